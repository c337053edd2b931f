"""What Python holds of a memory system: its table of C functions, and its errors."""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NewType

import numpy as np
import torch

from ..compiled.code import address_of, keep
from ..errors import DeviceError, DriverError, ForkError, LayoutError, StreamCaptureError
from ..stats import CallStats
from . import entries
from .fencing import EVENTS, SLOTS, STREAM
from .running import CAPTURED
from .table import (
    COPY, CREATE, DRIVER, FORKED, FREE, MAP, RELEASE, RESERVE, SCRATCH, SET_ACCESS, SET_READ_ACCESS, SYNCHRONIZE,
    UNMAP,
)  # fmt: skip

Handle = NewType("Handle", int)
"""Physical memory of a page, or of several side by side, as the memory system names it."""

DEFAULT_PAGE_SIZE = 2 << 20
STEPS = (
    "unmap", "map", "set_access", "create", "release", "set_access", "reserve", "free", "wait_for", "fill", "copy",
    "deallocate",
)  # fmt: skip
"""By kind of a step: the function of the table."""


class Meter:
    """Calls that succeeded, by name, of the first kinds of steps."""

    def __init__(self) -> None:
        self.spent = np.zeros((RELEASE + 1, 2), np.int64)
        """By kind: calls, and nanoseconds in all. Compiled code adds to it."""

    def stats(self) -> dict[str, CallStats]:
        """A snapshot of those that were made."""
        found = zip(STEPS, self.spent.tolist())
        return {name: CallStats(count, nanoseconds / 1e9) for name, (count, nanoseconds) in found if count}


class Driver:
    """A memory system. Addresses and sizes are in bytes, multiples of `page_size`.

    Args:
        device: where the pages are.
        granularity: bytes of the smallest page that it has.
        page_size: bytes of one page, a multiple of the granularity.
        words: addresses of `FUNCTIONS`, and `ARGUMENTS`.
        names: what the memory system calls its functions, for errors.

    Attributes:
        table: its `DRIVER` record. A test may put functions of its own into it.
        address: that of the table, which compiled functions are given.
        slot_streams: by slot of a fence, its stream, so that it lives as long as its handle is there.
    """

    def __init__(
        self, device: torch.device, granularity: int, page_size: int, words: Mapping[str, int], names: Mapping[str, str]
    ) -> None:
        self.device, self.granularity, self.page_size, self.names = device, granularity, page_size, names
        records = np.zeros(1, DRIVER)
        fences: Any = np.zeros(SLOTS, STREAM), *(np.zeros((SLOTS, EVENTS), np.int64) for _ in range(2))
        keep(records, fences)
        self.table, self.address = records[0], records.ctypes.data
        for name, value in words.items():
            self.table[name] = value
        for name, part in zip(("streams_at", "ticks_at", "events_at"), fences):
            self.table[name] = part.ctypes.data
        self.table["clock"] = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
        self._process = os.getpid()
        self.slot_streams: list[Any] = [None] * SLOTS
        _drivers.add(self)

    # -------------------------------------------------------------- memory

    def memory_info(self) -> tuple[int, int]:
        """Free and total physical bytes of the device, now."""
        raise NotImplementedError

    def empty_torch_cache(self) -> int:
        """Has torch's allocator give memory of the device back that holds no tensor; returns the number of bytes."""
        return 0

    def reserve(self, nbytes: int) -> int:
        """Reserves a virtual range and returns its address."""
        out = array("q", [0])
        self.make_step(RESERVE, out.buffer_info()[0], nbytes, 0, f"reserving {nbytes} bytes of addresses")
        return out[0]

    def free(self, address: int, nbytes: int) -> None:
        """Gives a whole reserved range back; nothing may be mapped in it."""
        self.make_step(FREE, address, nbytes)

    def create(self, pages: int = 1) -> Handle:
        """Makes one piece of memory, of several pages side by side if asked. Raises `DriverOutOfMemoryError` when the
        device has none left."""
        out = array("q", [0])
        self.make_step(CREATE, out.buffer_info()[0], pages * self.page_size, 1)
        return Handle(out[0])

    def release(self, handle: Handle) -> None:
        """Gives a piece of memory back; it may be mapped nowhere."""
        word = array("q", [handle])
        self.make_step(RELEASE, word.buffer_info()[0], 0, 1)

    def map(self, address: int, handle: Handle, pages: int = 1) -> None:
        """Puts a piece of memory, which is of so many pages, under `address`, where nothing is mapped."""
        self.make_step(MAP, address, pages * self.page_size, handle)

    def set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        """Makes a range of mapped pages readable, and writable or read-only."""
        self.make_step(SET_ACCESS if writable else SET_READ_ACCESS, address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes away what is mapped in a range, whole pieces; where nothing is mapped it stays so."""
        self.make_step(UNMAP, address, nbytes)

    def make_step(
        self, kind: int, address: int, nbytes: int = 0, other: int = 0, detail: str = "", streams: Sequence[Any] = ()
    ) -> None:
        """Makes one call (see `vmmkv.driver.running`), without the interpreter's lock; `streams` are the current one,
        and the one that work is queued on. Raises `DriverError`, or `StreamCaptureError` where one is captured."""
        _scratch, at = new_scratch()
        handles = map(handle_of, streams or (None, None))
        status = entries.make(self.address, kind, address, nbytes, other, *handles, at)
        if status == CAPTURED:
            raise self.captured(STEPS[kind], *streams)
        if status:
            raise self.error(STEPS[kind], status, detail)

    # -------------------------------------------------------------- streams

    def current_stream(self) -> Any:
        """The stream that torch works on now; None where work is never asynchronous."""
        return None

    def current_handle(self) -> int:
        """The handle of that stream, 0 for none."""
        return handle_of(self.current_stream())

    def new_stream(self) -> Any:
        """A stream that waits for no other; None where work is never asynchronous."""
        return None

    def copy(self, destination: int, source: int, nbytes: int, stream: Any = None) -> None:
        """Copies bytes between ranges that do not overlap, of which one may be pinned host memory, in the order of a
        stream, or of the current one. Raises `DriverError` or `StreamCaptureError`."""
        current = self.current_stream()
        self.make_step(COPY, destination, nbytes, source, streams=(current, current if stream is None else stream))

    def synchronize(self) -> None:
        """Waits for all work on the device. Captures of other threads go on undisturbed."""
        word = array("q", [0])
        self.make_step(SYNCHRONIZE, word.buffer_info()[0], streams=(self.current_stream(), None))

    # -------------------------------------------------------------- errors

    def error(self, name: str, status: int, detail: str = "") -> Exception:
        """What a status of a function of the table is raised as."""
        if status == FORKED:
            return fork_error()
        return self.error_of(name, status, detail)

    def error_of(self, name: str, status: int, detail: str) -> DriverError:
        """The same, but for `FORKED`."""
        raise NotImplementedError

    def captured(self, name: str, *streams: Any) -> StreamCaptureError:
        """What is raised for a call while one of some streams is captured."""
        shown = " or ".join(dict.fromkeys(repr(stream) for stream in streams if stream is not None))
        return StreamCaptureError(
            f"{self.names[name]} cannot be part of a CUDA graph, and {shown} is being captured: extend what the graph "
            "needs before the capture, and truncate, free or close after it"
        )

    def check_process(self) -> None:
        """Raises `ForkError` where a driver was made by another process: each would take the other's pages for free."""
        if os.getpid() != self._process:
            raise fork_error()


def open_driver(device: str | torch.device | None = None, page_size: int | None = None) -> Driver:
    """The driver for `device`.

    Args:
        device: `"cuda"`, `"cuda:1"` or `"cpu"`; None takes CUDA where there is a GPU.
        page_size: bytes of a page; None is 2 MiB, or the granularity where that is larger.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise DeviceError(f"asked for device {device!r}; vmmkv knows 'cuda', 'cuda:1' and 'cpu'") from None
    if device.type == "cuda":
        from .cuda import CudaDriver

        return CudaDriver(device, page_size)
    if device.type == "cpu":
        from .host import HostDriver

        return HostDriver(page_size)
    raise DeviceError(f"asked for device {device}; vmmkv knows cuda and cpu")


def new_scratch() -> tuple[array[int], int]:
    """`SCRATCH` words for one call of a compiled function, and their address: it is good while they are held."""
    words = array("q", bytes(8 * SCRATCH))
    return words, words.buffer_info()[0]


def handle_of(stream: Any) -> int:
    """A stream's handle. The default stream has a name of its own, so that 0 is none."""
    return 0 if stream is None else stream.cuda_stream or LEGACY


LEGACY = 1
"""CU_STREAM_LEGACY."""


def fork_error() -> ForkError:
    """What a forked child is told."""
    return ForkError(
        "this driver was made before fork(); its memory belongs to the parent. Make a new one in the child, or start "
        "processes with the 'spawn' method"
    )


def check_page_size(page_size: int | None, granularity: int) -> int:
    """The page size to use: a multiple of `granularity`, 2 MiB unless asked otherwise."""
    if page_size is None:
        return -(-DEFAULT_PAGE_SIZE // granularity) * granularity
    if not isinstance(page_size, int) or page_size <= 0 or page_size % granularity or page_size.bit_length() > 47:
        shown = page_size if not isinstance(page_size, int) or page_size.bit_length() < 64 else "more than 64 bits"
        raise LayoutError(f"asked for page_size={shown}; it must be a multiple of {granularity} bytes, below 2**47")
    return page_size


def _leave_to_parent() -> None:
    """Refuses all calls in a forked child, by `push`, which comes first in each: the child has no part in the parent's
    pages, may have memory of its own where they were, and cannot use a GPU at all."""
    for driver in list(_drivers):
        driver.table["push"] = address_of(entries.host_refuse)


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)
