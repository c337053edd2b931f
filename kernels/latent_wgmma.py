"""Latents on Hopper: two warpgroups have the same 64 queries, and multiply by `wgmma`.

    scores    each has half of K's 576 numbers, and leaves what comes of them to the other, which adds it to its own,
    softmax   both come to the same,
    sums      each has half of V's 512 numbers.

A tile lies in shared memory as `wgmma` takes it for both products: in panels of 64 numbers of all keys, swizzled. Nine
panels are four for each warpgroup, and one of which each has half.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch

from . import latents
from .arguments import LATENT_DIM, LATENT_V_DIM, Variant
from .arithmetic import HALVES
from .hopper import (
    ATOM_BYTES,
    PANEL,
    ROW_BYTES,
    begin_products,
    commit_products,
    make_multiply_registers,
    make_multiply_shared,
    make_wait_products,
    publish_shared,
)
from .latents import Part, Products
from .ptx import inlined
from .shared import load_shared_f32x4, store_shared_f32x4

QUERIES = 64
"""Of a block of threads."""
TILE = 48
"""Keys that are worked on at a time: two tiles and the queries fill shared memory."""
SLOTS = 2
QUERY_PANEL, KEY_PANEL = QUERIES * ROW_BYTES, TILE * ROW_BYTES


class Shared(NamedTuple):
    """Where things are in shared memory, from a multiple of `ATOM_BYTES` on."""

    queries: int
    tiles: int
    scores: int
    """Of each warpgroup: 16 bytes a lane for 8 keys."""
    arrived: int
    end: int

    @property
    def nbytes(self) -> int:
        """In all, with what alignment takes."""
        return self.end + ATOM_BYTES


PANELS = LATENT_DIM // PANEL
SHARED = Shared(*accumulate((PANELS * QUERY_PANEL, SLOTS * PANELS * KEY_PANEL, 2 * QUERIES * TILE * 4, 16), initial=0))


def make_products(dtype: torch.dtype) -> Products:
    """The products of a warpgroup."""
    pack, dims = HALVES[dtype].pack, LATENT_V_DIM // 2
    multiply_first = make_multiply_shared(dtype, TILE, accumulate=False)
    multiply_next = make_multiply_shared(dtype, TILE, accumulate=True)
    multiply_values = make_multiply_registers(dtype, dims, TILE)
    wait_scores = make_wait_products(TILE // 2, pending=0)
    wait_sums = make_wait_products(latents.sums_of(QUERIES), pending=0)
    columns = TILE // 8

    @inlined
    def hold(fragments: Any, at: int, part: Part, lane: int) -> None:
        """There is no room for them in registers."""

    @inlined
    def begin_score(scores: Any, base: int, tile: int, part: Part) -> None:
        queries = base + SHARED.queries
        begin_products()
        multiply_first(scores, queries + part.half * (5 * QUERY_PANEL), tile + part.half * (5 * KEY_PANEL))
        for step in range(1, 16):
            panel, inside = part.half * 5 + step // 4, step % 4 * 32
            multiply_next(scores, queries + panel * QUERY_PANEL + inside, tile + panel * KEY_PANEL + inside)
        for step in range(2):
            inside = part.half * 64 + step * 32
            multiply_next(scores, queries + 4 * QUERY_PANEL + inside, tile + 4 * KEY_PANEL + inside)
        commit_products()

    @inlined
    def score(scores: Any, fragments: Any, base: int, tile: int, part: Part, lane: int) -> None:
        wait_scores(scores)
        to = base + SHARED.scores + (part.half * 4 + part.group) * (columns * 512) + lane * 16
        for j in range(columns):
            store_shared_f32x4(
                to + j * 512, scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]
            )  # fmt: skip

    @inlined
    def take(scores: Any, base: int, part: Part, lane: int) -> None:
        at = base + SHARED.scores + ((1 - part.half) * 4 + part.group) * (columns * 512) + lane * 16
        for j in range(columns):
            s = load_shared_f32x4(at + j * 512)
            for i in range(4):
                scores[4 * j + i] += s[i]

    @inlined
    def add_values(sums: Any, weights: Any, tile: int, part: Part, lane: int) -> None:
        begin_products()
        for j in range(TILE // 16):
            multiply_values(
                sums,
                pack(weights[8 * j], weights[8 * j + 1]), pack(weights[8 * j + 2], weights[8 * j + 3]),
                pack(weights[8 * j + 4], weights[8 * j + 5]), pack(weights[8 * j + 6], weights[8 * j + 7]),
                tile + part.half * (4 * KEY_PANEL) + j * (16 * ROW_BYTES),
            )  # fmt: skip
        commit_products()
        wait_sums(sums)

    return Products(
        ATOM_BYTES, SHARED.queries, SHARED.arrived, SHARED.tiles, SLOTS, TILE, ROW_BYTES, True, 1, hold, publish_shared,
        begin_score, score, take, add_values,
    )  # fmt: skip


def make_decode(variant: Variant) -> Any:
    """The kernel as a Python function."""
    return latents.make_decode(variant, make_products(variant.dtype))


def make_prefill(variant: Variant) -> Any:
    """The kernel as a Python function."""
    return latents.make_prefill(variant, make_products(variant.dtype))
