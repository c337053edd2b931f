"""Prewarming on the core: what was made ahead needs no call later, nothing of it is lost, and others can have it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import ROUNDS, small_driver
from faulty import FaultyDriver, has_memory
from interruption import interrupted

import vmmkv
from vmmkv.cache import KVCache
from vmmkv.core.pool import LARGE
from vmmkv.errors import BudgetError, DriverError, DriverOutOfMemoryError, OutOfPagesError, SequenceTooLongError
from vmmkv.pool import FramePool
from vmmkv.sequence import Sequence

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
TOKENS = 8
"""Of a page."""
BOTH = pytest.mark.parametrize("options", [{}, {"large_frames": False}, {"overread": 3}, {"scrub": True}], ids=str)


def make(
    pages: int = 200, pool: FramePool | None = None, driver: FaultyDriver | None = None, **options: Any
) -> tuple[KVCache, FaultyDriver]:
    """A cache, on a pool of so many pages if none is given."""
    driver = driver or FaultyDriver(small_driver("cpu"))
    pool = pool or FramePool.on(driver.inner, pages * driver.page_size)
    return KVCache(LAYOUT, 40, 100 * TOKENS, pool=pool, **{"lookahead": 0} | options), driver


def state(cache: KVCache, driver: FaultyDriver) -> object:
    stats = cache.stats()
    return driver.num_pages, driver.mapped.copy(), stats.pages, stats.rows, cache.pool.stats().free_bytes


def makes_nothing(cache: KVCache, driver: FaultyDriver, tokens: int, **options: int) -> Sequence:
    """Starts a sequence, for which the driver makes no memory; returns it."""
    made = cache.stats().pages_created
    sequence = cache.sequence(tokens, **options)
    assert has_memory(sequence, driver)  # type: ignore[arg-type]
    assert cache.stats().pages_created == made
    return sequence


@BOTH
def test_all_of_the_budget_is_made_and_mapped_in_rows(options: dict[str, object]) -> None:
    pages = random.randint(60, 200)
    cache, driver = make(pages, **options)
    tokens = random.randint(9, 30 * TOKENS)
    of_a_row = -(-(tokens + int(options.get("overread", 0))) // TOKENS)  # type: ignore[call-overload]
    made = cache.prewarm(tokens=tokens)
    assert made == pages * driver.page_size
    assert driver.num_pages == pages
    cache.check()
    rows = 0 if options.get("scrub") else min(pages // of_a_row, 40)
    stats = cache.stats()
    assert stats.rows["parked"] == rows
    assert stats.pages["surplus"] == rows * of_a_row
    assert cache.pool.free_pages() == pages - rows * of_a_row
    assert stats.tokens == 0
    changes = driver.changes
    sequences = [makes_nothing(cache, driver, tokens) for _ in range(rows)]
    assert driver.changes == changes
    assert cache.stats().adoptions == rows
    cache.free(sequences)
    cache.check()
    cache.trim()
    assert driver.num_pages == 0
    cache.close()
    cache.pool.close()
    assert not driver.handles


def test_a_sequence_that_begins_with_less_says_what_it_expects() -> None:
    tokens = random.randint(LARGE, 60) * TOKENS
    for options, expected in ({}, tokens), ({"large_frames": False}, 0):
        cache, driver = make(200, **options)
        cache.prewarm(tokens=tokens)
        changes = driver.changes
        for begin in (random.randint(1, tokens), 0):
            sequence = cache.sequence(begin, expected_tokens=expected)
            sequence.extend(tokens - begin)
            assert has_memory(sequence, driver)  # type: ignore[arg-type]
            if begin or expected:
                assert driver.changes == changes
        cache.check()


def test_rows_have_large_frames_as_those_of_a_prompt_do() -> None:
    cache, driver = make(3 * 40)
    cache.prewarm(tokens=40 * TOKENS)
    sizes = list(driver.sizes.values())
    assert (sizes.count(LARGE), sizes.count(1)) == (3 * 2, 3 * 8)


@pytest.mark.parametrize("large", [True, False])
def test_without_tokens_it_is_free_three_quarters_of_it_large(large: bool) -> None:
    cache, driver = make(160, large_frames=large)
    assert cache.prewarm("100%") == 160 * driver.page_size
    assert not driver.mapped
    assert list(driver.sizes.values()).count(LARGE) == (7 if large else 0)
    assert cache.pool.free_pages() == driver.num_pages == 160
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
    assert has_memory(first, driver)  # type: ignore[arg-type]
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
def test_what_cannot_be_had_changes_nothing(arguments: dict[str, Any], error: type[Exception]) -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = FramePool.on(driver.inner, 100 * driver.page_size)
    cache, _ = make(pool=pool, driver=driver, max_bytes=60 * driver.page_size)
    other, _ = make(pool=pool, driver=driver)
    held = other.sequence(30 * TOKENS)
    before = state(cache, driver), pool.stats()
    with pytest.raises(error):
        cache.prewarm(**arguments)
    assert (state(cache, driver), pool.stats()) == before
    assert cache.prewarm() == 60 * driver.page_size
    assert other.prewarm() == 10 * driver.page_size
    assert has_memory(held, driver)  # type: ignore[arg-type]


def test_what_is_reserved_for_others_is_lent_and_comes_back() -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = FramePool.on(driver.inner, 100 * driver.page_size)
    cache, _ = make(pool=pool, driver=driver)
    owner, _ = make(pool=pool, driver=driver, reserved=70 * driver.page_size)
    cache.prewarm(tokens=20 * TOKENS)
    assert cache.stats().rows["parked"] == 5
    sequence = owner.sequence(70 * TOKENS)
    assert has_memory(sequence, driver)  # type: ignore[arg-type]
    with pytest.raises(OutOfPagesError):
        cache.sequence(40 * TOKENS)
    cache.sequence(30 * TOKENS)
    assert driver.num_pages == 100
    cache.check()


def test_no_row_is_mapped_where_tenants_are_kept_apart() -> None:
    cache, driver = make(64)
    cache.sequence(10 * TOKENS, tenant="alice").free()
    cache.prewarm(tokens=10 * TOKENS)
    assert cache.stats().rows["parked"] == 1
    assert driver.num_pages == 64
    cache.check()


def test_where_the_mapper_works_some_pages_stay_free() -> None:
    cache, driver = make(128)
    assert cache.prewarm(tokens=TOKENS * 3) == 128 * driver.page_size
    assert cache.pool.free_pages() == 128 - 40 * 3
    ahead, driver = make(64, lookahead=4)
    ahead.prewarm(tokens=TOKENS * 2)
    assert ahead.pool.free_pages() == 2


@pytest.mark.parametrize("out_of_memory", [True, False])
@BOTH
def test_a_failed_call_takes_all_of_it_back(options: dict[str, object], out_of_memory: bool) -> None:
    arguments: dict[str, Any] = random.choice(
        [{}, {"tokens": 20 * TOKENS}, {"max_bytes": "70%", "tokens": 18 * TOKENS}]
    )
    skip, failures, is_over = 0, 0, False
    while not is_over:
        cache, driver = make(70, **options)
        cache.sequence(3 * TOKENS).free()
        before = state(cache, driver)
        driver.fail("create" if out_of_memory else "any", skip, out_of_memory)
        try:
            cache.prewarm(**arguments)
        except (DriverError, OutOfPagesError) as error:
            failures += 1
            cause = error.__cause__ if isinstance(error, OutOfPagesError) else error
            assert isinstance(cause, DriverOutOfMemoryError) == out_of_memory
            assert state(cache, driver) == before
            cache.check()
            assert cache.prewarm(**arguments) > 0
        is_over = driver.heal()
        cache.check()
        cache.close()
        cache.pool.close()
        assert not driver.mapped
        assert not driver.handles
        skip += random.randint(1, 3 if ROUNDS > 1 else 12)
    assert failures


def test_an_interruption_at_any_line_leaves_no_row_without_a_sequence_in_use() -> None:
    ended, line = None, 0
    while ended is None:
        line += random.randint(1, 40)
        cache, driver = make(70)
        ended = interrupted(lambda cache=cache: cache.prewarm(tokens=20 * TOKENS), line)
        cache.pool.set_limit(70 * driver.page_size)  # books a journal that was left behind
        cache.check()
        assert (cache.stats().tokens, cache.pool.stats().used_bytes) == (0, 0)
        sequence = cache.sequence(70 * TOKENS)
        assert has_memory(sequence, driver)  # type: ignore[arg-type]
        sequence.free()
        cache.close()
        cache.pool.close()
        assert not driver.handles


def test_on_a_device_the_first_sequences_make_no_call(device: str) -> None:
    driver = small_driver(device)
    layout = vmmkv.KVLayout(2, 2, driver.page_size // 256, torch.float32)  # 8 tokens in a page
    pool = FramePool.on(driver, 90 * driver.page_size)
    cache = KVCache(layout, 9, 99 * TOKENS, pool=pool)
    assert cache.prewarm(tokens=20 * TOKENS) == 90 * driver.page_size
    before = cache.stats().driver_calls
    sequences = [cache.sequence(20 * TOKENS) for _ in range(4)]
    assert cache.stats().driver_calls == before
    for sequence in sequences:
        sequence.k(0).fill_(sequence.number)
    assert all((sequence.k(0) == sequence.number).all() for sequence in sequences)
    cache.close()
    pool.close()
