"""append: writes the K and V of new tokens into rows, or into the blocks of a block table; rotates K and Q, if asked.

New tokens of a cache of 8 bits are quantized, after any rotation. The kernels are in `appending`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from .appending import AppendAddresses, AppendShape, AppendVariant, Rotation, Turning, make_append, make_changing_append
from .checks import (
    ALIGNMENT, Geometry, Key, Plans, check_block_table, check_cache, check_indices, check_new, check_rotation,
    check_scales, check_written, keys, refuse_alignment,
)  # fmt: skip
from .compiler import Kernel
from .launches import Launch, index_of, multiprocessors
from .quantized import LARGEST
from .row_copy import THREADS, tokens_of_block


class RotateHalf(NamedTuple):
    """Rotary position embedding ([RoFormer](https://arxiv.org/abs/2104.09864)) as in Llama: element i of a head is
    rotated with element i + rotary_dim / 2.

    The first `rotary_dim` elements `x` of each head become `x * cos + rotate_half(x) * sin`, where `rotate_half` puts
    the second half, negated, in front of the first; the others stay. (Models that rotate neighbours with each other, as
    GLM and Cohere do, cannot use it.)

    Attributes:
        query: `[tokens, num_heads, head_dim]`, like `k`.
        rotated: like `query`, takes the rotated queries of all tokens: `query` itself, or what overlaps it nowhere.
        cos: `[tokens, rotary_dim]`, of the dtype of `k`, as modules of transformers make them once a forward pass, for
            all layers; half of `rotary_dim` is a multiple of 16 bytes.
        sin: likewise.
    """

    query: Tensor
    rotated: Tensor
    cos: Tensor
    sin: Tensor


NO_ROTATION = None, None, None, None  # in the place of a `RotateHalf`


def append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, starts: Tensor,
    cu_seqlens: Tensor | None = None, block_table: Tensor | None = None, rotary: RotateHalf | None = None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Stores K and V of new tokens in the cache, on the current stream.

    Args:
        k: `[tokens, num_kv_heads, head_dim]`, fp32, fp16 or bf16 (or any dtype: bytes are copied).
        v: `[tokens, num_kv_heads, v_head_dim]`, of width 0 if K holds latents, of which V is a view.
        k_cache: `[max_sequences, max_seq_len, num_kv_heads, head_dim]`, any strides of rows, tokens and heads; with a
            block table `[num_blocks, block_size, num_kv_heads, head_dim]`.
        v_cache: likewise with `v_head_dim`.
        rows: int32 `[batch]`, the row of each sequence (of the block table, if there is one).
        starts: int32 `[batch]`, the position of each sequence's first new token.
        cu_seqlens: int32 `[batch + 1]`, from 0 on, where each sequence's tokens begin in `k` and `v`; tokens behind the
            last are ignored; None: one token each.
        block_table: int32 `[max_sequences, max_blocks]`, the block of each run of `block_size` tokens, which is a
            multiple of 16; None: the caches hold rows.
        rotary: rotates K before it is stored, and queries, in the same launch; None: K is stored as it is.
        k_scales: fp32 `[max_sequences, max_seq_len, num_kv_heads]` (`[num_blocks, block_size, num_kv_heads]`), any
            strides, takes the scales of K: `k_cache` must be e4m3fn or int8, and gets the same bits as from
            `quantized.quantize`, after any rotation. So a head that holds a NaN or an infinity becomes NaN. Or fp32
            `[max_sequences, num_kv_heads]`, by rows (of the block table, if there is one): the scales of whole
            sequences, which are only read; K is rounded with them as `quantize(k, dtype, scales)` does. None: `k_cache`
            has the dtype of `k`.
        v_scales: likewise for V.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or alignments do not fit; nothing is written.
    """
    run = torch.ops.vmmkv.append if torch.compiler.is_compiling() else _append
    tensors = k, v, k_cache, v_cache, rows, starts, cu_seqlens, block_table, None, k_scales, v_scales
    run(*tensors, *(rotary or NO_ROTATION))


def _append(*tensors: Tensor | None) -> None:
    """Launches the kernel for the tensors of `AppendAddresses`, and those of a `RotateHalf`."""
    launch, addresses = _launches.find(tensors)
    k, v, k_cache, v_cache, *_ = addresses
    if (k | v | k_cache | v_cache) % ALIGNMENT:
        refuse_alignment(k, v, k_cache, v_cache)
    if tensors[-1] is not None and reduce(or_, addresses[-4:]) % ALIGNMENT:
        refuse_alignment(*addresses[-4:])
    launch.run(*addresses)


SCHEMA = (
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor rows, Tensor starts, Tensor? cu_seqlens, "
    "Tensor? block_table, Tensor? limit, Tensor(c!)? k_scales, Tensor(d!)? v_scales, Tensor? query, "
    "Tensor(e!)? rotated, Tensor? cos, Tensor? sin) -> ()"
)
MUTATED = "k_cache", "v_cache", "k_scales", "v_scales", "rotated"
torch.library.custom_op("vmmkv::append", _append, mutates_args=MUTATED, schema=SCHEMA)


def append_behind(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, lengths: Tensor, limit: Tensor,
    cu_seqlens: Tensor | None = None, k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """`append` to rows, behind the tokens that they hold: `lengths` count the new ones afterwards.

    Args:
        lengths: int32 `[batch]`, tokens of each sequence.
        limit: int32 `[1]`, a length that no sequence may exceed. Before it writes behind that, the device stops with an
            error (and with it the process's use of it).

    Raises:
        ValueError, TypeError: as in `append`.
    """
    _append(k, v, k_cache, v_cache, rows, lengths, cu_seqlens, None, limit, k_scales, v_scales, *NO_ROTATION)
    if cu_seqlens is not None:
        lengths += cu_seqlens.diff()


def bind_append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Callable[[int, int, int], None]:  # fmt: skip
    """`append`, one token to each sequence, for tensors that look like these: the work of each step.

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
    given = _check(geometry)
    variant = _variant_of(given)
    shape = tokens, per_block, *_ = _shape_of(given, variant)
    blocks = -(-tokens // per_block), 2 if given.rotary else 1
    strides = [stride * given.k.dtype.itemsize for tensor in given.rotary for stride in tensor.strides[:-1]]
    half = [given.rotary[2].shape[1] // 2 * given.k.dtype.itemsize] if given.rotary else []
    arguments = (*addresses, *shape, *[None] * len(given.rotary), *half, *strides)
    return Launch(append_kernel(variant), blocks, index_of(given.k.device), arguments)


class Geometries(NamedTuple):
    """The tensors of a call, without data, in the order of `AppendAddresses`; and of a `RotateHalf`, or none."""

    k: Geometry
    v: Geometry
    k_cache: Geometry
    v_cache: Geometry
    rows: Geometry
    starts: Geometry
    cu_seqlens: Geometry | None
    block_table: Geometry | None
    limit: Geometry | None
    k_scales: Geometry | None
    v_scales: Geometry | None
    rotary: tuple[Geometry, ...]

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.k.shape[0] if self.cu_seqlens is None else max(self.cu_seqlens.shape, default=0) - 1


def _check(geometry: tuple[Key | None, ...]) -> Geometries:
    """Raises `ValueError` or `TypeError` where tensors do not fit together."""
    tensors = [Geometry._make(key) if key else None for key in geometry]
    given = Geometries._make((*tensors[:11], tuple(filter(None, tensors[11:]))))
    k, v, k_cache, v_cache, rows, starts, cu_seqlens, block_table, limit, k_scales, v_scales, rotary = given
    check_new(k, v)
    _check_cache("k_cache", k_cache, k, k_scales, block_table or k_cache)
    _check_cache("v_cache", v_cache, v, v_scales, block_table or v_cache)
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"got k_cache of {k_cache.dtype} and v_cache of {v_cache.dtype}; they must be the same")
    if k_scales and v_scales and _are_given(k_scales) != _are_given(v_scales):
        raise ValueError(
            f"got k_scales {list(k_scales.shape)} and v_scales {list(v_scales.shape)}; both must be of tokens, or both "
            "of whole sequences"
        )
    batch = given.batch
    if batch <= 0 < k.shape[0]:
        raise ValueError(f"got k {list(k.shape)} and no sequences; there must be one for each token")
    check_indices(k.device, (batch,), rows=rows, starts=starts)
    check_indices(k.device, (batch + 1,), cu_seqlens=cu_seqlens)
    if block_table is not None:
        check_block_table(k.device, block_table, k_cache)
    check_indices(k.device, (1,), limit=limit)
    if rotary:
        check_rotation(k, *rotary)
    return given


def _variant_of(given: Geometries) -> AppendVariant:
    """What its kernel is compiled for."""
    k, v, dtype = given.k, given.v, given.k_cache.dtype
    k_head, v_head = k.shape[2] * dtype.itemsize // 16, v.shape[2] * dtype.itemsize // 16
    vectors = k.shape[1] * k_head, k_head, k.shape[1] * v_head, v_head
    rotation = Turning(k.dtype, given.rotary[0].shape[1]) if given.rotary else None
    dtypes = (k.dtype, dtype) if given.k_scales else None
    return AppendVariant(*vectors, rotation, dtypes, _are_given(given.k_scales))


def _shape_of(given: Geometries, variant: AppendVariant) -> tuple[int, ...]:
    """The numbers in `AppendShape`."""
    k, v, k_cache, v_cache = given[:4]
    per_block = 1
    if not variant.rotation and not variant.dtypes:
        per_block = tokens_of_block(k.shape[0], variant.k_vectors, multiprocessors(k.device))
    block_size, table = (k_cache.shape[1], given.block_table.strides[0] * 4) if given.block_table else (0, 0)
    new = [stride * k.dtype.itemsize for stride in (*k.strides[:2], *v.strides[:2])]
    cached = [stride * k_cache.dtype.itemsize for stride in (*k_cache.strides[:3], *v_cache.strides[:3])]
    by_token = [each.strides if each else (0, 0, 0) for each in (given.k_scales, given.v_scales)]
    scales = [stride * 4 for row, *token, head in by_token for stride in (row, *(token or [0]), head)]
    return k.shape[0], per_block, given.batch, block_size, table, *new, *cached, *scales


def _are_given(scales: Geometry | None) -> bool:
    """Whether there are scales, and they are those of whole sequences."""
    return scales is not None and len(scales.shape) == 2


def _check_cache(name: str, cache: Geometry, new: Geometry, scales: Geometry | None, rows: Geometry) -> None:
    """A cache that new tokens can be written to as they are, or as 8-bit numbers with their scales: of each token, or
    given for each of the `rows` that a tensor has."""
    if scales is not None or (cache.dtype in LARGEST and cache.dtype != new.dtype):
        check_scales(name, cache, new, scales, rows if _are_given(scales) else None)
        new = Geometry(new.shape, new.strides, cache.dtype, new.device)
    check_cache(name, cache, like=new)
    check_written(**{name: cache})
    if scales is not None and not _are_given(scales):
        check_written(**{f"{name[0]}_scales": scales})


@cache
def append_kernel(variant: AppendVariant) -> Kernel:
    """The kernel for a geometry; with a rotation a second block of each token rotates its query."""
    structs = (AppendAddresses, AppendShape, Rotation) if variant.rotation else (AppendAddresses, AppendShape)
    if variant.rotation or variant.dtypes:
        return Kernel(make_changing_append, (variant,), structs, THREADS)
    return Kernel(make_append, (variant,), structs, 2 * THREADS, blocks_per_sm=4)
