"""Layers of a `VmmCache` made with `compile=True`: one compiled forward pass, or CUDA graph, serves every length.

Each layer appends behind its own length, which is a number on the device, and advances it. A pass reads and writes
tensors with the shape of whole rows, which never move, so that nothing that a compiler guards on changes from token to
token. Whole rows have memory for live tokens only: vmmkv's own attention alone reads them, with its kernels, or, under
masks that these do not know, outside of graphs and of live tokens. Where kernels do not take K and V nothing is
compiled, and layers give views of live tokens as those of other caches do.

Only the host can map pages. Outside of graphs a layer's write does it. Before a pass that `generate` compiles
transformers asks, by `get_mask_sizes` and outside of the graph, how long its mask must be: that announces a pass to all
layers, and makes room for it. A compiled write takes the announcement of its layer, and the host counts its tokens
afterwards. Without an announcement it is refused.

Invariants:
 1. The host knows each layer's length exactly and tells the device before the two may differ in use: after a pass that
    was announced and not counted, say.
 2. The memory that an announced pass reads and writes is mapped.
 3. Rows begin with token 0: positions are tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import StreamCaptureError, VmmkvError
from .attention import NAME, kernels_take, shown
from .batch import Batch, Where
from .layer_group import Extent, LayerGroup, Step, check_batch, unfinished
from .layers import VmmLayer
from .row_writes import check_autograd, write_rows
from .stand_ins import WholeRows


class CompiledLayerGroup(LayerGroup):
    """Layers that share token records, and have their lengths on the device."""

    begins_with_first = True
    lengths: Tensor  # int32 `[layers, max_batch_size]`
    is_told = True  # whether the device knows the lengths of the host, but for an announced pass that ended early
    has_kernels = True  # whether vmmkv's kernels take the K and V of all layers, as far as these are known

    def add_layer(self, layer_idx: int) -> Extent:
        self.passes.layers.append(extent := super().add_layer(layer_idx))
        return extent

    def learn(self, layer: Extent, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        super().learn(layer, keys, values, dtype)
        if not kernels_take(keys, values):
            self.has_kernels = False
            if not self.passes.is_uncompiled:
                self.passes.is_uncompiled = True
                warnings.warn(
                    f'VmmCache(compile=True) works uncompiled: attn_implementation="{NAME}" has no kernels for '
                    f"{shown(keys, values)}",
                    stacklevel=2,
                )

    def set_batch(self, batch: Batch | None) -> None:
        if batch is not None:
            device = batch.kv_cache.device
            if not hasattr(self, "lengths"):
                rows = self._limits.max_batch_size
                with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
                    self.row_numbers = torch.arange(rows, dtype=torch.int32, device=device)
                    self.limit = torch.full((1,), self.max_seq_len, dtype=torch.int32, device=device)
                    self.lengths = torch.zeros(len(self.layers), rows, dtype=torch.int32, device=device)
            # Nothing that graphs read and write ever moves; of other memory that is written no CUDA graph is made.
            for tensor in (self.lengths, self.limit, self.row_numbers, *batch.ranges):
                torch._dynamo.mark_static_address(tensor)
        super().set_batch(batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with torch.inference_mode(False):  # as in `set_batch`
            return super().__deepcopy__(memo)

    def _read(self, layer: Extent, where: Where) -> list[Tensor]:
        k, v = self._held().whole_rows(layer.index, layer.rows)
        return [k[:, where[2]].transpose(1, 2), v[:, where[2]].transpose(1, 2)]

    def read_whole_rows(self, layer: Extent) -> tuple[WholeRows, WholeRows]:
        """K and V of whole rows, `[batch_size, num_kv_heads, max_seq_len, head_dim]`."""
        k, v = (states.transpose(1, 2) for states in self._held().whole_rows(layer.index, layer.rows))
        lengths = self.lengths[layer.index, : layer.rows]
        return WholeRows(k, lengths, self.window), WholeRows(v, lengths, self.window)

    def _open(self, layer: Extent, keys: Tensor, values: Tensor, looks: tuple[object, ...]) -> Step:
        self.settle()
        others = [each for each in self.passes.layers if each.rows and each.expected == keys.shape[2]]
        if any(each.end != layer.end for each in others):
            raise unfinished()  # they would write as many inside of a graph, where nothing can be checked
        step = super()._open(layer, keys, values, looks)
        self.tell()
        return step

    def _make_room(self, rows: int, first: int, begin: int, end: int) -> None:
        if not self.has_kernels:
            super()._make_room(rows, first, begin, end)
            return
        batch = self._held()
        with self.passes.changing(VmmkvError):
            if batch.rows and end > batch.end:  # announced room stays
                batch.shrink(batch.rows, self._needed()[1], batch.end)
            batch.reserve(rows, first, max(self._whole_pages(end), end))  # until there the host need not look
            batch.unshare(begin)

    def _whole_pages(self, end: int) -> int:
        """The end of the pages that `end` tokens lie in."""
        page_tokens = self._held().page_tokens
        return min(-(-end // page_tokens) * page_tokens, self.max_seq_len)

    def update(self, layer: Extent, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer.written:  # by a compiled pass that was not counted
            self._step = None
        attended = super().update(layer, keys, values)
        layer.expected, self.is_told = 0, True  # only now does the host count what the device does
        return attended

    def _append(self, layer: int, keys: Tensor, values: Tensor, new: Where, attended: Where) -> list[Tensor]:
        step, self._step, self.is_told = self._step, None, False  # an interrupted write may count on the device
        self._append_behind(layer, write_rows, keys, values)
        self._step = step
        return self._held().view(layer, attended)

    def append_inside(self, layer: Extent, keys: Tensor, values: Tensor) -> None:
        """Appends K and V inside of a graph."""
        check_autograd(keys, values)
        check_batch(layer, keys.shape[0])
        self.check_room(layer, keys.shape[2])
        self._append_behind(layer.index, torch.ops.vmmkv.write_rows, keys, values)
        layer.expected, layer.written = 0, keys.shape[2]

    def _append_behind(self, layer: int, write: Callable[..., None], keys: Tensor, values: Tensor) -> None:
        """Writes behind the tokens that the device knows of."""
        rows = keys.shape[0]
        k_rows, v_rows = self._held().whole_rows(layer, rows)
        write(keys, values, k_rows, v_rows, self.row_numbers[:rows], self.lengths[layer, :rows], self.limit)

    def check_room(self, layer: Extent, tokens: int) -> None:
        """Raises `StreamCaptureError` unless there is room for a pass inside of a graph."""
        if self.is_captured or layer.expected != tokens:
            raise StreamCaptureError(
                f"a compiled forward pass of {tokens} tokens cannot map pages: call cache.get_mask_sizes({tokens}, 0) "
                "before it, outside of the graph, as generate does. Passes that are captured by hand are refused"
            )

    def settle(self) -> None:
        """Counts the tokens that compiled passes have written since."""
        for layer in self.passes.layers:
            if layer.written:
                self.passes.start_over()
                end = layer.end + layer.written
                first = layer.first if layer.record_past else max(layer.first, layer.first_visible(end))
                layer.first, layer.end, layer.expected, layer.written = first, end, 0, 0

    def tell(self) -> None:
        """Tells the device how long layers are."""
        ends = torch.tensor([[layer.end] for layer in self.layers], dtype=torch.int32)
        self.lengths.copy_(ends, non_blocking=True)
        self.is_told = True

    def expect(self, tokens: int, asker: Extent) -> None:
        """Makes room for a pass of `tokens` that may come, to the layers that are as long as `asker`."""
        held = [layer for layer in self.layers if layer.rows]
        is_told = self.is_told and not any(layer.expected for layer in held)  # the last pass may have broken off
        self.expect_none()
        if held:
            if not is_told:
                self.tell()
            rows, first, _ = self._needed()
            ends = [layer.end for layer in held]
            end = max(ends) + tokens
            self._make_room(rows, first, min(ends), end)
            if self._held().end > self._whole_pages(end):  # a longer pass was expected
                self._held().shrink(rows, first, self._whole_pages(end))
        for layer in self.layers:
            if layer.end == asker.end:
                layer.expected = tokens

    def expect_none(self) -> None:
        """Takes back an announcement."""
        self._step = None
        for layer in self.layers:
            layer.expected = 0

    def fit(self) -> None:
        if self.batch is not None:
            self.settle()
            super().fit()
            self.expect_none()  # the room for it may be gone
            self.tell()

    def clear(self) -> None:
        super().clear()
        if self.batch:
            self.tell()


class VmmCompiledLayer(VmmLayer):  # type: ignore[no-untyped-call]
    """One layer of a `VmmCache` made with `compile=True`, of which `groups` are all."""

    group: CompiledLayerGroup

    def __init__(self, groups: Iterable[CompiledLayerGroup], group: CompiledLayerGroup, layer_idx: int) -> None:
        super().__init__(group, layer_idx)
        self._groups = groups

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return self.group.has_kernels

    def shown(self) -> tuple[Any, Any]:
        if self._extent.rows and not torch.compiler.is_compiling():
            self.group.settle()
        return super().shown()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends K and V; returns K and V that they attend to: `WholeRows`, which vmmkv's own attention alone can
        read, inside of graphs, and where `get_mask_sizes` has announced the pass. For the first tokens, without
        kernels, and for callers that ask for no mask it is what `VmmLayer` returns."""
        group, is_compiling = self.group, torch.compiler.is_compiling()
        if group.is_captured or (is_compiling and self._extent.rows and group.has_kernels):
            group.append_inside(self._extent, key_states, value_states)
            return group.read_whole_rows(self._extent)
        update = self._update_outside_graphs if is_compiling else self._update
        return update(key_states, value_states)

    def _update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        is_masked = self._extent.expected == keys.shape[2]
        attended = super()._update(keys, values)
        return self.group.read_whole_rows(self._extent) if is_masked else attended

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Whole rows, which announces a pass of `query_length` tokens to the layers that are as long as this one; it
        need not come, and saying it twice changes nothing. What `VmmLayer` returns for the first tokens, and without
        kernels."""
        if not self.group.has_kernels:
            self.group.expect_none()
        if not (self._extent.rows and self.group.has_kernels):
            return super().get_mask_sizes(query_length)
        if torch.compiler.is_compiling():
            self.group.check_room(self._extent, query_length)
            return self.group.max_seq_len, 0
        if not any(group.is_captured for group in self._groups):
            self.group.settle()
            for group in self._groups:
                if group.has_kernels:
                    group.expect(query_length, self._extent)
        return self.group.max_seq_len, 0

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        """Tokens so far, a tensor on the device; 0 before the first."""
        group = self.group
        if not self._extent.rows:
            return 0
        if torch.compiler.is_compiling():
            return group.lengths[self._extent.index, 0].clone()  # the caller's must not change with the next pass
        group.settle()
        return torch.full((), self._extent.end, dtype=torch.int32, device=group.lengths.device)

    def length_after_crop(self, tokens_to_remove: int) -> int:
        self.group.settle()
        return super().length_after_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        self.group.is_told = False
        super().crop(tokens_to_remove)
