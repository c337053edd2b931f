"""Threads on one pool, with a watchdog: bytes stay whose they are, nobody waits for ever, and all of it comes back.

On a GPU each thread writes on a stream of its own, and looks at what it has written there or on another: nobody waits
for the device, so that pages leave their rows while work that reads them is still to come.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from contextlib import nullcontext, suppress

import pytest
import torch
from conftest import ROUNDS, small_driver

import vmmkv
from vmmkv.errors import OutOfPagesError, OutOfRowsError

SECONDS = (5 if torch.cuda.is_available() else 2) * ROUNDS
"""For all of these tests together."""
PATIENCE = 300
"""Seconds after which somebody waits for ever."""


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
        """Takes steps, at least one, until the time is over or somebody has failed."""
        own = self.streams[0]
        try:
            with torch.cuda.stream(own) if own else nullcontext():
                while (time.monotonic() < self.crew.until or not self.steps) and not self.crew.failures:
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
        what = chance.random()
        if what < 0.15 or not live:
            cache = chance.choice(caches)
            tenant = chance.choice([None, None, "alice", "bob"])
            sequence = cache.sequence(chance.randint(0, 40), expected_tokens=chance.choice([0, 0, 60]), tenant=tenant)
            live[sequence], self.written[sequence] = float(chance.randrange(1 << 20)), 0
        elif what < 0.25:
            self.forget(chance.choice(list(live)))  # left to the garbage collector
        elif what < 0.35:
            sequence = chance.choice(list(live))
            self.forget(sequence)
            sequence.free()
        elif what < 0.42:
            sequence = chance.choice(list(live))
            sequence.truncate(chance.randint(sequence.start, sequence.length))
            self.written[sequence] = min(self.written[sequence], sequence.length)
        elif what < 0.46:
            sequence = chance.choice(list(live))
            sequence.release_before(chance.randint(sequence.start, sequence.length))
        elif what < 0.48:
            chance.choice(caches).trim()
        elif what < 0.5:
            chance.choice(caches).check()
        elif what < 0.58:
            sequence = chance.choice(list(live))
            for child in sequence.cache.fork_many(sequence, chance.randint(1, 2)):
                live[child], self.written[child] = live[sequence], self.written[sequence]
        else:
            cache = chance.choice(list(live)).cache
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


class Crew:
    """Threads that use caches until the time is over; the first failure ends all."""

    def __init__(self, caches: list[vmmkv.KVCache], seconds: float) -> None:
        self.caches = caches
        self.until = time.monotonic() + seconds
        self.failures: list[BaseException] = []

    def run(self, threads: int) -> None:
        faulthandler.dump_traceback_later(self.until - time.monotonic() + PATIENCE)
        workers = [Worker(self, number) for number in range(threads)]
        crew = [threading.Thread(target=worker.work, daemon=True) for worker in workers]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(max(self.until - time.monotonic(), 0) + PATIENCE)
            assert not thread.is_alive(), "somebody waits for ever"
        faulthandler.cancel_dump_traceback_later()
        if self.failures:
            raise self.failures[0]


def layouts(page_size: int) -> list[vmmkv.KVLayout]:
    """Token records of an eighth of a page, and of three quarters of one in two ranges."""
    return [
        vmmkv.KVLayout(2, 2, page_size // 256, torch.float32),
        vmmkv.KVLayout(3, 4, page_size // 128, torch.float32, layers_per_range=2),
    ]


@pytest.mark.parametrize("num_caches", [1, 4])
@pytest.mark.parametrize("lookahead", [0, 24])
def test_eight_threads(device: str, num_caches: int, lookahead: int) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads take turns in the middle of things
    try:
        driver = small_driver(device)
        size = driver.page_size
        pool = vmmkv.FramePool(120 * size, driver=driver)
        caches = [
            vmmkv.KVCache(
                layouts(size)[index % 2],
                24 // num_caches,
                120,
                pool=pool,
                lookahead=lookahead,
                scrub=index == 2,
                guaranteed=10 * size if index else 0,
            )
            for index in range(num_caches)
        ]
        Crew(caches, SECONDS / 4).run(8)
        for cache in caches:
            cache.check()
            assert cache.stats().tokens == 0
        pool.trim()
        assert pool.stats().physical_bytes == 0
        for cache in caches:
            cache.close()
        pool.close()
    finally:
        sys.setswitchinterval(before)
