"""What continuous batching asks of rows at each step, without a model: to grow in place, and to give memory back."""

from __future__ import annotations

import weakref
from random import Random

import pytest
import torch

import vmmkv
from vmmkv.integrations.idle_memory import IdleMemory
from vmmkv.integrations.row_requests import NO_ROOM, RowRequests
from vmmkv.integrations.row_stages import StagedRequests

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


def test_requests_are_on_all_devices_or_on_none() -> None:
    """Each has memory, rows and room on the host of its own. What fails on one is as it was on all."""
    random, devices = Random(), []
    for layers in (1, 2, 1):
        pool = vmmkv.FramePool(random.randint(20, 40) * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)
        layout, host = vmmkv.KVLayout(layers, 1, 64, torch.float32), random.randint(1, 20) * PAGE_SIZE
        devices.append(vmmkv.KVCache(layout, random.randint(4, 8), 1000, pool=pool, lookahead=0, host_bytes=host))
    requests = StagedRequests([RowRequests([cache], [0], reuse=True, has_host=True) for cache in devices])
    held: dict[str, int] = {}
    away, seen = set[str](), set[str]()
    met: set[tuple[str, bool]] = set()
    wanted = {(what, done) for what in ("grow", "return", "put away", "fork") for done in (False, True)}
    for number in range(5000):
        name = random.choice([*held, str(number)])
        tokens = held.get(name, 0) + random.choice((1, 1, 9, 40))
        seen.add(name)
        if name not in held:
            what, done = "begin", begins(requests, name)
            held |= {name: 0} if done else {}
        elif name in away or random.random() < 0.6:
            what = "return" if name in away else "grow"
            done = requests.grow_in_place(name, held[name], tokens) or requests.make_room(name, held[name], tokens)
            held[name] = tokens if done else held[name]
            away -= {name} if done else set()
        elif random.random() < 0.4:
            what, done = "put away", requests.put_away(name)
            away |= {name} if done else set()
            held = held if done else {each: held[each] for each in held if each != name}
        elif random.random() < 0.5:
            children = [f"{number}, {child}" for child in range(random.randint(1, 3))]
            started = requests.fork(name, children)
            seen.update(children)
            what, done = "fork", started == children
            held |= dict.fromkeys(started, held[name])
        else:
            what, done = "end", True
            requests.end(name)
            del held[name]
        met.add((what, done))
        for stage in requests.stages:
            assert {each for each in seen if each in stage} == held.keys() - away
            assert {each for each in seen if stage.is_away(each)} == away
            assert stage.caches[0].stats().tokens == sum(held[each] for each in held.keys() - away)
        if number > 100 and met >= wanted:
            break
    assert met >= wanted
    requests.end_all()
    for cache in devices:
        assert cache.stats().tokens == 0
        cache.check()
        cache.close()


def begins(requests: StagedRequests, name: str) -> bool:
    try:
        return requests.begin(name, 9) == 0
    except NO_ROOM:
        return False


def test_requests_end_with_who_holds_them() -> None:
    """Not when the garbage collector comes: they hold caches."""
    layout = vmmkv.KVLayout(1, 1, 64, torch.float32)
    cache = vmmkv.KVCache(layout, 1, 10, max_bytes=10 * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)
    requests = RowRequests([cache], [0], reuse=True, has_host=False)
    assert requests.stages == [requests]
    reference = weakref.ref(requests)
    del requests
    assert reference() is None


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
