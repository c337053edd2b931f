"""Lending: the budget of a frame pool comes from a ledger that several processes share.

The budget of the pool is what the ledger grants to this process. A growth that lacks budget asks the ledger for more.
If other processes hold the rest, the growth waits while their threads give back what holds no live tokens: first pages
that do not exist, then free frames, then surplus, least recently used first. A process with enough budget does not look
at the ledger, except for its thread, which looks every `INTERVAL` seconds.
"""

from __future__ import annotations

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

INTERVAL = 0.05
"""Seconds between two looks of a thread that no process wakes."""
SWEEP = 20
"""Looks between two that remove lines of processes that have ended, also if nothing has changed."""
STEP = 0.0005
"""Seconds between two looks of a growth that waits for other processes."""
PATIENCE = 5.0
"""The most seconds that a growth waits for processes that are about to give memory back."""
EXTRA = 64
"""A process takes a part of the limit more than it lacks, so that it asks less often: one divided by this."""


class Lender:
    """What a pool has of a ledger.

    Args:
        pool: the pool, with a budget of nothing.
        ledger: the ledger, in which this process has no line yet.
        reserved: bytes that are always granted, or a share of the limit.

    Raises:
        BudgetError: what is reserved cannot be had, or the ledger cannot be used.
    """

    def __init__(self, pool: Pool, ledger: Ledger, reserved: float | str = 0) -> None:
        self._pool, self.ledger, self._page_size = weakref.ref(pool), ledger, pool.driver.page_size
        self.attainable = 0
        """Bytes that the pool could have, as of the last look: what other processes neither use nor have reserved."""
        self._asking = threading.RLock()
        """Held by the thread that asks for memory."""
        self._moving = threading.Lock()
        """Held while the pool's budget and what is granted differ."""
        self._seen: tuple[Any, ...] = ()
        self._is_over = False
        try:
            self._reserve(reserved)
        except BaseException:
            ledger.close()
            raise
        ledger.socket.settimeout(INTERVAL)
        self._thread = threading.Thread(target=self._work, name="vmmkv-lender", daemon=True)
        self._thread.start()
        self._halt = weakref.finalize(pool, self.halt)

    def _reserve(self, asked: float | str) -> None:
        """Takes what is reserved."""
        self.ledger.join()
        with self.ledger.locked() as book:
            pages = parse_bytes(asked, book.limit) // self._page_size
            reserved, others = pages * self._page_size, int(book.lines["reserved"].sum())
            if reserved + others > book.limit:
                raise BudgetError(
                    f"asked to reserve {format_bytes(reserved)} of {format_bytes(book.limit)} that processes share; "
                    f"others have reserved {format_bytes(others)}"
                )
            book.mine["reserved"], self.attainable = reserved, book.attainable
        if pages and not self.borrow(pages):
            raise BudgetError(
                f"asked to reserve {format_bytes(reserved)} of {format_bytes(self.limit)} that processes share; live "
                "tokens of others take more than the rest"
            )

    @property
    def limit(self) -> int:
        """Bytes that all processes may have together."""
        return self.ledger.limit

    # ------------------------------------------------------------------ taking

    def borrow(self, pages: int) -> int:
        """Raises the pool's budget by so many pages, or by none; returns by how many. Waits while other processes give
        memory back. In a finalizer or a signal handler within such a call it does nothing."""
        asking: Any = self._asking
        if self._is_over or pages <= 0 or asking._is_owned() or self.ledger.is_busy:
            return 0
        with asking, suppress(BudgetError):  # where the ledger cannot be used, the process has what it has
            granted = self._granted(pages * self._page_size) // self._page_size
            if granted and (pool := self._pool()) is not None:
                with self._moving:
                    pool.limit_to(pool.word("budget") + granted)
                return granted
        return 0

    def _granted(self, nbytes: int) -> int:
        """Has the ledger grant so many bytes, or some more, perhaps after a while. Returns how many, or 0."""
        request, end = 0, time.monotonic() + PATIENCE
        try:
            while True:
                with self.ledger.locked() as book:
                    wanted = nbytes + self._extra(book, nbytes)
                    if book.take(wanted):
                        return wanted
                    if not request:
                        request = book.ask(nbytes)
                        self.ledger.wake(book)
                    elif book.is_hopeless(request) or time.monotonic() > end:
                        return 0
                time.sleep(STEP)
        finally:
            if request:
                with self.ledger.locked() as book:
                    book.mine["wanted"] = 0

    def _extra(self, book: Book, nbytes: int) -> int:
        """Bytes to take beyond what is lacking: none where they are scarce."""
        if book.lines["wanted"].any():
            return 0
        return max(min(book.free - nbytes, book.limit // EXTRA), 0) // self._page_size * self._page_size

    # ------------------------------------------------------------------ giving

    def _work(self) -> None:
        looks = 0
        while not self._is_over:
            try:
                self.ledger.socket.recv(1)
            except TimeoutError:
                looks += 1
            except OSError:  # closed
                return
            with suppress(VmmkvError):  # the next look may succeed
                self.look(always=looks % SWEEP == 0)

    def look(self, always: bool = True) -> None:
        """Writes down what the pool uses, and gives back what other processes lack and this one does not need.

        Args:
            always: also if nothing has changed since the last look.
        """
        pool = self._pool()
        if pool is None or self._is_over:
            return
        committed = pool.word("committed") * self._page_size
        seen = committed, self.ledger.peek()
        if seen == self._seen and not always:
            return
        asking: Any = self._asking
        with self._moving:
            budget, is_asking = pool.word("budget"), not asking.acquire(blocking=False)
            with self.ledger.locked() as book:
                mine = book.mine
                if not is_asking:  # an interruption may have left more granted than the pool has taken
                    mine["granted"] = min(int(mine["granted"]), self._held(pool) * self._page_size)
                    asking.release()
                mine["used"], mine["answered"], self.attainable = committed, book.header["requests"], book.attainable
                spare = budget - max(committed, int(mine["reserved"])) // self._page_size
                pages = 0 if mine["wanted"] else max(min(-(-book.missing // self._page_size), spare), 0)
                mine["giving"] = pages * self._page_size
            if pages:
                self._give(pool, budget, pages)
        self._seen = committed, self.ledger.peek()

    def _give(self, pool: Pool, budget: int, pages: int) -> None:
        """Lowers the pool's budget, and then what is granted."""
        try:
            pool.limit_to(budget - pages)
        finally:  # also if live tokens have come meanwhile, or a call of the driver has failed
            left = self._held(pool)
            with self.ledger.locked() as book:
                book.mine["granted"] -= max(budget - left, 0) * self._page_size
                book.mine["giving"] = 0

    def _held(self, pool: Pool) -> int:
        """Pages that the pool may make, or has made."""
        return max(pool.word("budget"), pool.word("created") + pool.word("leased"))

    # ------------------------------------------------------------------ limits and the end

    def set_limit(self, nbytes: int) -> None:
        """Sets the limit of all processes together. Raises `BudgetError` where more is reserved."""
        change_limit(self.ledger, nbytes)
        self.look()

    def halt(self) -> None:
        """Ends the thread. The line stays: at the end of a process its memory is there for a moment longer."""
        self._is_over = True
        if self._thread is not threading.current_thread():
            self._thread.join(1)

    def end(self) -> None:
        """Ends the thread, and removes this process's line: its memory is gone."""
        self._halt()
        self.ledger.close()


def change_limit(ledger: Ledger, nbytes: int) -> None:
    """Sets the limit of a ledger, and has processes give back what is beyond it and holds no live tokens. Raises
    `BudgetError` where more is reserved."""
    with ledger.locked() as book:
        reserved = int(book.lines["reserved"].sum())
        if nbytes < max(reserved, 1):
            raise BudgetError(f"asked for a limit of {format_bytes(nbytes)}; {format_bytes(reserved)} are reserved")
        book.header["limit"] = nbytes
        book.header["requests"] += 1
        ledger.wake(book)


def change_reserve(ledger: Ledger, pid: int, nbytes: int) -> None:
    """Sets what is reserved for a process: it keeps so much from now on. Raises `BudgetError` where there is no such
    process, or others have reserved too much."""
    with ledger.locked() as book:
        found = (book.lines["pid"] == pid).nonzero()[0]
        if not len(found):
            raise BudgetError(f"asked to reserve memory for process {pid}, which does not use {ledger.path.stem}")
        others = int(book.lines["reserved"].sum()) - int(book.lines["reserved"][found[0]])
        if nbytes + others > book.limit:
            raise BudgetError(
                f"asked to reserve {format_bytes(nbytes)} of {format_bytes(book.limit)}; others have reserved "
                f"{format_bytes(others)}"
            )
        book.lines[found[0]]["reserved"] = nbytes
        ledger.write(book, int(found[0]))
