"""Memory in which the blocks of one launch leave their parts for each other.

Launches on one stream follow each other and share it. A graph may run beside any stream, and its branches beside each
other: its counters are its own, and its room for parts is torch's, like any tensor that a captured call makes.
"""

from __future__ import annotations

import threading
from functools import cache

import torch

from .context import allocate_zeroed, driver

SLAB = 1 << 20
"""Bytes of counters that are made at a time."""

_rooms: dict[tuple[int, int], tuple[int, int]] = {}
"""By device and stream: the address of the room for parts, and its bytes."""
_counters: dict[tuple[int, int, int], tuple[int, int]] = {}
"""By device, stream and capture: the address of counters, and how many."""
_slabs: dict[int, tuple[int, int]] = {}
"""By device: the next free address of the newest slab, and its bytes."""
_taking = threading.Lock()
"""Two streams must not be given the same counters."""


class Workspace:
    """Memory for a kernel's launches on a device.

    Args:
        index: of the CUDA device; -1: the simulator.
        partial_bytes: room for parts.
        counters: 32-bit counters, which are 0 and are left 0 by each launch.
    """

    def __init__(self, index: int, partial_bytes: int, counters: int) -> None:
        self._index = index
        self._partial_bytes = partial_bytes
        self._counters = counters
        self._by_stream: dict[int, tuple[int, int]] = {}  # what is allocated stays

    def room(self) -> tuple[int, int]:
        """Addresses of room for parts and of counters, until the current stream is given other work."""
        stream = torch._C._cuda_getCurrentRawStream(self._index) if self._index >= 0 else 0
        if stream and (capture := _capture_of(self._index, stream)):  # the default stream cannot be captured
            return _captured_room(self._index, stream, capture, self._partial_bytes, self._counters)
        if stream not in self._by_stream:
            self._by_stream[stream] = _lasting_room(self._index, stream, self._partial_bytes, self._counters)
        return self._by_stream[stream]


def _lasting_room(index: int, stream: int, partial_bytes: int, counters: int) -> tuple[int, int]:
    where = _counters_of(index, stream, 0, counters)
    assert where is not None
    room, have = _rooms.get((index, stream), (0, 0))
    if have < partial_bytes:
        have = 1 << (partial_bytes - 1).bit_length()
        room = _allocate(index, have)
        _rooms[index, stream] = room, have
    return room, where


def _captured_room(index: int, stream: int, capture: int, partial_bytes: int, counters: int) -> tuple[int, int]:
    room = torch.empty(partial_bytes, dtype=torch.uint8, device=index)
    where = _counters_of(index, stream, capture, counters)
    if where is None:  # then zeros are part of the graph; the room is held, so that they lie elsewhere
        where = torch.zeros(counters, dtype=torch.int32, device=index).data_ptr()
    return room.data_ptr(), where


def _counters_of(index: int, stream: int, capture: int, counters: int) -> int | None:
    """Counters of a stream, or of its capture; None as in `_take_counters`."""
    where, many = _counters.get((index, stream, capture), (0, 0))
    if many >= counters:
        return where
    with _taking:
        taken = _take_counters(index, counters, capturing=bool(capture))
    if taken is not None:
        _counters[index, stream, capture] = taken, counters
    return taken


def _take_counters(index: int, counters: int, capturing: bool) -> int | None:
    """Counters that nobody has had. None: there are none left, and none can be made during a capture."""
    nbytes = -(-counters // 64) * 256
    free, left = _slabs.get(index, (0, 0))
    if left < nbytes:
        if capturing:
            return None
        left = max(SLAB, nbytes)
        free = _allocate(index, left)
    _slabs[index] = free + nbytes, left - nbytes
    return free


_host: list[torch.Tensor] = []


def _allocate(index: int, nbytes: int) -> int:
    """Zeroed memory that stays. Not torch's: a call may be the first in a pool that is to be left empty."""
    if index < 0:
        _host.append(torch.zeros(nbytes, dtype=torch.uint8))
        return _host[-1].data_ptr()
    return allocate_zeroed(index, nbytes)


def _capture_of(index: int, stream: int) -> int:
    """What the current stream of a device is captured for; 0: it is not."""
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return _capture_of(index, stream)
    return int(driver().cuStreamGetCaptureInfo(stream)[2]) if torch._C._cuda_isCurrentStreamCapturing() else 0


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; two for the simulator, so that work is shared there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def most_shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of threads may have; for the simulator, Hopper's."""
    if device.type != "cuda":
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
