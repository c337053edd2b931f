"""A warp's 16 queries and a tile of keys: products of matrices in shared memory, and the softmax that goes along.

A product's scores are spread over a warp: a lane has the columns `8 j + 2 (lane % 4)` and the next of row `lane // 4`
in `scores[4 j]` and `scores[4 j + 1]`, and the same of the row 8 further down in the next two. Rows in shared memory
are 16 bytes longer than their data: an odd number of 16-byte columns lets eight rows be read at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .arguments import Options
from .compiler import float32, inlined
from .memory import FLOOR, HALVES, LOG2E, exp2, fma, if_within, load_f32, maximum, reciprocal, store_4, store_16, tanh
from .warp import any_lane, load_matrices, load_matrices_transposed, shuffle_xor, transpose_words
from .warp import multiply as multiplications

SLACK = 8.0
"""How far scores may pass what weights are relative to, as a power of 2, until older sums are brought to a new maximum:
mostly they need not be. Any 16-bit float holds such a weight."""


class Visible(NamedTuple):
    """The keys that each of a lane's two queries sees: from `low` on, before `high`."""

    low0: int
    high0: int
    low1: int
    high1: int


class Softmax(NamedTuple):
    """The softmax of a lane's two queries so far: the largest score `m` up to `SLACK`, the sum `l` of weights relative
    to it."""

    m0: float
    m1: float
    l0: float
    l1: float


@inlined
def begin_softmax(sums: Any, num_sums: int) -> Softmax:
    """Before the first key, of which there are no sums yet."""
    for i in range(num_sums):
        sums[i] = float32(0)
    return Softmax(float32(FLOOR), float32(FLOOR), float32(0), float32(0))


@inlined
def mask(scores: Any, num_scores: int, key: int, visible: Visible, inner: float, lane: int) -> None:
    """Makes scores of a tile's products; `key` is the tile's first. Keys that are not visible are taken out."""
    if inner != float32(0):
        for i in range(num_scores):
            scores[i] = tanh(scores[i] * inner)
    if key + 2 * num_scores > visible.high0 or key < visible.low1:
        first = key + 2 * (lane & 3)
        low0, high0 = visible.low0 - first, visible.high0 - first
        low1, high1 = visible.low1 - first, visible.high1 - first
        for j in range(num_scores // 4):
            for i in range(2):
                scores[4 * j + i] = if_within(scores[4 * j + i], 8 * j + i, low0, high0)
                scores[4 * j + i + 2] = if_within(scores[4 * j + i + 2], 8 * j + i, low1, high1)


@inlined
def raise_maximum(scores: Any, first: int, num_scores: int, before: float, outer: float) -> tuple[float, int]:
    """The reference of a row's weights, and whether that has changed for any of the warp's rows: the largest
    score, if it is beyond `SLACK`. The row's scores begin at `first`; four lanes share it."""
    m = before
    for j in range(num_scores // 4):
        m = maximum(m, maximum(scores[4 * j + first], scores[4 * j + first + 1]))
    for step in range(2):
        m = maximum(m, shuffle_xor(m, 1 << step))
    grown = any_lane(1 if (m - before) * outer > float32(SLACK) else 0)
    return m if grown else before, grown


@inlined
def raise_maxima(scores: Any, num_scores: int, before: Softmax, outer: float) -> tuple[Softmax, float, float, int]:
    """A softmax that a tile's scores may be weighed by; what the two queries' older sums are to be multiplied by, and
    whether any of the warp's are to be."""
    m0, grown0 = raise_maximum(scores, 0, num_scores, before.m0, outer)
    m1, grown1 = raise_maximum(scores, 2, num_scores, before.m1, outer)
    a0 = exp2((before.m0 - m0) * outer)
    a1 = exp2((before.m1 - m1) * outer)
    return Softmax(m0, m1, before.l0 * a0, before.l1 * a1), a0, a1, grown0 | grown1


@inlined
def weigh(scores: Any, num_scores: int, softmax: Softmax, outer: float) -> Softmax:
    """Makes a tile's scores weights, and adds up this lane's."""
    m0, m1, l0, l1 = softmax
    z0 = -m0 * outer
    z1 = -m1 * outer
    for j in range(num_scores // 4):
        for i in range(2):
            scores[4 * j + i] = exp2(fma(scores[4 * j + i], outer, z0))
            scores[4 * j + 2 + i] = exp2(fma(scores[4 * j + 2 + i], outer, z1))
    for j in range(num_scores // 4):
        l0 += scores[4 * j] + scores[4 * j + 1]
        l1 += scores[4 * j + 2] + scores[4 * j + 3]
    return Softmax(m0, m1, l0, l1)


@inlined
def weigh_tile(
    scores: Any, num_scores: int, key: int, visible: Visible, softmax: Softmax, options: Options, lane: int
) -> tuple[Softmax, float, float, int]:
    """Makes a tile's products weights; returns what `raise_maxima` does."""
    mask(scores, num_scores, key, visible, options.inner, lane)
    softmax, a0, a1, grown = raise_maxima(scores, num_scores, softmax, options.outer)
    return weigh(scores, num_scores, softmax, options.outer), a0, a1, grown


@inlined
def rescale(sums: Any, num_sums: int, a0: float, a1: float) -> None:
    """Brings older sums to new maxima."""
    for j in range(num_sums // 4):
        sums[4 * j] *= a0
        sums[4 * j + 1] *= a0
        sums[4 * j + 2] *= a1
        sums[4 * j + 3] *= a1


@inlined
def sum_weights(softmax: Softmax) -> tuple[float, float]:
    """The sums of weights of both rows, which four lanes share."""
    l0 = softmax.l0
    l1 = softmax.l1
    for step in range(2):
        l0 += shuffle_xor(l0, 1 << step)
        l1 += shuffle_xor(l1, 1 << step)
    return l0, l1


@inlined
def divisors(softmax: Softmax, sinks: int, head: int, outer: float) -> tuple[float, float]:
    """What sums are multiplied by at the end: 1 over the weights of a row, a sink's among them; 0 if it saw no key."""
    l0, l1 = sum_weights(softmax)
    if sinks != 0:
        sink = load_f32(sinks + head * 4) * float32(LOG2E)
        l0 += exp2(sink - softmax.m0 * outer)
        l1 += exp2(sink - softmax.m1 * outer)
    d0 = float32(0) if l0 == float32(0) else reciprocal(l0)  # a NaN, as of a sink, is to show
    d1 = float32(0) if l1 == float32(0) else reciprocal(l1)
    return d0, d1


def make_store(dtype: Any, num_sums: int) -> Any:
    """A function for kernels that stores a lane's two rows."""
    pack = HALVES[dtype].pack
    words = num_sums // 4  # of a lane, in a row

    @inlined
    def store_row(sums: Any, first: int, d: float, to: int, there: bool, lane: int) -> None:
        """The sums of one row begin at `first`."""
        for j in range(0, words // 4 * 4, 4):
            i = 4 * j + first
            w0, w1 = pack(sums[i] * d, sums[i + 1] * d), pack(sums[i + 4] * d, sums[i + 5] * d)
            w2, w3 = pack(sums[i + 8] * d, sums[i + 9] * d), pack(sums[i + 12] * d, sums[i + 13] * d)
            w0, w1, w2, w3 = transpose_words(w0, w1, w2, w3, lane)
            if there:
                store_16(to + (j + (lane & 3)) * 16, w0, w1, w2, w3)
        for j in range(words // 4 * 4, words):
            if there:
                word = pack(sums[4 * j + first] * d, sums[4 * j + first + 1] * d)
                store_4(to + j * 16 + (lane & 3) * 4, word)

    @inlined
    def store(sums: Any, d0: float, d1: float, to: int, token_stride: int, query: int, count: int, lane: int) -> None:
        """To the address of the first query's output; those from `count` on are left out."""
        store_row(sums, 0, d0, to + query * token_stride, query < count, lane)
        store_row(sums, 2, d1, to + (query + 8) * token_stride, query + 8 < count, lane)

    return store


def pitch_of(head_dim: int) -> int:
    """Bytes from one row in shared memory to the next."""
    return head_dim * 2 + 16


def make_add(dtype: torch.dtype) -> Any:
    """A function for kernels that adds a product [16 x 16] to sums, from one on."""
    multiply = multiplications[dtype]

    @inlined
    def add(sums: Any, at: int, a: Any, b: Any) -> None:
        for half in range(2):
            s = at + 4 * half
            d = multiply(
                sums[s], sums[s + 1], sums[s + 2], sums[s + 3], a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1]
            )  # fmt: skip
            for i in range(4):
                sums[s + i] = d[i]

    return add


def make_score(dtype: torch.dtype, head_dim: int, tile: int) -> Any:
    """A function for kernels: `scores = Q K^T` of queries and a tile of K, by their addresses."""
    add, pitch = make_add(dtype), pitch_of(head_dim)

    @inlined
    def score(scores: Any, queries: int, k: int, lane: int) -> None:
        for i in range(tile // 2):
            scores[i] = float32(0)
        for step in range(head_dim // 16):
            a = load_matrices(queries + (lane & 15) * pitch + step * 32 + (lane >> 4) * 16)
            for j in range(tile // 16):
                token = j * 16 + (lane & 7) + (lane >> 4) * 8
                add(scores, 8 * j, a, load_matrices(k + token * pitch + step * 32 + (lane >> 3 & 1) * 16))

    return score


def make_add_values(dtype: torch.dtype, dims: int) -> Any:
    """A function for kernels: `sums += P V` of 16 keys of a tile, and so many dims of V."""
    add, pack = make_add(dtype), HALVES[dtype].pack

    @inlined
    def add_values(sums: Any, weights: Any, w: int, v: int) -> None:
        """Their weights begin at `w`; `v` is the address of this lane's row of the first matrices."""
        p0, p1 = pack(weights[w], weights[w + 1]), pack(weights[w + 2], weights[w + 3])
        p2, p3 = pack(weights[w + 4], weights[w + 5]), pack(weights[w + 6], weights[w + 7])
        for i in range(dims // 16):
            add(sums, 8 * i, (p0, p1, p2, p3), load_matrices_transposed(v + i * 32))

    return add_values
