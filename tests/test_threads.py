"""Threads on one pool, with a watchdog: bytes stay whose they are, nobody waits for ever, and all of it comes back."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from conftest import small_driver

import vmmkv
from vmmkv.errors import OutOfPagesError, OutOfRowsError

SECONDS = float(os.environ.get("VMMKV_STRESS_SECONDS", "2"))
LAYOUTS = [
    vmmkv.KVLayout(2, 2, 16, torch.float32),
    vmmkv.KVLayout(3, 4, 32, torch.float32, layers_per_range=2),
]


class Crew:
    """Threads that use caches until the time is over; the first failure ends all."""

    def __init__(self, caches: list[vmmkv.KVCache], seconds: float) -> None:
        self.caches = caches
        self.until = time.monotonic() + seconds
        self.failures: list[BaseException] = []
        self.done = 0

    def serve(self, number: int) -> None:
        """Some sequences at a time, each with its own value in all of its tokens."""
        chance = random.Random(number)
        live: dict[vmmkv.Sequence, float] = {}
        try:
            while time.monotonic() < self.until and not self.failures:
                with suppress(OutOfPagesError, OutOfRowsError):
                    self.step(chance, live)
                self.done += 1
        except BaseException as error:
            self.failures.append(error)
        finally:
            for sequence in live:
                sequence.free()

    def step(self, chance: random.Random, live: dict[vmmkv.Sequence, float]) -> None:
        what = chance.random()
        if what < 0.15 or not live:
            cache = chance.choice(self.caches)
            expected = chance.choice([0, 0, 60])
            live[cache.sequence(chance.randint(0, 40), expected_tokens=expected)] = chance.random()
        elif what < 0.25:
            live.pop(chance.choice(list(live)))  # left to the garbage collector
        elif what < 0.35:
            sequence = chance.choice(list(live))
            del live[sequence]
            sequence.free()
        elif what < 0.42:
            sequence = chance.choice(list(live))
            sequence.truncate(chance.randint(sequence.start, sequence.length))
        elif what < 0.46:
            sequence = chance.choice(list(live))
            sequence.release_before(chance.randint(sequence.start, sequence.length))
        elif what < 0.48:
            chance.choice(self.caches).trim()
        elif what < 0.5:
            chance.choice(self.caches).check()
        else:
            cache = chance.choice(list(live)).cache
            batch = [each for each in live if each.cache is cache and each.length + 8 <= cache.max_seq_len]
            cache.extend(batch, chance.randint(0, 8))
        for sequence, value in live.items():
            for states in (sequence.k(0), sequence.v(sequence.cache.layout.num_layers - 1)):
                states.fill_(value)
            time.sleep(0)
            for states in (sequence.k(0), sequence.v(sequence.cache.layout.num_layers - 1)):
                assert states.eq(value).all(), "somebody else's bytes"

    def run(self, threads: int) -> None:
        crew = [threading.Thread(target=self.serve, args=(number,), daemon=True) for number in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(max(self.until - time.monotonic(), 0) + 60)
            if thread.is_alive():
                faulthandler.dump_traceback()
            assert not thread.is_alive(), "somebody waits for ever"
        if self.failures:
            raise self.failures[0]
        assert self.done > 0


@pytest.mark.parametrize("num_caches", [1, 4])
@pytest.mark.parametrize("lookahead", [0, 24])
def test_eight_threads(num_caches: int, lookahead: int) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads take turns in the middle of things
    try:
        pool = vmmkv.FramePool(120 * 4096, driver=small_driver("cpu"))
        caches = [
            vmmkv.KVCache(
                LAYOUTS[index % 2],
                24 // num_caches,
                120,
                pool=pool,
                lookahead=lookahead,
                scrub=index == 2,
                guaranteed=10 * 4096 if index else 0,
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
