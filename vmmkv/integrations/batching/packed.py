"""Attention of a packed batch: new tokens of many sequences one behind the other, with K and V in rows.

On a GPU by the kernels, from rows and lengths on the device: nothing waits for the host, and one captured graph serves
every length. Elsewhere by torch, one sequence after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...cache import KVCache
from ...kernels import append, decode, mixed
from ...kernels.quantized import dequantize, quantize
from ..attention import kernels_take


class Packed(NamedTuple):
    """Where the tokens of a batch are: int32 tensors on its device."""

    cu_seqlens: Tensor  # `[batch + 1]`, where new tokens of each sequence begin; those behind the last are padding
    rows: Tensor  # `[batch]`, the row of each sequence
    starts: Tensor  # `[batch]`, its tokens, new ones left out
    lengths: Tensor  # `[batch]`, its tokens, new ones included
    max_prompts: int  # the most sequences that have more than one new token; 0: each has one

    def news(self) -> list[tuple[int, int, slice]]:
        """Of each sequence the row, the tokens before the new ones, and where these are."""
        bounds = self.cu_seqlens.tolist()
        return [*zip(self.rows.tolist(), self.starts.tolist(), map(slice, bounds[:-1], bounds[1:]))]


class Kept(NamedTuple):
    """K and V of a layer in rows, `[rows, max_seq_len, num_kv_heads, head_dim]`, and the scales of 8-bit ones,
    `[rows, max_seq_len, num_kv_heads]`."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


def kept_in(cache: KVCache, layer: int) -> Kept:
    """K and V of a layer in the rows of a cache."""
    return Kept(*(cache.kv(layer) if cache.layout.scales is None else cache.scaled_kv(layer)))


def append_and_attend(query: Tensor, key: Tensor, value: Tensor, kept: Kept, batch: Packed, **options: Any) -> Tensor:
    """Write K and V of new tokens into rows, and attend to all tokens of their sequences: `[1, tokens, num_heads,
    v_head_dim]`.

    Args:
        query, key, value: `[1, heads, tokens, head_dim]`.
        options: those of `attend`.
    """
    query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    write(key, value, kept, batch)
    return attend(query, kept, batch, **options).unsqueeze(0)


def write(key: Tensor, value: Tensor, kept: Kept, batch: Packed) -> None:
    """Write K and V of new tokens, `[tokens, num_kv_heads, head_dim]`, into rows."""
    k, v, k_scales, v_scales = kept
    if kernels_take(key, value):
        append(key, value, k, v, batch.rows, batch.starts, batch.cu_seqlens, k_scales=k_scales, v_scales=v_scales)
        return
    for row, start, new in batch.news():
        there = row, slice(start, start + new.stop - new.start)
        for given, states, scales in ((key, k, k_scales), (value, v, v_scales)):
            if scales is None:
                states[there] = given[new]
            else:
                states[there], scales[there] = quantize(given[new], states.dtype)


def attend(
    query: Tensor,
    kept: Kept,
    batch: Packed,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of `query`, `[tokens, num_heads, head_dim]`, each token to its own sequence up to itself. Returns
    `[tokens, num_heads, v_head_dim]`."""
    k, v, k_scales, v_scales = kept
    output: Tensor
    if kernels_take(k if k_scales is None else query, v):
        sinks = None if sinks is None else sinks.float().contiguous()
        options = {"rows": batch.rows, "sinks": sinks, "scale": scale, "window": window, "softcap": softcap}
        if k_scales is not None:
            options |= {"k_scales": k_scales, "v_scales": v_scales}
        if batch.max_prompts:
            output = mixed(query, k, v, batch.cu_seqlens, batch.lengths, max_prompts=batch.max_prompts, **options)
        else:
            output = decode(query.unsqueeze(1), k, v, batch.lengths, **options).squeeze(1)
        return output
    output = query.new_zeros(*query.shape[:2], v.shape[-1])
    for row, start, new in batch.news():
        if (length := start + new.stop - new.start) == start:
            continue
        first = max(start + 1 - window, 0) if window else 0
        there = row, slice(first, length)
        keys, values = k[there], v[there]
        if k_scales is not None and v_scales is not None:
            keys, values = (
                dequantize(states, scales[there], query.dtype)
                for states, scales in ((keys, k_scales), (values, v_scales))
            )
        distance = (torch.arange(start, length)[:, None] - torch.arange(first, length)).to(query.device)
        sees = (distance >= 0) & (distance < (window or length))
        q, keys, values = (each.transpose(0, 1) for each in (query[new], keys, values))
        output[new] = _attend_to_one(q, keys, values, sees, scale, softcap, sinks).transpose(0, 1)
    return output


def _attend_to_one(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention of one sequence: `q` `[num_heads, queries, head_dim]`, `k` and `v` `[num_kv_heads, tokens, ...]`."""
    if not softcap and sinks is None:
        q, k, v = (each.unsqueeze(0) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True).squeeze(0)
    k, v = (states.repeat_interleave(q.shape[0] // k.shape[0], dim=0) for states in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(v.dtype)
    return weights[..., : k.shape[1]] @ v
