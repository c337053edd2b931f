"""Policies of rows, against plain loops over the same columns: no memory, no driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vmmkv.memory.frames import LARGE
from vmmkv.rows import policy

MAX_SEQ_LEN = 100
COLUMNS = st.tuples(st.integers(0, 60), st.integers(0, MAX_SEQ_LEN), st.integers(0, 40), st.integers(-20, 40))
"""A live row: its length, what it expects, how many tokens more there is room for, and how far behind its length it
wakes the mapper."""


def table_of(rows: list[tuple[int, int, int, int]]) -> Any:
    """What policies read of a row table, with all rows needy."""
    lengths, expected, room, wakes = np.array(rows, np.int64).reshape(-1, 4).T
    return SimpleNamespace(
        lengths=lengths,
        expectations=expected,
        capacities=lengths + room,
        wakes=lengths + wakes,
        needy=dict.fromkeys(range(len(rows))),
    )


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1),
    st.lists(st.integers(1, 9000), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_pages_of_many_rows_are_those_of_each(
    extents: list[tuple[int, int]], records: list[int], overread: int
) -> None:
    ends = [(start, start + tokens) for start, tokens in extents]
    found = policy.page_spans(np.array(ends, np.int64), records, 4096, overread)
    for row, (start, end) in enumerate(ends):
        expected = policy.spans(start, end + overread if end else 0, records, 4096)
        assert [(first[row], last[row]) for first, last in found] == expected
        for (first, last), record in zip(expected, records):
            covered = range(first * 4096, last * 4096)
            assert end == start or (start * record in covered and end * record - 1 in covered)


@given(st.lists(COLUMNS), st.integers(0, 30))
def test_the_neediest_rows_are_mapped_ahead_first(rows: list[tuple[int, int, int, int]], ahead: int) -> None:
    """Who has used up half of his lookahead, or expects more than there is room for; nobody else, and none twice. Of
    the latter each comes as if a quarter of a lookahead were left, so that they come one after another."""
    table = table_of(rows)
    awake = policy.awake(table)
    numbers, tokens = policy.growing(table, awake, ahead, MAX_SEQ_LEN)
    expected = {}
    for number, (length, announced, room, wakes) in enumerate(rows):
        aim = min(max(length + ahead, announced), MAX_SEQ_LEN) if length or announced else 0
        if (wakes < 0 or announced > length + room) and aim > length + room:
            expected[number] = aim
    assert dict(zip(numbers.tolist(), tokens.tolist())) == expected
    left = {n: min(room, ahead // 4) if end > length + room else room for n, (length, end, room, _) in enumerate(rows)}
    assert numbers.tolist() == sorted(expected, key=left.__getitem__)
    looked_at = {n for n, (length, announced, room, wakes) in enumerate(rows) if wakes < 0 or announced > length + room}
    assert set(awake.tolist()) == looked_at


@given(st.integers(0, 10 * LARGE), st.integers(0, 3))
def test_large_frames_lie_under_what_begins_at_the_beginning(pages: int, start: int) -> None:
    under = policy.large_frames(pages, start)
    assert under * LARGE <= pages
    assert (pages - under * LARGE < LARGE) if start == 0 else under == 0
