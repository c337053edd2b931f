"""Stored prefixes: full frames of a guest that lie in host memory, and make way for what is needed more.

Frames are copied from a row that has them. Frames that lie in no row, or in several of which none is known, are mapped
in a window of the tier's own, a few at a time; then the copy is waited for.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter, deque
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..core import entries
from ..core.cache import Cache
from ..core.pool import Ask
from ..core.sequence import no_token
from ..core.tables import PART, ROW_MASK
from ..driver.driver import Handle, handle_of
from ..driver.fence import Fence, finished_on_error, wait_for_device
from ..errors import ArgumentError, VmmkvError
from .copying import copies
from .slots import Run, Slots

WINDOW = 64
"""Pages of the window."""


@dataclass(eq=False)
class Stored:
    """A prefix: its tokens, its slots for each range, and the fence of all copies to and from them."""

    tokens: int
    priority: int
    taken: list[list[Run]]
    pages: int
    fence: Fence


class Prefixes:
    """The stored prefixes of a cache.

    Args:
        cache: whose frames they are copies of.
        slots: the host memory.
        stream: the stream of copies to the host.
        lowest_priority: the lowest priority of prefixes that are stored; None stores none.
    """

    def __init__(self, cache: Cache, slots: Slots, stream: Any, lowest_priority: int | None) -> None:
        self.cache, self.pool, self.driver = cache, cache.pool, cache.pool.driver
        self.slots, self.stream, self.lowest_priority = slots, stream, lowest_priority
        self.stored: dict[int, Stored] = {}
        self.levels: dict[int, dict[int, None]] = {}
        """By priority the handles, the least recently used first."""
        self.pages: Counter[int] = Counter()
        """By priority the slots."""
        self.gone: deque[int] = deque()
        """Handles that have made way."""
        self.storing: deque[tuple[Fence, array[int], int]] = deque()
        """Frames that are being copied, and their pages."""
        self._handles, self._window, self._shown = count(1), 0, 0

    # ------------------------------------------------------------------ to the host

    def store(self, frames: Items[array[int]], tokens: int, priority: int) -> int | None:
        """Copies a prefix to the host: see `HostTier.store`.

        Raises:
            VmmkvError: a call has failed.
        """
        if self.lowest_priority is None or priority < self.lowest_priority:
            return None
        counts = [sum(int(self.pool.frames[frame]["pages"]) for frame in each) for each in frames]
        records, size = self.cache.records, self.driver.page_size
        if any(pages * size < tokens * record for pages, record in zip(counts, records)) or len(counts) != len(records):
            raise ArgumentError(f"asked to store {tokens} tokens, which {counts} pages do not hold")
        if not tokens or not self.make_way(sum(counts), priority):
            return None
        Fence.after(self.driver, [self.driver.current_stream()])  # fails in a capture, which an allocation would end
        flat = array("q", [frame for each in frames for frame in each])
        if entries.hold_again(self.cache.address, flat.buffer_info()[0], len(flat)) < 0:
            raise ArgumentError("asked to store frames that no guest holds")
        taken: list[list[Run]] = []
        try:
            taken = self.slots.take(counts)
            with finished_on_error(self.driver):
                for part, (each, runs) in enumerate(zip(frames, taken)):
                    self._copy(part, each, runs)
                fence = Fence.after(self.driver, [self.stream])
        except BaseException:
            self.storing.append((Fence(), flat, sum(counts)))
            self.slots.give(taken, Fence())
            self.collect()
            raise
        self.storing.append((fence, flat, sum(counts)))
        handle = next(self._handles)
        self.stored[handle] = Stored(tokens, priority, taken, sum(counts), fence)
        self.levels.setdefault(priority, {})[handle] = None
        self.pages[priority] += sum(counts)
        return handle

    def _copy(self, part: int, frames: array[int], runs: list[Run]) -> None:
        """Queues copies of the frames of a range."""
        size, ask = self.driver.page_size, Ask()
        hosts = [run.address + page * size for run in runs for page in range(run.pages)]
        pages = [int(self.pool.frames[frame]["pages"]) for frame in frames]
        words = array("q", [frame for frame, number in zip(frames, pages) for _ in range(number)])
        left = array("q", hosts)
        code = entries.copy_frames(
            self.cache.address, part, words.buffer_info()[0], left.buffer_info()[0], len(left), handle_of(self.stream),
            ask.address,
        )  # fmt: skip
        if code < 0:
            raise self.cache.error(code, ask)
        first, missing = 0, list[tuple[int, list[int]]]()
        for frame, number in zip(frames, pages):
            if any(left[first : first + number]):
                missing.append((frame, hosts[first : first + number]))
            first += number
        if any(self.pool.frames[frame]["refs"] for frame, _ in missing):
            wait_for_device(self.driver)  # it may be written to still, on streams that are not known
        while missing:
            number = 0
            while number < len(missing) and sum(len(each) for _, each in missing[: number + 1]) <= WINDOW:
                number += 1
            self._copy_through_window(missing[:number])
            del missing[:number]

    def _copy_through_window(self, frames: list[tuple[int, list[int]]]) -> None:
        """Copies frames to addresses of their pages in host memory, and waits for the copies."""
        size = self.driver.page_size
        if not self._window:
            self._window = self.driver.reserve(WINDOW * size)
            weakref.finalize(self, _free, self.driver, self._window, WINDOW * size).atexit = False
        self._clear_window()
        hosts = [host for _, each in frames for host in each]
        try:
            for frame, each in frames:
                handle = Handle(int(self.pool.frames[frame]["handle"]))
                self.driver.map(self._window + self._shown * size, handle, len(each))
                self._shown += len(each)
            self.driver.set_access(self._window, self._shown * size, writable=False)
            with finished_on_error(self.driver):
                first = 0
                for page in range(1, len(hosts) + 1):
                    if page == len(hosts) or hosts[page] != hosts[page - 1] + size:
                        self.driver.copy(hosts[first], self._window + first * size, (page - first) * size, self.stream)
                        first = page
                Fence.after(self.driver, [self.stream]).wait()
        finally:
            self._clear_window()

    def _clear_window(self) -> None:
        """Unmaps what is in the window."""
        if self._shown:
            self.driver.unmap(self._window, self._shown * self.driver.page_size)
            self._shown = 0

    def finish(self, pages: int) -> int:
        """Waits for copies to the host until so many pages are not held for them any more. Returns how many."""
        given = 0
        while self.storing and given < pages:
            self.storing[0][0].wait()
            self._clear_window()
            given += self.collect()
        return given

    def collect(self) -> int:
        """Releases frames that have been copied, the oldest first. Returns their pages. If a call has failed some are
        in the window still."""
        given = 0
        with suppress(VmmkvError):
            self._clear_window()
            while self.storing and self.storing[0][0].passed():
                _, frames, pages = self.storing.popleft()
                entries.drop(self.cache.address, frames.buffer_info()[0], len(frames))
                given += pages
        return given

    # ------------------------------------------------------------------ back

    def load(self, handle: int, ticket: int, first: int, tokens: int) -> bool:
        """Copies stored tokens to a live sequence: see `HostTier.load`."""
        stored = self.stored.get(handle)
        if stored is None:
            return False
        if first + tokens > stored.tokens or min(first, tokens) < 0:
            raise no_token()
        level = self.levels[stored.priority]
        level[handle] = level.pop(handle)  # the most recently used now
        if tokens:
            self._load(stored, ticket, first, first + tokens)
        return True

    def _load(self, stored: Stored, ticket: int, first: int, end: int) -> None:
        records, cache, ask = self.cache.records, self.cache, Ask()
        bounds = [(0, first * record, end * record) for record in records]
        words = array("q", copies(stored.taken, self.driver.page_size, bounds))
        fence, rows, row = stored.fence, cache.rows, ticket & ROW_MASK
        try:
            code = self.pool.change(
                ask, entries.plan_load, cache.address, ticket, first, end, words.buffer_info()[0], len(words) // 4,
                fence.slots, fence.tick,
            )  # fmt: skip
        finally:
            if row < cache.max_sequences:
                stored.fence |= Fence(self.driver, int(rows["slots"][row]), int(rows["tick"][row]))
        if code == PART:
            raise ArgumentError("asked to load tokens onto pages that the sequence shares; part it first")
        if code < 0:
            raise cache.error(code, ask)

    # ------------------------------------------------------------------ making way

    def drop(self, handle: int) -> None:
        """Forgets a prefix, if it is stored."""
        if stored := self.stored.pop(handle, None):
            del self.levels[stored.priority][handle]
            self.pages[stored.priority] -= stored.pages
            self.slots.give(stored.taken, stored.fence)

    def make_way(self, pages: int, priority: int | None = None) -> bool:
        """Drops prefixes, of a priority at most, or of any, until so many slots can be taken. Returns whether they can;
        if not, no prefix is dropped."""
        self.slots.collect()
        levels = sorted(level for level in self.levels if priority is None or level <= priority)
        room = self.slots.left + self.slots.leaving
        if room + sum(self.pages[level] for level in levels) < pages:
            return False
        for level in levels:
            while self.levels[level] and self.slots.left + self.slots.leaving < pages:
                handle = next(iter(self.levels[level]))
                self.drop(handle)
                self.gone.append(handle)
        return True

    def close(self) -> None:
        """Waits for copies, releases frames, and clears the window. Raises `StreamCaptureError` or `DriverError`."""
        wait_for_device(self.driver)
        self.collect()
        self._clear_window()


def _free(driver: Any, address: int, nbytes: int) -> None:
    """Gives the addresses of a window back."""
    with suppress(VmmkvError):
        driver.free(address, nbytes)
