"""The random machine of the prefix tree, with host memory where evicted frames go first."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from random import Random

from core_machine import Model
from prefix_machine import Ids, Known, PrefixMachine, Tables

from vmmkv.core.cache import Cache
from vmmkv.core.sequence import Sequence
from vmmkv.errors import OutOfHostMemoryError
from vmmkv.prefix import entries
from vmmkv.prefix.offload import Offload
from vmmkv.prefix.prefixes import Key, Prefixes
from vmmkv.tier.host_tier import HostTier
from vmmkv.tier.stored import WINDOW


class HostMachine(PrefixMachine):
    """Random operations on caches with a prefix tree and a host tier each."""

    often = *PrefixMachine.often, "do_evict", "do_come_back", "do_come_back"

    next_prompt: tuple[Key, Ids] | None = None

    def __init__(self, random: Random, *, faults: bool = True) -> None:
        super().__init__(random, faults=faults)
        tiers = [tree.offload.tier for tree in self.trees if tree.offload]
        self.tiers = tiers
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
        return super().held_frames() + Counter(frame for frames in storing for frame in frames)

    def staging(self) -> list[range]:
        size = WINDOW * self.pool.driver.page_size
        windows = [tier.prefixes._window for tier in self.tiers if tier.prefixes._shown]
        return [*super().staging(), *(range(window, window + size) for window in windows)]

    def check(self) -> None:
        super().check()
        for tree, tier in zip(self.trees, self.tiers):
            assert tree.offload
            tables, stored = Tables(tree), tier.prefixes.stored
            there = [node for node in range(1, tables.fresh) if node not in tables.free and tables.nodes[node]["host"]]
            hosted = {(node, int(tables.nodes[node]["host"])) for node in there}
            assert hosted - {*tier.prefixes.gone} == {(each.node, serial) for serial, each in stored.items()}
            assert tier.used <= tier.slots.limit * tier.slots.page_size

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

    def do_suspend_for_a_time(self, index: int) -> None:
        """A sequence that leaves, while others begin."""
        if model := self.pick(index):
            with suppress(OutOfHostMemoryError):
                self.tiers[index].suspend(model.sequence)
                if isinstance(model, Known):
                    model.committed = 0
                self.resume(index, model)

    def resume(self, index: int, model: Model) -> None:
        """Resumes a sequence, or gives it up."""
        try:
            self.do_begin_here(index)
            self.device.current = model.home
            self.tiers[index].resume(model.sequence)
        except BaseException:
            self.device.heal()
            model.sequence.free()
            self.models[index].remove(model)
            raise
        self.read(model, model.home)

    def do_clear(self, index: int) -> None:
        before = self.trees[index].state[0]["used"]
        super().do_clear(index)
        offload = self.trees[index].offload
        if before and not self.trees[index].state[0]["used"] and offload:
            offload.close()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.device.finish()
        for tier in self.tiers:
            tier.finish(1 << 30)
        super().run(0)
        for tier in self.tiers:
            assert tier.used == tier.slots.made == 0
