"""The kernels of decode and prefill over MLA's latents, whichever instructions multiply.

decode cuts the work as for other heads (`decode_parts`); prefill has a block of threads for each 64 queries.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from .arguments import Given, Variant, first_query, first_token, head_in, make_entry, make_ragged, num_queries, row_of
from .compiler import float32, inlined, uint32
from .decode_parts import Share, make_share_work
from .decode_products import UNIT, Piece
from .latent_products import make_attend
from .latents import PREFILL_QUERIES, Job, bundles_of, dims_of, make_put, make_settle, part_of, sums_of, visible_of
from .memory import load_i32, shared_address
from .softmax import Visible


def make_decode(variant: Variant, slots: int) -> Any:
    """The kernel of decode as a Python function; `slots` as in `latent_products.make_attend`."""
    attend, arrived, alignment = make_attend(variant, slots)
    bundles = bundles_of(variant)
    queries, heads_per_kv, num_bundles = bundles.per_bundle, variant.heads_per_kv, bundles.bundles(1)
    num_sums, strips, dims = sums_of(queries), queries // 16, dims_of(queries)
    settle = make_settle(variant, bundles, arrived)

    @inlined
    def work_on(own: Any, piece: Piece, share: Share, bundles: int, given: Given, thread: int, lane: int) -> None:
        base, part = own
        sums = cuda.local.array(num_sums, float32)
        options = given.options
        k = head_in(given.at.k, 0, given.sizes.k, options.block_size)
        q = given.at.q + first_query(piece.sequence, given.sizes.q, given)
        first = piece.bundle * queries
        number = first + part.strip * 16 + (lane >> 2)
        low0, high0, low1, high1 = visible_of(number, heads_per_kv, options.q_len, piece.first, piece.last + 1, options)
        visible = Visible(low0, min(high0, piece.token_end), low1, min(high1, piece.token_end))
        count, row = heads_per_kv * options.q_len, row_of(piece.sequence, given)
        job = Job(q, count, first, k, row, piece.token, piece.first, piece.token_end)
        softmax = attend(sums, base, job, visible, part, given, thread, lane)
        settle(sums, softmax, base, piece, share, part, given, thread, lane)

    work_on_share = make_share_work(variant, bundles, work_on)

    @inlined
    def decode(given: Given) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + alignment - 1) // alignment * alignment
        own = base, part_of(thread >> 5, strips, dims)
        work_on_share(own, num_bundles, given, thread, lane)

    return make_entry(variant, decode)


def make_prefill(variant: Variant, slots: int) -> Any:
    """The kernel of prefill as a Python function; `slots` as in `latent_products.make_attend`."""
    attend, _, alignment = make_attend(variant, slots)
    heads_per_kv, num_sums = variant.heads_per_kv, sums_of(PREFILL_QUERIES)
    strips, dims = PREFILL_QUERIES // 16, dims_of(PREFILL_QUERIES)
    put_outputs, _ = make_put(variant, PREFILL_QUERIES)

    @inlined
    def units_of(sequence: int, given: Given) -> int:
        """Blocks of queries; in a mixed batch single tokens are left out."""
        tokens = num_queries(sequence, given)
        tokens = 0 if given.options.mixed != 0 and tokens == 1 else tokens
        return (tokens * heads_per_kv + PREFILL_QUERIES - 1) // PREFILL_QUERIES

    _, locate = make_ragged(units_of)

    @inlined
    def find_queries(given: Given, lane: int) -> tuple[int, int, bool]:
        """The sequence of a block, its first query there, and whether it has any. The lanes of a warp look together."""
        unit = cuda.gridDim.x - 1 - cuda.blockIdx.x  # the last queries of a prompt see most keys: they go first
        sequence, before = locate(unit, given.sizes.batch, given, lane)
        return sequence, (unit - before) * PREFILL_QUERIES, unit - before < units_of(sequence, given)

    @inlined
    def prefill(given: Given) -> None:
        at, sizes, options, window = given.at, given.sizes, given.options, given.options.window
        thread = cuda.threadIdx.x
        lane = thread & 31
        base = (shared_address(cuda.shared.array(0, uint32)) + alignment - 1) // alignment * alignment
        sums = cuda.local.array(num_sums, float32)
        part = part_of(thread >> 5, strips, dims)

        sequence, query, there = find_queries(given, lane)
        if not there:
            return
        start = load_i32(at.cu_seqlens + sequence * 4)
        tokens = load_i32(at.cu_seqlens + sequence * 4 + 4) - start
        length = load_i32(at.seq_lens + sequence * 4)
        first = first_token(sequence, given)
        if window != 0:  # what no query of the sequence sees may be gone
            first = max(first, length - tokens + 1 - window)
        k = head_in(at.k, 0, sizes.k, options.block_size)
        number = query + part.strip * 16 + (lane >> 2)
        q, count = at.q + start * sizes.q.token, tokens * heads_per_kv
        row = row_of(sequence, given)
        # The keys that the block's queries see: where their first tile begins, and their end.
        last_token = min((query + PREFILL_QUERIES - 1) // heads_per_kv, tokens - 1)
        end = length - tokens + last_token + 1 if options.causal != 0 else length
        low = max(first, length - tokens + query // heads_per_kv + 1 - window) if window != 0 else first
        key, end = low // UNIT * UNIT, end if first < length else 0
        visible = visible_of(number, heads_per_kv, tokens, first, length, options)
        job = Job(q, count, query, k, row, key, first, end)
        softmax = attend(sums, base, job, visible, part, given, thread, lane)
        to = at.out + start * sizes.out.token
        put_outputs(sums, softmax, number, count, to, part, given, lane)

    return make_entry(variant, prefill)
