"""Virtual memory on a GPU: the CUDA driver's virtual memory API through `cuda.bindings.driver`.

Works in the primary context, the one that torch uses, so that torch's kernels see the mappings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cuda.bindings.driver as cu
import torch

from ..compiled.code import keep
from ..errors import DeviceError, DeviceLostError, DriverError, DriverOutOfMemoryError
from .driver import LEGACY, Driver, check_page_size

SUCCESS = cu.CUresult.CUDA_SUCCESS
MINIMUM = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
LOST = {
    getattr(cu.CUresult, f"CUDA_ERROR_{name}")
    for name in (
        "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED", "ASSERT", "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED",
        "ECC_UNCORRECTABLE", "DEINITIALIZED",
    )
}  # fmt: skip
"""After these a context never works again."""
NAMES = {
    "reserve": "cuMemAddressReserve", "free": "cuMemAddressFree", "create": "cuMemCreate", "release": "cuMemRelease",
    "map": "cuMemMap", "set_access": "cuMemSetAccess", "unmap": "cuMemUnmap", "fill": "cuMemsetD8Async",
    "copy": "cuMemcpyAsync", "make_event": "cuEventCreate", "record": "cuEventRecord", "query": "cuEventQuery",
    "wait": "cuStreamWaitEvent", "wait_for": "cuEventSynchronize", "is_capturing": "cuStreamIsCapturing",
    "push": "cuCtxPushCurrent_v2", "pop": "cuCtxPopCurrent_v2", "capture_mode": "cuThreadExchangeStreamCaptureMode",
    "allocate": "cuMemAlloc_v2", "deallocate": "cuMemFree_v2", "synchronize": "cuCtxSynchronize",
}  # fmt: skip
"""By name in the table of a driver: the CUDA driver's function."""


def check(call: str, status: Any, detail: str = "") -> None:
    """Raises what a CUDA driver call returned, unless it was success."""
    if status != SUCCESS:
        lost = DeviceLostError if status in LOST else DriverError
        kind = DriverOutOfMemoryError if status == OUT_OF_MEMORY else lost
        raise kind(call, cu.CUresult(status).name, detail)


def cuda_version() -> str:
    """The newest CUDA that the installed driver supports."""
    status, version = cu.cuDriverGetVersion()
    check("cuDriverGetVersion", status)
    return f"{version // 1000}.{version % 1000 // 10}"


class CudaDriver(Driver):
    """Pages of GPU memory (see `vmmkv.driver.driver.Driver`).

    Pages can be exported to other processes where the device supports it: `features` says what a trial page was
    granted, and what else there is. Pages are not made for GPUDirect RDMA: with `gpuDirectRDMACapable` set, driver 580
    refuses to map a page again once its first mapping is gone and the access of another one has changed.

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
        torch.cuda.mem_get_info(self.device)  # makes torch's primary context, where there is none yet
        status, ordinal = cu.cuDeviceGet(index)
        check("cuDeviceGet", status)
        status, context = cu.cuDevicePrimaryCtxRetain(ordinal)  # for ever, like torch
        check("cuDevicePrimaryCtxRetain", status)
        with torch.cuda.device(self.device):  # what pages can do, and what `cuMemCreate` is asked for
            self.features, self.allocation, granularity = self._probe(ordinal)
        self.access = []
        """What `cuMemSetAccess` is asked for: pages to write, and pages to read only."""
        for rights in ("READWRITE", "READ"):
            self.access.append(cu.CUmemAccessDesc())
            self.access[-1].location = self.allocation.location
            self.access[-1].flags = getattr(cu.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{rights}")
        libcuda = ctypes.CDLL("libcuda.so.1")
        words = {
            name: ctypes.cast(getattr(libcuda, symbol), ctypes.c_void_p).value or 0 for name, symbol in NAMES.items()
        }
        words |= {"context": int(context), "property": self.allocation.getPtr()}
        words |= {"access": self.access[0].getPtr(), "read_access": self.access[1].getPtr()}
        super().__init__(self.device, granularity, check_page_size(page_size, granularity), words, NAMES)
        keep(self.allocation, self.access)

    def _probe(self, ordinal: Any) -> tuple[dict[str, bool], Any, int]:
        """What the device supports, what `cuMemCreate` is asked for, and the granularity of its pages. Makes a page to
        be sure that it can be exported."""

        def supports(name: str) -> bool:
            attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED")
            status, value = cu.cuDeviceGetAttribute(attribute, ordinal)
            return bool(status == SUCCESS and value)

        if not supports("VIRTUAL_MEMORY_MANAGEMENT"):
            raise DeviceError(f"{self.device} has no virtual memory management, which vmmkv is made of")
        more = {"fabric_handles": "HANDLE_TYPE_FABRIC", "host_numa_pages": "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT"}
        for exportable in (supports("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"), False):
            wanted = cu.CUmemAllocationProp()
            wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            wanted.location.id = self.device.index
            if exportable:
                handle_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                wanted.requestedHandleTypes = handle_type
            status, granularity = cu.cuMemGetAllocationGranularity(wanted, MINIMUM)
            check("cuMemGetAllocationGranularity", status)
            status, handle = cu.cuMemCreate(granularity, wanted, 0)
            if status == SUCCESS:
                check("cuMemRelease", *cu.cuMemRelease(handle))
                features = {name: supports(attribute) for name, attribute in more.items()}
                return {"exportable": exportable, **features}, wanted, granularity
        check("cuMemCreate", status, "not even a plain page could be made")
        raise AssertionError("check raises")

    def error_of(self, name: str, status: int, detail: str) -> DriverError:
        try:
            check(NAMES[name], cu.CUresult(status), detail or (f"on {self.device}" if name == "create" else ""))
        except DriverError as error:
            return error.with_traceback(None)
        raise AssertionError(f"{name} has not failed")

    def memory_info(self) -> tuple[int, int]:
        self.check_process()
        return torch.cuda.mem_get_info(self.device)

    def empty_torch_cache(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            return 0
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def current_handle(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device.index) or LEGACY

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]


@contextmanager
def trial_capture(device: torch.device) -> Iterator[None]:
    """Captures what is launched on a stream of a device, the current one meanwhile: it is not run, and forgotten. A
    capture of `torch.cuda.graph` that fails leaves torch unusable: its random numbers, its allocator and its current
    stream stay in it. So torch is not told of this one."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # else the caching allocator may ask for events, which a capture does not allow
    stream, mode = torch.cuda.Stream(device), cu.CUstreamCaptureMode  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        try:  # from here on: else an interruption leaves a stream in capture that somebody else is given
            (status,) = cu.cuStreamBeginCapture(stream.cuda_stream, mode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            check("cuStreamBeginCapture", status)
            yield
        finally:
            status, graph = cu.cuStreamEndCapture(stream.cuda_stream)
            if status == SUCCESS:
                cu.cuGraphDestroy(graph)
        check("cuStreamEndCapture", status)
