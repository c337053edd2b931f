"""Where a token lies: the one difference between contiguous kernels and their paged twins."""

from __future__ import annotations

from typing import Any

from numba import cuda

from .memory import load_i32


def make_place(block_size: int) -> Any:
    """A function for kernels that gives the byte offset of a token.

    Args:
        block_size: tokens of a block in the block table; 0: tokens lie in rows.
    """

    @cuda.jit(device=True, inline="always")
    def place(token, row, table, row_stride, token_stride):  # type: ignore[no-untyped-def]
        """`table` is the address of the row's part of the block table."""
        if block_size:
            block = token // block_size
            return load_i32(table + block * 4) * row_stride + (token - block * block_size) * token_stride
        return row * row_stride + token * token_stride

    return place
