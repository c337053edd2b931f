"""prefill on Hopper: three warps bring what eight multiply.

A block of threads stays, and takes one job after another (see `jobs`). Its first warpgroup, of four warps, is the
producer: one of its warps finds jobs and brings their queries, one fills a ring in shared memory with tiles of K, and
one another with tiles of V. The others are consumers (see `prefill_consumers`).

K and V are copied by one tensor map each, whatever their strides: see `tile_copies`.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from .addressing import row_of
from .arguments import NO_GROUPS, Addresses, Groups, Maps, Scoring, Sizes, Strides, Variant
from .hopper import ATOM_BYTES, make_take_registers, publish_barriers
from .jobs import get_job, make_bring_queries, make_find_jobs
from .prefill_consumers import make_consume_jobs
from .prefixes import make_prefixes
from .prompts import Prompt, make_prompts, make_ranges
from .ptx import inlined, uint32
from .ring import Ring, RingUse
from .shared import shared_address
from .tile_copies import Source, box_of, make_copy_tile
from .warp import sync_warp
from .wgmma_shapes import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    QUERIES,
    WARPGROUP,
    Rings,
    make_rings,
    shared_of,
    tile_of,
)


def make_produce(head_dim: int, block_size: int, keys_of_job: Any, of_jobs: RingUse, of_tiles: RingUse) -> Any:
    """A function for kernels that fills a ring with the tiles of K or of V of all jobs; called by a warp."""
    tile = tile_of(head_dim)
    look_up, copy_tile = make_copy_tile(head_dim, tile, block_size)
    wait_job, release_job, wait_empty, fill = of_jobs.wait_full, of_jobs.release, of_tiles.wait_empty, of_tiles.fill

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
            home = look_up(first_key, row, job, lane) if tiles > 0 else 0  # else nothing of it need be there
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


def make_prefill(variant: Variant) -> Any:
    """The kernel as a Python function."""
    head_dim, block_size = variant.head_dim, variant.block_size
    tile, shared, uses = tile_of(head_dim), shared_of(head_dim), make_rings(head_dim)
    init_jobs, init_queries, init_k, init_v = (use.init for use in uses)
    give_registers, take_registers = map(make_take_registers, (PRODUCER_REGISTERS, CONSUMER_REGISTERS))
    work = (make_prefixes if variant.cascaded else make_prompts)(variant, QUERIES)
    find_jobs = make_find_jobs(work, make_bring_queries(head_dim, QUERIES, work), uses.jobs, uses.queries)
    step = box_of(tile, block_size) if block_size else 1
    keys_of_block, keys_of_lane = make_ranges(QUERIES, step, variant.causal, variant.windowed)

    @inlined
    def keys_of_job(job: Prompt, window: int) -> tuple[int, int]:
        """The first of the first tile, and how many tiles."""
        first_key, end = keys_of_block(job, window)
        return first_key, (max(end - first_key, 0) + tile - 1) // tile

    produce_k, produce_v = (
        make_produce(head_dim, block_size, keys_of_job, uses.jobs, each) for each in (uses.k, uses.v)
    )
    consume_jobs = make_consume_jobs(variant, uses, keys_of_job, keys_of_lane, work.put)

    @inlined
    def prefill(maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups) -> None:
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
            consume_jobs(rings, at, sizes, strides, scoring, groups, thread, lane)
        else:
            give_registers()
            # One warp copies K, another one V, and one finds out what is to be done.
            if thread < 32:
                produce_k(rings.jobs, rings.k, maps.k_boxes, maps.k_tokens, at, strides, scoring.window, lane)
            elif thread < 64:
                produce_v(rings.jobs, rings.v, maps.v_boxes, maps.v_tokens, at, strides, scoring.window, lane)
            elif thread < 96:
                find_jobs(rings.jobs, rings.queries, at, sizes, strides, groups, scoring.window, lane)

    def kernel(maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        prefill(maps, at, sizes, strides, scoring, NO_GROUPS)

    def cascaded_kernel(
        maps: Maps, at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups
    ) -> None:
        prefill(maps, at, sizes, strides, scoring, groups)

    return cascaded_kernel if variant.cascaded else kernel
