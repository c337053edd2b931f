"""A meter: how often the memory system was called, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass

from ..stats import CallStats


@dataclass(slots=True)
class Calls:
    """One call of the memory system: how often, and nanoseconds in all."""

    count: int = 0
    nanoseconds: int = 0

    def add(self, count: int, nanoseconds: int) -> None:
        """Adds a run of calls; a clock reading for each would cost as much as the code around it."""
        self.count += count
        self.nanoseconds += nanoseconds


class Meter:
    """The calls that succeeded, by the names of `vmmkv.memory.driver.Driver`'s methods."""

    def __init__(self) -> None:
        self.reserve = Calls()
        self.create = Calls()
        self.map = Calls()
        self.set_access = Calls()
        self.unmap = Calls()
        self.release = Calls()

    def stats(self) -> dict[str, CallStats]:
        """A snapshot of those that were made."""
        return {
            name: CallStats(calls.count, calls.nanoseconds / 1e9) for name, calls in vars(self).items() if calls.count
        }
