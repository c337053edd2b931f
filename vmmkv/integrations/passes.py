"""The forward passes of a cache, and what its layers hold: layers that get as many tokens in one pass must be in step.

Layers write once in each pass, in the order of their numbers, and some write in none or in few passes. A pass begins
with a layer whose number is no higher than that of the layer which wrote last. Layers that get as many tokens in one
pass must have been equally long before it: otherwise an earlier pass has ended in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import AutogradError, DtypeError, ShapeError, UnfinishedPassError
from ..layout import DTYPES
from .batch import Batch, Shape, Where


@dataclass(eq=False)
class Extent:
    """The tokens `[first, end)` of `rows` sequences that layer `layer_idx` of the model holds."""

    layer_idx: int
    index: int  # the layer's number in its group
    window: int | None  # tokens that a token attends to, itself included; None: all
    shape: Shape | None = None  # None before the first K and V
    rows: int = 0
    first: int = 0
    end: int = 0
    keeps_past: bool = False  # whether `first` stays although the window has moved on
    expected: int = 0  # tokens of a compiled pass that was announced, and may come or have ended in the middle
    written: int = 0  # tokens that a compiled pass has written behind `end`

    def first_visible(self, length: int) -> int:
        """The first token that the one behind `length` others attends to."""
        return 0 if self.window is None else max(length - self.window + 1, 0)

    def first_kept(self, end: int) -> int:
        """The first token that the layer needs once its tokens end at `end`."""
        return self.first if self.keeps_past else max(self.first, self.first_visible(end))

    def clear(self) -> None:
        """Drops all tokens."""
        self.rows = self.first = self.end = self.expected = self.written = 0


Append = Callable[[int, Tensor, Tensor, Where, Where], list[Tensor]]
"""Writes K and V of a layer, and returns those that they attend to; see `Batch.append`."""


class Step(NamedTuple):
    """What the layers of a group do alike in a forward pass."""

    number: int  # of the pass
    looks: tuple[object, ...]  # shapes, dtypes and devices of K and V
    held: tuple[object, ...]  # of a layer before the pass: rows, first token, end and shape
    skipped: int  # new tokens that the layer does not keep: those of a prompt in front of its window
    is_alone: bool  # whether the new tokens attend to the K and V that came, as they came
    batch: Batch
    new: Where
    attended: Where
    after: tuple[int, int, int]  # of a layer after the pass: rows, first token and end


@dataclass
class Passes:
    """The forward passes of a cache, over all of its layers."""

    number: int = 0  # of the pass
    last_layer: int = -1  # the number of the layer that has written last in this pass; -1 before the first
    is_broken: bool = False  # whether a change of the batch has ended in the middle
    before: dict[int, int] = field(default_factory=dict)
    """How long layers were before this pass, by the tokens that they got in it."""
    extents: list[Extent] = field(default_factory=list)  # of a cache made with `compile=True`: those of all layers
    is_uncompiled: bool = False  # of such a cache: whether a warning has said that nothing is compiled

    def start_over(self) -> None:
        """Has the next layer that writes begin a pass."""
        self.number, self.last_layer, self.before = self.number + 1, -1, {}

    def check(self, extent: Extent, tokens: int) -> None:
        """Raises `UnfinishedPassError` unless a layer may get `tokens` more in this pass, or begin the next with it."""
        begins = extent.layer_idx <= self.last_layer
        if self.is_broken or not (begins or self.before.get(tokens, extent.end) == extent.end):
            raise unfinished()

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


def unfinished() -> UnfinishedPassError:
    """The error for layers that are out of step."""
    return UnfinishedPassError(
        "a forward pass, or a change of the batch, ended in the middle: it has reached some layers and others not. "
        "Call reset() and start over"
    )


def check_kv(layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Raises `ShapeError` unless K and V of a layer are of the same tokens of the same sequences."""
    shapes = [[*each.shape] if isinstance(each, Tensor) else type(each).__name__ for each in (keys, values)]
    if not all(len(shape) == 4 and shape[:3] == shapes[0][:3] and isinstance(shape, list) for shape in shapes):
        raise ShapeError(
            f"got K {shapes[0]} and V {shapes[1]} for layer {layer_idx}; both are tensors "
            "[batch_size, num_kv_heads, tokens, head_dim], and only head_dim may differ"
        )


def check_autograd(keys: Tensor, values: Tensor) -> None:
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


def common_dtype(keys: Tensor, values: Tensor, held: torch.dtype | None) -> torch.dtype:
    """The narrowest dtype that holds K, V and the dtype `held` exactly; raises `DtypeError` if there is none."""
    with suppress(RuntimeError):
        if {keys.dtype, values.dtype} <= set(DTYPES):  # other integers would be rounded
            return torch.promote_types(torch.promote_types(keys.dtype, values.dtype), held or keys.dtype)
    there = f", and the cache holds {held}" if held else ""
    raise DtypeError(
        f"got K as {keys.dtype} and V as {values.dtype}{there}; vmmkv has no dtype that holds all of it. Run the "
        "model in one of its dtypes, or all forward passes under autocast"
    )
