"""The contract of a memory system, and the only code that talks to one.

A driver hands out physical pages and puts them under virtual addresses. There are two, of one
contract: `cuda` (the CUDA driver's virtual memory API) and `host` (a memfd mapped piece by piece).
Each method is one call of the memory system, so that a test can make any one of them fail.

The contract:
 1. `reserve` returns addresses that belong to nobody else and that fault on any access.
 2. `create` returns physical memory, of a page or of several. It has no address. What it holds is nobody's secret:
    zeros, as far as has been seen, but a driver need not promise that.
 3. `map` puts all of it under an address; an access still faults until `set_access`.
    It may be mapped at many addresses; they all see the same bytes.
 4. `unmap` takes the pages away from an address range, wherever there are some; accesses fault again. The bytes
    stay in the pages until `release`, and a page mapped again elsewhere shows them there.
 5. A call either does what it says or raises `DriverError` and does nothing.
 6. Only the process that made a driver has a part in its pages: in a forked child `reserve`, `create`, `map` and
    `release` raise `ForkError`.
 7. No call waits for work on the device, and none checks whether work still uses a page: that is
    the caller's part (see `vmmkv.memory.fence`).
"""

from __future__ import annotations

import os
from typing import Any, NewType, Protocol, runtime_checkable

import torch

from ...errors import ArgumentError, DeviceError, DriverError, ForkError, LayoutError

Handle = NewType("Handle", int)
"""Physical memory of a page, or of several side by side, as the memory system names it."""

DEFAULT_PAGE_SIZE = 2 << 20


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before this point has finished; does not wait."""

    def synchronize(self) -> None:
        """Waits until it has."""

    def wait(self, stream: Any) -> None:
        """Makes work that is submitted to `stream` from now on wait for this point; the host goes on."""


class Driver(Protocol):
    """What `vmmkv` asks of a memory system. Addresses and sizes are in bytes, multiples of `page_size`."""

    @property
    def device(self) -> torch.device:
        """Where the pages are."""

    @property
    def granularity(self) -> int:
        """Bytes of the smallest page that the memory system has."""

    @property
    def page_size(self) -> int:
        """Bytes of one page, a multiple of the granularity."""

    def enter_thread(self) -> None:
        """Makes a thread that is not the user's ready for calls."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total physical bytes of the device, now."""

    def reserve(self, nbytes: int) -> int:
        """Reserves a virtual range and returns its address."""

    def free(self, address: int, nbytes: int) -> None:
        """Gives a whole reserved range back; nothing may be mapped in it."""

    def create(self, pages: int = 1) -> Handle:
        """Makes one piece of memory, of several pages side by side if asked. Raises `DriverOutOfMemoryError` when the
        device has none left."""

    def release(self, handle: Handle) -> None:
        """Gives a piece of memory back; it may be mapped nowhere."""

    def map(self, address: int, handle: Handle, pages: int = 1) -> None:
        """Puts a piece of memory, which is of so many pages, under `address`, where nothing is mapped."""

    def set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        """Makes a range of mapped pages readable, and writable or read-only."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes away what is mapped in a range, whole pieces; where nothing is mapped it stays so."""

    def fill(self, address: int, nbytes: int, value: int, stream: Any) -> None:
        """Sets bytes, in the order of a stream."""

    def copy(self, destination: int, source: int, nbytes: int, stream: Any = None) -> None:
        """Copies bytes between ranges that do not overlap, of which one may be pinned host memory, in the order of a
        stream, or of the current one."""

    def current_stream(self) -> Any:
        """The stream that torch works on now; None where work is never asynchronous."""

    def new_stream(self) -> Any:
        """A stream that waits for no other; None where work is never asynchronous."""

    def record(self, stream: Any) -> Event:
        """An event after all work submitted to `stream` so far.

        Raises:
            StreamCaptureError: a CUDA graph is being captured on the current stream, or on `stream`. `fill` and
                `copy` raise it too: as a part of the graph they would run again at each replay.
        """

    def synchronize(self) -> None:
        """Waits for all work on the device. Captures of other threads go on undisturbed.

        Raises:
            StreamCaptureError: a CUDA graph is being captured on the current stream.
            DeviceLostError: an earlier failure has ended the device's context, and its memory with it.
        """


@runtime_checkable
class NativeDriver(Driver, Protocol):
    """A driver whose functions can be called by their addresses, without the interpreter."""

    def c_interface(self) -> dict[str, int]:
        """Addresses of C functions, by the names of this class's methods, and of the arguments that they take."""

    def error(self, name: str, status: int) -> DriverError:
        """What the method of that name raises for a status of its function."""


def driver_for(driver: Driver | None, device: str | torch.device | None, page_size: int | None) -> Driver:
    """A memory system of somebody's own, or the one for `device`: see `open_driver`."""
    if driver is None:
        return open_driver(device, page_size)
    if device is not None or page_size is not None:
        raise ValueError("give a driver, or device and page_size; a driver has its own")
    if not hasattr(driver, "reserve"):
        raise ArgumentError(f"got driver={driver!r}; it must be a vmmkv.memory.driver.Driver, as open_driver() returns")
    return driver


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


def are_of_one_memory(one: Driver, other: Driver) -> bool:
    """Whether two drivers have their pages from the same device, as far as is known: of somebody's own it is not."""
    is_ours = type(one).__module__.startswith(f"{__name__}.")
    return is_ours and type(one) is type(other) and one.device == other.device


def check_process(owner: int) -> None:
    """Raises `ForkError` where a driver was made by another process: each would take the other's pages for free."""
    if os.getpid() != owner:
        raise ForkError(
            "this driver was made before fork(); its memory belongs to the parent. Make a new one in the child, or "
            "start processes with the 'spawn' method"
        )


def check_page_size(page_size: int | None, granularity: int) -> int:
    """The page size to use: a multiple of `granularity`, 2 MiB unless asked otherwise."""
    if page_size is None:
        return -(-DEFAULT_PAGE_SIZE // granularity) * granularity
    if not isinstance(page_size, int) or page_size <= 0 or page_size % granularity or page_size.bit_length() > 47:
        shown = page_size if not isinstance(page_size, int) or page_size.bit_length() < 64 else "more than 64 bits"
        raise LayoutError(f"asked for page_size={shown}; it must be a multiple of {granularity} bytes, below 2**47")
    return page_size
