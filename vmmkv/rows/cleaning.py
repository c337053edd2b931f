"""Cleaning: what pages are filled with before a sequence has them, and, for debugging, when it leaves them.

Pages are filled on their sequence's own stream, the one that it was made on, behind the row's fence; other streams that
grow it are ordered behind that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..driver.fence import Fence, wait_for_device
from ..errors import DriverError, StreamCaptureError
from ..space.arena import Arena
from .books import Books

POISON = 0xFF
"""Bytes that are no number in any floating-point format, of 1, 2 or 4 bytes."""


@dataclass(eq=False, slots=True)
class Growth:
    """Pages `[first, end)` that a row is to have in one arena.

    Attributes:
        missing: how many of them are to be mapped.
        large: in how many large frames they may be.
        ready: the end of those that could be used before.
    """

    arena: Arena
    row: int
    first: int
    end: int
    missing: int
    large: int
    ready: int


class Cleaner:
    """See above.

    Args:
        books: what rows hold.
    """

    def __init__(self, books: Books) -> None:
        self._driver, self._pool, self._books, self._table = books.pool.driver, books.pool, books, books.table
        rules = books.rules
        self._pattern = POISON if rules.poison and not rules.scrub else 0
        """What pages are filled with that are not clean."""

    def begun(self, rows: list[int]) -> list[int]:
        """Those whose pages are filled as they begin to use them. What is only for debugging is no part of a graph."""
        if not self._books.rules.cleans or (self._pattern and self._is_captured(rows)):
            return []
        return rows

    def clean(self, rows: list[int], plan: list[Growth]) -> None:
        """Fills the pages that rows begin to use, and those that were mapped with another tenant's bytes, in the order
        of what their sequences do with them."""
        own_streams = set()
        unclean = [(row, each) for row in rows for each in self._unclean(row)]
        for growth in plan if self._pool.tenants else ():
            table, row = growth.arena.table, growth.row
            unclean += [(row, each) for each in table.unclean(row, growth.ready, growth.end, self._table.tenant[row])]
        for row, (address, nbytes) in unclean:
            own = self._table.own_streams[row]
            self._table.fences[row].order(own)  # who had the pages before may still read them
            self._driver.fill(address, nbytes, self._pattern, own)
            own_streams.add(own)
        current = self._driver.current_stream()
        for own in own_streams - {current}:
            Fence.after(self._driver, [own]).order(current)  # what is written there next must not be zeroed
        for growth in plan:
            growth.arena.table.belong(growth.row, growth.ready, growth.end, self._table.tenant[growth.row])

    def spoil(self, row: int, own: Any, leaving: list[tuple[Arena, int, int]]) -> None:
        """Fills the pages that a sequence has left, where that is wanted, in order behind the row's fence, on the
        stream that it was made on."""
        if not leaving or not self._books.rules.poison:
            return
        try:
            self._table.fences[row].order(own)
            for arena, begin, end in leaving:
                begin = max(begin, arena.table.own[row])  # others may read what is before it
                address, nbytes = arena.table.address_of(row, begin), (end - begin) * self._books.page_size
                if nbytes > 0:
                    self._driver.fill(address, nbytes, POISON, own)
            self._table.fence(row, Fence.after(self._driver, [own]))
        except DriverError:  # the sequence has left them all the same
            with suppress(DriverError):
                wait_for_device(self._driver)  # for fills that no fence knows

    def _is_captured(self, rows: list[int]) -> bool:
        """Whether a graph is being captured, where nothing can be filled."""
        try:
            self._table.fence_after(self._driver, rows)
        except StreamCaptureError:
            return True
        return False

    def _unclean(self, row: int) -> Iterator[tuple[int, int]]:
        """Addresses and bytes of the pages that a row begins to use with what it claims."""
        books, old_end = self._books, self._table.length[row]
        for table, (first, end), (_, used_end) in zip(books.tables, books.touched(row), books.spans(0, old_end)):
            if books.rules.zero_tail and not old_end and books.extent(row)[1]:
                end = table.ready[row]  # a dense kernel reads all that the row has adopted
            first = max(first, used_end, table.own[row])
            if end > first:
                yield table.address_of(row, first), (end - first) * books.page_size
