"""decode and prefill over MLA's latents: which kernel a call gets, and the kernels, whichever instructions multiply.

decode cuts the work as for other heads (`decode_parts`); prefill has a block of threads for each 64 queries.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda

from .arguments import (
    ARGUMENTS, LATENT_V_DIM, NO_GROUPS, Addresses, Given, Scoring, Sizes, Strides, Variant, first_query, first_token,
    head_of, make_ragged, row_of,
)  # fmt: skip
from .compiler import Kernel, float32, inlined, int64, uint32
from .decode_parts import Lengths, make_clear, make_shares, part_bytes
from .decode_products import UNIT
from .latent_products import WGMMA_BYTES, WGMMA_QUERIES, make_attend, mma_blocks_per_sm, mma_shared_of, slots_for
from .latents import (
    PREFILL_QUERIES, THREADS, Job, bundles_of, dims_of, latent_queries, make_put, make_settle, part_of, sums_of,
    visible_of,
)  # fmt: skip
from .launches import most_shared_bytes, multiprocessors
from .memory import load_i32, shared_address
from .plans import Geometries, Plan, choose_kernel
from .softmax import Visible


def make_decode(variant: Variant, slots: int) -> Any:
    """The kernel of decode as a Python function; `slots` as in `latent_products.make_attend`."""
    attend, arrived, alignment = make_attend(variant, slots)
    bundles = bundles_of(variant)
    queries, count, q_len = bundles.per_bundle, bundles.per_head, variant.q_len
    num_sums = sums_of(queries)
    num_bundles, team, mixed = bundles.bundles(1), bundles.team, variant.mixed

    share_of_block, piece_at, sequence_after, is_empty = make_shares(bundles, variant.windowed, False)
    heads_per_kv, causal, windowed = variant.heads_per_kv, variant.causal, variant.windowed
    strips, dims = queries // 16, dims_of(queries)
    settle = make_settle(variant, bundles, arrived)
    clear = make_clear(variant.dtype, LATENT_V_DIM, bundles)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        given = Given(at, sizes, strides, scoring, NO_GROUPS)
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + alignment - 1) // alignment * alignment
        sums = cuda.local.array(num_sums, float32)
        part = part_of(thread >> 5, strips, dims)
        lengths = Lengths(at.cu_seqlens, at.seq_lens, at.starts, scoring.window, num_bundles // team, NO_GROUPS)

        place = int64(cuda.blockIdx.x)
        while place < sizes.batch:
            if is_empty(place, lengths):
                clear(place, num_bundles, given, thread)
            place += cuda.gridDim.x

        share = share_of_block(sizes.batch, lengths, lane)
        unit, sequence, before = share.begin, share.sequence, share.before
        while unit < share.end:
            piece = piece_at(unit, share, sequence, before, lengths)
            k, _ = head_of(0, at, strides)
            q = at.q + first_query(sequence, at.cu_seqlens, strides.q.row, strides.q.token, mixed)
            first = piece.bundle * queries
            number = first + part.strip * 16 + (lane >> 2)
            seen = visible_of(
                number, q_len, piece.first, piece.last + 1, scoring.window, heads_per_kv, causal, windowed
            )
            high0, high1 = min(seen.high0, piece.token_end), min(seen.high1, piece.token_end)
            visible = Visible(seen.low0, high0, seen.low1, high1)
            row = row_of(sequence, at, strides)
            job = Job(q, count, first, k, row, piece.token, piece.first, piece.token_end)
            softmax = attend(sums, base, job, visible, part, given, thread, lane)
            settle(sums, softmax, base, piece, share, part, given, thread, lane)
            unit = piece.end
            if unit == piece.bundle_end and piece.round == lengths.rounds - 1:
                before = unit
                sequence = sequence_after(sequence, share, unit, lengths)

    return kernel


def make_prefill(variant: Variant, slots: int) -> Any:
    """The kernel of prefill as a Python function; `slots` as in `latent_products.make_attend`."""
    attend, _, alignment = make_attend(variant, slots)
    heads_per_kv, causal, windowed = variant.heads_per_kv, variant.causal, variant.windowed
    num_sums = sums_of(PREFILL_QUERIES)

    strips, dims, mixed = PREFILL_QUERIES // 16, dims_of(PREFILL_QUERIES), variant.mixed
    put_outputs, _ = make_put(variant, PREFILL_QUERIES)

    @inlined
    def units_of(sequence: int, cu_seqlens: int) -> int:
        """Blocks of queries; in a mixed batch single tokens are left out."""
        tokens = load_i32(cu_seqlens + sequence * 4 + 4) - load_i32(cu_seqlens + sequence * 4)
        tokens = 0 if mixed and tokens == 1 else tokens
        return (tokens * heads_per_kv + PREFILL_QUERIES - 1) // PREFILL_QUERIES

    _, locate = make_ragged(units_of)

    @inlined
    def find_queries(cu_seqlens: int, batch: int, lane: int) -> tuple[int, int, bool]:
        """The sequence of a block, its first query there, and whether it has any. The lanes of a warp look together."""
        unit = cuda.gridDim.x - 1 - cuda.blockIdx.x  # the last queries of a prompt see most keys: they go first
        sequence, before = locate(unit, batch, cu_seqlens, lane)
        return sequence, (unit - before) * PREFILL_QUERIES, unit - before < units_of(sequence, cu_seqlens)

    @inlined
    def span_of(first_query: int, tokens: int, first: int, length: int, window: int) -> tuple[int, int]:
        """The keys that a block's queries see: where their first tile begins, and their end."""
        last_token = min((first_query + PREFILL_QUERIES - 1) // heads_per_kv, tokens - 1)
        end = length - tokens + last_token + 1 if causal else length
        low = max(first, length - tokens + first_query // heads_per_kv + 1 - window) if windowed else first
        return low // UNIT * UNIT, end if first < length else 0

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        given = Given(at, sizes, strides, scoring, NO_GROUPS)
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + alignment - 1) // alignment * alignment
        sums = cuda.local.array(num_sums, float32)
        part = part_of(thread >> 5, strips, dims)

        sequence, query, there = find_queries(at.cu_seqlens, sizes.batch, lane)
        if not there:
            return
        start = load_i32(at.cu_seqlens + sequence * 4)
        tokens = load_i32(at.cu_seqlens + sequence * 4 + 4) - start
        length = load_i32(at.seq_lens + sequence * 4)
        first = first_token(sequence, at.starts)
        if windowed:  # what no query of the sequence sees may be gone
            first = max(first, length - tokens + 1 - scoring.window)
        k, _ = head_of(0, at, strides)
        number = query + part.strip * 16 + (lane >> 2)
        q, count = at.q + start * strides.q.token, tokens * heads_per_kv
        row = row_of(sequence, at, strides)
        key, end = span_of(query, tokens, first, length, scoring.window)
        visible = visible_of(number, tokens, first, length, scoring.window, heads_per_kv, causal, windowed)
        job = Job(q, count, query, k, row, key, first, end)
        softmax = attend(sums, base, job, visible, part, given, thread, lane)
        to = at.out + start * strides.out.token
        put_outputs(sums, softmax, number, count, to, part, given, lane)

    return kernel


def best_latents(given: Geometries, queries: int) -> tuple[str, ...]:
    """The kernels on tensor cores for a call with so many queries in a block of threads. Heads must fill matrices of
    16, and shared memory must have room for two tiles."""
    room = slots_for(queries, most_shared_bytes(given.q.device)) >= 2
    if given.q.shape[-2] % 16 or not room:
        return ()
    return ("wgmma", "mma") if queries == WGMMA_QUERIES else ("mma",)


def latent_decode_plan(given: Geometries, variant: Variant, name: str) -> Plan:
    """The plan of a decode on tensor cores, by the kernel of this name; "auto": by the best."""
    bundles = bundles_of(variant)
    name = choose_kernel(name, given, best_latents(given, bundles.per_bundle))
    kernel = latent_kernel(name, variant, most_shared_bytes(given.q.device))
    blocks = bundles.grid(multiprocessors(given.q.device) * kernel.blocks_per_sm)
    counters = given.seq_lens.shape[0] * bundles.bundles(1)
    return Plan(kernel, (blocks, 1), 2 * blocks * part_bytes(bundles, LATENT_V_DIM), counters)


def latent_prefill_plan(given: Geometries, variant: Variant, name: str, prompts: int) -> Plan:
    """The plan of a prefill on tensor cores, of so many prompts at most."""
    tokens, num_heads, _ = given.q.shape
    # No batch has more blocks of queries, however its tokens are spread.
    most = tokens * num_heads // PREFILL_QUERIES + prompts
    return Plan(latent_kernel(name, variant, most_shared_bytes(given.q.device)), (most, 1))


@cache
def latent_kernel(name: str, variant: Variant, shared_bytes: int) -> Kernel:
    """The kernel on tensor cores of this name, for devices with so much shared memory a block: of decode where the
    variant says how many queries there are, else of prefill."""
    factory = make_decode if variant.q_len else make_prefill
    if name == "wgmma":
        return Kernel(factory, (variant, 0), ARGUMENTS, THREADS, shared_bytes=WGMMA_BYTES, hopper=True)
    queries = latent_queries(variant)
    slots, blocks_per_sm = slots_for(queries, shared_bytes), mma_blocks_per_sm(queries, shared_bytes)
    room = mma_shared_of(queries, slots).nbytes
    return Kernel(factory, (variant, slots), ARGUMENTS, THREADS, blocks_per_sm=blocks_per_sm, shared_bytes=room)
