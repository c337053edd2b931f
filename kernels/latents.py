"""Attention over MLA's latents: which queries and tokens a block of threads has, and what becomes of its sums.

There is one KV head, of 576 numbers, whose first 512 are V as well (DeepSeek-V2, arXiv 2405.04434, with the projections
of K and V absorbed in those of queries and outputs). So a sequence's queries are its tokens' heads, one token's behind
the other's: all of them read the same. A block of threads has 16, 32 or 64, and brings tiles of keys to shared memory,
once for both products, which `latent_mma` and `latent_wgmma` make.

decode cuts the work as for other heads (see `decode_shares`): a block leaves what it has of a longer sequence as a part
(see `decode_parts`). prefill has a block of threads for each 64 queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda

from .addressing import Row, Tokens, first_token, head_of, make_addressing, make_first_query, row_of
from .arguments import LATENT_DIM, LATENT_V_DIM, NO_GROUPS, Addresses, Scoring, Sizes, Strides, Variant
from .arithmetic import FLOOR, HALVES, LOG2E, clamp, exp2, maximum, reciprocal
from .decode_parts import Parts, Sum, make_clear, make_finish, make_parts, part_bytes
from .decode_shares import UNIT, Lengths, Piece, Queries, Share, make_shares
from .memory import increment, load_f32, load_fresh_f32, load_fresh_f32x4, load_i32, store_4, store_f32x2
from .ptx import float32, inlined, int64, uint32
from .ragged import make_ragged
from .shared import copy_16, load_shared_f32, shared_address, store_shared_f32
from .softmax import Softmax, Visible, sum_weights

WARPS = 8
THREADS = 32 * WARPS
TOGETHER = THREADS // 8
"""Queries, or keys, that a block's threads copy at a time, eight of them each."""
MERGED = THREADS * 4 // LATENT_V_DIM
"""Queries whose parts a block's threads add up at a time, a thread four dims of one."""
PREFILL_QUERIES = 64
"""Of a block of threads."""


class Bundles(Queries):
    """The queries of a sequence in decode: 16, 32 or 64 are a bundle, on which all warps of a block work."""

    @property
    def at_once(self) -> int:
        return next((octets for octets in (2, 4) if self.per_head <= octets * 8), 8)

    @property
    def sharing(self) -> int:
        return 1


def bundles_of(variant: Variant) -> Queries:
    """How decode's queries are worked on."""
    return Bundles(variant.heads_per_kv, variant.q_len, variant.mixed).in_teams(1)


def queries_of(variant: Variant) -> int:
    """Queries of a block of threads."""
    return bundles_of(variant).per_bundle if variant.q_len else PREFILL_QUERIES


def dims_of(queries: int) -> int:
    """Of V, that a warp has, for its 16 queries."""
    return LATENT_V_DIM * queries // 16 // WARPS


def sums_of(queries: int) -> int:
    """Sums that a thread has."""
    return dims_of(queries) // 2


class Span(NamedTuple):
    """The tokens that a block of threads works on: from the tile that begins at `key`, before `end`. Those before
    `first` are not there."""

    key: int
    first: int
    end: int


class Part(NamedTuple):
    """What a warp has of the work of a block of threads."""

    strip: int
    """Its 16 queries."""
    half: int
    """Of a tile's keys; on Hopper of K's numbers."""
    numbers: int
    """Which part of K's; on Hopper 0."""
    dims: int
    """The first of V that it has."""


def make_part_of(queries: int) -> Any:
    """A function for kernels: a warp's part of the work."""
    strips, dims = queries // 16, dims_of(queries)

    @inlined
    def part_of(warp: int) -> Part:
        number = warp // strips
        return Part(warp % strips, number % 2, number // 2, number * dims)

    return part_of


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
    home_of, address_of = make_addressing(variant.block_size)

    @inlined
    def copy(to: int, lines: int, line: int, source: int, thread: int) -> None:
        """Of one of so many queries or keys the 16 bytes that are this thread's, of each 128: eight take turns."""
        vector = thread & 7
        source += vector * 16
        to += line * line_bytes + ((vector ^ (line & 7)) if swizzled else vector) * 16
        for i in range(LATENT_DIM // 64):
            copy_16(to + i * (lines * line_bytes if swizzled else 128), source + i * 128)

    @inlined
    def copy_queries(to: int, q: int, first: int, count: int, strides: Strides, thread: int) -> None:
        """Those behind the last repeat it."""
        for turn in range(-(-queries // TOGETHER)):
            line = turn * TOGETHER + (thread >> 3)
            if line < queries:
                number = min(first + line, count - 1)
                source = q + number // heads_per_kv * strides.q_token + number % heads_per_kv * strides.q_head
                copy(to, queries, line, source, thread)

    @inlined
    def look_up(homes: Any, key: int, row: Row, span: Span, thread: int) -> None:
        for turn in range(turns):
            token = key + turn * TOGETHER + (thread >> 3)
            homes[turn] = home_of(clamp(token, span.first, span.end - 1), row)

    @inlined
    def copy_tile(to: int, k: Tokens, homes: Any, key: int, span: Span, thread: int) -> None:
        """Those that are not there repeat one that is."""
        for turn in range(turns):
            line = turn * TOGETHER + (thread >> 3)
            if line < tile:
                token = clamp(key + line, span.first, span.end - 1)
                copy(to, tile, line, address_of(token, homes[turn], k), thread)

    return copy_queries, look_up, copy_tile, turns


def make_visible_of(variant: Variant) -> Any:
    """A function for kernels: the keys that a lane's two queries see."""
    heads_per_kv, causal, windowed = variant.heads_per_kv, variant.causal, variant.windowed

    @inlined
    def visible_of(number: int, tokens: int, first: int, length: int, window: int) -> Visible:
        """Of the queries of this number and 8 further on, of so many tokens; behind the last there is it again."""
        high0 = length - tokens + 1 + min(number // heads_per_kv, tokens - 1) if causal else length
        high1 = length - tokens + 1 + min((number + 8) // heads_per_kv, tokens - 1) if causal else length
        low0 = max(first, high0 - window) if windowed else first
        low1 = max(first, high1 - window) if windowed else first
        return Visible(low0, high0, low1, high1)

    return visible_of


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
            scale = reciprocal(weights) if weights > float32(0) else float32(0)
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


def make_decode(variant: Variant, attend: Any, arrived: int, alignment: int) -> Any:
    """The kernel as a Python function.

    Args:
        attend: an inlined device function: attention of a block's queries to some tokens.
        arrived: where in shared memory one float is left.
        alignment: of shared memory.
    """
    bundles = bundles_of(variant)
    queries, count, q_len = bundles.per_bundle, bundles.per_head, variant.q_len
    num_sums = sums_of(queries)
    num_bundles, team = bundles.bundles(1), bundles.team

    share_of_block, piece_at, sequence_after, is_empty = make_shares(bundles, variant.windowed, False)
    first_query = make_first_query(variant.mixed)
    part_of = make_part_of(queries)
    visible_of = make_visible_of(variant)
    settle = make_settle(variant, bundles, arrived)
    clear = make_clear(variant.dtype, LATENT_V_DIM, bundles)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + alignment - 1) // alignment * alignment
        sums = cuda.local.array(num_sums, float32)
        part = part_of(thread >> 5)
        lengths = Lengths(at.cu_seqlens, at.seq_lens, at.starts, scoring.window, num_bundles // team, NO_GROUPS)

        place = int64(cuda.blockIdx.x)
        while place < sizes.batch:
            if is_empty(place, lengths):
                clear(place, num_bundles, at, strides, scoring.outer, thread)
            place += cuda.gridDim.x

        share = share_of_block(sizes.batch, lengths, lane)
        unit, sequence, before = share.begin, share.sequence, share.before
        while unit < share.end:
            piece = piece_at(unit, share, sequence, before, lengths)
            k, _ = head_of(0, at, strides)
            q = at.q + first_query(sequence, at.cu_seqlens, strides.q_batch, strides.q_token)
            first = piece.bundle * queries
            number = first + part.strip * 16 + (lane >> 2)
            seen = visible_of(number, q_len, piece.first, piece.last + 1, scoring.window)
            high0, high1 = min(seen.high0, piece.token_end), min(seen.high1, piece.token_end)
            softmax = attend(
                sums, base, q, first, count, k, row_of(sequence, at, strides),
                Span(piece.token, piece.first, piece.token_end), Visible(seen.low0, high0, seen.low1, high1), part,
                strides, scoring, thread, lane,
            )  # fmt: skip
            settle(sums, softmax, base, piece, share, part, at, strides, scoring.outer, thread, lane)
            unit = piece.end
            if unit == piece.bundle_end and piece.round == lengths.rounds - 1:
                before = unit
                sequence = sequence_after(sequence, share, unit, lengths)

    return kernel


def make_find_queries(variant: Variant) -> Any:
    """A function for kernels: the sequence that a block of threads works on, and the first of its queries there."""
    heads_per_kv, mixed = variant.heads_per_kv, variant.mixed

    @inlined
    def units_of(sequence: int, cu_seqlens: int) -> int:
        """Blocks of queries; in a mixed batch single tokens are left out."""
        tokens = load_i32(cu_seqlens + sequence * 4 + 4) - load_i32(cu_seqlens + sequence * 4)
        tokens = 0 if mixed and tokens == 1 else tokens
        return (tokens * heads_per_kv + PREFILL_QUERIES - 1) // PREFILL_QUERIES

    _, locate = make_ragged(units_of)

    @inlined
    def find_queries(cu_seqlens: int, batch: int, lane: int) -> tuple[int, int, bool]:
        """The lanes of a warp look together. Whether there are any comes last."""
        unit = cuda.gridDim.x - 1 - cuda.blockIdx.x  # the last queries of a prompt see most keys: they go first
        sequence, before = locate(unit, batch, cu_seqlens, lane)
        return sequence, (unit - before) * PREFILL_QUERIES, unit - before < units_of(sequence, cu_seqlens)

    return find_queries


def make_prefill(variant: Variant, attend: Any, alignment: int) -> Any:
    """The kernel as a Python function; arguments are those of `make_decode`."""
    heads_per_kv, causal, windowed = variant.heads_per_kv, variant.causal, variant.windowed
    num_sums = sums_of(PREFILL_QUERIES)

    find_queries = make_find_queries(variant)
    part_of = make_part_of(PREFILL_QUERIES)
    visible_of = make_visible_of(variant)
    put_outputs, _ = make_put(variant, PREFILL_QUERIES)

    @inlined
    def span_of(first_query: int, tokens: int, first: int, length: int, window: int) -> Span:
        """The keys that a block's queries see."""
        last_token = min((first_query + PREFILL_QUERIES - 1) // heads_per_kv, tokens - 1)
        end = length - tokens + last_token + 1 if causal else length
        low = max(first, length - tokens + first_query // heads_per_kv + 1 - window) if windowed else first
        return Span(low // UNIT * UNIT, first, end if first < length else 0)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + alignment - 1) // alignment * alignment
        sums = cuda.local.array(num_sums, float32)
        part = part_of(thread >> 5)

        sequence, query, there = find_queries(at.cu_seqlens, sizes.batch, lane)
        if not there:
            return
        start = load_i32(at.cu_seqlens + sequence * 4)
        tokens = load_i32(at.cu_seqlens + sequence * 4 + 4) - start
        length = load_i32(at.seq_lens + sequence * 4)
        first = first_token(sequence, at.starts)
        if windowed:  # what no query of the sequence sees may be gone
            first = max(first, length - tokens + 1 - scoring.window)
        k, _ = head_of(0, at, strides)
        number = query + part.strip * 16 + (lane >> 2)
        softmax = attend(
            sums, base, at.q + start * strides.q_token, query, tokens * heads_per_kv, k, row_of(sequence, at, strides),
            span_of(query, tokens, first, length, scoring.window),
            visible_of(number, tokens, first, length, scoring.window), part, strides, scoring, thread, lane,
        )  # fmt: skip
        to = at.out + start * strides.out_token
        put_outputs(sums, softmax, number, tokens * heads_per_kv, to, part, at, strides, scoring.outer, lane)

    return kernel
