"""decode on tensor cores: K and V go straight from memory into the registers that are multiplied.

Transposed, a step of attention is two products of matrices whose 8 columns are queries that share a KV head, an octet:

    S = K q        [16 tokens x head_dim] [head_dim x 8 queries]
    O = V^T P      [head_dim x 16 tokens] [16 tokens x 8 queries]

The dims are summed in the first product and label the rows of the second, so their order is free: each lane
takes 16 bytes of K and of V as they lie. No shared memory, and no waiting for other warps, while tokens stream past.
P comes out of the first product as the second wants it but for a transposition in registers.

K and V of 8 bits become f16 on the way from register to product, without loss, and so without their scales: a scale of
K multiplies its token's scores, and one of V its token's weights. What they are multiplied with has to be f16 as well,
so it is brought to where f16 has most digits: each query by a power of two, which its scores give back; weights by what
they are relative to, which is not the greatest score but the greatest weight with its scale. (As if no scale were below
2**-40, so that the sum of the weights without their scales stays finite, and that of zeros counts beside great V.)

For shares of the work see `decode_shares`, for what becomes of the sums `decode_parts`.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
from numba import cuda

from .addressing import Row, Tokens, head_of, make_addressing, make_first_query, row_of, scales_of
from .arguments import NO_GROUPS, Addresses, Groups, Scoring, Sizes, Strides, Variant
from .arithmetic import HALVES, clamp, exp2, fma, if_within, log2, maximum, pick_bytes, raising, reciprocal, tanh
from .decode_parts import make_clear, make_settle, results_of
from .decode_shares import UNIT, Lengths, Piece, Queries, make_shares
from .eight_bits import EIGHT_BITS
from .memory import load_16_cached, load_16_once, load_f32
from .ptx import float32, inlined, int64, uint32
from .softmax import Softmax, Visible, begin_softmax
from .warp import any_lane, shuffle, shuffle_xor, transpose
from .warp import multiply as multiplications

HEADROOM = 15
"""Weights with scales are up to this power of two: so f16 has the small ones as well."""

LEAST_SCALE = 2.0**-40
"""Of V, in what weights are relative to. Were it smaller, there would be no factor to bring zeros to great V."""


class Octet(NamedTuple):
    """Up to 8 queries that share a KV head: a warp's."""

    kv_head: int
    column: int
    """The first of them among those of the head."""


def chunks_of(head_dim: int, vectors: int) -> tuple[int, int]:
    """The 64 bytes of K, and the 128 of V, that lanes load of a token at a time: so many make up a head.

    A lane's 16 bytes of them are `vectors` once they are 16-bit numbers: 2 of 8-bit ones, 1 otherwise.
    """
    return -(-head_dim // (32 * vectors)), -(-head_dim // (64 * vectors))


def vectors_of(variant: Variant) -> int:
    """What becomes of 16 bytes of K or V."""
    return 2 if variant.kv_dtype else 1


def blocks_per_sm(variant: Variant) -> int:
    """Of 8-bit numbers a warp has half as many bytes on their way, in half the registers: twice as many warps have all.
    Wider heads leave no room for them."""
    return 4 if variant.kv_dtype and variant.head_dim <= 128 else 2


def multiplied_dtype(variant: Variant) -> torch.dtype:
    """What tensor cores are given."""
    return torch.float16 if variant.kv_dtype else variant.dtype


def make_load_queries(variant: Variant, queries: Queries) -> Any:
    """A function for kernels that loads a lane's part of an octet: its dims of each chunk, of query `lane // 4`."""
    head_dim, vectors, scaled = variant.head_dim, vectors_of(variant), variant.kv_dtype is not None
    group, per_head = queries.group, queries.per_head
    low, high, pack = HALVES[variant.dtype].low, HALVES[variant.dtype].high, HALVES[torch.float16].pack
    chunks, _ = chunks_of(head_dim, vectors)
    num_words = 4 * chunks * vectors

    @inlined
    def to_f16(words: Any, lane: int) -> tuple[float, float]:
        """Brings a lane's query to where f16 has most digits; what takes its own two columns' scores back."""
        top = float32(0)
        for i in range(num_words):
            top = maximum(top, maximum(abs(low(words[i])), abs(high(words[i]))))
        top = maximum(top, shuffle_xor(top, 1))
        top = maximum(top, shuffle_xor(top, 2))
        raised, lowered = raising(top)
        for i in range(num_words):
            words[i] = pack(low(words[i]) * raised, high(words[i]) * raised)
        column = (lane & 3) * 8
        return shuffle(lowered, column), shuffle(lowered, column + 4)

    @inlined
    def load_queries(words: Any, octet: Octet, q: int, strides: Strides, lane: int) -> tuple[float, float]:
        """From the address of the sequence's first query. What there is none of is 0. What the scores of a lane's
        columns are to be multiplied by."""
        number = octet.column + (lane >> 2)
        query = min(number, per_head - 1)
        source = q + query // group * strides.q_token + (octet.kv_head * group + query % group) * strides.q_head
        for c in range(chunks):
            for x in range(vectors):
                offset = ((c * 4 + (lane & 3)) * vectors + x) * 16
                inside = number < per_head and offset < head_dim * 2
                loaded = load_16_cached(source + (offset if inside else 0))
                for i in range(4):
                    words[(c * vectors + x) * 4 + i] = loaded[i] if inside else uint32(0)
        if scaled:
            return to_f16(words, lane)
        return float32(1), float32(1)

    return load_queries


def make_loads(variant: Variant) -> tuple[Any, Any, Any]:
    """Functions for kernels: a lane's part of K, of V, and of scales, of 16 tokens; those outside of the live ones
    repeat one."""
    head_dim, vectors = variant.head_dim, vectors_of(variant)
    _, address_of = make_addressing(variant.block_size)
    k_chunks, v_chunks = chunks_of(head_dim, vectors)
    head_bytes = head_dim * 2 // vectors
    load_vector = load_16_once[max(gcd(head_bytes, 256), 64)]

    @inlined
    def load_k(words: Any, k: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The rows `lane // 4` and the 8th after that."""
        for r in range(2):
            position = clamp(token + r * 8 + (lane >> 2), piece.first, piece.last)
            source = address_of(position, home, k)
            for c in range(k_chunks):
                offset = c * 64 + (lane & 3) * 16
                if head_bytes % 64 and offset >= head_bytes:
                    offset = 0  # the query is 0 there
                loaded = load_vector(source + offset)
                for i in range(4):
                    words[(r * k_chunks + c) * 4 + i] = loaded[i]

    @inlined
    def load_v(words: Any, v: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The tokens that are a lane's columns in the product."""
        for r in range(4):
            position = clamp(token + (lane & 3) * 2 + (r & 1) + (r >> 1) * 8, piece.first, piece.last)
            source = address_of(position, home, v)
            for c in range(v_chunks):
                offset = c * 128 + (lane >> 2) * 16
                if head_bytes % 128 and offset >= head_bytes:
                    offset = 0  # these sums are not stored
                loaded = load_vector(source + offset)
                for i in range(4):
                    words[(r * v_chunks + c) * 4 + i] = loaded[i]

    @inlined
    def load_scales(scales: Tokens, token: int, home: int, piece: Piece, lane: int) -> tuple[float, float]:
        """Of the tokens whose scores a lane has: `lane // 4` and the 8th after that."""
        first = clamp(token + (lane >> 2), piece.first, piece.last)
        second = clamp(token + (lane >> 2) + 8, piece.first, piece.last)
        return load_f32(address_of(first, home, scales)), load_f32(address_of(second, home, scales))

    return load_k, load_v, load_scales


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


def make_products(variant: Variant) -> tuple[Any, Any]:
    """Functions for kernels: the two products."""
    multiply, vectors = multiplications[multiplied_dtype(variant)], vectors_of(variant)
    scaled, softcapped = variant.kv_dtype is not None, variant.softcapped
    k_chunks, v_chunks = chunks_of(variant.head_dim, vectors)
    k_pair, v_pair = make_pairs(variant.kv_dtype)

    @inlined
    def score(
        k_words: Any, q_words: Any, scale0: float, scale1: float, lift0: float, lift1: float, inner: float
    ) -> tuple[float, float, float, float]:
        """Of 16 tokens and 8 queries: a lane has tokens `lane // 4` and the 8th after, for each of two queries."""
        d = (float32(0), float32(0), float32(0), float32(0))
        for c in range(k_chunks):
            low = c * 4
            high = (k_chunks + c) * 4
            for x in range(2 * vectors):
                q = (c * 2 * vectors + x) * 2
                d = multiply(
                    d[0], d[1], d[2], d[3],
                    k_pair(k_words, low, 2 * x), k_pair(k_words, high, 2 * x),
                    k_pair(k_words, low, 2 * x + 1), k_pair(k_words, high, 2 * x + 1),
                    q_words[q], q_words[q + 1],
                )  # fmt: skip
        if scaled:
            # Both first: the one may be as great as the other is small.
            d = (d[0] * (lift0 * scale0), d[1] * (lift1 * scale0), d[2] * (lift0 * scale1), d[3] * (lift1 * scale1))
        if softcapped:
            return tanh(d[0] * inner), tanh(d[1] * inner), tanh(d[2] * inner), tanh(d[3] * inner)
        return d

    @inlined
    def accumulate(sums: Any, v_words: Any, p0: int, p1: int) -> None:
        """Adds V^T P of 16 tokens. Pairs of tokens are put together as the multiplication wants them."""
        for c in range(v_chunks):
            for pair in range(4 * vectors):
                w = pair // vectors
                e0 = v_words[c * 4 + w]
                e1 = v_words[(v_chunks + c) * 4 + w]
                e2 = v_words[(2 * v_chunks + c) * 4 + w]
                e3 = v_words[(3 * v_chunks + c) * 4 + w]
                o = (c * 4 * vectors + pair) * 4
                d = multiply(
                    sums[o], sums[o + 1], sums[o + 2], sums[o + 3],
                    v_pair(e0, e1, pair, 0), v_pair(e0, e1, pair, 1),
                    v_pair(e2, e3, pair, 0), v_pair(e2, e3, pair, 1),
                    p0, p1,
                )  # fmt: skip
                for i in range(4):
                    sums[o + i] = d[i]

    return score, accumulate


def make_attend(variant: Variant, queries: Queries) -> tuple[Any, Any]:
    """Functions for kernels: what a lane's two queries see of a piece, and an octet's attention to a warp's tokens."""
    pack, windowed, scaled = HALVES[multiplied_dtype(variant)].pack, variant.windowed, variant.kv_dtype is not None
    group, q_len = queries.group, queries.q_len
    vectors = vectors_of(variant)
    k_chunks, v_chunks = chunks_of(variant.head_dim, vectors)
    k_words, v_words, num_sums = 8 * k_chunks, 16 * v_chunks, 16 * v_chunks * vectors
    stride = queries.token_warps * UNIT

    home_of, _ = make_addressing(variant.block_size)
    load_k, load_v, load_scales = make_loads(variant)
    score, accumulate = make_products(variant)

    @inlined
    def keys_of_lane(piece: Piece, column: int, window: int) -> Visible:
        """Of the queries of this number and the next; those that there are not see as much as the last."""
        high0 = piece.last + 1 - q_len + min(column // group, q_len - 1) + 1
        high1 = piece.last + 1 - q_len + min((column + 1) // group, q_len - 1) + 1
        low0 = max(piece.first, high0 - window) if windowed else piece.first
        low1 = max(piece.first, high1 - window) if windowed else piece.first
        return Visible(low0, min(high0, piece.token_end), low1, min(high1, piece.token_end))

    @inlined
    def score_of_scale(scale: float, outer: float) -> float:
        """What a token's scores gain by its scale of V. That may be a NaN, which is for the weights to show."""
        return (log2(maximum(float32(LEAST_SCALE), scale)) - float32(HEADROOM)) * reciprocal(outer)

    @inlined
    def attend(
        sums: Any, q_fragment: Any, lift0: float, lift1: float, k: Tokens, v: Tokens, k_scales: Tokens,
        v_scales: Tokens, row: Row, piece: Piece, token: int, visible: Visible, scoring: Scoring, lane: int,
    ) -> Softmax:  # fmt: skip
        """From a token on; other warps have those in between. The softmax is this lane's."""
        k_fragment = cuda.local.array(k_words, uint32)
        v_fragment = cuda.local.array(v_words, uint32)
        for i in range(num_sums):
            sums[i] = float32(0)
        m0, m1, l0, l1 = begin_softmax()
        k0, k1, v0, v1 = float32(1), float32(1), float32(1), float32(1)
        if token < piece.token_end:
            home = home_of(token, row)
            load_k(k_fragment, k, token, home, piece, lane)
            load_v(v_fragment, v, token, home, piece, lane)
            if scaled:
                k0, k1 = load_scales(k_scales, token, home, piece, lane)
                v0, v1 = load_scales(v_scales, token, home, piece, lane)
            home = home_of(min(token + stride, piece.last), row)
        while token < piece.token_end:
            s0, s1, s2, s3 = score(k_fragment, q_fragment, k0, k1, lift0, lift1, scoring.inner)
            t = token + (lane >> 2)
            s0 = if_within(s0, t, visible.low0, visible.high0)
            s1 = if_within(s1, t, visible.low1, visible.high1)
            s2 = if_within(s2, t + 8, visible.low0, visible.high0)
            s3 = if_within(s3, t + 8, visible.low1, visible.high1)
            # K of the next tokens is on its way while V is multiplied, and V while K is.
            token += stride
            if token < piece.token_end:
                load_k(k_fragment, k, token, home, piece, lane)
                if scaled:
                    k0, k1 = load_scales(k_scales, token, home, piece, lane)
            if scaled:
                g0, g1 = score_of_scale(v0, scoring.outer), score_of_scale(v1, scoring.outer)
                n0 = maximum(m0, maximum(s0 + g0, s2 + g1))
                n1 = maximum(m1, maximum(s1 + g0, s3 + g1))
            else:
                n0 = maximum(m0, maximum(s0, s2))
                n1 = maximum(m1, maximum(s1, s3))
            for step in range(3):
                n0 = maximum(n0, shuffle_xor(n0, 4 << step))
                n1 = maximum(n1, shuffle_xor(n1, 4 << step))
            a0 = exp2((m0 - n0) * scoring.outer)
            a1 = exp2((m1 - n1) * scoring.outer)
            if any_lane(n0 > m0 or n1 > m1):  # seldom, after the first tokens
                for i in range(num_sums // 2):
                    sums[2 * i] *= a0
                    sums[2 * i + 1] *= a1
            m0 = n0
            m1 = n1
            p0 = exp2(fma(s0, scoring.outer, -m0 * scoring.outer))
            p1 = exp2(fma(s1, scoring.outer, -m1 * scoring.outer))
            p2 = exp2(fma(s2, scoring.outer, -m0 * scoring.outer))
            p3 = exp2(fma(s3, scoring.outer, -m1 * scoring.outer))
            l0 = fma(l0, a0, p0 + p2)
            l1 = fma(l1, a1, p1 + p3)
            if scaled:
                p0, p1, p2, p3 = p0 * v0, p1 * v0, p2 * v1, p3 * v1
            accumulate(sums, v_fragment, transpose(pack(p0, p1)), transpose(pack(p2, p3)))
            if token < piece.token_end:
                load_v(v_fragment, v, token, home, piece, lane)
                if scaled:
                    v0, v1 = load_scales(v_scales, token, home, piece, lane)
                home = home_of(min(token + stride, piece.last), row)
        return Softmax(m0, m1, l0, l1)

    return keys_of_lane, attend


def make_put_results(variant: Variant, queries: Queries) -> Any:
    """A function for kernels that leaves a warp's sums, maxima and weights in shared memory."""
    head_dim, vectors = variant.head_dim, vectors_of(variant)
    results, per_octet = results_of(queries, head_dim), queries.per_octet
    _, chunks = chunks_of(head_dim, vectors)
    dims = 8 * vectors  # of a lane and chunk

    @inlined
    def put_results(shared: Any, sums: Any, softmax: Softmax, warp: int, lane: int) -> None:
        m0, m1, l0, l1 = softmax
        for step in range(3):
            l0 += shuffle_xor(l0, 4 << step)
            l1 += shuffle_xor(l1, 4 << step)
        for i in range(2):
            query = 2 * (lane & 3) + i
            if query < per_octet:
                column = warp * per_octet + query
                if lane < 4:
                    shared[results.maxima + column] = m1 if i else m0
                    shared[results.weights + column] = l1 if i else l0
                for c in range(chunks):
                    dim = (c * 8 + (lane >> 2)) * dims
                    if dim < head_dim:
                        to = results.sums + column * head_dim + dim
                        for w in range(dims):
                            shared[to + w] = sums[(c * dims + w) // 2 * 4 + w % 2 * 2 + i]

    return put_results


def make_decode(variant: Variant) -> Any:
    """The kernel as a Python function."""
    head_dim, queries = variant.head_dim, Queries(variant.group, variant.q_len, variant.mixed)
    octets, octets_per_head, bundles_per_head = queries.octets, queries.octets_per_head, queries.bundles_per_head
    vectors = vectors_of(variant)
    k_chunks, v_chunks = chunks_of(head_dim, vectors)
    q_words, num_sums = 4 * k_chunks * vectors, 16 * v_chunks * vectors
    shared_floats = results_of(queries, head_dim).floats

    share_of_block, piece_at, sequence_after, is_empty = make_shares(queries, variant.windowed, variant.cascaded)
    first_query = make_first_query(queries.mixed)
    load_queries = make_load_queries(variant, queries)
    keys_of_lane, attend = make_attend(variant, queries)
    put_results = make_put_results(variant, queries)
    settle = make_settle(variant.dtype, head_dim, queries, variant.cascaded)
    clear = make_clear(variant.dtype, head_dim, queries)

    @inlined
    def decode(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        shared = cuda.shared.array(shared_floats, float32)
        q_fragment = cuda.local.array(q_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        bundles = sizes.kv_heads * bundles_per_head
        lengths = Lengths(at.cu_seqlens, at.seq_lens, at.starts, scoring.window, bundles, groups)

        place = int64(cuda.blockIdx.x)
        while place < sizes.batch:
            if is_empty(place, lengths):
                clear(place, bundles, at, strides, scoring.outer, thread)
            place += cuda.gridDim.x

        share = share_of_block(sizes.batch, lengths, lane)
        unit, sequence, before = share.begin, share.sequence, share.before
        while unit < share.end:
            piece = piece_at(unit, share.end, sequence, before, lengths)
            token = piece.token + warp // octets * UNIT
            number = piece.bundle * octets + warp % octets
            octet = Octet(number // octets_per_head, number % octets_per_head * 8)
            row = row_of(sequence, at, strides)
            k, v = head_of(octet.kv_head, at, strides)
            k_scales, v_scales = scales_of(octet.kv_head, at, strides)
            visible = keys_of_lane(piece, octet.column + 2 * (lane & 3), scoring.window)
            q = at.q + first_query(sequence, at.cu_seqlens, strides.q_batch, strides.q_token)
            lift0, lift1 = load_queries(q_fragment, octet, q, strides, lane)
            softmax = attend(
                sums, q_fragment, lift0, lift1, k, v, k_scales, v_scales, row, piece, token, visible, scoring, lane
            )  # fmt: skip
            put_results(shared, sums, softmax, warp, lane)
            settle(shared, piece, share.size, bundles, at, sizes, strides, groups, scoring.outer, thread)
            unit = piece.end
            if unit == piece.bundle_end and piece.bundle == bundles - 1:
                before = unit
                sequence = sequence_after(sequence, share, unit, lengths)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        decode(at, sizes, strides, scoring, NO_GROUPS)

    def cascaded_kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups) -> None:
        decode(at, sizes, strides, scoring, groups)

    return cascaded_kernel if variant.cascaded else kernel
