"""A layer group: the layers of a model with the same attention window, side by side in the token records of one batch.

The first layer of a group that writes in a forward pass opens a step: what all layers of the group do alike in that
pass, and room for it. Later layers only write and view.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..errors import (
    DeviceError,
    DriverOutOfMemoryError,
    DtypeError,
    OutOfPagesError,
    OutOfRowsError,
    ShapeError,
    StreamCaptureError,
    UnsupportedError,
    VmmkvError,
)
from .batch import Batch, Limits, Pools, Shape, Where
from .masks import NAME, attention_of
from .passes import Append, Extent, Passes, Step, check_autograd, check_batch, check_kv, common_dtype, unfinished
from .states import ScaledStates

NO_ROOM = OutOfRowsError, OutOfPagesError, DriverOutOfMemoryError, StreamCaptureError
"""Errors after which a batch is as before, also if it was about to share pages or to take another order."""


class LayerGroup:
    """Layers that share token records, of which a window is None if they attend to all tokens. Nothing is reserved
    before the first write. `config` is that of a model whose K and V are kept in 8 bits: it says which attention reads
    them."""

    _append: Append | None = None  # a method that appends in the place of the batch's

    def __init__(
        self, limits: Limits, pools: Pools, passes: Passes, window: int | None, config: PreTrainedConfig | None
    ) -> None:
        self.max_seq_len, self.passes, self.window = limits.max_seq_len, passes, window
        self._limits, self._pools = replace(limits, large_frames=window is None), pools
        self._config = config
        self._reads_scaled = True
        self._extents: list[Extent] = []
        self.batch: Batch | None = None
        self.states_dtype: torch.dtype | None = None  # of K and V as attention reads them; None before the first
        self._step: Step | None = None
        self._is_shown = False  # whether a user has views of K and V to write to

    @property
    def device(self) -> torch.device | None:
        """Where K and V are; None before the first."""
        return self.batch.kv_cache.device if self.batch else None

    @property
    def is_scaled(self) -> bool:
        """Whether K and V are kept as numbers of 8 bits, and their scales."""
        return self._limits.kv_dtype is not None

    @property
    def num_layers(self) -> int:
        return len(self._extents)

    # ------------------------------------------------------------------ layout

    def add_layer(self, layer_idx: int) -> Extent:
        """Adds layer number `layer_idx` of the model; the layer and the group keep its extent."""
        self._extents.append(Extent(layer_idx, len(self._extents), self.window))
        return self._extents[-1]

    def learn(self, extent: Extent, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Makes the layout fit a layer's K and V, which are kept in `dtype`. Layers still to come are taken to have the
        same shape; where one has not, or has a wider dtype, the tokens that are there move into another layout."""
        shape = Shape.of(keys, values)
        shapes = [each.shape or shape for each in self._extents]
        shapes[extent.index] = shape
        if self.batch is None:
            self.set_batch(Batch.open(self._limits.layout(shapes, dtype), self._limits, self._pools.on(keys.device)))
        elif (layout := self._limits.layout(shapes, dtype)) != self.batch.kv_cache.layout:
            known = [each.index for each in self._extents if each.shape and each is not extent]
            self.set_batch(self.batch.copy(layout, known, self.batch.kv_cache.pool))
        extent.shape, self.states_dtype = shape, dtype

    def set_batch(self, batch: Batch | None) -> None:
        """Takes up another batch, which holds the same tokens."""
        self.batch, self._step = batch, None

    def batch_of_first(self, num_layers: int) -> Batch | None:
        """A batch with room for the first layers alone, and their tokens; None if they have none yet."""
        known = {extent.index: extent.shape for extent in self._extents[:num_layers] if extent.shape}
        if not (self.batch and self.states_dtype and known):
            return None
        guess = next(iter(known.values()))
        layout = self._limits.layout([known.get(index, guess) for index in range(num_layers)], self.states_dtype)
        return self.batch if num_layers == self.num_layers else self.batch.copy(layout, known, self.batch.kv_cache.pool)

    def keep_first(self, num_layers: int, batch: Batch | None) -> None:
        """Forgets the layers behind, which hold no tokens; `batch` is from `batch_of_first`."""
        self.set_batch(batch)
        del self._extents[num_layers:]

    # ------------------------------------------------------------------ forward passes

    def update(self, extent: Extent, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's next K and V, `[batch_size, num_kv_heads, tokens, head_dim]`; returns K and V of the tokens
        that they attend to, `ScaledStates` where they are kept in 8 bits."""
        step, passes = self._step, self.passes
        looks = keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device
        if (
            step is None
            or step.number != passes.number
            or looks != step.looks
            or (extent.rows, extent.first, extent.end, extent.shape) != step.held
            or extent.layer_idx <= passes.last_layer
            or passes.is_broken
            or (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad))
        ):
            step = self._open(extent, keys, values)
        keys, values = keys.to(self.states_dtype), values.to(self.states_dtype)
        new_keys, new_values = keys, values
        if step.skipped:
            new_keys, new_values = keys[:, :, step.skipped :], values[:, :, step.skipped :]
        append = self._append or step.batch.append
        states = append(extent.index, new_keys, new_values, step.new, step.attended)
        # In one line, of which an interrupt leaves no half.
        extent.rows, extent.first, extent.end, passes.last_layer = *step.after, extent.layer_idx
        if step.is_alone:
            return keys, values
        if len(states) > 2:
            k, v = self._as_scaled(states)
            return (k, v) if self._reads_scaled else (k.dequantized(), v.dequantized())
        return states[0], states[1]

    def _as_scaled(self, states: list[Tensor]) -> tuple[ScaledStates, ScaledStates]:
        assert self.states_dtype is not None
        k, v, k_scales, v_scales = states
        return ScaledStates(k, k_scales, self.states_dtype), ScaledStates(v, v_scales, self.states_dtype)

    def _open(self, extent: Extent, keys: Tensor, values: Tensor) -> Step:
        """Works out the step of a layer, and of those that are in the same state: checks, and makes room."""
        check_autograd(keys, values)
        self._accept(extent, keys, values)
        rows, _, tokens, _ = keys.shape
        begin, end = extent.end, extent.end + tokens
        self.passes.check(extent, tokens)
        drops = not extent.rows and self._drops_prompts(extent, tokens)
        skipped = extent.first_visible(end) if drops else 0
        first = extent.first if extent.rows else skipped
        self._make_room(rows, first, begin + skipped, end)
        if extent.layer_idx <= self.passes.last_layer:
            self.passes.start_over()
        self.passes.before[tokens] = begin
        self._reads_scaled = self._config is not None and attention_of(self._config) == NAME
        batch, visible = self._held(), extent.first_visible(begin)
        self._step = Step(
            self.passes.number,
            (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device),
            (extent.rows, extent.first, extent.end, extent.shape),
            skipped,
            drops or (self.is_scaled and not extent.rows),
            batch,
            batch.where(rows, begin + skipped, end),
            batch.where(rows, max(visible, first), end),
            (rows, first if extent.keeps_past else max(first, extent.first_visible(end)), end),
        )
        return self._step

    def _drops_prompts(self, extent: Extent, tokens: int) -> bool:
        """Whether a prompt of so many tokens attends to nothing but itself, and only its last tokens are kept."""
        return self.window is not None and tokens >= self.window and not extent.keeps_past

    def _accept(self, extent: Extent, keys: Tensor, values: Tensor) -> None:
        """Learns what K and V look like, and refuses those that do not fit what is there."""
        check_kv(extent.layer_idx, keys, values)
        batch, shape = self.batch, Shape.of(keys, values)
        held = self.states_dtype if batch and batch.rows else None
        dtype = common_dtype(keys, values, held)
        if not extent.rows and (held is None or shape != extent.shape or dtype != held):
            self.learn(extent, keys, values, dtype)
        if shape != extent.shape:
            raise ShapeError(
                f"got K {list(keys.shape)} and V {list(values.shape)} for layer {extent.layer_idx}; it holds "
                f"{extent.shape}. A cache serves one model"
            )
        if extent.rows:
            check_batch(extent, keys.shape[0])
        if dtype != self.states_dtype:
            raise DtypeError(
                f"got K as {keys.dtype} and V as {values.dtype}; this cache holds {self.states_dtype}, and has tokens. "
                "Run all forward passes under autocast, or none"
            )
        for states in (keys, values):
            if states.device != self.device:
                raise DeviceError(f"got K or V on {states.device}; this cache, and its model, are on {self.device}")

    def _make_room(self, rows: int, first: int, begin: int, end: int) -> None:
        """Makes rows `[0, rows)` hold the tokens `[first, end)`, of which those from `begin` on can be written."""
        batch = self._held()
        if end > batch.end and self.is_captured:
            raise StreamCaptureError(
                "each replay of a CUDA graph would write the same tokens again: let generate capture passes of a cache "
                "made with compile=True"
            )
        with self.passes.changing(VmmkvError):
            if end > batch.end:
                self.fit()  # the pass before this one was submitted as a whole: its windows may move on
            batch.reserve(rows, first, end)
            batch.unshare(begin)

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured: Python runs once for many passes."""
        device = self.device
        return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # ------------------------------------------------------------------ which sequences

    def add_rows(self, indices: list[int]) -> None:
        """Adds rows until there are as many as `indices`; those that are added hold what `indices` says."""
        self.fit()
        if not self._are_alike():
            raise unfinished()
        if self.batch and 0 < (rows := self.batch.rows) < len(indices):
            self.batch.reorder([*range(rows), *indices[rows:]], self._can_share())

    def reorder(self, indices: list[int]) -> None:
        """Makes sequence i what sequence `indices[i]` was, in all layers that hold tokens, behind `add_rows`."""
        held = [extent for extent in self._extents if extent.rows]
        if held:
            share, rows, batch = self._can_share(), held[0].rows, self._held()
            batch.reorder(indices[:rows], share, anew=share and (len(indices) > rows or not batch.shared_end))
            for extent in held:
                extent.rows = len(indices)
        self._step = None

    def _are_alike(self) -> bool:
        """Whether all layers that hold tokens hold those of as many sequences."""
        return len({extent.rows for extent in self._extents if extent.rows}) < 2

    def _can_share(self) -> bool:
        """Whether the next writes all come behind what rows hold, so that rows may share pages."""
        return not self._is_shown and all(e.end == self._held().end for e in self._extents if e.rows)

    def show(self, extent: Extent) -> tuple[Tensor, Tensor]:
        """K and V of the tokens that a layer holds, to read and, unless they are `ScaledStates`, to write: rows share
        no pages until there are no tokens."""
        batch = self._held()
        if not self.is_scaled:
            self._is_shown, self._step = True, None
            batch.unshare(extent.first)
        states = self._read(extent, batch.where(extent.rows, extent.first, extent.end + extent.written))
        return self._as_scaled(states) if self.is_scaled else (states[0], states[1])

    def _read(self, extent: Extent, where: Where) -> list[Tensor]:
        return self._held().view(extent.index, where)

    def fit(self) -> None:
        """Gives back rows, and tokens, that no layer holds any more."""
        self._step = None
        if self.batch:
            self.batch.shrink(*self._needed())
            self._is_shown = self._is_shown and self.batch.rows > 0

    def clear(self) -> None:
        """Drops all tokens, also after a change that ended in the middle."""
        for extent in self._extents:
            extent.clear()
        self._step, self._is_shown = None, False
        if self.batch:
            self.batch.clear()

    def _needed(self) -> tuple[int, int, int]:
        """Rows, first token and end of what layers hold."""
        held = [(extent.rows, extent.first, extent.end) for extent in self._extents if extent.rows]
        rows, firsts, ends = zip(*held) if held else ([0], [0], [0])
        return max(rows), min(firsts), max(ends)

    def _held(self) -> Batch:
        assert self.batch is not None, "nothing was written yet"
        return self.batch

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = object.__new__(type(self))
        batch = self._forked()
        vars(twin).update(copy.deepcopy(vars(self) | {"batch": None, "_is_shown": False, "_step": None}, memo))
        if self.batch and batch is None:
            layout = self.batch.kv_cache.layout
            batch = self.batch.copy(layout, range(layout.num_layers), self.batch.kv_cache.pool)
        twin.set_batch(batch)
        return twin

    def _forked(self) -> Batch | None:
        """A fork of its batch; None where there is none, or no rows for it, or where it must not share pages."""
        self._step = None
        if self.batch is None or any(extent.expected for extent in self._extents):
            return None
        with self.passes.changing(VmmkvError):
            self.fit()
        return self.batch.fork() if self._can_share() else None

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError("a VmmCache cannot be pickled, since it is addresses; copy.deepcopy copies it")
