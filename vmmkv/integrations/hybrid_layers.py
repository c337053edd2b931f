"""Layers that keep more than K and V: the rest stays as transformers keeps it, and K and V lie in rows.

It depends on the kinds of layers that `DynamicCache` makes, and on how these divide their methods between K and V and
the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from .layer_group import LayerGroup
from .layers import VmmLayer

INDEXED = (
    "transformers.cache_utils.DynamicIndexedLayer",
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLSparseCacheLayer",
)
"""Layers that keep the keys of an indexer, and leave all that concerns K and V to `super()`."""


class VmmHybridLayer(VmmLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call]
    """A `VmmLayer` beside the states of linear attention, `number_of_states` as transformers counts them."""

    device: Any = None  # of the states, as transformers sets them; the group knows those of K and V
    dtype: Any = None
    is_croppable = LinearAttentionLayer.is_croppable

    def __init__(self, group: LayerGroup, layer_idx: int, number_of_states: int) -> None:
        VmmLayer.__init__(self, group, layer_idx)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Takes K and V by position, states by name."""
        if args:
            VmmLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Drops all tokens, and the states that they left."""
        forget_states(self)
        VmmLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens, as `VmmLayer.crop`, from what is recorded of the states as well."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        VmmLayer.crop(self, tokens_to_remove)

    def _select(self, indices: torch.Tensor) -> None:
        VmmLayer._select(self, indices)
        LinearAttentionLayer.reorder_cache(self, indices)  # type: ignore[arg-type]


def layer_on_rows(layer: Any, layer_idx: int, group: Callable[[int | None], LayerGroup]) -> VmmLayer | None:
    """The layer on rows that takes the place of a layer of transformers; None for a kind that is not known.

    Args:
        group: finds the group for layers of a window.
    """
    kind: Any = type(layer)  # exactly: a subclass may keep, or do, more than is known here
    window = getattr(layer, "sliding_window", None)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer):
        return VmmLayer(group(window), layer_idx)
    if kind in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
        return VmmHybridLayer(group(window), layer_idx, layer.number_of_states)
    if f"{kind.__module__}.{kind.__qualname__}" in INDEXED:
        return indexed_layer(kind)(group(None), layer_idx)
    return None


def forget_states(layer: LinearAttentionLayer) -> None:
    """Drops the states of linear attention; `LinearAttentionLayer.reset` would keep zeros for as many sequences."""
    record_past = layer.record_past
    LinearAttentionLayer.__init__(layer, layer.number_of_states)
    layer.record_past = record_past


@cache
def indexed_layer(kind: Any) -> type[VmmLayer]:
    """A class of layers that are of `kind`, one of `INDEXED`, with K and V in rows."""

    class VmmIndexedLayer(kind, VmmLayer):  # type: ignore[misc,no-untyped-call]
        _layer_type = None  # or transformers would make such layers for every cache

        def __init__(self, group: LayerGroup, layer_idx: int) -> None:
            VmmLayer.__init__(self, group, layer_idx)
            self.reset()

        def reset(self) -> None:
            VmmLayer.reset(self)
            common = DynamicLayer()  # type: ignore[no-untyped-call]
            for name, value in vars(kind()).items() - vars(common).items():  # 5.17 would keep zeros of the indexer
                setattr(self, name, value)

        def __reduce__(self) -> tuple[Any, ...]:
            return _blank, (kind,), vars(self)

    return VmmIndexedLayer


def _blank(kind: Any) -> VmmLayer:
    """A layer that is being unpickled."""
    layer_class = indexed_layer(kind)
    return layer_class.__new__(layer_class)
