"""Ahead of need: what a mapper may do for rows while they are used.

It takes frames that are free, for pages behind live rows, and unmaps the pages of parked rows that nothing may touch.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..memory.pool import Account, FramePool
from ..space.arena import Arena
from ..space.change import Change
from . import policy
from .books import Books


class Ahead:
    """What `vmmkv.space.mapper.Grower` asks of a cache.

    Args:
        pool: where frames come from and go to.
        account: what the cache may have of it.
        books: what its rows hold.
    """

    def __init__(self, pool: FramePool, account: Account, books: Books) -> None:
        self._pool, self._account, self._books, self._table = pool, account, books, books.table

    @property
    def lookahead(self) -> int:
        """Tokens that are to be mapped behind each sequence."""
        return self._books.rules.lookahead

    def _ahead(self) -> Iterator[tuple[Arena, int, int]]:
        """Arenas, rows, and the page up to which they are to be mapped ahead; the neediest first."""
        for row, tokens in policy.growing(self._table, self.lookahead, self._books.rules.max_seq_len):
            for (arena, _), (first, end) in zip(self._books.ranges, self._books.spans(self._table.start[row], tokens)):
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
        pages = min(pages, len(self._pool.frames.free), self._pool.idle(self._account))
        planned = 0
        for arena, row, end in self._ahead():
            end = min(end, arena.table.end[row] + pages - planned)
            count = end - arena.table.end[row]
            if not count:
                break
            frames = self._pool.take(self._account, count)
            if self._pool.tenants and (self._pool.frames.tenants[frames] != self._table.tenant[row]).any():
                self._pool.give(self._account, frames)  # to be zeroed by whoever grows
                continue
            arena.plan_growth(change, row, end, frames)
            planned += count
        return planned

    def plan_release(self, change: Change, pages: int) -> int:
        """Plans to unmap up to so many pages of parked rows that nothing may touch, oldest first; returns how many."""
        planned = 0
        for row in self._table.parked:
            if planned < pages and self._table.fences[row].passed():
                for arena, _ in self._books.ranges:
                    planned += arena.plan_release(change, row, pages - planned)
            elif planned:
                break
        return planned

    def commit_ahead(self, change: Change) -> None:
        """Brings the books of rows up to what a change has done."""
        for row in {row for arena, _ in self._books.ranges for row in change.rows_of(arena.table)}:
            if self._table.is_live(row):
                self._books.retire_front(row)
                self._books.refresh(row)
            else:
                self._table.forget(row)
                self._books.settle(row)
