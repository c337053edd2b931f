"""decode and prefill over MLA's latents: which kernel a call gets, and what it takes to launch it."""

from __future__ import annotations

from functools import cache

from . import attention, latent_mma, latent_wgmma, latents
from .arguments import LATENT_V_DIM, Variant
from .attention import Geometries, Plan
from .compiler import Kernel
from .decode_parts import part_bytes
from .workspace import most_shared_bytes, multiprocessors


def best(given: Geometries, queries: int) -> tuple[str, ...]:
    """The kernels on tensor cores that there are for a call, with so many queries in a block of threads: whose heads
    fill matrices of 16, and for a device whose shared memory has room for two tiles."""
    room = latent_mma.slots_for(queries, most_shared_bytes(given.q.device)) >= 2
    if given.q.shape[-2] % 16 or not room:
        return ()
    return ("wgmma", "mma") if queries == latent_wgmma.QUERIES else ("mma",)


def decode_plan(given: Geometries, variant: Variant, name: str) -> Plan:
    """The plan of a decode on tensor cores, by the kernel of this name; "auto": by the best."""
    bundles = latents.bundles_of(variant)
    name = attention.choose(name, given, best(given, bundles.per_bundle))
    kernel = kernel_of(name, variant, most_shared_bytes(given.q.device))
    blocks = bundles.grid(multiprocessors(given.q.device) * kernel.blocks_per_sm)
    return attention.make_plan(
        given,
        kernel,
        (blocks, 1),
        partial_bytes=2 * blocks * part_bytes(bundles, LATENT_V_DIM),
        counters=given.seq_lens.shape[0] * bundles.bundles(1),
    )


def prefill_plan(given: Geometries, variant: Variant, name: str, prompts: int) -> Plan:
    """The plan of a prefill on tensor cores, of so many prompts at most."""
    tokens, num_heads, _ = given.q.shape
    # No batch has more blocks of queries, however its tokens are spread.
    most = tokens * num_heads // latents.PREFILL_QUERIES + prompts
    return attention.make_plan(given, kernel_of(name, variant, most_shared_bytes(given.q.device)), (most, 1))


def kernel_of(name: str, variant: Variant, shared_bytes: int) -> Kernel:
    """The kernel on tensor cores of this name."""
    return wgmma_kernel(variant) if name == "wgmma" else mma_kernel(variant, shared_bytes)


@cache
def mma_kernel(variant: Variant, shared_bytes: int) -> Kernel:
    """The kernel on tensor cores, of decode where the variant says how many queries there are, for devices with so much
    shared memory."""
    queries = latents.queries_of(variant)
    slots = latent_mma.slots_for(queries, shared_bytes)
    return Kernel(
        latent_mma.make_decode if variant.q_len else latent_mma.make_prefill,
        (variant, slots),
        attention.ARGUMENTS,
        latents.THREADS,
        blocks_per_sm=latent_mma.blocks_per_sm(queries, shared_bytes),
        shared_bytes=latent_mma.shared_of(queries, slots).nbytes,
    )


@cache
def wgmma_kernel(variant: Variant) -> Kernel:
    """The kernel for Hopper."""
    factory = latent_wgmma.make_decode if variant.q_len else latent_wgmma.make_prefill
    shared_bytes = latent_wgmma.SHARED.nbytes
    return Kernel(factory, (variant,), attention.ARGUMENTS, latents.THREADS, shared_bytes=shared_bytes, hopper=True)
