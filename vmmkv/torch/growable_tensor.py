"""A growable tensor: its shape is the maximum, its memory is what is used, and it never moves.

It is the tool under the cache, in general: one row of one arena. See `vmmkv.arena` and `vmmkv.pages` for the
invariants.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

import torch

from ..arena import Arena, check_address_space, wait_for_device
from ..budget import pages_within
from ..driver import Driver, driver_for
from ..errors import (
    BusyError,
    DeviceError,
    DriverError,
    DtypeError,
    ForkError,
    InterruptedChangeError,
    LayoutError,
    ShapeError,
    UseAfterFreeError,
    VmmkvError,
)
from ..fence import Fence, check_stream
from ..layout import shown, whole_number
from ..pages import PagePool
from ..tensors import check_dense, export_range

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _operation(
    method: Callable[Concatenate[GrowableTensor, Parameters], Result],
) -> Callable[Concatenate[GrowableTensor, Parameters], Result]:
    """Makes a method one operation: no other runs meanwhile, and none sees what an interrupted one (Ctrl-C) has left.

    `_is_dirty` stays set unless the method has ended, with a result or with an error of its own.
    """

    def attempt(tensor: GrowableTensor, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            result = method(tensor, *args, **kwargs)
        except (VmmkvError, TypeError, ValueError):
            tensor._is_dirty = False
            raise
        tensor._is_dirty = False
        return result

    @functools.wraps(method)
    def run(tensor: GrowableTensor, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        tensor._check_idle(method.__name__)
        with tensor._inside:
            tensor._check_open()
            if tensor._is_dirty:
                tensor._recover()
            tensor._is_dirty = True
            return attempt(tensor, *args, **kwargs)

    return run


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

    A view of its rows stays valid while it grows: addresses and strides never change. Not for use from several
    threads at once. A finalizer, or a signal handler, that runs in the middle of an operation may look at it; all that
    changes it is refused (`BusyError`).

    Args:
        shape_max: the largest shape, at most 100 TiB of it; the first dimension is the one that grows.
        dtype: of the elements; None is torch's default.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        max_bytes: the budget: bytes, `"20GiB"`, or a share of the memory that is free now.
        page_size: bytes of a page; None is 2 MiB.
        driver: a memory system of your own, instead of `device` and `page_size`.

    Raises:
        LayoutError: the shape has no bytes, or takes more than 100 TiB of addresses.
        BudgetError: the budget is no size, below one page, or larger than the device.
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        shape_max: Sequence[int],
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        *,
        max_bytes: float | str = "80%",
        page_size: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.shape_max = torch.Size(whole_number("shape_max", size) for size in shape_max)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(self.dtype, torch.dtype):
            raise DtypeError(f"got dtype={dtype!r}; it must be a torch.dtype")
        if not self.shape_max or min(self.shape_max) < 1:
            raise LayoutError(f"asked for shape_max={tuple(self.shape_max)}; each dimension is at least 1")
        self._row_bytes = math.prod(self.shape_max[1:]) * self.dtype.itemsize
        self._driver = driver_for(driver, device, page_size)
        size = self._driver.page_size
        nbytes = -(-self.shape_max[0] * self._row_bytes // size) * size
        check_address_space(nbytes, f"shape_max={tuple(self.shape_max)} of {self.dtype}")
        self._pool = PagePool(self._driver, pages_within(self._driver, max_bytes))
        self._arena = Arena(self._pool, 1, nbytes)
        with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
            flat = export_range(self._arena.address, nbytes, self.device, owner=self._arena)
            self._whole = flat[: self.shape_max[0] * self._row_bytes].view(self.dtype).view(self.shape_max)
        self._length = 0
        self._fence = Fence()
        self._streams = {self._driver.current_stream()}
        self._process = os.getpid()
        self._is_open = True
        self._has_memory = True
        """The memory is ours to give back."""
        self._inside = threading.Lock()
        self._is_dirty = False
        """An operation has begun and not ended."""
        _tensors.add(self)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._driver.device

    @property
    def tensor(self) -> torch.Tensor:
        """Its rows, `[length, *shape_max[1:]]`: a view, contiguous and zero-copy."""
        self._check_open()
        return self._whole[: self._length]

    @property
    def shape(self) -> torch.Size:
        """The shape of `tensor`."""
        return torch.Size((self._length, *self.shape_max[1:]))

    @property
    def capacity(self) -> int:
        """The length up to which growing costs no driver call."""
        return min(self._arena.rows[0].ready * self._driver.page_size // self._row_bytes, self.shape_max[0])

    def __len__(self) -> int:
        return self._length

    @_operation
    def resize(self, length: int) -> None:
        """Grows or shrinks to `length` rows. Rows that stay keep their values; new ones are undefined.

        Pages behind the new end stay mapped, ready to be grown into again; `trim` gives them back.

        Raises:
            ShapeError: `length` is negative or over the maximum.
            OutOfPagesError: the budget cannot supply the pages.
            DriverError: a driver call failed.
            StreamCaptureError: pages would be left behind while a CUDA graph is captured.
            UseAfterFreeError: it was closed. In all cases it is as before.
        """
        length = operator.index(length)
        self._make_room(length)
        if self._pages(length) < self._pages(self._length):
            self._fence_all()
        self._length = length

    @_operation
    def append(self, rows: torch.Tensor) -> None:
        """Grows by `rows`, `[n, *shape_max[1:]]`, and copies them.

        Raises:
            ArgumentError, ShapeError, DtypeError, DeviceError: they do not fit; and what `resize` raises. It is as
                before.
        """
        check_dense(rows, "rows")
        if rows.shape[1:] != self.shape_max[1:] or not rows.ndim:
            raise ShapeError(f"got {list(rows.shape)}; rows of shape_max={tuple(self.shape_max)} are needed")
        if rows.dtype != self.dtype:
            raise DtypeError(f"got {rows.dtype}; this tensor holds {self.dtype}. Convert with .to()")
        if rows.device != self.device:
            raise DeviceError(f"got rows on {rows.device}; this tensor is on {self.device}")
        start, end = self._length, self._length + len(rows)
        self._make_room(end)
        self._whole[start:end].copy_(rows.detach())  # it is no part of an autograd graph
        self._length = end

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Says that work on `stream` uses it: pages that it leaves behind wait for that work, too.

        Raises:
            DeviceError: the stream is on another device.
        """
        check_stream(stream)
        if stream.device != self.device:
            raise DeviceError(f"got a stream on {stream.device}; this tensor is on {self.device}")
        self._streams.add(stream)

    @_operation
    def trim(self) -> int:
        """Gives the pages behind its last row back to the system; returns their bytes.

        Waits for GPU work that was submitted before it shrank.
        """
        self._fence.wait()
        self._arena.unmap_back(0, self._pages(self._length))
        return self._pool.release_free() * self._driver.page_size

    @_operation
    def stats(self) -> GrowableTensorStats:
        """A snapshot: bytes."""
        size = self._driver.page_size
        return GrowableTensorStats(self._pool.budget * size, self._pool.created * size, self._length * self._row_bytes)

    def close(self) -> None:
        """Gives all memory back now, after all work on the device. To touch a view after this is a fault.

        Garbage collection does the same when nobody holds it or its views any more.

        Raises:
            StreamCaptureError: a CUDA graph is being captured; nothing was closed.
            DriverError: the device could not be waited for; nothing was closed.
            BusyError: another operation is not at its end.
        """
        if not self._has_memory:
            return
        self._check_idle("close")
        with self._inside:
            wait_for_device(self._driver)
            self._is_open = False
            self._length = 0
            self._arena.close()
            self._pool.close()
            self._has_memory = False

    def _pages(self, length: int) -> int:
        return -(-length * self._row_bytes // self._driver.page_size)

    def _make_room(self, length: int) -> None:
        """Maps the pages of `length` rows, or changes nothing."""
        if not 0 <= length <= self.shape_max[0]:
            raise ShapeError(
                f"asked for {shown(length)} rows; shape_max={tuple(self.shape_max)} has {self.shape_max[0]}"
            )
        end, old_end = self._pages(length), self._arena.rows[0].end
        if end <= self._arena.rows[0].ready:
            return
        supply = self._pool.take(max(end - old_end, 0))
        try:
            self._arena.map_back(0, max(end, old_end), supply)
        except DriverError:
            self._pool.give(supply)
            with suppress(DriverError):  # what cannot be unmapped stays in the books, behind the last row
                self._arena.unmap_back(0, old_end)
            raise

    def _fence_all(self) -> None:
        """Keeps the pages behind the last row until all work so far has finished."""
        self._fence |= Fence.after(self._driver, {self._driver.current_stream(), *self._streams})

    def _check_open(self) -> None:
        if not self._is_open:
            raise UseAfterFreeError("this GrowableTensor was closed; make a new one")
        self._check_process()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ForkError("this GrowableTensor was made before fork(); its memory belongs to the parent")

    def _check_idle(self, asked: str) -> None:
        self._check_process()  # first: a child may have got the lock in whatever state
        if self._inside.locked():
            raise BusyError(
                f"{asked} was called in the middle of another operation on the same GrowableTensor, as by a finalizer "
                "or a signal handler. Leave a note there and call it later"
            )

    def _recover(self) -> None:
        """After an interruption: makes the books right, or says that nobody can."""
        if self._pool.unsettled:
            raise InterruptedChangeError(
                "this GrowableTensor was interrupted (Ctrl-C) while it had the driver make or release a page, and "
                "cannot know whether that was done. Close it, and make a new one"
            )
        self._fence_all()  # who was interrupted may have begun to write behind the last row
        self._arena.settle(0)
        self._pool.settle(self._arena.rows[0].pages)
        self._is_dirty = False

    def __reduce__(self) -> NoReturn:
        raise TypeError("a GrowableTensor owns its memory and cannot be copied or pickled; clone its tensor")

    def __repr__(self) -> str:
        sizes = f"{list(self.shape)} of {list(self.shape_max)}"
        return f"<vmmkv.torch.GrowableTensor on {self.device}: {sizes}, {self.dtype}>"

    def __enter__(self) -> GrowableTensor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_tensors: weakref.WeakSet[GrowableTensor] = weakref.WeakSet()
