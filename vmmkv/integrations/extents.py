"""What each layer of a cache holds, and that its layers have been through the same forward passes.

Nobody says where a pass begins or ends. Layers write once in each, in the order of their numbers, and some in none or
in few of them: a layer whose number is no higher than the last one's begins the next pass. One that broke off in the
middle, or left layers out, shows in the next: layers that get as many tokens in one pass have been equally long before.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnfinishedPassError


@dataclass
class Extent:
    """What one layer, number `layer_idx` of the model, holds: the tokens `[first, end)` of `rows` sequences."""

    layer_idx: int
    rows: int = 0
    first: int = 0
    end: int = 0
    window: int | None = None
    """Tokens that a token attends to, itself included; None: all of them, or the layer moves `first` by itself."""
    keeps_past: bool = False
    """Whether `first` stays although the window has moved on."""
    changes: int = 0
    """How often the sequences were put into another order: odd while they are."""
    last_pass: tuple[int, int] = 0, 0
    """The number of the pass that it wrote in last, and how many tokens."""
    accepted: tuple[object, ...] = ()
    """What the last K and V looked like: those that look the same need no other check."""
    expected: int = 0
    """Tokens of a pass that was announced and has not been counted: it may come, or have ended in the middle."""
    written: int = 0
    """Tokens that a compiled pass has written and that `Passes.count` has not counted."""

    def first_kept(self, end: int) -> int:
        """The first token that it needs of those that it holds, once they end at `end`."""
        return self.first if self.window is None or self.keeps_past else max(end - self.window + 1, self.first)

    def is_in_step_with(self, other: Extent) -> bool:
        """Whether one forward pass may give both of them as many tokens."""
        return (self.end, self.changes) == (other.end, other.changes) and not self.changes % 2

    def clear(self) -> None:
        """Drops all tokens."""
        self.rows = self.first = self.end = self.changes = self.expected = self.written = 0


class Passes:
    """The forward passes of a cache, over all of its layers."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self._number = 1
        self._last_layer = -1
        """The number of the layer that has written last in this pass; -1 before the first."""
        self._states: dict[int, tuple[int, int]] = {}
        """Length and changes that layers had before this pass, by the tokens that they got in it."""

    def forget(self, extents: list[Extent]) -> None:
        """These, which are empty, are no longer those of layers."""
        self.extents = [extent for extent in self.extents if not any(extent is other for other in extents)]

    def check(self, extent: Extent, tokens: int) -> None:
        """Before a layer writes `tokens` more: layers that get as many in one pass were in the same state before it.

        Raises:
            UnfinishedPassError: they were not.
        """
        state = extent.end, extent.changes
        is_out_of_step = self._states.get(tokens, state) != state and not self._is_begun_by(extent)
        if is_out_of_step or extent.changes % 2:
            raise unfinished()

    def record(self, extent: Extent, rows: int, first: int, end: int) -> None:
        """A layer has written: it holds the tokens `[first, end)` of `rows` sequences now."""
        if self._is_begun_by(extent):
            self.start_over()
        tokens = end - extent.end
        self._states[tokens] = extent.end, extent.changes
        held = rows, first, end, (self._number, tokens), 0, 0, extent.layer_idx
        # In one line, of which an interrupt leaves no half.
        extent.rows, extent.first, extent.end, extent.last_pass, extent.expected, extent.written, self._last_layer = (
            held
        )

    def _is_begun_by(self, extent: Extent) -> bool:
        """Whether what a layer writes next is the first of another pass."""
        return extent.layer_idx <= self._last_layer

    def count(self) -> None:
        """Records what compiled passes have written."""
        for extent in self.extents:
            if extent.written:
                end = extent.end + extent.written
                self.record(extent, extent.rows, extent.first_kept(end), end)

    def start_over(self) -> None:
        """Whoever writes next begins a pass."""
        self._number, self._last_layer, self._states = self._number + 1, -1, {}


def unfinished() -> UnfinishedPassError:
    """What to raise where layers are out of step."""
    return UnfinishedPassError(
        "a forward pass, or a change of the batch, ended in the middle: it has reached some layers and others not. "
        "Call reset() and start over"
    )
