"""A memory pool's lease of a frame pool: its pages count there, nobody else has them, and promises are kept."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
import torch
from c_driver import CDriver, Functions
from conftest import on_driver, run_python, small_driver
from faulty import FaultyDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import Interruption, interrupt, interrupted
from test_torch import filled, mapped

import vmmkv
from vmmkv.errors import BudgetError, DriverError, OutOfPagesError, OutOfRowsError
from vmmkv.space.mapper import Mapper
from vmmkv.torch import GrowableTensor, memory_allocated, memory_pool, memory_stats
from vmmkv.torch.lease import Lease
from vmmkv.torch.pool import MemoryPool

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
PAGE = 4096
MIB = 1 << 20


@pytest.fixture(scope="module")
def compiled() -> tuple[CDriver, Functions]:
    c_driver = CDriver()
    return c_driver, Functions(c_driver, 0)


class Device:
    """A frame pool on host memory, and an allocator whose pages come from there, too.

    Args:
        compiled: what makes them; of one test at a time.
        pages: the pool's limit.
    """

    def __init__(self, compiled: tuple[CDriver, Functions], pages: int) -> None:
        self.c_driver, self.functions = compiled
        self.driver = self.c_driver.driver = FaultyDriver(small_driver("cpu"))
        self.driver.unmaps_anything = True
        self.c_driver.fail_at, self.c_driver.misuse = -1, []
        self.c_driver.handles, self.c_driver.released = {}, set()
        for name in ("budget", "physical", "segments"):
            self.functions.books[name] = 0
        self.pool = on_driver(self.driver, vmmkv.FramePool, pages * PAGE)
        self.segments: dict[int, int] = {}

    def lease(self, limit: int, guaranteed: int = 0) -> Lease:
        lease = Lease(self.pool, self.functions.allocator, limit, guaranteed)
        lease.open()
        return lease

    def allocate(self, pages: int) -> bool:
        """Whether there was a segment to have."""
        self.driver.heal()
        address = self.functions.allocate(pages * PAGE)
        if address:
            ctypes.memset(address, 1, pages * PAGE)
            self.segments[address] = pages * PAGE
        return bool(address)

    def deallocate(self) -> None:
        self.driver.heal()
        self.c_driver.fail_at, self.c_driver.failed = -1, None
        self.functions.deallocate(*self.segments.popitem())

    def check(self) -> None:
        """What accounts say is what there is, and no more than is allowed."""
        stats, pool = self.pool.stats(), self.pool
        assert not self.c_driver.misuse
        assert stats.physical_bytes == self.driver.num_pages * PAGE <= stats.limit_bytes
        assert stats.leased_bytes + pool.frames.existing * PAGE <= stats.limit_bytes
        taken = sum(account.taken for account in pool.accounts)
        assert stats.physical_bytes - stats.free_bytes <= taken * PAGE
        assert taken == stats.leased_bytes // PAGE + pool.frames.taken
        assert pool.accounts.physical == pool.frames.existing + self.functions.allocator.physical
        assert pool.accounts.leased == self.functions.allocator.budget

    def end(self, lease: Lease) -> None:
        """Everything goes back, and nothing of the lease is left."""
        self.c_driver.fail_at = -1
        while self.segments:
            self.deallocate()
        lease.end()
        assert self.pool.stats().holders == 0
        self.pool.close()
        assert not self.driver.handles


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_any_use_of_a_pool_with_a_lease(compiled, seed: int, faults: bool) -> None:
    """A cache, a tensor and a memory pool, blocks that begin and end, a limit that moves and calls that fail: nobody's
    bytes change, the books are what the driver has, and what is guaranteed can be had."""
    chance = random.Random(seed)
    device = Device(compiled, 70)
    pool, driver = device.pool, device.driver
    guaranteed = chance.choice([0, 5, 10])
    lease = device.lease(chance.choice([12, 70]), guaranteed)
    cache = vmmkv.KVCache(
        LAYOUT, 4, 320, pool=pool, guaranteed=chance.choice([0, 6]) * PAGE, lookahead=chance.choice([0, 30])
    )
    if isinstance(pool.mapper, Mapper):
        pool.mapper.ring = lambda: None  # it works when it is told to
    tensor = GrowableTensor((20, PAGE), torch.uint8, max_bytes=20 * PAGE, pool=pool)
    live: list[tuple[vmmkv.Sequence, float]] = []
    inside = False
    for _ in range(30):
        if faults and chance.random() < 0.2:
            driver.fail(chance.choice(["create", "map", "set_access"]), chance.randrange(5), chance.random() < 0.5)
        device.c_driver.fail_at = chance.choice([-1, -1, 0, 1, 2]) if faults else -1
        with suppress(OutOfPagesError, OutOfRowsError, DriverError, BudgetError):
            what = chance.randrange(12)
            if what < 2:
                live.append((cache.sequence(chance.choice([0, 20, 60, 300])), chance.random()))
            elif what == 2 and live:
                live.pop(chance.randrange(len(live)))[0].free()
            elif what == 3 and live:
                chance.choice(live)[0].truncate(0)
            elif what == 4:
                tensor.resize(chance.randint(0, 20))
            elif what == 5:
                pool.set_limit(chance.randint(1, 90) * PAGE)
            elif what == 6:
                pool.trim(keep=chance.randint(0, 40) * PAGE)
            elif what == 7:
                lease.grow()
                inside = True
            elif what == 8:
                lease.shrink()
                inside = False
                assert not device.allocate(1)
            elif what == 9 and device.segments:
                device.deallocate()
            elif inside:
                device.allocate(chance.randint(1, 9))
        device.c_driver.failed, device.c_driver.fail_at = None, -1
        driver.heal()
        while isinstance(pool.mapper, Mapper) and pool.mapper.work():
            pass
        device.check()
        cache.check()
        for sequence, value in live:
            sequence.k(0).fill_(value)
        tensor.tensor.fill_(7)
        for sequence, value in live:
            assert (sequence.k(0) == value).all()
        assert all(ctypes.string_at(at, size) == b"\1" * size for at, size in device.segments.items())
        assert lease.kept_pages == sum(device.segments.values()) // PAGE
    lease.grow()
    missing = guaranteed - lease.kept_pages
    assert missing <= 0 or device.allocate(missing)
    cache.free(sequence for sequence, _ in live)
    cache.close()
    tensor.close()
    device.end(lease)


def pages_of(cache: vmmkv.KVCache) -> int:
    return cache.stats().pages["used"]


def test_a_block_has_what_others_do_not_use(compiled) -> None:
    """Also what is mapped and parked, or free; and gives back what it has not made."""
    device = Device(compiled, 20)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool)
    kept, parked, gone = cache.sequence(3 * 8), cache.sequence(12 * 8), GrowableTensor((5, PAGE), pool=device.pool)
    parked.free()
    gone.resize(1)
    gone.close()
    lease = device.lease(30)
    lease.grow()
    assert device.pool.stats().leased_bytes == 17 * PAGE
    assert not device.allocate(18)
    assert device.allocate(10)
    device.check()
    lease.shrink()
    assert device.pool.stats().leased_bytes == 10 * PAGE
    kept.extend(7 * 8)
    with pytest.raises(OutOfPagesError):
        kept.extend(8)
    device.check()
    cache.close()
    device.end(lease)


def test_others_have_what_a_block_has_not_made_but_for_what_is_guaranteed(compiled) -> None:
    device = Device(compiled, 20)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool)
    lease = device.lease(20, guaranteed=8)
    lease.grow()
    assert device.allocate(5)
    sequence = cache.sequence(12 * 8)
    with pytest.raises(OutOfPagesError):
        sequence.extend(8)
    assert not device.allocate(4)
    assert device.allocate(3)
    device.check()
    cache.close()
    device.end(lease)


def test_what_is_still_on_its_way_back_is_not_leased(compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that somebody took, and that are on nobody's account any more."""
    monkeypatch.setenv("VMMKV_DEBUG", "0")  # which would find them
    device = Device(compiled, 20)
    frames = device.pool.frames.take(12, 0, 20).single
    lease = device.lease(20)
    lease.grow()
    assert lease.reclaim(5) == 5
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool)
    assert cache.sequence(8 * 8).length == 64
    assert device.pool.accounts.room >= 0
    device.pool.frames.give(frames)
    cache.close()
    device.end(lease)


def test_a_lease_takes_nothing_from_another(compiled) -> None:
    """Whose block may run, and need it at any moment."""
    device = Device(compiled, 20)
    first, second = device.lease(15), Lease(device.pool, Functions(device.c_driver, 0).allocator, 15, 0)
    second.open()
    first.grow()
    second.grow()
    assert device.allocate(15)
    assert [account.taken for account in device.pool.accounts] == [15, 5]
    second.end()
    device.end(first)


def test_a_lease_is_no_memory_for_a_device_that_has_none(compiled) -> None:
    """What others have mapped is, though the pool's limit allows more."""
    device = Device(compiled, 20)
    lease = device.lease(20)
    parked = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool)
    device.pool.set_limit(15 * PAGE)
    lease.grow()
    device.pool.set_limit(20 * PAGE)
    parked.sequence(5 * 8).free()
    assert device.allocate(4)
    device.driver.fail("create", out_of_memory=True)
    assert cache.sequence(5 * 8).length == 40
    assert device.driver.num_pages == 9
    assert device.pool.stats().leased_bytes == 10 * PAGE  # before it was known that there is none
    cache.close()
    parked.close()
    device.end(lease)


def test_limits_and_trims_leave_what_was_made(compiled) -> None:
    device = Device(compiled, 20)
    pool, lease = device.pool, device.lease(20)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=pool)
    cache.sequence(6 * 8).free()
    lease.grow()
    assert device.allocate(7)
    with pytest.raises(OutOfPagesError) as caught:
        pool.set_limit(6 * PAGE)
    assert (caught.value.requested, caught.value.available) == (6, 7)
    assert pool.stats().leased_bytes == 20 * PAGE
    pool.set_limit(9 * PAGE)
    assert pool.stats().leased_bytes == 9 * PAGE
    assert not device.allocate(3)
    pool.set_limit(20 * PAGE)
    cache.sequence(6 * 8).free()
    assert pool.trim(keep=10 * PAGE) == 3 * PAGE
    assert pool.trim() == 3 * PAGE
    assert pool.stats().physical_bytes == 7 * PAGE
    assert pool.stats().leased_bytes == 9 * PAGE  # it is no memory
    device.check()
    cache.close()
    device.end(lease)


def test_what_a_lessee_makes_meanwhile_is_not_promised_to_others(compiled) -> None:
    """Between a look at what it uses and the moment that it gives the rest back."""
    device = Device(compiled, 20)
    pool, lease = device.pool, device.lease(20)
    lease.grow()
    reclaim = lease.reclaim

    def reclaim_late(count: int, *, wait: bool = False, firm: bool = False) -> int:
        device.allocate(6)
        return reclaim(count, wait=wait)

    lease.reclaim = reclaim_late
    with pytest.raises(BudgetError, match="6 are guaranteed to others, or in use"):
        vmmkv.KVCache(LAYOUT, 4, 160, pool=pool, guaranteed=15 * PAGE)
    lease.grow()
    with pytest.raises(OutOfPagesError, match="take 12"):
        pool.set_limit(9 * PAGE)
    lease.reclaim = reclaim
    assert pool.limit_pages == 20
    assert pool.stats().holders == 1
    device.check()
    device.end(lease)


def test_more_cannot_be_guaranteed_than_there_is(compiled) -> None:
    device = Device(compiled, 20)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool, guaranteed=15 * PAGE)
    with pytest.raises(BudgetError, match="15 are guaranteed"):
        device.lease(20, guaranteed=6)
    assert device.pool.stats().holders == 1
    cache.close()
    device.pool.close()


def test_a_lease_is_what_the_allocator_may_take(compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an interruption has come before that was told."""
    device = Device(compiled, 20)
    lease = device.lease(20)
    monkeypatch.setattr(device.functions.allocator, "set_budget", lambda pages: interrupt())
    with pytest.raises(Interruption):
        lease.grow()
    monkeypatch.undo()
    device.check()
    device.end(lease)


@pytest.mark.parametrize("name", ["open", "grow", "shrink", "limit", "collect"])
def test_a_lease_that_was_interrupted(compiled, name: str) -> None:
    """At any line: the books are right, or the pool says that nobody knows, and what was made is as it was."""
    ended, line = None, 0
    while ended is None:
        line += random.randint(1, 25)  # not at all of them, and at others in each run
        device = Device(compiled, 20)
        pool = device.pool
        cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=pool)
        cache.sequence(16 * 8).free()
        lease = Lease(pool, device.functions.allocator, 12, 2)
        if name != "open":
            lease.open()
        if name not in ("open", "grow"):
            lease.grow()
            assert device.allocate(5)
        if name == "collect":
            device.deallocate()
            lease.end()
        operations = {
            "open": lease.open,
            "grow": lease.grow,
            "shrink": lease.shrink,
            "limit": partial(pool.set_limit, 10 * PAGE),
            "collect": pool.trim,
        }
        ended = interrupted(operations[name], line)
        with suppress(vmmkv.InterruptedChangeError):
            device.check()
            cache.check()
            assert cache.sequence(3 * 8).length == 24
            device.check()
        cache.close()
        if name != "collect":
            while device.segments:
                device.deallocate()
            lease.end()
        with suppress(vmmkv.InterruptedChangeError):
            assert pool.stats().holders == 0
            pool.close()
            assert not device.driver.handles


def test_segments_come_while_others_take_the_lease(compiled) -> None:
    """In another thread, without the interpreter, whatever happens to the limit and the cache meanwhile."""
    device = Device(compiled, 24)
    pool, lease = device.pool, device.lease(20, guaranteed=4)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=pool)
    over, got = threading.Event(), [0, 0]

    def allocate() -> None:
        chance = random.Random(5)
        while not over.is_set():
            got[device.allocate(chance.randint(1, 6))] += 1
            if len(device.segments) > chance.randint(0, 4):
                device.deallocate()

    thread = threading.Thread(target=allocate)
    thread.start()
    chance = random.Random(6)
    try:
        for _ in range(150):
            with suppress(OutOfPagesError):
                chance.choice(
                    [
                        lease.grow,
                        lambda: lease.reclaim(3),
                        lambda: cache.sequence(8 * chance.randint(1, 12)).free(),
                        lambda: pool.set_limit(chance.randint(4, 24) * PAGE),
                    ]
                )()
            with pool.monitor.lock:
                assert lease.kept_pages <= device.functions.allocator.budget <= pool.limit_pages - pool.frames.existing
    finally:
        over.set()
        thread.join()
    assert min(got) > 0
    device.check()
    cache.close()
    device.end(lease)


def test_a_forked_child_has_no_lease() -> None:
    child = run_python(
        """
        import os, vmmkv
        from vmmkv.torch.lease import Lease

        class Allocator:
            physical = budget = 0
            def set_budget(self, pages):
                self.budget = max(pages, self.physical)
                return self.budget

        pool = vmmkv.FramePool("1MiB", device="cpu", page_size=4096)
        allocator = Allocator()
        lease = Lease(pool, allocator, 20, 0)
        lease.open()
        lease.grow()
        allocator.physical = 2
        if not os.fork():
            for operation in (lease.grow, lease.shrink):
                try:
                    operation()
                except vmmkv.ForkError:
                    print("refused", flush=True)
            lease.end()
            os._exit(0)
        os.wait()
        print(pool.stats().leased_bytes)
        lease.shrink()
        print(pool.stats().leased_bytes)
        """
    )
    assert child.stdout == "refused\nrefused\n81920\n8192\n", child.stderr


# ---------------------------------------------------------------------- memory pools


class Caching:
    """What torch does with memory pools, on the host: it keeps segments whose tensors are gone, until their pool ends
    or it is told to empty its cache; a pool ends when nobody holds it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pools: list[Caching.Pool] = []
        self.orphans: list[int] = []

    class Pool:
        def __init__(self, caching: Caching) -> None:
            self.caching, self.unused = caching, []

        def __del__(self) -> None:
            self.caching.orphans += self.unused
            self.caching.empty()

    def empty(self) -> None:
        """`torch.cuda.empty_cache`."""
        for address in self.orphans:
            self.device.functions.deallocate(address, PAGE)
        self.orphans = []

    def make(self, allocator: object) -> Pool:
        return self.Pool(self)

    @contextmanager
    def use(self, pool: Pool, device: torch.device) -> Iterator[None]:
        self.pools.append(pool)
        yield
        self.pools.pop()

    def tensor(self) -> Tensor:
        """A tensor of a page, in the pool of the innermost block."""
        pool = self.pools[-1]
        address = pool.unused.pop() if pool.unused else self.device.functions.allocate(PAGE)
        if not address:
            raise torch.OutOfMemoryError("no segment")
        return Tensor(self, weakref.ref(pool), address)


class Tensor:
    """See above."""

    def __init__(self, caching: Caching, pool: Callable[[], Caching.Pool | None], address: int) -> None:
        self.caching, self.pool, self.address = caching, pool, address

    def __del__(self) -> None:
        pool = self.pool()
        (pool.unused if pool else self.caching.orphans).append(self.address)


@pytest.fixture
def caching(compiled, monkeypatch: pytest.MonkeyPatch) -> Caching:
    caching = Caching(Device(compiled, 20))
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda allocate, deallocate: None, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", caching.make)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", caching.use)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return caching


def lessee(caching: Caching, limit: int, guaranteed: int = 0) -> MemoryPool:
    device = caching.device
    allocator = device.functions.allocator
    return MemoryPool(torch.device("cpu"), allocator, Lease(device.pool, allocator, limit, guaranteed))


def test_a_memory_pool_leases_while_it_is_in_use(caching: Caching) -> None:
    device = caching.device
    gc.collect()
    before = memory_allocated("cpu")
    memory = lessee(caching, 12)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool)
    cache.sequence(20 * 8).free()
    assert device.pool.stats().holders == 2
    with memory:
        assert memory.stats().leased_bytes == memory.stats().budget_bytes == 12 * PAGE
        tensors = [caching.tensor() for _ in range(5)]
        device.check()
    assert memory.stats().leased_bytes == memory.stats().physical_bytes == 5 * PAGE
    assert memory_allocated("cpu") - before == device.driver.num_pages * PAGE
    assert [held.physical_bytes for held in memory_stats("cpu") if held.owner is memory] == [5 * PAGE]
    del tensors[2:]
    assert memory.stats().physical_bytes == 5 * PAGE
    assert memory.release() == 3 * PAGE
    assert device.pool.stats().leased_bytes == 2 * PAGE
    assert cache.sequence(18 * 8).length == 18 * 8
    device.check()
    tensors.clear()
    caching.empty()
    memory.release()
    cache.close()
    with pytest.raises(BudgetError, match="memory pools"):
        device.pool.close()
    del memory
    device.pool.close()
    assert not device.driver.handles


def test_the_account_of_a_memory_pool_ends_with_its_last_tensor(caching: Caching) -> None:
    device = caching.device
    memory = lessee(caching, 12, guaranteed=12)
    with memory:
        tensor, other = caching.tensor(), caching.tensor()
    del other, memory
    stats = device.pool.stats()
    assert (stats.holders, stats.guaranteed_bytes, stats.leased_bytes) == (1, 0, PAGE)
    device.check()
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=device.pool)
    assert cache.sequence(19 * 8).length == 19 * 8
    cache.close()
    del tensor
    with pytest.raises(BudgetError):  # torch keeps the segment
        device.pool.close()
    caching.empty()
    device.pool.close()
    assert not device.driver.handles


def test_a_segment_that_could_not_be_leased(caching: Caching) -> None:
    memory = lessee(caching, 12)
    cache = vmmkv.KVCache(LAYOUT, 4, 160, pool=caching.device.pool)
    sequence = cache.sequence(17 * 8)
    tensors = []

    def work() -> None:
        with memory:
            tensors.extend([caching.tensor(), caching.tensor()])
            sequence.extend(8)
            tensors.append(caching.tensor())

    with pytest.raises(torch.OutOfMemoryError) as caught:
        work()
    assert "what could be leased" in caught.value.__notes__[0]
    del caught  # it holds the pool
    assert memory.stats().physical_bytes == memory.stats().leased_bytes == 2 * PAGE


def test_what_a_lease_does_not_go_with_is_refused() -> None:
    pool = vmmkv.FramePool("1MiB", device="cpu", page_size=PAGE)
    with pytest.raises(vmmkv.DeviceError, match="asked for a memory pool on cpu"):
        memory_pool(pool=pool)
    with pytest.raises(ValueError, match="a pool has its own"):
        memory_pool(pool=pool, device="cuda")
    with pytest.raises(ValueError, match="without a pool"):
        memory_pool(guaranteed="1GiB")
    with pytest.raises(vmmkv.ArgumentError, match="FramePool"):
        memory_pool(pool="60GiB")


# ---------------------------------------------------------------------- on a GPU

TOKENS = 4096
"""Of `LAYOUT`, in a page of 2 MiB."""


def make_pool(pages: int) -> tuple[vmmkv.FramePool, vmmkv.KVCache]:
    pool = vmmkv.FramePool(pages * 2 * MIB, device="cuda")
    return pool, vmmkv.KVCache(LAYOUT, 4, pages * TOKENS, pool=pool, lookahead=0)


@pytest.mark.gpu
def test_tensors_and_tokens_on_one_pool() -> None:
    pool, cache = make_pool(256)
    cache.sequence(200 * TOKENS).free()
    memory = memory_pool("256MiB", pool=pool)
    with memory:
        assert pool.stats().leased_bytes == 256 * MIB
        kept, gone = filled(40 * MIB, 3), filled(100 * MIB, 5)
        with pytest.raises(torch.OutOfMemoryError):
            filled(120 * MIB, 7)
    assert mapped(kept.data_ptr(), 40 * MIB) + mapped(gone.data_ptr(), 100 * MIB) == memory.stats().physical_bytes
    stats = pool.stats()
    assert stats.leased_bytes == memory.stats().physical_bytes == 140 * MIB
    assert stats.physical_bytes == 140 * MIB + cache.stats().physical_bytes + stats.free_bytes <= 512 * MIB
    sequence = cache.sequence(186 * TOKENS)
    sequence.k(0).fill_(2)
    with pytest.raises(OutOfPagesError):
        sequence.extend(1)
    assert (kept == 3).all()
    assert (gone == 5).all()
    del gone
    assert memory.release() == 100 * MIB
    sequence.extend(50 * TOKENS)
    sequence.k(0).fill_(2)
    assert (kept == 3).all()
    cache.check()


@pytest.mark.gpu
def test_what_is_guaranteed_to_a_memory_pool_is_there() -> None:
    pool, cache = make_pool(128)
    memory = memory_pool("256MiB", pool=pool, guaranteed="64MiB")
    with memory:
        first = filled(32 * MIB, 3)
        sequence = cache.sequence(96 * TOKENS)
        second = filled(32 * MIB, 5)
        with pytest.raises(OutOfPagesError):
            sequence.extend(1)
    with pytest.raises(torch.OutOfMemoryError) as caught, memory:
        filled(2 * MIB, 7)
    assert "what could be leased" in caught.value.__notes__[0]
    del caught
    assert (first == 3).all()
    assert (second == 5).all()


@pytest.mark.gpu
def test_a_tensor_that_outlives_its_memory_pool_counts_until_torch_gives_it_back() -> None:
    pool, cache = make_pool(64)
    with memory_pool("64MiB", pool=pool):
        tensor = filled(64 * MIB, 3)
    assert pool.stats().holders == 2
    assert pool.stats().leased_bytes == 64 * MIB
    with pytest.raises(OutOfPagesError):
        cache.sequence(33 * TOKENS)
    assert (tensor == 3).all()
    del tensor
    torch.cuda.empty_cache()
    assert cache.sequence(64 * TOKENS).length == 64 * TOKENS
    cache.close()
    pool.close()


@pytest.mark.gpu
def test_blocks_beside_a_cache_in_another_thread() -> None:
    pool, cache = make_pool(128)
    memory = memory_pool("128MiB", pool=pool, guaranteed="64MiB")
    over, wrong, chance = threading.Event(), [], random.Random(7)

    def serve() -> None:
        chance, stream = random.Random(8), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not over.is_set():
                with suppress(OutOfPagesError), cache.sequence(chance.randint(1, 100) * TOKENS) as sequence:
                    sequence.k(0).fill_(sequence.number)
                    if (sequence.k(0) != sequence.number).any():
                        wrong.append(sequence.number)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for value in range(1, 101):
            tensors = []
            with suppress(torch.OutOfMemoryError), memory:
                tensors += [filled(16 * MIB, value) for _ in range(4)]  # what is guaranteed
                tensors += [filled(chance.randint(1, 40) * MIB, value) for _ in range(3)]
            assert len(tensors) >= 4
            assert all((tensor == value).all() for tensor in tensors)
            del tensors
            memory.release()
            stats = pool.stats()
            assert stats.physical_bytes <= stats.limit_bytes
            assert thread.is_alive()
    finally:
        over.set()
        thread.join()
    assert wrong == []
    cache.check()
