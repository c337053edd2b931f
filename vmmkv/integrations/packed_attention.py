"""Attention of a packed batch: new tokens of many sequences one behind the other, whose K and V lie in rows.

On a GPU by the kernels, from rows and lengths that lie there: nothing waits for the host, and one captured graph serves
every length. Elsewhere by torch, one sequence after another.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..cache import KVCache
from ..kernels import RotateHalf, append, decode, mixed
from ..kernels.checks import ALIGNMENT
from ..kernels.quantized import dequantize, quantize
from .attention import kernels_take
from .rotation import Rotation


class Packed(NamedTuple):
    """Where the tokens of a batch are: int32 tensors on its device.

    Attributes:
        cu_seqlens: `[batch + 1]`, where each sequence's new tokens begin; those behind the last are nobody's.
        rows: `[batch]`, the row of each sequence.
        starts: `[batch]`, its tokens, new ones left out.
        lengths: `[batch]`, its tokens, new ones included.
        max_prompts: how many of them have more than one new token at most; 0: each has one.
    """

    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    max_prompts: int


class Kept(NamedTuple):
    """K and V of a layer in rows, `[rows, max_seq_len, num_kv_heads, head_dim]`, and of 8 bits the scales of each,
    `[rows, max_seq_len, num_kv_heads]`."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None


def kept_in(cache: KVCache, layer: int) -> Kept:
    """What a cache keeps of a layer."""
    return Kept(*(cache.kv(layer) if cache.layout.scales is None else cache.scaled_kv(layer)))


def write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: Kept,
    batch: Packed,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Writes K and V of new tokens, `[tokens, num_kv_heads, head_dim]`, into rows; with cos and sin, `[tokens,
    rotary_dim]`, K rotated, see `can_rotate`.

    Returns:
        the queries, `[tokens, num_heads, head_dim]`, which are rotated likewise.
    """
    places = kept.k, kept.v, batch.rows, batch.starts, batch.cu_seqlens
    scales = {"k_scales": kept.k_scales, "v_scales": kept.v_scales}
    if angles is not None:
        rotated = torch.empty_like(query)  # a model may still have use for the others
        append(key, value, *places, rotary=RotateHalf(query, rotated, *angles), **scales)
        return rotated
    if kernels_take(key, value):
        append(key, value, *places, **scales)
        return query
    for row, first, begin, end in zip(batch.rows.tolist(), batch.starts.tolist(), *_bounds(batch)):
        there = slice(first, first + end - begin)
        for new, states, scales_of in ((key, kept.k, kept.k_scales), (value, kept.v, kept.v_scales)):
            if scales_of is None:
                states[row, there] = new[begin:end]
            else:
                states[row, there], scales_of[row, there] = quantize(new[begin:end], states.dtype)
    return query


def can_rotate(rotation: Rotation, value: torch.Tensor) -> bool:
    """Whether there is a kernel that rotates, for queries, keys and angles as they lie, on the way into rows."""
    return kernels_take(rotation.key, value) and in_vectors(rotation)


def in_vectors(rotation: Rotation) -> bool:
    """Whether all lie in whole vectors of the kernel's, also the halves of angles."""
    query, key, cos, sin = rotation.query, rotation.key, rotation.cos, rotation.sin
    if cos.shape[2] % 2 or any(states.stride(-1) != 1 for states in (query, key, cos, sin)):
        return False
    strides = *query.stride()[1:3], *key.stride()[1:3], cos.stride(1), sin.stride(1)
    sizes = functools.reduce(operator.or_, strides, cos.shape[2] // 2) * key.itemsize
    addresses = query.data_ptr() | key.data_ptr() | cos.data_ptr() | sin.data_ptr()
    return not (sizes | addresses) % ALIGNMENT


def attend(
    query: torch.Tensor,
    kept: Kept,
    batch: Packed,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query`, `[tokens, num_heads, head_dim]`, each token to its own sequence up to itself; the other
    arguments are those of `vmmkv.kernels.mixed`. Returns `[tokens, num_heads, v_head_dim]`."""
    k, v, k_scales, v_scales = kept
    if not kernels_take(k if k_scales is None else query, v):
        return _attend_one_by_one(query, kept, batch, scale, window, softcap, sinks)
    sinks = None if sinks is None else sinks.float().contiguous()
    options = {"rows": batch.rows, "sinks": sinks, "scale": scale, "window": window, "softcap": softcap}
    if k_scales is not None:
        options |= {"k_scales": k_scales, "v_scales": v_scales}
    output: torch.Tensor
    if batch.max_prompts:
        output = mixed(query, k, v, batch.cu_seqlens, batch.lengths, max_prompts=batch.max_prompts, **options)
    else:
        output = decode(query.unsqueeze(1), k, v, batch.lengths, **options).squeeze(1)
    return output


def _bounds(batch: Packed) -> tuple[list[int], list[int]]:
    """Where the new tokens of each sequence begin and end."""
    bounds = batch.cu_seqlens.tolist()
    return bounds[:-1], bounds[1:]


def _attend_one_by_one(
    query: torch.Tensor,
    kept: Kept,
    batch: Packed,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    output = query.new_zeros(*query.shape[:2], kept.v.shape[-1])
    for row, length, begin, end in zip(batch.rows.tolist(), batch.lengths.tolist(), *_bounds(batch)):
        if begin == end:
            continue
        first = max(length - (end - begin) + 1 - window, 0) if window else 0
        read = _read(kept, row, slice(first, length), query.dtype)
        q, keys, values = (states.transpose(0, 1) for states in (query[begin:end], *read))
        positions, tokens = torch.arange(length - (end - begin), length), torch.arange(first, length)
        distance = (positions[:, None] - tokens).to(query.device)
        sees = (distance >= 0) & (distance < (window or length))
        output[begin:end] = _attend_once(q, keys, values, sees, scale, softcap, sinks).transpose(0, 1)
    return output


def _read(kept: Kept, row: int, tokens: slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of some tokens of a row, `[tokens, num_kv_heads, head_dim]`; of 8 bits a copy, in a dtype."""
    k, v = kept.k[row, tokens], kept.v[row, tokens]
    if kept.k_scales is None or kept.v_scales is None:
        return k, v
    return dequantize(k, kept.k_scales[row, tokens], dtype), dequantize(v, kept.v_scales[row, tokens], dtype)


def _attend_once(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sees: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence: `q` `[num_heads, queries, head_dim]`, `k` and `v` `[num_kv_heads, tokens, ...]`."""
    if not softcap and sinks is None:
        q, k, v = (each.unsqueeze(0) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True).squeeze(0)
    groups = q.shape[0] // k.shape[0]
    k, v = (states.repeat_interleave(groups, dim=0) for states in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.float().softmax(dim=-1).to(v.dtype)
    return weights[..., : k.shape[1]] @ v
