"""Wrong arguments, and calls that come at a bad moment: refused by name, or right, and nothing has changed."""

from __future__ import annotations

import ctypes
from functools import partial
from random import Random
from typing import Any

import pytest
from conftest import small_driver
from core_rows import LAYOUT, Row, check_all, new_cache, new_pool
from faulty import FaultyDriver
from simulated_device import SimulatedDevice

from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.pool import Ask, Pool
from vmmkv.errors import (
    BusyError,
    DriverError,
    OutOfPagesError,
    OutOfRangeError,
    OutOfRowsError,
    StreamCaptureError,
    UseAfterFreeError,
)


def filled(cache: Cache, tokens: int = 20) -> Row:
    row = Row(cache.start(tokens))
    row.write(Random(), 0)
    return row


@pytest.mark.parametrize("number", [-(1 << 64), -1, 201, (1 << 63) - 1, (1 << 64) + 3])
def test_numbers_that_no_row_has(number: int) -> None:
    pool = new_pool()
    cache = new_cache(pool)
    row = filled(cache)
    batch = cache.batch([row.sequence])
    for call in (
        row.sequence.extend,
        row.sequence.extend_in_place,
        batch.extend,
        partial(cache.extend, [row.sequence]),
        lambda n: cache.extend([row.sequence], [n]),
        lambda n: cache.extend([cache.start()], 9, starts=[n]),
        row.sequence.truncate,
        row.sequence.release_before,
        cache.start,
        lambda n: cache.start(expected=n),
        partial(cache.share, row.sequence),
        lambda n: cache.adopt_kept(2, 0, n),
        lambda n: cache.adopt_kept(2, 0, 0, n),
        lambda n: cache.adopt_kept(2, 0, 0, 0, n),
        lambda n: cache.start(row=n),
        lambda n: cache.adopt_kept(n, 0, 0),
        lambda n: cache.start(key=min(n, -1)),
    ):
        with pytest.raises((ValueError, OverflowError, OutOfRangeError)):
            call(number)
        check_all(pool, cache)
        row.verify()


@pytest.mark.parametrize("call", ["unmap", "free", "synchronize"])
def test_a_cache_that_cannot_be_closed_is_closed_later(call: str) -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = new_pool(90, driver.inner)
    cache = new_cache(pool, reserved=7)
    for skip in range(30):
        row = filled(cache)
        row.sequence.fork()
        driver.fail(call, skip)
        try:
            cache.close()
        except DriverError:
            check_all(pool, *([cache] if cache.address in pool.caches else []))
            if call == "synchronize" and skip == 0:  # nothing was closed
                cache.start().free()
            else:
                with pytest.raises(UseAfterFreeError):
                    cache.start()
            cache.close()
            pool.trim_to()
            assert not driver.mapped
            assert (pool.word("used"), pool.word("committed"), pool.word("created")) == (0, 0, 0)
            cache = new_cache(pool, reserved=7)
        else:
            assert driver.heal()
            return
    raise AssertionError("it fails for ever")


# ---------------------------------------------------------------------- streams


class CapturingDevice(SimulatedDevice):
    """A device on which graphs may be captured: a call that would spoil a graph is misuse."""

    functions, memory = (*SimulatedDevice.functions, "is_capturing"), 1 << 20

    def __init__(self, random: Random) -> None:
        self.captured: set[int] = set()
        super().__init__(random)

    def _c_is_capturing(self, handle: int, out: int) -> None:
        ctypes.c_int64.from_address(out).value = handle in self.captured

    def meet(self, name: str) -> None:
        handle = {"record": 1, "wait": 0, "fill": 3, "copy": 3}.get(name)
        assert handle is None or self._now.words[handle] not in self.captured, "work of another stream in a graph"
        super().meet(name)


@pytest.mark.parametrize("scrub", [False, True])
def test_a_stream_that_is_captured_gets_no_work(scrub: bool) -> None:
    """Each operation is refused, or makes no call on the stream. Behind the capture all goes on."""
    done: list[str] = []
    for seed in range(12):
        random = Random(seed)
        device = CapturingDevice(random)
        pool = Pool(device.inner, 60)
        cache = Cache(pool, LAYOUT.record_bytes, 8, 200, scrub=scrub)
        first, second, _third = device.streams
        left: list[tuple[int, int]] = []
        for stream in (first, second):
            device.current = stream
            for length in (20, 7):
                sequence = cache.start(length)
                stream.submit(lambda: None)
                left.append((sequence.row, sequence.ticket >> 24))
                sequence.free()
        device.current = first
        live = [cache.start(9), cache.start(30)]
        live.append(live[1].fork())
        device.current = second
        live.append(cache.start(9))
        live[0].record_stream(second)
        captured = random.choice([first, second])
        device.current = random.choice([first, second])
        device.captured = {captured.cuda_stream}
        operations: list[tuple[str, Any]] = [
            *[(f"extend {index}", partial(each.extend, 1)) for index, each in enumerate(live)],
            *[(f"extend far {index}", partial(each.extend, 60)) for index, each in enumerate(live)],
            *[(f"fork {index}", each.fork) for index, each in enumerate(live)],
            *[(f"truncate {index}", partial(each.truncate, 2)) for index, each in enumerate(live)],
            *[(f"part {index}", partial(cache.part, each.ticket, 0)) for index, each in enumerate(live)],
            *[(f"record {index}", partial(each.record_stream, first)) for index, each in enumerate(live)],
            *[(f"adopt {row}", partial(cache.adopt_kept, row, last, 3)) for row, last in left],
            ("begin", partial(cache.start, 5)),
            ("begin more", partial(cache.start, 60)),
            ("trim", pool.trim_to),
            *[(f"free {index}", each.free) for index, each in enumerate(live)],
        ]  # fmt: skip
        kept: list[object] = []
        for name, operation in random.sample(operations, len(operations)):
            try:
                kept.append(operation())
                done.append(name)
            except (StreamCaptureError, UseAfterFreeError, OutOfPagesError, OutOfRowsError, ValueError):
                pass
            check_all(pool, cache)
        device.captured = set()
        kept.clear()
        cache.close()
        assert pool.word("used") == 0
    assert len(set(done)) > 10


def test_more_streams_than_slots() -> None:
    device = CapturingDevice(Random())
    pool = Pool(device.inner, 90)
    cache = Cache(pool, LAYOUT.record_bytes, 70, 20)
    sequences = []
    for _ in range(62):
        device.current = device.new_stream()
        sequences.append(cache.start())
    device.current = device.new_stream()
    for call in (
        cache.start,
        partial(cache.free, sequences[:2]),
        partial(sequences[0].record_stream, device.current),
    ):
        with pytest.raises(DriverError, match="more streams than 62"):
            call()
        check_all(pool, cache)
    device.current = device.streams[3]
    cache.free(sequences[:2])
    device.finish()
    device.current = device.new_stream()
    cache.start(3)
    check_all(pool, cache)


# ---------------------------------------------------------------------- in the middle of others


@pytest.mark.parametrize("fails", [False, True])
def test_a_sequence_that_grows_while_its_surplus_is_unmapped(fails: bool) -> None:
    """By another thread. It does not grow onto pages that are about to go."""
    driver = FaultyDriver(small_driver("cpu"))
    pool = new_pool(90, driver.inner)
    cache = new_cache(pool)
    row = filled(cache, 100)
    batch = cache.batch([row.sequence])
    row.sequence.truncate(5)
    del row.tokens[5:]
    ask = Ask()
    with pool.lock:
        serial = entries.plan_trim(pool.address, 0, 1024, ask.address)
        assert serial > 1
        assert row.sequence.capacity < 100
        assert not row.sequence.extend_in_place(60)
        with pytest.raises(BusyError):  # it needs pages, and this thread is in the middle
            batch.extend(60)
        assert row.sequence.extend_in_place(1)
        if fails:
            driver.fail("unmap")
        entries.run(pool.address, serial, 0)
        entries.commit(pool.address, serial, ask.address)
    row.write(Random(), 5)
    batch.extend(60)
    row.write(Random(), 6)
    check_all(pool, cache)
    row.verify()
