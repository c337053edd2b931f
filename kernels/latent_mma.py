"""Latents on the tensor cores of any GPU since Ampere, with much shared memory.

Of a block's 8 warps 8, 4 or 2 have the same 16 of its 16, 32 or 64 queries:

    scores    a warp has half of a tile's keys, and a quarter, a half or all of their 576 numbers,
    softmax   each reads its queries' scores of all keys from shared memory and adds them up: all come to the same,
    sums      a warp has an eighth, a quarter or half of V's 512 numbers.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from numba import cuda

from . import latent_kernels
from .arguments import LATENT_DIM, Scoring, Strides, Variant
from .latents import WARPS, Job, Part, dims_of, make_copies, queries_of, sums_of
from .mma_products import make_add, make_add_values, pitch_of
from .ptx import float32, inlined, int64, uint32
from .shared import commit_copies, load_shared_f32x4, make_wait_older_copies, store_shared_f32x4
from .softmax import Softmax, Visible, begin_softmax, make_mask, raise_maxima, rescale, weigh
from .warp import any_lane, load_matrices

TILE = 32
"""Keys that are worked on at a time."""
PITCH = pitch_of(LATENT_DIM)
"""Bytes from one query, or key, in shared memory to the next."""


def parts_of(queries: int) -> int:
    """Parts of K's numbers that the warps with the same keys and queries have."""
    return WARPS // 2 // (queries // 16)


def blocks_per_sm(queries: int, shared_bytes: int) -> int:
    """Two with few queries, whose sums leave registers for it: one copies while the other waits for its warps.

    Args:
        queries: of a block of threads.
        shared_bytes: what a block of threads may have.
    """
    return 2 if queries == 16 and shared_of(queries, 2).nbytes <= shared_bytes // 2 - 1024 else 1


def slots_for(queries: int, shared_bytes: int) -> int:
    """Tiles that shared memory has room for; less than two are too few."""
    left = shared_bytes // blocks_per_sm(queries, shared_bytes) - 1024 - shared_of(queries, 0).nbytes
    return left // (TILE * PITCH)


class Shared(NamedTuple):
    """Where things are in shared memory."""

    queries: int
    scores: int
    """Of all parts of numbers, for each 16 queries: 16 bytes a lane for 8 keys."""
    arrived: int
    """How many parts of a bundle there were before this block's: one float."""
    tiles: int
    nbytes: int
    """In all."""


def shared_of(queries: int, slots: int) -> Shared:
    """The shared memory of a block of threads."""
    return Shared(*accumulate((queries * PITCH, 64 * TILE * 4, 16, slots * TILE * PITCH), initial=0))


def make_score(dtype: torch.dtype, queries: int, held: bool) -> tuple[Any, Any, int]:
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


def make_exchange(queries: int) -> tuple[Any, Any]:
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


def make_attend(variant: Variant, queries: int, slots: int) -> Any:
    """A function for kernels: the attention of a job; called by all threads of a block."""
    shared, num_sums = shared_of(queries, slots), sums_of(queries)
    num_scores, tile_bytes = TILE // 2, TILE * PITCH
    copy_queries, look_up, copy_tile, turns = make_copies(variant, queries, TILE, PITCH)
    # Sums of 16 queries leave room for queries in registers, if there is one block on a multiprocessor.
    hold, score, num_fragments = make_score(variant.dtype, queries, queries == 16 and slots > 2)
    leave, take = make_exchange(queries)
    add_values = make_add_values(variant.dtype, dims_of(queries))
    mask = make_mask(variant.softcapped, num_scores)
    wait_older_copies = make_wait_older_copies(slots - 2)

    @inlined
    def attend(
        sums: Any, base: int, job: Job, visible: Visible, part: Part, strides: Strides, scoring: Scoring, thread: int,
        lane: int,
    ) -> Softmax:  # fmt: skip
        scores = cuda.local.array(num_scores, float32)
        fragments = cuda.local.array(num_fragments, uint32)
        homes = cuda.local.array(turns, int64)
        for i in range(num_sums):
            sums[i] = float32(0)
        softmax = begin_softmax()
        key, coming, slot, free = job.key, job.key, int64(0), int64(0)
        cuda.syncthreads()  # nobody needs what there was before
        if key < job.end:
            copy_queries(base + shared.queries, job, strides, thread)
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
            cuda.syncthreads()  # the tile is there, and nobody needs the one before
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
            mask(scores, key, visible, scoring.inner, lane)
            softmax, a0, a1, _ = raise_maxima(scores, num_scores, softmax, scoring.outer)
            softmax = weigh(scores, num_scores, softmax, scoring.outer)
            if any_lane(a0 < float32(1) or a1 < float32(1)):  # seldom, after the first tiles
                rescale(sums, num_sums, a0, a1)
            v = base + shared.tiles + slot + part.dims * 2 + (lane & 15) * PITCH + (lane >> 4) * 16
            for j in range(TILE // 16):
                add_values(sums, scores, 8 * j, v + j * (16 * PITCH))
            slot = slot + tile_bytes if slot < (slots - 1) * tile_bytes else int64(0)
            key += TILE
        return softmax

    return attend


def make_decode(variant: Variant, slots: int) -> Any:
    """The kernel as a Python function."""
    queries = queries_of(variant)
    return latent_kernels.make_decode(
        variant, make_attend(variant, queries, slots), shared_of(queries, slots).arrived, 16
    )


def make_prefill(variant: Variant, slots: int) -> Any:
    """The kernel as a Python function."""
    return latent_kernels.make_prefill(variant, make_attend(variant, queries_of(variant), slots), 16)
