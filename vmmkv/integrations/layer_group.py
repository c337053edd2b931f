"""A layer group: the layers of a model that forget alike, side by side in the token records of one batch.

Layers come one after another in a forward pass, so each has an extent of its own; what the group's rows hold
is the union of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch

from ..errors import (
    AutogradError,
    DeviceError,
    DtypeError,
    ShapeError,
    StreamCaptureError,
)
from ..layout import KVLayout
from .batch import Batch, Limits
from .equal_rows import equal_neighbours
from .extents import Extent, Passes, unfinished
from .pools import Pools
from .scaled_states import ScaledStates, check_quantizable

_SAVED_AS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""What dtypes are pickled as that torch does not unpickle."""


def check_kv(layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises `ShapeError` unless K and V of a layer are of the same tokens of the same sequences."""
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            f"got K {list(keys.shape)} and V {list(values.shape)} for layer {layer_idx}; both are "
            "[batch_size, num_kv_heads, tokens, head_dim], and only head_dim may differ"
        )


class Shape(NamedTuple):
    """What one layer keeps of a token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Shape:
        return cls(keys.shape[1], keys.shape[3], values.shape[3])


class LayerGroup:
    """Layers that share token records. Nothing is reserved before the first write.

    Args:
        limits: what its batch can grow to.
        pools: that this lies on.
        passes: of the cache that it is a part of.
        window: tokens that a token of theirs attends to, itself included; None: all.
    """

    def __init__(self, limits: Limits, pools: Pools, passes: Passes, window: int | None) -> None:
        self.max_seq_len = limits.max_seq_len
        self.passes = passes
        self.window = window
        self._limits, self._pools = replace(limits, large_frames=window is None), pools
        self._extents: list[Extent] = []
        self._shapes: list[Shape | None] = []
        self.batch: Batch | None = None
        self.states_dtype: torch.dtype | None = None
        """Of K and V, as layers get them and attention reads them; None before the first."""
        self._has_selected = False
        """Whether rows were put into another order as a whole, so that layers need not do it one by one."""
        self._is_shown = False
        """Whether anybody has views of K and V to write to."""
        self._compared_pass = 0, 0
        """The last one behind which rows were compared, as in `Extent.last_pass`."""

    @property
    def device(self) -> torch.device | None:
        """Where K and V are; None before the first."""
        return self.batch.kv_cache.device if self.batch else None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of K and V; None while there are none."""
        return self.states_dtype if self.batch and self.batch.rows else None

    @property
    def is_scaled(self) -> bool:
        """Whether K and V are kept as numbers of 8 bits, and their scales."""
        return self._limits.kv_dtype is not None

    @property
    def num_layers(self) -> int:
        return len(self._extents)

    def add_layer(self, layer_idx: int) -> tuple[int, Extent]:
        """Another layer, number `layer_idx` of the model: its index in the group, and its extent, which the layer keeps
        up to date."""
        extent = Extent(layer_idx)
        self._shapes.append(None)
        self._extents.append(extent)
        self.passes.extents.append(extent)
        return len(self._extents) - 1, extent

    def batch_of_first(self, num_layers: int) -> Batch | None:
        """A batch with room for as many layers, and the tokens of those; None, if they have none yet.

        Raises:
            OutOfPagesError, DriverError: as in `Batch.reserve`.
        """
        known = {index: shape for index, shape in enumerate(self._shapes[:num_layers]) if shape}
        if self.batch is None or self.states_dtype is None or not known or num_layers == self.num_layers:
            return self.batch if known else None
        guess = next(iter(known.values()))
        shapes = [known.get(index, guess) for index in range(num_layers)]
        layout = self._layout(shapes, self.states_dtype)
        return self.batch.copy(layout, known, self.batch.kv_cache.pool)

    def keep_first(self, num_layers: int, batch: Batch | None) -> None:
        """Forgets the layers behind, which hold no tokens; `batch` is from `batch_of_first`."""
        self.batch = batch
        self.passes.forget(self._extents[num_layers:])
        del self._extents[num_layers:], self._shapes[num_layers:]

    def learn(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes a layer's shape from K and V themselves, `[batch_size, num_kv_heads, tokens, head_dim]`.

        Models do not all cache what their config suggests (latents, for one). Layers still to come are taken to
        look the same; where one does not, or comes in a wider dtype, the tokens that are there move into a layout
        that fits.

        Raises:
            LayoutError: the rows would be longer than kernels with 32-bit strides can address.
            DtypeError: vmmkv does not hold this dtype.
        """
        shape = Shape.of(keys, values)
        shapes = [*self._shapes[:layer], shape, *self._shapes[layer + 1 :]]
        dtype = self._dtype_with(keys.dtype)
        if self.batch is None:
            layout = self._layout([known or shape for known in shapes], dtype)
            self.batch = Batch.open(layout, self._limits, self._pools.on(keys.device))
        elif (shape, dtype) != (self._room(layer), self.states_dtype):
            layout = self._layout([known or shape for known in shapes], dtype)
            others = [index for index, known in enumerate(self._shapes) if known and index != layer]
            self.batch = self.batch.copy(layout, others, self.batch.kv_cache.pool)
        self._shapes, self.states_dtype = shapes, dtype

    def _dtype_with(self, dtype: torch.dtype) -> torch.dtype:
        """Of K and V once a layer has come in `dtype`: of what is there, unless the other has more bytes."""
        return max(self.dtype or dtype, dtype, key=lambda each: each.itemsize)

    def _room(self, layer: int) -> Shape | None:
        """The shape that a layer's place in the record has; None where it has none."""
        layers = self._held().kv_cache.layout.layers
        if layer >= len(layers):
            return None
        room = layers[layer]
        return Shape(room.num_kv_heads, room.k_head_dim, room.v_head_dim)

    def _layout(self, shapes: list[Shape], dtype: torch.dtype) -> KVLayout:
        """As many layers in a record as kernels with 32-bit strides can address over the whole row; all of them, where
        nobody else's kernels read it."""
        heads, k_head_dim, v_head_dim = zip(*shapes)
        num_layers = len(shapes)
        if kv_dtype := self._limits.kv_dtype:
            check_quantizable(dtype, kv_dtype)
            return KVLayout(num_layers, heads, k_head_dim, kv_dtype, v_head_dim, scales="token_head")
        for ranges in range(1, num_layers + 1):
            layout = KVLayout(num_layers, heads, k_head_dim, dtype, v_head_dim, -(-num_layers // ranges))
            if self.max_seq_len <= layout.int32_token_limit:
                break
        return layout

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Writes K and V of a layer's next tokens, `[batch_size, num_kv_heads, tokens, head_dim]`, from token
        `first` on: where the layer ends, or where an empty layer begins.

        Raises:
            AutogradError: autograd would record the write.
            ShapeError, DtypeError, DeviceError: they are not like those before.
            UnfinishedPassError: as in `Passes.check`.
            StreamCaptureError: a CUDA graph is being captured.
            OutOfRowsError, ReleasedTokensError, SequenceTooLongError, OutOfPagesError, DriverError: as in
                `Batch.reserve`. Nothing was written in any case.
        """
        self._accept(layer, keys, values)
        extent = self._extents[layer]
        rows, _, tokens, _ = keys.shape
        begin, end = extent.first if extent.rows else first, first + tokens
        self.passes.check(extent, end - extent.end)
        self._make_room(rows, begin, end)
        self._held().unshare(first)
        self._put(layer, keys, values, first)
        extent.first = begin
        self.passes.record(extent, rows, extent.first_kept(end), end)

    def _make_room(self, rows: int, first: int, end: int) -> None:
        """Sees to it that rows `[0, rows)` hold the tokens `[first, end)`."""
        batch = self._held()
        if end > batch.end:
            if self.is_captured:
                raise StreamCaptureError(
                    "each replay of a CUDA graph would write the same tokens again: make the cache with compile=True, "
                    "and call reserve(seq_len) before the capture"
                )
            self.fit()  # the forward pass before this one has been submitted as a whole: its windows may move on
            self.share_prompts()
        if not batch.holds(rows, first, end):
            self._check_rows()
            batch.reserve(rows, first, end)

    def _check_rows(self) -> None:
        """Raises `UnfinishedPassError` where a failure of the driver has ended sequences that layers hold tokens of."""
        if any(extent.rows > self._held().rows for extent in self._extents):
            raise unfinished()

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured: Python runs once for many passes."""
        if torch.compiler.is_compiling() or self.batch is None:
            return False
        return self.batch.kv_cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _put(self, layer: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Writes where there is room."""
        self._held().write(layer, keys, values, first)

    write_outside_graphs = torch.compiler.disable(write)  # type: ignore[no-untyped-call]
    """For what is being compiled: driver calls are no part of a graph. Eager callers save its cost."""

    def _accept(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Learns what K and V look like, and refuses those that a copy would convert or broadcast silently."""
        check_autograd(keys, values)
        extent = self._extents[layer]
        rows = extent.rows
        looks = rows, keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device
        if looks == extent.accepted:
            return
        check_kv(extent.layer_idx, keys, values)
        if not rows and (
            self.batch is None
            or not self.batch.rows  # another attention may read the next tokens
            or Shape.of(keys, values) != self._shapes[layer]
            or keys.dtype != self.dtype
        ):
            self.learn(layer, keys, values)
        kv_cache = self._held().kv_cache
        if Shape.of(keys, values) != self._shapes[layer]:
            raise ShapeError(
                f"got K {list(keys.shape)} and V {list(values.shape)} for layer {extent.layer_idx}; it holds "
                f"{self._shapes[layer]}. A cache serves one model"
            )
        if rows:
            check_batch(extent, keys.shape[0])
        for states in (keys, values):
            if states.dtype != self.states_dtype:
                raise DtypeError(
                    f"got K or V as {states.dtype}; this cache holds {self.states_dtype}, and has tokens. Run all "
                    "forward passes under autocast, or none"
                )
            if states.device != kv_cache.device:
                raise DeviceError(f"got K or V on {states.device}; this cache, and its model, are on {kv_cache.device}")
        extent.accepted = looks if rows else ()

    def read(self, layer: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens that a layer holds from `first` on: views
        `[batch_size, num_kv_heads, tokens, head_dim]`, `ScaledStates` where they are kept in 8 bits."""
        extent = self._extents[layer]
        k, v, *scales = self._held().parts(layer, extent.rows, first, extent.end)
        if scales and self.states_dtype:
            return ScaledStates(k, scales[0], self.states_dtype), ScaledStates(v, scales[1], self.states_dtype)
        return k, v

    def show(self, layer: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for whoever may write to them, unless they are `ScaledStates`, to which nobody can: from now on rows
        share no pages, until there are no tokens.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: as in `Batch.unshare`.
        """
        if not self.is_scaled:
            self._is_shown = True
            self._held().unshare(first)
        return self.read(layer, first)

    def add_rows(self, indices: list[int]) -> None:
        """Makes room for as many sequences as are named; those that are added hold what they are to. `fit` takes it
        back.

        Raises:
            OutOfRowsError, OutOfPagesError, DriverError: as in `Batch.reorder`; nothing has changed.
        """
        self.fit()
        if self.batch and 0 < (rows := self.batch.rows) < len(indices):
            if self._are_alike():
                self.batch.reorder([*range(rows), *indices[rows:]], self._can_share())
            else:
                self.batch.reserve(len(indices), self.batch.first, self.batch.end)

    def _are_alike(self) -> bool:
        """Whether all layers that hold tokens hold those of as many sequences."""
        return len({extent.rows for extent in self._extents if extent.rows}) == 1

    def _can_share(self) -> bool:
        """Whether all that may be written comes behind what rows hold, so that they may share pages."""
        return not self._is_shown and all(e.end == self._held().end for e in self._extents if e.rows)

    def share_prompts(self) -> None:
        """Has neighbouring sequences that hold the same bytes share pages, once behind a pass of more than a page: less
        fills none. It comes before the next pass: all layers have written, and beams have been put into order.

        Raises:
            OutOfPagesError, DriverError: as in `Batch.share`.
        """
        batch, last = self._held(), self._extents[-1]
        if last.rows < 2 or last.last_pass[1] <= batch.page_tokens or last.last_pass == self._compared_pass:
            return
        self._compared_pass = last.last_pass
        self.fit()
        if last.first == last.end or not (self._are_alike() and self._can_share()):  # a window of one token keeps none
            return
        for row, source in equal_neighbours(batch, self._extents):
            batch.share(row, source)

    def select(self, layer: int, indices: torch.Tensor) -> None:
        """Makes the layer's i-th sequence what its `indices[i]`-th was. A copy of its K, or V, is made meanwhile.

        Raises:
            OutOfRowsError, OutOfPagesError, DriverError: as in `Batch.reserve` and `unshare`; nothing has changed.
        """
        extent, batch = self._extents[layer], self._held()
        if self._has_selected:
            extent.changes += 1
            return
        if not len(indices):
            extent.clear()
            return
        first, *others = batch.parts(layer, extent.rows, extent.first, extent.end)
        indices = indices.to(first.device)
        chosen = first.index_select(0, indices)
        batch.reserve(len(indices), extent.first, extent.end)
        batch.unshare(extent.first)
        extent.changes += 1
        extent.rows = len(indices)
        new_first, *new_others = batch.parts(layer, extent.rows, extent.first, extent.end)
        new_first.copy_(chosen)
        del chosen
        for new, old in zip(new_others, others):
            new.copy_(old.index_select(0, indices))
        extent.changes += 1

    @contextmanager
    def selecting(self, indices: list[int]) -> Iterator[None]:
        """Does at once, for all layers that hold tokens, what they ask for with `select` inside, if they hold tokens of
        as many sequences; each says by asking that the rest of it is about to follow. `add_rows` comes before.

        Raises:
            OutOfPagesError, DriverError: as in `Batch.reorder`.
        """
        held = [extent for extent in self._extents if extent.rows]
        if self._are_alike():
            share, rows = self._can_share(), held[0].rows
            for extent in held:
                extent.changes += 1
            self._held().reorder(indices[:rows], share, anew=share and len(indices) > rows)
            for extent in held:
                extent.rows = len(indices)
            self._has_selected = True
        try:
            yield
        finally:
            self._has_selected = False

    def fit(self) -> None:
        """Gives back rows, and tokens, that no layer holds any more."""
        if self.batch:
            rows, first, end = self._needed()
            self.batch.shrink(rows, first, end)
            self._is_shown = self._is_shown and rows > 0

    def _needed(self) -> tuple[int, int, int]:
        """Rows, first token and end of what layers hold."""
        held = [extent for extent in self._extents if extent.rows]
        if not held:
            return 0, 0, 0
        return max(e.rows for e in held), min(e.first for e in held), max(e.end for e in held)

    def _held(self) -> Batch:
        assert self.batch is not None, "nothing was written yet"
        return self.batch

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = object.__new__(type(self))
        batch = self._forked()
        vars(twin).update(copy.deepcopy(vars(self) | {"batch": None, "_is_shown": False}, memo))
        if self.batch and batch is None:
            layout = self.batch.kv_cache.layout
            batch = self.batch.copy(layout, range(layout.num_layers), self.batch.kv_cache.pool)
        twin.batch = batch
        return twin

    def _forked(self) -> Batch | None:
        """A fork of its batch; None where there is none, or no rows for it, or where it must not share pages."""
        if self.batch is None or any(extent.expected for extent in self._extents):
            return None
        self.fit()
        return self.batch.fork() if self._can_share() else None

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the tokens that the layers hold, and nothing else of the rows."""
        held = {
            index: [
                states.clone().view(_SAVED_AS.get(states.dtype, states.dtype))
                for states in self._held().parts(index, extent.rows, extent.first, extent.end)
            ]
            for index, extent in enumerate(self._extents)
            if extent.rows
        }
        layout = self._held().kv_cache.layout if held else None
        return vars(self) | {"batch": None, "_is_shown": False, "saved": (layout, held)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up tokens where they were loaded to, which may be another device."""
        layout, held = state.pop("saved")
        vars(self).update(state)
        for extent in self._extents:
            extent.accepted = ()
        if held:
            k, *_ = next(iter(held.values()))
            self.batch = Batch.open(layout, self._limits, self._pools.on(k.device))
            self.batch.reserve(*self._needed())
            for index, saved in held.items():
                extent = self._extents[index]
                for states, new in zip(self.batch.parts(index, extent.rows, extent.first, extent.end), saved):
                    states.copy_(new.view(states.dtype))


def check_autograd(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises `AutogradError` where autograd would record what is written."""
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        raise AutogradError(
            "K and V require gradients, and a cache that is written in place keeps no graph. Run the model under "
            "torch.no_grad() or torch.inference_mode(); to train through a cache use DynamicCache"
        )


def check_batch(extent: Extent, rows: int) -> None:
    """Raises `ShapeError` where a layer that holds tokens gets those of another batch."""
    if rows != extent.rows:
        raise ShapeError(
            f"got a batch of {rows}; the cache holds {extent.rows} sequences. Call reset() for another batch, "
            "batch_repeat_interleave() or batch_select_indices() to go on with more or fewer of these"
        )
