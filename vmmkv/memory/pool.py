"""The frame pool: the memory of a device that several may use, and the account of each.

Invariants, in pages:
 1. `free + taken = existing`, and the driver holds exactly the existing ones, beside those that lessees have made.
    `existing + leased <= limit`: what is leased a holder makes and gives back itself, at any time and without a word.
 2. What holders *use* cannot be had by others; everything else can, in their order of need: free frames, those that may
    still be made, and what holders have mapped and do not use.
 3. What is guaranteed to a holder is there for it: the sum, over all, of what each has *firmly* or is guaranteed,
    whichever is more, is at most `limit`. Firm is what a holder uses, and what it may begin to use without asking, such
    as what lies behind a live sequence. What is guaranteed, and not there yet, is lent: to whatever is mapped and not
    firm, such as parked rows and prefixes that are kept. Its owner has it back as soon as it needs pages.
 4. Everything follows from what the driver made, what `tables` say is mapped, and what lessees say is leased: `recover`
    works it out anew.
"""

from __future__ import annotations

import html
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from ..errors import (
    BudgetError,
    ForkError,
    InterruptedChangeError,
    OutOfPagesError,
    UseAfterFreeError,
    VmmkvError,
)
from ..stats import AccountStats, CallStats
from . import debugging
from .budget import pages_within
from .calls import Calls, LoopedCalls
from .driver import Driver, NativeDriver, driver_for
from .frames import Frames, Supply, Tenants
from .meter import Meter
from .monitor import Monitor, operation
from .picture import draw_accounts
from .ranges import Ranges


class Table(Protocol):
    """Where frames are mapped."""

    account: Account
    """Whose they are."""
    tail_frames: list[int]
    """Those of them that lie behind rows, of one page."""
    doubt: list[Any]
    """What is just being mapped or unmapped."""

    def tell_uses(self) -> None:
        """Tells frames how often they were used."""

    def mapped_pages(self) -> Collection[int]:
        """The pages of those that are mapped, once for each place."""

    def settle(self) -> None:
        """Makes the table right after an interruption: what may or may not be mapped is unmapped."""


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


class Bell(Protocol):
    """Who maps ahead of need."""

    meter: Meter
    """Its calls of the driver."""
    pages: int
    """Pages that it has mapped."""
    error: str | None
    """What went wrong last."""

    def ring(self) -> None:
        """Has it look for work soon."""

    def stop(self) -> None:
        """Ends it."""

    def forget(self) -> None:
        """In a forked child, where it is not."""


def _nobody() -> None:
    """The holder of an account before it is opened."""


@dataclass(eq=False)
class Account:
    """What one holder may have, in pages.

    Attributes:
        limit: the most that it may have mapped; None is all of the pool.
        guaranteed: what it can have at any time.
        is_lease: whether its pages are no frames of the pool, but the holder's own: `taken` is then what is leased, and
            `Holder.kept_pages` what of that there is.
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


@dataclass(frozen=True)
class FramePoolStats:
    """A snapshot of a `FramePool`, in bytes.

    Attributes:
        limit_bytes: the most that the pool may take.
        physical_bytes: what it takes now.
        free_bytes: what of it belongs to nobody.
        leased_bytes: what memory pools of torch have, or may take without asking; that is less for the others.
        guaranteed_bytes: what is promised to accounts.
        holders: how many have an account.
        used_bytes: what of it holders use, so that nobody else can have it.
        sequences: live ones, of caches.
        tokens: theirs.
        pages_created: pages created since the beginning.
        pages_mapped: how many were mapped `ahead` of need, by the mapper, and how many `in need`, by whoever grew.
        pages_cleaned: how many that were another tenant's were zeroed ahead of need, by the mapper.
        prompt_tokens: tokens of `token_ids` that sequences were started with, for reuse, since the beginning.
        cached_tokens: those of them that held K and V already.
        driver_calls: calls of the memory system by name, but for the mapper's.
        mapper_calls: those of the mapper, which nobody waits for.
        mapper_error: what went wrong in it last; who grew then did its work, or was told by an error of his own call.
        accounts: what each holder has, the oldest first.
    """

    limit_bytes: int
    physical_bytes: int
    free_bytes: int
    leased_bytes: int
    guaranteed_bytes: int
    holders: int
    used_bytes: int
    sequences: int
    tokens: int
    pages_created: int
    pages_mapped: dict[str, int]
    pages_cleaned: int
    prompt_tokens: int
    cached_tokens: int
    driver_calls: dict[str, CallStats]
    mapper_calls: dict[str, CallStats]
    mapper_error: str | None
    accounts: tuple[AccountStats, ...]


class FramePool:
    """Physical memory of one device, for several caches and growable tensors: what one does not use another can have.

        pool = vmmkv.FramePool("60GiB")
        chat = vmmkv.KVCache(layout, 256, 32768, pool=pool, guaranteed="10GiB")
        embed = vmmkv.KVCache(other_layout, 64, 8192, pool=pool)

    All that lies on a pool is one monitor: methods may be called from several threads, and one runs at a time. Who
    needs no page does not wait while the driver maps for others.

    Args:
        max_bytes: the limit: bytes, `"20GiB"`, or a share of the memory that is free now. Memory is taken when tokens
            come, not before.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        page_size: bytes of a page; None is 2 MiB.
        driver: a memory system of your own, instead of `device` and `page_size`.

    Raises:
        BudgetError: the limit is no size, below one page, or larger than the device.
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        max_bytes: float | str = "80%",
        *,
        device: str | torch.device | None = None,
        page_size: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.driver = driver_for(driver, device, page_size)
        self.limit = pages_within(self.driver, max_bytes)
        """Pages, now."""
        self.is_shared = True
        """Whether it is for whoever wants to lie on it; otherwise what is free counts as its one holder's."""
        self.is_debugged = debugging.is_on()
        """Whether `VMMKV_DEBUG` was set when it was made."""
        self.monitor = Monitor()
        self.ranges = Ranges(self.driver.device)
        self.meter = Meter()
        """Calls of the driver, but for those of a mapper."""
        self.calls: Calls = make_calls(self.driver, self.meter)
        self.frames = Frames(self.calls, self.driver.memory_info()[1] // self.driver.page_size)
        self.number = next(_numbers)
        """Among the pools of this process."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of sequences that were started for reuse, since the beginning: all, and those that were there."""
        self.pages_in_need = 0
        """Pages that growths had to map themselves."""
        self.pages_cleaned = 0
        """Pages that were zeroed in the background, to be another tenant's."""
        self.tenants = Tenants()
        """Whose bytes are kept apart on this pool."""
        self.accounts: list[Account] = []
        self._account_numbers = itertools.count()
        self.tables: list[Table] = []
        """Of all holders, also of those that are gone while the device may still use what they had."""
        self.left_behind: deque[tuple[Table, Account, list[int]]] = deque()
        """Frames of holders that are gone, to be taken back by the next operation."""
        self.ended_leases: list[tuple[Account, Holder]] = []
        """Of lessees whose users are gone, and who give back what is left when they can."""
        self.mapper: Bell | None = None
        """Who maps ahead, where somebody wants that."""
        self._unusable: type[VmmkvError] | None = None
        weakref.finalize(self, _release_all, self.frames, os.getpid()).atexit = False
        _pools[self.number] = self

    @property
    def pool(self) -> FramePool:
        """Itself: what operations ask everything on a pool for."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.driver.device

    @property
    def page_size(self) -> int:
        """Bytes of a page."""
        return self.driver.page_size

    @property
    def leased(self) -> int:
        """Pages that lessees have made, or may make."""
        return sum([account.taken for account in self.accounts if account.is_lease])

    @property
    def physical(self) -> int:
        """Pages that there are: frames, and what lessees have made."""
        return self.frames.existing + sum(_used(account) for account in self.accounts if account.is_lease)

    @property
    def room(self) -> int:
        """Frames that may still be made."""
        return self.limit - self.leased - self.frames.existing

    @operation
    def set_limit(self, max_bytes: float | str) -> None:
        """Sets how much the pool may take, up or down. What is beyond it goes back to the system before this returns.

        Raises:
            BudgetError: it is no size, or larger than the device, or less than what is guaranteed.
            OutOfPagesError: tokens take more.
            DriverError: a driver call failed. The limit is as before in all cases, and nobody has lost a token.
        """
        limit = pages_within(self.driver, max_bytes)
        self.collect()
        guaranteed = sum(account.guaranteed for account in self.accounts)
        if limit < guaranteed:
            raise BudgetError(
                f"asked for a limit of {limit} pages of {self.page_size} bytes; {guaranteed} are guaranteed to caches "
                "on this pool. Close one, or keep a higher limit"
            )
        if not self._make_good(limit):
            raise OutOfPagesError(
                f"asked for a limit of {limit} pages of {self.page_size} bytes; tokens, and guarantees, take "
                f"{self._promised()}. Free or truncate sequences first",
                requested=limit,
                available=self._promised(),
            )
        self._shrink_to(limit - self.leased)
        if self.frames.existing + self.leased > limit:  # a lessee has made more meanwhile
            raise OutOfPagesError(
                f"asked for a limit of {limit} pages of {self.page_size} bytes; {self.frames.existing + self.leased} "
                "are in use by now. Free or truncate sequences first",
                requested=limit,
                available=self.frames.existing + self.leased,
            )
        self.limit = limit

    def memory_info(self) -> tuple[int, int]:
        """Bytes that shares of the pool are of, and bytes that it has in all."""
        return self.limit * self.page_size, self.limit * self.page_size

    @operation
    def trim(self, keep: float | str = 0) -> int:
        """Gives what nobody uses back to the system, until `keep` bytes are left, or all are in use; returns the bytes
        that went. `keep` is as in `max_bytes`, and shares are of the pool's limit.

        Waits for GPU work that still uses them.
        """
        self.collect()
        before = self.frames.existing
        kept = pages_within(self, keep, least=0, name="keep")
        self._shrink_to(max(kept - (self.physical - before), 0))
        return (before - self.frames.existing) * self.page_size

    @operation
    def stats(self) -> FramePoolStats:
        """A snapshot."""
        self.collect()
        size = self.page_size
        used = [_used(account) for account in self.accounts]  # each once: lessees make pages at any time
        lessees = sum(pages for account, pages in zip(self.accounts, used) if account.is_lease)
        holders = [holder for account in self.accounts if (holder := account.holder()) is not None]
        sequences, tokens = map(sum, zip((0, 0), *(holder.sequences() for holder in holders)))
        return FramePoolStats(
            limit_bytes=self.limit * size,
            physical_bytes=(self.frames.existing + lessees) * size,
            free_bytes=self.frames.free_pages * size,
            leased_bytes=self.leased * size,
            guaranteed_bytes=sum(account.guaranteed for account in self.accounts) * size,
            holders=len(self.accounts),
            used_bytes=sum(used) * size,
            sequences=sequences,
            tokens=tokens,
            pages_created=self.frames.made,
            pages_mapped={"ahead": self.mapper.pages if self.mapper else 0, "in need": self.pages_in_need},
            pages_cleaned=self.pages_cleaned,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            driver_calls=self.meter.stats(),
            mapper_calls=self.mapper.meter.stats() if self.mapper else {},
            mapper_error=self.mapper.error if self.mapper else None,
            accounts=tuple(map(self._account_stats, self.accounts, used)),
        )

    def _account_stats(self, account: Account, used: int) -> AccountStats:
        holder, size = account.holder(), self.page_size
        sequences, tokens = (0, 0) if holder is None else holder.sequences()
        return AccountStats(
            name=account.name,
            limit_bytes=min(self.limit, self.limit if account.limit is None else account.limit) * size,
            guaranteed_bytes=account.guaranteed * size,
            mapped_bytes=(used if account.is_lease else account.taken) * size,
            used_bytes=used * size,
            sequences=sequences,
            tokens=tokens,
        )

    def open_account(self, account: Account, holder: Holder) -> None:
        """Opens an account for a holder that is made in full: from now on it may be asked for what it does not use, and
        to recover. So who is interrupted before that leaves none.

        Raises:
            BudgetError: so much cannot be guaranteed beside what others are guaranteed, or use, or within the limit.
        """
        limit, guaranteed = account.limit, account.guaranteed
        if limit is not None and guaranteed > limit:
            raise BudgetError(f"asked for a guarantee of {guaranteed} pages, and for {limit} at most; ask for less")
        with self.monitor.door, self.monitor.changing, self.monitor.lock:
            if not self._make_good(self.limit - guaranteed):
                raise BudgetError(
                    f"asked for a guarantee of {guaranteed} pages of {self.page_size} bytes; of {self.limit} in the "
                    f"pool {self._promised()} are guaranteed to others, or in use by them. Ask for less, or raise its "
                    "limit"
                )
            account.name = f"{holder.kind} {next(self._account_numbers)}"
            account.holder = weakref.ref(holder)
            if self.is_debugged:
                account.origin = debugging.caller()
            self.accounts.append(account)

    def close_account(self, account: Account) -> None:
        """Ends an account. What its holder has, and could not unmap, counts until it is given back all the same."""
        account.holder, account.guaranteed = _nobody, 0
        if not account.taken:
            with suppress(ValueError):
                self.accounts.remove(account)

    # ------------------------------------------------------------------ for holders, inside of their operations

    def allowed(self, account: Account) -> int:
        """Pages that a holder may use in all: what others use, and what they are guaranteed, is theirs."""
        others = sum(max(other.guaranteed, _used(other)) for other in self.accounts if other is not account)
        return min(self.limit - others, self.limit if account.limit is None else account.limit)

    def check_allowed(self, account: Account, pages: int) -> None:
        """Raises `OutOfPagesError`, where a holder may not use so many pages in all."""
        allowed = self.allowed(account)
        if pages > allowed:
            raise OutOfPagesError(
                f"asked for {pages} pages of {self.page_size} bytes in all; {allowed} are the most that can be had of "
                f"{self.limit}, beside what others use or are guaranteed",
                requested=pages,
                available=allowed,
            )

    def idle(self, account: Account) -> int:
        """Pages that nobody has, as far as a holder may have them. Firmly it may have no more than `headroom`."""
        idle = self.limit - self.frames.taken - self.leased
        return idle if account.limit is None else min(idle, account.limit - account.taken)

    def headroom(self, account: Account) -> int:
        """Pages that a holder may have firmly, beside those that it has so, without anybody giving up any."""
        return max(account.guaranteed - _firm(account), 0) - self.overdraft(self.limit)

    @property
    def has_guarantees(self) -> bool:
        """Whether anything is guaranteed. Otherwise all that is mapped may be firm."""
        return sum([account.guaranteed for account in self.accounts]) > 0

    def overdraft(self, limit: int) -> int:
        """Pages by which what all have firmly, or are guaranteed, whichever is more, is beyond a limit; negative where
        there is room."""
        return sum([max(account.guaranteed, _firm(account)) for account in self.accounts]) - limit

    def slacken(self, account: Account | None, limit: int, *, wait: bool) -> None:
        """Has others give up pages that they do not use but might begin to, until nothing firm or guaranteed is beyond
        a limit, or there are no more. A lessee has none from other lessees."""
        for other in list(self.accounts):
            holder = other.holder()
            if other is account or holder is None or (account is not None and account.is_lease and other.is_lease):
                continue
            while (count := min(self.overdraft(limit), _firm(other) - other.guaranteed)) > 0:
                if not holder.reclaim(count, wait=wait, firm=True):
                    break

    def make_headroom(self, account: Account, pages: int) -> None:
        """Has others give up what is in the way of so many more pages of a holder, all of whose pages are firm."""
        more = max(account.taken + pages - max(account.taken, account.guaranteed), 0)
        for wait in (False, True):
            self.slacken(account, self.limit - more, wait=wait)

    def take(self, account: Account, pages: int, large: int = 0) -> Supply:
        """Frames of so many pages in all, up to so many large ones among them.

        Raises:
            OutOfPagesError: there is not as much idle; see `reclaim`.
            DriverError: the driver could not make one; those made before it are free now.
        """
        self._check_idle(account, pages)
        supply = self.frames.take(pages, large, self.limit - self.leased)
        account.taken += pages
        return supply

    def tenant_number(self, tenant: Hashable) -> int:
        """The number of a tenant, as long as anything here carries it. Forgets others now and then."""
        if self.tenants.are_many:
            holders = [holder for account in self.accounts if (holder := account.holder()) is not None]
            self.tenants.forget(self.frames.known_tenants().union(*(holder.known_tenants() for holder in holders)))
        return self.tenants.number(tenant)

    def lease(self, account: Account, pages: int) -> None:
        """Lets a lessee make so many pages more. Frames that nobody has go back to the system for them.

        Raises:
            OutOfPagesError: there is not as much idle; see `reclaim_from_others`.
            DriverError: the driver could not release one; those released before it are gone.
        """
        self._check_idle(account, pages)
        self.frames.release(max(pages - self.room, 0))
        account.taken += pages

    def _check_idle(self, account: Account, pages: int) -> None:
        """Raises `OutOfPagesError`, where so much is not idle."""
        if pages > (idle := self.idle(account)):
            raise OutOfPagesError(
                f"asked for {pages} pages of {self.page_size} bytes; {idle} are idle, of {self.limit} in the pool",
                requested=pages,
                available=idle,
            )

    def give(self, account: Account, frames: Collection[int]) -> None:
        """Takes frames back that are mapped nowhere."""
        account.taken -= self.frames.give(frames)

    def reclaim_from_others(self, account: Account | None, count: int, *, wait: bool, guaranteed: bool = False) -> int:
        """Has others give back up to `count` pages that they do not use; returns how many. A lessee has none from other
        lessees, who may need theirs at any time.

        Args:
            guaranteed: also those that they are guaranteed, which nobody can have then, but for which there is memory:
                so none that are only leased.
        """
        reclaimed = 0
        for other in list(self.accounts):
            holder = other.holder()
            if other.is_lease and (guaranteed or (account is not None and account.is_lease)):
                continue
            most = count - reclaimed if guaranteed else min(count - reclaimed, other.taken - other.guaranteed)
            if other is not account and holder is not None and most > 0:
                reclaimed += holder.reclaim(most, wait=wait)
        return reclaimed

    def collect(self) -> None:
        """Takes back what was left behind by holders that are gone."""
        while self.left_behind:
            _, account, frames = self.left_behind[0]
            self.give(account, frames)
            self._forget_first()
        for account, lessee in self.ended_leases.copy():
            account.guaranteed = 0
            lessee.reclaim(account.taken)
            if not account.taken:
                self.close_account(account)
                self.ended_leases.remove((account, lessee))

    def _forget_first(self) -> None:
        """Ends the first entry of what was left behind, whose frames are free. What is still mapped comes again."""
        table, account, _ = self.left_behind[0]
        if not table.mapped_pages():
            with suppress(ValueError):
                self.tables.remove(table)
        if account.holder() is None:  # otherwise its holder was interrupted while it made one more
            self.close_account(account)
        self.left_behind.popleft()

    def recover(self) -> None:
        """Makes all books on this pool right after an interruption, or says that nobody can."""
        if self._unusable:
            return
        self._unusable = InterruptedChangeError
        if not self.calls.in_doubt:
            with suppress(VmmkvError):
                while self.left_behind:
                    self._forget_first()  # what lies in no table will be free
                for table in self.tables:
                    table.settle()
                self.frames.settle(page for table in self.tables for page in table.mapped_pages())
                for account in list(self.accounts):
                    if (holder := account.holder()) is not None:
                        holder.recover()
                    else:
                        of_it = [table for table in self.tables if table.account is account]
                        account.taken = len({page for table in of_it for page in table.mapped_pages()})
                        self.close_account(account)
                self._unusable = None

    def check_usable(self) -> None:
        """Raises what forbids any use of the pool.

        Raises:
            InterruptedChangeError, ForkError, UseAfterFreeError: it does.
        """
        if self._unusable:
            raise self._unusable(_REASONS[self._unusable])

    def close(self) -> None:
        """Gives all memory back now. Close what lies on the pool first.

        Raises:
            BudgetError: something still lies on the pool.
        """
        if self._unusable is UseAfterFreeError:
            return
        monitor = self.monitor
        monitor.check_outside("close")
        with monitor.door, monitor.changing, monitor.lock:
            monitor.check_outside("close", changing=True)
            before, monitor.is_dirty = monitor.is_dirty, True  # who is interrupted leaves the rest to others
            self.collect()
            monitor.is_dirty = before
            if self.accounts:
                report = "\n".join(["", *self._held()]) if self.is_debugged else ""
                raise BudgetError(
                    f"{len(self.accounts)} caches, growable tensors or memory pools (with what torch has made there) "
                    f"lie on this pool; close them first{report}"
                )
            self._unusable = UseAfterFreeError
            self.frames.close()

    def _held(self) -> Iterator[str]:
        """Who has what, for a leak report."""
        for account in self.accounts:
            yield f"{account.taken} pages of what was made at {account.origin}"
            holder = account.holder()
            yield from (f"  {line}" for line in (holder.held() if holder is not None else ()))

    def _promised(self) -> int:
        """Pages that are used, or guaranteed."""
        return sum(max(account.guaranteed, _used(account)) for account in self.accounts)

    def _make_good(self, limit: int) -> bool:
        """Sees to it that what is firm, or guaranteed, is at most so much. False where what is used does not allow
        that; then nobody has given anything, but for what a lessee has meanwhile begun to use."""
        if self._promised() > limit:
            return False
        self.slacken(None, limit, wait=True)
        return self.overdraft(limit) <= 0

    def _shrink_to(self, limit: int) -> None:
        """Gives frames back to the system, until at most so many are left, or all are used."""
        surplus = self.frames.existing - limit - self.frames.free_pages
        for account in list(self.accounts):
            holder = account.holder()
            if holder is not None and surplus > 0 and not account.is_lease:
                surplus -= holder.reclaim(surplus, wait=True)
        self.frames.release(min(max(self.frames.existing - limit, 0), self.frames.free_pages))

    def _leave_to_parent(self) -> None:
        self.monitor.reset()
        self.monitor.is_dirty = True  # so that nobody passes by without a look at what forbids it
        if self.mapper:
            self.mapper.forget()
        self._unusable = ForkError

    def __reduce__(self) -> NoReturn:
        raise TypeError("a FramePool owns its memory and cannot be copied or pickled; make another one")

    def __repr__(self) -> str:
        mib = self.page_size / 2**20
        return (
            f"<vmmkv.FramePool on {self.device}: {self.frames.existing * mib:.0f} of {self.limit * mib:.0f} MiB, "
            f"{len(self.accounts)} accounts>"
        )

    def _repr_html_(self) -> str:
        """What Jupyter shows: who has how much."""
        try:
            stats = self.stats()
        except VmmkvError:
            return html.escape(repr(self))
        title = f"FramePool {self.number} on {self.device}"
        return draw_accounts(title, stats.limit_bytes, stats.free_bytes, stats.accounts)


_REASONS = {
    InterruptedChangeError: "this memory was interrupted (Ctrl-C, a signal handler) while it had the driver make, map "
    "or release a page, and cannot know whether that was done. Close what lies on it, which gives the memory back, and "
    "make a new one",
    ForkError: "this memory was made before fork(); it belongs to the parent. Make a new one in the child, or start "
    "processes with the 'spawn' method",
    UseAfterFreeError: "this FramePool was closed; make a new one",
}

_numbers = itertools.count()
_pools: weakref.WeakValueDictionary[int, FramePool] = weakref.WeakValueDictionary()


def living_pools() -> list[FramePool]:
    """Those of this process, the first one made coming first."""
    return [pool for reference in _pools.valuerefs() if (pool := reference()) is not None]


def pool_stats() -> dict[FramePool, FramePoolStats]:
    """A snapshot of each pool of this process that is in use, the first one made coming first."""
    stats = {}
    for pool in living_pools():
        with suppress(VmmkvError):
            stats[pool] = pool.stats()
    return stats


def _forget_pools() -> None:
    for pool in list(_pools.values()):
        pool._leave_to_parent()


os.register_at_fork(after_in_child=_forget_pools)


def make_calls(driver: Driver, meter: Meter) -> Calls:
    """The fastest way to make many calls of a driver."""
    if isinstance(driver, NativeDriver):
        from .compiled_calls import CompiledCalls  # imports Numba

        return CompiledCalls(driver, meter)
    return LoopedCalls(driver, meter)


def _used(account: Account) -> int:
    holder = account.holder()
    return holder.kept_pages if holder is not None else account.taken


def _firm(account: Account) -> int:
    holder = account.holder()
    return holder.firm_pages if holder is not None else account.taken


def _release_all(frames: Frames, owner: int) -> None:
    if os.getpid() == owner:
        frames.close()
