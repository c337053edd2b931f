"""A pool: physical memory of a device, and `change`, which plans, runs and commits."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from sys import is_finalizing
from typing import Any

import numpy as np

from ..compiled.code import keep
from ..driver.driver import STEPS, Driver, Meter, fork_error
from ..driver.fence import Fence, wait_for_device
from ..driver.table import CREATE, SCRATCH
from ..errors import (
    BudgetError, BusyError, DeviceLostError, DriverError, DriverOutOfMemoryError, OutOfPagesError, UseAfterFreeError,
    VmmkvError,
)  # fmt: skip
from . import codes, entries
from .tables import ACCOUNT, ASK, FRAME, IN, OUT, POOL, STAGE, STEP, UNSTAGE

LARGE = 16
"""Pages of a large frame."""
SLOTS = 256
"""Caches and accounts that a pool may have at a time."""
STACKS = "small", "larges", "unmade", "gained", "gained_large"
"""Tables of frames by what they are free for."""
TRIMMED = 1024
"""Pages that one change of `trim` gives back."""
WORDS = len(ASK.names or ())
ASKED, AVAILABLE, SLOTS_AT, TICK, ROW_AT, FRESH, FRUGAL, CURRENT = range(SCRATCH, SCRATCH + 8)
"""Places in an `Ask`."""
NAMES = dict(enumerate(STEPS)) | {STAGE: "map", UNSTAGE: "unmap", OUT: "unmap", IN: "map"}
"""By kind of a step: the function of the driver's table."""
NORESERVE, CHUNK = 0x4000, 1 << 36
_chunk: list[Any] = [b"", 0]
"""The mapping that tables are cut from, and how much of it is used."""
_cutting = threading.Lock()
NO_LIMIT_PAGES = 1 << 40
"""The limit, in pages, of an account that may have all of its pool."""
ZEROS = array("q", bytes(8 * WORDS))


class Ask:
    """Numbers to and from a compiled call: see `vmmkv.core.tables.ASK`."""

    __slots__ = "address", "words"

    def __init__(self) -> None:
        self.words = ZEROS[:]
        self.address = self.words.buffer_info()[0]


class Pool:
    """Physical memory of one device, for several caches.

    Args:
        driver: the memory system.
        pages: the budget.
        poison: whether memory is filled with NaN where its tokens are gone, for debugging: see
            `vmmkv.core.starting.poison`.
    """

    def __init__(self, driver: Driver, pages: int, *, poison: bool = False) -> None:
        self.driver, self.meter, self.ahead_meter = driver, Meter(), Meter()
        self.evict: list[Callable[[int], int]] = []
        """Functions of guests: each is called with a number of pages, drops frames, and returns how many pages it
        gave."""
        self.leases: list[Any] = []
        """Users that create pages themselves, such as `vmmkv.torch.allocator.Lease`."""
        self.lender: Any = None
        """What the budget is borrowed from, if processes share it: a `vmmkv.lending.Lender`."""
        self.lock: Any = threading.RLock()
        """The planning lock, held from the plan of a change to its commit."""
        self.copying: Any = threading.RLock()
        """Held while a copy is in the staging range; taken before `lock`."""
        self.mapper: Any = None
        """The mapper of the pool, if it has one; an object with a method `ring`."""
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """Caches that were opened on the pool, also closed ones."""
        self.unclosed: deque[Any] = deque()
        """Caches that nothing else holds, and that could not be closed: see `close_later`."""
        self.most = max(driver.memory_info()[1] // driver.page_size, pages)
        """The largest budget, in pages. Tables have room for twice as many frames: a change replaces some by others."""
        capacity = 2 * self.most + 64
        self.frames, self.accounts = zeros(capacity, FRAME), zeros(SLOTS, ACCOUNT)
        self.steps = journal(6 * capacity)
        self.caches = zeros(SLOTS, np.dtype(np.int64))
        self.stacks = {name: zeros(capacity, np.dtype(np.int64)) for name in STACKS}
        self.staging = driver.reserve(LARGE * driver.page_size)
        self.state = record(
            POOL, driver=driver.address, page_size=driver.page_size, large=LARGE, capacity=capacity, budget=pages,
            frames_at=at(self.frames), accounts_at=at(self.accounts), accounts=SLOTS, caches_at=at(self.caches),
            caches=SLOTS, steps_at=at(self.steps), max_steps=len(self.steps), serial=codes.RING,
            run_scratch=at(zeros(SCRATCH, np.dtype(np.int64))), spent=self.meter.spent.ctypes.data,
            spent_ahead=self.ahead_meter.spent.ctypes.data, staging=self.staging, asleep=1,
            poison=0xFF if poison else 0, **{f"{name}_at": at(each) for name, each in self.stacks.items()},
        )  # fmt: skip
        self.address = self.state.ctypes.data
        keep(self.meter.spent, self.ahead_meter.spent)
        self.current_handle = driver.current_handle
        self.is_open = True
        _pools.add(self)
        for pool in list(_with_unclosed):
            pool.close_again()

    # ------------------------------------------------------------------ changes

    def change(self, ask: Ask, plan: Callable[..., int], *arguments: int) -> int:
        """Plans a change, makes its driver calls, and books them. Where the plan says so, asks guests for pages, waits
        for the device, and plans again.

        Returns `DONE`, or a code that the plan has for its caller.
        """
        lock, error, refusal, may_evict = self.lock, None, None, True
        if lock._is_owned() or is_finalizing():
            raise busy()
        if self.unclosed:
            self.close_again()
        ask.words[CURRENT] = self.current_handle()
        while True:
            with lock:
                if not self.is_open:
                    raise UseAfterFreeError("this pool was closed; make a new one")
                ask.words[ASKED] = 0
                code = plan(*arguments, ask.address)
                if code > codes.RING:
                    entries.run(self.address, code, 0)
                    code = entries.commit(self.address, code, ask.address)
                    if code == codes.FAILED:
                        error = self.failure(ask)
            if code == codes.NO_PAGES and (self.sweep() or self.gain_budget_for(ask)):
                continue
            if code != codes.WAIT and code != codes.SHORT and code != codes.FAILED:
                break
            if code == codes.WAIT and may_evict:
                may_evict = False  # once: what guests drop may be in use by the device, too
                if self.ask_guests(ask.words[ASKED]):
                    continue
            refusal = error or refusal
            try:
                self._help(code, ask, error)
            except OutOfPagesError as lack:
                if not refusal:
                    raise
                words = f"{lack} The device has no memory for new pages: {refusal}"
                raise OutOfPagesError(words, requested=lack.requested, available=lack.available) from refusal
            error = None
        if code in (codes.NO_PAGES, codes.CAPTURED, codes.FULL, codes.DEAD):
            raise self.error(code, ask)
        if code == codes.RING:
            self.ring()
        return codes.DONE if code == codes.RING else code

    def close_later(self, unclosed: Any) -> None:
        """Keeps a cache that nothing holds any more, and that could not be closed, and the pool. The pool
        closes it at its next change, or when its statistics are read, or when the process makes another pool."""
        self.unclosed.append(unclosed)
        _with_unclosed.add(self)

    def close_again(self) -> None:
        """Closes caches that could not be closed when they were collected."""
        left = [*self.unclosed]
        self.unclosed.clear()
        for each in left:
            each.end()
        if not self.unclosed:
            _with_unclosed.discard(self)

    def sweep(self) -> bool:
        """Ends sequences of all caches that were collected. Returns whether it has ended any."""
        caches = [*self.members]
        before = sum(len(cache.dead) for cache in caches)
        for cache in caches:
            cache.sweep()
        return sum(len(cache.dead) for cache in caches) < before

    def _help(self, code: int, ask: Ask, error: DriverError | None) -> None:
        """Waits, or asks guests, as a plan needs before it is made again. Raises where nothing helps."""
        if code == codes.WAIT:
            Fence(self.driver, ask.words[SLOTS_AT], ask.words[TICK]).wait()
        elif code == codes.SHORT:
            missing = ask.words[ASKED]
            if self.change(Ask(), entries.plan_retired, self.address, missing) != codes.GONE:
                return
            if not self.ask_guests(missing):
                raise self.out_of_pages(missing, 0)
        elif ask.words[FRUGAL] or not isinstance(error, DriverOutOfMemoryError):
            raise error or self.driver.error("record", int(ask.words[0]))
        elif not self._ask_neighbours(ask.words[ASKED]):
            ask.words[FRUGAL] = 1  # the driver has no memory for new frames: take surplus

    def ask_guests(self, pages: int) -> int:
        """Has guests drop frames until so many pages are free or can be reclaimed. Returns the number of pages."""
        gained = 0
        for evict in self.evict:
            gained += evict(pages - gained) if gained < pages else 0
        return gained

    def _ask_neighbours(self, pages: int) -> int:
        """Has torch, and other pools of the same memory, give up to so many pages back to the driver that hold nothing.
        Returns how many they gave."""
        mine = self.driver
        given = mine.empty_torch_cache() // mine.page_size
        for other in list(_pools):
            theirs = other.driver
            is_same = theirs.device == mine.device and theirs.table["create"] == mine.table["create"]
            if other is not self and is_same and given < pages:
                with suppress(VmmkvError):  # it is in the middle of a change of this thread, or dead
                    given += other.trim_to(other.word("created") - (pages - given))
        return given

    def failure(self, ask: Ask) -> DriverError:
        """The error that ended the last journal. The pages that were not created go to `ask`."""
        state = self.state[0]
        done, status = int(state["done"]), int(state["status"])
        step, left = self.steps[done], self.steps[done : int(state["calls"])]
        ask.words[ASKED] = int(left["nbytes"][left["kind"] == CREATE].sum()) // self.driver.page_size
        detail = f"{step['nbytes']} bytes on {self.driver.device}" if step["kind"] == CREATE else ""
        return self.driver.error(NAMES[int(step["kind"])], status, detail)  # type: ignore[return-value]

    def error(self, code: int, ask: Ask) -> Exception:
        """The exception for a code of a compiled call."""
        if code == codes.NO_PAGES:
            return self.out_of_pages(ask.words[ASKED], ask.words[AVAILABLE])
        if code == codes.CAPTURED:
            return self.driver.captured("record", self.driver.current_stream())
        if code == codes.DEAD:
            return fork_error()
        if code == codes.FULL:
            return DriverError("record", "FULL", "more streams than 62 are named by live sequences")
        return self.driver.error("record", ask.words[0])

    def out_of_pages(self, asked: int, available: int, what: str = "") -> OutOfPagesError:
        """The error for missing pages."""
        page, limit = self.driver.page_size >> 10, self.word("budget")
        return OutOfPagesError(
            f"asked for {what}{asked} pages of {page:,} KiB; {available} are available, of a limit of {limit}. Free or "
            "truncate sequences, or raise the limit",
            requested=asked,
            available=available,
        )

    # ------------------------------------------------------------------ budget

    def word(self, name: str) -> int:
        """A word of the books."""
        return int(self.state[0][name])

    def limit_to(self, pages: int, account: int = -1, reserved: int = 0) -> None:
        """Sets the budget in pages, or the limit and the reservation of an account. Releases pages above the budget."""
        ask = Ask()
        if (account < 0 and pages > self.most) or not 0 <= reserved <= pages:
            raise BudgetError(
                f"asked for a limit of {pages} pages, {reserved} of them reserved; the device has {self.most}"
            )
        while self.change(ask, entries.plan_limit, self.address, account, pages, reserved) == codes.NO_LIMIT:
            budget = pages if account < 0 else self.word("budget") - reserved
            missing = self.word("committed") - budget
            if not (self.take_leased(missing) if account < 0 else self.gain_budget(missing)):
                raise self.out_of_pages(pages, ask.words[AVAILABLE], "a limit of ")
        if account < 0:
            self.release(self.word("created") - max(pages - self.word("leased"), 0))

    def trim_to(self, keep_pages: int = 0) -> int:
        """Gives free, surplus and held pages back to the driver until `keep_pages` exist; returns how many."""
        before, last, keep_pages = self.word("created"), -1, min(max(keep_pages, 0), self.most)
        while self.word("created") != last:
            last = self.word("created")
            self.change(Ask(), entries.plan_trim, self.address, keep_pages, TRIMMED)
            if last == self.word("created") > keep_pages:
                wanted = last - keep_pages
                retired = self.change(Ask(), entries.plan_retired, self.address, wanted)
                last = -1 if retired != codes.GONE or self.ask_guests(wanted) else last
        return before - last

    def free_pages(self) -> int:
        """Pages that exist and are mapped nowhere, nor held."""
        return self.word("small") + self.word("larges") * LARGE

    def release(self, pages: int) -> int:
        """Gives up to so many pages that no sequence uses back to the driver; returns how many."""
        before, pages = self.word("created"), max(pages, 0)
        self.trim_to(before - pages)
        self.ask_guests(pages - before + self.word("created"))
        self.trim_to(before - pages)
        return before - self.word("created")

    def take_leased(self, pages: int) -> int:
        """Takes back up to so many leased pages that do not exist, but none that are reserved; and all of lessees that
        have ended. Returns how many."""
        given = 0
        for lease in self.leases.copy():
            given += lease.give(max(pages - given, 0))
        return given

    def gain_budget(self, pages: int) -> int:
        """Takes back leased pages that do not exist, and borrows budget for the rest. Returns how many pages."""
        given = self.take_leased(pages)
        return given + (self.lender.borrow(pages - given) if self.lender and given < pages else 0)

    def gain_budget_for(self, ask: Ask) -> bool:
        """Gains budget for a plan that was refused for want of pages. Returns whether there was any."""
        missing = ask.words[ASKED] - self.word("budget") + self.word("committed")
        return missing > 0 and self.gain_budget(missing) > 0

    def unstage(self) -> None:
        """Drops a copy that was left in the staging range."""
        if self.word("staged"):
            wait_for_device(self.driver)
            self.change(Ask(), entries.plan_unstage, self.address)

    def __del__(self, ends: Callable[[], bool] = is_finalizing) -> None:
        """Gives all memory back of a pool that nothing holds any more, and so no cache."""
        if ends() or "is_open" not in vars(self):  # memory goes with the process; or the pool was not made whole
            return
        with suppress(VmmkvError):
            self.end()

    def end(self) -> None:
        """Gives all memory back of a pool on which nothing lies. A second call does nothing."""
        if not self.is_open:
            return
        if self.mapper is not None:
            self.mapper.stop()
        with suppress(DeviceLostError):  # its memory is lost, too
            self.unstage()
            self.trim_to()
            self.driver.free(self.staging, LARGE * self.driver.page_size)
        if self.lender is not None:
            self.lender.end()
        with self.lock:
            self.is_open = False
        _pools.discard(self)
        _journals.setdefault(len(self.steps), []).append(self.steps)

    def open_account(self, limit: int, reserved: int = 0) -> int:
        """Opens an account; returns its number. Raises `BudgetError`."""
        return self.opened(entries.open_account, self.address, limit, reserved)

    def opened(self, entry: Callable[..., int], address: int, limit: int, reserved: int) -> int:
        """What an entry that opens an account returns. Raises `BudgetError`."""
        if not 0 <= reserved <= limit <= NO_LIMIT_PAGES:
            raise BudgetError(f"asked to reserve {reserved} of at most {limit} pages")
        ask = Ask()
        while (code := entry(address, limit, reserved, ask.address)) == codes.NO_LIMIT:
            left = ask.words[AVAILABLE]
            if not self.gain_budget(reserved - left):
                raise BudgetError(f"asked to reserve {reserved} pages; {left} are neither used nor reserved by others")
        if code == codes.FULL:
            raise BudgetError(f"a pool has at most {SLOTS} caches and {SLOTS} accounts at a time; close some")
        return code

    def keep_stream(self, ask: Ask, stream: Any = None) -> None:
        """Keeps the object of a stream, None for the current one, that a compiled call has named for the first time."""
        if ask.words[FRESH]:
            self.driver.slot_streams[ask.words[FRESH] - 1] = self.driver.current_stream() if stream is None else stream

    def ring(self) -> None:
        """Wakes the mapper, if there is one."""
        if self.mapper is not None:
            self.mapper.ring()


def zeros(count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of zeros for the life of the process, which takes memory where it is written to. Arrays are cut from few
    mappings: Linux limits the mappings of a process."""
    nbytes = -(-max(count * dtype.itemsize, 1) // 64) * 64
    with _cutting:
        if _chunk[1] + nbytes > len(_chunk[0]):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
            _chunk[:] = [mmap.mmap(-1, max(nbytes, CHUNK), flags=flags), 0]
        array_of = np.frombuffer(_chunk[0], dtype, count, _chunk[1])
        _chunk[1] += nbytes
    keep(array_of)
    return array_of


def journal(steps: int) -> np.ndarray[Any, np.dtype[Any]]:
    """A table of steps: one that a pool has left, or a new one. It is most of the addresses that a pool takes."""
    left = _journals.get(steps)
    try:
        return left.pop() if left else zeros(steps, STEP)
    except IndexError:  # another thread has taken it
        return zeros(steps, STEP)


def at(array_of: np.ndarray[Any, Any]) -> int:
    """The address of an array."""
    return int(array_of.__array_interface__["data"][0])


def record(dtype: np.dtype[Any], **words: int) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of one record."""
    found = zeros(1, dtype)
    for name, value in words.items():
        found[name] = value
    return found


def busy() -> BusyError:
    """The error for a finalizer or a signal handler within a change of its own thread."""
    return BusyError("called in the middle of another call of the same thread, by a finalizer or a signal handler")


class DeadLock:
    """Stands for a lock in a forked child: refuses what would need it."""

    def _is_owned(self) -> bool:
        raise fork_error()

    def __enter__(self) -> None:
        raise fork_error()

    def __exit__(self, *_: object) -> None:
        """Is not called."""


def _leave_to_parent() -> None:
    """Marks all pools dead in a forked child. Threads of the parent, which are not there, may hold their locks."""
    for pool in list(_pools):
        pool.state["dead"] = 1
        for cache in pool.members:
            cache.state["num_rows"] = 0  # so that no sequence grows in what is mapped
        pool.lock = pool.copying = DeadLock()
        if pool.mapper is not None:
            pool.mapper.leave()
            pool.mapper = None
    _with_unclosed.clear()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_journals: dict[int, list[np.ndarray[Any, np.dtype[Any]]]] = {}
"""By length: tables of steps that pools have left."""
_with_unclosed: set[Pool] = set()
"""Pools with caches that could not be closed. Nothing else may hold them."""
os.register_at_fork(after_in_child=_leave_to_parent)
