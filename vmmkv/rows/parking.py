"""Parked rows: by age, for who must give pages up, and by capacity, for who looks for a row that fits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice

SOME = 64
"""Rows that are looked at before what has become of them."""


class Parking:
    """Rows that nobody has, whose pages are still mapped.

    To park, to leave and to find the row that fits best cost the same for ten rows as for a hundred thousand, but for
    the search in a sorted list of the capacities that there are.
    """

    def __init__(self) -> None:
        self._capacity: dict[int, int] = {}  # oldest first
        self._rows: dict[int, dict[int, None]] = {}
        self._capacities: list[int] = []

    def __len__(self) -> int:
        return len(self._capacity)

    def __contains__(self, row: object) -> bool:
        return row in self._capacity

    def __iter__(self) -> Iterator[int]:
        """The rows, those that were parked first coming first."""
        return iter(self._capacity)

    def put(self, row: int, capacity: int) -> None:
        """Parks a row, or says that the capacity of a parked one is another now; it stays as old as it was."""
        if (before := self._capacity.get(row)) is not None:
            if before == capacity:
                return
            self._drop(row, before)
        self._capacity[row] = capacity
        rows = self._rows.get(capacity)
        if rows is None:
            rows = self._rows[capacity] = {}
            insort(self._capacities, capacity)
        rows[row] = None

    def remove(self, row: int) -> None:
        """Takes a row away, if it is parked."""
        capacity = self._capacity.pop(row, None)
        if capacity is not None:
            self._drop(row, capacity)

    def fitting(self, tokens: int) -> Iterator[int]:
        """Rows, the best first: the smallest that is large enough; then, or with no length to go by, the largest."""
        count = len(self._capacities)
        split = bisect_left(self._capacities, tokens) if tokens else count
        for index in chain(range(split, count), range(split - 1, -1, -1)):
            yield from self._rows[self._capacities[index]]

    def oldest(self) -> Iterator[int]:
        """The rows, those that were parked first coming first; they may leave meanwhile."""
        passed = 0
        while some := list(islice(self._capacity, passed, passed + SOME)):
            yield from some
            passed += sum(row in self._capacity for row in some)

    def _drop(self, row: int, capacity: int) -> None:
        rows = self._rows[capacity]
        del rows[row]
        if not rows:
            del self._rows[capacity]
            del self._capacities[bisect_left(self._capacities, capacity)]
