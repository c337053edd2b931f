"""A lease: a share of a frame pool, whose pages a memory pool's allocator makes itself, in machine code.

torch calls that where no Python may run, so it cannot ask for each page. It is told beforehand how many it may have.

Invariants:
 1. What is leased is the allocator's budget, and the account's `taken`: they are changed here, in operations on the
    pool. What of it is used the allocator alone decides, at any time.
 2. A lease grows when a block begins, into what others do not use, and shrinks to what is used when the block ends.
    In between others can have what is not used, as of any holder, but for what is guaranteed.
 3. The account ends when the memory pool has ended, and torch has given back the last of its segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..invariants import watch
from ..memory.accounts import Account
from ..memory.monitor import bookkeeping, operation
from ..memory.pool import FramePool

if TYPE_CHECKING:
    from .allocator import Allocator


class Lease:
    """See above; what a frame pool asks of a holder.

    Args:
        pool: whose pages are leased.
        allocator: who makes them, with a budget of nothing.
        limit: the most that may be leased, in pages.
        guaranteed: pages that can be leased at any time.
    """

    kind = "MemoryPool"

    def __init__(self, pool: FramePool, allocator: Allocator, limit: int, guaranteed: int) -> None:
        self.pool = pool
        self.limit = limit
        self._allocator = allocator
        self._account = Account(limit, guaranteed, is_lease=True)

    def check_usable(self) -> None:
        """Raises what forbids any use of the pool."""
        self.pool.check_usable()

    @operation
    def open(self) -> None:
        """Opens the account.

        Raises:
            BudgetError: so much cannot be guaranteed.
        """
        if self.pool.is_debugged:
            watch(self.pool)
        self.pool.collect()
        self.pool.accounts.open(self._account, self)

    @operation
    def grow(self) -> None:
        """Leases as much as can be had: what is idle, and then what others do not use, idle pages first.

        Raises:
            DriverError: others could not give back what they do not use. It has not grown.
        """
        pool, account = self.pool, self._account
        pool.collect()
        wanted = pool.accounts.allowed(account) - account.taken
        pool.accounts.make_headroom(account, max(wanted, 0))
        wanted = min(wanted, pool.accounts.headroom(account))
        pool.accounts.make_idle(account, wanted)
        pool.lease(account, max(min(wanted, pool.accounts.idle(account)), 0))
        self._allocator.set_budget(account.taken)

    @bookkeeping
    def shrink(self) -> None:
        """Gives back what is not used."""
        self.reclaim(self._account.taken)

    def end(self) -> None:
        """Has the pool end the account, as soon as nothing of it is left. May be called in the middle of anything."""
        self.pool.ended_leases.append((self._account, self))

    # ------------------------------------------------------------------ as a holder

    @property
    def kept_pages(self) -> int:
        """Pages that segments of torch lie on."""
        return self._allocator.physical

    @property
    def firm_pages(self) -> int:
        """All that are leased: torch makes them without asking."""
        return self._account.taken

    def reclaim(self, count: int, *, wait: bool = False, firm: bool = False) -> int:
        """Gives up to `count` pages that are not used to others on its pool; returns how many. All are firm."""
        before = self._account.taken
        self._account.taken = self._allocator.set_budget(max(before - count, 0))
        return before - self._account.taken

    def recover(self) -> None:
        """Works its books out anew, after an interruption."""
        self._account.taken = self._allocator.budget

    def sequences(self) -> tuple[int, int]:
        """None: it has segments, and these are no tokens."""
        return 0, 0

    def known_tenants(self) -> set[int]:
        """None: what it has is nobody's in particular."""
        return set()

    def held(self) -> list[str]:
        """What of it is in use."""
        return [f"{self.kept_pages} pages of torch's segments"] if self.kept_pages else []
