"""`attn_implementation="vmmkv"`: attention of transformers models by the kernels, on K and V where they lie.

The reference is transformers' eager attention, where the mask is the whole truth. Kernels run where they know all that
it says, and every other argument. Otherwise SDPA runs with the mask of eager attention, or the model's own eager
attention; and a keyword that none of them knows is an error, never ignored.

Of transformers it depends on the interfaces that it registers with (`AttentionInterface`, `AttentionMaskInterface`),
on `PreTrainedModel.get_correct_attn_implementation`, which asks for the attention of a model that is made, and on
`eager_attention_forward` in the module of each model.
"""

from __future__ import annotations

import sys
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging

from ..errors import UnsupportedAttentionError
from ..kernels import decode, prefill
from ..kernels.checks import ATTENTION_DTYPES, HEAD_DIMS
from ..kernels.compiler import SIMULATED
from ..kernels.row_decode import MAX_QUERIES
from .row_writes import even_cu_seqlens
from .stand_ins import NAME as NAME
from .stand_ins import ScaledStates, Spans, WholeRows, make_mask, warn

LEFT_TO_THE_MASK = frozenset({"is_causal", "sliding_window", "position_ids", "max_length_q", "max_length_k"})
"""Keywords that eager attention ignores: its mask says the same."""

NOT_ABOUT_ATTENTION = frozenset({
    "deterministic", "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
})  # fmt: skip
"""Keywords that models hand down to all that they call."""

IGNORED = LEFT_TO_THE_MASK | NOT_ABOUT_ATTENTION
NUMBERS = int, float

COMPUTES_ITSELF = frozenset({
    # with masks
    "axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text", "nllb-moe",
    "qwen4_exp_text", "t5gemma2_decoder",
    # with what caches return, of which rows have more than there is memory for
    "diffllama", "doge", "jetmoe",
})  # fmt: skip
"""Models that do more with masks, K or V than to hand them to their attention. Of masks others are refused, too."""

logger = logging.get_logger(__name__)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls for attention: `query` `[batch, num_heads, q_length, head_dim]`, `key` and
    `value` `[batch, num_kv_heads, kv_length, head_dim]` of any strides, `attention_mask` from `make_mask`; None is no
    mask, which a causal module may give for a single query only. `scaling` is of the scores; None is
    `head_dim ** -0.5`.

    Returns:
        `[batch, q_length, num_heads, head_dim]`, and the weights if a model's own attention ran.

    Raises:
        UnsupportedAttentionError: a keyword that is not known here, nor to the model's own eager attention; or a mask
            for other tokens than there are.
    """
    kept = key.window if isinstance(key, WholeRows) else None
    told = {name: given for name, given in kwargs.items() if not (given is None or given is False or name in IGNORED)}
    spans = attention_mask if isinstance(attention_mask, Spans) else None
    lacking = _lacking(query, key, value, dropout, scaling, told)
    if spans is not None and not lacking:
        lacking = _differing(spans, query, key, kwargs.get("sliding_window"), kept)
    if spans is not None and not lacking:
        return _attend_with_kernels(query, key, value, scaling, told, spans), None
    if lacking:
        warn(lacking)
    mask = _as_bias(attention_mask, query.dtype)
    if isinstance(key, WholeRows) and isinstance(value, WholeRows):
        key, value, mask, told = _of_live_tokens(key, value, query.shape[2], mask, told)
    return _attend_without_kernels(module, query, key, value, mask, dropout, scaling, told, kwargs)


def kernels_take(key: Tensor, value: Tensor) -> bool:
    """Whether there are kernels for K and V like these."""
    head_dim = key.shape[-1]
    device_fits = key.is_cuda or SIMULATED
    return bool(device_fits and key.dtype in ATTENTION_DTYPES and head_dim in HEAD_DIMS and head_dim == value.shape[-1])


def shown(key: Tensor, value: Tensor) -> str:
    """The properties of K and V that kernels ask for, in words."""
    return f"K heads of {key.shape[-1]}, V heads of {value.shape[-1]}, in {key.dtype} on {key.device.type}"


def _lacking(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, told: dict[str, Any]
) -> str | None:
    """The first thing asked for that the kernels cannot do; None if they can do all of it."""
    if not kernels_take(key, value):
        return shown(key, value)
    if query.dtype != key.dtype:
        return f"queries in {query.dtype} and keys in {key.dtype}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients"
    if dropout:
        return "dropout"
    if not (scaling is None or (isinstance(scaling, NUMBERS) and scaling > 0)):
        return "scales that are not positive numbers"
    softcap, sinks = told.get("softcap"), told.get("s_aux")
    if not (softcap is None or (isinstance(softcap, NUMBERS) and softcap > 0)):
        return "soft caps that are not positive numbers"
    if sinks is not None and sinks.shape != query.shape[1:2]:
        return "sinks that are not one number for each head"
    others = told.keys() - {"softcap", "s_aux"}
    return f"the keyword {', '.join(sorted(others))}" if others else None


def _differing(spans: Spans, query: Tensor, key: Tensor, window: int | None, kept: int | None) -> str | None:
    """How a mask differs from its query and key, from the attention window of the module, and from the `kept` tokens of
    the layer; None if it agrees with all of them."""
    if spans.shape != (query.shape[0], 1, query.shape[2], key.shape[2]):
        return "masks of another shape than queries and keys"
    if window is not None and window != spans.window:
        return f"a window of {window} with a mask whose window is {spans.window or 'all tokens'}"
    if kept and not 0 < spans.window <= kept:
        return f"a mask with a window of {spans.window or 'all tokens'} for a layer that keeps {kept}"
    return None


def _attend_with_kernels(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, told: dict[str, Any], spans: Spans
) -> Tensor:
    # Not before nothing is refused any more: a traceback that shows whole rows would read where no memory is.
    if isinstance(key, WholeRows) and isinstance(value, WholeRows):
        key, value = key.states, value.states
    sinks = told.get("s_aux")
    batch_size, num_heads, q_length, head_dim = query.shape
    scales: dict[str, Tensor] = {}
    if isinstance(key, ScaledStates) and isinstance(value, ScaledStates):
        scales = {"k_scales": key.scales.transpose(1, 2), "v_scales": value.scales.transpose(1, 2)}
        key, value = key.numbers, value.numbers
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output: Tensor
    options = {
        "starts": spans.first,
        "sinks": None if sinks is None else sinks.float().contiguous(),
        "scale": scaling,
        "window": spans.window,
        "softcap": told.get("softcap", 0.0),
        **scales,
    }
    if q_length <= MAX_QUERIES:
        output = decode(q, k, v, spans.end, **options)
        return output
    cu_seqlens = even_cu_seqlens(batch_size, q_length, query.device)
    output = prefill(q.reshape(-1, num_heads, head_dim), k, v, cu_seqlens, spans.end, **options)
    return output.view(batch_size, q_length, num_heads, head_dim)


def _attend_without_kernels(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    told: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """SDPA, or, with what SDPA does not know, the model's own eager attention."""
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if mask is None and query.shape[2] > 1 and is_causal:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} is causal and gives no mask for its {query.shape[2]} queries: "
            f'attn_implementation="{NAME}" cannot know which tokens each sees. Load the model with '
            'attn_implementation="eager" or "sdpa"; VmmCache works with them, too'
        )
    bias = told.get("position_bias")
    if not told.keys() - {"position_bias"} and isinstance(scaling, (*NUMBERS, NoneType)):
        mask = bias if mask is None else mask if bias is None else mask + bias
        output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal=False)
        return output, None
    eager = _eager_attention(module, told)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, weights = eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **{**kwargs, **told})
    return output, weights


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask that is added to scores, in their dtype, for spans, a mask of bool, or one that is added already."""
    if mask is None:
        return None
    if isinstance(mask, Spans):
        return mask.as_bias(dtype)
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), lowest)
    return mask if mask.dtype == dtype else mask.clamp(min=lowest).to(dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it asks the device for lengths
def _of_live_tokens(
    key: WholeRows, value: WholeRows, q_length: int, mask: Tensor | None, told: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The parts of K, V, a mask that is added to scores, and a bias of positions, for the tokens that a layer has
    memory of when its newest `q_length` attend; raises `UnsupportedAttentionError` if they see others."""
    bias: Any = told.get("position_bias", mask)
    if mask is None or {mask.shape[-1], bias.shape[-1]} != {key.shape[2]}:
        raise UnsupportedAttentionError(
            f"got no mask, or a mask or a bias of positions for other tokens than the {key.shape[2]} of whole rows: "
            f"get_mask_sizes({q_length}, ...) has asked a VmmCache made with compile=True for them. Give a mask of "
            "that many tokens, which hides those that are not there, or do not ask"
        )
    end = int(key.lengths[0])
    first = 0 if key.window is None else max(end - q_length - key.window + 1, 0)
    seen = mask > torch.finfo(mask.dtype).min
    if seen[..., :first].any() or seen[..., end:].any():
        raise UnsupportedAttentionError(
            f"got a mask whose queries see other tokens than those from {first} to {end - 1}, which the cache holds "
            "for them: a mask of whole rows hides all others. Or make the VmmCache without compile=True"
        )
    live = slice(first, end)
    told = told | ({"position_bias": bias[..., live]} if "position_bias" in told else {})
    mask = mask[..., live].clone(memory_format=torch.contiguous_format)  # SDPA's kernels trust that it is aligned
    return key.states[:, :, live], value.states[:, :, live], mask, told


def _eager_attention(module: torch.nn.Module, instructions: dict[str, Any]) -> Any:
    """The eager attention of the model that a module belongs to, if it knows all instructions."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is not None:
        code = eager.__code__
        known = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], "output_attentions"}
        if instructions.get("s_aux") is getattr(module, "sinks", None):
            known.add("s_aux")  # eager attention takes them from the module
        if instructions.keys() <= known:
            return eager
    raise UnsupportedAttentionError(
        f"{type(module).__name__} gives its attention {', '.join(sorted(instructions))}, and "
        f'attn_implementation="{NAME}" does not know all of it, nor does an eager attention of its own. Load the model '
        'with attn_implementation="eager"; VmmCache works with that, too'
    )


def _choose_attention(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
    """Chooses the attention that a model is going to run; transformers asks each model that is made."""
    if requested_attention == NAME and not can_attend(self):
        logger.warning_once(
            f'attn_implementation="{NAME}" is not for {type(self).__name__}, which computes attention by itself, or '
            'with masks, K or V: its own attention ("eager") runs. VmmCache works with it'
        )
        requested_attention = "eager"
    return _choose_among_own(self, requested_attention, *args, **kwargs)


def can_attend(model: PreTrainedModel) -> bool:
    """Whether a model looks for its attention among those that are registered, and leaves masks, K and V to it."""
    code = sys.modules[type(model).__module__]
    chooses_itself = any(name.endswith("_ATTENTION_CLASSES") for name in vars(code))
    asks = model._supports_attention_backend or model._can_set_attn_implementation()
    return asks and not chooses_itself and model.config.model_type not in COMPUTES_ITSELF


_choose_among_own = PreTrainedModel.get_correct_attn_implementation
PreTrainedModel.get_correct_attn_implementation = _choose_attention  # type: ignore[method-assign]
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
