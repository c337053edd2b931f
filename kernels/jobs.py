"""Jobs that blocks of threads take one by one: the next begins while the last ends.

There are no more blocks than fit on the GPU. Whichever is ready takes the next job, by a counter: so they may be of any
length, and the longest come first. In each block one warp finds jobs, and brings their queries to shared memory, while
others work on those that it found before.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from .addressing import make_addressing
from .arguments import Addresses, Groups, Sizes, Strides
from .arithmetic import divide
from .hopper import ROW_BYTES, publish_shared
from .memory import increment
from .prompts import Prompt, Work
from .ptx import inlined, int64
from .ring import Ring, RingUse
from .shared import copy_16, load_shared_i32, store_shared_i32, wait_copies
from .warp import shuffle_count

JOB_BYTES = len(Prompt._fields) * 4
JOBS = 2
"""Of a block that are known: the one that is worked on, and the next."""
NO_MORE = Prompt(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""What follows the last job."""


@inlined
def put_job(to: int, job: Prompt) -> None:
    """Leaves a job in shared memory."""
    store_shared_i32(to, job.sequence)
    store_shared_i32(to + 4, job.start)
    store_shared_i32(to + 8, job.num_queries)
    store_shared_i32(to + 12, job.query)
    store_shared_i32(to + 16, job.position)
    store_shared_i32(to + 20, job.begin)
    store_shared_i32(to + 24, job.length)
    store_shared_i32(to + 28, job.head)
    store_shared_i32(to + 32, job.kv_head)
    store_shared_i32(to + 36, job.part)


@inlined
def get_job(at: int) -> Prompt:
    """A job that was left there."""
    return Prompt(
        load_shared_i32(at), load_shared_i32(at + 4), load_shared_i32(at + 8), load_shared_i32(at + 12),
        load_shared_i32(at + 16), load_shared_i32(at + 20), load_shared_i32(at + 24), load_shared_i32(at + 28),
        load_shared_i32(at + 32), load_shared_i32(at + 36),
    )  # fmt: skip


def make_bring_queries(head_dim: int, queries: int, work: Work) -> Any:
    """A function for kernels that copies a job's queries to a slot, as tiles of 64; called by a warp."""
    vectors = head_dim // 8  # of 16 bytes, in a query
    lines = 32 // vectors  # queries at a time
    panels_bytes = -(-vectors // 8) * 64 * ROW_BYTES
    _, address_of = make_addressing(work.query_block)
    queries_of, home_of_query = work.queries_of, work.home_of_query

    @inlined
    def bring_queries(to: int, at: Addresses, strides: Strides, job: Prompt, lane: int) -> None:
        """Those behind the prompt's last repeat it."""
        tokens = queries_of(job, at, strides)
        column = lane % vectors
        query = lane // vectors if lane < lines * vectors else queries
        while query < queries:
            number = min(job.query + query, job.num_queries - 1)
            source = address_of(number, home_of_query(number, job, strides), tokens)
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
    def find_jobs(
        jobs: Ring, queries: Ring, at: Addresses, sizes: Sizes, strides: Strides, groups: Groups, window: int, lane: int
    ) -> None:
        per_head = count_jobs(at, sizes, groups, lane)
        per_kv_head = per_head * heads
        count = per_kv_head * sizes.kv_heads
        number = int64(cuda.blockIdx.x)
        n = 0
        while number < count:
            # A head of K and V after another, so that each stays in the second cache. The last queries of a prompt see
            # most keys: they go first.
            kv_head = divide(number, per_kv_head)
            place = number - kv_head * per_kv_head
            head = kv_head * heads + place % heads
            job = find_queries(head, per_head - 1 - place // heads, at, sizes, groups, window, lane)
            to = wait_job_empty(jobs, n)
            if lane == 0:
                put_job(to, job)
            job_filled(jobs, n, lane)
            bring_queries(wait_queries_empty(queries, n), at, strides, job, lane)
            queries_filled(queries, n, lane)
            n += 1
            taken = 0
            if lane == 0:  # as often as there are jobs: then the counter is 0 again
                taken = int64(increment(at.counters, count - 1))
            number = cuda.gridDim.x + shuffle_count(taken, 0)
        to = wait_job_empty(jobs, n)
        if lane == 0:
            put_job(to, NO_MORE)
        job_filled(jobs, n, lane)

    return find_jobs
