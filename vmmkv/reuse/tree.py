"""A prefix tree: which pages hold K and V of which token ids, to the token, and which of them go first.

K and V of a token depend on all tokens before it: whatever holds tokens `[0, n)` of the same ids, under the same key
(salt, adapter), holds the same bytes. A page is known once it is whole, and stands at the token that made it so.

Invariants:
 1. Nothing is shared between keys, and what matches was compared id by id.
 2. On a path all pages are known that are whole after its tokens, in each arena from page 0 on, each under one number;
    and a number stands for one page of the tree.
 3. A node without pages, or whose last token made no page whole, has two children at least: there are at most two
    nodes for each page.
 4. Tokens of a node were used together, are locked together and kept alike. So what goes first is a matter of pages,
    not of how they happen to be divided among nodes.

The tree knows no memory: pages are numbers. It refers once to each that it knows, and no more to those that `evict`,
`replace` and `forget` return. It has no lock of its own either, and after an operation that was interrupted (Ctrl-C)
nobody can trust it: begin a new one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import count
from math import inf
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InvariantError, ShapeError, StaleMatchError
from ..events import EventLog, Tier
from .geometry import Geometry
from .invariants import faults
from .lookup import Duplicate, duplicates, readable, token_ids, walk
from .node import Ids, Node, Root
from .order import EvictionOrder
from .retention import MAX_PRIORITY, Retention, in_order
from .telling import Teller

OTHER_IDS = (
    "asked to commit other token ids than were committed for the same K and V, in pages that are shared; unshare() "
    "a sequence before you write others there"
)
"""Said where a page would be known to hold K and V of two beginnings."""


class Match(NamedTuple):
    """What is there of a sequence's beginning. It is good until the tree changes.

    Attributes:
        tokens: how many of its tokens can be had, in all arenas.
        pages: by arena the numbers of the pages that hold nothing else, from page 0 on: to be shared.
        partial: by arena the number of the page behind them, which holds the rest of these tokens and then others: to
            be copied. None where there is no rest.
        node: where the last of the tokens is, for `lock`.
    """

    tokens: int
    pages: list[list[int]]
    partial: list[int | None]
    node: Node


class Insertion(NamedTuple):
    """What is known of a sequence after `insert`.

    Attributes:
        tokens: of the sequence. Known are the pages that are whole after so many, and no others.
        duplicates: those of them that are known by another number than the one given.
        node: which ends with the last of these tokens, for `lock`.
        new: by arena the numbers of those that were not known before.
    """

    tokens: int
    duplicates: list[Duplicate]
    node: Node
    new: list[list[int]]


class PrefixTree:
    """Prefixes of sequences, under keys.

    Args:
        page_size: bytes of a page.
        records: bytes of a token, by arena.
        clock: seconds, for priorities that end; any monotonic clock.
        log: is told what can be found here, under each `Key`.
        tier: where the pages lie, for who is told.

    Raises:
        LayoutError: there can be no such pages or records.
    """

    def __init__(
        self,
        page_size: int,
        records: Sequence[int],
        clock: Callable[[], float] = monotonic,
        log: EventLog | None = None,
        tier: Tier = "device",
    ) -> None:
        self.geometry = Geometry(page_size, records)
        self.teller = Teller(log, self.geometry, tier) if log else None
        self.roots: dict[Hashable, Root] = {}
        self.order: EvictionOrder[Node] = EvictionOrder()
        self.numbers: list[set[int]] = [set() for _ in records]
        """By arena, of the pages that are known."""
        self.nodes = 0
        """How many there are, but for roots."""
        self.tokens = 0
        """How many there are, those that sequences share counting once."""
        self.now = clock
        self._uses = count(1)

    @property
    def pages(self) -> int:
        """How many are known."""
        return sum(map(len, self.numbers))

    # ------------------------------------------------------------------ looking

    def match(self, key: Hashable, ids: npt.NDArray[np.integer[Any]]) -> Match:
        """Finds the longest beginning of a sequence whose K and V are there. Changes nothing.

        With several arenas it may be shorter than it could be, by less than a page's tokens, where what went on from
        there has been evicted in part.

        Args:
            key: salt, adapter: whatever K and V depend on beside the ids.
            ids: the sequence's token ids, `[tokens]`, of an integer type.

        Raises:
            ArgumentError, ShapeError, DtypeError: the ids are none.
        """
        path, tokens = walk(self._root(key), token_ids(ids))
        tokens, numbers = readable(path, tokens, self.geometry)
        wholes = self.geometry.pages(tokens)
        partial = [
            of[whole] if tokens * record % self.geometry.page_size else None
            for of, whole, record in zip(numbers, wholes, self.geometry.records)
        ]
        for of, whole in zip(numbers, wholes):
            del of[whole:]
        return Match(tokens, numbers, partial, path[-1])

    def path(self, key: Hashable, ids: Ids) -> list[Node]:
        """The nodes that ids lead through, from the root on; the last one may go on behind them."""
        return walk(self._root(key), ids)[0]

    # ------------------------------------------------------------------ what is known

    def insert(
        self,
        key: Hashable,
        ids: npt.NDArray[np.integer[Any]],
        pages: Sequence[Sequence[int]],
        retention: Iterable[Retention] = (),
        held: Node | None = None,
    ) -> Insertion:
        """Makes the pages of a sequence known, and says that it was used now. Pages that hold nothing that could be
        read in all arenas are left out, and so are all that would make no more tokens match.

        Args:
            key: as for `match`.
            ids: token ids, `[tokens]`.
            pages: by arena the numbers of the sequence's pages, as many as are whole after these tokens
                (`geometry.pages(tokens)`), but for those that are whole after `held`.
            retention: how long tokens are to be kept; of the others, what was said before holds.
            held: a node whose path these ids begin with, locked by who inserts them, and what follows is added to it
                where nobody else has it; None: nobody knows of any.

        Raises:
            ArgumentError, ShapeError, DtypeError: the ids are none, or there are more pages or fewer.
            RetentionError: ranges overlap.
            ValueError: a page is known to hold other tokens.
            InvariantError: two pages have one number. The tree is unchanged, as after all of these.
        """
        ids, ranges = token_ids(ids), in_order(retention)
        root = self._root(key)
        begin = held if held and held.parent else root
        first, wholes = self.geometry.pages(begin.end), self.geometry.pages(len(ids))
        if [*map(len, pages)] != [whole - before for whole, before in zip(wholes, first)]:
            raise ShapeError(
                f"asked to insert {len(ids)} tokens with {[*map(len, pages)]} pages; {wholes} are whole after them, "
                f"{first} are known"
            )
        mine = self.geometry.readable(len(ids))
        ids = ids[: self.geometry.whole_after(mine)]
        path, known = walk(begin, ids)
        others = duplicates(path, known, pages, self.geometry)
        if others:
            self._check_new([each.given for each in others if each.arena == arena] for arena in range(len(pages)))
        is_new = mine > known or (known < len(ids) and mine > readable(*walk(root, ids), self.geometry)[0])
        if is_new:
            bounds = zip(pages, first, self.geometry.pages(known), self.geometry.pages(len(ids)))
            fresh = [list(of[before - skipped : whole - skipped]) for of, skipped, before, whole in bounds]
            node = self._append(root, path[-1], ids, known, fresh, held)
        else:
            node, fresh = self._node_ending(path[-1], self.geometry.last_whole(known)), []
        self._retain(node, ranges)
        if is_new and self.teller:
            self.teller.stored(key, node)
        self._use(node)
        return Insertion(node.end, others, node, fresh)

    def renumber(self, path: Sequence[Node], arena: int, first: int, old: list[int], new: list[int]) -> bool:
        """Gives pages of a path, from page `first` of an arena on, other numbers; returns False, and changes nothing,
        where they have not the old ones any more.

        Args:
            path: the nodes from the root on.
            new: what has these numbers holds the same.

        Raises:
            InvariantError: one of them is another page already, or two are the same.
        """
        places, end = [], first + len(old)
        for node in path:
            begin = self.geometry.pages(node.begin)[arena]
            low, high = max(first - begin, 0), min(end - begin, len(node.pages[arena]))
            if low < high:
                places.append((node.pages[arena], low, high, begin - first))
        if [number for numbers, low, high, _ in places for number in numbers[low:high]] != old:
            return False
        if not self.numbers[arena].isdisjoint(new) or len(set(new)) < len(new):
            raise InvariantError(f"asked to know pages of arena {arena} by {new}; one is another page, or there twice")
        for numbers, low, high, offset in places:
            numbers[low:high] = new[low + offset : high + offset]
        self.numbers[arena].difference_update(old)
        self.numbers[arena].update(new)
        return True

    def forget(self, key: Hashable) -> list[list[int]]:
        """Drops all that is known under a key, also what somebody uses: nothing matches it any more. Returns the
        numbers of its pages, by arena. Who holds a node of it may still `unlock` that."""
        gone: list[list[int]] = [[] for _ in self.numbers]
        nodes: list[Node] = [self.roots.pop(key)] if key in self.roots else []
        for node in nodes:
            nodes += node.children.values()
        for node in reversed(nodes):
            if self.teller:
                self.teller.forgotten(node)
            self.nodes -= node.parent is not None
            self.tokens -= len(node.ids)
            self._drop(node, node.begin, gone)
            node.parent, node.children = None, {}
        return gone

    # ------------------------------------------------------------------ what is used

    def use(self) -> int:
        """A number for what is used now, greater than those of all uses before."""
        return next(self._uses)

    def lock(self, node: Node, tokens: int | None = None) -> Node:
        """Keeps the pages that are whole in the first `tokens` tokens, or in all, of the path to a node from being
        evicted. (The partial page of a match is not among them.)

        Args:
            node: of a match or an insertion.
            tokens: of the match; None is all to the node's end.

        Returns:
            What to unlock, once for each lock.

        Raises:
            StaleMatchError: they are not in the tree any more.
        """
        end = node.end if tokens is None else tokens
        if not 0 <= end <= node.end or (node.parent is None and not isinstance(node, Root)):
            raise StaleMatchError(f"asked to lock {end} tokens, which were evicted since, or moved: match them again")
        node = self._node_ending(node, self.geometry.last_whole(end))
        node.holders += 1
        for each in node.path():
            each.locks += 1
        return node

    def unlock(self, node: Node) -> None:
        """Takes a lock back. It was in use until now.

        Raises:
            InvariantError: nobody has locked it.
        """
        if not node.holders:
            raise InvariantError("asked to unlock a node that nobody has locked")
        node.holders -= 1
        path = list(node.path())
        for each in path:
            each.locks -= 1
        self._use(node)
        for each in path:
            self._join(each)

    def evict(
        self,
        pages: int,
        priority: int = MAX_PRIORITY,
        used: float = inf,
        leaving: Callable[[Node], None] | None = None,
        whole: bool = False,
    ) -> list[list[int]]:
        """Gives up pages that nobody uses: those of the lowest priority first, of these the least recently used, each
        after all that follow it. Returns their numbers, by arena, in this order.

        Args:
            pages: at least so many, if there are. With a token go all pages that it made whole.
            priority: the highest that goes.
            used: the last use up to which what has this priority goes.
            leaving: is told of each leaf before it loses pages.
            whole: no leaf keeps any.
        """
        gone: list[list[int]] = [[] for _ in self.numbers]
        now = self.now()
        while (missing := pages - sum(map(len, gone))) > 0 and (leaf := self.order.first(now)):
            if (leaf.priority_at(now), leaf.used) > (priority, used):
                break
            self.order.pop(now)
            if leaving:
                leaving(leaf)
            end = leaf.begin if whole else self._end_without(leaf, missing)
            if self.teller:
                self.teller.removed(leaf, end)
            self._drop(leaf, end, gone)
            self._end_at(leaf, end)
        return gone

    # ------------------------------------------------------------------ surgery

    def _root(self, key: Hashable) -> Root:
        """Where the paths of a key begin; of one that is not known, a root that is not in the tree yet."""
        return self.roots.get(key) or Root(key, len(self.geometry.records))

    def _node_ending(self, node: Node, at: int) -> Node:
        """The node on the path to this one that ends with so many tokens; cuts one in two if need be."""
        while node.parent is not None and node.begin >= at:
            node = node.parent
        if at == node.end:
            return node
        first, end = self.geometry.pages(node.begin), self.geometry.pages(at)
        self.nodes += 1
        return node.cut(at, [after - before for before, after in zip(first, end)])

    def _append(self, root: Root, last: Node, ids: Ids, known: int, fresh: list[list[int]], held: Node | None) -> Node:
        """Puts the ids behind the first `known`, which end in the node `last`, and fresh pages, into a leaf; into the
        one that is held, where nobody else has that."""
        self._check_new(fresh)
        if last is held and last.can_go_on:
            leaf = last
            leaf.go_on(ids[known:], fresh)
        else:
            self.roots[root.key] = root
            leaf = Node(self._node_ending(last, known), known, ids[known:].copy(), fresh)
            self.nodes += 1
        leaf.come_last()
        self.tokens += len(ids) - known
        for new, numbers in zip(fresh, self.numbers):
            numbers.update(new)
        return leaf

    def _check_new(self, pages: Iterable[list[int]]) -> None:
        """Raises `ValueError` where the tree knows a page, by arena, at another place than it is inserted at, and
        `InvariantError` where one is there twice."""
        for arena, (new, numbers) in enumerate(zip(pages, self.numbers)):
            if not numbers.isdisjoint(new):
                raise ValueError(OTHER_IDS)
            if len(set(new)) < len(new):
                raise InvariantError(f"asked to insert pages of arena {arena} of which two have one number")

    def _retain(self, node: Node, ranges: Iterable[Retention]) -> None:
        """Says how long tokens of the path to a node are to be kept."""
        for each in ranges:
            begin = self.geometry.whole_after(each.start)
            end = node.end if each.end is None else min(self.geometry.whole_after(each.end), node.end)
            if begin < end:
                self._node_ending(node, begin)
                self._node_ending(node, end)
                expires = inf if each.seconds is None else self.now() + each.seconds
                for part in node.path():
                    if begin <= part.begin and part.end <= end:
                        if self.teller:
                            self.teller.updated(part, each.priority)
                        part.priority, part.expires = each.priority, expires

    def _use(self, node: Node) -> None:
        """Says that the tokens of the path to a node were used now."""
        use = self.use()
        for each in node.path():
            each.used = use
        self.order.offer(node, self.now())

    def _join(self, node: Node) -> None:
        self.nodes -= node.join()

    def _end_without(self, leaf: Node, pages: int) -> int:
        """Where a leaf ends that has given up so many pages, or all."""
        if pages >= leaf.num_pages:
            return leaf.begin
        kept = sum(self.geometry.pages(leaf.end)) - pages
        ends = range(leaf.begin, leaf.end)
        index = bisect_right(ends, kept, key=lambda end: sum(self.geometry.pages(end)))
        return max(self.geometry.last_whole(leaf.begin + index - 1), leaf.begin)

    def _drop(self, node: Node, end: int, gone: list[list[int]]) -> None:
        """Takes from a node the pages that are not whole after `end` tokens, the last of an arena first."""
        bounds = zip(node.pages, self.geometry.pages(node.begin), self.geometry.pages(end))
        for (numbers, first, keep), known, of in zip(bounds, self.numbers, gone):
            last = numbers[keep - first :][::-1]
            del numbers[keep - first :]
            known.difference_update(last)
            of += last

    def _end_at(self, leaf: Node, end: int) -> None:
        """Gives up the tokens of a leaf from `end` on, which have no pages any more, and itself if none are left."""
        self.tokens -= leaf.end - end
        if end > leaf.begin:
            leaf.shorten(end)
            self.order.offer(leaf, self.now())
        else:
            self.nodes -= 1
            self._tidy(leaf.detach())

    def _tidy(self, node: Node) -> None:
        """Mends a node that has lost a child: only where several follow may it go on behind its last page."""
        if isinstance(node, Root):
            if not node.children:
                del self.roots[node.key]
        elif not node.children:
            self.order.offer(node, self.now())
        elif len(node.children) == 1:
            if node.num_pages:
                self._node_ending(node, self.geometry.last_whole(node.end))
            self._join(node)

    def check(self) -> None:
        """Checks the invariants; slow.

        Raises:
            InvariantError: one is broken; the message says which.
        """
        for fault in faults(self):
            raise InvariantError(fault)
