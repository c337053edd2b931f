"""append: writes the K and V of new tokens into rows, or into the blocks of a block table; rotates K and Q, if asked.

Tokens that are copied as they are share a block of threads, as many as still leave work for every multiprocessor: half
of its threads move K and half V, and one of them looks up where a token goes. Else a block has one token, and another
block its queries; into a cache of 8 bits it quantizes on the way, what is rotated as well. With a block table only the
token's address differs. Where lengths are data on the device, who looks at that of a sequence with one new token counts
it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from numba import cuda

from .addressing import Row, Tokens, make_addressing
from .checks import (
    ALIGNMENT,
    Geometry,
    Key,
    check_block_table,
    check_cache,
    check_indices,
    check_new,
    check_rotation,
    check_scales,
    check_written,
    keys,
    refuse_alignment,
)
from .compiler import Kernel
from .launches import Launch, index_of
from .memory import load_counter, load_i32, store_4, trap
from .plans import Plans
from .ptx import inlined, int64
from .quantized import LARGEST
from .quantizing import make_quantize_heads
from .ragged import sequence_of
from .rotary import RotateHalf, Rotation, make_rotate
from .vectors import THREADS, make_copy_heads, make_move_tokens, most_tokens, tokens_of_block
from .workspace import multiprocessors


class AppendAddresses(NamedTuple):
    """Where tensors lie, as `append` and `append_behind` have them; 0: this one is not given."""

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
    """New tokens, those of a block of threads, and sequences; bytes from one row of the block table to the next, and
    from one row (or block), token and head."""

    tokens: int
    per_block: int
    batch: int
    table: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    k_cache_row: int
    k_cache_token: int
    k_cache_head: int
    v_cache_row: int
    v_cache_token: int
    v_cache_head: int
    k_scales_row: int
    k_scales_token: int
    k_scales_head: int
    v_scales_row: int
    v_scales_token: int
    v_scales_head: int


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rotary: RotateHalf | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Stores K and V of new tokens in the cache, on the current stream.

    Args:
        k: `[tokens, num_kv_heads, head_dim]`, fp32, fp16 or bf16 (or any dtype: bytes are copied).
        v: `[tokens, num_kv_heads, v_head_dim]`, of width 0 if K holds latents, of which V is a view.
        k_cache: `[max_sequences, max_seq_len, num_kv_heads, head_dim]`, any strides of rows, tokens and heads; with a
            block table `[num_blocks, block_size, num_kv_heads, head_dim]`.
        v_cache: likewise with `v_head_dim`.
        rows: int32 `[batch]`, the row of each sequence (of the block table, if there is one).
        starts: int32 `[batch]`, the position of each sequence's first new token.
        cu_seqlens: int32 `[batch + 1]`, where each sequence's tokens begin in `k` and `v`; tokens behind the last are
            ignored; None: one token each.
        block_table: int32 `[max_sequences, max_blocks]`, the block of each run of `block_size` tokens.
        rotary: rotates K before it is stored, and queries, in the same launch; None: K is stored as it is.
        k_scales: fp32 `[max_sequences, max_seq_len, num_kv_heads]` (`[num_blocks, block_size, num_kv_heads]`), any
            strides, takes the scales of K: `k_cache` must be e4m3fn or int8, and gets the same bits as from
            `quantized.quantize`, after any rotation. So a head that holds a NaN or an infinity becomes NaN. Or fp32
            `[max_sequences, num_kv_heads]`, by rows (of the block table, if there is one): the scales of whole
            sequences, which are only read; K is rounded with them as `quantize(k, dtype, scales)` does.
        v_scales: likewise for V.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or alignments do not fit; nothing is written.
    """
    run = torch.ops.vmmkv.append if torch.compiler.is_compiling() else _append
    turning = rotary or NO_ROTATION
    run(k, v, k_cache, v_cache, rows, starts, cu_seqlens, block_table, k_scales, v_scales, *turning)


def _append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    query: torch.Tensor | None,
    rotated: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    tensors = (k, v, k_cache, v_cache, rows, starts, cu_seqlens, block_table, None, k_scales, v_scales)
    _launch((*tensors, query, rotated, cos, sin))


MUTATED = "k_cache", "v_cache", "k_scales", "v_scales", "rotated"
torch.library.custom_op("vmmkv::append", _append, mutates_args=MUTATED)


def append_behind(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    limit: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """`append` to rows, behind the tokens that they hold: `lengths` count the new ones afterwards.

    Args:
        lengths: int32 `[batch]`, tokens of each sequence.
        limit: int32 `[1]`, a length that no sequence may exceed. Before it writes behind that, the device stops with an
            error (and with it the process's use of it).

    Raises:
        ValueError, TypeError: as in `append`.
    """
    _launch((k, v, k_cache, v_cache, rows, lengths, cu_seqlens, None, limit, k_scales, v_scales, *NO_ROTATION))
    if cu_seqlens is not None:
        lengths += cu_seqlens.diff()


NO_ROTATION = None, None, None, None
"""In the place of a `RotateHalf`."""


def _launch(tensors: tuple[torch.Tensor | None, ...]) -> None:
    """Launches the kernel for the tensors of `AppendAddresses`, and those of a `RotateHalf`."""
    launch, addresses = _launches.find(tensors)
    k, v, k_cache, v_cache, *_ = addresses
    if (k | v | k_cache | v_cache) % ALIGNMENT:
        refuse_alignment(k, v, k_cache, v_cache)
    if tensors[-1] is not None and reduce(or_, addresses[-4:]) % ALIGNMENT:
        refuse_alignment(*addresses[-4:])
    launch.run(*addresses)


def bind_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> Callable[[int, int, int], None]:
    """`append`, one token to each sequence, for tensors that look like these: what is left to do at each step.

    Returns:
        a function of the addresses of k and v, multiples of 16, and of starts, int32 `[batch]`. It knows the
        caches, the rows and the scales by address alone: keep them.
    """
    geometry = keys((k, v, k_cache, v_cache, rows, rows, None, None, None, k_scales, v_scales, *NO_ROTATION))
    caches = k_cache.data_ptr(), v_cache.data_ptr()
    if (caches[0] | caches[1]) % ALIGNMENT:
        refuse_alignment(*caches)
    scales = [each.data_ptr() if each is not None else 0 for each in (k_scales, v_scales)]
    return _prepare(geometry, (None, None, *caches, rows.data_ptr(), None, 0, 0, 0, *scales)).run


@lru_cache(1024)  # prompts have many lengths
def _prepare_call(geometry: tuple[Key | None, ...]) -> Launch:
    return _prepare(geometry, tuple([None if key else 0 for key in geometry[:11]]))


_launches = Plans(_prepare_call)


def _prepare(geometry: tuple[Key | None, ...], addresses: tuple[int | None, ...]) -> Launch:
    """Checks a call's geometry and prepares its launch, which will be given the addresses that are None."""
    kernel, shape, strides = _plan(geometry)
    k, *_ = geometry
    assert k
    blocks, rotary = (-(-shape.tokens // shape.per_block), 2 if strides else 1), [None] * 4 if strides else []
    return Launch(kernel, blocks, index_of(k[3]), (*addresses, *shape, *rotary, *strides))


def _plan(geometry: tuple[Key | None, ...]) -> tuple[Kernel, AppendShape, tuple[int, ...]]:
    """Checks a call's geometry; its kernel, the shape that this takes, and the strides of a `Rotation`."""
    k, v, k_cache, v_cache, rows, starts = (Geometry._make(key) for key in geometry[:6] if key)
    others = [Geometry._make(key) if key else None for key in geometry[6:11]]
    cu_seqlens, block_table, limit, k_scales, v_scales = others
    rotary = [Geometry._make(key) for key in geometry[11:] if key]
    check_new(k, v)
    _check_cache("k_cache", k_cache, k, "k_scales", k_scales, block_table or k_cache)
    _check_cache("v_cache", v_cache, v, "v_scales", v_scales, block_table or v_cache)
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"got k_cache of {k_cache.dtype} and v_cache of {v_cache.dtype}; they must be the same")
    given = _are_given(k_scales)
    if k_scales and v_scales and given != _are_given(v_scales):
        raise ValueError(
            f"got k_scales {list(k_scales.shape)} and v_scales {list(v_scales.shape)}; both must be of tokens, or both "
            "of whole sequences"
        )
    batch = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if batch <= 0 < k.shape[0]:
        raise ValueError(f"got k {list(k.shape)} and no sequences; there must be one for each token")
    check_indices(k.device, (batch,), rows=rows, starts=starts)
    if cu_seqlens is not None:
        check_indices(k.device, (batch + 1,), cu_seqlens=cu_seqlens)
    if block_table is not None:
        check_block_table(k.device, block_table, k_cache)
    if limit is not None:
        check_indices(k.device, (1,), limit=limit)
    if rotary:
        check_rotation(k, *rotary)
    heads, size = k.shape[1], k_cache.dtype.itemsize
    k_head, v_head = k.shape[2] * size // 16, v.shape[2] * size // 16
    block_size = 0 if block_table is None else k_cache.shape[1]
    dtypes = (k.dtype, k_cache.dtype) if k_scales else None
    rotation = (k.dtype, rotary[0].shape[1], rotary[2].shape[1] * k.dtype.itemsize // 32) if rotary else None
    facts = cu_seqlens is not None, block_size, limit is not None, rotation, dtypes, given
    kernel = append_kernel(heads * k_head, k_head, heads * v_head, v_head, *facts)
    table_stride = block_table.strides[0] * 4 if block_table else 0
    new = [stride * k.dtype.itemsize for stride in (*k.strides[:2], *v.strides[:2])]
    cached = [stride * size for stride in (*k_cache.strides[:3], *v_cache.strides[:3])]
    by_token = [each.strides if each else (0, 0, 0) for each in (k_scales, v_scales)]
    scales = [stride * 4 for row, *token, head in by_token for stride in (row, *(token or [0]), head)]
    turning = tuple(stride * k.dtype.itemsize for tensor in rotary for stride in tensor.strides[:-1])
    per_block = 1 if rotary or dtypes else tokens_of_block(k.shape[0], heads * k_head, multiprocessors(k.device))
    return kernel, AppendShape(k.shape[0], per_block, batch, table_stride, *new, *cached, *scales), turning


def _are_given(scales: Geometry | None) -> bool:
    """Whether there are scales, and they are those of whole sequences."""
    return scales is not None and len(scales.shape) == 2


def _check_cache(
    name: str, cache: Geometry, new: Geometry, scales_name: str, scales: Geometry | None, rows: Geometry
) -> None:
    """A cache that new tokens can be written to as they are, or as 8-bit numbers with their scales: of each token, or
    given for each of the `rows` that a tensor has."""
    if scales is not None or (cache.dtype in LARGEST and cache.dtype != new.dtype):
        check_scales(name, cache, new, scales_name, scales, rows if _are_given(scales) else None)
        new = Geometry(new.shape, new.strides, cache.dtype, new.device)
    check_cache(name, cache, like=new)
    check_written(**{name: cache})
    if scales is not None and not _are_given(scales):
        check_written(**{scales_name: scales})


Turning = tuple[torch.dtype, int, int]
"""A rotation to the compiler: the dtype, heads of a query, 16-byte vectors of half of what is rotated of a head."""


@cache
def append_kernel(
    k_vectors: int,
    k_head_vectors: int,
    v_vectors: int,
    v_head_vectors: int,
    ragged: bool,
    block_size: int,
    limited: bool,
    rotation: Turning | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    given: bool = False,
) -> Kernel:
    """The kernel for a geometry, in vectors of 16 bytes of the cache; `block_size` 0 is without a block table.

    With `limited` it stops at a limit, and starts are lengths: unless it is `ragged`, it advances them. With a
    `rotation` a second block of each token rotates its queries. With `dtypes`, of what is new and of the cache, it
    quantizes, with scales that are `given` or with its own.
    """
    vectors = k_vectors, k_head_vectors, v_vectors, v_head_vectors
    structs = (AppendAddresses, AppendShape, Rotation) if rotation else (AppendAddresses, AppendShape)
    facts = int(ragged), block_size, int(limited)
    if rotation or dtypes:
        return Kernel(make_changing_append, (*vectors, *facts, rotation, dtypes, given), structs, THREADS)
    return Kernel(make_append, (*vectors, *facts), structs, 2 * THREADS, blocks_per_sm=4)


class Place(NamedTuple):
    """Where a new token goes."""

    sequence: int
    position: int
    """In its sequence."""
    home: int
    """The row's number, or the block's."""


def make_placing(ragged: int, block_size: int, limited: int) -> tuple[Any, Any]:
    """Functions for kernels: where a new token goes, and how many of these have a place."""
    home_of, _ = make_addressing(block_size)
    load_start = load_counter if limited else load_i32

    @inlined
    def place_of_token(token: int, at: AppendAddresses, shape: AppendShape) -> Place:
        sequence = sequence_of(token, at.cu_seqlens, shape.batch) if ragged else token
        first = load_i32(at.cu_seqlens + sequence * 4) if ragged else token
        position = load_start(at.starts + sequence * 4) + token - first
        if limited and position >= load_i32(at.limit):
            trap()
        number = load_i32(at.rows + sequence * 4)
        return Place(sequence, position, home_of(position, Row(number, at.block_table + number * shape.table)))

    @inlined
    def count_tokens(at: AppendAddresses, shape: AppendShape) -> int:
        return min(shape.tokens, load_i32(at.cu_seqlens + shape.batch * 4)) if ragged else shape.tokens

    return place_of_token, count_tokens


def make_append(
    k_vectors: int,
    k_head_vectors: int,
    v_vectors: int,
    v_head_vectors: int,
    ragged: int,
    block_size: int,
    limited: int,
) -> Any:
    """The kernel that copies, as a Python function; the arguments are constants to the compiler."""
    _, address_of = make_addressing(block_size)
    place_of_token, count_tokens = make_placing(ragged, block_size, limited)
    most = most_tokens(k_vectors)
    num_places = 2 * most

    @inlined
    def place_of_k(places: Any, index: int) -> int:
        return places[index]

    @inlined
    def place_of_v(places: Any, index: int) -> int:
        return places[most + index]

    move_k = make_move_tokens(k_vectors, k_head_vectors, place_of_k)
    move_v = make_move_tokens(v_vectors, v_head_vectors, place_of_v)

    def kernel(at: AppendAddresses, shape: AppendShape) -> None:
        places = cuda.shared.array(num_places, int64)
        thread = cuda.threadIdx.x
        first = cuda.blockIdx.x * shape.per_block
        count = min(count_tokens(at, shape) - first, shape.per_block)
        if thread < count:
            sequence, position, home = place_of_token(first + thread, at, shape)
            k_cache = Tokens(at.k_cache, shape.k_cache_row, shape.k_cache_token)
            v_cache = Tokens(at.v_cache, shape.v_cache_row, shape.v_cache_token)
            places[thread] = address_of(position, home, k_cache)
            places[most + thread] = address_of(position, home, v_cache)
            if limited and not ragged:
                store_4(at.starts + sequence * 4, position + 1)
        cuda.syncthreads()
        if thread < THREADS:
            source = at.k + first * shape.k_token
            move_k(source, shape.k_token, shape.k_head, places, shape.k_cache_head, count, thread)
        else:
            source = at.v + first * shape.v_token
            move_v(source, shape.v_token, shape.v_head, places, shape.v_cache_head, count, thread - THREADS)

    return kernel


def make_changing_append(
    k_vectors: int,
    k_head_vectors: int,
    v_vectors: int,
    v_head_vectors: int,
    ragged: int,
    block_size: int,
    limited: int,
    rotation: Turning | None,
    dtypes: tuple[torch.dtype, torch.dtype] | None,
    given: bool,
) -> Any:
    """The kernel that rotates, or quantizes, or both."""
    _, address_of = make_addressing(block_size)
    place_of_token, count_tokens = make_placing(ragged, block_size, limited)
    heads, half = k_vectors // k_head_vectors, 0
    if rotation:
        dtype, query_heads, half_vectors = rotation
        head_vectors = k_head_vectors * dtype.itemsize if dtypes else k_head_vectors
        half = half_vectors * 16 // dtype.itemsize
        rotate_k = make_rotate(dtype, heads, head_vectors, half_vectors)
        rotate_query = make_rotate(dtype, query_heads, head_vectors, half_vectors)

    @inlined
    def write_turned(
        source: int, target: int, scales: int, source_head: int, target_head: int, scales_head: int, cos: int, sin: int
    ) -> None:
        rotate_k(source, target, source_head, target_head, cos, sin)

    if dtypes:
        write_k = make_quantize_heads(heads, k_head_vectors * 16, *dtypes, half, given)
        write_v = make_quantize_heads(heads, v_head_vectors * 16, *dtypes, 0, given)
    else:
        write_k = write_turned
        write_v = make_copy_heads(v_vectors, v_head_vectors)

    @inlined
    def write(token: int, at: AppendAddresses, shape: AppendShape, cos: int, sin: int) -> None:
        if token >= count_tokens(at, shape):
            return
        sequence, position, home = place_of_token(token, at, shape)
        k_to = address_of(position, home, Tokens(at.k_cache, shape.k_cache_row, shape.k_cache_token))
        v_to = address_of(position, home, Tokens(at.v_cache, shape.v_cache_row, shape.v_cache_token))
        scaled = load_i32(at.rows + sequence * 4) if given else home
        k_scales_to = address_of(position, scaled, Tokens(at.k_scales, shape.k_scales_row, shape.k_scales_token))
        v_scales_to = address_of(position, scaled, Tokens(at.v_scales, shape.v_scales_row, shape.v_scales_token))
        k_from = at.k + token * shape.k_token
        v_from = at.v + token * shape.v_token

        write_k(k_from, k_to, k_scales_to, shape.k_head, shape.k_cache_head, shape.k_scales_head, cos, sin)
        if v_vectors:  # latents have no V of their own
            write_v(v_from, v_to, v_scales_to, shape.v_head, shape.v_cache_head, shape.v_scales_head, 0, 0)
        if limited and not ragged:
            cuda.syncthreads()  # all threads know the position
            if cuda.threadIdx.x == 0:
                store_4(at.starts + sequence * 4, position + 1)

    def kernel(at: AppendAddresses, shape: AppendShape) -> None:
        write(cuda.blockIdx.x, at, shape, 0, 0)

    def rotating_kernel(at: AppendAddresses, shape: AppendShape, turn: Rotation) -> None:
        token = cuda.blockIdx.x
        cos = turn.cos + token * turn.cos_token
        sin = turn.sin + token * turn.sin_token
        if cuda.blockIdx.y == 0:
            write(token, at, shape, cos, sin)
        else:
            source = turn.query + token * turn.query_token
            target = turn.rotated + token * turn.rotated_token
            rotate_query(source, target, turn.query_head, turn.rotated_head, cos, sin)

    return rotating_kernel if rotation else kernel
