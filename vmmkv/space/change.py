"""A change: runs of pages that are unmapped and mapped, planned, run and committed one after another.

    plan    with the monitor's lock: says what will be done, and puts it in doubt
    run     makes the driver's calls and writes nothing down, so that it needs no lock
    commit  with the lock again: writes down what was done, and ends the doubt

Whoever plans one holds the monitor's `changing` from then until it is committed, so there is one at a time.
"""

from __future__ import annotations

from ..driver.calls import Calls, Outcome
from ..driver.table import MAP, SET_ACCESS, UNMAP, VACANT
from ..memory.frames import LARGE, Supply
from ..memory.pool import FramePool
from .page_table import PageTable, Run

Placement = tuple[PageTable, Run, list[int], int]
"""Frames that are put behind what a row has, and the page up to which the row is accessible then."""


class Change:
    """See above.

    Args:
        pool: where frames come from and go to.
        calls: make the calls instead of the pool's own.
    """

    def __init__(self, pool: FramePool, calls: Calls | None = None) -> None:
        self._pool, self._frames = pool, pool.frames
        self._calls = calls or pool.calls
        self._unmaps: list[tuple[PageTable, Run]] = []
        self._placements: list[Placement] = []
        self._unmap_steps: list[int] = []
        self._map_steps: list[int] = []
        self._access_steps: list[int] = []
        self._outcome: Outcome

    def unmap(self, table: PageTable, run: Run) -> None:
        """Plans to unmap the front or the back of a row. From now on it may not be used."""
        self._unmaps.append((table, run))
        if not run.is_front:
            table.ready[run.row] = max(min(table.ready[run.row], run.begin), table.first[run.row])
        table.doubt.append(run)
        self._unmap_steps += (UNMAP, *table.range_of(run), VACANT)

    def map(self, table: PageTable, row: int, end: int, supply: Supply, large: int = 0) -> None:
        """Plans to make a row accessible up to page `end`, with frames from `supply` behind what it has, up to so many
        large ones first."""
        begin = table.end[row]
        if end > table.ready[row]:
            run = Run(row, begin, max(begin, end))
            self.place(table, run, supply.pop(run.end - begin, large), end)

    def place(
        self,
        table: PageTable,
        run: Run,
        frames: list[int],
        end: int,
        *,
        kind: int = SET_ACCESS,
        since: int | None = None,
    ) -> None:
        """Plans to put frames behind what a row has, and to make it accessible up to page `end`: from where it is, or
        from page `since`, where several runs of the row are planned."""
        row, begin, size = run.row, run.begin, table.page_size
        ready = table.ready[row] if since is None else since
        self._placements.append((table, run, frames, end))
        table.doubt.append(run)
        is_large, handles = self._frames.is_large.data, self._frames.handles.data
        address = table.address_of(row, begin)
        self._access_steps += (kind, address - (begin - ready) * size, (end - ready) * size, VACANT)
        for frame in frames:
            nbytes = size * LARGE if is_large[frame] else size
            self._map_steps += (MAP, address, nbytes, handles[frame])
            address += nbytes

    def make(self) -> None:
        """Runs it, commits it, and raises what `check` raises: what nobody else needs to be told of."""
        self.run()
        self.commit()
        self.check()

    def run(self) -> None:
        """Makes the calls, until one fails."""
        self._outcome = self._calls.run(self._unmap_steps + self._map_steps + self._access_steps)

    def commit(self) -> int:
        """Writes down what was done, and gives frames back that lie nowhere now; returns the pages that were mapped."""
        pages, unmapped = 0, self._outcome.done
        mapped = unmapped - len(self._unmaps)
        accessible = mapped - self.frames
        for table, run in self._unmaps:
            if unmapped > 0:
                self._pool.give(table.account, table.take_off(run))
            unmapped -= 1
            table.doubt.remove(run)
        for table, run, frames, ready in self._placements:
            if mapped > 0:
                pages += table.put(run, frames[:mapped])
            if mapped < len(frames):
                self._pool.give(table.account, frames[max(mapped, 0) :])
            if accessible > 0:
                table.ready[run.row] = ready
            mapped -= len(frames)
            accessible -= 1
            table.doubt.remove(run)
        return pages

    @property
    def frames(self) -> int:
        """How many it maps."""
        return len(self._map_steps) // 4

    @property
    def pages(self) -> int:
        """How many it maps."""
        return sum([run.end - run.begin for _, run, *_ in self._placements])

    @property
    def is_empty(self) -> bool:
        """Whether nothing was planned."""
        return not self._placements and not self._unmaps

    def rows_of(self, table: PageTable) -> set[int]:
        """The rows of a table that it changes."""
        runs = [*self._unmaps, *((each, run) for each, run, *_ in self._placements)]
        return {run.row for each, run in runs if each is table}

    def check(self) -> None:
        """Raises why it ended early, if it did.

        Raises:
            DriverError: the call that failed; none came after it.
        """
        self._outcome.check()
