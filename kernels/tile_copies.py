"""Tiles of K and V, brought to shared memory by Hopper's copy engine.

A tile is rows of 128 bytes: of the first 64 elements of all its tokens, then of the next 64, swizzled (see `hopper`).
In a row of a cache it is one copy for each 64 elements, whatever the strides; with a block table it is one a block.
Where a copy would reach beyond the live tokens they are copied one by one, and the rest becomes zeros without being
read.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from numba import cuda

from .hopper import copy_box, expect_bytes
from .memory import load_i32
from .warp import sync_warp


def box_of(tile: int, block_size: int) -> int:
    """Tokens of a copy; `block_size` 0 is without a block table."""
    return gcd(tile, block_size) if block_size else tile


def tile_bytes(head_dim: int, tile: int) -> int:
    """Of `tile` tokens of one head, in whole rows."""
    return -(-head_dim // 64) * tile * 128


def make_copy_tile(head_dim: int, tile: int, block_size: int) -> Any:
    """A function for kernels: a warp begins to copy a tile."""
    box, halves = box_of(tile, block_size), -(-head_dim // 64)
    boxes = tile // box
    stage_bytes = tile_bytes(head_dim, tile)

    @cuda.jit(device=True, inline="always")
    def find(token, row, table):  # type: ignore[no-untyped-def]
        """Where a token lies: a row or a block, and the first token of that."""
        if block_size:
            block = token // block_size
            return load_i32(table + block * 4), block * block_size
        return row, 0

    @cuda.jit(device=True, inline="always")
    def copy_tile(to, box_map, token_map, head, row, table, key, begin, length, full, lane):  # type: ignore[no-untyped-def]
        """From token `key` on, of a row or of a row of the block table; `begin` to `length` are live.

        `full` is the barrier that waits for it.
        """
        if lane == 0:
            expect_bytes(full, stage_bytes)
        sync_warp()
        # Each lane looks up a block and copies it, or half of it.
        item = lane
        while item < boxes * halves:
            half = item // boxes
            token = key + item % boxes * box
            if begin <= token and token + box <= length:
                home, origin = find(token, row, table)
                target = to + (half * tile + token - key) * 128
                copy_box(target, box_map, half * 64, head, token - origin, home, full)
            item += 32
        for index in range(boxes):
            token = key + index * box
            if token < begin or token + box > length:
                home, origin = find(max(min(token, length - 1), 0), row, table)
                item = lane
                while item < box * halves:
                    half = item // box
                    inside = token + item % box
                    place = inside - origin if begin <= inside and inside < length else -1  # outside the tensor
                    target = to + (half * tile + inside - key) * 128
                    copy_box(target, token_map, half * 64, head, place, home, full)
                    item += 32

    return copy_tile
