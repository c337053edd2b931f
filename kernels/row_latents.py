"""decode and prefill over MLA's latents: which kernel a call gets, and what it takes to launch it."""

from __future__ import annotations

from functools import cache

from . import attention, latent_mma
from .arguments import LATENT_V_DIM, Variant
from .attention import Geometries, Plan
from .compiler import Kernel
from .decode_parts import part_bytes
from .workspace import most_shared_bytes, multiprocessors


def best(given: Geometries, queries: int) -> tuple[str, ...]:
    """The kernels on tensor cores that there are for a call, with so many queries in a block of threads: whose heads
    fill matrices of 16, and for a device whose shared memory has room for two tiles."""
    room = latent_mma.slots_for(queries, most_shared_bytes(given.q.device)) >= 2
    return ("mma",) if room and given.q.shape[-2] % 16 == 0 else ()


def decode_plan(given: Geometries, variant: Variant) -> Plan:
    """The plan of a decode on tensor cores."""
    bundles, shared_bytes = latent_mma.bundles_of(variant), most_shared_bytes(given.q.device)
    blocks = multiprocessors(given.q.device) * latent_mma.blocks_per_sm(bundles.per_bundle, shared_bytes)
    return attention.make_plan(
        given,
        mma_kernel(variant, shared_bytes),
        (blocks, 1),
        partial_bytes=2 * blocks * part_bytes(bundles, LATENT_V_DIM),
        counters=given.seq_lens.shape[0] * bundles.bundles(1),
    )


def prefill_plan(given: Geometries, variant: Variant, prompts: int) -> Plan:
    """The plan of a prefill on tensor cores, of so many prompts at most."""
    tokens, num_heads, _ = given.q.shape
    # No batch has more blocks of queries, however its tokens are spread.
    most = tokens * num_heads // latent_mma.PREFILL_QUERIES + prompts
    return attention.make_plan(given, mma_kernel(variant, most_shared_bytes(given.q.device)), (most, 1))


@cache
def mma_kernel(variant: Variant, shared_bytes: int) -> Kernel:
    """The kernel on tensor cores, of decode where the variant says how many queries there are, for devices with so much
    shared memory."""
    queries = latent_mma.queries_of(variant)
    slots = latent_mma.slots_for(queries, shared_bytes)
    return Kernel(
        latent_mma.make_decode if variant.q_len else latent_mma.make_prefill,
        (variant, slots),
        attention.ARGUMENTS,
        latent_mma.THREADS,
        blocks_per_sm=latent_mma.blocks_per_sm(queries, shared_bytes),
        shared_bytes=latent_mma.shared_of(queries, slots).nbytes,
    )
