"""decode on tensor cores: K and V go straight from memory into the registers that are multiplied.

Transposed, a step of attention is two products of matrices whose 8 columns are queries that share a KV head, an octet:

    S = K q        [16 tokens x head_dim] [head_dim x 8 queries]
    O = V^T P      [head_dim x 16 tokens] [16 tokens x 8 queries]

The dims are summed in the first product and label the rows of the second, so their order is free: each lane
takes bytes of K and of V as they lie. No shared memory, and no waiting for other warps, while tokens stream past.
P comes out of the first product as the second wants it but for a transposition in registers.

Where more than 8 queries share a KV head, a warp multiplies the same registers by several octets: what bounds several
queries is how often K and V are brought from the second cache, not how often they are multiplied.

For the two products see `decode_products`, for how K and V are loaded `decode_loads`, where queries are kept
`decode_queries`, for shares of the work `decode_shares`, for what becomes of the sums `decode_parts`.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from .addressing import Row, Tokens, head_of, make_addressing, make_first_query, row_of, scales_of
from .arguments import NO_GROUPS, Addresses, Groups, Scoring, Sizes, Strides, Variant
from .arithmetic import FLOOR, if_within
from .decode_loads import make_loads, make_place_of, runs_of, vectors_of, words_of
from .decode_parts import make_clear, make_settle, results_of
from .decode_products import make_accumulate, make_score, make_weigh
from .decode_queries import Octet, make_queries, shared_bytes_of
from .decode_shares import UNIT, Lengths, Piece, Queries, make_shares
from .ptx import float32, inlined, int64, uint32
from .softmax import Visible
from .warp import shuffle_xor


def registers_for(variant: Variant) -> tuple[int, ...]:
    """How many blocks of threads a multiprocessor has registers for, with one octet at once in a warp, with two, ...

    Of narrow heads, and of 8-bit numbers, a warp has few bytes on their way, in few registers: with more warps there
    are as many bytes. Wide heads leave no room for them.
    """
    if variant.kv_dtype:
        return (4,) if variant.head_dim <= 128 else (2,)
    return {64: (4, 3, 2, 2), 80: (3, 3, 2, 2), 96: (3, 2, 2, 2), 128: (2, 2, 2, 2)}.get(variant.head_dim, (2,))


def queries_of(variant: Variant, kv_heads: int) -> Queries:
    """How queries are worked on: two heads at a time where these share pieces of 64 bytes, which memory gives whole."""
    run, _ = runs_of(variant)
    heads = 2 if run.nbytes % 64 and kv_heads % 2 == 0 else 1
    queries = Queries(variant.heads_per_kv, variant.q_len, variant.mixed, len(registers_for(variant)), heads)
    return queries.in_teams(kv_heads)


def blocks_per_sm(variant: Variant, queries: Queries) -> int:
    """As many as there are registers for."""
    return registers_for(variant)[queries.at_once - 1]


def make_visible_of(variant: Variant, queries: Queries) -> Any:
    """A function for kernels: the keys of a piece that two queries of a lane see."""
    heads_per_kv, q_len, windowed = queries.heads_per_kv, queries.q_len, variant.windowed

    @inlined
    def visible_of(piece: Piece, column: int, window: int) -> Visible:
        """Of the queries of this number and the next; those that there are not see as much as the last."""
        high0 = piece.last + 1 - q_len + min(column // heads_per_kv, q_len - 1) + 1
        high1 = piece.last + 1 - q_len + min((column + 1) // heads_per_kv, q_len - 1) + 1
        low0 = max(piece.first, high0 - window) if windowed else piece.first
        low1 = max(piece.first, high1 - window) if windowed else piece.first
        return Visible(low0, min(high0, piece.token_end), low1, min(high1, piece.token_end))

    return visible_of


def make_attend(variant: Variant, queries: Queries, pair_of: Any) -> Any:
    """A function for kernels: the attention of a warp's octets to its tokens."""
    at_once, scaled = queries.at_once, variant.kv_dtype is not None
    k_words, v_words, _, num_sums = words_of(variant)
    columns, num_scores, all_sums = 2 * at_once, 4 * at_once, num_sums * at_once
    stride = queries.token_warps * UNIT

    home_of, _ = make_addressing(variant.block_size)
    load_k, load_v, load_scales = make_loads(variant)
    visible_of = make_visible_of(variant, queries)
    score, weigh = make_score(variant, pair_of), make_weigh(variant)
    accumulate = make_accumulate(variant, at_once)

    @inlined
    def attend(
        sums: Any, maxima: Any, weights: Any, held: Any, lifts: Any, k: Tokens, v: Tokens, k_scales: Tokens,
        v_scales: Tokens, row: Row, piece: Piece, token: int, column: int, scoring: Scoring, lane: int,
    ) -> None:  # fmt: skip
        """From a token on; other warps have those in between. The first octet begins at a column; of each octet a lane
        has two columns' maxima, and of their weights' sums what is of its own tokens."""
        k_fragment = cuda.local.array(k_words, uint32)
        v_fragment = cuda.local.array(v_words, uint32)
        scores = cuda.local.array(num_scores, float32)
        p_fragment = cuda.local.array(columns, uint32)
        for i in range(all_sums):
            sums[i] = float32(0)
        for i in range(columns):
            maxima[i] = float32(FLOOR)
            weights[i] = float32(0)
        k0, k1, v0, v1 = float32(1), float32(1), float32(1), float32(1)
        if token < piece.token_end:
            home = home_of(token, row)
            load_k(k_fragment, k, token, home, piece, lane)
            load_v(v_fragment, v, token, home, piece, lane)
            if scaled:
                k0, k1 = load_scales(k_scales, token, home, piece, lane)
                v0, v1 = load_scales(v_scales, token, home, piece, lane)
            home = home_of(min(token + stride, piece.last), row)
        while token < piece.token_end:
            t = token + (lane >> 2)
            for o in range(at_once):
                visible = visible_of(piece, column + 8 * o + 2 * (lane & 3), scoring.window)
                s = score(k_fragment, held, lifts, o, k0, k1, scoring.inner)
                scores[4 * o] = if_within(s[0], t, visible.low0, visible.high0)
                scores[4 * o + 1] = if_within(s[1], t, visible.low1, visible.high1)
                scores[4 * o + 2] = if_within(s[2], t + 8, visible.low0, visible.high0)
                scores[4 * o + 3] = if_within(s[3], t + 8, visible.low1, visible.high1)
            # K of the next tokens is on its way while V is multiplied, and V while K is.
            token += stride
            if token < piece.token_end:
                load_k(k_fragment, k, token, home, piece, lane)
                if scaled:
                    k0, k1 = load_scales(k_scales, token, home, piece, lane)
            for o in range(at_once):
                p = weigh(scores, o, sums, maxima, weights, v0, v1, scoring.outer)
                p_fragment[2 * o] = p[0]
                p_fragment[2 * o + 1] = p[1]
            accumulate(sums, v_fragment, p_fragment)
            if token < piece.token_end:
                load_v(v_fragment, v, token, home, piece, lane)
                if scaled:
                    v0, v1 = load_scales(v_scales, token, home, piece, lane)
                home = home_of(min(token + stride, piece.last), row)

    return attend


def make_put_results(variant: Variant, queries: Queries) -> Any:
    """A function for kernels that leaves a warp's sums, maxima and weights in shared memory."""
    head_dim, vectors = variant.head_dim, vectors_of(variant)
    results, per_octet, at_once = results_of(queries, head_dim), queries.per_octet, queries.at_once
    _, run = runs_of(variant)
    v_row, place_of, dims = run.words, make_place_of(run), 2 * vectors  # of a word
    num_sums = 2 * dims * v_row

    @inlined
    def put_octet(shared: Any, sums: Any, maxima: Any, weights: Any, warp: int, lane: int, o: int) -> None:
        for i in range(2):
            weight = weights[2 * o + i]
            for step in range(3):
                weight += shuffle_xor(weight, 4 << step)
            query = 2 * (lane & 3) + i
            if query < per_octet:
                column = (warp * at_once + o) * per_octet + query
                if lane < 4:
                    shared[results.maxima + column] = maxima[2 * o + i]
                    shared[results.weights + column] = weight
                for w in range(v_row):
                    dim = place_of(w, lane >> 2) * dims // 4
                    if dim < head_dim:
                        to = results.sums + column * results.stride + dim
                        for d in range(dims):
                            shared[to + d] = sums[o * num_sums + (w * dims + d) // 2 * 4 + d % 2 * 2 + i]

    def make_put(last: int) -> Any:
        """Of the octets up to one. The compiler leaves a loop of so many steps, and then sums are not in registers."""
        if last == 0:

            @inlined
            def put_first(shared: Any, sums: Any, maxima: Any, weights: Any, warp: int, lane: int) -> None:
                put_octet(shared, sums, maxima, weights, warp, lane, 0)

            return put_first
        put_others = make_put(last - 1)

        @inlined
        def put_results(shared: Any, sums: Any, maxima: Any, weights: Any, warp: int, lane: int) -> None:
            put_others(shared, sums, maxima, weights, warp, lane)
            put_octet(shared, sums, maxima, weights, warp, lane, last)

        return put_results

    return make_put(at_once - 1)


def make_decode(variant: Variant, queries: Queries) -> Any:
    """The kernel as a Python function."""
    head_dim = variant.head_dim
    octets, octets_per_head = queries.octets, queries.octets_per_head
    at_once, sharing, team = queries.at_once, queries.sharing, queries.team
    _, _, q_words, num_sums = words_of(variant)
    dynamic = shared_bytes_of(variant, queries) > 0
    shared_floats = 0 if dynamic else results_of(queries, head_dim).floats
    all_words, all_sums, columns = q_words * (1 if dynamic else at_once), num_sums * at_once, 2 * at_once

    share_of_block, piece_at, sequence_after, is_empty = make_shares(queries, variant.windowed, variant.cascaded)
    first_query = make_first_query(queries.mixed)
    take_queries, pair_of = make_queries(variant, queries)
    attend = make_attend(variant, queries, pair_of)
    put_results = make_put_results(variant, queries)
    settle = make_settle(variant.dtype, head_dim, queries, variant.cascaded)
    clear = make_clear(variant.dtype, head_dim, queries)

    @inlined
    def decode(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        shared = cuda.shared.array(shared_floats, float32)
        q_fragment = cuda.local.array(all_words, uint32)
        sums = cuda.local.array(all_sums, float32)
        maxima = cuda.local.array(columns, float32)
        weights = cuda.local.array(columns, float32)
        lifts = cuda.local.array(columns, float32)
        bundles = sizes.kv_heads * octets_per_head // octets
        lengths = Lengths(at.cu_seqlens, at.seq_lens, at.starts, scoring.window, bundles // team, groups)

        place = int64(cuda.blockIdx.x)
        while place < sizes.batch:
            if is_empty(place, lengths):
                clear(place, bundles, at, strides, scoring.outer, thread)
            place += cuda.gridDim.x

        share = share_of_block(sizes.batch, lengths, lane)
        unit, sequence, before = share.begin, share.sequence, share.before
        while unit < share.end:
            piece = piece_at(unit, share, sequence, before, lengths)
            token = piece.token + warp // sharing * UNIT
            number = piece.bundle * octets + warp % sharing * at_once
            kv_head, column = number // octets_per_head, number % octets_per_head * 8
            row = row_of(sequence, at, strides)
            k, v = head_of(kv_head, at, strides)
            k_scales, v_scales = scales_of(kv_head, at, strides)
            q = at.q + first_query(sequence, at.cu_seqlens, strides.q_batch, strides.q_token)
            held = take_queries(q_fragment, lifts, shared, Octet(kv_head, column), q, strides, warp, lane)
            attend(
                sums, maxima, weights, held, lifts, k, v, k_scales, v_scales, row, piece, token, column, scoring, lane
            )
            put_results(shared, sums, maxima, weights, warp, lane)
            settle(shared, piece, share, bundles, at, sizes, strides, groups, scoring.outer, thread)
            unit = piece.end
            if unit == piece.bundle_end and piece.round == lengths.rounds - 1:
                before = unit
                sequence = sequence_after(sequence, share, unit, lengths)

    def kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring) -> None:
        decode(at, sizes, strides, scoring, NO_GROUPS)

    def cascaded_kernel(at: Addresses, sizes: Sizes, strides: Strides, scoring: Scoring, groups: Groups) -> None:
        decode(at, sizes, strides, scoring, groups)

    return cascaded_kernel if variant.cascaded else kernel
