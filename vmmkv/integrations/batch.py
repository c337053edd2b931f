"""A batch: equally long sequences in neighbouring rows of a `KVCache`, read and written as one tensor per layer.

Rows `[0, rows)` hold the tokens `[first, end)`; token `t` lies at position `t - origin` of its row. All rows that a
batch may have belong to it for good. A fork lies in other rows of the same `KVCache`, and shares pages. Tokens from
`shared_end` on lie in pages that can be written.

Methods raise what the methods of `KVCache` raise that they call. Nothing has changed then, unless the driver failed in
`reorder`: that, and all that is interrupted, may leave rows half changed, and only `clear` is safe.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .. import errors
from ..arguments import check_length, check_size
from ..budget import parse_bytes
from ..cache import KVCache
from ..core.addresses import ADDRESS_LIMIT
from ..layout import KVLayout
from ..pool import FramePool, check_pool_alone
from ..sequence import Sequence
from .row_writes import RowWriter
from .stand_ins import check_quantizable, write_quantized

MAX_BATCHES = 8  # batches that share the rows of a `KVCache`, and with them pages
MAX_ADDRESSES = ADDRESS_LIMIT // 8  # bytes of addresses that all of them take together, unless one alone takes more


class Pools:
    """A pool for each device: the one that was given, or pools that live as long as something lies on them."""

    def __init__(self, max_bytes: float | str | None, page_size: int | None, given: FramePool | None) -> None:
        check_pool_alone(given, max_bytes=max_bytes, page_size=page_size)
        if max_bytes is not None:
            parse_bytes(max_bytes, free=0)
        self._max_bytes, self._given = max_bytes, given
        self._page_size = None if page_size is None else check_size("page_size", page_size)
        self._made: weakref.WeakValueDictionary[torch.device, FramePool] = weakref.WeakValueDictionary()

    def on(self, device: torch.device) -> FramePool:
        """The pool of a device; raises `DeviceError` where the given one is on another."""
        if self._given is not None:
            if device != self._given.device:
                raise errors.DeviceError(
                    f"got K and V on {device}; the pool of this cache is on {self._given.device}. Make a pool there, "
                    "or, for a model on several devices, the cache without one"
                )
            return self._given
        pool = self._made.get(device)
        if pool is None:
            limit = "80%" if self._max_bytes is None else self._max_bytes
            self._made[device] = pool = FramePool(limit, device=device, page_size=self._page_size)
        return pool

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same pools: a copy of a cache shares pages."""
        return self


class Shape(NamedTuple):
    """What one layer keeps of a token."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Shape:
        return cls(keys.shape[1], keys.shape[3], values.shape[3])


@dataclass(frozen=True)
class Limits:
    """What a batch can grow to."""

    max_seq_len: int
    max_batch_size: int
    lookahead: int | None = None  # this and the next as in `KVCache`
    large_frames: bool = True
    kv_dtype: torch.dtype | None = None  # the 8-bit format that K and V are kept in, with scales; None: their own dtype

    def __post_init__(self) -> None:
        for name, least in (("max_seq_len", 1), ("max_batch_size", 1), ("lookahead", 0)):
            if (size := getattr(self, name)) is not None or least:
                object.__setattr__(self, name, check_size(name, size, least))

    def layout(self, shapes: list[Shape], dtype: torch.dtype) -> KVLayout:
        """As many layers in a record as 32-bit strides can address over the whole row; all layers in 8 bits, which only
        vmmkv's kernels read."""
        heads, k_head_dim, v_head_dim = zip(*shapes)
        num_layers = len(shapes)
        if self.kv_dtype:
            check_quantizable(dtype, self.kv_dtype)
            return KVLayout(num_layers, heads, k_head_dim, self.kv_dtype, v_head_dim, scales="token_head")
        for ranges in range(1, num_layers + 1):
            layout = KVLayout(num_layers, heads, k_head_dim, dtype, v_head_dim, -(-num_layers // ranges))
            if self.max_seq_len <= layout.int32_token_limit:
                break
        return layout


Where = tuple[slice, slice, slice]  # rows, heads, and positions in rows


class Batch:
    """Equally long sequences in rows `[first_row, first_row + max_batch_size)` of a `KVCache`."""

    def __init__(self, kv_cache: KVCache, limits: Limits, first_row: int = 0) -> None:
        self.kv_cache, self._limits, self._first_row = kv_cache, limits, first_row
        self.page_tokens = max(kv_cache.page_size // max(kv_cache.layout.record_bytes), 1)
        numbers = torch.arange(limits.max_batch_size, dtype=torch.int32, device=kv_cache.device)
        read = kv_cache.kv if kv_cache.layout.scales is None else kv_cache.scaled_kv
        views = [
            [states[first_row : first_row + limits.max_batch_size] for states in read(layer)]
            for layer in range(kv_cache.layout.num_layers)
        ]
        self._parts = [[states.transpose(1, 2) for states in layer] for layer in views]
        self.ranges = [kv_cache.range(index) for index in range(len(kv_cache.layout.record_bytes))]
        """Those of the cache: compilers cannot look into that."""
        self._places: list[Any] = [
            (layer.range, *((tuple(s.shape[1:]), s.stride(), int(s.storage_offset())) for s in views[index][:2]))
            for index, layer in enumerate(kv_cache.layout.layers)
        ]
        self._writers = [RowWriter(k, v, numbers, *scales) for k, v, *scales in views] if numbers.is_cuda else []
        self._starts = torch.zeros_like(numbers)
        self._starts_at = 0
        self._sequences: list[Sequence] = []
        self.clear()

    @classmethod
    def open(cls, layout: KVLayout, limits: Limits, pool: FramePool) -> Batch:
        """A batch in a `KVCache` of its own on a pool, with rows for forks."""
        addresses = limits.max_batch_size * limits.max_seq_len * layout.token_bytes
        kv_cache = KVCache(
            layout,
            limits.max_batch_size * max(min(MAX_ADDRESSES // addresses, MAX_BATCHES), 1),
            limits.max_seq_len,
            pool=pool,
            int32_strides=layout.scales is None,  # only vmmkv's kernels read 8 bits
            lookahead=limits.lookahead,
            large_frames=limits.large_frames,
        )
        return cls(kv_cache, limits)

    # ------------------------------------------------------------------ rows and tokens

    def clear(self) -> None:
        """Empties all rows; their pages stay mapped, ready for the next tokens. It is safe after a failed change."""
        self.rows = self.origin = self.first = self.end = self.shared_end = 0
        self._renew(0)

    def reserve(self, rows: int, first: int, end: int, origin: int | None = None) -> None:
        """Makes at least rows `[0, rows)` hold at least the tokens `[first, end)`; maps the pages that they need. Empty
        rows begin with token `origin`; None: `first`."""
        self._check_rows(rows)
        check_length(end, self._limits.max_seq_len)  # a row whose window has moved has more room than that
        if not self.rows:
            self.origin, self.first, self.end = first if origin is None else origin, first, first
        if first < self.first:
            raise errors.ReleasedTokensError(
                f"asked for tokens from {first} on; those before {self.first} have left the sliding window. Call "
                "reset() after a forward pass that did not finish"
            )
        if rows <= self.rows and end <= self.end:
            return
        end = max(end, self.end)
        held, added = self._sequences[: self.rows], self._sequences[self.rows : rows]
        self.kv_cache.extend(held, end - self.end)
        try:
            if added:
                self.kv_cache.extend(added, end - self.origin, starts=[self.first - self.origin] * len(added))
        except errors.VmmkvError:
            self._truncate(held, self.end)
            raise
        self.rows, self.end = max(rows, self.rows), end

    def _check_rows(self, rows: int) -> None:
        if rows > self._limits.max_batch_size:
            raise errors.OutOfRowsError(
                f"asked for a batch of {rows} sequences; there are {self._limits.max_batch_size} rows. Make the cache "
                "with a larger max_batch_size: a row without tokens takes addresses, not memory"
            )

    def shrink(self, rows: int, first: int, end: int) -> None:
        """Gives back the rows from `rows` on, and the tokens outside of `[first, end)`; of those in front full pages.
        GPU work on them that was submitted may finish."""
        if not rows:
            self.clear()
            return
        if rows < self.rows:
            self._renew(rows)
            self.rows = rows
        if end < self.end:
            self._truncate(self._sequences[:rows], end)
            self.end = end
        if first - self.first >= self.page_tokens:
            for sequence in self._sequences[:rows]:
                sequence.release_before(first - self.origin)
            self.first = first

    def _truncate(self, sequences: Iterable[Sequence], end: int) -> None:
        for sequence in sequences:
            sequence.truncate(end - self.origin)

    def _renew(self, first: int) -> None:
        """Ends the sequences in the rows from `first` on, and begins new ones."""
        self.kv_cache.free(self._sequences[first:])
        rows = range(self._first_row + first, self._first_row + self._limits.max_batch_size)
        self._sequences[first:] = [self.kv_cache.sequence(row=row) for row in rows]

    # ------------------------------------------------------------------ sharing

    def reorder(self, indices: list[int], share: bool, anew: bool = False) -> None:
        """Makes the i-th sequence hold what the `indices[i]`-th did. There may be more of them then, and no fewer. They
        `share` pages, or no row shares any afterwards. With `anew` sequences that change share all full pages with what
        they become, instead of copies of the tokens that they do not share yet; without memory rows are half changed
        then."""
        rows = max(len(indices), self.rows)
        self._check_rows(rows)
        self.shared_end = self.end
        moves = {row: source for row, source in enumerate(indices) if row != source}
        while anew and (unread := moves.keys() - moves.values()):
            for row in unread:
                self._fork_row(row, moves.pop(row))
        self.kv_cache.reorder(self._sequences[:rows], [moves.get(row, row) for row in range(rows)])
        if not share:
            self.kv_cache.unshare(self._sequences[:rows], self.first - self.origin)
            self.shared_end = 0
        self.rows = rows

    def _fork_row(self, row: int, source: int) -> None:
        """Makes a row a fork of another one; without memory for that, a copy in its own pages."""
        self.kv_cache.free([self._sequences[row]])
        self._sequences[row] = self.kv_cache.sequence(row=self._first_row + row)
        pair = [self._sequences[source], self._sequences[row]]
        try:
            self.kv_cache.reorder(pair, [0, 0])
        except (errors.OutOfPagesError, errors.DriverOutOfMemoryError):
            self.kv_cache.extend(pair[1:], self.end - self.origin, starts=[self.first - self.origin])
            self.kv_cache.reorder(pair, [0, 0])

    def fork(self) -> Batch | None:
        """Another batch that holds the same tokens and shares their full pages; None where there are no rows for it."""
        for first_row in range(0, self.kv_cache.max_sequences, self._limits.max_batch_size):
            with suppress(errors.OutOfRowsError):
                twin = Batch(self.kv_cache, self._limits, first_row)
                break
        else:
            return None
        self.shared_end = twin.shared_end = self.end
        sequences = [*self._sequences[: self.rows], *twin._sequences[: self.rows]]
        self.kv_cache.reorder(sequences, [*range(self.rows)] * 2)
        twin.rows, twin.origin, twin.first, twin.end = self.rows, self.origin, self.first, self.end
        return twin

    def unshare(self, first: int) -> None:
        """Makes tokens from `first` on safe to write over."""
        if first < self.shared_end:
            start = min(max(first, self.first), self.end) - self.origin
            self.kv_cache.unshare(self._sequences[: self.rows], start)
            self.shared_end = first

    def in_layout(self, layout: KVLayout, layers: Iterable[int]) -> Batch:
        """This batch if it has that layout, otherwise a `copy` in it."""
        return self if layout == self.kv_cache.layout else self.copy(layout, layers)

    def copy(self, layout: KVLayout, layers: Iterable[int]) -> Batch:
        """Another batch on the same pool that holds the same tokens of some layers, laid out anew."""
        twin = Batch.open(layout, self._limits, self.kv_cache.pool)
        twin.reserve(self.rows, self.first, self.end, self.origin)
        where = self.where(self.rows, self.first, self.end)
        for layer in layers:
            for new, old in zip(twin.view(layer, where), self.view(layer, where)):
                new.copy_(old)
        return twin

    # ------------------------------------------------------------------ K and V

    def where(self, rows: int, first: int, end: int) -> Where:
        """The place of the tokens `[first, end)` of rows `[0, rows)`."""
        return slice(rows), slice(None), slice(first - self.origin, end - self.origin)

    def whole_rows(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """K and V of rows `[0, rows)` from position 0 to their end, `[rows, max_seq_len, num_kv_heads, head_dim]`.

        They are views of one tensor, made where they are used: a compiler would copy what a graph mutates through views
        that enter it side by side.
        """
        index, (k_shape, *k_place), (v_shape, *v_place) = self._places[layer]
        flat = self.ranges[index]
        return flat.as_strided((rows, *k_shape), *k_place), flat.as_strided((rows, *v_shape), *v_place)

    def view(self, layer: int, where: Where) -> list[Tensor]:
        """Views of K and V, `[rows, num_kv_heads, tokens, head_dim]`, and of the scales of each, `[rows, num_kv_heads,
        tokens]`, if there are scales."""
        return list(map(itemgetter(where), self._parts[layer]))

    def append(self, layer: int, keys: Tensor, values: Tensor, new: Where, attended: Where) -> list[Tensor]:
        """Writes K and V, `[rows, num_kv_heads, tokens, head_dim]`, where there is room; returns a view, as `view`."""
        parts, position = self._parts[layer], new[2].start
        if self._writers and position != self._starts_at:  # once for all layers of a forward pass
            self._starts, self._starts_at = torch.full_like(self._starts, position), position
        if self._writers and self._writers[layer].write(keys, values, self._starts):
            pass
        elif len(parts) > 2:
            k, v, k_scales, v_scales = map(itemgetter(new), parts)
            write_quantized(keys, k, k_scales)
            write_quantized(values, v, v_scales)
        else:
            parts[0][new], parts[1][new] = keys, values
        return list(map(itemgetter(attended), parts))
