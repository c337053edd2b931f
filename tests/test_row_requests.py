"""What continuous batching asks of rows at each step, without a model: to grow in place, and to give memory back."""

from __future__ import annotations

import weakref
from random import Random
from unittest.mock import Mock

import torch

import vmmkv
from vmmkv.integrations.batching.requests import Ranks, Requests

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
    """Each has memory and rows of its own. What fails on one is as it was on all. Requests that
    decode together grow together, in part of the steps."""
    random, caches = Random(), []
    for layers in (1, 2, 1):
        pool = vmmkv.FramePool(random.randint(20, 40) * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)
        layout = vmmkv.KVLayout(layers, 1, 64, torch.float32)
        caches.append(vmmkv.KVCache(layout, random.randint(4, 8), 1000, pool=pool, lookahead=0))
    weights = Mock(**{"switches.return_value": 0, "key.return_value": ""})
    requests = Requests(caches, [0] * 3, weights, Ranks(Mock(tp_size=1)), reuse=True)
    held: dict[str, int] = {}
    seen = set[str]()
    met: set[tuple[str, bool]] = set()
    wanted = {(what, done) for what in ("grow", "together", "fork") for done in (False, True)}
    for number in range(5000):
        name = random.choice([*held, str(number)])
        tokens = held.get(name, 0) + random.choice((1, 1, 9, 40))
        seen.add(name)
        requests.begin_step(())
        if name not in held:
            what, done = "begin", requests.begin(name, 9) == 0
            held |= {name: 0} if done else {}
        elif random.random() < 0.5:
            what = "grow"
            done = requests.admit(name, held[name], tokens, expected=9)
            held[name] = tokens if done else held[name]
            held = held if name in requests else {each: held[each] for each in held if each != name}
        elif random.random() < 0.3:
            requests.begin_step(held.items())
            what, done = "together", all(cache.stats().tokens > sum(held.values()) for cache in caches)
            held = {each: tokens + done for each, tokens in held.items()}
            assert all(requests.admit(each, held[each] - 1, held[each], expected=9) for each in held if done)
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
        assert {each for each in seen if each in requests} == held.keys()
        for cache in caches:
            assert cache.stats().tokens == sum(held.values())
        if number > 100 and met >= wanted:
            break
    assert met >= wanted
    requests.end_all()
    for cache in caches:
        assert cache.stats().tokens == 0
        cache.check()
        cache.close()


def test_requests_end_with_who_holds_them() -> None:
    """Not when the garbage collector comes: they hold caches."""
    layout = vmmkv.KVLayout(1, 1, 64, torch.float32)
    cache = vmmkv.KVCache(layout, 1, 10, max_bytes=10 * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)
    requests = Requests([cache], [0], Mock(), Ranks(Mock(tp_size=1)), reuse=True)
    reference = weakref.ref(requests)
    del requests
    assert reference() is None
