"""Evicting: what is known gives way, the least needed first, when memory is short, or ahead of that.

Pages of the tree and tails of kept rows have one order: by how long they are to be kept, then by their last use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from ..memory.frames import LARGE
from ..rows.rows import Rows
from ..space.mapper import stock
from .finding import Hit
from .host_prefixes import HostPrefixes
from .known import Known
from .node import Node, Root
from .promoting import Promotion


class Evictor:
    """See above.

    Args:
        rows: the rows of the cache.
        known: what is known of them.
        host: keeps what is evicted, if anybody does.
        promotion: moves pages to large frames, if anything does.
    """

    def __init__(self, rows: Rows, known: Known, host: HostPrefixes | None, promotion: Promotion | None) -> None:
        self._rows: Rows = weakref.proxy(rows)  # whose keeper holds this
        self._known, self._host, self._promotion = known, host, promotion
        self._table, self._books, self._pool = rows.table, rows.books, rows.pool

    def evict(self, pages: int, wait: bool) -> int:
        """Gives up what is known, least needed first, until so many pages are free, or will be as soon as nothing reads
        them; then what kept rows have beside that. Returns how many are free."""
        before, later = self._pool.frames.taken, 0
        self._rows.sharing.clear(wait)
        if self._promotion:
            self._promotion.give_way(wait)

        def missing() -> int:
            return pages - later - (before - self._pool.frames.taken)

        beside = LARGE if self._pool.frames.has_large else 0  # only what has no known page left is free
        while missing() > 0 and self._known.roomy and self._trim(next(iter(self._known.roomy)), wait):
            pass
        while missing() > 0:
            gone, rows = self._least_needed(missing() + beside, self._leaving)
            gone = gone if any(gone) or rows else self._known.know_copies()
            if not any(gone) and not rows:
                break
            taken = self._pool.frames.taken
            rows, left = self._let_go(gone, rows)
            self._unmap(rows, wait)
            self._rows.sharing.clear(wait)  # of what was copied to the host, and lay on no row
            if not wait:  # who has waited already, and what is there still, is about to be copied
                later += max(left - (taken - self._pool.frames.taken), 0)
        while missing() > 0 and self._table.kept:
            row = next(iter(self._table.kept))
            self._known.give_up(row)
            self._unmap([row], wait)
        return before - self._pool.frames.taken

    def _trim(self, row: int, wait: bool) -> bool:
        """Unmaps what a kept row has behind its tokens; returns False where something may still read it."""
        fence = self._table.fences[row]
        if wait:
            fence.wait()
        if fence.passed():
            del self._known.roomy[row]
            self._rows.reclaimer.unmap_surplus({row: len(self._known.chains[row].ids)})
        return row not in self._known.roomy

    def _least_needed(
        self, pages: int, leaving: Callable[[Node], None] | None = None, whole: bool = False
    ) -> tuple[list[list[int]], list[int]]:
        """Has the tree give up so many pages, as far as they are less needed than any tail, and if `whole` all of each
        leaf that loses some; or else names the kept row that has the least needed tail, if there is one."""
        now = self._known.tree.now()
        tail = self._known.tails.order.first(now)
        if tail is None:
            return self._known.tree.evict(pages, leaving=leaving, whole=whole), []
        gone = self._known.tree.evict(pages, tail.priority_at(now), tail.used, leaving, whole)
        return gone, [] if any(gone) else [tail.row]

    def least_needed(self) -> int:
        """The kept row that gives way first when there is no other."""
        row = next(iter(self._table.kept))
        tail = self._known.tails.order.first(self._known.tree.now()) if self._known.tails.of[row].ids else None
        return tail.row if tail else row

    def _leaving(self, leaf: Node) -> None:
        """Has the host keep what is about to be evicted."""
        if self._host:
            *_, top = leaf.path()
            assert isinstance(top.parent, Root)
            self._host.keep(top.parent.key, leaf, self._known.written)

    def make_way(self, hit: Hit, tokens: int) -> bool:
        """Has kept rows be parked ahead of need, least needed first, where memory is full and a new sequence that is to
        have so many tokens can adopt one: to unmap their pages and to map them elsewhere costs more than all else.
        Returns whether anything was given up, and what was found is to be found again."""
        if (
            hit.row is not None
            or not hit.is_copied
            or self._host
            or not self._table.kept
            or not self._books.rules.lookahead
        ):
            return False
        parked = next(map(self._table.parked.size, self._table.parked.largest()), 0)
        pages, there = (sum(end for _, end in self._books.spans(0, each)) for each in (tokens, parked))
        wanted = 2 * pages + stock(self._pool)  # so that there are some to choose from, of which one may be long enough
        asked = missing = wanted - self._pool.accounts.idle(self._rows.account) - there
        if missing <= 0:
            return False
        if hit.tokens:
            self._known.tree.unlock(self._known.tree.lock(hit.node, hit.locked))  # goes last
        given_up: list[int] = []
        while missing > 0:
            leaf = self._known.tree.order.first(self._known.tree.now())
            if leaf is None or leaf.num_pages > 2 * pages:  # most of that would be given up for nothing
                break
            gone, rows = self._least_needed(1, whole=True)
            given_up += self._let_go(gone, rows)[0]
            missing -= sum(map(len, gone))
        for row in given_up:
            if row in self._table.retired:
                self._books.settle(row)
        return missing < asked or bool(given_up)

    def give_way(self, pages: int) -> None:
        """Gives up so many pages that are known, least needed first, before somebody needs them. Those that lie on no
        row are free then; the rows of the others are nobody's."""
        while pages > 0 and not self._host:  # the driver has no work in between for who has to copy them
            gone, rows = self._least_needed(pages)
            if not any(gone) and not rows:
                break
            _, left = self._let_go(gone, rows)
            pages -= sum(map(len, gone)) or left

    def _behind(self, row: int) -> int:
        """How many pages a kept row has behind those that the tree knows."""
        geometry = self._known.tree.geometry
        counts = geometry.known_pages(len(self._known.chains[row].ids))
        return sum(max(arena.table.end[row] - count, 0) for (arena, _), count in zip(self._books.ranges, counts))

    def _let_go(self, gone: Sequence[list[int]], rows: list[int]) -> tuple[list[int], int]:
        """Drops pages that the tree knows no more, and the kept rows that they lie in, or gives up others. Returns all
        these rows, and how many pages are left on rows that do not use them."""
        # Frames before rows: one that has all for its own then can be adopted.
        left = sum(map(self._known.held.drop, filter(None, gone))) + sum(map(self._behind, rows))
        for row in rows:
            self._known.give_up(row)
        # Of a kept row the last page goes first, in the first arena; what others hold behind it is beside that.
        places = self._known.tails.places(gone[0])
        return rows + [row for place in places for row in self._known.lose_place(place)], left

    def _unmap(self, rows: Iterable[int], wait: bool) -> None:
        """Unmaps what was kept on rows, but for those that something may still read."""
        fences = {row: self._table.fences[row] for row in rows}
        for fence in fences.values() if wait else ():
            fence.wait()
        self._rows.reclaimer.unmap_surplus({row: 0 for row, fence in fences.items() if fence.passed()})
