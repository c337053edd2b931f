"""Masks for `attn_implementation="vmmkv"`: `Spans` where they say it all, and the mask of eager attention elsewhere.

The mask of SDPA is bool; some models compute with masks, and know only those that are added to scores. Of transformers
it depends on how `masking_utils` composes mask functions, and on the keywords that it gives to mask interfaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import and_masks, causal_mask_function, eager_mask, sliding_window_overlay
from transformers.utils import logging

from .spans import NAME, Spans

MAX_TOKENS = 2**31 - 1
"""Of K and V: spans are int32."""

logger = logging.get_logger(__name__)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The function that transformers calls to make a mask; its arguments are those of `eager_mask`.

    It checks whether the attention mask pads on the left, which waits for the GPU. Inside graphs it cannot: there the
    device asserts it.

    Returns:
        `Spans`, or what `eager_mask` returns if spans cannot express which tokens each query sees.
    """
    window = _window_of(mask_function, q_length, kwargs)
    end, first = q_offset + q_length, torch.zeros(batch_size, dtype=torch.int64, device=device)
    lacking = "this pattern of attention" if window is None or kv_length > MAX_TOKENS else None
    if not lacking and attention_mask is not None:
        first, left_padded = _left_padding(attention_mask, end)
        if torch.compiler.is_compiling() or (left_padded.is_cuda and torch.cuda.is_current_stream_capturing()):
            torch._assert_async(left_padded, "the attention mask must pad on the left only")
        elif not left_padded:
            lacking = "attention masks other than left padding"
    if window is None or lacking:
        warn(str(lacking))
        if not getattr(kwargs.get("config"), "is_causal", True):
            kwargs["allow_is_bidirectional_skip"] = False  # its attention would take no mask for a causal one
        return eager_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # type: ignore[arg-type]
            kv_offset,
            mask_function,
            attention_mask,
            device=device,
            **kwargs,
        )
    if window:
        first = torch.clamp(first, min=q_offset + 1 - window)
    first, last = (token - kv_offset for token in (first, torch.zeros_like(first) + end))
    return Spans(first.clamp(min=0).int(), last.clamp(min=0).int(), window, (batch_size, 1, q_length, kv_length))


def _window_of(mask_function: Callable[..., Any], q_length: int, kwargs: dict[str, Any]) -> int | None:
    """The window of a causal mask, 0 if it has none; None of any other mask."""
    if kwargs.get("use_vmap"):
        return None
    if mask_function is causal_mask_function:
        return 0
    if getattr(mask_function, "__code__", None) is not _AND:
        return None
    if torch.compiler.is_compiling():  # a compiler cannot look into functions
        is_altered = not kwargs.get("allow_is_causal_skip", True) and q_length > 1
        is_other = "allow_is_bidirectional_skip" in kwargs or getattr(kwargs["config"], "attention_chunk_size", None)
        window = None if is_altered or is_other else kwargs.get("local_size")
    else:
        overlay, *others = _captured(mask_function)
        is_window = others == [causal_mask_function] and getattr(overlay, "__code__", None) is _WINDOW
        window = _captured(overlay) if is_window else None
    return window if window and window > 0 else None


def _captured(function: Callable[..., Any]) -> Any:
    """The content of the closure of a function that transformers has made."""
    (cell,) = function.__closure__ or ()
    return cell.cell_contents


_AND, _WINDOW = and_masks(causal_mask_function).__code__, sliding_window_overlay(1).__code__
"""Causal windows of transformers are `and_masks(sliding_window_overlay(window), causal_mask_function)`."""


def _left_padding(attention_mask: Tensor, end: int | Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence's first token, int64 `[batch]`, and whether all tokens from there to `end` are unmasked."""
    token = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    first = (attention_mask.cumsum(-1) == 0).sum(-1)
    seen = attention_mask | (token < first[:, None]) | (token >= end)
    return first, seen.all() & torch.as_tensor(end <= attention_mask.shape[1], device=token.device)


def warn(lacking: str) -> None:
    """Warns once that something runs without kernels."""
    if torch.compiler.is_compiling():
        return
    logger.warning_once(
        f'attn_implementation="{NAME}" has no kernels for {lacking}; attention runs on SDPA (or the model\'s own) there'
    )
