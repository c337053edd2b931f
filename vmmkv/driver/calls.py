"""Many calls of a driver at once, without the interpreter's lock, and how long they took.

Each method makes calls until one fails, and returns how many succeeded: what was done is written down in any case,
before `Outcome.check` raises the error.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from . import entries
from .driver import STEPS, Driver, new_scratch
from .meter import Meter
from .table import CREATE, RELEASE, STATUS

Handles = npt.NDArray[np.int64]
Steps = Sequence[int]
"""Calls, four numbers each: kind, address, bytes, and the handle of what is put there, or `VACANT`."""


class Outcome:
    """What came of many calls.

    Attributes:
        done: how many succeeded, the first ones.
    """

    __slots__ = "_error", "done"

    def __init__(self, done: int, error: Exception | None = None) -> None:
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


class Calls:
    """The calls of a driver.

    Args:
        driver: the memory system.
        meter: counts the calls.
    """

    def __init__(self, driver: Driver, meter: Meter) -> None:
        self.driver, self.meter = driver, meter
        self._spent = meter.spent.ctypes.data

    def create(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        """Makes frames of so many pages, and writes down their handles, for each of their pages."""
        start, nbytes = handles.ctypes.data, pages * self.driver.page_size
        return self.run([word for frame in frames for word in (CREATE, start + 8 * frame, nbytes, pages)])

    def release(self, handles: Handles, frames: Sequence[int], pages: int) -> Outcome:
        """Gives frames of so many pages back; `VACANT` becomes their handle."""
        start = handles.ctypes.data
        return self.run([word for frame in frames for word in (RELEASE, start + 8 * frame, 0, pages)])

    def run(self, steps: Steps) -> Outcome:
        """Makes steps, one after another."""
        count, words = len(steps) // 4, array("q", steps)
        scratch, at = new_scratch()
        done = entries.run(self.driver.address, words.buffer_info()[0], count, self._spent, at)
        if done == count:
            return Outcome(done)
        kind, _, nbytes, _ = steps[done * 4 : done * 4 + 4]
        detail = f"{nbytes} bytes on {self.driver.device}" if kind == CREATE else ""
        return Outcome(done, self.driver.error(STEPS[kind], scratch[STATUS], detail))
