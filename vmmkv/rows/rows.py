"""The rows of one cache: whose they are, the pages under them, and how these are given and taken.

A page is *used* when tokens of a live sequence lie in it. All other mapped pages are *surplus*: parked and retired
rows, tails behind a truncated or adopted sequence, lookahead, fronts before `start`. Surplus pages cost nothing to use
again where they are and are unmapped only when somebody else needs them.

Invariants, beside those of the tables:
 1. All tokens in `[start, length)` of a live row lie in pages that are mapped and accessible, and `capacity` more than
    `length` says that all up to there do. Lengths are written when there is memory, in one step.
 2. Growing to `length <= capacity` needs no driver call and no look at the row's pages.
 3. A page leaves a row, or a row changes its owner, only after the fence of the row has passed (or in the order of the
    one stream that the fence is on). Pages are zeroed on their sequence's own stream, the one that it was made on,
    behind the fence; other streams that grow it are ordered behind that.
 4. `grow` maps all pages for all its rows or changes nothing.
 5. With `zero_tail` a live row that holds tokens may be read from its first page to its very end, and holds nothing of
    another sequence; none of its pages goes to another row, but for those in front. A failure that could not be undone
    leaves `PageTable.has_hole` true; the next growth repairs it.
 6. Everything here follows from what page tables and the pool say, and from extents, owners and fences: `recover` works
    it out anew after an interruption.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DriverError, DriverOutOfMemoryError, OutOfPagesError, StreamCaptureError
from ..memory import debugging
from ..memory.fence import Fence
from ..memory.pool import Account, FramePool
from ..space.arena import Arena, free_waiting
from ..space.change import Change
from . import policy
from .policy import Span
from .table import NOBODY, RowTable

FREE_PAGE = -1
"""In `KVCache.page_map`: the page exists and belongs to nobody."""
SURPLUS_PAGE = -2
"""In `KVCache.page_map`: the page is mapped but holds no token; it is ready to be adopted or reclaimed."""
VACANT_PAGE = -3
"""In `KVCache.page_map`: the page's memory was given back to the system."""
ZERO_PAGE = -4
"""In `KVCache.page_map`: the page that lies behind every live row with `zero_tail`."""
OTHERS_PAGE = -5
"""In `KVCache.page_map`: the page is another cache's, on the same pool."""

POISON = 0xFF
"""Bytes that are no number in any floating-point format, of 1, 2 or 4 bytes."""


class _Growth(NamedTuple):
    """Pages that a row is to have in one arena; `ready` of them could be used before."""

    arena: Arena
    row: int
    span: Span
    ready: int


class Rows:
    """See above.

    Args:
        pool: the frame pool that they lie on.
        table: the rows.
        records: per range of the layout the bytes of a token record in it.
        max_seq_len: tokens per row.
        scrub: zero pages before another sequence can read them.
        zero_tail: map one page of zeros wherever a live row has no pages; implies `scrub`.
        lookahead: tokens that a mapper maps behind each sequence; 0 without one.
        overread: tokens that are always mapped behind each sequence.
        poison: for debugging: fill pages with what is no number in any floating-point format, before a sequence has
            them (without `scrub`) and when it leaves them. Not with `zero_tail`, where kernels read such pages.
    """

    account: Account
    """What the cache may have of the pool."""
    ranges: list[tuple[Arena, int]]
    """Per range of the layout its arena, and the bytes of a token record in it."""

    def __init__(
        self,
        pool: FramePool,
        table: RowTable,
        records: Sequence[int],
        max_seq_len: int,
        scrub: bool = False,
        zero_tail: bool = False,
        lookahead: int = 0,
        overread: int = 0,
        poison: bool = False,
    ) -> None:
        self.pool, self.table = pool, table
        self.max_seq_len = max_seq_len
        self.adoptions = 0
        """Sequences that started on a row with mapped pages."""
        self.page_uses = 0
        """How often a page has left a sequence since the beginning."""
        self.abandoned: deque[weakref.KeyedRef[tuple[int, int], Any]] = deque()
        """Rows, and the numbers of their sequences, that were left behind without `free`."""
        self.poison = poison and not zero_tail
        self.scrub = scrub or zero_tail or self.poison
        self._pattern = 0 if scrub or zero_tail else POISON
        """What pages are filled with that are not clean."""
        self.origins: dict[int, str] = {}
        """With debugging, by row: who has started its sequence."""
        self.zero_tail = zero_tail
        self.lookahead, self.overread = lookahead, overread
        self.caller_pages = 0
        """Pages that growths had to map themselves."""
        self.zero_frames: list[int] = []
        """The one frame of all tails, where there are any."""
        # A live row's zero tail grows with each page that is taken from it.
        self.spare = 0 if zero_tail else pool.limit // 512
        """Pages to reclaim beyond those that are missing: to look for them costs as much as to reclaim several."""
        self._driver = pool.driver
        self._page_size = pool.page_size
        self._records = records
        self._page_tokens = -(-self._page_size // min(records))
        self._claims: dict[int, tuple[int, int]] = {}
        """While room is made for rows: what these are to hold, so that their pages are no surplus."""

    def open(self, account: Account, row_bytes: Sequence[int]) -> None:
        """Reserves the arenas, of rows of so many bytes.

        Raises:
            DriverError, OutOfPagesError, StreamCaptureError: that could not be done.
        """
        self.account = account
        try:
            arenas = [Arena(self.pool, account, self.table.num_rows, nbytes) for nbytes in row_bytes]
            if self.zero_tail:
                self.zero_frames = arenas[0].table.tail_frames = self.pool.take(account, 1)
                arenas[0].zero(self.zero_frames[0])
        except BaseException:
            self.pool.close_account(account)
            raise
        self.ranges = list(zip(arenas, self._records))

    def close(self) -> None:
        """Ends all sequences and unmaps everything, in whatever state the driver is; all work must have finished."""
        self.table.owners[:] = NOBODY
        for arena, _ in self.ranges:
            arena.close()
        self.pool.close_account(self.account)

    # ------------------------------------------------------------------ what there is

    def pages(self, row: int) -> list[tuple[list[int], list[int]]]:
        """Per arena the row's mapped frames, and those of them that hold tokens."""
        return [
            (arena.table.frames_in(row), arena.table.frames_in(row, *span) if span.end > span.first else [])
            for (arena, _), span in zip(self.ranges, self._used(row))
        ]

    def page_map(self) -> npt.NDArray[np.int64]:
        """What each physical page holds, by page number: see `KVCache.page_map`."""
        frames = self.pool.frames
        pages = np.where(frames.handles[: frames.numbers] < 0, VACANT_PAGE, OTHERS_PAGE).astype(np.int64)
        pages[frames.free] = FREE_PAGE
        pages[self.zero_frames] = ZERO_PAGE
        for row in range(self.table.num_rows):
            for mapped, used in self.pages(row):
                pages[mapped] = SURPLUS_PAGE
                pages[used] = self.table.owner[row]
        return pages

    def sequences(self) -> tuple[int, int]:
        """Live sequences, and their tokens."""
        rows = self.table.live_rows()
        return len(rows), int((self.table.lengths[rows] - self.table.starts[rows]).sum())

    def held(self) -> list[str]:
        """What live sequences hold, a line for each, and with debugging who has started it."""
        lines = []
        collected = {reference.key for reference in self.abandoned}
        for row in self.table.live:
            if (row, self.table.owner[row]) in collected:
                continue
            pages = sum(len(mapped) for mapped, _ in self.pages(row))
            tokens = self.table.length[row] - self.table.start[row]
            origin = self.origins.get(row, "an unknown place")
            lines.append(f"sequence {self.table.owner[row]}: {tokens} tokens, {pages} pages, started at {origin}")
        return lines

    @property
    def used_pages(self) -> int:
        """Pages that hold tokens of live sequences, or are about to."""
        extents = self.table.extents[self.table.live_rows()]
        used = policy.count_pages(extents, self._records, self._page_size, self.overread)
        for row, claim in self._claims.items():
            now = int(self.table.start[row]), int(self.table.length[row])
            for extent, sign in ((claim, 1), (now, -1)):
                used += sign * sum(end - first for first, end in self._spans(*extent))
        return used

    @property
    def surplus_pages(self) -> int:
        """Mapped pages that hold no tokens of live sequences."""
        return self.account.taken - len(self.zero_frames) - self.used_pages

    @property
    def kept_pages(self) -> int:
        """Pages that others cannot have."""
        return self.used_pages + len(self.zero_frames) + self._bound_pages()

    @property
    def available_pages(self) -> int:
        """Pages that can be had, but for those behind live rows that work on the GPU may still read."""
        live = self.table.lengths[self.table.live_rows()]
        fenced = 0
        if not self.zero_tail:
            long = policy.tails(self.table, live, self._page_tokens)
            fenced = sum(self._surplus(row) for row in long if not self.table.fences[row].passed())
        return self.pool.allowed(self.account) - self.kept_pages - fenced

    # ------------------------------------------------------------------ taking and leaving rows

    def pick(self, tokens: int, tenant: int = 0) -> int:
        """Takes a row off the lists, for a sequence of so many tokens; what another tenant had there is unmapped.

        Raises:
            OutOfRowsError: all rows are live.
        """
        table = self.table
        row = table.pick(tokens, self._driver.current_stream(), tenant)
        if row is None:
            row = next(row for row in table.retired if not table.is_live(row))
        if table.tenant[row] != tenant or row in table.retired:
            table.fences[row].wait()
            self._unmap_surplus(row, self.pool.limit)
            if row in table.empty:
                table.empty.remove(row)
            return row
        if not self.table.fences[row].passed_for(self._driver.current_stream()):
            self.table.fences[row].wait()
        return row

    def take(self, row: int, owner: int, tokens: int, expected: int = 0, tenant: int = 0) -> None:
        """Gives a picked row to a new sequence, with room for `tokens` tokens.

        Its pages for tokens that are `expected` are reclaimed after those of idle parked rows.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `_make_room`; the row is back on the lists.
        """
        adopted = self._has_pages(row)
        self.table.own(row, owner, self._driver.current_stream(), expected, tenant)
        if self.pool.is_debugged:
            self.origins[row] = debugging.caller()
        self._refresh(row)
        try:
            if tokens and self.zero_tail:
                self._keep(row, 2 * max(tokens, expected))
            if tokens > self.table.capacity[row] or (tokens and self.zero_tail):
                self._make_room({row: (0, tokens)}, [row])
        except BaseException:
            self._vacate(row)
            raise
        self.table.length[row] = tokens
        self._refresh(row)
        self.adoptions += adopted

    def _keep(self, row: int, tokens: int) -> None:
        """Gives back what a row without tokens has adopted beyond so many: soon nobody else may have it."""
        if any(arena.table.end[row] > end for (arena, _), (_, end) in zip(self.ranges, self._spans(0, tokens))):
            self.table.fences[row].wait()
            self._unmap_surplus(row, self.pool.limit, tokens)

    def release(self, references: Iterable[tuple[int, int]]) -> None:
        """Takes rows from their sequences, behind a fence on the current stream and those in use.

        Args:
            references: rows and the numbers of their sequences; those that are not theirs any more are passed over.

        Raises:
            StreamCaptureError: a CUDA graph is being captured, on the current stream or on one of theirs; no row was
                taken.
        """
        rows = [row for row, number in dict.fromkeys(references) if self.table.owner[row] == number]
        if not rows:
            return
        fence = self._fence_after(rows)
        for row in rows:
            self._count_uses(row, 0, 0)
            self.table.fences[row] |= fence
            self._spoil(row, 0, 0)
            self._vacate(row)

    def release_abandoned(self) -> None:
        """Frees the rows of sequences that were garbage-collected, and ranges of caches that were, during a capture."""
        free_waiting()
        self.pool.collect()
        if not self.abandoned:
            return
        references = list(self.abandoned)
        try:
            self.release(reference.key for reference in references)
        except StreamCaptureError:
            return  # later, then
        for _ in references:
            self.abandoned.popleft()

    def _vacate(self, row: int) -> None:
        """Puts a row that nobody has any more on the list where it belongs."""
        self.table.disown(row)
        self._settle(row)

    def _settle(self, row: int) -> None:
        """Works out what a row without a sequence is good for: to be adopted, or empty, or nothing."""
        table = self.table
        if not self._has_pages(row):
            for arena, _ in self.ranges:
                arena.table.begin_at(row, 0)
            self._refresh(row)
            table.parked.remove(row)
            table.retired.pop(row, None)
            table.empty.append(row)
            return
        self._refresh(row)
        if all(arena.table.first[row] == 0 for arena, _ in self.ranges):
            table.parked.put(row, table.capacity[row])
        else:
            table.parked.remove(row)
            table.retired[row] = None

    def recover(self) -> None:
        """Makes the books right after an interruption: what follows from other books is worked out anew."""
        self._claims = {}
        table = self.table
        parked, retired = list(table.parked), list(table.retired)
        table.parked, table.retired, table.live, table.empty = type(table.parked)(), {}, {}, []
        self.account.taken = sum(len(arena.table.mapped_frames()) for arena, _ in self.ranges)
        for row in dict.fromkeys([*parked, *retired, *range(table.num_rows - 1, -1, -1)]):  # as old as they were
            if table.is_live(row):
                table.live[row] = None
                self._retire_front(row)
                self._refresh(row)
            else:
                self._vacate(row)

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
        table = self.table
        needing = rows[lengths > (table.capacities[rows] if starts is None else 0)]
        extents = np.stack([table.starts[rows] if starts is None else starts, lengths], axis=1)
        claims = dict(zip(rows.tolist(), map(tuple, extents.tolist())))
        self._make_room(claims, needing.tolist())
        table.extents[rows] = extents
        for row in needing.tolist():
            self._retire_front(row)
            self._refresh(row)

    def grow_one(self, row: int, length: int) -> None:
        """`grow` for one row, without arrays."""
        self._make_room({row: (self.table.start[row], length)}, [row])
        self.table.length[row] = length
        self._refresh(row)

    def _make_room(self, claims: dict[int, tuple[int, int]], needing: list[int]) -> None:
        """Maps the pages that tokens `[start, length)` of rows lie in. What rows hold is as before.

        Args:
            claims: of all that grow: the pages of one are no surplus for another.
            needing: those of them that may need pages.

        Raises:
            OutOfPagesError: the budget, or the device, cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages have to be zeroed, or waited for, while a CUDA graph is captured.
                In all cases nothing has changed.
        """
        self._claims = claims
        try:
            with self.pool.ranges.growth:
                self._map(needing)
        finally:
            self._claims = {}

    def _map(self, rows: list[int]) -> None:
        """Maps, and zeroes where that is asked for, what rows claim, or changes nothing."""
        plan: list[_Growth] = []
        missing = 0
        for row in rows:
            for (arena, _), span in zip(self.ranges, self._used(row)):
                reaches, table = arena.table.reaches(row, span.first), arena.table
                missing += max(span.end - (table.end[row] if reaches else span.first), 0)
                if not reaches or span.end > table.ready[row]:
                    plan.append(_Growth(arena, row, span, table.ready[row]))
        supply: list[int] = []
        zeroing = False
        try:
            if self.zero_tail and plan:
                self._wait_for_readers(rows)
            if missing:
                supply = self._supply(missing)
                self.caller_pages += missing
                self.pool.pages_in_need += missing
            self._run(plan, supply)
            begun = rows if self.scrub and not (self._pattern and self._is_captured(rows)) else []
            if begun or self.pool.tenants:
                zeroing = True
                self._zero(begun, plan)
            if self.zero_tail:
                for row in rows:
                    self._fill_tails(row)
        except BaseException:
            self._undo(rows, plan, supply, zeroing)
            raise

    def _run(self, plan: list[_Growth], supply: list[int]) -> None:
        """Makes one change of a plan.

        Raises:
            DriverError: a call failed. What was mapped before it is in the books.
        """
        for arena, row, span, _ in plan:
            self._begin(arena, row, span.first)
            arena.make_way(row, span.end)
        change = Change(self.pool.calls, self.pool.frames.handles)
        for arena, row, span, _ in plan:
            arena.plan_growth(change, row, span.end, supply)
        change.run()
        change.commit(self.pool)
        change.check()

    def _begin(self, arena: Arena, row: int, first: int) -> None:
        """Makes a row without tokens begin at page `first`, where its pages do not reach there."""
        table = arena.table
        if not table.reaches(row, first):
            self.table.fences[row].wait()
            arena.unmap_back(row, 0)
            table.begin_at(row, first)

    def _undo(self, rows: list[int], plan: list[_Growth], supply: list[int], zeroing: bool) -> None:
        """Takes a growth back. Pages that cannot be unmapped, or not yet, stay in the books as surplus."""
        self._claims = {}
        fence = None
        if zeroing:
            with suppress(StreamCaptureError):  # which has refused the first memset already
                fence = self._fence_after(rows)
        for arena, *_ in plan:
            with suppress(DriverError):
                arena.table.settle()
        self.pool.give(self.account, supply)
        if fence and not self.zero_tail and not self.pool.tenants:
            for row in rows:
                self.table.fences[row] |= fence
        else:
            if fence:
                fence.wait()  # who reads all that is mapped must not see these pages, so they cannot stay until later
            for arena, row, _, ready in plan:
                with suppress(DriverError):
                    arena.unmap_back(row, ready)
        for row in rows:
            if not self.table.length[row]:
                for arena, _ in self.ranges:
                    if not arena.table.pages(row):
                        arena.table.begin_at(row, 0)
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
        if self._leaving(row, start, length):
            self.table.fences[row] |= self._fence_after([row])
            self._count_uses(row, start, length)
            self._spoil(row, start, length)
        self.table.extents[row] = start, length
        self._retire_front(row)

    def _retire_front(self, row: int) -> None:
        """Notes whether a live row has pages in front of its first token: nobody will ever use them there."""
        if any(
            arena.table.first[row] < min(first, arena.table.end[row])
            for (arena, _), (first, _) in zip(self.ranges, self._used(row))
        ):
            self.table.retired[row] = None
        else:
            self.table.retired.pop(row, None)

    def _has_pages(self, row: int) -> bool:
        return any(arena.table.pages(row) for arena, _ in self.ranges)

    def _used(self, row: int) -> list[Span]:
        """Per arena the pages of the row that hold tokens, or are about to."""
        return self._spans(*self._extent(row))

    def _extent(self, row: int) -> tuple[int, int]:
        """The first token that a row keeps, and its end: now, or as soon as there is room."""
        return self._claims.get(row) or (self.table.start[row], self.table.length[row])

    def _spans(self, start: int, length: int) -> list[Span]:
        return policy.spans(start, length + self.overread if length else 0, self._records, self._page_size)

    def _leaving(self, row: int, start: int, length: int) -> list[tuple[Arena, int, int]]:
        """The pages, arena by arena, that hold tokens now and would hold none with this start and length."""
        leaving = []
        for (arena, _), (first, end), (new_first, new_end) in zip(
            self.ranges, self._used(row), self._spans(start, length)
        ):
            front_end = min(max(new_first, first), end)
            back_first = min(max(new_end, front_end), end)
            leaving += [(arena, begin, stop) for begin, stop in ((first, front_end), (back_first, end)) if begin < stop]
        return leaving

    def _count_uses(self, row: int, start: int, length: int) -> None:
        """Counts that pages leave the sequence that they are part of."""
        for arena, begin, end in self._leaving(row, start, length):
            self.page_uses += end - begin
            arena.table.count_use(row, begin, end)

    def _fence_after(self, rows: Iterable[int]) -> Fence:
        """A fence after all work on rows so far, and on the current stream."""
        streams = {self._driver.current_stream()}
        for row in rows:
            streams |= {self.table.own_streams[row], *self.table.streams[row]}
        return Fence.after(self._driver, streams)

    def _wait_for_readers(self, rows: list[int]) -> None:
        """Waits for work that may read rows to their very end, behind which something will be unmapped."""
        fence = self._fence_after(rows)
        for row in rows:
            fence = self.table.fences[row] | fence
        fence.wait()

    def _fill_tails(self, row: int) -> None:
        """Makes a row readable to its end in every arena."""
        for arena, _ in self.ranges:
            if arena.table.ready[row] < arena.table.end[row]:
                self._wait_for_readers([row])
            arena.fill_tail(row, *self.zero_frames)

    def _zero(self, rows: list[int], plan: list[_Growth]) -> None:
        """Fills the pages that rows begin to use, and those that were mapped with another tenant's bytes, in the order
        of what their sequences do with them."""
        own_streams = set()
        unclean = [(row, each) for row in rows for each in self._unclean(row)]
        for arena, row, span, ready in plan if self.pool.tenants else ():
            tenant = self.table.tenant[row]
            unclean += [(row, each) for each in arena.table.unclean(row, ready, span.end, tenant)]
        for row, (address, nbytes) in unclean:
            own = self.table.own_streams[row]
            self.table.fences[row].order(own)  # who had the pages before may still read them
            self._driver.fill(address, nbytes, self._pattern, own)
            own_streams.add(own)
        current = self._driver.current_stream()
        for own in own_streams - {current}:
            self._driver.record(own).wait(current)  # what is written there next must not be zeroed
        for arena, row, span, ready in plan:
            arena.table.belong(row, ready, span.end, self.table.tenant[row])

    def _spoil(self, row: int, start: int, length: int) -> None:
        """Fills the pages that a sequence leaves, where that is wanted, in order behind the row's fence."""
        leaving = self._leaving(row, start, length) if self.poison else []
        if not leaving:
            return
        own = self.table.own_streams[row]
        self.table.fences[row].order(own)
        with suppress(DriverError):
            for arena, begin, end in leaving:
                self._driver.fill(arena.table.address_of(row, begin), (end - begin) * self._page_size, POISON, own)
        self.table.fences[row] |= Fence.after(self._driver, [own])

    def _is_captured(self, rows: list[int]) -> bool:
        """Whether a graph is being captured, where nothing can be filled."""
        try:
            self._fence_after(rows)
        except StreamCaptureError:
            return True
        return False

    def _unclean(self, row: int) -> Iterator[tuple[int, int]]:
        """Addresses and bytes of the pages that a row begins to use with what it claims."""
        old_end = self.table.length[row]
        for (arena, _), (first, end), (_, used_end) in zip(self.ranges, self._used(row), self._spans(0, old_end)):
            if self.zero_tail and not old_end and self._claims[row][1]:
                end = arena.table.ready[row]  # a dense kernel reads all that the row has adopted
            first = max(first, used_end)
            if end > first:
                yield arena.table.address_of(row, first), (end - first) * self._page_size

    def _refresh(self, row: int) -> None:
        """Works out a row's capacity: the tokens that it can grow to without a look at its pages."""
        live, (start, length) = self.table.is_live(row), self._extent(row)
        capacity = self.max_seq_len
        whole = True
        for (arena, record), (_, used_end) in zip(self.ranges, self._spans(start, length)):
            table = arena.table
            end = table.ready[row]
            # Pages that do not reach its first token are what a growth has left that did not happen.
            whole &= table.reaches(row, start * record // self._page_size)
            whole &= not (self.zero_tail and table.has_hole(row))
            if table.first[row] and not live:
                end = 0  # nobody can adopt it
            elif self.scrub and live:
                end = min(end, used_end)  # behind are another's bytes
            capacity = min(capacity, max(end * self._page_size // record - self.overread, 0))
        if live and not whole:
            capacity = length  # so that the next growth repairs it
        self.table.capacity[row] = capacity
        self.table.wake[row] = capacity - self.lookahead // 2 if live else capacity

    # ------------------------------------------------------------------ ahead of need

    def ring(self) -> None:
        """Has pages mapped ahead, where that is wanted."""
        if self.lookahead and self.pool.mapper:
            self.pool.mapper.ring()

    def _ahead(self) -> Iterator[tuple[Arena, int, int]]:
        """Arenas, rows, and the page up to which they are to be mapped ahead; the neediest first."""
        for row, tokens in policy.growing(self.table, self.lookahead, self.max_seq_len):
            for (arena, _), (first, end) in zip(self.ranges, self._spans(self.table.start[row], tokens)):
                table = arena.table
                if table.reaches(row, first) and table.ready[row] == table.end[row] < end:
                    yield arena, row, end

    def pages_ahead(self, enough: int) -> int:
        """Pages that are still to be mapped ahead, counted up to `enough`."""
        pages = 0
        for arena, row, end in self._ahead():
            pages += end - arena.table.end[row]
            if pages >= enough:
                return enough
        return pages

    def plan_ahead(self, change: Change, pages: int) -> int:
        """Plans to map up to so many pages ahead, of frames that are free; returns how many."""
        pages = min(pages, len(self.pool.frames.free), self.pool.idle(self.account))
        planned = 0
        for arena, row, end in self._ahead():
            end = min(end, arena.table.end[row] + pages - planned)
            count = end - arena.table.end[row]
            if not count:
                break
            frames = self.pool.take(self.account, count)
            if self.pool.tenants and (self.pool.frames.tenants[frames] != self.table.tenant[row]).any():
                self.pool.give(self.account, frames)  # to be zeroed by whoever grows
                continue
            arena.plan_growth(change, row, end, frames)
            planned += count
        return planned

    def plan_release(self, change: Change, pages: int) -> int:
        """Plans to unmap up to so many pages of parked rows that nothing may touch, oldest first; returns how many."""
        planned = 0
        for row in self.table.parked:
            if planned < pages and self.table.fences[row].passed():
                for arena, _ in self.ranges:
                    planned += arena.plan_release(change, row, pages - planned)
            elif planned:
                break
        return planned

    def commit_ahead(self, change: Change) -> None:
        """Brings the books of rows up to what a change has done."""
        for row in {row for arena, _ in self.ranges for row in change.rows_of(arena.table)}:
            if self.table.is_live(row):
                self._retire_front(row)
                self._refresh(row)
            else:
                self.table.forget(row)
                self._settle(row)

    # ------------------------------------------------------------------ reclaiming

    def _surplus(self, row: int) -> int:
        """Surplus pages of one row. A row that is just growing may not have all of its used pages yet."""
        surplus = 0
        for (arena, _), (first, end) in zip(self.ranges, self._used(row)):
            table = arena.table
            surplus += table.pages(row) - max(min(end, table.end[row]) - max(first, table.first[row]), 0)
        return surplus

    def _bound_pages(self) -> int:
        """Pages that hold no tokens, and yet nobody else's: those behind rows that may be read to their very end."""
        if not self.zero_tail:
            return 0
        bound = 0
        for row in {*self.table.live, *self._claims}:
            if (self._claims.get(row) or self.table.extents[row])[1]:
                for (arena, _), (_, end) in zip(self.ranges, self._used(row)):
                    bound += max(arena.table.end[row] - max(end, arena.table.first[row]), 0)
        return bound

    def _victims(self) -> Iterator[tuple[int, int]]:
        live = self.table.live_rows()
        lengths = self.table.lengths[live]
        for index, row in enumerate(live.tolist() if self._claims else ()):
            if row in self._claims:
                lengths[index] = self._claims[row][1]
        return policy.victims(self.table, lengths, self._page_tokens, self.max_seq_len, self.zero_tail)

    def reclaim(self, count: int, *, wait: bool = False) -> int:
        """Unmaps up to `count` surplus pages, and gives them to the pool; returns how many.

        Takes those that no work on the device may touch, unless it is to wait for it.
        """
        self.release_abandoned()
        return self._reclaim_from(self._victims(), count, wait)

    def _reclaim_from(self, rows: Iterable[tuple[int, int]], count: int, wait: bool = False) -> int:
        reclaimed = 0
        with self.pool.ranges.reclaiming:
            for row, keep in rows:
                if not self._surplus(row):
                    continue
                if wait:
                    self.table.fences[row].wait()
                if self.table.fences[row].passed():
                    reclaimed += self._unmap_surplus(row, count - reclaimed, keep)
                if reclaimed >= count:
                    break
        return reclaimed

    def _unmap_surplus(self, row: int, count: int, keep: int = 0) -> int:
        """Unmaps up to `count` surplus pages of one row, whose fence has passed; none of its first `keep` tokens.

        Returns:
            how many.
        """
        live = self.table.is_live(row)
        unmapped = 0
        try:
            for (arena, _), (first, end), (_, kept) in zip(self.ranges, self._used(row), self._spans(0, keep)):
                table = arena.table
                if live:
                    unmapped += arena.unmap_front(row, min(first, table.first[row] + count - unmapped))
                unmapped += arena.unmap_back(row, max(end, kept, table.end[row] - (count - unmapped)))
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
        for row in self.table.parked:
            for arena, _ in self.ranges:
                count += arena.table.pages(row)
            if count >= enough:
                break
        return count

    def _supply(self, count: int) -> list[int]:
        """`count` frames: free ones, then retired ones, then new ones, and under pressure any surplus."""
        pool = self.pool
        free = len(pool.frames.free)
        if self.table.retired and count > free:
            self._reclaim_from(policy.retired(self.table, self.max_seq_len), count - free)
        if pool.has_guarantees:
            self._check_allowed(count)
        if count > pool.idle(self.account):
            self._press(count)
        try:
            return pool.take(self.account, count)
        except DriverOutOfMemoryError as error:
            self.release_abandoned()
            self._press(count, error)  # the device has less left than the limit allows
            return pool.take(self.account, count)

    def _press(self, count: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Has others, or other rows, give back what is missing of `count` pages, or raises before it changes anything.

        Idle pages go before those that have to be waited for, our own before others'.
        """
        pool = self.pool

        def missing() -> int:
            return count - (len(pool.frames.free) if cause else pool.idle(self.account))

        if self._parked_pages(missing()) < missing():
            self._check_allowed(count, cause)
        self.reclaim(missing() + self.spare)
        for wait in (False, True):
            if missing() > 0 and wait:
                self.reclaim(missing(), wait=True)
            if missing() > 0:
                pool.reclaim_from_others(self.account, missing(), wait=wait)

    def _check_allowed(self, count: int, cause: DriverOutOfMemoryError | None = None) -> None:
        """Raises `OutOfPagesError`, where not even all surplus would do for `count` pages more, which are claimed."""
        allowed = self.pool.allowed(self.account)
        if cause:
            allowed = min(allowed, self.pool.allowed(self.account) - self.pool.limit + self.pool.frames.existing)
        kept = self.kept_pages - count
        if allowed < kept + count:
            limit = str(cause) if cause else f"{allowed} are the most that this cache can have"
            raise OutOfPagesError(
                f"asked for {count} more pages of {self._page_size} bytes; {allowed - kept} can be had: {limit}, and "
                f"{kept} pages hold tokens of live sequences. Free or truncate sequences, or make the cache "
                "with a larger max_bytes",
                requested=count,
                available=allowed - kept,
            ) from cause
