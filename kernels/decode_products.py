"""What decode's warps compute of 16 tokens on tensor cores: two products, and the softmax between them.

K and V of 8 bits become f16 on the way from register to product, without loss, and so without their scales: a scale of
K multiplies its token's scores, and one of V its token's weights. What they are multiplied with has to be f16 as well,
so it is brought to where f16 has most digits: each query by a power of two, which its scores give back; weights by what
they are relative to, which is not the greatest score but the greatest weight with its scale. (As if no scale were below
2**-40, so that the sum of the weights without their scales stays finite, and that of zeros counts beside great V.)
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import Variant
from .arithmetic import HALVES, exp2, fma, log2, maximum, pick_bytes, reciprocal, tanh
from .decode_loads import runs_of, vectors_of, words_of
from .eight_bits import EIGHT_BITS
from .ptx import float32, inlined
from .warp import any_lane, shuffle_xor, transpose
from .warp import multiply as multiplications

HEADROOM = 15
"""Weights with scales are up to this power of two: so f16 has the small ones as well."""

LEAST_SCALE = 2.0**-40
"""Of V, in what weights are relative to. Were it smaller, there would be no factor to bring zeros to great V."""


def multiplied_dtype(variant: Variant) -> torch.dtype:
    """What tensor cores are given."""
    return torch.float16 if variant.kv_dtype else variant.dtype


def make_pairs(kv_dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Functions for kernels: two 16-bit numbers in a word, as the multiplication wants them, out of K, and out of V."""

    @inlined
    def k_pair(words: Any, first: int, pair: int) -> int:
        """Dims `2 * pair` and the next of what a lane loaded of a token."""
        return words[first + pair]

    @inlined
    def v_pair(a: int, b: int, pair: int, second: int) -> int:
        """One dim of two tokens: of dims `2 * pair` and the next the first or the second."""
        return pick_bytes(a, b, 0x5410 + second * 0x2222)

    if kv_dtype is None:
        return k_pair, v_pair
    lower, upper = EIGHT_BITS[kv_dtype].lower, EIGHT_BITS[kv_dtype].upper

    @inlined
    def k_pair_of_8_bits(words: Any, first: int, pair: int) -> int:
        word = words[first + pair // 2]
        return upper(word) if pair % 2 else lower(word)

    @inlined
    def v_pair_of_8_bits(a: int, b: int, pair: int, second: int) -> int:
        both = pick_bytes(a, b, 0x5140 + pair % 2 * 0x2222)
        return upper(both) if second else lower(both)

    return k_pair_of_8_bits, v_pair_of_8_bits


def make_score(variant: Variant, pair_of: Any) -> Any:
    """A function for kernels: the first product, of 16 tokens and an octet.

    Args:
        pair_of: an inlined device function: two words of the queries from one on.
    """
    multiply, vectors = multiplications[multiplied_dtype(variant)], vectors_of(variant)
    scaled, softcapped = variant.kv_dtype is not None, variant.softcapped
    k_row, q_words = runs_of(variant)[0].words, words_of(variant).q
    k_pair, _ = make_pairs(variant.kv_dtype)

    @inlined
    def score(
        k_words: Any, held: Any, lifts: Any, o: int, scale0: float, scale1: float, inner: float
    ) -> tuple[float, float, float, float]:
        """Of the octet `o` of the warp's: a lane has tokens `lane // 4` and the 8th after, for each of two queries."""
        lift0, lift1 = lifts[2 * o], lifts[2 * o + 1]
        d = (float32(0), float32(0), float32(0), float32(0))
        for x in range(k_row * vectors // 2):
            q = pair_of(held, o * q_words + 2 * x)
            d = multiply(
                d[0], d[1], d[2], d[3],
                k_pair(k_words, 0, 2 * x), k_pair(k_words, k_row, 2 * x),
                k_pair(k_words, 0, 2 * x + 1), k_pair(k_words, k_row, 2 * x + 1), q[0], q[1],
            )  # fmt: skip
        if scaled:
            # Both first: the one may be as great as the other is small.
            d = (d[0] * (lift0 * scale0), d[1] * (lift1 * scale0), d[2] * (lift0 * scale1), d[3] * (lift1 * scale1))
        if softcapped:
            return tanh(d[0] * inner), tanh(d[1] * inner), tanh(d[2] * inner), tanh(d[3] * inner)
        return d

    return score


def make_accumulate(variant: Variant, at_once: int) -> Any:
    """A function for kernels: the second product, of 16 tokens and so many octets."""
    multiply, vectors = multiplications[multiplied_dtype(variant)], vectors_of(variant)
    v_row, num_sums = runs_of(variant)[1].words, words_of(variant).sums
    _, v_pair = make_pairs(variant.kv_dtype)

    @inlined
    def accumulate(sums: Any, v_words: Any, p_words: Any) -> None:
        """Adds V^T P of 16 tokens. Pairs of tokens are put together as the multiplication wants them."""
        for pair in range(v_row * vectors):
            w = pair // vectors
            e0 = v_words[w]
            e1 = v_words[v_row + w]
            e2 = v_words[2 * v_row + w]
            e3 = v_words[3 * v_row + w]
            first, second = v_pair(e0, e1, pair, 0), v_pair(e0, e1, pair, 1)
            third, fourth = v_pair(e2, e3, pair, 0), v_pair(e2, e3, pair, 1)
            for each in range(at_once):
                o = each * num_sums + pair * 4
                d = multiply(
                    sums[o], sums[o + 1], sums[o + 2], sums[o + 3], first, second, third, fourth,
                    p_words[2 * each], p_words[2 * each + 1],
                )  # fmt: skip
                for i in range(4):
                    sums[o + i] = d[i]

    return accumulate


def make_weigh(variant: Variant) -> Any:
    """A function for kernels that makes an octet's scores of 16 tokens weights, as the second product wants them."""
    pack, scaled = HALVES[multiplied_dtype(variant)].pack, variant.kv_dtype is not None
    num_sums = words_of(variant).sums

    @inlined
    def score_of_scale(scale: float, outer: float) -> float:
        """What a token's scores gain by its scale of V. That may be negative, or a NaN, which is for the weights to
        show."""
        return (log2(maximum(float32(LEAST_SCALE), abs(scale))) - float32(HEADROOM)) * reciprocal(outer)

    @inlined
    def weigh(
        scores: Any, o: int, sums: Any, maxima: Any, weights: Any, v0: float, v1: float, outer: float
    ) -> tuple[int, int]:
        """Of the octet `o` of the warp's. Brings its older sums to new maxima; `v0` and `v1` are scales of V."""
        s0, s1, s2, s3 = scores[4 * o], scores[4 * o + 1], scores[4 * o + 2], scores[4 * o + 3]
        m0, m1 = maxima[2 * o], maxima[2 * o + 1]
        if scaled:
            g0, g1 = score_of_scale(v0, outer), score_of_scale(v1, outer)
            n0 = maximum(m0, maximum(s0 + g0, s2 + g1))
            n1 = maximum(m1, maximum(s1 + g0, s3 + g1))
        else:
            n0 = maximum(m0, maximum(s0, s2))
            n1 = maximum(m1, maximum(s1, s3))
        for step in range(3):
            n0 = maximum(n0, shuffle_xor(n0, 4 << step))
            n1 = maximum(n1, shuffle_xor(n1, 4 << step))
        a0 = exp2((m0 - n0) * outer)
        a1 = exp2((m1 - n1) * outer)
        if any_lane(n0 > m0 or n1 > m1):  # seldom, after the first tokens
            for i in range(num_sums // 2):
                sums[o * num_sums + 2 * i] *= a0
                sums[o * num_sums + 2 * i + 1] *= a1
        maxima[2 * o] = n0
        maxima[2 * o + 1] = n1
        p0 = exp2(fma(s0, outer, -n0 * outer))
        p1 = exp2(fma(s1, outer, -n1 * outer))
        p2 = exp2(fma(s2, outer, -n0 * outer))
        p3 = exp2(fma(s3, outer, -n1 * outer))
        weights[2 * o] = fma(weights[2 * o], a0, p0 + p2)
        weights[2 * o + 1] = fma(weights[2 * o + 1], a1, p1 + p3)
        if scaled:
            p0, p1, p2, p3 = p0 * v0, p1 * v0, p2 * v1, p3 * v1
        return transpose(pack(p0, p1)), transpose(pack(p2, p3))

    return weigh
