"""Events of caches: who only hears them knows what a sequence will find, whatever happens to the cache."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from random import Random
from typing import Any

import pytest
from conftest import PATIENCE, join, on_driver, small_driver, some
from faulty import FaultyDriver
from router import Router
from test_prefixes import LAYOUT, RANGES, World, prompt

import vmmkv
from vmmkv.events import Cleared, Created, Dropped, EventLog, Removed, Stored, salt_of, tensorrt_llm

Key = tuple[Any, ...]
KEYS: list[Key] = [(None, None, None), ("salt", None, None), (None, 7, None), ("salt", "lora", None)]
KEYS += [(None, None, "tenant"), ("salt", None, 3)]


class Listener:
    """A cache that tells all it does to two routers, in vLLM's words and in TensorRT-LLM's.

    Args:
        world: of a cache with an event log.
    """

    def __init__(self, world: World) -> None:
        self.cache, self.log = world.cache, world.cache.event_log
        self.routers = Router(), Router()
        self.encoder = tensorrt_llm.Encoder(self.cache.max_seq_len)
        self.arrays = world.random.random() < 0.5

    def listen(self, timeout: float = 0.0) -> list[Any]:
        events = self.cache.events(timeout)
        self.routers[0].read_vllm(events, self.arrays)
        self.routers[1].read_tensorrt_llm(self.encoder.encode(events))
        return events

    def hit(self, key: Key, ids: list[int]) -> int:
        """What the routers expect a sequence to find, in whole blocks."""
        salt, adapter, tenant = key
        told = salt_of(salt, tenant), None if adapter is None else str(adapter)
        hits = {router.hit(told, ids[:-1], self.log.block_size) for router in self.routers}
        assert len(hits) == 1
        return hits.pop()

    def known(self) -> list[tuple[Key, list[int]]]:
        """All that is known."""
        keys = {(salt_of(key[0], key[2]), None if key[1] is None else str(key[1])): key for key in KEYS}
        return [(keys[prefix[:2]], list(prefix[2:])) for prefix in self.routers[0].known]


def listened(random: Random, pages: int, layout: vmmkv.KVLayout = LAYOUT, block_size: int = 8, **options: Any) -> World:
    return World(random, pages, layout, event_log=EventLog(block_size), **{"large_frames": False, **options})


def loose(world: World) -> int:
    """How many tokens a range's page has at most, by which a hit may differ."""
    return max(-(-world.cache.page_size // record) for record in world.cache.layout.record_bytes)


def finds_what_is_known(world: World, listener: Listener) -> None:
    """All that routers know is there."""
    world.cache.free(list(world.ids))
    world.ids.clear()
    for key, ids in world.random.sample(every := listener.known(), min(len(every), 20)):
        listener.listen()
        ids = [*ids, 99]
        hit = listener.hit(key, ids)
        salt, adapter, tenant = key
        tight = world.cache.pool.limit_pages < 100  # there may be no room for copies
        with world.cache.sequence(token_ids=ids, salt=salt, adapter=adapter, tenant=tenant) as sequence:
            assert tight or sequence.cached_tokens >= hit - (loose(world) if world.cache.layout is RANGES else 0)


@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("pages", [60, 2000], ids=["tight", "plenty"])
def test_who_hears_all_knows_what_is_found(layout: vmmkv.KVLayout, pages: int) -> None:
    """To the block; the cache may find more where a row is adopted whole, which is less than a page."""
    for block_size in (BLOCK_SIZES[index] for index in some(len(BLOCK_SIZES), 1)):
        seed = Random().randrange(1 << 32)
        print(f"{block_size=}, {seed=}")
        hears_all(Random(seed), layout, pages, block_size)


BLOCK_SIZES = [1, 3, 4, 8, 16]


def hears_all(random: Random, layout: vmmkv.KVLayout, pages: int, block_size: int) -> None:
    """Uses a cache at random, and asks those who hear of it what a sequence will find."""
    world = listened(random, pages, layout, block_size)
    listener = Listener(world)
    below = loose(world) if layout is RANGES else 0  # where of two that part one was evicted in part
    for _ in range(80):
        live, what = list(world.ids), random.random()
        listener.listen()
        try:
            if what < 0.45 or not live:
                key, ids = random.choice(KEYS), prompt(world)
                expected = listener.hit(key, ids)
                sequence = world.start(ids, key)
                assert sequence.cached_tokens < expected + block_size + loose(world)
                if pages == 2000:  # else there may be no room for copies
                    assert expected - below <= sequence.cached_tokens
                if random.random() < 0.8:
                    world.commit(sequence, random.choice([None, random.randint(0, len(ids))]))
            elif what < 0.6:
                sequence = random.choice(live)
                room = world.cache.max_seq_len - sequence.length
                world.extend(sequence, [random.randrange(2) for _ in range(min(random.randint(1, 20), room))])
                world.commit(sequence)
            elif what < 0.7:
                sequence = random.choice(live)
                world.truncate(sequence, random.randint(0, sequence.length))
            elif what < 0.75:
                world.fork_of(random.choice(live))
            elif what < 0.97:
                world.free(random.choice(live))
            else:
                world.cache.trim()
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError):
            for sequence in live:
                world.free(sequence)
        world.cache.check()
    listener.listen()
    finds_what_is_known(world, listener)
    world.cache.close()
    listener.listen()
    assert not listener.known()
    assert world.cache.event_log
    assert world.cache.event_log.dropped == 0


def test_hits_are_those_that_were_told_of() -> None:
    """With whole pages committed, and memory for all, a sequence finds exactly the blocks that routers know."""
    for block_size in (1, 2, 4, 8, 16, 24):
        random = Random()
        world = listened(random, 2000, block_size=block_size)
        listener, hits = Listener(world), 0
        for _ in range(60):
            listener.listen()
            key, ids = random.choice(KEYS[:3]), prompt(world)
            if len(world.ids) == 4:
                world.free(random.choice(list(world.ids)))
            sequence = world.start(ids, key)
            assert sequence.cached_tokens // block_size == listener.hit(key, ids) // block_size
            hits += bool(sequence.cached_tokens)
            world.commit(sequence, len(ids) // 8 * 8)
        assert hits


@pytest.mark.parametrize("block_size", [4, 8])
def test_a_page_in_which_two_part_stays_known_while_one_of_them_does(block_size: int) -> None:
    """The less needed of two prompts goes first, from its end to where they part, then the other to its beginning."""
    world = listened(Random(), 40, block_size=block_size)
    listener = Listener(world)
    prompts = [1] * 32, [1] * 22 + [2] * 10
    for ids, priority in zip(prompts, (50, 20)):
        with world.cache.sequence(token_ids=ids) as sequence:
            sequence.commit(ids, retention=[vmmkv.Retention(priority=priority)])
    hits = []
    for pages in range(34, 41):  # that others have; 6 are known
        with world.cache.sequence(25 * 8), world.cache.sequence((pages - 25) * 8):
            listener.listen()
            hits.append([listener.hit(KEYS[0], [*ids, 9]) for ids in prompts])
    shared = 22 // block_size * block_size
    assert hits == [[32, 32], [32, 24], [32, shared], [24, shared], [16, 16], [8, 8], [0, 0]]


def test_what_a_cache_tells() -> None:
    """Created with the blocks that fit; stored at its priority, removed, cleared."""
    log = EventLog(8)
    world = World(Random(), 40, LAYOUT, event_log=log, large_frames=False)
    (created,) = world.cache.events()
    assert isinstance(created, Created)
    assert created.device_blocks == 40
    sequence = world.start([1] * 40)
    assert world.cache.events() == []
    keep = [vmmkv.Retention(0, 16, 80), vmmkv.Retention(16, None, 20)]
    sequence.commit([1] * 40, retention=keep)
    sequence.commit([1] * 40)
    events = world.cache.events()
    assert [(event.blocks.start, len(event.blocks.hashes), event.priority) for event in events] == [
        (0, 2, 80),
        (16, 3, 20),
    ]
    assert events[1].blocks.parent == events[0].blocks.hashes[-1]
    world.free(sequence)
    world.cache.trim()
    hashes = events[0].blocks.hashes + events[1].blocks.hashes
    removed = world.cache.events()
    assert all(isinstance(event, Removed) for event in removed)
    assert [each for event in removed for each in event.hashes] == list(reversed(hashes))
    world.commit(world.start([1] * 40))
    world.cache.close()
    (stored, cleared) = world.cache.events(timeout=None)
    assert isinstance(stored, Stored)
    assert stored.blocks.hashes == hashes  # the same tokens, the same names
    assert isinstance(cleared, Cleared)
    assert world.cache.events(timeout=None) == []


def test_a_neighbour_on_the_pool_evicts_and_that_is_told() -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 40 * driver.page_size)
    logs = EventLog(8), EventLog(8)
    first, second = (vmmkv.KVCache(LAYOUT, 4, 320, pool=pool, large_frames=False, event_log=log) for log in logs)
    with first.sequence(token_ids=[1] * 80) as sequence:
        sequence.commit([1] * 80)
    stored = sum(len(event.blocks.hashes) for event in first.events() if isinstance(event, Stored))
    assert stored == 10
    kept = second.sequence(36 * 8)
    removed = sum(len(event.hashes) for event in first.events())
    assert removed == 6
    assert [type(event) for event in second.events()] == [Created]
    kept.free()
    with first.sequence(token_ids=[1] * 81) as sequence:
        assert sequence.cached_tokens == 8 * (stored - removed)
    pool.set_limit(driver.page_size)
    assert sum(len(event.hashes) for event in first.events()) >= stored - removed - 1


def test_nobody_listens() -> None:
    world = World(Random(), 40, LAYOUT)
    world.commit(world.start([-1] * 20, (b"salt", -1, None)))
    assert world.cache.event_log is None
    with pytest.raises(vmmkv.ArgumentError, match="event_log"):
        world.cache.events()


def test_what_there_are_no_words_for_is_refused() -> None:
    world = listened(Random(), 40)
    listener = Listener(world)
    live = world.start([1] * 20)
    for change in ({"salt": b"x"}, {"token_ids": [-1]}):
        with pytest.raises(vmmkv.ArgumentError, match="routers"):
            world.cache.sequence(**{"token_ids": [1, 2], **change})
    with pytest.raises(vmmkv.ArgumentError, match="routers"):
        live.commit([1 << 32] * 16)
    assert world.cache.sequence(token_ids=[-1], salt=b"x", reuse=False).length == 1  # nothing to tell of
    assert world.cache.stats().rows["live"] == 1
    world.commit(live)
    listener.listen()
    assert listener.hit(KEYS[0], [1] * 20) == 16
    log = world.cache.event_log
    closed = EventLog()
    closed.close()
    for wrong in (log, closed, 16):
        with pytest.raises(vmmkv.ArgumentError):
            World(Random(), 40, LAYOUT, event_log=wrong)
    unspent = EventLog()
    with pytest.raises(vmmkv.BudgetError):
        vmmkv.KVCache(LAYOUT, 2, 20, max_bytes=1, event_log=unspent, device="cpu")
    World(Random(), 40, LAYOUT, event_log=unspent)


def test_threads_tell_in_order() -> None:
    """Several compute and evict, one listens: it never hears of what continues nothing, and knows all in the end."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    world = listened(Random(seed), 60, rows=12)
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
    finds_what_is_known(world, listener)


def test_events_that_nobody_drains() -> None:
    """They are dropped, and counted; who comes late knows nothing that is not there."""
    world = World(Random(), 60, LAYOUT, event_log=EventLog(8, max_events=10), large_frames=False)
    listener = Listener(world)
    for token in range(40):
        world.commit(sequence := world.start([token] * 40))
        world.free(sequence)
    dropped = world.cache.stats().events_dropped
    assert dropped > 10
    created, first, *_ = listener.listen()
    assert isinstance(created, Created)
    assert isinstance(first, Dropped)
    assert first.count == dropped
    finds_what_is_known(world, listener)
    before = {tuple(ids) for _, ids in listener.known()}
    world.commit(world.start([77] * 40))
    listener.listen()
    assert {tuple(ids) for _, ids in listener.known()} - before >= {(77,) * 8}
    assert world.cache.stats().events_dropped == dropped


def test_who_awaits_events_is_woken_by_the_end() -> None:
    async def main() -> list[str]:
        world = listened(Random(), 40)
        log = world.cache.event_log
        assert log

        async def follow() -> list[str]:
            return [type(event).__name__ async for event in log]

        following = asyncio.create_task(follow())
        await asyncio.to_thread(lambda: world.commit(world.start([1] * 40)))
        await asyncio.to_thread(world.cache.close)
        return await following

    assert asyncio.run(main()) == ["Created", "Stored", "Cleared"]


def test_a_cache_that_is_collected_ends_its_log() -> None:
    world = listened(Random(), 40)
    world.commit(world.start([1] * 40))
    log = world.cache.event_log
    assert log
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def follow() -> None:
        while events := log.events(timeout=None):
            for event in events:
                found.put(type(event))

    thread = threading.Thread(target=follow)
    thread.start()
    assert [found.get(timeout=PATIENCE) for _ in range(2)] == [Created, Stored]
    world.ids.clear()
    world.keys.clear()
    del world
    gc.collect()
    join(thread)
    assert found.get_nowait() is Cleared
    assert log.closed
