"""Tiles of 8-bit K and V, which become 16 bits on their way to shared memory, without loss and without their scales.

Threads have a tile in registers while they work on another, and put it to its place when that is free.
"""

from __future__ import annotations

from typing import Any

import torch

from .addressing import Row, Tokens, make_addressing
from .eight_bits import EIGHT_BITS
from .memory import load_16, load_f32
from .prompts import Prompt, live
from .ptx import inlined
from .shared import load_shared_f32, store_shared_16, store_shared_f32, wait_copies


def make_widened_tiles(
    dtype: torch.dtype, block_size: int, tile: int, head_dim: int, pitch: int, threads: int
) -> tuple[Any, Any, Any, int, int]:
    """Functions for kernels: a block's threads look a tile up, begin to fetch one head of it, and put it, and its
    scales, to shared memory. Keys that are not live repeat one that is.

    Returns:
        the functions; how many homes a thread looks up, and how many words it fetches.
    """
    home_of, address_of = make_addressing(block_size)
    widen = EIGHT_BITS[dtype].pair
    vectors = head_dim // 16  # of 16 bytes in a token
    turns = -(-tile * vectors // threads)
    assert tile <= threads, "a thread fetches one scale"

    @inlined
    def look_up(homes: Any, key: int, row: Row, prompt: Prompt, thread: int) -> None:
        for turn in range(turns):
            homes[turn] = home_of(live(key + (thread + turn * threads) // vectors, prompt), row)
        homes[turns] = home_of(live(key + thread % tile, prompt), row)

    @inlined
    def begin(
        words: Any, to: int, source: Tokens, scales: Tokens, homes: Any, key: int, prompt: Prompt, thread: int
    ) -> float:
        """Fetches a thread's part, and gives a scale of it."""
        for turn in range(turns):
            vector = thread + turn * threads
            token = live(key + vector // vectors, prompt)
            loaded = load_16(address_of(token, homes[turn], source) + vector % vectors * 16)
            for i in range(4):
                words[4 * turn + i] = loaded[i]
        return load_f32(address_of(live(key + thread % tile, prompt), homes[turns], scales))

    @inlined
    def end(words: Any, scale: float, to: int, scales_to: int, thread: int) -> None:
        """Puts it where it belongs. What was copied before is there, too."""
        wait_copies()
        for turn in range(turns):
            vector = thread + turn * threads
            if vector < tile * vectors:
                place = to + vector // vectors * pitch + vector % vectors * 32
                for half in range(2):
                    a = words[4 * turn + 2 * half]
                    b = words[4 * turn + 2 * half + 1]
                    store_shared_16(
                        place + half * 16,
                        widen(a, a, 0x1100), widen(a, a, 0x3322), widen(b, b, 0x1100), widen(b, b, 0x3322),
                    )  # fmt: skip
        if thread < tile:
            store_shared_f32(scales_to + thread * 4, scale)

    return look_up, begin, end, turns + 1, 4 * turns


def make_scale(num_scores: int) -> Any:
    """A function for kernels that multiplies a tile's scores, or weights, by its scales."""

    @inlined
    def scale_columns(scores: Any, scales: int, lane: int) -> None:
        """See `softmax` for where they are."""
        for j in range(num_scores // 4):
            for i in range(2):
                scale = load_shared_f32(scales + (8 * j + 2 * (lane & 3) + i) * 4)
                scores[4 * j + i] *= scale
                scores[4 * j + 2 + i] *= scale

    return scale_columns
