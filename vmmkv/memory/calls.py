"""Many calls of a driver at once, and how long they took.

Each method makes calls until one fails, and returns how many succeeded: what was done is written down in any case,
before `Outcome.check` raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DriverError
from .driver import Driver, Handle, NativeDriver
from .meter import NAMES, Meter

VACANT = -1
"""The handle of a frame that does not exist."""

Handles = npt.NDArray[np.int64]

UNMAP, MAP, SET_ACCESS, SET_READ_ACCESS = range(4)
"""Kinds of steps."""
METHODS = (*NAMES[:3], "set_access")
"""By kind: the method of the driver."""


Steps = Sequence[int]
"""Calls that change what is mapped, four numbers each: kind, address, bytes, and the handle of what is put there, or
`VACANT`."""


class Outcome:
    """What came of many calls.

    Attributes:
        done: how many succeeded, the first ones.
    """

    __slots__ = "_error", "done"

    def __init__(self, done: int, error: DriverError | None = None) -> None:
        self.done = done
        self._error = error

    def __bool__(self) -> bool:
        """Whether all succeeded."""
        return self._error is None

    def check(self) -> None:
        """Raises why they ended early, if they did."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # it knows this frame, which must not know it: memory would wait for the garbage collector


class Calls(Protocol):
    """What maps, and what makes what is mapped."""

    meter: Meter
    in_doubt: bool
    """Whether a frame is being made or released, and its handle does not say so yet."""

    def create(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        """Makes frames of so many pages, and writes down their handles, for each of their pages."""

    def release(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        """Gives frames of so many pages back; `VACANT` becomes their handle."""

    def run(self, steps: Steps) -> Outcome:
        """Makes steps, one after another."""


class LoopedCalls:
    """The calls of any driver, one by one.

    Args:
        driver: the memory system.
        meter: counts the calls.
    """

    def __init__(self, driver: Driver, meter: Meter) -> None:
        self.driver, self.meter = driver, meter
        self.in_doubt = False

    def create(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        def create(frame: int) -> None:
            self.in_doubt = True
            try:
                handles[frame : frame + pages] = self.driver.create(pages)
            except DriverError:
                self.in_doubt = False
                raise
            self.in_doubt = False

        return self._each("create", create, frames)

    def release(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        def release(frame: int) -> None:
            handle = int(handles[frame])
            self.in_doubt = True
            handles[frame : frame + pages] = VACANT  # before: released twice, it may be somebody else's by then
            try:
                self.driver.release(Handle(handle))
            except DriverError:
                handles[frame : frame + pages] = handle
                self.in_doubt = False
                raise
            self.in_doubt = False

        return self._each("release", release, frames)

    def run(self, steps: Steps) -> Outcome:
        done = 0
        for method, some in groupby(zip(*[iter(steps)] * 4), lambda step: METHODS[step[0]]):
            outcome = self._each(method, self._make, list(some))
            done += outcome.done
            if not outcome:
                outcome.done = done
                return outcome
        return Outcome(done)

    def _make(self, step: Steps) -> None:
        kind, address, nbytes, handle = step
        if kind == UNMAP:
            self.driver.unmap(address, nbytes)
        elif kind == MAP:
            self.driver.map(address, Handle(int(handle)), nbytes // self.driver.page_size)
        else:
            self.driver.set_access(address, nbytes, kind == SET_ACCESS)

    def _each(self, name: str, call: Callable[[Any], None], items: Sequence[Any]) -> Outcome:
        start = perf_counter_ns()
        done = 0
        try:
            for item in items:
                call(item)
                done += 1
        except DriverError as error:
            return Outcome(done, error)
        finally:
            self.meter.add(name, done, perf_counter_ns() - start)
        return Outcome(done)


def make_calls(driver: Driver, meter: Meter) -> Calls:
    """The fastest way to make many calls of a driver."""
    if isinstance(driver, NativeDriver):
        from .compiled_calls import CompiledCalls  # imports Numba

        return CompiledCalls(driver, meter)
    return LoopedCalls(driver, meter)
