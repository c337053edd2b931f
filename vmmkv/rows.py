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
 1. A row belongs to the sequence whose number is its `owner`, and numbers are never used twice: who names a row and
    another number names a sequence that is gone.
 2. `start <= length <= capacity` for each live row, in tokens, and all tokens in `[start, length)` lie in
    pages that are mapped and accessible. Both are written when there is memory, in one step.
 3. Growing to `length <= capacity` needs no driver call and no look at the row's pages.
 4. A page leaves a row, or a row changes its owner, only after the fence of the row has passed (or in the
    order of the one stream that the fence is on). Pages are zeroed on their sequence's own stream, the one that it
    was made on, behind the fence; other streams that grow it are ordered behind that.
 5. `grow` maps all pages for all its rows or changes nothing.
 6. With `zero_tail` a live row that holds tokens may be read from its first page to its very end, and holds nothing
    of another sequence; none of its pages goes to another row, but for those in front. A failure that could not be
    undone leaves `Row.has_hole` true; the next growth repairs it.
 7. Everything here follows from what arenas and the pool say, and from `extents`, `owner` and the fences: `recover`
    works it out anew after an interruption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arena import Arena, free_waiting
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

NOBODY = -1
"""The owner of a row without a sequence."""


class _Growth(NamedTuple):
    """Pages `[first, end)` that a row is to have in one arena; `ready` of them could be used before."""

    arena: Arena
    row: int
    first: int
    end: int
    ready: int


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
        self.num_rows = num_rows
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
        """The one page of all tails, where there are any."""
        for page in self.zero_pages:
            ranges[0][0].zero(page)
        self.extents = np.zeros((num_rows, 2), np.int64)
        """By row: the first token that is kept, and the end."""
        self.claims = self.extents
        """The same, but while room is made for rows: what these are to hold, so that their pages are no surplus."""
        self.start, self.length = self.extents[:, 0], self.extents[:, 1]
        self.capacity = np.zeros(num_rows, np.int64)
        self.owner = np.full(num_rows, NOBODY, np.int64)
        """By row: the number of the sequence that has it."""
        self.expected = np.zeros(num_rows, np.int64)
        """By row: the tokens that its sequence said it will soon have."""
        # The same memory for one row at a time, as Python's own integers: several times faster than numpy's.
        self.start_of, self.length_of = self.start.data, self.length.data
        self.capacity_of, self.owner_of = self.capacity.data, self.owner.data
        self.parked: dict[int, None] = {}  # oldest first, like `retired`
        self.retired: dict[int, None] = {}  # also live rows whose front was given back
        self.empty = list(range(num_rows - 1, -1, -1))
        self._fences = [Fence() for _ in range(num_rows)]
        self._own: list[Any] = [None] * num_rows
        """By row: the stream that its sequence was made on."""
        self._streams: list[set[Any]] = [set() for _ in range(num_rows)]
        """By row: streams that were named, besides."""

    def count_states(self) -> dict[str, int]:
        """Rows by state."""
        live = int((self.owner != NOBODY).sum())
        parked, empty = len(self.parked), len(self.empty)
        return {"live": live, "parked": parked, "retired": self.num_rows - live - parked - empty, "empty": empty}

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
        for row in range(self.num_rows):
            for mapped, used in self.pages(row):
                pages[mapped] = SURPLUS_PAGE
                pages[used] = self.owner[row]
        return pages

    # ------------------------------------------------------------------ taking and leaving rows

    def pick(self, tokens: int) -> int:
        """Takes a row off the lists: the parked row that fits best, an empty one, or one to wait for.

        Raises:
            OutOfRowsError: all rows are live.
        """
        if self.parked:
            stream = self._driver.current_stream()
            parked = np.fromiter(self.parked, np.int64, len(self.parked))
            room = self.capacity[parked]
            never = np.iinfo(np.int64).max
            # The smallest that is large enough; with none, or no length to go by, the largest.
            misfit = np.where((room >= tokens) & (tokens > 0), room - tokens, never - 1 - room)
            for _ in range(len(parked)):
                best = int(np.argmin(misfit))
                row = int(parked[best])
                if self._fences[row].passed_for(stream):
                    del self.parked[row]
                    return row
                misfit[best] = never
        if self.empty:
            return self.empty.pop()
        if self.parked:
            row = next(iter(self.parked))
            self._fences[row].wait()
            del self.parked[row]
            return row
        for row in self.retired:
            if self.owner_of[row] == NOBODY:
                self._fences[row].wait()
                self._unmap_surplus(row, self.pool.budget)
                return self.empty.pop()
        raise OutOfRowsError(
            f"all {self.num_rows} rows belong to live sequences; free one, or make the cache with a larger "
            "max_sequences (a row without tokens takes addresses only)"
        )

    def take(self, row: int, owner: int, tokens: int, expected: int = 0) -> None:
        """Gives a picked row to a new sequence, with room for `tokens` tokens.

        Its pages for tokens that are `expected` are reclaimed after those of idle parked rows.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `_make_room`; the row is back on the lists.
        """
        adopted = any(arena.rows[row].pages for arena, _ in self.ranges)
        self._own[row] = self._driver.current_stream()
        self.expected[row] = expected
        self.owner_of[row] = owner
        self._refresh(row)
        try:
            if tokens and self.zero_tail:
                self._keep(row, 2 * max(tokens, expected))
            if tokens > self.capacity_of[row] or (tokens and self.zero_tail):
                self._make_room(row, (0, tokens), [row])
        except BaseException:
            self._vacate(row)
            raise
        self.length_of[row] = tokens
        self._refresh(row)
        self.adoptions += adopted

    def _keep(self, row: int, tokens: int) -> None:
        """Gives back what a row without tokens has adopted beyond so many: soon nobody else may have it."""
        if any(arena.rows[row].end > end for arena, (_, end) in self._spans(0, tokens)):
            self._fences[row].wait()
            self._unmap_surplus(row, self.pool.budget, tokens)

    def release(self, references: Iterable[tuple[int, int]]) -> None:
        """Takes rows from their sequences, behind a fence on the current stream and those in use.

        Args:
            references: rows and the numbers of their sequences; those that are not theirs any more are passed over.

        Raises:
            StreamCaptureError: a CUDA graph is being captured, on the current stream or on one of theirs; no row was
                taken.
        """
        rows = [row for row, number in dict.fromkeys(references) if self.owner_of[row] == number]
        if not rows:
            return
        fence = self._fence_after(rows)
        for row in rows:
            self.pool.count_uses(self._leaving(row, 0, 0))
            self._fences[row] |= fence
            self._vacate(row)

    def _vacate(self, row: int) -> None:
        """Puts a row that nobody has any more on the list where it belongs."""
        self.owner_of[row] = NOBODY
        self._forget(row)
        self.retired.pop(row, None)
        adoptable = all(arena.rows[row].first == 0 for arena, _ in self.ranges)
        (self.parked if adoptable else self.retired)[row] = None
        self._settle(row)

    def _forget(self, row: int) -> None:
        """Forgets what was the sequence's."""
        self.extents[row] = self.expected[row] = 0
        self._streams[row].clear()
        self._own[row] = None

    def _settle(self, row: int) -> None:
        """Works out what a row without a sequence is good for: to be adopted, or empty."""
        if not any(arena.rows[row].pages for arena, _ in self.ranges):
            for arena, _ in self.ranges:
                arena.begin_at(row, 0)
            self.parked.pop(row, None)
            self.retired.pop(row, None)
            self.empty.append(row)
        self._refresh(row)

    def record_stream(self, row: int, stream: Any) -> None:
        """Work on `stream` may use the row until its sequence is freed."""
        self._streams[row].add(stream)

    def recover(self) -> None:
        """Makes the books right after an interruption: what follows from other books is worked out anew.

        Raises:
            DriverError: what is in doubt could not be unmapped.
        """
        self.claims = self.extents
        for arena, _ in self.ranges:
            for row in range(self.num_rows):
                arena.settle(row)
        mapped = {page for arena, _ in self.ranges for row in arena.rows for page in row.pages}
        self.pool.settle(mapped.union(self.zero_pages))
        parked, retired = list(self.parked), list(self.retired)
        self.parked, self.retired, self.empty = {}, {}, []
        for row in dict.fromkeys([*parked, *retired, *range(self.num_rows - 1, -1, -1)]):  # as old as they were
            if self.owner_of[row] == NOBODY:
                self._vacate(row)
            else:
                self._retire_front(row)
                self._refresh(row)

    # ------------------------------------------------------------------ growing and shrinking

    def grow(
        self,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Sets new lengths, and maps the pages that they need: for all rows or for none.

        Args:
            starts: also the first tokens, of rows that hold none yet; no page is mapped in front of them.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `_make_room`; nothing has changed.
        """
        needing = lengths > (self.capacity[rows] if starts is None else 0)
        firsts = self.start[rows] if starts is None else starts
        extents = np.stack([firsts, lengths], axis=1)
        self._make_room(rows, extents, rows[needing].tolist())
        self.extents[rows] = extents
        for row in rows[needing].tolist():
            self._retire_front(row)
            self._refresh(row)

    def grow_one(self, row: int, length: int) -> None:
        """`grow` for one row, without arrays."""
        self._make_room(row, (self.start_of[row], length), [row])
        self.length_of[row] = length
        self._refresh(row)

    def _make_room(self, rows: Any, extents: Any, needing: list[int]) -> None:
        """Maps the pages that tokens `[start, length)` of rows lie in. What rows hold is as before.

        Args:
            rows, extents: of all that grow: the pages of one are no surplus for another.
            needing: those of them that may need pages.

        Raises:
            OutOfPagesError: the budget, or the device, cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages have to be zeroed, or waited for, while a CUDA graph is captured.
                In all cases nothing has changed.
        """
        self.claims = self.extents.copy()
        self.claims[rows] = extents
        try:
            self._map(needing)
        finally:
            self.claims = self.extents

    def _map(self, rows: list[int]) -> None:
        """Maps, and zeroes where that is asked for, what rows claim, or changes nothing."""
        plan: list[_Growth] = []
        missing = 0
        for row in rows:
            for arena, (first, end) in self._used(row):
                mapping = arena.rows[row]
                reaches = mapping.first <= first <= mapping.end
                missing += max(end - (mapping.end if reaches else first), 0)
                if not reaches or end > mapping.ready:
                    plan.append(_Growth(arena, row, first, end, mapping.ready))
        supply: list[int] = []
        zeroing = False
        try:
            if self.zero_tail and plan:
                self._wait_for_readers(rows)
            if missing:
                supply = self._supply(missing)
            for arena, row, first, end, _ in plan:
                self._begin(arena, row, first)
                arena.map_back(row, end, supply)
            if self.scrub:
                zeroing = True
                self._zero(rows)
            if self.zero_tail:
                for row in rows:
                    self._fill_tails(row)
        except BaseException:
            self._undo(rows, plan, supply, zeroing)
            raise

    def _begin(self, arena: Arena, row: int, first: int) -> None:
        """Makes a row without tokens begin at page `first`, where its pages do not reach there."""
        mapping = arena.rows[row]
        if not mapping.first <= first <= mapping.end:
            self._fences[row].wait()
            arena.unmap_back(row, 0)
            arena.begin_at(row, first)

    def _undo(self, rows: list[int], plan: list[_Growth], supply: list[int], zeroing: bool) -> None:
        """Takes a growth back. Pages that cannot be unmapped, or not yet, stay in the books as surplus."""
        self.claims = self.extents
        self.pool.give(supply)
        fence = None
        if zeroing:
            with suppress(StreamCaptureError):  # which has refused the first memset already
                fence = self._fence_after(rows)
        if fence and not self.zero_tail:
            for row in rows:
                self._fences[row] |= fence
        else:
            if fence:
                fence.wait()  # a dense kernel must not see these pages, so they cannot stay until later
            for arena, row, _, _, ready in plan:
                with suppress(DriverError):
                    arena.settle(row)
                    arena.unmap_back(row, ready)
        for row in rows:
            if not self.length_of[row]:
                for arena, _ in self.ranges:
                    if not arena.rows[row].pages:
                        arena.begin_at(row, 0)
            elif self.zero_tail:
                with suppress(DriverError, StreamCaptureError):
                    self._fill_tails(row)
            self._retire_front(row)
            self._refresh(row)

    def shrink(self, row: int, start: int, length: int) -> None:
        """Moves a live row's start forward or its length back. Pages without tokens become surplus.

        Raises:
            StreamCaptureError: whole pages would leave the sequence while a CUDA graph is captured.
        """
        leaving = self._leaving(row, start, length)
        if leaving:
            self._fences[row] |= self._fence_after([row])
            self.pool.count_uses(leaving)
        self.extents[row] = start, length
        self._retire_front(row)

    def _retire_front(self, row: int) -> None:
        """Notes whether a live row has pages in front of its first token: nobody will ever use them there."""
        if any(arena.rows[row].first < min(first, arena.rows[row].end) for arena, (first, _) in self._used(row)):
            self.retired[row] = None
        else:
            self.retired.pop(row, None)

    def _used(self, row: int) -> list[tuple[Arena, tuple[int, int]]]:
        """Per arena the pages `[first, end)` of the row that hold tokens, or are about to."""
        return self._spans(*self.claims[row].tolist())

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

    def _streams_of(self, rows: Iterable[int]) -> set[Any]:
        """The streams that the sequences of rows may be used on, as far as they were named."""
        return {stream for row in rows for stream in (self._own[row], *self._streams[row])}

    def _fence_after(self, rows: Iterable[int]) -> Fence:
        """A fence after all work on rows so far, and on the current stream."""
        return Fence.after(self._driver, {self._driver.current_stream(), *self._streams_of(rows)})

    def _wait_for_readers(self, rows: list[int]) -> None:
        """Waits for work that may read rows to their very end, behind which something will be unmapped."""
        fence = self._fence_after(rows)
        for row in rows:
            fence = self._fences[row] | fence
        fence.wait()

    def _fill_tails(self, row: int) -> None:
        """Makes a row readable to its end in every arena."""
        for arena, _ in self.ranges:
            if arena.rows[row].ready < arena.rows[row].end:
                self._wait_for_readers([row])
            arena.fill_tail(row, *self.zero_pages)

    def _zero(self, rows: list[int]) -> None:
        """Zeroes the pages that rows begin to use, in the order of what their sequences do with them."""
        own_streams = set()
        for row in rows:
            own = self._own[row]
            for address, nbytes in self._unclean(row):
                self._fences[row].order(own)  # who had the pages before may still read them
                self._driver.fill(address, nbytes, 0, own)
                own_streams.add(own)
        current = self._driver.current_stream()
        for own in own_streams - {current}:
            self._driver.record(own).wait(current)  # what is written there next must not be zeroed

    def _unclean(self, row: int) -> Iterator[tuple[int, int]]:
        """Addresses and bytes of the pages that a row begins to use with what it claims."""
        old_end = self.length_of[row]
        for (arena, (first, end)), (_, (_, used_end)) in zip(self._used(row), self._spans(0, old_end)):
            if self.zero_tail and not old_end:
                end = arena.rows[row].ready  # a dense kernel reads all that the row has adopted
            first = max(first, used_end)
            if end > first:
                yield arena.rows[row].address + first * self._page_size, (end - first) * self._page_size

    def _refresh(self, row: int) -> None:
        """Works out a row's capacity: the tokens that it can grow to without a look at its pages."""
        live, (start, length) = self.owner_of[row] != NOBODY, self.claims[row].tolist()
        capacity = self.max_seq_len
        whole = True
        for arena, record in self.ranges:
            mapping = arena.rows[row]
            end = mapping.ready
            # Pages that do not reach its first token are what a growth has left that did not happen.
            whole &= mapping.first <= start * record // self._page_size <= mapping.end
            whole &= not (self.zero_tail and mapping.has_hole)
            if mapping.first and not live:
                end = 0  # nobody can adopt it
            elif self.scrub and live:
                end = min(end, -(-length * record // self._page_size))  # behind are another's bytes
            capacity = min(capacity, end * self._page_size // record)
        self.capacity_of[row] = capacity if whole or not live else length  # so that the next growth repairs it

    # ------------------------------------------------------------------ reclaiming

    @property
    def used_pages(self) -> int:
        """Pages that hold tokens of live sequences."""
        size = self._page_size  # rows that belong to nobody hold no tokens
        start, length = self.claims.T
        return -sum(int((length * -record // size).sum() + (start * record // size).sum()) for _, record in self.ranges)

    @property
    def surplus_pages(self) -> int:
        """Mapped pages that hold no tokens of live sequences."""
        return self.pool.taken - len(self.zero_pages) - self.used_pages

    @property
    def available_pages(self) -> int:
        """Pages that hold no tokens, but for those behind live rows that work on the GPU may still read."""
        fenced = sum(self._surplus(row) for row in self._tails(self.length) if not self._fences[row].passed())
        return self.pool.budget - len(self.zero_pages) - self.used_pages - fenced - self._bound_pages()

    def _surplus(self, row: int) -> int:
        """Surplus pages of one row. A row that is just growing may not have all of its used pages yet."""
        surplus = 0
        for arena, (first, end) in self._used(row):
            mapping = arena.rows[row]
            surplus += len(mapping.pages) - max(min(end, mapping.end) - max(first, mapping.first), 0)
        return surplus

    def _bound_pages(self) -> int:
        """Pages that hold no tokens, and yet nobody else's: those behind rows that may be read to their very end."""
        if not self.zero_tail:
            return 0
        readable = np.flatnonzero(self.claims[:, 1]).tolist()
        used = ((arena.rows[row], end) for row in readable for arena, (_, end) in self._used(row))
        return sum(max(mapping.end - max(end, mapping.first), 0) for mapping, end in used)

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
        yield from self._retired()
        tails = self._tails(np.maximum(self.claims[:, 1], self.expected))
        yield from zip(tails, self.expected[tails].tolist())
        yield from zip(list(self.parked), repeat(0))
        live = self.owner != NOBODY  # with `scrub` no capacity shows a tail
        if self.zero_tail:
            live &= self.claims[:, 1] == 0  # others may be read to their very end
        yield from zip(np.flatnonzero(live).tolist(), repeat(0))

    def _retired(self) -> list[tuple[int, int]]:
        """Retired rows, all of whose pages may go, and live rows with pages in front, which keep all others."""
        return [(row, 0 if self.owner_of[row] == NOBODY else self.max_seq_len) for row in self.retired]

    def _tails(self, lengths: npt.NDArray[np.int64]) -> list[int]:
        """Live rows with pages behind so many tokens that others may have, as far as capacities show them; the longest
        tail first."""
        if self.zero_tail:
            return []
        tails = self.capacity - lengths
        rows = np.flatnonzero((tails >= self._page_tokens) & (self.owner != NOBODY))
        return rows[np.argsort(-tails[rows])].tolist() if len(rows) else []

    def _reclaim_from(self, rows: Iterable[tuple[int, int]], count: int, wait: bool = False) -> int:
        reclaimed = 0
        for row, keep in rows:
            if not self._surplus(row):
                continue
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
        live = self.owner_of[row] != NOBODY
        unmapped = 0
        try:
            for (arena, (first, end)), (_, (_, kept)) in zip(self._used(row), self._spans(0, keep)):
                mapping = arena.rows[row]
                if live:
                    unmapped += arena.unmap_front(row, min(first, mapping.first + count - unmapped))
                unmapped += arena.unmap_back(row, max(end, kept, mapping.end - (count - unmapped)))
        finally:
            if live:
                self._retire_front(row)
                self._refresh(row)
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
            self._reclaim_from(self._retired(), count - self.pool.free)
        if count > self.pool.available:
            self._press(count, count - self.pool.available)
        try:
            return self.pool.take(count)
        except DriverOutOfMemoryError as error:
            free_waiting()
            self._press(count, count - self.pool.free, error)  # the device has less left than the budget allows
            return self.pool.take(count)

    def _press(self, count: int, missing: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Reclaims `missing` pages, or raises before it changes anything."""
        if self._parked_pages(missing) >= missing:
            self.reclaim(missing, self.spare)
            return
        used = self.used_pages - count  # which counts those asked for, since they are claimed
        surplus = self.pool.taken - len(self.zero_pages) - used - self._bound_pages()
        if surplus < missing:
            available = count - missing + surplus
            limit = str(cause) if cause else f"the budget is {self.pool.budget}"
            raise OutOfPagesError(
                f"asked for {count} more pages of {self._page_size} bytes; {available} can be had: {limit}, and "
                f"{used} pages hold tokens of live sequences. Free or truncate sequences, or make the cache "
                "with a larger max_bytes",
                requested=count,
                available=available,
            ) from cause
        self.reclaim(missing, self.spare)
