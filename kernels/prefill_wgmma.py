"""prefill on Hopper: two warps copy with the copy engine, eight warps multiply.

A block of threads has three groups of four warps. The first only copies tiles of K and V, two of each ahead; two have
64 queries each, and multiply by `wgmma`, which runs on while the threads do something else:

    issue   S(n) = Q K(n)^T       and behind it O += P(n-1) V(n-1)
    wait    for S(n), while O is still being added to
    softmax of S(n), which gives P(n)
    wait    for O, and scale it to the new maximum

The two groups take turns at issuing, so that one's softmax runs beside the other's products.

K and V are copied by one tensor map each, whatever their strides: a row is read like any other tensor, one copy a
tile. With a block table it is one copy a block. Where a copy would reach beyond the live tokens of a sequence they are
copied one by one, and nothing else is read.

Instructions and layouts are those of the PTX manual; the plan is that of FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from typing import Any

import torch
from numba import cuda

from .addressing import row_of
from .arithmetic import FLOOR, HALVES, exp2, tanh
from .hopper import (
    arrive,
    begin_products,
    commit_products,
    init_barrier,
    make_multiply_registers,
    make_multiply_shared,
    make_take_registers,
    make_wait_products,
    publish_barriers,
    publish_shared,
    store_shared_16,
    wait_barrier,
)
from .memory import load_16_cached
from .prompts import make_find_queries
from .ptx import float32, uint32
from .shared import shared_address
from .softmax import divisors, hide, make_ranges, make_store, maxima, rescale, weigh
from .tile_copies import make_copy_tile, tile_bytes
from .warp import make_meet

GROUPS = 2
"""Of four warps, that multiply; of another one two warps copy."""
THREADS = 128 * (GROUPS + 1)
QUERIES = 64 * GROUPS
STAGES = 2
"""Tiles of K, and of V, in shared memory."""


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 128 if head_dim <= 128 else 64


def shared_bytes(head_dim: int) -> int:
    """Of the queries and all stages, 64 elements of each a row; then barriers, and what alignment takes."""
    return -(-head_dim // 64) * 128 * (QUERIES + 2 * STAGES * tile_of(head_dim)) + 128 + 1024


def make_prefill(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    causal: bool,
    windowed: bool,
    softcapped: bool,
) -> Any:
    """The kernel as a Python function; the arguments are constants to the compiler.

    Args:
        group: query heads that share a KV head.
        block_size: tokens of a block in the block table; 0 without one.
    """
    pack = HALVES[dtype].pack
    tile = tile_of(head_dim)
    steps, halves = head_dim // 16, -(-head_dim // 64)
    num_scores, num_sums, num_weights = tile // 2, head_dim // 2, tile // 4
    stage_bytes = tile_bytes(head_dim, tile)
    group_bytes = halves * 64 * 128
    q_vectors = 64 * (head_dim // 8) // 128  # of 16 bytes, that a thread copies

    multiply_first = make_multiply_shared(dtype, tile, accumulate=False)
    multiply_next = make_multiply_shared(dtype, tile, accumulate=True)
    add_values = make_multiply_registers(dtype, head_dim, tile)
    wait_scores = make_wait_products(num_scores, pending=0)
    wait_scores_first = make_wait_products(num_scores, pending=1)
    wait_sums = make_wait_products(num_sums, pending=0)
    give_registers, take_registers = make_take_registers(24), make_take_registers(240)
    meet_group, _ = make_meet(128)
    take_turn, give_turn = make_meet(128 * GROUPS)

    find_queries = make_find_queries(QUERIES, windowed)
    look_up, copy_tile = make_copy_tile(head_dim, tile, block_size)
    keys_of_block, keys_of_rows = make_ranges(QUERIES, tile, causal, windowed)
    store = make_store(dtype, num_sums)

    @cuda.jit(device=True, inline="always")
    def issue_scores(scores, q_shared, k_shared):  # type: ignore[no-untyped-def]
        begin_products()
        for step in range(steps):
            a = q_shared + step // 4 * (64 * 128) + step % 4 * 32
            b = k_shared + step // 4 * (tile * 128) + step % 4 * 32
            if step == 0:
                multiply_first(scores, a, b)
            else:
                multiply_next(scores, a, b)
        commit_products()

    @cuda.jit(device=True, inline="always")
    def issue_sums(sums, weights, v_shared):  # type: ignore[no-untyped-def]
        begin_products()
        for step in range(tile // 16):
            w = step * 4
            add_values(sums, weights[w], weights[w + 1], weights[w + 2], weights[w + 3], v_shared + step * 16 * 128)
        commit_products()

    @cuda.jit(device=True, inline="always")
    def pack_weights(weights, scores):  # type: ignore[no-untyped-def]
        for i in range(num_weights):
            weights[i] = pack(scores[2 * i], scores[2 * i + 1])

    def kernel(  # type: ignore[no-untyped-def]
        k_boxes, v_boxes, k_tokens, v_tokens,
        q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, partials, counters,
        batch, kv_heads, table_stride, window,
        q_batch, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, out_batch, out_token, out_head,
        inner, outer,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane = thread & 31
        head = cuda.blockIdx.x
        q_shared = (shared_address(cuda.shared.array(0, uint32)) + 1023) // 1024 * 1024
        k_shared = q_shared + GROUPS * group_bytes
        v_shared = k_shared + STAGES * stage_bytes
        # Of each stage: K is there, V is there, K may be overwritten, V may be overwritten.
        k_full = v_shared + STAGES * stage_bytes
        v_full = k_full + STAGES * 8
        k_empty = v_full + STAGES * 8
        v_empty = k_empty + STAGES * 8

        sequence, prompt, count, first_query, begin, length = find_queries(
            batch, cu_seqlens, seq_lens, starts, window, lane
        )
        if first_query >= count:
            return
        position = length - count + first_query
        first_key, end = keys_of_block(position, begin, length, window)
        tiles = (max(end - first_key, 0) + tile - 1) // tile

        if thread == 0:
            for stage in range(STAGES):
                init_barrier(k_full + stage * 8, 1)
                init_barrier(v_full + stage * 8, 1)
                init_barrier(k_empty + stage * 8, 4 * GROUPS)
                init_barrier(v_empty + stage * 8, 4 * GROUPS)
            publish_barriers()
        cuda.syncthreads()

        if thread < 128:
            give_registers()
            # One warp copies K, another one V.
            if thread < 64 and tiles > 0:
                row = row_of(sequence, rows)
                table = block_table + row * table_stride
                boxes, tokens, to, full, empty = k_boxes, k_tokens, k_shared, k_full, k_empty
                if thread >= 32:
                    boxes, tokens, to, full, empty = v_boxes, v_tokens, v_shared, v_full, v_empty
                home = look_up(first_key, row, table, begin, length, lane)
                for n in range(tiles):
                    stage = n % STAGES
                    key = first_key + n * tile
                    wait_barrier(empty + stage * 8, (n // STAGES + 1) % 2)
                    copy_tile(
                        to + stage * stage_bytes,
                        boxes,
                        tokens,
                        head // group,
                        home,
                        key,
                        begin,
                        length,
                        full + stage * 8,
                        lane,
                    )
                    # Blocks are looked up before there is room for them.
                    home = look_up(key + tile, row, table, begin, length, lane)
        else:
            take_registers()
            which = thread // 128 - 1
            inside = thread % 128
            line = inside // 32 * 16 + (lane >> 2)  # of this lane's two rows the first
            q_shared += which * group_bytes
            low0, high0, low1, high1 = keys_of_rows(position + which * 64 + line, begin, length, window)
            scores = cuda.local.array(num_scores, float32)
            weights = cuda.local.array(num_weights, uint32)
            sums = cuda.local.array(num_sums, float32)

            for i in range(q_vectors):
                vector = inside + i * 128
                query = vector // (head_dim // 8)
                column = vector % (head_dim // 8)
                source = q + (prompt + min(first_query + which * 64 + query, count - 1)) * q_token + head * q_head
                w0, w1, w2, w3 = load_16_cached(source + column * 16)
                target = q_shared + column // 8 * (64 * 128) + query * 128
                store_shared_16(target + ((column ^ query) & 7) * 16, w0, w1, w2, w3)
            publish_shared()
            meet_group(1 + which)

            for i in range(num_sums):
                sums[i] = float32(0)
            m0 = float32(FLOOR)
            m1 = float32(FLOOR)
            l0 = float32(0)
            l1 = float32(0)
            if which == 1:
                give_turn(1 + GROUPS)
            n = 0
            while n < tiles:
                stage = n % STAGES
                key = first_key + n * tile
                wait_barrier(k_full + stage * 8, n // STAGES % 2)
                take_turn(1 + GROUPS + which)
                issue_scores(scores, q_shared, k_shared + stage * stage_bytes)
                if n > 0:
                    wait_barrier(v_full + (1 - stage) * 8, (n - 1) // STAGES % 2)
                    issue_sums(sums, weights, v_shared + (1 - stage) * stage_bytes)
                    give_turn(1 + GROUPS + 1 - which)
                    wait_scores_first(scores)
                else:
                    give_turn(1 + GROUPS + 1 - which)
                    wait_scores(scores)
                if lane == 0:
                    arrive(k_empty + stage * 8)

                if softcapped:
                    for i in range(num_scores):
                        scores[i] = tanh(scores[i] * inner)
                if key + tile > high0 or key < low1:
                    hide(scores, num_scores, key, lane, low0, high0, low1, high1)
                n0, n1 = maxima(scores, num_scores, m0, m1)
                a0 = exp2((m0 - n0) * outer)
                a1 = exp2((m1 - n1) * outer)
                m0 = n0
                m1 = n1
                l0, l1 = weigh(scores, num_scores, m0, m1, l0 * a0, l1 * a1, outer)
                wait_sums(sums)
                if n > 0 and lane == 0:
                    arrive(v_empty + (1 - stage) * 8)
                rescale(sums, num_sums, a0, a1)
                pack_weights(weights, scores)
                n += 1
            if tiles > 0:
                stage = (tiles - 1) % STAGES
                wait_barrier(v_full + stage * 8, (tiles - 1) // STAGES % 2)
                issue_sums(sums, weights, v_shared + stage * stage_bytes)
                wait_sums(sums)
            if which == 0:
                take_turn(1 + GROUPS)  # the other group gave one that nobody took

            d0, d1 = divisors(m0, m1, l0, l1, sinks, head, outer)
            to = out + (prompt + first_query) * out_token + head * out_head
            store(sums, d0, d1, to, out_token, which * 64 + line, count - first_query, lane)

    return kernel
