"""A ring of slots in shared memory, which one warp fills with tiles while others use them.

The n-th tile goes to slot `n % num_slots`. A slot has two barriers: *full*, which completes when the bytes of a tile
have come, and *empty*, which completes when all who use the tile have released it. Each completes once a turn of the
ring, so whoever waits says which completion is meant by its parity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .hopper import arrive, expect_bytes, init_barrier, wait_barrier
from .ptx import inlined
from .warp import sync_warp

BARRIER_BYTES = 16
"""Of the two barriers of a slot."""


class Ring(NamedTuple):
    """Addresses in shared memory."""

    slots: int
    """A multiple of 1024 bytes."""
    barriers: int
    """Full ones of all slots, then empty ones."""


class Slot(NamedTuple):
    """What a tile is copied to: where it goes, and the barrier that waits for its bytes."""

    address: int
    full: int


class RingUse(NamedTuple):
    """Functions for kernels, on a `Ring`. All but the first take a tile's number, and are called by whole warps."""

    init: Any
    """Called by one thread."""
    wait_empty: Any
    """For who fills it. Then: `fill` and copies, or stores and `filled`."""
    fill: Any
    filled: Any
    wait_full: Any
    """For who uses it."""
    release: Any


def make_ring(num_slots: int, slot_bytes: int, users: int) -> RingUse:
    """The functions for rings of a size.

    Args:
        num_slots: a power of two: what would be division is a mask and a shift.
        slot_bytes: of a tile.
        users: warps that release each tile.
    """
    assert num_slots.bit_count() == 1
    mask, shift = num_slots - 1, num_slots.bit_length() - 1

    @inlined
    def full(ring: Ring, n: int) -> int:
        return ring.barriers + (n & mask) * 8

    @inlined
    def empty(ring: Ring, n: int) -> int:
        return ring.barriers + (num_slots + (n & mask)) * 8

    @inlined
    def init(ring: Ring) -> None:
        for slot in range(num_slots):
            init_barrier(full(ring, slot), 1)
            init_barrier(empty(ring, slot), users)

    @inlined
    def wait_empty(ring: Ring, n: int) -> int:
        """Waits until the tile that was in this one's slot is released, in the first turn there was none: where this
        one goes."""
        wait_barrier(empty(ring, n), (n >> shift) + 1 & 1)
        return ring.slots + (n & mask) * slot_bytes

    @inlined
    def fill(ring: Ring, n: int, lane: int) -> Slot:
        """Has the full barrier wait for a tile, whose copies may begin then."""
        if lane == 0:
            expect_bytes(full(ring, n), slot_bytes)
        sync_warp()
        return Slot(ring.slots + (n & mask) * slot_bytes, full(ring, n))

    @inlined
    def filled(ring: Ring, n: int, lane: int) -> None:
        """Says that a tile is there, which this warp's lanes have stored."""
        sync_warp()
        if lane == 0:
            arrive(full(ring, n))

    @inlined
    def wait_full(ring: Ring, n: int) -> int:
        """Waits until a tile is there: its address."""
        wait_barrier(full(ring, n), n >> shift & 1)
        return ring.slots + (n & mask) * slot_bytes

    @inlined
    def release(ring: Ring, n: int, lane: int) -> None:
        """Says that this warp needs a tile no more: all of its lanes have read it, or their products have."""
        if lane == 0:
            arrive(empty(ring, n))

    return RingUse(init, wait_empty, fill, filled, wait_full, release)
