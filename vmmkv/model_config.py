"""The KV layout of a Hugging Face model, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import DtypeError, LayoutError
from .layout import DTYPES, KVLayout

NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
NUM_HEADS = ("num_attention_heads", "n_head", "num_heads")
NUM_KV_HEADS = ("num_key_value_heads_per_layer", "num_key_value_heads", "multi_query_group_num")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
MAX_SEQ_LEN = ("max_position_embeddings", "n_positions")

CLASS_DEFAULTS = ("num_key_value_heads", "head_dim")
"""Sizes that a nested config leaves out where they are its class's defaults, which differ between classes."""

EVEN_LAYER_TYPES = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
"""Layers that keep K and V of every token that they attend to, all in one shape."""

UNEVEN_KEYS = (
    "attn_layer_indices",
    "attn_layer_period",
    "block_configs",
    "full_attention_interval",
    "global_head_dim",
    "hybrid_override_pattern",
    "is_encoder_decoder",
    "num_global_key_value_heads",
    "per_layer_config",
    "swa_head_dim",
    "swa_num_key_value_heads",
)
"""Keys of models whose layers keep different shapes, or something else than K and V."""


def layout_from_config(
    config: Mapping[str, Any] | object,
    *,
    dtype: torch.dtype | None = None,
    layers_per_range: int | None = None,
    scales: str | None = None,
) -> KVLayout:
    """The layout of what transformers caches for a model.

    Args:
        config: the content of a `config.json`, or a transformers config. A multimodal model's `config.json` may
            leave out sizes of its `text_config`; `AutoConfig` fills them in.
        dtype: of K and V; None is the config's own, bfloat16 where it names none.
        layers_per_range: see `KVLayout`.
        scales: see `KVLayout`.

    Raises:
        LayoutError: a size is missing, or the layers keep different things: make a `KVLayout` by hand then.
        DtypeError: the config names a dtype that vmmkv does not hold, or one without scales where they are asked for.
    """
    whole: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()  # type: ignore[attr-defined]
    text = text_config(whole)
    uneven = sorted(set(text.get("layer_types") or ()) - EVEN_LAYER_TYPES)
    uneven += [key for key in UNEVEN_KEYS if text.get(key)]
    if uneven:
        raise LayoutError(
            f"not every layer of this model keeps K and V of one shape: its config has {', '.join(uneven)}. "
            "Make a KVLayout of the layers that do"
        )
    # The last layers of Gemma 3n read the K and V of earlier ones.
    num_layers = _find(text, NUM_LAYERS) - (text.get("num_kv_shared_layers") or 0)
    num_kv_heads, head_dim, v_head_dim = _heads(text, complete=text is whole or whole is not config)
    return KVLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype or dtype_from_name(_get(text, "dtype", "torch_dtype") or _get(whole, "dtype", "torch_dtype")),
        v_head_dim=v_head_dim,
        layers_per_range=layers_per_range,
        scales=scales,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def dtype_from_name(name: str | None) -> torch.dtype:
    """The dtype called `name`, bfloat16 for None; raises `DtypeError` for one that vmmkv does not hold."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    dtype = names.get(name or "bfloat16")
    if dtype is None:
        raise DtypeError(f"asked for K and V as {name}; vmmkv holds {', '.join(names)}")
    return dtype


KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What K and V may be kept in, with scales, instead of a model's own dtype, by the name that users give it."""


def kv_dtype_from_name(name: str | None) -> torch.dtype | None:
    """The 8-bit format called `name`; None for None: K and V are kept in their own dtype.

    Raises:
        DtypeError: there is no such format.
    """
    if name is None:
        return None
    if not isinstance(name, str) or name not in KV_DTYPES:
        raise DtypeError(
            f"asked for kv_dtype={name!r}; it must be one of {', '.join(map(repr, KV_DTYPES))}, or None: K and V in "
            "the model's dtype"
        )
    return KV_DTYPES[name]


def _heads(text: Mapping[str, Any], complete: bool) -> tuple[Any, Any, Any]:
    """KV heads, width of K, width of V; each one number or one per layer."""
    if text.get("kv_lora_rank"):
        # What is cached are the latents: as K what K and V are made from, as V the rotary part of K.
        return 1, text["kv_lora_rank"], _find(text, ("qk_rope_head_dim",))
    missing = [key for key in CLASS_DEFAULTS if key not in text]
    if missing and not complete:
        raise LayoutError(
            f"text_config leaves out {' and '.join(missing)}, for which each class of models has a default of its "
            f"own; it has {', '.join(sorted(text))}. Give the config that transformers.AutoConfig loads, or the sizes"
        )
    num_heads = _find(text, NUM_HEADS)
    num_kv_heads = _get(text, *NUM_KV_HEADS) or num_heads
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        num_kv_heads = 1
    return num_kv_heads, _get(text, "head_dim") or _find(text, HIDDEN_SIZE) // num_heads, text.get("v_head_dim")


def _get(config: Mapping[str, Any], *keys: str) -> Any:
    """The first of `keys` that has a value; None where none has."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _find(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value = _get(config, *keys)
    if value is None:
        raise LayoutError(f"looked for {' or '.join(keys)} in the config; it has {', '.join(sorted(config))}")
    return value
