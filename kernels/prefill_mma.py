"""prefill on the tensor cores of any GPU since Ampere: tiles of K and V come through shared memory.

A block of threads has `16 * warps` queries of one head, a warp 16 of them. For every tile of keys:

    scores    S = Q K^T, with Q and K read from shared memory as fragments,
    softmax   within four lanes, which share a row of S,
    sums      O += P V, where P is S in the registers it came in.

K of the next tile is copied while V is used, and V while K is. 8-bit K and V become 16-bit on the way to shared memory,
without their scales, which multiply scores and weights: threads hold a tile in registers until its place is free.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from numba import cuda

from .arguments import Given, Row, Tokens, Variant, address_of, head_of, home_of, make_entry, row_of
from .compiler import float32, inlined, int64, uint32
from .memory import (
    copy_16, load_16, load_f32, load_shared_f32, shared_address, store_shared_16, store_shared_f32, wait_copies,
)  # fmt: skip
from .prompts import Prompt, Work, keys_of_block, keys_of_lane, live, make_prefixes, make_prompts
from .quantized import EIGHT_BITS
from .softmax import Softmax, begin_softmax, make_add_values, make_score, mask, pitch_of, raise_maxima, rescale, weigh


def make_widened_tiles(variant: Variant, threads: int) -> tuple[Any, Any, Any, int, int]:
    """Functions for kernels: a block's threads look a tile up, begin to fetch one head of it and a scale each, and put
    them to shared memory, behind copies of before; a live key takes the place of one that is not. And how many homes a
    thread looks up, and how many words it fetches."""
    assert variant.kv_dtype
    widen, pitch = EIGHT_BITS[variant.kv_dtype].pair, pitch_of(variant.head_dim)
    tile, vectors = tile_of(variant.head_dim), variant.head_dim // 16  # of 16 bytes in a token
    turns = -(-tile * vectors // threads)
    assert tile <= threads, "a thread fetches one scale"

    @inlined
    def look_up(homes: Any, key: int, row: Row, prompt: Prompt, thread: int) -> None:
        for turn in range(turns):
            homes[turn] = home_of(live(key + (thread + turn * threads) // vectors, prompt), row)
        homes[turns] = home_of(live(key + thread % tile, prompt), row)

    @inlined
    def begin(
        words: Any, to: int, source: Tokens, scales: Tokens, homes: Any, key: int, prompt: Prompt, thread: int
    ) -> float:
        for turn in range(turns):
            vector = thread + turn * threads
            token = live(key + vector // vectors, prompt)
            loaded = load_16(address_of(token, homes[turn], source) + vector % vectors * 16)
            for i in range(4):
                words[4 * turn + i] = loaded[i]
        return load_f32(address_of(live(key + thread % tile, prompt), homes[turns], scales))

    @inlined
    def end(words: Any, scale: float, to: int, scales_to: int, thread: int) -> None:
        wait_copies()
        for turn in range(turns):
            vector = thread + turn * threads
            if vector < tile * vectors:
                place = to + vector // vectors * pitch + vector % vectors * 32
                for half in range(2):
                    a = words[4 * turn + 2 * half]
                    b = words[4 * turn + 2 * half + 1]
                    store_shared_16(
                        place + half * 16,
                        widen(a, a, 0x1100), widen(a, a, 0x3322), widen(b, b, 0x1100), widen(b, b, 0x3322),
                    )  # fmt: skip
        if thread < tile:
            store_shared_f32(scales_to + thread * 4, scale)

    return look_up, begin, end, turns + 1, 4 * turns


@inlined
def scale_columns(scores: Any, num_scores: int, scales: int, lane: int) -> None:
    """Multiplies a tile's scores, or weights, by its scales."""
    for j in range(num_scores // 4):
        for i in range(2):
            scale = load_shared_f32(scales + (8 * j + 2 * (lane & 3) + i) * 4)
            scores[4 * j + i] *= scale
            scores[4 * j + 2 + i] *= scale


def warps_of(head_dim: int) -> int:
    """Of 16 queries each, in a block of threads."""
    return 8 if head_dim <= 128 else 4


def tile_of(head_dim: int) -> int:
    """Keys that are worked on at a time: what shared memory and registers have room for."""
    return 64 if head_dim <= 128 else 32


class Shared(NamedTuple):
    """Where things are in shared memory: the queries, and one tile of K and V, and of their scales if there are any."""

    queries: int
    k: int
    v: int
    k_scales: int
    v_scales: int
    nbytes: int  # in all


def shared_of(head_dim: int, scaled: bool) -> Shared:
    """The shared memory of a block of threads."""
    pitch, tile = pitch_of(head_dim), tile_of(head_dim)
    scales = 4 * tile if scaled else 0
    sizes = 16 * warps_of(head_dim) * pitch, tile * pitch, tile * pitch, scales, scales
    return Shared(*accumulate(sizes, initial=0))


def make_bring_queries(work: Work, queries: int, head_dim: int, threads: int) -> Any:
    """A function for kernels: a block's threads begin to copy its queries; those behind the prompt's last repeat it."""
    query_at = work.query_at
    vectors, pitch = head_dim // 8, pitch_of(head_dim)  # of 16 bytes in a query; bytes from one to the next
    turns = -(-queries * vectors // threads)

    @inlined
    def bring_queries(to: int, prompt: Prompt, given: Given, thread: int) -> None:
        for turn in range(turns):
            vector = thread + turn * threads
            if vector < queries * vectors:
                query = max(min(prompt.query + vector // vectors, prompt.num_queries - 1), 0)
                column = vector % vectors * 16
                copy_16(to + vector // vectors * pitch + column, query_at(query, prompt, given) + column)

    return bring_queries


def make_copied_tiles(variant: Variant, threads: int) -> tuple[Any, Any, Any, int, int]:
    """`make_widened_tiles` for 16 bits, which are copied as they are."""
    tile, vectors, pitch = tile_of(variant.head_dim), variant.head_dim // 8, pitch_of(variant.head_dim)
    turns = -(-tile * vectors // threads)

    @inlined
    def look_up(homes: Any, key: int, row: Row, prompt: Prompt, thread: int) -> None:
        for turn in range(turns):
            homes[turn] = home_of(live(key + (thread + turn * threads) // vectors, prompt), row)

    @inlined
    def begin(
        words: Any, to: int, source: Tokens, scales: Tokens, homes: Any, key: int, prompt: Prompt, thread: int
    ) -> float:
        for turn in range(turns):
            vector = thread + turn * threads
            if vector < tile * vectors:
                token, column = live(key + vector // vectors, prompt), vector % vectors * 16
                copy_16(to + vector // vectors * pitch + column, address_of(token, homes[turn], source) + column)
        return float32(1)

    @inlined
    def end(words: Any, scale: float, to: int, scales_to: int, thread: int) -> None:
        wait_copies()

    return look_up, begin, end, turns, 1


def make_attend(variant: Variant, work: Work) -> Any:
    """A function for kernels: attention of a block's queries to the keys that they see; called by all its threads."""
    head_dim, scaled = variant.head_dim, variant.kv_dtype is not None
    warps, tile, pitch = warps_of(head_dim), tile_of(head_dim), pitch_of(head_dim)
    shared = shared_of(head_dim, scaled)
    num_scores, num_sums, queries, threads = tile // 2, head_dim // 2, 16 * warps, 32 * warps

    bring_queries = make_bring_queries(work, queries, head_dim, threads)
    make_tiles = make_widened_tiles if scaled else make_copied_tiles
    look_up, begin_tile, end_tile, num_homes, num_words = make_tiles(variant, threads)
    score, add_values = make_score(variant.dtype, head_dim, tile), make_add_values(variant.dtype, head_dim)

    @inlined
    def attend(
        sums: Any, base: int, prompt: Prompt, given: Given, thread: int, warp: int, lane: int
    ) -> tuple[Softmax, int]:
        """`base` is the address of shared memory. With the softmax comes the number in the block of the first of this
        lane's two queries."""
        scores = cuda.local.array(num_scores, float32)
        homes = cuda.local.array(num_homes, int64)
        words = cuda.local.array(num_words, uint32)
        row = row_of(prompt.sequence, given)
        k, v, k_scales, v_scales = head_of(prompt.kv_head, given)
        first, end = keys_of_block(prompt, queries, given.options)
        key = first // tile * tile
        line = warp * 16 + (lane >> 2)
        visible = keys_of_lane(prompt, line, given.options)

        softmax = begin_softmax(sums, num_sums)
        scale = float32(1)
        if key < end:
            bring_queries(base + shared.queries, prompt, given, thread)
            look_up(homes, key, row, prompt, thread)
            scale = begin_tile(words, base + shared.k, k, k_scales, homes, key, prompt, thread)
        while key < end:
            end_tile(words, scale, base + shared.k, base + shared.k_scales, thread)
            cuda.syncthreads()  # K is there, and no warp needs the last V
            scale = begin_tile(words, base + shared.v, v, v_scales, homes, key, prompt, thread)
            look_up(homes, key + tile, row, prompt, thread)
            score(scores, base + shared.queries + warp * 16 * pitch, base + shared.k, lane)
            if scaled:
                scale_columns(scores, num_scores, base + shared.k_scales, lane)
            end_tile(words, scale, base + shared.v, base + shared.v_scales, thread)
            cuda.syncthreads()  # V is there, and no warp needs this K
            if key + tile < end:
                scale = begin_tile(words, base + shared.k, k, k_scales, homes, key + tile, prompt, thread)

            mask(scores, num_scores, key, visible, given.options.inner, lane)
            softmax, a0, a1, grown = raise_maxima(scores, num_scores, softmax, given.options.outer)
            if grown:
                rescale(sums, num_sums, a0, a1)
            softmax = weigh(scores, num_scores, softmax, given.options.outer)
            if scaled:
                scale_columns(scores, num_scores, base + shared.v_scales, lane)
            for j in range(tile // 16):
                line_of_v = base + shared.v + (j * 16 + (lane & 15)) * pitch + (lane >> 4) * 16
                add_values(sums, scores, 8 * j, line_of_v)
            key += tile
        return softmax, line

    return attend


def make_prefill(variant: Variant) -> Any:
    """The kernel as a Python function."""
    num_sums = variant.head_dim // 2
    work = (make_prefixes if variant.prefixes else make_prompts)(variant, 16 * warps_of(variant.head_dim))
    find_queries, put = work.find_queries, work.put
    attend = make_attend(variant, work)

    @inlined
    def prefill(given: Given) -> None:
        thread = cuda.threadIdx.x
        lane = thread & 31
        warp = thread >> 5
        base = shared_address(cuda.shared.array(0, uint32))
        sums = cuda.local.array(num_sums, float32)
        # The last queries of a prompt see most keys: they go first.
        job = cuda.gridDim.y - 1 - cuda.blockIdx.y
        prompt = find_queries(cuda.blockIdx.x, job, given, lane)
        if prompt.query >= prompt.num_queries:
            return
        softmax, line = attend(sums, base, prompt, given, thread, warp, lane)
        put(sums, softmax, line, prompt, given, lane)

    return make_entry(variant, prefill)
