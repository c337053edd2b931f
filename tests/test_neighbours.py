"""Neighbours: caches without a pool of all share what a device has, and nothing else."""

from __future__ import annotations

import ctypes
import errno
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from conftest import on_driver, small_driver
from faulty import FaultyDriver

import vmmkv
from vmmkv.compiled.code import keep
from vmmkv.driver import host
from vmmkv.driver.mapping import PIECE
from vmmkv.driver.table import FUNCTIONS
from vmmkv.errors import OutOfPagesError
from vmmkv.memory.neighbours import asking, give_back

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
    for _ in range(60):
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


def test_a_driver_of_somebodys_own_is_nobodys_neighbour(small_device: SmallDevice) -> None:
    other = make(FaultyDriver(small_driver("cpu")))
    other.sequence(12 * 8).free()
    with pytest.raises(OutOfPagesError):
        make().sequence(12 * 8)
    assert physical(other) == 12


def test_no_bytes_go_from_one_cache_to_another(small_device: SmallDevice) -> None:
    """As they do on a pool, where what is NaN to one layout may lie behind another's tokens."""
    one, other = make(), make()
    with one.sequence(12 * 8) as sequence:
        sequence.k(0).fill_(float("nan"))
    sequence = other.sequence(12 * 8 - 7)
    sequence.extend(7)
    if not other.pool.is_debugged:  # which fills pages with NaN itself
        assert not sequence.k(0).isnan().any()


def test_who_asks_is_not_asked(small_device: SmallDevice) -> None:
    """So that no two wait for each other; and who is only busy is waited for."""
    one, other = make(), make()
    with asking(one.pool) as neighbours:
        assert other.pool in list(neighbours)
        with asking(other.pool) as neighbours:
            assert one.pool not in list(neighbours)
    with asking(other.pool) as neighbours:
        assert one.pool in list(neighbours)
    one.sequence(12 * 8).free()
    given: list[int] = []
    asks = threading.Thread(target=lambda: given.append(give_back(one.pool, 4 * one.page_size)))
    with one.pool.monitor.lock:
        asks.start()
    asks.join()
    assert given == [4 * one.page_size]
    one.close()
    assert give_back(one.pool, one.page_size) == 0


def test_a_refusal_keeps_nothing_alive(small_device: SmallDevice) -> None:
    """Not itself in a circle with the frames that it came through: what these hold ends at once."""
    live = make().sequence(12 * 8)
    with pytest.raises(OutOfPagesError) as caught:
        make().sequence(12 * 8)
    refusal = weakref.ref(caught.value)
    del caught
    assert refusal() is None
    assert live.length == 12 * 8


@pytest.mark.parametrize("call", ["create", "map"])
def test_a_pool_is_not_asked_in_the_middle_of_its_own_operation(small_device: SmallDevice, call: str) -> None:
    """As by a signal handler that grows another cache while the driver is called: it would wait for itself."""
    refusals: list[object] = []
    caches = [make(lookahead=0) for _ in range(2)]

    def interrupted(name: str, file: int) -> None:
        if name == call and file == caches[1].pool.driver.table["property"] and not refusals:
            refusals.append(None)
            try:
                caches[0].sequence((CAPACITY + 1) * 8)
            except OutOfPagesError as error:
                refusals.append(error)

    caches[1].sequence(40).free()  # nobody uses them
    grown = caches[1].sequence(8)
    small_device.before = interrupted
    thread = threading.Thread(target=lambda: grown.extend(60), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(refusals) == 2
    assert grown.length == 68


def test_what_ends_while_a_neighbour_gives_back_waits_for_nobody(small_device: SmallDevice) -> None:
    """As garbage collection ends it, in the thread that the one who asks waits for."""
    one, other = make(), make()
    ended = [one.sequence(8)]
    other.sequence(12 * 8).free()

    def collect(name: str, file: int) -> None:
        if name == "release" and ended:
            ended.pop().free()
            with pytest.raises(vmmkv.BusyError):
                one.trim()

    small_device.before = collect
    thread = threading.Thread(target=lambda: one.sequence(8 * 8), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "somebody waits for ever"
    assert not ended
    assert one.stats().rows["live"] == 0
    one.check()
