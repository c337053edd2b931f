"""What transformers calls for attention while a model runs on rows, and the layers that call it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching import cache as their_cache
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import UnsupportedAttentionError
from ..attention import NOT_ABOUT_ATTENTION
from ..borrowed_attention import BorrowedAttention
from ..left_to_attention import CACHE
from ..row_groups import Group, Probe, layer_groups, not_for_rows
from ..whole_layers import Inside, attend_inside, make_layers_whole, split_layers
from .cache import RowCache

NAME = "vmmkv_rows"
"""What attention is called while a model runs on rows."""

ATTENTION = BorrowedAttention(NAME, clear=split_layers)
"""Of models that managers run on rows."""

OF_BATCH = "block_table"
"""What layers are told with every batch, and hand on to attention."""
ALONE = (
    "stop every manager that runs the model, or one of the same config. Then, and of a copy that was made under a "
    "manager, vmmkv.integrations.continuous_batching.disable(model) leaves the model to transformers"
)
"""What helps who runs a model that managers run."""
KNOWN = {*PagedAttentionArgs.__annotations__, *NOT_ABOUT_ATTENTION, "sliding_window", "logits_to_keep"}
"""Keywords of attention that are heeded, or mean nothing to it."""
FOR_ATTENTION = PagedAttentionArgs.__annotations__.keys() - {
    "input_ids", "attention_mask", "position_ids", "cache", "use_cache",
}  # fmt: skip
"""Of what layers are told, that which is for attention alone."""


def attend_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    vmmkv_cache: Any = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **told: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention while a model runs on rows.

    Raises:
        UnsupportedAttentionError: it was called otherwise, or is told what is not known here.
    """
    unknown = [name for name in told.keys() - KNOWN if told[name] is not None and told[name] is not False]
    unknown += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    cache = vmmkv_cache
    if isinstance(cache, Probe) and not _is_causal(module):
        raise UnsupportedAttentionError(
            f"{type(module).__name__} is not causal, and requests of a batch have no mask that shows tokens what comes "
            "behind them; if its config alone makes it so, give that is_decoder=True, or is_causal=True"
        )
    is_in_batch = isinstance(cache, Inside) or (isinstance(cache, RowCache | Probe) and OF_BATCH in told)
    if not is_in_batch or unknown:
        what = f"told its attention {', '.join(unknown)}" if is_in_batch else "called it without a batch of requests"
        raise UnsupportedAttentionError(
            f"{type(module).__name__} {what}, and attention on rows knows none of that; {ALONE}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(cache, Inside):  # its layer was entered, and is not asked for its number: all are one program
        return attend_inside(query, key, value, told.get("sliding_window"), scale, softcap or 0.0, s_aux), None
    return cache.attend(module.layer_idx, query, key, value, told, scale, softcap or 0.0, s_aux), None


def _is_causal(module: Any) -> bool:
    """Whether tokens see none behind them, as far as a layer and its config say."""
    return all(getattr(each, "is_causal", True) for each in (module, getattr(module, "config", None)))


def attend_rows_or_go_around(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """`attend_rows`, which the compiler goes around in layers that were not entered."""
    attend = attend_rows if isinstance(kwargs.get(CACHE), Inside) else _attend_apart
    return attend(*args, **kwargs)


_attend_apart = torch.compiler.disable(attend_rows)  # type: ignore[no-untyped-call]
AttentionInterface.register(NAME, attend_rows_or_go_around)


# ---------------------------------------------------------------------- layers


def groups_of(model: PreTrainedModel, kv_dtype: torch.dtype | None) -> list[Group]:
    """The layer groups of a model.

    Raises:
        UnsupportedError: some of its layers do not keep K and V of their own.
    """
    config = model.config.get_text_config()
    try:
        kinds = their_cache.group_layers_by_attn_type(config)
    except ValueError as error:
        raise not_for_rows(model, f"a kind of layer that keeps something else ({error})") from None
    windows = {SLIDING_ATTENTION: config.sliding_window} if SLIDING_ATTENTION in kinds else {}
    return layer_groups(model, kinds, windows, run_tokens, kv_dtype)


def run_tokens(model: PreTrainedModel, tokens: torch.Tensor, probe: Probe) -> None:
    """Runs a model on tokens, as continuous batching calls it."""
    told = {OF_BATCH: None, CACHE: probe}
    model(input_ids=tokens, position_ids=tokens, cache=probe, use_cache=False, **told)


def compile_layers_whole(model: Any) -> None:
    """Has compiled layers of a model be one program each, as long as somebody runs it on rows."""
    make_layers_whole(model, GradientCheckpointingLayer, RowCache, FOR_ATTENTION)
