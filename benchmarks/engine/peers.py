"""Attention of others over what a backend holds: FlashAttention-3 on rows, FlashInfer on blocks. And all by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from .attention import Attend, Batch, Write, numba_attention, numba_write, torch_attention, torch_write
from .backend import KVBackend, Numbers, pinned
from .paged import PagedKV

WORKSPACE_BYTES = 512 << 20


def fa3_attention(kv: KVBackend) -> Attend:
    """FlashAttention-3 on rows, which read as whole tiles: behind their ends there must be `vmm.OVERREAD`."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    def attend(layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        call = partial(flash_attn_with_kvcache, cache_seqlens=batch.seq_lens, cache_batch_idx=batch.rows, causal=True)
        k, v = kv.kv(layer)
        if not batch.prompts:
            return call(q.unsqueeze(1), k, v).squeeze(1)
        assert batch.host is not None
        return call(q, k, v, cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=int(batch.host[2].max()))

    return attend


class FlashInfer:
    """FlashInfer on blocks: a call for sequences that decode, and one for prompts behind them.

    Both follow a plan, made on the host from lengths and tables before the step; one of decoding goes for a CUDA graph
    as well, if it was made for its size. Plans are copied from buffers that the next one of its kind overwrites.
    """

    def __init__(self, kv: PagedKV) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self.kv, self.device = kv, kv.pool.device
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.make_decoding = partial(BatchDecodeWithPagedKVCacheWrapper, self.workspace, "NHD", use_tensor_cores=True)
        self.prompts = BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
        self.decoding: dict[int, Any] = {}
        """By size of the graph; 0: of no graph."""
        self.size = 0
        """Of that which was planned last."""
        self.copied = torch.cuda.Event() if self.device.type == "cuda" else None

    def plan(self, host: Numbers, prompts: int, num_heads: int, size: int = 0) -> None:
        """Prepares a step.

        Args:
            host: as of a `Batch`.
            prompts: how many of them are prompts.
            size: of the graph, to which those that decode are padded; 0: it is in no graph.
        """
        if self.copied:
            self.copied.synchronize()
        rows, starts, counts = host
        lengths, decoding = starts + counts, len(rows) - prompts
        about = num_heads, self.kv.pool.shape[-2], self.kv.pool.shape[-1], self.kv.block_size
        types = {"q_data_type": self.kv.pool.dtype, "kv_data_type": self.kv.pool.dtype}
        if size or decoding:
            self.size, padding = size, (0, max(size - decoding, 0))
            # Each that pads has the one token that every block has room for.
            padded = np.pad(rows[:decoding], padding), np.pad(lengths[:decoding], padding, constant_values=1)
            if size not in self.decoding:
                self.decoding[size] = self._make_decoding(size)
            self.decoding[size].plan(*self._pages(*padded), *about, **types)
        if prompts:
            cu_seqlens = torch.from_numpy(np.append(0, counts[decoding:].cumsum())).int()
            pages = self._pages(rows[decoding:], lengths[decoding:])
            self.prompts.plan(cu_seqlens, *pages, *about, causal=True, **types)
        if self.copied:
            self.copied.record()

    def __call__(self, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attention of a step that has been planned, see `Attend`."""
        kv, out = self.kv.kv(layer), torch.empty_like(q)  # without `out` it fills one with zeros
        decoding = len(batch.rows) - batch.prompts
        if decoding:
            self.decoding[self.size].run(q[:decoding], kv, out=out[:decoding])
        if batch.prompts:
            self.prompts.run(q[decoding:], kv, out=out[decoding:])
        return out

    def _make_decoding(self, size: int) -> Any:
        """What decodes: for a graph with buffers of its own."""
        if not size:
            return self.make_decoding()
        ends, lasts, blocks = (
            torch.zeros(count, dtype=torch.int32, device=self.device)
            for count in (size + 1, size, self.kv.pool.shape[1] + size)
        )
        return self.make_decoding(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=ends,
            paged_kv_indices_buffer=blocks,
            paged_kv_last_page_len_buffer=lasts,
        )

    def _pages(self, rows: Numbers, lengths: Numbers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tables as FlashInfer takes them: where each one's blocks begin, the blocks, tokens in the last one. Blocks
        alone go to the device here: it reads the others on the host."""
        size = self.kv.block_size
        counts = -(-lengths // size)
        used = np.arange(counts.max()) < counts[:, None]
        blocks = pinned(self.kv.table[rows, : counts.max()][used], self.device).to(self.device, non_blocking=True)
        ends, lasts = np.append(0, counts.cumsum()), lengths - (counts - 1) * size
        return torch.from_numpy(ends).int(), blocks, torch.from_numpy(lasts).int()


ATTENTION: dict[str, Callable[[Any], Attend]] = {
    "numba": numba_attention,
    "torch": torch_attention,
    "fa3": fa3_attention,
    "flashinfer": FlashInfer,
}
WRITE: dict[str, Callable[[Any], Write]] = {"numba": numba_write, "torch": torch_write}
