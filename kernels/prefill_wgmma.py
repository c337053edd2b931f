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

from .addressing import Row, make_addressing, row_of
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
    publish_shared,
    store_shared_16,
)
from .memory import load_16_cached
from .prefixes import make_prefixes
from .prompts import Prompt, Work, make_prompts, make_ranges
from .ptx import float32, inlined, uint32
from .ring import BARRIER_BYTES, Ring, make_ring
from .shared import shared_address
from .softmax import Softmax, Visible, begin_softmax, hide, rescale, weigh
from .tile_copies import Source, make_copy_tile, tile_bytes
from .warp import make_meet, shuffle_count

WARPGROUP = 128
"""Threads of a warpgroup."""
CONSUMERS = 2
THREADS = WARPGROUP * (1 + CONSUMERS)
QUERIES = 64 * CONSUMERS
SLOTS = 2
"""Of each ring."""

MEETING, TURN = 1, 1 + CONSUMERS
"""Numbers of barriers: of each consumer's threads, and of its turn to issue products; 0 is that of all threads."""


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 128 if head_dim <= 128 else 64


class Shared(NamedTuple):
    """Where things are in shared memory, from a multiple of `ATOM_BYTES` on."""

    queries: int
    """64 for each consumer, laid out as a tile is."""
    k_slots: int
    v_slots: int
    k_barriers: int
    v_barriers: int
    end: int

    @property
    def nbytes(self) -> int:
        """In all, with what alignment takes."""
        return self.end + ATOM_BYTES


def shared_of(head_dim: int) -> Shared:
    """The shared memory of a block of threads."""
    slots, barriers = SLOTS * tile_bytes(head_dim, tile_of(head_dim)), SLOTS * BARRIER_BYTES
    return Shared(*accumulate((tile_bytes(head_dim, QUERIES), slots, slots, barriers, barriers), initial=0))


def make_produce(head_dim: int, block_size: int, wait_empty: Any, fill: Any) -> Any:
    """A function for kernels that fills a ring with the tiles of K or of V; called by a warp."""
    tile = tile_of(head_dim)
    look_up, copy_tile = make_copy_tile(head_dim, tile, block_size)

    @inlined
    def produce(ring: Ring, source: Source, row: Row, first_key: int, tiles: int, prompt: Prompt, lane: int) -> None:
        home = look_up(first_key, row, prompt, lane)
        for n in range(tiles):
            key = first_key + n * tile
            wait_empty(ring, n)
            copy_tile(fill(ring, n, lane), source, home, key, prompt, lane)
            # Blocks are looked up before there is room for them.
            home = look_up(key + tile, row, prompt, lane)

    return produce


def make_load_queries(head_dim: int, work: Work, meet: Any) -> Any:
    """A function for kernels that brings a consumer its queries; called by its threads."""
    vectors = head_dim // 8  # of 16 bytes, in a query
    _, address_of = make_addressing(work.query_block)
    queries_of, home_of_query = work.queries_of, work.home_of_query

    @inlined
    def load_queries(
        to: int, at: Addresses, strides: Strides, first: int, prompt: Prompt, consumer: int, inside: int
    ) -> None:
        """Those behind the prompt's last repeat it."""
        queries = queries_of(prompt, at, strides)
        for i in range(64 * vectors // WARPGROUP):
            vector = inside + i * WARPGROUP
            query = vector // vectors
            column = vector % vectors
            number = min(first + query, prompt.num_queries - 1)
            source = address_of(number, home_of_query(number, prompt, strides), queries)
            w0, w1, w2, w3 = load_16_cached(source + column * 16)
            target = to + column // 8 * (64 * ROW_BYTES) + query * ROW_BYTES
            store_shared_16(target + ((column ^ query) & 7) * 16, w0, w1, w2, w3)
        publish_shared()
        meet(MEETING + consumer)

    return load_queries


def make_issue(dtype: torch.dtype, head_dim: int, tile: int) -> tuple[Any, Any]:
    """Functions for kernels: begin `scores = Q K^T`, and `sums += weights V`, for one tile."""
    multiply_first = make_multiply_shared(dtype, tile, accumulate=False)
    multiply_next = make_multiply_shared(dtype, tile, accumulate=True)
    add_values = make_multiply_registers(dtype, head_dim, tile)
    rows_at, columns_at = make_operand_at(16), make_operand_at(tile * ROW_BYTES)
    row, slot = ROW_BYTES // 16, tile_bytes(head_dim, tile) // 16

    @inlined
    def issue_scores(scores: Any, queries: int, k_ring: Ring, n: int) -> None:
        a, b = rows_at(queries), rows_at(k_ring.slots) + (n & SLOTS - 1) * slot
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
        b = columns_at(v_ring.slots) + (n & SLOTS - 1) * slot
        begin_products()
        for step in range(tile // 16):
            w = step * 4
            add_values(sums, weights[w], weights[w + 1], weights[w + 2], weights[w + 3], b + step * 16 * row)
        commit_products()

    return issue_scores, issue_sums


def make_consume(variant: Variant, wait_full: Any, release: Any) -> Any:
    """A function for kernels: attention of a consumer's queries to all tiles, which ends with the sums."""
    dtype, head_dim, softcapped = variant.dtype, variant.head_dim, variant.softcapped
    tile = tile_of(head_dim)
    num_scores, num_sums, num_weights = tile // 2, head_dim // 2, tile // 4
    pack = HALVES[dtype].pack
    issue_scores, issue_sums = make_issue(dtype, head_dim, tile)
    wait_scores = make_wait_products(num_scores, pending=0)
    wait_scores_only = make_wait_products(num_scores, pending=1)
    wait_sums = make_wait_products(num_sums, pending=0)
    take_turn, give_turn = make_meet(WARPGROUP * CONSUMERS)

    @inlined
    def issue(
        sums: Any, scores: Any, weights: Any, queries: int, k_ring: Ring, v_ring: Ring, n: int, consumer: int
    ) -> None:
        """In its turn: scores of the n-th tile, which are there at the end, and sums of the one before."""
        take_turn(TURN + consumer)
        issue_scores(scores, queries, k_ring, n)
        if n > 0:
            wait_full(v_ring, n - 1)
            issue_sums(sums, weights, v_ring, n - 1)
            give_turn(TURN + 1 - consumer)
            wait_scores_only(scores)  # sums are still being added to
        else:
            give_turn(TURN + 1 - consumer)
            wait_scores(scores)

    @inlined
    def consume(
        sums: Any, queries: int, k_ring: Ring, v_ring: Ring, first_key: int, tiles: int, visible: Visible,
        scoring: Scoring, consumer: int, lane: int,
    ) -> Softmax:  # fmt: skip
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        softmax = begin_softmax()
        for i in range(num_sums):
            sums[i] = float32(0)
        if consumer == 1:
            give_turn(TURN)  # the other begins
        n = 0
        if tiles > 0:
            wait_full(k_ring, 0)
        while n < tiles:
            issue(sums, scores, weights, queries, k_ring, v_ring, n, consumer)
            release(k_ring, n, lane)
            if softcapped:
                for i in range(num_scores):
                    scores[i] = tanh(scores[i] * scoring.inner)
            key = first_key + n * tile
            if key + tile > visible.high0 or key < visible.low1:
                hide(scores, num_scores, key, lane, visible)
            softmax, grown, a0, a1 = weigh(scores, num_scores, softmax, scoring.outer)
            if n + 1 < tiles:
                wait_full(k_ring, n + 1)
            wait_sums(sums)
            if n > 0:
                release(v_ring, n - 1, lane)
            if grown:
                rescale(sums, num_sums, a0, a1)
            for i in range(num_weights):
                weights[i] = pack(scores[2 * i], scores[2 * i + 1])
            n += 1
        if tiles > 0:
            wait_full(v_ring, tiles - 1)
            issue_sums(sums, weights, v_ring, tiles - 1)
            wait_sums(sums)
        if consumer == 0:
            take_turn(TURN)  # the other gave one that nobody took
        return softmax

    return consume


def make_prefill(variant: Variant) -> Any:
    """The kernel as a Python function."""
    head_dim = variant.head_dim
    tile, num_sums = tile_of(head_dim), head_dim // 2
    shared, queries_bytes = shared_of(head_dim), tile_bytes(head_dim, 64)
    init_ring, wait_empty, fill, wait_full, release = make_ring(SLOTS, tile_bytes(head_dim, tile), 4 * CONSUMERS)
    give_registers, take_registers = make_take_registers(24), make_take_registers(240)
    meet, _ = make_meet(WARPGROUP)

    work = (make_prefixes if variant.cascaded else make_prompts)(variant, QUERIES)
    find_queries, put = work.find_queries, work.put
    keys_of_block, keys_of_lane = make_ranges(QUERIES, tile, variant.causal, variant.windowed)
    produce = make_produce(head_dim, variant.block_size, wait_empty, fill)
    load_queries = make_load_queries(head_dim, work, meet)
    consume = make_consume(variant, wait_full, release)

    @inlined
    def prefill(maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        prompt = find_queries(at, sizes, groups, scoring.window, lane)
        if prompt.query >= prompt.num_queries:
            return
        first_key, end = keys_of_block(prompt, scoring.window)
        tiles = (max(end - first_key, 0) + tile - 1) // tile

        base = (shared_address(cuda.shared.array(0, uint32)) + ATOM_BYTES - 1) // ATOM_BYTES * ATOM_BYTES
        k_ring = Ring(base + shared.k_slots, base + shared.k_barriers)
        v_ring = Ring(base + shared.v_slots, base + shared.v_barriers)
        if thread == 0:
            init_ring(k_ring)
            init_ring(v_ring)
            publish_barriers()
        cuda.syncthreads()

        if thread < WARPGROUP:
            give_registers()
            # One warp copies K, another one V.
            if thread < 64 and tiles > 0:
                ring, source = k_ring, Source(maps.k_boxes, maps.k_tokens, prompt.kv_head)
                if thread >= 32:
                    ring, source = v_ring, Source(maps.v_boxes, maps.v_tokens, prompt.kv_head)
                row = row_of(prompt.sequence, at, strides)
                produce(ring, source, row, first_key, tiles, prompt, lane)
        else:
            take_registers()
            consumer = shuffle_count(thread // WARPGROUP, 0) - 1  # which the compiler sees is a warp's
            inside = thread % WARPGROUP
            line = consumer * 64 + inside // 32 * 16 + (lane >> 2)  # of this lane's two queries the first
            queries = base + shared.queries + consumer * queries_bytes
            load_queries(queries, at, strides, prompt.query + consumer * 64, prompt, consumer, inside)

            sums = cuda.local.array(num_sums, float32)
            visible = keys_of_lane(prompt, line, scoring.window)
            softmax = consume(sums, queries, k_ring, v_ring, first_key, tiles, visible, scoring, consumer, lane)
            put(sums, softmax, line, prompt, at, sizes, strides, groups, scoring.outer, lane)

    def kernel(maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        prefill(maps, at, sizes, strides, scoring, NO_GROUPS)

    def cascaded_kernel(
        maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups
    ) -> None:
        prefill(maps, at, sizes, strides, scoring, groups)

    return cascaded_kernel if variant.cascaded else kernel
