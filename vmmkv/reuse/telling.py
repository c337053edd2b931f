"""What routers are told of a prefix tree: the tokens that can be found in it, as spans of an event log.

Told are, of the path to each leaf, the tokens that lie in known pages in all arenas: `Geometry.readable(leaf.end)`. So
what a router hears of it can have, but for less than a block, and, with several arenas, where what went on from a token
was evicted in part (see `lookup`).

Priorities are told as they were given: that one is for some seconds only nobody is told, nor that they are over.

A node has the span of its last token that was told. It may reach over several nodes, which were cut since, and a node
over several spans, which were joined: those before follow from the span's parents.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..events import EventLog, Span, Tier
from ..events.naming import Name, told_names
from .geometry import Geometry
from .node import Ids, Node


class Key(NamedTuple):
    """What K and V depend on beside token ids.

    Attributes:
        salt, adapter, tenant: as in `KVCache.sequence`.
        number: the tenant's, of the pool.
    """

    salt: Name
    adapter: Name
    tenant: Name
    number: int


def check_log(log: object) -> None:
    """Raises `ArgumentError` where this is no log that can be a new cache's."""
    if not isinstance(log, EventLog):
        raise ArgumentError(f"got event_log={log!r}; it must be a vmmkv.events.EventLog")
    log.check_new()


class Teller:
    """Tells a log what happens to a tree.

    Args:
        log: of this tree, or of one in each tier.
        geometry: of the tree.
        tier: where its pages lie.
    """

    def __init__(self, log: EventLog, geometry: Geometry, tier: Tier = "device") -> None:
        self._log, self._geometry, self._tier = log, geometry, tier

    def stored(self, key: Hashable, leaf: Node) -> None:
        """Tells of the tokens of the path to a new leaf that could not be found before."""
        span, start = self._told(leaf)
        end = self._geometry.readable(leaf.end)
        parent = span or self._root(key)
        for part in reversed([each for each in leaf.path() if each.end > start]):
            stop = min(part.end, end)
            if stop > start:
                ids = self._ids(part, start, stop)
                parent = part.span = self._log.stored(parent, start, ids, priority=part.priority, tier=self._tier)
                start = stop

    def updated(self, node: Node, priority: int) -> None:
        """Tells that the tokens of a node are about to be kept at another priority."""
        if priority != node.priority:
            for span, start, stop in self._pieces(node, node.begin):
                self._log.updated(span, start, self._ids(node, start, stop), priority=(node.priority, priority))

    def removed(self, leaf: Node, end: int) -> None:
        """Tells that a leaf is about to give up its tokens from `end` on."""
        for span, start, _ in self._pieces(leaf, self._left(leaf, end)):
            self._log.removed(span, start, tier=self._tier)

    def forgotten(self, node: Node) -> None:
        """Tells that the tokens of a node are gone, after all that follow them."""
        for span, start, _ in self._pieces(node, node.begin):
            self._log.removed(span, start, tier=self._tier)

    def is_right(self, leaf: Node) -> bool:
        """Whether of the path to a leaf as many tokens were told as can be found; slow."""
        return self._told(leaf)[1] == self._left(leaf, leaf.end)

    def _root(self, key: Hashable) -> Span:
        """What sequences under a key begin with."""
        assert isinstance(key, Key)
        return self._log.root(*told_names(key.salt, key.adapter, key.tenant))

    def _told(self, node: Node) -> tuple[Span | None, int]:
        """The span of the last token of the path to a node that was told, and the position behind it."""
        for each in node.path():
            if told := each.told():
                return told
        return None, 0

    def _pieces(self, node: Node, begin: int) -> Iterator[tuple[Span, int, int]]:
        """The told tokens of the path to a node from one on, by spans, the last ones first."""
        span, stop = self._told(node)
        while span is not None and stop > begin:
            yield span, max(span.start, begin), stop
            stop, span = span.start, span.parent

    def _left(self, leaf: Node, end: int) -> int:
        """How many tokens of the path to a leaf can be found when it ends with `end`."""
        found, node = self._geometry.readable(end), leaf
        while found < node.begin:
            assert node.parent is not None
            others = (each for each in node.parent.children.values() if each is not node)
            found = max(found, self._reach(others, node.begin))
            node = node.parent
        return found

    def _reach(self, nodes: Iterable[Node], enough: int) -> int:
        """How many tokens can be found on the path to any of the leaves below these nodes; `enough` is enough."""
        best, waiting = 0, [iter(nodes)]
        while waiting and best < enough:
            node = next(waiting[-1], None)
            if node is None:
                waiting.pop()
            elif node.children:
                waiting.append(iter(node.children.values()))
            else:
                best = max(best, self._geometry.readable(node.end))
        return min(best, enough)

    def _ids(self, node: Node, start: int, stop: int) -> Ids:
        """Ids of the path to a node, from the beginning of the block on in which `start` is."""
        start -= start % self._log.block_size
        parts = []
        for each in node.path():
            if each.begin < stop:
                parts.append(each.ids[max(start - each.begin, 0) : stop - each.begin])
            if each.begin <= start:
                break
        return np.concatenate(parts[::-1])
