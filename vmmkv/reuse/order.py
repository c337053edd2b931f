"""Who gives pages up next: leaves by priority, those with the same by their last use.

Two heaps, whose entries may be out of date and are then passed over: a leaf that is used, locked or given children
leaves its entries where they are, and has a new one when it is a leaf that nobody uses again. The second heap is of
priorities that will fall back to the default, or rise to it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar

SMALL = 64
"""Entries that are never too many."""


class Leaf(Protocol):
    """What gives pages up.

    Attributes:
        used: when it was used last: a number that grows with each use.
        priority, expires: how long it is to be kept, and when that is the default again.
    """

    used: int
    priority: int
    expires: float

    @property
    def is_evictable(self) -> bool:
        """Whether nobody uses it, and nothing follows it."""

    def priority_at(self, now: float) -> int:
        """Its priority then."""


AnyLeaf = TypeVar("AnyLeaf", bound=Leaf)
Ranked = tuple[int, int, int, AnyLeaf]
"""Priority, last use, and a number of its own, so that no two leaves are compared."""
Expiring = tuple[float, int, int, AnyLeaf]
"""When its priority ends, last use, number."""


class EvictionOrder(Generic[AnyLeaf]):
    """Leaves that nobody uses."""

    def __init__(self) -> None:
        self._ranked: list[Ranked[AnyLeaf]] = []
        self._expiring: list[Expiring[AnyLeaf]] = []
        self._numbers = count()
        self._most = SMALL

    def offer(self, node: AnyLeaf, now: float) -> None:
        """Takes a node up, if it is a leaf that nobody uses; to be called whenever it has become one, or was used."""
        if not node.is_evictable:
            return
        number = next(self._numbers)
        heappush(self._ranked, (node.priority_at(now), node.used, number, node))
        if now < node.expires < inf:
            heappush(self._expiring, (node.expires, node.used, number, node))
        if len(self._ranked) + len(self._expiring) > self._most:
            self._drop_outdated(now)

    def pop(self, now: float) -> AnyLeaf | None:
        """Takes away the leaf that gives pages up first."""
        leaf = self.first(now)
        if leaf:
            heappop(self._ranked)
        return leaf

    def first(self, now: float) -> AnyLeaf | None:
        """The leaf that gives pages up first. It keeps its place."""
        self._expire(now)
        while self._ranked and not _is_current(self._ranked[0], now):
            heappop(self._ranked)
        return self._ranked[0][-1] if self._ranked else None

    def leaves(self, now: float) -> set[AnyLeaf]:
        """All that have their place."""
        expired = {entry[-1] for entry in self._expiring if _will_expire(entry) and entry[0] <= now}
        return {entry[-1] for entry in self._ranked if _is_current(entry, now)} | expired

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            entry = heappop(self._expiring)
            if _will_expire(entry):
                self.offer(entry[-1], now)

    def _drop_outdated(self, now: float) -> None:
        """Its cost is spread over the offers since the last time."""
        self._ranked = [entry for entry in self._ranked if _is_current(entry, now)]
        self._expiring = [entry for entry in self._expiring if _will_expire(entry)]
        heapify(self._ranked)
        heapify(self._expiring)
        self._most = SMALL + 2 * (len(self._ranked) + len(self._expiring))


def _is_current(entry: Ranked[AnyLeaf], now: float) -> bool:
    priority, used, _, node = entry
    return node.is_evictable and used == node.used and priority == node.priority_at(now)


def _will_expire(entry: Expiring[AnyLeaf]) -> bool:
    expires, used, _, node = entry
    return node.is_evictable and used == node.used and expires == node.expires
