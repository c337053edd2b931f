"""Shelves of rows, against lists that are sorted anew for each question."""

from __future__ import annotations

import random

from vmmkv.rows.shelf import SOME, Shelf


def test_any_operations_on_a_shelf() -> None:
    shelf, model = Shelf(), {}
    for _ in range(20 * SOME):
        row, size = random.randrange(4 * SOME), random.randrange(6)
        if random.random() < 0.7:
            shelf.put(row, size)
            model[row] = size
        else:
            shelf.remove(row)
            model.pop(row, None)
        assert len(shelf) == len(model)
        assert list(shelf) == list(shelf.oldest()) == list(model)
        largest = [shelf.size(row) for row in shelf.largest()]
        assert largest == sorted((size for size in model.values() if size), reverse=True)
        assert set(shelf.largest()) == {row for row, size in model.items() if size}
        fitting = list(shelf.fitting(3))
        assert sorted(fitting) == sorted(model)
        large, small = (sorted(size for size in model.values() if (size < 3) == is_small) for is_small in (False, True))
        assert [model[row] for row in fitting] == large + small[::-1]


def test_all_rows_come_once_while_they_leave() -> None:
    shelf = Shelf()
    for row in range(5 * SOME):
        shelf.put(row, 1 + row % 3)
    for walk in (shelf.oldest, shelf.largest):
        before, came = list(shelf), []
        for row in walk():
            came.append(row)
            if random.random() < 0.5:
                shelf.remove(row)
        assert sorted(came) == sorted(before)
