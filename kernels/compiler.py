"""From a Python function to a loaded kernel: with `ptx`, all that touches Numba's internals and the CUDA driver.

A kernel is compiled for the device at hand, kept on disk, and launched by the driver with packed arguments: Numba's own
dispatcher spends tens of microseconds on looking at them. Every argument is a 64-bit integer: an address, a
stride in bytes, or a count.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
import threading
from collections.abc import Callable
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from numba import cuda, types

from .ptx import SIMULATED

ENTRY = "kernel"
"""What every kernel is called in its machine code."""


class Kernel:
    """A kernel, made when it is first launched.

    Args:
        factory: makes the kernel, a plain Python function, from `constants`.
        constants: what is fixed at compile time.
        num_arguments: arguments of the kernel.
        threads: threads of a block.
    """

    def __init__(
        self, factory: Callable[..., Any], constants: tuple[int, ...], num_arguments: int, threads: int
    ) -> None:
        self.factory = factory
        self.constants = constants
        self.num_arguments = num_arguments
        self.threads = threads
        self._handles: dict[int, Any] = {}
        self._lock = threading.Lock()  # of the values, between packing and the launch that reads them
        self._pack = struct.Struct(f"{num_arguments}q").pack_into
        self._values = ctypes.create_string_buffer(8 * num_arguments)
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * num_arguments)(*range(first, first + 8 * num_arguments, 8))
        self._parameters = ctypes.addressof(self._pointers)

    def launch(self, blocks: tuple[int, int], index: int, arguments: tuple[int, ...]) -> None:
        """Runs a grid of blocks on the current stream of the CUDA device `index`."""
        if 0 in blocks:
            return
        if SIMULATED:
            self._simulated[blocks, self.threads](*arguments)
            return
        handle = self._handles.get(index) or self._load(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        with self._lock:
            self._pack(self._values, 0, *arguments)  # the driver copies the values during the call
            (status,) = _driver().cuLaunchKernel(handle, *blocks, 1, self.threads, 1, 1, 0, stream, self._parameters, 0)
        if status:
            raise RuntimeError(f"cuLaunchKernel failed with {status.name} for {self.factory.__name__}{self.constants}")

    def cubin(self, capability: tuple[int, int]) -> bytes:
        """Machine code for a compute capability, from disk or from the compiler. Needs no GPU."""
        path = _cache_folder() / f"{self._key(capability)}.cubin"
        if path.exists():
            return path.read_bytes()
        code = to_cubin(self.ptx(capability), capability)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(code)
        unfinished.replace(path)  # another process may be doing the same
        return code

    def ptx(self, capability: tuple[int, int]) -> str:
        """What the compiler makes of it. Needs no GPU."""
        return to_ptx(self.factory(*self.constants), self.num_arguments, self.threads, capability)

    def _key(self, capability: tuple[int, int]) -> str:
        name = f"{self.factory.__module__}.{self.factory.__name__}{self.constants} {self.threads} {capability}"
        return hashlib.sha256(f"{name} {_sources()} {version('numba-cuda')}".encode()).hexdigest()

    def _load(self, index: int) -> Any:
        cu = _driver()
        code = self.cubin(torch.cuda.get_device_capability(index))
        with torch.cuda.device(index):
            torch.cuda.current_stream().query()  # makes the context that the kernel is loaded into
            status, module = cu.cuModuleLoadData(code)
            if not status:
                status, self._handles[index] = cu.cuModuleGetFunction(module, ENTRY.encode())
        if status:
            raise RuntimeError(f"loading {self.factory.__name__}{self.constants} failed with {status.name}")
        return self._handles[index]

    @cached_property
    def _simulated(self) -> Any:
        return cuda.jit(self.factory(*self.constants))


def to_ptx(function: Any, num_arguments: int, threads: int, capability: tuple[int, int]) -> str:
    """Compiles a kernel whose arguments are all int64."""
    signature = types.void(*[types.int64] * num_arguments)
    options: dict[str, Any] = {"device": False, "abi": "numba", "output": "ptx", "launch_bounds": threads}
    ptx: str = cuda.compile(function, signature, cc=capability, **options)[0]
    mangled = re.search(r"\.entry\s+(\w+)", ptx)
    assert mangled
    return ptx.replace(mangled[1], ENTRY)


def to_cubin(ptx: str, capability: tuple[int, int]) -> bytes:
    """Assembles PTX for one compute capability."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}")
    return bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code)


@cache
def _driver() -> Any:
    import cuda.bindings.driver as driver

    return driver


@cache
def _sources() -> str:
    """A hash of all kernels' sources: any change makes new machine code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmmkv"
