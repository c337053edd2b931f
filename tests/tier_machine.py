"""The random machine of the core, with sequences that are suspended."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from core_machine import Machine, Model, Prefix, follow
from simulated_device import SimulatedDevice

from vmmkv.core import entries
from vmmkv.core.pool import Ask
from vmmkv.errors import ArgumentError, OutOfHostMemoryError, SuspendedError, VmmkvError
from vmmkv.prefix.tables import MOVED
from vmmkv.tier import slots
from vmmkv.tier.host_tier import HostTier
from vmmkv.tier.slots import copies
from vmmkv.tier.stored import WINDOW


class HostChunk(slots.Chunk):
    """A chunk whose memory the simulated device may use, as long as it is there."""

    def __init__(self, pages: int, page_size: int, is_pinned: bool) -> None:
        super().__init__(pages, page_size, is_pinned)
        SimulatedDevice.host[self.address] = self.memory.nbytes
        weakref.finalize(self.memory, SimulatedDevice.host.pop, self.address)


@dataclass
class Kept:
    """A stored prefix: bytes of its tokens, its pages, and its priority and last use."""

    tokens: list[int]
    pages: list[tuple[int, int]]
    key: int
    rank: tuple[int, int]


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the simulated device use slots."""
    monkeypatch.setattr(slots, "Chunk", HostChunk)
    monkeypatch.setattr(SimulatedDevice, "host", {})


class TierMachine(Machine):
    """Has a host tier for each cache. Suspended sequences are on lists of their own."""

    often = *Machine.often, "do_suspend", "do_resume", "do_commit_longest", "do_store", "do_load", "do_trim"

    def __init__(self, random: Random, *, faults: bool = True) -> None:
        super().__init__(random, faults=faults)
        self.limits = [random.choice([0, 3, 20, 200, 200]) for _ in self.caches]
        size = self.pool.driver.page_size
        self.tiers = [HostTier(cache, limit * size) for cache, limit in zip(self.caches, self.limits)]
        self.away: list[list[Model]] = [[] for _ in self.caches]
        self.stored: list[dict[int, Kept]] = [{} for _ in self.caches]
        self.uses = 0
        finish = self.pool.evict[: len(self.tiers)]
        self.pool.evict[:] = [*finish, *(self.evictor(index) for index in range(len(self.caches)))]

    def evictor(self, index: int) -> Callable[[int], int]:
        """What evicts prefixes of a guest, and stores some of them."""

        def evict(pages: int) -> int:
            guest, given = self.guests[index], 0
            while guest.prefixes and given < pages:
                prefix = guest.prefixes[0]
                if self.random.random() < 0.7:
                    self.store(index, prefix)
                given += guest.drop(prefix)
            return given

        return evict

    def held_frames(self) -> Counter[int]:
        storing = [frames for tier in self.tiers for _, frames in tier.prefixes.storing]
        return super().held_frames() + Counter(frame for frames in storing for frame in frames)

    def staging(self) -> list[range]:
        size = WINDOW * self.pool.driver.page_size
        windows = [tier.prefixes._window for tier in self.tiers if tier.prefixes._shown]
        return [*super().staging(), *(range(window, window + size) for window in windows)]

    def check(self) -> None:
        super().check()
        for tier, models, limit, stored in zip(self.tiers, self.away, self.limits, self.stored):
            while tier.prefixes.gone:
                gone = stored.pop(tier.prefixes.gone.popleft()[1])
                assert all(gone.rank <= each.rank for each in stored.values() if each.rank[1] < self.uses)
            assert stored.keys() == tier.prefixes.stored.keys()
            assert tier.used <= tier.slots.made * tier.slots.page_size <= limit * tier.slots.page_size
            kept = self.suspended_pages(tier)
            pages = sum(len(each.slots) for each in tier.prefixes.stored.values())
            assert pages == sum(tier.prefixes.pages.values())
            assert kept + pages + tier.slots.leaving == tier.slots.taken
            assert len(tier.away) == len(models)
            for model in models:
                assert (model.sequence.start, model.sequence.length) == (model.start, len(model.tokens))

    def suspended_pages(self, tier: HostTier) -> int:
        return sum(run.pages for taken in tier.away.values() for runs in taken for run in runs)

    def store(self, index: int, prefix: Prefix) -> None:
        priority = self.random.randrange(4)
        self.uses += 1
        pages = self.pages_of(prefix, self.uses, priority)
        tier = self.tiers[index]
        with suppress(VmmkvError), tier.alone():
            tier.sweep()
            if tier.prefixes.store(pages).any():
                there = pages[["part", "page"]].tolist()
                self.stored[index][self.uses] = Kept(prefix.tokens, there, prefix.key, (priority, self.uses))

    def pages_of(self, prefix: Prefix, serial: int, priority: int) -> np.ndarray:
        """The pages of a prefix that hold tokens, in any order."""
        pages = [
            (0, serial, part, page, frame, offset, priority, 0, 0)
            for part, frames in enumerate(prefix.frames)
            for page, (frame, offset) in enumerate(
                (frame, offset) for frame in frames for offset in range(self.pool.frames[frame]["pages"])
            )
        ]
        return np.array(self.random.sample(pages, len(pages)), MOVED)

    def do_store(self, index: int) -> None:
        guest = self.guests[index]
        long = [prefix for prefix in guest.prefixes if prefix.tokens]
        if long:
            prefix = self.random.choice(long)
            self.store(index, prefix)
            if self.random.random() < 0.5:
                guest.drop(prefix)

    def do_commit_longest(self, index: int) -> None:
        if models := [each for each in self.models[index] if each.tokens and not each.start]:
            model = max(models, key=lambda each: len(each.tokens))
            self.commit(index, model, len(model.tokens))

    def do_load(self, index: int) -> None:
        """A new sequence: some tokens are written, those behind come from the host."""
        stored, cache, tier = self.stored[index], self.caches[index], self.tiers[index]
        if not stored:
            return
        handle = self.random.choice([*stored])
        kept = stored[handle]
        stream = self.device.current = self.random.choice(self.device.streams[:3])
        length = self.random.randint(0, len(kept.tokens))
        first = self.random.randint(0, length)
        sequence = cache.start(length, key=kept.key)
        model = Model(sequence, stream, kept.key, self.byte(first))
        self.write(model, 0)
        pages = [(handle, *place) for place in kept.pages]
        with tier.alone():
            is_loaded = tier.prefixes.load(pages, sequence.ticket, first, length - first)
        if is_loaded:
            self.uses += 1
            kept.rank = kept.rank[0], self.uses
            model.tokens += kept.tokens[first:]
        else:
            sequence.truncate(first)
            assert (0, handle) in tier.prefixes.gone
        del model.tokens[length:]
        self.models[index].append(model)

    def do_load_shared(self, index: int) -> None:
        """Tokens cannot be loaded onto pages that others have."""
        model, stored, cache = self.pick(index), self.stored[index], self.caches[index]
        if model and stored and cache.extents["shared"][model.sequence.row * len(cache.ranges)]:
            handle = self.random.choice([*stored])
            if min(len(stored[handle].tokens), len(model.tokens)) and not model.start:
                pages = [(handle, *place) for place in stored[handle].pages]
                with pytest.raises(ArgumentError):
                    self.tiers[index].prefixes.load(pages, model.sequence.ticket, 0, 1)

    def do_drop(self, index: int) -> None:
        if self.stored[index]:
            handle = self.random.choice([*self.stored[index]])
            self.tiers[index].prefixes.drop(handle)
            del self.stored[index][handle]

    def some_away(self, index: int) -> Model | None:
        return self.random.choice(self.away[index]) if self.away[index] else None

    def do_suspend(self, index: int) -> None:
        if model := self.pick(index):
            self.device.current = self.random.choice([model.home, self.device.streams[0]])
            tier, record_bytes = self.tiers[index], self.caches[index].records
            tokens, size = len(model.tokens) - model.start, self.pool.driver.page_size
            pages = sum(-(-tokens * record // size) for record in record_bytes)
            kept = self.suspended_pages(tier)
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

    def do_abandon_resume(self, index: int) -> None:
        """An interruption in the middle of a resume: planned, and perhaps run, but not booked."""
        if model := self.some_away(index):
            tier, cache, ask, ticket = self.tiers[index], self.caches[index], Ask(), model.sequence.ticket
            words = copies(tier.pieces(ticket, model.start), cache.records, model.start, len(model.tokens))
            at = model.sequence.cell.buffer_info()[0], words.buffer_info()[0], len(words) // 4
            with self.pool.lock:
                serial = entries.plan_resume(cache.address, *at, ask.address)
                if serial > 1 and self.random.random() < 0.7:
                    entries.run(self.pool.address, serial, 0)
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

    def run(self, steps: int) -> None:
        """Runs so many steps, and gives all slots back."""
        for _ in range(steps):
            self.step()
        for index in range(len(self.caches)):
            for model in self.away[index]:
                model.sequence.free()
            self.away[index].clear()
            for handle in self.stored[index]:
                self.tiers[index].prefixes.drop(handle)
        self.device.finish()
        for tier in self.tiers:
            assert tier.used == tier.slots.made == 0
        super().run(0)
