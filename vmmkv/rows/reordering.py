"""Reordering: rows that come to hold what other rows held, as beams do, by copying or by sharing.

    a <- b <- c    chains: first a, which nobody reads, then b
    a <- b <- a    circles: a part of a is kept aside, then b goes to a, and the part to b; part after part

Where two rows lie on the same frames from their first pages on, those stay. Behind them a row either copies, to pages
that it has to itself, or lets go of what it has and begins as the other does, as a fork would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from ..driver.fence import Fence, wait_for_device
from ..errors import DriverOutOfMemoryError, UnsupportedError, VmmkvError
from ..memory.frames import LARGE
from ..memory.monitor import at_once
from ..space.arena import Arena
from ..space.page_table import PageTable
from ..space.undo import Undo
from .books import Books
from .growing import Growing
from .keeping import Keeping
from .policy import MAKE, MAP, Span
from .reclaiming import Reclaimer
from .sharing import Sharing

Shrink = Callable[[int, int, int], None]
"""Says which tokens a live row keeps: `Rows.shrink`."""
Pages = dict[int, list[int]]
"""By row a page of each range."""


class Move(NamedTuple):
    """What a row is to hold.

    Attributes:
        row, source: it, and the row that holds that now.
        common: per arena the page up to which their frames are the same.
        splits: per arena the pages of the source on whose frames it is to begin, as in `Sharing.splits`; None: it
            copies what lies behind `common`.
        spared: pages that it would not have to itself then, had it shared all that it could.
    """

    row: int
    source: int
    common: list[int]
    splits: list[Span] | None = None
    spared: int = 0


class Reordering:
    """See above.

    Args:
        books: what its rows hold.
        keeping: who is told what rows hold now.
        reclaimer: gives pages.
        growing: maps them.
        sharing: has rows lie on the same ones.
    """

    def __init__(
        self, books: Books, keeping: Keeping, reclaimer: Reclaimer, growing: Growing, sharing: Sharing
    ) -> None:
        self._pool, self._account, self._books, self._table = books.pool, books.account, books, books.table
        self._keeping, self._reclaimer, self._growing, self._sharing = keeping, reclaimer, growing, sharing
        self._driver = books.pool.driver

    def reorder(self, sources: dict[int, int], share: bool, copy: bool, shrink: Shrink) -> None:
        """Has each row hold what its source held before.

        Args:
            share: whether rows may come to lie on the same frames.
            copy: whether one may copy what it could share.
            shrink: writes down what rows keep.

        Raises:
            OutOfPagesError, DriverOutOfMemoryError, UnsupportedError, StreamCaptureError: all rows hold what they did.
                Those of a circle may have pages of their own where they shared some, if copies were made before that:
                see `Sharing.make_own_from` and `_own_circles`.
            DriverError: either that, or the rows that were to change are nobody's any more.
        """
        sources = {row: source for row, source in sources.items() if row != source}
        if not sources:
            return
        rows = {*sources, *sources.values()}
        self._check_tenants(sources)
        fence = self._table.fence_after(self._driver, rows)
        chains, circles = _in_order(sources)
        turning = {row for circle in circles for row in circle}
        alone = turning if share else turning | {*sources.values()}
        own = self._ends(circles, sources)
        turns = [self._turn(circle, sources, own) for circle in circles]
        scratch = self._scratch(turns)
        if any(page < table.own[row] for row in own for table, page in zip(self._books.tables, own[row])):
            moves = [*self._plan(chains, sources, alone, copy, own), *chain(*turns)]
            self._sharing.check_parts(own, self._claims(moves), sum(map(self._missing, moves)))
            turns = self._own_circles(circles, sources, own)
        moves = self._plan(chains, sources, alone, copy, own)
        self._prepare([*moves, *chain(*turns)])
        current = self._driver.current_stream()
        for fenced in (fence, *(self._table.fences[row] for row in rows)):  # and who reads on other streams
            fenced.order(current)
        self._books.unsettled = set(sources)
        try:
            for move in moves:
                self._move(move, shrink)
            for turn in turns:
                self._take_turns(turn, scratch, shrink)
            self._order_behind(rows)
        except VmmkvError:
            with suppress(VmmkvError):
                wait_for_device(self._driver)
            for row in sources:
                self._sharing.lose(row)
            self._books.unsettled = set()
            raise
        self._books.unsettled = set()

    def _check_tenants(self, sources: dict[int, int]) -> None:
        tenant = self._table.tenant
        if any(tenant[row] != tenant[source] for row, source in sources.items()):
            raise UnsupportedError(
                "asked for tokens of another tenant's sequence; what a tenant wrote is never read from others' rows. "
                "Reorder the sequences of each tenant by themselves"
            )

    # ------------------------------------------------------------------ what is to be done

    def _ends(self, circles: list[list[int]], sources: dict[int, int]) -> Pages:
        """By row that takes another's place, the page in each range up to which all of them have the same frames;
        behind it none is to have another's."""
        ends = {}
        for circle in circles:
            same = [min(pages) for pages in zip(*(self._common(row, sources[row], {}) for row in circle))]
            for row in circle:
                places = zip(self._books.tables, same, self._books.used(row))
                ends[row] = [table.frame_begin(row, max(page, first)) for table, page, (first, _) in places]
        return ends

    def _own_circles(self, circles: list[list[int]], sources: dict[int, int], own: Pages) -> list[list[Move]]:
        """Has rows that take each other's place have what they will write to for their own; returns their moves.

        Raises:
            OutOfPagesError, DriverError: as in `Sharing.make_own_from`.
            UnsupportedError: one cannot hold what another does any more: it has given up its front for copies.
        """
        with Undo() as undo:
            for row, pages in own.items():
                self._sharing.make_own_from(row, pages, undo)
            return [self._turn(circle, sources, own) for circle in circles]

    def _turn(self, circle: list[int], sources: dict[int, int], own: Pages) -> list[Move]:
        """Moves of rows that take each other's place, and have their own from some pages on then.

        Raises:
            UnsupportedError: one cannot hold what another does.
        """
        turn = [Move(row, sources[row], self._common(row, sources[row], own)) for row in circle]
        if not all(self._can_write(move, own[move.row]) for move in turn):
            raise UnsupportedError(
                "asked for sequences to take each other's place, of which one has given its front back "
                "(release_before) and the other begins there; fork one of them, and free it"
            )
        return turn

    def _plan(self, chains: list[int], sources: dict[int, int], alone: set[int], copy: bool, own: Pages) -> list[Move]:
        """Moves of rows in an order in which each is read before it changes.

        Args:
            alone: rows of which nothing may be shared, such as those that will copy to what they have to themselves.
            copy: whether a row may copy what it could share.
            own: by row the page in each range from which on it has its own, or will have.
        """
        shared_ends = {row: [table.own[row] for table in self._books.tables] for row in chains}
        moves = []
        for row in chains:
            source = sources[row]
            common = self._common(row, source, own)
            is_own = all(end <= page for end, page in zip(shared_ends[row], common))
            can_copy = copy and is_own and self._reaches(row, source)
            splits = self._sharing.splits(source)
            if source in alone:
                splits = [(first, first) for first, _ in splits]
            spared = sum(max(split - page, 0) for page, (_, split) in zip(common, splits))
            move = Move(row, source, common, splits, spared)
            if can_copy and not self._should_share(move, source not in sources):
                moves.append(Move(row, source, common, spared=spared))
                continue
            if source in shared_ends:
                shared_ends[source] = [max(end, split) for end, (_, split) in zip(shared_ends[source], splits)]
            moves.append(move)
        return moves

    def _should_share(self, move: Move, lasts: bool) -> bool:
        """Whether a row that could copy had better share what is full, as `KVCache.reorder` says.

        Args:
            lasts: whether the source keeps its tokens.
        """
        row, source, spared = move.row, move.source, move.spared
        copying = sharing = 0
        places = zip(self._books.tables, move.common, self._books.used(source), move.splits or [])
        for table, page, (_, used_end), (_, split) in places:
            copying += used_end - page + MAKE * max(used_end - max(table.end[row], page), 0)
            sharing += MAP * (len(table.frames_in(source, page, split)) if page < split else 0)
            sharing += MAKE * (used_end - max(split, page))
        is_fork = not self._table.length[row]
        return bool(spared) and (is_fork or copying > sharing or (lasts and self._table.debt[row] + spared >= sharing))

    def _common(self, row: int, source: int, own: Pages) -> list[int]:
        """Per arena the page up to which a row has the same frames as a source, from the source's first token on.

        Args:
            own: by row the page from which on it has its own, or will have.
        """
        size, start = self._books.page_size, self._table.start[source]
        pages = []
        for (arena, record), (_, used_end) in zip(self._books.ranges, self._books.used(source)):
            first = arena.table.frame_begin(source, start * record // size)
            pages.append(first + _equal(arena.table, row, source, first, used_end))
        return [min(ends) for ends in zip(pages, *(own[each] for each in (row, source) if each in own))]

    def _reaches(self, row: int, source: int) -> bool:
        """Whether a row's pages lead up to where a source's tokens begin, so that it can hold them."""
        return all(
            table.reaches(row, first) and table.ready[row] == table.end[row]
            for table, (first, _) in zip(self._books.tables, self._books.touched(source))
        )

    def _can_write(self, move: Move, own: list[int]) -> bool:
        """Whether a row that has its own from some pages on has those where a source's tokens begin, and to itself what
        it will copy to."""
        places = zip(self._books.tables, self._books.touched(move.source), move.common, own)
        return all(
            table.first[move.row] <= first and min(table.own[move.row], begin) <= page
            for table, (first, _), page, begin in places
        )

    # ------------------------------------------------------------------ doing it

    def _prepare(self, moves: list[Move]) -> None:
        """Sees to it that there is memory for all moves.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.grow`. Nothing has changed but that
                some of what is missing may be mapped.
        """
        claims = self._claims(moves)
        try:
            at_once(self._growing.grow(claims, [*claims]))
            self._growing.fence_fills(claims)  # for what fails before anything is copied there
            missing = sum(self._missing(move) for move in moves)
            if missing:
                self._books.claims = claims  # nobody is to take back what was mapped for them
                self._books.under_way = missing
                self._reclaimer.afford(missing)
                supply = self._reclaimer.supply(missing, 0)
                self._pool.give(self._account, supply.large + supply.single)
        finally:
            self._books.claims, self._books.under_way = {}, 0
            for row in claims:
                self._books.refresh(row)

    def _claims(self, moves: list[Move]) -> dict[int, Span]:
        """Tokens that rows which copy are to have room for: what they hold, and what they are to hold."""
        extents, claims = self._table.extents, {}
        for move in moves:
            (start, length), (new_start, new_length) = extents[move.row].tolist(), extents[move.source].tolist()
            if move.splits is None:
                claims[move.row] = min(start, new_start), max(length, new_length)
        return claims

    def _missing(self, move: Move) -> int:
        """Pages that a row will need that shares."""
        spans = zip(self._books.used(move.source), move.splits or [])
        return sum(max(used_end - split, 0) for (_, used_end), (_, split) in spans)

    def _move(self, move: Move, shrink: Shrink) -> None:
        """Makes a row hold what another holds that has not changed yet."""
        if move.splits is None:
            for arena, begin, end in self._parts(move):
                self._sharing.copy(arena, move.source, move.row, begin, end)
            self._sharing.copy_scales(move.source, move.row)
            self._table.debt[move.row] += move.spared
            self._keeping.keeper.inherit({move.row: move.source})
            self._settle(move.row, self._table.extents[move.source].tolist(), shrink)
            return
        row = move.row
        self._table.debt[row] = 0
        shrink(row, 0, 0)
        (self._table.fences[row] | self._table.fence_after(self._driver, [row])).wait()
        for (arena, _), page, (first, _) in zip(self._books.ranges, move.common, move.splits):
            kept = arena.table.reaches(row, first) and arena.table.frame_begin(row, page) == page
            arena.unmap_back(row, page if kept else 0)
        self._sharing.fork(move.source, [row], move.splits)
        self._keeping.keeper.inherit({row: move.source})

    def _parts(self, move: Move) -> list[tuple[Arena, int, int]]:
        """What a row copies: bytes of arenas."""
        start, length = self._table.extents[move.source].tolist()
        return [
            (arena, max(page * self._books.page_size, start * record), length * record)
            for (arena, record), page in zip(self._books.ranges, move.common)
        ]

    def _settle(self, row: int, extent: list[int], shrink: Shrink) -> None:
        """Writes down what a row holds now."""
        before = self._table.extents[row].tolist()
        shrink(row, *extent)
        for arena, begin, end in self._books.leaving(row, *before):  # what it had not used before
            if arena.table.is_shared(row):
                self._books.duplicates += arena.table.use(row, begin, end)
        self._books.refresh(row)

    def _scratch(self, turns: list[list[Move]]) -> torch.Tensor:
        """Memory for what turns keep aside. Raises `DriverOutOfMemoryError` where there is none."""
        sizes = [end - begin for turn in turns for _, begin, end in self._parts(turn[-1])]
        nbytes = min(max([0, *sizes]), LARGE * self._books.page_size)
        if turns and self._books.scales:
            nbytes = max(nbytes, self._books.scales.row_bytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._pool.device)
        except (MemoryError, RuntimeError) as error:  # torch raises either
            detail = f"{nbytes} bytes beside the cache, to reorder sequences in a circle"
            raise DriverOutOfMemoryError("torch.empty", type(error).__name__, detail) from error

    def _take_turns(self, turn: list[Move], scratch: torch.Tensor, shrink: Shrink) -> None:
        """Makes rows hold each what the next one holds, and the last what the first one does."""
        extents = [self._table.extents[move.source].tolist() for move in turn]
        aside, step = scratch.data_ptr(), LARGE * self._books.page_size  # of which scratch has room for what it keeps
        for parts in zip(*map(self._parts, turn)):
            arena = parts[0][0]
            address = [arena.table.address_of(move.row, 0) for move in turn]
            for lowest in range(min(begin for _, begin, _ in parts), max(end for *_, end in parts), step):
                spans = [(max(begin, lowest), min(end, lowest + step)) for _, begin, end in parts]
                begin, end = spans[-1]
                if begin < end:
                    self._driver.copy(aside, address[0] + begin, end - begin)
                for move, span in zip(turn[:-1], spans):
                    self._sharing.copy(arena, move.source, move.row, *span)
                if begin < end:
                    self._driver.copy(address[-1] + begin, aside, end - begin)
        if scales := self._books.scales:
            self._driver.copy(aside, scales.address_of(turn[0].row), scales.row_bytes)
            for move in turn[:-1]:
                scales.copy(move.source, move.row)
            self._driver.copy(scales.address_of(turn[-1].row), aside, scales.row_bytes)
        self._keeping.keeper.inherit({move.row: move.source for move in turn})
        for move, extent in zip(turn, extents):
            self._settle(move.row, extent, shrink)

    def _order_behind(self, rows: set[int]) -> None:
        """Has all streams that use rows go on behind what was copied."""
        current = self._driver.current_stream()
        streams = {stream for row in rows for stream in (self._table.own_streams[row], *self._table.streams[row])}
        for stream in streams - {current}:
            Fence.after(self._driver, [current]).order(stream)
        fence = Fence.after(self._driver, [current])
        for row in rows:
            self._table.fence(row, fence)


def _in_order(sources: dict[int, int]) -> tuple[list[int], list[list[int]]]:
    """Rows in an order in which each changes behind all that read it; and those that take each other's place, each
    followed by its source."""
    readers = Counter(sources.values())
    chains = [row for row in sources if not readers[row]]
    for row in chains:
        source = sources[row]
        readers[source] -= 1
        if source in sources and not readers[source]:
            chains.append(source)
    circles, left = [], {row: None for row in sources if readers[row]}
    while left:
        row, _ = left.popitem()
        circle = [row]
        while (row := sources[row]) != circle[0]:
            circle.append(row)
            del left[row]
        circles.append(circle)
    return chains, circles


def _equal(table: PageTable, row: int, source: int, first: int, end: int) -> int:
    """How many of a source's pages `[first, end)`, from the first on, are a row's as well."""
    if not table.reaches(row, first):
        return 0
    end = min(end, table.ready[row], table.end[source])
    here, there = table.pages_in(row, first, end), table.pages_in(source, first, end)
    differing = np.flatnonzero(here != there)
    return int(differing[0]) if len(differing) else len(here)
