"""Events of caches: who only hears them knows what a sequence will find, whatever happens to the cache."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest
from router import Router
from test_prefixes import KEYS, LAYOUT, RANGES, Key, Machine, World

import vmmkv
from vmmkv.events import Created, Dropped, EventLog, salt_of


class Listener:
    """A cache that tells all it does to a router, in vLLM's words."""

    def __init__(self, world: World) -> None:
        self.cache, self.log = world.cache, world.cache.event_log
        self.router = Router()
        self.arrays = Random().random() < 0.5

    def listen(self, timeout: float = 0.0) -> list[Any]:
        events = self.cache.events(timeout)
        self.router.read_vllm(events, self.arrays)
        return events

    def hit(self, key: Key, ids: list[int]) -> int:
        """What the router expects a sequence to find, in whole blocks."""
        return self.router.hit(told(key), ids[:-1], self.log.block_size)

    def known(self) -> list[tuple[Key, list[int]]]:
        """All that is known."""
        keys = {told(key): key for key in KEYS}
        return [(keys[prefix[:2]], list(prefix[2:])) for prefix in self.router.known]

    def finds_what_is_known(self, world: World) -> None:
        """Looks whether what routers know is there."""
        world.cache.free(list(world.ids))
        world.ids.clear()
        for key, ids in Random().sample(every := self.known(), min(len(every), 20)):
            self.listen()
            hit, names = self.hit(key, [*ids, 99]), dict(zip(("salt", "adapter", "tenant"), key))
            tight = world.cache.pool.limit_pages < 100  # there may be no room for copies
            with world.cache.sequence(token_ids=[*ids, 99], **names) as sequence:
                assert tight or sequence.cached_tokens >= hit - (loose(world) if world.cache.layout is RANGES else 0)


def told(key: Key) -> tuple[str | None, str | None]:
    return salt_of(key[0], key[2]), None if key[1] is None else str(key[1])


def loose(world: World) -> int:
    """How many tokens a range's page has at most, by which a hit may differ."""
    return max(-(-world.cache.page_size // record) for record in world.cache.layout.record_bytes)


class Heard(Machine):
    """Random operations, and a listener that says what each new sequence will find."""

    listener: Listener

    def start(self, ids: list[int], key: Key = KEYS[0], reuse: bool = True, whole: bool = True) -> vmmkv.Sequence:
        """To the block; the cache may find more where a row is adopted whole, which is less than a page. It may find
        less of two prompts that part within a page if one was evicted in part, and where there is no room for copies.
        """
        self.listener.listen()
        expected, cache = self.listener.hit(key, ids), self.cache
        sequence = super().start(ids, key, reuse, whole)
        assert sequence.cached_tokens < expected + self.listener.log.block_size + loose(self)
        if reuse and cache.pool.limit_pages > 1000:
            assert sequence.cached_tokens >= expected - (loose(self) if cache.layout is RANGES else 0)
        return sequence

    def step(self) -> None:
        self.listener.listen()
        super().step()


@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("pages", [60, 2000], ids=["tight", "plenty"])
def test_a_listener_that_hears_all_knows_what_is_found(random: Random, layout: vmmkv.KVLayout, pages: int) -> None:
    log = EventLog(random.choice([1, 3, 4, 8, 16]))
    heard = Heard(random, pages, layout, event_log=log, large_frames=False)
    heard.listener = listener = Listener(heard)
    for _ in range(80):
        heard.step()
    listener.listen()
    listener.finds_what_is_known(heard)
    heard.cache.close()
    listener.listen()
    assert not listener.known()
    assert listener.log.dropped == 0


def test_what_is_stored_has_the_priority_that_it_is_kept_at() -> None:
    world = World(40, event_log=EventLog(8), large_frames=False)
    sequence = world.start([1] * 40)
    sequence.commit([1] * 40, retention=[vmmkv.Retention(0, 16, 80), vmmkv.Retention(16, None, 20)])
    sequence.commit([1] * 40)
    created, *stored = world.cache.events()
    assert isinstance(created, Created)
    assert [(event.blocks.start, len(event.blocks.hashes), event.priority) for event in stored] == [
        (0, 2, 80),
        (16, 3, 20),
    ]


def test_what_there_are_no_words_for_is_refused() -> None:
    world, silent, log, closed = World(event_log=EventLog(8)), World(), EventLog(), EventLog()
    silent.commit(silent.start([-1] * 20, (b"salt", -1, None)))
    closed.close()
    live = world.start([1] * 20)
    for call, match in (
        (silent.cache.events, "event_log"),
        (lambda: world.cache.sequence(token_ids=[1, 2], salt=b"x"), "routers"),
        (lambda: world.cache.sequence(token_ids=[-1]), "routers"),
        (lambda: live.commit([1 << 32] * 16), "routers"),
        *((lambda wrong=wrong: World(event_log=wrong), "log") for wrong in (world.cache.event_log, closed, 16)),
    ):
        with pytest.raises(vmmkv.ArgumentError, match=match):
            call()
    assert world.cache.sequence(token_ids=[-1], salt=b"x", reuse=False).length == 1  # nothing to tell of
    with pytest.raises(vmmkv.BudgetError):
        vmmkv.KVCache(LAYOUT, 2, 20, max_bytes=1, event_log=log, device="cpu")
    World(event_log=log)  # which was not spent


def test_threads_tell_in_order(seed: int) -> None:
    """Several compute and evict, one listens: it never hears of what continues nothing, and knows all in the end."""
    world = World(60, event_log=EventLog(8), large_frames=False)
    listener = Listener(world)
    errors: list[BaseException] = []

    def compute(number: int) -> None:
        random = Random(seed + number)
        try:
            for _ in range(60):
                ids = [random.randrange(2) for _ in range(random.randint(1, 6))] * 8
                try:
                    with world.cache.sequence(token_ids=ids, salt=random.choice([None, "salt"])) as sequence:
                        sequence.commit(ids)
                except vmmkv.OutOfPagesError:
                    world.cache.trim()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            listener.listen(timeout=0.1)
    finally:
        for thread in threads:
            thread.join()
    assert not errors
    listener.listen()
    world.cache.check()
    listener.finds_what_is_known(world)


def test_events_that_nobody_drains() -> None:
    """They are dropped, and counted; who comes late knows nothing that is not there."""
    world = World(60, event_log=EventLog(8, max_events=10), large_frames=False)
    listener = Listener(world)
    for token in range(40):
        world.free(world.commit(world.start([token] * 40)))
    dropped = world.cache.stats().events_dropped
    assert dropped > 10
    created, first, *_ = listener.listen()
    assert isinstance(created, Created)
    assert isinstance(first, Dropped)
    assert first.count == dropped
    listener.finds_what_is_known(world)
    before = {tuple(ids) for _, ids in listener.known()}
    world.commit(world.start([77] * 40))
    listener.listen()
    assert {tuple(ids) for _, ids in listener.known()} - before >= {(77,) * 8}
    assert world.cache.stats().events_dropped == dropped
