"""Prewarming: what was made ahead nobody waits for, nothing of it is lost, and others can have it."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import ROUNDS, on_driver, small_driver
from faulty import FaultyDriver, has_memory

import vmmkv
from vmmkv.errors import BudgetError, DriverError, DriverOutOfMemoryError, OutOfPagesError, SequenceTooLongError
from vmmkv.memory.frames import LARGE

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
TOKENS = 8
"""Of a page."""
BOTH = pytest.mark.parametrize("options", [{}, {"large_frames": False}, {"zero_tail": True}, {"scrub": True}], ids=str)


def make(pages: int = 200, **options: object) -> tuple[vmmkv.KVCache, FaultyDriver]:
    driver = FaultyDriver(small_driver("cpu"))
    where = {"driver": driver, "max_bytes": pages * driver.page_size, "lookahead": 0} | options
    return on_driver(where.pop("driver"), vmmkv.KVCache, LAYOUT, 40, 100 * TOKENS, **where), driver


def state(cache: vmmkv.KVCache, driver: FaultyDriver) -> object:
    stats = cache.stats()
    return driver.num_pages, driver.mapped.copy(), stats.pages, stats.rows, cache.pool.stats().free_bytes


def makes_nothing(cache: vmmkv.KVCache, driver: FaultyDriver, tokens: int) -> vmmkv.Sequence:
    """Starts a sequence, for which the driver makes no memory; returns it."""
    made = cache.stats().pages_created
    sequence = cache.sequence(tokens)
    assert has_memory(sequence, driver)
    assert cache.stats().pages_created == made
    return sequence


@BOTH
def test_all_of_the_budget_is_made_and_mapped_in_rows(options: dict[str, object]) -> None:
    pages = random.randint(60, 200)
    cache, driver = make(pages, **options)
    before, of_a_row = driver.num_pages, random.randint(2, 30)
    tokens = random.randint((of_a_row - 1) * TOKENS + 1, of_a_row * TOKENS)
    made = cache.prewarm(tokens=tokens)
    assert made == (pages - before) * driver.page_size
    assert driver.num_pages == pages
    cache.check()
    rows = min((pages - before) // of_a_row, 40)
    stats = cache.stats()
    assert stats.rows["parked"] == rows
    assert stats.pages["surplus"] == rows * of_a_row
    assert stats.pages["free"] == pages - before - rows * of_a_row
    changes = driver.changes
    sequences = [makes_nothing(cache, driver, tokens) for _ in range(rows)]
    if not options.get("zero_tail"):  # whose zeros behind a row are mapped then
        assert driver.changes == changes
    assert cache.stats().adoptions == rows
    cache.free(sequences)
    cache.check()
    cache.trim()
    assert driver.num_pages == before
    cache.close()
    assert not driver.handles


def test_who_begins_with_less_says_what_it_expects() -> None:
    """Or is not to have large frames: those that reach beyond what it has and expects it would not have for long."""
    tokens = random.randint(LARGE, 60) * TOKENS
    for options, expected in ({}, tokens), ({"large_frames": False}, 0):
        cache, driver = make(200, **options)
        cache.prewarm(tokens=tokens)
        changes = driver.changes
        for begin in (random.randint(1, tokens), 0):
            sequence = cache.sequence(begin, expected_tokens=expected)
            sequence.extend(tokens - begin)
            assert has_memory(sequence, driver)
        assert driver.changes == changes
        cache.check()


def test_rows_have_large_frames_as_those_of_a_prompt_do() -> None:
    cache, driver = make(3 * 40)
    cache.prewarm(tokens=40 * TOKENS)
    sizes = list(driver.sizes.values())
    assert (sizes.count(LARGE), sizes.count(1)) == (3 * 2, 3 * 8)


def test_on_a_device_the_first_sequences_make_no_call(device: str) -> None:
    driver = small_driver(device)
    layout = vmmkv.KVLayout(2, 2, driver.page_size // 256, torch.float32)  # 8 tokens in a page
    cache = on_driver(driver, vmmkv.KVCache, layout, 9, 99 * TOKENS, max_bytes=90 * driver.page_size)
    assert cache.prewarm(tokens=20 * TOKENS) == 90 * driver.page_size
    before = cache.stats().driver_calls
    sequences = [cache.sequence(20 * TOKENS) for _ in range(4)]
    assert cache.stats().driver_calls == before
    for sequence in sequences:
        sequence.k(0).fill_(sequence.number)
    assert all((sequence.k(0) == sequence.number).all() for sequence in sequences)
    cache.close()


@pytest.mark.parametrize("large", [True, False])
def test_without_tokens_it_is_free_three_quarters_of_it_large(large: bool) -> None:
    cache, driver = make(160, large_frames=large)
    assert cache.prewarm("100%") == 160 * driver.page_size
    assert not driver.mapped
    assert list(driver.sizes.values()).count(LARGE) == (7 if large else 0)
    assert cache.stats().pages["free"] == driver.num_pages == 160
    prompts = [makes_nothing(cache, driver, 2 * LARGE * TOKENS + 5) for _ in range(3)]
    assert makes_nothing(cache, driver, 3 * TOKENS).length == 3 * TOKENS
    cache.free(prompts)
    cache.check()


def test_what_there_is_already_counts() -> None:
    """So it can be called again, and beside sequences."""
    cache, driver = make(100)
    first, second = cache.sequence(20 * TOKENS), cache.sequence(10 * TOKENS)
    second.free()
    size = driver.page_size
    assert cache.prewarm(25 * size) == 0
    assert cache.prewarm(50 * size) == 20 * size
    assert cache.prewarm(0.5) == 0
    before = state(cache, driver)
    assert cache.prewarm(50 * size) == 0
    assert cache.prewarm(45 * size) == 0  # less than there is, and free
    assert state(cache, driver) == before
    assert cache.prewarm(tokens=9) == 50 * size
    assert has_memory(first, driver)
    cache.check()


def test_a_longer_prompt_takes_what_was_mapped_elsewhere() -> None:
    cache, driver = make(96, large_frames=False)
    cache.prewarm(tokens=10 * TOKENS)
    makes_nothing(cache, driver, 96 * TOKENS)
    cache.check()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_bytes": "1PiB"}, BudgetError),
        ({"max_bytes": "a lot"}, BudgetError),
        ({"max_bytes": 80 * 4096}, OutOfPagesError),
        ({"max_bytes": 61 * 4096, "tokens": 20}, OutOfPagesError),
        ({"tokens": 801}, SequenceTooLongError),
        ({"tokens": -1}, ValueError),
        ({"tokens": 1.5}, TypeError),
    ],
    ids=str,
)
def test_what_cannot_be_had_changes_nothing(arguments: dict[str, object], error: type[Exception]) -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 100 * driver.page_size)
    cache, _ = make(pool=pool, driver=None, max_bytes=60 * driver.page_size)
    other, _ = make(pool=pool, driver=None, max_bytes=None)
    held = other.sequence(30 * TOKENS)
    before = state(cache, driver), pool.stats()
    with pytest.raises(error):
        cache.prewarm(**arguments)
    assert (state(cache, driver), pool.stats()) == before
    assert cache.prewarm() == 60 * driver.page_size
    assert other.prewarm() == 10 * driver.page_size
    assert has_memory(held, driver)


def test_what_is_guaranteed_to_others_is_lent_and_comes_back() -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 100 * driver.page_size)
    options = {"pool": pool, "driver": None, "max_bytes": None}
    cache, owner = make(**options)[0], make(guaranteed=70 * driver.page_size, **options)[0]
    cache.prewarm(tokens=20 * TOKENS)
    assert cache.stats().rows["parked"] == 5
    made = cache.stats().pages_created
    sequence = owner.sequence(70 * TOKENS)
    assert has_memory(sequence, driver)
    with pytest.raises(OutOfPagesError):
        cache.sequence(40 * TOKENS)
    cache.sequence(30 * TOKENS)
    assert driver.num_pages == 100
    assert cache.stats().pages_created <= made + 3 * LARGE  # large frames that single pages are made of
    cache.check()


def test_no_row_is_mapped_for_nobody_where_tenants_are_kept_apart() -> None:
    cache, driver = make(64)
    cache.sequence(10 * TOKENS, tenant="alice").free()
    cache.prewarm(tokens=10 * TOKENS)
    assert cache.stats().rows["parked"] == 1
    assert driver.num_pages == 64
    cache.check()


def test_what_the_mapper_keeps_free_is_not_mapped() -> None:
    cache, driver = make(128, lookahead=0)
    assert cache.prewarm(tokens=TOKENS * 3) == 128 * driver.page_size
    assert cache.stats().pages["free"] == 128 - 40 * 3
    ahead, driver = make(64, lookahead=4)
    ahead.prewarm(tokens=TOKENS * 2)
    assert ahead.stats().pages["free"] == 2


@pytest.mark.parametrize("out_of_memory", [True, False])
@BOTH
def test_a_failed_call_takes_all_of_it_back(options: dict[str, object], out_of_memory: bool) -> None:
    arguments = random.choice([{}, {"tokens": 20 * TOKENS}, {"max_bytes": "70%", "tokens": 18 * TOKENS}])
    skip, failures, is_over = 0, 0, False
    while not is_over:
        cache, driver = make(70, **options)
        cache.sequence(3 * TOKENS).free()
        before = state(cache, driver)
        driver.fail("create" if out_of_memory else "any", skip, out_of_memory)
        try:
            cache.prewarm(**arguments)
        except DriverError as error:
            failures += 1
            assert isinstance(error, DriverOutOfMemoryError) == out_of_memory  # noqa: PT017
            assert state(cache, driver) == before
            cache.check()
            assert cache.prewarm(**arguments) > 0
        is_over = driver.heal()
        cache.check()
        cache.close()
        assert not driver.mapped
        assert not driver.handles
        skip += random.randint(1, 3 if ROUNDS > 1 else 12)
    assert failures
