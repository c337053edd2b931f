"""decode on tensor cores: K and V go straight from memory into the registers that are multiplied.

Transposed, a step of attention is two products of matrices whose 8 columns are queries that share a KV head, an octet:

    S = K q        [16 tokens x head_dim] [head_dim x 8 queries]
    O = V^T P      [head_dim x 16 tokens] [16 tokens x 8 queries]

The dims are summed in the first product and label the rows of the second, so their order is free: each lane takes bytes
of K and V as they lie. Tokens stream past without shared memory and without waiting for other warps. P comes out of the
first product as the second wants it, but for a transposition in registers.

Where more than 8 queries share a KV head, a warp multiplies the same registers by several octets: several queries are
bound by how often K and V are read from the second cache, not by how often they are multiplied.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
from numba import cuda

from .arguments import (
    Given, Head, Row, Variant, first_query, head_of, home_of, make_entry, row_of,
)  # fmt: skip
from .compiler import float32, inlined, uint32
from .decode_parts import Share, make_settle, make_share_work, results_of
from .decode_products import (
    UNIT, WARPS, Piece, Queries, make_accumulate, make_loads, make_place_of, make_score, make_weigh, runs_of,
    vectors_of, words_of,
)  # fmt: skip
from .memory import (
    FLOOR, HALVES, if_within, load_4, load_8, load_shared_8, maximum, raising, shared_address, store_shared_8,
)  # fmt: skip
from .softmax import Visible
from .warp import shuffle, shuffle_xor


class Octet(NamedTuple):
    """Up to 8 queries that share a KV head."""

    kv_head: int
    column: int  # the first of them among those of the head


def make_load_queries(variant: Variant, queries: Queries) -> Any:
    """A function for kernels that loads a lane's part of an octet: its dims of each chunk, of query `lane // 4`."""
    head_dim, vectors, scaled = variant.head_dim, vectors_of(variant), variant.kv_dtype is not None
    heads_per_kv = queries.heads_per_kv
    low, high, pack = HALVES[variant.dtype].low, HALVES[variant.dtype].high, HALVES[torch.float16].pack
    run, _ = runs_of(variant)
    k_row, place_of = run.words, make_place_of(run)
    num_words = k_row * vectors

    @inlined
    def to_f16(words: Any, at: int, lane: int) -> tuple[float, float]:
        """Brings a lane's query to where f16 has most digits; the factors that take its columns' scores back."""
        top = float32(0)
        for i in range(num_words):
            top = maximum(top, maximum(abs(low(words[at + i])), abs(high(words[at + i]))))
        top = maximum(top, shuffle_xor(top, 1))
        top = maximum(top, shuffle_xor(top, 2))
        raised, lowered = raising(top)
        for i in range(num_words):
            words[at + i] = pack(low(words[at + i]) * raised, high(words[at + i]) * raised)
        column = (lane & 3) * 8
        return shuffle(lowered, column), shuffle(lowered, column + 4)

    @inlined
    def load_queries(words: Any, at: int, octet: Octet, q: int, given: Given, lane: int) -> tuple[float, float]:
        """From the address of the sequence's first query, to words from `at` on; queries and dims that are missing are
        0. Returns factors of the scores of a lane's two columns."""
        number, per_head, sizes = octet.column + (lane >> 2), heads_per_kv * given.options.q_len, given.sizes
        query = min(number, per_head - 1)
        source = q + query // heads_per_kv * sizes.q.token
        source += (octet.kv_head * heads_per_kv + query % heads_per_kv) * sizes.q.head
        for w in range(k_row):
            offset = place_of(w, lane & 3) * vectors
            inside = number < per_head and offset < head_dim * 2
            if scaled:
                two = load_8(source + (offset if inside else 0))
                words[at + 2 * w] = two[0] if inside else uint32(0)
                words[at + 2 * w + 1] = two[1] if inside else uint32(0)
            else:
                one = load_4(source + (offset if inside else 0))
                words[at + w] = one if inside else uint32(0)
        if scaled:
            return to_f16(words, at, lane)
        return float32(1), float32(1)

    return load_queries


WORD_BYTES = 128  # of a word of each lane in shared memory, where pairs of words lie side by side


def shared_bytes_of(variant: Variant, queries: Queries) -> int:
    """Dynamic shared memory: of results, and behind these of queries, where sums leave them no registers. 0: shared
    memory is static; queries that are brought to f16 are never in it."""
    if variant.head_dim <= 80 or queries.at_once <= 2:
        return 0
    return results_of(queries, variant.head_dim).nbytes + queries.octets * words_of(variant).q * WORD_BYTES


def make_queries(variant: Variant, queries: Queries) -> tuple[Any, Any]:
    """Functions for kernels: take a warp's queries, from an octet on as many as it works on at once, to registers or to
    shared memory; and a pair of their words, of what that gave."""
    load_queries = make_load_queries(variant, queries)
    at_once, sharing, token_warps = queries.at_once, queries.sharing, queries.token_warps
    num_words = words_of(variant).q
    behind = results_of(queries, variant.head_dim).nbytes

    @inlined
    def take(words: Any, lifts: Any, shared: Any, octet: Octet, q: int, given: Given, warp: int, lane: int) -> Any:
        for o in range(at_once):
            each = Octet(octet.kv_head, octet.column + 8 * o)
            lifts[2 * o], lifts[2 * o + 1] = load_queries(words, o * num_words, each, q, given, lane)
        return words

    pair_of = inlined(lambda held, word: (held[word], held[word + 1]))

    @inlined
    def take_to_shared(
        words: Any, lifts: Any, shared: Any, octet: Octet, q: int, given: Given, warp: int, lane: int
    ) -> int:
        """Called by all threads of a block: warps that have the same queries share the work."""
        held = shared_address(shared) + behind + warp % sharing * at_once * num_words * WORD_BYTES + lane * 8
        for o in range(at_once):
            lifts[2 * o], lifts[2 * o + 1] = float32(1), float32(1)
            if o % token_warps == warp // sharing:
                load_queries(words, 0, Octet(octet.kv_head, octet.column + 8 * o), q, given, lane)
                for x in range(num_words // 2):
                    store_shared_8(held + (o * num_words + 2 * x) * WORD_BYTES, words[2 * x], words[2 * x + 1])
        cuda.syncthreads()
        return held

    pair_of_shared = inlined(lambda held, word: load_shared_8(held + word * WORD_BYTES))
    return (take_to_shared, pair_of_shared) if shared_bytes_of(variant, queries) else (take, pair_of)


def registers_for(variant: Variant) -> tuple[int, ...]:
    """Blocks of threads that a multiprocessor has registers for, with one octet at once in a warp, with two, ... Of
    narrow heads and 8-bit numbers a warp has few bytes on their way, in few registers; more warps make up for it."""
    if variant.kv_dtype:
        return (4,) if variant.head_dim <= 128 else (2,)
    return {64: (4, 3, 2, 2), 80: (3, 3, 2, 2), 96: (3, 2, 2, 2), 128: (2, 2, 2, 2)}.get(variant.head_dim, (2,))


def queries_of(variant: Variant, kv_heads: int) -> Queries:
    """How queries are worked on: two heads at a time where these share pieces of 64 bytes, which memory gives whole."""
    run, _ = runs_of(variant)
    heads = 2 if run.nbytes % 64 and kv_heads % 2 == 0 else 1
    octets = -(-variant.heads_per_kv * variant.q_len // 8)
    at_once = min(len(registers_for(variant)), octets)
    sharing = gcd(WARPS, -(-octets // at_once) * heads)
    return Queries(variant.heads_per_kv, variant.q_len, at_once, sharing).in_teams(kv_heads)


@inlined
def visible_of(piece: Piece, column: int, heads_per_kv: int, given: Given) -> Visible:
    """The keys of a piece that two queries of a lane see, of number `column` and the next; missing queries see as
    much as the last."""
    q_len, window = given.options.q_len, given.options.window
    high0 = piece.last + 1 - q_len + min(column // heads_per_kv, q_len - 1) + 1
    high1 = piece.last + 1 - q_len + min((column + 1) // heads_per_kv, q_len - 1) + 1
    low0 = max(piece.first, high0 - window) if window != 0 else piece.first
    low1 = max(piece.first, high1 - window) if window != 0 else piece.first
    return Visible(low0, min(high0, piece.token_end), low1, min(high1, piece.token_end))


def make_attend(variant: Variant, queries: Queries, pair_of: Any) -> Any:
    """A function for kernels: the attention of a warp's octets, from a column on, to its tokens, from one on; other
    warps have those in between. Of each octet a lane has two columns' maxima, and weights' sums over its tokens."""
    at_once, scaled = queries.at_once, variant.kv_dtype is not None
    k_words, v_words, _, num_sums = words_of(variant)
    columns, num_scores, all_sums = 2 * at_once, 4 * at_once, num_sums * at_once
    stride = queries.token_warps * UNIT
    load_k, load_v, load_scales = make_loads(variant)
    heads_per_kv, score, weigh = queries.heads_per_kv, make_score(variant, pair_of), make_weigh(variant)
    accumulate = make_accumulate(variant, at_once)

    @inlined
    def attend(
        sums: Any, maxima: Any, weights: Any, held: Any, lifts: Any, head: Head, row: Row, piece: Piece, token: int,
        column: int, given: Given, lane: int,
    ) -> None:  # fmt: skip
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
            load_k(k_fragment, head.k, token, home, piece, lane)
            load_v(v_fragment, head.v, token, home, piece, lane)
            if scaled:
                k0, k1 = load_scales(head.k_scales, token, home, piece, lane)
                v0, v1 = load_scales(head.v_scales, token, home, piece, lane)
            home = home_of(min(token + stride, piece.last), row)
        while token < piece.token_end:
            t = token + (lane >> 2)
            for o in range(at_once):
                number = column + 8 * o + 2 * (lane & 3)
                visible = visible_of(piece, number, heads_per_kv, given)
                s = score(k_fragment, held, lifts, o, k0, k1, given.options.inner)
                scores[4 * o] = if_within(s[0], t, visible.low0, visible.high0)
                scores[4 * o + 1] = if_within(s[1], t, visible.low1, visible.high1)
                scores[4 * o + 2] = if_within(s[2], t + 8, visible.low0, visible.high0)
                scores[4 * o + 3] = if_within(s[3], t + 8, visible.low1, visible.high1)
            # K of the next tokens is on its way while V is multiplied, and V while K is.
            token += stride
            if token < piece.token_end:
                load_k(k_fragment, head.k, token, home, piece, lane)
                if scaled:
                    k0, k1 = load_scales(head.k_scales, token, home, piece, lane)
            for o in range(at_once):
                p = weigh(scores, o, sums, maxima, weights, v0, v1, given.options.outer)
                p_fragment[2 * o] = p[0]
                p_fragment[2 * o + 1] = p[1]
            accumulate(sums, v_fragment, p_fragment)
            if token < piece.token_end:
                load_v(v_fragment, head.v, token, home, piece, lane)
                if scaled:
                    v0, v1 = load_scales(head.v_scales, token, home, piece, lane)
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
                        to = column * results.stride + dim
                        for d in range(dims):
                            shared[to + d] = sums[o * num_sums + (w * dims + d) // 2 * 4 + d % 2 * 2 + i]

    def make_put(last: int) -> Any:
        """For the octets up to one: a loop of so many steps is not unrolled, and then sums are not in registers."""
        more = last > 0
        put_others: Any = make_put(last - 1) if more else None

        @inlined
        def put_results(shared: Any, sums: Any, maxima: Any, weights: Any, warp: int, lane: int) -> None:
            if more:
                put_others(shared, sums, maxima, weights, warp, lane)
            put_octet(shared, sums, maxima, weights, warp, lane, last)

        return put_results

    return make_put(at_once - 1)


def make_decode(variant: Variant, queries: Queries) -> Any:
    """The kernel as a Python function."""
    head_dim = variant.head_dim
    octets, octets_per_head = queries.octets, queries.octets_per_head
    at_once, sharing = queries.at_once, queries.sharing
    _, _, q_words, num_sums = words_of(variant)
    dynamic = shared_bytes_of(variant, queries) > 0
    shared_floats = 0 if dynamic else results_of(queries, head_dim).floats
    all_words, all_sums, columns = q_words * (1 if dynamic else at_once), num_sums * at_once, 2 * at_once

    take_queries, pair_of = make_queries(variant, queries)
    attend = make_attend(variant, queries, pair_of)
    put_results = make_put_results(variant, queries)
    settle = make_settle(variant.dtype, head_dim, queries)

    @inlined
    def work_on(own: Any, piece: Piece, share: Share, bundles: int, given: Given, thread: int, lane: int) -> None:
        warp, shared = own
        q_fragment = cuda.local.array(all_words, uint32)
        sums = cuda.local.array(all_sums, float32)
        maxima = cuda.local.array(columns, float32)
        weights = cuda.local.array(columns, float32)
        lifts = cuda.local.array(columns, float32)
        token = piece.token + warp // sharing * UNIT
        number = piece.bundle * octets + warp % sharing * at_once
        octet = Octet(number // octets_per_head, number % octets_per_head * 8)
        row, head = row_of(piece.sequence, given), head_of(octet.kv_head, given)
        q = given.at.q + first_query(piece.sequence, given.sizes.q, given)
        held = take_queries(q_fragment, lifts, shared, octet, q, given, warp, lane)
        attend(sums, maxima, weights, held, lifts, head, row, piece, token, octet.column, given, lane)
        put_results(shared, sums, maxima, weights, warp, lane)
        settle(shared, piece, share, bundles, given, thread)

    work_on_share = make_share_work(variant, queries, work_on)

    @inlined
    def decode(given: Given) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        own = thread >> 5, cuda.shared.array(shared_floats, float32)
        work_on_share(own, given.sizes.kv_heads * octets_per_head // octets, given, thread, lane)

    return make_entry(variant, decode)
