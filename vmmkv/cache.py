"""The cache: one virtual tensor of the maximum shape, backed by memory only where tokens are."""

from __future__ import annotations

import html
import os
import threading
import warnings
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NoReturn, Self
from weakref import proxy

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from . import snapshot
from .arguments import (
    batch_of,
    check_flags,
    check_length,
    check_shape,
    check_tokens,
    ids_of,
    indices_of,
    row_number,
    whole_numbers,
)
from .budget import budget_pages, pages_within, parse_bytes
from .core import entries
from .core.addresses import check_address_space
from .core.check import check
from .core.pool import SLOTS_AT, TICK, Ask
from .core.reordering import reorder
from .core.tables import ROW_BITS, ROW_MASK
from .driver.driver import open_driver
from .driver.fence import Fence
from .errors import ArgumentError, BusyError, LeakWarning, OutOfRowsError, VmmkvError
from .events import Event, EventLog
from .events.log import check_ids
from .events.naming import Name, name_of, told_names
from .layout import KVLayout, shown, whole_number
from .picture import draw_cache
from .pool import FramePool, check_pool_alone
from .prefix.prefixes import Prefixes, tenant_key
from .prefix.retention import check_priority
from .sequence import Sequence, check_reusable
from .stats import CacheStats
from .tier.host_tier import HostTier
from .transfer import receive
from .views import TokenCache

Ints = npt.NDArray[np.integer[Any]]
_making = threading.Lock()
LOOKAHEAD_PAGES = 1
"""Pages of tokens mapped ahead by default, on a GPU. More take pages of parked rows that a new sequence would adopt."""


class KVCache(TokenCache):
    """K and V of many sequences, each in one contiguous row of virtual memory.

    All methods may be called from several threads; a single sequence may be used by one thread at a time. A finalizer,
    or a signal handler, that runs in the middle of an operation may free sequences; what needs a page then raises
    `BusyError`. After `close` all methods raise `UseAfterFreeError`, but for `free`, `close` and `events`. An error
    leaves the cache and its sequences as they were, unless the method says otherwise.

    Args:
        layout: the shape of a token.
        max_sequences: the number of rows: the most sequences that live at a time.
        max_seq_len: tokens of a row. Both take virtual addresses only, 100 TiB in all.
        max_bytes: the budget: bytes, `"20GiB"`, or a share of the memory that is free now, `"80%"` (the
            default) or `0.8`. Memory is allocated as sequences grow, not before.
        max_tokens: the budget in tokens, instead of `max_bytes`: that many always fit, in whatever sequences. (The
            page of each range in which a sequence begins after `release_before` is not counted.)
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        page_size: bytes of a page, a multiple of the smallest that there is (4 KiB of host memory, 2 MiB on today's
            GPUs; `granularity_size` of `vmmkv info`); None is 2 MiB.
        scrub: fill pages with zeros before another sequence can read them; one memset for each growth onto new pages.
        int32_strides: refuse a geometry whose rows are longer than kernels with 32-bit strides can
            address (torch's memory-efficient SDPA; see `KVLayout.int32_token_limit`).
        pool: physical memory shared with other caches, instead of `device` and `page_size`. Without one the
            cache makes one of `max_bytes` for itself. With one, `max_bytes` is the most of it that this cache may have;
            None is all that others do not use.
        reserved: bytes of `pool`, as in `max_bytes`, that this cache can have at any time; shares are of the pool.
            While unused, other caches may use them for parked rows and cached prefixes, never for live tokens.
        lookahead: tokens for which a background thread maps pages behind each sequence's end before it needs them,
            from idle memory. None is one page of tokens on a GPU, and no thread on host memory; 0 is no thread.
        overread: tokens behind each sequence's length that are always mapped, for kernels that read a tile past its
            end. They count as used. Their contents are undefined: a kernel that multiplies them by zero, as
            FlashAttention-3 does, needs finite numbers there (set `scrub` if the pool may have held NaN before).
        large_frames: put prompts, and sequences that are expected to be long, on pieces of 16 pages, which the driver
            makes and maps as fast as one page. Set it to False with sliding windows (`release_before`), where pages in
            front could not be given back one by one. Never used with `max_tokens`, which is exact to the page.
        host_bytes: host memory, pinned where there is a GPU, for suspended sequences and evicted prefixes: bytes,
            `"20GiB"`, or a share of the host's memory. Host memory is allocated on demand.
        host_priority: the lowest priority (`Retention`) of evicted pages that are copied to the host; None copies
            none. TensorRT-LLM's `secondary_offload_min_priority`.
        event_log: records which prefixes can be found, for `events` or an `EventPublisher`: a new
            `vmmkv.events.EventLog`, of this cache alone. None records nothing, and costs nothing. With a log, token ids
            must be from 0 to 2**32 - 1, salts text, and adapters and tenants text or numbers.

    Raises:
        LayoutError: the geometry takes more than 100 TiB of addresses, or, with `int32_strides`, strides beyond 32
            bits; or a number of tokens, sequences or bytes of a page cannot be.
        BudgetError: the budget is no size, below one page, or larger than the device, or both budgets are given; or the
            pool cannot reserve that much.
        DeviceError: there is no such device.
        DriverError: the driver could not reserve the addresses.
        RetentionError: `host_priority` is no priority.
        ArgumentError, ValueError: an argument has the wrong type, or conflicts with another.
    """

    kind = Sequence
    account_name = ""
    """Its name among those on its pool."""
    pool: FramePool
    """The physical memory that it lies on."""
    prefixes: Prefixes | None = None
    """The cached prefixes, once a sequence was started with `token_ids`."""
    event_log: EventLog | None = None
    """What records which prefixes can be found, if anything does."""
    host_tier: HostTier | None = None
    """Host memory for suspended sequences and evicted prefixes, if the cache has any."""

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
        int32_strides: bool = False,
        pool: FramePool | None = None,
        reserved: float | str = 0,
        lookahead: int | None = None,
        overread: int = 0,
        large_frames: bool = True,
        host_bytes: float | str = 0,
        host_priority: int | None = 30,
        event_log: EventLog | None = None,
    ) -> None:
        if event_log is not None and not isinstance(event_log, EventLog):
            raise ArgumentError(f"got event_log={event_log!r}; it must be a vmmkv.events.EventLog")
        if event_log is not None:
            event_log.check_new()
        check_priority(0 if host_priority is None else host_priority, None)
        check_flags(scrub=scrub, int32_strides=int32_strides, large_frames=large_frames)
        max_sequences, max_seq_len = check_shape(layout, max_sequences, max_seq_len, int32_strides)
        overread = whole_number("overread", overread, least=0)
        lookahead = None if lookahead is None else whole_number("lookahead", lookahead, least=0)
        if pool is None and reserved:
            raise ArgumentError(
                f"got reserved={reserved!r} without a pool; a cache by itself has all of max_bytes. Give it the pool "
                "that it shares with others"
            )
        check_pool_alone(pool, device=device, page_size=page_size)
        self.owns_pool = pool is None
        budget = layout, max_sequences, max_bytes, max_tokens, overread
        if pool is None:
            driver = open_driver(device, page_size)
            pool, limit = FramePool(budget_pages(driver, *budget) * driver.page_size, device=driver), None
            pool.is_shared = False
        else:
            limit = None if max_bytes is max_tokens is None else budget_pages(pool, *budget)
        row_bytes = sum((max_seq_len + overread) * record for record in layout.record_bytes)
        check_address_space(row_bytes * max_sequences, f"max_sequences={max_sequences} x max_seq_len={max_seq_len}")
        ahead = LOOKAHEAD_PAGES * pool.page_size if pool.device.type == "cuda" else 0
        self.lookahead = -(-ahead // min(layout.record_bytes)) if lookahead is None else lookahead
        super().__init__(
            pool,
            layout,
            max_sequences,
            max_seq_len,
            limit=limit,
            reserved=pages_within(pool, reserved, name="reserved") if reserved else 0,
            lookahead=self.lookahead,
            overread=overread,
            large=large_frames and max_tokens is None,
            scrub=scrub,
        )
        self.account_name = pool.name(self)
        self.host_tier = None
        if host_bytes:
            nbytes = parse_bytes(host_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            self.host_tier = HostTier(proxy(self), nbytes, host_priority)
        self.prompt_tokens = self.cached_tokens = 0
        """Tokens of sequences that were started for reuse, since the beginning: all of them, and the cached ones."""
        self.event_log = event_log
        if event_log is not None:
            self.prefixes = Prefixes(proxy(self), events=event_log.max_events, tier=self.host_tier)
            event_log.follow(self.prefixes.ring)

    # ------------------------------------------------------------------ sequences

    def sequence(
        self,
        tokens: int = 0,
        *,
        token_ids: npt.ArrayLike | None = None,
        salt: Name = None,
        adapter: Name = None,
        reuse: bool = True,
        whole: bool = True,
        expected_tokens: int = 0,
        tenant: Name = None,
        row: int | None = None,
    ) -> Sequence:
        """Starts a sequence of `tokens` tokens, on a row whose pages are still mapped if there is one; or a sequence of
        given `token_ids`, which begins with cached K and V where earlier sequences have committed them.

        It belongs to the current stream: order work on other streams behind it, and name them with
        `Sequence.record_stream`. Without tokens it takes no memory.

        Args:
            tokens: initial length. The pages are available on return; a parked row of similar size is reused if there
                is one.
            token_ids: instead of `tokens`: the ids of the first tokens, `[tokens]` whole numbers below 2**63; None
                looks nothing up, and then nothing can be committed. The first `Sequence.cached_tokens` of them hold K
                and V already, from earlier calls of `Sequence.commit`. The last token is never among them: the pass
                that computes it gives the next one.
            salt: text, bytes, or a whole number of at most 128 bits; prefixes cached under one salt are never found
                under another. `1` and `"1"` are two salts; `True` and `1.0` are refused.
            adapter: the model's adapter, which K and V depend on; separates prefixes as `salt` does. The same types.
            reuse: False neither uses cached prefixes nor adds to them.
            whole: False: the sequence starts with only the `cached_tokens` found in the cache. Call `extend` before
                each prefill chunk.
            expected_tokens: the total length that it will soon have, if tokens come in chunks: the parked row that fits
                it best is chosen, and pages reserved for it are given to other sequences last. With a lookahead the
                mapper maps them ahead, from idle memory; this call does not wait for that.
            tenant: the user that the sequence belongs to. Bytes written by one tenant's sequences can never be read
                from the rows of another: rows are not adopted across tenants, and pages are filled in between. None is
                a tenant like any other: text, bytes, or a whole number of at most 128 bits.
            row: use this row index, e.g. to keep a batch in adjacent rows; None picks one.

        Raises:
            ArgumentError, ValueError: an argument has the wrong type, is negative, or conflicts with another.
            ShapeError, DtypeError: `token_ids` are no one-dimensional array of whole numbers.
            UnsupportedError: `token_ids` with scales of whole sequences.
            StreamCaptureError: a CUDA graph is being captured, and pages have to be filled or copied.
            OutOfRowsError: `max_sequences` sequences are alive, or the row belongs to a live one.
            OutOfRangeError: there is no such row.
            SequenceTooLongError, OutOfPagesError, DriverError: as in `Sequence.extend`.
        """
        if row is not None:
            row = row_number(row, self.max_sequences)
        check_flags(reuse=reuse, whole=whole)
        if self.scales:
            self.scales.check_not_captured()
        tokens, expected = check_tokens(tokens), check_tokens(expected_tokens, "expected_tokens")
        if token_ids is not None:
            ids, names = ids_of(token_ids), names_of(salt, adapter, tenant)
            check_reusable(self.layout)
            if tokens or row is not None:
                raise ArgumentError(f"got tokens={tokens}, row={row} and token_ids; give token_ids alone")
            tokens = len(ids)
            if reuse:
                check_length(max(tokens, expected), self.max_seq_len)
                return self._reusing(ids, names, whole, expected)
            tokens = tokens if whole else 0
        elif not whole:
            raise ArgumentError("got whole=False without token_ids; extend() a sequence that begins without tokens")
        elif salt is not None or adapter is not None:
            name, value = ("adapter", adapter) if salt is None else ("salt", salt)
            raise ArgumentError(f"got {name}={value!r} without token_ids; it keeps apart what is cached of these")
        check_length(max(tokens, expected), self.max_seq_len)
        return self._begun(self.start(tokens, expected=expected, key=tenant_key(tenant), row=row))

    def _reusing(self, ids: Ints, names: tuple[Name, Name, Name], whole: bool, expected: int) -> Sequence:
        """Starts a sequence that begins with the cached tokens of these ids."""
        if self.event_log is not None:
            check_ids(ids)
            told_names(*names)
        if self.prefixes is None:
            with _making:
                self.prefixes = self.prefixes or Prefixes(proxy(self), tier=self.host_tier)
        key = self.prefixes.names.get(names) or self.prefixes.key(*names)
        with self.pool.nvtx("vmmkv: prefix hit"):
            found, cached = self.prefixes.start(ids, key, whole=whole, expected=expected)
        sequence = self._begun(found)
        sequence.cached_tokens = cached
        for each in (self, self.pool):
            each.prompt_tokens += len(ids)
            each.cached_tokens += cached
        return sequence

    def shared_pages(
        self,
        token_ids: npt.ArrayLike,
        *,
        salt: Name = None,
        adapter: Name = None,
        expected_tokens: int = 0,
        tenant: Name = None,
    ) -> int:
        """The number of pages that a sequence of these tokens would share with live ones if it began now: it takes that
        many fewer of `available_pages`. Arguments and their errors are as in `sequence`."""
        self.check_usable()
        check_length(check_tokens(expected_tokens, "expected_tokens"), self.max_seq_len)
        ids, names = ids_of(token_ids), names_of(salt, adapter, tenant)
        return self.prefixes.shared_pages(ids, self.prefixes.key(*names)) if self.prefixes else 0

    def tier(self) -> HostTier:
        """The host tier, which holds suspended sequences. Raises `ArgumentError` if the cache has none."""
        if self.host_tier is None:
            raise ArgumentError("asked to suspend a sequence of a cache without a host tier; make it with host_bytes")
        return self.host_tier

    def _begun(self, sequence: Any) -> Sequence:
        """Gives a new sequence scales of its own."""
        if self.scales:
            try:
                self.scales.reset(sequence.row)
            except BaseException:
                super().free((sequence,))
                raise
        return sequence  # type: ignore[no-any-return]

    def fork_many(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Starts sequences that begin with all tokens of another: see `Sequence.fork`. All of them or none.

        Args:
            sequence: a live sequence of this cache.
            count: how many to start, 0 or more.

        Raises:
            OutOfRowsError: there are fewer rows left than that.
            TypeError, ValueError: it is no sequence of this cache, or no such number; and what `Sequence.fork` raises.
        """
        (parent,) = batch_of(self, [sequence])
        left = self.max_sequences - int(self.state[0]["live"])
        if check_tokens(count, "count") > left:
            raise OutOfRowsError(f"asked for {count} sequences; {left} of max_sequences={self.max_sequences} are left")
        children: list[Any] = []
        if self.scales:
            self.scales.check_not_captured()
        try:
            with self.pool.nvtx("vmmkv: fork"):
                for _ in range(count):
                    children.append(self._begun(self.share(parent, parent.length)))
                    if self.prefixes:
                        self.prefixes.inherit(children[-1], parent)
                if self.scales:
                    self.scales.copy({child.row: parent.row for child in children})
        except BaseException:
            with suppress(VmmkvError):  # else they are freed when they are collected
                super().free(children)
            raise
        return children

    def receive(
        self,
        rank: int,
        *,
        group: dist.ProcessGroup | None = None,
        expected_tokens: int = 0,
        tenant: Name = None,
        reuse: bool = True,
    ) -> Sequence:
        """Receives a sequence that another process sends with `Sequence.send`. The host waits for that process.

        Both caches must have the same layout; their pages may differ in size. The new sequence belongs to the current
        stream: with NCCL its tokens arrive in the order of that stream, with gloo before this returns.

        Token ids that the sender has committed are committed here, under the same salt and adapter. Tokens that are
        cached here already (`Sequence.cached_tokens`) are not sent again.

        Args:
            rank: the sender's rank in the default group.
            group: a group that both processes are in; None is the default one.
            expected_tokens: the total length that it will soon have: see `sequence`.
            tenant: who the new sequence belongs to: see `sequence`.
            reuse: False neither uses cached prefixes nor adds to them.

        Raises:
            ArgumentError: there is no such process or group; or the cache has an event log, which cannot express the
                sender's ids, salt or adapter.
            LayoutError: the sequence is of another layout.
            SequenceTooLongError, OutOfRowsError, OutOfPagesError, DriverError: as in `sequence`. In all these cases the
                sender gets `TransferRefusedError`, and both processes can go on.
            TransferError: the sender is gone, does not send within the group's timeout, or sends something else.
            StreamCaptureError: a CUDA graph is being captured.
        """
        check_flags(reuse=reuse)
        return receive(self, rank, group, expected_tokens, name_of("tenant", tenant), reuse)

    def order_behind(self, sequence: Sequence) -> None:
        """Has the current stream wait for all work on a sequence so far."""
        ask = Ask()
        code = entries.fence(self.address, sequence.ticket, ask.address)
        if code < 0:
            raise self.error(code, ask)
        fence = Fence(self.pool.driver, ask.words[SLOTS_AT], ask.words[TICK])
        fence.order(self.pool.driver.current_stream())

    def known(self, sequence: Sequence) -> tuple[tuple[Name, Name] | None, Ints]:
        """Salt and adapter that a sequence's tokens may be cached under, if any, and the ids that were committed."""
        return self.prefixes.known(sequence) if self.prefixes else (None, np.empty(0, np.int64))

    def reorder(self, sequences: Iterable[Sequence], indices: Iterable[int]) -> None:
        """Gives sequence i the tokens of sequence `indices[i]`, as in beam search: rows and their addresses stay. All
        sequences change or none.

        Pages that two rows share already are neither copied nor mapped, so forked beams copy only what lies behind the
        fork. A sequence without tokens becomes a fork. Pages that other sequences share are never written to: a
        sequence that has to write there gets pages of its own first.

        It is done in the order of the current stream, behind all work on the sequences so far; later work on their own
        streams, and on those named with `record_stream`, waits for it.

        Args:
            sequences: live sequences of this cache, each once.
            indices: one index into `sequences` for each of them; an index may be repeated.

        Raises:
            OutOfPagesError: there is no memory for sequences that become longer, or for copies of shared pages.
            DriverOutOfMemoryError: there is no memory beside the cache for the up to 32 MiB that a circle needs.
            DriverError: a driver call failed: before anything changed; or later, and then the sequences that were to
                change have ended, and all others are as before.
            UnsupportedError: in a circle one has given back its front (`release_before`) where another begins; or
                tokens would come to another tenant. As after other errors, sequences of a circle may have copies of
                what they shared.
            StreamCaptureError: a CUDA graph is being captured.
            TypeError, ValueError, OutOfRangeError: these are not sequences of this cache, or one is named twice; or the
                indices are not one for each sequence, and of these.
        """
        batch = batch_of(self, sequences)
        chosen = indices_of(indices, len(batch))
        with self.pool.nvtx("vmmkv: reorder"):
            reorder(self, batch, chosen)
            if self.scales:
                self._reorder_scales({each: batch[index] for each, index in zip(batch, chosen)})
        if self.prefixes:
            self.prefixes.reordered(batch, [batch[index] for index in chosen])

    def _reorder_scales(self, moves: dict[Any, Any]) -> None:
        """Copies the scales of the tokens that sequences have taken over. The streams of these sequences wait for the
        copies. If a call fails, ends the sequences that were to change: they would have wrong scales."""
        assert self.scales is not None
        try:
            self.scales.copy({each.row: other.row for each, other in moves.items()})
            driver = self.pool.driver
            fence = Fence.after(driver, [driver.current_stream()])
            slots = int(np.bitwise_or.reduce([self.rows["streams"][each.row] for each in moves]))
            for slot in range(slots.bit_length()):
                if slots >> slot & 1:
                    fence.order(driver.slot_streams[slot])
        except BaseException:
            with suppress(VmmkvError):
                self.free([each for each, other in moves.items() if each is not other])
            raise

    def unshare(self, sequences: Iterable[Sequence], start: int = 0) -> None:
        """Makes tokens from `start` on safe to write over: pages shared with other sequences are copied, and these
        sequences no longer count as holding committed tokens there. `extend` does this itself for the tokens that it
        makes room for.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: as in `Sequence.extend`. All sequences hold their tokens
                as before: some perhaps in copies, and some no longer as committed ones.
            TypeError, ValueError: these are not sequences of this cache, or one is named twice; or `start` is not a
                whole number, or lies behind a sequence's end.
        """
        batch, start = batch_of(self, sequences), check_tokens(start, "start")
        for sequence in batch:
            if start > sequence.length:
                raise ValueError(f"asked for tokens from {shown(start)} on; {sequence!r} is shorter")
        for sequence in batch:
            self.part(sequence.ticket, start)

    def extend(  # type: ignore[override]
        self,
        sequences: Iterable[Sequence],
        tokens: int | Collection[int] | npt.NDArray[np.integer[Any]],
        *,
        starts: Collection[int] | None = None,
    ) -> None:
        """Makes room for more tokens in many sequences: all of them or none. `batch()` makes a handle for sequences
        that grow together step by step.

        Args:
            sequences: live sequences of this cache, each once.
            tokens: tokens to add, one number for all or one per sequence.
            starts: for sequences without tokens, the first token that will be read: no page is mapped in front of it.
                Afterwards they are as if `release_before(start)` had followed.

        Raises:
            SequenceTooLongError, OutOfPagesError, DriverError, StreamCaptureError, BusyError: as in `Sequence.extend`.
            TypeError, ValueError: something is not a sequence of this cache, or is named twice; or not a number for
                each sequence, from 0 on; with `starts`, a sequence holds tokens, or would begin behind its end.
        """
        batch = batch_of(self, sequences)
        counts = tokens if type(tokens) is int else whole_numbers("tokens", tokens, len(batch), self.max_seq_len)
        begins = None if starts is None else whole_numbers("starts", starts, len(batch), self.max_seq_len)
        if begins is not None and (any(each.length for each in batch) or (begins > counts).any()):
            raise ValueError(
                f"asked for starts={begins.tolist()} of tokens={tokens}; they are for sequences without tokens, and "
                "none is behind its sequence's end. Others have release_before"
            )
        super().extend(batch, counts, starts=begins)

    def grow(
        self, tickets: int, count: int, each: int, counts: array[int] | None = None, starts: array[int] | None = None
    ) -> None:
        """`extend` where pages may have to be mapped."""
        with self.pool.nvtx("vmmkv: growth"):
            super().grow(tickets, count, each, counts, starts)

    def free(self, sequences: Iterable[Sequence]) -> None:  # type: ignore[override]
        """Ends sequences; one fence serves all of them. Sequences that were freed already are ignored.

        Raises:
            StreamCaptureError: a CUDA graph is being captured, on the current stream or on one that the sequences were
                used on; nothing was freed.
            TypeError, ValueError: something is not a sequence, or belongs to another cache; nothing was freed.
        """
        ended = batch_of(self, sequences, repeated=True)
        if not self.pool.word("dead"):  # in a forked child they are the parent's
            super().free(ended)

    # ------------------------------------------------------------------ memory

    def trim(self) -> int:
        """Gives surplus, cached prefixes and free pages back to the system, also those that others on the pool have
        left free; returns the number of bytes. Waits for GPU work that still uses them.

        Raises:
            DriverError: a page could not be released; what went before it is gone, and the rest can be trimmed again.
        """
        self.check_usable()
        if self.prefixes:
            self.prefixes.evict(self.pool.most)
        return self.trim_own() * self.page_size

    def close(self) -> None:
        """Ends all sequences and gives all memory back now, after all work on the device. The addresses stay reserved
        while a view lives: to touch one after this is a fault. Garbage collection does the same when nothing holds the
        cache, its sequences or views any more.

        Raises:
            StreamCaptureError, DriverError: a CUDA graph is being captured, or the device could not be waited for.
            BusyError: another operation of this thread is not at its end.
        """
        if not self.is_open or self.pool.word("dead"):
            return
        live = self._live() if self.pool.is_debugged else {}
        super().close()
        if self.prefixes:
            self.prefixes.close()
        if self.event_log is not None:
            self.event_log.close()
        self.is_open = False
        self.pool.holders.pop(self.account_name, None)
        self.drop_views()
        if self.owns_pool:
            self.pool.end()
        for sequence, told in live.items():
            warnings.warn(f"a KVCache was closed with {told}", LeakWarning, stacklevel=2, source=sequence)

    def _live(self) -> dict[Any, str]:
        held = [sequence for watch in [*self.watches] if (sequence := watch()) is not None]
        return {each: repr(each) for each in held if self.owners[each.ticket & ROW_MASK] == each.ticket >> ROW_BITS > 0}

    def events(self, timeout: float | None = 0.0, *, most: int | None = None) -> list[Event]:
        """Takes events of the cached prefixes from `event_log`. Arguments and errors are those of `EventLog.events`;
        and `ArgumentError` if the cache was made without `event_log`."""
        if self.event_log is None:
            raise ArgumentError("asked for the events of a cache that records none; make it with event_log")
        return self.event_log.events(timeout, most=most)

    # ------------------------------------------------------------------ accounting

    @property
    def available_pages(self) -> int:
        """Pages of the budget that live tokens can be given: all that no cache uses or has reserved."""
        self._settle()
        account = self.pool.accounts[self.account]
        used, committed = int(account["used"]), max(int(account["used"]), int(account["reserved"]))
        others = self.pool.word("committed") - committed
        return max(min(int(account["limit"]), self.pool.attainable_pages - others) - used, 0)

    def _settle(self) -> None:
        """Frees what was collected, and closes what could not be closed before."""
        self.check_usable()
        if self.dead:
            self.sweep()
        if self.pool.unclosed:
            self.pool.close_again()

    def mapped_pages(self) -> int:
        """Pages that are mapped for it, each counted once."""
        return snapshot.counts(self)["mapped"]

    def stats(self) -> CacheStats:
        """A snapshot: bytes, tokens, waste, pages and rows by state, reuse, driver calls."""
        self._settle()
        if self.host_tier:
            self.host_tier.refresh()
        return snapshot.stats(self)

    def page_map(self) -> npt.NDArray[np.int64]:
        """By physical page number, the owner of each page now, int64 `[pages]`: a `Sequence.number`, or one of the page
        states, such as `FREE_PAGE`. A large frame belongs to a sequence as a whole, as soon as one of its tokens lies
        in it."""
        self.check_usable()
        with self.pool.lock:
            return snapshot.page_map(self)

    def check(self) -> None:
        """Checks every invariant of the books; raises `InvariantError` if one is broken."""
        self._settle()
        if self.pool.word("pending"):  # an interruption has left it: the next plan books it
            self.pool.limit_to(self.pool.word("budget"))
        with self.pool.lock:  # guests alone know how often they hold a frame
            held = Counter(dict(enumerate(self.pool.frames["held"][: self.pool.word("fresh")].tolist())))
            held[self.pool.word("staged") - 1] -= 1  # by the pool itself
            check(self.pool, [other for other in self.pool.members if not other.is_closed], held)

    # ------------------------------------------------------------------ use and misuse

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """What Jupyter shows: which pages each row and sequence has."""
        try:
            return draw_cache(self)
        except VmmkvError:
            return html.escape(repr(self))


def names_of(salt: Name, adapter: Name, tenant: Name) -> tuple[Name, Name, Name]:
    """Names as plain values. Raises `ArgumentError` for what is none."""
    return name_of("salt", salt), name_of("adapter", adapter), name_of("tenant", tenant)
