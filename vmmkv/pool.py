"""The frame pool: physical memory of one device, for several caches and growable tensors."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn, Protocol

import torch

from .budget import pages_within
from .core.cache import Cache
from .core.pool import NO_LIMIT_PAGES, Pool
from .core.tables import ACCOUNT
from .driver.driver import Driver, fork_error, open_driver
from .errors import ArgumentError, BudgetError, UseAfterFreeError, VmmkvError
from .ledger import Ledger, device_name, path_of
from .lending import Lender
from .stats import AccountStats, FramePoolStats


class Holder(Protocol):
    """A cache, growable tensor or memory pool that lies on a pool."""

    @property
    def account(self) -> int:
        """The number of its account."""

    def mapped_pages(self) -> int:
        """Pages that are mapped for it, each counted once."""


class FramePool(Pool):
    """Physical memory of one device, for several caches and growable tensors: memory that one does not use another can
    have.

        pool = vmmkv.FramePool("60GiB")
        chat = vmmkv.KVCache(layout, 256, 32768, pool=pool, reserved="10GiB")
        embed = vmmkv.KVCache(other_layout, 64, 8192, pool=pool)

    Methods may be called from several threads. Calls that need no page do not wait while the driver maps pages.

    Args:
        max_bytes: the limit: bytes, `"20GiB"`, or a share of the memory that is free now. Memory is allocated as
            sequences grow, not before.
        device: `"cuda"`, `"cuda:1"`, `"cpu"`, or a driver that is open; None takes CUDA where there is a GPU.
        page_size: bytes of a page, a multiple of the smallest that there is (4 KiB of host memory, 2 MiB on today's
            GPUs; `granularity_size` of `vmmkv info`); None is 2 MiB.
        shared: the name of a budget that this user's processes on the device share; None is a budget of this process
            alone. The first process sets the limit. Memory that holds no live tokens in one process goes to another
            that lacks it; each process makes its own memory, and none reads that of another. torch memory pools take
            only what is granted to this process already.
        reserved: with `shared`, bytes that this process can have at any time, as in `max_bytes`; shares are of the
            limit.

    Raises:
        ArgumentError: `shared` is no name, or there is `reserved` without it.
        BudgetError: the limit is no size, below one page, or larger than the device; or what is reserved cannot be had;
            or the file of the shared budget cannot be used.
        LayoutError: there is no such page.
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        max_bytes: float | str = "80%",
        *,
        device: str | torch.device | Driver | None = None,
        page_size: int | None = None,
        shared: str | None = None,
        reserved: float | str = 0,
    ) -> None:
        if shared is None and reserved:
            raise ArgumentError(f"got reserved={reserved!r} without shared; a pool by itself has all of max_bytes")
        driver = device if isinstance(device, Driver) else open_driver(device, page_size)
        self.is_debugged = os.environ.get("VMMKV_DEBUG", "0") not in ("", "0")
        """Whether `VMMKV_DEBUG` was set when it was made."""
        pages = pages_within(driver, max_bytes)
        path = None if shared is None else path_of(shared, device_name(driver.device))
        super().__init__(driver, pages if path is None else 0, poison=self.is_debugged)
        self.is_shared = True
        """Whether several may lie on it; otherwise it ends with its one cache or tensor."""
        self.number = next(_numbers)
        """Among the pools of this process."""
        nvtx: Any = torch.cuda.nvtx.range if driver.device.type == "cuda" else nullcontext
        self.nvtx: Callable[[str], AbstractContextManager[Any]] = nvtx
        """A range with a name on a profiler's time line."""
        self.prompt_tokens = self.cached_tokens = 0
        """Tokens of sequences that were started for reuse, since the beginning: all of them, and the cached ones."""
        self.holders: weakref.WeakValueDictionary[str, Holder] = weakref.WeakValueDictionary()
        """By name: those who lie on it."""
        self._kinds: dict[str, itertools.count[int]] = {}
        self.lender: Lender | None = None
        if path is not None:
            self.lender = Lender(self, Ledger(path, pages * self.page_size), reserved)
        _pools[self.number] = self

    def name(self, holder: Holder) -> str:
        """Names a holder by its kind and its number: `"KVCache 0"`."""
        kind = type(holder).__name__
        name = f"{kind} {next(self._kinds.setdefault(kind, itertools.count()))}"
        self.holders[name] = holder
        return name

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
        """The most pages that it may take, at present: of a shared budget, all processes together."""
        return self.lender.ledger.limit // self.page_size if self.lender else self.word("budget")

    @property
    def attainable_pages(self) -> int:
        """The most pages that it can have now: of a shared budget, those that other processes neither use nor have
        reserved."""
        return self.lender.attainable // self.page_size if self.lender else self.word("budget")

    def memory_info(self) -> tuple[int, int]:
        """The bytes that shares of the pool refer to, and its bytes in all: both are its limit."""
        return self.limit_pages * self.page_size, self.limit_pages * self.page_size

    def check_usable(self) -> None:
        """Raises `ForkError` or `UseAfterFreeError` if the pool cannot be used."""
        if self.word("dead"):
            raise fork_error()
        if not self.is_open:
            raise UseAfterFreeError("this FramePool was closed; make a new one")

    def set_limit(self, max_bytes: float | str) -> None:
        """Sets how much the pool may take, up or down. Memory beyond that goes back to the system before this returns.

        `max_bytes` takes the same forms as in the constructor; a percentage refers to device memory that is free now
        plus what the pool already holds. The limit of a shared budget counts for all of its processes, which give
        memory back soon after this returns.

        Raises:
            BudgetError: it is not a size, or below one page, or larger than the device, or less than what is reserved.
            OutOfPagesError: live tokens and reservations take more. The limit is as before, and no sequence has lost a
                token.
            DriverError: a driver call failed. The limit is set; the rest can be trimmed.
        """
        self.check_usable()
        if self.lender:
            limit = pages_within(self.driver, max_bytes, held=self.limit_pages)
            self.lender.ledger.set_limit(limit * self.page_size)
            return
        held = (self.word("created") + self.word("leased")) * self.page_size
        limit = pages_within(self.driver, max_bytes, held=held)
        reserved = int(self.accounts["reserved"].sum())
        if limit < reserved:
            raise BudgetError(
                f"asked for a limit of {limit} pages of {self.page_size >> 10:,} KiB; {reserved} are reserved. Close a "
                "cache, or keep a higher limit"
            )
        self.limit_to(limit)

    def trim(self, keep: float | str = 0) -> int:
        """Gives unused memory back to the system, until the pool has `keep` bytes left, or only memory in use; returns
        the number of bytes given back. `keep` takes the same forms as `max_bytes`; shares refer to the pool's limit.

        Waits for GPU work that still uses it.

        Raises:
            BudgetError: `keep` is no size, or more than the pool's limit.
            DriverError: a page could not be released; what went before it is gone, and the rest can be trimmed again.
        """
        self.check_usable()
        kept = pages_within(self, keep, least=0, name="keep")
        return self.release(self.word("created") - max(kept - self.word("leased"), 0)) * self.page_size

    def stats(self) -> FramePoolStats:
        """A snapshot: bytes, pages, sequences, driver calls, and what each account has."""
        self.check_usable()
        self.take_leased(0)  # of memory pools that are gone
        self.close_again()
        size, accounts = self.page_size, tuple(self._accounts())
        mapper, taken = self.mapper, sum(lessee.mapped_pages() for lessee in self.leases)
        return FramePoolStats(
            limit_bytes=self.limit_pages * size,
            physical_bytes=(self.word("created") + taken) * size,
            free_bytes=self.free_pages() * size,
            leased_bytes=self.word("leased") * size,
            reserved_bytes=int(self.accounts["reserved"].sum()) * size,
            holders=int(self.accounts["open"].sum()),
            used_bytes=(self.word("used") - self.word("leased") + taken) * size,
            sequences=sum(account.sequences for account in accounts),
            tokens=sum(account.tokens for account in accounts),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            **self.counts(),
            mapper_error=mapper.error if mapper else None,
            accounts=accounts,
        )

    def counts(self) -> dict[str, Any]:
        """What `FramePoolStats` and `CacheStats` say of the pool alike: pages since the beginning, and driver calls."""
        return {
            "pages_created": self.word("made"),
            "pages_mapped": {"ahead": self.word("mapped_ahead"), "in need": self.word("mapped_in_need")},
            "driver_calls": self.meter.stats(),
            "mapper_calls": self.ahead_meter.stats(),
        }

    def _accounts(self) -> list[AccountStats]:
        """What each holder has, the oldest first."""
        found = []
        for name, holder in sorted(self.holders.copy().items(), key=lambda item: item[1].account):
            words = dict(zip(ACCOUNT.names or (), self.accounts[holder.account].tolist()))
            state = holder.state[0] if isinstance(holder, Cache) else None
            limit = min(words["limit"], self.limit_pages) if words["limit"] < NO_LIMIT_PAGES else self.limit_pages
            found.append(
                AccountStats(
                    name=name,
                    limit_bytes=limit * self.page_size,
                    reserved_bytes=words["reserved"] * self.page_size,
                    mapped_bytes=holder.mapped_pages() * self.page_size,
                    used_bytes=words["used"] * self.page_size,
                    sequences=0 if state is None else int(state["live"]),
                    tokens=0 if state is None else int(state["tokens"]),
                )
            )
        return found

    def close(self) -> None:
        """Gives all memory back now. Close the caches and tensors on the pool first. In a forked child this does
        nothing.

        Raises:
            BudgetError: a cache, tensor or memory pool still lies on the pool.
        """
        if not self.is_open or self.word("dead"):
            return
        self.take_leased(0)
        self.close_again()
        if self.accounts["open"].any():
            raise BudgetError(
                f"{int(self.accounts['open'].sum())} caches, growable tensors or memory pools (with what torch has "
                f"made there) lie on this pool: {', '.join(sorted(self.holders))}. Close them first"
            )
        self.end()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a FramePool owns its memory and cannot be copied or pickled; make another one")

    def __repr__(self) -> str:
        mib = self.page_size / 2**20
        return (
            f"<vmmkv.FramePool on {self.device}: {self.word('created') * mib:.0f} of {self.limit_pages * mib:.0f} MiB, "
            f"{int(self.accounts['open'].sum())} accounts>"
        )


def check_pool_alone(pool: object, **others: object) -> None:
    """Raises `ArgumentError` for what is no pool, or a pool that a cache has made for itself; and `ValueError` for an
    argument that the pool determines."""
    if pool is None:
        return
    if not isinstance(pool, FramePool):
        raise ArgumentError(f"got pool={pool!r}; it must be a vmmkv.FramePool")
    if not pool.is_shared:
        raise ArgumentError(
            f"got pool={pool!r}, which a cache, or a growable tensor, has made for itself, and which ends with it; "
            "make a vmmkv.FramePool, and give it to both"
        )
    pool.check_usable()
    if any(other is not None for other in others.values()):
        raise ValueError(f"give a pool, or {', '.join(others)}; a pool has its own")


def pool_stats() -> dict[FramePool, FramePoolStats]:
    """A snapshot of each pool of this process that is in use, the first one made coming first."""
    stats = {}
    for reference in _pools.valuerefs():
        with suppress(VmmkvError):
            if (pool := reference()) is not None:
                stats[pool] = pool.stats()
    return stats


_numbers = itertools.count()
_pools: weakref.WeakValueDictionary[int, FramePool] = weakref.WeakValueDictionary()
