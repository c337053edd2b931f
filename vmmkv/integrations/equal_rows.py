"""Neighbouring rows of a batch that hold the same bytes.

`generate` repeats a prompt for each beam, and for each sequence that it is to return.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch

from .batch import Batch
from .extents import Extent

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What numbers of so many bytes are compared as: a NaN equals itself, and 0 is not -0."""


def equal_neighbours(batch: Batch, extents: Many[Extent]) -> Iterator[tuple[int, int]]:
    """Rows, each with the first of those right before it that hold the same bytes of all tokens that layers hold.

    Args:
        extents: of all layers; those that hold tokens hold them of as many rows.
    """
    last, source = extents[-1], 0
    newest = _bits(batch.parts(len(extents) - 1, last.rows, last.end - 1, last.end)[0])
    for row, looks_alike in enumerate((newest[1:] == newest[:-1]).flatten(1).all(1).tolist(), start=1):
        if looks_alike and _are_equal(batch, extents, source, row):
            yield row, source
        else:
            source = row


def _are_equal(batch: Batch, extents: Many[Extent], row: int, other: int) -> bool:
    """Whether two rows hold the same bytes of all tokens that layers hold."""
    return all(
        torch.equal(_bits(states[row]), _bits(states[other]))
        for layer, extent in enumerate(extents)
        if extent.rows
        for states in batch.parts(layer, extent.rows, extent.first, extent.end)
    )


def _bits(states: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers."""
    return states.view(_BITS[states.itemsize])
