"""What becomes of a block's sums over latents: outputs, or parts of them, which the last block of a bundle adds up.

Parts are those of decode (see `decode_parts`), of many queries, wide ones.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from .addressing import make_first_query
from .arguments import LATENT_V_DIM, Addresses, Strides, Variant
from .arithmetic import FLOOR, HALVES, LOG2E, exp2, maximum, reciprocal
from .decode_parts import Parts, Sum, make_finish, make_parts, part_bytes
from .decode_shares import Piece, Queries, Share
from .latents import THREADS, Part, sums_of
from .memory import increment, load_f32, load_fresh_f32, load_fresh_f32x4, store_4, store_f32x2
from .ptx import float32, inlined, int64
from .shared import load_shared_f32, store_shared_f32
from .softmax import Softmax, sum_weights

MERGED = THREADS * 4 // LATENT_V_DIM
"""Queries whose parts a block's threads add up at a time, a thread four dims of one."""


def make_put(variant: Variant, queries: int) -> tuple[Any, Any]:
    """Functions for kernels: put a warp's outputs; put its sums to a part, in fp32."""
    heads_per_kv, pack = variant.heads_per_kv, HALVES[variant.dtype].pack
    num_sums, sums_bytes = sums_of(queries), queries * LATENT_V_DIM * 4

    @inlined
    def put_output(
        sums: Any, offset: int, m: float, weights: float, number: int, count: int, to: int, part: Part,
        at: Addresses, strides: Strides, outer: float, lane: int,
    ) -> None:  # fmt: skip
        """Of one query; `offset` is 0 for a lane's first, 2 for its second."""
        if number < count:
            head = number % heads_per_kv
            if at.sinks != 0:
                weights += exp2(load_f32(at.sinks + head * 4) * float32(LOG2E) - m * outer)
            scale = float32(0) if weights == float32(0) else reciprocal(weights)
            to += number // heads_per_kv * strides.out_token + head * strides.out_head + part.dims * 2 + (lane & 3) * 4
            for j in range(num_sums // 4):
                store_4(to + j * 16, pack(sums[4 * j + offset] * scale, sums[4 * j + offset + 1] * scale))

    @inlined
    def put_outputs(
        sums: Any, softmax: Softmax, number: int, count: int, to: int, part: Part, at: Addresses, strides: Strides,
        outer: float, lane: int,
    ) -> None:  # fmt: skip
        """Of the queries of this number and 8 further on, of `count` whose outputs begin at the address `to`."""
        l0, l1 = sum_weights(softmax)
        put_output(sums, 0, softmax.m0, l0, number, count, to, part, at, strides, outer, lane)
        put_output(sums, 2, softmax.m1, l1, number + 8, count, to, part, at, strides, outer, lane)

    @inlined
    def put_sums(sums: Any, softmax: Softmax, line: int, to: int, part: Part, lane: int) -> None:
        l0, l1 = sum_weights(softmax)
        for j in range(num_sums // 4):
            at = to + line * (LATENT_V_DIM * 4) + (part.dims + 8 * j + 2 * (lane & 3)) * 4
            store_f32x2(at, sums[4 * j], sums[4 * j + 1])
            store_f32x2(at + 8 * LATENT_V_DIM * 4, sums[4 * j + 2], sums[4 * j + 3])
        if part.dims == 0 and lane & 3 == 0:
            store_f32x2(to + sums_bytes + line * 8, softmax.m0, l0)
            store_f32x2(to + sums_bytes + (line + 8) * 8, softmax.m1, l1)

    return put_outputs, put_sums


def make_add_parts(bundles: Queries) -> Any:
    """A function for kernels that adds up parts of four queries: of each four dims. Those of four parts come together,
    since a block has many queries, wide ones, and is the only one that adds them up."""
    quarter, nbytes = LATENT_V_DIM // 4, part_bytes(bundles, LATENT_V_DIM)
    share_bytes, sums_bytes = 2 * bundles.team * nbytes, bundles.per_bundle * LATENT_V_DIM * 4

    @inlined
    def add_parts(totals: Any, parts: Parts, line: int, quad: int, outer: float) -> None:
        """Of lines `MERGED` apart; `totals` are sums, and a maximum and a sum of weights behind, of each."""
        m = cuda.local.array(16, float32)
        weights = cuda.local.array(16, float32)
        o = cuda.local.array(64, float32)
        for i in range(4):
            for j in range(4):
                totals[6 * i + j] = float32(0)
            totals[6 * i + 4] = float32(FLOOR)
            totals[6 * i + 5] = float32(0)
        index = 0
        while index < parts.num_parts:
            for p in range(4):
                number = min(index + p, parts.num_parts - 1)
                at = parts.second + (number - 1) * share_bytes if number > 0 else parts.first
                for i in range(4):
                    state = at + sums_bytes + (line + i * MERGED) * 8
                    m[4 * p + i] = load_fresh_f32(state)
                    weights[4 * p + i] = load_fresh_f32(state + 4)
                    loaded = load_fresh_f32x4(at + ((line + i * MERGED) * quarter + quad) * 16)
                    for j in range(4):
                        o[(4 * p + i) * 4 + j] = loaded[j]
            for i in range(4):
                higher = totals[6 * i + 4]
                for p in range(4):
                    higher = maximum(higher, m[4 * p + i])
                old = exp2((totals[6 * i + 4] - higher) * outer)
                totals[6 * i + 4] = higher
                totals[6 * i + 5] *= old
                for j in range(4):
                    totals[6 * i + j] *= old
                for p in range(4):
                    weight = exp2((m[4 * p + i] - higher) * outer) if index + p < parts.num_parts else float32(0)
                    totals[6 * i + 5] += weight * weights[4 * p + i]
                    for j in range(4):
                        totals[6 * i + j] += weight * o[(4 * p + i) * 4 + j]
            index += 4

    return add_parts


def make_settle(variant: Variant, bundles: Queries, arrived: int) -> Any:
    """A function for kernels that makes an output of a block's sums, or a part; of the last part of a bundle, which
    then has them all, both."""
    quarter, queries = LATENT_V_DIM // 4, bundles.per_bundle
    count, num_bundles = bundles.per_head, bundles.bundles(1)
    first_query = make_first_query(bundles.mixed)
    put_outputs, put_sums = make_put(variant, queries)
    part_of, parts_of, _, _ = make_parts(bundles, LATENT_V_DIM)
    add_parts = make_add_parts(bundles)
    _, finish = make_finish(variant.dtype, bundles, quarter)

    @inlined
    def settle(
        sums: Any, softmax: Softmax, base: int, piece: Piece, share: Share, part: Part, at: Addresses,
        strides: Strides, outer: float, thread: int, lane: int,
    ) -> None:  # fmt: skip
        """Called by all threads of a block."""
        line = part.strip * 16 + (lane >> 2)
        if piece.end - piece.begin == piece.bundle_end - piece.bundle_begin:
            to = at.out + first_query(piece.sequence, at.cu_seqlens, strides.out_batch, strides.out_token)
            number = piece.bundle * queries + line
            put_outputs(sums, softmax, number, count, to, part, at, strides, outer, lane)
            return
        to = part_of(share.number, share, piece.bundle_begin, at.partials)
        put_sums(sums, softmax, line, to, part, lane)
        parts = parts_of(piece, share, at.partials)
        cuda.syncthreads()
        if thread == 0:
            cuda.threadfence()
            counter = at.counters + (piece.sequence * num_bundles + piece.bundle) * 4
            store_shared_f32(base + arrived, float32(increment(counter, parts.num_parts - 1)))
        cuda.syncthreads()
        if int64(load_shared_f32(base + arrived)) == parts.num_parts - 1:
            cuda.threadfence()
            totals = cuda.local.array(24, float32)
            quad, first = thread % quarter, thread // quarter
            while first < queries:
                add_parts(totals, parts, first, quad, outer)
                for i in range(4):
                    number = piece.bundle * queries + first + i * MERGED
                    if number < count:
                        t = 6 * i
                        total = Sum(
                            totals[t + 4], totals[t + 5], totals[t], totals[t + 1], totals[t + 2], totals[t + 3]
                        )  # fmt: skip
                        finish(total, quad, number, 0, piece.sequence, at, strides, outer)
                first += 4 * MERGED

    return settle
