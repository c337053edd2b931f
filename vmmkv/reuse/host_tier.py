"""The host tier: sequences that are suspended, whose bytes lie in host memory while their rows stay their own.

A sequence moves as one copy for each range of the layout, between its row and pinned memory, in the order of the
current stream. Its pages are surplus then, and go to others after the copy. On resuming it gets pages again, at the
same addresses.

    here --suspend--> leaving --> away --resume--> coming --> here

Who is interrupted in between finds a sequence that is here while it was leaving, and away while it was coming.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..driver.fence import Fence, finished_on_error
from ..errors import OutOfHostMemoryError, VmmkvError
from ..events import EventLog
from ..memory.budget import parse_bytes
from ..rows.rows import Rows
from ..rows.table import Suspended
from .host_prefixes import HostPrefixes
from .states import states_of


class HostTier:
    """See above.

    Args:
        rows: the rows of the cache.
        ranges: the elements of each range of the layout.
        host_bytes: the most that suspended sequences and evicted prefixes may take: bytes, `"20GiB"`, or a share of the
            host's memory.
        priority: the lowest of prefixes that are kept when they are evicted; None: none are.
        log: what is told of these to routers, if anything is.

    Raises:
        BudgetError: it is no size.
    """

    def __init__(
        self,
        rows: Rows,
        ranges: Sequence[torch.Tensor],
        host_bytes: float | str,
        priority: int | None,
        log: EventLog | None = None,
    ) -> None:
        self._rows, self._table, self._ranges = rows, rows.table, ranges
        self.limit = parse_bytes(host_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        """Bytes."""
        self.prefixes = HostPrefixes(rows, self.limit, priority, log)
        """What was evicted, and makes way for sequences."""

    @property
    def used(self) -> int:
        """Bytes that suspended sequences and prefixes take."""
        return self._table.suspended_bytes + self.prefixes.nbytes

    def suspend(self, row: int) -> None:
        """Moves a live row's tokens to the host.

        Raises:
            OutOfHostMemoryError: the tier, or the host, has no room for them.
            StreamCaptureError: a CUDA graph is being captured. Nothing has changed in both cases.
        """
        table, driver = self._table, self._rows.pool.driver
        sources = states_of(self._rows, self._ranges, row, table.start[row], table.length[row])
        nbytes = sum(source.nbytes for source in sources)
        if not self.prefixes.make_room(nbytes, wait=True):
            left = self.limit - self._table.suspended_bytes
            raise OutOfHostMemoryError(
                f"asked to suspend a sequence of {nbytes} bytes; the host tier has {left} of "
                f"{self.limit} left. Resume or free others, or make the cache with more host_bytes"
            )
        table.fence_after(driver, [row]).order(driver.current_stream())
        pinned = driver.device.type == "cuda"
        try:
            states = [torch.empty(len(each), dtype=each.dtype, pin_memory=pinned) for each in sources]
        except (MemoryError, RuntimeError) as error:  # torch raises either
            raise OutOfHostMemoryError(
                f"asked to suspend a sequence of {nbytes} bytes, which the tier has room for, but not the host: {error}"
            ) from error
        start, length = table.extents[row].tolist()
        with finished_on_error(driver):
            for state, source in zip(states, sources):
                state.copy_(source, non_blocking=True)
            self._rows.put_away(row, Suspended(start, length, table.expected[row], states, nbytes))

    def resume(self, row: int) -> None:
        """Moves a suspended row's tokens back.

        Raises:
            OutOfPagesError, DriverError, StreamCaptureError: see `Growing.make_room`; it is suspended still.
        """
        table, driver = self._table, self._rows.pool.driver
        record = table.suspended[row]
        self._rows.bring_back(row, record)
        targets = states_of(self._rows, self._ranges, row, record.start, record.length)
        try:
            table.fences[row].order(driver.current_stream())  # behind what is still on its way to the host
            for state, target in zip(record.states, targets):
                target.copy_(state, non_blocking=True)
            Fence.after(driver, [driver.current_stream()]).order(table.own_streams[row])
        except VmmkvError:
            self._rows.suspending.leave_away(row, record)
            raise
        self._rows.suspending.settle_back(row)
