"""The cache on the compiled core, by its public methods: K and V of a token follow from the ids up to it."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
import torch
from conftest import ROUNDS, small_driver

import vmmkv
from vmmkv.cache import KVCache
from vmmkv.pool import FramePool
from vmmkv.sequence import Sequence

LAYOUT = vmmkv.KVLayout(3, 2, 16, torch.float32, layers_per_range=2)
PAGE, MOST = 4096, 120
NAMES = ["begin", "begin", "begin", "extend", "extend", "commit", "fork", "truncate", "release", "suspend", "reorder"]
NAMES += ["unshare", "free", "trim"]


def values(ids: list[int], layer: int) -> torch.Tensor:
    """A number for each token, which follows from all ids up to it, `[tokens, 1, 1]`."""
    running, found = layer, []
    for each in ids:
        running = (running * 31 + each + 7) % 10007
        found.append(float(running))
    return torch.tensor(found).view(-1, 1, 1)


class Held:
    """A sequence, and the ids of its tokens."""

    def __init__(self, sequence: Sequence, ids: list[int], names: dict[str, str]) -> None:
        self.sequence, self.ids, self.names, self.start, self.is_known = sequence, ids, names, 0, True

    def write(self, first: int) -> None:
        """Writes K and V of tokens from one on."""
        for layer in range(LAYOUT.num_layers):
            whole = values(self.ids, layer)
            self.sequence.k(layer)[first - self.start :] = whole[first:]
            self.sequence.v(layer)[first - self.start :] = -whole[first:]

    def verify(self) -> None:
        """Compares all tokens with what they should be."""
        if not self.sequence.is_suspended:
            for layer in range(LAYOUT.num_layers):
                whole = values(self.ids, layer)[self.start :].expand(-1, 2, 16)
                assert torch.equal(self.sequence.k(layer), whole)
                assert torch.equal(self.sequence.v(layer), -whole)
        assert (self.sequence.start, self.sequence.length) == (self.start, len(self.ids))


class Machine:
    """Random operations on a cache."""

    def __init__(self, random: Random) -> None:
        self.random = random
        pool = FramePool.on(small_driver("cpu"), random.choice([60, 150]) * PAGE)
        self.cache = KVCache(
            LAYOUT, 7, MOST, pool=pool, host_bytes="1MiB", large_frames=random.random() < 0.5,
            overread=random.choice([0, 3]), scrub=random.random() < 0.2,
        )  # fmt: skip
        self.held: list[Held] = []
        self.prompts: list[list[int]] = [[]]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            name = self.random.choice(NAMES)
            held = self.random.choice(self.held) if self.held else None
            with suppress(vmmkv.OutOfPagesError, vmmkv.OutOfRowsError, vmmkv.OutOfHostMemoryError):
                if name == "begin":
                    self.begin()
                elif name == "trim":
                    self.cache.trim()
                elif held is not None and (name in ("suspend", "free") or not held.sequence.is_suspended):
                    getattr(self, name)(held)
            for each in self.held:
                each.verify()
        self.cache.check()
        assert self.cache.stats().rows["live"] == len(self.held)
        self.cache.free([each.sequence for each in self.held])

    def begin(self) -> None:
        prompt = self.random.choice(self.prompts)
        ids = prompt[: self.random.randint(0, len(prompt))]
        ids = ids + [self.random.randrange(3) for _ in range(self.random.randint(1, 40))]
        ids, names = ids[: MOST - 5], self.random.choice([{}, {"salt": "a"}, {"tenant": "b"}])
        sequence = self.cache.sequence(token_ids=ids, **names)
        assert sequence.cached_tokens < len(ids)
        self.held.append(Held(sequence, ids, names))
        self.held[-1].write(sequence.cached_tokens)

    def extend(self, held: Held) -> None:
        count = self.random.randint(0, MOST - len(held.ids))
        held.sequence.extend(count)
        first = len(held.ids)
        held.ids = held.ids + [self.random.randrange(3) for _ in range(count)]
        held.write(first)

    def commit(self, held: Held) -> None:
        if held.start == 0 and held.is_known:
            held.sequence.commit(held.ids)
            self.prompts.append(held.ids)

    def fork(self, held: Held) -> None:
        child = Held(held.sequence.fork(), held.ids, held.names)
        child.start, child.is_known = held.start, held.is_known
        self.held.append(child)

    def truncate(self, held: Held) -> None:
        length = self.random.randint(held.start, len(held.ids))
        held.sequence.truncate(length)
        held.ids = held.ids[:length]

    def release(self, held: Held) -> None:
        held.start = self.random.randint(held.start, len(held.ids))
        held.sequence.release_before(held.start)

    def suspend(self, held: Held) -> None:
        if held.sequence.is_suspended:
            held.sequence.resume()
        else:
            held.sequence.suspend()

    def reorder(self, held: Held) -> None:
        others = [each for each in self.held if each.names == held.names and each.start == held.start == 0]
        batch = [each for each in others if not each.sequence.is_suspended]
        indices = [self.random.randrange(len(batch)) for _ in batch]
        with suppress(vmmkv.UnsupportedError):
            self.cache.reorder([each.sequence for each in batch], indices)
            for each, (ids, known) in zip(batch, [(batch[i].ids, batch[i].is_known) for i in indices]):
                each.ids, each.is_known = ids, known

    def unshare(self, held: Held) -> None:
        first = self.random.randint(held.start, len(held.ids))
        self.cache.unshare([held.sequence], first)
        held.write(first)

    def free(self, held: Held) -> None:
        self.held.remove(held)
        held.sequence.free()


def test_any_operations_in_any_order() -> None:
    for _ in range(12 * ROUNDS):
        seed = Random().randrange(1 << 32)
        try:
            Machine(Random(seed)).run(60)
        except BaseException as error:
            error.add_note(f"Machine(Random({seed})).run(60)")
            raise


def test_a_suspended_sequence_is_refused_by_name() -> None:
    pool = FramePool.on(small_driver("cpu"), 60 * PAGE)
    cache = KVCache(LAYOUT, 2, MOST, pool=pool, host_bytes="1MiB")
    sequence = cache.sequence(9)
    sequence.suspend()
    for call in (lambda: sequence.extend(1), lambda: sequence.row, lambda: sequence.k(0), sequence.fork):
        with pytest.raises(vmmkv.SuspendedError):
            call()
    assert (sequence.length, sequence.is_suspended) == (9, True)
    sequence.resume()
    sequence.extend(1)
    assert sequence.length == 10
