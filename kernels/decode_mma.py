"""decode on tensor cores: K and V go straight from memory into the registers that are multiplied.

Transposed, a step of attention is two products of matrices whose 8 columns are queries that share a KV head, an octet:

    S = K q        [16 tokens x head_dim] [head_dim x 8 queries]
    O = V^T P      [head_dim x 16 tokens] [16 tokens x 8 queries]

The dims are summed in the first product and label the rows of the second, so their order is free: each lane
takes 16 bytes of K and of V as they lie. No shared memory, and no waiting for other warps, while tokens stream past.
P comes out of the first product as the second wants it but for a transposition in registers.

For shares of the work see `decode_shares`, for what becomes of the sums `decode_parts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numba import cuda

from .addressing import Row, Tokens, head_of, make_addressing, make_first_query, row_of
from .arguments import Addresses, Scoring, Sizes, Strides, Variant
from .arithmetic import HALVES, NEGATIVE_INFINITY, exp2, fma, maximum, pick_bytes, tanh
from .decode_parts import make_settle, results_of
from .decode_shares import UNIT, Lengths, Piece, Queries, make_shares
from .memory import load_16, load_16_cached
from .ptx import float32, inlined, uint32
from .softmax import Softmax, Visible, begin_softmax
from .warp import multiply as multiplications
from .warp import shuffle_xor, transpose

BLOCKS_PER_SM = 2


class Octet(NamedTuple):
    """Up to 8 queries that share a KV head: a warp's."""

    kv_head: int
    column: int
    """The first of them among those of the head."""


def chunks_of(head_dim: int) -> tuple[int, int]:
    """The 64 bytes of K, and the 128 of V, that lanes load of a token at a time: so many make up a head."""
    return -(-head_dim // 32), -(-head_dim // 64)


def make_load_queries(head_dim: int, queries: Queries) -> Any:
    """A function for kernels that loads a lane's part of an octet: 16 bytes of every 64, of query `lane // 4`."""
    group, per_head = queries.group, queries.per_head
    chunks, _ = chunks_of(head_dim)

    @inlined
    def load_queries(words: Any, octet: Octet, q: int, strides: Strides, lane: int) -> None:
        """From the address of the sequence's first query. What there is none of is 0."""
        number = octet.column + (lane >> 2)
        query = min(number, per_head - 1)
        source = q + query // group * strides.q_token + (octet.kv_head * group + query % group) * strides.q_head
        source += (lane & 3) * 16
        for c in range(chunks):
            inside = number < per_head and c * 64 + (lane & 3) * 16 < head_dim * 2
            loaded = load_16_cached(source + (c * 64 if inside else 0))
            for i in range(4):
                words[c * 4 + i] = loaded[i] if inside else uint32(0)

    return load_queries


def make_loads(head_dim: int, block_size: int) -> tuple[Any, Any]:
    """Functions for kernels: a lane's part of K, and of V, of 16 tokens; those outside of the live ones repeat one."""
    _, address_of = make_addressing(block_size)
    k_chunks, v_chunks = chunks_of(head_dim)

    @inlined
    def load_k(words: Any, k: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The rows `lane // 4` and the 8th after that."""
        for r in range(2):
            position = max(min(token + r * 8 + (lane >> 2), piece.last), piece.first)
            source = address_of(position, home, k)
            for c in range(k_chunks):
                offset = c * 64 + (lane & 3) * 16
                if head_dim % 32 and offset >= head_dim * 2:
                    offset = 0  # the query is 0 there
                loaded = load_16(source + offset)
                for i in range(4):
                    words[(r * k_chunks + c) * 4 + i] = loaded[i]

    @inlined
    def load_v(words: Any, v: Tokens, token: int, home: int, piece: Piece, lane: int) -> None:
        """The tokens that are a lane's columns in the product."""
        for r in range(4):
            position = token + (lane & 3) * 2 + (r & 1) + (r >> 1) * 8
            position = max(min(position, piece.last), piece.first)
            source = address_of(position, home, v)
            for c in range(v_chunks):
                offset = c * 128 + (lane >> 2) * 16
                if head_dim % 64 and offset >= head_dim * 2:
                    offset = 0  # these sums are not stored
                loaded = load_16(source + offset)
                for i in range(4):
                    words[(r * v_chunks + c) * 4 + i] = loaded[i]

    return load_k, load_v


def make_products(dtype: torch.dtype, head_dim: int, softcapped: bool) -> tuple[Any, Any]:
    """Functions for kernels: the two products."""
    multiply = multiplications[dtype]
    k_chunks, v_chunks = chunks_of(head_dim)

    @inlined
    def score(k_words: Any, q_words: Any, inner: float) -> tuple[float, float, float, float]:
        """Of 16 tokens and 8 queries: a lane has tokens `lane // 4` and the 8th after, for each of two queries."""
        d = (float32(0), float32(0), float32(0), float32(0))
        for c in range(k_chunks):
            for x in range(2):
                low = c * 4 + 2 * x
                high = (k_chunks + c) * 4 + 2 * x
                d = multiply(
                    d[0], d[1], d[2], d[3],
                    k_words[low], k_words[high], k_words[low + 1], k_words[high + 1],
                    q_words[c * 4 + 2 * x], q_words[c * 4 + 2 * x + 1],
                )  # fmt: skip
        if softcapped:
            return tanh(d[0] * inner), tanh(d[1] * inner), tanh(d[2] * inner), tanh(d[3] * inner)
        return d

    @inlined
    def accumulate(sums: Any, v_words: Any, p0: int, p1: int) -> None:
        """Adds V^T P of 16 tokens. Pairs of tokens are put together as the multiplication wants them."""
        for c in range(v_chunks):
            for w in range(4):
                e0 = v_words[c * 4 + w]
                e1 = v_words[(v_chunks + c) * 4 + w]
                e2 = v_words[(2 * v_chunks + c) * 4 + w]
                e3 = v_words[(3 * v_chunks + c) * 4 + w]
                o = (c * 4 + w) * 4
                d = multiply(
                    sums[o], sums[o + 1], sums[o + 2], sums[o + 3],
                    pick_bytes(e0, e1, 0x5410), pick_bytes(e0, e1, 0x7632),
                    pick_bytes(e2, e3, 0x5410), pick_bytes(e2, e3, 0x7632),
                    p0, p1,
                )  # fmt: skip
                for i in range(4):
                    sums[o + i] = d[i]

    return score, accumulate


def make_attend(variant: Variant, queries: Queries) -> tuple[Any, Any]:
    """Functions for kernels: what a lane's two queries see of a piece, and an octet's attention to a warp's tokens."""
    pack, windowed = HALVES[variant.dtype].pack, variant.windowed
    group, q_len = queries.group, queries.q_len
    k_chunks, v_chunks = chunks_of(variant.head_dim)
    k_words, v_words, num_sums = 8 * k_chunks, 16 * v_chunks, 16 * v_chunks
    stride = queries.token_warps * UNIT

    home_of, _ = make_addressing(variant.block_size)
    load_k, load_v = make_loads(variant.head_dim, variant.block_size)
    score, accumulate = make_products(variant.dtype, variant.head_dim, variant.softcapped)

    @inlined
    def keys_of_lane(piece: Piece, column: int, window: int) -> Visible:
        """Of the queries of this number and the next; those that there are not see as much as the last."""
        high0 = piece.last + 1 - q_len + min(column // group, q_len - 1) + 1
        high1 = piece.last + 1 - q_len + min((column + 1) // group, q_len - 1) + 1
        low0 = max(piece.first, high0 - window) if windowed else piece.first
        low1 = max(piece.first, high1 - window) if windowed else piece.first
        return Visible(low0, min(high0, piece.token_end), low1, min(high1, piece.token_end))

    @inlined
    def attend(
        sums: Any, q_fragment: Any, k: Tokens, v: Tokens, row: Row, piece: Piece, token: int, visible: Visible,
        scoring: Scoring, lane: int,
    ) -> Softmax:  # fmt: skip
        """From a token on; other warps have those in between. The softmax is this lane's."""
        k_fragment = cuda.local.array(k_words, uint32)
        v_fragment = cuda.local.array(v_words, uint32)
        for i in range(num_sums):
            sums[i] = float32(0)
        m0, m1, l0, l1 = begin_softmax()
        if token < piece.token_end:
            home = home_of(token, row)
            load_k(k_fragment, k, token, home, piece, lane)
            load_v(v_fragment, v, token, home, piece, lane)
            home = home_of(min(token + stride, piece.last), row)
        while token < piece.token_end:
            s0, s1, s2, s3 = score(k_fragment, q_fragment, scoring.inner)
            t = token + (lane >> 2)
            s0 = s0 if visible.low0 <= t < visible.high0 else float32(NEGATIVE_INFINITY)
            s1 = s1 if visible.low1 <= t < visible.high1 else float32(NEGATIVE_INFINITY)
            s2 = s2 if visible.low0 <= t + 8 < visible.high0 else float32(NEGATIVE_INFINITY)
            s3 = s3 if visible.low1 <= t + 8 < visible.high1 else float32(NEGATIVE_INFINITY)
            # K of the next tokens is on its way while V is multiplied, and V while K is.
            token += stride
            if token < piece.token_end:
                load_k(k_fragment, k, token, home, piece, lane)
            n0 = maximum(m0, maximum(s0, s2))
            n1 = maximum(m1, maximum(s1, s3))
            for step in range(3):
                n0 = maximum(n0, shuffle_xor(n0, 4 << step))
                n1 = maximum(n1, shuffle_xor(n1, 4 << step))
            a0 = exp2((m0 - n0) * scoring.outer)
            a1 = exp2((m1 - n1) * scoring.outer)
            m0 = n0
            m1 = n1
            for i in range(num_sums // 2):
                sums[2 * i] *= a0
                sums[2 * i + 1] *= a1
            p0 = exp2(fma(s0, scoring.outer, -m0 * scoring.outer))
            p1 = exp2(fma(s1, scoring.outer, -m1 * scoring.outer))
            p2 = exp2(fma(s2, scoring.outer, -m0 * scoring.outer))
            p3 = exp2(fma(s3, scoring.outer, -m1 * scoring.outer))
            l0 = fma(l0, a0, p0 + p2)
            l1 = fma(l1, a1, p1 + p3)
            accumulate(sums, v_fragment, transpose(pack(p0, p1)), transpose(pack(p2, p3)))
            if token < piece.token_end:
                load_v(v_fragment, v, token, home, piece, lane)
                home = home_of(min(token + stride, piece.last), row)
        return Softmax(m0, m1, l0, l1)

    return keys_of_lane, attend


def make_put_results(head_dim: int, queries: Queries) -> Any:
    """A function for kernels that leaves a warp's sums, maxima and weights in shared memory."""
    results, per_octet = results_of(queries, head_dim), queries.per_octet
    _, chunks = chunks_of(head_dim)

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
                    dim = c * 64 + (lane >> 2) * 8
                    if dim < head_dim:
                        to = results.sums + column * head_dim + dim
                        for w in range(8):
                            shared[to + w] = sums[(c * 4 + w // 2) * 4 + w % 2 * 2 + i]

    return put_results


def make_decode(variant: Variant) -> Any:
    """The kernel as a Python function."""
    head_dim, queries = variant.head_dim, Queries(variant.group, variant.q_len, variant.mixed)
    octets, octets_per_head, bundles_per_head = queries.octets, queries.octets_per_head, queries.bundles_per_head
    k_chunks, v_chunks = chunks_of(head_dim)
    q_words, num_sums = 4 * k_chunks, 16 * v_chunks
    shared_floats = results_of(queries, head_dim).floats

    share_of_block, piece_at, sequence_after = make_shares(queries, variant.windowed)
    first_query = make_first_query(queries.mixed)
    load_queries = make_load_queries(head_dim, queries)
    keys_of_lane, attend = make_attend(variant, queries)
    put_results = make_put_results(head_dim, queries)
    settle = make_settle(variant.dtype, head_dim, queries)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        shared = cuda.shared.array(shared_floats, float32)
        q_fragment = cuda.local.array(q_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        bundles = sizes.kv_heads * bundles_per_head
        lengths = Lengths(at.cu_seqlens, at.seq_lens, at.starts, scoring.window, bundles)

        share = share_of_block(sizes.batch, lengths, lane)
        unit, sequence, before = share.begin, share.sequence, share.before
        while unit < share.end:
            piece = piece_at(unit, share.end, sequence, before, lengths)
            token = piece.token + warp // octets * UNIT
            number = piece.bundle * octets + warp % octets
            octet = Octet(number // octets_per_head, number % octets_per_head * 8)
            row = row_of(sequence, at, strides)
            k, v = head_of(octet.kv_head, at, strides)
            visible = keys_of_lane(piece, octet.column + 2 * (lane & 3), scoring.window)
            q = at.q + first_query(sequence, at.cu_seqlens, strides.q_batch, strides.q_token)
            load_queries(q_fragment, octet, q, strides, lane)
            softmax = attend(sums, q_fragment, k, v, row, piece, token, visible, scoring, lane)
            put_results(shared, sums, softmax, warp, lane)
            settle(shared, piece, share.size, bundles, at, strides, scoring.outer, thread)
            unit = piece.end
            if unit == piece.bundle_end and piece.bundle == bundles - 1:
                before = unit
                sequence = sequence_after(sequence, share, unit, lengths)

    return kernel
