"""Launches: packed arguments, workspace, and tensor maps.

A `Launch` keeps the grid and all arguments in one buffer. A call writes the stream and the arguments that changed,
which lie side by side, and calls the driver, which has copied them when it returns; so one lock serves all threads.

A `Workspace` is memory in which the blocks of a launch leave partial results for each other. Launches on one stream
follow each other and share it. A graph may run beside any stream: it has counters of its own, and its room for partial
results is torch's, as for any tensor of a captured call.

A tensor map describes K or V to Hopper's copy engine, whatever the strides.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from .arguments import Maps
from .checks import Geometry, Key
from .compiler import SIMULATED, Kernel, Structs, allocate_zeroed, driver, enter_context, fields
from .warp import PANEL, ROW_BYTES, simulated_maps, swizzled

FORMATS = {int: "q", float: "f4x", bytes: "128s"}  # of packed arguments: integers, floats, and tensor maps
ALIGNMENT = 64  # of tensor maps, which come first among a kernel's arguments

# The driver's `CUlaunchConfig`: blocks and threads in three dimensions and shared bytes, the stream, attributes.
CONFIG = struct.Struct("=7I4x q q I4x")
FROM_STREAM = struct.Struct("=q16x")  # its end, from the stream on: there are no attributes

MOST_BLOCKS = (1 << 31) - 1, 65_535  # of a grid


@lru_cache(1024)
def lay_out(structs: Structs, changes: tuple[bool, ...]) -> tuple[list[int], struct.Struct, struct.Struct]:
    """Where a kernel's arguments lie behind `CONFIG`, those that change before the others: the offset of each; how the
    stream and those that change are written, and how the others are."""
    formats = [FORMATS[kind] for kind in fields(structs)]
    changing = "".join(format for format, each in zip(formats, changes) if each)
    constant = struct.Struct("=" + "".join(format for format, each in zip(formats, changes) if not each))
    changing_bytes = struct.calcsize("=" + changing)
    ends = {True: 0, False: changing_bytes}
    offsets = []
    for format, each in zip(formats, changes):
        offsets.append(ends[each])
        ends[each] += struct.calcsize("=" + format)
    return offsets, struct.Struct(FROM_STREAM.format + changing), constant


class Launch:
    """A kernel with its grid, and with the arguments that do not change; `ValueError` for more blocks than a grid has.

    Args:
        kernel: is loaded now.
        blocks: of the grid; if there are none, nothing is launched.
        index: of the CUDA device; -1: the simulator.
        arguments: the fields of all structs, in order; None: `run` takes this one.
    """

    def __init__(self, kernel: Kernel, blocks: tuple[int, int], index: int, arguments: tuple[Any, ...]) -> None:
        if blocks[0] > MOST_BLOCKS[0] or blocks[1] > MOST_BLOCKS[1]:
            raise ValueError(
                f"got work for {blocks[0]:,} x {blocks[1]:,} blocks of threads; a grid has {MOST_BLOCKS[0]:,} x "
                f"{MOST_BLOCKS[1]:,} at most: it must be given in several calls, of fewer tokens or sequences each"
            )
        self.kernel = kernel
        self._blocks = blocks
        self._index = index
        self._arguments = arguments
        self._empty = 0 in blocks
        if self._empty or SIMULATED:
            return
        self._lock = threading.Lock()  # of the buffer, from writing to launching
        offsets, changing, constant = lay_out(kernel.structs, tuple([each is None for each in arguments]))
        self._buffer = ctypes.create_string_buffer(CONFIG.size + ALIGNMENT + changing.size + constant.size)
        at = ctypes.addressof(self._buffer)
        config = -(at + CONFIG.size) % ALIGNMENT
        first = config + CONFIG.size
        self._stream = first - FROM_STREAM.size
        CONFIG.pack_into(self._buffer, config, *blocks, 1, kernel.threads, 1, 1, kernel.shared_bytes, 0, 0, 0)
        constants = [each for each in arguments if each is not None]
        constant.pack_into(self._buffer, self._stream + changing.size, *constants)
        self._pointers = (ctypes.c_void_p * len(arguments))(*[at + first + offset for offset in offsets])
        addresses = at + config, int(kernel.handle(index)), ctypes.addressof(self._pointers)
        self._given = *map(ctypes.c_void_p, addresses), None
        self._write = changing.pack_into
        self._driver_launch = _driver_launch()

    def run(self, *changing: Any) -> None:
        """Launches it on the current stream of its device, with the arguments that were left out, in order."""
        if self._empty:
            return
        if SIMULATED:
            values = iter(changing)
            self.kernel.simulate(self._blocks, [next(values) if each is None else each for each in self._arguments])
            return
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                self.run(*changing)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        with self._lock:
            self._write(self._buffer, self._stream, stream, *changing)
            status = self._driver_launch(*self._given)
        if status:
            self._fail(driver().CUresult(status), changing)

    def _fail(self, status: Any, changing: tuple[Any, ...]) -> None:
        """Raises what the driver says, but for the first call of a thread, which has no context yet."""
        cu = driver()
        _, context = cu.cuCtxGetCurrent()
        if status != cu.CUresult.CUDA_ERROR_INVALID_CONTEXT or int(context):
            raise RuntimeError(f"cuLaunchKernelEx failed with {status.name} for {self.kernel}")
        enter_context(self._index)
        self.run(*changing)


def index_of(device: torch.device) -> int:
    """The index of a CUDA device; -1: the simulator."""
    return device.index if device.type == "cuda" else -1


@cache
def _driver_launch() -> Any:
    """The driver's function by ctypes, which takes arguments made before; the bindings make theirs at each call."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


SLAB = 1 << 20  # bytes of counters that are made at a time

_rooms: dict[tuple[int, int], tuple[int, int]] = {}  # by device and stream: address and bytes of room for parts
# By device, stream and capture: the address of counters, and how many.
_counters: dict[tuple[int, int, int], tuple[int, int]] = {}
_slabs: dict[int, tuple[int, int]] = {}  # by device: the next free address of the newest slab, and its bytes
_taking = threading.Lock()  # two streams must not be given the same counters


@dataclass(eq=False)
class Workspace:
    """Memory for a kernel's launches on a device."""

    _index: int  # of the CUDA device; -1: the simulator
    _partial_bytes: int  # room for partial results
    _counters: int  # 32-bit counters, which are 0 and are left 0 by each launch
    _by_stream: dict[int, tuple[int, int]] = field(default_factory=dict)  # allocations are never freed

    def room(self) -> tuple[int, int]:
        """Addresses of room for parts and of counters, until the current stream is given other work."""
        stream = torch._C._cuda_getCurrentRawStream(self._index) if self._index >= 0 else 0
        if stream and (capture := _capture_of(self._index, stream)):  # the default stream cannot be captured
            return self._captured_room(stream, capture)
        if stream not in self._by_stream:
            self._by_stream[stream] = self._lasting_room(stream)
        return self._by_stream[stream]

    def _lasting_room(self, stream: int) -> tuple[int, int]:
        where = _counters_of(self._index, stream, 0, self._counters)
        assert where is not None
        room, have = _rooms.get((self._index, stream), (0, 0))
        if have < self._partial_bytes:
            have = 1 << (self._partial_bytes - 1).bit_length()
            room = _allocate(self._index, have)
            _rooms[self._index, stream] = room, have
        return room, where

    def _captured_room(self, stream: int, capture: int) -> tuple[int, int]:
        room = torch.empty(self._partial_bytes, dtype=torch.uint8, device=self._index)
        where = _counters_of(self._index, stream, capture, self._counters)
        if where is None:  # then zeros are part of the graph; the room is held, so that they lie elsewhere
            where = torch.zeros(self._counters, dtype=torch.int32, device=self._index).data_ptr()
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
    """Unused counters. None: none are left, and none can be made during a capture."""
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
    """The number of the capture of a device's current stream; 0: it is not captured."""
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return _capture_of(index, stream)
    return int(driver().cuStreamGetCaptureInfo(stream)[2]) if torch._C._cuda_isCurrentStreamCapturing() else 0


@cache
def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a CUDA device; two for the simulator, so that work is shared there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def most_shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of threads may have; for the simulator, Hopper's."""
    if device.type != "cuda":
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def can_be_mapped(tensor: Geometry) -> bool:
    """Whether there can be a tensor map of it: rows of 1 TiB are too far apart."""
    steps = [stride * tensor.dtype.itemsize for stride in tensor.strides[:-1]]
    return max(tensor.shape) <= 1 << 32 and max(steps) < 1 << 40


class SimulatedMap(NamedTuple):
    """A tensor map for the simulator."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box_tokens: int

    def copy(self, target: int, place: tuple[int, ...]) -> int:
        """Copies the box at a place; its bytes."""
        element, head, token, row = place
        width, heads, tokens, rows = self.sizes
        inside = 0 <= head < heads and 0 <= token <= tokens - self.box_tokens and 0 <= row < rows
        assert inside, "a copy from outside touches the tensor's first page"
        for index, vector in product(range(self.box_tokens), range(0, PANEL, 8)):
            position = element + vector, head, token + index, row
            to = swizzled(target + index * ROW_BYTES + vector * 2)
            if position[0] < width:
                source = self.address + position[0] * 2 + sum(np.multiply(position[1:], self.strides).tolist())
                ctypes.memmove(to, source, 16)
            else:
                ctypes.memset(to, 0, 16)
        return self.box_tokens * ROW_BYTES


@lru_cache(16)
def maps_of(k: Key | None, v: Key | None, box_tokens: int) -> Callable[[int, int], Maps]:
    """A function of the addresses of K and V that gives their maps."""
    assert k
    assert v

    @lru_cache(1024)  # a model has some for each layer
    def maps_at(k_address: int, v_address: int) -> Maps:
        tensors = (k_address, k), (v_address, v)
        return Maps(*[_encode(*each, box) for box in (box_tokens, 1) for each in tensors])

    return maps_at


def _encode(address: int, key: Key, box_tokens: int) -> Any:
    """A map of a 16-bit tensor `[rows, tokens, heads, head_dim]`, for boxes of tokens of one head and panel: 128 bytes;
    for the simulator, a number."""
    shape, strides, dtype, _ = key
    assert can_be_mapped(Geometry._make(key)), "the driver refuses it"
    sizes = tuple(reversed(shape))
    steps = tuple(stride * dtype.itemsize for stride in reversed(strides[:-1]))
    if SIMULATED:
        simulated_maps.append(SimulatedMap(address, sizes, steps, box_tokens))
        return len(simulated_maps) - 1
    cu = driver()
    kinds = cu.CUtensorMapDataType
    bf16, f16 = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    status, encoded = cu.cuTensorMapEncodeTiled(
        bf16 if dtype == torch.bfloat16 else f16, 4, address,
        [cu.cuuint64_t(size) for size in sizes],
        [cu.cuuint64_t(step) for step in steps],
        [cu.cuuint32_t(size) for size in (PANEL, 1, box_tokens, 1)],
        [cu.cuuint32_t(1)] * 4,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with {status.name} for {list(shape)} of strides {strides}")
    return ctypes.string_at(encoded.getPtr(), 128)
