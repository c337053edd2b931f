"""Neighbours: caches without a pool of all share what a device has, and nothing else."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from random import Random

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.driver.driver import Driver, Handle
from vmmkv.driver.host import HostDriver
from vmmkv.errors import DriverOutOfMemoryError, OutOfPagesError
from vmmkv.memory.neighbours import asking, give_back

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
CAPACITY = 16
"""Pages of the device."""


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Has drivers that are opened from now on have so many pages among them; returns how many each has."""
    pages: Counter[int] = Counter()
    create, release = HostDriver.create, HostDriver.release
    before = {id(pool.driver) for pool in vmmkv.memory.pool.living_pools()}

    def create_within(driver: HostDriver, count: int = 1) -> Handle:
        if id(driver) not in before:
            if pages.total() + count > CAPACITY:
                raise DriverOutOfMemoryError("create", "ENOMEM", "this device is small")
            pages[id(driver)] += count
        return create(driver, count)

    def release_of(driver: HostDriver, handle: Handle) -> None:
        if id(driver) in pages:  # others may be garbage of tests before, which nobody knows as those of living pools
            pages[id(driver)] -= driver._sizes.get(handle, driver.page_size) // driver.page_size
        release(driver, handle)

    monkeypatch.setattr(HostDriver, "create", create_within)
    monkeypatch.setattr(HostDriver, "release", release_of)
    return pages


def make(driver: Driver | None = None) -> vmmkv.KVCache:
    driver = driver or small_driver("cpu")
    return on_driver(driver, vmmkv.KVCache, LAYOUT, 8, 160, max_bytes=CAPACITY * driver.page_size)


def physical(cache: vmmkv.KVCache) -> int:
    return cache.stats().physical_bytes // cache.page_size


def test_what_one_cache_does_not_use_another_can_have(small_device: Counter[int]) -> None:
    """Each may have the whole device, and has as much as the others' live tokens leave."""
    chance = Random()
    caches = [make() for _ in range(3)]
    live: list[tuple[vmmkv.KVCache, vmmkv.Sequence, float]] = []
    for _ in range(60):
        cache, pages, value = chance.choice(caches), chance.randint(1, 10), chance.random()
        room = CAPACITY - sum(sequence.length // 8 for _, sequence, _ in live)
        if live and chance.random() < 0.5:
            live.pop(chance.randrange(len(live)))[1].free()
        elif len(live) < 8 and pages <= room:
            sequence = cache.sequence(8 * pages)
            sequence.k(0).fill_(value)
            live.append((cache, sequence, value))
        elif len(live) < 8:
            with pytest.raises(OutOfPagesError):
                cache.sequence(8 * pages)
        for each in caches:
            each.check()
        assert small_device.total() == sum(map(physical, caches)) <= CAPACITY
        assert all((sequence.k(0) == value).all() for _, sequence, value in live)


def test_a_driver_of_somebodys_own_is_nobodys_neighbour(small_device: Counter[int]) -> None:
    other = make(FaultyDriver(small_driver("cpu")))
    other.sequence(12 * 8).free()
    with pytest.raises(OutOfPagesError):
        make().sequence(12 * 8)
    assert physical(other) == 12


def test_no_bytes_go_from_one_cache_to_another(small_device: Counter[int]) -> None:
    """As they do on a pool, where what is NaN to one layout may lie behind another's tokens."""
    one, other = make(), make()
    with one.sequence(12 * 8) as sequence:
        sequence.k(0).fill_(float("nan"))
    sequence = other.sequence(12 * 8 - 7)
    sequence.extend(7)
    if not other.pool.is_debugged:  # which fills pages with NaN itself
        assert not sequence.k(0).isnan().any()


def test_who_asks_is_not_asked(small_device: Counter[int]) -> None:
    """So that no two wait for each other; and who is only busy is waited for."""
    one, other = make(), make()
    with asking(one.pool) as neighbours:
        assert other.pool in list(neighbours)
        with asking(other.pool) as neighbours:
            assert one.pool not in list(neighbours)
    with asking(other.pool) as neighbours:
        assert one.pool in list(neighbours)
    one.sequence(12 * 8).free()
    given: list[int] = []
    asks = threading.Thread(target=lambda: given.append(give_back(one.pool, 4 * one.page_size)))
    with one.pool.monitor.lock:
        asks.start()
    asks.join()
    assert given == [4 * one.page_size]
    one.close()
    assert give_back(one.pool, one.page_size) == 0


def test_a_refusal_keeps_nothing_alive(small_device: Counter[int]) -> None:
    """Not itself in a circle with the frames that it came through: what these hold ends at once."""
    live = make().sequence(12 * 8)
    with pytest.raises(OutOfPagesError) as caught:
        make().sequence(12 * 8)
    refusal = weakref.ref(caught.value)
    del caught
    assert refusal() is None
    assert live.length == 12 * 8


@pytest.mark.parametrize("call", ["create", "map"])
def test_a_pool_is_not_asked_in_the_middle_of_its_own_operation(
    small_device: Counter[int], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As by a signal handler that grows another cache while the driver is called: it would wait for itself."""
    monkeypatch.setattr(HostDriver, "c_interface", None, raising=False)
    inner, drivers, refusals = getattr(HostDriver, call), [small_driver("cpu") for _ in range(2)], []
    caches = [on_driver(each, vmmkv.KVCache, LAYOUT, 8, 160, max_bytes=1 << 20, lookahead=0) for each in drivers]

    def interrupted(driver: Driver, *args: object) -> object:
        if driver is drivers[1] and not refusals:
            refusals.append(None)
            try:
                caches[0].sequence((CAPACITY + 1) * 8)
            except OutOfPagesError as error:
                refusals.append(error)
        return inner(driver, *args)

    caches[1].sequence(40).free()  # nobody uses them
    grown = caches[1].sequence(8)
    monkeypatch.setattr(HostDriver, call, interrupted)
    thread = threading.Thread(target=lambda: grown.extend(60), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(refusals) == 2
    assert grown.length == 68


def test_what_ends_while_a_neighbour_gives_back_waits_for_nobody(
    small_device: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As garbage collection ends it, in the thread that the one who asks waits for."""
    one, other = make(), make()
    ended = [one.sequence(8)]
    other.sequence(12 * 8).free()
    release = HostDriver.release

    def release_and_collect(driver: HostDriver, handle: Handle) -> None:
        if ended:
            ended.pop().free()
            with pytest.raises(vmmkv.BusyError):
                one.trim()
        release(driver, handle)

    monkeypatch.setattr(HostDriver, "release", release_and_collect)
    thread = threading.Thread(target=lambda: one.sequence(8 * 8), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "somebody waits for ever"
    assert not ended
    assert one.stats().rows["live"] == 0
    one.check()
    monkeypatch.setattr(HostDriver, "release", release)
