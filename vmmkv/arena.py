"""An arena: one reserved virtual range cut into rows, and the pages mapped under each row.

    row 0                         row 1                         row 2
    |p|p|p|.|.|.|.|.|.|.|.|.|.|.| |.|.|p|p|p|.|.|.|.|.|.|.|.|.| |p|p|0|0|0|0|0|0|0|0|0|0|0|0|
                                       ^ pages in front were given back     ^ the tail: one page of zeros

Invariants:
 1. The mapped pages of a row are consecutive: `[first, end)` in pages from the row's address.
 2. `Row.pages` says what the driver has mapped after every call, also after one that failed. Only pages
    in `[first, ready)` may be accessed; `ready` is `end` except after a failure that could not be undone.
 3. A page that is mapped here is taken from the pool; it goes back to the pool when it is unmapped.
 4. Rows never move, and the range stays reserved for as long as a view of it lives.
 5. While the driver maps or unmaps, `Row.doubt` names the pages that are being changed: who is interrupted then
    (Ctrl-C) cannot know how far it came. `settle` unmaps them, and so makes the books right.
 6. A row's tail is one shared page, mapped read-only from page `tail` to the row's end; `Row.tail` says so
    after every call, like `Row.pages`. It may be read from `tail_ready` on, which is `tail` except after a
    failure that could not be undone. Rows have no tails unless somebody fills them.

An arena knows bytes and pages, not tokens and not who reads them: that is `vmmkv.rows`.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from contextlib import suppress
from time import perf_counter_ns

from .driver import Driver
from .errors import DeviceLostError, DriverError, LayoutError, VmmkvError
from .pages import PagePool

ADDRESS_LIMIT = 100 << 40
"""Bytes of virtual addresses that can be relied on: 100 TiB could be reserved on an H200, 127 could not."""


class Row:
    """What is mapped under one row, counted in pages from the row's address."""

    __slots__ = ("address", "doubt", "first", "limit", "pages", "ready", "tail", "tail_ready")

    def __init__(self, address: int, limit: int) -> None:
        self.address = address
        self.limit = limit
        self.first = 0
        self.pages: list[int] = []
        self.ready = 0
        self.tail = self.tail_ready = limit
        self.doubt: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    @property
    def has_hole(self) -> bool:
        """Whether there are pages from `first` to the row's end that may not be read."""
        return self.ready < self.end or self.end < self.tail_ready


class Arena:
    """One reserved range of `num_rows` rows.

    Args:
        pool: where pages come from and go back to.
        num_rows: rows in the range.
        row_bytes: bytes of a row, a multiple of the page size.
    """

    def __init__(self, pool: PagePool, num_rows: int, row_bytes: int) -> None:
        self.pool = pool
        self.driver = pool.driver
        self.meter = pool.meter
        self.page_size = pool.driver.page_size
        self.row_bytes = row_bytes
        self.nbytes = num_rows * row_bytes
        free_waiting()
        start = perf_counter_ns()
        self.address = self.driver.reserve(self.nbytes)
        self.meter.reserve.add(1, perf_counter_ns() - start)
        limit = row_bytes // self.page_size
        self.rows = [Row(self.address + index * row_bytes, limit) for index in range(num_rows)]
        # Not at exit: views may be read until the very end, and the process takes everything with it.
        weakref.finalize(self, _free_range, pool, self.address, self.nbytes, self.rows, os.getpid()).atexit = False

    def begin_at(self, row: int, first: int) -> None:
        """Makes a row without pages begin at page `first`."""
        mapping = self.rows[row]
        mapping.first = mapping.ready = first

    def map_back(self, row: int, end: int, supply: list[int]) -> None:
        """Extends a row's mapped pages up to page `end`, with pages popped from `supply`; a tail makes way.

        Raises:
            DriverError: what was mapped before it stays mapped; `unmap_back`, and `fill_tail`, undo it.
        """
        mapping, size = self.rows[row], self.page_size
        if end > mapping.tail:
            self._unmap(mapping, mapping.tail, end)
            mapping.tail, mapping.tail_ready = end, max(end, mapping.tail_ready)
            mapping.doubt = None
        if end <= mapping.ready:
            return
        driver_map, handles, pages = self.driver.map, self.pool.handles, mapping.pages
        base, old_end = mapping.address, mapping.end
        start = perf_counter_ns()
        mapping.doubt = old_end, end
        try:
            for address in range(base + old_end * size, base + end * size, size):
                driver_map(address, handles[supply[-1]])  # type: ignore[arg-type]
                pages.append(supply.pop())
        except DriverError:
            mapping.doubt = None
            raise
        finally:
            mapped = perf_counter_ns()
            self.meter.map.add(mapping.end - old_end, mapped - start)
        mapping.doubt = None
        self.driver.set_access(base + mapping.ready * size, (end - mapping.ready) * size)
        mapping.ready = end
        self.meter.set_access.add(1, perf_counter_ns() - mapped)

    def unmap_back(self, row: int, end: int) -> int:
        """Unmaps a row's pages from page `end` on and gives them to the pool; returns how many."""
        mapping = self.rows[row]
        end = max(end, mapping.first)
        pages = mapping.pages[end - mapping.first :]
        if pages:
            mapping.ready = min(mapping.ready, end)  # also where the call fails: the pages are to be used no more
            self._unmap(mapping, end, mapping.end)
            del mapping.pages[end - mapping.first :]
            mapping.doubt = None
            self.pool.give(pages)
        return len(pages)

    def unmap_front(self, row: int, first: int) -> int:
        """Unmaps a row's pages before page `first` and gives them to the pool; returns how many."""
        mapping = self.rows[row]
        pages = mapping.pages[: max(first - mapping.first, 0)]
        if pages:
            self._unmap(mapping, mapping.first, mapping.first + len(pages))
            mapping.pages, mapping.first = mapping.pages[len(pages) :], mapping.first + len(pages)
            mapping.doubt = None
            self.pool.give(pages)
        return len(pages)

    def fill_tail(self, row: int, page: int) -> None:
        """Maps a page, read-only, everywhere behind a row's pages. Pages that a failure left unusable there go.

        Raises:
            DriverError: `Row.has_hole` is still true; call it again.
        """
        mapping, size, base = self.rows[row], self.page_size, self.rows[row].address
        if not mapping.has_hole:
            return
        self.unmap_back(row, mapping.ready)
        driver_map, handle, old_tail = self.driver.map, self.pool.handles[page], mapping.tail
        start = perf_counter_ns()
        mapping.doubt = mapping.end, old_tail
        try:
            for tail in range(old_tail - 1, mapping.end - 1, -1):  # downwards: what is mapped reaches the row's end
                driver_map(base + tail * size, handle)  # type: ignore[arg-type]
                mapping.tail = tail
        except DriverError:
            mapping.doubt = None
            raise
        finally:
            mapped = perf_counter_ns()
            self.meter.map.add(old_tail - mapping.tail, mapped - start)
        mapping.doubt = None
        self.driver.set_access(base + mapping.tail * size, (mapping.tail_ready - mapping.tail) * size, False)
        mapping.tail_ready = mapping.tail
        self.meter.set_access.add(1, perf_counter_ns() - mapped)

    def zero(self, page: int) -> None:
        """Zeroes a page that is mapped nowhere, in the first row, which is still empty; waits for it.

        Raises:
            StreamCaptureError: a CUDA graph is being captured.
        """
        self.map_back(0, 1, [page])
        stream = self.driver.current_stream()
        self.driver.fill(self.address, self.page_size, 0, stream)
        self.driver.record(stream).synchronize()
        self._unmap(self.rows[0], 0, 1)
        self.rows[0].pages.clear()
        self.begin_at(0, 0)
        self.rows[0].doubt = None

    def settle(self, row: int) -> None:
        """Makes the books of a row right after an interruption: what may or may not be mapped is unmapped.

        Raises:
            DriverError: the doubt remains.
        """
        mapping = self.rows[row]
        if mapping.doubt is None:
            return
        first, end = mapping.doubt
        self.driver.unmap(mapping.address + first * self.page_size, (end - first) * self.page_size)
        if end > mapping.end:
            mapping.tail = max(mapping.tail, end)
            mapping.tail_ready = max(mapping.tail, mapping.tail_ready)
        if end < mapping.end:  # pages in front
            gone = max(end - mapping.first, 0)
            mapping.pages, mapping.first = mapping.pages[gone:], mapping.first + gone
        else:
            del mapping.pages[max(first - mapping.first, 0) :]
        mapping.ready = max(min(mapping.ready, mapping.end), mapping.first)
        mapping.doubt = None

    def close(self) -> None:
        """Unmaps everything, in whatever state the driver is; all work must have finished."""
        _unmap_all(self.driver, self.rows)

    def _unmap(self, row: Row, first: int, end: int) -> None:
        """Unmaps pages `[first, end)`; the caller writes it down, and ends the doubt."""
        start = perf_counter_ns()
        row.doubt = first, end
        try:
            self.driver.unmap(row.address + first * self.page_size, (end - first) * self.page_size)
        except DriverError:
            row.doubt = None
            raise
        self.meter.unmap.add(1, perf_counter_ns() - start)


def check_address_space(nbytes: int, asked: str) -> None:
    """Raises `LayoutError` where what was asked for would take more addresses than there are."""
    if nbytes > ADDRESS_LIMIT:
        tebibytes = nbytes / 2**40 if nbytes < 1 << 1000 else math.inf
        raise LayoutError(
            f"{asked} takes {tebibytes:.1f} TiB of virtual addresses; {ADDRESS_LIMIT >> 40} TiB can be relied "
            "on. Lower one of the factors"
        )


def _unmap_all(driver: Driver, rows: list[Row]) -> None:
    for row in rows:
        first, end = row.doubt or (row.first, row.end)  # of what an interruption left in doubt, all that it may be
        first, end = row.doubt = min(first, row.first), max(end, row.end)
        if first < end:
            with suppress(DriverError):
                driver.unmap(row.address + first * driver.page_size, (end - first) * driver.page_size)
                row.pages.clear()
                row.doubt = None  # not before: who is interrupted here comes again
        if row.tail < row.limit:
            with suppress(DriverError):
                driver.unmap(row.address + row.tail * driver.page_size, (row.limit - row.tail) * driver.page_size)
                row.tail = row.limit


def wait_for_device(driver: Driver) -> None:
    """Waits for all work on the device, before what it may use is unmapped.

    Raises:
        StreamCaptureError, DriverError: it cannot be waited for, so nothing may be unmapped. (What a lost context has
            left needs no waiting: its memory is lost, too.)
    """
    with suppress(DeviceLostError):
        driver.synchronize()


_waiting: deque[tuple[PagePool, int, int, list[Row], int]] = deque()
"""Ranges of arenas that are gone, and whose work could not be waited for then: during a graph capture, say. Their pools
stay until they go, for a page is released when it is mapped no more."""


def free_waiting() -> None:
    """Gives back the ranges of arenas that ended when that was not possible, as far as it is now."""
    for _ in range(len(_waiting)):
        with suppress(IndexError):  # another thread was faster
            _free_range(*_waiting.popleft())


def _free_range(pool: PagePool, address: int, nbytes: int, rows: list[Row], owner: int) -> None:
    if os.getpid() != owner:
        return
    try:
        wait_for_device(pool.driver)
    except VmmkvError:
        _waiting.append((pool, address, nbytes, rows, owner))
        return
    _unmap_all(pool.driver, rows)
    with suppress(DriverError):
        pool.driver.free(address, nbytes)
