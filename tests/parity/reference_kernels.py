"""`append`, `decode` and `prefill` as their documentation has them, in plain fp32: what kernels are told, without them.

They read no token that a kernel would not read, and check their arguments as kernels do.
"""

from __future__ import annotations

import torch

from vmmkv.kernels import RotateHalf, quantize
from vmmkv.kernels.checks import Geometry, check_attention, check_indices, check_rotation, check_sinks, keys


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    rotary: RotateHalf,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """`vmmkv.kernels.append` that rotates. Its angles turn pairs, one number of which is real, the other imaginary."""
    like_k, *turning, like_rows, like_starts = (Geometry(*key) for key in keys((k, *rotary, rows, starts)) if key)
    check_rotation(like_k, *turning)
    check_indices(k.device, (len(rows),), rows=like_rows, starts=like_starts)
    bounds = cu_seqlens.tolist()
    turned = _turn(k, rotary.cos, rotary.sin)
    for row, start, begin, end in zip(rows.tolist(), starts.tolist(), bounds, bounds[1:]):
        there = slice(start, start + end - begin)
        for states, cache, scales in ((turned, k_cache, k_scales), (v, v_cache, v_scales)):
            if scales is None:
                cache[row, there] = states[begin:end]
            else:
                cache[row, there], scales[row, there] = quantize(states[begin:end], cache.dtype)
    rotary.rotated.copy_(_turn(rotary.query, rotary.cos, rotary.sin))


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """For angles that are the same in both halves, as a model's are."""
    half = cos.shape[1] // 2
    assert torch.equal(cos[:, :half], cos[:, half:])
    assert torch.equal(sin[:, :half], sin[:, half:])
    pairs = torch.complex(states[..., :half].float(), states[..., half : 2 * half].float())
    turned = pairs * torch.complex(cos[:, :half].float(), sin[:, :half].float()).unsqueeze(1)
    return torch.cat([turned.real, turned.imag, states[..., 2 * half :].float()], -1).to(states.dtype)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    starts: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """`vmmkv.kernels.decode`."""
    assert q.shape[1] <= 8
    _check(q, k, v, seq_lens, starts, sinks)
    rows = zip(q, k, v, starts.tolist(), seq_lens.tolist())
    return torch.stack([_attend(*row, sinks, scale, window, softcap) for row in rows])


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    starts: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """`vmmkv.kernels.prefill`."""
    _check(q, k, v, seq_lens, starts, sinks)
    queries = q.tensor_split(cu_seqlens[1:-1].tolist())
    rows = zip(queries, k, v, starts.tolist(), seq_lens.tolist())
    return torch.cat([_attend(*row, sinks, scale, window, softcap) for row in rows])


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor | None) -> None:
    like_q, like_k, like_v, seq_lens, starts, sinks = (key and Geometry(*key) for key in keys((q, k, v, *tensors)))
    check_attention(like_q, like_k, like_v, like_q, None, None)
    check_indices(q.device, (len(k),), seq_lens=seq_lens, starts=starts)
    if sinks:
        check_sinks(sinks, like_q)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    end: int,
    sinks: torch.Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """One sequence: `q` `[tokens, num_heads, head_dim]`, the last of `k` and `v` `[end, num_kv_heads, head_dim]`."""
    query = torch.arange(end - len(q), end, device=q.device)[:, None]
    key = torch.arange(start, end, device=q.device)
    seen = (key <= query) & (key > query - window if window else True)
    k, v = (states[start:end].float().repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., : len(key)]  # a query that sees nothing gives zeros
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
