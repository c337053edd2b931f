"""Tiles of K and V, brought to shared memory by Hopper's copy engine.

A tile is rows of 128 bytes: of the first 64 elements of all its tokens, then of the next 64, swizzled (see `hopper`).
In a row of a cache it is one copy for each 64 elements, whatever the strides; with a block table it is one a block.
Where a copy would reach beyond the live tokens they are copied one by one, and in place of each of the rest a live one:
a copy from outside of the tensor would give zeros, but touches the tensor's first page, which may not be mapped.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from numba import cuda

from .addressing import make_addressing
from .hopper import copy_box, expect_bytes
from .warp import shuffle_count, sync_warp


def box_of(tile: int, block_size: int) -> int:
    """Tokens of a copy; `block_size` 0 is without a block table."""
    return gcd(tile, block_size) if block_size else tile


def tile_bytes(head_dim: int, tile: int) -> int:
    """Of `tile` tokens of one head, in whole rows."""
    return -(-head_dim // 64) * tile * 128


def make_copy_tile(head_dim: int, tile: int, block_size: int) -> tuple[Any, Any]:
    """Functions for kernels: the lanes of a warp look a tile up, and begin to copy it.

    Both take the tile's first token; of the sequence, `begin` to `length` are live.
    """
    home_of, _ = make_addressing(block_size)
    box, halves = box_of(tile, block_size), -(-head_dim // 64)
    boxes = tile // box
    assert boxes * halves <= 32, "a lane copies one box"
    stage_bytes = tile_bytes(head_dim, tile)

    @cuda.jit(device=True, inline="always")
    def look_up(token, row, table, begin, length, lane):  # type: ignore[no-untyped-def]
        """Where this lane's part of the tile lies."""
        return home_of(max(min(token + lane % boxes * box, length - 1), begin), row, table)

    @cuda.jit(device=True, inline="always")
    def copy_tile(to, box_map, token_map, head, home, token, begin, length, full, lane):  # type: ignore[no-untyped-def]
        """`full` is the barrier that waits for it."""
        if lane == 0:
            expect_bytes(full, stage_bytes)
        sync_warp()
        half = lane // boxes
        first = token + lane % boxes * box
        if half < halves and begin <= first and first + box <= length:
            inside = first % block_size if block_size else first
            copy_box(to + (half * tile + first - token) * 128, box_map, half * 64, head, inside, home, full)
        for index in range(boxes):
            first = token + index * box
            if first < begin or first + box > length:
                its_home = shuffle_count(home, index)
                item = lane
                while item < box * halves:
                    half = item // box
                    live = max(min(first + item % box, length - 1), begin)
                    inside = live % block_size if block_size else live
                    to_token = to + (half * tile + index * box + item % box) * 128
                    copy_box(to_token, token_map, half * 64, head, inside, its_home, full)
                    item += 32

    return look_up, copy_tile
