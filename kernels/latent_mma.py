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

from . import latents
from .arguments import LATENT_DIM, LATENT_V_DIM, Variant
from .arithmetic import HALVES
from .latents import WARPS, Part, Products, queries_of
from .prefill_mma import pitch_of
from .ptx import float32, inlined
from .shared import load_shared_f32x4, store_shared_f32x4
from .warp import load_matrices, load_matrices_transposed
from .warp import multiply as multiplications

TILE = 32
"""Keys that are worked on at a time."""
PITCH = pitch_of(LATENT_DIM)
"""Bytes from one query, or key, in shared memory to the next."""


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


def make_products(dtype: torch.dtype, queries: int, slots: int) -> Products:
    """The products, which are those of `prefill_mma.make_products`. A warp with few sums holds its queries."""
    multiply, pack = multiplications[dtype], HALVES[dtype].pack
    shared, groups = shared_of(queries, slots), queries // 16
    parts = 4 // groups
    steps, dims, held = LATENT_DIM // 16 // parts, LATENT_V_DIM * groups // WARPS, groups == 1 and slots > 2

    @inlined
    def add(sums: Any, at: int, a: Any, b0: int, b1: int) -> None:
        d = multiply(sums[at], sums[at + 1], sums[at + 2], sums[at + 3], a[0], a[1], a[2], a[3], b0, b1)
        for i in range(4):
            sums[at + i] = d[i]

    @inlined
    def add_step(scores: Any, at: int, a: Any, tile: int) -> None:
        b = load_matrices(tile)
        for eight in range(2):
            add(scores, at + eight * 4, a, b[2 * eight], b[2 * eight + 1])

    @inlined
    def place_of(part: Part, lane: int) -> int:
        """Where a lane's row of the first matrices of a warp's queries is."""
        return (part.group * 16 + (lane & 15)) * PITCH + part.numbers * (steps * 32) + (lane >> 4) * 16

    @inlined
    def hold(fragments: Any, at: int, part: Part, lane: int) -> None:
        if held:
            at += place_of(part, lane)
            for step in range(steps):
                a = load_matrices(at + step * 32)
                for i in range(4):
                    fragments[4 * step + i] = a[i]

    @inlined
    def score(scores: Any, fragments: Any, base: int, tile: int, part: Part, lane: int) -> None:
        """Of even and of odd steps by themselves: products of the same sums wait for each other."""
        for i in range(16):
            scores[i] = float32(0)
        at = base + shared.queries + place_of(part, lane)
        token = part.half * 16 + (lane & 7) + (lane >> 4) * 8
        tile += token * PITCH + part.numbers * (steps * 32) + (lane >> 3 & 1) * 16
        if held:
            for step in range(steps):
                f = 4 * step
                a = (fragments[f], fragments[f + 1], fragments[f + 2], fragments[f + 3])
                add_step(scores, step % 2 * 8, a, tile + step * 32)
        else:
            for two in range(steps // 2):
                for odd in range(2):
                    offset = (2 * two + odd) * 32
                    add_step(scores, odd * 8, load_matrices(at + offset), tile + offset)
            if steps % 2:
                offset = (steps - 1) * 32
                add_step(scores, 0, load_matrices(at + offset), tile + offset)
        to = base + shared.scores + ((part.numbers * groups + part.group) * 4 + part.half * 2) * 512 + lane * 16
        for eight in range(2):
            s = 4 * eight
            store_shared_f32x4(
                to + eight * 512, scores[s] + scores[8 + s], scores[s + 1] + scores[9 + s],
                scores[s + 2] + scores[10 + s], scores[s + 3] + scores[11 + s],
            )  # fmt: skip

    @inlined
    def take(scores: Any, base: int, part: Part, lane: int) -> None:
        """Scores of all keys, added up."""
        at = base + shared.scores + part.group * 2048 + lane * 16
        for j in range(4):
            s = load_shared_f32x4(at + j * 512)
            for i in range(4):
                scores[4 * j + i] = s[i]
        for numbers in range(1, parts):
            for j in range(4):
                s = load_shared_f32x4(at + numbers * (groups * 2048) + j * 512)
                for i in range(4):
                    scores[4 * j + i] += s[i]

    @inlined
    def add_values(sums: Any, weights: Any, tile: int, part: Part, lane: int) -> None:
        tile += (lane & 15) * PITCH + part.dims * 2 + (lane >> 4) * 16
        for j in range(TILE // 16):
            p0 = pack(weights[8 * j], weights[8 * j + 1])
            p1 = pack(weights[8 * j + 2], weights[8 * j + 3])
            p2 = pack(weights[8 * j + 4], weights[8 * j + 5])
            p3 = pack(weights[8 * j + 6], weights[8 * j + 7])
            for i in range(dims // 16):
                b = load_matrices_transposed(tile + j * (16 * PITCH) + i * 32)
                for eight in range(2):
                    add(sums, (2 * i + eight) * 4, (p0, p1, p2, p3), b[2 * eight], b[2 * eight + 1])

    @inlined
    def publish() -> None:
        """A barrier is enough."""

    @inlined
    def begin_score(scores: Any, base: int, tile: int, part: Part) -> None:
        """They do not run on."""

    num_fragments = 4 * steps if held else 1
    return Products(
        16, shared.queries, shared.arrived, shared.tiles, slots, TILE, PITCH, False, num_fragments, hold, publish,
        begin_score, score, take, add_values,
    )  # fmt: skip


def make_decode(variant: Variant, slots: int) -> Any:
    """The kernel as a Python function."""
    return latents.make_decode(variant, make_products(variant.dtype, queries_of(variant), slots))


def make_prefill(variant: Variant, slots: int) -> Any:
    """The kernel as a Python function."""
    return latents.make_prefill(variant, make_products(variant.dtype, queries_of(variant), slots))
