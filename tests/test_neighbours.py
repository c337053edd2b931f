"""Neighbours: caches without a pool of all share what a device has, and nothing else; nor do tenants of one cache."""

from __future__ import annotations

import ctypes
import errno
from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from conftest import on_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.compiled.code import keep
from vmmkv.driver import host
from vmmkv.driver.driver import Driver
from vmmkv.driver.mapping import PIECE
from vmmkv.driver.table import FUNCTIONS
from vmmkv.errors import OutOfPagesError
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
CAPACITY = 16
"""Pages of the device."""


class SmallDevice:
    """C functions of a device of few pages, which all drivers that are opened meanwhile are on.

    Attributes:
        pages: by the address of a driver's file, how many it has.
        before: called with the name of a function and that address, before each call.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pages: Counter[int] = Counter()
        self.before: Callable[[str, int], None] = lambda name, file: None
        self.callbacks, self.originals = {}, {}
        for name in ("create", "map", "release"):
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * FUNCTIONS[name])
            self.originals[name] = kind(host.WORDS[name])
            self.callbacks[name] = kind(getattr(self, name))
            keep(self.callbacks[name])  # garbage of these tests calls it later
            patch.setitem(host.WORDS, name, ctypes.cast(self.callbacks[name], ctypes.c_void_p).value)

    def create(self, out: int, nbytes: int, file: int, flags: int) -> int:
        self.before("create", file)
        if self.pages.total() + nbytes // 4096 > CAPACITY:
            return errno.ENOMEM
        self.pages[file] += nbytes // 4096
        return self.originals["create"](out, nbytes, file, flags)

    def map(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> int:
        self.before("map", self.piece(handle)["file"])
        return self.originals["map"](address, nbytes, offset, handle, flags)

    def release(self, handle: int) -> int:
        piece = self.piece(handle)
        self.before("release", piece["file"])
        self.pages[piece["file"]] -= int(piece["nbytes"]) // 4096
        return self.originals["release"](handle)

    def piece(self, handle: int) -> np.void:
        return np.frombuffer(ctypes.string_at(handle, PIECE.itemsize), PIECE)[0]

    def total(self) -> int:
        return self.pages.total()


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> SmallDevice:
    """Has drivers that are opened from now on have so many pages among them."""
    return SmallDevice(monkeypatch)


def make(driver: FaultyDriver | None = None, **options: int) -> vmmkv.KVCache:
    memory = {"max_bytes": CAPACITY * 4096, "device": "cpu", "page_size": 4096}
    return on_driver(driver, vmmkv.KVCache, LAYOUT, 8, 160, **memory, **options)


def physical(cache: vmmkv.KVCache) -> int:
    return cache.stats().physical_bytes // cache.page_size


def test_what_one_cache_does_not_use_another_can_have(small_device: SmallDevice) -> None:
    """Each may have the whole device, and has as much as the others' live tokens leave."""
    chance = Random()
    caches = [make() for _ in range(3)]
    live: list[tuple[vmmkv.KVCache, vmmkv.Sequence, float]] = []
    for _ in range(200):
        cache, pages, value = chance.choice(caches), chance.randint(1, 10), chance.random()
        room = CAPACITY - sum(sequence.length // 8 for _, sequence, _ in live)
        if live and chance.random() < 0.5:
            live.pop(chance.randrange(len(live)))[1].free()
        elif len(live) < 8 and pages <= room:
            sequence = cache.sequence(8 * pages)
            sequence.k(0).fill_(value)
            live.append((cache, sequence, value))
        elif len(live) < 8:
            with pytest.raises(OutOfPagesError):
                cache.sequence(8 * pages)
        for each in caches:
            each.check()
        assert small_device.total() == sum(map(physical, caches)) <= CAPACITY
        assert all((sequence.k(0) == value).all() for _, sequence, value in live)


def test_no_bytes_go_from_one_cache_to_another(small_device: SmallDevice) -> None:
    """As they do on a pool, where what is NaN to one layout may lie behind another's tokens."""
    one, other = make(), make()
    with one.sequence(12 * 8) as sequence:
        sequence.k(0).fill_(float("nan"))
    sequence = other.sequence(12 * 8 - 7)
    sequence.extend(7)
    if not other.pool.is_debugged:  # which fills pages with NaN itself
        assert not sequence.k(0).isnan().any()


def test_torch_gives_back_memory_without_tensors(small_device: SmallDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a growth is refused: after a training step torch has nearly all of a GPU."""
    cache = make()
    small_device.pages[0] = CAPACITY - 2
    monkeypatch.setattr(Driver, "empty_torch_cache", lambda _: small_device.pages.pop(0, 0) * 4096)
    assert cache.sequence(20).length == 20
    assert not small_device.pages[0]


# ---------------------------------------------------------------------- tenants


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
