"""Threads on one pool, with a watchdog: bytes stay whose they are, nobody waits for ever, and all of it comes back.

On a GPU each thread writes on a stream of its own, and looks at what it has written there or on another: nobody waits
for the device, so that pages leave their rows while work that reads them is still to come.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
import torch
from conftest import PATIENCE, ROUNDS, join, on_driver, small_driver
from faulty import FaultyDriver, has_memory
from test_prefixes import Key, Machine

import vmmkv
from vmmkv.errors import OutOfHostMemoryError, OutOfPagesError, OutOfRowsError

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
STEPS = (250 if torch.cuda.is_available() else 100) * ROUNDS
"""Of each of eight threads."""


class Worker:
    """A thread's sequences, each with its own value in all of its tokens.

    Args:
        crew: whose caches it uses.
        number: its number.
    """

    def __init__(self, crew: Crew, number: int) -> None:
        self.crew, self.chance = crew, random.Random(number)
        self.live: dict[vmmkv.Sequence, float] = {}
        self.written: dict[vmmkv.Sequence, int] = {}
        device = crew.caches[0].device
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]
        self.wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in self.streams]
        """By stream: elements that were somebody else's."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.steps = 0

    def work(self) -> None:
        """Takes its steps, or fewer if a thread has failed."""
        own = self.streams[0]
        try:
            with torch.cuda.stream(own) if own else nullcontext():
                while self.steps < self.crew.steps and not self.crew.failures:
                    with suppress(OutOfPagesError, OutOfRowsError):
                        self.step()
                    self.look()
                    self.write()
                    self.steps += 1
                    if own is None or self.steps % 64 == 0:
                        self.check()
                self.check()
        except BaseException as error:
            self.crew.failures.append(error)
        finally:
            with torch.cuda.stream(own) if own else nullcontext():
                for sequence in self.live:
                    sequence.free()

    def step(self) -> None:
        chance, live, caches = self.chance, self.live, self.crew.caches
        sequence, what = chance.choice(list(live) or [None]), chance.random()
        if sequence is None or what < 0.15:
            cache = chance.choice(caches)
            tenant = chance.choice([None, None, "alice", "bob"])
            sequence = cache.sequence(chance.randint(0, 40), expected_tokens=chance.choice([0, 0, 60]), tenant=tenant)
            live[sequence], self.written[sequence] = float(chance.randrange(1 << 20)), 0
        elif what < 0.35:
            self.forget(sequence)
            if what < 0.25:  # others are left to the garbage collector
                sequence.free()
        elif what < 0.42:
            sequence.truncate(chance.randint(sequence.start, sequence.length))
            self.written[sequence] = min(self.written[sequence], sequence.length)
        elif what < 0.46:
            sequence.release_before(chance.randint(sequence.start, sequence.length))
        elif what < 0.48:
            chance.choice([chance.choice(caches).trim, self.crew.move_limit])()
        elif what < 0.58:
            for child in sequence.cache.fork_many(sequence, chance.randint(1, 2)):
                live[child], self.written[child] = live[sequence], self.written[sequence]
        else:
            cache = sequence.cache
            batch = [each for each in live if each.cache is cache and each.length + 8 <= cache.max_seq_len]
            cache.extend(batch, chance.randint(0, 8))

    def forget(self, sequence: vmmkv.Sequence) -> None:
        del self.live[sequence], self.written[sequence]

    def states(self, sequence: vmmkv.Sequence) -> list[torch.Tensor]:
        """K of the first layer, and V of the last."""
        return [sequence.k(0), sequence.v(sequence.cache.layout.num_layers - 1)]

    def look(self) -> None:
        """Counts what is wrong in tokens that were written at some time, on any of its streams."""
        which = self.chance.randrange(2)
        own, stream = self.streams[0], self.streams[which]
        if stream and own and stream is not own:
            stream.wait_stream(own)
        with torch.cuda.stream(stream) if stream else nullcontext():
            if stream and self.chance.random() < 0.05:
                torch.cuda._sleep(10**6)
            for sequence, value in self.live.items():
                if stream:
                    sequence.record_stream(stream)
                for states in self.states(sequence):
                    self.wrong[which] += (states[: max(self.written[sequence] - sequence.start, 0)] != value).sum()
        if stream and own and stream is not own:
            own.wait_stream(stream)  # before it writes there, or frees

    def write(self) -> None:
        """Fills tokens that are new."""
        for sequence, value in self.live.items():
            for states in self.states(sequence):
                states[max(self.written[sequence] - sequence.start, 0) :] = value
            self.written[sequence] = sequence.length

    def check(self) -> None:
        assert not any(int(wrong) for wrong in self.wrong), "somebody else's bytes"


class Sharer(Machine):
    """A thread's sequences, which begin like those of others."""

    def __init__(self, crew: Crew, number: int) -> None:
        self.crew, self.random = crew, random.Random(number)
        self.cache, self.known, self.finds_all = self.random.choice(crew.caches), crew.known, False
        self.ids, self.keys = {}, {}

    def check(self) -> None:
        for sequence in self.random.sample(list(self.ids), min(2, len(self.ids))):
            if not sequence.is_suspended:
                self.read(sequence, sequence.length)

    def work(self) -> None:
        """Takes its steps, or fewer if a thread has failed."""
        try:
            for _ in range(self.crew.steps):
                if not self.crew.failures:
                    with suppress(OutOfHostMemoryError):
                        self.step()
        except BaseException as error:
            self.crew.failures.append(error)
        finally:
            self.cache.free(list(self.ids))


class Crew:
    """Threads that use caches, each for so many steps; the first failure ends all."""

    def __init__(self, caches: list[vmmkv.KVCache], steps: int, kind: type[Worker | Sharer] = Worker) -> None:
        self.caches, self.kind = caches, kind
        self.known: dict[Key, list[list[int]]] = {}
        """Ids that were made known, by salt, adapter and tenant."""
        self.steps, self.pages = steps, caches[0].pool.limit_pages
        self.failures: list[BaseException] = []

    def move_limit(self) -> None:
        """Lowers the pool's limit by an eighth, or raises it again, unless what lives does not allow that."""
        pool = self.caches[0].pool
        pool.set_limit((self.pages - random.choice([0, self.pages // 8])) * pool.page_size)

    def run(self, threads: int) -> None:
        workers = [self.kind(self, number) for number in range(threads)]
        crew = [threading.Thread(target=worker.work, daemon=True) for worker in workers]
        for thread in crew:
            thread.start()
        join(*crew)
        if self.failures:
            raise self.failures[0]


def layouts(page_size: int) -> list[vmmkv.KVLayout]:
    """Token records of an eighth of a page, and of three quarters of one in two ranges."""
    return [
        vmmkv.KVLayout(2, 2, page_size // 256, torch.float32),
        vmmkv.KVLayout(3, 4, page_size // 128, torch.float32, layers_per_range=2),
    ]


@pytest.fixture
def _often_switched() -> Iterator[None]:
    """Threads take turns in the middle of things."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_often_switched")
@pytest.mark.parametrize(("num_caches", "lookahead"), [(1, 0), (4, 24)])
def test_eight_threads(device: str, num_caches: int, lookahead: int) -> None:
    driver = small_driver(device)
    size = driver.page_size
    pool = on_driver(driver, vmmkv.FramePool, 120 * size)
    caches = [
        vmmkv.KVCache(
            layouts(size)[index % 2],
            24 // num_caches,
            120,
            pool=pool,
            lookahead=lookahead,
            scrub=index == 2,
            overread=5 * (index == 1),
            reserved=10 * size if index else 0,
        )
        for index in range(num_caches)
    ]
    Crew(caches, STEPS).run(8)
    for cache in caches:
        cache.check()
        assert cache.stats().tokens == 0
    pool.trim()
    assert pool.stats().physical_bytes == 0
    for cache in caches:
        cache.close()
    pool.close()


@pytest.mark.usefixtures("_often_switched")
@pytest.mark.parametrize("layers_per_range", [1, 2])
def test_eight_threads_begin_alike(layers_per_range: int) -> None:
    """With all that moves tokens, in caches of which one is reserved what the other may have meanwhile."""
    layout = vmmkv.KVLayout(2, 1, 64, torch.float32, layers_per_range=layers_per_range)
    pool = on_driver(small_driver("cpu"), vmmkv.FramePool, 260 * 4096)
    options = {"pool": pool, "lookahead": 24, "host_bytes": 128 * 4096}
    caches = [
        vmmkv.KVCache(layout, 24, 200, **options, reserved=pages * 4096, large_frames=pages > 0) for pages in (0, 20)
    ]
    Crew(caches, STEPS, Sharer).run(8)
    for cache in caches:
        cache.check()
        assert cache.stats().tokens == 0
        cache.close()
    pool.close()


class BlockedDriver(FaultyDriver):
    """Before it maps it waits until it is let go on."""

    def __init__(self) -> None:
        super().__init__(small_driver("cpu"))
        self.has_come, self.goes_on = threading.Event(), threading.Event()
        self.blocks = False

    def _call(self, name: str, *args: object) -> object:
        if name == "map" and self.blocks:
            self.has_come.set()
            assert self.goes_on.wait(PATIENCE)
        return super()._call(name, *args)


@contextmanager
def blocked(driver: BlockedDriver, growth: Callable[[], object], goes_on: bool = False) -> Iterator[None]:
    """While another thread's growth is in the middle of the driver's call, which ends behind, or, if it `goes_on`, may
    do so before."""
    driver.blocks = True
    with ThreadPoolExecutor(1) as executor:
        grown = executor.submit(growth)
        try:
            assert driver.has_come.wait(PATIENCE)
            yield
            assert goes_on or not grown.done()
        finally:
            driver.blocks = False
            driver.goes_on.set()
            grown.result(PATIENCE)


@pytest.mark.parametrize("options", [{}, {"scrub": True}], ids=str)
@pytest.mark.parametrize("kind", ["sequence", "batch", "start"])
def test_who_needs_no_page_waits_for_nobodys(kind: str, options: dict) -> None:
    """While the driver maps for one, others begin, grow inside their pages, shrink, end, and look at what there is."""
    driver = BlockedDriver()
    pool = on_driver(driver, vmmkv.FramePool, 60 * driver.page_size)
    first, second = (vmmkv.KVCache(LAYOUT, 8, 100, pool=pool, **options) for _ in range(2))
    grown, beside, ended, left = (first.sequence(tokens) for tokens in (3, 3, 30, 20))
    elsewhere = second.sequence(3)
    growth = {
        "sequence": partial(grown.extend, 60),
        "batch": partial(first.extend, [grown, beside], [60, 3]),
        "start": partial(first.sequence, 63),
    }[kind]
    with blocked(driver, growth):
        for sequence in (elsewhere, *([beside] if kind != "batch" else [])):
            sequence.extend(1)
            sequence.cache.extend([sequence], 1)
            assert sequence.length == 5
            sequence.truncate(3)
        ended.free()
        del ended, left  # which nobody frees
        begun = [first.sequence(expected_tokens=expected) for expected in (0, 40)]
        assert not any(each.length for each in begun)
        assert first.stats().tokens == 6
    assert grown.length == (3 if kind == "start" else 63)
    for sequence in begun:
        sequence.extend(40)
        assert has_memory(sequence, driver)
    first.check()
    second.check()
    assert has_memory(grown, driver)


@pytest.mark.parametrize("name", ["free", "truncate"])
def test_who_ends_while_it_grows_has_not_grown(name: str) -> None:
    """By another thread, which is not how sequences are to be used: all is as if it had not grown, and nothing lost."""
    driver = BlockedDriver()
    cache = on_driver(driver, vmmkv.KVCache, LAYOUT, 8, 100, max_bytes=60 * driver.page_size)
    grown, beside = cache.sequence(3), cache.sequence(3)

    def grow() -> None:
        with pytest.raises(vmmkv.BusyError, match="another thread has changed the sequence"):
            cache.extend([beside, grown], 60)

    with blocked(driver, grow):
        grown.free() if name == "free" else grown.truncate(1)
    cache.check()
    assert beside.length == 3
    cache.extend([beside, *([] if name == "free" else [grown])], 60)
    cache.check()
    assert has_memory(beside, driver)
