"""Sequences that begin with tokens that are there already: right K and V, of nobody else, and as many as there are.

K and V of a token stand for all that they depend on: salt, adapter, tenant and all ids up to it.
"""

from __future__ import annotations

import gc
import hashlib
import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
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
from vmmkv.arguments import ids_of

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
RANGES = vmmkv.KVLayout(3, [2, 1, 2], 24, torch.float32, layers_per_range=1)  # records that do not divide pages


class World:
    """A cache, and what each sequence should hold."""

    def __init__(
        self,
        random: Random,
        pages: int,
        layout: vmmkv.KVLayout,
        *,
        rows: int = 6,
        max_seq_len: int = 200,
        driver: FaultyDriver | None = None,
        **options: Any,
    ) -> None:
        self.random = random
        self.driver = driver or FaultyDriver(small_driver("cpu"))
        self.driver.changes_access = True  # a row that alone has a shared page becomes able to write to it
        self.cache = on_driver(
            self.driver, vmmkv.KVCache, layout, rows, max_seq_len, max_bytes=pages * self.driver.page_size, **options
        )
        self.ids: dict[vmmkv.Sequence, list[int]] = {}
        self.keys: dict[vmmkv.Sequence, tuple[Any, ...]] = {}
        self.known: dict[tuple[Any, ...], list[list[int]]] = {}

    def values(self, sequence: vmmkv.Sequence) -> torch.Tensor:
        """What K and V of each of its tokens are: each stands for the key, and all ids up to it."""
        digest, values = repr(self.keys[sequence]).encode(), []
        for token in self.ids[sequence]:
            digest = hashlib.blake2b(digest + b"%d" % token, digest_size=8).digest()
            values.append(int.from_bytes(digest[:3], "little"))
        return torch.tensor(values, dtype=torch.float32)

    def write(self, sequence: vmmkv.Sequence, begin: int) -> None:
        """Computes tokens from one on."""
        new = self.values(sequence)[begin:, None, None]
        for layer in range(self.cache.layout.num_layers):
            for offset, states in enumerate((sequence.k(layer), sequence.v(layer))):
                states[begin:] = new + layer + offset / 2

    def check(self) -> None:
        self.cache.check()
        pages = self.cache.stats().pages
        assert sum(pages.values()) == self.driver.num_pages
        surplus = np.isin(self.cache.page_map(), (vmmkv.SURPLUS_PAGE, vmmkv.KEPT_PAGE, vmmkv.LOOKAHEAD_PAGE))
        assert surplus.sum() == pages["surplus"]
        for sequence, ids in self.ids.items():
            self.read(sequence, len(ids))

    def read(self, sequence: vmmkv.Sequence, end: int) -> None:
        """Looks whether the first tokens of a sequence are its own."""
        expected = self.values(sequence)[:end, None, None]
        for layer in range(self.cache.layout.num_layers):
            for offset, states in enumerate((sequence.k(layer), sequence.v(layer))):
                assert (states[:end] == expected + layer + offset / 2).all(), "another's K and V"

    def whole(self, tokens: int) -> int:
        """Of so many tokens those that lie in pages that they fill, in all ranges."""
        size = self.cache.page_size
        return min(tokens * record // size * size // record for record in self.cache.layout.record_bytes)

    def most(self, key: tuple[Any, ...], ids: list[int]) -> int:
        """How many tokens of a new sequence have been made known in whole pages."""
        best = 0
        for known in self.known.get(key, []):
            readable, common = self.whole(len(known)), 0
            while common < min(readable, len(ids) - 1) and known[common] == ids[common]:
                common += 1
            best = max(best, common)
        return best

    def start(
        self,
        ids: list[int],
        key: tuple[Any, ...] = (None, None, None),
        reuse: bool = True,
        whole: bool = True,
    ) -> vmmkv.Sequence:
        salt, adapter, tenant = key
        sequence = self.cache.sequence(
            token_ids=np.array(ids, np.int64), salt=salt, adapter=adapter, tenant=tenant, reuse=reuse, whole=whole
        )
        if not whole:
            assert sequence.length == sequence.cached_tokens
            sequence.extend(len(ids) - sequence.length)  # where that fails, the sequence ends with this frame
        assert sequence.length == len(ids)
        assert sequence.cached_tokens < max(len(ids), 1)
        self.ids[sequence], self.keys[sequence] = list(ids), key
        self.read(sequence, sequence.cached_tokens)
        self.write(sequence, sequence.cached_tokens)
        return sequence

    def commit(self, sequence: vmmkv.Sequence, tokens: int | None = None) -> None:
        ids = self.ids[sequence][:tokens]
        sequence.commit(np.array(ids, np.int64))
        self.known.setdefault(self.keys[sequence], []).append(ids)

    def extend(self, sequence: vmmkv.Sequence, ids: list[int]) -> None:
        begin = len(self.ids[sequence])
        sequence.extend(len(ids))
        self.ids[sequence] += ids
        self.write(sequence, begin)

    def truncate(self, sequence: vmmkv.Sequence, tokens: int) -> None:
        sequence.truncate(tokens)
        del self.ids[sequence][tokens:]

    def fork_of(self, parent: vmmkv.Sequence) -> vmmkv.Sequence:
        child = parent.fork()
        self.ids[child], self.keys[child] = self.ids[parent].copy(), self.keys[parent]
        return child

    def reorder(self, sequences: list[vmmkv.Sequence], indices: list[int]) -> None:
        self.cache.reorder(sequences, indices)
        before = [(self.ids[sequences[index]], self.keys[sequences[index]]) for index in indices]
        for sequence, (ids, key) in zip(sequences, before):
            self.ids[sequence], self.keys[sequence] = ids.copy(), key

    def free(self, sequence: vmmkv.Sequence) -> None:
        sequence.free()
        del self.ids[sequence], self.keys[sequence]


def prompt(world: World, vocabulary: int = 2) -> list[int]:
    """Ids that often begin like others."""
    random = world.random
    known = [ids for lists in world.known.values() for ids in lists] or [[]]
    begin = random.choice(known)
    begin = begin[: random.choice([len(begin), random.randint(0, len(begin))])]
    return (begin + [random.randrange(vocabulary) for _ in range(random.randint(1, 60))])[:150]


@pytest.mark.few(8)
@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"large_frames": False}, {"overread": 5}], ids=str)
@pytest.mark.parametrize("pages", [60, 2000], ids=["tight", "plenty"])
def test_any_operations_in_any_order(layout: vmmkv.KVLayout, options: dict[str, Any], pages: int) -> None:
    """Everybody reads what is theirs; with memory for all, and one range of single pages, everything known is found.
    (What is known of a large frame that is not full goes with its row.)"""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    world = World(random, pages, layout, **options)
    keys = [(None, None, None), ("salt", None, None), (None, 7, None), (None, None, "tenant")]
    for _ in range(60):
        live = list(world.ids)
        what = random.random()
        try:
            if what < 0.45 or not live:
                key, ids = random.choice(keys), prompt(world)
                reuse = random.random() < 0.9
                most = world.most(key, ids) if reuse else 0
                sequence = world.start(ids, key, reuse, whole=random.random() < 0.6)
                assert reuse or not sequence.cached_tokens
                if pages > 1000 and layout is LAYOUT and options.get("large_frames") is False:
                    assert sequence.cached_tokens >= most
                if reuse and random.random() < 0.8:
                    world.commit(sequence, random.choice([None, random.randint(0, len(ids))]))
            elif what < 0.6:
                sequence = random.choice(live)
                most = world.cache.max_seq_len - sequence.length
                world.extend(sequence, [random.randrange(2) for _ in range(min(random.randint(1, 20), most))])
                if sequence.is_reusable and random.random() < 0.7:
                    world.commit(sequence)
            elif what < 0.7:
                sequence = random.choice(live)
                world.truncate(sequence, random.randint(0, sequence.length))
            elif what < 0.75:
                sequence = random.choice(live)
                token = random.randint(0, sequence.length)
                world.cache.unshare([sequence], token)
                world.ids[sequence][token:] = [random.randrange(2) for _ in range(sequence.length - token)]
                world.write(sequence, token)
                if sequence.is_reusable and random.random() < 0.7:
                    world.commit(sequence)
            elif what < 0.8:
                world.fork_of(random.choice(live))
            elif what < 0.86:
                tenant = world.keys[random.choice(live)][2]
                own = [sequence for sequence in live if world.keys[sequence][2] == tenant]
                chosen = random.sample(own, random.randint(1, len(own)))
                world.reorder(chosen, [random.randrange(len(chosen)) for _ in chosen])
                for sequence in chosen:
                    if sequence.is_reusable and random.random() < 0.3:
                        world.commit(sequence)
            elif what < 0.97:
                world.free(random.choice(live))
            else:
                world.cache.trim()
                world.known.clear()
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError):
            assert pages < 1000 or len(live) == 6
            for sequence in live:
                world.free(sequence)
        world.check()
    world.cache.close()
    assert not world.driver.mapped
    assert not world.driver.handles


@pytest.mark.parametrize("host_bytes", [0, "1MiB"])
def test_who_computes_in_chunks_takes_no_memory_before(host_bytes: float | str) -> None:
    """As much begins with what is known, and no page lies behind it."""
    world = World(Random(), 40, LAYOUT, large_frames=False, host_bytes=host_bytes)
    random, counts = world.random, []
    ids = [random.randrange(2) for _ in range(random.randint(1, 60))]
    for whole in (False, True):  # nothing is known yet, or not all of it
        first = world.start(ids, whole=whole)
        world.commit(first)
        longer = [*ids, *(random.randrange(2) for _ in range(random.randint(1, 40)))]
        used = world.cache.stats().pages["used"]
        second = world.cache.sequence(token_ids=longer, whole=whole)
        counts.append(second.cached_tokens)
        more = -(-second.length // 8) - second.length // 8  # full pages are shared
        assert whole or world.cache.stats().pages["used"] == used + more
        second.free()
        if host_bytes:  # the second comes back from there
            world.free(first)
            world.start([3] * 200)
            world.free(next(iter(world.ids)))
    assert all(count >= len(ids) // 8 * 8 for count in counts)
    assert world.cache.sequence(token_ids=[4] * 20, whole=False).length == 0
    assert world.cache.sequence(token_ids=ids, whole=False, reuse=False).length == 0
    with pytest.raises(vmmkv.ArgumentError, match="without token_ids"):
        world.cache.sequence(20, whole=False)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (vmmkv.ArgumentError, "salt='x' without token_ids", {"tokens": 5, "salt": "x"}),
        (vmmkv.ArgumentError, "adapter=7 without token_ids", {"adapter": 7}),
        (ValueError, "expected_tokens=-1", {"expected_tokens": -1}),
        (vmmkv.DtypeError, r"2\*\*63", {"token_ids": [2**63]}),
        (vmmkv.DtypeError, r"2\*\*63", {"token_ids": [2**64]}),
    ],
)
def test_what_says_nothing_of_a_sequence_is_refused_by_name(
    error: type[Exception], match: str, arguments: dict[str, Any]
) -> None:
    world = make()
    with pytest.raises(error, match=match):
        world.cache.sequence(**arguments)
    assert world.cache.stats().rows["live"] == 0


def make(pages: int = 200, **options: Any) -> World:
    return World(Random(), pages, LAYOUT, **options)


def test_what_begins_alike_shares_pages_while_both_live() -> None:
    world = make(large_frames=False)
    first = world.start([1] * 40)
    world.commit(first)
    used = world.cache.stats().pages["used"]
    second = world.start([1] * 40 + [2])
    assert second.cached_tokens == 40
    assert world.cache.stats().pages["used"] == used + 1
    assert (world.cache.page_map() == vmmkv.SHARED_PAGE).sum() == used
    world.check()


@pytest.mark.parametrize("indices", [[1, 1], [0, 0], [1, 0]], ids=str)
@pytest.mark.parametrize("tokens", [40, 43], ids=["full pages", "and a part"])
def test_what_is_known_goes_along_when_sequences_are_reordered(indices: list[int], tokens: int) -> None:
    world = make(large_frames=False)
    one, two = world.start([1] * tokens, ("salt", None, None)), world.start([2] * tokens)
    world.commit(one)
    world.commit(two)
    world.reorder([one, two], indices)
    world.check()
    for sequence in (one, two):
        world.extend(sequence, [3] * 13)
        world.commit(sequence)
    held = [(world.ids[sequence], world.keys[sequence]) for sequence in (one, two)]
    for sequence in (one, two):
        world.free(sequence)
    for ids, key in held:
        assert world.start([*ids, 4], key).cached_tokens >= world.whole(len(ids))
    world.start([1] * tokens + [3] * 14)
    world.start([2] * tokens + [3] * 14, ("salt", None, None))
    world.check()


def test_who_turns_in_a_circle_keeps_nothing_from_being_evicted_that_it_has_copied() -> None:
    world = make(pages=16, large_frames=False)
    one, two = world.start([1] * 40), world.start([2] * 40)
    world.commit(one)
    world.commit(two)
    world.reorder([one, two], [1, 0])  # 6 pages are free: enough for one of the copies, until what it had is evicted
    world.check()


def test_a_known_frame_that_one_sequence_has_alone_needs_no_page_to_be_written_to() -> None:
    world = World(Random(), 74, vmmkv.KVLayout(2, 8, 32, torch.float32, layers_per_range=1))  # 2 tokens in a page
    one = world.start([1] * 64)  # two large frames in each range, and 10 pages are left
    world.commit(one)
    world.truncate(one, 50)
    world.extend(one, [3] * 3)
    world.check()


@pytest.mark.parametrize("large_frames", [False, True])
def test_pages_that_live_sequences_have_too_are_foretold(large_frames: bool) -> None:
    world = make(900, rows=9, large_frames=large_frames)
    world.commit(world.start([1] * 150))
    world.commit(ended := world.start([2] * 150))
    world.free(ended)
    page_bytes, (record,) = world.cache.page_size, world.cache.layout.record_bytes
    for ids in ([1] * 150, [1] * 70 + [3] * 20, [1] * 4 + [4] * 100, [2] * 160, [2] * 90, [5] * 30):
        before, shared = world.cache.stats().pages["used"], world.cache.shared_pages(ids)
        world.start(ids)
        taken = world.cache.stats().pages["used"] - before
        assert large_frames or taken == -(-len(ids) * record // page_bytes) - shared
        assert (shared > 0) == (taken * page_bytes < len(ids) * record)
    world.check()


def test_a_hit_of_few_tokens_leaves_room_for_large_frames() -> None:
    """The tokens lie on single pages, and behind a shared one there could be no large frame."""
    world = make(900, rows=9, max_seq_len=900)
    few = world.cache.page_size * 3 // world.cache.layout.record_bytes[0]
    world.commit(world.start([1] * few))
    for ids in ([1] * few + [2] * 300, [1] * few + [3] * 300):
        second = world.start(ids)
        assert world.cache.extents[second.row]["head_end"].min() >= 16
    world.check()


def test_who_has_no_room_costs_nobody_what_is_known() -> None:
    """Copies of what lies within a large frame take pages before the rest is mapped; not if there is none for that."""
    world = make(150, max_seq_len=900)
    shared = world.random.randrange(17, 32)
    world.commit(world.start([1] * 48 * 8))
    for token in (2, 3):
        world.commit(other := world.start([token] * 40 * 8))
        world.free(other)
    live = world.cache.sequence((70 - 48) * 8)
    ids = [1] * shared * 8 + [4] * world.random.randint(97 - shared, 110 - shared) * 8  # of 96 pages it has 80, and 16
    with pytest.raises(vmmkv.OutOfPagesError):
        world.cache.sequence(token_ids=ids)
    live.free()
    assert [world.start([token] * 40 * 8 + [5]).cached_tokens for token in (2, 3)] == [40 * 8, 40 * 8]
    world.check()


@pytest.mark.parametrize("call", ["copy", "map", "unmap", "set_access"])
@pytest.mark.parametrize("indices", [[1, 0, 0, 1], [0, 0, 2, 2], [3, 0, 1, 2]], ids=str)
def test_nobody_reads_what_a_failed_reordering_has_left(call: str, indices: list[int]) -> None:
    for skip in some(8, 4):
        world = make(large_frames=False)
        sequences = [world.start([first] * 45) for first in (1, 2, 3)] + [world.start([])]
        for sequence in sequences:
            world.commit(sequence)
        world.driver.fail(call, skip)
        with suppress(vmmkv.DriverError):
            world.reorder(sequences, indices)
        world.driver.heal()
        world.ids = {sequence: ids for sequence, ids in world.ids.items() if is_live(sequence)}
        world.check()
        for sequence in list(world.ids):
            world.free(sequence)
        for first in (1, 2, 3, 4, 5, 6):
            world.commit(world.start([first] * 45 + [first]))
        world.check()


def is_live(sequence: vmmkv.Sequence) -> bool:
    try:
        sequence.check_usable()
    except vmmkv.UseAfterFreeError:
        return False
    return True


def test_what_nobody_committed_is_not_known() -> None:
    world = make()
    world.free(world.start([1] * 40))
    assert world.start([1] * 40).cached_tokens == 0


@pytest.mark.parametrize("known_anew", [False, True])
def test_what_is_written_over_is_known_no_more(known_anew: bool) -> None:
    """Also behind the last page that is full, which nobody shares, and the next one who takes the row would have."""
    world = make()
    sequence = world.start([1] * 21)
    world.commit(sequence)
    world.cache.unshare([sequence], 18)
    world.ids[sequence][18:] = [2] * 3
    world.write(sequence, 18)
    if known_anew:
        world.commit(sequence)
    world.free(sequence)
    assert world.start([1] * 18 + ([2] if known_anew else [1]) * 4).cached_tokens == (21 if known_anew else 18)
    world.check()


def test_what_is_used_is_never_evicted() -> None:
    world = make(pages=20, large_frames=False)
    kept = world.start([1] * 80)
    world.commit(kept)
    with pytest.raises(vmmkv.OutOfPagesError):
        world.start([2] * 96)
    assert kept.length == 80
    assert world.start([1] * 81).cached_tokens == 80
    world.check()


def test_what_is_used_stays_known_where_it_was_computed_twice() -> None:
    """What goes is what nobody uses, and not what follows it, on the pages of who lives."""
    world = make(pages=20, large_frames=False)
    both = [world.start([1] * 80) for _ in range(2)]
    for sequence in both:
        world.commit(sequence)
    world.free(both[0])
    world.free(world.start([2] * 72))  # 9 of its 10 pages
    assert world.start([1] * 81).cached_tokens == 80
    world.check()


@pytest.mark.usefixtures("undebugged")
def test_who_begins_does_not_wait_for_the_copies_of_who_began_before() -> None:
    device = SimulatedDevice(Random())
    world = World(Random(), 200, LAYOUT, driver=device, large_frames=False)
    world.commit(world.start([1] * 32))
    for cached in (9, 17, 18):
        before = sum(stream.done for stream in device.streams)
        sequence = world.cache.sequence(token_ids=[1] * cached + [2] * 9)
        assert sequence.cached_tokens == cached
        assert sum(stream.done for stream in device.streams) == before
    device.finish()
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
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(vmmkv.OutOfHostMemoryError, match="no memory"):
            one.suspend()
        with pytest.raises(vmmkv.DriverOutOfMemoryError, match="circle"):
            cache.reorder([one, other], [1, 0])
    assert cache.stats().prefix_pages == before.prefix_pages > 0
    other.commit([2] * 20)
    cache.check()


# ---------------------------------------------------------------------- what is promised can be had


def cut(world: World) -> None:
    """Commits, and drops most of it again."""
    sequence = world.start([1] * 80)
    world.commit(sequence)
    world.truncate(sequence, 12)


def open_window(world: World) -> None:
    """Commits, and gives the front back."""
    sequence = world.start([1] * 80)
    world.commit(sequence)
    sequence.release_before(60)
    del world.ids[sequence]


def compute_twice(world: World) -> None:
    """Two compute the same, for neither was there when the other began; the one that is known ends."""
    both = [world.start([1] * 80), world.start([1] * 80)]
    for sequence in both:
        world.commit(sequence)
    world.free(both[0])


def go_on_behind(world: World) -> None:
    """A row ends that has tokens which nobody knows behind those that another uses."""
    first = world.start([1] * 40)
    world.commit(first)
    first.extend(60)
    world.start([1] * 40 + [2])
    world.free(first)


def fork_before(world: World) -> None:
    """Pages are known that only a fork uses, which does not know it, and others that nobody uses, for longer."""
    parent = world.start([1] * 80)
    world.fork_of(parent)
    world.commit(parent)
    world.free(parent)
    other = world.start([2] * 64)
    world.commit(other)
    world.free(other)


@pytest.mark.parametrize("options", [{}, {"large_frames": False}, {"scrub": True}], ids=str)
@pytest.mark.parametrize("begin", [cut, open_window, compute_twice, go_on_behind, fork_before])
def test_pages_that_are_said_to_be_available_are(begin: Callable[[World], None], options: dict[str, Any]) -> None:
    world = make(pages=40, **options)
    begin(world)
    available, taken = world.cache.available_pages, []
    while available:  # in pieces, for a row has not room for all of them
        taken.append(world.cache.sequence(min(available, 20) * 8))
        taken[-1].k(0).fill_(9)
        available -= min(available, 20)
        assert world.cache.available_pages == available
    world.check()


def test_all_rows_can_be_had_again() -> None:
    world = make()
    for token in range(6):
        sequence = world.start([token] * 20)
        world.commit(sequence)
        world.free(sequence)
    sequences = [world.start([9, token] * 10) for token in range(6)]
    world.check()
    with pytest.raises(vmmkv.OutOfRowsError):
        world.start([7])
    world.free(sequences[0])
    assert world.start([3] * 20).cached_tokens == 16  # whole pages: its row was given to another
    world.check()


def test_memory_of_a_cache_that_is_gone_goes_back() -> None:
    """Also what is only known, and before the garbage collector comes."""
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 100 * driver.page_size)
    cache = vmmkv.KVCache(LAYOUT, 2, 200, pool=pool)
    for token in range(4):
        sequence = cache.sequence(token_ids=[token] * 60)
        sequence.commit([token] * 60)
        sequence.free()
    gc.disable()
    try:
        del cache, sequence
        assert not driver.mapped
        assert pool.stats().holders == 0
        assert pool.stats().free_bytes == pool.stats().physical_bytes
    finally:
        gc.enable()


def test_a_neighbour_has_what_is_only_known() -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 40 * driver.page_size)
    first, second = (vmmkv.KVCache(LAYOUT, 4, 320, pool=pool) for _ in range(2))
    for token in range(3):
        sequence = first.sequence(token_ids=[token] * 80)
        sequence.commit([token] * 80)
        sequence.free()
    assert second.available_pages == 40
    assert second.sequence(40 * 8).length == 320
    first.check()
    assert first.sequence(token_ids=[]).cached_tokens == 0
    second.close()
    pool.set_limit(30 * driver.page_size)
    first.check()


def test_a_limit_below_what_is_only_known() -> None:
    driver = FaultyDriver(small_driver("cpu"))
    pool = on_driver(driver, vmmkv.FramePool, 40 * driver.page_size)
    cache = vmmkv.KVCache(LAYOUT, 4, 320, pool=pool)
    for token in range(3):
        sequence = cache.sequence(token_ids=[token] * 80)
        sequence.commit([token] * 80)
        sequence.free()
    pool.set_limit(5 * driver.page_size)
    assert driver.num_pages <= 5
    cache.check()


# ---------------------------------------------------------------------- streams


@pytest.mark.usefixtures("undebugged")
def test_a_capture_changes_nothing() -> None:
    device = SimulatedDevice(Random())
    world = World(Random(), 40, LAYOUT, driver=device)
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
@pytest.mark.parametrize("same_stream", [True, False])
def test_the_next_turn_on_a_stream_makes_no_call(same_stream: bool) -> None:
    """Not even to ask whether work has finished: on this stream it comes behind that."""
    device = SimulatedDevice(Random())
    world = World(Random(), 40, LAYOUT, driver=device)
    ids = [1] * Random().randint(9, 30)
    turn = world.start(ids)
    world.commit(turn)
    device.streams[0].submit(lambda: None)
    world.free(turn)
    device.current = device.streams[not same_stream]
    fault = device.fail(lasting=True)
    with nullcontext() if same_stream else pytest.raises(vmmkv.DriverError):
        assert world.cache.sequence(token_ids=[*ids, 2], whole=False).cached_tokens == len(ids)
    assert fault.was_met != same_stream


def test_who_asks_for_a_row_that_was_kept_has_it() -> None:
    world = make()
    sequence = world.start([1] * 45)
    world.commit(sequence)
    row = sequence.row
    world.free(sequence)
    other = world.cache.sequence(20, row=row)
    assert other.row == row
    other.k(0).fill_(0)
    world.check()
    other.free()
    world.check()
    again = world.start([1] * 46)
    assert again.cached_tokens >= world.whole(45)


@pytest.mark.parametrize("known", [31, 29])
def test_a_known_page_that_there_is_no_room_to_copy_is_written_to(known: int) -> None:
    """A sequence starts wherever it would without reuse: then the page is no longer known."""
    pool = on_driver(small_driver("cpu"), vmmkv.FramePool, 40 * 4096)
    layout = vmmkv.KVLayout(1, 1, 64, torch.float32)  # 8 tokens a page
    cache, other = (vmmkv.KVCache(layout, 4, 400, pool=pool, large_frames=False) for _ in range(2))
    first = cache.sequence(token_ids=[1] * 80)
    first.commit([1] * 80)
    first.free()
    taken = other.sequence(36 * 8)
    sequence = cache.sequence(token_ids=[1] * known + [2] * (32 - known))
    assert (sequence.length, sequence.cached_tokens, taken.length) == (32, known, 36 * 8)
    cache.check()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_in_an_array_are_not_copied(dtype: Any) -> None:
    ids = np.arange(1000, dtype=dtype)
    assert ids_of(ids) is ids
    with vmmkv.KVCache(vmmkv.KVLayout(2, 2, 16, torch.float32), 4, 1200, max_bytes="16MiB", device="cpu") as cache:
        first = cache.sequence(token_ids=ids)
        first.commit(ids)
        assert cache.sequence(token_ids=ids.tolist()).cached_tokens == 999
        assert cache.sequence(token_ids=ids).cached_tokens == 999


def test_a_hit_takes_few_python_calls() -> None:
    """Whatever its length: a call takes half a microsecond."""
    ids = np.random.default_rng().integers(1000, size=8 * 63 + 9)
    layout = vmmkv.KVLayout(2, 2, 16, torch.float32)
    with vmmkv.KVCache(
        layout, 8, 2000, max_bytes=3000 * 4096, device="cpu", page_size=4096, large_frames=False
    ) as cache:
        first = cache.sequence(token_ids=ids)
        assert calls_of(lambda: first.commit(ids)) <= 30
        found: list[vmmkv.Sequence] = []
        assert calls_of(lambda: found.append(cache.sequence(token_ids=ids))) <= 60
        assert found[0].cached_tokens == 8 * 64
        first.free()
        found.pop().free()
        assert calls_of(lambda: found.append(cache.sequence(token_ids=ids))) <= 40  # a chat's next turn
        assert found[0].cached_tokens == 8 * 64


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
