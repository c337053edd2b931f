"""Prewarming: memory that is made, and mapped, before anybody asks for it.

Who says how many tokens a sequence usually has gets rows:
 1. So many tokens' pages are mapped in empty rows, one after another, as in the row of a sequence that has ended: large
    frames in front, single pages behind (`policy.large_frames`). Who starts there, and expects as many tokens, makes no
    driver call.
 2. What is left, and what the mapper keeps free anyway (`STOCK`), is free single pages, for who grows beyond that.

Otherwise, and where tenants are kept apart, and whose a row would be nobody knows, all of it is free. Where the cache
has large frames `PROMPTS` of it are such, for prompts; the rest is single pages, for what grows token by token.
"""

from __future__ import annotations

from contextlib import suppress

from ..errors import DriverError
from ..memory.frames import LARGE
from ..space.change import Change
from ..space.mapper import STOCK
from ..space.undo import Undo
from . import policy
from .books import Books

PROMPTS = 3 / 4
"""The part that large frames are: about what they have of sequences of some 1,400 tokens, 16 in a page."""


class Prewarming:
    """See above.

    Args:
        books: what rows hold.
    """

    def __init__(self, books: Books) -> None:
        self._pool, self._account, self._books, self._table = books.pool, books.account, books, books.table

    def prewarm(self, pages: int | None, tokens: int) -> int:
        """Makes memory until the cache has so many pages, or finds them free; returns how many were made.

        Args:
            pages: in all; None: all that is idle.
            tokens: of each row that is mapped; 0: none is.

        Raises:
            OutOfPagesError: so much is not idle.
            DriverError: a call failed, for want of memory, say. What was made is gone.
        """
        accounts, frames = self._pool.accounts, self._pool.frames
        ahead = accounts.idle(self._account) if pages is None else max(pages - self._account.taken, 0)
        accounts.check_idle(self._account, ahead)
        before = frames.existing
        with Undo() as undo:
            undo.push(self._release_beyond, before)
            mapped = self._map(ahead, tokens, undo) if tokens and not self._pool.tenants else 0
            large = 0 if mapped or not self._books.rules.large else PROMPTS
            self._make(max(ahead - mapped - frames.free_pages, 0), large)
        return frames.existing - before

    def _release_beyond(self, pages: int) -> None:
        """Undoes what made memory."""
        self._pool.frames.release(max(self._pool.frames.existing - pages, 0))

    def _make(self, pages: int, part: float) -> None:
        """Makes so many free pages, this part of them in large frames."""
        large = int(part * pages) // LARGE
        self._pool.frames.make(large, LARGE)
        self._pool.frames.make(pages - large * LARGE)

    def _map(self, pages: int, tokens: int, undo: Undo) -> int:
        """Maps so many tokens in each of as many empty rows as there are such pages for; returns how many it took."""
        books, pool = self._books, self._pool
        places = list(zip(books.ranges, books.spans(0, tokens)))
        of_a_row = sum(end for _, (_, end) in places)
        usable = pages - int(STOCK * pages) if books.rules.lookahead else pages
        rows = [*reversed(self._table.empty)][: usable // of_a_row]
        larges = [policy.large_frames(end, 0) if books.rules.large else 0 for _, (_, end) in places]
        fitting = (pool.accounts.room // LARGE) + len(pool.frames.free_large)  # none is made of single pages
        undo.push(self._unmap, rows)
        for row in rows if books.rules.zero_tail else ():
            for (arena, _), (_, end) in places:
                arena.make_way(row, end)
        supply = pool.take(self._account, len(rows) * of_a_row, min(len(rows) * sum(larges), fitting))
        change = Change(pool)
        for row in rows:
            for ((arena, _), (_, end)), large in zip(places, larges):
                change.map(arena.table, row, end, supply, large)
        change.run()
        change.commit()
        self._settle(rows)
        change.check()
        return len(rows) * of_a_row

    def _settle(self, rows: list[int]) -> None:
        """Brings the books of rows that nobody has up to what is mapped."""
        for row in rows:
            self._table.forget(row)
            self._books.settle(row)

    def _unmap(self, rows: list[int]) -> None:
        """Undoes `_map`. What the driver does not unmap stays, as in the row of a sequence that has ended."""
        for row in rows:
            for arena, _ in self._books.ranges:
                with suppress(DriverError):
                    arena.unmap_back(row, 0)
        self._settle(rows)
