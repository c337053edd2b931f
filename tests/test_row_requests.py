"""What continuous batching asks of rows at each step, without a model: to grow in place, and to give memory back."""

from __future__ import annotations

from random import Random

import pytest
import torch

import vmmkv
from vmmkv.integrations.idle_memory import IdleMemory

PAGE_SIZE = 4096


def test_what_has_pages_grows_in_place_and_nothing_else_does() -> None:
    """Whatever a caller takes a sequence to hold: what is refused is as before, and no memory is taken."""
    random, layout = Random(), vmmkv.KVLayout(1, 1, 64, torch.float32)
    pool, outcomes = vmmkv.FramePool(200 * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE), set()
    with vmmkv.KVCache(layout, 2, 1000, pool=pool, lookahead=0, host_bytes="1MiB") as cache:
        sequence = cache.sequence()
        while sequence.length < 900:
            length, capacity, mapped = sequence.length, sequence.capacity, pool.stats().physical_bytes
            tokens, held = random.randint(0, 9), length + random.choice((0, 0, 0, -1, 1))
            grows = held == length and length + tokens <= capacity
            assert sequence.extend_in_place(tokens, held=held) == grows
            assert sequence.length == length + grows * tokens
            assert pool.stats().physical_bytes == mapped
            outcomes.add((grows, held == length))
            if not grows:
                sequence.extend(9)
        assert outcomes == {(True, True), (False, True), (False, False)}
        sequence.suspend()
        assert not sequence.extend_in_place(1)
        sequence.free()
        assert not sequence.extend_in_place(0)
        cache.check()


class Clock:
    """It stands still until it is turned."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [0.0, 0.5, 60.0])
def test_memory_goes_back_once_after_so_many_seconds_without_work(seconds: float) -> None:
    clock, given = Clock(), []
    idle = IdleMemory(seconds, lambda: given.append(clock.now), clock)
    for _ in range(2):
        idle.note(True)
        clock.now += 1000
        idle.note(False)  # from now on
        clock.now += seconds
        idle.note(False)
        assert not given
        clock.now += 0.25
        idle.note(False)
        assert given == [clock.now]
        clock.now += 1000
        idle.note(False)
        assert len(given) == 1
        given.clear()


def test_work_in_between_begins_the_time_anew_and_infinity_is_never() -> None:
    clock, given = Clock(), []
    idle, never = (IdleMemory(seconds, lambda: given.append(clock.now), clock) for seconds in (10.0, float("inf")))
    for is_busy, later in ((False, 9.0), (True, 9.0), (False, 9.0), (False, 2.0)):
        idle.note(is_busy)
        never.note(is_busy)
        clock.now += later
    assert not given
    idle.note(False)
    never.note(False)
    assert given == [clock.now]
