"""The random machine of the core, with sequences that are suspended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from random import Random

import pytest
from core_machine import Machine, Model, follow
from simulated_device import SimulatedDevice

from vmmkv.core.cache import Cache
from vmmkv.errors import ArgumentError, OutOfHostMemoryError, SuspendedError
from vmmkv.tier import slots
from vmmkv.tier.host_tier import HostTier


class HostChunk(slots.Chunk):
    """A chunk whose memory the simulated device may use, as long as it is there."""

    def __init__(self, pages: int, page_size: int, is_pinned: bool) -> None:
        super().__init__(pages, page_size, is_pinned)
        SimulatedDevice.host[self.address] = self.memory.nbytes
        weakref.finalize(self.memory, SimulatedDevice.host.pop, self.address)


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the simulated device use slots."""
    monkeypatch.setattr(slots, "Chunk", HostChunk)
    monkeypatch.setattr(SimulatedDevice, "host", {})


class TierMachine(Machine):
    """Has a host tier for each cache. Suspended sequences are on lists of their own."""

    def __init__(self, random: Random, *, faults: bool = True) -> None:
        super().__init__(random, faults=faults)
        self.limits = [random.choice([0, 3, 20, 200]) for _ in self.caches]
        size = self.pool.driver.page_size
        self.tiers = [HostTier(cache, limit * size) for cache, limit in zip(self.caches, self.limits)]
        self.away: list[list[Model]] = [[] for _ in self.caches]

    def check(self) -> None:
        super().check()
        for tier, models, limit in zip(self.tiers, self.away, self.limits):
            assert tier.used <= tier.slots.made * tier.slots.page_size <= limit * tier.slots.page_size
            kept = sum(run.pages for runs in tier.away.values() for run in runs)
            leaving = sum(run.pages for _, runs in tier.slots._leaving for run in runs)
            assert kept + leaving == tier.slots.taken
            assert len(tier.away) == len(models)
            for model in models:
                assert (model.sequence.start, model.sequence.length) == (model.start, len(model.tokens))

    def some_away(self, index: int) -> Model | None:
        return self.random.choice(self.away[index]) if self.away[index] else None

    def do_suspend(self, index: int) -> None:
        if model := self.pick(index):
            self.device.current = self.random.choice([model.home, self.device.streams[0]])
            tier, record_bytes = self.tiers[index], self.caches[index].records
            tokens, size = len(model.tokens) - model.start, self.pool.driver.page_size
            pages = sum(-(-tokens * record // size) for record in record_bytes)
            kept = sum(run.pages for runs in tier.away.values() for run in runs)
            try:
                tier.suspend(model.sequence)
            except OutOfHostMemoryError:
                assert pages + kept > self.limits[index]
                return
            self.models[index].remove(model)
            self.away[index].append(model)

    def do_resume(self, index: int) -> None:
        if model := self.some_away(index):
            row = model.sequence.row
            stream = self.device.current = self.random.choice(self.device.streams[:3])
            self.tiers[index].resume(model.sequence)
            self.away[index].remove(model)
            self.models[index].append(model)
            assert model.sequence.row == row
            model.sequence.record_stream(stream)
            self.read(model, stream)  # no stream has to be told to wait
            self.read(model, model.home)
            follow(model.home, stream)

    def do_free_suspended(self, index: int) -> None:
        if model := self.some_away(index):
            self.device.current = model.home
            model.sequence.free()
            self.away[index].remove(model)

    def do_refused(self, index: int) -> None:
        """What a suspended sequence cannot do."""
        if model := self.some_away(index):
            sequence, cache = model.sequence, self.caches[index]
            self.device.current = model.home
            calls: list[Callable[[], object]] = [
                lambda: sequence.extend(0), lambda: sequence.truncate(0), lambda: sequence.release_before(0),
                lambda: cache.part(sequence.ticket, 0), lambda: cache.batch([sequence]).extend(),
                lambda: self.tiers[index].suspend(sequence),
            ]  # fmt: skip
            with pytest.raises(SuspendedError):
                self.random.choice(calls)()
        if model := self.pick(index):
            with pytest.raises(ArgumentError):
                self.tiers[index].resume(model.sequence)

    def do_fork_suspended(self, index: int) -> None:
        model, cache = self.some_away(index), self.caches[index]
        if model and cache.state[0]["live"] < cache.max_sequences:
            with pytest.raises(SuspendedError):
                model.sequence.fork()

    def run(self, steps: int) -> None:
        """Runs so many steps, and gives all slots back."""
        for _ in range(steps):
            self.step()
        for index, cache in enumerate(self.caches):
            for model in self.away[index]:
                model.sequence.free()
            self.away[index].clear()
            assert isinstance(cache, Cache)
        self.device.finish()
        for tier in self.tiers:
            assert tier.used == tier.slots.made == 0
        super().run(0)
