"""Lending: the budget of a frame pool comes from a ledger that several processes share.

The budget of the pool is what the ledger grants to this process. A growth that lacks budget asks the ledger for more.
If other processes hold the rest, the growth waits while their threads give back what holds no live tokens: first pages
that do not exist, then free frames, then surplus, least recently used first. A process with enough budget does not look
at the ledger, except for its thread, which looks every `INTERVAL` seconds.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from .budget import parse_bytes
from .core.pool import Pool
from .errors import BudgetError, VmmkvError
from .ledger import Book, Ledger
from .stats import format_bytes

INTERVAL = 50_000
"""Microseconds between two looks of a thread that no process wakes."""
SWEEP = 20
"""Looks between two that remove lines of processes that have ended, also if nothing has changed."""
STEP = 0.0005
"""Seconds between two looks of a growth that waits for other processes."""
PATIENCE = 5.0
"""The most seconds that a growth waits for processes that are about to give memory back."""
EXTRA = 64
"""A process takes a part of the limit more than it lacks, so that it asks less often: one divided by this. It takes no
more where another process lacks some."""


class Lender:
    """What a pool has of a ledger.

    Args:
        pool: the pool, with a budget of nothing.
        ledger: the ledger, in which this process has no line yet.
        reserved: bytes that are always granted, or a share of the limit.
    """

    def __init__(self, pool: Pool, ledger: Ledger, reserved: float | str = 0) -> None:
        self._pool, self.ledger, self._page_size = weakref.ref(pool), ledger, pool.driver.page_size
        self.attainable = 0
        """Bytes that the pool could have, as of the last look: what other processes neither use nor have reserved."""
        self.used_by_others = 0
        """Bytes of live tokens of other processes, as of the last look."""
        self._asking: Any = threading.RLock()
        """Held by the thread that asks for memory."""
        self._moving: Any = threading.RLock()
        """Held while the pool's budget and what is granted differ."""
        self._seen: tuple[Any, ...] = ()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="vmmkv-lender", daemon=True)
        ledger.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, INTERVAL))
        try:
            self._reserve(reserved)
            self._halt = weakref.finalize(pool, self.halt)
            self._thread.start()
        except BaseException:
            self._is_over = True
            ledger.close()
            raise

    def _reserve(self, asked: float | str) -> None:
        def reserve(book: Book) -> int:
            pages = parse_bytes(asked, book.limit) // self._page_size
            book.reserve(book.mine, pages * self._page_size)
            self.attainable = book.attainable
            return pages

        self.ledger.join()
        pages = self.ledger.change(reserve)
        if pages and not self.borrow(pages):
            raise BudgetError(
                f"asked to reserve {format_bytes(pages * self._page_size)} of {format_bytes(self.ledger.limit)} that "
                "processes share; live tokens of others take more than the rest"
            )

    # ------------------------------------------------------------------ taking

    def borrow(self, pages: int) -> int:
        """Raises the pool's budget by so many pages, or by none; returns by how many. Waits while other processes give
        memory back. In a finalizer or a signal handler within a call of the lender it does nothing."""
        is_nested = self._asking._is_owned() or self._moving._is_owned() or self.ledger.is_busy
        if self._is_over or pages <= 0 or is_nested:
            return 0
        with self._asking, suppress(BudgetError):  # where the ledger cannot be used, the process has what it has
            granted = self._granted(pages * self._page_size) // self._page_size
            if granted and (pool := self._pool()) is not None:
                with self._moving:
                    before = pool.word("budget")
                    pool.limit_to(min(before + granted, pool.most))
                    return pool.word("budget") - before
        return 0

    def _granted(self, nbytes: int) -> int:
        """Has the ledger grant so many bytes, or some more, perhaps after a while. Returns how many, or 0."""
        request, end = 0, time.monotonic() + PATIENCE

        def take(book: Book) -> int | None:
            nonlocal request
            extra = 0 if book.lines["wanted"].any() else min(book.open - nbytes, book.limit // EXTRA)
            wanted = nbytes + max(extra, 0) // self._page_size * self._page_size
            if book.take(wanted):
                return wanted
            is_over = bool(request) and (book.is_hopeless(request) or time.monotonic() > end)
            reserved = int(book.lines["reserved"][book.others].sum())
            if is_over or int(book.mine["granted"]) + nbytes > book.limit - reserved:
                return 0
            if not request:
                book.header["requests"] += 1
                book.mine["wanted"], book.mine["since"] = nbytes, time.monotonic_ns()
                request = int(book.header["requests"])
                self.ledger.wake(book)
            return None

        def stop(book: Book) -> None:
            book.mine["wanted"] = 0

        try:
            while (granted := self.ledger.change(take)) is None:
                time.sleep(STEP)
            return granted
        finally:
            if request:
                self.ledger.change(stop)

    # ------------------------------------------------------------------ giving

    def _work(self) -> None:
        looks = 0
        while not self._is_over:
            try:
                self.ledger.socket.recv(1)
            except BlockingIOError:
                looks += 1
            except OSError:  # closed
                return
            with suppress(VmmkvError, OSError):  # the next look may succeed
                self.look(always=looks % SWEEP == 0)

    def look(self, always: bool = True) -> None:
        """Writes down what the pool uses, and gives back what other processes lack and this one does not need.

        Args:
            always: also if nothing has changed since the last look.
        """
        pool = self._pool()
        if pool is None or self._is_over:
            return
        pool.sweep()
        seen = pool.word("committed"), self.ledger.peek()
        if seen == self._seen and not always:
            return
        with self._moving:
            budget = pool.word("budget")
            if pages := self.ledger.change(lambda book: self._spare(book, pool)):
                self._give(pool, budget, pages)
        self._seen = seen  # from before: the next look finds what has changed since

    def _spare(self, book: Book, pool: Pool) -> int:
        """Writes down what the pool uses, and how many pages it is about to give back; returns them."""
        mine, committed = book.mine, pool.word("committed")
        if self._asking.acquire(blocking=False):  # an interruption may have left more than the pool has taken
            try:
                mine["granted"] = min(int(mine["granted"]), self._held(pool) * self._page_size)
                mine["wanted"] = 0
            finally:
                self._asking.release()
        mine["used"] = committed * self._page_size
        mine["answered"], self.attainable = book.header["requests"], book.attainable
        self.used_by_others = int(book.lines["used"][book.others].sum())
        spare = pool.word("budget") - max(committed, int(mine["reserved"]) // self._page_size)
        pages = 0 if mine["wanted"] else max(min(-(-book.missing // self._page_size), spare), 0)
        if pages:
            mine["since"] = time.monotonic_ns()
        mine["giving"] = pages * self._page_size
        return pages

    def _give(self, pool: Pool, budget: int, pages: int) -> None:
        """Lowers the pool's budget, and then what is granted."""

        def give(book: Book) -> None:
            book.mine["granted"] -= max(budget - self._held(pool), 0) * self._page_size
            book.mine["giving"] = 0

        try:
            pool.limit_to(max(budget - pages, pool.word("committed")))
        finally:  # also if live tokens have come meanwhile, or a call of the driver has failed
            self.ledger.change(give)

    def _held(self, pool: Pool) -> int:
        return max(pool.word("budget"), pool.word("created") + pool.word("leased"))

    # ------------------------------------------------------------------ the end

    def halt(self) -> None:
        """Ends the thread. At the end of the process the line stays, since the memory is there for a moment longer."""
        self._is_over = True
        with suppress(OSError):
            self.ledger.socket.shutdown(socket.SHUT_RD)
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(1)
        if self._pool() is None:
            self.ledger.close()

    def end(self) -> None:
        """Ends the thread, and removes this process's line: its memory is gone."""
        self._halt()
        self.ledger.close()
