"""`vmmkv.core.reordering`: beams among all other operations, on streams that run late, with failing calls."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from conftest import ROUNDS
from core_machine import Machine, Model
from simulated_device import SimulatedDevice

import vmmkv
from vmmkv.core import reordering
from vmmkv.core.cache import Cache
from vmmkv.core.reordering import ASIDE, in_order, reorder
from vmmkv.errors import DriverError, OutOfPagesError, UnsupportedError


@pytest.fixture(autouse=True)
def _buffers_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a circle keeps aside stays until the device has been there, as torch has it on a GPU."""
    kept: list[torch.Tensor] = []
    make = reordering.Reordering.buffer

    def buffer(self: Any, moves: dict[int, int]) -> torch.Tensor:
        kept.append(memory := make(self, moves))
        SimulatedDevice.host[memory.data_ptr()] = memory.nbytes
        return memory

    monkeypatch.setattr(reordering.Reordering, "buffer", buffer)
    yield
    for memory in kept:
        SimulatedDevice.host.pop(memory.data_ptr(), None)


class ReorderingMachine(Machine):
    """The random machine of the core, which reorders, too."""

    def do_reorder(self, index: int) -> None:
        cache, models = self.caches[index], self.models[index]
        chosen = self.random.sample(models, self.random.randint(0, len(models)))
        indices = [self.random.randrange(len(chosen)) for _ in chosen]
        if self.random.random() < 0.4:
            self.random.shuffle(indices := list(range(len(chosen))))
        self.device.current = self.random.choice(self.device.streams[:3])
        rows = [model.sequence.row for model in chosen]
        try:
            reorder(cache, [model.sequence for model in chosen], indices)
        except UnsupportedError:
            pairs = [(model, chosen[source]) for model, source in zip(chosen, indices)]
            assert any(one.key != other.key or one.start > other.start for one, other in pairs)
            return
        except DriverError:
            self.forget_ended(index, [model for model, source in zip(chosen, indices) if chosen[source] is not model])
            raise
        assert [model.sequence.row for model in chosen] == rows
        held = [(model.start, model.tokens) for model in chosen]
        for model, source in zip(chosen, indices):
            model.start, model.tokens = held[source][0], list(held[source][1])

    do_reorder_again = do_reorder
    """Chosen twice as often."""

    def forget_ended(self, index: int, models: list[Model]) -> None:
        """Either no sequence that was to change has ended, or all of them; without tokens if they could not end."""
        owners = self.caches[index].owners
        live = [owners[model.sequence.ticket & 0xFFFFFF] == model.sequence.ticket >> 24 for model in models]
        same = [is_live and model.sequence.length == len(model.tokens) for is_live, model in zip(live, models)]
        if not all(same):
            assert not any(is_live and model.sequence.length for is_live, model in zip(live, models))
            self.models[index] = [model for model in self.models[index] if model not in models]


@pytest.mark.parametrize("faults", [False, True], ids=["without faults", "with faults"])
def test_any_reorderings_among_any_operations(faults: bool) -> None:
    done = 0
    for _ in range(25 * ROUNDS):
        seed = Random().randrange(1 << 32)
        try:
            (machine := ReorderingMachine(Random(seed), faults=faults)).run(80)
            done += machine.done["do_reorder"] + machine.done["do_reorder_again"]
        except BaseException as error:
            error.add_note(f"ReorderingMachine(Random({seed}), faults={faults}).run(80)")
            raise
    assert done > 40 * ROUNDS


def test_any_moves_are_put_in_order() -> None:
    """Each move finds what its source held before all of them, with one place to keep a row aside."""
    for _ in range(200 * ROUNDS):
        random = Random()
        rows = random.sample(range(100), random.randint(1, 12))
        moves = {row: source for row in rows if row != (source := random.choice(rows))}
        if random.random() < 0.5:
            shuffled = random.sample(rows, len(rows))
            moves = {row: source for row, source in zip(rows, shuffled) if row != source}
        place = {row: row for row in rows}
        for to, source, row in in_order(moves):
            place[to] = place[source]
            assert place[to] == moves[row]
        place.pop(ASIDE, None)
        assert place == {row: moves.get(row, row) for row in rows}


def bare_cache(pages: int = 40, **options: Any) -> tuple[Cache, SimulatedDevice]:
    """A cache of 4 rows of 100 tokens on a device whose driver refuses misuse."""
    from vmmkv.core.pool import Pool

    device = SimulatedDevice(Random())
    layout = vmmkv.KVLayout(3, 2, 16, torch.float32)
    return Cache(Pool(device.inner, pages), layout.record_bytes, 4, 100, **{"large": False, **options}), device


def test_beams_that_were_forked_copy_and_map_nothing() -> None:
    cache, device = bare_cache()
    first = cache.start(50)
    beams = [first, *(first.fork() for _ in range(3))]
    for beam in beams:
        beam.extend(3)
    changes, used = device.changes, cache.pool.word("used")
    for indices in ([1, 0, 2, 3], [2, 2, 2, 3], [1, 2, 3, 0], [3, 3, 3, 3]):
        reorder(cache, beams, indices)
    assert (device.changes, cache.pool.word("used")) == (changes, used)


def test_sequences_without_tokens_become_forks() -> None:
    cache, _ = bare_cache()
    first = cache.start(64)
    used = cache.pool.word("used")
    beams = [first, *(cache.start() for _ in range(3))]
    reorder(cache, beams, [0, 0, 0, 0])
    assert [beam.length for beam in beams] == [64] * 4
    assert cache.pool.word("used") <= used + 3


def test_what_is_refused_changes_nothing() -> None:
    cache, _device = bare_cache(pages=14)
    long, short, third = cache.start(60), cache.start(5), cache.start(1)
    before = [(each.start, each.length) for each in (long, short, third)]
    with pytest.raises(OutOfPagesError):
        reorder(cache, [long, short, third], [1, 0, 0])
    long.release_before(50)
    with pytest.raises(UnsupportedError, match="release_before"):
        reorder(cache, [long, short], [1, 0])
    assert [(each.start, each.length) for each in (long, short, third)] == [(50, 60), *before[1:]]
    third.free()
    with pytest.raises(vmmkv.UseAfterFreeError):
        reorder(cache, [long, third], [1, 0])
