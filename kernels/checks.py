"""What kernels ask of their arguments, checked before anything is launched.

All but the addresses is checked once for each geometry: looking at tensors costs more than launching a kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ALIGNMENT = 16
"""Bytes that a thread moves at a time; addresses and strides are multiples of it."""


class Geometry(NamedTuple):
    """A tensor without its data. Strides are in elements."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


Key = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""What a `Geometry` is made of: a plain tuple is made in half the time."""


def key(tensor: torch.Tensor) -> Key:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check_alignment(*pointers: int) -> None:
    """Raises `ValueError` unless addresses are multiples of 16 bytes."""
    for pointer in pointers:
        if pointer % ALIGNMENT:
            raise ValueError(f"got a tensor at {pointer:#x}; its address must be a multiple of {ALIGNMENT} bytes")


def check_new(k: Geometry, v: Geometry) -> None:
    """K and V of new tokens: as many tokens and heads, in whole vectors."""
    if len(k.shape) != 3 or len(v.shape) != 3 or k.shape[:2] != v.shape[:2]:
        raise ValueError(f"got k {list(k.shape)} and v {list(v.shape)}; both must be [tokens, num_kv_heads, head_dim]")
    _check_vectors("k", k)
    _check_vectors("v", v)


def check_cache(name: str, cache: Geometry, like: Geometry | None = None) -> None:
    """A cache in whole vectors, that tensors like `like` can be written to."""
    if len(cache.shape) != 4:
        raise ValueError(f"got {name} {list(cache.shape)}; it must be [rows, tokens, num_kv_heads, head_dim]")
    if like is not None:
        if cache.shape[2:] != like.shape[-2:]:
            raise ValueError(f"got {name} {list(cache.shape)} for {list(like.shape)}; heads or widths differ")
        if cache.dtype != like.dtype:
            raise TypeError(f"got {name} of {cache.dtype} for {like.dtype}; they must be the same")
        if cache.device != like.device:
            raise ValueError(f"got {name} on {cache.device} for a tensor on {like.device}")
    _check_vectors(name, cache)


def check_indices(device: torch.device, shape: tuple[int, ...] | None, **tensors: Geometry) -> None:
    """Index tensors: int32, on the device, without gaps, and of the given shape where there is one."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"got {name} of {tensor.dtype}; it must be torch.int32")
        if tensor.device != device:
            raise ValueError(f"got {name} on {tensor.device}; K and V are on {device}")
        if tensor.strides[-1] != 1 or (shape is not None and tensor.shape != shape):
            raise ValueError(f"got {name} {list(tensor.shape)}; it must be contiguous {list(shape or ())}")


def _check_vectors(name: str, tensor: Geometry) -> None:
    size = tensor.dtype.itemsize
    steps = [tensor.shape[-1] * size, *(stride * size for stride in tensor.strides[:-1])]
    if tensor.strides[-1] != 1 or any(step % ALIGNMENT for step in steps):
        raise ValueError(
            f"{name} has strides {tensor.strides} and a last dimension of {tensor.shape[-1]}: the last stride must be "
            f"1, its width and other strides multiples of {ALIGNMENT} bytes"
        )
