"""Latents: which queries and tokens a block of threads has, how they come to shared memory, what becomes of sums.

There is one KV head of 576 numbers, whose first 512 are V as well (DeepSeek-V2, arXiv 2405.04434, with the projections
of K and V absorbed in those of queries and outputs). A sequence's queries are the heads of its tokens, one token's
behind the other's: all of them read the same. A block of threads has 16, 32 or 64, and brings each tile of keys to
shared memory once for both products, which `latent_products` makes. Partial results are those of `decode_parts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda

from .arguments import (
    LATENT_DIM, LATENT_V_DIM, Given, Row, Options, Sizes, Tokens, Variant, address_of, first_query, home_of,
)  # fmt: skip
from .compiler import float32, inlined, int64
from .decode_parts import Parts, Share, Sum, make_finish, make_parts, part_bytes
from .decode_products import Piece, Queries
from .memory import (
    FLOOR, HALVES, LOG2E, clamp, copy_16, exp2, increment, load_f32, load_fresh_f32, load_fresh_f32x4,
    load_shared_f32, maximum, reciprocal, store_4, store_f32x2, store_shared_f32,
)  # fmt: skip
from .softmax import Softmax, Visible, sum_weights

WARPS = 8
THREADS = 32 * WARPS
TOGETHER = THREADS // 8  # queries, or keys, that a block's threads copy at a time, eight of them each
PREFILL_QUERIES = 64  # of a block of threads


def bundles_of(variant: Variant) -> Queries:
    """How decode's queries are worked on: 16, 32 or 64 are a bundle, on which all warps of a block work."""
    per_head = variant.heads_per_kv * variant.q_len
    at_once = next((octets for octets in (2, 4) if per_head <= octets * 8), 8)
    return Queries(variant.heads_per_kv, variant.q_len, at_once).in_teams(1)


def latent_queries(variant: Variant) -> int:
    """Queries of a block of threads."""
    return bundles_of(variant).per_bundle if variant.q_len else PREFILL_QUERIES


def dims_of(queries: int) -> int:
    """Of V, that a warp has, for its 16 queries."""
    return LATENT_V_DIM * queries // 16 // WARPS


def sums_of(queries: int) -> int:
    """Sums that a thread has."""
    return dims_of(queries) // 2


class Job(NamedTuple):
    """Queries of a sequence that a block of threads works on, and the tokens that they see."""

    q: int  # the address of the sequence's first
    num_queries: int  # the sequence's
    query: int  # the block's first among them; behind the last there is it again
    k: Tokens
    row: Row
    key: int  # where the first tile begins
    begin: int  # the first token that is there
    end: int


class Part(NamedTuple):
    """A warp's part of the work of a block of threads."""

    strip: int  # its 16 queries
    half: int  # of a tile's keys; on Hopper of K's numbers
    numbers: int  # which part of K's; on Hopper 0
    dims: int  # the first of V that it has


@inlined
def part_of(warp: int, strips: int, dims: int) -> Part:
    """A warp's part of the work, of so many strips, where a warp has so many dims of V."""
    number = warp // strips
    return Part(warp % strips, number % 2, number // 2, number * dims)


def make_copies(variant: Variant, queries: int, tile: int, line_bytes: int) -> tuple[Any, Any, Any, int]:
    """Functions for kernels, called by all of a block's threads: begin to copy queries; look up the tokens of a tile,
    and begin to copy them; and how many homes a thread looks up.

    Args:
        tile: keys of a tile.
        line_bytes: from one query's or key's first 16 bytes in shared memory to the next one's. 128: these are all that
            it has there, swizzled, and the next 128 bytes of all follow, as Hopper's products take them.
    """
    heads_per_kv, swizzled = variant.heads_per_kv, line_bytes == 128
    turns = -(-tile // TOGETHER)

    @inlined
    def copy(to: int, lines: int, line: int, source: int, thread: int) -> None:
        """Copies this thread's 16 bytes of each 128 of a query or key; eight threads share one."""
        vector = thread & 7
        source += vector * 16
        to += line * line_bytes + ((vector ^ (line & 7)) if swizzled else vector) * 16
        for i in range(LATENT_DIM // 64):
            copy_16(to + i * (lines * line_bytes if swizzled else 128), source + i * 128)

    @inlined
    def copy_queries(to: int, job: Job, sizes: Sizes, thread: int) -> None:
        for turn in range(-(-queries // TOGETHER)):
            line = turn * TOGETHER + (thread >> 3)
            if line < queries:
                number = min(job.query + line, job.num_queries - 1)
                source = job.q + number // heads_per_kv * sizes.q.token + number % heads_per_kv * sizes.q.head
                copy(to, queries, line, source, thread)

    @inlined
    def look_up(homes: Any, key: int, job: Job, thread: int) -> None:
        for turn in range(turns):
            token = key + turn * TOGETHER + (thread >> 3)
            homes[turn] = home_of(clamp(token, job.begin, job.end - 1), job.row)

    @inlined
    def copy_tile(to: int, homes: Any, key: int, job: Job, thread: int) -> None:
        for turn in range(turns):
            line = turn * TOGETHER + (thread >> 3)
            if line < tile:
                token = clamp(key + line, job.begin, job.end - 1)
                copy(to, tile, line, address_of(token, homes[turn], job.k), thread)

    return copy_queries, look_up, copy_tile, turns


@inlined
def visible_of(number: int, heads_per_kv: int, tokens: int, first: int, length: int, options: Options) -> Visible:
    """The keys that a lane's two queries see, of a number and 8 further on, among those of a sequence's last tokens
    that share a KV head; queries that are missing see as much as the last."""
    window, causal = options.window, options.causal != 0
    high0 = length - tokens + 1 + min(number // heads_per_kv, tokens - 1) if causal else length
    high1 = length - tokens + 1 + min((number + 8) // heads_per_kv, tokens - 1) if causal else length
    low0 = max(first, high0 - window) if window != 0 else first
    low1 = max(first, high1 - window) if window != 0 else first
    return Visible(low0, high0, low1, high1)


MERGED = THREADS * 4 // LATENT_V_DIM  # queries whose parts a block's threads add up at a time, a thread 4 dims of one


def make_put(variant: Variant, queries: int) -> tuple[Any, Any]:
    """Functions for kernels: put a warp's outputs; put its sums to a part, in fp32."""
    heads_per_kv, pack = variant.heads_per_kv, HALVES[variant.dtype].pack
    num_sums, sums_bytes = sums_of(queries), queries * LATENT_V_DIM * 4

    @inlined
    def put_output(
        sums: Any, offset: int, m: float, weights: float, number: int, count: int, to: int, part: Part, given: Given,
        lane: int,
    ) -> None:  # fmt: skip
        at, sizes = given.at, given.sizes
        if number < count:
            head = number % heads_per_kv
            if at.sinks != 0:
                weights += exp2(load_f32(at.sinks + head * 4) * float32(LOG2E) - m * given.options.outer)
            scale = float32(0) if weights == float32(0) else reciprocal(weights)
            to += number // heads_per_kv * sizes.out.token + head * sizes.out.head + part.dims * 2 + (lane & 3) * 4
            for j in range(num_sums // 4):
                store_4(to + j * 16, pack(sums[4 * j + offset] * scale, sums[4 * j + offset + 1] * scale))

    @inlined
    def put_outputs(
        sums: Any, softmax: Softmax, number: int, count: int, to: int, part: Part, given: Given, lane: int
    ) -> None:
        """Outputs of the queries of this number and 8 further on, of `count`, which begin at the address `to`."""
        l0, l1 = sum_weights(softmax)
        put_output(sums, 0, softmax.m0, l0, number, count, to, part, given, lane)
        put_output(sums, 2, softmax.m1, l1, number + 8, count, to, part, given, lane)

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
    """A function for kernels that adds up four dims of four queries `MERGED` apart, four parts at a time, since a block
    has many queries, wide ones. `totals` are sums, then a maximum and a sum of weights, of each."""
    quarter, nbytes = LATENT_V_DIM // 4, part_bytes(bundles, LATENT_V_DIM)
    share_bytes, sums_bytes = 2 * bundles.team * nbytes, bundles.per_bundle * LATENT_V_DIM * 4

    @inlined
    def add_parts(totals: Any, parts: Parts, line: int, quad: int, outer: float) -> None:
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
    """A function for kernels, called by all threads of a block, that makes an output of its sums, or a part; the last
    part of a bundle makes both."""
    quarter, queries = LATENT_V_DIM // 4, bundles.per_bundle
    heads_per_kv, num_bundles = bundles.heads_per_kv, bundles.bundles(1)
    put_outputs, put_sums = make_put(variant, queries)
    own_part, parts_of, _, _ = make_parts(bundles, LATENT_V_DIM)
    add_parts = make_add_parts(bundles)
    _, finish = make_finish(variant.dtype, bundles, quarter)

    @inlined
    def settle(
        sums: Any, softmax: Softmax, base: int, piece: Piece, share: Share, part: Part, given: Given, thread: int,
        lane: int,
    ) -> None:  # fmt: skip
        at, sizes = given.at, given.sizes
        line, count = part.strip * 16 + (lane >> 2), heads_per_kv * given.options.q_len
        if piece.end - piece.begin == piece.bundle_end - piece.bundle_begin:
            to = at.out + first_query(piece.sequence, sizes.out, given)
            number = piece.bundle * queries + line
            put_outputs(sums, softmax, number, count, to, part, given, lane)
            return
        to = own_part(share.number, share, piece.bundle_begin, at.partials)
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
                add_parts(totals, parts, first, quad, given.options.outer)
                for i in range(4):
                    number = piece.bundle * queries + first + i * MERGED
                    if number < count:
                        t = 6 * i
                        total = Sum(
                            totals[t + 4], totals[t + 5], totals[t], totals[t + 1], totals[t + 2], totals[t + 3]
                        )  # fmt: skip
                        finish(total, quad, number, 0, piece.sequence, given)
                first += 4 * MERGED

    return settle
