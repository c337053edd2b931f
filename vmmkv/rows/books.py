"""The books of rows: what each holds, in pages, and what follows from that: capacities, and the lists that rows are on.

A page is *used* when tokens of a live sequence lie in it, or in another page of its frame. All other mapped pages are
*surplus*: parked and retired rows, what lies behind a truncated or adopted sequence, lookahead, fronts before `start`.
Surplus pages cost nothing to use again where they are and are unmapped only when somebody else needs them.

Pages are counted by row, and in all. Rows that have changed since are counted again when somebody asks (`catch_up`), so
that to grow within a row's capacity takes one comparison with its alert, and no question looks at all rows.

Who changes a row says so here, by what has changed:

    its length, inside of its pages    `RowTable.stir`: it is counted again when somebody asks
    its pages, its start, or sharing   `refresh`: its capacity is worked out at once, and it is stirred
    that, where nobody has it          `settle`: it goes on the list where it belongs, too

Nothing here maps, unmaps or touches memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..memory.accounts import Account
from ..memory.pool import FramePool
from ..space.arena import Arena
from . import policy
from .policy import Span
from .scales import SequenceScales
from .table import Place, RowTable


@dataclass(frozen=True)
class Rules:
    """What a cache promises of its rows.

    Attributes:
        max_seq_len: tokens per row.
        scrub: pages hold nothing of another sequence when one begins to use them.
        zero_tail: live rows with tokens may be read to their very end; implies `scrub`.
        lookahead: tokens that a mapper maps behind each sequence; 0 without one.
        overread: tokens that are always mapped behind each sequence.
        large: whether large frames may lie under tokens.
        poison: for debugging: pages are filled with what is no number in any floating-point format, before a sequence
            has them (unless they are zeroed) and when it leaves them. Not with `zero_tail`, where kernels read such
            pages.
    """

    max_seq_len: int
    scrub: bool = False
    zero_tail: bool = False
    lookahead: int = 0
    overread: int = 0
    large: bool = False
    poison: bool = False

    @cached_property
    def cleans(self) -> bool:
        """Whether pages are filled before a sequence has them, so that what lies behind its end is not its own."""
        return self.scrub or self.zero_tail or self.poison


@dataclass(eq=False, slots=True)
class Count:
    """Pages of a live row, or of all: that are used, that are mapped, and behind those that are used, that others can
    have, and that they cannot, but for shared ones; and of the former those that it may grow into without asking."""

    used: int
    mapped: int
    spare: int
    bound: int
    open: int


NOTHING = Count(0, 0, 0, 0, 0)


class Books:
    """See above.

    Args:
        pool: where frames come from and go to.
        account: what the cache may have of it.
        table: the rows.
        ranges: per range of the layout its arena, and the bytes of a token record in it.
        rules: what the cache promises.
        scales: what rows have beside their pages, if anything.
    """

    def __init__(
        self,
        pool: FramePool,
        account: Account,
        table: RowTable,
        ranges: list[tuple[Arena, int]],
        rules: Rules,
        scales: SequenceScales | None,
    ) -> None:
        self.pool, self.account = pool, account
        self.table, self.ranges, self.rules, self.scales = table, ranges, rules, scales
        self.page_size, self._frames = pool.page_size, pool.frames
        self.forget_counts()
        self.claims: dict[int, tuple[int, int]] = {}
        """While room is made for rows: what these are to hold, so that their pages are no surplus."""
        self.under_way = 0
        """Pages that nobody claims, and that rows are about to have: a change maps them just now, or will."""
        self.is_short = False
        """Whether what lay behind live rows had to be taken back, since memory was last there to be made."""
        self.unsettled: set[int] = set()
        """Rows whose tokens are just being changed into those of others: who is interrupted then has neither."""
        self.duplicates = 0
        """How many pages too many come of counting the pages of each live row, where several use the same."""
        self.zero_frames: list[int] = []
        """The one frame of the zeros behind rows, where there are any."""
        self.tables = [arena.table for arena, _ in ranges]
        """Per range what lies in it."""
        self.records = [record for _, record in ranges]
        """Per range the bytes of a token record."""
        self._no_spans: list[Span] = [(0, 0)] * len(ranges)
        self.page_tokens = -(-self.page_size // min(self.records))
        """Tokens that a page has room for at least in one range."""

    def extent(self, row: int) -> tuple[int, int]:
        """The first token that a row keeps, and its end: now, or as soon as there is room."""
        return self.claims.get(row) or (self.table.start[row], self.table.length[row])

    def spans(self, start: int, length: int) -> list[Span]:
        """Per arena the pages that tokens `[start, length)` of a row lie in, and those behind that may be read."""
        if not length:
            return self._no_spans
        return policy.spans(start, length + self.rules.overread, self.records, self.page_size)

    def touched(self, row: int) -> list[Span]:
        """Per arena the pages of the row that hold tokens, or are about to."""
        return self.spans(*self.extent(row))

    def used(self, row: int) -> list[Span]:
        """Per arena the pages of the row that are used, or are about to be."""
        return self._whole_frames(row, self.touched(row))

    def wanted(self, row: int) -> list[Span]:
        """Per arena the pages of the row that are used, and those behind them that are to be mapped ahead."""
        (tokens,) = policy.wanted(self.table, np.array([row]), self.rules.lookahead, self.rules.max_seq_len).tolist()
        return self._whole_frames(row, self.spans(self.table.start[row], tokens))

    def _whole_frames(self, row: int, spans: list[Span]) -> list[Span]:
        if not self.rules.large or not self._frames.has_large:
            return spans
        return [
            (table.frame_begin(row, first), table.frame_end(row, end)) if first < end else (first, end)
            for table, (first, end) in zip(self.tables, spans)
        ]

    def leaving(self, row: int, start: int, length: int) -> list[tuple[Arena, int, int]]:
        """The pages, arena by arena, that are used now and would not be with this start and length."""
        leaving = []
        for (arena, _), (first, end), (new_first, new_end) in zip(
            self.ranges, self.used(row), self._whole_frames(row, self.spans(start, length))
        ):
            front_end = min(max(new_first, first), end)
            back_first = min(max(new_end, front_end), end)
            leaving += [(arena, begin, stop) for begin, stop in ((first, front_end), (back_first, end)) if begin < stop]
        return leaving

    def leave(self, row: int, leaving: list[tuple[Arena, int, int]]) -> int:
        """Counts that a sequence leaves pages; returns how many."""
        count = 0
        for arena, begin, end in leaving:
            count += end - begin
            arena.table.count_use(row, begin, end)
            if arena.table.is_shared(row):
                self.duplicates -= arena.table.leave(row, begin, end)
        return count

    def use(self, row: int) -> None:
        """Counts a live row among the users of its pages, after an interruption."""
        for table, span in zip(self.tables, self.used(row)):
            if table.is_shared(row):
                self.duplicates += table.use(row, *span)

    def is_shared(self, row: int) -> bool:
        """Whether pages of a row may lie in others, too."""
        return self._frames.has_shared and any(table.is_shared(row) for table in self.tables)

    def shares_surplus(self, row: int) -> bool:
        """Whether surplus pages of a row may lie in others, too."""
        return self._frames.has_shared and any(
            table.own[row] > end or table.first[row] < min(first, table.own[row])
            for table, (first, end) in zip(self.tables, self.used(row))
        )

    def has_pages(self, row: int) -> bool:
        """Whether anything is mapped in a row."""
        return any(table.pages(row) for table in self.tables)

    def surplus(self, row: int) -> int:
        """Surplus pages of one row. A row that is just growing may not have all of its used pages yet."""
        surplus = 0
        for table, (first, end) in zip(self.tables, self.used(row)):
            surplus += table.pages(row) - max(min(end, table.end[row]) - max(first, table.first[row]), 0)
        return surplus

    # ------------------------------------------------------------------ counts, kept of rows that have changed since

    def catch_up(self) -> None:
        """Counts the pages of rows that have changed since, and says which of them are needy."""
        table = self.table
        for row in table.stirred:
            if table.length[row] > table.brink[row]:
                self._count(row)
            if self.rules.lookahead and (
                table.length[row] > table.wake[row] or table.expected[row] > table.capacity[row]
            ):
                table.needy[row] = None
        table.stirred.clear()

    def _count(self, row: int) -> None:
        """Counts a row's pages, and says what others may have of them."""
        table, count, brink, spare = self.table, NOTHING, self.rules.max_seq_len, 0
        if table.is_live(row):
            count, brink, spare = self._look(row, table.start[row], table.length[row])
        if count.spare:
            table.spare.put(row, spare)
        else:
            table.spare.remove(row)
        table.brink[row] = brink
        table.alert[row] = min(brink, table.wake[row])
        before, self._counts[row] = self._counts[row], count
        self._used += count.used - before.used
        self._mapped += count.mapped - before.mapped
        self._bound += count.bound - before.bound
        self._open += count.open - before.open

    def _look(self, row: int, start: int, length: int) -> tuple[Count, int, int]:
        """The pages of a live row that keeps tokens `[start, length)`; the tokens that those it uses have room for; and
        how many are behind those that it expects to use."""
        used = mapped = behind = open_pages = spare = 0
        brink, expected = self.rules.max_seq_len, self.table.expected[row]
        expected += self.rules.overread if expected else 0
        spans = self._whole_frames(row, self.spans(start, length))
        for (arena, record), (first, end) in zip(self.ranges, spans):
            row_first, row_end = arena.table.first[row], arena.table.end[row]
            used += end - first
            mapped += row_end - row_first
            if row_end > end:
                behind += row_end - max(end, row_first)
                # Where it has no token, the next one uses the whole frame.
                grown = arena.table.frame_begin(row, end) if first == end else end
                open_pages += max(row_end - max(grown, row_first, arena.table.own[row]), 0)
                expected_end = -(-expected * record // self.page_size)
                spare += max(row_end - max(end, row_first, expected_end), 0)
            brink = min(brink, max(end * self.page_size // record - self.rules.overread, 0))
        if self.rules.zero_tail and length:
            return Count(used, mapped, 0, open_pages, 0), brink, spare
        if (away := self.table.suspended.get(row)) and away.place is not Place.COMING:  # it does not grow
            open_pages = 0
        return Count(used, mapped, behind, 0, open_pages), brink, spare

    def forget_counts(self) -> None:
        """Begins to count, with rows that have nothing or are about to be refreshed."""
        self._counts = [NOTHING] * self.table.num_rows
        self._used = self._mapped = self._bound = self._open = 0  # of all
        self.under_way = 0

    @property
    def parked_pages(self) -> int:
        """Pages of rows that nobody has: what is usually there to be reclaimed."""
        self.catch_up()
        return self.account.taken - len(self.zero_frames) - self._mapped

    @property
    def used_pages(self) -> int:
        """Pages that hold tokens of live sequences, or are about to, in whole frames; each once."""
        self.catch_up()
        used = self._used - self.duplicates
        if self.claims:
            rows, extents = np.array(list(self.claims)), np.array(list(self.claims.values()))
            used += self.pages_used(rows, extents) - sum([self._counts[row].used for row in self.claims])
        return used

    def token_bytes(self) -> int:
        """Bytes that hold tokens of live sequences; those of several of them once."""
        nbytes = self.table.tokens * sum(self.records)
        for arena, record in self.ranges if self.duplicates else []:
            spans = [self._bytes_held(arena, record, row) for row in self.table.live]
            begins, ends = np.concatenate(spans, axis=1)
            order = np.argsort(begins, kind="stable")
            begins, ends = begins[order], ends[order]
            covered = np.maximum.accumulate(np.concatenate([[0], ends[:-1]]))  # by those that begin before
            nbytes -= int((np.minimum(ends, covered) - begins).clip(0).sum())
        return nbytes

    def _bytes_held(self, arena: Arena, record: int, row: int) -> npt.NDArray[np.int64]:
        """Of pages that a row may share, where in physical memory its tokens begin and end: `[2, pages]` bytes, as if
        pages lay one after another by their numbers."""
        table, size = arena.table, self.page_size
        pages = table.pages_in(row, 0, table.own[row]).astype(np.int64)
        places = (np.arange(len(pages)) + table.first[row]) * size
        held: npt.NDArray[np.int64] = np.clip(self.table.extents[row, :, None] * record - places, 0, size)
        held += pages * size
        return held

    def pages_used(self, rows: npt.NDArray[np.int64], extents: npt.NDArray[np.int64]) -> int:
        """Pages that tokens lie in, or would, in whole frames, row by row; `extents` are starts and lengths,
        `[rows, 2]`."""
        used = 0
        spans = policy.page_spans(extents, self.records, self.page_size, self.rules.overread)
        for table, (first, end) in zip(self.tables, spans):
            used += int((end - first).sum())
            if self.rules.large:
                held = first < end
                used += table.ragged_pages(rows[held], first[held], before=True)
                used += table.ragged_pages(rows[held], end[held], before=False)
        return used

    def bound_pages(self) -> int:
        """Pages that hold no tokens, and yet nobody else's: those behind rows that may be read to their very end."""
        if not self.rules.zero_tail:
            return 0
        self.catch_up()
        claimed = [self._look(row, *extent)[0].bound - self._counts[row].bound for row, extent in self.claims.items()]
        return self._bound + sum(claimed) + self._shared_behind()

    def _shared_behind(self) -> int:
        """Pages behind rows that may be read to their very end which several may have there, and nobody uses."""
        pages = set[int]()
        rows = self.table.live if self._frames.has_shared else ()
        for row in [row for row in rows if self.extent(row)[1]]:
            for table, (_, end) in zip(self.tables, self.used(row)):
                begin, stop = max(end, table.first[row]), table.own[row]
                if begin < stop:
                    pages.update(table.pages_in(row, begin, stop).tolist())
        return sum(not self._frames.users[page] for page in pages)

    def refresh(self, row: int) -> None:
        """Works out a row's capacity: the tokens that it can grow to without a look at its pages."""
        rows, rules, size = self.table, self.rules, self.page_size
        live, capacity = rows.is_live(row), rules.max_seq_len
        start, length = self.extent(row)
        for arena, record in self.ranges:
            table = arena.table
            first, ready = table.first[row], table.ready[row]
            if live:
                # Pages that do not reach its first token are what a growth has left that did not happen.
                whole = first <= start * record // size <= table.end[row]
                whole &= table.own[row] <= max(length * record // size, first)  # it may be written behind it
                if not whole or (rules.zero_tail and table.has_hole(row)):
                    capacity = length  # so that the next growth repairs it
                    break
                if rules.cleans:
                    used = length + rules.overread if length else 0
                    ready = min(ready, -(-used * record // size))  # behind are another's bytes
            elif first:
                ready = 0  # nobody can adopt it
            room = ready * size // record - rules.overread
            if room < capacity:
                capacity = max(room, 0)
        rows.capacity[row] = capacity
        rows.wake[row] = rows.alert[row] = capacity - rules.lookahead // 2 if live else capacity
        if row in rows.suspended:
            rows.capacity[row], rows.wake[row] = -1, 0  # nobody grows it before it is back
        rows.stir(row)

    def retire_front(self, row: int) -> None:
        """Notes whether a live row has pages in front of its first token: nobody will ever use them there."""
        if self.extent(row)[0] and any(
            table.first[row] < min(first, table.end[row]) for table, (first, _) in zip(self.tables, self.used(row))
        ):
            self.table.fronts[row] = None
        else:
            self.table.fronts.pop(row, None)

    def settle(self, row: int) -> None:
        """Works out what a row without a sequence is good for: to be adopted, or empty, or nothing."""
        table = self.table
        if not self.has_pages(row):
            for each in self.tables:
                each.begin_at(row, 0)
            self.refresh(row)
            table.parked.remove(row)
            table.retired.pop(row, None)
            table.kept.pop(row, None)
            table.empty[row] = None
            return
        self.refresh(row)
        if row in table.kept:
            return
        if all(each.first[row] == 0 and each.have_alone(row) for each in self.tables):
            table.retired.pop(row, None)
            table.parked.put(row, table.capacity[row])
        else:
            table.parked.remove(row)
            table.retired[row] = None

    def vacate(self, row: int) -> None:
        """Puts a row that nobody has any more on the list where it belongs."""
        self.table.disown(row)
        self.settle(row)

    @property
    def kept_pages(self) -> int:
        """Pages that others cannot have."""
        return self.used_pages + len(self.zero_frames) + self.bound_pages()

    @property
    def firm_pages(self) -> int:
        """Pages that are used, or that live rows may grow into without asking."""
        kept = self.kept_pages  # has caught up
        claimed = [self._look(row, *extent)[0].open - self._counts[row].open for row, extent in self.claims.items()]
        return kept + self._open + sum(claimed) + self.under_way

    def hide_claims(self) -> dict[int, tuple[int, int]]:
        """Begins a change for what rows claim, while others go on: nobody but who grows is to know of the claims, which
        are returned, but where anything is guaranteed, the pages that they make firm count. (Who is interrupted has the
        books worked out anew.)"""
        claims, guaranteed = self.claims, self.pool.accounts.has_guarantees
        firm = self.firm_pages if guaranteed else 0
        self.claims = {}
        self.under_way = firm - self.firm_pages if guaranteed else 0
        return claims

    def show_claims(self, claims: dict[int, tuple[int, int]]) -> None:
        """Ends it."""
        self.claims, self.under_way = claims, 0
