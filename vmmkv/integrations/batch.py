"""A batch: equally long sequences in rows 0, 1, 2, … of one `KVCache`, read and written as one tensor per layer.

Invariants:
 1. Rows `[0, rows)` hold the tokens `[first, end)`; token `t` lies at position `t - origin` of its row.
 2. Every row belongs to the batch for good, also those without tokens: so the i-th sequence is in row i.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..budget import parse_bytes
from ..cache import KVCache
from ..errors import ArgumentError, LayoutError, OutOfRowsError, ReleasedTokensError
from ..layout import KVLayout
from ..sequence import Sequence, check_length
from .row_writes import RowWriter


@dataclass(frozen=True)
class Limits:
    """What a batch can grow to.

    Attributes:
        max_seq_len: tokens of a row. Virtual addresses only.
        max_batch_size: rows, likewise.
        max_bytes: the budget, as in `KVCache`.
        page_size: bytes of a page; None is 2 MiB.

    Raises:
        ArgumentError: what must be a whole number is none.
        LayoutError, BudgetError: it is one that cannot be, on any device.
    """

    max_seq_len: int
    max_batch_size: int
    max_bytes: float | str | None
    page_size: int | None

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_batch_size", "page_size"):
            size = getattr(self, name)
            if size is None and name == "page_size":
                continue
            try:
                size = operator.index(size)
            except TypeError:
                raise ArgumentError(f"got {name}={size!r}; it must be a whole number") from None
            if size < 1:
                raise LayoutError(f"asked for {name}={size}; it is at least 1")
            object.__setattr__(self, name, size)
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes, free=0)


class Batch:
    """Equally long sequences.

    Args:
        layout: the shape of a token.
        limits: what it can grow to.
        device: where K and V are.
        zero_tail: rows can be read to their end, as in `KVCache`.

    Raises:
        LayoutError, BudgetError, DeviceError: as in `KVCache`.
    """

    def __init__(self, layout: KVLayout, limits: Limits, device: torch.device, zero_tail: bool = False) -> None:
        self.kv_cache = KVCache(
            layout,
            limits.max_batch_size,
            limits.max_seq_len,
            max_bytes=limits.max_bytes,
            device=device,
            page_size=limits.page_size,
            int32_strides=True,
            zero_tail=zero_tail,
        )
        self._limits = limits
        self.zero_tail = zero_tail
        self.origin = self.first = self.end = 0
        self.page_tokens = max(self.kv_cache.page_size // max(layout.record_bytes), 1)
        self._sequences: list[Sequence] = []
        self._renew(0)
        self._set_rows(0)

    def holds(self, rows: int, first: int, end: int) -> bool:
        """Whether rows `[0, rows)` hold the tokens `[first, end)`."""
        return rows <= self.rows and self.first <= first and end <= self.end

    def reserve(self, rows: int, first: int, end: int, origin: int | None = None) -> None:
        """Makes at least rows `[0, rows)` hold at least the tokens `[first, end)`; maps the pages that they need.

        Args:
            origin: the token that rows begin with, where there were none; None: `first`.

        Raises:
            OutOfRowsError: there are fewer rows.
            ReleasedTokensError: tokens from `first` on have been given back.
            SequenceTooLongError, OutOfPagesError, DriverError: as in `KVCache.extend`.
                Nothing has changed in any case.
        """
        if rows > len(self._sequences):
            raise OutOfRowsError(
                f"asked for a batch of {rows} sequences; there are {len(self._sequences)} rows. Make the cache with a "
                "larger max_batch_size: a row without tokens takes addresses, not memory"
            )
        check_length(end, self._limits.max_seq_len)  # also where a window has moved, and the row has room yet
        if not self.rows:
            self.origin = first if origin is None else origin
            self.first = self.end = first
        if first < self.first:
            raise ReleasedTokensError(
                f"asked for tokens from {first} on; those before {self.first} have left the sliding window. Call "
                "reset() after a forward pass that did not finish"
            )
        end = max(end, self.end)
        more = end - self.end
        if rows > self.rows:
            added = rows - self.rows
            self.kv_cache.extend(self._sequences[:rows], [more] * self.rows + [end - self.origin] * added)
            for sequence in self._sequences[self.rows : rows]:
                sequence.release_before(self.first - self.origin)
            self._set_rows(rows)
        elif more:
            self.kv_cache.extend(self._sequences[: self.rows], more)
        self.end = end

    def shrink(self, rows: int, first: int, end: int) -> None:
        """Gives back the rows from `rows` on, and the tokens outside of `[first, end)`.

        What the GPU still has to do with them may finish; the work must have been submitted. Tokens in
        front go when they fill a page.

        Raises:
            StreamCaptureError: a CUDA graph is being captured.
        """
        if rows < self.rows:
            self._renew(rows)
            self._set_rows(rows)
        if not rows:
            self.origin = self.first = self.end = 0
            return
        if end < self.end:
            for sequence in self._sequences[:rows]:
                sequence.truncate(end - self.origin)
            self.end = end
        if first - self.first >= self.page_tokens:
            for sequence in self._sequences[:rows]:
                sequence.release_before(first - self.origin)
            self.first = first

    def _renew(self, first: int) -> None:
        """Empties the rows from `first` on. Their pages stay mapped, ready for the next tokens there."""
        self.kv_cache.free(self._sequences[first:])
        renewed = [self.kv_cache.sequence() for _ in range(first, self.kv_cache.max_sequences)]
        self._sequences[first:] = sorted(renewed, key=lambda sequence: sequence.row)

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        views = [self.kv_cache.kv(layer) for layer in range(self.kv_cache.layout.num_layers)]
        self._row_numbers = torch.arange(rows, dtype=torch.int32, device=self.kv_cache.device)
        self._starts, self._starts_at = self._row_numbers, -1
        self._writers = [RowWriter(k, v, self._row_numbers) for k, v in views]
        self._kv = [(k[:rows].transpose(1, 2), v[:rows].transpose(1, 2)) for k, v in views]

    def kv(self, layer: int, rows: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens `[first, end)` in rows `[0, rows)`: `[rows, num_kv_heads, tokens, head_dim]` each,
        strided and zero-copy."""
        k, v = self._kv[layer]
        if rows < self.rows:
            k, v = k[:rows], v[:rows]
        position, tokens = first - self.origin, end - first
        return k.narrow(2, position, tokens), v.narrow(2, position, tokens)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
        """Writes K and V, `[rows, num_kv_heads, tokens, head_dim]`, from token `first` on; there is room for them."""
        position = first - self.origin
        if position != self._starts_at:  # once for all layers of a forward pass
            self._starts, self._starts_at = torch.full_like(self._row_numbers, position), position
        if not self._writers[layer].write(keys, values, self._starts):
            k, v = self.kv(layer, keys.shape[0], first, first + keys.shape[2])
            k.copy_(keys)
            v.copy_(values)

    def copy(self, layout: KVLayout, layers: Iterable[int], zero_tail: bool, origin: int | None = None) -> Batch:
        """Another batch that holds the same tokens, laid out anew; what it holds of other layers is undefined.

        Args:
            origin: the token that its rows begin with; None: the first that is held.

        Raises:
            OutOfPagesError, DriverError: as in `reserve`.
        """
        twin = Batch(layout, self._limits, self.kv_cache.device, zero_tail)
        twin.reserve(self.rows, self.first, self.end, origin)
        for layer in layers:
            there, here = (batch.kv(layer, self.rows, self.first, self.end) for batch in (twin, self))
            there[0].copy_(here[0])
            there[1].copy_(here[1])
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return self.copy(self.kv_cache.layout, range(self.kv_cache.layout.num_layers), self.zero_tail)
