"""Consumers of prefill on Hopper: warpgroups of 64 queries each, which multiply what others bring.

They multiply by `wgmma`, which runs on while the threads do something else:

    issue   S(n) = Q K(n)^T      and behind it O += P(n-1) V(n-1)
    wait    for S(n), while O is still being added to
    softmax of S(n), which gives P(n)
    wait    for O, and scale it if the maximum has grown

The two consumers take turns at issuing, so that one's softmax runs beside the other's products. Instructions and
layouts are those of the PTX manual; the plan is that of FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from typing import Any

import torch
from numba import cuda

from .arguments import Addresses, Groups, Scoring, Sizes, Strides, Variant
from .arithmetic import HALVES
from .hopper import (
    ROW_BYTES,
    begin_products,
    commit_products,
    make_multiply_registers,
    make_multiply_shared,
    make_operand_at,
    make_wait_products,
)
from .jobs import get_job
from .ptx import float32, inlined, uint32
from .ring import Ring
from .softmax import Softmax, Visible, begin_softmax, make_mask, raise_maxima, rescale, weigh
from .tile_copies import tile_bytes
from .warp import make_meet, shuffle_count
from .wgmma_shapes import CONSUMERS, WARPGROUP, Rings, RingUses, slots_of, tile_of

TURN = 1
"""The number of the first consumer's barrier, and the other's is the next: its turn to issue products."""


def make_begin_products(dtype: torch.dtype, head_dim: int) -> tuple[Any, Any]:
    """Functions for kernels: begin `scores = Q K^T`, and `sums += weights V`, for one tile."""
    tile = tile_of(head_dim)
    multiply_first = make_multiply_shared(dtype, tile, accumulate=False)
    multiply_next = make_multiply_shared(dtype, tile, accumulate=True)
    add_values = make_multiply_registers(dtype, head_dim, tile)
    rows_at, columns_at = make_operand_at(16), make_operand_at(tile * ROW_BYTES)
    row, slot, slots = ROW_BYTES // 16, tile_bytes(head_dim, tile) // 16, slots_of(head_dim)
    k_mask, v_mask = slots.k - 1, slots.v - 1

    @inlined
    def issue_scores(scores: Any, queries: int, k_ring: Ring, n: int) -> None:
        a, b = rows_at(queries), rows_at(k_ring.slots) + (n & k_mask) * slot
        begin_products()
        for step in range(head_dim // 16):
            if step == 0:
                multiply_first(scores, a, b)
            else:
                panel, inside = step // 4, step % 4 * 2
                multiply_next(scores, a + (panel * 64 * row + inside), b + (panel * tile * row + inside))
        commit_products()

    @inlined
    def issue_sums(sums: Any, weights: Any, v_ring: Ring, n: int) -> None:
        b = columns_at(v_ring.slots) + (n & v_mask) * slot
        begin_products()
        for step in range(tile // 16):
            w = step * 4
            add_values(sums, weights[w], weights[w + 1], weights[w + 2], weights[w + 3], b + step * 16 * row)
        commit_products()

    return issue_scores, issue_sums


def make_issue(variant: Variant, uses: RingUses) -> tuple[Any, Any]:
    """Functions for kernels: issue a tile's products, in turns with the other consumer; begin `sums += weights V`."""
    tile = tile_of(variant.head_dim)
    issue_scores, issue_sums = make_begin_products(variant.dtype, variant.head_dim)
    wait_v, (take_turn, give_turn) = uses.v.wait_full, make_meet(WARPGROUP * CONSUMERS)
    wait_scores = make_wait_products(tile // 2, pending=0)
    wait_scores_only = make_wait_products(tile // 2, pending=1)

    @inlined
    def issue(
        sums: Any, scores: Any, weights: Any, queries: int, rings: Rings, n: int, first: bool, consumer: int
    ) -> None:
        """In its turn: scores of the n-th tile, which are there at the end, and sums of the one before, unless it is
        the job's first."""
        take_turn(TURN + consumer)
        issue_scores(scores, queries, rings.k, n)
        if first:
            give_turn(TURN + 1 - consumer)
            wait_scores(scores)
        else:
            wait_v(rings.v, n - 1)
            issue_sums(sums, weights, rings.v, n - 1)
            give_turn(TURN + 1 - consumer)
            wait_scores_only(scores)  # sums are still being added to

    return issue, issue_sums


def make_consume(variant: Variant, uses: RingUses) -> Any:
    """A function for kernels: attention of a consumer's queries to all tiles of a job, which ends with the sums."""
    head_dim, tile = variant.head_dim, tile_of(variant.head_dim)
    num_scores, num_sums, num_weights = tile // 2, head_dim // 2, tile // 4
    pack = HALVES[variant.dtype].pack
    wait_k, release_k, wait_v, release_v = uses.k.wait_full, uses.k.release, uses.v.wait_full, uses.v.release
    release_queries = uses.queries.release
    issue, issue_sums = make_issue(variant, uses)
    mask = make_mask(variant.softcapped, num_scores)
    wait_sums = make_wait_products(num_sums, pending=0)

    @inlined
    def consume(
        sums: Any, queries: int, rings: Rings, number: int, begin: int, tiles: int, first_key: int, visible: Visible,
        scoring: Scoring, consumer: int, lane: int,
    ) -> Softmax:  # fmt: skip
        """The job is the one of this number, and its tiles are those from `begin` on in the rings."""
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        softmax = begin_softmax()
        for i in range(num_sums):
            sums[i] = float32(0)
        n = begin
        key = first_key
        end = begin + tiles
        if n < end:
            wait_k(rings.k, n)
        while n < end:
            issue(sums, scores, weights, queries, rings, n, n == begin, consumer)
            release_k(rings.k, n, lane)
            mask(scores, key, visible, scoring.inner, lane)
            softmax, a0, a1, grown = raise_maxima(scores, num_scores, softmax, scoring.outer)
            softmax = weigh(scores, num_scores, softmax, scoring.outer)
            # The assembler begins a new block of instructions here, and so waits for sums behind the exponentials.
            if n + 1 < end:
                wait_k(rings.k, n + 1)
            wait_sums(sums)
            if n > begin:
                release_v(rings.v, n - 1, lane)
            if grown:
                rescale(sums, num_sums, a0, a1)
            for i in range(num_weights):
                weights[i] = pack(scores[2 * i], scores[2 * i + 1])
            n += 1
            key += tile
        release_queries(rings.queries, number, lane)
        if tiles > 0:
            wait_v(rings.v, end - 1)
            issue_sums(sums, weights, rings.v, end - 1)
            wait_sums(sums)
            release_v(rings.v, end - 1, lane)
        return softmax

    return consume


def make_consume_jobs(variant: Variant, uses: RingUses, keys_of_job: Any, keys_of_lane: Any, put: Any) -> Any:
    """A function for kernels: attention of a consumer's queries in all jobs of a block of threads.

    Args:
        keys_of_job: an inlined device function, as the following are: the first key of a job, and how many tiles.
        keys_of_lane: the keys that a lane's two queries see.
        put: what becomes of their sums.
    """
    num_sums, queries_bytes = variant.head_dim // 2, tile_bytes(variant.head_dim, 64)
    wait_job, release_job, wait_queries = uses.jobs.wait_full, uses.jobs.release, uses.queries.wait_full
    take_turn, give_turn = make_meet(WARPGROUP * CONSUMERS)
    consume = make_consume(variant, uses)

    @inlined
    def consume_jobs(
        rings: Rings, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups, thread: int,
        lane: int,
    ) -> None:  # fmt: skip
        consumer = shuffle_count(thread // WARPGROUP, 0) - 1  # the same in all lanes, as the compiler sees
        line = consumer * 64 + thread % WARPGROUP // 32 * 16 + (lane >> 2)  # of this lane's two queries the first
        sums = cuda.local.array(num_sums, float32)
        if consumer == 1:
            give_turn(TURN)  # the other begins
        number, n = 0, 0
        job = get_job(wait_job(rings.jobs, 0))
        while job.sequence >= 0:
            first_key, tiles = keys_of_job(job, scoring.window)
            visible = keys_of_lane(job, line, scoring.window)
            own_queries = wait_queries(rings.queries, number) + consumer * queries_bytes
            softmax = consume(sums, own_queries, rings, number, n, tiles, first_key, visible, scoring, consumer, lane)
            job = get_job(wait_job(rings.jobs, number))  # again: no registers hold it meanwhile
            put(sums, softmax, line, job, at, sizes, strides, groups, scoring.outer, lane)
            release_job(rings.jobs, number, lane)
            n += tiles
            number += 1
            job = get_job(wait_job(rings.jobs, number))
        if consumer == 0:
            take_turn(TURN)  # the other gave one that nobody took

    return consume_jobs
