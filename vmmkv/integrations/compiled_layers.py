"""Layers whose length is data on the device: one compiled forward pass, one CUDA graph, serves every length.

A forward pass reads its rows' lengths from `lengths`, and its last layer advances them there. What it reads and writes
has the shape of whole rows and never moves, so nothing that a compiler guards on changes from token to token. Only the
host can map pages, and it does not know the lengths: it keeps `bound`, which no pass can have exceeded, and asks the
device when that is about to leave the pages that are mapped, every few tokens.

Invariants:
 1. `lengths <= bound <= batch.end` between forward passes: what a pass reads, and all that it writes, is mapped.
    `bound` is `batch.end` where the user has reserved room: passes that the host does not see may fill it.
 2. All rows are equally long, and all layers of a group write the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Self

import torch

from ..cache import KVCache
from ..errors import ShapeError, StreamCaptureError, UnsupportedError
from .attention import NAME, kernels_take
from .batch import Limits
from .layer_group import LayerGroup
from .layers import VmmLayer
from .row_writes import append_rows, can_append


class Place(NamedTuple):
    """Where K and V of a layer lie in its range: shapes without the first dimension, and strides, in elements."""

    range: int
    k_shape: tuple[int, ...]
    k_strides: tuple[int, ...]
    k_offset: int
    v_shape: tuple[int, ...]
    v_strides: tuple[int, ...]
    v_offset: int

    @classmethod
    def of(cls, kv_cache: KVCache, layer: int) -> Place:
        k, v = kv_cache.kv(layer)
        return cls(
            kv_cache.layout.layers[layer].range,
            tuple(k.shape[1:]),
            k.stride(),
            int(k.storage_offset()),
            tuple(v.shape[1:]),
            v.stride(),
            int(v.storage_offset()),
        )


class CompiledLayerGroup(LayerGroup):
    """Layers that share token records, and a length on the device.

    Args:
        limits, window: as in `LayerGroup`. Pages behind the window are given back.
        attention: the name of the attention that will read the rows. Any but vmmkv's own reads rows to their end.
    """

    def __init__(self, limits: Limits, window: int | None, attention: Callable[[], str]) -> None:
        super().__init__(limits, window)
        self.is_reserved = False
        """Whether the user has said how long sequences may become until the next `reset`."""
        self._attention = attention
        self._bound = 0
        self._pass = 0, 0
        """Sequences, and tokens of each, of the last forward pass that began outside of a graph."""
        self._places: list[Place] = []

    def learn(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch = self.batch
        super().learn(layer, keys, values)
        if batch is None:
            with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
                self.row_numbers = torch.arange(self._limits.max_batch_size, dtype=torch.int32, device=keys.device)
                self.lengths = torch.zeros_like(self.row_numbers)
        if batch is not self.batch:
            self._tell_compilers()

    def _reads_whole_rows(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        return self._attention() != NAME or not kernels_take(keys, values)

    def _tell_compilers(self) -> None:
        """Where the layers of a new batch lie, and that its memory never moves."""
        kv_cache = self._held().kv_cache
        self._places = [Place.of(kv_cache, layer) for layer in range(self.num_layers)]
        for tensor in (self.lengths, *map(kv_cache.range, range(len(kv_cache.layout.record_bytes)))):
            torch._dynamo.mark_static_address(tensor)  # or CUDA graphs would not be made, since it is written

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if batch := self.batch:  # its tokens stay where they are in their rows: `lengths` are positions, too
            layout = batch.kv_cache.layout
            memo[id(batch)] = batch.copy(layout, range(layout.num_layers), batch.zero_tail, batch.origin)
        with torch.inference_mode(False):  # as in `learn`
            twin = super().__deepcopy__(memo)
        if twin.batch:
            twin._tell_compilers()
        return twin

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            "a cache made with compile=True cannot be pickled: what must be mapped behind its tokens depends on the "
            "attention that will read them. Save one that was made without it; copy.deepcopy copies either"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # driver calls are no part of a graph
    def begin(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before a layer writes K and V, `[batch_size, num_kv_heads, tokens, head_dim]`, outside of a graph.

        Raises:
            ShapeError: the first layer has got another number of tokens; and what `LayerGroup.write` raises.
        """
        self._accept(layer, keys, values)
        rows, _, tokens, _ = keys.shape
        if layer == 0:
            self.make_room(tokens, rows)
            self._pass = rows, tokens
        elif (rows, tokens) != self._pass:
            raise ShapeError(
                f"got {tokens} tokens of {rows} sequences for layer {layer} of its group, and {self._pass[1]} of "
                f"{self._pass[0]} for the first: a model of such layers needs a cache made without compile=True"
            )
        self._extents[layer].rows = rows

    def make_room(self, tokens: int, rows: int = 0) -> None:
        """Maps the pages that a forward pass of so many tokens will write to.

        Raises:
            StreamCaptureError: a CUDA graph is being captured, and nothing was reserved for it.
            SequenceTooLongError, OutOfRowsError, OutOfPagesError, DriverError: as in `Batch.reserve`.
        """
        batch = self.batch
        rows = max(rows, *[extent.rows for extent in self._extents])
        if batch is None or not rows:
            return
        if batch.kv_cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.check_reserved()
            return
        self._bound += tokens
        if self._bound <= batch.end and rows <= batch.rows:
            return
        length = int(self.lengths[0])
        if self.window and not batch.zero_tail:
            batch.shrink(batch.rows, max(length + 1 - self.window, 0), batch.end)
        end = length + tokens
        whole_pages = -(-end // batch.page_tokens) * batch.page_tokens
        batch.reserve(rows, batch.first, max(min(whole_pages, self.max_seq_len), end))
        self._bound = batch.end if self.is_reserved else end

    def reserve(self, seq_len: int) -> None:
        """Maps pages for sequences of up to `seq_len` tokens; see `VmmCache.reserve`."""
        batch = self._held()
        batch.reserve(batch.rows, batch.first, seq_len)
        self._bound = batch.end
        self.is_reserved = True

    def check_reserved(self) -> None:
        """Raises `StreamCaptureError` unless `reserve` was called since the last `reset`."""
        if not self.is_reserved:
            raise StreamCaptureError(
                "a forward pass that is compiled or captured by hand cannot map pages: call "
                "cache.reserve(seq_len), with the length that sequences will reach, after the prompt and before it"
            )

    def rows_of(self, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, whole rows `[rows, max_seq_len, num_kv_heads, head_dim]`.

        Views of one tensor, made where they are used: of a mutation through views that enter a graph side by side a
        compiler would make copies.
        """
        place = self._places[layer]
        flat = self._held().kv_cache.range(place.range)
        k = flat.as_strided((rows, *place.k_shape), place.k_strides, place.k_offset)
        v = flat.as_strided((rows, *place.v_shape), place.v_strides, place.v_offset)
        return k, v

    def advance(self, tokens: int) -> None:
        """All rows have `tokens` more tokens, says the last layer of a forward pass."""
        self.lengths += tokens

    def select(self, layer: int, indices: torch.Tensor) -> None:
        self.learn_length()
        super().select(layer, indices)

    def fit(self) -> None:
        if self.batch is None:
            return
        rows = max(extent.rows for extent in self._extents)
        if not rows:
            self.lengths.zero_()
            self._bound, self.is_reserved = 0, False
        elif not self.is_reserved:
            self._bound = int(self.lengths[0])
        self.batch.shrink(rows, self.batch.first, self._bound)

    def learn_length(self) -> None:
        """Asks the device how long the rows are."""
        if self.batch is not None:
            first, end = self.batch.first, int(self.lengths[0])
            for extent in self._extents:
                extent.first, extent.end = (first, end) if extent.rows else (0, 0)


class VmmCompiledLayer(VmmLayer):  # type: ignore[no-untyped-call]
    """One layer of a `VmmCache` made with `compile=True`."""

    is_compileable = True
    is_croppable = False
    _group: CompiledLayerGroup

    def _held(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        self._group.learn_length()  # the device is asked how long the rows are
        return super()._held()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends K and V, `[batch_size, num_kv_heads, tokens, head_dim]`; returns whole rows, `[batch_size,
        num_kv_heads, max_seq_len, head_dim]`, of which what lies behind the new tokens is undefined (zeros for an
        attention that reads it).

        Raises:
            VmmkvError: see `LayerGroup.write`; nothing was written. Not from inside a compiled graph.
        """
        group = self._group
        if not torch.compiler.is_compiling() or not self._extent.rows:
            group.begin(self._index, key_states, value_states)
        rows, _, tokens, _ = key_states.shape
        k_rows, v_rows = group.rows_of(self._index, rows)
        write = torch.ops.vmmkv.write_rows if torch.compiler.is_compiling() else _write_rows
        write(key_states, value_states, k_rows, v_rows, group.row_numbers[:rows], group.lengths[:rows])
        if self._index == group.num_layers - 1:
            group.advance(tokens)
        return k_rows.transpose(1, 2), v_rows.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Whole rows. Every forward pass asks this first: it makes room for `query_length` tokens."""
        if torch.compiler.is_compiling():
            self._group.check_reserved()
        else:
            self._group.make_room(query_length)
        return self._group.max_seq_len, 0

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens so far, a tensor on the device; 0 before the first."""
        return self._group.lengths[0] if self._extent.rows else 0

    def length_after_crop(self, tokens_to_remove: int) -> int:
        raise NotImplementedError("a cache made with compile=True keeps all tokens until reset()")


class VmmCompiledSlidingWindowLayer(VmmCompiledLayer):  # type: ignore[no-untyped-call]
    """The same where tokens attend to `sliding_window` tokens, themselves included."""

    is_sliding = True

    def __init__(self, group: CompiledLayerGroup, layer_idx: int, sliding_window: int) -> None:
        super().__init__(group, layer_idx)
        self.sliding_window = sliding_window

    def get_max_length(self) -> int:
        """The window, as in transformers."""
        return self.sliding_window


def _write_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_numbers: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Writes K and V, `[batch, num_kv_heads, tokens, head_dim]`, behind the `lengths` tokens of each row."""
    if can_append(keys, values):
        append_rows(keys, values, k_rows, v_rows, row_numbers, lengths)
        return
    token = lengths[:1] + torch.arange(keys.shape[2], device=keys.device)
    k_rows.index_copy_(1, token, keys.transpose(1, 2))
    v_rows.index_copy_(1, token, values.transpose(1, 2))


# To compilers it is one operation that writes into rows: they would take the copies apart, and copy whole rows.
torch.library.custom_op("vmmkv::write_rows", _write_rows, mutates_args=("k_rows", "v_rows"))
