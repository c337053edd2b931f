"""Large frames: where they lie, and what they cost, as the documentation says."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver, has_memory
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.memory.frames import LARGE

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


@pytest.mark.parametrize(
    "options", [{"zero_tail": True}, {"max_tokens": 800, "max_bytes": None}, {"large_frames": False}], ids=str
)
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


def test_one_in_the_middle_of_which_no_token_is_left_goes_to_others() -> None:
    cache, driver = make(pages=2 * LARGE)
    sequence = cache.sequence(LARGE * TOKENS)
    page = random.randint(1, LARGE - 1)
    sequence.truncate(page * TOKENS)
    sequence.release_before(page * TOKENS)
    assert used(cache) == 0
    other = cache.sequence(2 * LARGE * TOKENS)
    assert used(cache) == cache.available_pages + 2 * LARGE == 2 * LARGE
    other.free()
    sequence.extend(TOKENS)
    assert has_memory(sequence, driver)
    assert used(cache) == 1
    cache.check()


def test_who_adopts_one_and_would_end_in_it_has_single_pages_there() -> None:
    cache, driver = make()
    cache.sequence(3 * LARGE * TOKENS).free()
    tokens = random.randint(LARGE * TOKENS + 1, (2 * LARGE - 1) * TOKENS)
    sequence = cache.sequence(tokens)
    assert cache.stats().adoptions == 1
    assert used(cache) == -(-tokens // TOKENS)
    assert len({driver.mapped[sequence.k(0)[at].data_ptr() // 4096 * 4096] for at in range(LARGE * TOKENS)}) == 1


@pytest.mark.parametrize("_", range(10))
def test_who_adopts_them_and_grows_wastes_no_more_than_the_last_page(_: int) -> None:
    """Also who ends in front of one, and grows into it."""
    cache, driver = make()
    first = cache.sequence(random.randint(0, 2 * LARGE) * TOKENS)
    while first.length < 4 * LARGE * TOKENS:  # single frames and large ones behind each other
        first.extend(random.choice([1, LARGE, LARGE + 1]) * TOKENS)
    first.free()
    sequence = cache.sequence(random.randint(1, 3 * LARGE) * TOKENS - random.choice([0, 0, 1]))
    assert cache.stats().adoptions == 1
    for _ in range(2 * LARGE):
        assert used(cache) == -(-sequence.length // TOKENS)
        sequence.extend(random.randint(1, TOKENS))
    assert has_memory(sequence, driver)
    cache.check()


def test_frames_are_converted_where_only_others_are_free() -> None:
    cache, driver = make(pages=2 * LARGE)
    short = [cache.sequence(TOKENS) for _ in range(2 * LARGE)]
    assert frames(driver) == (0, 2 * LARGE)
    cache.free(short)
    prompt = cache.sequence(2 * LARGE * TOKENS)  # adopts the page of one of them, and needs all others
    assert frames(driver) == (1, LARGE)
    prompt.free()
    short = [cache.sequence(TOKENS) for _ in range(LARGE + 1)]
    assert used(cache) == LARGE + 1
    assert frames(driver) == (0, 2 * LARGE)
    cache.check()
    cache.free(short)
