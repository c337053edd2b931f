"""Attention over what a backend holds: our kernels, and torch's on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from vmmkv.kernels import RotateHalf, append, decode, mixed, prefill

from .backend import KVBackend, Numbers
from .model import Angles, rotate


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


Kernels = tuple[Callable[[KVBackend], Write], Callable[[KVBackend], Attend]]
ATTENTION: dict[str, Kernels] = {"numba": (numba_write, numba_attention), "torch": (torch_write, torch_attention)}
