"""Shelves: rows by their size, for who looks for one that fits, and by how long they have been there."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

SOME = 64
"""Rows that are looked at before what has become of them."""


class Shelf:
    """Rows of any sizes.

    To put, to remove and to find the row that fits best cost the same for ten rows as for a hundred thousand, but for
    the search in a sorted list of the sizes that there are.
    """

    def __init__(self) -> None:
        # A `dict` would look at all that have left its front before it finds the first one.
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._rows: dict[int, OrderedDict[int, None]] = {}
        self._ascending: list[int] = []

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, row: object) -> bool:
        return row in self._sizes

    def __iter__(self) -> Iterator[int]:
        """The rows, those that were put there first coming first."""
        return iter(self._sizes)

    def size(self, row: int) -> int:
        """The size of a row that is there."""
        return self._sizes[row]

    def put(self, row: int, size: int) -> None:
        """Puts a row there, or says that the size of one is another now; it stays as old as it was."""
        if (before := self._sizes.get(row)) is not None:
            if before == size:
                return
            self._drop(row, before)
        self._sizes[row] = size
        rows = self._rows.get(size)
        if rows is None:
            rows = self._rows[size] = OrderedDict()
            insort(self._ascending, size)
        rows[row] = None

    def remove(self, row: int) -> None:
        """Takes a row away, if it is there."""
        size = self._sizes.pop(row, None)
        if size is not None:
            self._drop(row, size)

    def fitting(self, size: int) -> Iterator[int]:
        """Rows, the best first: the smallest that is large enough; then, or with no size to go by, the largest."""
        count = len(self._ascending)
        split = bisect_left(self._ascending, size) if size else count
        for index in chain(range(split, count), range(split - 1, -1, -1)):
            yield from self._rows[self._ascending[index]]

    def oldest(self) -> Iterator[int]:
        """The rows, those that were put there first coming first; they may leave meanwhile."""
        return each_of(self._sizes)

    def largest(self) -> Iterator[int]:
        """The rows of any size but 0, the largest first; they may leave, or shrink and come again, meanwhile."""
        for size in self._ascending[::-1]:
            if size and (rows := self._rows.get(size)):
                yield from each_of(rows)

    def _drop(self, row: int, size: int) -> None:
        rows = self._rows[size]
        del rows[row]
        if not rows:
            del self._rows[size]
            del self._ascending[bisect_left(self._ascending, size)]


def each_of(rows: OrderedDict[int, int] | OrderedDict[int, None]) -> Iterator[int]:
    """Rows in their order; they may leave meanwhile. Looks at no more than twice as many as are asked for."""
    passed = 0
    while some := list(islice(rows, passed, passed + max(SOME, passed))):
        yield from some
        passed += sum(row in rows for row in some)
