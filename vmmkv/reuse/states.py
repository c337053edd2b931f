"""Tokens of a row as they lie: one flat tensor for each range of the layout, K and V of all its layers; and its scales,
where rows have any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..rows.rows import Rows


def states_of(rows: Rows, ranges: Sequence[torch.Tensor], row: int, start: int, end: int) -> list[torch.Tensor]:
    """By range the elements of tokens `[start, end)` of a row: views.

    Args:
        ranges: the elements of each range, all rows of it.
    """
    states = []
    for flat, (arena, record) in zip(ranges, rows.ranges):
        base = arena.table.address_of(row, 0) - arena.address
        states.append(flat[(base + start * record) // flat.itemsize : (base + end * record) // flat.itemsize])
    return states


def messages_of(rows: Rows, ranges: Sequence[torch.Tensor], row: int, start: int, end: int) -> list[torch.Tensor]:
    """What another process is sent of a row: these, and its scales, where rows have any."""
    scales = [rows.scales.rows[row]] if rows.scales else []
    return [*states_of(rows, ranges, row, start, end), *scales]
