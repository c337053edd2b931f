"""Kernels by name, and how a process that did not make a kernel loads it.

Adapters have the calling convention of `check_attention`. They import what they call when they are called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..errors import ArgumentError

Tensor = torch.Tensor


def sdpa(backend: SDPBackend, masked: bool, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    """torch's SDPA with a backend pinned: with slices of each row's length, or with one mask for all rows."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    attend: Any = partial(scaled_dot_product_attention, enable_gqa=q.shape[1] != k.shape[1])
    with sdpa_kernel(backend):
        if masked:
            seen = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
            return attend(q, k, v, attn_mask=seen[:, None, None]).transpose(1, 2)
        counts = lengths.tolist()
        if len(set(counts)) == 1:
            return attend(q, k[:, :, : counts[0]], v[:, :, : counts[0]]).transpose(1, 2)
        rows = [slice(index, index + 1) for index in range(len(counts))]
        each = [attend(q[row], k[row, :, :count], v[row, :, :count]) for row, count in zip(rows, counts)]
        return torch.cat(each).transpose(1, 2)


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    """FlashAttention-3's forward with lengths on the device (package fa3-fwd)."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)


def flashinfer(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    """FlashInfer's decode of a paged cache, with each row as one page."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, _, heads, head_dim = q.shape
    used = lengths > 0
    starts = torch.cat([used.new_zeros(1, dtype=torch.int32), used.cumsum(0).int()])
    ends = torch.where(used, lengths, k.shape[1])
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device=q.device), "NHD")
    shape = heads, k.shape[2], head_dim, k.shape[1]
    wrapper.plan(starts, used.nonzero().flatten().int(), ends, *shape, q_data_type=q.dtype, kv_data_type=k.dtype)
    return wrapper.run(q.flatten(0, 1), (k, v)).view(batch, 1, heads, head_dim)


def flashinfer_single(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """FlashInfer's decode of one sequence, on a slice of each row."""
    from flashinfer import single_decode_with_kv_cache

    counts = lengths.tolist()
    each = [single_decode_with_kv_cache(q[i, 0], k[i, :count], v[i, :count]) for i, count in enumerate(counts)]
    return torch.stack(each)[:, None]


def rows_decode(kernel: str, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    from ..kernels import decode

    return decode(q, k, v, lengths, kernel=kernel)


BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
TARGETS: dict[str, Callable[..., Any]] = {
    **{f"sdpa-{name}": partial(sdpa, backend, False) for name, backend in BACKENDS.items()},
    **{f"sdpa-{name}-masked": partial(sdpa, backend, True) for name, backend in BACKENDS.items() if name != "flash"},
    "fa3": flash_attention_3,
    "flashinfer": flashinfer,
    "flashinfer-single": flashinfer_single,
    "vmmkv": partial(rows_decode, "auto"),
    "vmmkv-plain": partial(rows_decode, "plain"),
}
"""Kernels that have a name."""


def name_of(kernel: str | Callable[..., Any]) -> str:
    """The name by which another process loads a kernel."""
    if isinstance(kernel, str):
        return kernel
    module, name = getattr(kernel, "__module__", ""), getattr(kernel, "__qualname__", "")
    if not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not kernel:
        raise ArgumentError(
            f"got {kernel!r} as a kernel, which another process has to find; give a function at the top level of a "
            "module, or its name as 'package.module:function'"
        )
    return f"{inspect.getfile(kernel) if module == '__main__' else module}:{name}"


@cache
def load(target: str) -> Callable[..., Any]:
    """The kernel called `target`: one of `TARGETS`, `package.module:function` or `path/to/file.py:function`."""
    if target in TARGETS:
        if target.startswith("vmmkv"):
            from ..kernels import decode  # noqa: F401 - imported once, and not by each process that is forked
        return TARGETS[target]
    place, _, name = target.rpartition(":")
    if not place:
        raise ArgumentError(
            f"asked for kernel {target!r}; give package.module:function, file.py:function, or {', '.join(TARGETS)}"
        )
    try:
        if place.endswith(".py"):  # its neighbours can be imported as well, as from a script
            path = Path(place).resolve(strict=True)
            sys.path.insert(0, str(path.parent))
        found = vars(import_module(path.stem if place.endswith(".py") else place))
    except Exception as error:
        raise ArgumentError(f"asked for kernel {target!r}; {place} fails: {type(error).__name__}: {error}") from None
    if not callable(found.get(name)):
        raise ArgumentError(f"asked for kernel {target!r}; {Path(place).name} has no function {name}")
    kernel: Callable[..., Any] = found[name]
    return kernel
