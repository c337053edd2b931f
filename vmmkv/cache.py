"""The cache: one virtual tensor of the maximum shape, backed by memory only where tokens are."""

from __future__ import annotations

import functools
import html
import itertools
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .arena import Arena, check_address_space
from .budget import budget_pages
from .driver import Driver, open_driver
from .errors import (
    DeviceError,
    DriverError,
    ForkError,
    LayoutError,
    StreamCaptureError,
    UseAfterFreeError,
    VmmkvError,
)
from .invariants import check_invariants
from .layout import KVLayout
from .pages import PagePool
from .picture import draw_cache
from .rows import Rows
from .sequence import Sequence, check_length
from .stats import CacheStats, CallStats
from .tensors import export_range, kv_views


class KVCache:
    """K and V of many sequences, each in one contiguous row of virtual memory.

    All methods may be called from several threads; a single sequence from one at a time.

    Args:
        layout: the shape of a token.
        max_sequences: rows: sequences that may live at a time.
        max_seq_len: tokens of a row. Both take virtual addresses only, 100 TiB in all.
        max_bytes: the budget: bytes, `"20GiB"`, or a share of the memory that is free now, `"80%"` (the
            default) or `0.8`. Memory is taken when tokens come, not before.
        max_tokens: the budget in tokens, instead of `max_bytes`: as many always fit, however they are spread.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        page_size: bytes of a page; None is 2 MiB.
        scrub: zero pages before another sequence can read them; one memset per extension onto pages.
        zero_tail: let kernels read a live row that holds tokens to its very end, as stock attention under a mask
            does: one read-only page of zeros is mapped wherever the row has no page, and pages of another sequence are
            zeroed before (it implies `scrub`). Only what `release_before` gave back still faults. It is slower:
            a row's tail costs driver calls for each of its pages once, and growing onto a page, or taking one
            from a live row, waits for the GPU; neither can be done in a stream capture. Streams that read a
            row must be named with `Sequence.record_stream`, also where a mask hides it.
        int32_strides: refuse a geometry whose rows are longer than kernels with 32-bit strides can
            address (torch's memory-efficient SDPA; see `KVLayout.int32_token_limit`).
        driver: a memory system of your own, instead of `device` and `page_size`.

    Raises:
        LayoutError: the geometry takes more than 100 TiB of addresses, or strides beyond 32 bits.
        BudgetError: the budget is no size, below one page, or larger than the device.
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        layout: KVLayout,
        max_sequences: int,
        max_seq_len: int,
        *,
        max_bytes: float | str | None = None,
        max_tokens: int | None = None,
        device: str | torch.device | None = None,
        page_size: int | None = None,
        scrub: bool = False,
        zero_tail: bool = False,
        int32_strides: bool = False,
        driver: Driver | None = None,
    ) -> None:
        max_sequences, max_seq_len = operator.index(max_sequences), operator.index(max_seq_len)
        if driver is not None and (device is not None or page_size is not None):
            raise ValueError("give a driver, or device and page_size; a driver has its own")
        if max_sequences < 1 or max_seq_len < 1:
            raise LayoutError(
                f"asked for max_sequences={max_sequences}, max_seq_len={max_seq_len}; both are at least 1"
            )
        if int32_strides and max_seq_len > layout.int32_token_limit:
            raise LayoutError(
                f"asked for max_seq_len={max_seq_len} with int32_strides; a token stride of "
                f"{max(layout.record_bytes)} bytes allows {layout.int32_token_limit}. Lower max_seq_len, or lower "
                "layers_per_range in the layout"
            )
        self.layout = layout
        self.max_sequences = max_sequences
        self.max_seq_len = max_seq_len
        self._driver = driver or open_driver(device, page_size)
        size = self._driver.page_size
        row_bytes = [-(-max_seq_len * record // size) * size for record in layout.record_bytes]
        check_address_space(
            sum(row_bytes) * max_sequences, f"max_sequences={max_sequences} x max_seq_len={max_seq_len}"
        )
        if max_bytes is None and max_tokens is None:
            max_bytes = "80%"
        budget = budget_pages(self._driver, layout, max_sequences, max_bytes, max_tokens, zero_tail)
        pool = PagePool(self._driver, budget)
        arenas = [Arena(pool, max_sequences, nbytes) for nbytes in row_bytes]
        self._pool = pool
        self._rows = Rows(pool, list(zip(arenas, layout.record_bytes)), max_sequences, max_seq_len, scrub, zero_tail)
        with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
            ranges = [export_range(arena.address, arena.nbytes, self.device, owner=arena) for arena in arenas]
            self._ranges = [flat.view(layout.dtype) for flat in ranges]
            self._views = kv_views(self._ranges, layout, max_sequences, max_seq_len)
        self._abandoned: deque[int] = deque()
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._unusable: Callable[[], VmmkvError] | None = None
        _caches.add(self)

    # ------------------------------------------------------------------ sequences

    @property
    def device(self) -> torch.device:
        """Where K and V are."""
        return self._driver.device

    @property
    def page_size(self) -> int:
        """Bytes of a page."""
        return self._driver.page_size

    def sequence(self, tokens: int = 0, *, expected_tokens: int = 0) -> Sequence:
        """Starts a sequence of `tokens` tokens, on a row whose pages are still mapped where there is one.

        It belongs to the current stream: order work on other streams behind it, and name them with
        `Sequence.record_stream`. Without tokens it takes no memory.

        Args:
            tokens: that there is room for at once, on the parked row that fits them best.
            expected_tokens: that it will soon have in all, where they come in chunks: maps nothing for them, but finds
                the parked row that fits best, and takes pages for others from there only where no others are idle.

        Raises:
            OutOfRowsError: `max_sequences` sequences are alive.
            SequenceTooLongError, OutOfPagesError, DriverError: as in `Sequence.extend`; there is no
                new sequence then.
        """
        tokens, expected_tokens = operator.index(tokens), operator.index(expected_tokens)
        with self._lock:
            self._check_usable()
            for count in (tokens, expected_tokens):
                _check_tokens(count)
                check_length(count, self.max_seq_len)
            self._free_abandoned()
            number = next(self._numbers)
            return Sequence(self, number, self._rows.acquire(number, tokens, expected_tokens))

    def extend(
        self, sequences: Collection[Sequence], tokens: int | Collection[int] | npt.NDArray[np.integer[Any]]
    ) -> None:
        """Makes room for more tokens in many sequences: all of them or none.

        Args:
            sequences: live sequences of this cache, each once.
            tokens: how many more, one number for all or one per sequence.

        Raises:
            SequenceTooLongError, OutOfPagesError, DriverError, UseAfterFreeError: as in
                `Sequence.extend`; no sequence has changed then.
            ValueError: a sequence is of another cache or named twice, or a number is negative.
        """
        counts = _whole_numbers(tokens, len(sequences))
        with self._lock:
            rows = [sequence._row for sequence in sequences if sequence._cache is self]
            distinct = len(set(rows)) == len(rows) == len(sequences)
            if isinstance(counts, int):
                sensible = 0 <= counts <= self.max_seq_len
            else:
                sensible = bool(((counts >= 0) & (counts <= self.max_seq_len)).all())
            if not distinct or not sensible:
                self._refuse(sequences, counts)
            index = np.array(rows, np.int64)
            before = self._rows.length[index]
            lengths = before + counts
            if (lengths <= self._rows.capacity[index]).all():
                self._rows.length[index] = lengths
            else:
                longest = int(lengths.max())
                if self._unusable or index.min() < 0 or longest > self.max_seq_len:
                    self._refuse(sequences, longest)
                self._free_abandoned()
                self._rows.grow_batch(index, lengths, before)

    def _extend_one(self, sequence: Sequence, tokens: int) -> None:
        """`Sequence.extend`: the same for one, without arrays."""
        tokens = operator.index(tokens)
        with self._lock:
            row, rows = sequence._row, self._rows
            before = rows.length_of[row]
            length = before + tokens
            if tokens >= 0 and length <= rows.capacity_of[row]:
                rows.length_of[row] = length
            else:
                if self._unusable or row < 0 or tokens < 0 or length > self.max_seq_len:
                    self._refuse([sequence], length if tokens >= 0 else tokens)
                if self._abandoned:
                    self._free_abandoned()
                rows.grow([row], [length], [before])

    def _refuse(self, sequences: Collection[Sequence], tokens: int | npt.NDArray[np.int64]) -> None:
        """Raises what is wrong with an `extend` by, or to, so many tokens."""
        self._check_usable()
        for sequence in sequences:
            self._check_live(sequence)
        if len(set(sequences)) != len(sequences):
            raise ValueError("a sequence is named twice in one extend; add its tokens up instead")
        _check_tokens(int(np.min(tokens, initial=0)))
        check_length(int(np.max(tokens, initial=0)), self.max_seq_len)

    def _truncate(self, sequence: Sequence, tokens: int) -> None:
        with self._lock:
            self._rows.shrink(*self._tokens_of(sequence, tokens), operator.index(tokens))

    def _release_before(self, sequence: Sequence, token: int) -> None:
        with self._lock:
            row, _ = self._tokens_of(sequence, token)
            self._rows.shrink(row, operator.index(token), self._rows.length_of[row])

    def _tokens_of(self, sequence: Sequence, token: int) -> tuple[int, int]:
        """Row and start of a sequence that holds `token`, or ends with it."""
        row = self._check_live(sequence)
        start, length = int(self._rows.start[row]), self._rows.length_of[row]
        if not start <= token <= length:
            raise ValueError(f"asked for token {token}; {sequence!r} holds tokens {start} to {length}")
        return row, start

    def _record_stream(self, sequence: Sequence, stream: torch.cuda.Stream) -> None:
        with self._lock:
            row = self._check_live(sequence)
            if stream.device != self.device:
                raise DeviceError(f"got a stream on {stream.device}; this cache is on {self.device}")
            self._rows.record_stream(row, stream)

    def free(self, sequences: Collection[Sequence]) -> None:
        """Ends sequences; one fence serves all of them. Those that are free already are passed over.

        Raises:
            StreamCaptureError: a CUDA graph is being captured; nothing was freed.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]
            # A finalizer of the user's, run by garbage collection in the middle of another operation.
            for sequence in sequences:
                if sequence._row >= 0:
                    sequence._cache._abandoned.append(sequence._row)
                    sequence._row = -1
            return
        with self._lock:
            if self._unusable:
                return
            live = [sequence for sequence in dict.fromkeys(sequences) if sequence._row >= 0]
            rows = [self._check_live(sequence) for sequence in live]
            if rows:
                self._rows.release(rows)
            for sequence in live:
                sequence._row = -1

    def _free_abandoned(self) -> None:
        """Frees the rows of sequences that were garbage-collected."""
        rows = []
        while self._abandoned:
            rows.append(self._abandoned.popleft())
        if rows:
            try:
                self._rows.release(rows)
            except StreamCaptureError:
                self._abandoned.extend(rows)  # later, then
            except BaseException:
                self._abandoned.extend(rows)
                raise

    # ------------------------------------------------------------------ memory

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer over all rows: the whole virtual tensor.

        Only tokens of live sequences may be touched: an access elsewhere is a fault. With `zero_tail` a live
        row may be read from its sequence's `start` to the row's end.

        Returns:
            K `[max_sequences, max_seq_len, num_kv_heads, head_dim]` and V likewise with its own width;
            strided, zero-copy, at addresses that never change.
        """
        self._check_usable()
        return self._views[layer]

    def range(self, index: int) -> torch.Tensor:
        """A range of the layout, all rows of it: `[elements]`. K and V of its layers are views of this tensor.

        For compilers, which take one tensor that is written in place better than many that share its memory.
        """
        self._check_usable()
        return self._ranges[index]

    def trim(self) -> int:
        """Gives surplus and free pages back to the system; returns their bytes.

        Waits for GPU work that still uses them.
        """
        with self._lock:
            self._check_usable()
            self._free_abandoned()
            self._rows.reclaim(self._rows.surplus_pages)
            return self._pool.release_free() * self.page_size

    def close(self) -> None:
        """Ends all sequences and gives all memory back now, after all work on the device.

        The addresses stay reserved while a view lives: to touch one after this is a fault.
        Garbage collection does the same when nobody holds the cache, its sequences or views any more.

        Raises:
            StreamCaptureError: a CUDA graph is being captured; nothing was closed.
        """
        with self._lock:
            if self._unusable:
                return
            with suppress(DriverError):  # a lost context has lost the memory, too
                self._driver.synchronize()
            self._unusable = functools.partial(UseAfterFreeError, "this KVCache was closed; make a new one")
            self._rows.capacity[:] = -1
            self._views, self._ranges = [], []
            for arena, _ in self._rows.ranges:
                arena.close()
            self._pool.close()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ accounting

    @property
    def available_pages(self) -> int:
        """Pages of the budget that hold no tokens and can be had without waiting for the GPU.

        Not counted are pages behind a live sequence that work of the sequence before it may still read: they can be
        had, too, but the host waits. Those of parked rows are counted: the stream that freed them adopts them at once.
        """
        with self._lock:
            self._check_usable()
            self._free_abandoned()
            return self._rows.available_pages

    def stats(self) -> CacheStats:
        """A snapshot: bytes, tokens, waste, pages and rows by state, reuse, driver calls."""
        with self._lock:
            self._check_usable()
            self._free_abandoned()
            rows, pool = self._rows, self._pool
            live = rows.owner >= 0
            tokens = int((rows.length[live] - rows.start[live]).sum())
            used = rows.used_pages
            uses = pool.page_uses + used
            meter = vars(pool.meter).items()
            calls = {name: CallStats(calls.count, calls.nanoseconds / 1e9) for name, calls in meter if calls.count}
            return CacheStats(
                budget_bytes=pool.budget * self.page_size,
                physical_bytes=pool.created * self.page_size,
                tokens=tokens,
                token_bytes=tokens * self.layout.token_bytes,
                waste=1 - tokens * self.layout.token_bytes / (used * self.page_size) if used else 0.0,
                pages={
                    "used": used,
                    "surplus": pool.taken - len(rows.zero_pages) - used,
                    "free": pool.free,
                    "zero": len(rows.zero_pages),
                },
                rows=rows.count_states(),
                pages_created=pool.pages_created,
                page_uses=uses,
                reuse_factor=uses / pool.pages_created if pool.pages_created else 0.0,
                adoptions=rows.adoptions,
                driver_calls=calls,
                driver_seconds=sum(call.seconds for call in calls.values()),
            )

    def page_map(self) -> npt.NDArray[np.int64]:
        """What each physical page holds now, by page number: the `Sequence.number` that it belongs to,
        or `FREE_PAGE`, `SURPLUS_PAGE`, `VACANT_PAGE` or `ZERO_PAGE`."""
        with self._lock:
            self._check_usable()
            self._free_abandoned()
            return self._rows.page_map()

    def page_uses(self) -> npt.NDArray[np.int64]:
        """By page number: how many sequences each physical page has served and left."""
        with self._lock:
            return np.array(self._pool.uses, np.int64)

    def check(self) -> None:
        """Checks every invariant of the books; raises `InvariantError` where one is broken."""
        with self._lock:
            self._check_usable()
            self._free_abandoned()
            check_invariants(self._rows)

    # ------------------------------------------------------------------ use and misuse

    def _check_usable(self) -> None:
        if self._unusable:
            raise self._unusable()

    def _check_live(self, sequence: Sequence) -> int:
        """The row of a live sequence of this cache."""
        self._check_usable()
        if sequence._cache is not self:
            raise ValueError(f"{sequence!r} belongs to another cache")
        if sequence._row < 0:
            raise UseAfterFreeError(f"sequence {sequence.number} was freed; start a new one with cache.sequence()")
        return sequence._row

    def _after_fork(self) -> None:
        """In a forked child: the memory is the parent's, and a GPU cannot be used at all."""
        self._lock = threading.RLock()
        self._rows.capacity[:] = -1
        self._unusable = functools.partial(
            ForkError,
            "this KVCache was made before fork(); its memory belongs to the parent. Make a new one in the child, "
            "or start processes with the 'spawn' method",
        )

    def __repr__(self) -> str:
        if self._unusable:
            return "<vmmkv.KVCache: gone>"
        stats = self.stats()
        return (
            f"<vmmkv.KVCache on {self.device}: {stats.rows['live']} sequences, {stats.tokens} tokens, "
            f"{stats.physical_bytes / 2**20:.0f} of {stats.budget_bytes / 2**20:.0f} MiB>"
        )

    def _repr_html_(self) -> str:
        """What Jupyter shows: the page map."""
        with self._lock:
            return html.escape(repr(self)) if self._unusable else draw_cache(self._rows, self.stats())


def _whole_numbers(
    tokens: int | Collection[int] | npt.NDArray[np.integer[Any]], count: int
) -> int | npt.NDArray[np.int64]:
    """One number, or an array of `count`."""
    if isinstance(tokens, int):
        return tokens
    numbers = np.asarray(tokens)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise TypeError(f"got tokens {tokens!r}; they must be whole numbers")
    if numbers.shape not in ((), (count,)):
        raise ValueError(f"got tokens of shape {numbers.shape} for {count} sequences; give one number or one for each")
    return numbers.astype(np.int64)


def _check_tokens(tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"asked for {tokens} tokens; to drop tokens use truncate")


_caches: weakref.WeakSet[KVCache] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in _caches:
        cache._after_fork()


os.register_at_fork(after_in_child=_after_fork)
