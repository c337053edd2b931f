"""The layers of a `VmmCache`: what transformers asks of a layer, on a layer group.

To transformers a layer is a `DynamicLayer`, but all that deals with K and V is defined anew. It depends on the names of
these methods and attributes, on the kinds of layers that `DynamicCache` makes, and on layers that write once in each
forward pass, in the order of their numbers.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..errors import ArgumentError, ReleasedTokensError, UnsupportedError
from .layer_group import LayerGroup


class VmmLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a `VmmCache`, which lies in the rows of `group`; number `layer_idx` of the model.

    `keys` and `values` are views of the tokens that it keeps, `[batch_size, num_kv_heads, tokens, head_dim]`, until the
    next crop, reorder or reset; None while it keeps none. Since they can be written to, pages that are shared are
    copied first, and none are shared until the next reset. 8 bits are `ScaledStates`, and cannot be written to.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, group: LayerGroup, layer_idx: int) -> None:
        # DynamicLayer's own would set keys and values.
        self.layer_idx, self.is_sliding = layer_idx, group.window is not None
        self.join(group)

    def join(self, group: LayerGroup) -> None:
        """Becomes the last layer of a group; the one that it was in must have dropped it."""
        self.group, self._extent = group, group.add_layer(self.layer_idx)
        self.home: torch.device | None = None  # the device of the last K and V

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learns the shapes of K and V; writes nothing."""
        self.group.learn(self._extent, key_states, value_states, key_states.dtype)

    @property
    def rows(self) -> int:
        """Sequences of which it holds tokens."""
        return self._extent.rows

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._extent.rows > 0

    @property
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return self.group.states_dtype

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        return self.group.device

    def shown(self) -> tuple[Any, Any]:
        """K and V that the user may write to."""
        return self.group.show(self._extent) if self.rows else (None, None)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self.shown()[0]  # type: ignore[no-any-return]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.shown()[1]  # type: ignore[no-any-return]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `VmmCache.update`."""
        if torch.compiler.is_dynamo_compiling():
            return self._update_outside_graphs(key_states, value_states)  # type: ignore[no-any-return]
        return self.group.update(self._extent, key_states, value_states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # driver calls are no part of a graph
    def _update_outside_graphs(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._update(keys, values)

    def _update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.group.update(self._extent, keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens the next `query_length` ones attend to, themselves included, and the first of them."""
        extent = self._extent
        first = extent.first_visible(extent.end)
        return extent.end - first + query_length, first

    def get_seq_length(self) -> int:
        """Tokens so far, also those that a window has left behind."""
        return self._extent.end

    def get_max_length(self) -> int:
        """The largest length: `max_seq_len`; of a window the window, as in transformers."""
        return self.group.window or self.group.max_seq_len

    @property
    def sliding_window(self) -> int | None:
        return self.group.window

    @property
    def _sliding_window_tensor(self) -> Tensor | None:
        """The window as `DynamicCache(iter(cache))` looks for it."""
        return torch.tensor(self.group.window) if self.is_sliding else None

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        return self.get_seq_length()

    @property
    def record_past(self) -> bool:
        """Whether the layer keeps what its window leaves behind, until the next `crop`."""
        return self._extent.record_past

    @record_past.setter
    def record_past(self, records: bool) -> None:
        self._extent.record_past = records

    def activate_past_recording(self) -> None:
        """Lets tokens be dropped with `crop` although the window has moved on."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens: see `VmmCache.crop`."""
        end = self.length_after_crop(tokens_to_remove)
        self._extent.first, self._extent.end = self._extent.first_visible(end), end
        if not end:
            self._extent.forget()

    def length_after_crop(self, tokens_to_remove: int) -> int:
        """The length that `crop` would leave; raises what it would raise."""
        try:
            tokens_to_remove = operator.index(tokens_to_remove)  # generate() counts in tensors on the device
        except TypeError:
            raise ArgumentError(f"asked to crop {tokens_to_remove!r} tokens; it must be a whole number") from None
        if tokens_to_remove > 0:
            raise ValueError(f"asked to crop {tokens_to_remove} tokens; -{tokens_to_remove} drops that many")
        extent = self._extent
        end = max(extent.end + tokens_to_remove, 0)
        if extent.first_visible(end) < extent.first:
            raise ReleasedTokensError(
                f"asked to drop {-tokens_to_remove} of {extent.end} tokens; the window before them is gone: this layer "
                f"holds tokens from {extent.first} on. Call activate_past_recording() before the tokens come"
            )
        return end

    def reset(self) -> None:
        """Drops all tokens, and ends the forward pass."""
        self._extent.forget()
        self.group.passes.start_over()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raises `UnsupportedError`, unless it holds no tokens: all layers of a cache hold the same sequences."""
        if self.rows:
            raise UnsupportedError("asked one layer for other sequences; ask its VmmCache, for all layers")

    batch_repeat_interleave = batch_select_indices = reorder_cache  # type: ignore[assignment]

    def reorder_states(self, indices: Tensor) -> None:
        """Makes sequence i what sequence `indices[i]` was, in what the layer keeps beside K and V."""

    def offload(self) -> NoReturn:
        """Raises `UnsupportedError`: attention reads K and V where they are written."""
        raise UnsupportedError(
            "K and V in rows stay on their device, where attention reads them; DynamicCache(offloading=True) moves "
            "them to the host and back"
        )

    prefetch = offload


class VmmHybridLayer(VmmLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call]
    """A `VmmLayer` beside the states of linear attention, which transformers keeps."""

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
        forget_states(self)
        VmmLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        VmmLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        VmmLayer.reorder_cache(self, beam_idx)
        self.reorder_states(beam_idx)

    def reorder_states(self, indices: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, indices)  # type: ignore[arg-type]


def forget_states(layer: LinearAttentionLayer) -> None:
    """Drops the states of linear attention; `LinearAttentionLayer.reset` would keep zeros for as many sequences."""
    record_past = layer.record_past
    LinearAttentionLayer.__init__(layer, layer.number_of_states)
    layer.record_past = record_past
