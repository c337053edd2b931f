"""`vmmkv.core.reordering`: beams among all other operations, on streams that run late, with failing calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import ROUNDS, randoms
from core_machine import Machine, Model
from simulated_device import SimulatedDevice

from vmmkv.core import reordering
from vmmkv.core.reordering import reorder
from vmmkv.errors import DriverError, UnsupportedError


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
    for random in randoms(25):
        (machine := ReorderingMachine(random, faults=faults)).run(80)
        done += machine.done["do_reorder"] + machine.done["do_reorder_again"]
    assert done > 40 * ROUNDS
