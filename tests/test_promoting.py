"""Prefixes that are hit again move to large frames: the same bytes, in fewer calls, and nobody is worse off for it."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from conftest import calls, on_driver, small_driver
from faulty import FaultyDriver
from simulated_device import NotReady, SimulatedDevice
from test_prefixes import World
from test_prefixes_failing import is_interrupted_everywhere
from test_tiers import Late

import vmmkv
from vmmkv.errors import DriverError
from vmmkv.memory.frames import LARGE
from vmmkv.reuse.promoting import HOT
from vmmkv.space.mapper import Mapper

LAYOUT = vmmkv.KVLayout(2, 2, 128, torch.float32)  # a token in a page of 4 KiB
RANGES = vmmkv.KVLayout(3, [2, 1, 2], 192, torch.float32, layers_per_range=1)  # records that do not divide pages
KNOWN = [Random(0).randrange(9) for _ in range(40)]


def quiet(cache: vmmkv.KVCache) -> Mapper:
    """The mapper, which works only when it is told to from now on."""
    mapper = cache.pool.mapper
    assert isinstance(mapper, Mapper)
    mapper.ring = lambda: None  # type: ignore[method-assign]
    return mapper


def work(world: Decoded) -> None:
    """Lets the mapper do all that it finds to do, and the device all that it is told to."""
    for _ in range(100):
        if not world.mapper.work():
            world.finish()
            if not world.mapper.work():
                return
    raise AssertionError("there is no end to it")


class Decoded(World):
    """A cache with a prefix that lies on single pages, for it came token by token."""

    def __init__(
        self,
        pages: int = 200,
        layout: vmmkv.KVLayout = LAYOUT,
        driver: FaultyDriver | None = None,
        tenant: str | None = None,
        tokens: int = len(KNOWN),
        **options: Any,
    ) -> None:
        super().__init__(Random(), pages, layout, driver=driver, **{"lookahead": 1, **options})
        self.mapper = quiet(self.cache) if self.cache.pool.mapper else None
        self.prefix = KNOWN[:tokens]
        self.first = self.grown(self.prefix, tenant)

    def finish(self) -> None:
        if isinstance(self.driver, SimulatedDevice):
            self.driver.finish()

    def read(self, sequence: vmmkv.Sequence, end: int) -> None:
        self.finish()
        super().read(sequence, end)

    def grown(self, ids: list[int], tenant: str | None = None) -> vmmkv.Sequence:
        """A sequence of these ids that came in pieces for which no large frame is worth it, and is known."""
        sequence = self.start(ids[:10], (None, None, tenant))
        for begin in range(10, len(ids), 10):
            sequence.extend(len(ids[begin : begin + 10]))
            self.ids[sequence] += ids[begin : begin + 10]
            self.finish()
            self.write(sequence, begin)
        self.commit(sequence)
        return sequence

    def hit(self, tenant: str | None = None) -> tuple[vmmkv.Sequence, int]:
        """A sequence that begins with the prefix, and how many frames were mapped for it."""
        before = self.maps
        self.finish()
        sequence = self.start([*self.prefix, 9], (None, None, tenant))
        assert sequence.cached_tokens == len(self.prefix)
        return sequence, self.maps - before

    @property
    def maps(self) -> int:
        return self.cache.stats().driver_calls["map"].count

    @property
    def promoted(self) -> int:
        return self.cache.stats().promoted_pages

    def begin_copy(self) -> None:
        """Lets the mapper come to where it waits for a copy, or has none to wait for."""
        self.finish()
        mover = self.cache._rows.movers[-1]
        while not mover.is_waiting:
            assert self.mapper is not None
            assert self.mapper.work()

    def heat(self, tenant: str | None = None) -> None:
        """Hits the prefix as often as it takes. One of the rows is kept then, with nothing that moves at its end."""
        for sequence in [self.hit(tenant)[0] for _ in range(HOT)]:
            self.free(sequence)

    def keep(self, sequences: Any) -> None:
        """What `is_interrupted_everywhere` asks for."""

    def close(self) -> None:
        for sequence in list(self.ids):
            self.free(sequence)
        self.cache.trim()
        assert self.driver.num_pages == 0
        self.cache.check()
        self.cache.close()
        assert not self.driver.mapped


@pytest.mark.parametrize(("layout", "runs", "single"), [(LAYOUT, 2, 8), (RANGES, 2, 43)], ids=["one range", "ranges"])
def test_the_next_hit_maps_large_frames(layout: vmmkv.KVLayout, runs: int, single: int) -> None:
    """Of 40 pages there are two runs of 16, and of 30, 15 and 30 pages one each in two ranges."""
    world = Decoded(layout=layout)
    held, maps = [], 0
    for number in range(HOT):
        sequence, maps = world.hit()
        held.append(sequence)
        assert maps >= runs * LARGE + single
        work(world)
        assert world.promoted == (runs * LARGE if number == HOT - 1 else 0)
        world.check()
    last, after = world.hit()
    assert after == maps - runs * (LARGE - 1)
    world.check()
    for sequence in [world.first, *held]:
        world.free(sequence)
    world.cache.trim()  # of what lies on the old pages nobody has any more
    assert world.driver.num_pages == world.cache.stats().pages["used"]
    world.check()
    world.hit()
    world.check()
    world.free(last)
    world.close()


def test_who_lies_on_the_old_pages_keeps_them_and_goes_on() -> None:
    """Also where it commits more, is forked, or truncated; and what it has known stays so."""
    world = Decoded()
    world.heat()
    held, _ = world.hit()
    before = [world.first.k(0).data_ptr(), *world.cache._rows.pages(world.first.row)[0][0]]
    work(world)
    assert world.promoted == 32
    assert [world.first.k(0).data_ptr(), *world.cache._rows.pages(world.first.row)[0][0]] == before
    world.extend(world.first, [7] * 20)
    world.commit(world.first)
    child = world.fork_of(world.first)
    world.check()
    world.truncate(held, 20)
    world.extend(held, [8] * 5)
    world.check()
    ids = world.ids[world.first]
    world.free(world.first)
    world.free(child)
    last = world.start([*ids, 1])
    assert last.cached_tokens == 60
    world.check()
    world.close()


@pytest.mark.usefixtures("undebugged")
@pytest.mark.parametrize("tokens", [32, 40])
def test_a_kept_row_is_adopted_or_given_up(tokens: int) -> None:
    """One that is found by a page that has moved is of no use; one with a page behind it is as good as ever."""
    world = Decoded()
    ids = [5, *KNOWN[1:tokens]]
    sequences = [world.grown(ids), *(world.start([*ids, 9]) for _ in range(HOT))]
    for sequence in sequences:
        world.free(sequence)
    work(world)
    world.check()
    assert world.promoted == 32
    before = world.driver.changes
    sequence = world.start([*ids, 9])
    assert sequence.cached_tokens == tokens
    assert world.driver.changes - before == (1 if tokens == 40 else 3)  # a page for the last token, and two frames
    world.check()
    world.close()


@pytest.mark.parametrize("options", [{"lookahead": 0}, {"large_frames": False}], ids=str)
def test_nothing_moves_where_it_is_not_wanted(options: dict[str, Any]) -> None:
    world = Decoded(**options)
    assert (world.mapper is None) == ("lookahead" in options)
    for _ in range(HOT + 1):
        world.hit()
        if world.mapper:
            work(world)
    assert world.promoted == 0
    world.check()
    world.close()


def test_without_room_nothing_moves_and_nobody_gives_way() -> None:
    """Whatever there is for it: single pages that are free, or less than a large frame takes."""
    world = Decoded(pages=len(KNOWN) + HOT + LARGE - 1)
    for _ in range(HOT):
        world.hit()
    before = world.cache.stats()
    work(world)
    after = world.cache.stats()
    assert after.promoted_pages == 0
    assert (after.prefix_pages, after.pages["used"]) == (before.prefix_pages, before.pages["used"])
    world.cache.pool.set_limit((len(KNOWN) + HOT + 9 + LARGE) * world.cache.page_size)  # with pages ahead
    world.hit()
    work(world)
    assert world.promoted == LARGE  # once: all rows lie on the old pages
    world.check()
    world.close()


@pytest.mark.parametrize("late", [False, True])
def test_what_is_being_copied_gives_way(late: bool) -> None:
    """Somebody needs all pages in the middle of it."""
    device = SimulatedDevice(Random())
    world = Decoded(pages=len(KNOWN) + 2 * LARGE, driver=device)
    world.heat()
    world.begin_copy()
    if not late:
        world.finish()
    world.first.extend(2 * LARGE)
    world.ids[world.first] += [3] * 2 * LARGE
    world.finish()
    world.write(world.first, len(KNOWN))
    world.check()
    work(world)
    assert world.promoted == 0
    world.close()


def test_hits_meanwhile_are_as_before() -> None:
    """The old pages are known until the copy has run, which comes behind what has written them."""
    world = Decoded(driver=SimulatedDevice(Random()))
    _, maps = [world.hit() for _ in range(HOT)][-1]
    world.begin_copy()
    before = world.maps
    meanwhile = world.cache.sequence(token_ids=[*KNOWN, 9])
    assert (meanwhile.cached_tokens, world.maps - before) == (len(KNOWN), maps)
    assert world.promoted == 0
    work(world)
    assert world.promoted == 32
    _, after = world.hit()
    assert after < maps
    meanwhile.free()
    world.check()
    world.close()


@pytest.mark.usefixtures("undebugged")
def test_a_tenants_bytes_are_told_from_others() -> None:
    """What has moved is zeroed before another has it, also where it has not come to be known."""
    for is_done in (True, False):
        world = Decoded(pages=100, tenant="one")
        for _ in range(HOT):
            world.hit("one")
        if is_done:
            work(world)
            assert world.promoted == 32
            _, maps = world.hit("one")
            assert maps <= 12
        else:
            world.begin_copy()
        world.check()
        for sequence in list(world.ids):
            world.free(sequence)
        other = world.cache.sequence(98, tenant="another")
        for layer in range(LAYOUT.num_layers):
            assert not other.k(layer).any()
            assert not other.v(layer).any()
        other.free()
        world.close()


def survives(kind: str, skip: int, gives_way: bool) -> bool:
    """Has the n-th call fail of what the mapper does, or of who needs memory in the middle of that; False where there
    are fewer."""
    device = SimulatedDevice(Random())
    world = Decoded(driver=device, tokens=18)
    world.heat()
    world.finish()
    if gives_way:
        world.begin_copy()
    if kind == "for want of memory":
        device.fail("create", skip, out_of_memory=True)
    elif kind == "not ready":
        device.fail("query", skip, error=NotReady)
    else:
        device.fail("any", skip)
    for _ in range(2):
        with suppress(DriverError):
            world.cache.trim() if gives_way else work(world)
        world.finish()
        world.cache.check()
    was_met = not device.heal()
    world.check()
    if not gives_way and kind != "for want of memory":
        work(world)
        assert world.promoted == LARGE
        held = [world.hit() for _ in range(2)]  # of which one has the row that was kept
        assert max(maps for _, maps in held) <= 4
    world.check()
    world.close()
    return was_met


@pytest.mark.parametrize(
    ("kind", "gives_way"), [("once", False), ("for want of memory", False), ("not ready", False), ("once", True)]
)
def test_a_failed_call(kind: str, gives_way: bool) -> None:
    """Nothing is lost, nothing leaks, and the prefix moves when the driver is well again."""
    assert next(skip for skip in range(100) if not survives(kind, skip, gives_way)) > 0


@pytest.mark.parametrize("layout", [LAYOUT, RANGES], ids=["one range", "ranges"])
def test_any_operations_on_streams_that_run_late(layout: vmmkv.KVLayout) -> None:
    seed = Random().randrange(1 << 32)
    print(f"{seed=}")
    random = Random(seed)
    for pages in (70, 100, 400):
        late = Late(random, layout, pages, lookahead=1)
        late.most = 12  # so that they come to lie on single pages
        mapper = quiet(late.cache)
        for _ in range(80):
            late.known = sorted(late.known, key=len)[-2:]
            late.step()
            for _ in range(random.choice([0, 1, 3, 50])):
                if not mapper.work():
                    break
            late.cache.check()
        assert not mapper.error
        late.commit_and_free()
        late.device.finish()
        late.cache.close()
        assert not late.device.mapped


@pytest.mark.parametrize("name", ["trim", "hit", "close"])
def test_an_interruption_while_a_copy_is_there(name: str) -> None:
    """What it was copied to is nobody's then."""

    def make(driver: FaultyDriver) -> Any:
        world = Decoded(driver=driver)
        world.heat()
        world.begin_copy()
        world.names = {"first": world.first}  # type: ignore[attr-defined]
        return world

    operations = {
        "trim": lambda world: world.cache.trim(),
        "hit": lambda world: world.cache.sequence(token_ids=[*KNOWN, 9]),
        "close": lambda world: world.cache.close(),
    }
    is_interrupted_everywhere(make, operations[name], closes=name == "close")


def test_the_thread_does_it() -> None:
    cache = on_driver(
        FaultyDriver(small_driver("cpu")), vmmkv.KVCache, LAYOUT, 6, 200, max_bytes=200 * 4096, lookahead=1
    )
    with cache:
        first = cache.sequence(token_ids=KNOWN[:10])
        for _ in range(3):
            first.extend(10)
        first.commit(KNOWN)
        held = [cache.sequence(token_ids=[*KNOWN, 9]) for _ in range(HOT)]
        with calls(Mapper, "wait") as until:
            until(lambda: cache.stats().promoted_pages == 32)
        cache.check()
        assert [sequence.cached_tokens for sequence in held] == [len(KNOWN)] * HOT
