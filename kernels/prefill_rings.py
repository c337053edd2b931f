"""What moves through a block of prefill on Hopper: rings of slots, tiles of K and V, and jobs.

A ring's n-th tile goes to slot `n % num_slots`. A slot has two barriers: *full* completes when the tile's bytes have
come, *empty* when all warps that use the tile have released it. Each completes once a turn of the ring; waiting threads
name a completion by its parity.

A tile is panels of 64 elements one behind the other, in swizzled rows of 128 bytes, one a token. In a row of a cache
one copy (a *box*) brings a panel, whatever the strides; with a block table one copy a block. Where a box would reach
beyond the live tokens, tokens are copied one by one, a live one in place of each of the rest: a copy from outside the
tensor gives zeros, but touches the tensor's first page, which may not be mapped.

There are no more blocks of threads than fit on the GPU. A counter gives each its next job, the longest first. One warp
of a block finds jobs and brings their queries while others work on earlier ones.
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

from numba import cuda

from .arguments import Given, Row, home_of
from .compiler import inlined, int64
from .memory import copy_16, divide, increment, load_shared_i32, store_shared_i32, wait_copies
from .prompts import Prompt, Work, live
from .warp import (
    ATOM_BYTES, PANEL, ROW_BYTES, arrive, copy_box, expect_bytes, init_barrier, publish_shared, shuffle_count,
    sync_warp, wait_barrier,
)  # fmt: skip

BARRIER_BYTES = 16  # of the two barriers of a slot


class Ring(NamedTuple):
    """Addresses in shared memory."""

    slots: int  # a multiple of 1024 bytes
    barriers: int  # full ones of all slots, then empty ones


class Slot(NamedTuple):
    """The place of a tile, and the barrier that waits for its bytes."""

    address: int
    full: int


class RingUse(NamedTuple):
    """Functions for kernels, on a `Ring`. All but the first take a tile's number, and are called by whole warps."""

    init: Any  # called by one thread
    wait_empty: Any  # until the tile that was in this one's slot is released: where this one goes
    fill: Any  # then the full barrier waits for a tile, whose copies may begin
    filled: Any  # or: a tile is there, which this warp's lanes have stored
    wait_full: Any  # until a tile is there: its address
    release: Any  # this warp needs a tile no more: all of its lanes have read it, or their products have


def make_ring(num_slots: int, slot_bytes: int, users: int) -> RingUse:
    """The functions for rings of a size: the slots are a power of two, so that division is a mask and a shift; `users`
    are the warps that release each tile."""
    assert num_slots.bit_count() == 1
    mask, shift = num_slots - 1, num_slots.bit_length() - 1

    full: Any = inlined(lambda ring, n: ring.barriers + (n & mask) * 8)
    empty: Any = inlined(lambda ring, n: ring.barriers + (num_slots + (n & mask)) * 8)

    @inlined
    def init(ring: Ring) -> None:
        for slot in range(num_slots):
            init_barrier(full(ring, slot), 1)
            init_barrier(empty(ring, slot), users)

    @inlined
    def wait_empty(ring: Ring, n: int) -> int:
        wait_barrier(empty(ring, n), (n >> shift) + 1 & 1)  # in the first turn there was none
        return ring.slots + (n & mask) * slot_bytes

    @inlined
    def fill(ring: Ring, n: int, lane: int) -> Slot:
        if lane == 0:
            expect_bytes(full(ring, n), slot_bytes)
        sync_warp()
        return Slot(ring.slots + (n & mask) * slot_bytes, full(ring, n))

    @inlined
    def filled(ring: Ring, n: int, lane: int) -> None:
        sync_warp()
        if lane == 0:
            arrive(full(ring, n))

    @inlined
    def wait_full(ring: Ring, n: int) -> int:
        wait_barrier(full(ring, n), n >> shift & 1)
        return ring.slots + (n & mask) * slot_bytes

    @inlined
    def release(ring: Ring, n: int, lane: int) -> None:
        if lane == 0:
            arrive(empty(ring, n))

    return RingUse(init, wait_empty, fill, filled, wait_full, release)


class Source(NamedTuple):
    """One head of K or V, by the tensor maps of boxes of tokens and of single ones."""

    boxes: bytes
    tokens: bytes
    head: int
    box: int  # tokens of a box; unless there is a block table, those of a tile


def box_of(tile: int, block_size: int) -> int:
    """Tokens of a copy; `block_size` 0 is without a block table."""
    return gcd(tile, block_size) if block_size else tile


def tile_bytes(head_dim: int, tile: int) -> int:
    """Of `tile` tokens of one head, in whole rows."""
    return -(-head_dim // PANEL) * tile * ROW_BYTES


def make_copy_tile(head_dim: int, tile: int) -> tuple[Any, Any, Any]:
    """Functions for kernels: the lanes of a warp find their boxes in a tile, look these up, and begin to copy a tile.
    Tokens are live from the prompt's `begin` on, to its `length`."""
    panels = -(-head_dim // PANEL)
    assert tile // 16 * panels <= 32, "a lane copies one box"

    @inlined
    def box_in_tile(lane: int, box: int, row: Row) -> tuple[int, int]:
        """A lane's panel, and the first token of its box in a tile."""
        if row.block_size == 0:
            return lane, 0
        panel = divide(lane * box, tile)
        return panel, lane * box - panel * tile

    @inlined
    def look_up(first: int, row: Row, prompt: Prompt) -> tuple[int, int]:
        """The row or block that a box's first token is in, and its number there."""
        home = home_of(live(first, prompt), row)
        return (home, first) if row.block_size == 0 else (home >> 32, first - (home & 0xFFFFFFFF))

    @inlined
    def copy_rows(
        slot: Slot, source: Source, home: int, token: int, first: int, row: Row, prompt: Prompt, lane: int
    ) -> None:
        """Copies a box's tokens one by one; `first` is the box's first."""
        box = source.box if row.block_size != 0 else tile
        item = lane
        while item < box * panels:
            panel = divide(item, box) if row.block_size != 0 else item // tile
            number = item - panel * box
            inside = live(first + number, prompt)
            if row.block_size != 0:
                inside -= divide(inside, row.block_size) * row.block_size
            to = slot.address + (panel * tile + first - token + number) * ROW_BYTES
            copy_box(to, source.tokens, panel * PANEL, source.head, inside, home, slot.full)
            item += 32

    @inlined
    def copy_tile(
        slot: Slot, source: Source, own: tuple[int, int], place: tuple[int, int], token: int, row: Row, prompt: Prompt,
        lane: int,
    ) -> None:  # fmt: skip
        """`own` is what `box_in_tile` gives the lane, `place` what `look_up` does."""
        box = source.box if row.block_size != 0 else tile
        panel, offset = own
        home, inside = place
        first = token + offset
        if panel < panels and prompt.begin <= first and first + box <= prompt.length:
            to = slot.address + (panel * tile + offset) * ROW_BYTES
            copy_box(to, source.boxes, panel * PANEL, source.head, inside, home, slot.full)
        if token < prompt.begin or token + tile > prompt.length:
            first, index = token, 0
            while first < token + tile:
                if first < prompt.begin or first + box > prompt.length:
                    copy_rows(slot, source, shuffle_count(home, index), token, first, row, prompt, lane)
                first += box
                index += 1

    return box_in_tile, look_up, copy_tile


JOB_BYTES = len(Prompt._fields) * 4
JOBS = 2  # of a block that are known: the one that is worked on, and the next
NO_MORE = Prompt(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0)  # what follows the last job


@inlined
def put_job(to: int, job: Prompt) -> None:
    """Leaves a job in shared memory."""
    for i in range(len(job)):
        store_shared_i32(to + 4 * i, job[i])


@inlined
def get_job(at: int) -> Prompt:
    """A job that was left there."""
    return Prompt(
        load_shared_i32(at), load_shared_i32(at + 4), load_shared_i32(at + 8), load_shared_i32(at + 12),
        load_shared_i32(at + 16), load_shared_i32(at + 20), load_shared_i32(at + 24), load_shared_i32(at + 28),
        load_shared_i32(at + 32), load_shared_i32(at + 36),
    )  # fmt: skip


def make_bring_queries(head_dim: int, queries: int, work: Work) -> Any:
    """A function for kernels, called by a warp, that copies a job's queries to a slot, as tiles of 64; behind the
    prompt's last query it is copied again."""
    vectors = head_dim // 8  # of 16 bytes, in a query
    lines = 32 // vectors  # queries at a time
    panels_bytes = -(-vectors // 8) * 64 * ROW_BYTES
    query_at = work.query_at

    @inlined
    def bring_queries(to: int, given: Given, job: Prompt, lane: int) -> None:
        column = lane % vectors
        query = lane // vectors if lane < lines * vectors else queries
        while query < queries:
            number = min(job.query + query, job.num_queries - 1)
            source = query_at(number, job, given)
            inside = query % 64 * ROW_BYTES + column // 8 * (64 * ROW_BYTES) + ((column ^ query) & 7) * 16
            copy_16(to + query // 64 * panels_bytes + inside, source + column * 16)
            query += lines
        wait_copies()
        publish_shared()

    return bring_queries


def make_find_jobs(work: Work, bring_queries: Any, of_jobs: RingUse, of_queries: RingUse) -> Any:
    """A function for kernels that finds all jobs of a block; called by a warp."""
    heads, count_jobs, find_queries = work.heads, work.count_jobs, work.find_queries
    wait_job_empty, job_filled = of_jobs.wait_empty, of_jobs.filled
    wait_queries_empty, queries_filled = of_queries.wait_empty, of_queries.filled

    @inlined
    def find_jobs(jobs: Ring, queries: Ring, given: Given, lane: int) -> None:
        per_head = count_jobs(given, lane)
        per_kv_head = per_head * heads
        count = per_kv_head * given.sizes.kv_heads
        number = int64(cuda.blockIdx.x)
        n = 0
        while number < count:
            # A head of K and V after another, so that each stays in the second cache. The last queries of a prompt see
            # most keys: they go first.
            kv_head = divide(number, per_kv_head)
            place = number - kv_head * per_kv_head
            head = kv_head * heads + place % heads
            job = find_queries(head, per_head - 1 - place // heads, given, lane)
            to = wait_job_empty(jobs, n)
            if lane == 0:
                put_job(to, job)
            job_filled(jobs, n, lane)
            bring_queries(wait_queries_empty(queries, n), given, job, lane)
            queries_filled(queries, n, lane)
            n += 1
            taken = 0
            if lane == 0:  # as often as there are jobs: then the counter is 0 again
                taken = int64(increment(given.at.counters, count - 1))
            number = cuda.gridDim.x + shuffle_count(taken, 0)
        to = wait_job_empty(jobs, n)
        if lane == 0:
            put_job(to, NO_MORE)
        job_filled(jobs, n, lane)

    return find_jobs


WARPGROUP = 128  # threads of a warpgroup
CONSUMERS = 2  # warpgroups that multiply; one more copies
THREADS = WARPGROUP * (1 + CONSUMERS)
QUERIES = 64 * CONSUMERS


def registers_of(head_dim: int, general: bool) -> tuple[int, int]:
    """Registers of a thread that copies, and of one that multiplies: all together no more than they had when they
    began. A general kernel's copies need more."""
    if not general:
        return 72, 216
    return (104, 200) if head_dim <= 128 else (88, 208)


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 128 if head_dim <= 128 else 112 if head_dim <= 192 else 80


class Rings(NamedTuple):
    """All rings of a block of threads: a `Ring` each, the functions on it, or how many slots it has."""

    jobs: Any
    queries: Any  # the queries of a few jobs
    k: Any
    v: Any


def slots_of(head_dim: int) -> Rings:
    """What shared memory has room for. A tile of V is held longer than one of K."""
    if head_dim <= 64:
        return Rings(JOBS, 2, 4, 4)
    return Rings(JOBS, 1, 2, 4 if head_dim <= 128 else 2)


class Shared(NamedTuple):
    """Where things are in shared memory, from a multiple of `ATOM_BYTES` on."""

    queries: int  # 64 for each consumer, laid out as a tile is
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
    barriers = [count * BARRIER_BYTES for count in (*slots[1:], JOBS)]
    return Shared(*accumulate((queries, slots.k * tile, slots.v * tile, JOBS * JOB_BYTES, *barriers), initial=0))


def make_rings(head_dim: int) -> Rings:
    """The functions on a block's rings."""
    slots, tile, consumers = slots_of(head_dim), tile_bytes(head_dim, tile_of(head_dim)), 4 * CONSUMERS
    return Rings(
        make_ring(slots.jobs, JOB_BYTES, 2 + consumers),  # the warps that bring K and V read jobs as well
        make_ring(slots.queries, tile_bytes(head_dim, QUERIES), consumers),
        make_ring(slots.k, tile, consumers),
        make_ring(slots.v, tile, consumers),
    )
