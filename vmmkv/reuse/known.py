"""What is known: the tokens of pages, in a prefix tree, and those that each row holds.

Invariants:
 1. A frame that holds a page of the tree is held here, as one place more where it is.
 2. A live row's committed pages are locked in the tree, and those that it has copies of: what is used is never evicted,
    and all that is not can be, where nothing else is left after the tree has come to know the copies instead.
 3. `kept` rows belong to nobody, are whole from their first page on, and hold what their chain says.
 4. What a row holds behind the last page that the tree knows of it is its tail, as long as it is known to hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ..driver.fence import Fence
from ..errors import InvariantError
from ..events import EventLog
from ..rows.rows import Rows
from .held import Held
from .node import Ids, Node, common
from .retention import Retention
from .tails import Tail, Tails
from .tree import OTHER_IDS, PrefixTree


class Chain(NamedTuple):
    """What a row is known to hold: the tokens of these ids. What the tree knows of the first `own` of them lies in this
    row itself. While it is live `node` is locked."""

    key: Hashable
    ids: Ids
    node: Node | None
    own: int = 0


class Pages(NamedTuple):
    """Pages of a path that follow each other, which get other numbers: as many single ones as a large frame has, or
    some that a row has copied.

    Attributes:
        key: the path's.
        ids: of its first tokens.
        arena: which.
        first: the page of a row that the first of them is.
        numbers: theirs.
    """

    key: Hashable
    ids: Ids
    arena: int
    first: int
    numbers: list[int]


class Page(NamedTuple):
    """A page that the tree knows by another number: page `page` of rows in arena `arena`, by the number that it had."""

    arena: int
    page: int
    number: int


class Known:
    """See above.

    Args:
        rows: the rows of the cache.
        log: what is told of them to routers, if anything is.
    """

    def __init__(self, rows: Rows, log: EventLog | None) -> None:
        self._log, self._table, self.books, self._pool = log, rows.table, rows.books, rows.pool
        self.chains: dict[int, Chain] = {}
        """By row, live or kept."""
        self.roomy: dict[int, None] = {}
        """Kept rows that may have pages behind their tokens."""
        self.written = Fence()
        """Passes when all that is known has been written."""
        self.held = Held(rows.pool, rows.account)
        self.reset()
        rows.pool.tables.append(self.held)
        weakref.finalize(self, self.held.leave_behind).atexit = False

    def reset(self) -> None:
        """Forgets all, after an interruption: frames that were held are nobody's then."""
        self.tree = PrefixTree(self.books.page_size, self.books.records, log=self._log)
        self.tails = Tails()
        """Of live rows what was committed of them, and of all kept ones."""
        self.chains.clear()
        self.roomy.clear()

    def hold(self, row: int, chain: Chain | None) -> None:
        """Has a row be known to hold this, and what it held before no more."""
        before = self.chains.pop(row, None)
        if chain:
            self.chains[row] = chain
        if before and before.node:
            self.tree.unlock(before.node)

    def locked(self, row: int, node: Node, key: Hashable, ids: Ids) -> Chain:
        """Locks of the path to a node what is known by pages that a row has, not by others that were copied, or that
        are known instead by now. Returns what the row holds then."""
        ends = []
        for (arena, _), known in zip(self.books.ranges, node.path_pages()):
            mine = arena.table.pages_in(row, 0, len(known)).tolist()
            if mine == known[: len(mine)]:  # at once: most are
                ends.append(len(known) + 1)
            else:
                ends.append(next(page for page, its in enumerate(mine) if its != known[page]))
        own = self.tokens_before(ends)
        return Chain(key, ids, self.lock(node, own), own)

    def lock(self, node: Node, tokens: int) -> Node:
        """Locks of the path to a node what is whole in so many tokens."""
        return self.tree.lock(node, min(node.end, tokens))

    def tokens_before(self, ends: Iterable[int]) -> int:
        """How many tokens lie in front of pages, one of each range."""
        return min(end * self.books.page_size // record for end, record in zip(ends, self.books.records))

    def insert(self, row: int, key: Hashable, ids: Ids, retention: Iterable[Retention]) -> int:
        """Has the tree know the pages of a row, which is known to hold no other tokens than these, and holds those that
        it did not know; has the row be known to hold them all. Returns how many of the tokens the tree knows now.

        Raises:
            ValueError: a page that it shares is known to hold others.
        """
        before = self.chains.get(row)
        held = before.node if before and before.key == key else None
        known, geometry = held.end if held else 0, self.tree.geometry
        firsts, counts = geometry.pages(known), geometry.pages(len(ids))
        spans = [*zip(self.books.tables, firsts, counts)]
        if any(first < table.own[row] for table, first, _ in spans):
            self._check_shared(row, ids)
        pages = [table.pages_in(row, first, count).tolist() for table, first, count in spans]
        insertion = self.tree.insert(key, ids, pages, retention, held)
        for new in insertion.new:
            self.held.hold(new)
        ends = [count + 1 for count in counts]
        for each in reversed(insertion.duplicates):
            ends[each.arena] = each.page
        own = before.own if before and before.own < known else self.tokens_before(ends)
        chain = Chain(key, ids.copy(), insertion.node, own)
        if insertion.node is held:  # it is locked
            self.chains[row] = chain
        else:
            self.tree.lock(insertion.node)
            self.hold(row, chain)
        return insertion.tokens

    def _check_shared(self, row: int, ids: Ids) -> None:
        """Raises `ValueError` where a row that has pages of this one is known to hold other tokens there than these.
        The tree need not know such pages: it may know others by those tokens."""
        geometry = self.tree.geometry
        for other, chain in self.chains.items():
            same, both = common(chain.ids, ids), min(len(chain.ids), len(ids))
            for table, first, end in zip(self.books.tables, geometry.pages(same), geometry.pages(both)):
                if first < end and (table.pages_in(row, first, end) == table.pages_in(other, first, end)).any():
                    raise ValueError(OTHER_IDS)

    # ------------------------------------------------------------------ tails

    def tail_of(self, row: int, before: Tail | None, used: int = 0, kept: bool = False) -> Tail | None:
        """The tail of a row, as its chain says: to be kept as the one before, if that was at the same place. None where
        the tree does not know by pages of this row what lies before it."""
        ids, geometry = self.chains[row].ids, self.tree.geometry
        count = geometry.known_pages(len(ids))[0]
        place = self._place(row, count)
        if place is None:
            return None
        begin = -(-count * geometry.page_size // geometry.records[0])
        tail = Tail(row, place, ids[begin:].tobytes(), kept, used)
        if before and before.place == place:
            tail.priority, tail.expires = before.priority, before.expires
        return tail

    def continue_tail(self, row: int, before: Tail) -> None:
        """Writes down what is left of the tail of a live row, whose chain is another now."""
        if tail := self.tail_of(row, before):
            self.tails.put(tail, self.tree.now())

    def _place(self, row: int, count: int) -> Hashable | None:
        """Where the tail of a row is, if it can be found: behind so many pages that the tree knows."""
        chain, table = self.chains[row], self.books.ranges[0][0].table
        if count > table.end[row] or table.first[row] or not len(chain.ids):
            return None
        if not count:
            return chain.key
        page = table.memory.item(row, count - 1)
        return page if page in self.tree.numbers[0] else None

    # ------------------------------------------------------------------ what is known no more, or elsewhere

    def give_up(self, row: int) -> None:
        """Has a kept row be one that nobody can adopt. What the tree knows of it stays known."""
        del self.chains[row]
        self.tails.pop(row)
        self.roomy.pop(row, None)
        self._table.kept.pop(row)
        self.books.settle(row)

    def lose_place(self, number: int) -> list[int]:
        """Says that the tree does not know a page by its number any more. Returns the kept rows that nobody could find
        any more, which are given up."""
        rows = self.tails.rows(number)
        kept = [row for row in rows if row in self._table.kept]
        for row in rows:
            if row in self._table.kept:
                self.give_up(row)
            else:
                self.tails.pop(row)
        return kept

    def know_copies(self) -> list[list[int]]:
        """Has the tree know the copies that live rows have of pages, instead of those that nobody uses. Returns the
        numbers of these, which it knows no more, by arena."""
        gone: list[Page] = []
        for row, chain in self.chains.items():
            if chain.node and chain.own < chain.node.end:
                path, ends = list(chain.node.path())[::-1], []
                for number, ((arena, _), known) in enumerate(zip(self.books.ranges, chain.node.path_pages())):
                    mine = arena.table.pages_in(row, 0, len(known)).tolist()
                    copied = [page for page, its in enumerate(known) if mine[page] != its]
                    kept = arena.table.own[row]  # behind, it may write to its pages as they are, and perhaps does soon
                    unused = [page for page in copied if page < kept and not self._pool.frames.users[known[page]]]
                    self.held.hold(mine[page] for page in unused)
                    for page in unused:
                        self.tree.renumber(path, number, page, [known[page]], [mine[page]])
                        gone.append(Page(number, page, known[page]))
                    ends.append(min(set(copied).difference(unused), default=len(known) + 1))
                self.chains[row] = Chain(chain.key, chain.ids, chain.node, self.tokens_before(ends))
        self._disown(gone)
        return [[page.number for page in gone if page.arena == arena] for arena in range(len(self.books.ranges))]

    def _disown(self, gone: Iterable[Page]) -> None:
        """Says that the tree knows other pages instead of these, which rows may have."""
        for arena, page, number in gone:
            before = page * self.books.page_size // self.books.records[arena]
            for row in self.books.ranges[arena][0].table.rows_with(page, number):
                if chain := self.chains.get(row):
                    self.chains[row] = Chain(chain.key, chain.ids, chain.node, min(chain.own, before))

    def move(self, pages: Pages, numbers: list[int]) -> bool:
        """Has pages of a path be those of other numbers, which hold the same; returns False where they have left it.
        Rows that lie on the old ones have copies from there on."""
        _, _, arena, first, old = pages
        if not self.tree.renumber(self.tree.path(pages.key, pages.ids), arena, first, old, numbers):
            return False
        self.held.hold(numbers)
        for place in self.tails.places(old) if not arena else ():
            self.lose_place(place)
        self._disown(Page(arena, page, number) for page, number in enumerate(old, first))
        self.held.drop(old)
        return True

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantError: one is broken; the message says which.
        """
        self.tree.check()
        known = set().union(*self.tree.numbers)
        if known != self.held.known_pages(known):
            raise InvariantError("the tree knows a page whose frame is not held, or one is held for nothing")
        for row, chain in self.chains.items():
            if not self._table.is_live(row) and row not in self._table.kept:
                raise InvariantError(f"row {row} is nobody's, and known to hold tokens")
            for node in chain.node.path() if chain.node else ():
                users = self._pool.frames.users[[page for of in node.pages for page in of]]
                if node.end <= chain.own and not users.all():
                    raise InvariantError(f"row {row} keeps a page from being evicted that nobody uses")
        for row, tail in self.tails.of.items():
            ids = self.chains[row].ids
            pages = self.tree.match(self.chains[row].key, ids).pages[0]
            count = self.tree.geometry.known_pages(len(ids))[0]
            place = self.chains[row].key if not count else pages[count - 1] if count <= len(pages) else tail.place
            if tail.kept != (row in self._table.kept) or tail.place != place:
                raise InvariantError(f"row {row} cannot be found where its tail is")
            if not ids.tobytes().endswith(tail.ids):
                raise InvariantError(f"row {row} does not hold its tail")
        if not self.tails.of.keys() >= self._table.kept.keys():
            raise InvariantError("a kept row cannot be found")
