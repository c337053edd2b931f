"""Layers that keep more than K and V: the rest stays as transformers keeps it, and K and V lie in rows.

The hybrid layers of transformers call their part for K and V by its class instead of `super()`, so each of their
methods is defined anew.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from .layer_group import LayerGroup
from .layers import VmmLayer

INDEXED = (
    "transformers.cache_utils.DynamicIndexedLayer",
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLSparseCacheLayer",
)
"""Layers that keep the keys of an indexer, and leave all that concerns K and V to `super()`."""


class VmmHybridLayer(LinearAttentionAndFullAttentionLayer, VmmLayer):  # type: ignore[no-untyped-call,override]
    """A `VmmLayer` beside the states of linear attention, `number_of_states` as transformers counts them."""

    device: Any = None  # of the states, as transformers sets them; the group knows those of K and V
    dtype: Any = None

    def __init__(self, group: LayerGroup, layer_idx: int, number_of_states: int) -> None:
        VmmLayer.__init__(self, group, layer_idx)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Takes K and V by position, states by name."""
        if args:
            VmmLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """The largest length of K and V: states have none."""
        return VmmLayer.get_max_length(self)

    def reset(self) -> None:
        """Drops all tokens, and the states that they left."""
        forget_states(self)
        VmmLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens, as `VmmLayer.crop`, from what is recorded of the states as well."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        VmmLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders K, V and states."""
        VmmLayer.reorder_cache(self, beam_idx)

    def _select(self, indices: torch.Tensor) -> None:
        VmmLayer._select(self, indices)
        LinearAttentionLayer.reorder_cache(self, indices)  # type: ignore[arg-type]

    def offload(self) -> NoReturn:
        """Raises `UnsupportedError`."""
        VmmLayer.offload(self)

    prefetch = offload


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
