"""Many calls of the CUDA driver at once, compiled: a third faster than from Python, and other threads go on meanwhile.

Handles are written down by the same code that makes the calls, so that no interruption comes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from .calls import VACANT, Handles, Outcome
from .driver import NativeDriver
from .meter import Meter
from .native import at, call, word

WORDS = ("create", "release", "map", "set_access", "unmap", "property", "access", "read_access")
"""What the functions below are given: addresses of C functions, with the CUDA driver's signatures, and of arguments."""
CREATE, RELEASE, MAP, SET_ACCESS, UNMAP, PROPERTY, ACCESS, READ_ACCESS = range(len(WORDS))

Words = npt.NDArray[np.int64]


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function that gives up the interpreter's lock, and keeps the result on disk where there is room."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return njit(nogil=True, error_model="numpy")(function)


@compiled
def _create(words: Words, handles: Handles, frames: Any, nbytes: int) -> tuple[int, int]:
    out = word()
    for done in range(len(frames)):
        status = call(words[CREATE], (out, nbytes, words[PROPERTY], 0))
        if status:
            return done, status
        handles[frames[done]] = at(out)
    return len(frames), 0


@compiled
def _release(words: Words, handles: Handles, frames: Any) -> tuple[int, int]:
    for done in range(len(frames)):
        status = call(words[RELEASE], (handles[frames[done]],))
        if status:
            return done, status
        handles[frames[done]] = VACANT
    return len(frames), 0


@compiled
def _map(words: Words, addresses: Any, handles: Any, nbytes: int) -> tuple[int, int]:
    for done in range(len(addresses)):
        status = call(words[MAP], (addresses[done], nbytes, 0, handles[done], 0))
        if status:
            return done, status
    return len(addresses), 0


@compiled
def _set_access(words: Words, ranges: Any, access: int) -> tuple[int, int]:
    for done in range(len(ranges)):
        status = call(words[SET_ACCESS], (ranges[done, 0], ranges[done, 1], access, 1))
        if status:
            return done, status
    return len(ranges), 0


@compiled
def _unmap(words: Words, ranges: Any) -> tuple[int, int]:
    for done in range(len(ranges)):
        status = call(words[UNMAP], (ranges[done, 0], ranges[done, 1]))
        if status:
            return done, status
    return len(ranges), 0


class CompiledCalls:
    """The calls of a driver, compiled (see `vmmkv.memory.calls.Calls`). To make one compiles them, or loads them.

    Args:
        driver: the memory system.
        meter: counts the calls.
    """

    in_doubt = False

    def __init__(self, driver: NativeDriver, meter: Meter) -> None:
        self.driver, self.meter = driver, meter
        interface = driver.c_interface()
        self._words = np.array([interface[name] for name in WORDS])
        handles = np.empty(0, np.int64)
        self.create(handles, [])
        self.release(handles, [])
        self.map([], handles)
        self.set_access([])
        self.unmap([])

    def create(self, handles: Handles, frames: Sequence[int]) -> Outcome:
        return self._run("create", _create, handles, _words(frames), self.driver.page_size)

    def release(self, handles: Handles, frames: Sequence[int]) -> Outcome:
        return self._run("release", _release, handles, _words(frames))

    def map(self, addresses: Sequence[int], handles: Handles) -> Outcome:
        return self._run("map", _map, _words(addresses), handles, self.driver.page_size)

    def set_access(self, ranges: Sequence[tuple[int, int]], writable: bool = True) -> Outcome:
        access = int(self._words[ACCESS if writable else READ_ACCESS])
        return self._run("set_access", _set_access, _words(ranges).reshape(-1, 2), access)

    def unmap(self, ranges: Sequence[tuple[int, int]]) -> Outcome:
        return self._run("unmap", _unmap, _words(ranges).reshape(-1, 2))

    def _run(self, name: str, function: Any, *arguments: Any) -> Outcome:
        start = perf_counter_ns()
        done, status = function(self._words, *arguments)
        getattr(self.meter, name).add(done, perf_counter_ns() - start)
        return Outcome(done, self.driver.error(name, status) if status else None)


def _words(numbers: Sequence[Any]) -> Words:
    return np.array(numbers, np.int64)
