"""What decode kernels share: equal shares of a batch's work, and how parts of a sequence come together.

The work of a sequence is laid out KV head by KV head, in units of 16 tokens. Where a share ends within a head's tokens,
its block leaves sums of its part in `partials`; the last block to do so adds the parts up.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
from numba import cuda

from .addressing import first_token
from .arithmetic import FLOOR, HALVES, LOG2E, divide, exp2, maximum, reciprocal
from .memory import (
    increment,
    load_f32,
    load_fresh_f32,
    load_fresh_f32x4,
    load_i32,
    store_8,
    store_f32,
    store_f32x4,
)
from .ptx import float32, int64
from .ragged import make_ragged

UNIT = 16
"""Tokens of a unit of work."""
LEAST = 8
"""Units of a share at least, so that short sequences are not cut to crumbs."""


class Queries(NamedTuple):
    """The queries of a decode kernel, in slots of up to 8 that share a KV head."""

    group: int
    """Query heads that share a KV head."""
    q_len: int

    @property
    def per_head(self) -> int:
        """Queries of a KV head."""
        return self.group * self.q_len

    @property
    def slots_per_head(self) -> int:
        return -(-self.per_head // 8)

    @property
    def slots(self) -> int:
        """That a block of threads works on."""
        return gcd(4, self.slots_per_head)

    @property
    def per_slot(self) -> int:
        return min(8, self.per_head)

    def part_bytes(self, head_dim: int) -> int:
        """What a block leaves of a part: sums of V, a maximum and a sum of weights for each query; whole vectors."""
        return -(-self.slots * self.per_slot * (head_dim + 2) // 4) * 16

    def result_floats(self, head_dim: int, token_warps: int) -> int:
        """Shared memory for the same of every warp, and for a count."""
        return token_warps * self.slots * self.per_slot * (head_dim + 2) + 1


def make_shares(queries: Queries, windowed: bool) -> tuple[Any, Any]:
    """Functions for kernels: this block's share, and the piece that a unit begins."""
    q_len = queries.q_len

    @cuda.jit(device=True, inline="always")
    def span(sequence, seq_lens, starts, window):  # type: ignore[no-untyped-def]
        """The first token that a sequence's queries see, and its length."""
        length = load_i32(seq_lens + sequence * 4)
        first = first_token(sequence, starts)
        if windowed:
            first = max(first, length - q_len + 1 - window)
        return min(first, length), length

    @cuda.jit(device=True, inline="always")
    def units_of(sequence, lengths):  # type: ignore[no-untyped-def]
        """An empty sequence has a unit as well: somebody must write its output."""
        seq_lens, starts, window, groups = lengths
        first, length = span(sequence, seq_lens, starts, window)
        return max((length + UNIT - 1) // UNIT - first // UNIT, 1) * groups

    total, locate = make_ragged(units_of)

    @cuda.jit(device=True, inline="always")
    def share_of_block(batch, lengths, lane):  # type: ignore[no-untyped-def]
        """Units of every share; of this block's, where it begins and ends, its sequence, and the units before that."""
        units = total(batch, lengths, lane)
        share = max(divide(units + cuda.gridDim.x - 1, cuda.gridDim.x), LEAST)
        unit = cuda.blockIdx.x * share
        sequence, before = locate(unit, batch, lengths, lane)
        return share, unit, min(unit + share, units), sequence, before

    @cuda.jit(device=True, inline="always")
    def piece_at(unit, end, sequence, before, lengths):  # type: ignore[no-untyped-def]
        """As much as there is of one sequence and group of slots from a unit on.

        Returns:
            the sequence's first token to be read and its length; the group, the units where it begins and ends, the
            unit where the piece ends; the piece's first token, and the token where it ends.
        """
        seq_lens, starts, window, groups = lengths
        first, length = span(sequence, seq_lens, starts, window)
        group_units = divide(units_of(sequence, lengths), groups)
        index = divide(unit - before, group_units)
        group_begin = before + index * group_units
        piece_end = min(group_begin + group_units, end)
        origin = first // UNIT * UNIT - group_begin * UNIT
        token_end = min(origin + piece_end * UNIT, length) if first < length else 0
        return first, length, index, group_begin, group_begin + group_units, piece_end, origin + unit * UNIT, token_end

    return share_of_block, piece_at


def make_settle(dtype: torch.dtype, head_dim: int, queries: Queries, token_warps: int, threads: int, meet: Any) -> Any:
    """A function for kernels that makes an output, or a part of one, of what a block's warps left in shared memory.

    There are sums for each warp, query and dim, then maxima and then weights for each warp and query.

    Args:
        token_warps: warps with the same queries and other tokens.
        threads: that call it together; `meet(1)` lets them wait for each other.
    """
    pack = HALVES[dtype].pack
    group, slots, used, per_head = queries.group, queries.slots, queries.per_slot, queries.per_head
    tiles = queries.slots_per_head
    quarter = head_dim // 4
    items = slots * used * quarter  # of four dims of a query
    at_m = token_warps * slots * used * head_dim
    at_l = at_m + token_warps * slots * used
    at_arrived = at_l + token_warps * slots * used
    bytes_of_part = queries.part_bytes(head_dim)

    @cuda.jit(device=True, inline="always")
    def add_warps(shared, item, outer):  # type: ignore[no-untyped-def]
        """Of a query and four dims: the greatest score, the weights' sum, and the weighted sums of V."""
        column = item // quarter
        dim = item % quarter * 4
        top = float32(FLOOR)
        for w in range(token_warps):
            top = maximum(top, shared[at_m + w * slots * used + column])
        norm = float32(0)
        o0 = float32(0)
        o1 = float32(0)
        o2 = float32(0)
        o3 = float32(0)
        for w in range(token_warps):
            at = w * slots * used + column
            weight = exp2((shared[at_m + at] - top) * outer)
            norm += weight * shared[at_l + at]
            o0 += weight * shared[at * head_dim + dim]
            o1 += weight * shared[at * head_dim + dim + 1]
            o2 += weight * shared[at * head_dim + dim + 2]
            o3 += weight * shared[at * head_dim + dim + 3]
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

    @cuda.jit(device=True, inline="always")
    def settle(  # type: ignore[no-untyped-def]
        shared, thread, sequence, groups, index, group_begin, group_end, whole, share,
        out, out_token, out_head, sinks, partials, counters, outer,
    ):  # fmt: skip
        slot = cuda.blockIdx.x * 2 + (1 if cuda.blockIdx.x * share < group_begin else 0)
        item = thread
        while item < items:
            query, kv_head = query_of(item, index * slots)
            if query < per_head:
                part = add_warps(shared, item, outer)
                if whole:
                    finish(part, query, kv_head, out + item % quarter * 8, out_token, out_head, sinks, outer)
                else:
                    put_part(part, partials + slot * bytes_of_part, item)
            item += threads
        meet(1)
        if not whole:
            first_block = divide(group_begin, share)
            num_parts = divide(group_end - 1, share) - first_block + 1
            if thread == 0:
                cuda.threadfence()
                arrived = increment(counters + (sequence * groups + index) * 4, num_parts - 1)
                shared[at_arrived] = float32(arrived)
            meet(1)
            if int64(shared[at_arrived]) == num_parts - 1:
                cuda.threadfence()
                slot = first_block * 2 + (1 if first_block * share < group_begin else 0)
                first_part = partials + slot * bytes_of_part
                others = partials + (first_block + 1) * 2 * bytes_of_part
                item = thread
                while item < items:
                    query, kv_head = query_of(item, index * slots)
                    if query < per_head:
                        part = add_parts(first_part, others, num_parts, item, outer)
                        finish(part, query, kv_head, out + item % quarter * 8, out_token, out_head, sinks, outer)
                    item += threads

    return settle
