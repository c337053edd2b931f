"""Attention over what a backend holds: our kernels, torch's on a machine without a GPU, and those of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from vmmkv.kernels import RotateHalf, append, decode, mixed, prefill

from .backend import KVBackend, pinned
from .model import Angles, rotate
from .paged import PagedKV

WORKSPACE_BYTES = 512 << 20
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Batch:
    """New tokens of several sequences, on the device. All int32.

    Attributes:
        rows: `[batch]`, the row of each sequence.
        starts: `[batch]`, the position of each one's first new token.
        seq_lens: `[batch]`, tokens of each, with the new ones; 0: padding.
        cu_seqlens: `[batch + 1]`, where each one's new tokens begin.
        host: rows, starts and counts of new tokens once more, `[3, batch]`, for what calls a kernel for each sequence;
            None in a batch that a graph is made of.
        prompts: how many of them are prompts, or chunks of these, in a graph at most; others have one new token.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor
    host: Numbers | None
    prompts: int


Write = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Angles, Batch], torch.Tensor]
"""Puts K and V of new tokens into a layer's cache: takes what `Attend` of a model does. It rotates K, and returns the
queries rotated, perhaps where they were."""
Attend = Callable[[int, torch.Tensor, Batch], torch.Tensor]
"""Attention of new tokens, whose K and V are in the cache: takes the layer, q `[tokens, num_heads, head_dim]`."""


def numba_write(kv: KVBackend) -> Write:
    """Our kernel, for rows and for blocks."""

    def write(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: Angles, batch: Batch
    ) -> torch.Tensor:
        rotary = RotateHalf(q, q, *angles)
        append(k, v, *kv.kv(layer), batch.rows, batch.starts, batch.cu_seqlens, kv.block_table, rotary)
        return q

    return write


def numba_attention(kv: KVBackend) -> Attend:
    """Our kernels, for rows and for blocks."""

    def attend(layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        k, v = kv.kv(layer)
        lengths, table = (batch.seq_lens, batch.rows), kv.block_table
        if not batch.prompts:
            return decode(q.unsqueeze(1), k, v, *lengths, block_table=table).squeeze(1)
        if batch.host is not None and batch.prompts == len(batch.rows):
            return prefill(q, k, v, batch.cu_seqlens, *lengths, block_table=table)
        return mixed(q, k, v, batch.cu_seqlens, *lengths, block_table=table, max_prompts=batch.prompts)

    return attend


def torch_write(kv: KVBackend) -> Write:
    """Plain indexing, a sequence at a time."""

    def write(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: Angles, batch: Batch
    ) -> torch.Tensor:
        k = rotate(k, angles)
        for row, start, new in split(batch):
            for cache, tokens in zip(kv.kv(layer), (k[new], v[new])):
                if kv.block_table is None:
                    cache[row, start : start + len(tokens)] = tokens
                else:
                    places = torch.arange(start, start + len(tokens))
                    blocks = kv.block_table[row, places // cache.shape[1]]
                    cache[blocks, places % cache.shape[1]] = tokens
        return rotate(q, angles)

    return write


def torch_attention(kv: KVBackend) -> Attend:
    """SDPA, a sequence at a time."""

    def attend(layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        outs = []
        for row, start, new in split(batch):
            length = start + new.stop - new.start
            k, v = (tokens.transpose(0, 1) for tokens in tokens_of(kv, layer, row, length))
            mask = torch.ones(length - start, length, dtype=torch.bool).tril(start)
            queries = q[new].transpose(0, 1)
            outs.append(scaled_dot_product_attention(queries, k, v, mask, enable_gqa=True).transpose(0, 1))
        return torch.cat(outs)

    return attend


def tokens_of(kv: KVBackend, layer: int, row: int, length: int) -> list[torch.Tensor]:
    """K and V of a sequence, `[length, num_kv_heads, head_dim]`; copies where they lie in blocks."""
    if kv.block_table is None:
        return [cache[row, :length] for cache in kv.kv(layer)]
    blocks = kv.block_table[row, : -(-length // kv.kv(layer)[0].shape[1])]
    return [cache[blocks].flatten(0, 1)[:length] for cache in kv.kv(layer)]


def split(batch: Batch) -> list[tuple[int, int, slice]]:
    """For each sequence its row, its first new position, and where its new tokens are in the batch."""
    assert batch.host is not None
    rows, starts, counts = batch.host
    ends = counts.cumsum()
    spans = map(slice, (ends - counts).tolist(), ends.tolist())
    return list(zip(rows.tolist(), starts.tolist(), spans))


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
