"""Sequences that begin with tokens that are there already: right K and V, of nobody else, and as many as there are.

K and V of a token stand for all that they depend on: salt, adapter, tenant and all ids up to it.
"""

from __future__ import annotations

import gc
import hashlib
import resource
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_driver, small_driver, some
from faulty import FaultyDriver
from simulated_device import SimulatedDevice
from test_driver import limited

import vmmkv
from vmmkv.snapshot import frames_on

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
RANGES = vmmkv.KVLayout(3, [2, 1, 2], 24, torch.float32, layers_per_range=1)  # records that do not divide pages
Key = tuple[Any, Any, Any]
KEYS: list[Key] = [(None, None, None), ("salt", None, None), (None, 7, None), (None, None, "tenant")]
KEYS += [("salt", "lora", 3)]


class World:
    """A cache of 6 rows of 200 tokens, and what each sequence should hold."""

    def __init__(self, pages: int = 200, layout: vmmkv.KVLayout = LAYOUT, **options: Any) -> None:
        self.driver = options.pop("driver", None) or FaultyDriver(small_driver("cpu"))
        self.driver.changes_access = True  # a row that alone has a shared page becomes able to write to it
        limits = {"max_bytes": pages * self.driver.page_size} | options
        self.cache = on_driver(self.driver, vmmkv.KVCache, layout, 6, 200, **limits)
        self.ids: dict[vmmkv.Sequence, list[int]] = {}
        self.keys: dict[vmmkv.Sequence, Key] = {}
        self.known: dict[Key, list[list[int]]] = {}

    def states(self, sequence: vmmkv.Sequence) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, each with what it should be: it stands for the key, and all ids up to a token."""
        digest, values = repr(self.keys[sequence]).encode(), []
        for token in self.ids[sequence]:
            digest = hashlib.blake2b(digest + b"%d" % token, digest_size=8).digest()
            values.append(int.from_bytes(digest[:3], "little"))
        right = torch.tensor(values[sequence.start :], dtype=torch.float32)[:, None, None]
        layers = range(self.cache.layout.num_layers)
        pairs = [(sequence.k(layer), right + layer) for layer in layers]
        return pairs + [(sequence.v(layer), right + layer + 0.5) for layer in layers]

    def write(self, sequence: vmmkv.Sequence, begin: int) -> None:
        """Computes tokens from one on."""
        for states, right in self.states(sequence):
            states[begin - sequence.start :] = right[begin - sequence.start :]

    def read(self, sequence: vmmkv.Sequence, end: int) -> None:
        """Looks whether the first tokens of a sequence are its own."""
        for states, right in self.states(sequence):
            assert torch.equal(states[:end], right[:end].expand_as(states[:end])), "another's K and V"

    def check(self) -> None:
        self.cache.check()
        pages = self.cache.stats().pages
        assert sum(pages.values()) == self.driver.num_pages
        surplus = np.isin(self.cache.page_map(), (vmmkv.SURPLUS_PAGE, vmmkv.KEPT_PAGE, vmmkv.LOOKAHEAD_PAGE))
        assert surplus.sum() == pages["surplus"]
        filled = Counter[tuple[int, int]]()
        for sequence, ids in self.ids.items():
            assert sequence.length == len(ids)
            if not sequence.is_suspended:
                self.read(sequence, len(ids))
                filled |= self.places(sequence)  # of a page that sequences share, those with most of their tokens there
                names, known = self.cache.known(sequence)
                assert names in (None, self.keys[sequence][:2])
                assert known.tolist() == ids[: len(known)]
        stats, size, frames = self.cache.stats(), self.cache.page_size, self.cache.pool.frames
        assert stats.waste == pytest.approx(1 - filled.total() / (pages["used"] * size) if pages["used"] else 0)
        if not self.cache.pool.word("staged"):  # a copy that a failed call has left is held, too
            assert stats.prefix_pages == frames["pages"][frames["held"] > 0].sum()

    def places(self, sequence: vmmkv.Sequence) -> Counter[tuple[int, int]]:
        """Bytes of its tokens on each physical page: (frame, page within a large frame)."""
        size, found = self.cache.page_size, Counter[tuple[int, int]]()
        for part, record in enumerate(self.cache.layout.record_bytes):
            begin, end = sequence.start * record, sequence.length * record
            pages = range(begin // size, -(-end // size))
            for page, frame in zip(pages, frames_on(self.cache, sequence.row, part, pages.start, pages.stop).tolist()):
                found[frame, page % 16] += min(end, page * size + size) - max(begin, page * size)
        return found

    def most(self, key: Key, ids: list[int]) -> int:
        """How many tokens of a new sequence have been made known in whole pages of 8 tokens."""
        best = 0
        for known in self.known.get(key, []):
            common = 0
            while common < min(len(known) // 8 * 8, len(ids) - 1) and known[common] == ids[common]:
                common += 1
            best = max(best, common)
        return best

    def start(self, ids: list[int], key: Key = KEYS[0], reuse: bool = True, whole: bool = True) -> vmmkv.Sequence:
        names = dict(zip(("salt", "adapter", "tenant"), key))
        sequence = self.cache.sequence(token_ids=np.array(ids, np.int64), reuse=reuse, whole=whole, **names)
        if not whole:
            assert sequence.length == sequence.cached_tokens
            sequence.extend(len(ids) - sequence.length)  # where that fails, the sequence ends with this frame
        assert sequence.cached_tokens < max(len(ids), 1)
        self.ids[sequence], self.keys[sequence] = list(ids), key
        self.read(sequence, sequence.cached_tokens)
        self.write(sequence, sequence.cached_tokens)
        return sequence

    def commit(self, sequence: vmmkv.Sequence, tokens: int | None = None) -> vmmkv.Sequence:
        ids = self.ids[sequence][:tokens]
        sequence.commit(np.array(ids, np.int64))
        self.known.setdefault(self.keys[sequence], []).append(ids)
        return sequence

    def reorder(self, sequences: list[vmmkv.Sequence], indices: list[int]) -> None:
        self.cache.reorder(sequences, indices)
        before = [(self.ids[sequences[index]], self.keys[sequences[index]]) for index in indices]
        for sequence, (ids, key) in zip(sequences, before):
            self.ids[sequence], self.keys[sequence] = ids.copy(), key

    def free(self, sequence: vmmkv.Sequence) -> None:
        sequence.free()
        del self.ids[sequence], self.keys[sequence]


class Machine(World):
    """Random operations."""

    def __init__(self, random: Random, pages: int, layout: vmmkv.KVLayout, **options: Any) -> None:
        super().__init__(pages, layout, **options)
        self.random, self.finds_all = (
            random,
            pages > 1000 and layout is LAYOUT and not options.get("large_frames", True),
        )

    def some(self, most: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(0, most))]

    def do_start(self) -> None:
        """With memory for all, and one range of single pages, everything known is found: what is known of a large frame
        that is not full goes with its row."""
        random = self.random
        begin = random.choice([ids for lists in self.known.values() for ids in lists] or [[]])
        begin = begin[: random.choice([len(begin), random.randint(0, len(begin))])]
        ids = [*begin, 0, *self.some(59)][:150]
        key, reuse = random.choice(KEYS), random.random() < 0.9
        most = self.most(key, ids)
        sequence = self.start(ids, key, reuse, whole=random.random() < 0.6)
        assert reuse or not sequence.cached_tokens
        assert sequence.cached_tokens >= most or not reuse or not self.finds_all
        if reuse and random.random() < 0.8:
            self.commit(sequence, random.choice([None, random.randint(0, len(ids))]))

    def do_extend(self, sequence: vmmkv.Sequence) -> None:
        begin, ids = sequence.length, self.some(min(20, 200 - sequence.length))
        sequence.extend(len(ids))
        self.ids[sequence] += ids
        self.write(sequence, begin)
        self.commit_some([sequence])

    def do_truncate(self, sequence: vmmkv.Sequence) -> None:
        tokens = self.random.randint(sequence.start, sequence.length)
        sequence.truncate(tokens)
        del self.ids[sequence][tokens:]

    def do_release(self, sequence: vmmkv.Sequence) -> None:
        if self.random.random() < 0.3:
            sequence.release_before(self.random.randint(sequence.start, sequence.length))

    def do_unshare(self, sequence: vmmkv.Sequence) -> None:
        token = self.random.randint(sequence.start, sequence.length)
        self.cache.unshare([sequence], token)
        self.ids[sequence][token:] = [self.random.randrange(2) for _ in range(sequence.length - token)]
        self.write(sequence, token)
        self.commit_some([sequence])

    def do_fork(self, sequence: vmmkv.Sequence) -> None:
        child = sequence.fork()
        self.ids[child], self.keys[child] = self.ids[sequence].copy(), self.keys[sequence]

    def do_reorder(self, sequence: vmmkv.Sequence) -> None:
        own = [each for each in self.ids if self.keys[each][2] == self.keys[sequence][2] and not each.is_suspended]
        own = [each for each in own if each.start == 0]
        with suppress(vmmkv.UnsupportedError):
            self.reorder(own, [self.random.randrange(len(own)) for _ in own])
            self.commit_some(own)

    def do_suspend(self, sequence: vmmkv.Sequence) -> None:
        with suppress(vmmkv.ArgumentError):  # without a host tier
            sequence.suspend()

    def do_free(self, sequence: vmmkv.Sequence) -> None:
        self.free(sequence)

    def commit_some(self, sequences: list[vmmkv.Sequence]) -> None:
        for sequence in sequences:
            if sequence.is_reusable and sequence.start == 0 and self.random.random() < 0.7:
                self.commit(sequence)

    def step(self) -> None:
        live = list(self.ids)
        name = self.random.choice([name for name in dir(self) if name.startswith("do_")])
        try:
            if name == "do_start" or not live or self.random.random() < 0.3:
                self.do_start()
            elif (sequence := self.random.choice(live)).is_suspended and name != "do_free":
                sequence.resume()
            else:
                getattr(self, name)(sequence)
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError):
            assert not self.finds_all or len(live) == 6
            for sequence in live:
                self.free(sequence)
        self.check()

    def end(self, overread: int) -> None:
        """Looks whether all pages that are said to be available can be had, in pieces as long as a row."""
        for sequence in self.random.sample(list(self.ids), max(len(self.ids) - 2, 0)):
            self.free(sequence)
        available, taken = self.cache.available_pages, []
        while available:
            taken.append(self.cache.sequence(min(available, 25) * 8 - overread))
            available -= min(available, 25)
            assert self.cache.available_pages == available
        self.cache.check()


@pytest.mark.few(8)
@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"large_frames": False}, {"overread": 5}], ids=str)
@pytest.mark.parametrize("pages", [60, 2000], ids=["tight", "plenty"])
def test_any_operations_in_any_order(
    random: Random, layout: vmmkv.KVLayout, options: dict[str, Any], pages: int
) -> None:
    machine = Machine(random, pages, layout, host_bytes="1MiB", **options)
    for _ in range(60):
        machine.step()
    if pages == 60 and layout is LAYOUT:
        machine.end(options.get("overread", 0))
    machine.cache.close()
    assert not machine.driver.mapped
    assert not machine.driver.handles


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (vmmkv.ArgumentError, "salt='x' without token_ids", {"tokens": 5, "salt": "x"}),
        (vmmkv.ArgumentError, "adapter=7 without token_ids", {"adapter": 7}),
        (vmmkv.ArgumentError, "without token_ids", {"tokens": 20, "whole": False}),
        (ValueError, "expected_tokens=-1", {"expected_tokens": -1}),
        (vmmkv.DtypeError, r"2\*\*63", {"token_ids": [2**63]}),
        (vmmkv.DtypeError, "float64", {"token_ids": [1, 2.0]}),
        (vmmkv.DtypeError, "bool", {"token_ids": [True, False]}),
    ],
)
def test_what_says_nothing_of_a_sequence_is_refused(error: type[Exception], match: str, arguments: Any) -> None:
    world = World()
    with pytest.raises(error, match=match):
        world.cache.sequence(**arguments)
    assert world.cache.stats().rows["live"] == 0


@pytest.mark.parametrize("large_frames", [False, True])
def test_pages_that_live_sequences_have_too_are_foretold(large_frames: bool) -> None:
    world = World(900, large_frames=large_frames)
    world.commit(world.start([1] * 150))
    world.free(world.commit(world.start([2] * 150)))
    for ids in ([1] * 150, [1] * 70 + [3] * 20, [1] * 4 + [4] * 100, [2] * 160, [5] * 30):
        before, shared = world.cache.stats().pages["used"], world.cache.shared_pages(ids)
        world.start(ids)
        taken = world.cache.stats().pages["used"] - before
        assert large_frames or taken == -(-len(ids) // 8) - shared
        assert (shared > 0) == (taken * 8 < len(ids))


@pytest.mark.parametrize("call", ["copy", "map", "unmap", "set_access"])
@pytest.mark.parametrize("indices", [[1, 0, 0, 1], [3, 0, 1, 2]], ids=str)
def test_nobody_reads_what_a_failed_reordering_has_left(call: str, indices: list[int]) -> None:
    for skip in some(8, 4):
        world = World(large_frames=False)
        sequences = [world.commit(world.start([first] * 45)) for first in (1, 2, 3)] + [world.start([])]
        world.driver.fail(call, skip)
        with suppress(vmmkv.DriverError):
            world.reorder(sequences, indices)
        world.driver.heal()
        for sequence in sequences:
            with suppress(vmmkv.UseAfterFreeError):
                sequence.check_usable()
                world.read(sequence, len(world.ids[sequence]))
            world.free(sequence)
        for first in (1, 2, 3, 4, 5, 6):
            world.commit(world.start([first] * 45 + [first]))
        world.check()


def test_what_the_system_refuses_is_no_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, for pages, on the host, or beside the cache: nothing has changed, and what is known stays so."""
    cache = on_driver(small_driver("cpu"), vmmkv.KVCache, LAYOUT, 4, 400, max_bytes="1MiB", host_bytes="1MiB")
    one, other = (cache.sequence(token_ids=[number] * 20, salt=number) for number in (1, 2))
    one.commit([1] * 20)
    before = cache.stats()

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    with limited(resource.RLIMIT_FSIZE, before.physical_bytes), pytest.raises(vmmkv.OutOfPagesError, match="EFBIG"):
        cache.sequence(300)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(vmmkv.OutOfHostMemoryError, match="no memory"):
        one.suspend()
    with pytest.raises(vmmkv.DriverOutOfMemoryError, match="circle"):
        cache.reorder([one, other], [1, 0])
    assert cache.stats().prefix_pages == before.prefix_pages > 0
    other.commit([2] * 20)
    cache.check()


def known_alone(pool: vmmkv.FramePool) -> vmmkv.KVCache:
    """A cache whose pages hold known tokens of sequences that have ended."""
    cache = vmmkv.KVCache(LAYOUT, 4, 320, pool=pool)
    for token in range(3):
        with cache.sequence(token_ids=[token] * 80) as sequence:
            sequence.commit([token] * 80)
    return cache


def test_what_is_only_known_is_for_neighbours_for_limits_and_goes_with_its_cache() -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 40 * driver.page_size)
    first, second = known_alone(pool), vmmkv.KVCache(LAYOUT, 4, 320, pool=pool)
    assert second.available_pages == 40
    assert second.sequence(40 * 8).length == 320
    first.check()
    second.close()
    third = known_alone(pool)
    pool.set_limit(5 * driver.page_size)
    assert driver.num_pages <= 5
    third.check()
    gc.disable()
    try:
        del first, second, third
        assert not driver.mapped
        assert (pool.stats().holders, pool.stats().free_bytes) == (0, pool.stats().physical_bytes)
    finally:
        gc.enable()


@pytest.mark.usefixtures("undebugged")
def test_a_capture_changes_nothing() -> None:
    device = SimulatedDevice(Random())
    world = World(40, driver=device)
    first = world.start([1] * 30)
    device.fail("record", error=vmmkv.StreamCaptureError, lasting=True)
    with pytest.raises(vmmkv.StreamCaptureError):
        first.commit([1] * 30)
    device.heal()
    world.commit(first)
    for call in ("record", "copy"):
        device.fail(call, error=vmmkv.StreamCaptureError, lasting=True)
    submitted = [stream.submitted for stream in device.streams]
    with pytest.raises(vmmkv.StreamCaptureError):
        world.cache.sequence(token_ids=[1] * 21 + [2] * 9)
    assert [stream.submitted for stream in device.streams] == submitted, "a copy is part of the graph"
    device.heal()
    second = world.cache.sequence(token_ids=[1] * 21 + [2] * 9)
    device.finish()
    assert second.cached_tokens == 21
    assert torch.equal(second.k(0)[:21], first.k(0)[:21])
    world.cache.check()


@pytest.mark.usefixtures("undebugged")
def test_the_next_turn_on_a_stream_makes_no_call() -> None:
    """Not even to ask whether work has finished: on this stream it comes behind that."""
    device = SimulatedDevice(Random())
    world = World(40, driver=device)
    turn = world.commit(world.start([1] * 21))
    device.streams[0].submit(lambda: None)
    world.free(turn)
    fault = device.fail(lasting=True)
    assert world.cache.sequence(token_ids=[1] * 21 + [2], whole=False).cached_tokens == 21
    assert not fault.was_met
    device.current = device.streams[1]
    with pytest.raises(vmmkv.DriverError):
        world.cache.sequence(token_ids=[1] * 21 + [3], whole=False)


@pytest.mark.usefixtures("undebugged")
def test_a_growth_takes_cached_pages_that_are_idle_before_it_waits() -> None:
    device = SimulatedDevice(Random())
    world = World(40, driver=device, large_frames=False)
    world.free(world.commit(world.start([1] * 80)))
    device.finish()
    freed, sequence = world.cache.sequence(20 * 8), world.cache.sequence(10 * 8)
    device.current.submit(lambda: None)
    freed.free()
    never = device.fail("wait_for", lasting=True)
    sequence.extend(8 * 8)
    assert not never.was_met
    device.heal()
    sequence.extend(7 * 8)  # which waits for what was freed
    world.cache.check()


@pytest.mark.parametrize("known", [31, 29])
def test_a_known_page_that_there_is_no_room_to_copy_is_written_to(known: int) -> None:
    """A sequence starts wherever it would without reuse: then the page is no longer known."""
    pool = on_driver(small_driver("cpu"), vmmkv.FramePool, 40 * 4096)
    cache, other = (vmmkv.KVCache(LAYOUT, 4, 400, pool=pool, large_frames=False) for _ in range(2))
    with cache.sequence(token_ids=[1] * 80) as first:
        first.commit([1] * 80)
    taken = other.sequence(36 * 8)
    sequence = cache.sequence(token_ids=[1] * known + [2] * (32 - known))
    assert (sequence.length, sequence.cached_tokens, taken.length) == (32, known, 36 * 8)
    cache.check()


def test_a_hit_takes_few_python_calls() -> None:
    """Whatever its length: a call takes half a microsecond. Ids in an array are not copied."""
    ids = np.random.default_rng().integers(1000, size=8 * 24 + 7)
    cache = on_driver(small_driver("cpu"), vmmkv.KVCache, LAYOUT, 6, 200, max_bytes="1MiB", large_frames=False)
    assert vmmkv.arguments.ids_of(ids) is ids
    first = cache.sequence(token_ids=ids)
    assert calls_of(lambda: first.commit(ids)) <= 30
    found: list[vmmkv.Sequence] = []
    assert calls_of(lambda: found.append(cache.sequence(token_ids=ids))) <= 60
    assert found[0].cached_tokens == len(ids) - 1
    first.free()
    found.pop().free()
    assert calls_of(lambda: found.append(cache.sequence(token_ids=ids))) <= 40  # a chat's next turn


def calls_of(operation: Callable[[], object]) -> int:
    """The number of Python functions that are called."""
    count = -1  # the operation itself

    def notice(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(notice)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return count


def test_a_hit_of_few_tokens_leaves_room_for_large_frames() -> None:
    """The tokens lie on single pages, and behind a shared one there could be no large frame."""
    world = World(900)
    world.commit(world.start([1] * 24))
    for ids in ([1] * 24 + [2] * 160, [1] * 24 + [3] * 160):
        assert world.cache.extents[world.start(ids).row]["head_end"] >= 16
    world.check()
