"""The queries that decode's warps multiply: in registers, or in shared memory where sums leave them no registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numba import cuda

from .arguments import Strides, Variant
from .arithmetic import HALVES, maximum, raising
from .decode_loads import make_place_of, runs_of, vectors_of, words_of
from .decode_parts import results_of
from .decode_shares import Queries
from .memory import load_4, load_8
from .ptx import float32, inlined, uint32
from .shared import load_shared_8, shared_address, store_shared_8
from .warp import shuffle, shuffle_xor


class Octet(NamedTuple):
    """Up to 8 queries that share a KV head."""

    kv_head: int
    column: int
    """The first of them among those of the head."""


def make_load_queries(variant: Variant, queries: Queries) -> Any:
    """A function for kernels that loads a lane's part of an octet: its dims of each chunk, of query `lane // 4`."""
    head_dim, vectors, scaled = variant.head_dim, vectors_of(variant), variant.kv_dtype is not None
    heads_per_kv, per_head = queries.heads_per_kv, queries.per_head
    low, high, pack = HALVES[variant.dtype].low, HALVES[variant.dtype].high, HALVES[torch.float16].pack
    run, _ = runs_of(variant)
    k_row, place_of = run.words, make_place_of(run)
    num_words = k_row * vectors

    @inlined
    def to_f16(words: Any, at: int, lane: int) -> tuple[float, float]:
        """Brings a lane's query to where f16 has most digits; what takes its own two columns' scores back."""
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
    def load_queries(words: Any, at: int, octet: Octet, q: int, strides: Strides, lane: int) -> tuple[float, float]:
        """From the address of the sequence's first query, to words from `at` on. What there is none of is 0. What the
        scores of a lane's columns are to be multiplied by."""
        number = octet.column + (lane >> 2)
        query = min(number, per_head - 1)
        source = (
            q
            + query // heads_per_kv * strides.q_token
            + (octet.kv_head * heads_per_kv + query % heads_per_kv) * strides.q_head
        )
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


def are_shared(variant: Variant, queries: Queries) -> bool:
    """Whether a warp's queries are in shared memory; none of those are brought to f16."""
    return variant.head_dim > 80 and queries.at_once > 2


def shared_bytes_of(variant: Variant, queries: Queries) -> int:
    """Dynamic shared memory: of results, and behind these of queries; 0 where it is static."""
    if not are_shared(variant, queries):
        return 0
    return results_of(queries, variant.head_dim).nbytes + queries.octets * words_of(variant).q * WORD_BYTES


WORD_BYTES = 128
"""Of a word of each lane in shared memory, where pairs of words lie side by side."""


def make_queries(variant: Variant, queries: Queries) -> tuple[Any, Any]:
    """Functions for kernels: take a warp's queries, and a pair of their words, of what that gave."""
    load_queries = make_load_queries(variant, queries)
    at_once, sharing, token_warps = queries.at_once, queries.sharing, queries.token_warps
    num_words = words_of(variant).q
    behind = results_of(queries, variant.head_dim).nbytes

    @inlined
    def take(words: Any, lifts: Any, shared: Any, octet: Octet, q: int, strides: Strides, warp: int, lane: int) -> Any:
        """From an octet on as many as are worked on at once; `words` and `lifts` are of the lane's registers."""
        for o in range(at_once):
            each = Octet(octet.kv_head, octet.column + 8 * o)
            lifts[2 * o], lifts[2 * o + 1] = load_queries(words, o * num_words, each, q, strides, lane)
        return words

    @inlined
    def pair_of(held: Any, word: int) -> tuple[int, int]:
        return held[word], held[word + 1]

    @inlined
    def take_to_shared(
        words: Any, lifts: Any, shared: Any, octet: Octet, q: int, strides: Strides, warp: int, lane: int
    ) -> int:
        """Called by all threads of a block: warps that have the same queries share the work."""
        held = shared_address(shared) + behind + warp % sharing * at_once * num_words * WORD_BYTES + lane * 8
        for o in range(at_once):
            lifts[2 * o], lifts[2 * o + 1] = float32(1), float32(1)
            if o % token_warps == warp // sharing:
                load_queries(words, 0, Octet(octet.kv_head, octet.column + 8 * o), q, strides, lane)
                for x in range(num_words // 2):
                    store_shared_8(held + (o * num_words + 2 * x) * WORD_BYTES, words[2 * x], words[2 * x + 1])
        cuda.syncthreads()
        return held

    @inlined
    def pair_of_shared(held: int, word: int) -> tuple[int, int]:
        return load_shared_8(held + word * WORD_BYTES)

    return (take_to_shared, pair_of_shared) if are_shared(variant, queries) else (take, pair_of)
