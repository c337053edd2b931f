"""A call of the driver fails, whichever it is: nobody loses a byte or a page, and the same once more is done.

Every operation is tried with any of its calls failing. Work on the device is queued, so that there is something to
wait for, and memory is short, so that others have to give some back.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from conftest import each_with_few, on_driver, some
from faulty import has_memory
from simulated_device import NotReady, SimulatedDevice, Stream
from test_interruption import EVERYTHING

import vmmkv
from vmmkv.errors import BudgetError, DriverError, OutOfPagesError
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(1, 4, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB
WIDE = vmmkv.KVLayout(2, [8, 4], 32, torch.float32, layers_per_range=1)  # 2 and 4 tokens
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookahead": {"lookahead": 20},
    "scrub": {"scrub": True},
    "zero_tail": {"zero_tail": True},
}


class Held:
    """A sequence, and what its tokens should hold, which is nobody else's."""

    def __init__(self, device: SimulatedDevice, sequence: vmmkv.Sequence) -> None:
        self.device, self.sequence, self.start, self.values = device, sequence, 0, torch.empty(0)
        self.grow(sequence.length)

    def states(self) -> Iterator[torch.Tensor]:
        """K and V of each layer."""
        row, end = self.sequence.row, self.sequence.length
        for layer in range(self.sequence.cache.layout.num_layers):
            for whole in self.sequence.cache.kv(layer):
                yield whole[row, self.sequence.start : end]

    def grow(self, tokens: int, start: int = 0) -> None:
        """Writes tokens that it has grown by."""
        self.device.finish()
        written = max(len(self.values) - self.start, 0)
        self.values, self.start = torch.cat([self.values, torch.rand(tokens)]), max(self.start, start)
        for states in self.states():
            states[written:] = self.values[self.start + written :, None, None]

    def shrink(self, start: int, end: int) -> None:
        """Forgets what it has given up."""
        self.start, self.values = start, self.values[:end]

    def check(self) -> None:
        assert (self.sequence.start, self.sequence.length) == (self.start, len(self.values))
        assert has_memory(self.sequence, self.device)
        for states in self.states():
            assert (states == self.values[self.start :, None, None]).all(), "other bytes than its own"

    def be_read(self, stream: Stream) -> None:
        """Has work read it later, which expects what it holds now."""
        self.sequence.record_stream(stream)  # type: ignore[arg-type]
        for states in self.states() if self.sequence.length else ():
            begin, last = states.data_ptr(), states[-1]

            def read(states: torch.Tensor = states, expected: torch.Tensor = states.clone()) -> None:  # noqa: B008
                assert torch.equal(states, expected), "somebody has written here"

            nbytes = last.data_ptr() + last.nbytes - begin
            stream.submit(lambda begin=begin, nbytes=nbytes, read=read: self.device.touch(begin, nbytes, read))


class World:
    """Two caches and a tensor on one pool, which is full of what nobody uses."""

    def __init__(self, policy: str, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.device = device = SimulatedDevice(chance)
        self.page = page = device.page_size
        self.alice, bob = chance.choice([("alice", "bob"), (None, None)])
        options = {"overread": chance.choice([0, 9])} | POLICIES[policy]
        self.pool = on_driver(device, vmmkv.FramePool, chance.choice([58, 70]) * page)
        self.cache = vmmkv.KVCache(LAYOUT, chance.choice([10, 11]), 100, pool=self.pool, **options)
        self.other = vmmkv.KVCache(WIDE, 4, 40, pool=self.pool, guaranteed=6 * page)
        self.tensor = GrowableTensor((100, page // 2), torch.uint8, max_bytes=20 * page, pool=self.pool)
        self.mapper = self.pool.mapper
        if self.mapper:
            self.mapper.ring = lambda: None  # it works when it is told to
        self.held: dict[str, Held] = {}
        self.hold("long", self.cache.sequence(chance.randint(17, 24), tenant=self.alice))
        self.hold("short", self.cache.sequence(chance.randint(1, 7), expected_tokens=20))
        self.hold("empty", self.cache.sequence())
        self.hold("late", self.cache.sequence(40))
        work(self)
        self.hold("cut", self.cache.sequence(chance.randint(41, 60), tenant=self.alice))
        fork(self, "long")
        fork(self, "cut")
        self.hold("wide", self.other.sequence(6))
        self.hold("gone", self.cache.sequence(chance.randint(33, 50), tenant=bob))
        self.hold("gone wide", self.other.sequence(10))
        with vmmkv.KVCache(LAYOUT, 1, 100, pool=self.pool, lookahead=0) as closed:
            closed.sequence(3 * 8)  # leaves free frames
        self.tensor.resize(14)
        self.rows = 5
        self.tensor.resize(self.rows)
        self.tensor.tensor.fill_(7)
        for each in self.held.values():
            each.be_read(chance.choice(device.streams))
        release_before(self, "late", 20)
        truncate(self, "cut", 10)
        for name in ("gone", "gone wide"):
            free(self, name)
        self.limit = self.pool.limit_pages
        self.caches = [self.cache, self.other]
        self.tensors = [self.tensor]
        device.current = chance.choice(device.streams)

    def hold(self, name: str, sequence: vmmkv.Sequence) -> None:
        self.held[name] = Held(self.device, sequence)

    def check(self) -> None:
        """The books add up, they are what the driver was asked for, and everybody reads what is theirs."""
        self.device.finish()
        for cache in self.caches:
            cache.check()
        stats = self.pool.stats()
        assert stats.physical_bytes == self.device.num_pages * self.page <= stats.limit_bytes
        assert self.pool.limit_pages == self.limit
        assert stats.sequences == len(self.held)
        assert stats.tokens == sum(len(each.values) - each.start for each in self.held.values())
        for each in self.held.values():
            each.check()
        assert len(self.tensor) == self.rows
        assert (self.tensor.tensor == 7).all()

    def close(self) -> None:
        """What the books say there is room for there is; and in the end nothing is left."""
        work(self)
        for each in self.held.values():
            changes = self.device.changes
            tokens = each.sequence.capacity - each.sequence.length
            each.sequence.extend(tokens)
            assert self.device.changes == changes
            each.grow(tokens)
            each.check()
        for opened in (*self.caches, *self.tensors):
            opened.close()
        self.pool.close()
        assert not self.device.mapped
        assert not self.device.handles


def extend(world: World, name: str, tokens: int) -> None:
    world.held[name].sequence.extend(tokens)
    world.held[name].grow(tokens)


def extend_all(world: World) -> None:
    tokens = {"long": 30, "short": 0, "late": 9, "empty": 20, "cut": 1}
    world.cache.extend([world.held[name].sequence for name in tokens], list(tokens.values()))
    for name, count in tokens.items():
        world.held[name].grow(count)


def extend_from(world: World) -> None:
    world.cache.extend([world.held["empty"].sequence], 70, starts=[35])
    world.held["empty"].grow(70, 35)


def start(world: World, tokens: int, **options: Any) -> None:
    world.hold("new", world.cache.sequence(tokens, **options))


def start_wide(world: World) -> None:
    world.hold("new", world.other.sequence(13))


def truncate(world: World, name: str, tokens: int) -> None:
    world.held[name].sequence.truncate(tokens)
    world.held[name].shrink(world.held[name].start, tokens)


def release_before(world: World, name: str, token: int) -> None:
    world.held[name].sequence.release_before(token)
    world.held[name].shrink(token, len(world.held[name].values))


def free(world: World, name: str) -> None:
    world.held[name].sequence.free()
    del world.held[name]


def fork(world: World, name: str, count: int = 1) -> None:
    """Children begin with what the parent holds when its work is done."""
    parent = world.held[name]
    for number, child in enumerate(parent.sequence.cache.fork_many(parent.sequence, count)):
        held = world.held[f"{name}, fork {number}"] = Held.__new__(Held)
        held.device, held.sequence, held.start, held.values = world.device, child, parent.start, parent.values.clone()


def cut_and_extend(world: World, name: str) -> None:
    """Drops tokens that others share, and writes others there."""
    held = world.held[name]
    if len(held.values) > 11:
        truncate(world, name, 11)
    extend(world, name, 30)


def unshare(world: World, name: str, start: int) -> None:
    """Has what others share for itself, and may write over it."""
    held = world.held[name]
    held.sequence.cache.unshare([held.sequence], start)
    world.device.finish()
    held.values[start:] = torch.rand(len(held.values) - start)
    for states in held.states():
        states[start - held.start :] = held.values[start:, None, None]


def free_all(world: World) -> None:
    world.cache.free([each.sequence for name, each in world.held.items() if name != "wide"])
    world.held = {"wide": world.held["wide"]}


def abandon(world: World) -> None:
    world.held.pop("cut", None)
    world.cache.stats()


def set_limit(world: World, pages: int) -> None:
    world.pool.set_limit(pages * world.page)
    world.limit = pages


def resize(world: World, rows: int) -> None:
    world.tensor.resize(rows)
    world.device.finish()
    world.tensor.tensor[world.rows :] = 7
    world.rows = rows


def append(world: World) -> None:
    world.tensor.append(torch.full((21, world.page // 2), 7, dtype=torch.uint8))
    world.device.finish()
    world.tensor.tensor[world.rows :] = 7  # torch, which knows no queue here, has been too early where that was zeroed
    world.rows += 21


def open_cache(world: World, **options: Any) -> None:
    world.caches.append(vmmkv.KVCache(WIDE, 2, 40, pool=world.pool, guaranteed=9 * world.page, **options))


def open_tensor(world: World) -> None:
    world.tensors.append(GrowableTensor((100,), pool=world.pool))


def close(world: World) -> None:
    """What cannot be unmapped now is given back when nobody can see it any more."""
    world.cache.close()
    world.held = {"wide": world.held["wide"]}
    world.caches.remove(world.cache)
    del world.cache
    gc.collect()


def work(world: World) -> None:
    """What the mapper does, in a thread of its own, and what becomes of its errors there."""

    def run() -> None:
        with suppress(DriverError):
            while world.mapper.work():
                pass

    if world.mapper:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


OPERATIONS: dict[str, Callable[[World], object]] = {
    "start": lambda world: start(world, 95),
    "start a short one": lambda world: start(world, 3),
    "start, expecting": lambda world: start(world, 9, expected_tokens=70),
    "start, a tenant": lambda world: start(world, 70, tenant=world.alice),
    "start in the other cache": start_wide,
    "extend": lambda world: extend(world, "long", 75),
    "extend what was cut": lambda world: extend(world, "cut", 60),
    "extend the other cache": lambda world: extend(world, "wide", 10),
    "extend all": extend_all,
    "extend from": extend_from,
    "truncate": lambda world: truncate(world, "long", 3),
    "release before": lambda world: release_before(world, "long", 16),
    "fork": lambda world: fork(world, "wide"),
    "fork many": lambda world: fork(world, "cut, fork 0", 3),
    "fork what was released in front": lambda world: fork(world, "late"),
    "truncate a parent and extend": lambda world: cut_and_extend(world, "long"),
    "truncate a forked one and extend": lambda world: cut_and_extend(world, "long, fork 0"),
    "unshare a parent": lambda world: unshare(world, "long", 3),
    "unshare a forked one": lambda world: unshare(world, "cut, fork 0", 33),
    "free a parent": lambda world: free(world, "long"),
    "free": lambda world: free(world, "late"),
    "free all": free_all,
    "abandon": abandon,
    "prewarm": lambda world: world.cache.prewarm(),
    "prewarm rows": lambda world: world.cache.prewarm(tokens=30),
    "trim": lambda world: world.cache.trim(),
    "trim the pool": lambda world: world.pool.trim(keep=30 * world.page),
    "limit down": lambda world: set_limit(world, 42),
    "mapper": work,
    "close": close,
}
OPERATIONS_BESIDE: dict[str, Callable[[World], object]] = {
    "grow the tensor": lambda world: resize(world, 26),
    "shrink the tensor": lambda world: resize(world, 1),
    "append to the tensor": append,
    "trim the tensor": lambda world: world.tensor.trim(),
    "open a cache": open_cache,
    "open a cache with tails": lambda world: open_cache(world, zero_tail=True),
    "open a tensor": open_tensor,
}
"""Those for which it does not matter much what the first cache promises."""


def has_lost(world: World, error: Exception | None) -> bool:
    """Whether an error says that a sequence has ended, whose pages could not be mapped again by any call."""
    lost = [name for name, each in world.held.items() if "gone" in repr(each.sequence)]
    notes = getattr(error, "__notes__", [])
    assert notes == [
        f"Sequence {world.held[name].sequence.number} has ended: the driver did not map its tokens again"
        for name in lost
    ]
    for name in lost:
        del world.held[name]
    return bool(lost)


FEW = {"once": 5, "for want of memory": 2, "not ready": 2, "for good": 1}
"""How many of an operation's calls are made to fail: once, for want of memory, by a query that says no; or all from
there on."""


def survives(world: World, name: str, kind: str, skip: int) -> int | None:
    """Does an operation whose n-th call fails, in one of the ways of `FEW`, and what is still to be done then.

    Returns:
        None; of an operation that makes fewer calls, which of them could have failed so: how many.
    """
    operation = {**OPERATIONS, **OPERATIONS_BESIDE}[name]
    if kind == "for want of memory":
        fault = world.device.fail("create", skip, out_of_memory=True)
    elif kind == "not ready":
        fault = world.device.fail("query", skip, error=NotReady)
    else:
        fault = world.device.fail("any", skip, lasting=kind == "for good")
    error: Exception | None = None
    try:
        operation(world)
    except (DriverError, OutOfPagesError) as caught:
        error = caught.with_traceback(None)
    if world.device.heal():
        assert not error
        return skip - fault.skip
    assert not error or kind != "not ready", "what is not ready can be waited for"
    assert not isinstance(error, OutOfPagesError) or kind != "once"
    if has_lost(world, error):
        assert kind == "for good"
        error = None
    world.check()
    if error:
        operation(world)
        world.check()
    world.close()
    return None


@pytest.mark.parametrize(
    ("name", "policy"),
    each_with_few(2, [name for name in OPERATIONS if name != "mapper"], POLICIES)
    + each_with_few(1, OPERATIONS_BESIDE, ["any"])
    + [("mapper", "lookahead")],
)
def test_a_failed_call(name: str, policy: str) -> None:
    seed = Random().randrange(1 << 32)
    policy = Random().choice(list(POLICIES)) if policy == "any" else policy
    World(policy, seed).check()
    for kind, few in FEW.items():
        for skip in some(survives(World(policy, seed), name, kind, EVERYTHING) or 0, few):
            try:
                survives(World(policy, seed), name, kind, skip)
            except BaseException as error:
                error.add_note(f"survives(World({policy!r}, {seed}), {name!r}, {kind!r}, {skip})")
                raise


@pytest.mark.parametrize("policy", POLICIES)
def test_a_limit_below_what_lives_changes_nothing(policy: str) -> None:
    """And the error says how low it may be: so low it can be, and no lower."""
    world = World(policy, Random().randrange(1 << 32))
    world.device.finish()

    def state() -> object:
        capacities = [each.sequence.capacity for each in world.held.values()]
        return world.device.mapped.copy(), world.device.handles.copy(), world.pool.stats(), capacities

    before = state()
    with pytest.raises(BudgetError, match="6 are guaranteed"):
        world.pool.set_limit(5 * world.page)
    with pytest.raises(OutOfPagesError) as caught:
        world.pool.set_limit(6 * world.page)
    least = caught.value.available
    assert caught.value.requested == 6
    for pages in [*Random().sample(range(7, least), 3), least - 1]:
        with pytest.raises(OutOfPagesError):
            world.pool.set_limit(pages * world.page)
        assert state() == before
    set_limit(world, least)
    world.check()
    with pytest.raises(OutOfPagesError):
        extend(world, "cut", 90)
    world.check()
    set_limit(world, 90)
    extend(world, "cut", 90)
    world.check()
    world.close()
