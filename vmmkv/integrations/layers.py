"""The layers of a `VmmCache`: what transformers asks of a layer, on a layer group.

To transformers a layer is a `DynamicLayer`, with or without a sliding window, on which layers that keep more than K and
V can be put; but all that deals with K and V is defined anew. It depends on the names of these methods and attributes,
and on layers that write once in each forward pass, in the order of their numbers.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from transformers.cache_utils import DynamicLayer

from ..errors import (
    ArgumentError,
    AutogradError,
    DeviceError,
    DtypeError,
    ReleasedTokensError,
    ShapeError,
    UnsupportedError,
)
from .layer_group import LayerGroup


def _states(index: int, name: str) -> Any:
    """The property `keys` or `values` of a layer: see `VmmLayer`."""

    def read(layer: VmmLayer) -> torch.Tensor | None:
        return (layer.shown() or (None, None))[index]

    def overwrite(layer: VmmLayer, states: torch.Tensor | None) -> None:
        held = read(layer)
        if not isinstance(states, torch.Tensor):
            raise ArgumentError(f"got {type(states).__name__} as {name}; reset() drops all tokens, crop() the last")
        if held is None or states.shape != held.shape:
            there = list(held.shape) if held is not None else "nothing"
            raise ShapeError(
                f"got {name} {list(states.shape)}; layer {layer.layer_idx} holds {there}, and an assignment writes "
                "over what is there. crop(), reset() and batch_select_indices() change how much that is"
            )
        if states.dtype != held.dtype:
            raise DtypeError(f"got {name} as {states.dtype}; this cache holds {held.dtype}")
        if states.device != held.device:
            raise DeviceError(f"got {name} on {states.device}; layer {layer.layer_idx} is on {held.device}")
        if torch.is_grad_enabled() and states.requires_grad:
            raise AutogradError(f"got {name} that requires gradients; a cache that is written in place keeps no graph")
        held.copy_(states)

    return property(read, overwrite)


class VmmLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a `VmmCache`, which lies in the rows of `group`; number `layer_idx` of the model.

    Attributes:
        keys, values: K and V of the tokens that the layer keeps, `[batch_size, num_kv_heads, tokens, head_dim]`: views
            of the rows, until the next crop, reorder or reset; None while it keeps none. An assignment writes there:
            other states of the same shape, dtype and device. Since the views can be written to, pages that are shared
            are copied first, and none are shared until the next reset. 8 bits are `ScaledStates`, and cannot be
            written to.
    """

    is_compileable = False
    is_croppable = True
    keys, values = _states(0, "K"), _states(1, "V")

    def __init__(self, group: LayerGroup, layer_idx: int) -> None:
        # DynamicLayer's own would set keys and values.
        self.layer_idx, self.is_sliding = layer_idx, group.window is not None
        self.home: torch.device | None = None
        """The device of the last K and V."""
        self.join(group)

    def join(self, group: LayerGroup) -> None:
        """Becomes the last layer of a group; the one that it was in must have dropped it."""
        self.group, self._extent = group, group.add_layer(self.layer_idx)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learns the shapes of K and V, `[batch_size, num_kv_heads, tokens, head_dim]`; writes nothing."""
        self.group.learn(self._extent, key_states, value_states, key_states.dtype)

    @property
    def rows(self) -> int:
        """Sequences of which it holds tokens."""
        return self._extent.rows

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether it holds tokens."""
        return self._extent.rows > 0

    @property
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """Of K and V; None before the first."""
        return self.group.states_dtype

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """Where K and V are; None before the first."""
        return self.group.device

    def shown(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V that the user may write to."""
        return self.group.show(self._extent) if self._extent.rows else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends K and V, `[batch_size, num_kv_heads, tokens, head_dim]`; returns K and V of the tokens that they
        attend to: of 8 bits what is kept, unless nothing was there before.

        Raises:
            VmmkvError: as in `LayerGroup.update`; nothing was written.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._update_outside_graphs(key_states, value_states)  # type: ignore[no-any-return]
        return self.group.update(self._extent, key_states, value_states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # driver calls are no part of a graph
    def _update_outside_graphs(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._update(keys, values)

    def _update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.group.update(self._extent, keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens the next `query_length` ones attend to, themselves included, and the first of them."""
        first = self._extent.first_visible(self._extent.end)
        return self._extent.end - first + query_length, first

    def get_seq_length(self) -> int:
        """Tokens so far, also those that a window has left behind."""
        return self._extent.end

    def get_max_length(self) -> int:
        """The largest length: `max_seq_len`; of a window the window, as in transformers."""
        return self.group.window or self.group.max_seq_len

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a token attends to, itself included; None: all."""
        return self.group.window

    @property
    def _sliding_window_tensor(self) -> torch.Tensor | None:
        """The window as `DynamicCache(iter(cache))` looks for it."""
        return torch.tensor(self.group.window) if self.is_sliding else None

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        """Tokens so far, by the name that windows have for it."""
        return self.get_seq_length()

    @property
    def record_past(self) -> bool:
        """Whether the layer keeps what its window leaves behind, until the next `crop`."""
        return self._extent.keeps_past

    @record_past.setter
    def record_past(self, keeps_past: bool) -> None:
        self._extent.keeps_past = keeps_past

    def activate_past_recording(self) -> None:
        """Lets tokens be dropped with `crop` although the window has moved on."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens.

        Args:
            tokens_to_remove: minus their number, as transformers counts.

        Raises:
            ReleasedTokensError: the layer would need tokens that its window has left behind.
            ArgumentError, ValueError: it is no whole number, or positive.
        """
        end = self.length_after_crop(tokens_to_remove)
        self._extent.first, self._extent.end = self._extent.first_visible(end), end
        if not end:
            self._extent.clear()

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
        if self._extent.first_visible(end) < extent.first:
            raise ReleasedTokensError(
                f"asked to drop {-tokens_to_remove} of {extent.end} tokens; the window before them is gone: this layer "
                f"holds tokens from {extent.first} on. Call activate_past_recording() before the tokens come"
            )
        return end

    def reset(self) -> None:
        """Drops all tokens."""
        self._extent.clear()
        self.group.passes.start_over()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes sequence i what sequence `beam_idx[i]` was; there may be more or fewer of them then."""
        if self.rows:
            self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence, its copies side by side."""
        if self.rows:
            self._select(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences that `indices` names, or marks, and no others."""
        if self.rows:
            self._select(torch.arange(self.rows, device=indices.device)[indices])

    def _select(self, indices: torch.Tensor) -> None:
        self.group.select(self._extent, indices)

    def offload(self) -> NoReturn:
        """Raises `UnsupportedError`: attention reads K and V where they are written."""
        raise UnsupportedError(
            "K and V in rows stay on their device, where attention reads them; DynamicCache(offloading=True) moves "
            "them to the host and back"
        )

    prefetch = offload
