"""Other attention kernels, as they would be called: each maker returns a call, or raises where it cannot.

They are imported when they are measured; a machine has some of them or none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.environment import version_of

from .batches import DTYPE, HEAD_DIM, KV, NUM_HEADS, NUM_KV_HEADS, Batch
from .timing import Call

WORKSPACE_BYTES = 512 << 20
DENSE = "contiguous", "token-major"


class UnsupportedError(Exception):
    """A peer does not do what a case asks for."""


class Peer(NamedTuple):
    """A peer, the layouts that it reads, and what makes a call of it."""

    name: str
    layouts: tuple[str, ...]
    make: Callable[[Batch, KV], Call]


def peers(q_len: int) -> list[Peer]:
    """The peers for batches of so many queries a sequence."""
    dense = [
        Peer("SDPA, cuDNN", DENSE, partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
        Peer("SDPA, flash", DENSE, partial(sdpa, SDPBackend.FLASH_ATTENTION)),
        Peer("FlashAttention-3", DENSE, flash_attention_3),
    ]
    if q_len > 1:
        return [*dense, Peer("FlashInfer", ("paged-16",), flashinfer_prefill)]
    return [
        *dense,
        Peer("FlashInfer, tensor cores", ("paged-16",), partial(flashinfer_decode, True)),
        Peer("FlashInfer, CUDA cores", ("paged-16",), partial(flashinfer_decode, False)),
    ]


def versions() -> dict[str, str | None]:
    """Versions of the peers; None where one is not installed."""
    cudnn, names = torch.backends.cudnn.version(), ("fa3-fwd", "flashinfer-python")
    return {"cudnn": str(cudnn) if cudnn else None} | {name: version_of(name) for name in names}


def sdpa(backend: SDPBackend, batch: Batch, kv: KV) -> Call:
    """torch's scaled_dot_product_attention with the backend pinned: it runs that one or raises."""
    case = batch.case
    if not case.even:
        raise UnsupportedError("takes sequences of one length")
    seq_len = case.seq_lens[0]
    q, k, v = (tensor.transpose(1, 2) for tensor in (batch.q, kv.k[:, :seq_len], kv.v[:, :seq_len]))
    mask: dict[str, Any] = {"is_causal": case.causal and case.q_len > 1}
    if case.causal and 1 < case.q_len < seq_len:
        if backend == SDPBackend.CUDNN_ATTENTION:
            raise UnsupportedError("torch gives it no causal mask for queries behind a prefix but a dense one")
        mask = {"attn_mask": causal_lower_right(case.q_len, seq_len)}

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask).transpose(1, 2)

    return call


def flash_attention_3(batch: Batch, kv: KV) -> Call:
    """FlashAttention-3, built without block tables; lengths are given only where they differ, its faster way. It reads
    whole tiles then, beyond a sequence's end: see `OVERREAD`."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    case = batch.case
    k, v, seq_lens = kv.k, kv.v, batch.seq_lens
    if case.even:
        k, v, seq_lens = k[:, : case.seq_lens[0]], v[:, : case.seq_lens[0]], None
    return partial(flash_attn_with_kvcache, batch.q, k, v, cache_seqlens=seq_lens, causal=case.causal)


def flashinfer_decode(tensor_cores: bool, batch: Batch, kv: KV) -> Call:
    """FlashInfer's decode, planned here, outside of what is timed."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(make_workspace(batch), "NHD", use_tensor_cores=tensor_cores)
    block_size = kv.k.shape[1]
    wrapper.plan(
        *page_table(batch, kv), NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, block_size, q_data_type=DTYPE, kv_data_type=DTYPE
    )
    return partial(wrapper.run, batch.q.flatten(0, 1), (kv.k, kv.v))


def flashinfer_prefill(batch: Batch, kv: KV) -> Call:
    """FlashInfer's prefill, planned here; it chooses its backend."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(make_workspace(batch), "NHD")
    block_size = kv.k.shape[1]
    wrapper.plan(
        batch.cu_seqlens,
        *page_table(batch, kv),
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        block_size,
        causal=batch.case.causal,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    return partial(wrapper.run, batch.q.flatten(0, 1), (kv.k, kv.v))


def make_workspace(batch: Batch) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=batch.q.device)


def page_table(batch: Batch, kv: KV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block table as FlashInfer takes it: where each sequence's blocks begin, the blocks, tokens in the last one."""
    assert kv.block_table is not None
    block_size = kv.k.shape[1]
    counts = (batch.seq_lens + block_size - 1) // block_size
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(kv.block_table.shape[1], device=counts.device) < counts[:, None]
    return indptr, kv.block_table[used], batch.seq_lens - (counts - 1) * block_size
