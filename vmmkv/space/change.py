"""A change: runs of pages that are unmapped and mapped, planned, run and committed one after another.

    plan    with the monitor's lock: says what will be done, and puts it in doubt
    run     makes the driver's calls and writes nothing down, so that it needs no lock
    commit  with the lock again: writes down what was done, and ends the doubt

Whoever plans one holds the monitor's `changing` from then until it is committed, so there is one at a time.
"""

from __future__ import annotations

from ..memory.calls import Calls, Handles, Outcome
from ..memory.pool import FramePool
from .page_table import PageTable, Run


class Change:
    """See above.

    Args:
        calls: makes the calls.
        handles: of frames, by number.
    """

    def __init__(self, calls: Calls, handles: Handles) -> None:
        self._calls = calls
        self._handles = handles
        self._maps: list[tuple[PageTable, Run, list[int], int]] = []
        self._unmaps: list[tuple[PageTable, Run]] = []
        self._unmapped = self._mapped = self._accessible = Outcome(0)

    def unmap(self, table: PageTable, run: Run) -> None:
        """Plans to unmap the front or the back of a row. From now on it may not be used."""
        self._unmaps.append((table, run))
        if not run.is_front:
            table.ready[run.row] = max(min(table.ready[run.row], run.begin), table.first[run.row])
        table.doubt.append(run)

    def map(self, table: PageTable, run: Run, frames: list[int], ready: int) -> None:
        """Plans to put frames behind what a row has, and to make the row accessible up to page `ready`."""
        self._maps.append((table, run, frames, ready))
        table.doubt.append(run)

    def run(self) -> None:
        """Makes the calls, until one fails."""
        if self._unmaps:
            ranges = [table.range_of(run) for table, run in self._unmaps]
            self._unmapped = self._calls.unmap(ranges)
        if self._maps and self._unmapped:
            addresses = [
                address
                for table, run, *_ in self._maps
                for address in range(table.range_of(run)[0], sum(table.range_of(run)), table.page_size)
            ]
            frames = [frame for _, _, frames, _ in self._maps for frame in frames]
            self._mapped = self._calls.map(addresses, self._handles[frames])
        if self._maps and self._unmapped and self._mapped:
            ranges = [table.range_of(Run(run.row, table.ready[run.row], ready)) for table, run, _, ready in self._maps]
            self._accessible = self._calls.set_access(ranges)

    def commit(self, pool: FramePool) -> int:
        """Writes down what was done, and gives frames back that lie nowhere now; returns the pages that were mapped."""
        for index, (table, run) in enumerate(self._unmaps):
            if index < self._unmapped.done:
                pool.give(table.account, table.take_off(run))
        left = self._mapped.done
        for index, (table, run, frames, ready) in enumerate(self._maps):
            mapped = frames[:left]
            left -= len(mapped)
            pool.give(table.account, frames[len(mapped) :])
            table.put(Run(run.row, run.begin, run.begin + len(mapped)), mapped)
            if index < self._accessible.done:
                table.ready[run.row] = ready
        for table, run in [*self._unmaps, *((table, run) for table, run, *_ in self._maps)]:
            table.doubt.remove(run)
        return self._mapped.done

    @property
    def is_empty(self) -> bool:
        """Whether nothing was planned."""
        return not self._maps and not self._unmaps

    def rows_of(self, table: PageTable) -> set[int]:
        """The rows of a table that it changes."""
        runs = [*self._unmaps, *((each, run) for each, run, *_ in self._maps)]
        return {run.row for each, run in runs if each is table}

    def check(self) -> None:
        """Raises why it ended early, if it did.

        Raises:
            DriverError: the call that failed; none came after it.
        """
        for outcome in (self._unmapped, self._mapped, self._accessible):
            outcome.check()
