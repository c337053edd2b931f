"""prefill on the tensor cores of any GPU since Ampere: tiles of K and V come through shared memory.

A block of threads has `16 * warps` queries of one head, a warp 16 of them. For every tile of keys:

    scores    S = Q K^T, with Q and K read from shared memory as fragments,
    softmax   within four lanes, which share a row of S,
    sums      O += P V, where P is S in the registers it came in.

K of the next tile is copied while V is used, and V while K is. Rows in shared memory are 16 bytes longer than their
data: an odd number of 16-byte columns lets eight rows be read at once.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import cuda

from .addressing import make_addressing, row_of
from .arithmetic import FLOOR, HALVES, exp2, tanh
from .prompts import make_find_queries
from .ptx import float32, int64, uint32
from .shared import copy_16, shared_address, wait_copies
from .softmax import divisors, hide, make_ranges, make_store, maxima, rescale, weigh
from .warp import load_matrices, load_matrices_transposed
from .warp import multiply as multiplications


def warps_of(head_dim: int) -> int:
    """Of 16 queries each, in a block of threads."""
    return 8 if head_dim <= 128 else 4


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 64 if head_dim <= 128 else 32


def shared_bytes(head_dim: int) -> int:
    """Of the queries, and of one tile of K and V."""
    return (16 * warps_of(head_dim) + 2 * tile_of(head_dim)) * (head_dim * 2 + 16)


def make_copy(block_size: int, count: int, head_dim: int, threads: int) -> tuple[Any, Any, int]:
    """Functions for kernels: a block's threads look up `count` tokens, and begin to copy one head of them.

    Both take the first of the tokens; those before `low` or from `high` on repeat one in between.

    Returns:
        the functions, and how many homes a thread looks up.
    """
    home_of, offset_in = make_addressing(block_size)
    pitch = head_dim * 2 + 16
    vectors = head_dim // 8  # of 16 bytes in a token
    turns = -(-count * vectors // threads)

    @cuda.jit(device=True, inline="always")
    def look_up(homes, token, low, high, row, table, thread):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            position = max(min(token + (thread + turn * threads) // vectors, high - 1), low)
            homes[turn] = home_of(position, row, table)

    @cuda.jit(device=True, inline="always")
    def copy(to, source, homes, home_stride, token_stride, token, low, high, thread):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            vector = thread + turn * threads
            if vector < count * vectors:
                position = max(min(token + vector // vectors, high - 1), low)
                column = vector % vectors * 16
                at = source + offset_in(homes[turn], position, home_stride, token_stride)
                copy_16(to + vector // vectors * pitch + column, at + column)

    return look_up, copy, turns


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
    multiply, pack = multiplications[dtype], HALVES[dtype].pack
    warps, tile = warps_of(head_dim), tile_of(head_dim)
    threads = 32 * warps
    queries_per_block = 16 * warps
    pitch = head_dim * 2 + 16
    steps, score_tiles, sum_tiles = head_dim // 16, tile // 8, head_dim // 8
    num_scores, num_sums = 4 * score_tiles, 4 * sum_tiles

    find_queries = make_find_queries(queries_per_block, windowed)
    keys_of_block, keys_of_rows = make_ranges(queries_per_block, tile, causal, windowed)
    store = make_store(dtype, num_sums)
    _, copy_queries, query_turns = make_copy(0, queries_per_block, head_dim, threads)
    look_up, copy_tile, turns = make_copy(block_size, tile, head_dim, threads)

    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, partials, counters,
        batch, kv_heads, table_stride, window,
        q_batch, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, out_batch, out_token, out_head,
        inner, outer,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        head = cuda.blockIdx.x
        q_shared = shared_address(cuda.shared.array(0, uint32))
        k_shared = q_shared + queries_per_block * pitch
        v_shared = k_shared + tile * pitch
        scores = cuda.local.array(num_scores, float32)
        sums = cuda.local.array(num_sums, float32)
        homes = cuda.local.array(turns, int64)
        query_homes = cuda.local.array(query_turns, int64)

        sequence, prompt, count, first_query, begin, length = find_queries(
            batch, cu_seqlens, seq_lens, starts, window, lane
        )
        if first_query >= count:
            return

        row = row_of(sequence, rows)
        table = block_table + row * table_stride
        k_from = k + head // group * k_head
        v_from = v + head // group * v_head

        position = length - count + first_query
        key, end = keys_of_block(position, begin, length, window)
        low0, high0, low1, high1 = keys_of_rows(position + warp * 16 + (lane >> 2), begin, length, window)

        for i in range(num_sums):
            sums[i] = float32(0)
        m0 = float32(FLOOR)
        m1 = float32(FLOOR)
        l0 = float32(0)
        l1 = float32(0)
        if key < end:
            q_from = q + prompt * q_token + head * q_head
            for i in range(query_turns):
                query_homes[i] = 0
            copy_queries(q_shared, q_from, query_homes, 0, q_token, first_query, 0, count, thread)
            look_up(homes, key, begin, length, row, table, thread)
            copy_tile(k_shared, k_from, homes, k_row, k_token, key, begin, length, thread)
        while key < end:
            wait_copies()
            cuda.syncthreads()  # K is there, and nobody needs the V before
            copy_tile(v_shared, v_from, homes, v_row, v_token, key, begin, length, thread)
            look_up(homes, key + tile, begin, length, row, table, thread)
            for i in range(num_scores):
                scores[i] = float32(0)
            for step in range(steps):
                a = load_matrices(q_shared + (warp * 16 + (lane & 15)) * pitch + step * 32 + (lane >> 4) * 16)
                for j in range(score_tiles // 2):
                    token = j * 16 + (lane & 7) + (lane >> 4) * 8
                    b = load_matrices(k_shared + token * pitch + step * 32 + (lane >> 3 & 1) * 16)
                    for half in range(2):
                        at = (2 * j + half) * 4
                        d = multiply(
                            scores[at], scores[at + 1], scores[at + 2], scores[at + 3],
                            a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1],
                        )  # fmt: skip
                        for i in range(4):
                            scores[at + i] = d[i]
            wait_copies()
            cuda.syncthreads()  # V is there, and nobody needs this K
            if key + tile < end:
                copy_tile(k_shared, k_from, homes, k_row, k_token, key + tile, begin, length, thread)

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
            rescale(sums, num_sums, a0, a1)
            for j in range(score_tiles // 2):
                p0 = pack(scores[8 * j], scores[8 * j + 1])
                p1 = pack(scores[8 * j + 2], scores[8 * j + 3])
                p2 = pack(scores[8 * j + 4], scores[8 * j + 5])
                p3 = pack(scores[8 * j + 6], scores[8 * j + 7])
                for i in range(sum_tiles // 2):
                    b = load_matrices_transposed(v_shared + (j * 16 + (lane & 15)) * pitch + i * 32 + (lane >> 4) * 16)
                    for half in range(2):
                        at = (2 * i + half) * 4
                        d = multiply(
                            sums[at],
                            sums[at + 1],
                            sums[at + 2],
                            sums[at + 3],
                            p0,
                            p1,
                            p2,
                            p3,
                            b[2 * half],
                            b[2 * half + 1],
                        )
                        for x in range(4):
                            sums[at + x] = d[x]
            key += tile

        d0, d1 = divisors(m0, m1, l0, l1, sinks, head, outer)
        to = out + (prompt + first_query) * out_token + head * out_head
        store(sums, d0, d1, to, out_token, warp * 16 + (lane >> 2), count - first_query, lane)

    return kernel
