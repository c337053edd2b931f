"""Surplus of the compiled core: it goes where it is needed, without the bytes of others. Failing calls lose nothing."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import pytest
import torch
from conftest import small_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Pool
from vmmkv.core.sequence import Sequence
from vmmkv.errors import DriverError, OutOfPagesError

LAYOUT = vmmkv.KVLayout(1, 1, 128, torch.float32)
"""Four tokens on a page."""
RECORD = 1024


def opened(pages: int, **options: Any) -> tuple[Cache, FaultyDriver]:
    driver = FaultyDriver(small_driver("cpu"))
    return Cache(Pool(driver.inner, pages), LAYOUT.record_bytes, 5, 10_000, **{"large": False, **options}), driver


def place(sequence: Sequence, token: int) -> int:
    part = sequence.cache.ranges[0]
    return int(part["address"]) + sequence.row * int(part["row_pages"]) * 4096 + token * RECORD


def write(sequence: Sequence, value: int, first: int = 0) -> None:
    ctypes.memset(place(sequence, first), value, (sequence.length - first) * RECORD)


def read(sequence: Sequence, first: int = 0) -> set[int]:
    return set(ctypes.string_at(place(sequence, first), (sequence.length - first) * RECORD))


def test_pages_that_move_between_tenants_in_one_change_are_filled() -> None:
    cache, _driver = opened(10)
    sequence = cache.start(40, key=1)
    write(sequence, 7)
    sequence.free()
    assert read(cache.start(40, key=2)) == {0}


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


def test_a_row_that_alone_is_live_needs_no_copies() -> None:
    cache, _driver = opened(8, limit=8)
    first = cache.start(32)
    first.fork().free()
    cache.part(first.ticket, 0)
    write(first, 3)


def test_a_fork_and_a_growth_have_all_surplus_of_live_rows() -> None:
    cache, _driver = opened(9)
    first = cache.start(36, expected=16)
    first.truncate(5)
    fork = first.fork()  # needs a page, which only its source has
    fork.free()
    cache.pool.trim_to()
    first.extend(31)
    first.truncate(4)
    cache.start(32)  # needs what `first` expects to need, too


def test_a_sequence_can_be_read_after_a_change_of_places_has_failed() -> None:
    failed = 0
    for skip in range(20):
        cache, driver = opened(20)
        first = cache.start(8)
        write(first, 5)
        fork = first.fork()
        driver.fail("any", skip)
        try:
            cache.part(fork.ticket, 0)
        except DriverError:
            failed += 1
        driver.heal()
        assert read(fork) == {5}
    assert failed >= 8


def test_a_scrubbed_sequence_that_was_cut_may_begin_late() -> None:
    cache, _driver = opened(20, scrub=True)
    sequence = cache.start(30)
    sequence.truncate(0)
    cache.pool.trim_to()
    cache.extend([sequence], 30, starts=[20])
    assert read(sequence, 20) == {0}


def test_a_scrubbed_fork_does_not_see_what_its_parent_writes_later() -> None:
    cache, _driver = opened(12, scrub=True)
    parent = cache.start(4)
    fork = parent.fork()
    parent.extend(36)
    write(parent, 9, 4)
    parent.free()
    fork.extend(30)
    assert read(fork, 4) == {0}


def test_a_frame_that_a_guest_drops_while_it_leaves_its_row_is_free() -> None:
    held = array("q", bytes(80))

    class Dropping(FaultyDriver):
        """Has the guest drop its frames before the first unmapping."""

        def _before_unmap(self, address: int, nbytes: int) -> None:
            super()._before_unmap(address, nbytes)
            entries.drop(cache.address, held.buffer_info()[0], len(held))
            del held[:]

    driver = Dropping(small_driver("cpu"))
    cache = Cache(Pool(driver.inner, 10), LAYOUT.record_bytes, 5, 10_000, large=False)
    first = cache.start(8)
    del held[entries.hold(cache.address, first.ticket, 0, 0, 8, held.buffer_info()[0], 10) :]
    assert len(held) == 2
    row = first.row
    first.free()
    assert cache.start(0, row=row).length == 0
    assert not held
    check(cache.pool, [cache])
    assert cache.pool.free_pages() == 2


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
