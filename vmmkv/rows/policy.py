"""Which pages go first when somebody needs them, and which are mapped ahead: functions of the row table alone.

Nobody can adopt what is retired, so that goes first. What a sequence has to spare is used many tokens from now, if at
all, the end of it last; a lookahead is mapped again in time. Parked rows may be adopted whole by the next sequence, the
oldest are the least likely to be. What a sequence said that it will need comes last.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from ..memory.frames import LARGE
from .shelf import each_of
from .table import RowTable

Span = tuple[int, int]
"""Pages `[first, end)` of a row."""


def spans(start: int, length: int, records: Sequence[int], page_size: int) -> list[Span]:
    """Per arena the pages that tokens `[start, length)` lie in; `records` are bytes of a token."""
    return [(start * record // page_size, -(-length * record // page_size)) for record in records]


def page_spans(
    extents: npt.NDArray[np.int64], records: Sequence[int], page_size: int, overread: int
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """`spans` for many rows, with `overread` tokens behind those that hold any; `extents` are starts and lengths,
    `[rows, 2]`."""
    start, length = extents.T
    length = np.where(length, length + overread, 0)
    return [(start * record // page_size, -(-length * record // page_size)) for record in records]


def large_frames(pages: int, start: int) -> int:
    """How many large frames lie under new pages of a row whose tokens begin at `start`: as many as fit.

    So they lie under prompts, and under what is expected to be long. Behind them, and where a sequence grows token by
    token, lie single pages, so that a sequence has no more than its last page to waste; and under a window, whose front
    is given back page by page.

    What they cost comes later. A large frame is used, and mapped, as a whole:
     1. A sequence that is truncated into one keeps it until it grows or ends: up to `LARGE - 1` pages of each arena.
        One whose front is given back keeps the one that its first token lies in.
     2. Who adopts a row, and would end within one, or in front of one, has it unmapped, and what lies behind it, and
        gets single pages there. Where work may still touch it another row is taken; only where no memory is idle, or no
        other row, it is kept, as in 1.
     3. Where it takes frames of one size, and only the others are free, and no more memory may be taken, the driver
        releases them and makes those: `LARGE` calls of the one kind and one of the other.
    """
    return 0 if start else pages // LARGE


MAP, MAKE = 35, 44
"""What to map a frame counts, and to make one and map it, where a copy of a page counts 1: weights, near an H200's."""


def retired(table: RowTable, max_seq_len: int) -> Iterator[tuple[int, int]]:
    """Retired rows, all of whose pages may go, and live rows with pages in front, which keep all others."""
    yield from zip(each_of(table.retired), repeat(0))
    yield from zip(each_of(table.fronts), repeat(max_seq_len))


def victims(table: RowTable, max_seq_len: int, dense: bool, claimed: Collection[int]) -> Iterator[tuple[int, int]]:
    """Rows that may have pages to give, and the tokens whose pages they keep; what is missed least comes first.

    Args:
        dense: live rows that hold tokens may be read to their very end, so nothing behind them goes.
        claimed: rows that are about to hold more.
    """
    if table.retired or table.fronts:
        yield from retired(table, max_seq_len)
    yield from _spare(table, dense)
    yield from zip(table.parked.oldest(), repeat(0))
    yield from _expected(table, dense, claimed)
    if dense:
        yield from zip(claimed, repeat(max_seq_len))  # what lies in front of what they are to hold


def slack(table: RowTable, dense: bool, claimed: Container[int]) -> Iterator[tuple[int, int]]:
    """Those of `victims` that may grow into what they have to give, and ask nobody."""
    yield from _spare(table, dense)
    yield from _expected(table, dense, claimed)


def _spare(table: RowTable, dense: bool) -> Iterator[tuple[int, int]]:
    """Live rows that have more than they expect to need."""
    if not dense:
        yield from ((row, table.expected[row]) for row in table.spare.largest())


def _expected(table: RowTable, dense: bool, claimed: Container[int]) -> Iterator[tuple[int, int]]:
    """Live rows that have more than they hold."""
    yield from ((row, 0) for row in table.spare.oldest() if not dense or row not in claimed)


def wanted(table: RowTable, rows: npt.NDArray[np.int64], ahead: int, max_seq_len: int) -> npt.NDArray[np.int64]:
    """By row, the tokens that there is to be room for: so many ahead of those that it holds, and those that are
    expected; none where neither is known."""
    lengths, expected = table.lengths[rows], table.expectations[rows]
    return np.where((lengths > 0) | (expected > 0), np.minimum(np.maximum(lengths + ahead, expected), max_seq_len), 0)


def awake(table: RowTable) -> npt.NDArray[np.int64]:
    """Those of the needy rows that still are. A row that has half of its lookahead left is let alone, so that several
    pages come at once."""
    rows = np.fromiter(table.needy, np.int64, len(table.needy))
    lengths, expected = table.lengths[rows], table.expectations[rows]
    return rows[(lengths > table.wakes[rows]) | (expected > table.capacities[rows])]


def growing(
    table: RowTable, rows: npt.NDArray[np.int64], ahead: int, max_seq_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Those of live rows that are to have more pages, and the tokens that there is to be room for; the neediest first.

    What a row expects comes whole, in the order in which rows said so; only those who have next to nothing left, of a
    lookahead, come before. Otherwise every prompt would get its beginning before the first one got its end.

    Args:
        ahead: tokens that are to be mapped behind each row's length.
    """
    tokens = wanted(table, rows, ahead, max_seq_len)
    rows, tokens = rows[tokens > table.capacities[rows]], tokens[tokens > table.capacities[rows]]
    expected, capacities = table.expectations[rows], table.capacities[rows]
    left = capacities - table.lengths[rows]
    left = np.where(expected > capacities, np.minimum(left, ahead // 4), left)
    order = np.argsort(left, kind="stable")
    return rows[order], tokens[order]
