"""The random machine of the prefix tree, with host memory for evicted frames and suspended sequences."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import ClassVar

import pytest
import torch
from core_machine import Model, follow
from prefix_machine import Ids, Known, PrefixMachine, Tables
from simulated_device import SimulatedDevice

from vmmkv.core import entries as core_entries
from vmmkv.core.cache import Cache
from vmmkv.core.pool import Ask
from vmmkv.core.sequence import Sequence
from vmmkv.errors import ArgumentError, OutOfHostMemoryError, SuspendedError
from vmmkv.prefix import entries
from vmmkv.prefix.offload import Offload
from vmmkv.prefix.prefixes import Key, Prefixes
from vmmkv.tier import slots
from vmmkv.tier.host_tier import HostTier
from vmmkv.tier.slots import copies
from vmmkv.tier.stored import WINDOW


class HostChunk(slots.Chunk):
    """A chunk whose memory the simulated device may use, as long as it is there. Most are neighbours."""

    arena: ClassVar[torch.Tensor] = torch.empty(1 << 28, dtype=torch.uint8)
    used: ClassVar[int] = 0

    def __init__(self, pages: int, page_size: int, is_pinned: bool) -> None:
        super().__init__(pages, page_size, is_pinned)
        begin, end = HostChunk.used, HostChunk.used + self.memory.nbytes
        if end <= len(self.arena):
            self.memory, HostChunk.used = self.arena[begin:end], end
            self.address = self.memory.data_ptr()
        SimulatedDevice.host[self.address] = self.memory.nbytes
        weakref.finalize(self.memory, SimulatedDevice.host.pop, self.address)


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the simulated device use slots."""
    monkeypatch.setattr(slots, "Chunk", HostChunk)
    monkeypatch.setattr(SimulatedDevice, "host", {})


class HostMachine(PrefixMachine):
    """Random operations on caches with a prefix tree and a host tier each."""

    often = *PrefixMachine.often, "do_evict", "do_come_back", "do_come_back", "do_suspend", "do_resume"

    next_prompt: tuple[Key, Ids] | None = None

    def __init__(self, random: Random, *, faults: bool = True) -> None:
        super().__init__(random, faults=faults)
        tiers = [tree.offload.tier for tree in self.trees if tree.offload]
        self.tiers = tiers
        self.away: list[list[Model]] = [[] for _ in self.caches]
        self.pool.evict[:] = [each for tier, tree in zip(tiers, self.trees) for each in (tier.evict, tree.evictor)]

    def new_tree(self, cache: Cache) -> Prefixes:
        limit = self.random.choice([0, 3, 20, 200, 1000, 1000]) * cache.pool.driver.page_size
        tier = HostTier(cache, limit, self.random.choice([0, 0, 35]))
        tree = Prefixes(cache, events=1 << 14, clock=lambda: self.now, tier=tier)
        assert tree.offload
        tree.offload.load = self.counting(tree.offload)  # type: ignore[method-assign]
        return tree

    def counting(self, offload: Offload):  # type: ignore[no-untyped-def]
        """Counts hits on the host."""
        load = offload.load

        def counting(sequence: Sequence, words: tuple[int, int, int], cached: int) -> int:
            end = load(sequence, words, cached)
            self.done["host hits"] += end > cached
            self.done["host hits behind device hits"] += end > cached > 0
            self.done["host tokens"] += end - cached
            return end

        return counting

    def held_frames(self) -> Counter[int]:
        storing = [frames for tier in self.tiers for _, frames in tier.prefixes.storing]
        return super().held_frames() + Counter(frame for frames in storing for frame in frames if frame >= 0)

    def staging(self) -> list[range]:
        size = WINDOW * self.pool.driver.page_size
        windows = [tier.prefixes._window.start for tier in self.tiers if tier.prefixes._shown]
        return [*super().staging(), *(range(window, window + size) for window in windows)]

    def check(self) -> None:
        super().check()
        for tree, tier in zip(self.trees, self.tiers):
            assert tree.offload
            tables, stored = Tables(tree), tier.prefixes.stored
            there = [node for node in range(1, tables.fresh) if node not in tables.free and tables.nodes[node]["host"]]
            hosted = {(node, int(tables.nodes[node]["host"])) for node in there}
            assert hosted - {*tier.prefixes.gone} == {(each.node, serial) for serial, each in stored.items()}
            assert tier.used <= tier.slots.made * tier.slots.page_size <= tier.slots.limit * tier.slots.page_size
        for tier, models in zip(self.tiers, self.away):
            assert len(tier.away) == len(models)
            for model in models:
                assert (model.sequence.start, model.sequence.length) == (model.start, len(model.tokens))

    def do_evict_all(self, index: int) -> None:
        self.trees[index].evict(1 << 30)

    def prompt(self, index: int) -> tuple[Key, Ids]:
        return self.next_prompt or super().prompt(index)

    def do_come_back(self, index: int) -> None:
        """A sequence is committed and ends, its frames are evicted, and one begins with its tokens."""
        model = self.pick(index)
        if isinstance(model, Known) and model.names is not None and model.start == 0 and model.tokens:
            self.trees[index].commit(model.sequence, model.ids)
            self.ever[index][model.names].append(list(model.ids))
            self.caches[index].free([model.sequence])
            self.models[index].remove(model)
            self.device.run(self.random.choice([0, 1000]))
            self.trees[index].evict(self.random.choice([3, 1 << 30, 1 << 30]))
            kept = self.random.choice([len(model.ids), self.random.randint(1, len(model.ids))])
            ids = (model.ids[:kept] + self.some_ids(self.some() + 1))[: self.caches[index].max_seq_len]
            self.next_prompt = model.names, ids
        try:
            self.do_begin_here(index)
        finally:
            self.next_prompt = None

    def do_look(self, index: int) -> None:
        super().do_look(index)
        key, ids = self.prompt(index)
        given, (_, upper) = array("q", ids), self.bounds(index, key, ids)
        first = self.random.randint(0, len(ids))
        words = key.number, given.buffer_info()[0], len(ids), first, 0, 0
        assert first <= entries.look_up_host(self.trees[index].address, *words) <= max(first, upper)

    def do_make_way(self, index: int) -> None:
        """Sequences need host memory."""
        with self.tiers[index].alone():
            self.tiers[index].prefixes.make_way(self.random.choice([1, 1, 10, 1000]))

    def some_away(self, index: int) -> Model | None:
        return self.random.choice(self.away[index]) if self.away[index] else None

    def do_suspend(self, index: int) -> None:
        if model := self.pick(index):
            self.device.current = self.random.choice([model.home, self.device.streams[0]])
            tier, record_bytes = self.tiers[index], self.caches[index].records
            tokens, size = len(model.tokens) - model.start, self.pool.driver.page_size
            pages = sum(-(-tokens * record // size) for record in record_bytes)
            kept = sum(run.pages for taken in tier.away.values() for runs in taken for run in runs)
            try:
                tier.suspend(model.sequence)
            except OutOfHostMemoryError:
                assert pages + kept > tier.slots.limit
                return
            if isinstance(model, Known):
                model.committed = 0
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

    def do_abandon_resume(self, index: int) -> None:
        """An interruption in the middle of a resume: planned, and perhaps run, but not booked."""
        if model := self.some_away(index):
            tier, cache, ask, ticket = self.tiers[index], self.caches[index], Ask(), model.sequence.ticket
            words = copies(tier.pieces(ticket, model.start), cache.records, model.start, len(model.tokens))
            at = model.sequence.cell.buffer_info()[0], words.buffer_info()[0], len(words) // 4
            with self.pool.lock:
                serial = core_entries.plan_resume(cache.address, *at, ask.address)
                if serial > 1 and self.random.random() < 0.7:
                    core_entries.run(self.pool.address, serial, 0)
            if serial == 0:  # it has no tokens
                self.away[index].remove(model)
                self.models[index].append(model)

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

    def do_clear(self, index: int) -> None:
        before = self.trees[index].state[0]["used"]
        super().do_clear(index)
        offload = self.trees[index].offload
        if before and not self.trees[index].state[0]["used"] and offload:
            offload.close()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        for models in self.away:
            for model in models:
                model.sequence.free()
            models.clear()
        self.device.finish()
        for tier in self.tiers:
            tier.finish(1 << 30)
        super().run(0)
        for tier in self.tiers:
            assert tier.used == tier.slots.made == 0
