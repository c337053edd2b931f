"""Tails: what rows hold behind their last page that the prefix tree knows, and that fills no page.

    known to the tree   |a b c d|e f g h|
    row 3, live         |a b c d|e f g h|i j k    a tail of three tokens
    row 5, kept         |a b c d|e f g h|i j x y    another, at the same place

Such a page cannot be shared, since its row may go on in it, but what lies there is as good as any other K and V for as
long as the row holds it: whoever begins alike has it copied, or adopts the row where it is nobody's.

Tails stand at *places*: a place is the number of that last page, in the first range, or the key where there is none. Of
those at one place the neighbours in alphabetical order have most in common with any other, so a look-up compares two,
however many there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from .node import Ids, common
from .order import EvictionOrder
from .retention import DEFAULT_PRIORITY

TOKEN = 8
"""Bytes of an id."""


@dataclass(eq=False)
class Tail:
    """What one row holds at its place.

    Attributes:
        row: which.
        place: where.
        ids: of its tokens, as bytes.
        kept: whether the row is nobody's, and gives way when memory is short.
        used: when it was used last, in the tree's count.
        priority: how long it is to be kept.
        expires: when its priority is the default again.
    """

    row: int
    place: Hashable
    ids: bytes
    kept: bool = False
    used: int = 0
    priority: int = DEFAULT_PRIORITY
    expires: float = inf

    @property
    def is_evictable(self) -> bool:
        return self.kept

    @property
    def tokens(self) -> int:
        return len(self.ids) // TOKEN

    def priority_at(self, now: float) -> int:
        return self.priority if now < self.expires else DEFAULT_PRIORITY


class Found(NamedTuple):
    """A tail that begins with the first `tokens` of those that were asked for."""

    tail: Tail
    tokens: int


class Tails:
    """Of all rows that have one; those of kept rows may be empty."""

    def __init__(self) -> None:
        self.of: dict[int, Tail] = {}
        """By row."""
        self.order: EvictionOrder[Tail] = EvictionOrder()
        """Of kept rows that hold any token beside what the tree knows."""
        self._at: dict[Hashable, tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]] = {}
        """By place: ids and rows, in order, of live rows and of kept ones."""

    def put(self, tail: Tail, now: float) -> None:
        """Has a row hold this, and nothing that it held before."""
        self.pop(tail.row)
        self.of[tail.row] = tail
        insort(self._at.setdefault(tail.place, ([], []))[tail.kept], (tail.ids, tail.row))
        self.use(tail, now)

    def use(self, tail: Tail, now: float) -> None:
        """Has a tail take its place in the order of eviction."""
        if tail.ids:
            self.order.offer(tail, now)

    def pop(self, row: int) -> Tail | None:
        """Has a row hold nothing; returns what it held."""
        tail = self.of.pop(row, None)
        if tail:
            at = self._at[tail.place]
            entries = at[tail.kept]
            del entries[bisect_left(entries, (tail.ids, row))]
            if not any(at):
                del self._at[tail.place]
            tail.kept = False  # the order passes over it
        return tail

    def rows(self, place: Hashable) -> list[int]:
        """Those that hold something at a place."""
        return [row for entries in self._at.get(place, ()) for _, row in entries]

    def places(self, numbers: list[int]) -> list[int]:
        """Of pages those that are places, in their order."""
        if self._at.keys().isdisjoint(numbers):  # at once: most are none
            return []
        return [number for number in numbers if number in self._at]

    def longest(self, place: Hashable, ids: Ids, kept: bool) -> Found | None:
        """The tail of a live or a kept row at a place that has most in common with these ids; of several the one that
        has nothing else, if there is one."""
        at_place = self._at.get(place)
        if at_place is None or not (entries := at_place[kept]):
            return None
        asked = ids.tobytes()
        at = bisect_left(entries, (asked,))
        most = max([_common(near, asked) for near, _ in entries[max(at - 1, 0) : at + 1]])
        at = bisect_left(entries, (asked[: most * TOKEN],))  # the first one that begins so
        return Found(self.of[entries[at][1]], most)


def _common(tail: bytes, asked: bytes) -> int:
    """How many ids a tail and those that are asked for begin with alike."""
    if asked.startswith(tail):  # all of it, as most do
        return len(tail) // TOKEN
    return common(np.frombuffer(tail, np.int64), np.frombuffer(asked, np.int64))
