"""The host tier of a cache: tokens of suspended sequences, and of evicted prefixes, in host memory.

Tokens move between rows and slots of pinned host memory in large copies: a row is contiguous. Copies to the host go on
a stream of the tier's own, behind all work on the row. Copies back go on the sequence's own stream, which the current
stream waits for.

The core knows which rows are suspended (`vmmkv.core.copying`); the tier has their slots by ticket, which the next
call of the tier gives back. Prefixes (`vmmkv.tier.stored`) make way for sequences.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from sys import is_finalizing
from typing import Any

from ..core import entries
from ..core.cache import Cache
from ..core.codes import BROKEN, CHANGED, DONE
from ..core.pool import Ask, busy
from ..core.sequence import Sequence, suspended
from ..core.tables import ROW_BITS, ROW_MASK
from ..driver.driver import handle_of
from ..driver.fence import Fence
from ..errors import ArgumentError, BusyError, VmmkvError
from .slots import Run, Slots, copies
from .stored import StoredPrefixes


class HostTier:
    """Host memory for the tokens of a cache.

    Args:
        cache: the cache.
        max_bytes: the most host memory that the tier takes.
        lowest_priority: the lowest priority of prefixes that a tree stores here; None: the tree stores none.
    """

    def __init__(self, cache: Cache, max_bytes: int, lowest_priority: int | None = None) -> None:
        self.cache, self.pool, self.driver = cache, cache.pool, cache.pool.driver
        self.slots = Slots(self.driver.page_size, max_bytes, self.driver.device.type == "cuda")
        self.stream: Any = self.driver.new_stream()
        """The stream of copies to the host."""
        self.lock: Any = threading.RLock()
        self.away: dict[int, list[list[Run]]] = {}
        """By ticket of a suspended sequence, its slots for each range."""
        self.coming: set[int] = set()
        """Tickets of sequences that are being resumed."""
        self.lowest_priority = lowest_priority
        self.prefixes = StoredPrefixes(cache, self.slots, self.stream)
        tier = weakref.ref(self)
        self.evict = lambda pages: each.finish(pages) if (each := tier()) else 0
        self.pool.evict.insert(0, self.evict)

    @property
    def used(self) -> int:
        """Bytes of slots that hold tokens, or that a copy still uses."""
        with self.alone():
            self.sweep()
            return self.slots.taken * self.slots.page_size

    def refresh(self) -> None:
        """Gives back slots that nothing needs any more, unless the tier is busy."""
        with suppress(BusyError), self.alone():
            self.sweep()

    def alone(self) -> Any:
        """The lock for changes of the books. Raises `BusyError` in a finalizer or a signal handler within one."""
        if self.pool.lock._is_owned() or self.lock._is_owned() or is_finalizing():
            raise busy()
        return self.lock

    def finish(self, pages: int) -> int:
        """Waits for copies of prefixes until so many pages are not held for them any more. Returns how many."""
        with self.alone():
            return self.prefixes.finish(pages)

    def suspend(self, sequence: Sequence) -> None:
        """Moves a sequence's tokens to the host. Its pages are surplus then."""
        cache, ticket, ask = self.cache, sequence.ticket, Ask()
        cache.check_own((sequence,))
        Fence.after(self.driver, [self.driver.current_stream()])  # fails in a capture, which an allocation would end
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
                counts = [-(-(length - start) * record // self.driver.page_size) for record in cache.records]
                self.prefixes.make_way(sum(counts))
                self.away[ticket] = self.slots.take(counts)
                words = copies(self.pieces(ticket, start), cache.records, start, length)
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
        one, wait for them."""
        cache, ticket, ask, row = self.cache, sequence.ticket, Ask(), sequence.record_index()
        cache.check_own((sequence,))
        with self.alone():
            if ticket not in self.away:
                raise ArgumentError("asked to resume a sequence that is not suspended")
            if ticket in self.coming:
                raise BusyError("another thread is resuming the sequence")
            start, length = int(cache.away_starts[row]), int(cache.aways[row])
            words = copies(self.pieces(ticket, start), cache.records, start, length)
            self.coming.add(ticket)
        try:
            arguments = sequence.cell.buffer_info()[0], words.buffer_info()[0], len(words) // 4
            code = self.pool.change(ask, entries.plan_resume, cache.address, *arguments)
        finally:
            self.coming.discard(ticket)
            self.refresh()
        if code != DONE:
            raise cache.error(code, ask)

    def pieces(self, ticket: int, start: int) -> Iterable[tuple[int, int, int, Run]]:
        """The slots of a suspended sequence with the first token `start`: see `copies`."""
        for part, runs in enumerate(self.away[ticket]):
            at = start * self.cache.records[part]
            for run in runs:
                yield part, at, run.pages * self.driver.page_size, run
                at += run.pages * self.driver.page_size

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
        self.prefixes.collect()

    def __del__(self) -> None:
        """Waits for copies, which may use the slots still. Where that fails, the slots stay."""
        if is_finalizing() or "evict" not in vars(self):
            return
        with suppress(ValueError):
            self.pool.evict.remove(self.evict)
        try:
            if self.slots.taken:
                self.prefixes.close()
        except VmmkvError:
            _kept.append(self.slots)


_kept: list[Slots] = []
"""Slots of tiers that nothing holds, and that copies may use."""
