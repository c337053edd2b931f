"""What a block of threads of prefill on Hopper works on at a time, by the width of heads, and where that is."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from .hopper import ATOM_BYTES
from .jobs import JOB_BYTES, JOBS
from .ring import BARRIER_BYTES
from .tile_copies import tile_bytes

WARPGROUP = 128
"""Threads of a warpgroup. The first of a block copies, the others are consumers of 64 queries each."""


def consumers_of(head_dim: int) -> int:
    """Warpgroups that multiply: with narrow heads the products of two leave no time for a softmax."""
    return 3 if head_dim <= 64 else 2


def registers_of(head_dim: int) -> tuple[int, int]:
    """Of a thread that copies, and of one that multiplies; together no more than all had when they began."""
    return (32, 160) if consumers_of(head_dim) == 3 else (72, 216)


def threads_of(head_dim: int) -> int:
    """Threads of a block."""
    return WARPGROUP * (1 + consumers_of(head_dim))


def queries_of(head_dim: int) -> int:
    """Queries of a block."""
    return 64 * consumers_of(head_dim)


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 128 if head_dim <= 128 else 112 if head_dim <= 192 else 80


SLOTS = 2
"""Of the rings of K and of V."""


def query_slots_of(head_dim: int) -> int:
    """Jobs whose queries there is room for."""
    return 2 if head_dim <= 128 else 1


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
    query_slots, slots = query_slots_of(head_dim), SLOTS * tile_bytes(head_dim, tile_of(head_dim))
    queries = query_slots * tile_bytes(head_dim, queries_of(head_dim))
    barriers = [count * BARRIER_BYTES for count in (query_slots, SLOTS, SLOTS, JOBS)]
    return Shared(*accumulate((queries, slots, slots, JOBS * JOB_BYTES, *barriers), initial=0))
