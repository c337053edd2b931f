"""decode on tensor cores: K and V go straight from memory into the registers that are multiplied.

Transposed, a step of attention is two products of matrices whose 8 columns are queries that share a KV head:

    S = K q        [16 tokens x head_dim] [head_dim x 8 queries]
    O = V^T P      [head_dim x 16 tokens] [16 tokens x 8 queries]

The dims are summed in the first product and label the rows of the second, so their order is free: each lane
takes 16 bytes of K and of V as they lie. No shared memory, and no waiting for other warps, while tokens stream past.
P comes out of the first product as the second wants it but for a transposition in registers.

The work is cut into equal shares (see `ragged`). Where a share ends within a sequence, its block leaves sums of its
part in `partials`; the last block to do so adds the parts up.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from numba import cuda, float32, int64, uint32

from .arithmetic import HALVES, divide, exp2, fma, maximum, pick_bytes, reciprocal, tanh
from .memory import (
    increment,
    load_16,
    load_16_cached,
    load_f32,
    load_fresh_f32,
    load_fresh_f32x4,
    load_i32,
    store_8,
    store_f32,
    store_f32x4,
)
from .ragged import make_ragged
from .warp import multiply as multiplications
from .warp import shuffle_xor, transpose

WARPS = 4
THREADS = 32 * WARPS
UNIT = 16
"""Tokens of a unit of work."""
LEAST = 8
"""Units of a share at least, so that short sequences are not cut to crumbs."""
LOG2E = 1.4426950408889634
NEGATIVE_INFINITY = float("-inf")
FLOOR = -1e30
"""A maximum below all scores; infinite ones would have no difference."""


def slots_of(kv_heads: int, queries: int) -> int:
    """How many slots, of 8 queries of one KV head, a block works on: as many as its warps, if that divides them."""
    return gcd(WARPS, kv_heads * -(-queries // 8))


def part_bytes(head_dim: int, slots: int, queries: int) -> int:
    """What a block leaves of its part of a sequence: sums of V, a maximum and a sum of weights for each query."""
    return slots * min(8, queries) * (head_dim + 2) * 4


def make_decode(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    q_len: int,
    block_size: int,
    windowed: bool,
    softcapped: bool,
    slots: int,
) -> Any:
    """The kernel as a Python function; the arguments are constants to the compiler.

    Args:
        group: query heads that share a KV head.
        block_size: tokens of a block in the block table; 0 without one.
        slots: of 8 queries of one KV head, that a block works on; the other warps take other tokens.
    """
    multiply, pack = multiplications[dtype], HALVES[dtype].pack
    queries = group * q_len
    tiles = -(-queries // 8)  # slots of a KV head
    token_warps = WARPS // slots
    columns = 8 * slots
    used = min(8, queries)  # columns of a slot
    k_chunks, v_chunks = -(-head_dim // 32), -(-head_dim // 64)
    q_words, k_words, v_words = 4 * k_chunks, 8 * k_chunks, 16 * v_chunks
    num_sums = 16 * v_chunks
    shared_sums, shared_columns = WARPS * 8 * head_dim, WARPS * 8
    bytes_of_part = part_bytes(head_dim, slots, queries)
    quarter = head_dim // 4
    items = slots * used * quarter  # of four dims of a query
    stride = token_warps * UNIT

    @cuda.jit(device=True, inline="always")
    def span(sequence, seq_lens, starts, window):  # type: ignore[no-untyped-def]
        """The first token that a sequence's queries see, and its length."""
        length = load_i32(seq_lens + sequence * 4)
        first = 0
        if starts != 0:
            first = load_i32(starts + sequence * 4)
        if windowed:
            first = max(first, length - q_len + 1 - window)
        return first, length

    @cuda.jit(device=True, inline="always")
    def units_of(sequence, lengths):  # type: ignore[no-untyped-def]
        """An empty sequence has a unit as well: somebody must write its output."""
        seq_lens, starts, window, groups = lengths
        first, length = span(sequence, seq_lens, starts, window)
        return max((length + UNIT - 1) // UNIT - first // UNIT, 1) * groups

    total, locate = make_ragged(units_of)

    @cuda.jit(device=True, inline="always")
    def find(token, last, row, table):  # type: ignore[no-untyped-def]
        """Where the 16 tokens from `token` on lie: a row or a block, and its first token."""
        home = row
        origin = 0
        if block_size:
            block = min(token, last) // block_size
            home = load_i32(table + block * 4)
            origin = block * block_size
        return home, origin

    @cuda.jit(device=True, inline="always")
    def load_k(words, token, first, last, origin, base, k_token, lane):  # type: ignore[no-untyped-def]
        """Of 16 tokens, a lane's rows g and g + 8; those outside first..last repeat one within."""
        for r in range(2):
            position = max(min(token + r * 8 + (lane >> 2), last), first) - origin
            for c in range(k_chunks):
                offset = c * 64 + (lane & 3) * 16
                if head_dim % 32 and offset >= head_dim * 2:
                    offset = 0  # the query is 0 there
                loaded = load_16(base + position * k_token + offset)
                for i in range(4):
                    words[(r * k_chunks + c) * 4 + i] = loaded[i]

    @cuda.jit(device=True, inline="always")
    def load_v(words, token, first, last, origin, base, v_token, lane):  # type: ignore[no-untyped-def]
        """Of 16 tokens, those that are a lane's columns in the product."""
        for r in range(4):
            row = token + (lane & 3) * 2 + (r & 1) + (r >> 1) * 8
            position = max(min(row, last), first) - origin
            for c in range(v_chunks):
                offset = c * 128 + (lane >> 2) * 16
                if head_dim % 64 and offset >= head_dim * 2:
                    offset = 0  # these sums are not stored
                loaded = load_16(base + position * v_token + offset)
                for i in range(4):
                    words[(r * v_chunks + c) * 4 + i] = loaded[i]

    @cuda.jit(device=True, inline="always")
    def score(k_words, q_words, inner):  # type: ignore[no-untyped-def]
        """Of 16 tokens and 8 queries: a lane has tokens g and g + 8 for each of two queries."""
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

    @cuda.jit(device=True, inline="always")
    def accumulate(sums, v_words, p0, p1):  # type: ignore[no-untyped-def]
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

    @cuda.jit(device=True, inline="always")
    def add_warps(shared_o, shared_m, shared_l, item, outer):  # type: ignore[no-untyped-def]
        """Of a query and four dims: the greatest score, the weights' sum, and the weighted sums of V."""
        column = item // (used * quarter) * 8 + item // quarter % used
        dim = item % quarter * 4
        top = float32(FLOOR)
        for w in range(token_warps):
            top = maximum(top, shared_m[w * columns + column])
        norm = float32(0)
        o0 = float32(0)
        o1 = float32(0)
        o2 = float32(0)
        o3 = float32(0)
        for w in range(token_warps):
            at = w * columns + column
            weight = exp2((shared_m[at] - top) * outer)
            norm += weight * shared_l[at]
            o0 += weight * shared_o[at * head_dim + dim]
            o1 += weight * shared_o[at * head_dim + dim + 1]
            o2 += weight * shared_o[at * head_dim + dim + 2]
            o3 += weight * shared_o[at * head_dim + dim + 3]
        return top, norm, o0, o1, o2, o3

    @cuda.jit(device=True, inline="always")
    def put_part(part, to, item):  # type: ignore[no-untyped-def]
        store_f32x4(to + item * 16, part[2], part[3], part[4], part[5])
        if item % quarter == 0:
            to += items * 16 + item // quarter * 8
            store_f32(to, part[0])
            store_f32(to + 4, part[1])

    @cuda.jit(device=True, inline="always")
    def add_parts(first_part, others, num_parts, item, outer):  # type: ignore[no-untyped-def]
        """The same of all parts, eight at a time so that they come together."""
        top = float32(FLOOR)
        norm = float32(0)
        o0 = float32(0)
        o1 = float32(0)
        o2 = float32(0)
        o3 = float32(0)
        parts_m = cuda.local.array(8, float32)
        parts_l = cuda.local.array(8, float32)
        parts_o = cuda.local.array(32, float32)
        index = 0
        while index < num_parts:
            higher = top
            for i in range(8):
                at = first_part
                if index + i > 0:
                    at = others + (min(index + i, num_parts - 1) - 1) * 2 * bytes_of_part
                parts_m[i] = load_fresh_f32(at + items * 16 + item // quarter * 8)
                parts_l[i] = load_fresh_f32(at + items * 16 + item // quarter * 8 + 4)
                loaded = load_fresh_f32x4(at + item * 16)
                for j in range(4):
                    parts_o[4 * i + j] = loaded[j]
            for i in range(8):
                higher = maximum(higher, parts_m[i])
            old = exp2((top - higher) * outer)
            top = higher
            norm *= old
            o0 *= old
            o1 *= old
            o2 *= old
            o3 *= old
            for i in range(8):
                weight = exp2((parts_m[i] - top) * outer) if index + i < num_parts else float32(0)
                norm += weight * parts_l[i]
                o0 += weight * parts_o[4 * i]
                o1 += weight * parts_o[4 * i + 1]
                o2 += weight * parts_o[4 * i + 2]
                o3 += weight * parts_o[4 * i + 3]
            index += 8
        return top, norm, o0, o1, o2, o3

    @cuda.jit(device=True, inline="always")
    def query_of(item, slot):  # type: ignore[no-untyped-def]
        """The query of a column, among those that share its KV head, and that head."""
        slot += item // (used * quarter)
        return slot % tiles * 8 + item // quarter % used, slot // tiles

    @cuda.jit(device=True, inline="always")
    def finish(part, query, kv_head, to, out_token, out_head, sinks, outer):  # type: ignore[no-untyped-def]
        """Divides by the weights' sum, to which a sink adds one weight without a V, and stores."""
        weights = part[1]
        head = kv_head * group + query % group
        if sinks != 0:
            weights += exp2(load_f32(sinks + head * 4) * float32(LOG2E) - part[0] * outer)
        scale = reciprocal(weights) if weights > float32(0) else float32(0)
        to += query // group * out_token + head * out_head
        store_8(to, pack(part[2] * scale, part[3] * scale), pack(part[4] * scale, part[5] * scale))

    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, partials, counters,
        batch, kv_heads, table_stride, window,
        q_batch, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, out_batch, out_token, out_head,
        inner, outer,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        pair = lane & 3
        groups = kv_heads * tiles // slots  # of slots
        shared_o = cuda.shared.array(shared_sums, float32)
        shared_m = cuda.shared.array(shared_columns, float32)
        shared_l = cuda.shared.array(shared_columns, float32)
        shared_arrived = cuda.shared.array(1, int64)
        q_fragment = cuda.local.array(q_words, uint32)
        k_fragment = cuda.local.array(k_words, uint32)
        v_fragment = cuda.local.array(v_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        lengths = (seq_lens, starts, window, groups)

        units = total(batch, lengths, lane)
        share = max(divide(units + cuda.gridDim.x - 1, cuda.gridDim.x), LEAST)
        unit = cuda.blockIdx.x * share
        end = min(unit + share, units)
        sequence, before = locate(unit, batch, lengths, lane)

        while unit < end:
            # The piece: from this unit on, as much as there is of one sequence and group of slots.
            first, length = span(sequence, seq_lens, starts, window)
            last = length - 1
            group_units = divide(units_of(sequence, lengths), groups)
            group_index = divide(unit - before, group_units)
            group_begin = before + group_index * group_units
            group_end = group_begin + group_units
            piece_end = min(group_end, end)
            origin = first // UNIT * UNIT
            token = origin + (unit - group_begin + warp // slots) * UNIT
            token_end = min(origin + (piece_end - group_begin) * UNIT, length)
            slot = group_index * slots + warp % slots
            kv_head = slot // tiles
            column = slot % tiles * 8
            row = sequence
            if rows != 0:
                row = load_i32(rows + sequence * 4)
            table = block_table + row * table_stride

            # What this lane's two queries see: tokens from `low` on, before `high`.
            high0 = length - q_len + min((column + 2 * pair) // group, q_len - 1) + 1
            high1 = length - q_len + min((column + 2 * pair + 1) // group, q_len - 1) + 1
            low0 = max(first, high0 - window) if windowed else first
            low1 = max(first, high1 - window) if windowed else first
            high0 = min(high0, token_end)
            high1 = min(high1, token_end)

            # A lane's part of the queries: 16 bytes of every 64, of query g.
            query = min(column + (lane >> 2), queries - 1)
            q_from = q + sequence * q_batch + (query // group) * q_token
            q_from += (kv_head * group + query % group) * q_head + pair * 16
            for c in range(k_chunks):
                inside = column + (lane >> 2) < queries and c * 64 + pair * 16 < head_dim * 2
                loaded = load_16_cached(q_from + (c * 64 if inside else 0))
                for i in range(4):
                    q_fragment[c * 4 + i] = loaded[i] if inside else uint32(0)

            for i in range(num_sums):
                sums[i] = float32(0)
            m0 = float32(FLOOR)
            m1 = float32(FLOOR)
            l0 = float32(0)
            l1 = float32(0)
            k_from = k + kv_head * k_head
            v_from = v + kv_head * v_head
            if token < token_end:
                home, origin = find(token, last, row, table)
                load_k(k_fragment, token, first, last, origin, k_from + home * k_row, k_token, lane)
                load_v(v_fragment, token, first, last, origin, v_from + home * v_row, v_token, lane)
                home, origin = find(token + stride, last, row, table)
            while token < token_end:
                s0, s1, s2, s3 = score(k_fragment, q_fragment, inner)
                t = token + (lane >> 2)
                s0 = s0 if low0 <= t < high0 else float32(NEGATIVE_INFINITY)
                s1 = s1 if low1 <= t < high1 else float32(NEGATIVE_INFINITY)
                s2 = s2 if low0 <= t + 8 < high0 else float32(NEGATIVE_INFINITY)
                s3 = s3 if low1 <= t + 8 < high1 else float32(NEGATIVE_INFINITY)
                # K of the next tokens is on its way while V is multiplied, and V while K is.
                token += stride
                if token < token_end:
                    load_k(k_fragment, token, first, last, origin, k_from + home * k_row, k_token, lane)
                n0 = maximum(m0, maximum(s0, s2))
                n1 = maximum(m1, maximum(s1, s3))
                for step in range(3):
                    n0 = maximum(n0, shuffle_xor(n0, 4 << step))
                    n1 = maximum(n1, shuffle_xor(n1, 4 << step))
                a0 = exp2((m0 - n0) * outer)
                a1 = exp2((m1 - n1) * outer)
                m0 = n0
                m1 = n1
                for i in range(num_sums // 2):
                    sums[2 * i] *= a0
                    sums[2 * i + 1] *= a1
                p0 = exp2(fma(s0, outer, -m0 * outer))
                p1 = exp2(fma(s1, outer, -m1 * outer))
                p2 = exp2(fma(s2, outer, -m0 * outer))
                p3 = exp2(fma(s3, outer, -m1 * outer))
                l0 = fma(l0, a0, p0 + p2)
                l1 = fma(l1, a1, p1 + p3)
                accumulate(sums, v_fragment, transpose(pack(p0, p1)), transpose(pack(p2, p3)))
                if token < token_end:
                    load_v(v_fragment, token, first, last, origin, v_from + home * v_row, v_token, lane)
                    home, origin = find(token + stride, last, row, table)

            # The warps' results meet in shared memory, and the parts of other chunks in `partials`.
            for step in range(3):
                l0 += shuffle_xor(l0, 4 << step)
                l1 += shuffle_xor(l1, 4 << step)
            if lane < 4:
                shared_m[warp * 8 + 2 * pair] = m0
                shared_m[warp * 8 + 2 * pair + 1] = m1
                shared_l[warp * 8 + 2 * pair] = l0
                shared_l[warp * 8 + 2 * pair + 1] = l1
            for c in range(v_chunks):
                dim = c * 64 + (lane >> 2) * 8
                if dim < head_dim:
                    for w in range(4):
                        for i in range(4):
                            at = (warp * 8 + 2 * pair + (i & 1)) * head_dim + dim + 2 * w + (i >> 1)
                            shared_o[at] = sums[(c * 4 + w) * 4 + i]
            cuda.syncthreads()

            to = out + sequence * out_batch
            whole = piece_end - unit == group_units
            slot_of_part = cuda.blockIdx.x * 2 + (1 if cuda.blockIdx.x * share < group_begin else 0)
            part_of = partials + slot_of_part * bytes_of_part
            item = thread
            while item < items:
                query, its_head = query_of(item, group_index * slots)
                if query < queries:
                    part = add_warps(shared_o, shared_m, shared_l, item, outer)
                    if whole:
                        finish(part, query, its_head, to + item % quarter * 8, out_token, out_head, sinks, outer)
                    else:
                        put_part(part, part_of, item)
                item += THREADS
            cuda.syncthreads()

            if not whole:
                first_block = divide(group_begin, share)
                num_parts = divide(group_end - 1, share) - first_block + 1
                if thread == 0:
                    cuda.threadfence()
                    counter = counters + (sequence * groups + group_index) * 4
                    shared_arrived[0] = increment(counter, num_parts - 1)
                cuda.syncthreads()
                if shared_arrived[0] == num_parts - 1:
                    cuda.threadfence()
                    slot_of_part = first_block * 2 + (1 if first_block * share < group_begin else 0)
                    part_of = partials + slot_of_part * bytes_of_part
                    others = partials + (first_block + 1) * 2 * bytes_of_part
                    item = thread
                    while item < items:
                        query, its_head = query_of(item, group_index * slots)
                        if query < queries:
                            part = add_parts(part_of, others, num_parts, item, outer)
                            finish(part, query, its_head, to + item % quarter * 8, out_token, out_head, sinks, outer)
                        item += THREADS

            unit = piece_end
            if unit == before + group_units * groups:
                before = unit
                sequence += 1

    return kernel
