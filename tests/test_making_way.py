"""In a full pool sequences adopt the rows of what is needed least: what is known is found, and little is mapped."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from test_prefixes import LAYOUT, RANGES, World, prompt
from test_promoting import quiet

import vmmkv

COMMON = [1] * 12
"""A page of tokens, and a part of one."""


def work(world: World) -> None:
    """Lets the mapper do all that it finds to do."""
    mapper = world.cache.pool.mapper
    assert mapper is not None
    while mapper.work():
        pass


def full(pages: int = 100) -> World:
    """A cache whose pages all hold what was used once, but for what the mapper has for others."""
    world = World(Random(), pages, LAYOUT, rows=20, lookahead=8)
    quiet(world.cache)
    for number in range(100, 110):
        once(world, number)
    return world


def once(world: World, number: int, tokens: int = 150) -> int:
    """Lets a sequence come that begins with what is common, and go; returns how many tokens it began with."""
    sequence = world.start([*COMMON, *([number] * (tokens - len(COMMON)))])
    cached = sequence.cached_tokens
    world.commit(sequence)
    world.check()
    world.free(sequence)
    work(world)
    return cached


def test_who_begins_alike_takes_the_row_of_what_goes() -> None:
    world = full()
    before = world.cache.stats()
    assert [once(world, number) for number in range(8)] == [len(COMMON)] * 8
    after = world.cache.stats()
    assert after.adoptions == before.adoptions + 8
    assert after.driver_calls["map"].count - before.driver_calls["map"].count <= 3 * 8  # of 19 pages each


def test_what_was_used_last_stays() -> None:
    """It is what came before it that gives way."""
    world = full()
    for number in range(8):
        assert once(world, number) == len(COMMON)
        assert once(world, number) == 149


def test_who_expects_more_begins_on_a_large_frame() -> None:
    """A page, and a part of one, are copied: single pages under them would leave too few for a large frame behind."""
    world = World(Random(), 200, LAYOUT, lookahead=8)
    quiet(world.cache)
    once(world, 2)
    before = world.cache.stats().driver_calls["map"].count
    ids = np.array([*COMMON, *[3] * (17 * 8 - len(COMMON))])
    sequence = world.cache.sequence(token_ids=ids, whole=False, expected_tokens=len(ids))
    assert sequence.length == sequence.cached_tokens == len(COMMON)
    sequence.extend(len(ids) - len(COMMON))
    maps = world.cache.stats().driver_calls["map"].count - before
    assert maps <= 3  # a large frame, a page, and what is copied, where it is copied from
    world.cache.check()


@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
@pytest.mark.parametrize("options", [{}, {"scrub": True}, {"large_frames": False}], ids=str)
def test_any_operations_in_a_full_pool(layout: vmmkv.KVLayout, options: dict[str, Any]) -> None:
    """Nobody writes where others read, whatever rows have been shared before they are adopted."""
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    world = World(random, 100 if layout is LAYOUT else 200, layout, rows=8, lookahead=8, **options)
    quiet(world.cache)
    for _ in range(60):
        live = list(world.ids)
        try:
            if random.random() < 0.6 or not live:
                key = None, None, random.choice([None, None, None, "tenant"])
                sequence = world.start(prompt(world), key, whole=random.random() < 0.5)
                world.commit(sequence)
            elif random.random() < 0.3:
                world.fork_of(random.choice(live))
            elif random.random() < 0.2:
                sequence = random.choice(live)
                world.truncate(sequence, random.randint(0, sequence.length))
            else:
                world.free(random.choice(live))
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError):
            for sequence in live:
                world.free(sequence)
        if random.random() < 0.7:
            work(world)
        world.check()
    world.cache.close()
    assert not world.driver.handles
