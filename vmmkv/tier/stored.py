"""Stored prefixes: pages of a guest's frames that lie in host memory, and make way for tokens that are needed more.

Frames are copied from a row that has them. Frames that lie in no row, or in several of which none is known, are mapped
in a window of the tier's own, a few at a time; then the copy is waited for.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core import entries
from ..core.addresses import Addresses
from ..core.cache import Cache
from ..core.codes import PART
from ..core.pool import Ask, at
from ..core.sequence import no_token
from ..core.tables import ROW_MASK
from ..driver.driver import Handle, handle_of
from ..driver.fence import Fence, finished_on_error, wait_for_device
from ..errors import ArgumentError, VmmkvError
from .slots import Run, Slots, copies

WINDOW = 64
"""Pages of the window."""
FIELDS = ["serial", "node", "part", "page", "priority"]


@dataclass(eq=False)
class Stored:
    """What was stored under a serial: by range and page the slots, and the fence of all copies to and from them."""

    node: int
    priority: int
    slots: dict[tuple[int, int], Run]
    fence: Fence


class StoredPrefixes:
    """The stored prefixes of a cache: copies of its frames. A caller has the tier's lock: see `HostTier.alone`.
    Prefixes make way for sequences, and for prefixes of the same or a higher priority, the least recently used of the
    lowest priority first."""

    def __init__(self, cache: Cache, slots: Slots, stream: Any) -> None:
        self.cache, self.pool, self.driver = cache, cache.pool, cache.pool.driver
        self._cache_at = cache.address
        self.slots, self.stream = slots, stream
        self.stored: dict[int, Stored] = {}
        self.levels: dict[int, dict[int, None]] = {}
        """By priority the serials, the least recently used first."""
        self.pages: Counter[int] = Counter()
        """By priority the slots."""
        self.gone: deque[tuple[int, int]] = deque()
        """Nodes and serials of prefixes that have made way. The guest empties the queue."""
        self.storing: deque[list[Any]] = deque()
        """Of pages that are copied the fence, None until the copies are queued, and the frames: see `refer`."""
        self._window: Addresses | None = None
        self._shown = 0

    # ------------------------------------------------------------------ to the host

    def store(self, pages: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Copies pages to the host, asynchronously, and holds their frames until then. Returns of each page whether it
        was stored; none where a call fails.

        Args:
            pages: records of pages of frames that a guest holds: the serial of the prefix that a page belongs to, its
                `node` and `priority`, the page's `part` and `page`, and the place of its bytes, `frame` and `offset`.
                Prefixes of later serials come before others if there is not enough room.
        """
        is_stored = self._choose(pages)
        kept = pages[is_stored]
        kept = kept[np.lexsort((kept["page"], -kept["serial"], kept["part"]))]
        if not len(kept):
            return is_stored.astype(np.int64)
        Fence.after(self.driver, [self.driver.current_stream()])  # fails in a capture, which an allocation would end
        frames, runs, fence = ~kept["frame"], list[list[Run]](), Fence()
        entry: list[Any] = [None, frames]
        try:
            if (self.pool.frames["held"][kept["frame"]] < 1).any():
                raise ArgumentError("asked to store frames that no guest holds")
            self.storing.append(entry)  # before they are referenced: an interruption may come in between
            entries.refer(self._cache_at, at(frames), len(frames), 1)
            runs = self.slots.take([len(kept)])
            slots = [
                Run(chunk, first + page, 1, address + page * self.driver.page_size)
                for chunk, first, pages_of, address in runs[0]
                for page in range(pages_of)
            ]
            with finished_on_error(self.driver):
                for part in np.unique(kept["part"]).tolist():
                    first, end = np.searchsorted(kept["part"], [part, part + 1])
                    self._copy(part, kept[first:end], slots[first:end])
                entry[0] = fence = Fence.after(self.driver, [self.stream])
        except BaseException:
            entry[0] = fence
            self.slots.give(runs, fence)
            self.collect()
            raise
        found: dict[int, Stored] = {}
        for (serial, node, part, page, priority), slot in zip(kept[FIELDS].tolist(), slots):
            found.setdefault(serial, Stored(node, priority, {}, fence)).slots[part, page] = slot
        self.stored.update(found)
        for serial, each in found.items():
            self.pages[each.priority] += len(each.slots)
            self.levels.setdefault(each.priority, {})[serial] = None
        return is_stored.astype(np.int64)

    def _choose(self, pages: npt.NDArray[Any]) -> npt.NDArray[np.bool]:
        """The pages of the prefixes for which there is room, or made."""
        serials, firsts, counts = np.unique(pages["serial"], return_index=True, return_counts=True)
        chosen, wanted = [], 0
        for serial, first, count in reversed([*zip(serials, firsts, counts.tolist())]):
            if self.make_way(wanted + count, pages["priority"][first]):
                wanted += count
                chosen.append(serial)
        return np.isin(pages["serial"], chosen)

    def _copy(self, part: int, pages: npt.NDArray[Any], slots: list[Run]) -> None:
        """Queues copies of pages of a range, each within one chunk: see `copies`."""
        ask, left = Ask(), array("q", [slot.address for slot in slots])
        numbers, frames = np.ascontiguousarray(pages["page"]), np.ascontiguousarray(pages["frame"])
        places, chunks = (at(numbers), at(frames), left.buffer_info()[0]), [slot.chunk for slot in slots]
        ends = [index for index in range(1, len(slots)) if chunks[index] is not chunks[index - 1]] + [len(slots)]
        for first, end in zip([0, *ends], ends):
            words = *(place + 8 * first for place in places), end - first
            code = entries.copy_frames(self._cache_at, part, *words, handle_of(self.stream), ask.address)
            if code < 0:
                raise self.cache.error(code, ask)
        missing: dict[int, list[tuple[int, int]]] = {}
        for frame, offset, slot, is_left in zip(frames.tolist(), pages["offset"].tolist(), slots, left):
            if is_left:
                missing.setdefault(frame, []).append((offset, slot.address))
        if any(self.pool.frames[frame]["refs"] for frame in missing):
            wait_for_device(self.driver)  # it may be written to still, on streams that are not known
        self._copy_through_window(missing)

    def _copy_through_window(self, frames: dict[int, list[tuple[int, int]]]) -> None:
        """Copies pages of frames, of each the place and an address in host memory, and waits for the copies."""
        size, left = self.driver.page_size, [*frames.items()]
        if left and self._window is None:
            self._window = Addresses(self.driver, WINDOW * size)
        start = self._window.start if self._window else 0
        while left:
            self._clear_window()
            moves: list[tuple[int, int]] = []
            try:
                while left and self._shown + (pages := int(self.pool.frames[left[0][0]]["pages"])) <= WINDOW:
                    frame, places = left.pop(0)
                    address = start + self._shown * size
                    self.driver.map(address, Handle(int(self.pool.frames[frame]["handle"])), pages)
                    self._shown += pages
                    moves += [(host, address + offset * size) for offset, host in places]
                self.driver.set_access(start, self._shown * size, writable=False)
                with finished_on_error(self.driver):
                    for target, source in moves:
                        self.driver.copy(target, source, size, self.stream)
                    Fence.after(self.driver, [self.stream]).wait()
            finally:
                self._clear_window()

    def _clear_window(self) -> None:
        """Unmaps what is in the window."""
        if self._window and self._shown:
            self.driver.unmap(self._window.start, self._shown * self.driver.page_size)
            self._shown = 0

    def finish(self, pages: int) -> int:
        """Waits for copies to the host until so many pages are not held for them any more. Returns how many."""
        given = 0
        while self.storing and (fence := self.storing[0][0]) is not None and given < pages:
            fence.wait()
            self._clear_window()
            given += self.collect()
        return given

    def collect(self) -> int:
        """Releases frames that have been copied, the oldest first. Returns their pages. If a call has failed some are
        in the window still."""
        given = 0
        with suppress(VmmkvError):
            self._clear_window()
            while self.storing and (fence := self.storing[0][0]) is not None and fence.passed():
                frames = self.storing[0][1]
                entries.refer(self._cache_at, at(frames), len(frames), -1)  # a second time does nothing
                self.storing.popleft()
                given += len(frames)
        return given

    # ------------------------------------------------------------------ back

    def load(self, pages: Items[tuple[int, int, int]], ticket: int, first: int, tokens: int) -> bool:
        """Copies stored tokens, from the first on, to a live sequence that has room for them on pages of its own.
        `pages` are those that the tokens lie on: serial, range, and page. Returns False where some are not stored any
        more. After a `DriverError` some tokens may not have been copied."""
        used = {serial: self.stored.get(serial) for serial, _, _ in pages}
        if None in used.values():
            return False
        for serial in reversed(used):  # what is in front on a path is the most recently used
            level = self.levels.setdefault(self.stored[serial].priority, {})
            level[serial] = level.pop(serial, None)
        size, pieces = self.driver.page_size, list[tuple[int, int, int, Run]]()
        for serial, part, page in sorted(pages, key=lambda each: each[1:]):
            pieces.append((part, page * size, size, self.stored[serial].slots[part, page]))
        words = copies(pieces, self.cache.records, first, first + tokens)
        if min(first, tokens) < 0 or sum(words[2::4]) != tokens * sum(self.cache.records):
            raise no_token()
        if tokens == 0:
            return True
        cache, ask, rows, row, fence = self.cache, Ask(), self.cache.rows, ticket & ROW_MASK, Fence()
        stored = [self.stored[serial] for serial in used]
        for each in stored:
            fence |= each.fence
        try:
            code = self.pool.change(
                ask, entries.plan_load, cache.address, ticket, first, first + tokens, words.buffer_info()[0],
                len(words) // 4, fence.slots, fence.tick,
            )  # fmt: skip
        finally:
            if row < cache.max_sequences:
                for each in stored:
                    each.fence |= Fence(self.driver, int(rows["slots"][row]), int(rows["tick"][row]))
        if code == PART:
            raise ArgumentError("asked to load tokens onto pages that the sequence shares; part it first")
        if code < 0:
            raise cache.error(code, ask)
        return True

    # ------------------------------------------------------------------ making way

    def drop(self, serial: int) -> None:
        """Forgets a prefix, if it is stored."""
        if stored := self.stored.pop(serial, None):
            if self.levels.get(stored.priority, {}).pop(serial, 0) is None:  # else `store` was interrupted
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
                serial = next(iter(self.levels[level]))
                self.gone.append((self.stored[serial].node, serial))
                self.drop(serial)
        return True

    def close(self) -> None:
        """Waits for copies, releases frames, and clears the window. Raises `StreamCaptureError` or `DriverError`."""
        wait_for_device(self.driver)
        self.collect()
        self._clear_window()
