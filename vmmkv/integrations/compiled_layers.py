"""Layers of a `VmmCache` made with `compile=True`: one compiled forward pass, or CUDA graph, serves every length.

Each layer appends behind its own length, which is a number on the device, and advances it. A pass reads and writes
tensors with the shape of whole rows, which never move, so that nothing that a compiler guards on changes from token to
token. Whole rows have memory for live tokens only: vmmkv's own attention alone reads them, with its kernels. Where
these cannot run nothing is compiled, and layers give views of live tokens as those of other caches do.

Only the host can map pages. Outside of graphs a layer's write does it. Before a pass that `generate` compiles
transformers asks, outside of the graph, how long its mask must be: that announces a pass to all layers, and makes room
for it. A compiled write takes the announcement of its layer, and the host counts its tokens afterwards. Without an
announcement it is refused, unless the user has reserved room.

Of transformers it depends on `get_mask_sizes`, which `generate` calls before each compiled pass, outside of the graph.

Invariants:
 1. The host knows each layer's length exactly and tells the device before the two may differ in use: after a pass that
    was announced and not counted, say. Once room was reserved the device knows it, and the host asks.
 2. The memory that an announced pass, or one behind `reserve`, reads and writes is mapped.
 3. Rows begin with token 0: positions are tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

import torch
from transformers import PreTrainedConfig

from ..errors import StreamCaptureError, UnsupportedError, VmmkvError
from .attention import NAME, kernels_take, shown
from .batch import Batch, Limits, Where
from .layer_group import LayerGroup
from .layers import VmmLayer
from .passes import Extent, Passes, Step, check_autograd, check_batch, unfinished
from .pools import Pools
from .row_writes import write_rows
from .whole_rows import WholeRows


class CompiledLayerGroup(LayerGroup):
    """Layers that share token records, and have their lengths on the device."""

    lengths: torch.Tensor
    """int32 `[layers, max_batch_size]`."""

    def __init__(
        self, limits: Limits, pools: Pools, passes: Passes, window: int | None, config: PreTrainedConfig | None
    ) -> None:
        super().__init__(limits, pools, passes, window, config)
        self.is_reserved = False
        """Whether the user has said how long sequences may become until the next `reset`."""
        self.is_told = True
        """Whether the device knows the lengths that the host knows, but for an announced pass that ended early."""
        self._told_limit = 0
        """The value of `limit` on the device; -1 where an interruption may have come in between."""
        self.has_kernels = True
        """Whether vmmkv's kernels take the K and V of all layers, as far as these are known."""

    # ------------------------------------------------------------------ memory

    def add_layer(self, layer_idx: int) -> Extent:
        extent = super().add_layer(layer_idx)
        self.passes.extents.append(extent)
        return extent

    def learn(self, extent: Extent, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
        super().learn(extent, keys, values, dtype)
        if kernels_take(keys, values):
            return
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
                    self.limit = torch.zeros(1, dtype=torch.int32, device=device)
                    self.lengths = torch.zeros(len(self._extents), rows, dtype=torch.int32, device=device)
            # Nothing that graphs read and write ever moves; of other memory that is written no CUDA graph is made.
            for tensor in (self.lengths, self.limit, self.row_numbers, *batch.ranges):
                torch._dynamo.mark_static_address(tensor)
        super().set_batch(batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with torch.inference_mode(False):  # as in `set_batch`
            return super().__deepcopy__(memo)

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            "a cache made with compile=True cannot be pickled: compiled passes know where its rows are. Save one that "
            "was made without it; copy.deepcopy copies either"
        )

    def _read(self, extent: Extent, where: Where) -> list[torch.Tensor]:
        k, v = self._held().whole_rows(extent.index, extent.rows)
        return [k[:, where[2]].transpose(1, 2), v[:, where[2]].transpose(1, 2)]

    def read_whole_rows(self, extent: Extent) -> tuple[WholeRows, WholeRows]:
        """K and V of whole rows, `[batch_size, num_kv_heads, max_seq_len, head_dim]`."""
        k, v = (states.transpose(1, 2) for states in self._held().whole_rows(extent.index, extent.rows))
        lengths = self.lengths[extent.index, : extent.rows]
        return WholeRows(k, lengths, self.window), WholeRows(v, lengths, self.window)

    # ------------------------------------------------------------------ passes

    def _drops_prompts(self, extent: Extent, tokens: int) -> bool:
        return False

    def _open(self, extent: Extent, keys: torch.Tensor, values: torch.Tensor) -> Step:
        self.settle()
        others = [e for e in self.passes.extents if e.rows and e.expected == keys.shape[2]]
        if any(e.end != extent.end for e in others):
            raise unfinished()  # they would write as many inside of a graph, where nothing can be checked
        step = super()._open(extent, keys, values)
        self._step = None if self.is_reserved else step  # the device may come to know of more tokens at any time
        self.tell()
        return step

    def _make_room(self, rows: int, first: int, begin: int, end: int) -> None:
        if self.has_kernels:
            batch = self._held()
            with self.passes.changing(VmmkvError):
                if batch.rows and end > batch.end:  # announced or reserved room stays
                    batch.shrink(batch.rows, self._needed()[1], batch.end)
                batch.reserve(rows, first, max(self._whole_pages(end), end))  # until there the host need not look
                batch.unshare(begin)
        else:
            super()._make_room(rows, first, begin, end)
        self._tell_limit()

    def _whole_pages(self, end: int) -> int:
        """The end of the pages that `end` tokens lie in."""
        page_tokens = self._held().page_tokens
        return min(-(-end // page_tokens) * page_tokens, self.max_seq_len)

    def _tell_limit(self) -> None:
        """Tells the device how far it may write, if it does not know."""
        end = self._held().end
        if self._told_limit != end:
            self._told_limit = -1  # until it is told
            self.limit.fill_(end)
            self._told_limit = end

    def update(self, extent: Extent, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if extent.written:  # by a compiled pass that was not counted
            self._step = None
        attended = super().update(extent, keys, values)
        extent.expected = 0
        return attended

    def _append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, new: Where, attended: Where
    ) -> list[torch.Tensor]:
        step, self._step, self.is_told = self._step, None, False  # an interrupted write may count on the device
        self._append_behind(layer, write_rows, keys, values)
        self._step, self.is_told = step, True
        return self._held().view(layer, attended)

    def append_inside(self, extent: Extent, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Appends K and V, `[batch_size, num_kv_heads, tokens, head_dim]`, inside of a graph."""
        check_autograd(keys, values)
        check_batch(extent, keys.shape[0])
        self.check_room(extent, keys.shape[2])
        self._append_behind(extent.index, torch.ops.vmmkv.write_rows, keys, values)
        if not self.is_reserved:
            extent.expected, extent.written = 0, keys.shape[2]

    def _append_behind(self, layer: int, write: Callable[..., None], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes behind the tokens that the device knows of."""
        rows = keys.shape[0]
        k_rows, v_rows = self._held().whole_rows(layer, rows)
        write(keys, values, k_rows, v_rows, self.row_numbers[:rows], self.lengths[layer, :rows], self.limit)

    def check_room(self, extent: Extent, tokens: int) -> None:
        """Raises `StreamCaptureError` unless there is room for a pass inside of a graph."""
        if not self.is_reserved and (self.is_captured or extent.expected != tokens):
            raise StreamCaptureError(
                "a forward pass that is compiled or captured by hand cannot map pages: call "
                "cache.reserve(seq_len), with the length that sequences will reach, after the prompt and before it"
            )

    @property
    def is_captured(self) -> bool:
        return not torch.compiler.is_compiling() and super().is_captured

    def settle(self) -> None:
        """Counts the tokens that compiled passes have written since; where room was reserved it asks the device."""
        for extent in self.passes.extents:
            if extent.written:
                self.passes.start_over()
                self._newest = max(self._newest, extent.written)
                end = extent.end + extent.written
                counted = extent.first_kept(end), end, extent.written, 0, 0
                extent.first, extent.end, extent.newest, extent.expected, extent.written = counted
        held = [extent for extent in self._extents if extent.rows]
        if self.is_reserved and held:
            now = [end for extent, end in zip(self._extents, self.lengths[:, 0].tolist()) if extent.rows]
            in_step: dict[object, int] = {}
            if any(in_step.setdefault((e.newest, e.end), end) != end for e, end in zip(held, now)):
                raise unfinished()
            for extent, end in zip(held, now):
                extent.first, extent.end = extent.first_kept(end), end

    def tell(self) -> None:
        """Tells the device how long layers are."""
        ends = torch.tensor([[extent.end] for extent in self._extents], dtype=torch.int32)
        self.lengths.copy_(ends, non_blocking=True)
        self.is_told = True

    def expect(self, tokens: int, asker: Extent) -> None:
        """Makes room for a pass of `tokens` that may come, to the layers that are as long as `asker`."""
        held = [extent for extent in self._extents if extent.rows]
        is_told = self.is_told and not any(extent.expected for extent in held)  # the last pass may have broken off
        self.expect_none()
        if held:
            if not self.is_reserved:
                self.share_prompts()
                if not is_told:
                    self.tell()
            rows, first, _ = self._needed()
            ends = [extent.end for extent in held]
            end = max(ends) + tokens
            self._make_room(rows, first, min(ends), end)
            if not self.is_reserved and self._held().end > self._whole_pages(end):  # a longer pass was expected
                self._held().shrink(rows, first, self._whole_pages(end))
                self._tell_limit()
        for extent in self._extents:
            if extent.end == asker.end:
                extent.expected = tokens

    def expect_none(self) -> None:
        """Takes back an announcement."""
        self._step = None
        for extent in self._extents:
            extent.expected = 0

    # ------------------------------------------------------------------ the cache's own operations

    def reserve(self, seq_len: int) -> None:
        """Maps pages for sequences of up to `seq_len` tokens; see `VmmCache.reserve`."""
        if not self.has_kernels:
            raise UnsupportedError(
                "asked to reserve room for passes that are compiled or captured by hand; this cache works uncompiled, "
                f"since {NAME} has no kernels for its K and V"
            )
        self.settle()
        if not self.is_reserved:
            self.tell()
        batch, self._step = self._held(), None
        with self.passes.changing(VmmkvError):
            batch.reserve(batch.rows, batch.first, seq_len)
            batch.unshare(batch.first)  # tokens may be dropped by hand, and others written
        self._tell_limit()
        self.is_reserved = True

    def select(self, extent: Extent, indices: torch.Tensor) -> None:
        if not self.is_reordered:
            self.settle()
            super().select(extent, indices)
            self.tell()

    def _can_share(self) -> bool:
        return not self.is_reserved and super()._can_share()

    def fit(self) -> None:
        if self.batch is None:
            return
        if not any(extent.rows for extent in self._extents):
            self.is_reserved = False
        self.settle()
        super().fit()
        self.expect_none()  # the room for it may be gone
        self.tell()
        self._tell_limit()

    def clear(self) -> None:
        super().clear()
        self.is_reserved = False
        if self.batch:
            self.tell()
            self._tell_limit()

    def _needed(self) -> tuple[int, int, int]:
        rows, first, end = super()._needed()
        return rows, first, self._held().end if rows and self.is_reserved else end


class VmmCompiledLayer(VmmLayer):  # type: ignore[no-untyped-call]
    """One layer of a `VmmCache` made with `compile=True`.

    Args:
        groups: all of the cache.
        group: that it belongs to.
    """

    group: CompiledLayerGroup

    def __init__(self, groups: Iterable[CompiledLayerGroup], group: CompiledLayerGroup, layer_idx: int) -> None:
        super().__init__(group, layer_idx)
        self._groups = groups

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether there are kernels for what it holds."""
        return self.group.has_kernels

    def shown(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        # Inside of a graph there is nothing to count; where room was reserved, that breaks it, however.
        if self._extent.rows and (self.group.is_reserved or not torch.compiler.is_compiling()):
            self.group.settle()
        return super().shown()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends K and V, `[batch_size, num_kv_heads, tokens, head_dim]`; returns K and V that they attend to.

        That is whole rows, `[batch_size, num_kv_heads, max_seq_len, head_dim]`, inside of graphs, and where
        `get_mask_sizes` has returned as many before: `WholeRows`, which vmmkv's own attention alone can read. Elsewhere
        it is what `VmmLayer` returns: for the first tokens, without kernels, and for callers that ask for no mask.
        """
        group, extent = self.group, self._extent
        if torch.compiler.is_compiling():
            if not (extent.rows and group.has_kernels):
                return self._update_outside_graphs(key_states, value_states)  # type: ignore[no-any-return]
        elif not group.is_captured:
            return self._update(key_states, value_states)
        group.append_inside(extent, key_states, value_states)
        return group.read_whole_rows(extent)

    def _update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        is_masked = self._extent.expected == keys.shape[2]
        attended = super()._update(keys, values)
        return self.group.read_whole_rows(self._extent) if is_masked else attended

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Whole rows, which announces a pass of `query_length` tokens, which need not come; what `VmmLayer` returns for
        the first tokens, and without kernels."""
        if not self.group.has_kernels:
            self.group.expect_none()
        if not (self._extent.rows and self.group.has_kernels):
            return super().get_mask_sizes(query_length)
        if torch.compiler.is_compiling():
            self.group.check_room(self._extent, query_length)
        else:
            self._announce(query_length)
        return self.group.max_seq_len, 0

    def _announce(self, tokens: int) -> None:
        """Says that a pass may come to the layers that are as long as this one; saying it twice changes nothing."""
        if any(group.is_captured for group in self._groups):
            return  # room for a pass that is captured has to be reserved
        for group in self._groups:
            group.settle()
        for group in self._groups:
            if group.has_kernels:
                group.expect(tokens, self._extent)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens so far, a tensor on the device; 0 before the first."""
        group, extent = self.group, self._extent
        if not extent.rows:
            return 0
        if torch.compiler.is_compiling() or group.is_reserved:
            return group.lengths[extent.index, 0].clone()  # the caller's must not change with the next pass
        group.settle()
        return torch.full((), extent.end, dtype=torch.int32, device=group.lengths.device)

    def length_after_crop(self, tokens_to_remove: int) -> int:
        self.group.settle()
        return super().length_after_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        self.group.is_told = False
        super().crop(tokens_to_remove)
        if self.group.is_reserved:
            self.group.tell()
