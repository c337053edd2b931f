"""The allocator that torch calls for a memory pool: machine code, so that it never takes the interpreter's lock.

torch's threads take the interpreter's lock before the lock of torch's allocator, and torch calls this one under the
latter: a Python callback would take them in the other order and deadlock. So two functions are compiled
(`vmmkv.torch.allocating`), call the memory system through the addresses of its C functions, and keep their books in a
numpy record.

Invariants:
 1. `physical <= budget`, in bytes: the budget is debited before the first call, and credited for what is really gone.
    A lease that lowers the budget meanwhile gets what was not taken.
 2. `allocate` returns a segment all of whose pages can be accessed, or 0 and has changed nothing.
 3. A page is unmapped only after all work on its device. What cannot be unmapped stays in the books.
 4. Nothing here is ever freed: torch may give back a segment at any time until the process has ended.

A page is released as soon as it is mapped: the mapping keeps it, so that there are no handles to remember.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np

from ..compiled.code import address_of, bind, keep, link
from ..core.pool import ASKED, NO_LIMIT_PAGES, Ask
from ..driver.driver import Driver, fork_error
from ..pool import FramePool
from .allocating import ENTRIES, SOURCES, STATE

allocate, deallocate, lease, give_back, end = link("vmmkv.torch.allocating", ENTRIES, SOURCES)
TURNS = 8
"""Others may take pages while a lease grows: how often it is tried again."""


class Allocator:
    """One memory pool's pair of functions, and its books. The process keeps all of it for ever.

    Args:
        driver: the memory system.
        budget: pages.

    Attributes:
        allocate: address of `void *allocate(ssize_t size, int device, void *stream)`.
        deallocate: address of `void deallocate(void *segment, ssize_t size, int device, void *stream)`.
        state: the books, a record of `STATE`.
        address: that of the books.
    """

    def __init__(self, driver: Driver, budget: int) -> None:
        records = np.zeros(1, STATE)
        self.state, self.address = records[0], records.ctypes.data
        self.state["driver"], self.state["page_size"] = driver.address, driver.page_size
        self.state["budget"] = budget * driver.page_size
        libc = ctypes.CDLL(None)
        for name in ("lock", "unlock"):
            function = getattr(libc, f"pthread_mutex_{name}")
            self.state[name] = ctypes.cast(function, ctypes.c_void_p).value
        self.allocate, self.deallocate = (
            bind(address_of(function), self.address, words) for function, words in ((allocate, 1), (deallocate, 2))
        )
        keep(records, driver)

    @property
    def physical(self) -> int:
        return int(self.state["physical"]) // int(self.state["page_size"])


class Lease:
    """What an allocator may take of a pool. It grows when a block begins, into pages that others do not use, and
    shrinks to the pages that exist when the block ends. In between others can have the rest, but for `reserved` pages.

    The account ends when the memory pool has ended, and torch has given back the last of its segments. Until then the
    pool holds the lease.

    Args:
        pool: the pool.
        allocator: the allocator, with a budget of nothing.
        limit: the most pages that may be leased.
        reserved: pages that can be leased at any time.
    """

    def __init__(self, pool: FramePool, allocator: Allocator, limit: int, reserved: int) -> None:
        self.pool, self.limit = pool, limit
        self._allocator, self._reserved, self._is_over = allocator, reserved, False
        self.account = pool.open_account(limit, reserved)
        self._words = allocator.address, pool.address, self.account
        allocator.state["account"] = self.account + 1
        pool.leases.append(self)

    def grow(self) -> None:
        """Leases as many pages as there are: such that do not exist, then such that others have and do not use."""
        if self.pool.word("dead"):
            raise fork_error()
        ask = Ask()
        for _ in range(TURNS):
            lease(*self._words, NO_LIMIT_PAGES, ask.address)
            if not ask.words[ASKED] or not self.pool.release(ask.words[ASKED]):
                return

    def shrink(self) -> None:
        """Gives back all pages that do not exist."""
        give_back(*self._words, NO_LIMIT_PAGES, 0)

    def end(self) -> None:
        """Ends the account as soon as nothing of it is left. May be called in the middle of any other call."""
        self._is_over = True
        self.give(0)

    def give(self, pages: int) -> int:
        """Gives back up to so many pages that do not exist; all, if the memory pool has ended. Returns how many."""
        if not self._is_over:
            return int(give_back(*self._words, pages, self._reserved))
        given = int(end(*self._words))
        if not self._allocator.state["account"]:
            with suppress(ValueError):  # another thread has been first
                self.pool.leases.remove(self)
        return given

    def mapped_pages(self) -> int:
        return self._allocator.physical
