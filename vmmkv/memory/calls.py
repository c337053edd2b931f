"""Many calls of a driver at once, and how long they took.

Each method makes calls until one fails, and returns how many succeeded and the error, if there was one: what was done
is written down in any case.
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
Outcome = tuple[int, DriverError | None]


class Calls(Protocol):
    """What maps, and what makes what is mapped. Addresses and sizes are in bytes."""

    driver: Driver
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
            return done, error
        finally:
            getattr(self.meter, name).add(done, perf_counter_ns() - start)
        return done, None
