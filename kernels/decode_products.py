"""What a warp of decode does with 16 tokens: load K and V into registers, two products, and the softmax between them.

A few lanes load a token's bytes as they lie: 16 bytes each as long as there are so many for all of them, then 8, then
4.

8-bit K and V become f16 between register and product, without loss and without their scales: a scale of K multiplies
its token's scores, a scale of V its token's weights. Queries and weights must be f16 then as well, and are scaled to
where f16 has most digits: each query by a power of two, which its scores give back; weights are relative to the largest
product of weight and scale. (Scales count as at least 2**-40 there: so the sum of weights without scales stays finite,
and zeros count beside large V.)
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch

from .arguments import Tokens, Variant, address_of
from .compiler import float32, inlined
from .memory import (
    HALVES, clamp, exp2, fma, load_4_once, load_8_once, load_16_once, load_f32, log2, maximum, pick_bytes, reciprocal,
    tanh,
)  # fmt: skip
from .quantized import EIGHT_BITS
from .warp import any_lane, shuffle_xor, transpose
from .warp import multiply as multiplications

WARPS = 4  # of a block
THREADS = 32 * WARPS
UNIT = 16  # tokens of a unit of work
MOST_IN_TEAM = 8  # blocks; more would leave more of the multiprocessors over, and idle
HEADROOM = 15  # weights with scales are up to this power of two: so f16 has the small ones as well
LEAST_SCALE = 2.0**-40  # of V, in what weights are relative to; below it no factor would bring zeros to large V


class Queries(NamedTuple):
    """The queries of a sequence: those that share a KV head, of `heads_per_kv` heads and `q_len` tokens at most, in
    octets."""

    heads_per_kv: int
    q_len: int
    at_once: int = 1  # octets of a head that a warp works on: it loads K and V once for all of them
    sharing: int = 1  # warps that work on the same tokens of a bundle, each on other octets of it
    team: int = 1  # blocks that work on the same tokens, each on other bundles; there is a multiple of so many

    @property
    def per_head(self) -> int:
        return self.heads_per_kv * self.q_len

    @property
    def octets_per_head(self) -> int:
        """Behind the last query others are made up, so that warps have as many octets each."""
        octets = -(-self.per_head // 8)
        return -(-octets // self.at_once) * self.at_once

    @property
    def per_octet(self) -> int:
        return min(8, self.per_head)

    @property
    def octets(self) -> int:
        """Octets of a bundle."""
        return self.sharing * self.at_once

    @property
    def per_bundle(self) -> int:
        return self.octets * self.per_octet

    @property
    def token_warps(self) -> int:
        """Warps of a block that work on the same octets, and on different tokens."""
        return WARPS // self.sharing

    def bundles(self, kv_heads: int) -> int:
        """Bundles of a sequence."""
        return kv_heads * self.octets_per_head // self.octets

    def in_teams(self, kv_heads: int) -> Queries:
        """The same, worked on in the largest teams that there can be."""
        bundles = self.bundles(kv_heads)
        return self._replace(team=max(size for size in range(1, MOST_IN_TEAM + 1) if bundles % size == 0))

    def grid(self, blocks: int) -> int:
        """The largest number of blocks, up to this one, that makes whole teams; at least one team."""
        return max(blocks // self.team, 1) * self.team


class Piece(NamedTuple):
    """The part of a share that belongs to one sequence and bundle. Units are counted over the whole batch."""

    sequence: int
    first: int  # the sequence's first token that its queries see
    last: int  # its last token
    round: int  # of the sequence's
    bundle: int  # the bundle's number in its sequence
    bundle_begin: int  # the bundle's first unit, and the one that it ends before
    bundle_end: int
    begin: int  # the piece's first unit, and the one that it ends before
    end: int
    token: int  # the piece's first token, and the one that it ends before
    token_end: int


class Run(NamedTuple):
    """The bytes of a token that some lanes load: each so many times 16 bytes, then 8 and 4 or not."""

    lanes: int
    nbytes: int  # in all; lanes whose last 4 bytes are behind that load others in place of them
    whole: int
    eight: bool
    four: bool

    @property
    def words(self) -> int:
        """Words of a lane."""
        return 4 * self.whole + 2 * self.eight + self.four


def runs_of(variant: Variant) -> tuple[Run, Run]:
    """Of K, which 4 lanes load, and of V, which 8 load."""
    nbytes, runs = variant.head_dim * (1 if variant.kv_dtype else 2), []
    for lanes in (4, 8):
        whole, rest = divmod(nbytes, 16 * lanes)
        runs.append(Run(lanes, nbytes, whole, rest >= 8 * lanes, rest % (8 * lanes) > 0))
    return runs[0], runs[1]


def vectors_of(variant: Variant) -> int:
    """Vectors of 16-bit numbers that come of 16 bytes of K or V."""
    return 2 if variant.kv_dtype else 1


class Words(NamedTuple):
    """A lane's registers: K of two tokens and V of four, for 16 tokens; of an octet queries and sums."""

    k: int
    v: int
    q: int
    sums: int


def words_of(variant: Variant) -> Words:
    """The registers of a lane."""
    (k, v), vectors = runs_of(variant), vectors_of(variant)
    return Words(2 * k.words, 4 * v.words, k.words * vectors, 4 * v.words * vectors)


def make_place_of(run: Run) -> Any:
    """A function for kernels: where a lane's word lies in a run, in bytes."""
    lanes, _, whole, eight, _ = run
    behind_16 = lanes * whole * 16
    behind_8 = behind_16 + lanes * 8 * eight

    @inlined
    def place_of(word: int, part: int) -> int:
        if word < 4 * whole:
            return (word // 4 * lanes + part) * 16 + word % 4 * 4
        if eight and word < 4 * whole + 2:
            return behind_16 + part * 8 + (word - 4 * whole) * 4
        return behind_8 + part * 4

    return place_of


def make_load_run(run: Run, load_16: Any) -> Any:
    """A function for kernels that loads a lane's words, to words from `at` on."""
    _, nbytes, whole, eight, four = run
    place_of, first_of_8, last = make_place_of(run), 4 * whole, run.words - 1

    @inlined
    def load_run(words: Any, at: int, source: int, part: int) -> None:
        for c in range(whole):
            vector = load_16(source + place_of(4 * c, part))
            for i in range(4):
                words[at + 4 * c + i] = vector[i]
        if eight:
            pair = load_8_once(source + place_of(first_of_8, part))
            for i in range(2):
                words[at + first_of_8 + i] = pair[i]
        if four:
            place = place_of(last, part)
            words[at + last] = load_4_once(source + (place if place < nbytes else 0))

    return load_run


def make_loads(variant: Variant) -> tuple[Any, Any, Any]:
    """Functions for kernels: a lane's part of K, of V, and of scales, of 16 tokens; live tokens take the place of those
    that are not."""
    k_run, v_run = runs_of(variant)
    k_words, v_words = k_run.words, v_run.words
    # As many bytes as divide a row come with it, and 64 at least: there is no less.
    load_16 = load_16_once[max(gcd(k_run.nbytes, 256), 64)]
    load_k_run, load_v_run = make_load_run(k_run, load_16), make_load_run(v_run, load_16)

    @inlined
    def load_k(words: Any, k: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The rows `lane // 4` and the 8th after that."""
        for r in range(2):
            position = clamp(token + r * 8 + (lane >> 2), piece.first, piece.last)
            load_k_run(words, r * k_words, address_of(position, home, k), lane & 3)

    @inlined
    def load_v(words: Any, v: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The tokens that are a lane's columns in the product."""
        for r in range(4):
            position = clamp(token + (lane & 3) * 2 + (r & 1) + (r >> 1) * 8, piece.first, piece.last)
            load_v_run(words, r * v_words, address_of(position, home, v), lane >> 2)

    @inlined
    def load_scales(scales: Tokens, token: int, home: int, piece: Piece, lane: int) -> tuple[float, float]:
        """The scales of tokens whose scores a lane has: `lane // 4` and the 8th after that."""
        first = clamp(token + (lane >> 2), piece.first, piece.last)
        second = clamp(token + (lane >> 2) + 8, piece.first, piece.last)
        return load_f32(address_of(first, home, scales)), load_f32(address_of(second, home, scales))

    return load_k, load_v, load_scales


def multiplied_dtype(variant: Variant) -> torch.dtype:
    """What tensor cores are given."""
    return torch.float16 if variant.kv_dtype else variant.dtype


def make_pairs(kv_dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Functions for kernels: two 16-bit numbers in a word, as the multiplication wants them. Of K dims `2 * pair` and
    the next of what a lane loaded of a token; of V one dim of two tokens, the first or second of those dims."""
    if kv_dtype is None:
        k_pair = inlined(lambda words, first, pair: words[first + pair])
        return k_pair, inlined(lambda a, b, pair, second: pick_bytes(a, b, 0x5410 + second * 0x2222))
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
    """A function for kernels: the first product, of 16 tokens and octet `o` of the warp's. A lane has two tokens,
    `lane // 4` and the 8th after, for each of two queries. `pair_of` gives two words of the queries from one on."""
    multiply, vectors = multiplications[multiplied_dtype(variant)], vectors_of(variant)
    scaled = variant.kv_dtype is not None
    k_row, q_words = runs_of(variant)[0].words, words_of(variant).q
    k_pair, _ = make_pairs(variant.kv_dtype)

    @inlined
    def score(
        k_words: Any, held: Any, lifts: Any, o: int, scale0: float, scale1: float, inner: float
    ) -> tuple[float, float, float, float]:
        lift0, lift1 = lifts[2 * o], lifts[2 * o + 1]
        d = (float32(0), float32(0), float32(0), float32(0))
        for x in range(k_row * vectors // 2):
            q = pair_of(held, o * q_words + 2 * x)
            d = multiply(
                d[0], d[1], d[2], d[3],
                k_pair(k_words, 0, 2 * x), k_pair(k_words, k_row, 2 * x),
                k_pair(k_words, 0, 2 * x + 1), k_pair(k_words, k_row, 2 * x + 1), q[0], q[1],
            )  # fmt: skip
        if scaled:  # the two factors first: one may be as large as the other is small
            d = (d[0] * (lift0 * scale0), d[1] * (lift1 * scale0), d[2] * (lift0 * scale1), d[3] * (lift1 * scale1))
        if inner != float32(0):
            return tanh(d[0] * inner), tanh(d[1] * inner), tanh(d[2] * inner), tanh(d[3] * inner)
        return d

    return score


def make_accumulate(variant: Variant, at_once: int) -> Any:
    """A function for kernels: the second product; adds V^T P of 16 tokens and so many octets."""
    multiply, vectors = multiplications[multiplied_dtype(variant)], vectors_of(variant)
    v_row, num_sums = runs_of(variant)[1].words, words_of(variant).sums
    _, v_pair = make_pairs(variant.kv_dtype)

    @inlined
    def accumulate(sums: Any, v_words: Any, p_words: Any) -> None:
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


@inlined
def score_of_scale(scale: float, outer: float) -> float:
    """The gain of a token's scores by its scale of V, which may be negative, or a NaN that weights show."""
    return (log2(maximum(float32(LEAST_SCALE), abs(scale))) - float32(HEADROOM)) * reciprocal(outer)


def make_weigh(variant: Variant) -> Any:
    """A function for kernels that makes scores of 16 tokens and octet `o` weights, as the second product wants them; it
    scales the octet's older sums to new maxima. `v0` and `v1` are scales of V."""
    pack, scaled = HALVES[multiplied_dtype(variant)].pack, variant.kv_dtype is not None
    num_sums = words_of(variant).sums

    @inlined
    def weigh(
        scores: Any, o: int, sums: Any, maxima: Any, weights: Any, v0: float, v1: float, outer: float
    ) -> tuple[int, int]:
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
