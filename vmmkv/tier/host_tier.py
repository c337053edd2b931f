"""The host tier of a cache: tokens of suspended sequences, and of prefixes that a tree stores, in host memory.

Tokens move between rows and slots of pinned host memory in large copies: a row is contiguous. Copies to the host go on
a stream of the tier's own, behind all work on the row. Copies back go on the sequence's own stream, which the current
stream waits for.

The core knows which rows are suspended (`vmmkv.core.suspending`); the tier has their slots by ticket. The next call of
the tier gives back slots of sequences that were resumed or have ended. Prefixes make way for sequences, and for
prefixes of the same or a higher priority, the least recently used of the lowest priority first.

For a tree of prefixes (`vmmkv.tier.prefixes`):

    store        copies pages of frames to the host, and returns handles. The tier holds the frames until they are
                 copied: the caller may drop its own references at once.
    load         copies tokens from stored pages to a live sequence, in the order of its stream. False: some are gone
    drop         forgets a handle
    gone         handles that have made way; the tree empties the queue
    used         bytes of host memory
    make_way     has prefixes make way
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Sequence as Items
from contextlib import suppress
from sys import is_finalizing
from typing import Any

from ..core import entries
from ..core.cache import Cache
from ..core.pool import Ask, busy
from ..core.sequence import Sequence, suspended
from ..core.tables import BROKEN, CHANGED, DONE, RING, ROW_BITS, ROW_MASK
from ..driver.driver import handle_of
from ..driver.fence import Fence
from ..errors import ArgumentError, BusyError, VmmkvError
from .copying import copies
from .prefixes import Page, Prefixes
from .slots import Run, Slots


class HostTier:
    """Host memory for the tokens of a cache.

    Args:
        cache: whose tokens it has.
        max_bytes: the most host memory that it takes.
        lowest_priority: the lowest priority of prefixes that a tree is to store; None: it stores none.
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
        self.prefixes = Prefixes(cache, self.slots, self.stream)
        self.gone = self.prefixes.gone
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

    # ------------------------------------------------------------------ sequences

    def suspend(self, sequence: Sequence) -> None:
        """Moves a sequence's tokens to the host. Its pages are surplus then.

        Raises:
            OutOfHostMemoryError: there is no room for its tokens.
            SuspendedError, UseAfterFreeError, StreamCaptureError, DriverError, BusyError: the sequence is as before.
        """
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
                size = self.driver.page_size
                counts = [-(-(length - start) * record // size) for record in cache.records]
                self.prefixes.make_way(sum(counts))
                runs = self.away[ticket] = self.slots.take(counts)
                words = array("q", copies(runs, size, self.bounds(start, length)))
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
            bounds = self.bounds(int(cache.away_starts[row]), int(cache.aways[row]))
            words = array("q", copies(runs, self.driver.page_size, bounds))
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

    def bounds(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """For each range, where slots begin in a row, and the bytes that are copied."""
        return [(start * record, start * record, length * record) for record in self.cache.records]

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

    # ------------------------------------------------------------------ prefixes

    def store(self, pages: Items[Page], priorities: Items[int]) -> list[int | None]:
        """Copies pages to the host, asynchronously.

        Args:
            pages: pages of frames that a guest holds, each for one of some items.
            priorities: of each item. If there is not enough room, later items come before earlier ones.

        Returns:
            For each item a handle; or None: there is no room, or a call has failed.
        """
        try:
            with self.alone():
                self.sweep()
                return self.prefixes.store(pages, priorities)
        except VmmkvError:
            return [None] * len(priorities)

    def load(self, pages: Items[tuple[int, int, int]], ticket: int, first: int, tokens: int) -> bool:
        """Copies stored tokens, from the first on, to a live sequence that has room for them on pages of its own.

        Args:
            pages: the pages that the tokens lie on: handle, range, and page.
            ticket: of the sequence.
            first: the first token.
            tokens: the number of tokens.

        Returns:
            False: some are not stored any more.

        Raises:
            UseAfterFreeError, SuspendedError, ValueError, StreamCaptureError: nothing was copied.
            DriverError: some tokens may not have been copied.
        """
        with self.alone():
            self.sweep()
            return self.prefixes.load(pages, ticket, first, tokens)

    def finish(self, pages: int) -> int:
        """Waits for copies of prefixes until so many pages are not held for them any more. Returns how many. The pool
        calls this when it lacks pages."""
        with self.alone():
            return self.prefixes.finish(pages)

    def drop(self, handle: int) -> None:
        """Forgets a prefix, if it is stored still."""
        with self.alone():
            self.prefixes.drop(handle)

    def make_way(self, nbytes: int, priority: int | None = None) -> bool:
        """Has prefixes make way, of a priority at most, or of any. Returns whether there is room for so many bytes."""
        with self.alone():
            self.sweep()
            return self.prefixes.make_way(-(-nbytes // self.driver.page_size), priority)

    # ------------------------------------------------------------------ the end

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
