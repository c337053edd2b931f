"""Many calls of the CUDA driver at once, compiled: faster than from Python, and other threads go on meanwhile.

Handles are written down by the same code that makes the calls, so that no interruption comes in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from .calls import MAP, METHODS, SET_ACCESS, UNMAP, VACANT, Handles, Outcome, Steps
from .driver import NativeDriver
from .meter import NAMES, Meter
from .native import at, call, word

WORDS = ("create", "release", "unmap", "map", "set_access", "property", "access", "read_access")
"""What the functions below are given: addresses of C functions, with the CUDA driver's signatures, and of arguments."""
CREATE, RELEASE, UNMAP_CALL, MAP_CALL, ACCESS_CALL, PROPERTY, ACCESS, READ_ACCESS, CLOCK, TIME = range(len(WORDS) + 2)
MONOTONIC = 1
"""The clock that `clock_gettime` is asked for."""

Words = npt.NDArray[np.int64]


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function that gives up the interpreter's lock, and keeps the result on disk where there is room."""
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return njit(nogil=True, error_model="numpy")(function)


@compiled
def _now(words: Words) -> Any:
    """Nanoseconds."""
    call(words[CLOCK], (MONOTONIC, words[TIME]))
    return at(words[TIME]) * 1_000_000_000 + at(words[TIME] + 8)


@compiled
def _create(words: Words, handles: Handles, frames: Any, pages: int, nbytes: int, spent: Words) -> tuple[int, int]:
    out, start = word(), _now(words)
    done, status = 0, 0
    while done < len(frames) and status == 0:
        status = call(words[CREATE], (out, nbytes, words[PROPERTY], 0))
        if status == 0:
            handles[frames[done] : frames[done] + pages] = at(out)
            done += 1
    spent[0] += done
    spent[1] += _now(words) - start
    return done, status


@compiled
def _release(words: Words, handles: Handles, frames: Any, pages: int, spent: Words) -> tuple[int, int]:
    start = _now(words)
    done, status = 0, 0
    while done < len(frames) and status == 0:
        status = call(words[RELEASE], (handles[frames[done]],))
        if status == 0:
            handles[frames[done] : frames[done] + pages] = VACANT
            done += 1
    spent[0] += done
    spent[1] += _now(words) - start
    return done, status


@compiled
def _make(words: Words, kind: int, address: int, nbytes: int, handle: int) -> Any:
    """Makes one step."""
    if kind == UNMAP:
        return call(words[UNMAP_CALL], (address, nbytes))
    if kind == MAP:
        return call(words[MAP_CALL], (address, nbytes, 0, handle, 0))
    return call(words[ACCESS_CALL], (address, nbytes, words[ACCESS + kind - SET_ACCESS], 1))


@compiled
def _run(words: Words, steps: Any, spent: Words) -> tuple[int, int]:
    """Makes steps of four numbers each; the clock is read once for a run of one kind."""
    start = _now(words)
    for done in range(0, len(steps), 4):
        kind = steps[done]
        status = _make(words, kind, steps[done + 1], steps[done + 2], steps[done + 3])
        method = min(kind, SET_ACCESS)
        if status == 0:
            spent[method, 0] += 1
        if status or done + 4 == len(steps) or steps[done + 4] != kind:
            now = _now(words)
            spent[method, 1] += now - start
            start = now
        if status:
            return done // 4, status
    return len(steps) // 4, 0


class CompiledCalls:
    """The calls of a driver, compiled (see `vmmkv.memory.calls.Calls`). To make one compiles them, or loads them.

    Args:
        driver: the memory system.
        meter: counts the calls.
    """

    in_doubt = False

    def __init__(self, driver: NativeDriver, meter: Meter) -> None:
        self.driver, self.meter = driver, meter
        self._page_size = driver.page_size
        self._spent_on_create, self._spent_on_release = (meter.spent[NAMES.index(name)] for name in WORDS[:2])
        interface = driver.c_interface()
        self._time = np.zeros(2, np.int64)  # a `timespec`
        clock = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
        self._words = np.array([*(interface[name] for name in WORDS), clock, self._time.ctypes.data])
        handles = np.empty(0, np.int64)
        self.create(handles, [], 1)
        self.release(handles, [], 1)
        self.run([])

    def create(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        new, nbytes = np.array(frames, np.int64), pages * self._page_size
        done, status = _create(self._words, handles, new, pages, nbytes, self._spent_on_create)
        return Outcome(done, self.driver.error("create", status) if status else None)

    def release(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        done, status = _release(self._words, handles, np.array(frames, np.int64), pages, self._spent_on_release)
        return Outcome(done, self.driver.error("release", status) if status else None)

    def run(self, steps: Steps) -> Outcome:
        done, status = _run(self._words, np.array(steps, np.int64), self.meter.spent)
        return Outcome(done, self.driver.error(METHODS[steps[done * 4]], status) if status else None)
