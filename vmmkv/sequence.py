"""A sequence: what a user holds. Tokens that lie one after another at an address that never moves."""

from __future__ import annotations

import html
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import numpy.typing as npt
import torch
import torch.distributed as dist

from .arguments import check_tokens, ids_of
from .core import sequence as core
from .core.tables import ROW_BITS, ROW_MASK
from .errors import ArgumentError, ShapeError, StrideLimitWarning, UnsupportedError, VmmkvError
from .events.log import check_ids
from .layout import KVLayout, as_index, shown
from .picture import draw_sequence
from .prefix.retention import Retention
from .tensors import check_source
from .transfer import send

if TYPE_CHECKING:
    from .cache import KVCache


class Sequence(core.Sequence):
    """One sequence of a `KVCache`; made by `KVCache.sequence`.

    Free it with `free()` or a `with` block; garbage collection frees it too, but later. A sequence may be used by one
    thread at a time, different sequences of a cache by several.

    After its end, or that of its cache, all methods raise `UseAfterFreeError`, but for `free` and `extend_in_place`. In
    host memory (`suspend`) it may be asked for its `length` and `start`, resumed and freed; all else raises
    `SuspendedError`. An error leaves it as it was, unless the method says otherwise.
    """

    __slots__ = ("cached_tokens",)

    cache: KVCache
    """The cache that it belongs to."""
    cached_tokens: int
    """Tokens whose K and V were cached when it began."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self.cached_tokens = 0

    @property
    def number(self) -> int:
        """Its number in the process: 1 for the first sequence, never used twice."""
        return self.ticket >> ROW_BITS

    @property
    def index(self) -> int:
        """The row that it was given. After its end another sequence may have that row: see `row`."""
        return self.ticket & ROW_MASK

    @property
    def row(self) -> int:
        """Its index in the first dimension of `KVCache.kv`; constant for as long as it lives."""
        row = self.record_index()
        if self.cache.rows["suspended"][row]:
            raise core.suspended()
        return row

    @property
    def is_suspended(self) -> bool:
        """Whether its tokens are in host memory."""
        return bool(self.cache.rows["suspended"][self.record_index()])

    @property
    def is_reusable(self) -> bool:
        """Whether its tokens can be made known by `commit`: it was started with `token_ids`, for reuse."""
        self.record_index()
        return self.cache.prefixes is not None and self.cache.prefixes.is_own(self)

    @property
    def pool(self) -> object:
        """The physical memory that it lies on."""
        return self.cache.pool

    def extend(self, tokens: int) -> None:
        """Makes room for `tokens` more tokens; maps the pages that they need. Their contents are undefined until they
        are written; with `scrub=True` they are never those of another sequence.

        Raises:
            SequenceTooLongError: it would be longer than `max_seq_len`.
            OutOfPagesError: the budget, or the device, cannot supply the pages.
            DriverError: a driver call failed. As after `OutOfPagesError` it may have copies of what it shared.
            StreamCaptureError: pages have to be filled (`scrub`, another tenant) or copied (shared ones, after
                `truncate`) while a CUDA graph is being captured.
            BusyError: another thread has changed the sequence meanwhile.
            ArgumentError, ValueError: `tokens` is no whole number, or negative.
        """
        super().extend(tokens if type(tokens) is int else check_tokens(tokens))

    def extend_in_place(self, tokens: int, *, held: int | None = None) -> bool:  # type: ignore[override]
        """Makes room for `tokens` more tokens if pages for them are mapped already, for engines that look at each
        sequence in each step: it calls no driver and raises no error. After False call `extend`, which makes room or
        says why not.

        Args:
            tokens: tokens to add, at least 0.
            held: return False if the length is not this, for example because another thread has changed it.

        Returns:
            whether there is room. False also for a sequence that has ended.
        """
        return (held is None or held >= 0) and super().extend_in_place(tokens, -1 if held is None else held)

    def fork(self) -> Sequence:
        """Starts a sequence that begins with all tokens of this one. Full pages are shared: both sequences read the
        same memory, and neither writes there. Tokens on a page, or a large frame, that is not full are copied.

        The new sequence belongs to the current stream, behind all work on this one so far. Both may grow, be truncated
        and be freed in any order. Views of the new one are read-only where pages are shared: writing there is a fault.

        Raises:
            OutOfRowsError: `max_sequences` sequences are alive.
            OutOfPagesError, DriverError: there is no memory for the copies, or a driver call failed.
            StreamCaptureError: a CUDA graph is being captured.
        """
        return self.cache.fork_many(self, 1)[0]

    def commit(self, token_ids: npt.ArrayLike, *, retention: Iterable[Retention] = ()) -> None:
        """Publishes K and V of the first `len(token_ids)` tokens for reuse. The kernels that write them must have been
        launched, on the sequence's stream or one given to `record_stream`. Full pages can be reused until they are
        evicted, the tokens behind them as long as the row holds them.

        Args:
            token_ids: `[tokens]` whole numbers: the ids of all its tokens, from the first on, or of the first ones
                only, whose K and V have been computed.
            retention: how long they are kept once no sequence uses them. Without one, the least recently used are
                evicted first.

        Raises:
            ArgumentError: it has fewer tokens than that, or was started without `token_ids` or with `reuse=False`; or
                the cache has an event log, which cannot express these ids.
            ValueError: other ids were committed for the same tokens of this sequence.
            ShapeError, DtypeError: `token_ids` are no one-dimensional array of whole numbers.
            UnsupportedError: its first tokens were given back; or the layout has scales of whole sequences, with which
                others would read other numbers.
            RetentionError: ranges overlap, or are invalid.
            StreamCaptureError: a CUDA graph is being captured.
        """
        ids, cache = ids_of(token_ids), self.cache
        check_reusable(cache.layout)
        if cache.prefixes is None:
            raise ArgumentError(f"{self!r} was started without token_ids, or not for reuse")
        if cache.event_log is not None:
            check_ids(ids)
        cache.prefixes.commit(self, ids, retention)

    def suspend(self) -> None:
        """Moves its tokens to host memory; its pages go to other sequences when needed. It keeps its row, and so its
        addresses. The copy runs in the order of the current stream, behind all work on the sequence so far; the host
        does not wait.

        Raises:
            ArgumentError: the cache was made without `host_bytes`.
            OutOfHostMemoryError: `host_bytes` is too small, or the host has less memory left.
            StreamCaptureError: a CUDA graph is being captured.
        """
        with self.cache.pool.nvtx("vmmkv: suspend"):
            self.cache.tier().suspend(self)

    def resume(self) -> None:
        """Moves its tokens back, to the addresses that they had, in the order of the current stream; later work on the
        stream that the sequence was made on waits for that. Does nothing if it is not suspended.

        Raises:
            OutOfPagesError: the budget, or the device, cannot supply the pages.
            DriverError, StreamCaptureError: as in `extend`.
        """
        if self.is_suspended:
            with self.cache.pool.nvtx("vmmkv: resume"):
                self.cache.tier().resume(self)

    def truncate(self, tokens: int) -> None:
        """Drops the tokens from `tokens` on. Pages behind the new end may go to other sequences once they are idle.

        Raises:
            ArgumentError: `tokens` is not a whole number.
            ValueError: the sequence is shorter than that, or begins behind it (`start`).
            StreamCaptureError: whole pages would be given up while a CUDA graph is being captured.
        """
        tokens = as_index("tokens", tokens)
        self._check_holds(tokens)
        super().truncate(tokens)

    def release_before(self, token: int) -> None:
        """Drops the tokens before `token`, as for a sliding window; the others keep their positions. Whole pages in
        front of it go to other sequences when the GPU is done with them. Views start at `token` from now on. Raises
        what `truncate` raises."""
        token = as_index("token", token)
        self._check_holds(token)
        super().release_before(token)

    def _check_holds(self, token: int) -> None:
        """Raises `ValueError` for a token that it neither holds nor ends with."""
        if not self.start <= token <= self.length:
            raise ValueError(f"asked for token {shown(token)}; {self!r} holds tokens {self.start} to {self.length}")

    def send(self, rank: int, *, group: dist.ProcessGroup | None = None) -> None:
        """Sends its tokens to another process, which calls `KVCache.receive`, over torch.distributed: NCCL from a GPU,
        gloo from host memory. The sequence is unchanged, and may be extended or freed right after.

        Tokens are sent behind all work on the sequence so far. The host waits until the other process has memory for
        them. Then NCCL sends them in the order of the current stream; with gloo they are on their way when this
        returns. There is no acknowledgement that the tokens have arrived.

        Committed token ids, salt and adapter are sent along; tokens that the receiver has cached already are not sent,
        nor are the tenant and tokens in front of `start`.

        Args:
            rank: the receiver's rank in the default group.
            group: a group that both processes are in; None is the default one. It takes one transfer at a time between
                two processes.

        Raises:
            ArgumentError: there is no such process or group.
            TransferRefusedError: the receiver refuses it, for lack of memory, say. Both processes can go on.
            TransferError: the receiver is gone, does not answer within the group's timeout, or sends something else.
            SuspendedError, StreamCaptureError, DriverError: nothing was sent, and the receiver still waits.
        """
        send(self, rank, group)

    def free(self) -> None:
        """Ends the sequence; a second call does nothing. Other sequences get its row after all work on the current
        stream, and on the streams named with `record_stream`. Raises `StreamCaptureError` while one of these is
        captured; the sequence lives on."""
        self.cache.free((self,))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Declares that work on `stream` uses the sequence: its pages are not reused before that work is done. Raises
        `ArgumentError` or `DeviceError` for what is no stream of the cache's device."""
        super().record_stream(stream)

    def check_usable(self) -> None:
        """Raises `UseAfterFreeError` or `ForkError` if the sequence cannot be used."""
        self.cache.check_usable()
        self.record_index()

    def k(self, layer: int) -> torch.Tensor:
        """K of one layer, `[length - start, num_kv_heads, head_dim]` of the layout's dtype: a view, to read and write.
        A negative number counts layers from the last.

        The view shows the sequence's memory for as long as the sequence lives, and after that whatever is there. With a
        `StrideLimitWarning` it is longer than `KVLayout.int32_token_limit`.

        Raises:
            OutOfRangeError, ArgumentError: there is no such layer.
            UnsupportedError: the layout has scales: see `KVCache.scaled_kv`.
        """
        self._warn_of_stride()
        return self._view(layer, 0)

    def v(self, layer: int) -> torch.Tensor:
        """V of one layer, `[length - start, num_kv_heads, v_head_dim]`: a view like that of `k`; raises the same."""
        self._warn_of_stride()
        return self._view(layer, 1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copies K and V of the last tokens into the cache, on the current stream.

        Args:
            layer: the layer, as in `k`.
            k: `[tokens, num_kv_heads, head_dim]`, of the cache's dtype and device.
            v: `[tokens, num_kv_heads, v_head_dim]`, likewise.

        Raises:
            ShapeError, DtypeError, DeviceError, ArgumentError: they do not fit, or are no dense tensors; nothing was
                written.
            OutOfRangeError: there is no such layer.
            UnsupportedError: the layout has scales; use `vmmkv.kernels.append`, which writes or applies them.
        """
        pairs = [(k, self._view(layer, 0)), (v, self._view(layer, 1))]
        for name, (source, target) in zip("KV", pairs):
            check_source(source, name, target.dtype, target.device)
            if source.ndim != 3 or source.shape[1:] != target.shape[1:] or len(source) > len(target):
                hint = ". Call extend first" if source.shape[1:] == target.shape[1:] else ""
                raise ShapeError(
                    f"got {list(source.shape)} for the last tokens of layer {layer}; it must be "
                    f"[tokens <= {len(target)}, {target.shape[1]}, {target.shape[2]}]{hint}"
                )
        if len(k) != len(v):
            raise ShapeError(f"got K of {len(k)} tokens and V of {len(v)}; they must be as many")
        for source, target in pairs:
            target[len(target) - len(source) :].copy_(source.detach())  # the cache is no part of an autograd graph

    def _view(self, layer: int, which: int) -> torch.Tensor:
        return self.cache.kv(layer)[which][self.row, self.start : self.length]

    def _warn_of_stride(self) -> None:
        """Warns before a kernel of another project could read a view wrong without an error."""
        limit = self.cache.layout.int32_token_limit
        tokens = self.length - self.start
        if tokens > limit:
            warnings.warn(
                f"a view of {tokens} tokens is longer than the {limit} that kernels with 32-bit strides can address: "
                "do not give it to torch's memory-efficient or cuDNN SDPA. Flash is safe; "
                "KVLayout(layers_per_range=...) makes the stride smaller",
                StrideLimitWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        try:
            if self.is_suspended:
                return f"<vmmkv.Sequence {self.number}: suspended, {self.length - self.start} tokens on the host>"
            return f"<vmmkv.Sequence {self.number}: row {self.row}, {self.length} tokens>"
        except VmmkvError:
            return f"<vmmkv.Sequence {self.number}: gone>"

    def _repr_html_(self) -> str:
        """What Jupyter shows: the pages behind its tokens."""
        try:
            return draw_sequence(self.cache, self.row)
        except VmmkvError:
            return html.escape(repr(self))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Sequence owns its row and cannot be copied or pickled; start another with cache.sequence()")


def check_reusable(layout: KVLayout) -> None:
    """Raises `UnsupportedError` for a layout whose K and V no other sequence can begin with."""
    if layout.scales == "sequence_head":
        raise UnsupportedError(
            "asked to reuse K and V of a layout with scales='sequence_head'; what another sequence has computed was "
            "rounded with its own scales. fork() takes them along; scales='token_head' keeps them with the tokens"
        )
