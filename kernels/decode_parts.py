"""Equal shares of a decode step, and how their results come together.

A block of threads works on a bundle of octets at a time. The work of a sequence is laid out bundle by bundle in units
of 16 tokens, and that of all sequences end to end: a share begins and ends anywhere, and consists of pieces, each of
one sequence and one bundle. Neighbouring heads of a token lie side by side, so blocks form teams: a share is a team's,
and its blocks work on the same tokens at about the same time, each on a bundle of its own.

Warps leave their results in shared memory. A block that worked on all tokens of a bundle adds them up to the output.
Otherwise it leaves a part in memory, and the last block to do so adds up the bundle's parts.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from numba import cuda

from .arguments import Given, Variant, first_query, first_token, make_ragged, num_queries, sequence_of, v_dim_of
from .compiler import float32, inlined, int64
from .decode_products import THREADS, UNIT, Piece, Queries
from .memory import (
    FLOOR, HALVES, LOG2E, divide, exp2, increment, load_f32, load_fresh_f32, load_fresh_f32x4, load_i32, maximum,
    reciprocal, store_8, store_f32, store_f32x4,
)  # fmt: skip
from .prompts import PrefixParts, make_parts_of_query, prefix_of, tokens_of_part

LEAST_SHARE = 8  # units of a share at least, so that short sequences are not cut to crumbs


class Lengths(NamedTuple):
    """What the amount of work follows from."""

    given: Given
    rounds: int  # bundles of a sequence that a block of a team works on, one after the other


class Share(NamedTuple):
    """The units of a team of blocks."""

    number: int
    member: int  # this block's number in its team
    size: int  # units of every share, but for the last
    begin: int
    end: int
    sequence: int  # the one it begins with
    before: int  # units of those before


def make_share_work(variant: Variant, queries: Queries, work_on: Any) -> Any:
    """A function for kernels, called by all threads of a block, that has `work_on`, an inlined function, work on all
    pieces of the block's share, one after the other, and that makes the outputs of empty sequences. `own` is for
    `work_on`: what a thread has worked out before. `bundles` are those of a sequence."""
    team = queries.team
    clear = make_clear(variant.dtype, v_dim_of(variant.head_dim), queries)

    @inlined
    def span(sequence: int, given: Given) -> tuple[int, int]:
        """The first token that a sequence's queries see, and its length."""
        length = load_i32(given.at.seq_lens + sequence * 4)
        first = first_token(sequence, given)
        if given.options.window != 0:
            first = max(first, length - given.options.q_len + 1 - given.options.window)
        if given.groups.num_groups != 0:
            first = prefix_of(sequence, length, given)
        return min(first, length), length

    @inlined
    def takes_part(sequence: int, given: Given) -> bool:
        """In a mixed batch those that are not prompts do."""
        return given.options.mixed == 0 or num_queries(sequence, given) == 1

    @inlined
    def units_of(sequence: int, lengths: Lengths) -> int:
        if not takes_part(sequence, lengths.given):
            return 0
        first, length = span(sequence, lengths.given)
        if length <= 0:
            return 0
        # A sequence in which no query sees a token still has a unit, which writes the sequence's output.
        return max((length + UNIT - 1) // UNIT - first // UNIT, 1) * lengths.rounds

    total, locate = make_ragged(units_of)

    @inlined
    def share_of_block(lengths: Lengths, lane: int) -> Share:
        batch = lengths.given.sizes.batch
        units, teams = total(batch, lengths, lane), cuda.gridDim.x // team
        size = max(divide(units + teams - 1, teams), LEAST_SHARE)
        number = cuda.blockIdx.x // team
        begin = number * size
        sequence, before = locate(begin, batch, lengths, lane)
        return Share(number, cuda.blockIdx.x % team, size, begin, min(begin + size, units), sequence, before)

    @inlined
    def piece_at(unit: int, share: Share, sequence: int, before: int, lengths: Lengths) -> Piece:
        """`before` are the units of the sequences before."""
        first, length = span(sequence, lengths.given)
        bundle_units = divide(units_of(sequence, lengths), lengths.rounds)
        turn = divide(unit - before, bundle_units)
        begin = before + turn * bundle_units
        piece_end = min(begin + bundle_units, share.end)
        origin = (first // UNIT - begin) * UNIT  # where unit 0 would lie
        return Piece(
            sequence, first, length - 1, turn, turn * team + share.member, begin, begin + bundle_units, unit, piece_end,
            origin + unit * UNIT, min(origin + piece_end * UNIT, length) if first < length else 0,
        )  # fmt: skip

    @inlined
    def sequence_after(sequence: int, share: Share, unit: int, lengths: Lengths) -> int:
        sequence += 1
        while unit < share.end and units_of(sequence, lengths) == 0:
            sequence += 1
        return sequence

    @inlined
    def work_on_share(own: Any, bundles: int, given: Given, thread: int, lane: int) -> None:
        lengths = Lengths(given, bundles // team)
        place = int64(cuda.blockIdx.x)
        while place < given.sizes.batch:
            if load_i32(given.at.seq_lens + place * 4) <= 0 and takes_part(place, given):
                clear(place, bundles, given, thread)
            place += cuda.gridDim.x

        share = share_of_block(lengths, lane)
        unit, sequence, before = share.begin, share.sequence, share.before
        while unit < share.end:
            piece = piece_at(unit, share, sequence, before, lengths)
            work_on(own, piece, share, bundles, given, thread, lane)
            unit = piece.end
            if unit == piece.bundle_end and piece.round == lengths.rounds - 1:
                before = unit
                sequence = sequence_after(sequence, share, unit, lengths)

    return work_on_share


class Results(NamedTuple):
    """Where the warps' results are in shared memory, in floats: one for each warp with tokens of its own, and query."""

    stride: int  # of sums of V, from one query's to the next's: not all of them begin in the same bank
    maxima: int
    weights: int  # their sums
    arrived: int  # how many parts there were before this block's: one float
    floats: int  # in all

    @property
    def nbytes(self) -> int:
        """In whole vectors."""
        return -(-self.floats // 4) * 16


def results_of(queries: Queries, head_dim: int) -> Results:
    """The layout for a block of threads."""
    columns = queries.token_warps * queries.per_bundle
    stride = head_dim + 1
    return Results(stride, *accumulate((columns * stride, columns, columns, 1)))


def part_bytes(queries: Queries, head_dim: int) -> int:
    """Bytes of a part: sums of V of each query of a bundle, then a maximum and a sum of weights of each."""
    return -(-queries.per_bundle * (head_dim + 2) // 4) * 16


class Sum(NamedTuple):
    """Of four dims of a query: sums of V, and the sum of the weights in them, which are relative to a maximum."""

    m: float
    weights: float
    o0: float
    o1: float
    o2: float
    o3: float


NOTHING = Sum(float32(FLOOR), float32(0), float32(0), float32(0), float32(0), float32(0))


class Parts(NamedTuple):
    """The parts of a bundle: addresses of the first, and of the second, which others follow."""

    first: int
    second: int
    num_parts: int


def make_parts(queries: Queries, head_dim: int) -> tuple[Any, Any, Any, Any]:
    """Functions for kernels: a block's part of a bundle, all of a bundle's parts; put an item to a part, add it up.

    A block has two parts at most: of the bundle in which its share begins, and of the one in which it ends.
    """
    quarter, nbytes = head_dim // 4, part_bytes(queries, head_dim)
    share_bytes, sums_bytes = 2 * queries.team * nbytes, queries.per_bundle * head_dim * 4

    @inlined
    def part_of(number: int, share: Share, bundle_begin: int, partials: int) -> int:
        """The part of the block at the same place in the team of the share of this number."""
        where = 2 * share.member + (1 if number * share.size < bundle_begin else 0)
        return partials + number * share_bytes + where * nbytes

    @inlined
    def parts_of(piece: Piece, share: Share, partials: int) -> Parts:
        number = divide(piece.bundle_begin, share.size)
        num_parts = divide(piece.bundle_end - 1, share.size) - number + 1
        first = part_of(number, share, piece.bundle_begin, partials)
        return Parts(first, partials + (number + 1) * share_bytes + 2 * share.member * nbytes, num_parts)

    @inlined
    def put_part(to: int, part: Sum, item: int) -> None:
        store_f32x4(to + item * 16, part.o0, part.o1, part.o2, part.o3)
        if item % quarter == 0:
            to += sums_bytes + item // quarter * 8
            store_f32(to, part.m)
            store_f32(to + 4, part.weights)

    @inlined
    def place_of(parts: Parts, index: int, item: int) -> tuple[int, int]:
        at = parts.first
        if index > 0:
            at = parts.second + (index - 1) * share_bytes
        return at + item * 16, at + sums_bytes + item // quarter * 8

    return part_of, parts_of, put_part, make_add_parts(place_of)


def make_add_parts(place_of: Any) -> Any:
    """A function for kernels that adds parts to an item, eight at a time, so that they come together.

    `place_of` is an inlined function: where the part of an index has the item's sums, and maximum and weights.
    """

    @inlined
    def add_parts(total: Sum, parts: Any, item: int, outer: float) -> Sum:
        m, weights, o0, o1, o2, o3 = total
        o = cuda.local.array(4, float32)
        o[0], o[1], o[2], o[3] = o0, o1, o2, o3
        parts_m = cuda.local.array(8, float32)
        parts_weights = cuda.local.array(8, float32)
        parts_o = cuda.local.array(32, float32)
        index = 0
        while index < parts.num_parts:
            higher = m
            for i in range(8):
                sums, state = place_of(parts, min(index + i, parts.num_parts - 1), item)
                parts_m[i] = load_fresh_f32(state)
                parts_weights[i] = load_fresh_f32(state + 4)
                loaded = load_fresh_f32x4(sums)
                for j in range(4):
                    parts_o[4 * i + j] = loaded[j]
            for i in range(8):
                higher = maximum(higher, parts_m[i])
            old = exp2((m - higher) * outer)
            m = higher
            weights *= old
            for j in range(4):
                o[j] *= old
            for i in range(8):
                weight = exp2((parts_m[i] - m) * outer) if index + i < parts.num_parts else float32(0)
                weights += weight * parts_weights[i]
                for j in range(4):
                    o[j] += weight * parts_o[4 * i + j]
            index += 8
        return Sum(m, weights, o[0], o[1], o[2], o[3])

    return add_parts


def make_finish(dtype: torch.dtype, queries: Queries, quarter: int) -> tuple[Any, Any]:
    """Functions for kernels: which query an item is of, and its output."""
    pack, heads_per_kv, octets_per_head = HALVES[dtype].pack, queries.heads_per_kv, queries.octets_per_head
    octets, per_octet = queries.octets, queries.per_octet

    @inlined
    def query_of(item: int, bundle: int) -> tuple[int, int]:
        """Its number among those that share its KV head, where it may be behind the last; and that head."""
        octet = bundle * octets + item // (per_octet * quarter)
        return octet % octets_per_head * 8 + item // quarter % per_octet, octet // octets_per_head

    @inlined
    def finish(total: Sum, item: int, query: int, kv_head: int, sequence: int, given: Given) -> None:
        """Divides by the weights' sum, to which a sink adds one weight without a V, and stores."""
        at, sizes = given.at, given.sizes
        weights = total.weights
        head = kv_head * heads_per_kv + query % heads_per_kv
        if at.sinks != 0:
            weights += exp2(load_f32(at.sinks + head * 4) * float32(LOG2E) - total.m * given.options.outer)
        scale = float32(0) if weights == float32(0) else reciprocal(weights)
        to = at.out + first_query(sequence, sizes.out, given)
        to += item % quarter * 8
        to += query // heads_per_kv * sizes.out.token + head * sizes.out.head
        store_8(to, pack(total.o0 * scale, total.o1 * scale), pack(total.o2 * scale, total.o3 * scale))

    return query_of, finish


def make_clear(dtype: torch.dtype, head_dim: int, queries: Queries) -> Any:
    """A function for kernels that makes the outputs of an empty sequence of so many bundles: zeros."""
    heads_per_kv, items = queries.heads_per_kv, queries.per_bundle * head_dim // 4
    query_of, finish = make_finish(dtype, queries, head_dim // 4)

    @inlined
    def clear(sequence: int, bundles: int, given: Given, thread: int) -> None:
        item = thread
        while item < bundles * items:
            query, kv_head = query_of(item % items, item // items)
            if query < heads_per_kv * given.options.q_len:
                finish(NOTHING, item % items, query, kv_head, sequence, given)
            item += THREADS

    return clear


def make_settle(dtype: torch.dtype, head_dim: int, queries: Queries) -> Any:
    """A function for kernels that makes an output, or a part of one, of what a block's warps left in shared memory; the
    block's threads meet before and after they read it."""
    results, heads_per_kv, quarter = results_of(queries, head_dim), queries.heads_per_kv, head_dim // 4
    per_bundle, token_warps, items = queries.per_bundle, queries.token_warps, queries.per_bundle * quarter
    part_of, parts_of, put_part, add_parts = make_parts(queries, head_dim)
    query_of, finish = make_finish(dtype, queries, quarter)
    parts_of_query = make_parts_of_query(heads_per_kv, head_dim)

    @inlined
    def add_warps(shared: Any, item: int, outer: float) -> Sum:
        """The sum of an item: four dims of query `item // quarter`."""
        query = item // quarter
        m = float32(FLOOR)
        for w in range(token_warps):
            m = maximum(m, shared[results.maxima + w * per_bundle + query])
        weights = float32(0)
        o = cuda.local.array(4, float32)
        for j in range(4):
            o[j] = float32(0)
        for w in range(token_warps):
            column = w * per_bundle + query
            weight = exp2((shared[results.maxima + column] - m) * outer)
            weights += weight * shared[results.weights + column]
            for j in range(4):
                o[j] += weight * shared[column * results.stride + item % quarter * 4 + j]
        return Sum(m, weights, o[0], o[1], o[2], o[3])

    @inlined
    def place_of_prefix(parts: PrefixParts, index: int, item: int) -> tuple[int, int]:
        return parts.sums + index * parts.sums_stride + item % quarter * 16, parts.state + index * parts.state_stride

    add_parts_of_prefix = make_add_parts(place_of_prefix)

    @inlined
    def put_output(total: Sum, item: int, query: int, kv_head: int, piece: Piece, given: Given) -> None:
        """Adds what there is of the prefix: a piece's first token is the one behind it."""
        if given.groups.num_groups != 0 and piece.first > 0:
            place = piece.sequence * given.options.q_len + query // heads_per_kv
            group = sequence_of(piece.sequence, given.groups.cu_groups, given.groups.num_groups)
            tokens = tokens_of_part(group, piece.first, given.groups, heads_per_kv * given.options.q_len)
            num_parts = divide(piece.first + tokens - 1, tokens)
            parts = parts_of_query(place, kv_head * heads_per_kv + query % heads_per_kv, num_parts, given)
            total = add_parts_of_prefix(total, parts, item, given.options.outer)
        finish(total, item, query, kv_head, piece.sequence, given)

    @inlined
    def settle(shared: Any, piece: Piece, share: Share, bundles: int, given: Given, thread: int) -> None:
        whole = piece.end - piece.begin == piece.bundle_end - piece.bundle_begin
        mine = part_of(share.number, share, piece.bundle_begin, given.at.partials)
        per_head = heads_per_kv * given.options.q_len
        cuda.syncthreads()
        item = thread
        while item < items:
            query, kv_head = query_of(item, piece.bundle)
            if query < per_head:
                total = add_warps(shared, item, given.options.outer)
                if whole:
                    put_output(total, item, query, kv_head, piece, given)
                else:
                    put_part(mine, total, item)
            item += THREADS
        cuda.syncthreads()
        if whole:
            return
        parts = parts_of(piece, share, given.at.partials)
        # Barriers and counters keep that what a block's threads stored before they met is visible to the block that
        # counts last, and reads all parts.
        counter = given.at.counters + (piece.sequence * bundles + piece.bundle) * 4
        if thread == 0:
            shared[results.arrived] = float32(increment(counter, parts.num_parts - 1))
        cuda.syncthreads()
        if int64(shared[results.arrived]) == parts.num_parts - 1:
            item = thread
            while item < items:
                query, kv_head = query_of(item, piece.bundle)
                if query < per_head:
                    total = add_parts(NOTHING, parts, item, given.options.outer)
                    put_output(total, item, query, kv_head, piece, given)
                item += THREADS

    return settle
