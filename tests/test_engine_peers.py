"""Attention of others in the serving engine, with stand-ins that read what they are told as FlashAttention-3 0.0.3 (the
wheel fa3-fwd) and FlashInfer 0.6.6 do: the same tokens as without any cache."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import (
    CPU,
    RNG,
    check_greedy,
    check_nothing_is_kept,
    logits_without_cache,
    random_requests,
    tiny_model,
)
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.engine.attention import Batch, torch_attention
from benchmarks.engine.engine import Engine
from benchmarks.engine.paged import PagedKV
from benchmarks.engine.peers import FlashInfer
from benchmarks.engine.vmm import OVERREAD
from vmmkv import KVLayout

Tensor = torch.Tensor
TILE = 224
"""Tokens that FlashAttention-3 may read at a time."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of the last tokens of a sequence, `[tokens, heads, head_dim]`."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    causal: bool,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> Tensor:
    assert causal
    assert cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32
    if cu_seqlens_q is None:
        queries = list(q)
    else:
        counts = cu_seqlens_q.diff().tolist()
        assert (max_seqlen_q, cu_seqlens_q.dtype) == (max(counts), torch.int32)
        queries = list(q.split(counts))
    outs = []
    for own, row, length in zip(queries, cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True):
        for cache in (k_cache, v_cache):
            assert cache[row, : length + TILE].isfinite().all()  # a fault where nothing is mapped
        outs.append(attend(own, k_cache[row, :length], v_cache[row, :length]))
    return torch.cat(outs) if cu_seqlens_q is not None else torch.stack(outs)


class Wrapper:
    """Keeps what it is told, and reads it when it runs."""

    def __init__(self, workspace: Tensor, layout: str, **buffers: Any) -> None:
        assert layout == "NHD"
        self.buffers = buffers

    def plan_pages(self, indptr: Tensor, indices: Tensor, lasts: Tensor, *sizes: int, **types: torch.dtype) -> None:
        assert indptr.dtype == indices.dtype == lasts.dtype == torch.int32
        assert indptr[-1] == len(indices)
        assert types.keys() == {"q_data_type", "kv_data_type"}
        self.pages, self.sizes = [blocks.tolist() for blocks in indices.tensor_split(indptr[1:-1].long())], sizes
        self.lasts = lasts.tolist()

    def run_pages(self, queries: tuple[Tensor, ...], kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        assert self.sizes == (queries[0].shape[1], *kv[0].shape[-2:], kv[0].shape[1])
        outs = []
        for own, blocks, last in zip(queries, self.pages, self.lasts, strict=True):
            assert 0 < last <= kv[0].shape[1]
            length = (len(blocks) - 1) * kv[0].shape[1] + last
            outs.append(attend(own, *(cache[blocks].flatten(0, 1)[:length] for cache in kv)))
        out.copy_(torch.cat(outs))


class Decode(Wrapper):
    plan = Wrapper.plan_pages

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        assert self.buffers.pop("use_tensor_cores", True)
        if self.buffers:
            assert self.buffers["use_cuda_graph"]
            assert len(self.buffers["paged_kv_last_page_len_buffer"]) == len(q) == len(self.lasts)
            assert len(self.buffers["paged_kv_indptr_buffer"]) == len(q) + 1
            assert len(self.buffers["paged_kv_indices_buffer"]) >= sum(map(len, self.pages))
        self.run_pages(q.split(1), kv, out)


class Prefill(Wrapper):
    def plan(self, cu_seqlens: Tensor, *pages: Any, causal: bool, **types: torch.dtype) -> None:
        assert causal
        assert cu_seqlens.dtype == torch.int32
        self.counts = cu_seqlens.diff().tolist()
        self.plan_pages(*pages, **types)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        self.run_pages(q.split(self.counts), kv, out)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    fa3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": Decode, "BatchPrefillWithPagedKVCacheWrapper": Prefill}
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fa3)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**wrappers))


@pytest.mark.parametrize(("backend", "peer"), [("vmm", "fa3"), ("paged", "flashinfer")])
def test_peers_generate_what_a_model_without_a_cache_would(backend: str, peer: str) -> None:
    model = tiny_model()
    prompts, outputs = random_requests(12, 60, 30)
    options = OVERREAD if peer == "fa3" else {}
    memory = 200 * 16 * 512 if peer == "fa3" else 20 * 16 * 512  # rows take it beyond their ends, too
    engine = Engine(model, backend, memory, 5, 160, 2000, chunk=48, attention=peer, options=options)
    run = engine.run(prompts, outputs)
    assert run.finished == len(prompts)
    check_greedy(logits_without_cache(model), prompts, run)
    check_nothing_is_kept(engine, backend)
    engine.close()


def test_a_graph_of_flashinfer_reads_padding_as_sequences_of_one_token() -> None:
    heads, kv_heads, dim = 4, 2, 16
    kv = PagedKV(KVLayout(1, kv_heads, dim, torch.float32), 6, 100, 1 << 20, CPU)
    kv.pool.normal_()
    lengths = RNG.integers(1, 100, 4)
    rows = np.array([kv.admit(int(length)) for length in lengths])
    assert kv.extend(rows, lengths)
    host = np.stack([rows, lengths - 1, np.ones_like(rows)])
    flashinfer = FlashInfer(kv)
    q = torch.randn(8, heads, dim)
    padded = np.pad(host, ((0, 0), (0, 4)))
    rows_of, starts, _ = map(torch.from_numpy, padded.astype(np.int32))
    batch = Batch(rows_of, starts, starts + 1, torch.arange(9).clamp(max=4).int(), None, prompts=0)
    flashinfer.plan(host, 0, heads, 8)
    found = flashinfer(0, q, batch)
    alone = Batch(rows_of[:4], starts[:4], starts[:4] + 1, torch.arange(5).int(), host, prompts=0)
    torch.testing.assert_close(found[:4], torch_attention(kv)(0, q[:4], alone))
    assert found.isfinite().all()
