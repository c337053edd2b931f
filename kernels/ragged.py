"""Work of unequal sequences, cut into equal shares: where in the batch a share begins.

Lengths are data on the device. The work of all sequences is laid end to end, every block of threads takes as many
units of it as any other, and finds its first sequence by itself: so one launch, and one captured graph, serves every
length, and no block waits for the longest sequence.
"""

from __future__ import annotations

from typing import Any

from .memory import load_i32
from .ptx import inlined
from .warp import count_true, prefix_sum, shuffle_count, sum_of_lanes


@inlined
def sequence_of(token: int, cu_seqlens: int, batch: int) -> int:
    """The sequence whose tokens include this one: the last that begins at it or before."""
    sequence = 0
    end = batch
    while end - sequence > 1:
        middle = (sequence + end) // 2
        if load_i32(cu_seqlens + middle * 4) <= token:
            sequence = middle
        else:
            end = middle
    return sequence


def make_ragged(units_of: Any) -> tuple[Any, Any]:
    """Functions for kernels: `total` units of a batch, and `locate`, the sequence that a unit belongs to.

    Args:
        units_of: an inlined device function: the units of a sequence, from its index and one more argument.
    """

    @inlined
    def total(batch: int, lengths: Any, lane: int) -> int:
        """The units of all sequences. The lanes of a warp count together."""
        units = 0
        sequence = lane
        while sequence < batch:
            units += units_of(sequence, lengths)
            sequence += 32
        return sum_of_lanes(units)

    @inlined
    def locate(unit: int, batch: int, lengths: Any, lane: int) -> tuple[int, int]:
        """The sequence of a unit (at most the last one), and the units of those before it."""
        first = 0
        before = 0
        units = 0
        upto = 0
        searching = True
        while searching:
            units = units_of(first + lane, lengths) if first + lane < batch else 0
            upto = prefix_sum(units, lane)
            chunk = shuffle_count(upto, 31)
            searching = before + chunk <= unit and first + 32 < batch
            if searching:
                before += chunk
                first += 32
        ended = min(count_true(1 if before + upto <= unit else 0), batch - 1 - first)
        return first + ended, before + shuffle_count(upto - units, ended)

    return total, locate
