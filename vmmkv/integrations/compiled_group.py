"""A layer group whose lengths are data on the device: one compiled forward pass, one CUDA graph, serves every length.

Each layer appends behind its own length, which is on the device, and advances it. What a pass reads and writes has the
shape of whole rows and never moves, so nothing that a compiler guards on changes from token to token.

Only the host can map pages. Outside of graphs a layer's write sees to it itself. Before a pass that `generate` compiles
transformers asks, outside of the graph, how long its mask must be: that announces a pass to all layers, and makes room
for it. A compiled write takes the announcement of its layer, by which the host counts its tokens afterwards; without
one it is refused, unless the user has reserved room.

Whole rows have memory for live tokens only, so vmmkv's own attention alone reads them, with its kernels. Where these
cannot run nothing is compiled: layers give views of live tokens, as those of other caches do.

Invariants:
 1. The host knows each layer's length exactly and tells the device, where the two may differ, before it is used: after
    a pass that was announced and not counted, say. Once room was reserved the device knows it, and the host asks.
 2. What an announced pass, or one behind `reserve`, reads and writes is mapped.
 3. Rows begin with token 0: positions are tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch

from ..errors import StreamCaptureError, UnsupportedError
from .attention import NAME, kernels_take, shown
from .batch import Limits
from .extents import Extent, Passes, unfinished
from .layer_group import LayerGroup, check_autograd, check_batch
from .pools import Pools
from .row_writes import write_rows
from .whole_rows import WholeRows


class CompiledLayerGroup(LayerGroup):
    """Layers that share token records, and have their lengths on the device.

    Args:
        limits, pools, passes, window: as in `LayerGroup`.
    """

    def __init__(self, limits: Limits, pools: Pools, passes: Passes, window: int | None) -> None:
        super().__init__(limits, pools, passes, window)
        self.is_reserved = False
        """Whether the user has said how long sequences may become until the next `reset`."""
        self.is_told = True
        """Whether the device knows what the host does, unless a pass that was announced has ended in the middle."""
        self._told_limit = 0
        """What `limit` says on the device; -1 where an interruption may have come in between."""
        self.has_kernels = True
        """Whether vmmkv's kernels take the K and V of all layers, as far as these are known."""

    # ------------------------------------------------------------------ memory

    def learn(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch = self.batch
        if batch is None:
            rows = self._limits.max_batch_size
            with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
                self.row_numbers = torch.arange(rows, dtype=torch.int32, device=keys.device)
                self.lengths = torch.zeros(len(self._extents), rows, dtype=torch.int32, device=keys.device)
                self.limit = torch.zeros(1, dtype=torch.int32, device=keys.device)
        super().learn(layer, keys, values)
        if batch is not self.batch:
            self._tell_compilers()
        if self.has_kernels and not kernels_take(keys, values):
            self.has_kernels = False
            warnings.warn(
                f'VmmCache(compile=True) works uncompiled: attn_implementation="{NAME}" has no kernels for '
                f"{shown(keys, values)}",
                stacklevel=2,
            )

    def _tell_compilers(self) -> None:
        """That what graphs read and write never moves: CUDA graphs are not made of other memory that is written."""
        for tensor in (self.lengths, self.limit, self.row_numbers, *self._held().ranges):
            torch._dynamo.mark_static_address(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with torch.inference_mode(False):  # as in `learn`
            twin = super().__deepcopy__(memo)
        if twin.batch:
            twin._tell_compilers()
        return twin

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            "a cache made with compile=True cannot be pickled: compiled passes know where its rows are. Save one that "
            "was made without it; copy.deepcopy copies either"
        )

    def read(self, layer: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        extent = self._extents[layer]
        k, v = self._held().whole_rows(layer, extent.rows)
        live = slice(first, extent.end + extent.written)
        return k[:, live].transpose(1, 2), v[:, live].transpose(1, 2)

    # ------------------------------------------------------------------ passes

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        extent, tokens = self._extents[layer], keys.shape[2]
        if any(e.rows and e.expected == tokens and not e.is_in_step_with(extent) for e in self.passes.extents):
            raise unfinished()  # others would write as many inside of a graph, where nobody looks
        told, self.is_told = self.is_told, False  # until it is counted: it may be interrupted
        super().write(layer, keys, values, first)
        self.is_told = told

    def _make_room(self, rows: int, first: int, end: int) -> None:
        batch = self._held()
        if not self.has_kernels:
            super()._make_room(rows, first, end)
        elif not batch.holds(rows, first, end):
            if batch.rows:  # what windows have left behind goes; what was announced, or reserved, stays
                batch.shrink(batch.rows, self._needed()[1], batch.end)
            self._check_rows()
            batch.reserve(rows, first, max(self._whole_pages(end), end))
        self._tell_limit()

    def _tell_limit(self) -> None:
        """Tells the device how far it may write, if it does not know."""
        end = self._held().end
        if self._told_limit != end:
            self._told_limit = -1  # until it is told
            self.limit.fill_(end)
            self._told_limit = end

    def _whole_pages(self, end: int) -> int:
        """Where the pages end that `end` tokens lie in: until then the host need not look."""
        page_tokens = self._held().page_tokens
        return min(-(-end // page_tokens) * page_tokens, self.max_seq_len)

    def _put(self, layer: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        if not (self.is_reserved and self._extents[layer].rows):
            self.tell(layer)
        self.append(layer, write_rows, keys, values)

    def read_whole_rows(self, layer: int) -> tuple[WholeRows, WholeRows]:
        """K and V of whole rows, `[batch_size, num_kv_heads, max_seq_len, head_dim]`."""
        batch, rows = self._held(), self._extents[layer].rows
        k, v = (states.transpose(1, 2) for states in batch.whole_rows(layer, rows))
        lengths = self.lengths[layer, :rows]
        return WholeRows(k, lengths, self.window), WholeRows(v, lengths, self.window)

    def append(self, layer: int, write: Callable[..., None], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes behind the tokens that the device knows of, with `write_rows`."""
        rows = keys.shape[0]
        k_rows, v_rows = self._held().whole_rows(layer, rows)
        write(keys, values, k_rows, v_rows, self.row_numbers[:rows], self.lengths[layer, :rows], self.limit)

    def settle(self) -> None:
        """Counts what compiled passes have written since; where room was reserved it asks the device.

        Raises:
            UnfinishedPassError: layers that were in step before passes that the host has not seen no longer are.
        """
        self.passes.count()
        held = [extent for extent in self._extents if extent.rows]
        if self.is_reserved and held:
            now = [end for extent, end in zip(self._extents, self.lengths[:, 0].tolist()) if extent.rows]
            in_step: dict[object, int] = {}
            if any(in_step.setdefault((e.last_pass, e.end), end) != end for e, end in zip(held, now)):
                raise unfinished()
            for extent, end in zip(held, now):
                extent.first, extent.end = extent.first_kept(end), end

    def tell(self, layer: int) -> None:
        """Tells the device how long a layer is."""
        self.lengths[layer].fill_(self._extents[layer].end)

    def tell_all(self) -> None:
        """Tells it of all layers."""
        ends = torch.tensor([[extent.end] for extent in self._extents], dtype=torch.int32)
        self.lengths.copy_(ends, non_blocking=True)
        self.is_told = True

    def expect_none(self) -> None:
        """No pass comes that was announced."""
        for extent in self._extents:
            extent.expected = 0

    def expect(self, tokens: int, asker: Extent) -> None:
        """A pass of `tokens` may come, to the layers that are in the same state as `asker`: makes room for it.

        Raises:
            SequenceTooLongError, OutOfPagesError, DriverError: as in `Batch.reserve`; no pass is expected then.
        """
        held = [extent for extent in self._extents if extent.rows]
        is_told = self.is_told and not any(extent.expected for extent in held)  # the last one may have broken off
        self.expect_none()
        if held:
            if not (is_told or self.is_reserved):
                self.tell_all()
            if not self.is_reserved:
                self.share_prompts()
            rows, first, _ = self._needed()
            end = max(extent.end for extent in held) + tokens
            self._make_room(rows, first, end)
            self._held().unshare(min(extent.end for extent in held))
            if not self.is_reserved and self._held().end > self._whole_pages(end):  # a longer one was expected
                self._held().shrink(rows, first, self._whole_pages(end))
                self._tell_limit()
        for extent in self._extents:
            if extent.is_in_step_with(asker):
                extent.expected = tokens

    def check_room(self, extent: Extent, tokens: int) -> None:
        """Raises `StreamCaptureError` unless there is room for a pass inside of a graph."""
        if not self.is_reserved and (self.is_captured or extent.expected != tokens):
            raise StreamCaptureError(
                "a forward pass that is compiled or captured by hand cannot map pages: call "
                "cache.reserve(seq_len), with the length that sequences will reach, after the prompt and before it"
            )

    def check_graph(self, extent: Extent, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before K and V, `[batch_size, num_kv_heads, tokens, head_dim]`, are written inside of a graph.

        Raises:
            StreamCaptureError: no pass was announced, and no room reserved.
            ShapeError: it is another batch.
            AutogradError: autograd would record the write.
        """
        check_autograd(keys, values)
        check_batch(extent, keys.shape[0])
        self.check_room(extent, keys.shape[2])

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
            self.tell_all()
        batch = self._held()
        batch.reserve(batch.rows, batch.first, seq_len)
        batch.unshare(batch.first)  # tokens may be dropped, and others written, without a word
        self._tell_limit()
        self.is_reserved = True

    def select(self, layer: int, indices: torch.Tensor) -> None:
        self.settle()
        super().select(layer, indices)
        self.tell(layer)

    @contextmanager
    def selecting(self, indices: list[int]) -> Iterator[None]:
        if self.batch:
            self.settle()
        with super().selecting(indices):
            yield

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
        self.tell_all()
        self._tell_limit()

    def _needed(self) -> tuple[int, int, int]:
        rows, first, end = super()._needed()
        return rows, first, self._held().end if rows and self.is_reserved else end
