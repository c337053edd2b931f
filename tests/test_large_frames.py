"""Large frames: where they lie, and what they cost, as the documentation says."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.core.pool import LARGE

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
TOKENS = 8
"""Of a page."""


def make(pages: int = 100, **options: object) -> tuple[vmmkv.KVCache, FaultyDriver]:
    driver = FaultyDriver(small_driver("cpu"))
    cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 40, 100 * TOKENS, max_bytes=pages * driver.page_size, **options)
    return cache, driver


def frames(driver: FaultyDriver) -> tuple[int, int]:
    """Large frames, and single ones, that there are."""
    sizes = [driver.sizes[handle] for handle in driver.handles]
    assert set(sizes) <= {1, LARGE}
    return sizes.count(LARGE), sizes.count(1)


def used(cache: vmmkv.KVCache) -> int:
    return cache.stats().pages["used"]


def test_a_prompt_takes_as_many_pages_as_without() -> None:
    pages = random.randint(1, 100)
    for options, large in (({}, pages // LARGE), ({"large_frames": False}, 0)):
        cache, driver = make(**options)
        sequence = cache.sequence(random.randint((pages - 1) * TOKENS + 1, pages * TOKENS))
        assert frames(driver) == (large, pages - large * LARGE)
        assert used(cache) == pages
        assert (cache.page_map() == sequence.number).sum() == pages


@pytest.mark.parametrize("options", [{"max_tokens": 800, "max_bytes": None}, {"large_frames": False}], ids=str)
def test_there_are_none_where_promises_are_to_the_page(options: dict[str, object]) -> None:
    driver = FaultyDriver(small_driver("cpu"))
    cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 40, 800, **{"max_bytes": 200 * driver.page_size} | options)
    cache.sequence(400)
    assert frames(driver)[0] == 0


def test_who_grows_token_by_token_has_single_pages() -> None:
    cache, driver = make()
    sequence = cache.sequence(1)
    while sequence.length < 50 * TOKENS:
        sequence.extend(random.randint(1, 2 * TOKENS))
    assert frames(driver)[0] == 0


def test_who_is_truncated_into_one_keeps_it_until_it_grows_or_ends() -> None:
    cache, driver = make()
    sequence = cache.sequence(3 * LARGE * TOKENS)
    begun = random.randint(1, LARGE * TOKENS - 1)  # of the second one
    sequence.truncate(LARGE * TOKENS + begun)
    assert used(cache) == 2 * LARGE
    changes = driver.changes
    sequence.extend(LARGE * TOKENS - begun)
    assert driver.changes == changes
    assert used(cache) == 2 * LARGE
    sequence.release_before(LARGE * TOKENS + begun)
    assert used(cache) == LARGE
    sequence.free()
    assert used(cache) == 0


def test_what_is_dropped_inside_of_one_is_not_zeroed_before_it_was_read() -> None:
    device = SimulatedDevice(random.Random())
    cache = on_driver(device, vmmkv.KVCache, LAYOUT, 1, 999, max_bytes=3 * LARGE * device.page_size, scrub=True)
    sequence = cache.sequence(LARGE * TOKENS)
    device.finish()
    last = sequence.k(0)[-1]
    last.fill_(3)
    read, reader = [], device.streams[1]
    sequence.record_stream(reader)
    reader.submit(lambda: read.append(ctypes.c_float.from_address(last.data_ptr()).value))
    sequence.truncate(1)
    sequence.extend(LARGE * TOKENS)
    device.streams[0].queue[0]()  # comes first, if it does not wait
    device.finish()
    assert read == [3]
    assert not last.any()
