"""Frame pools: what one does not use another can have, what is reserved its owner can have, and it all adds up."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver, has_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import vmmkv
from vmmkv.errors import BudgetError, DriverError, OutOfPagesError, OutOfRowsError
from vmmkv.integrations.transformers import VmmCache
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
WIDE = vmmkv.KVLayout(3, 4, 32, torch.float32, layers_per_range=2)


def make_pool(pages: int) -> tuple[vmmkv.FramePool, FaultyDriver]:
    driver = FaultyDriver(small_driver("cpu"))
    return on_driver(driver, vmmkv.FramePool, pages * driver.page_size), driver


def cache_on(pool: vmmkv.FramePool, **options: int) -> vmmkv.KVCache:
    return vmmkv.KVCache(LAYOUT, 4, 160, pool=pool, **options)


def set_limit(pool: vmmkv.FramePool, pages: int, driver: FaultyDriver) -> None:
    """Sets a limit. It holds also where a call fails; what is left above it can be trimmed."""
    try:
        pool.set_limit(pages * pool.page_size)
    except DriverError:
        driver.heal()
        pool.trim()
    assert pool.limit_pages == pages


def pages_of(cache: vmmkv.KVCache) -> int:
    return cache.stats().pages["used"]


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_any_use_of_one_pool(seed: int, faults: bool) -> None:
    """Caches of different layouts and a tensor, with a limit that moves and driver calls that fail: nobody's bytes
    change, and the accounts are what the driver has."""
    chance = random.Random(seed)
    pool, driver = make_pool(40)
    size = driver.page_size
    reserved, most = chance.choice([0, 6, 12]), chance.choice([10, 30])
    caches = [
        vmmkv.KVCache(LAYOUT, 4, 120, pool=pool, reserved=reserved * size),
        vmmkv.KVCache(WIDE, 4, 60, pool=pool, max_bytes=most * size, scrub=chance.random() < 0.5),
    ]
    tensor = GrowableTensor((10_000, 4), torch.float32, max_bytes=20 * size, pool=pool)
    live: list[tuple[vmmkv.Sequence, float]] = []
    for _ in range(30):
        if faults and chance.random() < 0.2:
            driver.fail("any", chance.randrange(5), out_of_memory=chance.random() < 0.5)
        with suppress(OutOfPagesError, OutOfRowsError, DriverError, BudgetError):
            what = chance.randrange(8)
            if what < 2:
                sequence = chance.choice(caches).sequence(chance.randint(0, 60))
                live.append((sequence, chance.random()))
            elif what == 2 and live:
                live.pop(chance.randrange(len(live)))[0].free()
            elif what == 3 and live:
                sequence, _ = chance.choice(live)
                sequence.truncate(chance.randint(0, sequence.length))
            elif what == 4 and live:
                sequence, _ = chance.choice(live)
                sequence.extend(chance.randint(0, min(30, sequence.cache.max_seq_len - sequence.length)))
            elif what == 5:
                tensor.resize(chance.randint(0, 4000))
            elif what == 6:
                set_limit(pool, chance.randint(1, 50), driver)
            else:
                pool.trim()
        driver.heal()
        for cache in caches:
            cache.check()
        stats = pool.stats()
        assert stats.physical_bytes == driver.num_pages * size <= stats.limit_bytes
        each = [cache.stats() for cache in caches] + [tensor.stats()]
        assert sum(one.physical_bytes for one in each) + stats.free_bytes == stats.physical_bytes
        assert [one.budget_bytes for one in each] == [min(pages, pool.limit_pages) * size for pages in (50, most, 20)]
        for sequence, value in live:
            assert has_memory(sequence, driver)
            sequence.k(0).fill_(value)
        tensor.tensor.fill_(0.5)
        for sequence, value in live:
            assert (sequence.k(0) == value).all()
        others = pages_of(caches[1]) + -(-tensor.stats().used_bytes // size)
        if pages_of(caches[0]) < reserved:
            assert others <= pool.limit_pages - reserved
    for cache in caches:
        cache.close()
    tensor.close()
    pool.close()
    assert not driver.handles


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


def test_a_limit_below_what_lives_changes_nothing() -> None:
    pool, _ = make_pool(20)
    cache = cache_on(pool)
    live, gone = cache.sequence(9 * 8), cache.sequence(5 * 8)
    gone.free()
    with pytest.raises(OutOfPagesError) as caught:
        pool.set_limit(8 * pool.page_size)
    assert (caught.value.requested, caught.value.available) == (8, 9)
    assert pool.stats().physical_bytes == 14 * pool.page_size
    pool.set_limit(10 * pool.page_size)
    assert pool.stats().physical_bytes <= 10 * pool.page_size
    live.extend(8)
    with pytest.raises(OutOfPagesError):
        live.extend(8)
    pool.set_limit(20 * pool.page_size)
    live.extend(8)


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


@pytest.mark.parametrize("call", ["unmap", "synchronize"])
def test_what_a_collected_cache_could_not_unmap_is_tried_again(call: str) -> None:
    pool, driver = make_pool(20)
    driver.calls = (*driver.calls, "synchronize")
    cache, lost = (cache_on(pool) for _ in range(2))
    lost.sequence(9 * 8)
    driver.fail(call)
    del lost
    gc.collect()
    assert driver.mapped
    assert cache.available_pages == 20
    assert not driver.mapped
    assert cache.sequence(20 * 8).length == 160
    cache.check()


def test_a_pool_has_no_copies() -> None:
    pool, _ = make_pool(20)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="FramePool"):
            copied(pool)


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


@pytest.mark.parametrize("name", ["overread", "lookahead"])
def test_tokens_behind_a_sequence_are_not_negative(name: str) -> None:
    pool, _ = make_pool(20)
    with pytest.raises(vmmkv.LayoutError, match=f"{name}=-1"):
        cache_on(pool, **{name: -1})
    assert pool.stats().holders == 0
