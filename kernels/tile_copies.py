"""Tiles of K and V, brought to shared memory by Hopper's copy engine.

A tile is panels of 64 elements, one behind the other: rows of 128 bytes, one for each token, swizzled (see `hopper`).
In a row of a cache a panel is one copy (a *box*), whatever the strides; with a block table it is one a block. Where a
box would reach beyond the live tokens these are copied one by one, and in place of each of the rest a live one: a copy
from outside of the tensor would give zeros, but touches the tensor's first page, which may not be mapped.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from .addressing import Row, make_addressing
from .hopper import PANEL, ROW_BYTES, copy_box
from .prompts import Prompt, live
from .ptx import inlined
from .ring import Slot
from .warp import shuffle_count


class Source(NamedTuple):
    """One head of K or V, by the tensor maps of boxes of tokens and of single ones."""

    boxes: bytes
    tokens: bytes
    head: int


def box_of(tile: int, block_size: int) -> int:
    """Tokens of a copy; `block_size` 0 is without a block table."""
    return gcd(tile, block_size) if block_size else tile


def tile_bytes(head_dim: int, tile: int) -> int:
    """Of `tile` tokens of one head, in whole rows."""
    return -(-head_dim // PANEL) * tile * ROW_BYTES


def make_copy_tile(head_dim: int, tile: int, block_size: int) -> tuple[Any, Any]:
    """Functions for kernels: the lanes of a warp look a tile up, and begin to copy it.

    Both take the tile's first token, and the prompt, from whose `begin` on, to `length`, tokens are live.
    """
    home_of, _ = make_addressing(block_size)
    box, panels = box_of(tile, block_size), -(-head_dim // PANEL)
    boxes = tile // box
    assert boxes * panels <= 32, "a lane copies one box"

    @inlined
    def look_up(token: int, row: Row, prompt: Prompt, lane: int) -> int:
        """Where this lane's box of the tile lies."""
        return home_of(live(token + lane % boxes * box, prompt), row)

    @inlined
    def copy_rows(slot: Slot, source: Source, home: int, token: int, first: int, prompt: Prompt, lane: int) -> None:
        """Copies a box's tokens one by one; `first` is the box's first."""
        item = lane
        while item < box * panels:
            panel = item // box
            token_there = live(first + item % box, prompt)
            inside = token_there % block_size if block_size else token_there
            to = slot.address + (panel * tile + first - token + item % box) * ROW_BYTES
            copy_box(to, source.tokens, panel * PANEL, source.head, inside, home, slot.full)
            item += 32

    @inlined
    def copy_tile(slot: Slot, source: Source, home: int, token: int, prompt: Prompt, lane: int) -> None:
        """Begins to copy; `home` is what this lane looked up."""
        panel = lane // boxes
        first = token + lane % boxes * box
        if panel < panels and prompt.begin <= first and first + box <= prompt.length:
            inside = first % block_size if block_size else first
            to = slot.address + (panel * tile + first - token) * ROW_BYTES
            copy_box(to, source.boxes, panel * PANEL, source.head, inside, home, slot.full)
        for index in range(boxes):
            first = token + index * box
            if first < prompt.begin or first + box > prompt.length:
                copy_rows(slot, source, shuffle_count(home, index), token, first, prompt, lane)

    return look_up, copy_tile
