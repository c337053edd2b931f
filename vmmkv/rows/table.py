"""The row table: whose each row is, what it holds, and what work may touch it, in columns.

A row is in one of four states:

    empty    nothing is mapped
    live     belongs to a sequence
    parked   its sequence was freed; its pages are still mapped, from the first on: ready to be adopted
    retired  its sequence was freed after its front was given back: nobody can adopt it

Invariants:
 1. A row belongs to the sequence whose number is its `owner`, and numbers are never used twice: who names a row and
    another number names a sequence that is gone.
 2. `start <= length <= capacity` for each live row, in tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ..driver.driver import Driver
from ..driver.fence import Fence
from ..errors import OutOfRowsError
from .shelf import Shelf

NOBODY = -1
"""The owner of a row without a sequence."""
UNCOUNTED = -1
"""The brink of a row whose pages are to be counted."""
MAX_TRIES = 100
"""Fences of parked rows that are looked at, to find one that fits and need not be waited for."""


class Place(Enum):
    """Where the tokens of a suspended sequence are."""

    LEAVING = "on its row, and on the host"
    AWAY = "on the host"
    COMING = "on the host, and perhaps on its row"


@dataclass
class Suspended:
    """A live row whose tokens are on the host.

    Attributes:
        start: the first token that it keeps.
        length: its tokens.
        expected: those that it said it will have.
        states: by range the bytes of its tokens.
        nbytes: how many these are.
        place: where the tokens are.
    """

    start: int
    length: int
    expected: int
    states: list[Any]
    nbytes: int
    place: Place = Place.LEAVING


class RowTable:
    """Rows `[0, num_rows)`, all of them empty."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.extents = np.zeros((num_rows, 2), np.int64)
        """By row: the first token that is kept, and the end."""
        self.starts, self.lengths = self.extents[:, 0], self.extents[:, 1]
        self.capacities = np.zeros(num_rows, np.int64)
        """By row: the tokens that it can grow to without a driver call."""
        self.owners = np.full(num_rows, NOBODY, np.int64)
        """By row: the number of the sequence that has it."""
        self.expectations = np.zeros(num_rows, np.int64)
        """By row: the tokens that its sequence said it will soon have."""
        # The same memory for one row at a time, as Python's own integers: several times faster than numpy's.
        self.start, self.length = self.starts.data, self.lengths.data
        self.capacity, self.owner = self.capacities.data, self.owners.data
        self.expected = self.expectations.data
        self.wakes = np.zeros(num_rows, np.int64)
        """By row: the tokens from which on more is to be mapped ahead."""
        self.wake = self.wakes.data
        self.urgent = 0
        """Tokens that the neediest row may have left, beyond those of its next step, when the mapper is woken, for all
        that are needy by then."""
        self.brinks = np.full(num_rows, UNCOUNTED, np.int64)
        """By row: the tokens that the pages have room for which it used when they were counted."""
        self.brink = self.brinks.data
        self.alerts = np.full(num_rows, UNCOUNTED, np.int64)
        """By row: the tokens to which it grows, and nothing follows from it: up to its wake and its brink."""
        self.alert = self.alerts.data
        self.debts = np.zeros(num_rows, np.int64)
        """By row: pages that were copied to it in vain, since to share them would have spared all such copies."""
        self.debt = self.debts.data
        self.tenants = np.zeros(num_rows, np.int32)
        """By row: whose bytes its pages hold, also when nobody has it; numbers of `Tenants`."""
        self.tenant = self.tenants.data
        self.live: dict[int, None] = {}
        self.parked = Shelf()
        """By their capacities."""
        self.retired: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""
        self.suspended: dict[int, Suspended] = {}
        """Live rows whose tokens are on the host, and which hold none meanwhile."""
        self.kept: OrderedDict[int, None] = OrderedDict()
        """Rows that nobody has, for those who begin with the same tokens; oldest first."""
        self.fronts: OrderedDict[int, None] = OrderedDict()
        """Live rows with pages in front of what they keep; oldest first."""
        self.empty = dict.fromkeys(range(num_rows - 1, -1, -1))
        self.spare = Shelf()
        """Live rows with pages behind what they hold, by how many of those they do not expect to need."""
        self.stirred: dict[int, None] = {}
        """Rows that have passed their alerts, or whose pages have changed, since pages were counted."""
        self.needy: dict[int, None] = {}
        """Rows that may need pages ahead, and others that did."""
        self.fenced: dict[int, None] = {}
        """Live rows whose fences may not have passed, and others that were."""
        self.fences = [Fence() for _ in range(num_rows)]
        self.own_streams: list[Any] = [None] * num_rows
        """By row: the stream that its sequence was made on."""
        self.streams: list[set[Any]] = [set() for _ in range(num_rows)]
        """By row: streams that were named, besides."""

    def is_live(self, row: int) -> bool:
        """Whether a sequence has it."""
        return self.owner[row] != NOBODY

    def live_rows(self) -> npt.NDArray[np.int64]:
        """Rows that sequences have."""
        return np.flatnonzero(self.owners != NOBODY)

    @property
    def suspended_bytes(self) -> int:
        """What suspended sequences take on the host."""
        return sum(each.nbytes for each in self.suspended.values())

    @property
    def tokens(self) -> int:
        """Those of all sequences."""
        return int(self.lengths.sum() - self.starts.sum())

    def counts(self) -> dict[str, int]:
        """Rows by state."""
        live, parked, empty = len(self.live), len(self.parked) + len(self.kept), len(self.empty)
        return {"live": live, "parked": parked, "retired": self.num_rows - live - parked - empty, "empty": empty}

    def fitting(self, tokens: int, stream: Any, tenant: int | None) -> Iterator[int]:
        """Parked rows of a tenant that `stream` need not wait for, those first that fit so many tokens best."""
        for row in islice(self.parked.fitting(tokens), MAX_TRIES):
            if self.tenant[row] == tenant and self.fences[row].passed_for(stream):
                yield row

    def pick_row(self, row: int) -> None:
        """Takes a row off the lists of what can be adopted, or is empty.

        Raises:
            OutOfRowsError: it is live.
        """
        if self.is_live(row):
            raise OutOfRowsError(f"asked for row {row}, which belongs to sequence {self.owner[row]}; free that first")
        self.parked.remove(row)
        self.empty.pop(row, None)

    def check_left(self, count: int) -> None:
        """Raises `OutOfRowsError`, where not as many rows are left."""
        left = len(self.empty) + len(self.parked) + len(self.retired) + len(self.kept)
        if count > left:
            raise OutOfRowsError(
                f"asked for {count} rows; {left} are left, the others of {self.num_rows} belong to live sequences. "
                "Free some, or make the cache with a larger max_sequences (a row without tokens takes addresses only)"
            )

    def forget(self, row: int) -> None:
        """Takes a row that nobody has off the lists."""
        self.parked.remove(row)
        self.retired.pop(row, None)
        self.empty.pop(row, None)

    def own(self, row: int, owner: int, stream: Any, expected: int, tenant: int) -> None:
        """Gives a picked row to a sequence."""
        self.tenant[row] = tenant
        self.own_streams[row] = stream
        self.expected[row] = expected
        self.debt[row] = 0
        if self.fences[row].is_pending:
            self.fenced[row] = None
        self.live[row] = None
        self.owner[row] = owner

    def disown(self, row: int) -> None:
        """Takes a row from its sequence; it is on no list then."""
        self.owner[row] = NOBODY
        self.live.pop(row, None)
        self.suspended.pop(row, None)
        self.fronts.pop(row, None)
        self.fenced.pop(row, None)
        self.extents[row] = self.expected[row] = 0
        self.streams[row].clear()
        self.own_streams[row] = None

    def stir(self, row: int) -> None:
        """Has a row's pages counted anew."""
        self.stirred[row] = None
        self.brink[row] = UNCOUNTED

    def fence(self, row: int, fence: Fence) -> None:
        """Keeps what leaves a row until a fence has passed, too."""
        self.fences[row] |= fence
        self.fenced[row] = None

    def fence_after(self, driver: Driver, rows: Iterable[int]) -> Fence:
        """A fence after all work on rows so far, and on the current stream."""
        streams = {driver.current_stream()}
        for row in rows:
            streams |= {self.own_streams[row], *self.streams[row]}
        return Fence.after(driver, streams)
