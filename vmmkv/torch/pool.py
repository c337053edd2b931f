"""A memory pool: what torch allocates in a `with` block lies on pages of ours, within a budget of its own or a share of
a frame pool."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..budget import pages_within
from ..driver.driver import open_driver
from ..errors import DeviceError
from ..pool import FramePool, check_pool_alone, pool_stats

if TYPE_CHECKING:
    from .allocator import Allocator, Lease


def memory_pool(
    max_bytes: float | str = "80%",
    device: str | torch.device | None = None,
    *,
    pool: FramePool | None = None,
    reserved: float | str = 0,
) -> MemoryPool:
    """Makes a memory pool for a CUDA device.

        with vmmkv.torch.memory_pool(max_bytes="8GiB") as pool:
            model = Model().cuda()
        print(pool.stats())

    Args:
        max_bytes: the budget: bytes, `"8GiB"`, or a share of the memory that is free now, `"80%"` or `0.8`. With a
            `pool`, the most that it may have of that, and shares are of the pool.
        device: `"cuda:1"`; `"cuda"` is torch's current device, and so is None where there is no `pool`.
        pool: physical memory shared with caches and others. Without one it has a budget of its own, beside those of
            caches; together they should fit the device.
        reserved: bytes of the pool, as in `max_bytes`, that it can have at any time. Only with a `pool`.

    Raises:
        DeviceError: it is no CUDA device, or there is none.
        BudgetError: the budget is no size, below one page, or larger than the device; or the pool cannot reserve that
            much.
        ArgumentError, ValueError: the pool is no `FramePool`; or an argument conflicts with another.
    """
    check_pool_alone(pool, device=device)
    if pool is None and reserved:
        raise ValueError(f"asked for reserved={reserved!r} without a pool; it is a share of one: give pool=")
    target = pool.device if pool is not None else "cuda" if device is None else device
    if not str(target).startswith("cuda") or not torch.cuda.is_available():
        raise DeviceError(
            f"asked for a memory pool on {target}; torch has memory pools on CUDA devices only, and sees "
            f"{torch.cuda.device_count()} of them. KVCache and GrowableTensor run on host memory, too"
        )
    from .allocator import Allocator, Lease  # loads machine code

    if pool is None:
        driver = open_driver(target)
        return MemoryPool(driver.device, Allocator(driver, pages_within(driver, max_bytes)))
    limit = pages_within(pool, max_bytes)
    promised = pages_within(pool, reserved, name="reserved") if reserved else 0
    allocator = Allocator(pool.driver, 0)
    return MemoryPool(pool.device, allocator, Lease(pool, allocator, limit, promised))


@dataclass(frozen=True)
class MemoryPoolStats:
    """A snapshot of a `MemoryPool`.

    Attributes:
        budget_bytes: the most that it may take.
        leased_bytes: the most that it may take now: what it has leased of a frame pool, or the budget.
        physical_bytes: what it takes now: segments with tensors, and those that torch caches.
        segments: pieces that torch has allocated and not given back.
    """

    budget_bytes: int
    leased_bytes: int
    physical_bytes: int
    segments: int


class MemoryPool:
    """A `torch.cuda.MemPool` on vmmkv's pages; made by `memory_pool`.

    In a `with` block, which may be entered repeatedly but by one thread at a time (`RuntimeError` otherwise), every
    tensor that this thread allocates on the pool's device lies on pages like those of a `KVCache`, and counts against
    the pool's budget. Other threads, such as autograd's, allocate as usual.

    torch allocates under a lock under which no Python may run, so it cannot ask a `FramePool` for each page. Instead it
    has a *lease*: on entering a block as much as `max_bytes` allows of what others do not use; on leaving it, what
    torch has allocated of that. While the block runs, others can have what torch has not allocated, except what is
    `reserved`.

    torch's caching allocator works on top: segments whose tensors are gone are kept for later tensors of the pool. They
    go back to the system with `release`, or when nothing holds the pool any more. A tensor may outlive both: its
    segment goes back at the first `torch.cuda.empty_cache()` after its end.

    If the budget, or the device, does not allow a segment, torch raises `torch.OutOfMemoryError`; when that leaves the
    block, it carries a note of what the pool had. Only the pool's own device can access its pages: there is no peer
    access from others, and no CUDA IPC (`torch.multiprocessing`)."""

    def __init__(self, device: torch.device, allocator: Allocator, lease: Lease | None = None) -> None:
        self.device = device
        self._books = allocator.state
        self._lease = lease
        self._torch_allocator: Any = torch._C._cuda_customAllocator(allocator.allocate, allocator.deallocate)
        self._mem_pools: list[torch.cuda.MemPool] = []
        self._busy = threading.Lock()
        self._block = ExitStack()
        weakref.finalize(self, _end, self._mem_pools, lease).atexit = False
        if lease:
            lease.pool.name(self)
        pools.add(self)

    def __enter__(self) -> MemoryPool:
        global _blocks
        self._begin_use()
        try:
            if self._lease:
                self._lease.grow()
            with _lock:
                _blocks += 1
                self._block.callback(_leave_block)
            with torch.cuda.device(self.device):
                if not self._mem_pools:
                    self._mem_pools.append(torch.cuda.MemPool(self._torch_allocator))
            self._books["refused"] = 0
            self._block.enter_context(torch.cuda.use_mem_pool(self._mem_pools[0], self.device))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError) and self._books["refused"]:
            error.add_note(self._refusal())
        self._leave()

    def _leave(self) -> None:
        """Ends a block, or what has begun of one."""
        try:
            self._block.close()
        finally:
            self._end_use()

    def release(self) -> int:
        """Gives segments without tensors back to the system, after all work on the device; returns their bytes. The
        pool can be used again. While any pool is in a `with` block, or a CUDA graph is captured, torch can give nothing
        back, and this returns 0. Raises `RuntimeError` in a `with` block of this pool."""
        self._begin_use()
        try:
            before = int(self._books["physical"])
            with _lock:
                if _can_end():
                    self._mem_pools.clear()
            return before - int(self._books["physical"])
        finally:
            self._end_use()

    def stats(self) -> MemoryPoolStats:
        """A snapshot: bytes and segments."""
        leased, physical, segments = (int(self._books[name]) for name in ("budget", "physical", "segments"))
        budget = self._lease.limit * self._lease.pool.page_size if self._lease else leased
        return MemoryPoolStats(budget, leased, physical, segments)

    @property
    def account(self) -> int:
        """The number of its account on a frame pool; -1 without one."""
        return self._lease.account if self._lease else -1

    def mapped_pages(self) -> int:
        """Pages that segments of torch lie on."""
        return int(self._books["physical"]) // int(self._books["page_size"])

    def _begin_use(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"{self!r} is in a with block; make one pool per thread, and release it after the block")

    def _end_use(self) -> None:
        try:
            if self._lease:
                self._lease.shrink()
        finally:
            self._busy.release()

    def _refusal(self) -> str:
        stats, mib = self.stats(), 2**20
        asked = f"vmmkv: torch asked this memory pool for a segment of {self._books['refused'] / mib:.0f} MiB; "
        if self._books["status"]:
            import cuda.bindings.driver as cu

            return asked + f"the driver said {cu.CUresult(int(self._books['status'])).name}"
        whose = f"what could be leased of {self._lease.pool!r}" if self._lease else "its budget"
        return (
            f"{asked}{stats.physical_bytes / mib:.0f} of its {stats.leased_bytes / mib:.0f} MiB are taken: {whose}. "
            "torch keeps segments whose tensors are gone: leave the block and call release(), or make the pool with a "
            "larger max_bytes"
        )

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<vmmkv.torch.MemoryPool on {self.device}: "
            f"{stats.physical_bytes / 2**20:.0f} of {stats.budget_bytes / 2**20:.0f} MiB>"
        )


pools: weakref.WeakSet[MemoryPool] = weakref.WeakSet()
"""All of this process."""

# A torch.cuda.MemPool that ends while any other is in use aborts the process: its destructor asserts that nothing
# allocates to a pool. So those of lost pools wait here until no pool is in use.
_lock = threading.RLock()
_blocks = 0
_ended: list[torch.cuda.MemPool] = []


def _can_end() -> bool:
    return not _blocks and not torch.cuda.is_current_stream_capturing()


def _end(mem_pools: list[torch.cuda.MemPool], lease: Lease | None = None) -> None:
    """Ends these, and those that wait, now or when that is possible; takes the last reference to them."""
    with _lock:
        _ended.extend(mem_pools)
        mem_pools.clear()
        if _can_end():
            _ended.clear()
    if lease:
        lease.end()


def _leave_block() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        _end([])


def memory_allocated(device: str | torch.device | None = None) -> int:
    """Bytes of the pages of all caches, growable tensors, frame pools and memory pools of this process. torch also
    counts those of memory pools (in `torch.cuda.memory_reserved`), but not those of caches and growable tensors.

    Args:
        device: counts only what is there: `"cuda"` (torch's current device; torch's own error, where there is none),
            `"cuda:1"`, `"cpu"`; None counts all.
    """
    where = None if device is None else torch.device(device)
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    found = [stats.physical_bytes for pool, stats in pool_stats().items() if where in (None, pool.device)]
    alone = [pool for pool in pools if pool.account < 0 and where in (None, pool.device)]  # they lie on no frame pool
    return sum(found) + sum(pool.stats().physical_bytes for pool in alone)
