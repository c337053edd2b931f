"""Calls of a memory system, compiled. `driver` is the address of a `DRIVER`, `scratch` that of `SCRATCH` words."""

import numpy as np

from ..compiled import entry_without_lock, inner
from ..compiled.native import call, view
from .table import (
    CAPTURED_IMPLICITLY, CELL, COPY, CREATE, DRIVER, FILL, FREE, MAP, MODE, OUT_OF_MEMORY, RELEASE, RESERVE, SCRATCH,
    SET_ACCESS, SET_READ_ACCESS, STATUS, SYNCHRONIZE, TIME, UNMAP, VACANT, WAIT_FOR,
)  # fmt: skip

MONOTONIC, RELAXED, WORD = 1, 2, 8
CAPTURED = -3
"""Why nothing was queued: a CUDA graph is being captured."""


@inner
def enter(driver: int, scratch: int) -> int:
    """Makes the device's context current, and the capture mode relaxed, until `leave` with the same scratch; they do
    not nest. Returns a status, which the scratch has, too, unless it is 0."""
    d = view(driver, 1, DRIVER)[0]
    status = call(d.push, (d.context,))
    if status:
        view(scratch, SCRATCH, np.int64)[STATUS] = status
        return status
    view(scratch, SCRATCH, np.int64)[MODE] = RELAXED
    call(d.capture_mode, (scratch + MODE * WORD,))
    return 0


@inner
def leave(driver: int, scratch: int) -> int:
    """Makes the caller's context and capture mode current again."""
    d = view(driver, 1, DRIVER)[0]
    call(d.capture_mode, (scratch + MODE * WORD,))
    return call(d.pop, (scratch + CELL * WORD,))


@inner
def now(driver: int, scratch: int) -> int:
    """Nanoseconds."""
    call(view(driver, 1, DRIVER)[0].clock, (MONOTONIC, scratch + TIME * WORD))
    time = view(scratch, SCRATCH, np.int64)
    return time[TIME] * 1_000_000_000 + time[TIME + 1]


@inner
def step(driver: int, kind: int, address: int, nbytes: int, other: int, stream: int) -> int:
    """Makes one call. `create` and `release` write to `other` words from `address` on, or read from the first;
    `reserve` writes to the word there, and `other` is the alignment. A fill has a value, a copy its source as `other`,
    and both are queued on a stream.

    `SYNCHRONIZE` waits for all work on the device, with a word at the address. `synchronize` would break a capture of
    any other thread, whatever this thread's mode. To free memory waits for all streams as well, and leaves captures
    alone (seen on an H200 with driver 580).
    """
    d = view(driver, 1, DRIVER)[0]
    if kind == FILL:
        return call(d.fill, (address, other, nbytes, stream))
    if kind == COPY:
        return call(d.copy, (address, other, nbytes, stream))
    if kind == UNMAP:
        return call(d.unmap, (address, nbytes))
    if kind == MAP:
        return call(d.map, (address, nbytes, 0, other, 0))
    if kind == SET_ACCESS:
        return call(d.set_access, (address, nbytes, d.access, 1))
    if kind == SET_READ_ACCESS:
        return call(d.set_access, (address, nbytes, d.read_access, 1))
    if kind == RESERVE:
        return call(d.reserve, (address, nbytes, other, 0, 0))
    if kind == FREE:
        return call(d.free, (address, nbytes))
    if kind == WAIT_FOR:
        return call(d.wait_for, (address,))
    if kind == SYNCHRONIZE:
        status = call(d.allocate, (address, 1))
        if status == OUT_OF_MEMORY:
            return call(d.synchronize, ())
        return status if status else call(d.deallocate, (view(address, 1, np.int64)[0],))
    if kind == CREATE:
        status = call(d.create, (address, nbytes, d.property, 0))
    else:
        status = call(d.release, (view(address, 1, np.int64)[0],))
    if status == 0:
        words = view(address, other, np.int64)
        for index in range(other):
            words[index] = VACANT if kind == RELEASE else words[0]
    return status


@inner
def meter(spent: int, kind: int, calls: int, nanoseconds: int) -> None:
    """Adds to what a meter has of a kind of steps; 0 is no meter."""
    if spent:
        place = view(spent, (RELEASE + 1, 2), np.int64)[SET_ACCESS if kind == SET_READ_ACCESS else kind]
        place[0] += calls
        place[1] += nanoseconds


@inner
def captured(driver: int, stream: int, scratch: int) -> int:
    """`CAPTURED` if a graph is being captured on a stream, else a status. It needs the context."""
    words = view(scratch, SCRATCH, np.int64)
    words[CELL] = 0
    status = call(view(driver, 1, DRIVER)[0].is_capturing, (stream, scratch + CELL * WORD))
    if status == CAPTURED_IMPLICITLY or (status == 0 and words[CELL]):
        return CAPTURED
    return status


@inner
def either_captured(driver: int, current: int, stream: int, scratch: int) -> int:
    """`CAPTURED` if a graph is being captured on one of two streams, else a status. 0 is no stream. It needs the
    context."""
    status = captured(driver, current, scratch) if current else 0
    return captured(driver, stream, scratch) if status == 0 and stream not in (0, current) else status


@entry_without_lock
def make(driver: int, kind: int, address: int, nbytes: int, other: int, current: int, stream: int, scratch: int) -> int:
    """Makes one call, as `step` does, unless the current stream or the stream is captured; 0 is none. Returns a status,
    or `CAPTURED`."""
    status = enter(driver, scratch)
    if status == 0:
        status = either_captured(driver, current, stream, scratch)
        if status == 0:
            status = step(driver, kind, address, nbytes, other, stream)
        leave(driver, scratch)
    return status
