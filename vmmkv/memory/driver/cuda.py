"""Virtual memory on a GPU: the CUDA driver's virtual memory API through `cuda.bindings.driver`.

Works in the primary context, the one that torch uses, so that torch's kernels see the mappings.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cuda.bindings.driver as cu
import torch

from ...errors import DeviceError, DeviceLostError, DriverError, DriverOutOfMemoryError, StreamCaptureError
from . import Event, Handle, check_page_size, check_process

SUCCESS = cu.CUresult.CUDA_SUCCESS
MINIMUM = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
CAPTURED_IMPLICITLY = cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
NOT_CAPTURING = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
LOST = {
    getattr(cu.CUresult, f"CUDA_ERROR_{name}")
    for name in (
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "ECC_UNCORRECTABLE",
        "DEINITIALIZED",
    )
}
"""After these a context never works again."""
C_NAMES = {
    "reserve": "cuMemAddressReserve",
    "free": "cuMemAddressFree",
    "create": "cuMemCreate",
    "release": "cuMemRelease",
    "map": "cuMemMap",
    "set_access": "cuMemSetAccess",
    "unmap": "cuMemUnmap",
    "push": "cuCtxPushCurrent_v2",
    "pop": "cuCtxPopCurrent_v2",
    "synchronize": "cuCtxSynchronize",
}
"""Functions of the CUDA driver that compiled code calls."""


def check(call: str, status: Any, detail: str = "") -> None:
    """Raises what a CUDA driver call returned, unless it was success."""
    if status != SUCCESS:
        lost = DeviceLostError if status in LOST else DriverError
        kind = DriverOutOfMemoryError if status == OUT_OF_MEMORY else lost
        raise kind(call, cu.CUresult(status).name, detail)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Lets this thread make calls that would break a graph capture, its own or another thread's: it knows that they
    are no part of it. torch's caching allocator does the same."""
    _, mode = cu.cuThreadExchangeStreamCaptureMode(RELAXED)
    try:
        yield
    finally:
        cu.cuThreadExchangeStreamCaptureMode(mode)


def cuda_version() -> str:
    """The newest CUDA that the installed driver supports."""
    status, version = cu.cuDriverGetVersion()
    check("cuDriverGetVersion", status)
    return f"{version // 1000}.{version % 1000 // 10}"


class _CudaEvent:
    """A point in a stream's work."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def query(self) -> bool:
        with _relaxed():
            (status,) = cu.cuEventQuery(self._event.cuda_event)
        if status == NOT_READY:
            return False
        check("cuEventQuery", status)
        return True

    def synchronize(self) -> None:
        with _relaxed():
            (status,) = cu.cuEventSynchronize(self._event.cuda_event)
        check("cuEventSynchronize", status)

    def wait(self, stream: torch.cuda.Stream) -> None:
        self._event.wait(stream)


class CudaDriver:
    """Pages of GPU memory (see `vmmkv.memory.driver.Driver`).

    Pages can be exported to other processes and read by other PCIe devices (GPUDirect RDMA) where
    the device supports it: `features` says what a trial page was granted, and what else there is.

    Args:
        device: a CUDA device; without an index, torch's current one.
        page_size: bytes of a page, a multiple of the device's granularity (2 MiB on all so far).
    """

    def __init__(self, device: torch.device, page_size: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(f"asked for {device}, but torch sees no CUDA device; device='cpu' runs on host memory")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise DeviceError(f"asked for cuda:{index}; torch sees {torch.cuda.device_count()} CUDA device(s)")
        self.device = torch.device("cuda", index)
        self._process = os.getpid()
        self.memory_info()  # makes torch's primary context, where there is none yet
        status, ordinal = cu.cuDeviceGet(index)
        check("cuDeviceGet", status)
        status, self._context = cu.cuDevicePrimaryCtxRetain(ordinal)  # for ever, like torch
        check("cuDevicePrimaryCtxRetain", status)
        self.features, self.allocation, self.granularity = self._probe(ordinal)
        """What pages can do, what `cuMemCreate` is asked for, and bytes of the smallest page."""
        self.page_size = check_page_size(page_size, self.granularity)
        self.access = {writable: [self._access_description(writable)] for writable in (False, True)}
        """What `cuMemSetAccess` is asked for, by whether pages may be written."""

    def _allocation_property(self, exportable: bool, rdma: bool) -> Any:
        """What `cuMemCreate` is asked for."""
        wanted = cu.CUmemAllocationProp()
        wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.device.index
        if exportable:
            handle_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            wanted.requestedHandleTypes = handle_type
        wanted.allocFlags.gpuDirectRDMACapable = int(rdma)
        return wanted

    def _access_description(self, writable: bool) -> Any:
        """What `cuMemSetAccess` is asked for."""
        flags = cu.CUmemAccess_flags
        access = cu.CUmemAccessDesc()
        access.location = self.allocation.location
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        return access

    def _probe(self, ordinal: Any) -> tuple[dict[str, bool], Any, int]:
        """Which kind of page the device grants, and its granularity: asks, then makes one to be sure."""
        attribute = cu.CUdevice_attribute

        def supports(name: Any) -> bool:
            status, value = cu.cuDeviceGetAttribute(name, ordinal)
            return bool(status == SUCCESS and value)

        if not supports(attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED):
            raise DeviceError(f"{self.device} has no virtual memory management, which vmmkv is made of")
        exportable = supports(attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        rdma = supports(attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
        for features in (
            {"exportable": exportable, "rdma": rdma},
            {"exportable": exportable, "rdma": False},
            {"exportable": False, "rdma": False},
        ):
            wanted = self._allocation_property(**features)
            status, granularity = cu.cuMemGetAllocationGranularity(wanted, MINIMUM)
            check("cuMemGetAllocationGranularity", status)
            status, handle = cu.cuMemCreate(granularity, wanted, 0)
            if status == SUCCESS:
                check("cuMemRelease", *cu.cuMemRelease(handle))
                features["fabric_handles"] = supports(attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
                features["host_numa_pages"] = supports(
                    attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
                )
                return features, wanted, granularity
        check("cuMemCreate", status, "not even a plain page could be made")
        raise AssertionError("check raises")

    def c_interface(self) -> dict[str, int]:
        """What compiled code needs to do the same as this class without the interpreter: addresses of C functions, and
        of the arguments that they take. Valid as long as this driver lives."""
        libcuda = ctypes.CDLL("libcuda.so.1")
        addresses = {
            name: ctypes.cast(getattr(libcuda, symbol), ctypes.c_void_p).value or 0 for name, symbol in C_NAMES.items()
        }
        access, read_access = (self.access[writable][0].getPtr() for writable in (True, False))
        arguments = {"property": self.allocation.getPtr(), "access": access, "read_access": read_access}
        return addresses | arguments | {"context": int(self._context)}

    def error(self, name: str, status: int) -> DriverError:
        """What a method of this class would have raised for a status of the function that it calls."""
        try:
            check(C_NAMES[name], cu.CUresult(status), f"{self.page_size} bytes on {self.device}")
        except DriverError as error:
            return error.with_traceback(None)
        raise AssertionError(f"{name} has not failed")

    def enter_thread(self) -> None:
        check("cuCtxSetCurrent", *cu.cuCtxSetCurrent(self._context))

    def memory_info(self) -> tuple[int, int]:
        check_process(self._process)
        return torch.cuda.mem_get_info(self.device)

    def reserve(self, nbytes: int) -> int:
        check_process(self._process)
        status, address = cu.cuMemAddressReserve(nbytes, 0, 0, 0)
        check("cuMemAddressReserve", status, f"reserving {nbytes} bytes of addresses")
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        check("cuMemAddressFree", *cu.cuMemAddressFree(address, nbytes))

    def create(self, pages: int = 1) -> Handle:
        check_process(self._process)
        status, handle = cu.cuMemCreate(self.page_size * pages, self.allocation, 0)
        if status:
            check("cuMemCreate", status, f"{self.page_size * pages} bytes on {self.device}")
        return Handle(int(handle))

    def release(self, handle: Handle) -> None:
        check_process(self._process)
        check("cuMemRelease", *cu.cuMemRelease(handle))

    def map(self, address: int, handle: Handle, pages: int = 1) -> None:
        check_process(self._process)
        (status,) = cu.cuMemMap(address, self.page_size * pages, 0, handle, 0)
        if status:
            check("cuMemMap", status)

    def set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        (status,) = cu.cuMemSetAccess(address, nbytes, self.access[writable], 1)
        if status:
            check("cuMemSetAccess", status)

    def unmap(self, address: int, nbytes: int) -> None:
        check("cuMemUnmap", *cu.cuMemUnmap(address, nbytes))

    def fill(self, address: int, nbytes: int, value: int, stream: torch.cuda.Stream) -> None:
        with self._outside_capture("cuMemsetD8Async", stream):
            check("cuMemsetD8Async", *cu.cuMemsetD8Async(address, value, nbytes, stream.cuda_stream))

    def copy(self, destination: int, source: int, nbytes: int, stream: torch.cuda.Stream | None = None) -> None:
        stream = stream or self.current_stream()
        with self._outside_capture("cuMemcpyAsync", stream):
            check("cuMemcpyAsync", *cu.cuMemcpyAsync(destination, source, nbytes, stream.cuda_stream))

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def record(self, stream: torch.cuda.Stream) -> Event:
        with self._outside_capture("cuEventRecord", stream):
            return _CudaEvent(stream)

    def synchronize(self) -> None:
        # cuCtxSynchronize would break a capture of any other thread, whatever this thread's mode. To free memory waits
        # for all streams as well, and leaves captures alone (seen on an H200 with driver 580).
        with self._outside_capture("cuMemFree", self.current_stream()), _relaxed():
            status, trifle = cu.cuMemAlloc(1)
            if status == OUT_OF_MEMORY:
                check("cuCtxSynchronize", *cu.cuCtxSynchronize())
                return
            check("cuMemAlloc", status)
            check("cuMemFree", *cu.cuMemFree(trifle))

    @contextmanager
    def _outside_capture(self, call: str, stream: torch.cuda.Stream) -> Iterator[None]:
        """Refuses a call while the current stream is captured, which would repeat it at each replay, or while `stream`
        is: another thread's capture would take the call for its own.

        What torch raises for a failed call becomes a `DriverError` with the driver's name for it.
        """
        try:
            with torch.cuda.device(self.device):
                cu.cuCtxSetCurrent(self._context)  # a new thread has none
                for used in {self.current_stream(), stream}:
                    status, capture = cu.cuStreamIsCapturing(used.cuda_stream)
                    if status == CAPTURED_IMPLICITLY or (status == SUCCESS and capture != NOT_CAPTURING):
                        raise StreamCaptureError(
                            f"{call} cannot be part of a CUDA graph, and {used} is being captured: extend what the "
                            "graph needs before the capture, and truncate, free or close after it"
                        )
                    check("cuStreamIsCapturing", status)
                yield
        except DriverError:
            raise
        except RuntimeError as error:
            with _relaxed():
                (status,) = cu.cuStreamQuery(stream.cuda_stream)
            kind = DeviceLostError if status in LOST else DriverError
            raise kind(call, cu.CUresult(status).name, str(error).splitlines()[0]) from None
