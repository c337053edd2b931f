"""The cache: one virtual tensor of the maximum shape, backed by memory only where tokens are."""

from __future__ import annotations

import html
import os
import warnings
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from .arguments import (
    batch_of,
    check_flags,
    check_guarantee,
    check_priority,
    check_shape,
    indices_of,
    lookahead_tokens,
    not_negative,
    one_of,
    row_number,
    whole_numbers,
)
from .core.addresses import check_address_space
from .driver.driver import Driver, open_driver
from .driver.fence import Fence
from .errors import (
    ArgumentError,
    BusyError,
    DriverError,
    LeakWarning,
    UnsupportedError,
    VmmkvError,
)
from .events import Event, EventLog
from .events.log import check_ids
from .events.naming import Name, name_of, told_names
from .invariants import check_pool, check_rows, watch
from .layout import KVLayout, shown
from .memory.accounts import Account
from .memory.budget import budget_pages, pages_within
from .memory.monitor import Steps, bookkeeping, is_own, operation, stepwise
from .memory.owner import Owner, check_pool_alone, owners
from .memory.pool import FramePool
from .picture import draw_cache
from .reuse.host_tier import HostTier
from .reuse.node import Ids
from .reuse.prefixes import Prefixes, ids_of
from .reuse.states import messages_of
from .reuse.telling import Key, check_log
from .reuse.transfer import Head, Peer
from .rows.books import Rules
from .rows.rows import Rows
from .rows.scales import SequenceScales
from .sequence import Sequence, check_length, check_reusable, check_tokens
from .snapshot import mapped_ranges, snapshot
from .space.mapper import Mapper
from .starting import Found, Starting
from .stats import CacheStats, MappedRange
from .tensors import ScaledKV, export_range, kv_views, repeated_scales, scale_views

Ints = npt.NDArray[np.int64]


class KVCache(Owner):
    """K and V of many sequences, each in one contiguous row of virtual memory.

    All methods may be called from several threads; a single sequence may be used by one thread at a time. An
    interruption (Ctrl-C) in the middle of a method leaves the cache as it was before or after the call, or unusable
    (`InterruptedChangeError`) if it is unknown whether the driver has made or released a page. A finalizer, or a signal
    handler, that runs in the middle of an operation may free sequences. All other calls raise `BusyError`, except calls
    that need no page while a driver call is in progress; other threads do not wait for that driver call either. After
    `close` all methods raise `UseAfterFreeError`, but for `free`, `close` and `events`.

    Args:
        layout: the shape of a token.
        max_sequences: the number of rows: the most sequences that live at a time.
        max_seq_len: tokens of a row. Both take virtual addresses only, 100 TiB in all.
        max_bytes: the budget: bytes, `"20GiB"`, or a share of the memory that is free now, `"80%"` (the
            default) or `0.8`. Memory is allocated as sequences grow, not before.
        max_tokens: the budget in tokens, instead of `max_bytes`: that many always fit, in whatever sequences. (Two
            things are not counted: the page of each range in which a sequence begins after `release_before`, and the
            pages that a truncated sequence keeps with `zero_tail`.)
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        page_size: bytes of a page, a multiple of the smallest that there is (4 KiB of host memory, 2 MiB on today's
            GPUs; `granularity_size` of `vmmkv info`); None is 2 MiB.
        scrub: zero pages before another sequence can read them; one memset per extension onto new pages.
        zero_tail: let kernels read a live row that holds tokens to its very end, as stock attention under a mask
            does: one read-only page of zeros is mapped wherever the row has no page, and pages of another sequence are
            zeroed before (it implies `scrub`). Only pages given back by `release_before` still fault. It is slower:
            a row's tail costs driver calls for each of its pages once, and growing onto a page, or taking one
            from a live row, waits for the GPU; neither can be done in a stream capture. Streams that read a
            row must be named with `Sequence.record_stream`, even if a mask hides the tokens that they read.
        int32_strides: refuse a geometry whose rows are longer than kernels with 32-bit strides can
            address (torch's memory-efficient SDPA; see `KVLayout.int32_token_limit`).
        pool: physical memory shared with other caches, instead of `device` and `page_size`. Without one the
            cache makes one of `max_bytes` for itself. With one, `max_bytes` is the most of it that this cache may have;
            None is all that others do not use.
        guaranteed: bytes of `pool`, as in `max_bytes`, that this cache can have at any time; shares are of the pool.
            While unused, other caches may use them for parked rows and cached prefixes, never for live tokens.
        lookahead: tokens for which a background thread maps pages behind each sequence's end before it needs them,
            from idle memory. None is four pages of tokens on a GPU, and no thread on host memory; 0 is no thread. Not
            with `zero_tail`.
        overread: tokens behind each sequence's length that are always mapped, for kernels that read a tile past its
            end. They count as used. Their contents are undefined: a kernel that multiplies them by zero, as
            FlashAttention-3 does, needs finite numbers there (set `scrub` if the pool may have held NaN before).
        large_frames: put prompts, and sequences that are expected to be long, on pieces of 16 pages, which the driver
            makes and maps as fast as one page. Set it to False with sliding windows (`release_before`), where pages in
            front could not be given back one by one. Never used with `zero_tail` or `max_tokens`, which are exact to
            the page.
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
            pool cannot guarantee that much.
        DeviceError: there is no such device.
        DriverError, StreamCaptureError: the driver could not reserve the addresses; or a page of zeros, or scales of
            whole sequences, could not be made, for example while a CUDA graph is captured.
        ArgumentError, ValueError: an argument has the wrong type, or conflicts with another.
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
        pool: FramePool | None = None,
        guaranteed: float | str = 0,
        lookahead: int | None = None,
        overread: int = 0,
        large_frames: bool = True,
        host_bytes: float | str = 0,
        host_priority: int | None = 30,
        event_log: EventLog | None = None,
    ) -> None:
        if event_log is not None:
            check_log(event_log)
        check_priority(host_priority)
        check_flags(scrub=scrub, zero_tail=zero_tail, int32_strides=int32_strides, large_frames=large_frames)
        max_sequences, max_seq_len = check_shape(layout, max_sequences, max_seq_len, int32_strides)
        check_pool_alone(pool, device=device, page_size=page_size)
        check_guarantee(guaranteed, pool)
        self.layout = layout
        self.max_sequences = max_sequences
        self.max_seq_len = max_seq_len
        overread = not_negative("overread", overread)
        owns_pool = pool is None
        memory = open_driver(device, page_size) if pool is None else pool
        pool, limit = self._pool_on(memory, max_bytes, max_tokens, zero_tail, overread)
        super().__init__(pool, owns_pool)
        rules = Rules(
            max_seq_len,
            scrub=scrub,
            zero_tail=zero_tail,
            lookahead=lookahead_tokens(lookahead, layout, pool, zero_tail),
            overread=overread,
            large=large_frames and not zero_tail and max_tokens is None,
            poison=pool.is_debugged and layout.dtype.is_floating_point and not zero_tail,
        )
        self._rows = self._open_rows(rules, self._row_bytes(overread), limit, guaranteed)
        self._ranges, self._views = self._exported()
        self._scales = self._scale_views()
        self.event_log = event_log
        """What is told which prefixes can be found, if anything is."""
        self._host_tier = (
            HostTier(self._rows, self._ranges, host_bytes, host_priority, event_log) if host_bytes else None
        )
        self._starting = Starting(self._rows, self._host_tier.prefixes if self._host_tier else None, event_log)
        self._leaks: list[str] = []
        """With debugging: what lived when it was closed."""
        self._unclosed = weakref.finalize(self, _tell_leaks, self._rows, os.getpid()) if pool.is_debugged else None
        """With debugging: tells what lives where nobody closes it, also at the end of the process."""
        owners.add(self)
        if event_log:
            on_host = self._host_tier.limit if self._host_tier and host_priority is not None else 0
            self._begin_telling(event_log, pool.accounts.limit_of(self._rows.account), on_host)

    def _pool_on(
        self,
        memory: Driver | FramePool,
        max_bytes: float | str | None,
        max_tokens: int | None,
        zero_tail: bool,
        overread: int,
    ) -> tuple[FramePool, int | None]:
        """Returns the pool that the cache lies on, its own on a driver or the given one, and the most pages that it may
        have of a given one. Raises what `budget_pages` raises."""
        if max_bytes is None and max_tokens is None:
            if isinstance(memory, FramePool):
                return memory, None
            max_bytes = "80%"
        pages = budget_pages(memory, self.layout, self.max_sequences, max_bytes, max_tokens, zero_tail, overread)
        if isinstance(memory, FramePool):
            return memory, pages
        return FramePool.on(memory, pages * memory.page_size), None

    def _row_bytes(self, overread: int) -> list[int]:
        """Of a row in each range. Raises `LayoutError` where all rows together take too many addresses."""
        size, tokens = self.page_size, self.max_seq_len + overread
        row_bytes = [-(-tokens * record // size) * size for record in self.layout.record_bytes]
        asked = f"max_sequences={self.max_sequences} x max_seq_len={self.max_seq_len}"
        check_address_space(sum(row_bytes) * self.max_sequences, asked)
        return row_bytes

    @operation
    def _open_rows(self, rules: Rules, row_bytes: list[int], limit: int | None, guaranteed: float | str) -> Rows:
        """Makes the rows, with addresses, and an account."""
        pool = self.pool
        pool.collect()
        if rules.lookahead and pool.mapper is None:
            pool.mapper = Mapper(pool)
        if pool.is_debugged:
            watch(pool)
        pages = pages_within(pool, guaranteed, name="guaranteed") if guaranteed else 0
        ranges, scales = zip(row_bytes, self.layout.record_bytes), None
        if self.layout.scales == "sequence_head":
            scales = SequenceScales(pool.driver, self.layout, self.max_sequences)
        return Rows(pool, Account(limit, pages), self.max_sequences, ranges, rules, scales)

    def _exported(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """All ranges as tensors, and what `kv` returns of them."""
        arenas = [arena for arena, _ in self._rows.ranges]
        with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
            exported = [export_range(arena.address, arena.nbytes, self.device, owner=arena) for arena in arenas]
            ranges = [flat.view(self.layout.dtype) for flat in exported]
            return ranges, kv_views(ranges, self.layout, self.max_sequences, self.max_seq_len)

    def _scale_views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The scales that `scaled_kv` returns."""
        with torch.inference_mode(False):  # as above
            if self._rows.scales:
                return repeated_scales(self._rows.scales.rows, self.layout, self.max_seq_len)
            if self.layout.scales is None:
                return []
            return scale_views(self._ranges, self.layout, self.max_sequences, self.max_seq_len)

    def _begin_telling(self, event_log: EventLog, pages: int, host_bytes: int) -> None:
        """Has a log say how many blocks there can be on the device and on the host, and end with the cache."""
        block = sum(self.layout.record_bytes) * event_log.block_size
        event_log.created(pages * self.page_size // block, host_bytes // block)
        weakref.finalize(self, _end, event_log).atexit = False

    # ------------------------------------------------------------------ sequences

    @property
    def page_size(self) -> int:
        """Bytes of a page."""
        return self._driver.page_size

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
                looks nothing up, and then nothing can be committed. The first
                `Sequence.cached_tokens` of them hold K and V already, from earlier calls of `Sequence.commit`. If a
                sequence that has ended left a row with all cached tokens, that row is used; otherwise pages are shared,
                and copied where they hold other tokens as well, are not full, or few of many are needed. The last
                token is never among them: the pass that computes it gives the next one.
            salt: text, bytes, or a whole number of at most 128 bits; prefixes cached under one salt are never found
                under another. `1` and `"1"` are two salts; `True` and `1.0` are refused.
            adapter: the model's adapter, which K and V depend on; separates prefixes as `salt` does. The same types.
            reuse: False neither uses cached prefixes nor adds to them.
            whole: False: the sequence starts with only the `cached_tokens` found in the cache. Call `extend` before
                each prefill chunk.
            expected_tokens: the total length that it will soon have, if tokens come in chunks: the parked row that fits
                it best is chosen, and pages reserved for it are given to other sequences last. With a lookahead the
                mapper maps them ahead, from idle memory; this call does not wait for that.
            tenant: who the sequence belongs to. Bytes written by one tenant's sequences can never be read from the rows
                of another: rows are not adopted across tenants, and pages are zeroed in between. None is a tenant like
                any other. The same types as `salt`.
            row: use this row index, e.g. to keep a batch in adjacent rows; None picks one.

        Raises:
            ArgumentError, ValueError: an argument has the wrong type, is negative, or conflicts with another; or the
                cache has an event log, which cannot express these ids, salt, adapter or tenant.
            ShapeError, DtypeError: `token_ids` are no one-dimensional array of whole numbers.
            UnsupportedError: `token_ids` with `zero_tail`, or with scales of whole sequences.
            StreamCaptureError: a CUDA graph is being captured, and the layout has such scales, or pages have to be
                zeroed or copied.
            OutOfRowsError: `max_sequences` sequences are alive, or the row belongs to a live one.
            OutOfRangeError: there is no such row.
            SequenceTooLongError, OutOfPagesError, DriverError: as in `Sequence.extend`; there is no
                new sequence then.
        """
        ids = None
        check_flags(reuse=reuse, whole=whole)
        if row is not None:
            row = row_number(row, self.max_sequences)
        if token_ids is not None:
            ids = ids_of(token_ids)
            tokens = self._check_ids(ids, tokens, row)
        elif not whole:
            raise ArgumentError("got whole=False without token_ids; extend() a sequence that begins without tokens")
        elif salt is not None or adapter is not None:
            name, value = ("adapter", adapter) if salt is None else ("salt", salt)
            raise ArgumentError(f"got {name}={value!r} without token_ids; it keeps apart what is known of these")
        salt, adapter, tenant = name_of("salt", salt), name_of("adapter", adapter), name_of("tenant", tenant)
        tokens, expected_tokens = check_tokens(tokens), check_tokens(expected_tokens, "expected_tokens")
        check_length(max(tokens, expected_tokens), self.max_seq_len)
        if ids is None or not reuse:
            tokens = tokens if whole else 0
            sequence = None if tokens or row is not None else self._sequence_at_once(expected_tokens, tenant)
            return sequence or self._sequence(tokens, expected_tokens, tenant, row)
        if self.event_log:
            check_ids(ids)
            told_names(salt, adapter, tenant)
        asked = ids, salt, adapter, whole, expected_tokens, tenant
        begun = self._sequence_of_at_once(*asked)
        return begun if isinstance(begun, Sequence) else self._sequence_of(*asked, begun)

    def _check_ids(self, ids: Ids, tokens: int, row: int | None) -> int:
        """How many tokens these are, where they can be reused."""
        check_reusable(self.layout)
        if tokens:
            raise ArgumentError(f"got tokens={tokens!r} and {len(ids)} token_ids; give one of them")
        if row is not None:
            raise ArgumentError(f"got row={row} and token_ids, which may lie in another row; give one of them")
        if self._rows.rules.zero_tail:
            raise UnsupportedError(
                "asked for token_ids with zero_tail, which promises zeros behind sequences; make the cache without it"
            )
        return len(ids)

    def _key(self, salt: Name, adapter: Name, tenant: Name) -> Key:
        """What K and V depend on beside token ids."""
        return Key(salt, adapter, tenant, self.pool.tenant_number(tenant))

    @bookkeeping
    def _sequence_at_once(self, expected_tokens: int, tenant: Name) -> Sequence | None:
        """A sequence without tokens, where it can have a row as it is: then nobody waits for who maps for others."""
        return self._starting.take_at_once(self, expected_tokens, self.pool.tenant_number(tenant))

    @stepwise
    def _sequence(self, tokens: int, expected_tokens: int, tenant: Name, row: int | None) -> Steps[Sequence]:
        self._rows.release_abandoned()
        whose = self.pool.tenant_number(tenant)
        return (yield from self._starting.take(self, tokens, expected_tokens, whose, row))

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
        many fewer of `available_pages`. Arguments and their errors are as in `sequence`.
        """
        ids = ids_of(token_ids)
        salt, adapter, tenant = name_of("salt", salt), name_of("adapter", adapter), name_of("tenant", tenant)
        expected_tokens = check_tokens(expected_tokens, "expected_tokens")
        check_length(expected_tokens, self.max_seq_len)
        return self._shared_pages(ids, salt, adapter, expected_tokens, tenant)

    @bookkeeping
    def _shared_pages(self, ids: Ids, salt: Name, adapter: Name, expected: int, tenant: Name) -> int:
        self._rows.release_collected()
        keeper, key = self._rows.keeping.keeper, self._key(salt, adapter, tenant)
        return keeper.shared_pages(key, ids, expected) if isinstance(keeper, Prefixes) else 0

    def host_tier(self) -> HostTier:
        """The host tier, which holds suspended sequences and evicted prefixes.

        Raises:
            ArgumentError: it was made without one.
        """
        if self._host_tier is None:
            raise ArgumentError("asked to suspend a sequence of a cache without a host tier; make it with host_bytes")
        return self._host_tier

    @bookkeeping
    def _sequence_of_at_once(
        self, ids: Ids, salt: Name, adapter: Name, whole: bool, expected: int, tenant: Name
    ) -> Sequence | Found | None:
        """A sequence of given tokens, where nothing is mapped for it: then nobody waits for who maps for others."""
        key = self._key(salt, adapter, tenant)
        return self._starting.begin_at_once(self, key, ids, whole, expected)

    @operation
    def _sequence_of(
        self,
        ids: Ids,
        salt: Name,
        adapter: Name,
        whole: bool,
        expected: int,
        tenant: Name,
        found: Found | None,
    ) -> Sequence:
        key = self._key(salt, adapter, tenant)
        return self._starting.begin(self, key, ids, whole, expected, found)

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
                sender gets `TransferRefusedError`, nothing has changed, and both processes can go on.
            TransferError: the sender is gone, does not send within the group's timeout, or sends something else.
            StreamCaptureError: a CUDA graph is being captured. There is no new sequence in all cases.
        """
        check_flags(reuse=reuse)
        tenant = name_of("tenant", tenant)
        peer = Peer(rank, group, self.device)
        self._check_no_capture()
        head = peer.listen()
        with peer.told():
            head.check(self.layout)
            sequence = self._sequence_for(head, expected_tokens, tenant, reuse)
        first = max(head.start, sequence.cached_tokens)
        try:
            peer.accept(first)
            with self.pool.nvtx.receive:
                peer.receive(messages_of(self._rows, self._ranges, sequence.index, first, head.length))
            if sequence.key is not None and len(head.ids):
                with suppress(DriverError):  # it is there, and the other process knows; only nobody else finds it
                    sequence.commit(head.ids)
        except BaseException:
            self._starting.abandon([sequence])
            raise
        return sequence

    @bookkeeping
    def _check_no_capture(self) -> None:
        """Raises `StreamCaptureError` where nothing can be received."""
        Fence.after(self._driver, [self._driver.current_stream()])

    def _sequence_for(self, head: Head, expected_tokens: int, tenant: Name, reuse: bool) -> Sequence:
        """A sequence with room for another process's, which begins with what is known of it."""
        expected = max(check_tokens(expected_tokens, "expected_tokens"), head.length)
        if reuse and head.key and not self._rows.rules.zero_tail:
            salt, adapter = head.key
            sequence = self.sequence(
                token_ids=head.ids, salt=salt, adapter=adapter, expected_tokens=expected, tenant=tenant
            )
        else:
            tokens = 0 if head.start else head.length
            sequence = self.sequence(tokens, expected_tokens=expected, tenant=tenant)
        if missing := head.length - sequence.length:
            try:
                starts = [head.start] if head.start else None
                self.extend([sequence], missing, starts=starts)
            except BaseException:
                self._starting.abandon([sequence])
                raise
        return sequence

    def fork_many(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Starts sequences that begin with all tokens of another: see `Sequence.fork`. All of them or none.

        Args:
            sequence: a live sequence of this cache.
            count: how many to start, 0 or more.

        Raises:
            OutOfRowsError: there are fewer rows left than that.
            OutOfPagesError, DriverError, StreamCaptureError, UseAfterFreeError, SuspendedError: as in `Sequence.fork`.
            TypeError, ValueError: it is no sequence of this cache, or no such number.
        """
        (parent,) = batch_of(self, [sequence])
        return self._fork(parent, check_tokens(count, "count"))

    @operation
    def _fork(self, parent: Sequence, count: int) -> list[Sequence]:
        self._rows.release_abandoned()
        with self.pool.nvtx.fork:
            return self._starting.fork(self, parent, count)

    def reorder(
        self, sequences: Iterable[Sequence], indices: Iterable[int], *, share: bool = True, copy: bool = True
    ) -> None:
        """Gives sequence i the tokens of sequence `indices[i]`, as in beam search: rows and their addresses stay. All
        sequences change or none.

        Pages that two rows share already are neither copied nor mapped, so forked beams copy only what lies behind the
        fork. For the rest, copying a page is weighted 1, mapping a shared frame 35 (44 if it must be created first);
        the cheaper is chosen. Repeated copies add up: once they have cost as much as sharing, full pages are shared, if
        the source keeps its tokens. A sequence without tokens becomes a fork. Sequences that take each other's place in
        a circle are only copied. Pages that other sequences share are never written to: a sequence that has to write
        there gets pages of its own first, or shares the source's.

        It is done in the order of the current stream, behind all work on the sequences so far; later work on their own
        streams, and on those named with `record_stream`, waits for it.

        Args:
            sequences: live sequences of this cache, each once.
            indices: one index into `sequences` for each of them; an index may be repeated.
            share: whether pages may be shared. False copies everything, so that tokens may be written over afterwards.
            copy: whether full pages may be copied where they could be shared. False shares them at once, whatever that
                costs: for sequences that hold the same tokens already, or will for long.

        Raises:
            ArgumentError: neither `share` nor `copy`.
            OutOfPagesError: there is no memory for sequences that become longer, or for copies of shared pages.
            DriverOutOfMemoryError: there is no memory beside the cache for the up to 32 MiB that a circle needs.
            StreamCaptureError, UseAfterFreeError, SuspendedError: as in `Sequence.extend`. Nothing has changed in these
                cases; but sequences of a circle may have copies of what they shared where the device has less memory
                than the budget, or where what is known of their tokens takes the pages that were missing.
            DriverError: a driver call failed: before anything changed; or later, and then the sequences that were to
                change have ended, and all others are as before.
            OutOfRangeError: there is no such index.
            UnsupportedError: in a circle one has given back its front (`release_before`) where another begins; or
                tokens would come to another tenant. Nothing has changed, but that sequences of a circle may have copies
                of what they shared, if pages in front of a start gave way to them.
            TypeError, ValueError: these are not sequences of this cache, or one is named twice; or the indices are not
                whole numbers, or not one for each sequence.
        """
        batch = batch_of(self, sequences)
        check_flags(share=share, copy=copy)
        if not (share or copy):
            raise ArgumentError(
                "asked for share=False and copy=False; what another sequence holds comes by one of the two"
            )
        self._reorder(batch, indices_of(indices, len(batch)), share, copy)

    @operation
    def _reorder(self, batch: list[Sequence], indices: list[int], share: bool, copy: bool) -> None:
        self._rows.release_abandoned()
        rows, keys = [sequence.row for sequence in batch], [sequence.key for sequence in batch]
        changing = [(sequence, keys[index]) for sequence, index in zip(batch, indices) if sequence.key != keys[index]]
        for sequence, _ in changing:
            sequence.key = None  # who is interrupted makes nothing known under a key that may be another's
        try:
            with self.pool.nvtx.reorder:
                self._rows.reorder({row: rows[index] for row, index in zip(rows, indices)}, share, copy)
        except VmmkvError as error:
            for sequence, key in zip(batch, keys) if is_own(error) else ():
                sequence.key = key
            raise
        for sequence, key in changing:
            sequence.key = key
        self._rows.ring()

    def unshare(self, sequences: Iterable[Sequence], start: int = 0) -> None:
        """Makes tokens from `start` on safe to write over: pages shared with other sequences are copied, and these
        sequences no longer count as holding committed tokens there. `extend` does this itself for the tokens that it
        makes room for.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError, UseAfterFreeError, SuspendedError: as in
                `Sequence.extend`. All sequences hold their tokens as before: some perhaps in copies after a
                `DriverError`, where the device has less memory than the budget, or where what is known of their tokens
                takes the pages that were missing.
            TypeError, ValueError: these are not sequences of this cache, or one is named twice; or `start` is not a
                whole number, or lies behind a sequence's end.
        """
        batch, start = batch_of(self, sequences), check_tokens(start, "start")
        self._unshare(batch, start)

    @operation
    def _unshare(self, batch: list[Sequence], start: int) -> None:
        self._rows.release_abandoned()
        rows = [sequence.row for sequence in batch]
        for sequence, row in zip(batch, rows):
            if start > self._rows.table.length[row]:
                raise ValueError(f"asked for tokens from {shown(start)} on; {sequence!r} is shorter")
        self._rows.unshare(rows, start)
        self._rows.ring()

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
            tokens: tokens to add, one number for all or one per sequence.
            starts: for sequences without tokens, the first token that will be read: no page is mapped in front of it.
                Afterwards they are as if `release_before(start)` had followed.

        Raises:
            SequenceTooLongError, OutOfPagesError, DriverError, StreamCaptureError: as in `Sequence.extend`.
            BusyError, SuspendedError, UseAfterFreeError: as there. No sequence has changed in all these cases.
            TypeError: something is not a sequence, or not a whole number.
            ValueError: a sequence belongs to another cache or is named twice, a number is negative, or there is not one
                for each sequence; with `starts`, a sequence holds tokens, or would begin behind its end.
        """
        batch = batch_of(self, sequences)
        counts = whole_numbers("tokens", tokens, len(batch), self.max_seq_len)
        begins = None if starts is None else whole_numbers("starts", starts, len(batch), self.max_seq_len)
        index, numbers = _rows_of(batch)
        if begins is not None or not self._grow_within(index, numbers, counts):
            self._extend(batch, index, numbers, counts, begins)

    def _grow_within(self, index: Ints, numbers: Ints, counts: Ints) -> bool:
        """Writes down new lengths of rows, if none needs a page and all are those of sequences with these numbers."""
        table, monitor = self._rows.table, self.pool.monitor
        monitor.check_outside("extend")
        with monitor.inside, monitor.lock:
            lengths = table.lengths[index] + counts
            alive = table.owners[index] == numbers
            within = not monitor.is_dirty and bool(((lengths <= table.capacities[index]) & alive).all())
            if within:
                alarming = lengths > table.alerts[index]
                if alarming.any():
                    table.stirred.update(dict.fromkeys(index[alarming].tolist()))
                    urgent = (
                        lengths + counts > table.capacities[index] - table.urgent
                    )  # the next step, if it is as long
                    if self.pool.mapper and bool(urgent.any()):
                        self.pool.mapper.ring_later()
                table.lengths[index] = lengths
        return within

    @stepwise
    def _extend(
        self, batch: list[Sequence], index: Ints, numbers: Ints, counts: Ints, starts: Ints | None
    ) -> Steps[None]:
        self._rows.release_abandoned()
        index = self._live(batch, index, numbers)
        before = self._rows.table.lengths[index]
        if starts is not None and (before.any() or (starts > counts).any()):
            raise ValueError(
                f"asked for starts={starts.tolist()} of tokens={counts.tolist()}; they are for sequences without "
                "tokens, and none is behind its sequence's end. Others have release_before"
            )
        lengths = before + counts
        check_length(int(lengths.max(initial=0)), self.max_seq_len)
        yield from self._rows.grow(index, lengths, starts)
        self._rows.ring()

    def _live(self, batch: list[Sequence], index: Ints, numbers: Ints) -> Ints:
        """The rows of live sequences, which have these rows and numbers; raises what forbids the use of one."""
        table = self._rows.table
        if table.suspended or (table.owners[index] != numbers).any():
            return np.array([sequence.row for sequence in batch], np.int64)
        return index

    def free(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences; one fence serves all of them. Sequences that were freed already are ignored.

        If this is called in the middle of another operation of the same thread (by a finalizer, say), the next
        operation does it.

        Raises:
            StreamCaptureError: a CUDA graph is being captured, on the current stream or on one that the sequences were
                used on; nothing was freed.
            TypeError, ValueError: something is not a sequence, or belongs to another cache; nothing was freed.
        """
        batch = batch_of(self, sequences, repeated=True)
        if self.pool.monitor.inside.locked():  # no lock is taken: who has it may be waiting for this thread
            self._starting.abandon(batch)
        elif not self._unusable:
            self._free(batch)

    @bookkeeping
    def _free(self, batch: list[Sequence]) -> None:
        self._rows.release((sequence.index, sequence.number) for sequence in batch)
        self._starting.forget(batch)

    # ------------------------------------------------------------------ memory

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer over all rows: the whole virtual tensor. A negative number counts layers from the last.

        Only tokens of live sequences may be touched: an access elsewhere is a fault, which ends the process or the
        GPU's context. With `zero_tail` a live row may be read from its sequence's `start` to the row's end.

        So do not print, compare or copy these as a whole, nor more of a row than it has tokens: `print(kv(0)[0])` ends
        the process. `Sequence.k` and `v` are as long as their sequence. The storage of any of these views is the whole
        range: printing or reading that ends the process, too. To copy, save or share a view, `clone()` it first.

        Returns:
            K `[max_sequences, max_seq_len, num_kv_heads, head_dim]` and V likewise with its own width, of the layout's
            dtype; strided, zero-copy, at addresses that never change.

        Raises:
            OutOfRangeError, ArgumentError: there is no such layer.
            UnsupportedError: the layout has scales, without which these numbers mean nothing: see `scaled_kv`.
        """
        self.check_usable()
        if self.layout.scales is not None:
            raise UnsupportedError(
                f"asked for K and V of a layout with scales={self.layout.scales!r} without their scales; scaled_kv() "
                "gives both, and kernels that take both read and write them"
            )
        return one_of(self._views, layer, "layer")

    def scaled_kv(self, layer: int) -> ScaledKV:
        """K and V of one layer over all rows, as `kv`, and their scales: of a layout that has scales.

        `vmmkv.kernels` take them as `k`, `v`, `k_scales` and `v_scales`. The same cautions hold as for the views of
        `kv`.

        Returns:
            K and V as `kv` would, of the layout's dtype, and the scales of each, fp32 `[max_sequences, max_seq_len,
            num_kv_heads]`; those of whole sequences are the same memory for all tokens, which is written to by way of
            `sequence_scales` only.

        Raises:
            OutOfRangeError, ArgumentError: there is no such layer.
            UnsupportedError: the layout has no scales.
        """
        self.check_usable()
        if self.layout.scales is None:
            raise UnsupportedError(
                "asked for the scales of a layout that has none; make it with KVLayout(scales='token_head')"
            )
        return ScaledKV(*one_of(self._views, layer, "layer"), *self._scales[layer])

    def sequence_scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of whole sequences of one layer, by row: of a layout with `scales="sequence_head"`.

        They are yours to write, before a sequence has tokens: what was rounded with others would be other numbers.
        `vmmkv.kernels.sequence_scales` makes them of a prompt. `vmmkv.kernels.append` takes them as `k_scales` and
        `v_scales`, rounds with them and leaves them as they are. Those of a batch, `[rows]`, are what FlashAttention-3
        takes as `k_descale` and `v_descale`.

        A new sequence has scales of 1. Forks begin with those of their parent; sequences that are reordered, suspended
        or sent to another process take theirs along.

        All of a cache's are `max_sequences * num_layers` times 8 bytes for each KV head, in plain memory of torch,
        which is no part of its budget, and which `stats` does not count.

        Returns:
            Those of K and V, each fp32 `[max_sequences, num_kv_heads]`, strided, at addresses that never change.

        Raises:
            OutOfRangeError, ArgumentError: there is no such layer.
            UnsupportedError: the layout has no such scales.
        """
        self.check_usable()
        if self.layout.scales != "sequence_head":
            raise UnsupportedError(
                f"asked for the scales of sequences of a layout with scales={self.layout.scales!r}; make it with "
                "KVLayout(scales='sequence_head')"
            )
        k_scales, v_scales = one_of(self._scales, layer, "layer")
        return k_scales[:, 0], v_scales[:, 0]

    def range(self, index: int) -> torch.Tensor:
        """One range of the layout, all rows of it: `[elements]` of its dtype. K and V of its layers are views of this
        tensor.

        For compilers, which handle one tensor that is written in place better than many that share its memory. Do not
        print it either.

        Raises:
            OutOfRangeError, ArgumentError: there is no such range.
        """
        self.check_usable()
        return one_of(self._ranges, index, "range")

    @operation
    def prewarm(self, max_bytes: float | str | None = None, *, tokens: int = 0) -> int:
        """Makes memory ahead, so that the first sequences do not wait for it; returns the bytes that were made. `trim`
        gives them back.

        Args:
            max_bytes: what the cache is to have, or to find free, in all: bytes, `"4GiB"`, or a share of the pool,
                which without `pool` is the budget. None is all that nobody has, within the budget.
            tokens: that a sequence usually has, with its answer: so many are mapped in each of as many empty rows as
                there is memory for. A sequence of so many tokens, by now or by its `expected_tokens`, makes no driver
                call there; a longer one maps what is missing, and one that expects fewer has large frames that reach
                beyond them unmapped first, as in any row that it adopts. Mapped rows are what ended sequences leave:
                others have their pages when they need them. What is left is free. With 0 all of it is, three quarters
                in large frames if the cache has such; and where a `tenant` is in use on the pool, since nobody knows
                whose a row would be.

        Raises:
            BudgetError: it is no size, or more than the pool.
            OutOfPagesError: so much is not idle: others have it, or it is more than the cache may have.
            DriverOutOfMemoryError: the device has less left.
            DriverError: a driver call failed. What was made or mapped is given back in all cases.
            TypeError, ValueError, SequenceTooLongError: a row has no such number of tokens.
        """
        tokens = check_tokens(tokens)
        check_length(tokens, self.max_seq_len)
        pages = None if max_bytes is None else pages_within(self.pool, max_bytes)
        self._rows.release_abandoned()
        return self._rows.prewarming.prewarm(pages, tokens) * self.page_size

    @operation
    def trim(self) -> int:
        """Gives surplus and free pages back to the system; returns the number of bytes. Those that others on the pool
        have left free go, too.

        Waits for GPU work that still uses them.

        Raises:
            DriverError: a page could not be released; what went before it is gone, and the rest can be trimmed again.
        """
        return self.pool.trim_holder(self._rows)

    def close(self) -> None:
        """Ends all sequences and gives all memory back now, after all work on the device.

        The addresses stay reserved while a view lives: to touch one after this is a fault.
        Garbage collection does the same when nobody holds the cache, its sequences or views any more.

        Raises:
            StreamCaptureError: a CUDA graph is being captured; nothing was closed.
            DriverError: the device could not be waited for; nothing was closed.
            BusyError: another operation of this thread is not at its end.
        """
        super().close()
        leaks, self._leaks = self._leaks, []
        if leaks:
            report = "\n".join(["a KVCache was closed with live sequences:", *leaks])
            warnings.warn(report, LeakWarning, stacklevel=2)

    def _give_back(self) -> None:
        if self._unclosed and self._unclosed.detach():
            self._leaks = self._rows.held()
        self._views, self._scales, self._ranges, self._host_tier = [], [], [], None
        self._rows.close()
        if self.event_log:
            self.event_log.close()

    def events(self, timeout: float | None = 0.0, *, most: int | None = None) -> list[Event]:
        """Takes events of the cached prefixes from `event_log`, the oldest first. The log is also an asynchronous
        iterator of events.

        Args:
            timeout: seconds to wait if there is no event; None waits until there is one, or the cache is closed.
            most: the most events to take; None takes all.

        Returns:
            The events; none after the timeout, or if the cache was closed and none is left.

        Raises:
            ArgumentError: the cache was made without `event_log`; or `timeout` or `most` has the wrong type, or
                `timeout` is negative.
            BudgetError: `most` is not positive.
        """
        if self.event_log is None:
            raise ArgumentError("asked for the events of a cache that nobody listens to; make it with event_log")
        return self.event_log.events(timeout, most=most)

    # ------------------------------------------------------------------ accounting

    @property
    @bookkeeping
    def available_pages(self) -> int:
        """Pages of the budget that hold no tokens and can be had without waiting for the GPU.

        Excludes pages behind a live sequence that GPU work of a previous owner may still be reading; `extend` can use
        them, but waits for that work. Pages of parked rows are included: the stream that freed them can adopt them at
        once. With `zero_tail` pages behind a live sequence belong to it.
        """
        self._rows.release_abandoned()
        return self._rows.available_pages

    @bookkeeping
    def stats(self) -> CacheStats:
        """A snapshot: bytes, tokens, waste, pages and rows by state, reuse, driver calls."""
        self._rows.release_abandoned()
        return snapshot(self._rows, self._host_tier, self.event_log)

    @bookkeeping
    def page_map(self) -> npt.NDArray[np.int64]:
        """By physical page number, the owner of each page now, int64 `[pages]`: a `Sequence.number`,
        or `SHARED_PAGE`, `KEPT_PAGE`, `FREE_PAGE`, `SURPLUS_PAGE`, `LOOKAHEAD_PAGE`, `VACANT_PAGE`, `ZERO_PAGE` or
        `OTHERS_PAGE`.

        A large frame belongs to a sequence as a whole, as soon as one of its tokens lies in it."""
        self._rows.release_abandoned()
        return self._rows.page_map()

    @bookkeeping
    def page_uses(self) -> npt.NDArray[np.int64]:
        """By physical page number, how many sequences have used each page and left it: int64 `[pages]`."""
        for table in self.pool.tables:
            table.tell_uses()
        frames = self.pool.frames
        return frames.uses[: frames.numbers].copy()

    @bookkeeping
    def mapped_ranges(self) -> list[MappedRange]:
        """Where pages are mapped now: one run for each row and range of the layout that has any."""
        return mapped_ranges(self._rows)

    @operation
    def check(self) -> None:
        """Checks every invariant of the books; raises `InvariantError` if one is broken."""
        self._rows.release_abandoned()
        check_pool(self.pool)
        check_rows(self._rows)

    # ------------------------------------------------------------------ use and misuse

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

    @operation
    def _draw(self) -> str:
        self._rows.release_abandoned()
        return draw_cache(self._rows, snapshot(self._rows, self._host_tier, self.event_log))


def _tell_leaks(rows: Rows, owner: int) -> None:
    """Says which sequences live of a cache that has ended, and that nobody has closed; not in a forked child."""
    leaks = rows.held() if os.getpid() == owner else []
    if leaks:
        made = f"a KVCache, made at {rows.account.origin}, was never closed, and has live sequences:"
        warnings.warn("\n".join([made, *leaks]), LeakWarning, stacklevel=1)


def _end(log: EventLog) -> None:
    """Tells that a cache is gone."""
    log.cleared()
    log.close()


def _rows_of(batch: list[Sequence]) -> tuple[Ints, Ints]:
    """The rows that sequences were given, and their numbers."""
    index = np.array([sequence.index for sequence in batch], np.int64)
    return index, np.array([sequence.number for sequence in batch], np.int64)
