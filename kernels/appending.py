"""The kernels of `append`: one copies tokens as they are, the other rotates or quantizes them, or both.

Tokens that are copied share a block of threads: half of its threads move K and half V, and each of the first looks up
where a token goes. Otherwise a block has one token, and another block its queries. With a block table only the token's
address differs. Where lengths are data on the device, the thread that reads the length of a sequence with one new token
also advances it. Rotations are computed in fp32 and rounded once, when they are stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numba import cuda

from .arguments import Row, Steps, address_of, head_in, home_of, sequence_of
from .compiler import float32, inlined, int64
from .memory import divide, load_16_cached, load_16_written, load_counter, load_i32, make_turn, store_4, store_16, trap
from .quantized import make_quantize_heads
from .row_copy import THREADS, make_move_tokens, most_tokens, move_heads


class Rotation(NamedTuple):
    """The addresses of a `RotateHalf`, bytes of half of what it rotates of a head, and bytes from one token, and head,
    to the next."""

    query: int
    rotated: int
    cos: int
    sin: int
    half: int
    query_token: int
    query_head: int
    rotated_token: int
    rotated_head: int
    cos_token: int
    sin_token: int


def make_rotate(variant: AppendVariant, heads: int) -> Any:
    """A function for kernels that rotates one token's heads, so many, from an address to another, or in place. Its
    arguments are those of `quantized.make_quantize_heads`, but there are no scales."""
    assert variant.rotation
    dtype = variant.rotation.dtype
    head_vectors = variant.k_head_vectors * (dtype.itemsize if variant.dtypes else 1)  # of new tokens
    turn = make_turn(dtype)

    @inlined
    def put(target: int, x: Any, y: Any, cos: Any, sin: Any, sign: float) -> None:
        """Stores a vector that is turned with its counterpart."""
        w0, w1 = turn(x[0], y[0], cos[0], sin[0], sign), turn(x[1], y[1], cos[1], sin[1], sign)
        w2, w3 = turn(x[2], y[2], cos[2], sin[2], sign), turn(x[3], y[3], cos[3], sin[3], sign)
        store_16(target, w0, w1, w2, w3)

    @inlined
    def rotate_vectors(source: int, target: int, cos: int, sin: int, half: int) -> None:
        """Rotates a vector of the first half with its counterpart in the second."""
        x, y = load_16_written(source), load_16_written(source + half)
        c, d = load_16_cached(cos), load_16_cached(cos + half)
        s, t = load_16_cached(sin), load_16_cached(sin + half)
        put(target, x, y, c, s, float32(-1))
        put(target + half, y, x, d, t, float32(1))

    @inlined
    def rotate_heads(
        source: int, target: int, scales: int, source_head: int, target_head: int, scale_head: int, cos: int, sin: int,
        half: int,
    ) -> None:  # fmt: skip
        half_vectors = half >> 4
        passed_vectors = head_vectors - 2 * half_vectors
        vector = cuda.threadIdx.x
        while vector < heads * half_vectors:
            head = divide(vector, half_vectors)
            inside = (vector - head * half_vectors) * 16
            first, second = source + head * source_head + inside, target + head * target_head + inside
            rotate_vectors(first, second, cos + inside, sin + inside, half)
            vector += THREADS
        if passed_vectors > 0:
            passed = heads * passed_vectors
            move_heads(source + 2 * half, target + 2 * half, source_head, target_head, passed, passed_vectors)

    return rotate_heads


class Turning(NamedTuple):
    """A rotation, to the compiler."""

    dtype: torch.dtype
    query_heads: int


class AppendVariant(NamedTuple):
    """The constants of a kernel. Vectors are 16 bytes of the cache."""

    k_vectors: int  # of a token
    k_head_vectors: int
    v_vectors: int
    v_head_vectors: int
    rotation: Turning | None = None
    dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of new tokens and of the cache, where it quantizes
    given: bool = False  # it quantizes with scales that are given, of whole sequences

    @property
    def heads(self) -> int:
        return self.k_vectors // self.k_head_vectors


class AppendAddresses(NamedTuple):
    """Where tensors lie, as `append` and `append_behind` have them; 0: this one is not given.

    Without `cu_seqlens` each sequence has one new token. With a `limit` starts are lengths, which then count that one.
    """

    k: int
    v: int
    k_cache: int
    v_cache: int
    rows: int
    starts: int
    cu_seqlens: int
    block_table: int
    limit: int
    k_scales: int
    v_scales: int


class AppendShape(NamedTuple):
    """New tokens, those of a block of threads, and sequences; tokens of a block in the block table, or 0; bytes from
    one row of that to the next, and from one row (or block), token and head."""

    tokens: int
    per_block: int
    batch: int
    block_size: int
    table: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    k_cache: Steps
    v_cache: Steps
    k_scales: Steps
    v_scales: Steps


class Place(NamedTuple):
    """Where a new token goes."""

    sequence: int
    position: int  # in its sequence
    row: int
    home: int  # as `home_of` says


@inlined
def place_of_token(token: int, at: AppendAddresses, shape: AppendShape) -> Place:
    """Where a new token goes."""
    sequence, first = token, token
    if at.cu_seqlens != 0:
        sequence = sequence_of(token, at.cu_seqlens, shape.batch)
        first = load_i32(at.cu_seqlens + sequence * 4)
    position = load_counter(at.starts + sequence * 4) + token - first
    if at.limit != 0 and position >= load_i32(at.limit):
        trap()
    number = load_i32(at.rows + sequence * 4)
    row = Row(number, at.block_table + number * shape.table, shape.block_size)
    return Place(sequence, position, number, home_of(position, row))


@inlined
def count_tokens(at: AppendAddresses, shape: AppendShape) -> int:
    """How many of the new tokens have a place."""
    return min(shape.tokens, load_i32(at.cu_seqlens + shape.batch * 4)) if at.cu_seqlens != 0 else shape.tokens


@inlined
def advance(place: Place, at: AppendAddresses) -> None:
    """Counts a sequence's new token, where lengths are to be counted."""
    if at.limit != 0 and at.cu_seqlens == 0:
        store_4(at.starts + place.sequence * 4, place.position + 1)


def make_append(variant: AppendVariant) -> Any:
    """The kernel that copies, as a Python function."""
    most = most_tokens(variant.k_vectors)
    num_places = 2 * most

    def make_move(first: int, vectors: int, head_vectors: int) -> Any:
        return make_move_tokens(vectors, head_vectors, inlined(lambda places, index: places[first + index]))

    move_k = make_move(0, variant.k_vectors, variant.k_head_vectors)
    move_v = make_move(most, variant.v_vectors, variant.v_head_vectors)

    def kernel(at: AppendAddresses, shape: AppendShape) -> None:
        places = cuda.shared.array(num_places, int64)
        thread = cuda.threadIdx.x
        first = cuda.blockIdx.x * shape.per_block
        count = min(count_tokens(at, shape) - first, shape.per_block)
        if thread < count:
            place = place_of_token(first + thread, at, shape)
            k, v = (
                head_in(at.k_cache, 0, shape.k_cache, shape.block_size),
                head_in(at.v_cache, 0, shape.v_cache, shape.block_size),
            )
            places[thread] = address_of(place.position, place.home, k)
            places[most + thread] = address_of(place.position, place.home, v)
            advance(place, at)
        cuda.syncthreads()
        if thread < THREADS:
            source = at.k + first * shape.k_token
            move_k(source, shape.k_token, shape.k_head, places, shape.k_cache.head, count, thread)
        else:
            source = at.v + first * shape.v_token
            move_v(source, shape.v_token, shape.v_head, places, shape.v_cache.head, count, thread - THREADS)

    return kernel


def make_write_heads(variant: AppendVariant) -> tuple[Any, Any]:
    """Functions for kernels that write a token's heads of K, and of V, in one of three ways: see
    `quantized.make_quantize_heads` for their arguments."""
    if variant.dtypes:
        return (
            make_quantize_heads(variant.heads, variant.k_head_vectors * 16, *variant.dtypes, variant.given),
            make_quantize_heads(variant.heads, variant.v_head_vectors * 16, *variant.dtypes, variant.given),
        )
    v_vectors, v_head_vectors = variant.v_vectors, variant.v_head_vectors

    @inlined
    def copy_heads(
        source: int, target: int, scales: int, source_head: int, target_head: int, scale_head: int, cos: int, sin: int,
        half: int,
    ) -> None:  # fmt: skip
        move_heads(source, target, source_head, target_head, v_vectors, v_head_vectors)

    return make_rotate(variant, variant.heads), copy_heads


def make_changing_append(variant: AppendVariant) -> Any:
    """The kernel that rotates, or quantizes, or both, as a Python function."""
    write_k, write_v = make_write_heads(variant)
    has_v, given = variant.v_vectors > 0, variant.given  # latents have no V of their own

    @inlined
    def write(token: int, at: AppendAddresses, shape: AppendShape, cos: int, sin: int, half: int) -> None:
        if token >= count_tokens(at, shape):
            return
        place = place_of_token(token, at, shape)
        block = shape.block_size
        k_to = address_of(place.position, place.home, head_in(at.k_cache, 0, shape.k_cache, block))
        v_to = address_of(place.position, place.home, head_in(at.v_cache, 0, shape.v_cache, block))
        scaled, block = (place.row, 0) if given else (place.home, block)
        k_scales_to = address_of(place.position, scaled, head_in(at.k_scales, 0, shape.k_scales, block))
        v_scales_to = address_of(place.position, scaled, head_in(at.v_scales, 0, shape.v_scales, block))
        k_from = at.k + token * shape.k_token
        v_from = at.v + token * shape.v_token

        write_k(k_from, k_to, k_scales_to, shape.k_head, shape.k_cache.head, shape.k_scales.head, cos, sin, half)
        if has_v:
            write_v(v_from, v_to, v_scales_to, shape.v_head, shape.v_cache.head, shape.v_scales.head, 0, 0, 0)
        cuda.syncthreads()  # all threads know the position
        if cuda.threadIdx.x == 0:
            advance(place, at)

    if not variant.rotation:

        def kernel(at: AppendAddresses, shape: AppendShape) -> None:
            write(cuda.blockIdx.x, at, shape, 0, 0, 0)

        return kernel
    rotate_query = make_rotate(variant, variant.rotation.query_heads)

    def rotating_kernel(at: AppendAddresses, shape: AppendShape, turn: Rotation) -> None:
        token = cuda.blockIdx.x
        cos = turn.cos + token * turn.cos_token
        sin = turn.sin + token * turn.sin_token
        if cuda.blockIdx.y == 0:
            write(token, at, shape, cos, sin, turn.half)
        else:
            source = turn.query + token * turn.query_token
            target = turn.rotated + token * turn.rotated_token
            rotate_query(source, target, 0, turn.query_head, turn.rotated_head, 0, cos, sin, turn.half)

    return rotating_kernel
