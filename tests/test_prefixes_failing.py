"""A call fails, or somebody interrupts, while sequences begin with what is known: nobody loses a token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import Any

import pytest
from conftest import each_with_few, small_driver, some
from faulty import FaultyDriver
from interruption import interrupted
from simulated_device import NotReady, SimulatedDevice
from test_faults import FEW
from test_interruption import EVERYTHING, some_lines
from test_prefixes import LAYOUT, RANGES, World

import vmmkv
from vmmkv.errors import DriverError, OutOfPagesError
from vmmkv.rows.sharing import Sharing
from vmmkv.space.change import Change

PROMPT = [1] * 150
POLICIES: dict[str, dict[str, Any]] = {
    "large frames": {},
    "pages": {"large_frames": False},
    "scrub": {"scrub": True},
    "ranges": {"layout": RANGES},
}


class Busy(World):
    """A cache with little memory, of which each sequence has been used in another way."""

    def __init__(self, policy: str, driver: FaultyDriver, **more: Any) -> None:
        options = {"layout": LAYOUT} | POLICIES[policy] | more
        layout = options.pop("layout")
        super().__init__(Random(), 75 if layout is LAYOUT else 140, layout, rows=8, driver=driver, **options)
        parent = self.started("parent", PROMPT)
        self.commit(parent)
        self.fork("parent", "child")
        self.cut("child", 130)
        self.started("laid", PROMPT[:77] + [2] * 20)
        self.cut("laid", 40)
        kept = self.started("kept", [3] * 60)
        self.commit(kept, 40)
        kept.free()
        self.forget("kept")
        self.finish()

    def finish(self) -> None:
        if isinstance(self.driver, SimulatedDevice):
            self.driver.finish()

    def started(self, name: str, ids: list[int]) -> vmmkv.Sequence:
        sequence = self.cache.sequence(token_ids=ids)
        self.names = getattr(self, "names", {}) | {name: sequence}
        self.ids[sequence], self.keys[sequence] = list(ids), (None, None, None)
        self.finish()
        self.read(sequence, sequence.cached_tokens)
        self.write(sequence, sequence.cached_tokens)
        return sequence

    def fork(self, parent: str, name: str) -> None:
        self.names[name] = self.fork_of(self.names[parent])

    def cut(self, name: str, tokens: int) -> None:
        self.truncate(self.names[name], tokens)

    def grow(self, name: str, tokens: int) -> None:
        sequence = self.names[name]
        before = len(self.ids[sequence])
        sequence.extend(tokens)
        self.finish()
        self.ids[sequence] += [5] * tokens
        self.write(sequence, before)

    def free(self, name: str) -> None:  # type: ignore[override]
        self.names[name].free()
        self.forget(name)

    def forget(self, name: str) -> None:
        sequence = self.names.pop(name)
        del self.ids[sequence], self.keys[sequence]

    def keep(self, names: Collection[str]) -> None:
        """Leaves behind what has other names, or none yet."""
        self.names = {name: sequence for name, sequence in self.names.items() if name in names}
        self.ids = {sequence: self.ids[sequence] for sequence in self.names.values() if sequence in self.ids}
        self.keys = {sequence: self.keys[sequence] for sequence in self.names.values() if sequence in self.keys}

    def check(self) -> None:
        self.finish()
        for name, sequence in list(self.names.items()):
            if "gone" in repr(sequence):
                self.forget(name)
            else:
                assert sequence.length == len(self.ids[sequence])
        super().check()
        assert self.cache.stats().rows["live"] == len(self.names)

    def close(self) -> None:
        """Nothing is left, and what was known is of use, or nobody's."""
        self.cache.free(list(self.names.values()))
        self.keep([])
        self.started("again", [*PROMPT, 4])
        self.started("other", [3] * 70)
        self.check()
        self.cache.free(list(self.names.values()))
        self.keep([])
        self.cache.trim()
        assert self.driver.num_pages == 0
        self.cache.check()
        self.cache.close()
        assert not self.driver.mapped


def commit(world: Busy, name: str) -> None:
    sequence = world.names[name]
    sequence.commit(world.ids[sequence])


class Chunked(Busy):
    """One more sequence, which has committed a part of its tokens: the tree's node of these is its own."""

    def __init__(self, policy: str, driver: FaultyDriver) -> None:
        super().__init__(policy, driver)
        self.started("chunks", [5] * 36)
        commit(self, "chunks")
        self.grow("chunks", 20)


Make = Callable[[FaultyDriver], Busy]
Operation = Callable[[Busy], object]

OPERATIONS: dict[str, Operation] = {
    "adopt a kept row": lambda world: world.started("new", [3] * 60 + [2] * 90),
    "begin with all": lambda world: world.started("new", [*PROMPT, 2]),
    "begin with a part": lambda world: world.started("new", PROMPT[:101] + [2] * 60),
    "begin with a part of a tail": lambda world: world.started("new", [*PROMPT[:147], 2, 2]),
    "reorder": lambda world: world.reorder([world.names[name] for name in ("parent", "child", "laid")], [0, 0, 1]),
    "start where little is left": lambda world: world.started("new", [4] * 180),
    "commit": lambda world: commit(world, "laid"),
    "free": lambda world: world.free("parent"),
    "fork": lambda world: world.fork("parent", "new"),
    "grow what was cut": lambda world: world.grow("child", 40),
    "grow what was laid": lambda world: world.grow("laid", 50),
    "trim": lambda world: world.cache.trim(),
    "limit": lambda world: world.cache.pool.set_limit(
        (30 if len(world.cache.layout.record_bytes) == 1 else 60) * 4096  # less than there is, and enough to go on
    ),
    "close": lambda world: (world.cache.close(), world.keep([])),
}


def survives(make: Make, operation: Operation, kind: str, skip: int) -> int | None:
    """Does an operation whose n-th call fails, in one of the ways of `FEW`, and once more.

    Returns:
        None; of an operation that makes fewer calls, which of them could have failed so: how many.
    """
    device = SimulatedDevice(Random())
    world = make(device)
    for sequence in world.names.values():  # somebody reads, later
        address = sequence.k(0).data_ptr()
        device.streams[0].submit(lambda address=address: device.touch(address, 512, lambda: None))
    if kind == "for want of memory":
        fault = device.fail("create", skip, out_of_memory=True)
    elif kind == "not ready":
        fault = device.fail("query", skip, error=NotReady)
    else:
        fault = device.fail("any", skip, lasting=kind == "for good")
    error: Exception | None = None
    try:
        operation(world)
    except (DriverError, OutOfPagesError) as caught:
        error = caught.with_traceback(None)
    device.finish()
    if device.heal():
        assert not error
        return skip - fault.skip
    assert not error or kind != "not ready", "what is not ready can be waited for"
    names = list(world.names)
    world.check()
    if error and names == list(world.names):  # none was lost, by a driver that mapped nothing any more
        operation(world)
        world.check()
    world.close()
    return None


def survives_all(make: Make, operation: Operation) -> None:
    """Has calls of an operation fail, in each way."""
    for kind, few in FEW.items():
        for skip in some(survives(make, operation, kind, EVERYTHING) or 0, few):
            try:
                survives(make, operation, kind, skip)
            except BaseException as error:
                error.add_note(f"{kind=}, {skip=}")
                raise


@pytest.mark.parametrize(
    ("name", "policy"), each_with_few(2, [name for name in OPERATIONS if name != "close"], POLICIES)
)
def test_a_failed_call(name: str, policy: str) -> None:
    survives_all(lambda driver: Busy(policy, driver), OPERATIONS[name])


@pytest.mark.parametrize(("name", "policy"), each_with_few(2, OPERATIONS, POLICIES))
def test_an_interruption_at_any_line(name: str, policy: str) -> None:
    """Live sequences have their tokens, and what was known is forgotten; or the cache says that it is unusable."""
    is_interrupted_everywhere(lambda driver: Busy(policy, driver), OPERATIONS[name], closes=name == "close")


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_commit_that_makes_a_node_longer(policy: str) -> None:
    def make(driver: FaultyDriver) -> Busy:
        return Chunked(policy, driver)

    survives_all(make, lambda world: commit(world, "chunks"))
    is_interrupted_everywhere(make, lambda world: commit(world, "chunks"))


def is_interrupted_everywhere(make: Make, operation: Operation, closes: bool = False) -> None:
    """Interrupts an operation at many of its lines."""

    def check(line: int) -> int | None:
        driver = FaultyDriver(small_driver("cpu"))
        world = make(driver)
        driver.unmaps_anything = True
        before = {name: len(world.ids[sequence]) for name, sequence in world.names.items()}
        lines = interrupted(lambda: operation(world), line)
        world.keep(before)
        try:
            for each, sequence in world.names.items():
                if "gone" not in repr(sequence):
                    world.truncate(sequence, before[each])
            if not closes:
                world.check()
                world.close()
        except vmmkv.InterruptedChangeError:
            pass
        except vmmkv.UseAfterFreeError:
            assert closes
        world.cache.close()
        assert not driver.mapped
        assert driver.num_pages <= 16, "of a frame in the making, or on its way back, nobody knows"
        return lines

    for line in some_lines(check(EVERYTHING)):
        try:
            assert check(line) is None
        except BaseException as error:
            error.add_note(f"{line=}")
            raise


def test_copies_that_are_to_take_the_place_of_a_part_of_a_large_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is interrupted then has the frame unmapped whole, as the driver has it: both places are in doubt."""
    world = World(Random(), 200, LAYOUT, max_seq_len=600)
    world.commit(world.start([1] * 40 * 8))
    sequence = world.start([1] * 33 * 8)
    world.truncate(sequence, world.random.randrange(17 * 8, 31 * 8))
    world.driver.unmaps_anything = True
    put = Sharing._put

    def interrupt(change: Change) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sharing, "_put", lambda *args: (patch.setattr(Change, "make", interrupt), put(*args)))
        with pytest.raises(KeyboardInterrupt):
            sequence.extend(1)
    world.check()
