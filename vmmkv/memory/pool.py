"""The frame pool: the memory of a device that several may use, each on an account.

Invariants, beside those of the accounts, in pages:
 1. `free + taken = existing`, and the driver holds exactly the existing ones, beside those that lessees have made.
    `existing + leased <= limit`: what is leased a holder makes and gives back itself, at any time and without a word.
 2. Everything follows from what the driver made, what `tables` say is mapped, and what lessees say is leased: `recover`
    works it out anew.
"""

from __future__ import annotations

import html
import itertools
import os
import weakref
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import torch

from ..driver.calls import Calls
from ..driver.driver import Driver, open_driver
from ..driver.meter import Meter
from ..errors import (
    BudgetError,
    ForkError,
    InterruptedChangeError,
    OutOfPagesError,
    UseAfterFreeError,
    VmmkvError,
)
from ..stats import FramePoolStats
from . import debugging
from .accounts import Account, Accounts, Holder
from .budget import pages_within
from .frames import Frames, Supply, Tenants
from .monitor import Monitor, operation
from .nvtx import Ranges
from .picture import draw_accounts


class Table(Protocol):
    """Where frames are mapped."""

    account: Account
    """Whose they are."""
    zero_frames: list[int]
    """Those of them that are zeros behind rows, of one page."""
    doubt: list[Any]
    """What is just being mapped or unmapped."""

    def tell_uses(self) -> None:
        """Tells frames how often they were used."""

    def mapped_pages(self) -> Collection[int]:
        """The pages of those that are mapped, once for each place."""

    def settle(self) -> None:
        """Makes the table right after an interruption: what may or may not be mapped is unmapped."""


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

    def ring_later(self) -> None:
        """`ring`, for what is needed many tokens from now."""

    def forget(self) -> None:
        """In a forked child, where it is not."""


class FramePool:
    """Physical memory of one device, for several caches and growable tensors: memory that one does not use another can
    have.

        pool = vmmkv.FramePool("60GiB")
        chat = vmmkv.KVCache(layout, 256, 32768, pool=pool, guaranteed="10GiB")
        embed = vmmkv.KVCache(other_layout, 64, 8192, pool=pool)

    All caches and tensors on a pool form one monitor: methods may be called from several threads, and one runs at a
    time. Calls that need no page do not wait while the driver maps pages for others.

    Args:
        max_bytes: the limit: bytes, `"20GiB"`, or a share of the memory that is free now. Memory is allocated as
            sequences grow, not before.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`; None takes CUDA where there is a GPU.
        page_size: bytes of a page, a multiple of the smallest that there is (4 KiB of host memory, 2 MiB on today's
            GPUs; `granularity_size` of `vmmkv info`); None is 2 MiB.

    Raises:
        BudgetError: the limit is no size, below one page, or larger than the device.
        LayoutError: there is no such page.
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        max_bytes: float | str = "80%",
        *,
        device: str | torch.device | None = None,
        page_size: int | None = None,
    ) -> None:
        self._lay_on(open_driver(device, page_size), max_bytes)

    @classmethod
    def on(cls, driver: Driver, max_bytes: float | str) -> FramePool:
        """Makes a pool on a driver that is open already."""
        pool = cls.__new__(cls)
        pool._lay_on(driver, max_bytes)
        return pool

    def _lay_on(self, driver: Driver, max_bytes: float | str) -> None:
        self.driver = driver
        self.meter = Meter()
        """Calls of the driver, without those of a mapper."""
        self.calls = Calls(self.driver, self.meter)
        self.frames = Frames(self.calls, self.driver.memory_info()[1] // self.page_size)
        self.accounts = Accounts(self.frames, pages_within(self.driver, max_bytes), self.page_size)
        """Of the caches, tensors and memory pools that lie on it."""
        self.is_debugged = debugging.is_on()
        """Whether `VMMKV_DEBUG` was set when it was made."""
        self._takers: dict[int, str] = {}
        """With debugging: where pages were taken, by their numbers."""
        self.is_shared = True
        """Whether several may lie on it; otherwise free memory counts as its one holder's."""
        self.monitor = Monitor()
        self.nvtx = Ranges(self.driver.device)
        """What a profiler shows."""
        self.number = next(_numbers)
        """Among the pools of this process."""
        self.prompt_tokens = self.cached_tokens = 0
        """Tokens of sequences that were started for reuse, since the beginning: all of them, and the cached ones."""
        self.pages_in_need = 0
        """Pages that growths had to map themselves."""
        self.pages_cleaned = 0
        """Pages that were zeroed in the background, before another tenant has them."""
        self.tenants = Tenants()
        """The tenants whose bytes are kept apart on this pool."""
        self.tables: list[Table] = []
        """Of all holders, also of those that are gone while the device may still use their memory."""
        self.left_behind: deque[tuple[Table, Account, list[int]]] = deque()
        """Frames of holders that are gone, to be taken back by the next operation."""
        self.ended_leases: list[tuple[Account, Holder]] = []
        """Of lessees whose users are gone, and who give their memory back when they can."""
        self.mapper: Bell | None = None
        """The background mapper, if any cache has a lookahead."""
        self._unusable: type[VmmkvError] | None = None
        weakref.finalize(self, _release_all, self.frames, os.getpid()).atexit = False
        _pools[self.number] = self

    @property
    def pool(self) -> FramePool:
        """Itself: operations ask everything on a pool for its pool."""
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
    def limit_pages(self) -> int:
        """The most pages that it may take, at present."""
        return self.accounts.limit

    @operation
    def set_limit(self, max_bytes: float | str) -> None:
        """Sets how much the pool may take, up or down. Memory beyond that goes back to the system before this returns.

        `max_bytes` takes the same forms as in the constructor; a percentage refers to device memory that is free now
        plus what the pool already holds.

        Raises:
            BudgetError: it is not a size, or below one page, or larger than the device, or less than the guarantees.
            OutOfPagesError: live tokens and guarantees take more; `available` is the lowest limit that could be set.
            DriverError: a driver call failed. In all cases the limit is as before, and no sequence has lost a token.
        """
        self.collect()
        limit = pages_within(self.driver, max_bytes, held=self.accounts.physical * self.page_size)
        guaranteed = sum(account.guaranteed for account in self.accounts)
        if limit < guaranteed:
            raise BudgetError(
                f"asked for a limit of {limit} pages of {self.page_size} bytes; {guaranteed} are guaranteed to caches "
                "on this pool. Close one, or keep a higher limit"
            )
        if not self.accounts.make_good(limit):
            raise OutOfPagesError(
                f"asked for a limit of {limit} pages of {self.page_size} bytes; tokens, and guarantees, take "
                f"{self.accounts.promised}. Free or truncate sequences first",
                requested=limit,
                available=self.accounts.promised,
            )
        self._shrink_to(limit - self.accounts.leased)
        taken = self.frames.existing + self.accounts.leased
        if taken > limit:  # a lessee has made more meanwhile
            raise OutOfPagesError(
                f"asked for a limit of {limit} pages of {self.page_size} bytes; {taken} are in use by now. Free or "
                "truncate sequences first",
                requested=limit,
                available=taken,
            )
        self.accounts.limit = limit

    def memory_info(self) -> tuple[int, int]:
        """The bytes that shares of the pool refer to, and its bytes in all: both are its limit."""
        return self.limit_pages * self.page_size, self.limit_pages * self.page_size

    @operation
    def trim(self, keep: float | str = 0) -> int:
        """Gives unused memory back to the system, until the pool has `keep` bytes left, or only memory in use; returns
        the number of bytes given back. `keep` takes the same forms as `max_bytes`; shares refer to the pool's limit.

        Waits for GPU work that still uses it.

        Raises:
            BudgetError: `keep` is no size, or more than the pool's limit.
            DriverError: a page could not be released; what went before it is gone, and the rest can be trimmed again.
        """
        self.collect()
        before = self.frames.existing
        kept = pages_within(self, keep, least=0, name="keep")
        self._shrink_to(max(kept - (self.accounts.physical - before), 0))
        return (before - self.frames.existing) * self.page_size

    @operation
    def stats(self) -> FramePoolStats:
        """A snapshot: bytes, pages, sequences, driver calls, and what each account has."""
        self.collect()
        size, accounts = self.page_size, self.accounts.stats()
        lessees = [stats.used_bytes for account, stats in zip(self.accounts, accounts) if account.is_lease]
        return FramePoolStats(
            limit_bytes=self.limit_pages * size,
            physical_bytes=self.frames.existing * size + sum(lessees),
            free_bytes=self.frames.free_pages * size,
            leased_bytes=self.accounts.leased * size,
            guaranteed_bytes=sum(account.guaranteed_bytes for account in accounts),
            holders=len(accounts),
            used_bytes=sum(account.used_bytes for account in accounts),
            sequences=sum(account.sequences for account in accounts),
            tokens=sum(account.tokens for account in accounts),
            pages_created=self.frames.made,
            pages_mapped={"ahead": self.mapper.pages if self.mapper else 0, "in need": self.pages_in_need},
            pages_cleaned=self.pages_cleaned,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            driver_calls=self.meter.stats(),
            mapper_calls=self.mapper.meter.stats() if self.mapper else {},
            mapper_error=self.mapper.error if self.mapper else None,
            accounts=accounts,
        )

    # ------------------------------------------------------------------ for holders, inside of their operations

    def take(self, account: Account, pages: int, large: int = 0) -> Supply:
        """Frames of so many pages in all, up to so many large ones among them.

        Raises:
            OutOfPagesError: there is not as much idle; see `Accounts.make_idle`.
            DriverError: the driver could not make one; those made before it are free now.
        """
        self.accounts.check_idle(account, pages)
        supply = self.frames.take(pages, large, self.limit_pages - self.accounts.leased)
        account.taken += pages
        if self.is_debugged:
            taken = self.frames.in_pages([*supply.large, *supply.single])
            self._takers.update(dict.fromkeys(taken, debugging.caller()))
        return supply

    def taken_by(self, pages: Iterable[int]) -> list[str]:
        """With debugging: who has taken pages, or had them last, a line for each place."""
        takers = Counter(self._takers[page] for page in pages if page in self._takers)
        return [f"{count} page{'s' * (count > 1)} taken by {taker}" for taker, count in takers.items()]

    def tenant_number(self, tenant: Hashable) -> int:
        """The number of a tenant, as long as anything here carries it. Forgets others now and then."""
        if self.tenants.are_many:
            holders = [holder for account in self.accounts if (holder := account.holder()) is not None]
            self.tenants.forget(self.frames.known_tenants().union(*(holder.known_tenants() for holder in holders)))
        return self.tenants.number(tenant)

    def lease(self, account: Account, pages: int) -> None:
        """Lets a lessee make so many pages more. Frames that nobody has go back to the system for them.

        Raises:
            OutOfPagesError: there is not as much idle; see `Accounts.make_idle`.
            DriverError: the driver could not release one; those released before it are gone.
        """
        self.accounts.check_idle(account, pages)
        self.frames.release(max(pages - self.accounts.room, 0))
        account.taken += pages

    def trim_holder(self, holder: Holder) -> int:
        """Gives what a holder does not use, and what is free, back to the system; returns the bytes that went."""
        before = self.frames.existing
        holder.reclaim(self.limit_pages, wait=True)  # also what costs addresses only: pages that others have, too
        self.frames.release(self.frames.free_pages)
        return (before - self.frames.existing) * self.page_size

    def give(self, account: Account, frames: Collection[int]) -> None:
        """Takes frames back that are mapped nowhere."""
        account.taken -= self.frames.give(frames)

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
                self.accounts.close(account)
                self.ended_leases.remove((account, lessee))

    def _forget_first(self) -> None:
        """Ends the first entry of what was left behind, whose frames are free. What is still mapped comes again."""
        table, account, _ = self.left_behind[0]
        if not table.mapped_pages():
            with suppress(ValueError):
                self.tables.remove(table)
        if account.holder() is None:  # otherwise its holder was interrupted while it made one more
            self.accounts.close(account)
        self.left_behind.popleft()

    def recover(self) -> None:
        """Makes all books on this pool right after an interruption, or says that nobody can."""
        if self._unusable:
            return
        self._unusable = InterruptedChangeError
        with suppress(VmmkvError):
            while self.left_behind:
                self._forget_first()  # what lies in no table will be free
            for table in self.tables:
                table.settle()
            self.frames.settle(page for table in self.tables for page in table.mapped_pages())
            for account in self.accounts:
                if (holder := account.holder()) is not None:
                    holder.recover()
                else:
                    of_it = [table for table in self.tables if table.account is account]
                    account.taken = len({page for table in of_it for page in table.mapped_pages()})
                    self.accounts.close(account)
            self._unusable = None

    def check_usable(self) -> None:
        """Raises an error if the pool cannot be used.

        Raises:
            InterruptedChangeError, ForkError, UseAfterFreeError: it cannot.
        """
        if self._unusable:
            raise self._unusable(_REASONS[self._unusable])

    def close(self) -> None:
        """Gives all memory back now. Close the caches and tensors on the pool first. In a forked child this does
        nothing.

        Raises:
            BudgetError: a cache, tensor or memory pool still lies on the pool.
            BusyError: another operation of this thread is not at its end.
        """
        if self._unusable in (UseAfterFreeError, ForkError):
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
            self.end()

    def end(self) -> None:
        """Gives all memory back, whoever lies on it. Nobody can use the pool any more."""
        self._unusable = UseAfterFreeError
        self.mapper = None
        self.frames.close()

    def _held(self) -> Iterator[str]:
        """Who has what, for a leak report."""
        for account in self.accounts:
            yield f"{account.taken} pages of what was made at {account.origin}"
            holder = account.holder()
            yield from (f"  {line}" for line in (holder.held() if holder is not None else ()))

    def _shrink_to(self, limit: int) -> None:
        """Gives frames back to the system, until at most so many are left, or all are used."""
        surplus = self.frames.existing - limit - self.frames.free_pages
        for account in self.accounts:
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
            f"<vmmkv.FramePool on {self.device}: {self.frames.existing * mib:.0f} of {self.limit_pages * mib:.0f} MiB, "
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


def _release_all(frames: Frames, owner: int) -> None:
    if os.getpid() == owner:
        frames.close()
