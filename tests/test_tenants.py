"""Tenants: what one wrote is nowhere to be read from another's rows."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import interrupted
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.errors import BusyError, DriverError, OutOfPagesError, OutOfRowsError, UseAfterFreeError
from vmmkv.space.mapper import Mapper
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
TENANTS = ["alice", "bob", None]


def readable(cache: vmmkv.KVCache, driver: FaultyDriver, row: int) -> bytes:
    """All that is mapped in a row."""
    pages = b""
    for arena, _ in cache._rows.ranges:
        start = arena.table.address_of(row, 0)
        inside = [page for page in sorted(driver.accessible) if start <= page < start + arena.row_bytes]
        pages += b"".join(ctypes.string_at(page, cache.page_size) for page in inside)
    return pages


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([{}, {"scrub": True}, {"zero_tail": True}, {"lookahead": 12}]))
def test_a_secret_is_never_readable_from_another_tenants_rows(seed: int, options: dict) -> None:
    """Two caches on one pool, with calls that fail."""
    chance = random.Random(seed)
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, chance.choice([14, 40]) * driver.page_size)
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


def planted(pages: int, layout: vmmkv.KVLayout = LAYOUT) -> tuple[SimulatedDevice, vmmkv.KVCache, Mapper]:
    """A cache on a device whose work runs late, whose mapper works when it is told to; all free pages hold a secret."""
    driver = SimulatedDevice(random.Random(random.random()))
    cache = on_driver(driver, vmmkv.KVCache, layout, 3, 80, max_bytes=pages * driver.page_size, lookahead=16)
    mapper = cache.pool.mapper
    assert isinstance(mapper, Mapper)
    mapper.ring = lambda: None  # type: ignore[method-assign]
    gone = cache.sequence(80, tenant="alice")
    driver.finish()
    for states in (gone.k(0), gone.v(0), gone.k(1), gone.v(1)):
        states.fill_(7.0)
    gone.free()
    cache._rows.reclaim(pages)
    return driver, cache, mapper


def is_secret(cache: vmmkv.KVCache, driver: FaultyDriver, sequence: vmmkv.Sequence) -> bool:
    """Whether the secret can be read anywhere in a sequence's row."""
    held = torch.frombuffer(bytearray(readable(cache, driver, sequence.row)), dtype=torch.float32)
    return bool((held == 7).any())


@pytest.mark.parametrize("layout", [LAYOUT, vmmkv.KVLayout(2, 2, 128, torch.float32)], ids=["single", "large"])
def test_what_has_left_a_tenant_is_cleaned_and_mapped_ahead(layout: vmmkv.KVLayout) -> None:
    """In the background, and mapped when it is clean, never before. Nobody waits for the device."""
    driver, cache, mapper = planted(110, layout)
    sequence = cache.sequence(1, tenant="bob", expected_tokens=60)
    driver.finish()
    capacity = sequence.capacity
    for _ in range(20):
        while mapper.work():
            assert not is_secret(cache, driver, sequence)
        assert sequence.capacity == capacity or driver.streams[-1].done
        cache.check()
        driver.finish()
    calls = driver.changes
    sequence.extend(59)
    assert driver.changes == calls
    assert not is_secret(cache, driver, sequence)
    stats = cache.stats()
    assert 0 < stats.pages_cleaned == cache.pool.stats().pages_cleaned
    assert stats.pages_mapped["ahead"] > 0


@pytest.mark.parametrize("grows", [False, True])
def test_who_begins_where_pages_are_being_mapped_for_who_has_just_ended(grows: bool) -> None:
    """In another thread, between any two calls of the driver that the mapper, or who grows, makes."""
    for call in range(6):
        driver, cache, mapper = planted(40)
        mine, others = cache.sequence(tenant="alice", expected_tokens=40), list[vmmkv.Sequence]()
        calls = count()

        def meanwhile(name: str) -> None:
            if next(calls) == call:  # noqa: B023
                mine.free()  # noqa: B023
                with suppress(BusyError):  # in another thread it would wait
                    others.append(cache.sequence(tenant="bob"))  # noqa: B023
            assert not any(readable(cache, driver, other.row) for other in others)  # noqa: B023

        driver.meet = meanwhile  # type: ignore[method-assign]
        with suppress(UseAfterFreeError):
            if grows:
                mine.extend(40)
            while mapper.work():
                pass
        assert next(calls) > call
        driver.meet = lambda name: None  # type: ignore[method-assign]
        cache.check()
        for other in others or [cache.sequence(tenant="bob")]:
            other.extend(8)
            driver.finish()
            assert not is_secret(cache, driver, other)


def test_what_is_being_cleaned_gives_way() -> None:
    """It is no reason to run out of pages, nor to show what was there."""
    driver, cache, mapper = planted(10)
    sequence = cache.sequence(8, tenant="bob")
    while mapper.work():
        pass
    taken = cache.stats().pages["surplus"]
    assert taken  # zeroing has not begun
    other = cache.sequence(72, tenant="carol")
    cache.check()
    driver.finish()
    assert not is_secret(cache, driver, other)
    assert not is_secret(cache, driver, sequence)


@pytest.mark.parametrize("call", ["reserve", "map", "set_access", "fill", "record", "query", "unmap"])
def test_a_call_that_fails_while_pages_are_cleaned(call: str) -> None:
    """Pages are still whose they were, and are cleaned the next time."""
    driver, cache, mapper = planted(30)
    sequence = cache.sequence(8, tenant="bob")
    driver.finish()
    fault = driver.fail(call)
    for _ in range(9):
        with suppress(DriverError):
            while mapper.work():
                pass
        cache.check()
        assert not is_secret(cache, driver, sequence)
        driver.finish()
    assert fault.was_met
    changes = driver.changes
    sequence.extend(8)
    assert driver.changes == changes
    assert not is_secret(cache, driver, sequence)


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_tenants_of_whom_nothing_is_left_are_forgotten(seed: int, is_clean: bool) -> None:
    """New ones come all the time, and some come back: as many are remembered as there are rows and pages, no row shows
    what another tenant wrote, and whoever is known finds what it left."""
    chance = random.Random(seed)
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 12 * driver.page_size)
    pool.tenants.spare = 0
    caches = [vmmkv.KVCache(LAYOUT, 3, 60, pool=pool, scrub=is_clean) for _ in range(2)]
    live: list[tuple[vmmkv.KVCache, vmmkv.Sequence, int]] = []
    for _ in range(20):
        with suppress(OutOfPagesError, OutOfRowsError, vmmkv.SequenceTooLongError):
            what = chance.randrange(5)
            if what < 3:
                cache, tenant = chance.choice(caches), chance.randrange(1, 30) * chance.choice([1, 1000])
                live.append((cache, cache.sequence(chance.choice([0, 20, 40]), tenant=tenant), tenant))
            elif what == 3 and live:
                live.pop(chance.randrange(len(live)))[1].free()
            elif live:
                chance.choice(live)[1].extend(chance.randint(0, 20))
        for cache, sequence, tenant in live:
            held = torch.frombuffer(bytearray(readable(cache, driver, sequence.row) or bytes(4)), dtype=torch.float32)
            assert ((held == tenant) | (held == 0) | held.isnan()).all()
        for _, sequence, tenant in live:
            for states in (sequence.k(0), sequence.v(0), sequence.k(1), sequence.v(1)):
                states.fill_(tenant)
        assert len(pool.tenants) <= 2 * (1 + 12 + 2 * 3) + 1
    for cache in caches:
        cache.check()


def test_a_tenant_is_remembered_while_its_row_is() -> None:
    cache = vmmkv.KVCache(LAYOUT, 3, 60, max_bytes="1MiB", device="cpu", page_size=4096)
    cache.pool.tenants.spare = 4
    cache.sequence(40, tenant="alice").free()
    for number in range(50):
        cache.sequence(tenant=number).free()
    before = cache.stats().driver_calls["map"].count
    assert cache.sequence(40, tenant="alice").length == 40
    assert cache.stats().driver_calls["map"].count == before
    assert len(cache.pool.tenants) < 20


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


@pytest.mark.usefixtures("undebugged")
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


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["sequence", "tensor"])
@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
def test_an_interruption_leaves_no_secret(options: dict, kind: str) -> None:
    """At any line of a growth onto another tenant's pages: nothing of them can be read then, nor after the next."""
    ended, line = None, 0
    while ended is None:
        line += random.randint(1, 12)  # not at all of them, and at others in each run
        driver = FaultyDriver(small_driver("cpu"))
        driver.unmaps_anything = True
        pool = on_driver(driver, vmmkv.FramePool, 11 * driver.page_size)  # so that there are few but those
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


def lie_on_pieces(cache: vmmkv.KVCache) -> tuple[vmmkv.Sequence, ...]:
    """Tokens of bob's that whoever begins with them has to copy, in front of what is shared and behind it."""
    ids = np.arange(200)
    first = bobs(cache, ids)  # on a large frame
    ids = np.append(ids[:80], range(300, 328))
    return first, bobs(cache, ids), bobs(cache, ids)


def have_it_alone(cache: vmmkv.KVCache) -> tuple[vmmkv.Sequence, ...]:
    """A fork of bob's has for its own what it was truncated into."""
    first = bobs(cache, np.arange(40))
    fork = first.fork()
    fork.truncate(20)
    fork.extend(1)
    return first, fork


def grown(cache: vmmkv.KVCache, tenant: str) -> vmmkv.Sequence:
    """A sequence on 40 frames of one page."""
    sequence = cache.sequence(8, tenant=tenant)
    for _ in range(39):
        sequence.extend(8)
    return sequence


def bobs(cache: vmmkv.KVCache, ids: np.ndarray) -> vmmkv.Sequence:
    """Of which all that was not there is the secret."""
    sequence = cache.sequence(token_ids=ids, tenant="bob")
    cache.pool.driver.synchronize()
    for layer in range(2):
        sequence.k(layer)[sequence.cached_tokens :] = 7.0
        sequence.v(layer)[sequence.cached_tokens :] = 7.0
    sequence.commit(ids)
    return sequence


@pytest.mark.parametrize(("work", "call"), [(lie_on_pieces, "copy"), (have_it_alone, "wait_for")])
def test_a_copy_that_fails_leaves_no_secret(
    work: Callable[[vmmkv.KVCache], tuple[vmmkv.Sequence, ...]], call: str
) -> None:
    """On pages that were carol's, and are hers again afterwards, is nothing of bob's."""
    skip, was_met = 0, True
    while was_met:
        driver = SimulatedDevice(random.Random(skip))
        cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 4, 400, max_bytes=120 * driver.page_size, lookahead=0)
        grown(cache, "carol").free()
        driver.finish()
        cache._rows.reclaim(120)
        driver.fail(call, skip, lasting=True)
        with suppress(DriverError):
            work(cache)
        was_met = not driver.heal()
        driver.finish()
        cache.check()
        gc.collect()
        cache._rows.reclaim(120)
        hers = grown(cache, "carol")
        driver.finish()
        assert not is_secret(cache, driver, hers)
        skip += 1
    assert skip > 1


@pytest.mark.parametrize("share", [True, False])
def test_a_row_that_began_further_back_is_cleaned_from_its_new_beginning(share: bool) -> None:
    """Its own pages were behind the ones that it gets now, and are gone."""
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 32 * driver.page_size)
    caches = [vmmkv.KVCache(LAYOUT, 3, 320, pool=pool, large_frames=False) for _ in range(2)]
    short, moved = caches[1].sequence(3, tenant="bob"), caches[1].sequence(240, tenant="bob")
    for states in (short.k(0), short.k(1), short.v(0), short.v(1)):
        states.fill_(1.0)
    moved.release_before(160)
    moved.truncate(160)
    secret = caches[0].sequence(248, tenant="alice")  # on all pages but one
    for states in (secret.k(0), secret.k(1), secret.v(0), secret.v(1)):
        states.fill_(7.0)
    secret.free()
    caches[1].reorder([short, moved], [0, 0], share=share)
    assert (moved.k(0) == 1).all()
    assert not (np.frombuffer(readable(caches[1], driver, moved.row), np.float32) == 7).any()
    caches[1].check()
