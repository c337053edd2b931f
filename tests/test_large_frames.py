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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kept", [1, LARGE * TOKENS - 1])
def test_truncated_tokens_are_not_filled_before_other_streams_have_read_them(kept: int, large: bool, seed: int) -> None:
    """Whether the truncation gives a page up or not."""
    device = SimulatedDevice(random.Random(seed))
    memory = {"max_bytes": 3 * LARGE * device.page_size, "scrub": True, "large_frames": large}
    cache = on_driver(device, vmmkv.KVCache, LAYOUT, 1, 999, **memory)
    sequence = cache.sequence(LARGE * TOKENS)
    device.finish()
    last = sequence.k(0)[-1]
    last.fill_(3)
    read: list[float] = []
    sequence.record_stream(device.streams[1])
    device.streams[1].submit(lambda: read.append(ctypes.c_float.from_address(last.data_ptr()).value))
    sequence.truncate(kept)
    sequence.extend(LARGE * TOKENS - kept)
    device.finish()
    assert read == [3]
    assert not last.any()
