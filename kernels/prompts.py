"""Which queries of a prefill a block of threads has, and which tokens they may see."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .addressing import first_token
from .memory import load_i32
from .ragged import make_ragged


def make_find_queries(queries_per_block: int, windowed: bool) -> Any:
    """A function for kernels that gives a block of the grid's second dimension its queries."""

    @cuda.jit(device=True, inline="always")
    def units_of(sequence, cu_seqlens):  # type: ignore[no-untyped-def]
        """Blocks of queries."""
        count = load_i32(cu_seqlens + sequence * 4 + 4) - load_i32(cu_seqlens + sequence * 4)
        return (count + queries_per_block - 1) // queries_per_block

    _, locate = make_ragged(units_of)

    @cuda.jit(device=True, inline="always")
    def find_queries(batch, cu_seqlens, seq_lens, starts, window, lane):  # type: ignore[no-untyped-def]
        """The lanes of a warp look together.

        Returns:
            the sequence; where its queries begin in the batch, and how many they are; the block's first query among
            them, which is behind the last where there is nothing to do; and the sequence's first token that any
            of its queries sees, and its length.
        """
        # The last queries of a prompt see most keys: they go first.
        unit = cuda.gridDim.y - 1 - cuda.blockIdx.y
        sequence, before = locate(unit, batch, cu_seqlens, lane)
        prompt = load_i32(cu_seqlens + sequence * 4)
        count = load_i32(cu_seqlens + sequence * 4 + 4) - prompt
        length = load_i32(seq_lens + sequence * 4)
        begin = first_token(sequence, starts)
        if windowed:  # what no query of the sequence sees may be gone
            begin = max(begin, length - count + 1 - window)
        return sequence, prompt, count, (unit - before) * queries_per_block, begin, length

    return find_queries
