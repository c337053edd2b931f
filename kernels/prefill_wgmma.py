"""prefill on Hopper: two warps copy with the copy engine, eight warps multiply.

A block of threads has three warpgroups, of four warps each. The first is the producer: one of its warps fills a ring in
shared memory with tiles of K, one another with tiles of V. The others are consumers of 64 queries each, and multiply by
`wgmma`, which runs on while the threads do something else:

    issue   S(n) = Q K(n)^T       and behind it O += P(n-1) V(n-1)
    wait    for S(n), while O is still being added to
    softmax of S(n), which gives P(n)
    wait    for O, and scale it to the new maximum

The two consumers take turns at issuing, so that one's softmax runs beside the other's products.

K and V are copied by one tensor map each, whatever their strides: see `tile_copies`. Instructions and layouts are those
of the PTX manual; the plan is that of FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from numba import cuda

from .addressing import row_of
from .arguments import NO_GROUPS, Addresses, Groups, Maps, Scoring, Sizes, Strides, Variant
from .arithmetic import HALVES, tanh
from .hopper import (
    ATOM_BYTES,
    ROW_BYTES,
    begin_products,
    commit_products,
    make_multiply_registers,
    make_multiply_shared,
    make_operand_at,
    make_take_registers,
    make_wait_products,
    publish_barriers,
)
from .jobs import JOB_BYTES, JOBS, get_job, make_bring_queries, make_find_jobs
from .prefixes import make_prefixes
from .prompts import Prompt, make_prompts, make_ranges
from .ptx import float32, inlined, uint32
from .ring import BARRIER_BYTES, Ring, make_ring
from .shared import shared_address
from .softmax import (
    Softmax,
    Visible,
    add_weights,
    begin_softmax,
    hide,
    raise_maximum,
    relate,
    rescale,
    weigh,
)
from .tile_copies import Source, box_of, make_copy_tile, tile_bytes
from .warp import make_meet, shuffle_count, sync_warp

WARPGROUP = 128
"""Threads of a warpgroup."""

TURN = 1
"""The number of the first consumer's barrier, and the other's is the next: its turn to issue products."""


def consumers_of(head_dim: int) -> int:
    """Warpgroups that multiply: with narrow heads the products of two leave no time for a softmax."""
    return 3 if head_dim <= 64 else 2


def threads_of(head_dim: int) -> int:
    """Of a block."""
    return WARPGROUP * (1 + consumers_of(head_dim))


def queries_of(head_dim: int) -> int:
    """Of a block."""
    return 64 * consumers_of(head_dim)


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 128 if head_dim <= 128 else 112 if head_dim <= 192 else 80


class Slots(NamedTuple):
    """Of each ring."""

    queries: int
    k: int
    v: int


def slots_of(head_dim: int) -> Slots:
    """What shared memory has room for. V of a tile is held longer than K."""
    return Slots(2 if head_dim <= 128 else 1, 2, 2)


class Shared(NamedTuple):
    """Where things are in shared memory, from a multiple of `ATOM_BYTES` on."""

    queries: int
    """64 for each consumer, laid out as a tile is."""
    k_slots: int
    v_slots: int
    jobs: int
    query_barriers: int
    k_barriers: int
    v_barriers: int
    job_barriers: int
    end: int

    @property
    def nbytes(self) -> int:
        """In all, with what alignment takes."""
        return self.end + ATOM_BYTES


def shared_of(head_dim: int) -> Shared:
    """The shared memory of a block of threads."""
    slots, tile = slots_of(head_dim), tile_bytes(head_dim, tile_of(head_dim))
    tiles = slots.queries * tile_bytes(head_dim, queries_of(head_dim)), slots.k * tile, slots.v * tile, JOBS * JOB_BYTES
    barriers = [count * BARRIER_BYTES for count in (*slots, JOBS)]
    return Shared(*accumulate((*tiles, *barriers), initial=0))


def make_produce(head_dim: int, block_size: int, keys_of_job: Any, jobs_ring: Any, ring_of: Any) -> Any:
    """A function for kernels that fills a ring with the tiles of K or of V of all jobs; called by a warp."""
    tile = tile_of(head_dim)
    look_up, copy_tile = make_copy_tile(head_dim, tile, block_size)
    _, _, _, _, wait_job, release_job, _ = jobs_ring
    _, wait_empty, fill, _, _, _, _ = ring_of

    @inlined
    def produce(
        jobs: Ring, ring: Ring, boxes: bytes, tokens: bytes, at: Addresses, strides: Strides, window: int, lane: int
    ) -> None:
        number, n = 0, 0
        job = get_job(wait_job(jobs, 0))
        while job.sequence >= 0:
            sync_warp()
            release_job(jobs, number, lane)
            first_key, tiles = keys_of_job(job, window)
            source, row = Source(boxes, tokens, job.kv_head), row_of(job.sequence, at, strides)
            home = look_up(first_key, row, job, lane)
            for i in range(tiles):
                key = first_key + i * tile
                wait_empty(ring, n)
                copy_tile(fill(ring, n, lane), source, home, key, job, lane)
                # Blocks are looked up before there is room for them.
                home = look_up(key + tile, row, job, lane)
                n += 1
            number += 1
            job = get_job(wait_job(jobs, number))

    return produce


def make_issue(dtype: torch.dtype, head_dim: int, tile: int) -> tuple[Any, Any]:
    """Functions for kernels: begin `scores = Q K^T`, and `sums += weights V`, for one tile."""
    multiply_first = make_multiply_shared(dtype, tile, accumulate=False)
    multiply_next = make_multiply_shared(dtype, tile, accumulate=True)
    add_values = make_multiply_registers(dtype, head_dim, tile)
    rows_at, columns_at = make_operand_at(16), make_operand_at(tile * ROW_BYTES)
    row, slot, slots = ROW_BYTES // 16, tile_bytes(head_dim, tile) // 16, slots_of(head_dim)
    last_k, last_v = slots.k - 1, slots.v - 1

    @inlined
    def issue_scores(scores: Any, queries: int, k_ring: Ring, n: int) -> None:
        a, b = rows_at(queries), rows_at(k_ring.slots) + (n & last_k) * slot
        begin_products()
        for step in range(head_dim // 16):
            if step == 0:
                multiply_first(scores, a, b)
            else:
                panel, inside = step // 4, step % 4 * 2
                multiply_next(scores, a + (panel * 64 * row + inside), b + (panel * tile * row + inside))
        commit_products()

    @inlined
    def issue_sums(sums: Any, weights: Any, v_ring: Ring, n: int, first: int, end: int) -> None:
        """Of so many times 16 keys of it, from the first to before the end."""
        b = columns_at(v_ring.slots) + (n & last_v) * slot
        begin_products()
        for step in range(first, end):
            w = step * 4
            add_values(sums, weights[w], weights[w + 1], weights[w + 2], weights[w + 3], b + step * 16 * row)
        commit_products()

    return issue_scores, issue_sums


def make_consume(variant: Variant, k_use: tuple[Any, ...], v_use: tuple[Any, ...], release_queries: Any) -> Any:
    """A function for kernels: attention of a consumer's queries to all tiles of a job, which ends with the sums."""
    dtype, head_dim, softcapped = variant.dtype, variant.head_dim, variant.softcapped
    tile = tile_of(head_dim)
    num_scores, num_sums, num_weights = tile // 2, head_dim // 2, tile // 4
    pack = HALVES[dtype].pack
    _, _, _, _, wait_k, release_k, k_is_there = k_use
    _, _, _, _, wait_v, release_v, _ = v_use
    issue_scores, issue_sums = make_issue(dtype, head_dim, tile)
    wait_scores = make_wait_products(num_scores, pending=0)
    wait_scores_only = make_wait_products(num_scores, pending=1)
    wait_sums = make_wait_products(num_sums, pending=0)
    take_turn, give_turn = make_meet(2 * WARPGROUP)
    last, half = consumers_of(head_dim) - 1, tile // 32

    @inlined
    def consume(
        sums: Any, queries: int, k_ring: Ring, v_ring: Ring, begin: int, tiles: int, first_key: int, visible: Visible,
        scoring: Scoring, query_ring: Ring, number: int, consumer: int, lane: int,
    ) -> Softmax:  # fmt: skip
        """The job's tiles are those from `begin` on in the rings."""
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        softmax = begin_softmax()
        for i in range(num_sums):
            sums[i] = float32(0)
        following = consumer + 1 if consumer < last else 0
        n = begin
        key = first_key
        end = begin + tiles
        if n < end:
            wait_k(k_ring, n)
        while n < end:
            take_turn(TURN + consumer)
            issue_scores(scores, queries, k_ring, n)
            if n > begin:
                wait_v(v_ring, n - 1)
                issue_sums(sums, weights, v_ring, n - 1, 0, half)
                wait_scores_only(scores)  # sums are still being added to
            else:
                wait_scores(scores)
            release_k(k_ring, n, lane)
            next_is_there = k_is_there(k_ring, n + 1)
            if softcapped:
                for i in range(num_scores):
                    scores[i] = tanh(scores[i] * scoring.inner)
            if key + tile > visible.high0 or key < visible.low1:
                hide(scores, num_scores, key, lane, visible)
            m0, grown0 = raise_maximum(scores, 0, num_scores, softmax.m0, scoring.outer)
            # A warp that issues more than a few products waits until the first are done: so it does others' work first.
            if n > begin:
                issue_sums(sums, weights, v_ring, n - 1, half, tile // 16)
                give_turn(TURN + following)
            else:
                give_turn(TURN + following)
            m1, grown1 = raise_maximum(scores, 2, num_scores, softmax.m1, scoring.outer)
            softmax, a0, a1 = relate(softmax, m0, m1, scoring.outer)
            # The assembler begins a new block of instructions here, and so does not wait for sums before.
            if n + 1 < end and next_is_there == 0:
                wait_k(k_ring, n + 1)
            wait_sums(sums)
            if n > begin:
                release_v(v_ring, n - 1, lane)
            weigh(scores, num_scores, softmax, scoring.outer)
            # And here: it would have each sum wait for its exponential.
            if grown0 | grown1:
                rescale(sums, num_sums, a0, a1)
            softmax = add_weights(scores, num_scores, softmax)
            for i in range(num_weights):
                weights[i] = pack(scores[2 * i], scores[2 * i + 1])
            n += 1
            key += tile
        release_queries(query_ring, number, lane)
        if tiles > 0:
            wait_v(v_ring, end - 1)
            issue_sums(sums, weights, v_ring, end - 1, 0, tile // 16)
            wait_sums(sums)
            release_v(v_ring, end - 1, lane)
        return softmax

    return consume


def make_prefill(variant: Variant) -> Any:
    """The kernel as a Python function."""
    head_dim = variant.head_dim
    tile, num_sums = tile_of(head_dim), head_dim // 2
    shared, queries_bytes = shared_of(head_dim), tile_bytes(head_dim, 64)
    consumers, queries = consumers_of(head_dim), queries_of(head_dim)
    jobs_ring = make_ring(JOBS, JOB_BYTES, 2 + 4 * consumers)
    slots = slots_of(head_dim)
    queries_ring = make_ring(slots.queries, consumers * queries_bytes, 4 * consumers)
    k_use, v_use = [make_ring(count, tile_bytes(head_dim, tile), 4 * consumers) for count in (slots.k, slots.v)]
    init_jobs, _, _, _, wait_job, release_job, _ = jobs_ring
    init_queries, _, _, _, wait_queries, release_queries, _ = queries_ring
    init_k, init_v = k_use[0], v_use[0]
    given, taken = (32, 160) if consumers == 3 else (72, 216)
    give_registers, take_registers = make_take_registers(given), make_take_registers(taken)
    take_turn, give_turn = make_meet(2 * WARPGROUP)

    work = (make_prefixes if variant.cascaded else make_prompts)(variant, queries)
    put = work.put
    step = box_of(tile, variant.block_size) if variant.block_size else 1
    keys_of_block, keys_of_lane = make_ranges(queries, step, variant.causal, variant.windowed)
    find_jobs = make_find_jobs(work, make_bring_queries(head_dim, queries, work), jobs_ring, queries_ring)
    consume = make_consume(variant, k_use, v_use, release_queries)

    @inlined
    def keys_of_job(job: Prompt, window: int) -> tuple[int, int]:
        """The first one of the first tile, and how many tiles."""
        first_key, end = keys_of_block(job, window)
        return first_key, (max(end - first_key, 0) + tile - 1) // tile

    produce_k, produce_v = [make_produce(head_dim, variant.block_size, keys_of_job, jobs_ring, each) for each in (k_use, v_use)]

    @inlined
    def consume_jobs(
        jobs: Ring, query_ring: Ring, k_ring: Ring, v_ring: Ring, at: Addresses, sizes: Sizes, strides: Strides,
        scoring: Scoring, groups: Groups, thread: int, lane: int,
    ) -> None:  # fmt: skip
        consumer = shuffle_count(thread // WARPGROUP, 0) - 1  # the same in all lanes, as the compiler sees
        line = consumer * 64 + thread % WARPGROUP // 32 * 16 + (lane >> 2)  # of this lane's two queries the first
        sums = cuda.local.array(num_sums, float32)
        if consumer == consumers - 1:
            give_turn(TURN)  # the first begins
        number, n = 0, 0
        job = get_job(wait_job(jobs, 0))
        while job.sequence >= 0:
            first_key, tiles = keys_of_job(job, scoring.window)
            visible = keys_of_lane(job, line, scoring.window)
            queries = wait_queries(query_ring, number) + consumer * queries_bytes
            softmax = consume(
                sums, queries, k_ring, v_ring, n, tiles, first_key, visible, scoring, query_ring, number, consumer, lane
            )
            job = get_job(wait_job(jobs, number))  # again: registers are few
            put(sums, softmax, line, job, at, sizes, strides, groups, scoring.outer, lane)
            release_job(jobs, number, lane)
            n += tiles
            number += 1
            job = get_job(wait_job(jobs, number))
        if consumer == 0:
            take_turn(TURN)  # the last gave one that nobody took

    @inlined
    def prefill(maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + ATOM_BYTES - 1) // ATOM_BYTES * ATOM_BYTES
        jobs = Ring(base + shared.jobs, base + shared.job_barriers)
        queries = Ring(base + shared.queries, base + shared.query_barriers)
        k_ring = Ring(base + shared.k_slots, base + shared.k_barriers)
        v_ring = Ring(base + shared.v_slots, base + shared.v_barriers)
        if thread == 0:
            init_jobs(jobs)
            init_queries(queries)
            init_k(k_ring)
            init_v(v_ring)
            publish_barriers()
        cuda.syncthreads()

        if thread >= WARPGROUP:
            take_registers()
            consume_jobs(jobs, queries, k_ring, v_ring, at, sizes, strides, scoring, groups, thread, lane)
        else:
            give_registers()
            # One warp copies K, another one V, and one finds out what is to be done.
            if thread < 32:
                produce_k(jobs, k_ring, maps.k_boxes, maps.k_tokens, at, strides, scoring.window, lane)
            elif thread < 64:
                produce_v(jobs, v_ring, maps.v_boxes, maps.v_tokens, at, strides, scoring.window, lane)
            elif thread < 96:
                find_jobs(jobs, queries, at, sizes, strides, groups, scoring.window, lane)

    def kernel(maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        prefill(maps, at, sizes, strides, scoring, NO_GROUPS)

    def cascaded_kernel(
        maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups
    ) -> None:
        prefill(maps, at, sizes, strides, scoring, groups)

    return cascaded_kernel if variant.cascaded else kernel
