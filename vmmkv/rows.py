"""Who has which row, how many tokens it holds, and which of its pages may be taken away.

A row of the cache is the row of the same number in every arena. It is in one of four states:

    empty    nothing is mapped
    live     belongs to a sequence
    parked   its sequence was freed; its pages are still mapped, from the first on: ready to be adopted
    retired  its sequence was freed after its front was given back: nobody can adopt it

A page is *used* when tokens of a live sequence lie in it. All other mapped pages are *surplus*: parked
and retired rows, tails behind a truncated or adopted sequence, fronts before `start`. Surplus pages cost
nothing to use again where they are and are unmapped only when somebody else needs them.

Invariants:
 1. `start <= length <= capacity` for each live row, in tokens, and all tokens in `[start, length)` lie in
    pages that are mapped and accessible.
 2. Growing to `length <= capacity` needs no driver call and no look at the row's pages.
 3. A page leaves a row, or a row changes its owner, only after the fence of the row has passed (or in the
    order of the one stream that the fence is on).
 4. `grow` maps all pages for all its rows or leaves every length as it was.
 5. With `zero_tail` a live row that holds tokens may be read from its first page to its very end, and holds nothing
    of another sequence. A failure that could not be undone leaves `Row.has_hole` true; the next `grow` repairs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from .arena import Arena
from .errors import DriverError, DriverOutOfMemoryError, OutOfPagesError, OutOfRowsError, StreamCaptureError
from .fence import Fence
from .pages import PagePool

FREE_PAGE = -1
"""In `KVCache.page_map`: the page exists and belongs to nobody."""
SURPLUS_PAGE = -2
"""In `KVCache.page_map`: the page is mapped but holds no token; it is ready to be adopted or reclaimed."""
VACANT_PAGE = -3
"""In `KVCache.page_map`: the page's memory was given back to the system."""
ZERO_PAGE = -4
"""In `KVCache.page_map`: the page that lies behind every live row with `zero_tail`."""


class Rows:
    """The rows of a cache.

    Args:
        pool: the page pool of the arenas.
        ranges: per range of the layout its arena, and the bytes of a token record in it.
        num_rows: rows per arena.
        max_seq_len: tokens per row.
        scrub: zero pages before another sequence can read them.
        zero_tail: map one page of zeros wherever a live row has no pages; implies `scrub`.
    """

    def __init__(
        self,
        pool: PagePool,
        ranges: list[tuple[Arena, int]],
        num_rows: int,
        max_seq_len: int,
        scrub: bool,
        zero_tail: bool,
    ) -> None:
        self.pool = pool
        self.ranges = ranges
        self.max_seq_len = max_seq_len
        self.adoptions = 0
        """Sequences that started on a row with mapped pages."""
        self._driver = pool.driver
        self._page_size = pool.driver.page_size
        # A live row's zero tail grows with each page that is taken from it.
        self.spare = 0 if zero_tail else pool.budget // 512
        """Pages to reclaim beyond those that are missing: to look for them costs as much as to reclaim several."""
        self._page_tokens = -(-self._page_size // min(record for _, record in ranges))
        self.scrub = scrub or zero_tail
        self.zero_tail = zero_tail
        self.zero_pages = pool.take(int(zero_tail))
        """The one page of all tails, where there are any: created just now, so it reads as zero."""
        # A freed sequence has row -1: the last, which has no capacity and belongs to nobody.
        self.start = np.zeros(num_rows + 1, np.int64)
        self.length = np.zeros(num_rows + 1, np.int64)
        self.capacity = np.zeros(num_rows + 1, np.int64)
        self.capacity[-1] = -1
        self.owner = np.full(num_rows + 1, -1, np.int64)
        """By row: the number of the sequence that has it; -1 where none has."""
        self.expected = np.zeros(num_rows + 1, np.int64)
        """By row: the tokens that its sequence said it will soon have."""
        # The same memory for one row at a time, as Python's own integers: several times faster than numpy's.
        self.start_of, self.length_of = self.start.data, self.length.data
        self.capacity_of, self.owner_of = self.capacity.data, self.owner.data
        self.parked: dict[int, None] = {}  # oldest first, like `retired`
        self.retired: dict[int, None] = {}  # also live rows whose front was given back
        self.empty = list(range(num_rows - 1, -1, -1))
        self._fences = [Fence() for _ in range(num_rows)]
        self._streams: list[set[Any]] = [set() for _ in range(num_rows)]

    def count_states(self) -> dict[str, int]:
        """Rows by state."""
        live = int((self.owner >= 0).sum())
        parked, empty = len(self.parked), len(self.empty)
        return {"live": live, "parked": parked, "retired": len(self.owner) - 1 - live - parked - empty, "empty": empty}

    def pages(self, row: int) -> list[tuple[list[int], list[int]]]:
        """Per arena the row's mapped pages, and those of them that hold tokens."""
        pages = []
        for arena, (first, end) in self._used(row):
            mapping = arena.rows[row]
            pages.append((mapping.pages, mapping.pages[first - mapping.first : end - mapping.first]))
        return pages

    def page_map(self) -> npt.NDArray[np.int64]:
        """What each physical page holds, by page number: see `KVCache.page_map`."""
        pages = np.full(len(self.pool.handles), VACANT_PAGE, np.int64)
        pages[self.pool.free_pages] = FREE_PAGE
        pages[self.zero_pages] = ZERO_PAGE
        for row in range(len(self._fences)):
            for mapped, used in self.pages(row):
                pages[mapped] = SURPLUS_PAGE
                pages[used] = self.owner[row]
        return pages

    # ------------------------------------------------------------------ taking and leaving rows

    def acquire(self, owner: int, tokens: int, expected: int = 0) -> int:
        """A row for a new sequence, with room for `tokens` tokens: parked where possible, else empty.

        Its pages for tokens that are `expected` are reclaimed after those of idle parked rows.

        Raises:
            OutOfRowsError: all rows are live.
            OutOfPagesError, DriverError: see `grow`; the row is not taken.
        """
        row = self._pick(max(tokens, expected))
        adopted = any(arena.rows[row].pages for arena, _ in self.ranges)
        self.owner_of[row] = owner
        self.expected[row] = expected
        self._refresh(row)
        try:
            if tokens > self.capacity_of[row] or (tokens and self.zero_tail):
                self.grow([row], [tokens], [0])
        except BaseException:
            self._vacate(row)
            raise
        self.length_of[row] = tokens
        self._streams[row].add(self._driver.current_stream())
        self.adoptions += adopted
        return row

    def _pick(self, tokens: int) -> int:
        """Takes a row off the lists: the parked row that fits best, an empty one, or one to wait for."""
        if self.parked:
            stream = self._driver.current_stream()
            parked = np.fromiter(self.parked, np.int64, len(self.parked))
            room = self.capacity[parked]
            # The smallest that is large enough; with none, or no length to go by, the largest.
            misfit = np.where((room >= tokens) & (tokens > 0), room - tokens, np.iinfo(np.int64).max - room)
            for row in parked[np.argsort(misfit, kind="stable")].tolist():
                if self._fences[row].passed_for(stream):
                    del self.parked[row]
                    return int(row)
        if self.empty:
            return self.empty.pop()
        if self.parked:
            row = next(iter(self.parked))
            self._fences[row].wait()
            del self.parked[row]
            return row
        for row in self.retired:
            if self.owner_of[row] < 0:
                self._fences[row].wait()
                self._unmap_surplus(row, self.pool.budget)
                return self.empty.pop()
        raise OutOfRowsError(
            f"all {len(self._fences)} rows belong to live sequences; free one, or make the cache with a larger "
            "max_sequences (a row without tokens takes addresses only)"
        )

    def release(self, rows: list[int]) -> None:
        """Takes rows from their sequences, behind a fence on the current stream and those in use."""
        fence = self._fence_after({stream for row in rows for stream in self._streams[row]})
        for row in rows:
            self.pool.count_uses(self._leaving(row, 0, 0))
            self._fences[row] |= fence
            self._vacate(row)

    def _vacate(self, row: int) -> None:
        """Puts a row that nobody has any more on the list where it belongs."""
        self.owner_of[row] = -1
        self.start_of[row] = self.length_of[row] = 0
        self._streams[row].clear()
        self.retired.pop(row, None)
        adoptable = all(arena.rows[row].first == 0 for arena, _ in self.ranges)
        (self.parked if adoptable else self.retired)[row] = None
        self._settle(row)

    def _settle(self, row: int) -> None:
        """Works out what a row without a sequence is good for: to be adopted, or empty."""
        mappings = [arena.rows[row] for arena, _ in self.ranges]
        if not any(mapping.pages for mapping in mappings):
            for mapping in mappings:
                mapping.first = mapping.ready = 0
            self.parked.pop(row, None)
            self.retired.pop(row, None)
            self.empty.append(row)
        self._refresh(row)

    def record_stream(self, row: int, stream: Any) -> None:
        """Work on `stream` may use the row until its sequence is freed."""
        self._streams[row].add(stream)

    # ------------------------------------------------------------------ growing and shrinking

    def grow_batch(
        self, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], before: npt.NDArray[np.int64]
    ) -> None:
        """`grow` for many rows, of which few need pages; the others cost one comparison in all."""
        needing = lengths > self.capacity[rows]
        self.length[rows] = lengths
        try:
            self.grow(rows[needing].tolist(), lengths[needing].tolist(), before[needing].tolist())
        except BaseException:
            self.length[rows] = before
            for row in rows.tolist():
                self._refresh(row)
            raise

    def grow(self, rows: list[int], lengths: list[int], before: list[int]) -> None:
        """Sets new lengths in place of those `before`, and maps the pages that they need.

        Raises:
            OutOfPagesError: the budget, or the device, cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages have to be zeroed, or waited for, while a CUDA graph is captured.
                In all cases the lengths are unchanged.
        """
        size = self._page_size
        plan: list[tuple[Arena, int, int, int]] = []
        count = 0
        for row, length in zip(rows, lengths):
            self.length_of[row] = length  # what is used from now on is no surplus that could be reclaimed
            for arena, record in self.ranges:
                end = -(-length * record // size)
                mapping = arena.rows[row]
                if end > mapping.ready:
                    old_end = mapping.end
                    plan.append((arena, row, end, mapping.ready))
                    count += end - old_end if end > old_end else 0
        supply: list[int] = []
        zeroing = False
        try:
            if self.zero_tail and plan:
                self._wait_for_readers(rows)
            if count:
                supply = self._supply(count)
            for arena, row, end, _ in plan:
                arena.map_back(row, end, supply)
            if self.scrub:
                stream = self._driver.current_stream()
                for row, old, new in zip(rows, before, lengths):
                    self._streams[row].add(stream)
                    zeroing = True
                    self._zero_pages(row, old, new)
            if self.zero_tail:
                for row in rows:
                    self._fill_tails(row)
        except BaseException:
            self._undo(rows, before, plan, supply, zeroing)
            raise
        for row in rows:
            self._refresh(row)

    def _undo(
        self,
        rows: list[int],
        before: list[int],
        plan: list[tuple[Arena, int, int, int]],
        supply: list[int],
        zeroing: bool,
    ) -> None:
        """Takes a growth back. Pages that cannot be unmapped, or not yet, stay in the books as surplus."""
        for row, length in zip(rows, before):
            self.length_of[row] = length
        self.pool.give(supply)
        fence = None
        if zeroing:
            with suppress(StreamCaptureError):  # which has refused the first memset already
                fence = self._fence_after(())
        if fence and not self.zero_tail:
            for row in rows:
                self._fences[row] |= fence
        else:
            if fence:
                fence.wait()  # a dense kernel must not see these pages, so they cannot stay until later
            for arena, row, _, ready in plan:
                with suppress(DriverError):
                    arena.unmap_back(row, ready)
        for row in rows:
            if self.zero_tail and self.length_of[row]:
                with suppress(DriverError, StreamCaptureError):
                    self._fill_tails(row)
            self._refresh(row)

    def shrink(self, row: int, start: int, length: int) -> None:
        """Moves a live row's start forward or its length back. Pages without tokens become surplus.

        Raises:
            StreamCaptureError: whole pages would leave the sequence while a CUDA graph is captured.
        """
        leaving = self._leaving(row, start, length)
        if leaving:
            self._fences[row] |= self._fence_after(self._streams[row])
            self.pool.count_uses(leaving)
        self.start_of[row], self.length_of[row] = start, length
        if any(arena.rows[row].first < used[0] for arena, used in self._used(row)):
            self.retired[row] = None

    def _used(self, row: int) -> list[tuple[Arena, tuple[int, int]]]:
        """Per arena the pages `[first, end)` of the row that hold tokens."""
        return self._spans(self.start_of[row], self.length_of[row])

    def _spans(self, start: int, length: int) -> list[tuple[Arena, tuple[int, int]]]:
        """Per arena the pages `[first, end)` that tokens `[start, length)` of a row lie in."""
        size = self._page_size
        return [(arena, (start * record // size, -(-length * record // size))) for arena, record in self.ranges]

    def _leaving(self, row: int, start: int, length: int) -> list[int]:
        """The pages that hold tokens now and would hold none with this start and length."""
        leaving: list[int] = []
        for (arena, (first, end)), (_, (new_first, new_end)) in zip(self._used(row), self._spans(start, length)):
            mapping = arena.rows[row]
            front_end = min(max(new_first, first), end)
            back_first = min(max(new_end, front_end), end)
            leaving += mapping.pages[first - mapping.first : front_end - mapping.first]
            leaving += mapping.pages[back_first - mapping.first : end - mapping.first]
        return leaving

    def _fence_after(self, streams: Iterable[Any]) -> Fence:
        return Fence.after(self._driver, {self._driver.current_stream(), *streams})

    def _wait_for_readers(self, rows: list[int]) -> None:
        """Waits for work that may read rows to their very end, behind which something will be unmapped."""
        fence = self._fence_after({stream for row in rows for stream in self._streams[row]})
        for row in rows:
            fence = self._fences[row] | fence
        fence.wait()

    def _fill_tails(self, row: int) -> None:
        """Makes a row readable to its end in every arena."""
        for arena, _ in self.ranges:
            if arena.rows[row].ready < arena.rows[row].end:
                self._wait_for_readers([row])
            arena.fill_tail(row, *self.zero_pages)

    def _zero_pages(self, row: int, old: int, new: int) -> None:
        """Zeroes the pages that a row begins to use when it grows from `old` to `new` tokens."""
        for (arena, (_, first)), (_, (_, end)) in zip(self._spans(0, old), self._spans(0, new)):
            if self.zero_tail and not old:
                end = arena.rows[row].ready  # a dense kernel reads all that the row has adopted
            if end > first:
                address = arena.rows[row].address + first * self._page_size
                self._driver.fill(address, (end - first) * self._page_size, 0)

    def _refresh(self, row: int) -> None:
        """Works out a row's capacity: the tokens that it can grow to without a look at its pages."""
        live = self.owner_of[row] >= 0
        capacity = self.max_seq_len
        for arena, record in self.ranges:
            mapping = arena.rows[row]
            end = mapping.ready
            if mapping.first and not live:
                end = 0  # nobody can adopt it
            elif self.scrub and live:
                end = min(end, -(-self.length_of[row] * record // self._page_size))  # behind are another's bytes
            capacity = min(capacity, end * self._page_size // record)
        if self.zero_tail and live and any(arena.rows[row].has_hole for arena, _ in self.ranges):
            capacity = self.length_of[row]  # so that the next growth repairs it
        self.capacity_of[row] = capacity

    # ------------------------------------------------------------------ reclaiming

    @property
    def used_pages(self) -> int:
        """Pages that hold tokens of live sequences."""
        size = self._page_size  # rows that belong to nobody hold no tokens
        return -sum(
            int((self.length * -record // size).sum() + (self.start * record // size).sum())
            for _, record in self.ranges
        )

    @property
    def surplus_pages(self) -> int:
        """Mapped pages that hold no tokens of live sequences."""
        return self.pool.taken - len(self.zero_pages) - self.used_pages

    @property
    def available_pages(self) -> int:
        """Pages that hold no tokens, but for those behind live rows that work on the GPU may still read."""
        fenced = sum(self._surplus(row) for row in self._tails(self.length) if not self._fences[row].passed())
        return self.pool.budget - len(self.zero_pages) - self.used_pages - fenced

    def _surplus(self, row: int) -> int:
        """Surplus pages of one row. A row that is just growing may not have all of its used pages yet."""
        surplus = 0
        for arena, (first, end) in self._used(row):
            mapping = arena.rows[row]
            surplus += len(mapping.pages) - (min(end, mapping.end) - first)
        return surplus

    def reclaim(self, count: int, spare: int = 0) -> int:
        """Unmaps up to `count` surplus pages, and up to `spare` more where they are idle. Returns how many.

        Takes idle pages where it can and waits for the GPU where it must.
        """
        reclaimed = self._reclaim_from(self._candidates(), count + spare)
        if reclaimed < count:
            reclaimed += self._reclaim_from(self._candidates(), count - reclaimed, wait=True)
        return reclaimed

    def _candidates(self) -> Iterator[tuple[int, int]]:
        """Rows that may have surplus pages, and the tokens whose pages they keep; what is missed least comes first.

        Nobody can adopt what is retired. The end of a long tail is used many tokens from now, if at all; parked rows
        may be adopted whole by the next sequence, the oldest are the least likely to be. What a sequence said that it
        will need comes last.
        """
        yield from zip(list(self.retired), repeat(0))
        tails = self._tails(np.maximum(self.length, self.expected))
        yield from zip(tails, self.expected[tails].tolist())
        yield from zip(list(self.parked), repeat(0))
        live = np.flatnonzero(self.owner >= 0).tolist()  # with `scrub` no capacity shows a tail
        yield from zip(live, repeat(0))

    def _tails(self, lengths: npt.NDArray[np.int64]) -> list[int]:
        """Live rows with pages behind so many tokens, as far as capacities show them; the longest tail first."""
        tails = self.capacity - lengths
        rows = np.flatnonzero((tails >= self._page_tokens) & (self.owner >= 0))
        return rows[np.argsort(-tails[rows])].tolist() if len(rows) else []

    def _reclaim_from(self, rows: Iterable[tuple[int, int]], count: int, wait: bool = False) -> int:
        reclaimed = 0
        for row, keep in rows:
            if not self._surplus(row):
                continue
            if self.zero_tail and self.owner_of[row] >= 0:  # whose surplus pages may be read at any time
                self._fences[row] |= self._fence_after(self._streams[row])
            if wait:
                self._fences[row].wait()
            if self._fences[row].passed():
                reclaimed += self._unmap_surplus(row, count - reclaimed, keep)
            if reclaimed >= count:
                break
        return reclaimed

    def _unmap_surplus(self, row: int, count: int, keep: int = 0) -> int:
        """Unmaps up to `count` surplus pages of one row, whose fence has passed; none of its first `keep` tokens.

        Returns:
            how many.
        """
        live = self.owner_of[row] >= 0
        unmapped = 0
        try:
            for (arena, (first, end)), (_, (_, kept)) in zip(self._used(row), self._spans(0, keep)):
                mapping = arena.rows[row]
                if live:
                    unmapped += arena.unmap_front(row, min(first, mapping.first + count - unmapped))
                unmapped += arena.unmap_back(row, max(end, kept, mapping.end - (count - unmapped)))
                if self.zero_tail and self.length_of[row] and mapping.ready == mapping.end:  # else `grow` repairs it
                    arena.fill_tail(row, *self.zero_pages)
        finally:
            if live:
                self._refresh(row)
                if all(arena.rows[row].first >= used[0] for arena, used in self._used(row)):
                    self.retired.pop(row, None)
            else:
                self._settle(row)
        return unmapped

    def _parked_pages(self, enough: int) -> int:
        """Pages of parked rows, counted up to `enough`: what is usually there to be reclaimed."""
        count = 0
        for row in self.parked:
            for arena, _ in self.ranges:
                count += len(arena.rows[row].pages)
            if count >= enough:
                break
        return count

    def _supply(self, count: int) -> list[int]:
        """`count` pages: free ones, then retired ones, then new ones, and under pressure any surplus."""
        if self.retired and count > self.pool.free:
            self._reclaim_from(zip(list(self.retired), repeat(0)), count - self.pool.free)
        if count > self.pool.available:
            self._press(count, count - self.pool.available)
        try:
            return self.pool.take(count)
        except DriverOutOfMemoryError as error:
            self._press(count, count - self.pool.free, error)  # the device has less left than the budget allows
            return self.pool.take(count)

    def _press(self, count: int, missing: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Reclaims `missing` pages, or raises before it changes anything."""
        if self._parked_pages(missing) >= missing:
            self.reclaim(missing, self.spare)
            return
        used = self.used_pages - count  # `grow` counts those asked for among the used ones already
        surplus = self.pool.taken - len(self.zero_pages) - used
        if surplus < missing:
            available = count - missing + surplus
            limit = "the device has no memory left" if cause else f"the budget is {self.pool.budget}"
            raise OutOfPagesError(
                f"asked for {count} more pages of {self._page_size} bytes; {available} can be had: "
                f"{limit}, and {used} pages hold tokens of live sequences. Free or truncate "
                "sequences, or make the cache with a larger max_bytes",
                requested=count,
                available=available,
            ) from cause
        self.reclaim(missing, self.spare)
