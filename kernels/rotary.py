"""Rotary position embedding of one token's heads: 16 bytes of each half of a head per thread and turn.

Products and their sum are computed in fp32 and rounded once, to what is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numba import cuda

from .arithmetic import FORMATS, fma
from .memory import load_16_cached, load_16_written, store_16
from .ptx import float32, inlined
from .vectors import THREADS, move_heads


class RotateHalf(NamedTuple):
    """Rotary position embedding ([RoFormer](https://arxiv.org/abs/2104.09864)) as in Llama: element i of a head is
    rotated with element i + rotary_dim / 2.

    The first `rotary_dim` elements `x` of each head become `x * cos + rotate_half(x) * sin`, where `rotate_half` puts
    the second half, negated, in front of the first; the others stay. (Models that rotate neighbours with each other, as
    GLM and Cohere do, cannot use it.)

    Attributes:
        query: `[tokens, num_heads, head_dim]`, like `k`.
        rotated: like `query`, takes the rotated queries of all tokens: `query` itself, or what overlaps it nowhere.
        cos: `[tokens, rotary_dim]`, of the dtype of `k`, as modules of transformers make them once a forward pass, for
            all layers; half of `rotary_dim` is a multiple of 16 bytes.
        sin: likewise.
    """

    query: torch.Tensor
    rotated: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Rotation(NamedTuple):
    """The addresses of a `RotateHalf`, and bytes from one token, and head, to the next."""

    query: int
    rotated: int
    cos: int
    sin: int
    query_token: int
    query_head: int
    rotated_token: int
    rotated_head: int
    cos_token: int
    sin_token: int


def make_turn(dtype: torch.dtype) -> Any:
    """A function for kernels that rotates the numbers in a word, with their counterparts in another and a sign."""
    number = FORMATS[dtype]
    pack, low, high = number.pack, number.low, number.high

    @inlined
    def turn_single(x: int, y: int, cos: int, sin: int, sign: float) -> int:
        return pack(fma(low(x), low(cos), sign * low(y) * low(sin)), float32(0))

    @inlined
    def turn_pair(x: int, y: int, cos: int, sin: int, sign: float) -> int:
        return pack(
            fma(low(x), low(cos), sign * low(y) * low(sin)), fma(high(x), high(cos), sign * high(y) * high(sin))
        )

    return turn_single if number.per_word == 1 else turn_pair


def make_rotate(dtype: torch.dtype, heads: int, head_vectors: int, half_vectors: int) -> Any:
    """A function for kernels that rotates one token's heads.

    Args:
        head_vectors, half_vectors: 16-byte vectors of a head, and of half of what is rotated of it.
    """
    turn, half, passed_vectors = make_turn(dtype), half_vectors * 16, head_vectors - 2 * half_vectors

    @inlined
    def rotate_vectors(source: int, target: int, cos: int, sin: int) -> None:
        """Rotates a vector of the first half with its counterpart in the second."""
        x0, x1, x2, x3 = load_16_written(source)
        y0, y1, y2, y3 = load_16_written(source + half)
        c0, c1, c2, c3 = load_16_cached(cos)
        d0, d1, d2, d3 = load_16_cached(cos + half)
        s0, s1, s2, s3 = load_16_cached(sin)
        t0, t1, t2, t3 = load_16_cached(sin + half)
        plus, minus = float32(1), float32(-1)
        store_16(
            target,
            turn(x0, y0, c0, s0, minus),
            turn(x1, y1, c1, s1, minus),
            turn(x2, y2, c2, s2, minus),
            turn(x3, y3, c3, s3, minus),
        )
        store_16(
            target + half,
            turn(y0, x0, d0, t0, plus),
            turn(y1, x1, d1, t1, plus),
            turn(y2, x2, d2, t2, plus),
            turn(y3, x3, d3, t3, plus),
        )

    @inlined
    def rotate_heads(source: int, target: int, source_head: int, target_head: int, cos: int, sin: int) -> None:
        """Rotates one token's heads from address `source` to address `target`, which may be the same.

        Args:
            source_head, target_head: bytes from one head to the next.
            cos, sin: addresses of the token's.
        """
        vector = cuda.threadIdx.x
        while vector < heads * half_vectors:
            head = vector // half_vectors
            inside = (vector - head * half_vectors) * 16
            first, second = source + head * source_head + inside, target + head * target_head + inside
            rotate_vectors(first, second, cos + inside, sin + inside)
            vector += THREADS
        if passed_vectors:
            passed = heads * passed_vectors
            move_heads(source + 2 * half, target + 2 * half, source_head, target_head, passed, passed_vectors)

    return rotate_heads
