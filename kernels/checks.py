"""What kernels ask of their arguments, checked before anything is launched."""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes that a thread moves at a time; addresses and strides are multiples of it."""


def check_new(k: torch.Tensor, v: torch.Tensor) -> None:
    """K and V of new tokens: as many tokens and heads, in whole vectors."""
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2]:
        raise ValueError(f"got k {list(k.shape)} and v {list(v.shape)}; both must be [tokens, num_kv_heads, head_dim]")
    for name, tensor in (("k", k), ("v", v)):
        _check_alignment(name, tensor)


def check_cache(name: str, cache: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """A cache in whole vectors, that tensors like `like` can be written to."""
    if cache.ndim != 4:
        raise ValueError(f"got {name} {list(cache.shape)}; it must be [rows, tokens, num_kv_heads, head_dim]")
    if like is not None:
        if cache.shape[2:] != like.shape[-2:]:
            raise ValueError(f"got {name} {list(cache.shape)} for {list(like.shape)}; heads or widths differ")
        if cache.dtype != like.dtype:
            raise TypeError(f"got {name} of {cache.dtype} for {like.dtype}; they must be the same")
        if cache.device != like.device:
            raise ValueError(f"got {name} on {cache.device} for a tensor on {like.device}")
    _check_alignment(name, cache)


def check_indices(device: torch.device, **tensors: tuple[torch.Tensor, int | None]) -> None:
    """Index tensors: int32, contiguous, on the device, and of the given length where there is one."""
    for name, (tensor, length) in tensors.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"got {name} of {tensor.dtype}; it must be torch.int32")
        if tensor.device != device:
            raise ValueError(f"got {name} on {tensor.device}; K and V are on {device}")
        if tensor.stride(-1) != 1 or (length is not None and tensor.shape != (length,)):
            raise ValueError(
                f"got {name} {list(tensor.shape)}; it must be contiguous"
                + (f" [{length}]" if length is not None else "")
            )


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    size = tensor.element_size()
    steps = [tensor.shape[-1] * size, *(stride * size for stride in tensor.stride()[:-1])]
    if tensor.stride(-1) != 1 or tensor.data_ptr() % ALIGNMENT or any(step % ALIGNMENT for step in steps):
        raise ValueError(
            f"{name} has strides {tensor.stride()} and a last dimension of {tensor.shape[-1]}: the last stride must be "
            f"1, and its address, width and other strides multiples of {ALIGNMENT} bytes"
        )
