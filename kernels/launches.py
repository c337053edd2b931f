"""Launches that are prepared: a call writes what changed since the last one, and asks the driver.

The driver takes an address of the grid and the stream, and one of each argument's value. All lie in one buffer, the
stream right before the arguments that change, so that these are written at once. The driver has copied them when it
returns: one lock is all that threads need which launch the same.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from .compiler import Kernel, Structs, fields
from .context import driver, enter_context
from .ptx import SIMULATED

FORMATS = {int: "q", float: "f4x", bytes: "128s"}
"""How arguments are packed: 64-bit integers (addresses, strides in bytes, counts), floats, and tensor maps, which come
first among a kernel's arguments: there they lie at a multiple of `ALIGNMENT`."""

CONFIG = struct.Struct("=7I4x q q I4x")
"""The driver's `CUlaunchConfig`: blocks and threads in three dimensions and shared bytes, the stream, attributes."""
FROM_STREAM = struct.Struct("=q16x")
"""Its end, from the stream on: there are no attributes."""
ALIGNMENT = 64

MOST_BLOCKS = (1 << 31) - 1, 65_535
"""Of a grid."""


class Layout(NamedTuple):
    """Where arguments lie behind `CONFIG`: those that change, then the others."""

    offsets: list[int]
    """Of each argument."""
    changing_bytes: int
    nbytes: int
    write: Callable[..., None]
    """Writes the stream and what changes."""
    constant: struct.Struct


@lru_cache(1024)
def lay_out(structs: Structs, changes: tuple[bool, ...]) -> Layout:
    """The layout of a kernel's arguments, of which each changes or does not."""
    formats = [FORMATS[kind] for kind in fields(structs)]
    changing = "".join(format for format, each in zip(formats, changes) if each)
    constant = struct.Struct("=" + "".join(format for format, each in zip(formats, changes) if not each))
    changing_bytes = struct.calcsize("=" + changing)
    ends = {True: 0, False: changing_bytes}
    offsets = []
    for format, each in zip(formats, changes):
        offsets.append(ends[each])
        ends[each] += struct.calcsize("=" + format)
    write = struct.Struct(FROM_STREAM.format + changing).pack_into
    return Layout(offsets, changing_bytes, changing_bytes + constant.size, write, constant)


class Launch:
    """A kernel with its grid, and with the arguments that do not change.

    Args:
        kernel: is loaded now.
        blocks: of the grid; if there are none, nothing is launched.
        index: of the CUDA device; -1: the simulator.
        arguments: the fields of all structs, in order; None: `run` takes this one.

    Raises:
        ValueError: there are more blocks than a grid has.
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
        layout = lay_out(kernel.structs, tuple([each is None for each in arguments]))
        self._buffer = ctypes.create_string_buffer(CONFIG.size + ALIGNMENT + layout.nbytes)
        at = ctypes.addressof(self._buffer)
        config = -(at + CONFIG.size) % ALIGNMENT
        first = config + CONFIG.size
        CONFIG.pack_into(self._buffer, config, *blocks, 1, kernel.threads, 1, 1, kernel.shared_bytes, 0, 0, 0)
        constants = [each for each in arguments if each is not None]
        layout.constant.pack_into(self._buffer, first + layout.changing_bytes, *constants)
        self._pointers = (ctypes.c_void_p * len(arguments))(*[at + first + offset for offset in layout.offsets])
        addresses = at + config, int(kernel.handle(index)), ctypes.addressof(self._pointers)
        self._given = *map(ctypes.c_void_p, addresses), None
        self._write = layout.write
        self._stream = first - FROM_STREAM.size
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
    """Of a CUDA device; -1: the simulator."""
    return device.index if device.type == "cuda" else -1


@cache
def _driver_launch() -> Any:
    """The driver's function by ctypes, which takes arguments made before; the bindings make theirs at each call."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
