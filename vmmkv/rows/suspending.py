"""Suspending: what live rows hold while their tokens are on the host, on the way there and back.

The books say first that tokens are about to leave, and last that they are back: whoever is interrupted finds them here,
or on the host. The bytes are the host tier's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..driver.fence import wait_for_device
from ..errors import VmmkvError
from ..memory.monitor import Steps, at_once, is_own
from .books import Books
from .keeping import Keeping
from .table import Place, Suspended

Ints = npt.NDArray[np.int64]


class Suspending:
    """See above.

    Args:
        books: what rows hold.
        keeping: who knows what they hold.
    """

    def __init__(self, books: Books, keeping: Keeping) -> None:
        self._driver, self._books, self._table, self._keeping = books.pool.driver, books, books.table, keeping

    def put_away(self, row: int, record: Suspended, shrink: Callable[[int, int, int], None]) -> None:
        """Has a live row hold no tokens, once they have been copied to where the record says, behind a fence.

        Args:
            shrink: takes a row, its new start and length.
        """
        self._table.suspended[row] = record
        try:
            shrink(row, 0, 0)
        except VmmkvError as error:
            if is_own(error):
                del self._table.suspended[row]
            raise
        record.place, self._table.expected[row] = Place.AWAY, 0
        self._keeping.keeper.forget(row)
        self._books.refresh(row)

    def bring_back(self, row: int, record: Suspended, grow: Callable[[Ints, Ints, Ints], Steps[None]]) -> None:
        """Maps the pages that a suspended row's tokens are to be copied to; `settle_back` follows.

        Args:
            grow: takes rows, their lengths and starts.

        Raises:
            DriverError, StreamCaptureError: see `Growing.make_room`; it is suspended still.
        """
        record.place, self._table.expected[row] = Place.COMING, record.expected
        try:
            at_once(grow(np.array([row]), np.array([record.length]), np.array([record.start])))
        except VmmkvError:
            record.place, self._table.expected[row] = Place.AWAY, 0
            self._books.refresh(row)  # it may have been counted as one that grows
            raise

    def settle_back(self, row: int) -> None:
        """Writes down that a row's tokens are there again."""
        del self._table.suspended[row]
        self._books.refresh(row)

    def leave_away(self, row: int, record: Suspended) -> None:
        """Writes down that a row's tokens are on the host only, whatever is on its way back."""
        with suppress(VmmkvError):
            wait_for_device(self._driver)
        record.place, self._table.expected[row] = Place.AWAY, 0
        self._table.extents[row] = 0
        self._books.refresh(row)

    def recover(self) -> None:
        """After an interruption: what was leaving is here, or gone; what was coming is not here yet."""
        for row, record in list(self._table.suspended.items()):
            if record.place is Place.LEAVING and self._table.length[row]:
                self._table.expected[row] = record.expected
                del self._table.suspended[row]
            else:
                self.leave_away(row, record)
