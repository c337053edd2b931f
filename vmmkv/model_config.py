"""The KV layout of a Hugging Face model, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from .errors import LayoutError
from .layout import MAX_LAYERS, KVLayout, dtype_from_name, shown, whole_number

MAX_SEQ_LEN = ("max_position_embeddings", "n_positions")

DIVIDED = {"llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe"}
"""Types of models whose layers all keep K and V of `num_key_value_heads` heads of `head_dim`, and whose heads divide
`hidden_size` where the config has no `head_dim`."""
STATED = {"gemma", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "minimax_m2", "qwen3", "qwen3_moe"}
"""The same, but without a `head_dim` the heads have some width of the type's own."""
LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
"""Types whose layers all keep latents: as K what K and V are made from, as V the rotary part of K."""
WRAPPERS = {"gemma3", "kimi_k25", "llama4"}
"""Types of multimodal models whose `text_config` is one of those above."""


def layout_from_config(
    config: Mapping[str, Any] | object,
    *,
    dtype: torch.dtype | None = None,
    layers_per_range: int | None = None,
    scales: str | None = None,
) -> KVLayout:
    """The layout of what transformers caches for a model: of the layers that keep K and V, in their order.

    A layer with an attention window counts as one that keeps all tokens. States that do not grow with the tokens, as of
    linear attention, and the K and V of images and encoders are not counted.

    Runs the model without weights, which takes about a second, where transformers is installed and has it. Else only a
    few types are known.

    Args:
        config: the content of a `config.json`, or a transformers config.
        dtype: of K and V; None is the config's own, bfloat16 where it names none.
        layers_per_range: see `KVLayout`.
        scales: see `KVLayout`.

    Raises:
        LayoutError: neither transformers nor vmmkv knows the model, or its layers keep something else than K and V of
            each token: make a `KVLayout` by hand then.
        DtypeError: the config names a dtype that vmmkv does not hold, or one without scales where they are asked for.
    """
    whole: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()  # type: ignore[attr-defined]
    text = text_config(whole)
    names = (part.get(key) for part in (text, whole) for key in ("dtype", "torch_dtype"))
    dtype = dtype or dtype_from_name(next(filter(None, names), None))
    try:
        states = _asked(config) or _known(whole)
    except LayoutError as error:
        raise LayoutError(
            f"{error}. If its layers keep K and V alike, give their sizes (--layers, or KVLayout)"
        ) from error
    heads, k_widths, v_widths = (each[0] if len(set(each)) == 1 else each for each in zip(*states))
    return KVLayout(len(states), heads, k_widths, dtype, v_widths, layers_per_range, scales)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model.

    Raises:
        LayoutError: it is no object.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise LayoutError(f"got a text_config of type {type(text).__name__}; it must be an object")
    return text


def _asked(config: Mapping[str, Any] | object) -> Sequence[tuple[int, int, int]] | None:
    """KV heads, width of K and of V in each layer, of a model that transformers has; None for another."""
    try:
        from .integrations.cached_states import cached_states
    except ImportError:
        return None
    return cached_states(config)


def _known(config: Mapping[str, Any]) -> Sequence[tuple[int, int, int]]:
    """The same for a few types of models, from the config."""
    kind, text = str(config.get("model_type")), text_config(config)
    if text is not config and kind in WRAPPERS:
        kind = str(text.get("model_type"))
    if kind in LATENT:
        return [(1, _size(text, "kv_lora_rank"), _size(text, "qk_rope_head_dim"))] * _size(text, "num_hidden_layers")
    if kind not in DIVIDED | STATED:
        hint = "transformers does not have it" if find_spec("transformers") else "`pip install vmmkv[hf]` adds many"
        known = ", ".join(sorted(DIVIDED | STATED | LATENT))
        raise LayoutError(f"got model_type={config.get('model_type')!r}: {hint}, and vmmkv itself knows {known}")
    if kind in DIVIDED and text.get("head_dim") is None:
        width = _size(text, "hidden_size") // _size(text, "num_attention_heads")
    else:
        width = _size(text, "head_dim")
    return [(_size(text, "num_key_value_heads"), width, width)] * _size(text, "num_hidden_layers")


def _size(text: Mapping[str, Any], key: str) -> int:
    if text.get(key) is None:
        raise LayoutError(f"looked for {key} in the config of the language model; it has {', '.join(sorted(text))}")
    size = whole_number(key, text[key])
    if not 1 <= size <= MAX_LAYERS:
        raise LayoutError(f"the config has {key}={shown(size)}; it must be between 1 and {MAX_LAYERS}")
    return size
