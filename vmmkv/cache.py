"""The cache: one virtual tensor of the maximum shape, backed by memory only where tokens are."""

from __future__ import annotations

import functools
import html
import itertools
import operator
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Set
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .arena import Arena, check_address_space, free_waiting, wait_for_device
from .budget import budget_pages
from .driver import Driver, driver_for
from .errors import (
    ArgumentError,
    BusyError,
    DeviceError,
    ForkError,
    InterruptedChangeError,
    LayoutError,
    StreamCaptureError,
    UseAfterFreeError,
    VmmkvError,
)
from .fence import check_stream
from .invariants import check_invariants
from .layout import KVLayout, shown, whole_number
from .pages import PagePool
from .picture import draw_cache, draw_sequence
from .rows import NOBODY, Rows
from .sequence import Sequence, check_length
from .stats import CacheStats, CallStats
from .tensors import export_range, kv_views

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


OWN_ERRORS = VmmkvError, ValueError, TypeError
"""What methods raise themselves, with the books as before."""


def _was_interrupted(error: BaseException, outside: BaseException | None) -> bool:
    """Whether an error came while another was handled that is none of our own; `outside` was there before."""
    context = error.__context__
    return (
        context is not outside
        and context is not None
        and (not isinstance(context, OWN_ERRORS) or _was_interrupted(context, outside))
    )


def _operation(
    method: Callable[Concatenate[KVCache, Parameters], Result],
) -> Callable[Concatenate[KVCache, Parameters], Result]:
    """Makes a method one operation: no other runs meanwhile, in whatever thread, and none sees what an interrupted one
    has left.

    Both locks are given back by the interpreter itself, which an interruption cannot prevent. `_is_dirty` is what tells
    of one: it stays set unless the method has ended, with a result or with an error of its own.
    """

    def attempt(cache: KVCache, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        outside = sys.exception()
        try:
            result = method(cache, *args, **kwargs)
        except OWN_ERRORS as error:
            cache._is_dirty = _was_interrupted(error, outside)
            raise
        cache._is_dirty = False
        return result

    @functools.wraps(method)
    def run(cache: KVCache, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with cache._lock:
            if cache._inside.locked():
                raise BusyError(
                    f"{method.__name__.strip('_')} was called in the middle of another operation of this thread on the "
                    "same cache, as by a finalizer or a signal handler. Leave a note there and call it later"
                )
            with cache._inside:
                if cache._is_dirty:
                    cache._recover()
                cache._check_usable()
                cache._is_dirty = True
                return attempt(cache, *args, **kwargs)

    return run


class KVCache:
    """K and V of many sequences, each in one contiguous row of virtual memory.

    All methods may be called from several threads; a single sequence from one at a time. Whoever is interrupted
    (Ctrl-C) in the middle of one finds the cache as before it or after, or, where nobody knows whether the driver has
    made or released a page, unusable (`InterruptedChangeError`). A finalizer, or a signal handler, that runs in the
    middle of an operation may free sequences; everything else is refused (`BusyError`).

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
        if not isinstance(layout, KVLayout):
            raise ArgumentError(f"got layout={layout!r}; it must be a vmmkv.KVLayout")
        max_sequences = whole_number("max_sequences", max_sequences)
        max_seq_len = whole_number("max_seq_len", max_seq_len)
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
        self._driver = driver_for(driver, device, page_size)
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
        self._abandoned: deque[weakref.KeyedRef[tuple[int, int], Sequence]] = deque()
        """Rows, and the numbers of their sequences, that were left behind without `free`."""
        self._references: list[weakref.KeyedRef[tuple[int, int], Sequence] | None] = [None] * max_sequences
        """By row: what moves to `_abandoned` when the row's sequence is collected. That may be at any moment, in any
        thread, so it takes no Python code, which could be interrupted."""
        self._numbers = itertools.count()
        self._lock, self._inside = threading.RLock(), threading.Lock()
        self._is_dirty = False
        """An operation has begun and not ended; also when no other may begin."""
        self._is_open = True
        """The memory is ours to give back."""
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
        for count in (tokens, expected_tokens):
            check_length(_check_tokens(count), self.max_seq_len)
        return self._sequence(tokens, expected_tokens)

    @_operation
    def _sequence(self, tokens: int, expected_tokens: int) -> Sequence:
        self._free_abandoned()
        row, number = self._rows.pick(max(tokens, expected_tokens)), next(self._numbers)
        sequence = Sequence(self, number, row)
        self._references[row] = weakref.KeyedRef(sequence, self._abandoned.append, (row, number))
        self._rows.take(row, number, tokens, expected_tokens)  # from here on somebody will free it
        return sequence

    def extend(
        self,
        sequences: Iterable[Sequence],
        tokens: int | Collection[int] | npt.NDArray[np.integer[Any]],
        *,
        starts: Collection[int] | None = None,
    ) -> None:
        """Makes room for more tokens in many sequences: all of them or none.

        Args:
            sequences: live sequences of this cache, each once.
            tokens: how many more, one number for all or one per sequence.
            starts: of sequences without tokens, the first one that will be read: no page is mapped in front of it.
                Afterwards they are as if `release_before(start)` had followed.

        Raises:
            SequenceTooLongError, OutOfPagesError, DriverError, StreamCaptureError, UseAfterFreeError: as in
                `Sequence.extend`; no sequence has changed then.
            TypeError: something is no sequence, or no whole number.
            ValueError: a sequence is of another cache or named twice, a number is negative, or there are not as many
                numbers as sequences; with `starts`, a sequence holds tokens, or would begin behind its end.
        """
        batch = self._batch(sequences)
        counts = _whole_numbers("tokens", tokens, len(batch), self.max_seq_len)
        if starts is not None:
            self._extend_from(batch, counts, _whole_numbers("starts", starts, len(batch), self.max_seq_len))
            return
        with self._lock:
            if not self._is_dirty and not self._inside.locked():
                with self._inside:
                    within = self._grow_within(batch, counts)
                if within:
                    return
        self._extend(batch, counts)

    def _grow_within(self, batch: list[Sequence], counts: npt.NDArray[np.int64]) -> bool:
        """Writes down new lengths, if none needs a page and all sequences are alive."""
        rows = self._rows
        index = np.array([sequence._row for sequence in batch], np.int64)
        lengths = rows.length[index] + counts
        alive = rows.owner[index] == [sequence._number for sequence in batch]
        within = bool(((lengths <= rows.capacity[index]) & alive).all())
        if within:
            rows.length[index] = lengths
        return within

    @_operation
    def _extend(self, batch: list[Sequence], counts: npt.NDArray[np.int64]) -> None:
        self._free_abandoned()
        index = np.array([self._check_live(sequence) for sequence in batch], np.int64)
        lengths = self._rows.length[index] + counts
        check_length(int(lengths.max(initial=0)), self.max_seq_len)
        self._rows.grow(index, lengths)

    @_operation
    def _extend_from(self, batch: list[Sequence], counts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
        self._free_abandoned()
        index = np.array([self._check_live(sequence) for sequence in batch], np.int64)
        if self._rows.length[index].any() or (starts > counts).any():
            raise ValueError(
                f"asked for starts={starts.tolist()} of tokens={counts.tolist()}; they are for sequences without "
                "tokens, and none is behind its sequence's end. Others have release_before"
            )
        self._rows.grow(index, counts, starts)

    def _extend_one(self, sequence: Sequence, tokens: int) -> None:
        """`Sequence.extend`: the same for one, without arrays."""
        tokens = _check_tokens(tokens)
        row, rows = sequence._row, self._rows
        with self._lock:  # in which nothing is called: no signal handler comes between
            length = rows.length_of[row] + tokens
            if length <= rows.capacity_of[row] and rows.owner_of[row] == sequence._number and not self._is_dirty:
                rows.length_of[row] = length
                return
        self._grow_one(sequence, tokens)

    @_operation
    def _grow_one(self, sequence: Sequence, tokens: int) -> None:
        self._free_abandoned()
        row = self._check_live(sequence)
        length = self._rows.length_of[row] + tokens
        check_length(length, self.max_seq_len)
        self._rows.grow_one(row, length)

    def _batch(self, sequences: Iterable[Sequence], repeated: bool = False) -> list[Sequence]:
        """Sequences of this cache, each once; whether they may be `repeated`."""
        if isinstance(sequences, Sequence):
            raise TypeError(f"got {sequences!r}; give a list of sequences, or call the sequence's own method")
        try:
            each = iter(sequences)
        except TypeError:
            raise TypeError(f"got {sequences!r}; give a list of sequences") from None
        batch = list(each)
        with suppress(AttributeError):  # one look at each, where nothing is wrong
            if len({sequence for sequence in batch if sequence._cache is self}) == len(batch):
                return batch
        for sequence in batch:
            if not isinstance(sequence, Sequence):
                raise TypeError(f"got {sequence!r} among the sequences; they are what KVCache.sequence() returns")
            if sequence._cache is not self:
                raise ValueError(f"{sequence!r} belongs to another cache")
        if repeated:
            return list(dict.fromkeys(batch))
        raise ValueError("a sequence is named twice in one extend; add its tokens up instead")

    @_operation
    def _truncate(self, sequence: Sequence, tokens: int) -> None:
        row, start, _ = self._extent_of(sequence, tokens)
        self._rows.shrink(row, start, tokens)

    @_operation
    def _release_before(self, sequence: Sequence, token: int) -> None:
        row, _, length = self._extent_of(sequence, token)
        self._rows.shrink(row, token, length)

    def _extent_of(self, sequence: Sequence, token: int) -> tuple[int, int, int]:
        """Row, start and length of a sequence that holds `token`, or ends with it."""
        row = self._check_live(sequence)
        start, length = self._rows.start_of[row], self._rows.length_of[row]
        if not start <= token <= length:
            raise ValueError(f"asked for token {shown(token)}; {sequence!r} holds tokens {start} to {length}")
        return row, start, length

    @_operation
    def _record_stream(self, sequence: Sequence, stream: torch.cuda.Stream) -> None:
        row = self._check_live(sequence)
        check_stream(stream)
        if stream.device != self.device:
            raise DeviceError(f"got a stream on {stream.device}; this cache is on {self.device}")
        self._rows.record_stream(row, stream)

    def free(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences; one fence serves all of them. Those that are free already are passed over.

        In the middle of another operation of the same thread (in a finalizer, say) it is done later: by the next one.

        Raises:
            StreamCaptureError: a CUDA graph is being captured, on the current stream or on one that the sequences were
                used on; nothing was freed.
            ValueError: a sequence is of another cache; nothing was freed.
        """
        batch = self._batch(sequences, repeated=True)
        with self._lock:
            if self._inside.locked():
                references = [self._references[sequence._row] for sequence in batch]
                self._abandoned.extend(reference for reference in references if reference and reference() in batch)
            elif not self._unusable:
                self._free(batch)

    @_operation
    def _free(self, batch: list[Sequence]) -> None:
        self._rows.release((sequence._row, sequence._number) for sequence in batch)

    def _free_abandoned(self) -> None:
        """Frees the rows of sequences that were garbage-collected, and ranges of caches that were, during a capture."""
        free_waiting()
        if not self._abandoned:
            return
        references = list(self._abandoned)
        try:
            self._rows.release(reference.key for reference in references)
        except StreamCaptureError:
            return  # later, then
        for _ in references:
            self._abandoned.popleft()

    # ------------------------------------------------------------------ memory

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer over all rows: the whole virtual tensor.

        Only tokens of live sequences may be touched: an access elsewhere is a fault, which ends the process or the
        GPU's context. With `zero_tail` a live row may be read from its sequence's `start` to the row's end.

        So do not print, compare or copy these as a whole, nor more of a row than it has tokens: `print(kv(0)[0])` ends
        the process. `Sequence.k` and `v` are as long as their sequence. The storage under any of them is all of the
        range: to print it, or read it, ends the process, too. To copy, save or share a view, `clone()` it first.

        Returns:
            K `[max_sequences, max_seq_len, num_kv_heads, head_dim]` and V likewise with its own width;
            strided, zero-copy, at addresses that never change.
        """
        self._check_usable()
        return self._views[layer]

    def range(self, index: int) -> torch.Tensor:
        """A range of the layout, all rows of it: `[elements]`. K and V of its layers are views of this tensor.

        For compilers, which take one tensor that is written in place better than many that share its memory. Not to be
        printed either.
        """
        self._check_usable()
        return self._ranges[index]

    @_operation
    def trim(self) -> int:
        """Gives surplus and free pages back to the system; returns their bytes.

        Waits for GPU work that still uses them.
        """
        self._free_abandoned()
        self._rows.reclaim(self._rows.surplus_pages)
        return self._pool.release_free() * self.page_size

    def close(self) -> None:
        """Ends all sequences and gives all memory back now, after all work on the device.

        The addresses stay reserved while a view lives: to touch one after this is a fault.
        Garbage collection does the same when nobody holds the cache, its sequences or views any more.

        Raises:
            StreamCaptureError: a CUDA graph is being captured; nothing was closed.
            DriverError: the device could not be waited for; nothing was closed.
            BusyError: another operation of this thread is not at its end.
        """
        with self._lock:
            if not self._is_open:
                return
            if self._inside.locked():
                raise BusyError("close was called in the middle of another operation of this thread on the same cache")
            with self._inside:
                wait_for_device(self._driver)
                self._forbid(functools.partial(UseAfterFreeError, "this KVCache was closed; make a new one"))
                self._views, self._ranges = [], []
                for arena, _ in self._rows.ranges:
                    arena.close()
                self._pool.close()
                self._is_open = False

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
        With `zero_tail` pages behind a live sequence are its own.
        """
        return self._available_pages()

    @_operation
    def _available_pages(self) -> int:
        self._free_abandoned()
        return self._rows.available_pages

    @_operation
    def stats(self) -> CacheStats:
        """A snapshot: bytes, tokens, waste, pages and rows by state, reuse, driver calls."""
        return self._stats()

    def _stats(self) -> CacheStats:
        self._free_abandoned()
        rows, pool = self._rows, self._pool
        live = rows.owner != NOBODY
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

    @_operation
    def page_map(self) -> npt.NDArray[np.int64]:
        """What each physical page holds now, by page number: the `Sequence.number` that it belongs to,
        or `FREE_PAGE`, `SURPLUS_PAGE`, `VACANT_PAGE` or `ZERO_PAGE`."""
        self._free_abandoned()
        return self._rows.page_map()

    @_operation
    def page_uses(self) -> npt.NDArray[np.int64]:
        """By page number: how many sequences each physical page has served and left."""
        return np.array(self._pool.uses, np.int64)

    @_operation
    def check(self) -> None:
        """Checks every invariant of the books; raises `InvariantError` where one is broken."""
        self._free_abandoned()
        check_invariants(self._rows)

    # ------------------------------------------------------------------ use and misuse

    def _check_usable(self) -> None:
        if self._unusable:
            raise self._unusable()

    def _check_live(self, sequence: Sequence) -> int:
        """The row of a live sequence of this cache."""
        self._check_usable()
        if self._rows.owner_of[sequence._row] != sequence._number:
            raise UseAfterFreeError(f"sequence {sequence.number} was freed; start a new one with cache.sequence()")
        return sequence._row

    def _recover(self) -> None:
        """After an operation that was interrupted: makes the books right, or says that nobody can."""
        if self._unusable:
            return
        self._unusable = functools.partial(
            InterruptedChangeError,
            "this KVCache was interrupted (Ctrl-C, a signal handler) while it had the driver make, map or release a "
            "page, and cannot know whether that was done. Close it, which gives the memory back, and make a new one",
        )
        if not self._pool.unsettled:
            with suppress(VmmkvError):
                self._rows.recover()
                check_invariants(self._rows)
                self._unusable = None

    def _forbid(self, reason: Callable[[], VmmkvError]) -> None:
        """Ends all use."""
        self._unusable = reason
        self._is_dirty = True

    def _after_fork(self) -> None:
        """In a forked child: the memory is the parent's, and a GPU cannot be used at all."""
        self._lock, self._inside = threading.RLock(), threading.Lock()
        self._is_open = False
        self._forbid(
            functools.partial(
                ForkError,
                "this KVCache was made before fork(); its memory belongs to the parent. Make a new one in the child, "
                "or start processes with the 'spawn' method",
            )
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a KVCache owns its memory and cannot be copied or pickled; make another one of the same layout"
        )

    def __repr__(self) -> str:
        try:
            stats = self.stats()
        except BusyError:
            return "<vmmkv.KVCache: busy>"
        except VmmkvError:
            return "<vmmkv.KVCache: gone>"
        return (
            f"<vmmkv.KVCache on {self.device}: {stats.rows['live']} sequences, {stats.tokens} tokens, "
            f"{stats.physical_bytes / 2**20:.0f} of {stats.budget_bytes / 2**20:.0f} MiB>"
        )

    def _repr_html_(self) -> str:
        """What Jupyter shows: the page map."""
        return html.escape(repr(self)) if self._unusable else self._draw()

    @_operation
    def _draw(self) -> str:
        return draw_cache(self._rows, self._stats())

    @_operation
    def _draw_sequence(self, sequence: Sequence) -> str:
        return draw_sequence(self._rows, self._check_live(sequence))


def _whole_numbers(
    name: str, numbers: int | Collection[int] | npt.NDArray[np.integer[Any]], count: int, limit: int
) -> npt.NDArray[np.int64]:
    """`count` numbers from 0 to `limit`, of as many or of one for all."""
    try:
        given = np.asarray(numbers)
    except ValueError:  # lists of several lengths
        raise ValueError(f"got {name}={numbers!r}; give one number, or one for each of {count} sequences") from None
    if given.dtype.kind not in "iu":  # also numbers of more than 64 bits, and views of dictionaries
        if isinstance(numbers, Set | Mapping) and not isinstance(numbers, KeysView):
            raise TypeError(f"got {name}={numbers!r}; numbers in order are needed: give a list")
        values = numbers.tolist() if isinstance(numbers, np.ndarray) else numbers
        each = list(values) if isinstance(values, Collection) else [values]
        for number in each:
            check_length(_check_tokens(number), limit)
        given = np.array(each if isinstance(values, Collection) else values, np.int64)
    if given.shape not in ((), (count,)):
        raise ValueError(f"got {name} of shape {given.shape} for {count} sequences; give one number or one for each")
    _check_tokens(int(given.min(initial=0)))
    check_length(int(given.max(initial=0)), limit)
    return np.broadcast_to(given, count).astype(np.int64)


def _check_tokens(tokens: int) -> int:
    """A whole number of tokens."""
    try:
        tokens = operator.index(tokens)
    except TypeError:
        raise TypeError(f"got {tokens!r} tokens; they must be a whole number") from None
    if tokens < 0:
        raise ValueError(f"asked for {shown(tokens)} tokens; to drop tokens use truncate")
    return tokens


_caches: weakref.WeakSet[KVCache] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        cache._after_fork()


os.register_at_fork(after_in_child=_after_fork)
