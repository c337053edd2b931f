"""Small attention kernels on host memory that read K and V by address, each with one fault planted; one has none.

They have the calling convention of `vmmkv.testing.check_attention`, fp32.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
Array = np.ndarray[Any, np.dtype[Any]]


def record(view: Tensor, offset: int) -> Array:
    """The heads of a token, `[kv_heads, head_dim]`, so many elements behind the first of a view."""
    shape = tuple(view.shape[2:])
    address = view.data_ptr() + offset * view.itemsize
    return np.ctypeslib.as_array((ctypes.c_float * (shape[0] * shape[1])).from_address(address)).reshape(shape)


def offset_of(view: Tensor, row: int, token: int) -> int:
    return row * view.stride(0) + token * view.stride(1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    offset: Callable[[Tensor, int, int], int] = offset_of,
    v_offset: Callable[[Tensor, int, int], int] | None = None,
    reads: Callable[[int], int] = lambda length: length,
    hides: Callable[[Array, int], Array] = lambda values, length: values[:length],
    scale: bool = True,
) -> Tensor:
    """Attention, row by row.

    Args:
        offset: elements from the first of a view to a token; for V `v_offset`, if there is one.
        reads: how many tokens are read, by the length.
        hides: what is left of V, or of the weights, that were read.
    """
    out, groups = torch.zeros_like(q), q.shape[2] // k.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        tokens = range(reads(length))
        keys = np.stack([record(k, offset(k, row, token)) for token in tokens]).repeat(groups, 1)
        values = np.stack([record(v, (v_offset or offset)(v, row, token)) for token in tokens]).repeat(groups, 1)
        scores = np.einsum("qhd,thd->tqh", q[row].numpy(), keys) * (q.shape[3] ** -0.5 if scale else 1.0)
        weights = np.exp(scores - scores[:length].max(0))
        weights[length:] = 0
        weights /= weights.sum(0)
        found = np.einsum("tqh,thd->qhd", hides(weights, length), hides(values, length))
        out[row] = torch.from_numpy(found)
    return out


def right(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, lengths)


forgets_the_scale = partial(attend, scale=False)


def ignores_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, torch.full_like(lengths, k.shape[1]))


def divides_zero_by_zero(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, lengths) / (lengths > 0)[:, None, None, None]


multiplies_by_zero = partial(attend, reads=lambda length: -(-length // 8) * 8, hides=lambda values, length: values)
fetches_one_more = partial(attend, reads=lambda length: length + 1)


def reads_whole_tiles(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, lengths, reads=lambda length: -(-length // 16) * 16)


def reads_the_whole_row(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, lengths, reads=lambda length: k.shape[1])


takes_tokens_for_dense = partial(
    attend, offset=lambda view, row, token: row * view.stride(0) + token * view.shape[2] * view.shape[3]
)
takes_rows_for_dense = partial(
    attend, offset=lambda view, row, token: (row * view.shape[1] + token) * view.stride(1)
)  # fmt: skip


def takes_strides_of_k_for_v(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, lengths, v_offset=lambda view, row, token: offset_of(k, row, token))


def wrapped(offset: int) -> int:
    """A number as 32 bits hold it, with a sign."""
    return (offset + 2**31) % 2**32 - 2**31


wraps_bytes = partial(attend, offset=lambda *at: wrapped(4 * offset_of(*at)) // 4)
wraps_rows = partial(
    attend, offset=lambda view, row, token: wrapped(row * view.stride(0)) + token * view.stride(1)
)  # fmt: skip


def scales_k_in_place(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    for row, length in enumerate(lengths.tolist()):
        k[row, :length] *= 0.5
    out = attend(2 * q, k, v, lengths)
    for row, length in enumerate(lengths.tolist()):
        k[row, :length] *= 2
    return out


_kept: dict[int, Tensor] = {}


def keeps_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k, v, _kept.setdefault(lengths.data_ptr(), lengths.clone()))


def refuses_far_tokens(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    if k.shape[1] * k.stride(1) > 2**31:
        raise ValueError("K spans more than 2**31 elements")
    return attend(q, k, v, lengths)


def exits(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    os._exit(3)


def never_returns(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    threading.Event().wait()
    return q


def says_something(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    print("words of a kernel", flush=True)
    return attend(q, k, v, lengths)
