"""`decode` and `prefill` as their documentation has them, in plain fp32: what kernels are told, without them.

They read no token that a kernel would not read, and check their arguments as kernels do.
"""

from __future__ import annotations

import torch

from vmmkv.kernels.checks import Geometry, check_attention, check_indices, check_sinks, keys


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
