"""`attn_implementation="vmmkv"`: attention of transformers models by the kernels, on K and V where they lie.

Kernels need no mask of a byte for each query and key. They are told, for each sequence, which tokens are live:
`spans`, int32 `[2, batch, 1, 1]`, the first token that may be read and the end, counted from where K and V begin.
(Four dimensions, since that is how transformers knows masks that are finished.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.utils import logging

from ..kernels import decode, prefill
from ..kernels.checks import ATTENTION_DTYPES, HEAD_DIMS
from ..kernels.ptx import SIMULATED
from ..kernels.row_decode import MAX_QUERIES
from .row_writes import even_cu_seqlens

NAME = "vmmkv"

logger = logging.get_logger(__name__)


def make_spans(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """What transformers calls to make a mask; its arguments are those of `sdpa_mask`.

    Where `q_offset` is a tensor the number of tokens is known to the device only, and so is whether the attention mask
    pads on the left: a decode step then asserts it there.

    Returns:
        the spans, or a mask for SDPA where two numbers do not say which tokens each query sees.
    """
    is_window = (
        local_size is not None
        and getattr(config, "attention_chunk_size", None) is None
        and "allow_is_bidirectional_skip" not in kwargs
        and (allow_is_causal_skip or q_length == 1)  # else something was added to the window
    )
    lacking = None
    if use_vmap or not (mask_function is causal_mask_function or is_window):
        lacking = "this pattern of attention"
    else:
        end = q_offset + q_length
        first = torch.zeros(batch_size, dtype=torch.int64, device=device)
        if attention_mask is not None:
            first, left_padded = _left_padding(attention_mask, end)
            if torch.compiler.is_compiling() or (isinstance(q_offset, torch.Tensor) and q_length == 1):
                torch._assert_async(left_padded, "the attention mask must pad on the left only")
            elif not left_padded:
                lacking = "attention masks other than left padding"
    if lacking:
        _warn(lacking)
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # type: ignore[arg-type]
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **kwargs,
        )
    if local_size is not None:
        first = torch.clamp(first, min=q_offset + 1 - local_size)
    spans = torch.stack([first, torch.zeros_like(first) + end]) - kv_offset
    return spans.clamp(min=0).int().view(2, batch_size, 1, 1)


def _left_padding(attention_mask: torch.Tensor, end: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's first token, int64 `[batch]`, and whether all tokens from there to `end` are unmasked."""
    token = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    first = (attention_mask.cumsum(-1) == 0).sum(-1)
    seen = attention_mask | (token < first[:, None]) | (token >= end)
    return first, seen.all() & torch.as_tensor(end <= attention_mask.shape[1], device=token.device)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention: `query` `[batch, num_heads, q_length, head_dim]`, `key` and `value`
    `[batch, num_kv_heads, kv_length, head_dim]` of any strides, `attention_mask` from `make_spans`.

    Returns:
        `[batch, q_length, num_heads, head_dim]`, and no weights.
    """
    spans = attention_mask if attention_mask is not None and attention_mask.dtype == torch.int32 else None
    lacking = _lacking(query, key, value, dropout, kwargs)
    if spans is None or lacking:
        if lacking:
            _warn(lacking)
        if spans is not None:
            attention_mask = _mask_of(spans, query.shape[2], key.shape[2], sliding_window)
        more = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, **kwargs}
        if attention_mask is not None and kernels_take(key, value) and key.shape[2] > query.shape[2]:
            # They may be whole rows of a cache made with compile=True, which have memory for live tokens only.
            seen = _seen_tokens(attention_mask)
            key, value, attention_mask = key[:, :, seen], value[:, :, seen], attention_mask[..., seen]
            if (bias := more.get("position_bias")) is not None:
                more["position_bias"] = bias[..., seen]
        return _attend_without_kernels(module, query, key, value, attention_mask, dropout, scaling, **more)
    batch_size, num_heads, q_length, head_dim = query.shape
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    starts, seq_lens = spans[0].view(-1), spans[1].view(-1)
    options = {
        "starts": starts,
        "sinks": None if s_aux is None else s_aux.float(),
        "scale": scaling,
        "window": sliding_window or 0,
        "softcap": softcap or 0.0,
    }
    if q_length <= MAX_QUERIES:
        return decode(q, k, v, seq_lens, **options), None
    cu_seqlens = even_cu_seqlens(batch_size, q_length, query.device)
    output = prefill(q.reshape(-1, num_heads, head_dim), k, v, cu_seqlens, seq_lens, **options)
    return output.view(batch_size, q_length, num_heads, head_dim), None


def _lacking(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """What the kernels cannot do of what is asked for; None if they can do all of it."""
    if not kernels_take(key, value):
        return f"heads of {key.shape[-1]} and {value.shape[-1]} in {key.dtype} on {key.device.type}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients"
    if dropout:
        return "dropout"
    if kwargs.get("position_bias") is not None:
        return "a position bias"
    return None


def kernels_take(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there are kernels for K and V like these."""
    head_dim = key.shape[-1]
    device_fits = key.is_cuda or SIMULATED
    return bool(device_fits and key.dtype in ATTENTION_DTYPES and head_dim in HEAD_DIMS and head_dim == value.shape[-1])


def _mask_of(spans: torch.Tensor, q_length: int, kv_length: int, window: int | None) -> torch.Tensor:
    """The mask that spans stand for, `[batch, 1, q_length, kv_length]`, True where a query sees a key."""
    first, end = (part.view(-1, 1, 1, 1) for part in spans.unbind(0))
    key = torch.arange(kv_length, device=spans.device)
    query = end - q_length + torch.arange(q_length, device=spans.device)[:, None]
    seen = (key >= first) & (key <= query)
    return seen & (key > query - window) if window else seen


def _seen_tokens(attention_mask: torch.Tensor) -> slice:
    """From the first token that any query sees to the last; `attention_mask`, `[..., kv_length]`, is bool or added."""
    if attention_mask.dtype != torch.bool:
        attention_mask = attention_mask > torch.finfo(attention_mask.dtype).min
    seen = attention_mask.flatten(0, -2).any(0).nonzero().flatten().tolist()
    return slice(seen[0], seen[-1] + 1) if seen else slice(0)


def _attend_without_kernels(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA, or, with what SDPA does not know, the model's own eager attention."""
    if kwargs["softcap"] is None and kwargs["s_aux"] is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is not None:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.where(attention_mask, 0.0, lowest).to(query.dtype)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, _ = eager(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return output, None


def _warn(lacking: str) -> None:
    if torch.compiler.is_compiling():
        return
    logger.warning_once(
        f'attn_implementation="{NAME}" has no kernels for {lacking}; attention runs on SDPA (or the model\'s own) there'
    )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_spans)
