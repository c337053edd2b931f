"""Where a token lies: the one difference between contiguous kernels and their paged twins."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .memory import load_i32


@cuda.jit(device=True, inline="always")
def row_of(sequence, rows):  # type: ignore[no-untyped-def]
    """The row of a sequence, of the cache or of the block table; without `rows` its number."""
    return load_i32(rows + sequence * 4) if rows != 0 else sequence


@cuda.jit(device=True, inline="always")
def first_token(sequence, starts):  # type: ignore[no-untyped-def]
    """The first token of a sequence that may be read."""
    return load_i32(starts + sequence * 4) if starts != 0 else 0


def make_addressing(block_size: int) -> tuple[Any, Any]:
    """Functions for kernels: `home_of` a token, a row or a block, and its `offset_in` bytes.

    Args:
        block_size: tokens of a block in the block table; 0: tokens lie in rows.
    """

    @cuda.jit(device=True, inline="always")
    def home_of(token, row, table):  # type: ignore[no-untyped-def]
        """`table` is the address of the row's part of the block table."""
        return load_i32(table + token // block_size * 4) if block_size else row

    @cuda.jit(device=True, inline="always")
    def offset_in(home, token, home_stride, token_stride):  # type: ignore[no-untyped-def]
        inside = token % block_size if block_size else token
        return home * home_stride + inside * token_stride

    return home_of, offset_in
