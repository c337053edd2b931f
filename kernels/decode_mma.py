"""decode on tensor cores: K and V go straight from memory into the registers that are multiplied.

Transposed, a step of attention is two products of matrices whose 8 columns are queries that share a KV head:

    S = K q        [16 tokens x head_dim] [head_dim x 8 queries]
    O = V^T P      [head_dim x 16 tokens] [16 tokens x 8 queries]

The dims are summed in the first product and label the rows of the second, so their order is free: each lane
takes 16 bytes of K and of V as they lie. No shared memory, and no waiting for other warps, while tokens stream past.
P comes out of the first product as the second wants it but for a transposition in registers.

For shares of the work, and for what becomes of the sums, see `decode_parts`.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import cuda

from .addressing import make_addressing, row_of
from .arithmetic import FLOOR, HALVES, NEGATIVE_INFINITY, exp2, fma, maximum, pick_bytes, tanh
from .decode_parts import UNIT, Queries, make_settle, make_shares
from .memory import load_16, load_16_cached
from .ptx import float32, uint32
from .warp import make_meet, shuffle_xor, transpose
from .warp import multiply as multiplications

WARPS = 4
THREADS = 32 * WARPS
BLOCKS_PER_SM = 2


def make_decode(
    dtype: torch.dtype,
    head_dim: int,
    queries: Queries,
    block_size: int,
    windowed: bool,
    softcapped: bool,
) -> Any:
    """The kernel as a Python function; the arguments are constants to the compiler.

    Args:
        queries: warps without a slot of them take other tokens.
        block_size: tokens of a block in the block table; 0 without one.
    """
    multiply, pack = multiplications[dtype], HALVES[dtype].pack
    group, q_len, slots = queries.group, queries.q_len, queries.slots
    tiles, used, per_head = queries.slots_per_head, queries.per_slot, queries.per_head
    token_warps = WARPS // slots
    k_chunks, v_chunks = -(-head_dim // 32), -(-head_dim // 64)
    q_words, k_words, v_words = 4 * k_chunks, 8 * k_chunks, 16 * v_chunks
    num_sums = 16 * v_chunks
    at_m = WARPS * used * head_dim
    at_l = at_m + WARPS * used
    shared_floats = queries.result_floats(head_dim, token_warps)
    stride = token_warps * UNIT

    home_of, offset_in = make_addressing(block_size)
    meet, _ = make_meet(THREADS)
    share_of_block, piece_at = make_shares(queries, windowed)
    settle = make_settle(dtype, head_dim, queries, token_warps, THREADS, meet)

    @cuda.jit(device=True, inline="always")
    def load_k(words, token, first, last, home, k, k_row, k_token, lane):  # type: ignore[no-untyped-def]
        """Of 16 tokens, a lane's rows g and g + 8; those outside first..last repeat one within."""
        for r in range(2):
            position = max(min(token + r * 8 + (lane >> 2), last), first)
            source = k + offset_in(home, position, k_row, k_token)
            for c in range(k_chunks):
                offset = c * 64 + (lane & 3) * 16
                if head_dim % 32 and offset >= head_dim * 2:
                    offset = 0  # the query is 0 there
                loaded = load_16(source + offset)
                for i in range(4):
                    words[(r * k_chunks + c) * 4 + i] = loaded[i]

    @cuda.jit(device=True, inline="always")
    def load_v(words, token, first, last, home, v, v_row, v_token, lane):  # type: ignore[no-untyped-def]
        """Of 16 tokens, those that are a lane's columns in the product."""
        for r in range(4):
            row = token + (lane & 3) * 2 + (r & 1) + (r >> 1) * 8
            position = max(min(row, last), first)
            source = v + offset_in(home, position, v_row, v_token)
            for c in range(v_chunks):
                offset = c * 128 + (lane >> 2) * 16
                if head_dim % 64 and offset >= head_dim * 2:
                    offset = 0  # these sums are not stored
                loaded = load_16(source + offset)
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
        shared = cuda.shared.array(shared_floats, float32)
        q_fragment = cuda.local.array(q_words, uint32)
        k_fragment = cuda.local.array(k_words, uint32)
        v_fragment = cuda.local.array(v_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        lengths = (seq_lens, starts, window, groups)

        share, unit, end, sequence, before = share_of_block(batch, lengths, lane)

        while unit < end:
            first, length, index, group_begin, group_end, piece_end, token, token_end = piece_at(
                unit, end, sequence, before, lengths
            )
            last = length - 1
            token += warp // slots * UNIT
            slot = index * slots + warp % slots
            kv_head = slot // tiles
            column = slot % tiles * 8
            row = row_of(sequence, rows)
            table = block_table + row * table_stride

            # What this lane's two queries see: tokens from `low` on, before `high`.
            high0 = length - q_len + min((column + 2 * pair) // group, q_len - 1) + 1
            high1 = length - q_len + min((column + 2 * pair + 1) // group, q_len - 1) + 1
            low0 = max(first, high0 - window) if windowed else first
            low1 = max(first, high1 - window) if windowed else first
            high0 = min(high0, token_end)
            high1 = min(high1, token_end)

            # A lane's part of the queries: 16 bytes of every 64, of query g.
            query = min(column + (lane >> 2), per_head - 1)
            q_from = q + sequence * q_batch + (query // group) * q_token
            q_from += (kv_head * group + query % group) * q_head + pair * 16
            for c in range(k_chunks):
                inside = column + (lane >> 2) < per_head and c * 64 + pair * 16 < head_dim * 2
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
                home = home_of(token, row, table)
                load_k(k_fragment, token, first, last, home, k_from, k_row, k_token, lane)
                load_v(v_fragment, token, first, last, home, v_from, v_row, v_token, lane)
                home = home_of(min(token + stride, last), row, table)
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
                    load_k(k_fragment, token, first, last, home, k_from, k_row, k_token, lane)
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
                    load_v(v_fragment, token, first, last, home, v_from, v_row, v_token, lane)
                    home = home_of(min(token + stride, last), row, table)

            # The warps' results meet in shared memory.
            for step in range(3):
                l0 += shuffle_xor(l0, 4 << step)
                l1 += shuffle_xor(l1, 4 << step)
            for i in range(2):
                query = 2 * pair + i
                if query < used:
                    if lane < 4:
                        shared[at_m + warp * used + query] = m1 if i else m0
                        shared[at_l + warp * used + query] = l1 if i else l0
                    for c in range(v_chunks):
                        dim = c * 64 + (lane >> 2) * 8
                        if dim < head_dim:
                            for w in range(8):
                                at = (warp * used + query) * head_dim + dim + w
                                shared[at] = sums[(c * 4 + w // 2) * 4 + w % 2 * 2 + i]
            meet(1)
            settle(
                shared, thread, sequence, groups, index, group_begin, group_end,
                piece_end - unit == group_end - group_begin, share,
                out + sequence * out_batch, out_token, out_head, sinks, partials, counters, outer,
            )  # fmt: skip

            unit = piece_end
            if piece_end == group_end and index == groups - 1:
                before = unit
                sequence += 1

    return kernel
