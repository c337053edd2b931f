"""The K and V that a model of transformers hands to its cache, found by running the model without weights.

Configurations say it in too many ways: some layers keep nothing, some keep other shapes, some keep K and V twice. So
the model is built on the `meta` device, where tensors have shapes and no numbers, and makes one forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from ..errors import LayoutError

TOKENS = 3  # of the forward pass: fewer than any attention window has
KNOWN_LAYERS = {
    "DummyLayer", "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "LinearAttentionLayer",
}  # fmt: skip
"""Cache layers in which nothing but K and V grows with the tokens. Others keep the keys of an indexer, or compress."""


def cached_states(config: Mapping[str, Any] | object) -> list[tuple[int, int, int]] | None:
    """KV heads, and the widths of K and V, of the layers that keep any, in their order; None for a model that
    transformers does not have. `config` is the content of a `config.json`, or a transformers config."""
    model_type = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    kind = f"{model_type} of transformers {transformers.__version__}"
    try:
        if isinstance(config, Mapping):  # transformers completes it
            known = str(model_type) in CONFIG_MAPPING
            config = CONFIG_MAPPING[str(model_type)].from_dict(copy.deepcopy(dict(config))) if known else None
        found = _model(config) if isinstance(config, PreTrainedConfig) else None
        if found is None:
            return None
        layers = _run(*found)
    except LayoutError:
        raise
    except Exception as error:  # raised by the code of a config or a model
        raise LayoutError(f"{kind} does not run without weights: {type(error).__name__}: {error}") from error
    more = {type(layer).__name__ for layer in layers} - KNOWN_LAYERS
    if more:
        raise LayoutError(f"layers of {kind} keep more than K and V of each token: {', '.join(sorted(more))}")
    # Layers without K: linear attention, cross-attention, those that read the K and V of another layer.
    states = [_states(layer, kind) for layer in layers if getattr(layer, "keys", None) is not None]
    if not states:
        raise LayoutError(f"{kind} keeps no K and V in a cache")
    return states


def _model(config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig] | None:
    """The class of the language model, or of the whole model where that has none of its own, and its config."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise LayoutError(f"{config.model_type} has an encoder, whose K and V do not grow with the tokens")
    by_config: tuple[Any, ...] = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
    for kinds in by_config:
        for part in (text, config):
            if type(part) in kinds:
                model_class = kinds[type(part)]
                return model_class, text if isinstance(text, model_class.config_class) else config
    return None


class _AsIfZero(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations that depend on the numbers of tensors without numbers as if all were zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **kwargs or {})
        except RuntimeError:
            if not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
                raise
        zeros = tree_map_only(torch.Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), (args, kwargs or {}))
        answer = func(*zeros[0], **zeros[1])
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), answer)


def _run(model_class: Any, config: PreTrainedConfig) -> list[Any]:
    """The layers of the cache after a forward pass of a few tokens."""
    # Experts one after another would depend on the routing; batched, they do not.
    how = {"attn_implementation": "eager", "experts_implementation": "batched_mm", "dtype": torch.bfloat16}
    with torch.device("meta"), torch.no_grad(), _AsIfZero():  # type: ignore[no-untyped-call]
        model = model_class._from_config(copy.deepcopy(config), **how).eval()
        output = model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=True)
    cache = next((value for value in output.values() if isinstance(value, Cache)), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache.layers if cache else []


def _states(layer: Any, kind: str) -> tuple[int, int, int]:
    k, v = layer.keys, layer.values
    like = (1, k.shape[1], TOKENS, torch.bfloat16)
    for states in (k, v):
        if states.dim() != 4 or (*states.shape[:3], states.dtype) != like:
            shapes = f"K {[*k.shape]} {k.dtype} and V {[*v.shape]} {v.dtype}"
            raise LayoutError(
                f"a layer of {kind} keeps {shapes} of {TOKENS} tokens, which is not a head's K and V each"
            )
    return k.shape[1], k.shape[3], v.shape[3]
