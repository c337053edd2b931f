"""Tenants: what one wrote is nowhere to be read from another's rows."""

from __future__ import annotations

import ctypes
import random
from contextlib import suppress
from functools import partial

import pytest
import torch
from conftest import small_driver
from faulty import FaultyDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import interrupted

import vmmkv
from vmmkv.errors import DriverError, OutOfPagesError, OutOfRowsError
from vmmkv.space.mapper import Mapper
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
TENANTS = ["alice", "bob", None]


def readable(cache: vmmkv.KVCache, driver: FaultyDriver, row: int) -> bytes:
    """All that is mapped in a row."""
    pages = b""
    for arena, _ in cache._rows.ranges:
        start = arena.address + row * arena.row_bytes
        inside = [page for page in sorted(driver.accessible) if start <= page < start + arena.row_bytes]
        pages += b"".join(ctypes.string_at(page, cache.page_size) for page in inside)
    return pages


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([{}, {"scrub": True}, {"zero_tail": True}, {"lookahead": 12}]))
def test_a_secret_is_never_readable_from_another_tenants_rows(seed: int, options: dict) -> None:
    """Two caches on one pool, with calls that fail."""
    chance = random.Random(seed)
    driver = FaultyDriver(small_driver("cpu"))
    pool = vmmkv.FramePool(chance.choice([14, 40]) * driver.page_size, driver=driver)
    caches = [vmmkv.KVCache(LAYOUT, 3, 60, pool=pool, **options) for _ in range(2)]
    if isinstance(pool.mapper, Mapper):
        pool.mapper.ring = lambda: None  # type: ignore[method-assign]
    secrets = {tenant: random.Random(index).uniform(1, 2) for index, tenant in enumerate(TENANTS)}
    live: list[tuple[vmmkv.KVCache, vmmkv.Sequence, str | None]] = []
    for _ in range(25):
        if chance.random() < 0.2:
            driver.fail("any", chance.randrange(6))
        with suppress(OutOfPagesError, OutOfRowsError, DriverError):
            what = chance.randrange(5)
            if what < 2:
                cache, tenant = chance.choice(caches), chance.choice(TENANTS)
                sequence = cache.sequence(chance.randint(0, 40), expected_tokens=chance.choice([0, 50]), tenant=tenant)
                live.append((cache, sequence, tenant))
            elif what == 2 and live:
                _, sequence, _ = live.pop(chance.randrange(len(live)))
                sequence.free()
            elif what == 3 and live:
                _, sequence, _ = chance.choice(live)
                sequence.truncate(chance.randint(0, sequence.length))
            elif live:
                _, sequence, _ = chance.choice(live)
                sequence.extend(chance.randint(0, min(20, 60 - sequence.length)))
            while pool.mapper and pool.mapper.work():  # type: ignore[attr-defined]
                pass
        driver.heal()
        for cache, sequence, tenant in live:
            cache.check()
            for layer in range(2):
                sequence.k(layer).fill_(secrets[tenant])
                sequence.v(layer).fill_(secrets[tenant])
        for cache, sequence, tenant in live:
            held = torch.frombuffer(
                bytearray(readable(cache, driver, sequence.row)) or bytearray(4), dtype=torch.float32
            )
            for other in TENANTS:
                if other != tenant:
                    assert not (held == secrets[other]).any(), (tenant, other)


def test_a_growable_tensor_reads_no_tenants_bytes() -> None:
    pool = vmmkv.FramePool("1MiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 3, 60, pool=pool)
    sequence = cache.sequence(60, tenant="alice")
    sequence.k(0).fill_(7.0)
    sequence.free()
    cache.close()
    grown = GrowableTensor((4000,), torch.float32, pool=pool)
    grown.resize(4000)
    assert not (grown.tensor == 7).any()


def test_a_tenant_adopts_its_own_rows() -> None:
    cache = vmmkv.KVCache(LAYOUT, 3, 60, max_bytes="1MiB", device="cpu", page_size=4096)
    for tenant in ("alice", "bob"):
        cache.sequence(40, tenant=tenant).free()
    before = cache.stats().driver_calls["map"].count
    for tenant in ("bob", "alice"):
        assert cache.sequence(40, tenant=tenant).length == 40
    assert cache.stats().driver_calls["map"].count == before
    with pytest.raises(TypeError, match="unhashable"):
        cache.sequence(1, tenant=["carol"])


def test_what_is_cleaned_is_zero() -> None:
    cache = vmmkv.KVCache(LAYOUT, 2, 60, max_bytes="40KiB", device="cpu", page_size=4096)
    first = cache.sequence(60, tenant="alice")
    first.k(0).fill_(7.0)
    first.v(1).fill_(7.0)
    first.free()
    second = cache.sequence(60, tenant="bob")
    for layer in range(2):
        assert not second.k(layer).any()
        assert not second.v(layer).any()


@pytest.mark.parametrize("kind", ["sequence", "tensor"])
@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
def test_an_interruption_leaves_no_secret(options: dict, kind: str) -> None:
    """At any line of a growth onto another tenant's pages: nothing of them can be read then, nor after the next."""
    ended, line = None, 0
    while ended is None:
        line += random.randint(1, 6)  # not at all of them, and at others in each run
        driver = FaultyDriver(small_driver("cpu"))
        driver.unmaps_anything = True
        pool = vmmkv.FramePool(11 * driver.page_size, driver=driver)  # so that there are few but those
        cache = vmmkv.KVCache(LAYOUT, 2, 60, pool=pool, **options)
        grown = GrowableTensor((4000,), torch.float32, pool=pool, max_bytes=11 * driver.page_size)
        gone, sequence = cache.sequence(60, tenant="alice"), cache.sequence(3, tenant="bob")
        for states in (gone.k(0), gone.v(0), gone.k(1), gone.v(1)):
            states.fill_(7.0)
        gone.free()
        grow, first, then = (sequence.extend, 50, 2) if kind == "sequence" else (grown.resize, 4000, 2000)
        ended = interrupted(partial(grow, first), line)
        with suppress(vmmkv.InterruptedChangeError):
            cache.check()
            for _ in range(2):
                held = torch.frombuffer(bytearray(readable(cache, driver, sequence.row)), dtype=torch.float32)
                assert not (held == 7).any()
                assert not (grown.tensor == 7).any()
                grow(then)
