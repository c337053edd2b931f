"""Pools of one process on a device that has no memory left: others give back what they do not use."""

from __future__ import annotations

from random import Random

import pytest
from core_rows import Row, check_all, new_cache, new_pool
from test_neighbours import CAPACITY, SmallDevice, small_device  # noqa: F401

from vmmkv.driver.driver import Driver
from vmmkv.errors import VmmkvError


def test_pools_have_what_others_do_not_use(small_device: SmallDevice) -> None:  # noqa: F811
    """Each may have the whole device, and has as much as the others' live tokens leave."""
    seed = Random().randrange(1 << 32)
    random = Random(seed)
    caches = [new_cache(new_pool(CAPACITY), large=False) for _ in range(3)]
    live: list[Row] = []
    refused = 0
    for _ in range(200):
        if live and random.random() < 0.4:
            live.pop(random.randrange(len(live))).sequence.free()
        cache, tokens = random.choice(caches), random.choice([1, 4, 9, 20, 40])
        used = sum(each.pool.word("used") for each in caches)
        needed = sum(-(-tokens * record // 4096) for record in cache.records)
        try:
            row = Row(cache.start(tokens))
            row.write(random, 0)
            live.append(row)
        except VmmkvError:
            assert used + needed > CAPACITY, f"seed {seed}"
            refused += 1
        assert small_device.total() <= CAPACITY
        for row in live:
            row.verify()
    assert refused
    for cache in caches:
        check_all(cache.pool, cache)


def test_torch_gives_back_memory_without_tensors(small_device: SmallDevice, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Before a growth is refused: after a training step torch has nearly all of a GPU."""
    cache, held = new_cache(new_pool(CAPACITY), large=False), CAPACITY - 2
    small_device.pages[0] = held
    monkeypatch.setattr(Driver, "empty_torch_cache", lambda _: small_device.pages.pop(0, 0) * 4096)
    row = Row(cache.start(20))
    row.write(Random(), 0)
    assert not small_device.pages[0]
    row.verify()
