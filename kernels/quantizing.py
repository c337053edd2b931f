"""Writing the heads of one token as 8-bit numbers and their scales, rotated before: a warp for each head.

See `quantized` for what is written, and `rotary` for how it is rotated.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import cuda

from .arithmetic import FORMATS
from .eight_bits import EIGHT_BITS, pack_bytes
from .memory import load_8, load_16, load_f32, store_4, store_f32
from .ptx import float32, inlined, instruction
from .quantized import LARGEST, LEAST
from .rotary import make_turn
from .vectors import THREADS
from .warp import shuffle_xor

WARPS = THREADS // 32
INFINITY, NAN = math.inf, math.nan


def _greater(a: float, b: float) -> Any:
    return np.float32(max(a, abs(b)) if a == a and b == b else NAN)


greater = instruction(
    "{ .reg .f32 t; abs.f32 t, $2; max.NaN.f32 $0, $1, t; }", "f", "ff", _greater, pure=True
)  # fmt: skip
"""The greater of a number and the size of another; NaN if one of them is."""

exact_reciprocal = instruction(
    "rcp.rn.f32 $0, $1;", "f", "f", lambda x: np.float32(1) / np.float32(x), pure=True
)  # fmt: skip
"""1 / x, rounded to nearest."""


def make_load_four(dtype: torch.dtype, half: int) -> Any:
    """A function for kernels that loads four numbers of a head to a place in a local array.

    Args:
        half: of a head's first elements so many turn with as many behind them; 0: none do. What they become is rounded.
    """
    low, high, turn = FORMATS[dtype].low, FORMATS[dtype].high, make_turn(dtype)
    words, load = (4, load_16) if dtype.itemsize == 4 else (2, load_8)
    half_fours, four_bytes = half // 4, 4 * dtype.itemsize

    @inlined
    def put(numbers: Any, place: int, i: int, word: int) -> None:
        if words == 4:
            numbers[place + i] = low(word)
        else:
            numbers[place + 2 * i] = low(word)
            numbers[place + 2 * i + 1] = high(word)

    @inlined
    def load_four(numbers: Any, place: int, source: int, four: int, cos: int, sin: int) -> None:
        """From the address of a head."""
        x = load(source + four * four_bytes)
        if four < 2 * half_fours:
            first = four < half_fours
            y = load(source + (four + half_fours if first else four - half_fours) * four_bytes)
            c, s = load(cos + four * four_bytes), load(sin + four * four_bytes)
            for i in range(words):
                put(numbers, place, i, turn(x[i], y[i], c[i], s[i], float32(-1) if first else float32(1)))
        else:
            for i in range(words):
                put(numbers, place, i, x[i])

    return load_four


def make_quantize_heads(
    num_heads: int, head_dim: int, dtype: torch.dtype, to: torch.dtype, half: int = 0, given: bool = False
) -> Any:
    """A function for kernels that writes one token's heads as 8-bit numbers; called by all threads.

    Args:
        half: half of what is rotated of a head, in elements.
        given: scales are read, and not written.
    """
    load_four, code = make_load_four(dtype, half), EIGHT_BITS[to].code
    fours = head_dim // 4
    owned = -(-fours // 32)
    num_numbers = 4 * owned
    whole, step = 1.0 if given else LARGEST[to], 1 / LARGEST[to]

    @inlined
    def quantize_heads(
        source: int, target: int, scales: int, source_head: int, target_head: int, scale_head: int, cos: int, sin: int
    ) -> None:
        """From address `source` to `target` and `scales`; bytes from one head to the next; the token's angles."""
        lane = cuda.threadIdx.x & 31
        head = cuda.threadIdx.x >> 5
        numbers = cuda.local.array(num_numbers, float32)
        while head < num_heads:
            top = float32(0)
            for i in range(owned):  # a lane behind the last takes that as well
                load_four(numbers, 4 * i, source + head * source_head, min(i * 32 + lane, fours - 1), cos, sin)
                if not given:
                    for j in range(4):
                        top = greater(top, numbers[4 * i + j])
            if given:
                top = load_f32(scales + head * scale_head)
            else:
                for turn in range(5):
                    top = greater(top, shuffle_xor(top, 1 << turn))
            finite = top < float32(INFINITY)
            usable = finite and top >= float32(LEAST)
            factor = exact_reciprocal(top) * float32(whole) if usable else float32(0)
            for i in range(owned):
                for j in range(4):
                    number = numbers[4 * i + j]
                    numbers[4 * i + j] = number * factor if usable and (not given or number == number) else float32(0)
                if i * 32 + lane < fours:
                    word = pack_bytes(
                        code(numbers[4 * i]), code(numbers[4 * i + 1]),
                        code(numbers[4 * i + 2]), code(numbers[4 * i + 3]),
                    )  # fmt: skip
                    store_4(target + head * target_head + (i * 32 + lane) * 4, word)
            if lane == 0 and not given:
                store_f32(scales + head * scale_head, top * float32(step) if finite else float32(NAN))
            head += WARPS

    return quantize_heads
