"""The accounts of a frame pool: who has how many pages of it, may have, and is guaranteed.

Invariants, in pages:
 1. What holders *use* cannot be had by others; everything else can, in their order of need: free frames, those that may
    still be made, and what holders have mapped and do not use.
 2. What is guaranteed to a holder is there for it: the sum, over all, of what each has *firmly* or is guaranteed,
    whichever is more, is at most `limit`. Firm is what a holder uses, and what it may begin to use without asking, such
    as what lies behind a live sequence. What is guaranteed, and not there yet, is lent: to whatever is mapped and not
    firm, such as parked rows and prefixes that are kept. Its owner has it back as soon as it needs pages.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ..errors import BudgetError, OutOfPagesError
from ..stats import AccountStats
from . import debugging
from .frames import Frames


class Holder(Protocol):
    """Who has an account."""

    kind: str
    """What users call it: `KVCache`, say."""

    @property
    def kept_pages(self) -> int:
        """Pages that others cannot have."""

    @property
    def firm_pages(self) -> int:
        """Those, and pages that it may begin to use without asking; as many as it is about to have."""

    def reclaim(self, count: int, *, wait: bool = False, firm: bool = False) -> int:
        """Unmaps frames of `count` pages, as far as there are any that it does not use, and gives them back; returns
        how many pages. Takes only those that no work on the device may touch, unless it is to wait, and if `firm` only
        those that it may begin to use without asking."""

    def recover(self) -> None:
        """Works its books out anew, after an interruption."""

    def sequences(self) -> tuple[int, int]:
        """Live sequences, and their tokens."""

    def known_tenants(self) -> set[int]:
        """Numbers of tenants that it tells from others, beside those whose bytes its frames may hold."""

    def held(self) -> list[str]:
        """What users hold of it, a line for each, and with debugging who took that."""


def _nobody() -> None:
    """The holder of an account before it is opened."""


@dataclass(eq=False)
class Account:
    """What one holder may have, in pages.

    Attributes:
        limit: the most that it may have mapped; None is all of the pool.
        guaranteed: what it can have at any time.
        is_lease: whether its pages are no frames of the pool, but the holder's own: `taken` is then what is leased, and
            `used` what of that there is.
        taken: what it has.
        holder: whose it is.
        name: what the holder is, and a number that no other on the pool has had.
        origin: with debugging, who made the holder.
    """

    limit: int | None = None
    guaranteed: int = 0
    is_lease: bool = False
    taken: int = 0
    holder: Callable[[], Holder | None] = _nobody
    name: str = ""
    origin: str = ""

    @property
    def used(self) -> int:
        """What others cannot have; all that is left, where the holder is gone."""
        holder = self.holder()
        return self.taken if holder is None else holder.kept_pages

    @property
    def firm(self) -> int:
        """That, and what the holder may begin to use without asking."""
        holder = self.holder()
        return self.taken if holder is None else holder.firm_pages

    @property
    def promised(self) -> int:
        """What it uses, or is guaranteed."""
        return max(self.guaranteed, self.used)


class Accounts:
    """See above. Who opens or closes an account, or has others give up pages, is in the middle of an operation.

    Args:
        frames: those that are had.
        limit: the most that all may have.
        page_size: bytes of a page.
    """

    def __init__(self, frames: Frames, limit: int, page_size: int) -> None:
        self._frames, self._page_size = frames, page_size
        self.limit = limit
        """Pages, now."""
        self._accounts: list[Account] = []
        self._is_debugged = debugging.is_on()
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Account]:
        """Gives the accounts, the oldest first; they may be closed meanwhile."""
        return iter(self._accounts.copy())

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, account: Account, holder: Holder) -> None:
        """Opens an account for a holder that is made in full: from now on it may be asked for what it does not use, and
        to recover. So who is interrupted before that leaves none.

        Raises:
            BudgetError: so much cannot be guaranteed beside what others are guaranteed, or use, or within the limit.
        """
        limit, guaranteed = account.limit, account.guaranteed
        if limit is not None and guaranteed > limit:
            raise BudgetError(f"asked for a guarantee of {guaranteed} pages, and for {limit} at most; ask for less")
        if not self.make_good(self.limit - guaranteed):
            raise BudgetError(
                f"asked for a guarantee of {guaranteed} pages of {self._page_size} bytes; of {self.limit} in the pool "
                f"{self.promised} are guaranteed to others, or in use by them. Ask for less, or raise its limit"
            )
        account.name = f"{holder.kind} {next(self._numbers)}"
        account.holder = weakref.ref(holder)
        if self._is_debugged:
            account.origin = debugging.caller()
        self._accounts.append(account)

    def close(self, account: Account) -> None:
        """Ends an account. What its holder has, and could not unmap, counts until it is given back all the same."""
        account.holder, account.guaranteed = _nobody, 0
        if not account.taken:
            with suppress(ValueError):
                self._accounts.remove(account)

    def stats(self) -> tuple[AccountStats, ...]:
        """A snapshot of each."""
        return tuple(map(self._stats, self._accounts))

    def _stats(self, account: Account) -> AccountStats:
        holder, used, size = account.holder(), account.used, self._page_size  # once: lessees make pages at any time
        sequences, tokens = (0, 0) if holder is None else holder.sequences()
        return AccountStats(
            name=account.name,
            limit_bytes=self.limit_of(account) * size,
            guaranteed_bytes=account.guaranteed * size,
            mapped_bytes=(used if account.is_lease else account.taken) * size,
            used_bytes=used * size,
            sequences=sequences,
            tokens=tokens,
        )

    # ------------------------------------------------------------------ what there is

    @property
    def leased(self) -> int:
        """Pages that lessees have made, or may make."""
        return sum([account.taken for account in self._accounts if account.is_lease])

    @property
    def physical(self) -> int:
        """Pages that there are: frames, and what lessees have made."""
        return self._frames.existing + sum(account.used for account in self._accounts if account.is_lease)

    @property
    def room(self) -> int:
        """Frames that may still be made."""
        return self.limit - self.leased - self._frames.existing

    @property
    def promised(self) -> int:
        """Pages that are used, or guaranteed."""
        return sum(account.promised for account in self._accounts)

    @property
    def has_guarantees(self) -> bool:
        """Whether anything is guaranteed. Otherwise all that is mapped may be firm."""
        return sum([account.guaranteed for account in self._accounts]) > 0

    # ------------------------------------------------------------------ what one may have

    def limit_of(self, account: Account) -> int:
        """The most pages that a holder may have mapped."""
        return self.limit if account.limit is None else min(account.limit, self.limit)

    def allowed(self, account: Account) -> int:
        """Pages that a holder may use in all: what others use, and what they are guaranteed, is theirs."""
        others = sum(other.promised for other in self._accounts if other is not account)
        return min(self.limit - others, self.limit_of(account))

    def check_allowed(self, account: Account, pages: int) -> None:
        """Raises `OutOfPagesError`, where a holder may not use so many pages in all."""
        allowed = self.allowed(account)
        if pages > allowed:
            raise OutOfPagesError(
                f"asked for {pages} pages of {self._page_size} bytes in all; {allowed} are the most that can be had of "
                f"{self.limit}, beside what others use or are guaranteed",
                requested=pages,
                available=allowed,
            )

    def idle(self, account: Account) -> int:
        """Pages that nobody has, as far as a holder may have them. Firmly it may have no more than `headroom`."""
        idle = self.limit - self._frames.taken - self.leased
        return idle if account.limit is None else min(idle, account.limit - account.taken)

    def check_idle(self, account: Account, pages: int) -> None:
        """Raises `OutOfPagesError`, where so much is not idle."""
        if pages > (idle := self.idle(account)):
            raise OutOfPagesError(
                f"asked for {pages} pages of {self._page_size} bytes; {idle} are idle, of {self.limit} in the pool",
                requested=pages,
                available=idle,
            )

    def headroom(self, account: Account) -> int:
        """Pages that a holder may have firmly, beside those that it has so, without anybody giving up any."""
        return max(account.guaranteed - account.firm, 0) - self.overdraft(self.limit)

    def overdraft(self, limit: int) -> int:
        """Pages by which what all have firmly, or are guaranteed, whichever is more, is beyond a limit; negative where
        there is room."""
        return sum([max(account.guaranteed, account.firm) for account in self._accounts]) - limit

    # ------------------------------------------------------------------ what others give up

    def reclaim_from_others(self, account: Account, count: int, *, wait: bool, guaranteed: bool = False) -> int:
        """Has others give back up to `count` pages that they do not use; returns how many. A lessee has none from other
        lessees, who may need theirs at any time.

        Args:
            guaranteed: also those that they are guaranteed, which nobody can have then, but for which there is memory:
                so none that are only leased.
        """
        reclaimed = 0
        for other in self:
            holder = other.holder()
            if other.is_lease and (guaranteed or account.is_lease):
                continue
            most = count - reclaimed if guaranteed else min(count - reclaimed, other.taken - other.guaranteed)
            if other is not account and holder is not None and most > 0:
                reclaimed += holder.reclaim(most, wait=wait)
        return reclaimed

    def make_idle(self, account: Account, pages: int) -> None:
        """Has others give back what is missing of so many idle pages, as far as they can; idle ones of theirs first."""
        for wait in (False, True):
            if (missing := pages - self.idle(account)) > 0:
                self.reclaim_from_others(account, missing, wait=wait)

    def slacken(self, account: Account | None, limit: int, *, wait: bool) -> None:
        """Has others give up pages that they do not use but might begin to, until nothing firm or guaranteed is beyond
        a limit, or there are no more. A lessee has none from other lessees."""
        for other in self:
            holder = other.holder()
            if other is account or holder is None or (account is not None and account.is_lease and other.is_lease):
                continue
            while (count := min(self.overdraft(limit), other.firm - other.guaranteed)) > 0:
                if not holder.reclaim(count, wait=wait, firm=True):
                    break

    def make_headroom(self, account: Account, pages: int) -> None:
        """Has others give up what is in the way of so many more pages of a holder, all of whose pages are firm."""
        more = max(account.taken + pages - max(account.taken, account.guaranteed), 0)
        for wait in (False, True):
            self.slacken(account, self.limit - more, wait=wait)

    def make_good(self, limit: int) -> bool:
        """Sees to it that what is firm, or guaranteed, is at most so much. False where what is used does not allow
        that; then nobody has given anything, but for what a lessee has meanwhile begun to use."""
        if self.promised > limit:
            return False
        self.slacken(None, limit, wait=True)
        return self.overdraft(limit) <= 0
