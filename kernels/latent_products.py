"""Products over latents, by `mma` (GPUs since Ampere with much shared memory) and by `wgmma` (Hopper).

mma: of a block's 8 warps 8, 4 or 2 have the same 16 of its 16, 32 or 64 queries:

    scores    a warp has half of a tile's keys, and a quarter, a half or all of their 576 numbers,
    softmax   each warp reads its queries' scores of all keys from shared memory and adds them up,
    sums      a warp has an eighth, a quarter or half of V's 512 numbers.

wgmma: two warpgroups have the same 64 queries; products run on beside softmax:

    scores    each has half of K's 576 numbers, leaves its scores to the other, and adds the other's to its own,
    softmax   both come to the same,
    sums      each has half of V's 512 numbers.

As in `prefill_wgmma`, sums of a tile are issued behind scores of the next. A tile is nine swizzled panels of 64
numbers: four for each warpgroup, and one of which each has half.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from numba import cuda

from .arguments import LATENT_DIM, LATENT_V_DIM, Given, Variant
from .compiler import float32, inlined, instruction, int64, uint32
from .latents import WARPS, Job, Part, dims_of, latent_queries, make_copies, sums_of
from .memory import HALVES, commit_copies, load_shared_f32x4, make_wait_older_copies, store_shared_f32x4, wait_copies
from .softmax import Softmax, Visible, begin_softmax, make_add, make_add_values, pitch_of, rescale, weigh_tile
from .warp import (
    ATOM_BYTES, PANEL, ROW_BYTES, any_lane, begin_products, commit_products, load_matrices, make_multiply_registers,
    make_multiply_shared, make_operand_at, make_wait_products, publish_shared,
)  # fmt: skip

TILE = 32  # keys that are worked on at a time
PITCH = pitch_of(LATENT_DIM)  # bytes from one query, or key, in shared memory to the next


def parts_of(queries: int) -> int:
    """Parts of K's numbers that the warps with the same keys and queries have."""
    return WARPS // 2 // (queries // 16)


def mma_blocks_per_sm(queries: int, shared_bytes: int) -> int:
    """Two with few queries a block, whose sums leave registers for it: one copies while the other waits for its warps.
    `shared_bytes` is what a block may have."""
    return 2 if queries == 16 and mma_shared_of(queries, 2).nbytes <= shared_bytes // 2 - 1024 else 1


def slots_for(queries: int, shared_bytes: int) -> int:
    """Tiles that shared memory has room for; less than two are too few."""
    left = shared_bytes // mma_blocks_per_sm(queries, shared_bytes) - 1024 - mma_shared_of(queries, 0).nbytes
    return left // (TILE * PITCH)


class Shared(NamedTuple):
    """Where things are in shared memory; on Hopper from a multiple of `ATOM_BYTES` on."""

    queries: int
    tiles: int
    scores: int  # of all parts of K's numbers, for each 16 queries: 16 bytes a lane for 8 keys
    arrived: int  # how many parts of a bundle there were before this block's: one float
    nbytes: int  # in all, with what alignment takes


def mma_shared_of(queries: int, slots: int) -> Shared:
    """The shared memory of a block of threads."""
    scores, arrived, tiles, nbytes = accumulate((queries * PITCH, 64 * TILE * 4, 16, slots * TILE * PITCH))
    return Shared(0, tiles, scores, arrived, nbytes)


def make_mma_score(dtype: torch.dtype, queries: int, held: bool) -> tuple[Any, Any, int]:
    """Functions for kernels: hold the numbers of a warp's queries that it multiplies, if it does that; make scores of
    them and its keys. And the words that are held."""
    add, parts = make_add(dtype), parts_of(queries)
    steps = LATENT_DIM // 16 // parts

    @inlined
    def place_of(part: Part, lane: int) -> int:
        """Where a lane's row of the first matrices of a warp's queries is."""
        return (part.strip * 16 + (lane & 15)) * PITCH + part.numbers * (steps * 32) + (lane >> 4) * 16

    @inlined
    def hold(fragments: Any, queries: int, part: Part, lane: int) -> None:
        if held:
            at = queries + place_of(part, lane)
            for step in range(steps):
                a = load_matrices(at + step * 32)
                for i in range(4):
                    fragments[4 * step + i] = a[i]

    @inlined
    def score(scores: Any, fragments: Any, queries: int, tile: int, part: Part, lane: int) -> None:
        """Of even and of odd steps by themselves: products of the same sums wait for each other."""
        for i in range(16):
            scores[i] = float32(0)
        at = queries + place_of(part, lane)
        token = part.half * 16 + (lane & 7) + (lane >> 4) * 8
        tile += token * PITCH + part.numbers * (steps * 32) + (lane >> 3 & 1) * 16
        if held:
            for step in range(steps):
                f = 4 * step
                a = (fragments[f], fragments[f + 1], fragments[f + 2], fragments[f + 3])
                add(scores, step % 2 * 8, a, load_matrices(tile + step * 32))
        else:
            for two in range(steps // 2):
                for odd in range(2):
                    offset = (2 * two + odd) * 32
                    add(scores, odd * 8, load_matrices(at + offset), load_matrices(tile + offset))
            if steps % 2:
                offset = (steps - 1) * 32
                add(scores, 0, load_matrices(at + offset), load_matrices(tile + offset))

    return hold, score, 4 * steps if held else 1


def make_mma_exchange(queries: int) -> tuple[Any, Any]:
    """Functions for kernels: leave the scores of a warp's numbers and keys for others; take those of all numbers and
    keys."""
    strips, parts = queries // 16, parts_of(queries)

    @inlined
    def leave(scores: Any, to: int, part: Part, lane: int) -> None:
        to += ((part.numbers * strips + part.strip) * 4 + part.half * 2) * 512 + lane * 16
        for eight in range(2):
            s = 4 * eight
            store_shared_f32x4(
                to + eight * 512, scores[s] + scores[8 + s], scores[s + 1] + scores[9 + s],
                scores[s + 2] + scores[10 + s], scores[s + 3] + scores[11 + s],
            )  # fmt: skip

    @inlined
    def take(scores: Any, at: int, part: Part, lane: int) -> None:
        at += part.strip * 2048 + lane * 16
        for j in range(4):
            s = load_shared_f32x4(at + j * 512)
            for i in range(4):
                scores[4 * j + i] = s[i]
        for numbers in range(1, parts):
            for j in range(4):
                s = load_shared_f32x4(at + numbers * (strips * 2048) + j * 512)
                for i in range(4):
                    scores[4 * j + i] += s[i]

    return leave, take


def make_mma_attend(variant: Variant, queries: int, slots: int) -> Any:
    """A function for kernels: the attention of a job; called by all threads of a block."""
    shared, num_sums = mma_shared_of(queries, slots), sums_of(queries)
    num_scores, tile_bytes = TILE // 2, TILE * PITCH
    copy_queries, look_up, copy_tile, turns = make_copies(variant, queries, TILE, PITCH)
    # Sums of 16 queries leave room for queries in registers, if there is one block on a multiprocessor.
    hold, score, num_fragments = make_mma_score(variant.dtype, queries, queries == 16 and slots > 2)
    leave, take = make_mma_exchange(queries)
    add_values = make_add_values(variant.dtype, dims_of(queries))
    wait_older_copies = make_wait_older_copies(slots - 2)

    @inlined
    def attend(
        sums: Any, base: int, job: Job, visible: Visible, part: Part, given: Given, thread: int, lane: int
    ) -> Softmax:
        scores = cuda.local.array(num_scores, float32)
        fragments = cuda.local.array(num_fragments, uint32)
        homes = cuda.local.array(turns, int64)
        softmax = begin_softmax(sums, num_sums)
        key, coming, slot, free = job.key, job.key, int64(0), int64(0)
        cuda.syncthreads()  # no warp needs the shared memory of the job before
        if key < job.end:
            copy_queries(base + shared.queries, job, given.sizes, thread)
        for _ in range(slots - 1):
            if coming < job.end:
                look_up(homes, coming, job, thread)
                copy_tile(base + shared.tiles + free, homes, coming, job, thread)
                free += tile_bytes
                coming += TILE
            commit_copies()
        if key < job.end:
            look_up(homes, coming, job, thread)
            wait_older_copies()
            cuda.syncthreads()
            hold(fragments, base + shared.queries, part, lane)
        while key < job.end:
            wait_older_copies()
            cuda.syncthreads()  # the tile is there, and no warp needs the one before
            if coming < job.end:
                copy_tile(base + shared.tiles + free, homes, coming, job, thread)
                free = free + tile_bytes if free < (slots - 1) * tile_bytes else int64(0)
                coming += TILE
                look_up(homes, coming, job, thread)  # before there is room for them
            commit_copies()
            score(scores, fragments, base + shared.queries, base + shared.tiles + slot, part, lane)
            leave(scores, base + shared.scores, part, lane)
            cuda.syncthreads()  # scores are there
            take(scores, base + shared.scores, part, lane)
            softmax, a0, a1, _ = weigh_tile(scores, num_scores, key, visible, softmax, given.options, lane)
            if any_lane(a0 < float32(1) or a1 < float32(1)):  # seldom, after the first tiles
                rescale(sums, num_sums, a0, a1)
            v = base + shared.tiles + slot + part.dims * 2 + (lane & 15) * PITCH + (lane >> 4) * 16
            for j in range(TILE // 16):
                add_values(sums, scores, 8 * j, v + j * (16 * PITCH))
            slot = slot + tile_bytes if slot < (slots - 1) * tile_bytes else int64(0)
            key += TILE
        return softmax

    return attend


WGMMA_QUERIES = 64  # of a block of threads
SLOTS = 3  # for tiles: of this one V is multiplied, of the next one K, and one is being copied
PANELS = LATENT_DIM // PANEL
QUERY_PANEL, KEY_PANEL = WGMMA_QUERIES * ROW_BYTES, TILE * ROW_BYTES
TILE_BYTES = PANELS * KEY_PANEL


_SIZES = PANELS * QUERY_PANEL, SLOTS * TILE_BYTES, 2 * WGMMA_QUERIES * TILE * 4, 16 + ATOM_BYTES
WGMMA_SHARED = Shared(*accumulate(_SIZES, initial=0))

anew = instruction("mov.b64 $0, $1;", "l", "l", lambda address: address)
"""An address, from which others are worked out each time: there are no registers to keep those in during a loop."""


def make_wgmma_products(dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """Functions for kernels, called by a warpgroup: begin with scores of its half of K; leave them for the other; add
    the other's; begin with `sums += P V`."""
    multiply_first = make_multiply_shared(dtype, TILE, accumulate=False)
    multiply_next = make_multiply_shared(dtype, TILE, accumulate=True)
    multiply_values = make_multiply_registers(dtype, LATENT_V_DIM // 2, TILE)
    columns = TILE // 8

    rows_at, columns_at = make_operand_at(16), make_operand_at(KEY_PANEL)
    query_panel, key_panel = QUERY_PANEL // 16, KEY_PANEL // 16

    @inlined
    def multiply_steps(scores: Any, q: int, k: int, first: int, steps: int) -> None:
        for step in range(steps):
            multiply_next(scores, q + (first + step) * 2, k + (first + step) * 2)

    @inlined
    def begin_scores(scores: Any, queries: int, tile: int, part: Part) -> None:
        """Loops are short, so that they are unrolled: a branch among products makes the assembler wait for each."""
        all_queries, all_keys = rows_at(anew(queries)), rows_at(tile)
        q, k = all_queries + part.half * (5 * query_panel), all_keys + part.half * (5 * key_panel)
        begin_products()
        multiply_first(scores, q, k)
        multiply_steps(scores, q, k, 1, 3)
        multiply_steps(scores, q + query_panel, k + key_panel, 0, 4)
        multiply_steps(scores, q + 2 * query_panel, k + 2 * key_panel, 0, 4)
        multiply_steps(scores, q + 3 * query_panel, k + 3 * key_panel, 0, 4)
        half = part.half * 4
        multiply_steps(scores, all_queries + 4 * query_panel + half, all_keys + 4 * key_panel + half, 0, 2)
        commit_products()

    @inlined
    def leave(scores: Any, to: int, part: Part, lane: int) -> None:
        to += (part.half * 4 + part.strip) * (columns * 512) + lane * 16
        for j in range(columns):
            s = 4 * j
            store_shared_f32x4(to + j * 512, scores[s], scores[s + 1], scores[s + 2], scores[s + 3])

    @inlined
    def take(scores: Any, at: int, part: Part, lane: int) -> None:
        at += ((1 - part.half) * 4 + part.strip) * (columns * 512) + lane * 16
        for j in range(columns):
            s = load_shared_f32x4(at + j * 512)
            for i in range(4):
                scores[4 * j + i] += s[i]

    @inlined
    def begin_sums(sums: Any, weights: Any, tile: int, part: Part) -> None:
        v = columns_at(tile) + part.half * (4 * key_panel)
        begin_products()
        for j in range(TILE // 16):
            w = 4 * j
            multiply_values(sums, weights[w], weights[w + 1], weights[w + 2], weights[w + 3], v + j * ROW_BYTES)
        commit_products()

    return begin_scores, leave, take, begin_sums


def make_wgmma_attend(variant: Variant) -> Any:
    """A function for kernels: the attention of a job; called by all threads of a block."""
    pack = HALVES[variant.dtype].pack
    num_sums, num_scores, num_weights = sums_of(WGMMA_QUERIES), TILE // 2, TILE // 4
    copy_queries, look_up, copy_tile, turns = make_copies(variant, WGMMA_QUERIES, TILE, ROW_BYTES)
    begin_scores, leave, take, begin_sums = make_wgmma_products(variant.dtype)
    wait_scores = make_wait_products(num_scores, pending=0)
    wait_scores_only = make_wait_products(num_scores, pending=1)
    wait_sums = make_wait_products(num_sums, pending=0)
    wait_older_copies = make_wait_older_copies(1)

    @inlined
    def attend(
        sums: Any, base: int, job: Job, visible: Visible, part: Part, given: Given, thread: int, lane: int
    ) -> Softmax:
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        homes = cuda.local.array(turns, int64)
        softmax = begin_softmax(sums, num_sums)
        key, coming, slot, free = job.key, job.key, int64(0), int64(0)
        queries, tiles, exchange = base + WGMMA_SHARED.queries, base + WGMMA_SHARED.tiles, base + WGMMA_SHARED.scores
        cuda.syncthreads()  # no warp needs the shared memory of the job before
        if key < job.end:
            copy_queries(queries, job, given.sizes, thread)
        for _ in range(2):
            if coming < job.end:
                look_up(homes, coming, job, thread)
                copy_tile(tiles + free, homes, coming, job, thread)
                free += TILE_BYTES
                coming += TILE
            commit_copies()
        if key < job.end:
            look_up(homes, coming, job, thread)
            wait_older_copies()
            publish_shared()
            cuda.syncthreads()  # queries and the first tile are there
            begin_scores(scores, queries, tiles, part)
            wait_scores(scores)
            leave(scores, exchange, part, lane)
            cuda.syncthreads()
            take(scores, exchange, part, lane)
            softmax, _, _, _ = weigh_tile(scores, num_scores, key, visible, softmax, given.options, lane)
        while key < job.end:
            for i in range(num_weights):
                weights[i] = pack(scores[2 * i], scores[2 * i + 1])
            wait_copies()
            publish_shared()
            cuda.syncthreads()  # the next tile is there, and no warp needs the one before this
            following = slot + TILE_BYTES if slot < (SLOTS - 1) * TILE_BYTES else int64(0)
            begin_scores(scores, queries, tiles + following, part)  # behind the last tile nothing of them is visible
            begin_sums(sums, weights, tiles + slot, part)
            if coming < job.end:
                copy_tile(tiles + free, homes, coming, job, thread)
                free = free + TILE_BYTES if free < (SLOTS - 1) * TILE_BYTES else int64(0)
                coming += TILE
                look_up(homes, coming, job, thread)  # before there is room for them
            wait_scores_only(scores)  # sums are still being added to
            leave(scores, exchange, part, lane)
            cuda.syncthreads()  # scores are there
            key += TILE
            take(scores, exchange, part, lane)
            softmax, a0, a1, _ = weigh_tile(scores, num_scores, key, visible, softmax, given.options, lane)
            wait_sums(sums)
            if any_lane(a0 < float32(1) or a1 < float32(1)):  # seldom, after the first tiles
                rescale(sums, num_sums, a0, a1)
            slot = following
        return softmax

    return attend


def make_attend(variant: Variant, slots: int) -> tuple[Any, int, int]:
    """A function for kernels, called by all threads of a block: the attention of a job. `slots` are the tiles that have
    room; 0: Hopper's kernel. Also where one float is for `settle`, and the alignment of shared memory."""
    if not slots:
        return make_wgmma_attend(variant), WGMMA_SHARED.arrived, ATOM_BYTES
    queries = latent_queries(variant)
    return make_mma_attend(variant, queries, slots), mma_shared_of(queries, slots).arrived, 16
