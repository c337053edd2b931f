"""Latents on Hopper: two warpgroups have the same 64 queries, and multiply by `wgmma`, which runs on beside softmax.

    scores    each has half of K's 576 numbers, and leaves what comes of them to the other, which adds it to its own,
    softmax   both come to the same,
    sums      each has half of V's 512 numbers.

As in `prefill_consumers`, sums of a tile are issued behind scores of the next one, which are weighed meanwhile.

A tile lies in shared memory as `wgmma` takes it for both products: in panels of 64 numbers of all keys, swizzled. Nine
panels are four for each warpgroup, and one of which each has half.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from numba import cuda

from . import latent_kernels
from .arguments import LATENT_DIM, LATENT_V_DIM, Scoring, Strides, Variant
from .arithmetic import HALVES
from .hopper import (
    ATOM_BYTES,
    PANEL,
    ROW_BYTES,
    begin_products,
    commit_products,
    make_multiply_registers,
    make_multiply_shared,
    make_operand_at,
    make_wait_products,
    publish_shared,
)
from .latents import Job, Part, make_copies, sums_of
from .ptx import float32, inlined, instruction, int64, uint32
from .shared import commit_copies, load_shared_f32x4, make_wait_older_copies, store_shared_f32x4, wait_copies
from .softmax import Softmax, Visible, begin_softmax, make_mask, raise_maxima, rescale, weigh
from .warp import any_lane

QUERIES = 64
"""Of a block of threads."""
TILE = 32
"""Keys that are worked on at a time."""
SLOTS = 3
"""For tiles: of this one V is multiplied, of the next one K, and one is being copied."""
PANELS = LATENT_DIM // PANEL
QUERY_PANEL, KEY_PANEL = QUERIES * ROW_BYTES, TILE * ROW_BYTES
TILE_BYTES = PANELS * KEY_PANEL


class Shared(NamedTuple):
    """Where things are in shared memory, from a multiple of `ATOM_BYTES` on."""

    queries: int
    tiles: int
    scores: int
    """Of both warpgroups: for each 16 queries 16 bytes a lane for 8 keys."""
    arrived: int
    end: int

    @property
    def nbytes(self) -> int:
        """In all, with what alignment takes."""
        return self.end + ATOM_BYTES


SHARED = Shared(*accumulate((PANELS * QUERY_PANEL, SLOTS * TILE_BYTES, 2 * QUERIES * TILE * 4, 16), initial=0))


anew = instruction("mov.b64 $0, $1;", "l", "l", lambda address: address)
"""An address, from which others are worked out each time: there are no registers to keep those in during a loop."""


def make_products(dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
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


def make_attend(variant: Variant) -> Any:
    """A function for kernels: the attention of a job; called by all threads of a block."""
    pack = HALVES[variant.dtype].pack
    num_sums, num_scores, num_weights = sums_of(QUERIES), TILE // 2, TILE // 4
    copy_queries, look_up, copy_tile, turns = make_copies(variant, QUERIES, TILE, ROW_BYTES)
    begin_scores, leave, take, begin_sums = make_products(variant.dtype)
    mask = make_mask(variant.softcapped, num_scores)
    wait_scores = make_wait_products(num_scores, pending=0)
    wait_scores_only = make_wait_products(num_scores, pending=1)
    wait_sums = make_wait_products(num_sums, pending=0)
    wait_older_copies = make_wait_older_copies(1)

    @inlined
    def weigh_tile(
        scores: Any, exchange: int, softmax: Softmax, key: int, visible: Visible, scoring: Scoring, part: Part,
        lane: int,
    ) -> tuple[Softmax, float, float]:  # fmt: skip
        """Makes a warpgroup's scores weights, once the other's are there."""
        take(scores, exchange, part, lane)
        mask(scores, key, visible, scoring.inner, lane)
        softmax, a0, a1, _ = raise_maxima(scores, num_scores, softmax, scoring.outer)
        return weigh(scores, num_scores, softmax, scoring.outer), a0, a1

    @inlined
    def attend(
        sums: Any, base: int, job: Job, visible: Visible, part: Part, strides: Strides, scoring: Scoring, thread: int,
        lane: int,
    ) -> Softmax:  # fmt: skip
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        homes = cuda.local.array(turns, int64)
        for i in range(num_sums):
            sums[i] = float32(0)
        softmax = begin_softmax()
        key, coming, slot, free = job.key, job.key, int64(0), int64(0)
        queries, tiles, exchange = base + SHARED.queries, base + SHARED.tiles, base + SHARED.scores
        cuda.syncthreads()  # nobody needs what there was before
        if key < job.end:
            copy_queries(queries, job, strides, thread)
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
            softmax, _, _ = weigh_tile(scores, exchange, softmax, key, visible, scoring, part, lane)
        while key < job.end:
            for i in range(num_weights):
                weights[i] = pack(scores[2 * i], scores[2 * i + 1])
            wait_copies()
            publish_shared()
            cuda.syncthreads()  # the next tile is there, and nobody needs the one before this
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
            softmax, a0, a1 = weigh_tile(scores, exchange, softmax, key, visible, scoring, part, lane)
            wait_sums(sums)
            if any_lane(a0 < float32(1) or a1 < float32(1)):  # seldom, after the first tiles
                rescale(sums, num_sums, a0, a1)
            slot = following
        return softmax

    return attend


def make_decode(variant: Variant) -> Any:
    """The kernel as a Python function."""
    return latent_kernels.make_decode(variant, make_attend(variant), SHARED.arrived, ATOM_BYTES)


def make_prefill(variant: Variant) -> Any:
    """The kernel as a Python function."""
    return latent_kernels.make_prefill(variant, make_attend(variant), ATOM_BYTES)
