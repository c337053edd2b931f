"""Fills of the compiled core, on a device whose work runs late: no page goes while a fill of it is under way."""

from __future__ import annotations

from random import Random

import torch
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.pool import Ask, Pool


class NoMapper:
    """Stands for a mapper that does nothing by itself."""

    def ring(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


def scrubbed(**options: int) -> tuple[Cache, SimulatedDevice]:
    """A cache whose pages are filled before a sequence has them."""
    device = SimulatedDevice(Random())
    pool = Pool(device.inner, 40)
    pool.mapper = NoMapper()
    layout = vmmkv.KVLayout(3, 2, 16, torch.float32)
    return Cache(pool, layout.record_bytes, 4, 100, large=False, scrub=True, **options), device


def test_pages_that_a_truncation_has_left_stay_until_they_are_filled() -> None:
    cache, device = scrubbed()
    sequence = cache.sequence(60)
    device.finish()
    sequence.truncate(1)
    sequence.extend(10)
    sequence.truncate(1)
    cache.pool.trim()
    device.finish()
    assert cache.pool.word("created") == 1


def test_pages_that_are_mapped_ahead_stay_until_they_are_filled() -> None:
    cache, device = scrubbed(lookahead=20)
    sequence = cache.sequence(10)
    device.finish()
    sequence.extend(3)
    cache.pool.change(Ask(), entries.plan_ahead, cache.pool.address, 4)
    assert cache.pool.word("created") > cache.pool.word("used")
    cache.pool.trim()
    device.finish()
    assert cache.pool.word("created") == cache.pool.word("used")
