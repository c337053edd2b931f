"""A meter: how often the memory system was called, and how long that took."""

from __future__ import annotations

import numpy as np

from ..stats import CallStats

NAMES = ("unmap", "map", "set_access", "create", "release")
"""By number of a kind of steps (`vmmkv.driver.table`)."""


class Meter:
    """The calls that succeeded, by the names of functions of a driver's table."""

    def __init__(self) -> None:
        self.spent = np.zeros((len(NAMES), 2), np.int64)
        """By name: calls, and nanoseconds in all. Compiled code adds to it."""

    def stats(self) -> dict[str, CallStats]:
        """A snapshot of those that were made."""
        return {
            name: CallStats(count, nanoseconds / 1e9)
            for name, (count, nanoseconds) in zip(NAMES, self.spent.tolist())
            if count
        }
