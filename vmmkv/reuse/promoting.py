"""Promotion: prefixes that are hit again and again move from single pages to large frames, in the background.

    known pages   |a0 a1 a2 ... a15|a16 ...        a hit maps 16 frames for the first 16 pages
    staging row   |a0 a1 a2 ... a15|L0 ........ L15|   copied on a stream of its own
    known pages   |L0 .......... L15|a16 ...       the next hit maps one

Pages are single ones where a sequence grew by decoding, or where there was no memory for large frames. Rows that lie on
them keep them; who begins next lies on the large frame. Kept rows stay, too, for to adopt one costs no call at all; but
for one that is found by a page that has moved.

Invariants:
 1. It takes a large frame only where one is free, or may still be made, and idle, and gives it back as soon as somebody
    lacks pages. So it is no reason for `OutOfPagesError`, nor for an eviction.
 2. Numbers change in the tree when the copy is done, and in no operation of a user's: what somebody has found stays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..driver.fence import Fence, finished_on_error
from ..driver.table import SET_READ_ACCESS
from ..memory.frames import LARGE
from ..rows.books import Books
from ..rows.laying import Piece
from ..space.arena import Arena
from ..space.change import Change
from ..space.page_table import Run
from .known import Known, Pages
from .node import Ids, Node

HOT = 2
"""Hits after which a prefix moves. A hit on single pages costs the driver about what it costs to move them, so by the
second one that has been paid twice; and for as long as rows lie on the old pages, both are there, which is too much for
what is hit once."""
MOST = 16
"""Prefixes that wait to be moved. More would be known by their next hit."""


class Promotion:
    """See above. It is a `vmmkv.space.mapper.Mover`.

    Args:
        known: what is known of rows.
        books: what its rows hold.
    """

    def __init__(self, known: Known, books: Books) -> None:
        self._known, self._pool, self._account, self._books = known, books.pool, books.account, books
        self._driver = books.pool.driver
        self.pages = 0
        """How many have moved."""
        self.is_copying = False
        """Whether a copy may be under way that no fence knows."""
        self._hot: dict[Node, tuple[Hashable, Ids]] = {}
        self._moving: Pages | None = None
        """What is mapped in the staging row, or about to be, with the frame that it moves to."""
        self._copied: Fence | None = None
        """Passes when it has been copied."""
        self._staging: Arena | None = None

    # ------------------------------------------------------------------ what rows say

    def count(self, node: Node, key: Hashable, ids: Ids, laid: Sequence[list[Piece]]) -> None:
        """Counts a hit, which leads to a node, and was laid so."""
        if any(_single_pages(of) >= LARGE for of in laid):
            path = list(node.path())
            for each in path:
                each.hits += 1
            if path[-1].hits >= HOT and len(self._hot) < MOST:
                self._hot[node] = key, ids

    def give_way(self, wait: bool) -> None:
        """Gives up what is being copied; if it is not to wait, only if that has been copied."""
        if self._is_mapped and self._is_copied(wait):
            self._moving = self._copied = None
            self._stage().unmap_back(0, 0)

    # ------------------------------------------------------------------ what the mapper asks

    @property
    def is_waiting(self) -> bool:
        """Whether there will be something to do without anybody's ringing."""
        return self._copied is not None

    def plan(self, change: Change) -> bool:
        """Plans the next step; returns whether it lacks a large frame, for which there is room.

        Raises:
            DriverError: there can be no staging row, or nobody knows what has been copied. Nothing is planned.
        """
        if self._is_mapped:
            if self._is_copied():
                self._finish()
                self._stage().plan_back(change, 0, 0)
            return False
        pages = self._next()
        if pages is None:
            return False
        lacks = not self._pool.frames.free_large
        if self._pool.accounts.idle(self._account) < LARGE or (lacks and self._pool.accounts.room < LARGE):
            self._hot.clear()  # later hits will say what is hot then
            return False
        if not lacks:
            self._plan_copy(change, pages)
        return lacks

    def commit(self) -> None:
        """Copies what a change has mapped.

        Raises:
            DriverError: it could not be copied, and is not being copied any more.
        """
        if self._moving and not self._copied and self._is_mapped:
            if self._stage().table.ready[0] == 2 * LARGE:
                self._copy(self._moving)
            else:
                self._moving = self._copied = None

    # ------------------------------------------------------------------ copies

    @property
    def _is_mapped(self) -> bool:
        """Whether anything is in the staging row."""
        return self._staging is not None and self._staging.table.end[0] > 0

    def _is_copied(self, wait: bool = False) -> bool:
        """Whether nothing is being copied any more."""
        if self._copied and wait:
            self._copied.wait()
        return not self._copied or self._copied.passed()

    def _next(self) -> Pages | None:
        """What is to be moved next, if anything is."""
        while self._hot:
            node, (key, ids) = next(iter(self._hot.items()))
            for each in self._known.tree.path(key, ids):
                if each.hits >= HOT and (pages := self._pages_of(each, key, ids)):
                    return pages
            del self._hot[node]
        return None

    def _pages_of(self, node: Node, key: Hashable, ids: Ids) -> Pages | None:
        """The first single pages of a node that a large frame can take the place of."""
        for arena, (numbers, record) in enumerate(zip(node.pages, self._books.records)):
            stops = np.flatnonzero(np.concatenate([[True], self._pool.frames.is_large[numbers], [True]]))
            wide = np.diff(stops) > LARGE
            if wide.any():
                at = stops.item(wide.argmax())
                first = node.begin * record // self._books.page_size + at
                return Pages(key, ids, arena, first, numbers[at : at + LARGE])
        return None

    def _plan_copy(self, change: Change, pages: Pages) -> None:
        """Plans to map pages in the staging row, and a free frame behind them."""
        table = self._stage().table
        supply = self._pool.take(self._account, LARGE, 1)
        self._pool.frames.share(pages.numbers)
        change.place(table, Run(0, 0, LARGE), pages.numbers, LARGE, kind=SET_READ_ACCESS, since=0)
        change.place(table, Run(0, LARGE, 2 * LARGE), supply.large, 2 * LARGE, since=LARGE)
        self._moving, self._copied = pages, None

    @cached_property
    def _stream(self) -> Any:
        """The stream of copies."""
        return self._driver.new_stream()

    def _stage(self) -> Arena:
        """The staging row."""
        if self._staging is None:
            self._staging = Arena(self._pool, self._account, 1, 2 * LARGE * self._books.page_size)
        return self._staging

    def _copy(self, pages: Pages) -> None:
        """Copies pages to the frame behind them."""
        nbytes, table = LARGE * self._books.page_size, self._stage().table
        self.is_copying = True
        try:
            with finished_on_error(self._driver):
                self._known.written.order(self._stream)
                self._driver.copy(table.address_of(0, LARGE), table.address_of(0, 0), nbytes, self._stream)
                tenants = self._pool.frames.tenants
                tenants[table.pages_in(0, LARGE)] = tenants[pages.numbers]  # now: some of it is theirs already
                self._copied = Fence.after(self._driver, [self._stream])
        except BaseException:
            self._moving = None
            raise
        finally:
            self.is_copying = False

    def _finish(self) -> None:
        """Has what was copied be known where it is now."""
        pages = self._moving
        if pages and self._copied and self._known.move(pages, self._stage().table.pages_in(0, LARGE).tolist()):
            self.pages += LARGE
        self._moving = self._copied = None

    # ------------------------------------------------------------------ the end

    def reset(self) -> None:
        """Forgets all, after an interruption. What is mapped stays until it has been copied."""
        self._moving = None
        self._hot.clear()

    def close(self) -> None:
        """Gives all up, with the cache."""
        self.reset()
        if self._staging:
            self._staging.close()


def _single_pages(pieces: list[Piece]) -> int:
    """How many pages of a row lie on single ones that it shares."""
    return sum([(LARGE * len(piece.frames) - piece.pages) // (LARGE - 1) for piece in pieces if piece.frames])
