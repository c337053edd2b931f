"""Calls of the CUDA driver beside launches, whatever graphs are captured meanwhile.

Loading a kernel, allocating and waiting may end a capture of another thread, unless this thread says that it knows what
it does. It does: nothing here touches a stream other than its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def driver() -> Any:
    """The bindings, imported where there is a GPU."""
    import cuda.bindings.driver as driver

    return driver


@contextmanager
def beside_captures(index: int) -> Iterator[Any]:
    """The driver, for calls that create things on the CUDA device `index`; this thread's own stream may be captured."""
    cu = driver()
    with torch.cuda.device(index):
        enter_context(index)
        _, mode = cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield cu
        finally:
            cu.cuThreadExchangeStreamCaptureMode(mode)


def enter_context(index: int) -> None:
    """Makes torch's context current, as torch does in a thread with its first call that needs one."""
    driver().cuCtxSetCurrent(_primary_context(index))


@cache
def _primary_context(index: int) -> Any:
    cu = driver()
    _, device = cu.cuDeviceGet(index)
    _, context = cu.cuDevicePrimaryCtxRetain(device)  # for ever, like torch
    return context


def allocate_zeroed(index: int, nbytes: int) -> int:
    """The address of new memory on a CUDA device, zeroed when this returns; other streams are not waited for."""
    with beside_captures(index) as cu:
        status, address = cu.cuMemAlloc(nbytes)
        if not status:
            status = _zero(cu, address, nbytes)
            if status:
                cu.cuMemFree(address)
    if status:
        raise RuntimeError(f"asked for {nbytes} bytes of workspace on device {index}; the driver says {status.name}")
    return int(address)


def _zero(cu: Any, address: int, nbytes: int) -> Any:
    status, stream = cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if not status:
        (status,) = cu.cuMemsetD8Async(address, 0, nbytes, stream)
        if not status:
            (status,) = cu.cuStreamSynchronize(stream)
        cu.cuStreamDestroy(stream)
    return status
