"""The layers of a `VmmCache` made with `compile=True`: what transformers asks of them, inside of graphs and outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .compiled_group import CompiledLayerGroup
from .layers import Sliding, VmmLayer


class VmmCompiledLayer(VmmLayer):  # type: ignore[no-untyped-call]
    """One layer of a `VmmCache` made with `compile=True`.

    Args:
        groups: all of the cache.
        group: that it belongs to.
    """

    is_croppable = True
    _group: CompiledLayerGroup

    def __init__(self, groups: Iterable[CompiledLayerGroup], group: CompiledLayerGroup, layer_idx: int) -> None:
        super().__init__(group, layer_idx)
        self._groups = groups

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether there are kernels for what it holds."""
        return self._group.has_kernels

    def _held(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        # Inside of a graph there is nothing to count; where room was reserved, that breaks it, however.
        if self._extent.rows and (self._group.is_reserved or not torch.compiler.is_compiling()):
            self._group.settle()
        return super()._held()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends K and V, `[batch_size, num_kv_heads, tokens, head_dim]`; returns what they attend to.

        That is whole rows, `[batch_size, num_kv_heads, max_seq_len, head_dim]`, inside of graphs, and where
        `get_mask_sizes` has returned as many before: `WholeRows`, which vmmkv's own attention alone can read. Elsewhere
        it is what `VmmLayer` returns: for the first tokens, without kernels, and for callers that ask for no mask.

        Raises:
            VmmkvError: see `LayerGroup.write`, and `CompiledLayerGroup.check_graph`; nothing was written.
        """
        group, extent = self._group, self._extent
        if torch.compiler.is_compiling():
            if not (extent.rows and group.has_kernels):
                return self._append_outside_graphs(key_states, value_states)  # type: ignore[no-any-return]
        elif not group.is_captured:
            return self._append(key_states, value_states)
        group.check_graph(extent, key_states, value_states)
        group.append(self._index, torch.ops.vmmkv.write_rows, key_states, value_states)
        if not group.is_reserved:
            extent.expected, extent.written = 0, key_states.shape[2]
        return group.read_whole_rows(self._index)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group, extent = self._group, self._extent
        group.settle()
        first, is_masked = self._first_visible(extent.end), extent.expected == keys.shape[2]  # 0: it was not asked
        group.write(self._index, keys, values, extent.end)
        return group.read_whole_rows(self._index) if is_masked else group.read(self._index, first)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # driver calls are no part of a graph
    def _append_outside_graphs(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._append(keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Whole rows, which announces a pass of `query_length` tokens, which need not come; what `VmmLayer` returns for
        the first tokens, and without kernels."""
        if not self._group.has_kernels:
            self._group.expect_none()
        if not (self._extent.rows and self._group.has_kernels):
            return super().get_mask_sizes(query_length)
        if torch.compiler.is_compiling():
            self._group.check_room(self._extent, query_length)
        else:
            self._announce(query_length)
        return self._group.max_seq_len, 0

    def _announce(self, tokens: int) -> None:
        """Says that a pass may come to the layers that are in step with this one; it changes nothing to say it twice.

        Raises:
            VmmkvError: see `CompiledLayerGroup.expect`.
        """
        if any(group.is_captured for group in self._groups):
            return  # what is written there has to be reserved
        for group in self._groups:
            group.settle()
        for group in self._groups:
            if group.has_kernels:
                group.expect(tokens, self._extent)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens so far, a tensor on the device; 0 before the first."""
        group, extent = self._group, self._extent
        if not extent.rows:
            return 0
        if torch.compiler.is_compiling() or group.is_reserved:
            return group.lengths[self._index, 0].clone()  # it will change, and what was asked must not
        group.settle()
        return torch.full((), extent.end, dtype=torch.int32, device=group.lengths.device)

    def length_after_crop(self, tokens_to_remove: int) -> int:
        self._group.settle()
        return super().length_after_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        self._group.is_told = False
        super().crop(tokens_to_remove)
        if self._group.is_reserved:
            self._group.tell(self._index)


class VmmCompiledSlidingWindowLayer(Sliding, VmmCompiledLayer):  # type: ignore[no-untyped-call]
    """The same with a sliding window."""

    def __init__(
        self, groups: Iterable[CompiledLayerGroup], group: CompiledLayerGroup, layer_idx: int, sliding_window: int
    ) -> None:
        super().__init__(groups, group, layer_idx)
        self.sliding_window = self._extent.window = sliding_window

    @property
    def record_past(self) -> bool:
        return self._extent.keeps_past

    @record_past.setter
    def record_past(self, keeps_past: bool) -> None:
        self._extent.keeps_past = keeps_past
