"""An arena: one reserved virtual range cut into rows, and what is mapped there.

Invariants, beside those of its page table:
 1. A frame that is mapped here is taken from the pool, on an account; it goes back to both when it is unmapped.
 2. Rows never move, and the range stays reserved for as long as a view of it lives.

An arena knows bytes and pages, not tokens and not who reads them: that is `vmmkv.rows`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from contextlib import suppress
from itertools import chain
from time import perf_counter_ns

from ..driver.fence import Fence, wait_for_device
from ..driver.table import MAP, SET_READ_ACCESS, UNMAP, VACANT
from ..errors import DriverError, VmmkvError
from ..memory.accounts import Account
from ..memory.frames import Supply
from ..memory.pool import FramePool
from .change import Change
from .page_table import PageTable, Run


class Arena:
    """One reserved range of `num_rows` rows.

    Args:
        pool: where frames come from and go back to.
        account: whose they are meanwhile.
        num_rows: rows in the range.
        row_bytes: bytes of a row, a multiple of the page size.
    """

    def __init__(self, pool: FramePool, account: Account, num_rows: int, row_bytes: int) -> None:
        self.pool, self.account = pool, account
        self.page_size = pool.page_size
        guard = int(pool.is_debugged)  # a page behind each row that is never mapped
        self.row_bytes = row_bytes
        self.nbytes = num_rows * (row_bytes + guard * self.page_size)
        free_waiting()
        start = perf_counter_ns()
        self.address = pool.driver.reserve(self.nbytes)
        pool.meter.add("reserve", 1, perf_counter_ns() - start)
        limit = row_bytes // self.page_size
        self.table = PageTable(pool.driver, pool.frames, account, self.address, num_rows, limit, limit + guard)
        # Not at exit: views may be read until the very end, and the process takes everything with it.
        arguments = pool, account, self.table, self.nbytes, os.getpid()
        weakref.finalize(self, _free_range, *arguments).atexit = False
        pool.tables.append(self.table)

    def make_way(self, row: int, end: int) -> None:
        """Unmaps the zeros behind a row up to page `end`, if there are any.

        Raises:
            DriverError: it could not be unmapped.
        """
        table = self.table
        if end > table.zeros[row]:
            self._unmap(run := Run(row, table.zeros[row], end))
            table.zeros[row], table.zeros_ready[row] = end, max(end, table.zeros_ready[row])
            table.doubt.remove(run)

    def plan_back(self, change: Change, row: int, end: int, count: int | None = None) -> int:
        """Plans to unmap a row's frames behind page `end`; returns their pages.

        Args:
            count: not more frames than it takes for so many pages.
        """
        table = self.table
        begin = table.frame_end(row, max(end, table.first[row]))
        if count is not None:
            begin = max(begin, table.frame_begin(row, table.end[row] - count))
        return self._plan_unmapping(change, Run(row, begin, table.end[row]))

    def plan_front(self, change: Change, row: int, first: int, count: int) -> int:
        """Plans to unmap a row's frames before page `first`, not more than it takes for `count` pages; returns their
        pages."""
        table = self.table
        end = table.frame_begin(row, min(first, table.end[row]))
        end = min(end, table.frame_end(row, table.first[row] + count))
        return self._plan_unmapping(change, Run(row, table.first[row], end, is_front=True))

    def _plan_unmapping(self, change: Change, run: Run) -> int:
        if run.begin < run.end:
            change.unmap(self.table, run)
        return max(run.end - run.begin, 0)

    def unmap_back(self, row: int, end: int, count: int | None = None) -> int:
        """Does at once what `plan_back` plans."""
        change = Change(self.pool)
        pages = self.plan_back(change, row, end, count)
        if pages:
            change.make()
        return pages

    def fill_zeros(self, row: int, frame: int) -> None:
        """Maps a frame, read-only, everywhere behind a row's pages. Pages that a failure left unusable there go.

        Raises:
            DriverError: `has_hole` is still true; call it again.
        """
        table, calls = self.table, self.pool.calls
        if not table.has_hole(row):
            return
        self.unmap_back(row, table.ready[row])
        end, old = table.end[row], table.zeros[row]
        pages = range(old - 1, end - 1, -1)  # downwards: what is mapped reaches the row's end
        handle = int(self.pool.frames.handles[frame])
        table.doubt.append(run := Run(row, end, old))
        steps = [(MAP, table.address_of(row, page), self.page_size, handle) for page in pages]
        outcome = calls.run([*chain.from_iterable(steps)])
        table.zeros[row] = old - outcome.done
        table.doubt.remove(run)
        outcome.check()
        calls.run([SET_READ_ACCESS, *table.range_of(Run(row, end, table.zeros_ready[row])), VACANT]).check()
        table.zeros_ready[row] = end

    def zero(self, frame: int) -> None:
        """Zeroes a frame that is mapped nowhere, in the first row, which is still empty; waits for it.

        Raises:
            StreamCaptureError: a CUDA graph is being captured.
        """
        change = Change(self.pool)
        change.map(self.table, 0, 1, Supply([], [frame]))
        change.make()
        driver = self.pool.driver
        stream = driver.current_stream()
        driver.fill(self.address, self.page_size, 0, stream)
        Fence.after(driver, [stream]).wait()
        self._unmap(run := Run(0, 0, 1))
        self.table.take_off(run)
        self.table.doubt.remove(run)

    def close(self) -> None:
        """Unmaps everything, in whatever state the driver is; all work must have finished."""
        self.pool.give(self.account, self.table.unmap_all())

    def _unmap(self, run: Run) -> None:
        """Unmaps pages; the caller writes it down, and ends the doubt."""
        self.table.doubt.append(run)
        outcome = self.pool.calls.run([UNMAP, *self.table.range_of(run), VACANT])
        if not outcome:
            self.table.doubt.remove(run)
        outcome.check()


_waiting: deque[tuple[FramePool, Account, PageTable, int, int]] = deque()
"""Ranges of arenas that are gone, and could not be unmapped then, or not all of them: during a graph capture, say, or
where Ctrl-C came in between."""


def free_waiting() -> None:
    """Gives back the ranges of arenas that ended when that was not possible, as far as it is now."""
    for _ in range(len(_waiting)):
        with suppress(IndexError):  # another thread was faster
            _free_range(*_waiting.popleft())


def _free_range(pool: FramePool, account: Account, table: PageTable, nbytes: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    try:
        wait_for_device(pool.driver)
        pool.left_behind.append((table, account, table.unmap_all()))
    except VmmkvError:
        _waiting.append((pool, account, table, nbytes, owner))
        return
    except BaseException:  # Ctrl-C, which ends no program in a finalizer: it is reported, and all goes on
        pool.monitor.is_unfinished = True  # so that books are worked out anew, with what was unmapped so far
        _waiting.append((pool, account, table, nbytes, owner))
        raise
    if table.mapped_pages():
        _waiting.append((pool, account, table, nbytes, owner))
        return
    with suppress(DriverError):
        pool.driver.free(table.address, nbytes)
