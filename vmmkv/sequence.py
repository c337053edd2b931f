"""A sequence: what a user holds. Tokens that lie one after another at an address that never moves."""

from __future__ import annotations

import html
import operator
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import torch

from .errors import DeviceError, DtypeError, SequenceTooLongError, ShapeError, StrideLimitWarning, VmmkvError
from .layout import shown
from .tensors import check_dense

if TYPE_CHECKING:
    from .cache import KVCache


class Sequence:
    """One sequence of a `KVCache`; made by `KVCache.sequence`.

    Free it with `free()` or a `with` block; garbage collection frees it too, but later.
    Not for use from several threads at once (different sequences of one cache are).

    It names a row and the number under which the cache has it: whether it lives is written in one place, the cache's
    books.
    """

    __slots__ = ("__weakref__", "cache", "index", "number")

    cache: KVCache
    """The cache that it belongs to."""
    number: int
    """Its number in the cache: 0 for the first sequence, never used twice."""
    index: int
    """The row that it was given. After its end that is another's: see `row`."""

    def __init__(self, cache: KVCache, number: int, row: int) -> None:
        self.cache, self.number, self.index = cache, number, row

    @property
    def row(self) -> int:
        """Its index in the first dimension of `KVCache.kv`; the same for as long as it lives."""
        return self.cache._check_live(self)

    @property
    def length(self) -> int:
        """Tokens so far, including those before `start`."""
        return self.cache._rows.table.length[self.cache._check_live(self)]

    @property
    def start(self) -> int:
        """The first token that can be read: 0, or what was last given to `release_before`."""
        return self.cache._rows.table.start[self.cache._check_live(self)]

    @property
    def capacity(self) -> int:
        """The length up to which growing costs no driver call."""
        return self.cache._rows.table.capacity[self.cache._check_live(self)]

    def extend(self, tokens: int) -> None:
        """Makes room for `tokens` more tokens; maps the pages that they need.

        What the new tokens hold is undefined until they are written; with `scrub=True` it is never
        another sequence's.

        Raises:
            SequenceTooLongError: it would be longer than `max_seq_len`.
            OutOfPagesError: the budget, or the device, cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages have to be zeroed (`scrub`) or waited for (`zero_tail`) while a CUDA graph
                is captured.
            UseAfterFreeError: the sequence or its cache is gone.
        """
        self.cache._extend_one(self, tokens)

    def truncate(self, tokens: int) -> None:
        """Drops the tokens from `tokens` on. Pages behind the new end may go to others when idle."""
        self.cache._truncate(self, operator.index(tokens))

    def release_before(self, token: int) -> None:
        """Drops the tokens before `token`, as for a sliding window; the others keep their positions.

        Whole pages in front of it go to others when the GPU is done with them. Tokens before `token`
        must not be read again: views start at `token` from now on.
        """
        self.cache._release_before(self, operator.index(token))

    def free(self) -> None:
        """Ends the sequence. Its row goes to others after all work on the current stream, and on
        the streams named with `record_stream`. A second call does nothing."""
        self.cache.free([self])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Says that work on `stream` uses the sequence: its pages wait for that work, too.

        Raises:
            DeviceError: the stream is on another device than the cache.
        """
        self.cache._record_stream(self, stream)

    def k(self, layer: int) -> torch.Tensor:
        """K of one layer, `[length - start, num_kv_heads, head_dim]`: a view, to read and write.

        It shows the sequence's memory for as long as the sequence lives, and whoever's it is then.
        """
        self._warn_of_stride()
        return self._view(layer, 0)

    def v(self, layer: int) -> torch.Tensor:
        """V of one layer, `[length - start, num_kv_heads, v_head_dim]`: a view like that of `k`."""
        self._warn_of_stride()
        return self._view(layer, 1)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copies K and V of the last tokens into the cache.

        Args:
            layer: the layer.
            k: `[tokens, num_kv_heads, head_dim]`, of the cache's dtype and device.
            v: `[tokens, num_kv_heads, v_head_dim]`, likewise.

        Raises:
            ShapeError, DtypeError, DeviceError: they do not fit; nothing was written.
            ArgumentError: one is no tensor, is sparse, or has no data of its own; nothing was written.
        """
        check_dense(k, "K")
        check_dense(v, "V")
        pairs = [(k, self._view(layer, 0)), (v, self._view(layer, 1))]
        for source, target in pairs:
            if source.ndim != 3 or source.shape[1:] != target.shape[1:] or len(source) > len(target):
                raise ShapeError(
                    f"got {list(source.shape)} for the last tokens of layer {layer}; it must be "
                    f"[tokens <= {len(target)}, {target.shape[1]}, {target.shape[2]}]. Call extend first"
                )
            if source.dtype != target.dtype:
                raise DtypeError(f"got {source.dtype}; this cache holds {target.dtype}. Convert with .to()")
            if source.device != target.device:
                raise DeviceError(f"got a tensor on {source.device}; this cache is on {target.device}")
        if len(k) != len(v):
            raise ShapeError(f"got K of {len(k)} tokens and V of {len(v)}; they must be as many")
        for source, target in pairs:
            target[len(target) - len(source) :].copy_(source.detach())  # the cache is no part of an autograd graph

    def _view(self, layer: int, which: int) -> torch.Tensor:
        return self.cache.kv(layer)[which][self.row, self.start : self.length]

    def _warn_of_stride(self) -> None:
        """A view that is about to go to a kernel of somebody else's must not be read wrong silently."""
        limit = self.cache.layout.int32_token_limit
        tokens = self.length - self.start
        if tokens > limit:
            warnings.warn(
                f"a view of {tokens} tokens is longer than the {limit} that kernels with 32-bit strides can address: "
                "do not give it to torch's memory-efficient SDPA. Flash and cuDNN are safe; "
                "KVLayout(layers_per_range=...) makes the stride smaller",
                StrideLimitWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        try:
            return f"<vmmkv.Sequence {self.number}: row {self.row}, {self.length} tokens>"
        except VmmkvError:
            return f"<vmmkv.Sequence {self.number}: gone>"

    def _repr_html_(self) -> str:
        """What Jupyter shows: the pages under its tokens."""
        try:
            return self.cache._draw_sequence(self)
        except VmmkvError:
            return html.escape(repr(self))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Sequence owns its row and cannot be copied or pickled; start another with cache.sequence()")


def check_length(length: int, max_seq_len: int) -> None:
    """Raises `SequenceTooLongError` where a sequence would outgrow its row."""
    if length > max_seq_len:
        raise SequenceTooLongError(
            f"asked for {shown(length)} tokens; a row is max_seq_len={max_seq_len} long. Make the cache with a larger "
            "one: a longer row takes addresses, not memory"
        )
