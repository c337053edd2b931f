"""Ahead of need: what a mapper may do for rows while they are used.

It takes frames that are free, for pages behind live rows. It unmaps spare pages, which lie behind sequences that began
on longer rows than they need, and the pages of rows that nobody has and nothing may touch; where there are none, what
is kept for sequences to come gives way. What is free and was another tenant's is zeroed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ..memory.frames import LARGE
from ..space.arena import Arena
from ..space.change import Change
from ..space.mapper import CHUNK, MADE, Lack
from . import policy
from .books import Books
from .keeping import Keeping
from .scrubbing import Scrubbing, Wish

WINDOW = 4 * CHUNK
"""Free frames of each size, among which a tenant's row looks for those that it may read."""


class Ahead:
    """What `vmmkv.space.mapper.Grower` asks of a cache.

    Args:
        books: what its rows hold.
        keeping: who gives up what is only kept for sequences to come.
        scrubbing: zeroes frames.
    """

    def __init__(self, books: Books, keeping: Keeping, scrubbing: Scrubbing) -> None:
        self._pool, self._account, self._books, self._table = books.pool, books.account, books, books.table
        self._keeping, self._scrubbing = keeping, scrubbing
        self._lookahead_pages = sum(end for _, end in books.spans(0, self.lookahead)) + len(books.ranges)
        """At most."""
        self._table.urgent = self.lookahead // 4

    @property
    def lookahead(self) -> int:
        """Tokens that are to be mapped behind each sequence."""
        return self._books.rules.lookahead

    def plan_ahead(self, change: Change, frames: int) -> Lack:
        """Plans to map up to so many frames ahead, of those that are free; returns what lacks of them, up to `MADE`."""
        self._books.catch_up()
        self._scrubbing.wishes.clear()
        lack_large = lack_single = 0
        firm = self._pool.accounts.headroom(self._account)
        firm -= change.pages  # which are another's: they are in no books yet
        spare = sum(self._table.spare.size(row) - self._lookahead_pages for row in self._spare_rows())
        reach = self._reach(firm)
        self._table.urgent = min(reach // 2, self.lookahead // 4)
        for arena, row, begin, end in self._needs(reach):
            room, short = frames - change.frames - self._scrubbing.wished, MADE - lack_large - lack_single
            if min(room, short, firm + spare) <= 0:
                break
            pages = max(min(end - begin, firm), 0)
            behind = min(end - begin - pages, max(spare, 0))  # firm pages: what goes of them is headroom
            lack_single, spare = lack_single + min(behind, short), spare - behind
            wanted = policy.large_frames(pages, self._table.start[row]) if self._books.rules.large else 0
            large, single = self._available(pages, wanted, room)
            lack_large += min(wanted - large, short)
            if large == wanted:
                lack_single += min(pages - large * LARGE - single, short)
            if large + single:
                self._plan(change, arena, row, large, single)
            firm -= pages
            if change.frames and lack_large + lack_single and not self._pool.frames.free_pages:
                break  # nothing is made before the next look
        return Lack(0, 0) if self._scrubbing.is_busy else Lack(lack_large, lack_single)  # some are about to be free

    def _needs(self, reach: int) -> Iterator[tuple[Arena, int, int, int]]:
        """Arenas, rows, where their pages end, and the page up to which they are to be mapped so many tokens ahead; the
        neediest first."""
        books, awake = self._books, policy.awake(self._table)
        if len(awake) < len(self._table.needy):
            self._table.needy = dict.fromkeys(awake.tolist())
        rows, tokens = policy.growing(self._table, awake, reach, books.rules.max_seq_len)
        for row, length in zip(rows.tolist(), tokens.tolist()):
            for (arena, _), (first, end) in zip(books.ranges, books.spans(self._table.start[row], length)):
                table = arena.table
                if table.reaches(row, first) and table.ready[row] == table.end[row] < end:
                    yield arena, row, table.end[row], end

    def _reach(self, firm: int) -> int:
        """Tokens ahead of each row: the lookahead, but a quarter of a page where there is not enough for all, or some
        of it had to be taken back, so that what is idle stays free for prompts; `firm`: pages that rows may have
        firmly, beside those that they have so."""
        books, accounts, live = self._books, self._pool.accounts, len(self._table.live)
        pages = live * sum(end for _, end in policy.spans(0, self.lookahead, books.records, books.page_size))
        idle = accounts.idle(self._account)
        books.is_short &= accounts.room < pages
        is_tight = books.is_short or (idle < pages and idle + books.parked_pages < pages)
        is_tight |= firm < pages
        return min(-(-books.page_tokens // 4), self.lookahead) if is_tight else self.lookahead

    def _available(self, pages: int, wanted: int, frames: int) -> tuple[int, int]:
        """Large frames, and single ones behind them, for up to so many pages, of those that are free."""
        free, idle = self._pool.frames, max(self._pool.accounts.idle(self._account), 0)
        large = min(wanted, len(free.free_large), frames, idle // LARGE)
        if large < wanted and min(idle, self._pool.accounts.room) >= LARGE:
            return large, 0  # more will be made
        return large, min(pages - large * LARGE, len(free.free), frames - large, idle - large * LARGE)

    def _plan(self, change: Change, arena: Arena, row: int, large: int, single: int) -> None:
        """Plans to put free frames behind what a row has; those that hold another tenant's bytes are zeroed first."""
        pool, table, tenant = self._pool, arena.table, self._table.tenant[row]
        if pool.tenants:
            clean_large, clean = pool.frames.bring_forward(tenant, WINDOW)
            wish = Wish(tenant, max(large - clean_large, 0), max(single - clean, 0))
            if wish.large or wish.single:
                self._scrubbing.wishes.append(wish)
            large, single = large - wish.large, 0 if wish.large else single - wish.single
        supply = pool.take(self._account, large * LARGE + single, large)
        change.map(table, row, table.end[row] + large * LARGE + single, supply, large)

    def plan_release(self, change: Change, pages: int) -> int:
        """Plans to unmap up to so many pages that nothing may touch: spare ones, then of rows that nobody has, retired
        ones before parked ones, oldest first; returns how many. Where there are no such rows, what is kept gives way,
        and what of it lay on no row is free at once."""
        planned = self._plan_spare(change, pages)
        if not planned and not self._table.parked and not self._table.retired:
            before = self._pool.frames.taken
            self._keeping.keeper.give_way(pages)
            planned = before - self._pool.frames.taken
        for row in chain(self._table.retired, self._table.parked):
            if planned < pages and self._table.fences[row].passed():
                for arena, _ in self._books.ranges:
                    planned += arena.plan_back(change, row, 0, pages - planned)
            elif planned:
                break
        return planned

    def _plan_spare(self, change: Change, pages: int) -> int:
        """Plans to unmap up to so many spare pages; returns how many."""
        planned = 0
        for row in self._spare_rows():
            if planned >= pages:
                break
            if self._table.fences[row].passed() and not self._books.shares_surplus(row):
                for (arena, _), (_, end) in zip(self._books.ranges, self._books.wanted(row)):
                    planned += arena.plan_back(change, row, end, pages - planned)
                self._books.refresh(row)  # nobody is to grow there meanwhile
        return planned

    def _spare_rows(self) -> Iterator[int]:
        """Live rows with more behind them than they expect to need, and than a lookahead."""
        table = self._table
        for row in [] if self._books.rules.zero_tail else table.spare.largest():
            if table.spare.size(row) <= self._lookahead_pages:
                return
            if table.length[row] or table.expected[row]:
                yield row

    def commit_ahead(self, change: Change) -> None:
        """Brings the books of rows up to what a change has done."""
        for row in {row for table in self._books.tables for row in change.rows_of(table)}:
            if self._table.is_live(row):
                self._books.refresh(row)
            else:
                self._table.forget(row)
                self._books.settle(row)
