"""prefill on Hopper: three warps bring what eight multiply.

A block of threads stays and takes one job after another. Its first warpgroup is the producer: one warp finds jobs and
brings their queries, one fills a ring in shared memory with tiles of K, one another with tiles of V. The other two are
consumers of 64 queries each. They multiply by `wgmma`, which runs on while the threads do something else:

    issue   S(n) = Q K(n)^T      and behind it O += P(n-1) V(n-1)
    wait    for S(n), while O is still being added to
    softmax of S(n), which gives P(n)
    wait    for O, and scale it if the maximum has grown

Consumers take turns at issuing, so that one's softmax runs beside the other's products. The plan is that of
FlashAttention-3 (arXiv 2407.08608); instructions and layouts are those of the PTX manual.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from .arguments import Addresses, Given, Groups, Maps, Options, Sizes, Variant, make_given, row_of
from .compiler import float32, inlined, uint32
from .memory import HALVES, divide, shared_address
from .prefill_rings import (
    CONSUMERS, QUERIES, WARPGROUP, Ring, RingUse, Rings, Source,
    get_job, make_bring_queries, make_copy_tile, make_find_jobs, make_rings, registers_of, shared_of, slots_of,
    tile_bytes, tile_of,
)  # fmt: skip
from .prompts import Prompt, keys_of_block, keys_of_lane, make_prefixes, make_prompts
from .softmax import Softmax, Visible, begin_softmax, rescale, weigh_tile
from .warp import (
    ATOM_BYTES, ROW_BYTES, begin_products, commit_products, make_meet, make_multiply_registers, make_multiply_shared,
    make_operand_at, make_take_registers, make_wait_products, publish_barriers, shuffle_count, sync_warp,
)  # fmt: skip

TURN = 1  # the number of the first consumer's barrier, and the other's is the next: its turn to issue products


def make_issue(variant: Variant, uses: Rings) -> tuple[Any, Any]:
    """Functions for kernels: issue a tile's products, in turns with the other consumer; begin `sums += weights V`."""
    head_dim, tile = variant.head_dim, tile_of(variant.head_dim)
    multiply_first = make_multiply_shared(variant.dtype, tile, accumulate=False)
    multiply_next = make_multiply_shared(variant.dtype, tile, accumulate=True)
    add_values = make_multiply_registers(variant.dtype, head_dim, tile)
    rows_at, columns_at = make_operand_at(16), make_operand_at(tile * ROW_BYTES)
    row, slot, slots = ROW_BYTES // 16, tile_bytes(head_dim, tile) // 16, slots_of(head_dim)
    k_mask, v_mask = slots.k - 1, slots.v - 1
    wait_v, (take_turn, give_turn) = uses.v.wait_full, make_meet(WARPGROUP * CONSUMERS)
    wait_scores = make_wait_products(tile // 2, pending=0)
    wait_scores_only = make_wait_products(tile // 2, pending=1)

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


def make_consume(variant: Variant, uses: Rings) -> Any:
    """A function for kernels: attention of a consumer's queries to all tiles of a job, which ends with the sums."""
    head_dim, tile = variant.head_dim, tile_of(variant.head_dim)
    num_scores, num_sums, num_weights = tile // 2, head_dim // 2, tile // 4
    pack = HALVES[variant.dtype].pack
    wait_k, release_k, wait_v, release_v = uses.k.wait_full, uses.k.release, uses.v.wait_full, uses.v.release
    release_queries = uses.queries.release
    issue, issue_sums = make_issue(variant, uses)
    wait_sums = make_wait_products(num_sums, pending=0)

    @inlined
    def consume(
        sums: Any, queries: int, rings: Rings, number: int, begin: int, tiles: int, first_key: int, visible: Visible,
        given: Given, consumer: int, lane: int,
    ) -> Softmax:  # fmt: skip
        """The job is the one of this number, and its tiles are those from `begin` on in the rings."""
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        softmax = begin_softmax(sums, num_sums)
        n = begin
        key = first_key
        end = begin + tiles
        if n < end:
            wait_k(rings.k, n)
        while n < end:
            issue(sums, scores, weights, queries, rings, n, n == begin, consumer)
            release_k(rings.k, n, lane)
            softmax, a0, a1, grown = weigh_tile(scores, num_scores, key, visible, softmax, given.options, lane)
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


def make_consume_jobs(variant: Variant, uses: Rings, keys_of_job: Any, put: Any) -> Any:
    """A function for kernels: attention of a consumer's queries in all jobs of a block of threads. Inlined functions
    say the first key of a job and how many tiles, and what becomes of sums."""
    num_sums, queries_bytes = variant.head_dim // 2, tile_bytes(variant.head_dim, 64)
    wait_job, release_job, wait_queries = uses.jobs.wait_full, uses.jobs.release, uses.queries.wait_full
    take_turn, give_turn = make_meet(WARPGROUP * CONSUMERS)
    consume = make_consume(variant, uses)

    @inlined
    def consume_jobs(rings: Rings, given: Given, thread: int, lane: int) -> None:
        consumer = shuffle_count(thread // WARPGROUP, 0) - 1  # the same in all lanes, as the compiler sees
        line = consumer * 64 + thread % WARPGROUP // 32 * 16 + (lane >> 2)  # of this lane's two queries the first
        sums = cuda.local.array(num_sums, float32)
        if consumer == 1:
            give_turn(TURN)  # the other begins
        number, n = 0, 0
        job = get_job(wait_job(rings.jobs, 0))
        while job.sequence >= 0:
            first_key, tiles = keys_of_job(job, given)
            visible = keys_of_lane(job, line, given.options)
            own_queries = wait_queries(rings.queries, number) + consumer * queries_bytes
            softmax = consume(sums, own_queries, rings, number, n, tiles, first_key, visible, given, consumer, lane)
            job = get_job(wait_job(rings.jobs, number))  # again: no registers hold it meanwhile
            put(sums, softmax, line, job, given, lane)
            release_job(rings.jobs, number, lane)
            n += tiles
            number += 1
            job = get_job(wait_job(rings.jobs, number))
        if consumer == 0:
            take_turn(TURN)  # the other gave one that is not taken yet

    return consume_jobs


def make_produce(head_dim: int, keys_of_job: Any, of_jobs: RingUse, of_tiles: RingUse) -> Any:
    """A function for kernels that fills a ring with the tiles of K or of V of all jobs; called by a warp."""
    tile = tile_of(head_dim)
    box_in_tile, look_up, copy_tile = make_copy_tile(head_dim, tile)
    wait_job, release_job, wait_empty, fill = of_jobs.wait_full, of_jobs.release, of_tiles.wait_empty, of_tiles.fill

    @inlined
    def produce(jobs: Ring, ring: Ring, boxes: bytes, tokens: bytes, given: Given, lane: int) -> None:
        number, n = 0, 0
        job = get_job(wait_job(jobs, 0))
        while job.sequence >= 0:
            sync_warp()
            release_job(jobs, number, lane)
            first_key, tiles = keys_of_job(job, given)
            box, row = given.options.box, row_of(job.sequence, given)
            source = Source(boxes, tokens, job.kv_head, box)
            own = box_in_tile(lane, box, row)
            place = look_up(first_key + own[1], row, job) if tiles > 0 else (0, 0)  # else nothing of it need be there
            for i in range(tiles):
                key = first_key + i * tile
                wait_empty(ring, n)
                copy_tile(fill(ring, n, lane), source, own, place, key, row, job, lane)
                # Blocks are looked up before there is room for them.
                place = look_up(key + tile + own[1], row, job)
                n += 1
            number += 1
            job = get_job(wait_job(jobs, number))

    return produce


def make_prefill(variant: Variant) -> Any:
    """The kernel as a Python function."""
    head_dim, given_of = variant.head_dim, make_given(variant)
    tile, shared, uses = tile_of(head_dim), shared_of(head_dim), make_rings(head_dim)
    init_jobs, init_queries, init_k, init_v = (use.init for use in uses)
    give_registers, take_registers = map(make_take_registers, registers_of(head_dim, variant.general))
    work = (make_prefixes if variant.prefixes else make_prompts)(variant, QUERIES)
    find_jobs = make_find_jobs(work, make_bring_queries(head_dim, QUERIES, work), uses.jobs, uses.queries)

    @inlined
    def keys_of_job(job: Prompt, given: Given) -> tuple[int, int]:
        """The first of the first tile, and how many tiles."""
        first_key, end = keys_of_block(job, QUERIES, given.options)
        if given.options.block_size != 0:
            first_key = divide(first_key, given.options.box) * given.options.box
        return first_key, (max(end - first_key, 0) + tile - 1) // tile

    produce_k, produce_v = (make_produce(head_dim, keys_of_job, uses.jobs, each) for each in (uses.k, uses.v))
    consume_jobs = make_consume_jobs(variant, uses, keys_of_job, work.put)

    def kernel(maps: Maps, at: Addresses, sizes: Sizes, options: Options, groups: Groups) -> None:
        given = given_of(at, sizes, options, groups)
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + ATOM_BYTES - 1) // ATOM_BYTES * ATOM_BYTES
        rings = Rings(
            Ring(base + shared.jobs, base + shared.job_barriers),
            Ring(base + shared.queries, base + shared.query_barriers),
            Ring(base + shared.k_slots, base + shared.k_barriers),
            Ring(base + shared.v_slots, base + shared.v_barriers),
        )
        if thread == 0:
            init_jobs(rings.jobs)
            init_queries(rings.queries)
            init_k(rings.k)
            init_v(rings.v)
            publish_barriers()
        cuda.syncthreads()

        if thread >= WARPGROUP:
            take_registers()
            consume_jobs(rings, given, thread, lane)
        else:
            give_registers()
            # One warp copies K, another one V, and one finds jobs.
            if thread < 32:
                produce_k(rings.jobs, rings.k, maps.k_boxes, maps.k_tokens, given, lane)
            elif thread < 64:
                produce_v(rings.jobs, rings.v, maps.v_boxes, maps.v_tokens, given, lane)
            elif thread < 96:
                find_jobs(rings.jobs, rings.queries, given, lane)

    return kernel
