"""Frame pools: what one does not use another can have, what is reserved its owner can have, and it all adds up; also
what memory pools of torch lease there."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from random import Random

import pytest
import torch
from c_driver import CDriver, Functions
from conftest import on_driver, randoms, run_python, small_driver
from faulty import FaultyDriver, has_memory
from interruption import interrupted
from test_torch import filled, mapped
from transformers import LlamaConfig

import vmmkv
from vmmkv.cache import KVCache
from vmmkv.core.check import check
from vmmkv.errors import BudgetError, DriverError, OutOfPagesError, OutOfRowsError
from vmmkv.integrations.transformers import VmmCache
from vmmkv.pool import FramePool
from vmmkv.sequence import Sequence
from vmmkv.torch import GrowableTensor
from vmmkv.torch.allocator import Lease
from vmmkv.torch.pool import MemoryPool, memory_pool

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB


def make_pool(pages: int) -> tuple[vmmkv.FramePool, FaultyDriver]:
    driver = FaultyDriver(small_driver("cpu"))
    return on_driver(driver, vmmkv.FramePool, pages * driver.page_size), driver


def cache_on(pool: vmmkv.FramePool, **options: int) -> vmmkv.KVCache:
    return vmmkv.KVCache(LAYOUT, 4, 160, pool=pool, **options)


def pages_of(cache: vmmkv.KVCache) -> int:
    return cache.stats().pages["used"]


def test_what_is_reserved_comes_back_on_demand() -> None:
    pool, _ = make_pool(20)
    size = pool.page_size
    owner = cache_on(pool, reserved=8 * size)
    other = cache_on(pool)
    with pytest.raises(OutOfPagesError):
        other.sequence(13 * 8)
    other.sequence(12 * 8).free()  # parked, so that it may lie where the owner's may
    kept = other.sequence(12 * 8)
    own = owner.sequence(8 * 8)
    assert pages_of(owner) == 8
    with pytest.raises(OutOfPagesError):
        own.extend(8)
    with pytest.raises(OutOfPagesError) as caught:
        pool.set_limit(19 * size)
    assert (caught.value.requested, caught.value.available) == (19, 20)
    kept.free()
    own.extend(12 * 8)
    assert pages_of(owner) == 20


def test_more_cannot_be_reserved_than_there_is() -> None:
    pool, _ = make_pool(20)
    size = pool.page_size
    first = cache_on(pool, reserved=8 * size)
    with pytest.raises(BudgetError, match="12 are neither used nor reserved"):
        cache_on(pool, reserved=13 * size)
    with pytest.raises(BudgetError, match="8 are reserved"):
        pool.set_limit(7 * size)
    with pytest.raises(BudgetError, match="at most"):
        cache_on(pool, reserved=5 * size, max_bytes=4 * size)
    with pytest.raises(BudgetError, match="in all"):
        cache_on(pool, max_bytes=21 * size)
    assert pool.stats().holders == 1
    first.close()
    cache_on(pool, reserved=13 * size)


def test_a_share_is_of_what_is_free_and_what_the_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the same share is the same limit, whatever is taken."""
    pool, driver = make_pool(30)
    size = pool.page_size
    monkeypatch.setattr(driver, "memory_info", lambda: ((40 - driver.num_pages) * size, 100 * size))
    cache = cache_on(pool)
    kept = []
    for tokens in (0, 5 * 8, 9 * 8):
        kept.append(cache.sequence(tokens))
        pool.set_limit("50%")
        assert pool.limit_pages == 20
    assert driver.num_pages == 14


def test_trim_keeps_what_it_is_told_to() -> None:
    pool, _ = make_pool(20)
    cache = cache_on(pool)
    cache.sequence(12 * 8).free()
    assert pool.trim(keep=7 * pool.page_size) == 5 * pool.page_size
    assert pool.stats().physical_bytes == 7 * pool.page_size
    assert pool.trim(keep="10%") == 5 * pool.page_size  # of the pool's limit
    assert pool.trim() == 2 * pool.page_size


def tensor_of(pool: vmmkv.FramePool) -> int:
    tensor = GrowableTensor((20, pool.page_size), torch.uint8, pool=pool, max_bytes=20 * pool.page_size)
    tensor.resize(20)
    return len(tensor.tensor)


@pytest.mark.parametrize("whole", [True, False], ids=["a cache", "a sequence"])
@pytest.mark.parametrize("other", [lambda pool: cache_on(pool).sequence(20 * 8).length // 8, tensor_of])
def test_what_is_collected_gives_its_pages_to_others(whole: bool, other: Callable[[vmmkv.FramePool], int]) -> None:
    pool, driver = make_pool(20)
    lost = cache_on(pool)
    sequence = lost.sequence(20 * 8)
    with pytest.raises(OutOfPagesError):
        cache_on(pool).sequence(1)
    del sequence
    if whole:
        del lost
    gc.collect()
    assert other(pool) == 20
    assert driver.num_pages == 20


def test_a_pool_that_a_cache_has_made_for_itself_is_nobody_elses() -> None:
    """It ends with that cache, and with it would all that lies there."""
    cache = vmmkv.KVCache(LAYOUT, 2, 100, max_bytes="4MiB", device="cpu")
    tensor = GrowableTensor((100, 4), torch.float32, max_bytes="4MiB", device="cpu")
    for pool in (cache.pool, tensor.pool):
        for lie in (
            lambda pool=pool: vmmkv.KVCache(LAYOUT, 2, 100, pool=pool),
            lambda pool=pool: GrowableTensor((100,), pool=pool),
            lambda pool=pool: VmmCache(LlamaConfig(), 100, pool=pool),
        ):
            with pytest.raises(vmmkv.ArgumentError, match="ends with it"):
                lie()
        assert len(pool.stats().accounts) == 1


WIDE = vmmkv.KVLayout(3, 4, 32, torch.float32, layers_per_range=2)
PAGE, MIB = 4096, 1 << 20


class Device:
    """A frame pool on host memory, and an allocator whose pages come from there, too.

    Args:
        pages: the pool's limit.
    """

    def __init__(self, pages: int) -> None:
        self.driver = FaultyDriver(small_driver("cpu"))
        self.driver.unmaps_anything = True
        self.c_driver = CDriver(driver=self.driver)
        self.pool = FramePool(pages * PAGE, device=self.driver.inner)
        self.functions = Functions(self.c_driver, 0)
        self.segments: dict[int, int] = {}

    def lease(self, limit: int, reserved: int = 0) -> Lease:
        return Lease(self.pool, self.functions.allocator, limit, reserved)

    def cache(self, **options: object) -> KVCache:
        return KVCache(LAYOUT, 4, 320, pool=self.pool, **options)  # type: ignore[arg-type]

    def allocate(self, nbytes: int) -> bool:
        """Whether there was a segment to have: one that is zero, if there was room and no call has failed."""
        pages, state, driver = -(-nbytes // PAGE), self.functions.allocator.state, self.c_driver
        room = int(state["budget"]) // PAGE - self.functions.allocator.physical
        driver.failed = None
        address = self.functions.allocate(nbytes)
        if driver.failed == "release":  # its page is lost
            self.driver.release(driver.handles[max(driver.handles)])
            state["physical"] -= PAGE
        assert bool(address) == (pages <= room and driver.failed in (None, "pop"))
        if address:
            assert ctypes.string_at(address, pages * PAGE) == bytes(pages * PAGE)
            ctypes.memset(address, 1, pages * PAGE)
            self.segments[address] = pages * PAGE
        return bool(address)

    def deallocate(self) -> None:
        self.functions.deallocate(*self.segments.popitem())

    @property
    def leased(self) -> int:
        return self.pool.stats().leased_bytes // PAGE

    def check(self) -> None:
        """What the books say is what there is, and no more than is allowed."""
        stats, pool, allocator = self.pool.stats(), self.pool, self.functions.allocator
        assert not self.c_driver.misuse
        check(pool, [each for each in pool.members if not each.is_closed])
        assert stats.physical_bytes == self.driver.num_pages * PAGE <= stats.limit_bytes
        assert pool.word("created") + pool.word("leased") <= pool.limit_pages
        assert allocator.physical == sum(self.segments.values()) // PAGE
        assert allocator.state["segments"] == len(self.segments)
        assert allocator.physical <= int(allocator.state["budget"]) // PAGE <= pool.word("leased")

    def end(self, lease: Lease) -> None:
        """Everything goes back, and nothing of the lease is left."""
        while self.segments:
            self.deallocate()
        lease.end()
        assert not self.pool.leases
        self.pool.close()
        assert not self.driver.handles


class Machine:
    """Caches of different layouts, a tensor and a memory pool on one frame pool: blocks that begin and end, a limit
    that moves, and calls that fail. No byte of another changes, and what is reserved can be had."""

    def __init__(self, random: Random, faults: bool) -> None:
        self.random, self.faults = random, faults
        self.device = Device(70)
        self.reserved = random.choice([0, 5, 10])
        self.lease = self.device.lease(random.choice([12, 70]), self.reserved)
        self.promised, self.most = random.choice([0, 6]), random.choice([10, 30])
        wide = {"max_bytes": self.most * PAGE, "scrub": random.random() < 0.5}
        self.caches = [
            self.device.cache(reserved=self.promised * PAGE),
            KVCache(WIDE, 4, 60, pool=self.device.pool, **wide),
        ]
        self.tensor = GrowableTensor((20, PAGE), torch.uint8, max_bytes=20 * PAGE, pool=self.device.pool)
        self.live: list[tuple[Sequence, float]] = []
        self.inside = False
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        random, driver = self.random, self.device.driver
        if self.faults and random.random() < 0.2:
            driver.fail(random.choice(["create", "map", "set_access"]), random.randrange(5), random.random() < 0.5)
        name = random.choice([name for name in dir(self) if name.startswith("do_")])
        with suppress(OutOfPagesError, OutOfRowsError, DriverError, BudgetError):
            getattr(self, name)()
            self.done[name] += 1
        driver.heal()
        self.device.c_driver.failed, self.device.c_driver.fail_at = None, -1
        self.verify()

    def do_begin(self) -> None:
        cache = self.random.choice(self.caches)
        tokens = min(self.random.choice([0, 20, 60, 300]), cache.max_seq_len)
        self.live.append((cache.sequence(tokens), self.random.random()))
        self.live[-1][0].k(0).fill_(self.live[-1][1])

    def do_extend(self) -> None:
        if self.live:
            sequence, value = self.random.choice(self.live)
            before = sequence.length
            sequence.extend(min(self.random.choice([1, 9, 50]), sequence.cache.max_seq_len - before))
            sequence.k(0)[before:].fill_(value)

    def do_truncate(self) -> None:
        if self.live:
            sequence, _ = self.random.choice(self.live)
            sequence.truncate(self.random.randint(0, sequence.length))

    def do_free(self) -> None:
        if self.live:
            self.live.pop(self.random.randrange(len(self.live)))[0].free()

    def do_fork(self) -> None:
        if self.live:
            sequence, value = self.random.choice(self.live)
            self.live.append((sequence.fork(), value))

    def do_resize(self) -> None:
        self.tensor.resize(self.random.randint(0, 20))

    def do_limit(self) -> None:
        """It holds also where a call fails; what is left above it can be trimmed."""
        pages = self.random.randint(10, 90)
        try:
            self.device.pool.set_limit(pages * PAGE)
        except DriverError:
            self.device.driver.heal()
            self.device.pool.trim()
        assert self.device.pool.limit_pages == pages

    def do_trim(self) -> None:
        self.random.choice([each.trim for each in (self.device.pool, self.tensor, *self.caches)])()

    def do_enter(self) -> None:
        self.lease.grow()
        self.inside = True

    def do_leave(self) -> None:
        self.lease.shrink()
        self.inside = False
        assert not self.device.allocate(1 * PAGE)

    def do_allocate(self) -> None:
        if self.inside:
            if self.faults:
                self.device.c_driver.fail_at = self.random.randint(-1, 12)
            self.device.driver.heal()
            self.device.allocate(self.random.randint(1, 9 * PAGE))

    def do_deallocate(self) -> None:
        if self.device.segments:
            self.device.driver.heal()
            self.device.deallocate()

    def verify(self) -> None:
        if self.device.c_driver.misuse:
            raise self.device.c_driver.misuse[0]
        self.device.check()
        leased = int(self.device.functions.allocator.state["budget"]) // PAGE
        assert leased >= self.reserved or not self.inside, "what is reserved can be had while a block runs"
        pool, each = self.device.pool, [cache.stats() for cache in self.caches]
        assert [one.budget_bytes for one in each] == [pool.limit_pages * PAGE, min(self.most, pool.limit_pages) * PAGE]
        used = each[0].pages["used"]
        assert used >= self.promised or pool.word("used") - used <= pool.limit_pages - self.promised
        assert all(has_memory(sequence, self.device.driver) for sequence, _ in self.live)
        self.tensor.tensor.fill_(7)
        assert all((sequence.k(0) == value).all() for sequence, value in self.live)
        assert all(ctypes.string_at(at, size) == b"\1" * size for at, size in self.device.segments.items())

    def end(self) -> None:
        self.lease.grow()
        missing = self.reserved - self.device.functions.allocator.physical
        assert missing <= 0 or self.device.allocate(missing * PAGE)
        for each in (*self.caches, self.tensor):
            each.close()
        self.device.end(self.lease)


@pytest.mark.parametrize("faults", [False, True])
def test_any_use_of_a_pool_with_a_lease(faults: bool) -> None:
    done: Counter[str] = Counter()
    for random in randoms(12):
        machine = Machine(random, faults)
        for _ in range(40):
            machine.step()
        machine.end()
        done += machine.done
    assert len(done) == 12, done


def test_a_lease_takes_nothing_from_another() -> None:
    """Whose block may run, and need it at any moment."""
    device = Device(20)
    first = device.lease(15)
    other = Functions(device.c_driver, 0)
    second = Lease(device.pool, other.allocator, 15, 0)
    first.grow()
    second.grow()
    assert device.allocate(15 * PAGE)
    assert [int(device.pool.accounts[lease.account]["leased"]) for lease in (first, second)] == [15, 5]
    second.end()
    device.end(first)


@pytest.mark.parametrize("name", ["grow", "shrink", "give", "end", "limit"])
def test_a_lease_that_was_interrupted(name: str) -> None:
    """At any line: the books are right, and what was made is as it was."""
    ended, line = None, 0
    while ended is None:
        line += Random().randint(1, 8)
        device = Device(20)
        cache = device.cache(large_frames=False)
        cache.sequence(16 * 8).free()
        lease = device.lease(12, 2)
        if name != "grow":
            lease.grow()
            assert device.allocate(5 * PAGE)
        arguments = {"give": (3,), "limit": (10 * PAGE,)}.get(name, ())
        call = device.pool.set_limit if name == "limit" else getattr(lease, name)
        ended = interrupted(partial(call, *arguments), line)
        with suppress(OutOfPagesError):
            device.pool.set_limit(20 * PAGE)  # books a journal that was left behind
        device.check()
        assert cache.sequence(3 * 8).length == 24
        device.check()
        cache.close()
        if name != "end":
            device.end(lease)


def test_a_forked_child_has_no_lease() -> None:
    child = run_python(
        """
        import os, vmmkv
        from test_frame_pool import PAGE, Device
        device = Device(20)
        lease = device.lease(20)
        lease.grow()
        assert device.allocate(2 * PAGE)
        if not os.fork():
            try:
                lease.grow()
            except vmmkv.ForkError:
                print("refused", flush=True)
            lease.shrink()
            lease.end()
            os._exit(0)
        os.wait()
        print(device.leased)
        lease.shrink()
        print(device.leased)
        """
    )
    assert child.stdout == "refused\n20\n2\n", child.stderr


# ---------------------------------------------------------------------- memory pools


class Caching:
    """What torch does with memory pools, on the host: it keeps segments whose tensors are gone, until their pool ends
    or it is told to empty its cache; a pool ends when nothing holds it."""

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
            del self.device.segments[address]
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
        self.device.segments[address] = PAGE
        return Tensor(self, weakref.ref(pool), address)


class Tensor:
    """What `Caching.tensor` returns."""

    def __init__(self, caching: Caching, pool: Callable[[], Caching.Pool | None], address: int) -> None:
        self.caching, self.pool, self.address = caching, pool, address

    def __del__(self) -> None:
        pool = self.pool()
        (pool.unused if pool else self.caching.orphans).append(self.address)


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch) -> Caching:
    caching = Caching(Device(20))
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda allocate, deallocate: None, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", caching.make)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", caching.use)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return caching


def lessee(caching: Caching, limit: int, reserved: int = 0) -> MemoryPool:
    device = caching.device
    return MemoryPool(torch.device("cpu"), device.functions.allocator, device.lease(limit, reserved))


def test_a_memory_pool_leases_while_it_is_in_use(caching: Caching) -> None:
    device, memory = caching.device, lessee(caching, 12)
    cache = device.cache(large_frames=False)
    cache.sequence(20 * 8).free()
    with memory:
        assert memory.stats().leased_bytes == memory.stats().budget_bytes == 12 * PAGE
        tensors = [caching.tensor() for _ in range(5)]
        device.check()
        for call in (memory.__enter__, memory.release):
            with pytest.raises(RuntimeError, match="is in a with block"):
                call()
    assert memory.stats().leased_bytes == memory.stats().physical_bytes == 5 * PAGE
    (account,) = [each for each in device.pool.stats().accounts if each.name == "MemoryPool 0"]
    assert (account.mapped_bytes, account.used_bytes, account.limit_bytes) == (5 * PAGE, 5 * PAGE, 12 * PAGE)
    del tensors[2:]
    assert memory.stats().physical_bytes == 5 * PAGE
    assert memory.release() == 3 * PAGE
    assert cache.sequence(18 * 8).length == 18 * 8
    device.check()
    tensors.clear()
    caching.empty()
    memory.release()
    cache.close()
    with pytest.raises(BudgetError, match="memory pools"):
        device.pool.close()
    del memory, call
    device.pool.close()
    assert not device.driver.handles


def test_what_a_memory_pool_does_not_go_with_is_refused() -> None:
    pool = FramePool("1MiB", device="cpu", page_size=PAGE)
    with pytest.raises(vmmkv.DeviceError, match="asked for a memory pool on cpu"):
        memory_pool(pool=pool)
    with pytest.raises(vmmkv.DeviceError, match="asked for a memory pool on cpu"):
        memory_pool(device="cpu")
    with pytest.raises(ValueError, match="a pool has its own"):
        memory_pool(pool=pool, device="cuda")
    with pytest.raises(ValueError, match="without a pool"):
        memory_pool(reserved="1GiB")
    with pytest.raises(vmmkv.ArgumentError, match="FramePool"):
        memory_pool(pool="60GiB")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- on a GPU

TOKENS = 4096
"""Of `LAYOUT`, in a page of 2 MiB."""


@pytest.mark.gpu
def test_tensors_and_tokens_on_one_pool() -> None:
    pool = FramePool(256 * 2 * MIB, device="cuda")
    cache = KVCache(LAYOUT, 4, 256 * TOKENS, pool=pool, lookahead=0, large_frames=False)
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
