"""The softmax that prefill kernels keep while tiles of keys pass by.

A product's scores are spread over a warp: a lane has the columns `8 j + 2 (lane % 4)` and the next of row `lane // 4`,
in `scores[4 j]` and `scores[4 j + 1]`, and the same of the row 8 further down in the two after.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from .arithmetic import HALVES, LOG2E, NEGATIVE_INFINITY, exp2, fma, maximum, reciprocal
from .memory import load_f32, store_4
from .ptx import float32
from .warp import shuffle_xor


@cuda.jit(device=True, inline="always")
def hide(scores, num_scores, key, lane, low0, high0, low1, high1):  # type: ignore[no-untyped-def]
    """Takes out the keys that are not from `low` on and before `high`, for each of a lane's rows."""
    for j in range(num_scores // 4):
        for i in range(2):
            token = key + 8 * j + 2 * (lane & 3) + i
            at = 4 * j + i
            scores[at] = scores[at] if low0 <= token < high0 else float32(NEGATIVE_INFINITY)
            scores[at + 2] = scores[at + 2] if low1 <= token < high1 else float32(NEGATIVE_INFINITY)


@cuda.jit(device=True, inline="always")
def maxima(scores, num_scores, m0, m1):  # type: ignore[no-untyped-def]
    """Of the rows' scores and of those before."""
    for j in range(num_scores // 4):
        m0 = maximum(m0, maximum(scores[4 * j], scores[4 * j + 1]))
        m1 = maximum(m1, maximum(scores[4 * j + 2], scores[4 * j + 3]))
    for step in range(2):
        m0 = maximum(m0, shuffle_xor(m0, 1 << step))
        m1 = maximum(m1, shuffle_xor(m1, 1 << step))
    return m0, m1


@cuda.jit(device=True, inline="always")
def weigh(scores, num_scores, m0, m1, l0, l1, outer):  # type: ignore[no-untyped-def]
    """Makes scores weights, relative to the maxima; adds this lane's to the rows' sums."""
    z0 = -m0 * outer
    z1 = -m1 * outer
    for j in range(num_scores // 4):
        for i in range(2):
            scores[4 * j + i] = exp2(fma(scores[4 * j + i], outer, z0))
            scores[4 * j + 2 + i] = exp2(fma(scores[4 * j + 2 + i], outer, z1))
            l0 += scores[4 * j + i]
            l1 += scores[4 * j + 2 + i]
    return l0, l1


@cuda.jit(device=True, inline="always")
def rescale(sums, num_sums, a0, a1):  # type: ignore[no-untyped-def]
    """Brings older sums to new maxima."""
    for j in range(num_sums // 4):
        sums[4 * j] *= a0
        sums[4 * j + 1] *= a0
        sums[4 * j + 2] *= a1
        sums[4 * j + 3] *= a1


@cuda.jit(device=True, inline="always")
def divisors(m0, m1, l0, l1, sinks, head, outer):  # type: ignore[no-untyped-def]
    """What sums are multiplied by at the end: 1 over the weights of a row, a sink's among them; 0 if it saw no key."""
    for step in range(2):
        l0 += shuffle_xor(l0, 1 << step)
        l1 += shuffle_xor(l1, 1 << step)
    if sinks != 0:
        sink = load_f32(sinks + head * 4) * float32(LOG2E)
        l0 += exp2(sink - m0 * outer)
        l1 += exp2(sink - m1 * outer)
    return reciprocal(l0) if l0 > float32(0) else float32(0), reciprocal(l1) if l1 > float32(0) else float32(0)


def make_store(dtype: Any, num_sums: int) -> Any:
    """A function for kernels that stores a lane's two rows."""
    pack = HALVES[dtype].pack

    @cuda.jit(device=True, inline="always")
    def store(sums, d0, d1, to, token_stride, query, count, lane):  # type: ignore[no-untyped-def]
        """To the address of the first query's output; those from `count` on are left out."""
        to += query * token_stride + (lane & 3) * 4
        for j in range(num_sums // 4):
            if query < count:
                store_4(to + j * 16, pack(sums[4 * j] * d0, sums[4 * j + 1] * d0))
            if query + 8 < count:
                store_4(to + 8 * token_stride + j * 16, pack(sums[4 * j + 2] * d1, sums[4 * j + 3] * d1))

    return store


def make_ranges(queries_per_block: int, tile: int, causal: bool, windowed: bool) -> tuple[Any, Any]:
    """Functions for kernels: the keys that a block's queries see, and those that a lane's two rows see."""

    @cuda.jit(device=True, inline="always")
    def keys_of_block(position, begin, length, window):  # type: ignore[no-untyped-def]
        """From a multiple of `tile` on, and before which; `position` is that of the block's first query."""
        end = min(position + queries_per_block, length) if causal else length
        end = end if begin < length else 0
        first = max(begin, position + 1 - window) if windowed else begin
        return first // tile * tile, end

    @cuda.jit(device=True, inline="always")
    def keys_of_rows(position, begin, length, window):  # type: ignore[no-untyped-def]
        """Lower and upper bounds of the row at a position and of that 8 further on."""
        high0 = min(position + 1, length) if causal else length
        high1 = min(position + 9, length) if causal else length
        low0 = max(begin, position + 1 - window) if windowed else begin
        low1 = max(begin, position + 9 - window) if windowed else begin
        return low0, high0, low1, high1

    return keys_of_block, keys_of_rows
