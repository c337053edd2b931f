"""Stored prefixes: pages of a guest's frames that lie in host memory, and make way for what is needed more.

Frames are copied from a row that has them. Frames that lie in no row, or in several of which none is known, are mapped
in a window of the tier's own, a few at a time; then the copy is waited for.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any, NamedTuple

from ..core import entries
from ..core.cache import Cache
from ..core.pool import Ask
from ..core.sequence import no_token
from ..core.tables import DONE, PART, ROW_MASK
from ..driver.driver import Handle, handle_of
from ..driver.fence import Fence, finished_on_error, wait_for_device
from ..errors import ArgumentError, VmmkvError
from .slots import Run, Slots

WINDOW = 64
"""Pages of the window."""


class Page(NamedTuple):
    """A page to store: which item of a list it belongs to, its range and place there, and where in which frame its
    bytes are."""

    item: int
    part: int
    page: int
    frame: int
    offset: int


@dataclass(eq=False)
class Stored:
    """What was stored under a handle: by range and page the slots, and the fence of all copies to and from them."""

    priority: int
    slots: dict[tuple[int, int], Run]
    fence: Fence


class Prefixes:
    """The stored prefixes of a cache.

    Args:
        cache: whose frames they are copies of.
        slots: the host memory.
        stream: the stream of copies to the host.
    """

    def __init__(self, cache: Cache, slots: Slots, stream: Any) -> None:
        self.cache, self.pool, self.driver = cache, cache.pool, cache.pool.driver
        self._cache_at = cache.address
        self.slots, self.stream = slots, stream
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

    def store(self, pages: Items[Page], priorities: Items[int]) -> list[int | None]:
        """Copies pages to the host: see `HostTier.store`.

        Raises:
            VmmkvError: a call has failed.
        """
        handles: list[int | None] = [None] * len(priorities)
        chosen = self._choose(Counter(each.item for each in pages), priorities)
        kept = sorted((each for each in pages if each.item in chosen), key=lambda each: (each[1], -each[0], each[2]))
        if not kept:
            return handles
        Fence.after(self.driver, [self.driver.current_stream()])  # fails in a capture, which an allocation would end
        frames = array("q", [each.frame for each in kept])
        runs, is_held, fence = list[list[Run]](), False, Fence()
        try:
            is_held = entries.hold_again(self.cache.address, frames.buffer_info()[0], len(frames)) == DONE
            if not is_held:
                raise ArgumentError("asked to store frames that no guest holds")
            runs = self.slots.take([len(kept)])
            slots = [*zip(kept, singles(runs[0], self.driver.page_size))]
            with finished_on_error(self.driver):
                for part, each in groupby(slots, key=lambda slot: slot[0].part):
                    self._copy(part, [*each])
                fence = Fence.after(self.driver, [self.stream])
            self.storing.append((fence, frames, len(kept)))
        except BaseException:
            if is_held and all(each[1] is not frames for each in self.storing):
                self.storing.append((fence, frames, len(kept)))
            self.slots.give(runs, fence)
            self.collect()
            raise
        for item in chosen:
            handle = handles[item] = next(self._handles)
            self.stored[handle] = Stored(priorities[item], {}, fence)
            self.levels.setdefault(priorities[item], {})[handle] = None
        for page, slot in slots:
            self.stored[handles[page.item] or 0].slots[page.part, page.page] = slot
            self.pages[priorities[page.item]] += 1
        return handles

    def _choose(self, counts: Counter[int], priorities: Items[int]) -> list[int]:
        """The items for which there is room, or made: later ones rather than earlier ones."""
        chosen, wanted = [], 0
        for item in reversed(range(len(priorities))):
            if self.make_way(wanted + counts[item], priorities[item]):
                wanted += counts[item]
                chosen.append(item)
        return chosen[::-1]

    def _copy(self, part: int, slots: Items[tuple[Page, Run]]) -> None:
        """Queues copies of pages of a range."""
        ask, (pages, frames) = Ask(), (array("q", words) for words in zip(*(each[2:4] for each, _ in slots)))
        left = array("q", [slot.address for _, slot in slots])
        at = pages.buffer_info()[0], frames.buffer_info()[0], left.buffer_info()[0], len(left)
        code = entries.copy_frames(self.cache.address, part, *at, handle_of(self.stream), ask.address)
        if code < 0:
            raise self.cache.error(code, ask)
        missing: dict[int, list[tuple[int, int]]] = {}
        for (page, slot), is_left in zip(slots, left):
            if is_left:
                missing.setdefault(page.frame, []).append((page.offset, slot.address))
        if any(self.pool.frames[frame]["refs"] for frame in missing):
            wait_for_device(self.driver)  # it may be written to still, on streams that are not known
        self._copy_through_window(missing)

    def _copy_through_window(self, frames: dict[int, list[tuple[int, int]]]) -> None:
        """Copies pages of frames, of each the place and an address in host memory, and waits for the copies."""
        size = self.driver.page_size
        if frames and not self._window:
            self._window = self.driver.reserve(WINDOW * size)
            weakref.finalize(self, _free, self.driver, self._window, WINDOW * size).atexit = False
        left = [*frames.items()]
        while left:
            self._clear_window()
            moves: list[tuple[int, int]] = []
            try:
                while left and self._shown + (pages := int(self.pool.frames[left[0][0]]["pages"])) <= WINDOW:
                    frame, places = left.pop(0)
                    at = self._window + self._shown * size
                    self.driver.map(at, Handle(int(self.pool.frames[frame]["handle"])), pages)
                    self._shown += pages
                    moves += [(host, at + offset * size) for offset, host in places]
                self.driver.set_access(self._window, self._shown * size, writable=False)
                with finished_on_error(self.driver):
                    for target, source, pages in joined(moves, size):
                        self.driver.copy(target, source, pages * size, self.stream)
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
                _, frames, pages = self.storing[0]
                entries.drop(self._cache_at, frames.buffer_info()[0], len(self.storing.popleft()[1]))
                given += pages
        return given

    # ------------------------------------------------------------------ back

    def load(self, pages: Items[tuple[int, int, int]], ticket: int, first: int, tokens: int) -> bool:
        """Copies stored tokens to a live sequence: see `HostTier.load`."""
        if not all(handle in self.stored for handle, _, _ in pages):
            return False
        used = [*dict.fromkeys(handle for handle, _, _ in pages)]
        for handle in reversed(used):  # what is in front on a path is the most recently used
            level = self.levels[self.stored[handle].priority]
            level[handle] = level.pop(handle)
        words = self._words(pages, first, first + tokens)
        if min(first, tokens) < 0 or sum(words[2::4]) != tokens * sum(self.cache.records):
            raise no_token()
        if tokens:
            self._load([self.stored[handle] for handle in used], words, ticket, first, first + tokens)
        return True

    def _words(self, pages: Items[tuple[int, int, int]], first: int, end: int) -> array[int]:
        """The copies of tokens from pages, for the core."""
        words, size, records = array("q"), self.driver.page_size, self.cache.records
        for handle, part, page in sorted(pages, key=lambda each: each[1:]):
            low, high = max(page * size, first * records[part]), min((page + 1) * size, end * records[part])
            address = self.stored[handle].slots[part, page].address + low - page * size
            if words and tuple(words[-4:]) == (part, low - words[-2], words[-2], address - words[-2]):
                words[-2] += high - low
            elif low < high:
                words.extend((part, low, high - low, address))
        return words

    def _load(self, stored: Items[Stored], words: array[int], ticket: int, first: int, end: int) -> None:
        cache, ask, rows, row, fence = self.cache, Ask(), self.cache.rows, ticket & ROW_MASK, Fence()
        for each in stored:
            fence |= each.fence
        try:
            code = self.pool.change(
                ask, entries.plan_load, cache.address, ticket, first, end, words.buffer_info()[0], len(words) // 4,
                fence.slots, fence.tick,
            )  # fmt: skip
        finally:
            if row < cache.max_sequences:
                for each in stored:
                    each.fence |= Fence(self.driver, int(rows["slots"][row]), int(rows["tick"][row]))
        if code == PART:
            raise ArgumentError("asked to load tokens onto pages that the sequence shares; part it first")
        if code < 0:
            raise cache.error(code, ask)

    # ------------------------------------------------------------------ making way

    def drop(self, handle: int) -> None:
        """Forgets a prefix, if it is stored."""
        if stored := self.stored.pop(handle, None):
            del self.levels[stored.priority][handle]
            self.pages[stored.priority] -= len(stored.slots)
            self.slots.give([[*stored.slots.values()]], stored.fence)

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


def singles(runs: Iterable[Run], page_size: int) -> Iterator[Run]:
    """Runs of one page each."""
    for chunk, first, pages, address in runs:
        for page in range(pages):
            yield Run(chunk, first + page, 1, address + page * page_size)


def joined(moves: Iterable[tuple[int, int]], page_size: int) -> Iterator[tuple[int, int, int]]:
    """Copies of pages to addresses from others, as copies of all that lie side by side: target, source, pages."""
    count, start = 0, (0, 0)
    for target, source in moves:
        if count and (target, source) == (start[0] + count * page_size, start[1] + count * page_size):
            count += 1
            continue
        if count:
            yield *start, count
        count, start = 1, (target, source)
    if count:
        yield *start, count


def _free(driver: Any, address: int, nbytes: int) -> None:
    """Gives the addresses of a window back."""
    with suppress(VmmkvError):
        driver.free(address, nbytes)
