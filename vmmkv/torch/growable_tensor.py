"""A growable tensor: its shape is the maximum, its memory is what is used, and it never moves.

It is a cache of one row, whose tokens are the rows of the tensor, and one sequence that lives as long as the tensor.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch

from ..budget import pages_within
from ..core.addresses import check_address_space
from ..core.cache import Cache
from ..core.pool import busy
from ..driver.driver import fork_error
from ..errors import DtypeError, LayoutError, ShapeError, UseAfterFreeError
from ..layout import shown, whole_number
from ..pool import FramePool, check_pool_alone
from ..tensors import check_source, export_range


@dataclass(frozen=True)
class GrowableTensorStats:
    """A snapshot of a `GrowableTensor`.

    Attributes:
        budget_bytes: the most that it may take.
        physical_bytes: what it takes now, in whole pages, also those that a shrinking left behind.
        used_bytes: bytes of its rows.
    """

    budget_bytes: int
    physical_bytes: int
    used_bytes: int


class GrowableTensor:
    """A contiguous tensor that grows and shrinks in its first dimension, in place.

        history = GrowableTensor((1 << 30, 4096), torch.bfloat16)  # 8 TiB of addresses, no memory
        history.append(rows)  # [n, 4096]
        history.tensor  # [length, 4096]: a view, valid for as long as its rows are

    A view of its rows stays valid while it grows: addresses and strides never change. Methods may be called from
    several threads, and one runs at a time. A finalizer, or a signal handler, that runs in the middle of an operation
    may read its state; all that changes it is refused (`BusyError`). After `close` all else raises `UseAfterFreeError`.
    An error leaves it as it was.

    Args:
        shape_max: the largest shape, at most 100 TiB of it; the first dimension is the one that grows.
        dtype: of the elements; None is torch's default.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        max_bytes: the budget: bytes, `"20GiB"`, or a share of the memory that is free now, `"80%"` (the default) or
            `0.8`.
        page_size: bytes of a page, as in `KVCache`; None is 2 MiB.
        pool: physical memory shared with others, instead of `device` and `page_size`. Then `max_bytes` is the most of
            it that this tensor may have; None is all that others do not use.

    Raises:
        LayoutError: the shape has no bytes, or takes more than 100 TiB of addresses; or there is no such page.
        BudgetError: the budget is no size, below one page, or larger than the device.
        DtypeError, DeviceError: there is no such dtype or device.
        DriverError: the driver could not reserve the addresses.
        ArgumentError, TypeError, ValueError: the pool is not a `FramePool`, the shape is none, or something is given
            that the pool determines.
    """

    def __init__(
        self,
        shape_max: Sequence[int],
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        *,
        max_bytes: float | str | None = None,
        page_size: int | None = None,
        pool: FramePool | None = None,
    ) -> None:
        check_pool_alone(pool, device=device, page_size=page_size)
        self.shape_max = torch.Size(whole_number("shape_max", size) for size in shape_max)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(self.dtype, torch.dtype):
            raise DtypeError(f"got dtype={dtype!r}; it must be a torch.dtype")
        if not self.shape_max or min(self.shape_max) < 1:
            raise LayoutError(f"asked for shape_max={tuple(self.shape_max)}; each dimension is at least 1")
        self._row_bytes = math.prod(self.shape_max[1:]) * self.dtype.itemsize
        nbytes = self.shape_max[0] * self._row_bytes
        check_address_space(nbytes, f"shape_max={tuple(self.shape_max)} of {self.dtype}")
        self.owns_pool = pool is None
        limit = None if pool is None or max_bytes is None else pages_within(pool, max_bytes)
        budget = "80%" if max_bytes is None else max_bytes
        self.pool = pool or FramePool(budget, device=device, page_size=page_size)
        """The physical memory that it lies on."""
        self.pool.is_shared = not self.owns_pool
        self._lock: Any = threading.RLock()
        self._cache = Cache(self.pool, (self._row_bytes,), 1, self.shape_max[0], limit=limit, large=False)
        self._sequence = self._cache.start()
        with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
            flat = export_range(int(self._cache.ranges[0]["address"]), nbytes, self.device, owner=self._cache.owner())
            self._whole = flat.view(self.dtype).view(self.shape_max)
        self.account_name = self.pool.name(self)

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self.pool.device

    @property
    def tensor(self) -> torch.Tensor:
        """Its rows, `[length, *shape_max[1:]]`: a view, contiguous and zero-copy."""
        return self._opened()[: len(self)]

    @property
    def shape(self) -> torch.Size:
        """The shape of `tensor`."""
        return torch.Size((len(self), *self.shape_max[1:]))

    @property
    def capacity(self) -> int:
        """The length up to which growing costs no driver call."""
        return int(self._cache.capacities[0])

    def __len__(self) -> int:
        return int(self._cache.lengths[0])

    def resize(self, length: int) -> None:
        """Grows or shrinks to `length` rows. Rows that stay keep their values; new ones are undefined. Pages behind the
        new end stay mapped, ready to be grown into again; `trim` gives them back.

        Raises:
            ShapeError, TypeError: `length` is negative or over the maximum, or is no whole number.
            OutOfPagesError: the budget cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages would be left behind while a CUDA graph is captured.
        """
        length = operator.index(length)
        with self._alone():
            self._resize(length)

    def append(self, rows: torch.Tensor) -> None:
        """Grows by `rows`, `[n, *shape_max[1:]]`, and copies them. Raises `ArgumentError`, `ShapeError`, `DtypeError`
        or `DeviceError` where they do not fit, and what `resize` raises."""
        check_source(rows, "rows", self.dtype, self.device)
        if rows.shape[1:] != self.shape_max[1:] or not rows.ndim:
            needed = ", ".join(map(str, ("n", *self.shape_max[1:])))
            raise ShapeError(f"got rows of shape {list(rows.shape)}; it must be [{needed}], for any number n of rows")
        with self._alone():
            start, end = len(self), len(self) + len(rows)
            self._resize(end)
            self._opened()[start:end].copy_(rows.detach())  # it is no part of an autograd graph

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Says that work on `stream` uses it: pages that it leaves behind wait for that work, too. Raises
        `ArgumentError` or `DeviceError` for what is no stream of its device."""
        self._opened()
        self._cache.record_stream(self._sequence, stream)

    def trim(self) -> int:
        """Gives the pages behind its last row back to the system, and pages that are free; returns their bytes. Waits
        for GPU work that was submitted before it shrank. Raises `DriverError` as `KVCache.trim` does."""
        with self._alone():
            return self._cache.trim_own() * self.pool.page_size

    def stats(self) -> GrowableTensorStats:
        """A snapshot: bytes."""
        self._opened()
        size, limit = self.pool.page_size, int(self.pool.accounts[self.account]["limit"])
        physical = self.pool.word("created") if self.owns_pool else self.mapped_pages()
        budget = min(limit, self.pool.limit_pages)
        return GrowableTensorStats(budget * size, physical * size, len(self) * self._row_bytes)

    # ------------------------------------------------------------------ as a holder

    @property
    def account(self) -> int:
        """The number of its account."""
        return self._cache.account

    def mapped_pages(self) -> int:
        """Pages that are mapped for it."""
        return int(self._cache.extents[0]["mapped"] - self._cache.extents[0]["first"])

    # ------------------------------------------------------------------ use, and its end

    def close(self) -> None:
        """Gives all memory back now, after all work on the device. To touch a view after this is a fault. Garbage
        collection does the same when nothing holds it or its views any more.

        Raises:
            StreamCaptureError, DriverError: a CUDA graph is being captured, or the device could not be waited for.
            BusyError: another operation of this thread is not at its end.
        """
        if self.pool.word("dead"):
            return
        with self._alone(is_open=False):
            self._cache.close()
            vars(self).pop("_whole", None)
        self.pool.holders.pop(self.account_name, None)
        if self.owns_pool:
            self.pool.end()

    def _alone(self, *, is_open: bool = True) -> Any:
        """The lock, for a call that changes the tensor."""
        if self._lock._is_owned():
            raise busy()
        if is_open:
            self._opened()
        return self._lock

    def _opened(self) -> torch.Tensor:
        """All of the virtual tensor. Raises `UseAfterFreeError` or `ForkError` where it cannot be used any more."""
        if self.pool.word("dead"):
            raise fork_error()
        if not self._cache.owners[0]:
            raise UseAfterFreeError("this GrowableTensor was closed; make a new one")
        return self._whole

    def _resize(self, length: int) -> None:
        """Does what `resize` does, under the lock."""
        whole, before = self._opened(), len(self)
        if not 0 <= length <= self.shape_max[0]:
            raise ShapeError(
                f"asked for {shown(length)} rows; shape_max={tuple(self.shape_max)} has {self.shape_max[0]}"
            )
        if length >= before:
            self._sequence.extend(length - before)
        else:
            if (stream := self.pool.driver.current_stream()) is not None:
                self._cache.record_stream(self._sequence, stream)
            self._sequence.truncate(length)
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.pool.is_debugged and self.dtype.is_floating_point and not is_captured:
            whole[before:length].fill_(math.nan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GrowableTensor owns its memory and cannot be copied or pickled; clone its tensor")

    def __repr__(self) -> str:
        sizes = f"{list(self.shape)} of {list(self.shape_max)}"
        return f"<vmmkv.torch.GrowableTensor on {self.device}: {sizes}, {self.dtype}>"
