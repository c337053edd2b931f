"""Surplus of the compiled core: it goes where it is needed, without the bytes of others. Failing calls lose nothing."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from conftest import small_driver
from core_rows import token_at
from faulty import FaultyDriver

import vmmkv
from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Pool
from vmmkv.core.sequence import Sequence
from vmmkv.errors import DriverError, OutOfPagesError

LAYOUT = vmmkv.KVLayout(1, 1, 128, torch.float32)
"""Four tokens on a page."""


def opened(pages: int, **options: Any) -> tuple[Cache, FaultyDriver]:
    driver = FaultyDriver(small_driver("cpu"))
    return Cache(Pool(driver.inner, pages), LAYOUT.record_bytes, 5, 10_000, **{"large": False, **options}), driver


def write(sequence: Sequence, value: int, first: int = 0) -> None:
    place, record = token_at(sequence.cache, sequence.row, 0, first)
    ctypes.memset(place, value, (sequence.length - first) * record)


def read(sequence: Sequence, first: int = 0) -> set[int]:
    place, record = token_at(sequence.cache, sequence.row, 0, first)
    return set(ctypes.string_at(place, (sequence.length - first) * record))


def test_pages_whose_fill_has_failed_are_filled_before_they_are_used() -> None:
    cache, driver = opened(10)
    first = cache.start(36, key=1)
    write(first, 7)
    second = cache.start(4, key=2)
    write(second, 1)
    first.free()
    driver.fail("fill")
    with pytest.raises(DriverError):
        second.extend(20)
    if not second.extend_in_place(20):
        second.extend(20)
    assert read(second, 4) == {0}


def test_frames_that_only_parked_rows_share_are_reclaimed() -> None:
    cache, driver = opened(10)
    for trims in (False, True):
        first = cache.start(36)
        forks = [first, first.fork(), first.fork()]
        cache.free(forks)
        if trims:
            cache.pool.trim_to()
            assert driver.num_pages == 0
        cache.start(40, key=int(trims)).free()


def test_trim_gives_back_more_than_one_change_does() -> None:
    cache, driver = opened(2_000)
    cache.start(8_000).free()
    assert cache.pool.trim_to() == 2_000
    assert driver.num_pages == 0


def test_copies_for_which_there_is_no_room_are_not_begun() -> None:
    cache, _driver = opened(12)
    first = cache.start(32)
    fork, _other = first.fork(), cache.start(8)
    used = cache.pool.word("used")
    with pytest.raises(OutOfPagesError):
        cache.part(fork.ticket, 0)
    fork.truncate(27)
    with pytest.raises(OutOfPagesError):
        fork.extend(21)
    assert cache.pool.word("used") == used


@pytest.mark.parametrize("live", [0, 5])
def test_pages_that_were_mapped_one_by_one_become_large_frames(live: int) -> None:
    """Also where a large frame more than the tokens need would exceed the budget."""
    cache, _driver = opened(33 + live, large=True)
    kept = cache.start(4 * live)
    sequence = cache.start()
    for _ in range(33):
        cache.extend([sequence], 4)
    sequence.free()
    sequence = cache.start(expected=4 * 33, key=1)  # the parked row has another key
    cache.extend([sequence], 4 * 32)
    cache.extend([sequence], 4)
    assert cache.extents[sequence.row]["head_end"] == 32
    write(sequence, 7)
    assert read(sequence) == {7}
    assert kept.length == 4 * live
    check(cache.pool, [cache])
