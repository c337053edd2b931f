"""Prefixes that are evicted go to the host and come back: the same bytes, to nobody else, and never fewer hits.

K and V of a token stand for all that they depend on, as in `test_prefixes`.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import weakref
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROUNDS, each_with_few, on_driver, some
from faulty import FaultyDriver
from interruption import Interruption
from simulated_device import SimulatedDevice, Stream
from test_prefixes import LAYOUT, RANGES, World, prompt
from test_prefixes_failing import POLICIES, Busy, is_interrupted_everywhere, survives_all

import vmmkv
from vmmkv.driver.fence import Fence
from vmmkv.events import EventLog, Removed, Stored, tensorrt_llm
from vmmkv.reuse import host_pages
from vmmkv.reuse.host_pages import HostPages, Piece

PAGE = 4096
KEYS = [(None, None, None), ("salt", None, None), (None, 7, None), (None, None, "tenant")]


class Watched(Piece):
    """A piece of host memory of which simulated devices know whether it is there."""

    def __init__(self, memory: torch.Tensor, wanted: int) -> None:
        super().__init__(memory, wanted)
        SimulatedDevice.host[memory.data_ptr()] = memory.nbytes
        weakref.finalize(self, SimulatedDevice.host.pop, memory.data_ptr())


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "Piece", Watched)


def tiered(random: Random, pages: int, layout: vmmkv.KVLayout = LAYOUT, **options: Any) -> World:
    return World(random, pages, layout, **{"host_bytes": "1GiB", **options})


def on_host(world: World) -> int:
    return world.cache.stats().host_prefix_pages


# ------------------------------------------------------------------ any operations


@pytest.mark.few(8)
@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"large_frames": False}, {"overread": 5}], ids=str)
@pytest.mark.parametrize("host_bytes", ["1GiB", 40 * PAGE], ids=["plenty", "tight"])
def test_any_operations_in_any_order(layout: vmmkv.KVLayout, options: dict[str, Any], host_bytes: float | str) -> None:
    """Everybody reads what is theirs; with room on the host, and one range, all that was ever known is found."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    world = tiered(random, 60 if layout is LAYOUT else 110, layout, host_bytes=host_bytes, **options)
    for _ in range(60):
        live, what = list(world.ids), random.random()
        try:
            if what < 0.5 or not live:
                key, ids = random.choice(KEYS), prompt(world)
                reuse = random.random() < 0.9
                most = world.most(key, ids) if reuse else 0
                sequence = world.start(ids, key, reuse, whole=random.random() < 0.6)
                assert reuse or not sequence.cached_tokens
                if host_bytes == "1GiB" and layout is LAYOUT:
                    assert sequence.cached_tokens >= most
                if reuse and random.random() < 0.8:
                    world.commit(sequence, random.choice([None, random.randint(0, len(ids))]))
            elif what < 0.6:
                sequence = random.choice(live)
                most = min(world.cache.max_seq_len - sequence.length, 20)
                world.extend(sequence, [random.randrange(2) for _ in range(random.randint(0, most))])
                if sequence.key:
                    world.commit(sequence)
            elif what < 0.66:
                sequence = random.choice(live)
                world.truncate(sequence, random.randint(0, sequence.length))
            elif what < 0.72:
                world.fork_of(random.choice(live))
            elif what < 0.78:
                sequence = random.choice(live)
                sequence.suspend()
                world.cache.check()
                sequence.resume()
            elif what < 0.95:
                world.free(random.choice(live))
            else:
                world.cache.trim()
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError, vmmkv.OutOfHostMemoryError):
            for sequence in live:
                world.free(sequence)
        world.check()
        stats = world.cache.stats()
        assert stats.host_prefix_pages * PAGE <= stats.host_bytes <= world.cache.host_tier().limit
    world.cache.close()
    assert not world.driver.handles
    del world, sequence, live
    gc.collect()


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("host_pages", [10, 60, 10_000])
def test_hits_are_those_without_a_host_and_more(layout: vmmkv.KVLayout, host_pages: int) -> None:
    """The device's trees stay the same until a hit that only the host makes possible evicts other pages."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    pages = 40 if layout is LAYOUT else 70
    tiers = (0, host_pages * PAGE)
    worlds = [tiered(random, pages, layout, host_bytes=nbytes, large_frames=False) for nbytes in tiers]
    hits = [0, 0]
    for _ in range(60):
        key, ids, committed = random.choice(KEYS), prompt(worlds[0]), random.choice([None, random.randint(0, 60)])
        sequences = [world.start(ids, key) for world in worlds]
        cached = [sequence.cached_tokens for sequence in sequences]
        assert cached[0] <= cached[1]
        hits = [before + tokens for before, tokens in zip(hits, cached)]
        for world, sequence in zip(worlds, sequences):
            world.commit(sequence, committed)
            world.free(sequence)
            world.check()
        plain, with_host = [world.cache.stats() for world in worlds]
        assert with_host.cached_tokens == hits[1]
        if plain.prefix_pages != with_host.prefix_pages:
            assert cached[0] < cached[1]  # the longer hit took other pages, for which others were evicted
            break
    assert hits[1] > hits[0] or host_pages == 10


# ------------------------------------------------------------------ what goes, and what stays


def known(world: World, first: int, tokens: int = 40, priority: int = 35) -> list[int]:
    """Has a sequence of its own known, and ends it."""
    ids = [first] * tokens
    sequence = world.start(ids)
    sequence.commit(np.array(ids), retention=[vmmkv.Retention(priority=priority)])
    world.free(sequence)
    return ids


def cached(world: World, ids: list[int]) -> int:
    sequence = world.start([*ids, 99])
    tokens = sequence.cached_tokens
    world.free(sequence)
    return tokens


def test_what_was_evicted_is_back_on_a_hit() -> None:
    world = tiered(Random(), 20)
    ids = known(world, 1)
    before = world.cache.stats()
    assert (before.host_bytes, before.host_prefix_pages) == (0, 0)
    world.cache.trim()
    after = world.cache.stats()
    assert (after.prefix_pages, after.host_bytes, after.host_prefix_pages) == (0, 5 * PAGE, 5)
    sequence = world.start([*ids[:29], 3, 3])  # to the token
    assert sequence.cached_tokens == 29
    assert world.cache.stats().cached_tokens == 29
    world.check()


def test_a_chat_comes_back_behind_what_it_has_in_common_with_who_is_here() -> None:
    world = tiered(Random(), 60, large_frames=False)
    system = world.start([1] * 24)
    world.commit(system)
    chat = world.start([1] * 24 + [2] * 32)
    world.commit(chat)
    world.free(chat)
    world.cache.trim()
    assert world.cache.stats().prefix_pages == 3
    again = world.start([1] * 24 + [2] * 32 + [3])
    assert again.cached_tokens == 56
    assert (world.cache.page_map() == vmmkv.SHARED_PAGE).sum() == 3
    world.check()


def test_what_is_worth_too_little_is_gone() -> None:
    world = tiered(Random(), 40, host_priority=50)
    low, high = known(world, 1, priority=49), known(world, 2, priority=50)
    world.cache.trim()
    assert (cached(world, low), cached(world, high)) == (0, 40)
    world = tiered(Random(), 40, host_priority=None)
    known(world, 1, priority=100)
    world.cache.trim()
    assert on_host(world) == 0
    for wrong in (-1, 101, 3.5, True, "30"):
        with pytest.raises(vmmkv.ArgumentError, match="host_priority"):
            tiered(Random(), 40, host_priority=wrong)
        with pytest.raises(vmmkv.ArgumentError, match="host_priority"):
            vmmkv.KVCache(LAYOUT, 1, 8, max_bytes="1MiB", device="cpu", host_priority=wrong)  # without a host, too


def test_on_the_host_the_least_needed_makes_way() -> None:
    world = tiered(Random(), 100, host_bytes=10 * PAGE)
    high, low = known(world, 1, priority=80), known(world, 2, priority=40)
    world.cache.trim()
    middle = known(world, 3, priority=60)
    world.cache.trim()
    assert (cached(world, high), cached(world, low), cached(world, middle)) == (40, 0, 40)
    lowest = known(world, 4, priority=59)
    world.cache.trim()
    assert (cached(world, high), cached(world, middle), cached(world, lowest)) == (40, 40, 0)
    recent = known(world, 5, priority=80)
    world.cache.trim()
    assert cached(world, high) == 40  # used after `recent` has come
    latest = known(world, 6, priority=80)
    world.cache.trim()
    assert [cached(world, ids) for ids in (middle, recent, high, latest)] == [0, 0, 40, 40]


def test_suspended_sequences_go_before_prefixes_and_stay() -> None:
    world = tiered(Random(), 100, host_bytes=12 * PAGE)
    ids = known(world, 1)
    world.cache.trim()
    assert cached(world, ids) == 40
    sequence = world.start([2] * 80)
    sequence.suspend()
    assert on_host(world) == 0
    assert world.cache.stats().host_bytes == 10 * PAGE
    known(world, 3, priority=100)
    world.cache.trim()
    assert on_host(world) == 0
    sequence.resume()
    world.check()


def test_what_has_no_row_any_more_goes_to_the_host_all_the_same() -> None:
    for options in ({}, {"large_frames": False}):
        world = tiered(Random(), 60, rows=2, **options)
        prompts = [known(world, first) for first in range(1, 9)]
        assert world.cache.stats().prefix_pages > 10
        world.cache.trim()
        assert all(cached(world, ids) == 40 for ids in prompts)
        world.check()


def test_a_page_of_a_leaf_takes_the_path_along_once() -> None:
    world = tiered(Random(), 60, large_frames=False)
    ids = known(world, 1, 80)
    for other in (2, 3, 4):
        world.start([other] * 145)  # 57 of 60 pages: 7 of 10 that are known go, in three steps
    assert on_host(world) == 10
    assert world.cache.stats().prefix_pages == 3
    world.cache.free(list(world.ids))
    world.ids.clear()
    assert cached(world, ids) == 80


def test_who_leaves_nothing_leaves_nothing_on_the_host() -> None:
    world = tiered(Random(), 60)
    sequence = world.start([1] * 40, reuse=False)
    world.free(sequence)
    world.free(world.start([2] * 40))  # which nobody has committed
    world.cache.trim()
    assert world.cache.stats().host_bytes == 0


def test_others_find_nothing_on_the_host() -> None:
    world = tiered(Random(), 60)
    known(world, 1)
    world.cache.trim()
    assert on_host(world) == 5
    for key in KEYS[1:]:
        assert world.start([1] * 40, key).cached_tokens == 0
    assert world.start([1] * 40, reuse=False).cached_tokens == 0
    world.check()


def test_routers_hear_where_a_prefix_lies() -> None:
    world = tiered(Random(), 60, event_log=EventLog(8))
    encoder = tensorrt_llm.Encoder(200)

    def told() -> tuple[list[tuple[str, str, int]], dict[str, int]]:
        """Events by kind, tier and blocks; and TensorRT-LLM's, by kind, or by the level that blocks come to."""
        events = world.cache.events()
        plain = [
            (type(each).__name__, each.tier, len(each.blocks.hashes) if isinstance(each, Stored) else len(each.hashes))
            for each in events
            if isinstance(each, Stored | Removed)
        ]
        data = [each["data"] for each in encoder.encode(events)]
        return plain, Counter(
            f"to {each['cache_level']['new_value']}" if each["type"] == "updated" else each["type"] for each in data
        )

    ids = known(world, 1)
    assert told() == ([("Stored", "device", 5)], {"created": 1, "stored": 1})
    world.cache.trim()
    assert told() == ([("Stored", "host", 5), ("Removed", "device", 5)], {"to 1": 5})
    world.commit(world.start([*ids, *[2] * 8]))
    assert told() == ([("Stored", "device", 6)], {"to 0": 5, "stored": 1})
    world.cache.host_tier().prefixes.make_room(world.cache.host_tier().limit)
    assert told() == ([("Removed", "host", 1)] * 5, {})
    options = {"max_bytes": "1MiB", "host_bytes": "2MiB", "device": "cpu", "page_size": PAGE}
    created = vmmkv.KVCache(LAYOUT, 1, 8, event_log=EventLog(8), **options)
    (event,) = created.events()
    assert (event.device_blocks, event.host_blocks) == (256, 512)


def test_a_tenant_of_whom_nothing_is_left_but_on_the_host_is_known_still() -> None:
    world = tiered(Random(), 60, rows=2)
    world.cache.pool.tenants.spare = 0
    key = (None, None, "tenant")
    sequence = world.start([1] * 40, key)
    world.commit(sequence)
    world.free(sequence)
    world.cache.trim()
    for other in range(40):
        world.free(world.start([2] * 150, (None, None, other)))
        world.cache.trim()
    assert len(world.cache.pool.tenants) < 40
    assert world.start([1] * 40, key).cached_tokens == 39
    world.check()


def test_no_host_memory() -> None:
    """What the host has no room for is evicted as without it."""
    world = tiered(Random(), 60)
    ids = known(world, 1)
    with pytest.MonkeyPatch.context() as patch:

        def refused(*args: object, **options: object) -> None:
            raise RuntimeError("no pinned memory")

        patch.setattr(host_pages.torch, "empty", refused)
        world.cache.trim()
    assert world.cache.stats().host_bytes == 0
    assert cached(world, ids) == 0
    world.check()


def test_pieces_are_given_back_when_nothing_of_them_is_wanted() -> None:
    random = Random()
    pages, held = HostPages(PAGE, pinned=False), dict[int, int]()
    for _ in range(200):
        if random.random() < 0.5:
            for number in pages.add(random.randint(0, 50)):
                held[number] = random.randrange(256)
                for run in pages.runs(pages.places([number])):
                    ctypes.memset(run.address, held[number], PAGE)
        else:
            gone = random.sample(sorted(held), random.randint(0, len(held)))
            pages.drop(gone)
            for number in gone:
                del held[number]
        assert len(pages) == len(held)
        assert pages.nbytes >= len(held) * PAGE
        chosen = random.sample(sorted(held), min(len(held), 20)) + sorted(held)
        runs = list(pages.runs(pages.places(chosen)))
        assert [at for run in runs for at in range(run.begin, run.end)] == list(range(len(chosen)))
        for run in runs:
            bytes_there = ctypes.string_at(run.address, (run.end - run.begin) * PAGE)
            assert bytes_there == b"".join(bytes([held[number]]) * PAGE for number in chosen[run.begin : run.end])
    pages.drop(list(held))
    assert pages.nbytes == 0


# ------------------------------------------------------------------ streams that run late


class Late:
    """A cache on a device whose work runs when it likes, and one who uses sequences of it as the guide says."""

    most = 30
    """New tokens of a sequence."""

    def __init__(self, random: Random, layout: vmmkv.KVLayout, pages: int | None = None, **options: Any) -> None:
        self.random, self.device = random, SimulatedDevice(random)
        pages = pages or (20 if layout is LAYOUT else 40)
        self.mine = self.device.streams.copy()
        self.cache = on_driver(self.device, vmmkv.KVCache, layout, 5, 60, max_bytes=pages * PAGE, **options)
        self.ids: dict[vmmkv.Sequence, list[int]] = {}
        self.streams: dict[vmmkv.Sequence, Stream] = {}
        self.known: list[list[int]] = [[]]
        self.hits = 0

    def places(self, sequence: vmmkv.Sequence, token: int) -> list[tuple[int, int, bytes]]:
        """Address, bytes and contents of a token."""
        digest = hashlib.blake2b(repr(self.ids[sequence][: token + 1]).encode()).digest()
        ranges = self.cache._rows.ranges
        return [
            (arena.table.address_of(sequence.row, 0) + token * record, record, (digest * record)[:record])
            for arena, record in ranges
        ]

    def start(self, ids: list[int]) -> None:
        sequence = self.cache.sequence(token_ids=ids)
        self.ids[sequence], self.streams[sequence] = ids, self.device.current
        self.hits += bool(sequence.cached_tokens)
        self.read(sequence, sequence.cached_tokens)
        for token in range(sequence.cached_tokens, len(ids)):
            for address, nbytes, data in self.places(sequence, token):
                self.submit(sequence, address, nbytes, lambda a=address, n=nbytes, d=data: ctypes.memmove(a, d, n))

    def read(self, sequence: vmmkv.Sequence, tokens: int) -> None:
        for token in range(tokens):
            for address, nbytes, data in self.places(sequence, token):

                def check(address: int = address, nbytes: int = nbytes, data: bytes = data) -> None:
                    assert ctypes.string_at(address, nbytes) == data, "another's K and V"

                self.submit(sequence, address, nbytes, check)

    def submit(self, sequence: vmmkv.Sequence, address: int, nbytes: int, work: Any) -> None:
        self.streams[sequence].submit(lambda: self.device.touch(address, nbytes, work))

    def free(self, sequence: vmmkv.Sequence) -> None:
        sequence.free()
        del self.ids[sequence], self.streams[sequence]

    def commit_and_free(self) -> None:
        for sequence in list(self.ids):
            sequence.commit(self.ids[sequence])
            self.known.append(self.ids[sequence])
            self.free(sequence)

    def step(self) -> None:
        random, live = self.random, list(self.ids)
        self.device.current, what = random.choice(self.mine), random.random()
        try:
            if what < 0.55 or not live:
                begin = random.choice(self.known)
                begin = begin[: random.choice([len(begin), random.randint(0, len(begin))])]
                self.start((begin + [random.randrange(2) for _ in range(random.randint(1, self.most))])[:60])
            elif what < 0.7:
                sequence = random.choice(live)
                sequence.commit(self.ids[sequence])
                self.known.append(self.ids[sequence])
            elif what < 0.8:
                sequence = random.choice(live)
                self.read(sequence, sequence.length)
            elif what < 0.97:
                self.commit_and_free() if random.random() < 0.2 else self.free(random.choice(live))
            else:
                self.cache.trim()
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError):
            for sequence in live:
                self.free(sequence)
        self.cache.check()
        self.device.run(random.choice([0, 0, 20, 200]))


@pytest.mark.few(6)
@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"large_frames": False}], ids=str)
@pytest.mark.parametrize("host", [20, 10_000], ids=["tight", "plenty"])
def test_streams_that_run_late_see_their_own_bytes(layout: vmmkv.KVLayout, options: dict[str, Any], host: int) -> None:
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    for _ in range(2 * ROUNDS):
        late = Late(random, layout, host_bytes=host * PAGE, **options)
        for _ in range(50):
            late.step()
        if random.random() < 0.5:
            late.device.finish()
            late.cache.close()
            assert not late.device.mapped
        else:  # copies to the host may be under way
            device = late.device
            del late
            gc.collect()
            device.finish()


class Lazy(Random):
    """Has copies to the host wait for all other work."""

    def choice(self, streams: Any) -> Any:
        return next((stream for stream in streams if not stream.name.startswith("side")), streams[0])


def test_what_goes_to_the_host_stays_on_its_row_until_it_is_copied() -> None:
    """Also where that row is to have it for its own, and the tree gives it up to make room for that."""
    late = Late(Random(), LAYOUT, 3, large_frames=False, host_bytes=8 * PAGE)
    late.start([1] * 8)
    (sequence,) = late.ids
    sequence.commit([1] * 8)
    late.device.finish()
    sequence.truncate(3)
    late.device.current = late.mine[1]
    other = late.cache.sequence(16)
    late.mine[1].submit(lambda: None)  # when this is done there is room, whether anything was copied or not
    other.free()
    late.device.current, late.device.random = late.mine[0], Lazy()
    sequence.extend(1)
    late.device.random = late.random
    late.device.finish()
    late.free(sequence)
    before, late.hits = on_host(late), 0
    late.start([1] * 9)
    assert (before, late.hits) == (1, 1)
    late.device.finish()  # and reads what came back


# ------------------------------------------------------------------ failures and interruptions


class Tiered(Busy):
    """A busy cache, some of whose prefixes are on the host, and others about to go there."""

    def __init__(self, policy: str, driver: FaultyDriver) -> None:
        super().__init__(policy, driver, host_bytes=80 * PAGE)
        self.cache.trim()
        self.ended([6] * 50)
        self.finish()

    def ended(self, ids: list[int]) -> None:
        sequence = self.started("ended", ids)
        self.commit(sequence)
        self.free("ended")
        self.finish()


OPERATIONS = {
    "come back": lambda world: world.started("new", [3] * 60 + [2] * 30),
    "come back behind what is shared": lambda world: world.started("new", [6] * 50 + [2] * 9),
    "go": lambda world: world.cache.trim(),
    "go for others": lambda world: world.started("new", [4] * 180),
    "close": lambda world: (world.cache.close(), world.keep([])),
}


@pytest.mark.parametrize(
    ("name", "policy"), each_with_few(2, [name for name in OPERATIONS if name != "close"], POLICIES)
)
def test_a_failed_call(name: str, policy: str) -> None:
    survives_all(lambda driver: Tiered(policy, driver), OPERATIONS[name])


@pytest.mark.parametrize(("name", "policy"), each_with_few(2, OPERATIONS, POLICIES))
def test_an_interruption_at_any_line(name: str, policy: str) -> None:
    """Live sequences have their tokens, and what was known is forgotten; or the cache says that it is unusable."""
    is_interrupted_everywhere(lambda driver: Tiered(policy, driver), OPERATIONS[name], closes=name == "close")


def test_what_cannot_be_loaded_is_computed_again() -> None:
    """A failed copy, before and after which others are made: fewer cached tokens, and no harm."""
    for call in ("copy", "record", "wait"):
        for skip in some(12, 4):
            device = SimulatedDevice(Random())
            world = Tiered("pages", device)
            device.fail(call, skip)
            with suppress(vmmkv.DriverError):
                assert world.started("new", [3] * 60).cached_tokens in (0, 40)
            device.finish()
            device.heal()
            world.check()
            world.close()


@pytest.mark.parametrize("skip", [1, 2])
def test_an_interruption_while_copies_are_under_way(skip: int) -> None:
    """They run late, when the row may be another's, and the host's pages, too."""
    for _ in range(4 * ROUNDS):
        late = Late(Random(), RANGES, host_bytes=100 * PAGE)
        device, ids = late.device, [1] * 50
        late.start(ids)
        late.commit_and_free()
        device.finish()
        late.cache.trim()
        device.finish()
        device.fail("copy", skip, error=Interruption)
        with pytest.raises(Interruption):
            late.cache.sequence(token_ids=[*ids, 2])
        gc.collect()
        for first in (3, 4):
            late.start([first] * 55)
        device.finish()
        late.cache.check()
        late.cache.close()


@pytest.mark.parametrize("wants", ["another prefix", "nobody"])
def test_the_host_keeps_what_is_being_copied(wants: str) -> None:
    late = Late(Random(), LAYOUT, host_bytes=5 * PAGE)
    late.start([1] * 41)
    late.commit_and_free()
    late.cache.trim()
    late.start([2] * 41)
    late.commit_and_free()
    late.device.finish()
    device = late.device
    late.start([1] * 42)
    assert late.hits == 1
    if wants == "nobody":
        late.cache.close()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Fence, "wait", lambda fence: None)  # it would for what `trim` gives back
            late.cache.trim()
        late.device.finish()
        late.cache.check()
        late.cache.close()
    device.finish()
