"""The KV layout of a Hugging Face model, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import LayoutError
from .layout import KVLayout, dtype_from_name

MAX_SEQ_LEN = ("max_position_embeddings", "n_positions")


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

    Runs the model without weights, which takes about a second, by transformers (`pip install "vmmkv[hf]"`).

    Args:
        config: the content of a `config.json`, or a transformers config.
        dtype: of K and V; None is the config's own, bfloat16 where it names none.
        layers_per_range: see `KVLayout`.
        scales: see `KVLayout`.

    Raises:
        LayoutError: transformers is not installed, or does not know the model, or its layers keep something else than
            K and V of each token: make a `KVLayout` by hand then.
        DtypeError: the config names a dtype that vmmkv does not hold, or one without scales where they are asked for.
    """
    whole: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()  # type: ignore[attr-defined]
    text = text_config(whole)
    names = (part.get(key) for part in (text, whole) for key in ("dtype", "torch_dtype"))
    dtype = dtype or dtype_from_name(next(filter(None, names), None))
    hint = "If its layers keep K and V alike, give their sizes (--layers, or KVLayout)"
    try:
        from .integrations.cached_states import cached_states

        states = cached_states(config)
    except ImportError:
        raise LayoutError(f'transformers reads configs: pip install "vmmkv[hf]". {hint}') from None
    except LayoutError as error:
        raise LayoutError(f"{error}. {hint}") from error
    if states is None:
        raise LayoutError(f"got model_type={whole.get('model_type')!r}: transformers does not have it. {hint}")
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
