"""Fills of the compiled core, on a device whose work runs late: no page goes while a fill of it is under way."""

from __future__ import annotations

import ctypes
from random import Random

import numpy as np
import torch
from core_machine import NoMapper
from core_rows import new_cache, new_pool, token_at
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.pool import Ask, Pool
from vmmkv.core.tables import NOTE


def scrubbed(**options: int) -> tuple[Cache, SimulatedDevice]:
    """A cache whose pages are filled before a sequence has them."""
    device = SimulatedDevice(Random())
    pool = Pool(device.inner, 40)
    pool.mapper = NoMapper()
    layout = vmmkv.KVLayout(3, 2, 16, torch.float32)
    return Cache(pool, layout.record_bytes, 4, 100, large=False, scrub=True, **options), device


def test_pages_that_a_truncation_has_left_stay_until_they_are_filled() -> None:
    cache, device = scrubbed()
    sequence = cache.start(60)
    device.finish()
    sequence.truncate(1)
    sequence.extend(10)
    sequence.truncate(1)
    cache.pool.trim_to()
    device.finish()
    assert cache.pool.word("created") == 1


def test_pages_that_are_mapped_ahead_stay_until_they_are_filled() -> None:
    cache, device = scrubbed(lookahead=20)
    sequence = cache.start(10)
    device.finish()
    sequence.extend(3)
    cache.pool.change(Ask(), entries.plan_ahead, cache.pool.address, 4)
    assert cache.pool.word("created") > cache.pool.word("used")
    cache.pool.trim_to()
    device.finish()
    assert cache.pool.word("created") == cache.pool.word("used")


def bytes_of(cache: Cache, row: int, first: int, end: int) -> bytes:
    """What lies where tokens of a row are, or have been, in all ranges."""
    places = [(*token_at(cache, row, part, first),) for part in range(len(cache.ranges))]
    return b"".join(ctypes.string_at(place, record * (end - first)) for place, record in places)


def test_poison_leaves_alone_what_kernels_or_guests_may_read() -> None:
    pool = Pool(new_pool().driver, 200, poison=True)
    overread, known = new_cache(pool, overread=9), new_cache(pool)
    ring = np.zeros(8, NOTE)
    entries.join(known.address, ring.ctypes.data, len(ring))
    for cache in (overread, known):
        sequence = cache.start(50)
        row = sequence.row
        if cache is overread:
            assert 0xFF not in bytes_of(cache, row, 0, 59)
            sequence.truncate(3)
            assert 0xFF not in bytes_of(cache, row, 0, 59)
        for part in range(len(cache.ranges)):
            place, record = token_at(cache, row, part, 0)
            ctypes.memset(place, 7, record * sequence.length)
        length = sequence.length
        sequence.free()
        assert set(bytes_of(cache, row, 0, length)) == {7}
