"""Many calls of a driver at once, and how long they took.

Each method makes calls until one fails, and returns how many succeeded: what was done is written down in any case,
before `Outcome.check` raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DriverError
from .driver import Driver, Handle
from .meter import Meter

VACANT = -1
"""The handle of a frame that does not exist."""

Handles = npt.NDArray[np.int64]


class Outcome:
    """What came of many calls.

    Attributes:
        done: how many succeeded, the first ones.
    """

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
    """What maps, and what makes what is mapped. Addresses and sizes are in bytes."""

    meter: Meter
    in_doubt: bool
    """Whether a frame is being made or released, and its handle does not say so yet."""

    def create(self, handles: Handles, frames: Sequence[int]) -> Outcome:
        """Makes frames, and writes down their handles."""

    def release(self, handles: Handles, frames: Sequence[int]) -> Outcome:
        """Gives frames back; `VACANT` becomes their handle."""

    def map(self, addresses: Sequence[int], handles: Handles) -> Outcome:
        """Puts frames, by their handles, under addresses."""

    def set_access(self, ranges: Sequence[tuple[int, int]], writable: bool = True) -> Outcome:
        """Makes ranges, by address and size, readable, and writable or read-only."""

    def unmap(self, ranges: Sequence[tuple[int, int]]) -> Outcome:
        """Takes away what is mapped in ranges, by address and size."""


class LoopedCalls:
    """The calls of any driver, one by one.

    Args:
        driver: the memory system.
        meter: counts the calls.
    """

    def __init__(self, driver: Driver, meter: Meter) -> None:
        self.driver, self.meter = driver, meter
        self.in_doubt = False

    def create(self, handles: Handles, frames: Sequence[int]) -> Outcome:
        def create(frame: int) -> None:
            self.in_doubt = True
            try:
                handles[frame] = self.driver.create()
            except DriverError:
                self.in_doubt = False
                raise
            self.in_doubt = False

        return self._each("create", create, [(frame,) for frame in frames])

    def release(self, handles: Handles, frames: Sequence[int]) -> Outcome:
        def release(frame: int) -> None:
            handle = int(handles[frame])
            self.in_doubt = True
            handles[frame] = VACANT  # before: what is released twice may be somebody else's by then
            try:
                self.driver.release(Handle(handle))
            except DriverError:
                handles[frame] = handle
                self.in_doubt = False
                raise
            self.in_doubt = False

        return self._each("release", release, [(frame,) for frame in frames])

    def map(self, addresses: Sequence[int], handles: Handles) -> Outcome:
        return self._each("map", self.driver.map, list(zip(addresses, handles.tolist())))

    def set_access(self, ranges: Sequence[tuple[int, int]], writable: bool = True) -> Outcome:
        return self._each("set_access", self.driver.set_access, [(*each, writable) for each in ranges])

    def unmap(self, ranges: Sequence[tuple[int, int]]) -> Outcome:
        return self._each("unmap", self.driver.unmap, ranges)

    def _each(self, name: str, call: Any, arguments: Sequence[tuple[Any, ...]]) -> Outcome:
        start = perf_counter_ns()
        done = 0
        try:
            for each in arguments:
                call(*each)
                done += 1
        except DriverError as error:
            return Outcome(done, error)
        finally:
            getattr(self.meter, name).add(done, perf_counter_ns() - start)
        return Outcome(done)
