"""A lease: the share of a frame pool that a memory pool's allocator may take: see `vmmkv.torch.leasing`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..compiled.code import link
from ..core.pool import ASKED, NO_LIMIT_PAGES, Ask
from ..driver.driver import fork_error
from ..pool import FramePool
from .leasing import ENTRIES, SOURCES

if TYPE_CHECKING:
    from .allocator import Allocator

lease, give_back, end = link("vmmkv.torch.leasing", ENTRIES, SOURCES)
TURNS = 8
"""Others may take pages while a lease grows: how often it is tried again."""


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
        """Pages of what is leased that exist."""
        return self._allocator.physical
