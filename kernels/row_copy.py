"""copy_tokens: copies token ranges between rows, as for copy-on-write tails and beam reordering."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from numba import cuda

from .checks import ALIGNMENT, Geometry, Key, check_cache, check_device, check_indices, check_written, refuse_alignment
from .compiler import Kernel
from .launches import Launch, index_of
from .memory import load_i32
from .plans import Plans
from .vectors import THREADS, move_heads


class CopyAddresses(NamedTuple):
    """Where tensors lie, as `copy_tokens` has them."""

    source: int
    target: int
    source_rows: int
    source_starts: int
    target_rows: int
    target_starts: int
    lengths: int


class CopyStrides(NamedTuple):
    """Bytes from one row, token and head to the next."""

    source_row: int
    source_token: int
    source_head: int
    target_row: int
    target_token: int
    target_head: int


def copy_tokens(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: torch.Tensor,
    source_starts: torch.Tensor,
    target_rows: torch.Tensor,
    target_starts: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
) -> None:
    """Copies ranges of tokens between rows, on the current stream.

    Range `i` is the `lengths[i]` tokens of row `source_rows[i]` from `source_starts[i]` on. Ranges that are written
    must overlap neither each other nor any that is read.

    Args:
        source: `[rows, tokens, num_kv_heads, head_dim]`, any dtype, any strides of rows, tokens and heads.
        target: likewise, with the same heads and widths; may be `source`.
        source_rows: int32 `[ranges]`, on the device, like the next four.
        source_starts: the first token of each range there.
        target_rows: the row that each range goes to.
        target_starts: where its first token goes.
        lengths: how many tokens it has.
        max_length: none of `lengths` is greater; tokens behind it are not copied.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or alignments do not fit; nothing is copied.
    """
    if torch.compiler.is_compiling():
        torch.ops.vmmkv.copy_tokens(
            source, target, source_rows, source_starts, target_rows, target_starts, lengths, max_length
        )
        return
    tensors = (source, target, source_rows, source_starts, target_rows, target_starts, lengths)
    launch, addresses = _launches.find(tensors, max_length)
    if (addresses[0] | addresses[1]) % ALIGNMENT:
        refuse_alignment(*addresses[:2])
    launch.run(*addresses)


@lru_cache(1024)
def _prepare(max_length: int, geometry: tuple[Key | None, ...]) -> Launch:
    """Checks a call and prepares its launch."""
    if max_length < 0:
        raise ValueError(f"got max_length {max_length}; it must not be negative")
    source, target, *indices = (Geometry._make(key) for key in geometry if key)
    check_device(source.device)
    check_cache("source", source)
    check_written(target=target)
    check_cache("target", target, like=source)
    check_indices(source.device, indices[-1].shape[:1], **dict(zip(CopyAddresses._fields[2:], indices)))
    size = source.dtype.itemsize
    head_vectors = source.shape[3] * size // 16
    strides = CopyStrides(*(stride * size for stride in (*source.strides[:3], *target.strides[:3])))
    kernel, blocks = copy_kernel(source.shape[2] * head_vectors, head_vectors), (max_length, indices[-1].shape[0])
    return Launch(kernel, blocks, index_of(source.device), (*[None] * len(CopyAddresses._fields), *strides))


_launches = Plans(_prepare)


torch.library.custom_op("vmmkv::copy_tokens", copy_tokens, mutates_args=("target",))


@cache
def copy_kernel(vectors: int, head_vectors: int) -> Kernel:
    """The kernel for a geometry, in vectors of 16 bytes."""
    return Kernel(make_copy, (vectors, head_vectors), (CopyAddresses, CopyStrides), THREADS)


def make_copy(vectors: int, head_vectors: int) -> Any:
    """The kernel as a Python function; the arguments are constants to the compiler."""

    def kernel(at: CopyAddresses, strides: CopyStrides) -> None:
        token, copied = cuda.blockIdx.x, cuda.blockIdx.y * 4
        if token < load_i32(at.lengths + copied):
            first = at.source + load_i32(at.source_rows + copied) * strides.source_row
            second = at.target + load_i32(at.target_rows + copied) * strides.target_row
            first += (load_i32(at.source_starts + copied) + token) * strides.source_token
            second += (load_i32(at.target_starts + copied) + token) * strides.target_token
            move_heads(first, second, strides.source_head, strides.target_head, vectors, head_vectors)

    return kernel
