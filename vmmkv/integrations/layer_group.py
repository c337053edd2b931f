"""A layer group: the layers of a model with the same attention window, side by side in the token records of one batch.

Layers write once in each forward pass, in the order of their numbers, and some write in none or in few passes. A pass
begins with a layer whose number is no higher than that of the layer which wrote last. Layers that get as many tokens in
one pass must have been equally long before it: otherwise an earlier pass has ended in the middle.

The first layer of a group that writes in a forward pass opens a step: what all layers of the group do alike in that
pass, and room for it. Later layers only write and view.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import errors
from .batch import Batch, Limits, Pools, Shape, Where
from .row_writes import check_autograd, check_kv, common_dtype
from .stand_ins import NAME, ScaledStates, attention_of

NO_ROOM = errors.OutOfRowsError, errors.OutOfPagesError, errors.DriverOutOfMemoryError, errors.StreamCaptureError
"""Errors after which a batch is as before, also if it was about to share pages or to take another order."""


@dataclass(eq=False)
class Extent:
    """The tokens `[first, end)` of `rows` sequences that layer `layer_idx` of the model holds. It is what a group knows
    of a layer: groups that knew layers would outlive their cache until the next garbage collection."""

    layer_idx: int
    index: int  # the layer's number in its group
    window: int | None  # tokens that a token attends to, itself included; None: all
    shape: Shape | None = None  # None before the first K and V
    rows: int = 0
    first: int = 0
    end: int = 0
    record_past: bool = False  # whether `first` stays although the window has moved on
    expected: int = 0  # tokens of a compiled pass that was announced, and may come or have ended in the middle
    written: int = 0  # tokens that a compiled pass has written behind `end`

    def first_visible(self, length: int) -> int:
        """The first token that the one behind `length` others attends to."""
        return 0 if self.window is None else max(length - self.window + 1, 0)

    def forget(self) -> None:
        """Drops all tokens."""
        self.rows = self.first = self.end = self.expected = self.written = 0


class Step(NamedTuple):
    """What the layers of a group do alike in a forward pass."""

    number: int  # of the pass
    looks: tuple[object, ...]  # shapes, dtypes and devices of K and V, and that they require no gradients
    held: tuple[object, ...]  # of a layer before the pass: rows, first token, end and shape
    skipped: int  # new tokens that the layer does not keep: those of a prompt in front of its window
    is_alone: bool  # whether the new tokens attend to the K and V that came, as they came
    new: Where
    attended: Where
    after: tuple[int, int, int]  # of a layer after the pass: rows, first token and end


@dataclass
class Passes:
    """The forward passes of a cache, over all of its layers."""

    layers: list[Extent] = field(default_factory=list)  # of a cache made with `compile=True`: all of them
    number: int = 0  # of the pass
    last_layer: int = -1  # the number of the layer that has written last in this pass; -1 before the first
    is_broken: bool = False  # whether a change of the batch has ended in the middle
    before: dict[int, int] = field(default_factory=dict)
    """How long layers were before this pass, by the tokens that they got in it."""
    is_uncompiled: bool = False  # of a cache made with `compile=True`: whether a warning says that nothing is compiled

    def start_over(self) -> None:
        """Has the next layer that writes begin a pass."""
        self.number, self.last_layer, self.before = self.number + 1, -1, {}

    @contextmanager
    def changing(self, *harmless: type[Exception]) -> Iterator[None]:
        """Refuses all passes until `reset()` if the change inside ends early, unless by an error that is `harmless`."""
        if self.is_broken:
            raise unfinished()
        self.is_broken = True
        try:
            yield
        except harmless:
            self.is_broken = False
            raise
        self.is_broken = False


class LayerGroup:
    """Layers that share token records, of which a window is None if they attend to all tokens. Nothing is reserved
    before the first write. `config` is that of a model whose K and V are kept in 8 bits: it says which attention reads
    them."""

    begins_with_first = False  # whether rows begin with the first token of a prompt, whatever the window

    def __init__(
        self, limits: Limits, pools: Pools, passes: Passes, window: int | None, config: PreTrainedConfig | None
    ) -> None:
        self.max_seq_len, self.passes, self.window = limits.max_seq_len, passes, window
        self._limits, self._pools, self._config = replace(limits, large_frames=window is None), pools, config
        self.is_scaled = limits.kv_dtype is not None  # whether K and V are kept as numbers of 8 bits, and their scales
        self._reads_scaled = True
        self.layers: list[Extent] = []
        self.batch: Batch | None = None
        self.states_dtype: torch.dtype | None = None  # of K and V as attention reads them; None before the first
        self._step: Step | None = None
        self._is_shown = False  # whether a user has views of K and V to write to

    @property
    def device(self) -> torch.device | None:
        """Where K and V are; None before the first."""
        return self.batch.kv_cache.device if self.batch else None

    # ------------------------------------------------------------------ layout

    def add_layer(self, layer_idx: int) -> Extent:
        """Adds layer number `layer_idx` of the model; the layer and the group keep its extent."""
        self.layers.append(extent := Extent(layer_idx, len(self.layers), self.window))
        return extent

    def learn(self, layer: Extent, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Makes the layout fit a layer's K and V, which are kept in `dtype`. Layers still to come are taken to have the
        same shape; where one has not, or has a wider dtype, the tokens that are there move into another layout."""
        shape = Shape.of(keys, values)
        shapes = [shape if each is layer else each.shape or shape for each in self.layers]
        if self.batch is None:
            self.set_batch(Batch.open(self._limits.layout(shapes, dtype), self._limits, self._pools.on(keys.device)))
        else:
            known = [each.index for each in self.layers if each.shape and each is not layer]
            self.set_batch(self.batch.in_layout(self._limits.layout(shapes, dtype), known))
        layer.shape, self.states_dtype = shape, dtype

    def set_batch(self, batch: Batch | None) -> None:
        """Takes up another batch, which holds the same tokens."""
        self.batch, self._step = batch, None

    def batch_of_first(self, num_layers: int) -> Batch | None:
        """A batch with room for the first layers alone, and their tokens; None if they have none yet."""
        known = {each.index: each.shape for each in self.layers[:num_layers] if each.shape}
        if not (self.batch and self.states_dtype and known):
            return None
        guess = next(iter(known.values()))
        shapes = [known.get(index, guess) for index in range(num_layers)]
        return self.batch.in_layout(self._limits.layout(shapes, self.states_dtype), known)

    def keep_first(self, num_layers: int, batch: Batch | None) -> None:
        """Forgets the layers behind, which hold no tokens; `batch` is from `batch_of_first`."""
        self.set_batch(batch)
        del self.layers[num_layers:]

    # ------------------------------------------------------------------ forward passes

    def update(self, layer: Extent, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's next K and V, `[batch_size, num_kv_heads, tokens, head_dim]`; returns K and V of the tokens
        that they attend to, `ScaledStates` where they are kept in 8 bits."""
        step, passes = self._step, self.passes
        needs_grad = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        looks = keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device, needs_grad
        if (
            step is None
            or step.number != passes.number
            or looks != step.looks
            or (layer.rows, layer.first, layer.end, layer.shape) != step.held
            or layer.layer_idx <= passes.last_layer
            or passes.is_broken
        ):
            self._step = step = self._open(layer, keys, values, looks)
        keys, values = keys.to(self.states_dtype), values.to(self.states_dtype)
        new_keys, new_values = keys, values
        if step.skipped:
            new_keys, new_values = keys[:, :, step.skipped :], values[:, :, step.skipped :]
        states = self._append(layer.index, new_keys, new_values, step.new, step.attended)
        # In one line, of which an interrupt leaves no half.
        layer.rows, layer.first, layer.end, passes.last_layer = *step.after, layer.layer_idx
        if step.is_alone:
            return keys, values
        if len(states) > 2:
            k, v = self._as_scaled(states)
            return (k, v) if self._reads_scaled else (k.dequantized(), v.dequantized())
        return states[0], states[1]

    def _append(self, layer: int, keys: Tensor, values: Tensor, new: Where, attended: Where) -> list[Tensor]:
        """Writes K and V of a layer, and returns those that they attend to."""
        assert self.batch is not None
        return self.batch.append(layer, keys, values, new, attended)

    def _as_scaled(self, states: list[Tensor]) -> tuple[ScaledStates, ScaledStates]:
        assert self.states_dtype is not None
        k, v, k_scales, v_scales = states
        return ScaledStates(k, k_scales, self.states_dtype), ScaledStates(v, v_scales, self.states_dtype)

    def _open(self, layer: Extent, keys: Tensor, values: Tensor, looks: tuple[object, ...]) -> Step:
        """Works out the step of a layer, and of those that are in the same state: checks, and makes room."""
        self._accept(layer, keys, values)
        rows, _, tokens, _ = keys.shape
        begin, end = layer.end, layer.end + tokens
        begins = layer.layer_idx <= self.passes.last_layer
        if self.passes.is_broken or not (begins or self.passes.before.get(tokens, begin) == begin):
            raise unfinished()
        # A prompt that is longer than the window attends to nothing but itself, and only its last tokens are kept.
        is_long = self.window is not None and tokens >= self.window
        drops = is_long and not (layer.rows or layer.record_past or self.begins_with_first)
        skipped = layer.first_visible(end) if drops else 0
        first = layer.first if layer.rows else skipped
        self._make_room(rows, first, begin + skipped, end)
        if begins:
            self.passes.start_over()
        self.passes.before[tokens] = begin
        self._reads_scaled = self._config is not None and attention_of(self._config) == NAME
        batch, visible = self._held(), layer.first_visible(begin)
        return Step(
            self.passes.number,
            looks,
            (layer.rows, layer.first, layer.end, layer.shape),
            skipped,
            drops or (self.is_scaled and not layer.rows),
            batch.where(rows, begin + skipped, end),
            batch.where(rows, max(visible, first), end),
            (rows, first if layer.record_past else max(first, layer.first_visible(end)), end),
        )

    def _accept(self, layer: Extent, keys: Tensor, values: Tensor) -> None:
        """Learns what K and V look like, and refuses those that do not fit what is there."""
        check_autograd(keys, values)
        check_kv(layer.layer_idx, keys, values)
        shape, held = Shape.of(keys, values), self.states_dtype if self.batch and self.batch.rows else None
        dtype = common_dtype(keys, values, held)
        if not layer.rows and (held is None or shape != layer.shape or dtype != held):
            self.learn(layer, keys, values, dtype)
        if shape != layer.shape:
            raise errors.ShapeError(
                f"got K {list(keys.shape)} and V {list(values.shape)} for layer {layer.layer_idx}; it holds "
                f"{layer.shape}. A cache serves one model"
            )
        if layer.rows:
            check_batch(layer, keys.shape[0])
        if dtype != self.states_dtype:
            raise errors.DtypeError(
                f"got K as {keys.dtype} and V as {values.dtype}; this cache holds {self.states_dtype}, and has tokens. "
                "Run all forward passes under autocast, or none"
            )
        if not keys.device == values.device == self.device:
            raise errors.DeviceError(
                f"got K on {keys.device} and V on {values.device}; this cache, and its model, are on {self.device}"
            )

    def _make_room(self, rows: int, first: int, begin: int, end: int) -> None:
        """Makes rows `[0, rows)` hold the tokens `[first, end)`, of which those from `begin` on can be written."""
        batch = self._held()
        if end > batch.end and self.is_captured:
            raise errors.StreamCaptureError(
                "each replay of a CUDA graph would write the same tokens again: let generate capture passes of a cache "
                "made with compile=True"
            )
        with self.passes.changing(errors.VmmkvError):
            if end > batch.end:
                self.fit()  # the pass before this one was submitted as a whole: its windows may move on
            batch.reserve(rows, first, end)
            batch.unshare(begin)

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured: Python runs once for many passes."""
        if torch.compiler.is_compiling() or self.device is None or self.device.type != "cuda":
            return False
        return torch.cuda.is_current_stream_capturing()

    # ------------------------------------------------------------------ which sequences

    def add_rows(self, indices: list[int]) -> None:
        """Adds rows until there are as many as `indices`; those that are added hold what `indices` says."""
        self.fit()
        if len({layer.rows for layer in self.layers if layer.rows}) > 1:
            raise unfinished()
        if self.batch and 0 < (rows := self.batch.rows) < len(indices):
            self.batch.reorder([*range(rows), *indices[rows:]], self._can_share())

    def reorder(self, indices: list[int]) -> None:
        """Makes sequence i what sequence `indices[i]` was, in all layers that hold tokens, behind `add_rows`."""
        held = [layer for layer in self.layers if layer.rows]
        if held:
            share, rows, batch = self._can_share(), held[0].rows, self._held()
            batch.reorder(indices[:rows], share, anew=share and (len(indices) > rows or not batch.shared_end))
            for layer in held:
                layer.rows = len(indices)
        self._step = None

    def _can_share(self) -> bool:
        """Whether the next writes all come behind what rows hold, so that rows may share pages."""
        return not self._is_shown and all(each.end == self._held().end for each in self.layers if each.rows)

    def show(self, layer: Extent) -> tuple[Tensor, Tensor]:
        """K and V of the tokens that a layer holds, to read and, unless they are `ScaledStates`, to write: rows share
        no pages until there are no tokens."""
        batch = self._held()
        if not self.is_scaled:
            self._is_shown, self._step = True, None
            batch.unshare(layer.first)
        states = self._read(layer, batch.where(layer.rows, layer.first, layer.end + layer.written))
        return self._as_scaled(states) if self.is_scaled else (states[0], states[1])

    def _read(self, layer: Extent, where: Where) -> list[Tensor]:
        return self._held().view(layer.index, where)

    def fit(self) -> None:
        """Gives back rows, and tokens, that no layer holds any more."""
        self._step = None
        if self.batch:
            self.batch.shrink(*self._needed())
            self._is_shown = self._is_shown and self.batch.rows > 0

    def clear(self) -> None:
        """Drops all tokens, also after a change that ended in the middle."""
        for layer in self.layers:
            layer.forget()
        self._step, self._is_shown = None, False
        if self.batch:
            self.batch.clear()

    def _needed(self) -> tuple[int, int, int]:
        """Rows, first token and end of what layers hold."""
        held = [(layer.rows, layer.first, layer.end) for layer in self.layers if layer.rows]
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
            batch = self.batch.copy(self.batch.kv_cache.layout, range(len(self.layers)))
        twin.set_batch(batch)
        return twin

    def _forked(self) -> Batch | None:
        """A fork of its batch; None where there is none, or no rows for it, or where it must not share pages."""
        self._step = None
        if self.batch is None or any(layer.expected for layer in self.layers):
            return None
        with self.passes.changing(errors.VmmkvError):
            self.fit()
        return self.batch.fork() if self._can_share() else None

    def __getstate__(self) -> NoReturn:
        raise errors.UnsupportedError("a VmmCache cannot be pickled, since it is addresses; copy.deepcopy copies it")


# ---------------------------------------------------------------------- checks


def unfinished() -> errors.UnfinishedPassError:
    """The error for layers that are out of step."""
    return errors.UnfinishedPassError(
        "a forward pass, or a change of the batch, ended in the middle: it has reached some layers and others not. "
        "Call reset() and start over"
    )


def check_batch(layer: Extent, rows: int) -> None:
    """Raises `ShapeError` where a layer that holds tokens gets those of another batch."""
    if rows != layer.rows:
        raise errors.ShapeError(
            f"got a batch of {rows}; the cache holds {layer.rows} sequences. Call reset() for another batch, "
            "batch_repeat_interleave() or batch_select_indices() to go on with more or fewer of these"
        )
