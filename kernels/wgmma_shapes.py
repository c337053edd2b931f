"""What a block of threads of prefill on Hopper works on at a time, by the width of heads, and where that is."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from .hopper import ATOM_BYTES
from .jobs import JOB_BYTES, JOBS
from .ring import BARRIER_BYTES, Ring, RingUse, make_ring
from .tile_copies import tile_bytes

WARPGROUP = 128
"""Threads of a warpgroup."""
CONSUMERS = 2
"""Warpgroups that multiply; one more copies."""
THREADS = WARPGROUP * (1 + CONSUMERS)
QUERIES = 64 * CONSUMERS
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 72, 216
"""Of a thread; all together no more than they had when they began."""


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 128 if head_dim <= 128 else 112 if head_dim <= 192 else 80


class Slots(NamedTuple):
    """Of each ring."""

    queries: int
    """Jobs whose queries there is room for."""
    k: int
    v: int


def slots_of(head_dim: int) -> Slots:
    """What shared memory has room for. A tile of V is held longer than one of K."""
    if head_dim <= 64:
        return Slots(2, 4, 4)
    return Slots(1, 2, 4 if head_dim <= 128 else 2)


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
    queries = slots.queries * tile_bytes(head_dim, QUERIES)
    barriers = [count * BARRIER_BYTES for count in (*slots, JOBS)]
    return Shared(*accumulate((queries, slots.k * tile, slots.v * tile, JOBS * JOB_BYTES, *barriers), initial=0))


class Rings(NamedTuple):
    """All rings of a block of threads."""

    jobs: Ring
    queries: Ring
    k: Ring
    v: Ring


class RingUses(NamedTuple):
    """Functions for kernels on each of `Rings`."""

    jobs: RingUse
    queries: RingUse
    k: RingUse
    v: RingUse


def make_rings(head_dim: int) -> RingUses:
    """The functions on a block's rings."""
    slots, tile, consumers = slots_of(head_dim), tile_bytes(head_dim, tile_of(head_dim)), 4 * CONSUMERS
    return RingUses(
        make_ring(JOBS, JOB_BYTES, 2 + consumers),  # those who bring K and V read them as well
        make_ring(slots.queries, tile_bytes(head_dim, QUERIES), consumers),
        make_ring(slots.k, tile, consumers),
        make_ring(slots.v, tile, consumers),
    )
