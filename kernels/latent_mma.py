"""decode and prefill over MLA's latents on tensor cores: one KV head, whose first 512 of 576 numbers are V as well.

A sequence's queries are its tokens' heads, one token's behind the other's, since all of them read the same. A block of
threads has 16, 32 or 64 of them, and brings tiles of keys to shared memory, once for both products
([DeepSeek-V2](https://arxiv.org/abs/2405.04434), with K and V's projections absorbed in those of queries and outputs).
Of its 8 warps 8, 4 or 2 have the same 16 queries:

    scores    a warp has half of a tile's keys, and a quarter, a half or all of their 576 numbers,
    softmax   each reads its queries' scores of all keys from shared memory and adds them up: all come to the same,
    sums      a warp has an eighth, a quarter or half of V's 512 numbers.

decode cuts the work as for other heads (see `decode_shares`): a block leaves what it has of a longer sequence as a part
(see `decode_parts`). prefill has a block of threads for each 64 queries.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from numba import cuda

from .addressing import Row, Tokens, first_token, head_of, make_addressing, make_first_query, row_of
from .arguments import LATENT_DIM, LATENT_V_DIM, NO_GROUPS, Addresses, Scoring, Sizes, Strides, Variant
from .arithmetic import HALVES, LOG2E, exp2, reciprocal, tanh
from .decode_parts import NOTHING, make_clear, make_finish, make_parts
from .decode_shares import Lengths, Piece, Queries, make_shares
from .memory import increment, load_f32, load_i32, store_4, store_f32x2
from .prefill_mma import make_copy, pitch_of
from .ptx import float32, inlined, int64, uint32
from .ragged import make_ragged
from .shared import (
    commit_copies,
    load_shared_f32,
    load_shared_f32x4,
    make_wait_older_copies,
    shared_address,
    store_shared_f32,
    store_shared_f32x4,
)
from .softmax import Softmax, Visible, begin_softmax, hide, rescale, sum_weights, weigh
from .warp import any_lane, load_matrices, load_matrices_transposed
from .warp import multiply as multiplications

WARPS = 8
THREADS = 32 * WARPS
TILE = 32
"""Keys that are worked on at a time."""
PITCH = pitch_of(LATENT_DIM)
"""Bytes from one query, or key, in shared memory to the next."""
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


def bundles_of(variant: Variant) -> Bundles:
    """How decode's queries are worked on."""
    return Bundles(variant.group, variant.q_len, variant.mixed)


def queries_of(variant: Variant) -> int:
    """Queries of a block of threads."""
    return bundles_of(variant).per_bundle if variant.q_len else PREFILL_QUERIES


def blocks_per_sm(queries: int, shared_bytes: int) -> int:
    """Two with few queries, whose sums leave registers for it: one copies while the other waits for its warps.

    Args:
        queries: of a block of threads.
        shared_bytes: what a block of threads may have.
    """
    return 2 if queries == 16 and shared_of(queries, 2).nbytes <= shared_bytes // 2 - 1024 else 1


def slots_for(queries: int, shared_bytes: int) -> int:
    """Tiles that shared memory has room for; less than two are too few."""
    left = shared_bytes // blocks_per_sm(queries, shared_bytes) - 1024 - shared_of(queries, 0).nbytes
    return left // (TILE * PITCH)


class Shared(NamedTuple):
    """Where things are in shared memory."""

    queries: int
    scores: int
    """Of all parts of numbers, for each 16 queries: 16 bytes a lane for 8 keys."""
    arrived: int
    """How many parts of a bundle there were before this block's: one float."""
    tiles: int
    nbytes: int
    """In all."""


def shared_of(queries: int, slots: int) -> Shared:
    """The shared memory of a block of threads."""
    return Shared(*accumulate((queries * PITCH, 64 * TILE * 4, 16, slots * TILE * PITCH), initial=0))


class Span(NamedTuple):
    """The tokens that a block of threads works on: from the tile that begins at `key`, before `end`. Those before
    `first` are not there."""

    key: int
    first: int
    end: int


class Part(NamedTuple):
    """What a warp has of the work of a block of threads."""

    group: int
    """Its 16 queries."""
    half: int
    """Of a tile's keys."""
    numbers: int
    """Which part of K's."""
    dims: int
    """The first of V that it has."""


def make_part_of(queries: int) -> Any:
    """A function for kernels: a warp's part of the work."""
    groups = queries // 16
    dims = LATENT_V_DIM * groups // WARPS

    @inlined
    def part_of(warp: int) -> Part:
        number = warp // groups
        return Part(warp % groups, number % 2, number // 2, number * dims)

    return part_of


def make_products(dtype: torch.dtype, queries: int) -> tuple[Any, Any, Any]:
    """Functions for kernels: the queries that a warp holds in registers, where these have room for them; scores, which
    it leaves for the others; `sums += P V`. Products are those of `prefill_mma.make_products`."""
    multiply, pack = multiplications[dtype], HALVES[dtype].pack
    groups = queries // 16
    parts = 4 // groups
    steps, dims, held = LATENT_DIM // 16 // parts, LATENT_V_DIM * groups // WARPS, groups < 4

    @inlined
    def add(sums: Any, at: int, a: Any, b0: int, b1: int) -> None:
        d = multiply(sums[at], sums[at + 1], sums[at + 2], sums[at + 3], a[0], a[1], a[2], a[3], b0, b1)
        for i in range(4):
            sums[at + i] = d[i]

    @inlined
    def place_of(part: Part, lane: int) -> int:
        """Where a lane's row of the first matrices of a warp's queries is."""
        return (part.group * 16 + (lane & 15)) * PITCH + part.numbers * (steps * 32) + (lane >> 4) * 16

    @inlined
    def hold(fragments: Any, at: int, part: Part, lane: int) -> None:
        if held:
            at += place_of(part, lane)
            for step in range(steps):
                a = load_matrices(at + step * 32)
                for i in range(4):
                    fragments[4 * step + i] = a[i]

    @inlined
    def score(scores: Any, fragments: Any, at: int, tile: int, to: int, part: Part, lane: int) -> None:
        """Of even and of odd steps by themselves: products of the same sums wait for each other."""
        for i in range(16):
            scores[i] = float32(0)
        at += place_of(part, lane)
        token = part.half * 16 + (lane & 7) + (lane >> 4) * 8
        tile += token * PITCH + part.numbers * (steps * 32) + (lane >> 3 & 1) * 16
        for step in range(steps):
            f = 4 * step
            if held:
                a = (fragments[f], fragments[f + 1], fragments[f + 2], fragments[f + 3])
            else:
                a = load_matrices(at + step * 32)
            b = load_matrices(tile + step * 32)
            for eight in range(2):
                add(scores, (step % 2 * 2 + eight) * 4, a, b[2 * eight], b[2 * eight + 1])
        to += ((part.numbers * groups + part.group) * 4 + part.half * 2) * 512 + lane * 16
        for eight in range(2):
            s = 4 * eight
            store_shared_f32x4(
                to + eight * 512, scores[s] + scores[8 + s], scores[s + 1] + scores[9 + s],
                scores[s + 2] + scores[10 + s], scores[s + 3] + scores[11 + s],
            )  # fmt: skip

    @inlined
    def take(scores: Any, at: int, part: Part, lane: int) -> None:
        """Scores of all keys, added up."""
        at += part.group * 2048 + lane * 16
        for j in range(4):
            s = load_shared_f32x4(at + j * 512)
            for i in range(4):
                scores[4 * j + i] = s[i]
        for numbers in range(1, parts):
            for j in range(4):
                s = load_shared_f32x4(at + numbers * (groups * 2048) + j * 512)
                for i in range(4):
                    scores[4 * j + i] += s[i]

    @inlined
    def add_values(sums: Any, weights: Any, tile: int, part: Part, lane: int) -> None:
        tile += (lane & 15) * PITCH + part.dims * 2 + (lane >> 4) * 16
        for j in range(TILE // 16):
            p0 = pack(weights[8 * j], weights[8 * j + 1])
            p1 = pack(weights[8 * j + 2], weights[8 * j + 3])
            p2 = pack(weights[8 * j + 4], weights[8 * j + 5])
            p3 = pack(weights[8 * j + 6], weights[8 * j + 7])
            for i in range(dims // 16):
                b = load_matrices_transposed(tile + j * (16 * PITCH) + i * 32)
                for eight in range(2):
                    add(sums, (2 * i + eight) * 4, (p0, p1, p2, p3), b[2 * eight], b[2 * eight + 1])

    return hold, score, take, add_values


def make_attend(variant: Variant, queries: int, slots: int) -> Any:
    """A function for kernels: attention of a block's queries to some tokens; called by all of its threads."""
    group, softcapped = variant.group, variant.softcapped
    shared, num_sums = shared_of(queries, slots), LATENT_V_DIM * queries // 16 // WARPS // 2
    num_fragments = LATENT_DIM // 64 * queries // 16 * 4 if queries < 64 else 4
    tile_bytes = TILE * PITCH
    _, copy_queries, query_turns = make_copy(group, queries, LATENT_DIM, THREADS)
    look_up, copy, turns = make_copy(variant.block_size, TILE, LATENT_DIM, THREADS)
    hold, score, take, add_values = make_products(variant.dtype, queries)
    wait_older_copies = make_wait_older_copies(slots - 2)

    @inlined
    def bring_queries(base: int, q: int, first: int, count: int, strides: Strides, thread: int) -> None:
        """Begins to copy the queries of these numbers: heads are to them what a block table's tokens are."""
        homes = cuda.local.array(query_turns, int64)
        for turn in range(query_turns):
            number = min(first + (thread + turn * THREADS) // (LATENT_DIM // 8), count - 1)
            homes[turn] = number // group * strides.q_token
        source = Tokens(q, 1, strides.q_head)
        copy_queries(base + shared.queries, source, homes, first, 0, count, thread)

    @inlined
    def attend(
        sums: Any, base: int, q: int, first: int, count: int, k: Tokens, row: Row, span: Span, visible: Visible,
        part: Part, strides: Strides, scoring: Scoring, thread: int, lane: int,
    ) -> Softmax:  # fmt: skip
        """Of the queries from the number `first` on, of `count` that begin at the address `q`."""
        scores = cuda.local.array(16, float32)
        fragments = cuda.local.array(num_fragments, uint32)
        homes = cuda.local.array(turns, int64)
        for i in range(num_sums):
            sums[i] = float32(0)
        softmax = begin_softmax()
        key, coming, slot, free = span.key, span.key, int64(0), int64(0)
        cuda.syncthreads()  # nobody needs what there was before
        if key < span.end:
            bring_queries(base, q, first, count, strides, thread)
        for _ in range(slots - 1):
            if coming < span.end:
                look_up(homes, coming, span.first, span.end, row, thread)
                copy(base + shared.tiles + free, k, homes, coming, span.first, span.end, thread)
                free += tile_bytes
                coming += TILE
            commit_copies()
        if key < span.end:
            look_up(homes, coming, span.first, span.end, row, thread)
            wait_older_copies()
            cuda.syncthreads()
            hold(fragments, base + shared.queries, part, lane)
        while key < span.end:
            wait_older_copies()
            cuda.syncthreads()  # the tile is there, and nobody needs the one before
            if coming < span.end:
                copy(base + shared.tiles + free, k, homes, coming, span.first, span.end, thread)
                free = free + tile_bytes if free < (slots - 1) * tile_bytes else int64(0)
                coming += TILE
                look_up(homes, coming, span.first, span.end, row, thread)
            commit_copies()
            tile = base + shared.tiles + slot
            score(scores, fragments, base + shared.queries, tile, base + shared.scores, part, lane)
            cuda.syncthreads()  # scores are there
            take(scores, base + shared.scores, part, lane)
            if softcapped:
                for i in range(16):
                    scores[i] = tanh(scores[i] * scoring.inner)
            if key + TILE > visible.high0 or key < visible.low1:
                hide(scores, 16, key, lane, visible)
            softmax, a0, a1 = weigh(scores, 16, softmax, scoring.outer)
            if any_lane(a0 < float32(1) or a1 < float32(1)):  # seldom, after the first tiles
                rescale(sums, num_sums, a0, a1)
            add_values(sums, scores, tile, part, lane)
            slot = slot + tile_bytes if slot < (slots - 1) * tile_bytes else int64(0)
            key += TILE
        return softmax

    return attend


def make_visible_of(variant: Variant) -> Any:
    """A function for kernels: the keys that a lane's two queries see."""
    group, causal, windowed = variant.group, variant.causal, variant.windowed

    @inlined
    def visible_of(number: int, tokens: int, first: int, length: int, window: int) -> Visible:
        """Of the queries of this number and 8 further on, of so many tokens; behind the last there is it again."""
        high0 = length - tokens + 1 + min(number // group, tokens - 1) if causal else length
        high1 = length - tokens + 1 + min((number + 8) // group, tokens - 1) if causal else length
        low0 = max(first, high0 - window) if windowed else first
        low1 = max(first, high1 - window) if windowed else first
        return Visible(low0, high0, low1, high1)

    return visible_of


def make_put(variant: Variant, queries: int) -> tuple[Any, Any]:
    """Functions for kernels: put a warp's outputs; put its sums to a part, in fp32."""
    group, pack = variant.group, HALVES[variant.dtype].pack
    groups = queries // 16
    num_sums, sums_bytes = LATENT_V_DIM * groups // WARPS // 2, queries * LATENT_V_DIM * 4

    @inlined
    def put_output(
        sums: Any, offset: int, m: float, weights: float, number: int, count: int, to: int, part: Part,
        at: Addresses, strides: Strides, outer: float, lane: int,
    ) -> None:  # fmt: skip
        """Of one query; `offset` is 0 for a lane's first, 2 for its second."""
        if number < count:
            head = number % group
            if at.sinks != 0:
                weights += exp2(load_f32(at.sinks + head * 4) * float32(LOG2E) - m * outer)
            scale = reciprocal(weights) if weights > float32(0) else float32(0)
            to += number // group * strides.out_token + head * strides.out_head + part.dims * 2 + (lane & 3) * 4
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


def make_settle(variant: Variant, bundles: Bundles, shared: Shared) -> Any:
    """A function for kernels that makes an output of a block's sums, or a part; of the last part of a bundle, which
    then has them all, both."""
    quarter, group, queries = LATENT_V_DIM // 4, bundles.group, bundles.per_bundle
    count = bundles.per_head
    first_query = make_first_query(bundles.mixed)
    put_outputs, put_sums = make_put(variant, queries)
    part_of, parts_of, _, add_parts = make_parts(bundles, LATENT_V_DIM)
    query_of, finish = make_finish(variant.dtype, bundles, quarter)

    @inlined
    def settle(
        sums: Any, softmax: Softmax, base: int, piece: Piece, share_size: int, part: Part, at: Addresses, sizes: Sizes,
        strides: Strides, outer: float, thread: int, lane: int,
    ) -> None:  # fmt: skip
        """Called by all threads of a block."""
        line = part.group * 16 + (lane >> 2)
        if piece.end - piece.begin == piece.bundle_end - piece.bundle_begin:
            to = at.out + first_query(piece.sequence, at.cu_seqlens, strides.out_batch, strides.out_token)
            number = piece.bundle * queries + line
            put_outputs(sums, softmax, number, count, to, part, at, strides, outer, lane)
            return
        to = part_of(cuda.blockIdx.x, piece.bundle_begin, share_size, at.partials)
        put_sums(sums, softmax, line, to, part, lane)
        parts = parts_of(piece, share_size, at.partials)
        cuda.syncthreads()
        if thread == 0:
            cuda.threadfence()
            counter = at.counters + (piece.sequence * (bundles.octets_per_head // bundles.octets) + piece.bundle) * 4
            store_shared_f32(base + shared.arrived, float32(increment(counter, parts.num_parts - 1)))
        cuda.syncthreads()
        if int64(load_shared_f32(base + shared.arrived)) == parts.num_parts - 1:
            cuda.threadfence()
            item = thread
            while item < queries * quarter:
                query, kv_head = query_of(item, piece.bundle)
                if query < count:
                    total = add_parts(NOTHING, parts, item, outer)
                    finish(total, item, query, kv_head, piece.sequence, at, strides, outer)
                item += THREADS

    return settle


def make_decode(variant: Variant, slots: int) -> Any:
    """The kernel as a Python function."""
    bundles = bundles_of(variant)
    queries, count, q_len = bundles.per_bundle, bundles.per_head, variant.q_len
    num_sums = LATENT_V_DIM * queries // 16 // WARPS // 2
    num_bundles = bundles.bundles(1)

    share_of_block, piece_at, sequence_after, is_empty = make_shares(bundles, variant.windowed, False)
    first_query = make_first_query(variant.mixed)
    part_of = make_part_of(queries)
    visible_of = make_visible_of(variant)
    attend = make_attend(variant, queries, slots)
    settle = make_settle(variant, bundles, shared_of(queries, slots))
    clear = make_clear(variant.dtype, LATENT_V_DIM, bundles)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = shared_address(cuda.shared.array(0, uint32))
        sums = cuda.local.array(num_sums, float32)
        part = part_of(thread >> 5)
        lengths = Lengths(at.cu_seqlens, at.seq_lens, at.starts, scoring.window, num_bundles, NO_GROUPS)

        place = int64(cuda.blockIdx.x)
        while place < sizes.batch:
            if is_empty(place, lengths):
                clear(place, num_bundles, at, strides, scoring.outer, thread)
            place += cuda.gridDim.x

        share = share_of_block(sizes.batch, lengths, lane)
        unit, sequence, before = share.begin, share.sequence, share.before
        while unit < share.end:
            piece = piece_at(unit, share.end, sequence, before, lengths)
            k, _ = head_of(0, at, strides)
            q = at.q + first_query(sequence, at.cu_seqlens, strides.q_batch, strides.q_token)
            first = piece.bundle * queries
            number = first + part.group * 16 + (lane >> 2)
            seen = visible_of(number, q_len, piece.first, piece.last + 1, scoring.window)
            high0, high1 = min(seen.high0, piece.token_end), min(seen.high1, piece.token_end)
            softmax = attend(
                sums, base, q, first, count, k, row_of(sequence, at, strides),
                Span(piece.token, piece.first, piece.token_end), Visible(seen.low0, high0, seen.low1, high1), part,
                strides, scoring, thread, lane,
            )  # fmt: skip
            settle(sums, softmax, base, piece, share.size, part, at, sizes, strides, scoring.outer, thread, lane)
            unit = piece.end
            if unit == piece.bundle_end and piece.bundle == num_bundles - 1:
                before = unit
                sequence = sequence_after(sequence, share, unit, lengths)

    return kernel


def make_find_queries(variant: Variant) -> Any:
    """A function for kernels: the sequence that a block of threads works on, and the first of its queries there."""
    group, mixed = variant.group, variant.mixed

    @inlined
    def units_of(sequence: int, cu_seqlens: int) -> int:
        """Blocks of queries; in a mixed batch single tokens are left out."""
        tokens = load_i32(cu_seqlens + sequence * 4 + 4) - load_i32(cu_seqlens + sequence * 4)
        tokens = 0 if mixed and tokens == 1 else tokens
        return (tokens * group + PREFILL_QUERIES - 1) // PREFILL_QUERIES

    _, locate = make_ragged(units_of)

    @inlined
    def find_queries(cu_seqlens: int, batch: int, lane: int) -> tuple[int, int, bool]:
        """The lanes of a warp look together. Whether there are any comes last."""
        unit = cuda.gridDim.x - 1 - cuda.blockIdx.x  # the last queries of a prompt see most keys: they go first
        sequence, before = locate(unit, batch, cu_seqlens, lane)
        return sequence, (unit - before) * PREFILL_QUERIES, unit - before < units_of(sequence, cu_seqlens)

    return find_queries


def make_prefill(variant: Variant, slots: int) -> Any:
    """The kernel as a Python function."""
    group, causal, windowed = variant.group, variant.causal, variant.windowed
    num_sums = LATENT_V_DIM * PREFILL_QUERIES // 16 // WARPS // 2

    find_queries = make_find_queries(variant)
    part_of = make_part_of(PREFILL_QUERIES)
    visible_of = make_visible_of(variant)
    attend = make_attend(variant, PREFILL_QUERIES, slots)
    put_outputs, _ = make_put(variant, PREFILL_QUERIES)

    @inlined
    def span_of(first_query: int, tokens: int, first: int, length: int, window: int) -> Span:
        """The keys that a block's queries see."""
        last_token = min((first_query + PREFILL_QUERIES - 1) // group, tokens - 1)
        end = length - tokens + last_token + 1 if causal else length
        low = max(first, length - tokens + first_query // group + 1 - window) if windowed else first
        return Span(low // TILE * TILE, first, end if first < length else 0)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = shared_address(cuda.shared.array(0, uint32))
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
        number = query + part.group * 16 + (lane >> 2)
        softmax = attend(
            sums, base, at.q + start * strides.q_token, query, tokens * group, k, row_of(sequence, at, strides),
            span_of(query, tokens, first, length, scoring.window),
            visible_of(number, tokens, first, length, scoring.window), part, strides, scoring, thread, lane,
        )  # fmt: skip
        to = at.out + start * strides.out_token
        put_outputs(sums, softmax, number, tokens * group, to, part, at, strides, scoring.outer, lane)

    return kernel
