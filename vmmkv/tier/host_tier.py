"""The host tier of a cache: live sequences that are suspended.

A sequence's tokens move between its row and slots of pinned host memory, in large copies: a row is contiguous. Copies
to the host go on a stream of the tier's own, behind all work on the sequence; copies back on the sequence's own stream,
which the current stream waits for. A suspended sequence keeps its row, and so its addresses.

The core knows which rows are suspended (`vmmkv.core.suspending`). The tier has the slots by ticket. Slots whose
sequence was resumed or has ended are given back by the next call.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from sys import is_finalizing
from typing import Any

from ..core import entries
from ..core.cache import Cache
from ..core.pool import Ask, busy
from ..core.sequence import Sequence, suspended
from ..core.tables import BROKEN, CHANGED, DONE, RING, ROW_BITS, ROW_MASK
from ..driver.driver import handle_of
from ..driver.fence import Fence
from ..errors import ArgumentError, BusyError
from .slots import Run, Slots


class HostTier:
    """Host memory for the tokens of a cache.

    Args:
        cache: whose sequences may be suspended.
        max_bytes: the most host memory that it takes.
    """

    def __init__(self, cache: Cache, max_bytes: int) -> None:
        self.cache, self.pool, self.driver = cache, cache.pool, cache.pool.driver
        self.slots = Slots(self.driver.page_size, max_bytes, self.driver.device.type == "cuda")
        self.stream: Any = self.driver.new_stream()
        """The stream of copies to the host."""
        self.lock: Any = threading.RLock()
        self.away: dict[int, list[Run]] = {}
        """By ticket of a suspended sequence, its slots."""
        self.coming: set[int] = set()
        """Tickets of sequences that are being resumed."""

    @property
    def used(self) -> int:
        """Bytes of slots that hold tokens, or that a copy still uses."""
        with self.alone():
            self.sweep()
            return self.slots.taken * self.slots.page_size

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around changes of the tier's books. Raises `BusyError` in a finalizer or a signal handler within one."""
        if self.pool.lock._is_owned() or self.lock._is_owned() or is_finalizing():
            raise busy()
        with self.lock:
            yield

    def suspend(self, sequence: Sequence) -> None:
        """Moves a sequence's tokens to the host. Its pages are surplus then.

        Raises:
            OutOfHostMemoryError: there is no room for its tokens.
            SuspendedError, UseAfterFreeError, StreamCaptureError, DriverError, BusyError: the sequence is as before.
        """
        cache, ticket, ask = self.cache, sequence.ticket, Ask()
        cache.check_own((sequence,))
        code = CHANGED
        while code in (CHANGED, BROKEN):
            if code == BROKEN:
                cache.repair(ticket)
            with self.alone():
                self.sweep()
                row = sequence.record_index()
                if ticket in self.away:
                    raise suspended()
                start, length = int(cache.starts[row]), int(cache.lengths[row])
                runs = self.away[ticket] = self.slots.take(self.pages_for(start, length))
                words = array("q", self.copies(start, length, runs))
                try:
                    code = self.pool.change(
                        ask, entries.plan_suspend, cache.address, ticket, start, length, words.buffer_info()[0],
                        len(words) // 4, handle_of(self.stream),
                    )  # fmt: skip
                finally:
                    self.sweep()
        if code != DONE:
            raise cache.error(code, ask)

    def resume(self, sequence: Sequence) -> None:
        """Moves a suspended sequence's tokens back, to the same addresses. The sequence's own stream, and the current
        one, wait for them.

        Raises:
            ArgumentError: it is not suspended.
            OutOfPagesError, DriverError, StreamCaptureError, UseAfterFreeError, BusyError: it is suspended still.
        """
        cache, ticket, ask, row = self.cache, sequence.ticket, Ask(), sequence.record_index()
        cache.check_own((sequence,))
        with self.alone():
            if ticket not in self.away:
                raise ArgumentError("asked to resume a sequence that is not suspended")
            if ticket in self.coming:
                raise BusyError("another thread is resuming the sequence")
            runs = self.away[ticket]
            self.coming.add(ticket)
        try:
            words = array("q", self.copies(int(cache.away_starts[row]), int(cache.aways[row]), runs))
            arguments = sequence.cell.buffer_info()[0], words.buffer_info()[0], len(words) // 4
            code = self.pool.change(ask, entries.plan_resume, cache.address, *arguments)
        finally:
            self.coming.discard(ticket)
            with self.alone():
                self.sweep()
        if code == RING:
            self.pool.ring()
        elif code != DONE:
            raise cache.error(code, ask)

    def pages_for(self, start: int, length: int) -> int:
        """Slots for the tokens from a start to a length."""
        return sum(-(-(length - start) * record // self.driver.page_size) for record in self.cache.records)

    def copies(self, start: int, length: int, runs: Iterable[Run]) -> Iterator[int]:
        """Copies between a row and slots, four numbers each: see `vmmkv.core.suspending.plan_resume`."""
        size, left = self.driver.page_size, deque(runs)
        for part, record in enumerate(self.cache.records):
            first, end = start * record, length * record
            while first < end:
                run = left.popleft()
                nbytes = min(end - first, run.pages * size)
                yield from (part, first, nbytes, run.address)
                first += nbytes
                if pages := -(-nbytes // size) - run.pages:
                    left.appendleft(run._replace(pages=-pages, address=run.address + (run.pages + pages) * size))

    def sweep(self) -> None:
        """Gives back the slots of sequences that are not suspended any more. A row's fence covers all copies from it
        and to it."""
        rows = self.cache.rows
        for ticket in [each for each in self.away if each not in self.coming]:
            row = ticket & ROW_MASK
            if self.cache.owners[row] != ticket >> ROW_BITS or not rows["suspended"][row]:
                fence = Fence(self.driver, int(rows["slots"][row]), int(rows["tick"][row]))
                self.slots.give(self.away.pop(ticket), fence)
        self.slots.collect()
