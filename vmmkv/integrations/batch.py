"""A batch: equally long sequences in neighbouring rows of a `KVCache`, read and written as one tensor per layer.

Invariants:
 1. Rows `[0, rows)` of the batch hold the tokens `[first, end)`; token `t` lies at position `t - origin` of its row.
 2. As many rows as it may have belong to the batch for good, also those without tokens: so the i-th sequence is in the
    i-th of them. A copy has others of the same `KVCache`, and shares pages.
 3. Tokens from `shared_end` on lie in pages that can be written, and are no other sequence's.
The first holds at every line, whatever interrupts it: the books say less before sequences hold less, and more after
they hold more. What was cut short is put right by the next change.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..arguments import check_length, check_size
from ..cache import KVCache
from ..core.addresses import ADDRESS_LIMIT
from ..errors import (
    DriverOutOfMemoryError,
    OutOfPagesError,
    OutOfRowsError,
    ReleasedTokensError,
    UseAfterFreeError,
    VmmkvError,
)
from ..layout import KVLayout
from ..pool import FramePool
from ..sequence import Sequence
from .row_writes import RowWriter
from .scaled_states import write_quantized

MAX_BATCHES = 8
"""Batches that share the rows of a `KVCache`, and with them pages."""
MAX_ADDRESSES = ADDRESS_LIMIT // 8
"""Bytes of addresses that all of them take together, unless one alone takes more."""


@dataclass(frozen=True)
class Limits:
    """What a batch can grow to.

    Attributes:
        max_seq_len: tokens of a row. Virtual addresses only.
        max_batch_size: rows, likewise.
        lookahead: tokens that are mapped behind each row before it needs them, as in `KVCache`.
        large_frames: also as in `KVCache`.
        kv_dtype: the 8-bit format that K and V are kept in, with scales; None: their own dtype.

    Raises:
        ArgumentError: what must be a whole number is none.
        LayoutError: it is one that cannot be.
    """

    max_seq_len: int
    max_batch_size: int
    lookahead: int | None = None
    large_frames: bool = True
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_seq_len", 1), ("max_batch_size", 1), ("lookahead", 0)):
            if (size := getattr(self, name)) is not None or least:
                object.__setattr__(self, name, check_size(name, size, least))


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
    def of(cls, range_index: int, k: torch.Tensor, v: torch.Tensor) -> Place:
        return cls(
            range_index,
            tuple(k.shape[1:]),
            k.stride(),
            int(k.storage_offset()),
            tuple(v.shape[1:]),
            v.stride(),
            int(v.storage_offset()),
        )


class Batch:
    """Equally long sequences.

    Args:
        kv_cache: whose rows they are in.
        limits: what it can grow to.
        first_row: the first of its rows.

    Raises:
        OutOfRowsError: one of them is another's.
        DriverError: as in `KVCache.sequence`.
    """

    def __init__(self, kv_cache: KVCache, limits: Limits, first_row: int = 0) -> None:
        self.kv_cache, self._limits, self._first_row = kv_cache, limits, first_row
        self._places = [
            Place.of(layer.range, *(states[first_row:] for states in self._whole(index)[:2]))
            for index, layer in enumerate(kv_cache.layout.layers)
        ]
        self.ranges = [kv_cache.range(index) for index in range(len(kv_cache.layout.record_bytes))]
        """Those of the cache: compilers cannot look into that."""
        self.origin = self.first = self.end = self.shared_end = 0
        self.page_tokens = max(kv_cache.page_size // max(kv_cache.layout.record_bytes), 1)
        self._sequences: list[Sequence] = []
        self._is_changing = True
        self._set_rows(0)
        self._finish_change()

    @classmethod
    def open(cls, layout: KVLayout, limits: Limits, pool: FramePool) -> Batch:
        """A batch in a `KVCache` of its own, with rows for copies.

        Args:
            layout: the shape of a token.
            pool: the memory for K and V.

        Raises:
            LayoutError, OutOfPagesError, DriverError: as in `KVCache`.
        """
        addresses = limits.max_batch_size * limits.max_seq_len * layout.token_bytes
        kv_cache = KVCache(
            layout,
            limits.max_batch_size * max(min(MAX_ADDRESSES // addresses, MAX_BATCHES), 1),
            limits.max_seq_len,
            pool=pool,
            int32_strides=layout.scales is None,  # of 8 bits only kernels of ours count strides
            lookahead=limits.lookahead,
            large_frames=limits.large_frames,
        )
        return cls(kv_cache, limits)

    def holds(self, rows: int, first: int, end: int) -> bool:
        """Whether rows `[0, rows)` hold the tokens `[first, end)`."""
        return rows <= self.rows and self.first <= first and end <= self.end

    def reserve(self, rows: int, first: int, end: int, origin: int | None = None) -> None:
        """Makes at least rows `[0, rows)` hold at least the tokens `[first, end)`; maps the pages that they need.

        Args:
            origin: the token at the front of the rows, where they are empty; None: `first`.

        Raises:
            OutOfRowsError: there are fewer rows.
            ReleasedTokensError: tokens from `first` on have been given back.
            SequenceTooLongError, OutOfPagesError, DriverError: as in `KVCache.extend`.
                Nothing has changed in any case.
        """
        self._check_rows(rows)
        check_length(end, self._limits.max_seq_len)  # also where a window has moved, and the row has room yet
        self._finish_change()
        if not self.rows:
            self.origin, self.first, self.end = first if origin is None else origin, first, first
        if first < self.first:
            raise ReleasedTokensError(
                f"asked for tokens from {first} on; those before {self.first} have left the sliding window. Call "
                "reset() after a forward pass that did not finish"
            )
        end = max(end, self.end)
        self._is_changing = True
        try:
            self.kv_cache.extend(self._sequences[: self.rows], end - self.end)
            if rows > self.rows:
                added = self._sequences[self.rows : rows]
                self.kv_cache.extend(added, end - self.origin, starts=[self.first - self.origin] * len(added))
                self._set_rows(rows)
        except VmmkvError:
            self._finish_change()
            raise
        self.end = end
        self._is_changing = False

    def _check_rows(self, rows: int) -> None:
        """Raises `OutOfRowsError` where it has not as many."""
        if rows > self._limits.max_batch_size:
            raise OutOfRowsError(
                f"asked for a batch of {rows} sequences; there are {self._limits.max_batch_size} rows. Make the cache "
                "with a larger max_batch_size: a row without tokens takes addresses, not memory"
            )

    def shrink(self, rows: int, first: int, end: int) -> None:
        """Gives back the rows from `rows` on, and the tokens outside of `[first, end)`.

        What the GPU still has to do with them may finish; the work must have been submitted. Tokens in
        front go when they fill a page.

        Raises:
            StreamCaptureError: a CUDA graph is being captured.
        """
        self._finish_change()
        self._is_changing = True
        if rows < self.rows:
            self._set_rows(rows)
            self._renew(rows)
        if not rows:
            self.origin = self.first = self.end = 0
        elif end < self.end:
            self.end = end
            self._truncate()
        if rows and first - self.first >= self.page_tokens:
            self.first = first
            for sequence in self._sequences[:rows]:
                sequence.release_before(first - self.origin)
        self._is_changing = False

    def reorder(self, indices: list[int], share: bool, anew: bool = False) -> None:
        """Makes the i-th sequence hold what the `indices[i]`-th did. There may be more of them then, and no fewer.

        Args:
            share: whether they may share pages: then what is written before `end` is to be unshared. If not, no row
                shares any behind this.
            anew: have sequences that change share all full pages with what they become, which maps these; else they
                get copies of what they do not share yet.

        Raises:
            OutOfRowsError, OutOfPagesError, DriverOutOfMemoryError: there is no room; nothing has changed.
            DriverError: as in `KVCache.reorder`. After a failure in the middle, or any failure `anew`, no row that was
                there before holds tokens any more.
        """
        rows = max(len(indices), self.rows)
        self._check_rows(rows)
        self._finish_change()
        self._is_changing = True
        self.shared_end = self.end
        moves = {row: source for row, source in enumerate(indices) if row != source}
        while anew and (unread := moves.keys() - moves.values()):
            for row in unread:
                self._fork(row, moves.pop(row))
        self.kv_cache.reorder(self._sequences[:rows], [moves.get(row, row) for row in range(rows)])
        if not share:
            self.kv_cache.unshare(self._sequences[:rows], self.first - self.origin)
            self.shared_end = 0
        if rows > self.rows:
            self._set_rows(rows)
        self._is_changing = False

    def share(self, row: int, source: int) -> None:
        """Has two rows that hold the same bytes share the pages that are full. What is written before `end` is to be
        unshared then.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: as in `KVCache.reorder`; the batch holds no tokens then.
        """
        self._finish_change()
        self._is_changing = True
        self.shared_end = self.end
        self._fork(row, source)
        self._is_changing = False

    def _fork(self, row: int, source: int) -> None:
        """Has a row begin anew, as a fork of another; or, without memory for that, a copy in its own pages."""
        self.kv_cache.free([self._sequences[row]])
        self._sequences[row] = self.kv_cache.sequence(row=self._first_row + row)
        pair = [self._sequences[source], self._sequences[row]]
        try:
            self.kv_cache.reorder(pair, [0, 0])
        except (OutOfPagesError, DriverOutOfMemoryError):
            self.kv_cache.extend(pair[1:], self.end - self.origin, starts=[self.first - self.origin])
            self.kv_cache.reorder(pair, [0, 0])

    def fork(self) -> Batch | None:
        """Another batch that holds the same tokens, on the same pages as far as those are full; None where there are no
        rows for it. What is written before `end` is to be unshared then, in both.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: as in `KVCache.reorder`; there is no other then.
        """
        self._finish_change()
        twin = self._beside()
        if twin:
            self.shared_end = twin.shared_end = self.end
            sequences = [*self._sequences[: self.rows], *twin._sequences[: self.rows]]
            self.kv_cache.reorder(sequences, [*range(self.rows)] * 2)
            twin.origin, twin.first, twin.end = self.origin, self.first, self.end
            twin._set_rows(self.rows)
        return twin

    def _beside(self) -> Batch | None:
        """An empty batch in other rows, if there are any."""
        for first_row in range(0, self.kv_cache.max_sequences, self._limits.max_batch_size):
            with suppress(OutOfRowsError):
                return Batch(self.kv_cache, self._limits, first_row)
        return None

    def unshare(self, first: int) -> None:
        """Sees to it that tokens from `first` on can be written over.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: as in `KVCache.unshare`.
        """
        if first < self.shared_end:
            start = min(max(first, self.first), self.end) - self.origin
            self.kv_cache.unshare(self._sequences[: self.rows], start)
            self.shared_end = first

    def _finish_change(self) -> None:
        """Makes sequences hold what the books say, where a change was cut short."""
        if self._is_changing:
            try:
                self._truncate()
            except (UseAfterFreeError, ValueError):  # what was cut short has ended some, or emptied them
                self._set_rows(0)
            self._renew(self.rows)
            self._is_changing = False

    def _truncate(self) -> None:
        for sequence in self._sequences[: self.rows]:
            sequence.truncate(self.end - self.origin)

    def _renew(self, first: int) -> None:
        """Empties the rows from `first` on. Their pages stay mapped, ready for the next tokens there."""
        self.kv_cache.free(self._sequences[first:])
        del self._sequences[first:]
        for row in range(self._first_row + first, self._first_row + self._limits.max_batch_size):
            self._sequences.append(self.kv_cache.sequence(row=row))

    def _set_rows(self, rows: int) -> None:
        if not rows:
            self.shared_end = 0
        layers = map(self._whole, range(self.kv_cache.layout.num_layers))
        views = [[states[self._first_row :] for states in layer] for layer in layers]
        numbers = torch.arange(rows, dtype=torch.int32, device=self.kv_cache.device)
        writers = [RowWriter(k, v, numbers, *scales) for k, v, *scales in views]
        parts = [[states[:rows].transpose(1, 2) for states in layer] for layer in views]
        self.rows, self._starts, self._starts_at, self._writers, self._parts = rows, numbers, -1, writers, parts

    def _whole(self, layer: int) -> tuple[torch.Tensor, ...]:
        """K and V of all rows of the `KVCache`, and the scales of each, if it has scales."""
        kv_cache = self.kv_cache
        return kv_cache.kv(layer) if kv_cache.layout.scales is None else kv_cache.scaled_kv(layer)

    def parts(self, layer: int, rows: int, first: int, end: int) -> list[torch.Tensor]:
        """What is kept of the tokens `[first, end)` in rows `[0, rows)`: K and V, `[rows, num_kv_heads, tokens,
        head_dim]` each, and the scales of each, `[rows, num_kv_heads, tokens]`, if there are scales; strided and
        zero-copy."""
        parts = self._parts[layer]
        if rows < len(parts[0]):
            parts = [states[:rows] for states in parts]
        position, tokens = first - self.origin, end - first
        return [states.narrow(2, position, tokens) for states in parts]

    def whole_rows(self, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of rows `[0, rows)` from position 0 to their end, `[rows, max_seq_len, num_kv_heads, head_dim]`.

        For graphs: views of one tensor, made where they are used. Of a mutation through views that enter a graph side
        by side a compiler would make copies.
        """
        place = self._places[layer]
        flat = self.ranges[place.range]
        k = flat.as_strided((rows, *place.k_shape), place.k_strides, place.k_offset)
        v = flat.as_strided((rows, *place.v_shape), place.v_strides, place.v_offset)
        return k, v

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Writes K and V, `[rows, num_kv_heads, tokens, head_dim]`, from token `first` on; there is room for them."""
        position = first - self.origin
        if position != self._starts_at:  # once for all layers of a forward pass
            self._starts, self._starts_at = torch.full_like(self._starts, position), position
        if not self._writers[layer].write(keys, values, self._starts):
            k, v, *scales = self.parts(layer, keys.shape[0], first, first + keys.shape[2])
            if scales:
                write_quantized(keys, k, scales[0])
                write_quantized(values, v, scales[1])
            else:
                k.copy_(keys)
                v.copy_(values)

    def copy(self, layout: KVLayout, layers: Iterable[int], pool: FramePool) -> Batch:
        """Another batch that holds the same tokens, laid out anew; what it holds of other layers is undefined.

        Args:
            pool: that it lies on, of the same device.

        Raises:
            OutOfPagesError, DriverError: as in `reserve`.
        """
        twin = Batch.open(layout, self._limits, pool)
        twin.reserve(self.rows, self.first, self.end, self.origin)
        for layer in layers:
            there, here = (batch.parts(layer, self.rows, self.first, self.end) for batch in (twin, self))
            for new, old in zip(there, here):
                new.copy_(old)
        return twin
