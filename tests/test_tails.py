"""Tokens that fill no page are found, too: copied to the last equal one, or on a row that goes on; the least needed go.

Where a page holds more than any sequence nothing but tails is known, and a list of what each row holds says all that
there is to find.
"""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROUNDS, on_driver
from simulated_device import SimulatedDevice
from test_prefixes import World
from test_tiers import Late

import vmmkv
from vmmkv.reuse.tails import Tail, Tails

COARSE = vmmkv.KVLayout(1, 1, 2, torch.float32)  # 32 bytes: 128 tokens in a page of 4 KiB
FEW = vmmkv.KVLayout(1, 2, 8, torch.float32)  # 128 bytes: 32 tokens
ODD = vmmkv.KVLayout(1, 2, 9, torch.float32)  # 160 bytes: 25.6 tokens
RANGES = vmmkv.KVLayout(3, [2, 1, 2], 9, torch.float32, layers_per_range=1)
KEYS: list[tuple[Any, ...]] = [(None, None, None), ("salt", None, None), (None, 7, None), (None, None, "tenant")]


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64)


def test_a_look_up_finds_what_comparing_with_all_finds() -> None:
    random, tails, held = Random(), Tails(), dict[int, tuple[int, bool, list[int]]]()
    for _ in range(300):
        row = random.randrange(40)
        ids = [random.randrange(2) for _ in range(random.randint(0, 9))]
        if random.random() < 0.3:
            assert (tails.pop(row) is not None) == (held.pop(row, None) is not None)
        else:
            held[row] = place, kept, _ = random.randrange(2), random.random() < 0.5, ids
            tails.put(Tail(row, place, array(ids).tobytes(), kept), 0.0)
        place, kept, asked = random.randrange(2), random.random() < 0.5, [random.randrange(2) for _ in range(8)]
        others = {each: its for each, (at, is_kept, its) in held.items() if (at, is_kept) == (place, kept)}
        found = tails.longest(place, array(asked), kept)
        assert (found is None) == (not others)
        if found:
            assert found.tokens == common(others[found.tail.row], asked)
            assert found.tokens == max(common(its, asked) for its in others.values())
            if any(its == asked[: found.tokens] for its in others.values()):
                assert found.tail.tokens == found.tokens
        assert sorted(tails.rows(place)) == sorted(each for each, (at, *_) in held.items() if at == place)


def test_all_that_rows_hold_is_found_to_the_last_equal_token() -> None:
    """Of sequences that live what was committed, and of those that have ended all that was known."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    world = World(random, 500, COARSE, rows=80)
    held: dict[vmmkv.Sequence, list[int]] = {}
    """What of each is known."""
    found: set[vmmkv.Sequence] = set()
    """Whose others find: not those who have it from others, and have not committed it."""
    ended: dict[int, tuple[tuple[Any, ...], list[int]]] = {}
    """By row."""
    for _ in range(70):
        live, what = list(world.ids), random.random()
        there = [(world.keys[sequence], held[sequence]) for sequence in found] + [*ended.values()]
        if what < 0.5 or not live:
            key = random.choice(KEYS)
            begin = random.choice([[], *(ids for _, ids in there)])
            begin = begin[: random.choice([len(begin), random.randint(0, len(begin))])]
            ids = (begin + [random.randrange(2) for _ in range(random.randint(1, 40))])[:120]
            sequence = world.start(ids, key)
            cached = sequence.cached_tokens
            assert cached == max((common(its, ids[:-1]) for of, its in there if of == key), default=0)
            held[sequence] = ids[:cached]
            if ended.pop(sequence.row, None):
                found.add(sequence)
        elif what < 0.75:
            sequence = random.choice(live)
            tokens = random.randint(0, sequence.length)
            world.commit(sequence, tokens)
            if tokens >= len(held[sequence]):
                held[sequence] = world.ids[sequence][:tokens]
                found.add(sequence)
        elif what < 0.85:
            sequence = random.choice(live)
            tokens = random.randint(0, sequence.length)
            world.truncate(sequence, tokens)
            del held[sequence][tokens:]
        else:
            sequence = random.choice(live)
            row, key, ids = sequence.row, world.keys[sequence], held.pop(sequence)
            found.discard(sequence)
            world.free(sequence)
            if ids and not any(of == key and its[: len(ids)] == ids for of, its in ended.values()):
                ended[row] = key, ids
        world.check()


def chat(world: World, turns: list[list[int]]) -> list[int]:
    """Runs the turns of a chat; returns with how many tokens each began."""
    cached = []
    for ids in turns:
        sequence = world.start(ids)
        cached.append(sequence.cached_tokens)
        world.commit(sequence)
        world.free(sequence)
    return cached


def test_a_chat_that_fills_no_page_goes_on_without_a_driver_call() -> None:
    world = World(Random(), 10, COARSE)
    assert chat(world, [[1] * 20]) == [0]
    before = world.driver.changes
    assert chat(world, [[1] * 30, [1] * 30 + [2] * 70, [1] * 30 + [2] * 71]) == [20, 30, 100]
    assert world.driver.changes == before
    assert world.cache.stats().physical_bytes == world.cache.page_size
    world.check()


@pytest.mark.parametrize("ends", [False, True], ids=["lives", "has ended"])
def test_a_prompt_that_fills_no_page_is_copied_to_where_it_parts(ends: bool) -> None:
    """Who it is copied from keeps all that it has, and is found by the next one."""
    world = World(Random(), 10, COARSE)
    first = world.start([1] * 90 + [2] * 20)
    world.commit(first)
    if ends:
        world.free(first)
    second = world.start([1] * 90 + [3] * 20)
    assert second.cached_tokens == 90
    assert world.start([1] * 90 + [2] * 21).cached_tokens == 110
    world.check()


@pytest.mark.parametrize("layout", [FEW, ODD, RANGES], ids=["whole tokens in pages", "parts of tokens", "ranges"])
def test_behind_pages_that_are_shared_the_rest_is_copied(layout: vmmkv.KVLayout) -> None:
    """In several ranges as much as lies in one page more."""
    world = World(Random(), 60, layout, large_frames=False)
    first = world.start([1] * 75)
    world.commit(first)
    assert world.start([1] * 71 + [2] * 9).cached_tokens == 71
    assert world.start([1] * 80).cached_tokens == 75
    world.check()


def test_what_is_known_behind_a_token_in_two_pages_is_of_the_same_token() -> None:
    """It is the first one that parts, and the page that it begins in is known."""
    world = World(Random(), 60, ODD, large_frames=False)
    world.commit(world.start([1] * 40))  # token 25 begins in the first page, and ends in the second
    assert world.start([1] * 25 + [2] + [1] * 20).cached_tokens == 25
    assert world.start([1] * 26 + [2] * 20).cached_tokens == 26
    world.check()


def test_a_tail_stays_where_more_would_be_lost_than_is_won() -> None:
    """An ended sequence's row is taken over by who parts from it where its pages need not be mapped for that."""
    world = World(Random(), 60, FEW, large_frames=False)
    chat(world, [[1] * 70])
    row = world.start([1] * 69 + [2] * 9)  # one token is lost, and two calls are spared
    assert (row.row, row.cached_tokens) == (0, 69)
    world.free(row)
    chat(world, [[3] * 70])
    assert world.start([3] * 65 + [2] * 9).cached_tokens == 65  # five would be
    assert world.start([3] * 71).cached_tokens == 70
    world.check()


def test_the_least_needed_tail_goes_first() -> None:
    """By priority, then by when it was used last: among pages that are known, and among tails."""
    world = World(Random(), 5, COARSE, rows=10, large_frames=False)
    find = world.cache._starting.prefixes.finder.find
    for first, priority in ((1, 35), (2, 90), (3, 35), (4, 35), (5, 10)):
        sequence = world.start([first] * 50)
        sequence.commit([first] * 50, retention=[vmmkv.Retention(priority=priority)])
        world.free(sequence)
    again = world.start([1] * 51)
    world.commit(again)
    world.free(again)
    world.free(world.start([3] * 40 + [9]))  # 5 gives way for the copy, and what has it is nobody's then
    for first, known in ((6, {1, 2, 3, 4, 6}), (7, {1, 2, 3, 6, 7}), (8, {2, 3, 6, 7, 8}), (9, {2, 6, 7, 8, 9})):
        world.commit(sequence := world.start([first] * 50))
        world.free(sequence)
        assert {each for each in range(1, 10) if find(sequence.key, array([each] * 50)).tokens} == known
        world.check()


def test_what_another_row_holds_is_not_kept_twice() -> None:
    world = World(Random(), 10, COARSE)
    sequences = [world.start([1] * 50) for _ in range(3)]
    for sequence in sequences:
        world.commit(sequence)
    for sequence in sequences:
        world.free(sequence)
    assert (world.cache.page_map() == vmmkv.KEPT_PAGE).sum() == 1
    before = world.driver.changes
    world.start([2] * 50)
    world.start([3] * 50)
    assert world.driver.changes == before
    world.check()


def test_where_no_row_is_left_the_least_needed_tail_gives_its_row_up() -> None:
    world = World(Random(), 50, COARSE, rows=3)
    for first, priority in ((1, 90), (2, 20), (3, 35)):
        sequence = world.start([first] * 50)
        sequence.commit([first] * 50, retention=[vmmkv.Retention(priority=priority)])
        world.free(sequence)
    world.free(world.start([4] * 50, reuse=False))
    assert world.start([1] * 51).cached_tokens == 50
    assert world.start([3] * 51).cached_tokens == 50
    assert world.start([2] * 51).cached_tokens == 0
    world.check()


class Copying:
    """A cache whose device copies when it is told to, in which somebody has made 40 tokens known, a page and a tail."""

    def __init__(self) -> None:
        self.device, self.live = SimulatedDevice(Random()), list[vmmkv.Sequence]()
        self.cache = on_driver(
            self.device, vmmkv.KVCache, FEW, 5, 200, max_bytes=100 * self.device.page_size, large_frames=False
        )
        self.holder = self.cache.sequence(token_ids=array([1] * 40))
        self.holder.commit(array([1] * 40))
        self.device.finish()

    def forget_row(self) -> None:
        """Has what is known lie on no row: others have had all of them, and have left their pages there."""
        self.holder.free()
        self.cache.free([self.cache.sequence(70) for _ in range(5)])
        self.device.finish()

    def maps(self, common: int, other: int) -> int:
        """How many pages are mapped for one that begins with so many of the tokens that are known."""
        before = self.cache.stats().driver_calls["map"].count
        self.live.append(self.cache.sequence(token_ids=array([*[1] * common, *[other] * 10])))
        assert self.live[-1].cached_tokens == common
        self.cache.check()
        return self.cache.stats().driver_calls["map"].count - before

    def close(self) -> None:
        self.device.finish()
        self.cache.close()


def test_nothing_is_mapped_to_copy_from_a_row() -> None:
    world = Copying()
    assert [world.maps(20, other) for other in (2, 3, 4)] == [1, 1, 1]  # its own page
    world.close()


def test_what_is_being_copied_need_not_be_mapped_for_another_copy() -> None:
    world = Copying()
    world.forget_row()
    assert [world.maps(20, other) for other in (2, 3, 4)] == [1, 0, 0]
    world.close()


def test_what_was_copied_from_no_row_lies_on_one_from_then_on() -> None:
    world = Copying()
    world.forget_row()
    maps = []
    for other in (2, 3, 4):
        maps.append(world.maps(32, other))
        world.device.finish()
    assert maps == [1, 0, 0]
    world.close()


def test_rows_that_are_kept_hold_on_to_no_page_behind_their_tokens() -> None:
    """Those go before anything that is known does."""
    world = World(Random(), 10, FEW, rows=10, large_frames=False)
    for first in (1, 2):
        sequence = world.start([first] * 150)
        world.commit(sequence, 40)
        world.free(sequence)
    world.start([3] * 180)  # six pages, of which ten are there, and four known
    assert world.start([1] * 41).cached_tokens == world.start([2] * 41).cached_tokens == 40
    world.check()


def test_a_source_that_gives_way_meanwhile_is_copied_all_the_same() -> None:
    """There is room for one page more, and the row with the page that is copied is the only one that can make it."""
    world = World(Random(), 2, COARSE, rows=3, large_frames=False)
    world.commit(sequence := world.start([1] * 90))
    world.free(sequence)
    world.start([2] * 90)
    second = world.start([1] * 60 + [3] * 60)
    assert second.cached_tokens in (0, 60)
    world.check()


class Prompt(Random):
    """Has the first stream run before all others, until it has to wait."""

    before: tuple[Any, int] | None = None

    def choice(self, streams: Any) -> Any:
        now = streams[0], streams[0].done
        has_to_wait, self.before = self.before == now, now
        return super().choice(streams) if has_to_wait else streams[0]


@pytest.mark.parametrize("ends", [False, True], ids=["lives", "has ended"])
def test_nobody_writes_over_a_tail_before_it_is_copied(ends: bool) -> None:
    late = Late(Random(), FEW, 10, large_frames=False)
    late.start([1] * 20)
    (first,) = late.ids
    first.commit([1] * 20)
    if ends:
        late.free(first)
    late.device.finish()
    late.device.current, late.device.random = late.mine[1], Prompt()
    late.start([1] * 15 + [2])
    assert late.hits == 1
    late.device.current = late.mine[0]
    if ends:
        late.start([1] * 20 + [3])  # takes the row over
        first = list(late.ids)[-1]
        assert first.cached_tokens == 20
    rewrite(late, first, 3)
    late.device.finish()


def test_what_was_copied_is_copied_on_behind_that() -> None:
    """From a row whose own copy is under way when its sequence ends."""
    late = Late(Random(), FEW, 10, large_frames=False)
    late.device.current = late.mine[1]
    late.start([1] * 20)
    (first,) = late.ids
    first.commit([1] * 20)
    late.device.finish()
    late.device.current, late.device.random = late.mine[2], Prompt()
    late.start([1] * 15 + [2])
    late.free(list(late.ids)[-1])
    late.free(first)
    late.device.current = late.mine[0]
    late.start([1] * 14 + [3])
    assert late.hits == 2
    late.device.finish()


def rewrite(late: Late, sequence: vmmkv.Sequence, begin: int) -> None:
    """Drops the tokens of a sequence from one on, and writes another there."""
    late.device.current = late.streams[sequence]
    sequence.truncate(begin)
    sequence.extend(1)
    late.ids[sequence] = [*late.ids[sequence][:begin], late.ids[sequence][begin] + 1]
    for address, nbytes, data in late.places(sequence, begin):
        late.submit(sequence, address, nbytes, lambda a=address, n=nbytes, d=data: ctypes.memmove(a, d, n))


class Rewriting(Late):
    """Who also drops tokens that are known, and writes others there."""

    most = 20

    def step(self) -> None:
        super().step()
        live = [sequence for sequence in self.ids if sequence.length]
        if live and self.random.random() < 0.4:
            sequence = self.random.choice(live)
            rewrite(self, sequence, self.random.randrange(sequence.length))


@pytest.mark.parametrize("layout", [FEW, ODD, RANGES], ids=["whole tokens in pages", "parts of tokens", "ranges"])
def test_streams_that_run_late_see_their_own_bytes(layout: vmmkv.KVLayout) -> None:
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    for _ in range(2 * ROUNDS):
        late = Rewriting(random, layout, 30, large_frames=False)
        for _ in range(50):
            late.step()
        late.device.finish()
        late.cache.close()
        assert not late.device.mapped
