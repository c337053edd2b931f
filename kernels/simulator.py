"""Numba's simulator, with warps: threads take turns, and wait for each other where a GPU's threads would.

Numba's own simulator runs every CUDA thread as a thread of the system and knows no warps. Here they are greenlets of
one thread, so that a block runs in one order, always the same. Importing this module replaces the simulator's block.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import greenlet
import numpy as np
from numba import types
from numba.cuda.simulator import kernel, kernelapi
from numba.np import numpy_support

WARP = 32
WARPGROUP = 128


class Meeting:
    """Threads that wait for each other: each brings a value, the last to come works out what each of them gets."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = ""
        self.brought: list[Any] = [None] * size
        self.waiting: list[Thread] = []
        self.results: Sequence[Any] = ()

    def attend(self, name: str, value: Any, work_out: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Waits for the others; they must come for the same thing. What `work_out` makes of all values for this one."""
        thread = current()
        place = thread.index % self.size
        if self.waiting and self.name != name:
            raise RuntimeError(f"threads that must act together are at {self.name} and at {name}")
        self.brought[place] = value
        if len(self.waiting) < self.size - 1:
            self.name = name
            self.waiting.append(thread)
            thread.block.switch()
        else:
            self.results = work_out(self.brought)
            thread.block.ready.extend(self.waiting)
            thread.block.idle = 0
            self.brought, self.waiting = [None] * self.size, []
        return self.results[place]


class Thread:
    """A CUDA thread: a greenlet that lets others run where it must wait."""

    def __init__(self, block: Block, index: int, function: Callable[[], Any]) -> None:
        self.block = block
        self.index = index
        self.warp = block.meeting(("warp", index // WARP), WARP)
        self.warpgroup = block.meeting(("warpgroup", index // WARPGROUP), WARPGROUP)
        self.greenlet = greenlet.greenlet(function)


class Barrier:
    """Threads that come in phases, and bytes that are copied for them."""

    def __init__(self) -> None:
        self.expected = 0
        self.arrived = 0
        self.bytes = 0
        self.phase = 0

    def arrive(self, expected: int) -> None:
        """One more of the expected arrivals; the last ends the phase."""
        self.expected = expected
        self.arrived += 1
        self._end_phase()

    def copied(self, count: int) -> None:
        self.bytes -= count
        self._end_phase()

    def _end_phase(self) -> None:
        if self.arrived == self.expected and not self.bytes:
            self.arrived = 0
            self.phase += 1


class Block:
    """Runs the threads of one block; takes the place of Numba's BlockManager."""

    def __init__(self, function: Callable[..., Any], grid_dim: Any, block_dim: Any, debug: bool) -> None:
        self.function = function
        self.num_threads = int(np.prod(block_dim))
        self.meetings: dict[Any, Meeting] = {}
        self.barriers: dict[int, Barrier] = defaultdict(Barrier)  # by their numbers, or addresses in shared memory
        self.ready: deque[Thread] = deque()

    def meeting(self, key: Any, size: int) -> Meeting:
        return self.meetings.setdefault(key, Meeting(size))

    def run(self, grid_point: Any, *arguments: Any) -> None:
        global _running
        self.index = kernelapi.Dim3(*grid_point)
        self.scheduler = greenlet.getcurrent()
        self.idle = 0
        function = partial(self.function, *arguments)
        self.threads = [Thread(self, index, function) for index in range(self.num_threads)]
        self.ready.extend(self.threads)
        try:
            while self.ready:  # threads begin here, where the stack is short, and come back when they end
                _running = self.ready.popleft()
                _running.greenlet.switch()
        finally:
            _running = None
        if not all(thread.greenlet.dead for thread in self.threads):
            raise RuntimeError("simulated deadlock: some threads wait for threads that have left")

    def switch(self) -> None:
        """Lets the next thread run that can."""
        global _running
        if self.ready and self.ready[0].greenlet:  # it has begun
            _running = self.ready.popleft()
            _running.greenlet.switch()
        else:
            self.scheduler.switch()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Lets other threads run until a condition holds."""
        thread = current()
        while not condition():
            self.idle += 1
            if self.idle > 2 * self.num_threads:
                raise RuntimeError("simulated deadlock: every thread waits for another")
            self.ready.append(thread)
            self.switch()
        self.idle = 0


_running: Thread | None = None


def current() -> Thread:
    """The thread that runs now."""
    assert _running
    return _running


class SharedMemory:
    """Shared arrays of a block, aligned as a GPU's are."""

    def __init__(self, dynamic_bytes: int) -> None:
        self.dynamic = aligned(dynamic_bytes)
        self.arrays: dict[Any, Any] = {}

    def array(self, shape: int, dtype: Any) -> Any:
        if isinstance(dtype, types.Type):
            dtype = numpy_support.as_dtype(dtype)
        if shape == 0:
            return self.dynamic.view(dtype)
        caller = sys._getframe(1)
        key = caller.f_code, caller.f_lineno
        if key not in self.arrays:
            self.arrays[key] = aligned(shape * np.dtype(dtype).itemsize).view(dtype)
        return self.arrays[key]


def aligned(nbytes: int) -> Any:
    """Bytes that start at a multiple of 1024, full of NaN."""
    memory = np.full(nbytes + 1024, 0xFF, np.uint8)
    start = -memory.ctypes.data % 1024
    return memory[start : start + nbytes]


class Cuda(kernelapi.FakeCUDAModule):  # type: ignore[misc]
    """What `cuda` is inside a kernel."""

    def __init__(self, grid_dim: Any, block_dim: Any, dynshared_size: int) -> None:
        super().__init__(grid_dim, block_dim, dynshared_size)
        self._shared = SharedMemory(dynshared_size)

    @property
    def threadIdx(self) -> Any:  # noqa: N802
        return kernelapi.Dim3(current().index, 0, 0)

    @property
    def blockIdx(self) -> Any:  # noqa: N802
        return current().block.index

    def syncthreads(self) -> None:
        block = current().block
        block.meeting("block", block.num_threads).attend("syncthreads", None, lambda values: values)


Function = TypeVar("Function", bound=Callable[..., Any])

_device_functions: dict[int, Callable[..., Any]] = {}  # one of each module


def device_function(function: Function) -> Function:
    """Leaves a function as it is: its module sees the kernel's `cuda` during each launch.

    Numba's own enter and leave the module at each call, which takes longer than most of them.
    """
    _device_functions[id(function.__globals__)] = function
    return function


@contextmanager
def _swapped_modules(kernel_function: Callable[..., Any], module: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for function in (kernel_function, *_device_functions.values()):
            stack.enter_context(kernelapi.swapped_cuda_module(function, module))
        yield


kernel.swapped_cuda_module = _swapped_modules
kernel.FakeCUDAModule = Cuda
kernel.BlockManager = Block
