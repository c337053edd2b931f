"""A random machine for the compiled books: every operation in any order, on streams that run late, with failing calls.

Each token is a byte, written and read by work that is queued on streams. What a sequence should hold is kept in plain
lists. After each step the books are checked, and compared with what the driver was asked for.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from core_rows import share_left
from faulty import CALLS
from simulated_device import SimulatedDevice, Stream

from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import Ask, Pool
from vmmkv.core.sequence import Sequence
from vmmkv.core.tables import NOTE
from vmmkv.errors import DriverError, OutOfPagesError, OutOfRowsError, UseAfterFreeError, VmmkvError
from vmmkv.layout import KVLayout


@dataclass(eq=False)
class Model:
    """A sequence as it should be: a byte for each token."""

    sequence: Sequence
    home: Stream
    key: int
    tokens: list[int] = field(default_factory=list)
    start: int = 0
    streams: set[Stream] = field(default_factory=set)


@dataclass
class Prefix:
    """What the toy guest knows: bytes of tokens, and the frames of their full pages in each range."""

    tokens: list[int]
    frames: list[list[int]]
    key: int
    stream: Stream


@dataclass
class Left:
    """A row that a sequence has left."""

    row: int
    last: int
    tokens: list[int]
    key: int
    stream: Stream


def follow(stream: Stream, other: Stream) -> None:
    """Has later work on a stream come behind all work on another so far."""
    position = other.submitted
    if stream is not other:
        stream.submit(lambda: other.done >= position)


class Guest:
    """A dictionary of prefixes behind the door of the core."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.ring = np.zeros(8, NOTE)
        entries.join(cache.address, self.ring.ctypes.data, len(self.ring))
        self.prefixes: list[Prefix] = []
        self.left: list[Left] = []

    def held(self) -> Counter[int]:
        return Counter(frame for each in self.prefixes for frames in each.frames for frame in frames)

    def drop(self, prefix: Prefix) -> int:
        """Forgets a prefix; returns pages that may have become free."""
        self.prefixes.remove(prefix)
        pages = 0
        for frames in prefix.frames:
            numbers = array("q", frames)
            entries.refer(self.cache.address, numbers.buffer_info()[0], len(numbers), -1)
            pages += len(numbers)
        return pages

    def evict(self, pages: int) -> int:
        given = 0
        while self.prefixes and given < pages:
            given += self.drop(self.prefixes[0])
        return given


class NoMapper:
    """Stands for the mapper, whose changes are operations here."""

    def ring(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


class Machine:
    """Runs random operations on caches of one pool.

    Args:
        random: what chooses.
        faults: whether driver calls fail now and then.
    """

    often: tuple[str, ...] = ("do_begin", "do_extend", "do_step")
    """Operations that are chosen more often than others."""

    def __init__(self, random: Random, *, faults: bool = True) -> None:
        self.random, self.faults = random, faults
        self.device = SimulatedDevice(random)
        self.device.memory = 1 << 20
        self.pool = Pool(self.device.inner, random.choice([12, 40, 90]), poison=random.random() < 0.2)
        self.pool.mapper = NoMapper()
        self.caches = [self.new_cache() for _ in range(random.choice([1, 1, 2]))]
        self.guests = [Guest(cache) for cache in self.caches]
        self.pool.evict += [guest.evict for guest in self.guests]
        self.models: list[list[Model]] = [[] for _ in self.caches]
        self.done: Counter[str] = Counter()

    def new_cache(self) -> Cache:
        random = self.random
        layers = random.choice([1, 3])
        layout = KVLayout(
            layers, 1, random.choice([16, 36, 64]), torch.float32, layers_per_range=random.choice([None, 1, 2])
        )
        return Cache(
            self.pool, layout.record_bytes, random.choice([2, 4, 7]), random.choice([40, 400]),
            large=random.random() < 0.5,
            reserved=random.choice([0, 0, 3]), overread=random.choice([0, 0, 5]), scrub=random.random() < 0.2,
            lookahead=random.choice([0, 20]),
        )  # fmt: skip

    # ------------------------------------------------------------------ bytes

    def address(self, cache: Cache, row: int, part: int, token: int) -> int:
        g = cache.ranges[part]
        return int(g["address"]) + row * int(g["row_pages"]) * self.pool.driver.page_size + token * int(g["record"])

    def write(self, model: Model, first: int) -> None:
        """Queues that tokens from one on are written, on the sequence's stream."""
        cache, row = model.sequence.cache, model.sequence.row
        for part, g in enumerate(cache.ranges):
            for token in range(first, len(model.tokens)):
                place, value, nbytes = self.address(cache, row, part, token), model.tokens[token], int(g["record"])
                model.home.submit(self.memset(place, value, nbytes))

    def memset(self, place: int, value: int, nbytes: int):  # type: ignore[no-untyped-def]
        return lambda: self.device.touch(place, nbytes, lambda: ctypes.memset(place, value, nbytes))

    def read(self, model: Model, stream: Stream) -> None:
        """Queues that some tokens are read on a stream, and compared."""
        cache, row = model.sequence.cache, model.sequence.row
        there = range(model.start, len(model.tokens))
        for token in self.random.sample(there, min(4, len(there))):
            for part, g in enumerate(cache.ranges):
                what = f"token {token} of {len(model.tokens)} of range {part} in row {row}"
                place = self.address(cache, row, part, token)
                stream.submit(self.compare(place, model.tokens[token], int(g["record"]), what))
        behind = len(model.tokens) + int(cache.state[0]["overread"]) - 1
        if model.start < len(model.tokens) and cache.state[0]["overread"]:
            place, nbytes = self.address(cache, row, 0, behind), int(cache.ranges[0]["record"])
            stream.submit(lambda: self.device.touch(place, nbytes, lambda: None))

    def compare(self, place: int, value: int, nbytes: int, what: str):  # type: ignore[no-untyped-def]
        def work() -> None:
            found: list[bytes] = []
            self.device.touch(place, nbytes, lambda: found.append(ctypes.string_at(place, nbytes)))
            assert found[0] == bytes([value]) * nbytes, f"{what}: {Counter(found[0])}, not {value}"

        return work

    # ------------------------------------------------------------------ operations

    def step(self) -> None:
        """One operation, and all checks."""
        index = self.random.randrange(len(self.caches))
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [3 if name in self.often else 1 for name in names]
        name = self.random.choices(names, weights)[0]
        failures = self.device.failures
        if self.faults and self.random.random() < 0.3:
            lasting = self.random.random() < 0.2  # but not of calls that tell when the device has finished
            call = self.random.choice(CALLS) if lasting else "any"
            is_full = self.random.random() < 0.5
            self.device.fail(call, self.random.randrange(8), out_of_memory=is_full, lasting=lasting)
        try:
            getattr(self, name)(index)
            self.done[name] += 1
        except (OutOfPagesError, OutOfRowsError) as error:
            self.done[type(error).__name__] += 1
        except DriverError:
            assert self.device.failures > failures
            self.done["DriverError"] += 1
        self.device.heal()
        self.check()
        self.device.run(self.random.randrange(40))

    def held_frames(self) -> Counter[int]:
        """References of guests."""
        held: Counter[int] = Counter()
        for guest in self.guests:
            held += guest.held()
        return held

    def staging(self) -> list[range]:
        """Addresses where frames are mapped that lie on no row."""
        return [range(self.pool.staging, self.pool.staging + 16 * self.pool.driver.page_size)]

    def check(self) -> None:
        if self.pool.word("pending"):  # an abandoned journal: the next plan settles it
            self.pool.limit_to(self.pool.word("budget"))
        check(self.pool, self.caches, self.held_frames())
        for models in self.models:
            for model in models:
                assert (model.sequence.start, model.sequence.length) == (model.start, len(model.tokens))
        assert self.device.num_pages == self.pool.word("created")
        mapped = {}
        for cache in self.caches:
            for row in range(cache.max_sequences):
                for part, g in enumerate(cache.ranges):
                    e = cache.extents[row * len(cache.ranges) + part]
                    base = int(g["address"]) + row * int(g["row_pages"]) * self.pool.driver.page_size
                    for page in range(int(e["first"]), int(e["mapped"])):
                        number = int(cache.tables[part][row, page]) - 1
                        mapped[base + page * self.pool.driver.page_size] = int(self.pool.frames[number]["handle"])
        places = self.device.mapped.items()
        really = {place: handle for place, handle in places if not any(place in each for each in self.staging())}
        if not any(cache.rows["broken"].any() for cache in self.caches):
            assert mapped == really

    def pick(self, index: int) -> Model | None:
        model = self.random.choice(self.models[index]) if self.models[index] else None
        if model:
            self.device.current = model.home
        return model

    def some(self) -> int:
        return self.random.choice([0, 1, 1, 2, 5, 17, 60, 200])

    def byte(self, count: int) -> list[int]:
        return [self.random.randrange(1, 255) for _ in range(count)]

    def do_begin(self, index: int) -> None:
        cache = self.caches[index]
        stream = self.device.current = self.random.choice(self.device.streams[:3])
        tokens = min(self.some(), cache.max_seq_len)
        expected = min(self.random.choice([0, 0, 30, 100]), cache.max_seq_len)
        row = self.random.choice([None, None, None, self.random.randrange(cache.max_sequences)])
        key = self.random.choice([0, 0, 0, 5])
        sequence = cache.start(tokens, expected=expected, key=key, row=row)
        model = Model(sequence, stream, key, self.byte(tokens))
        assert row is None or sequence.row == row
        if cache.state[0]["key_of_sequence"] or key:
            self.expect_clean(model, cache)
        self.models[index].append(model)
        self.write(model, 0)

    def expect_clean(self, model: Model, cache: Cache) -> None:
        """Queues that no byte of another key is in what is mapped behind a new sequence of a cache that scrubs."""
        if not cache.state[0]["key_of_sequence"]:
            return
        row, value = model.sequence.row, 0 if cache.state[0]["overread"] else int(self.pool.state[0]["poison"])
        for part, g in enumerate(cache.ranges):
            e, size = cache.extents[row * len(cache.ranges) + part], self.pool.driver.page_size
            base = int(g["address"]) + row * int(g["row_pages"]) * size
            first, end = base + int(e["first"]) * size, base + int(e["ready"]) * size
            if first < end:
                model.home.submit(self.compare(first, value, end - first, "behind a new sequence"))

    def do_extend(self, index: int) -> None:
        if model := self.pick(index):
            self.grow([model], [self.some()])

    def do_step(self, index: int) -> None:
        """All sequences grow by a token, as a batch handle."""
        cache, models = self.caches[index], self.models[index]
        if any(len(model.tokens) >= cache.max_seq_len for model in models):
            return
        self.device.current = self.random.choice(self.device.streams[:3])
        homes = {model.home for model in models}
        if len(homes) == 1:
            self.device.current = homes.pop()
        for model in models:  # growth on another stream is ordered behind their own
            model.streams.add(self.device.current)
        cache.batch(model.sequence for model in models).extend()
        for model in models:
            model.tokens += self.byte(1)
            self.write(model, len(model.tokens) - 1)

    def do_extend_many(self, index: int) -> None:
        models = self.random.sample(self.models[index], self.random.randint(0, len(self.models[index])))
        self.grow(models, [self.some() for _ in models])

    def grow(self, models: list[Model], counts: list[int]) -> None:
        if not models:
            return
        cache = models[0].sequence.cache
        counts = [min(count, cache.max_seq_len - len(model.tokens)) for count, model in zip(counts, models)]
        cache.extend([model.sequence for model in models], counts)
        for count, model in zip(counts, models):
            model.tokens += self.byte(count)
            self.write(model, len(model.tokens) - count)

    def do_late_start(self, index: int) -> None:
        """A sequence whose front is never there."""
        cache = self.caches[index]
        stream = self.device.current = self.random.choice(self.device.streams[:3])
        sequence = cache.start()
        model = Model(sequence, stream, 0)
        self.models[index].append(model)
        length = self.random.randint(1, cache.max_seq_len)
        start = self.random.randint(0, length)
        cache.extend([sequence], length, starts=[start])
        model.tokens, model.start = self.byte(length), start
        self.write(model, start)

    def do_truncate(self, index: int) -> None:
        if model := self.pick(index):
            length = self.random.randint(model.start, len(model.tokens))
            model.sequence.truncate(length)
            del model.tokens[length:]

    def do_release(self, index: int) -> None:
        if (model := self.pick(index)) and self.random.random() < 0.5:
            start = self.random.randint(model.start, len(model.tokens))
            model.sequence.release_before(start)
            model.start = start

    def do_fork(self, index: int) -> None:
        if model := self.pick(index):
            stream = self.device.current = self.random.choice(self.device.streams[:3])
            fork = model.sequence.fork()
            self.models[index].append(Model(fork, stream, model.key, list(model.tokens), model.start))

    def do_unshare(self, index: int) -> None:
        if model := self.pick(index):
            token = self.random.randint(model.start, len(model.tokens))
            model.sequence.cache.part(model.sequence.ticket, token)
            model.tokens[token:] = self.byte(len(model.tokens) - token)
            self.write(model, token)

    def do_read(self, index: int) -> None:
        if model := self.pick(index):
            self.read(model, model.home)

    def do_read_elsewhere(self, index: int) -> None:
        """Work on another stream, behind the sequence's own, which is named."""
        if model := self.pick(index):
            stream = self.random.choice(self.device.streams[:3])
            model.sequence.record_stream(stream)
            follow(stream, model.home)
            self.read(model, stream)
            follow(model.home, stream)  # later writes come behind that

    def do_free(self, index: int) -> None:
        models = self.random.sample(self.models[index], min(len(self.models[index]), self.random.choice([1, 1, 3])))
        cache, guest = self.caches[index], self.guests[index]
        if not models:
            return
        self.device.current = models[0].home
        rows = [(model.sequence.row, int(cache.owners[model.sequence.row])) for model in models]
        cache.free(model.sequence for model in models)
        for model, (row, owner) in zip(models, rows):
            self.models[index].remove(model)
            if model.start == 0:
                guest.left.append(Left(row, owner, model.tokens, model.key, model.home))

    def do_collect(self, index: int) -> None:
        """A sequence that is not held any more."""
        if model := self.pick(index):
            self.models[index].remove(model)
            del model
            self.caches[index].sweep()

    def do_trim(self, index: int) -> None:
        self.pool.trim_to(self.random.choice([0, 0, 5, 20]))

    def do_trim_own(self, index: int) -> None:
        self.caches[index].trim_own()

    def do_limit(self, index: int) -> None:
        before = self.pool.word("budget")
        pages = self.random.choice([8, 12, 20, 40, 90])
        try:
            self.pool.limit_to(pages)
        except OutOfPagesError:
            assert pages < self.pool.word("committed")
            assert self.pool.word("budget") == before

    def do_ahead(self, index: int) -> None:
        """What the mapper does."""
        self.pool.change(Ask(), entries.plan_ahead, self.pool.address, 4)

    def do_abandon(self, index: int) -> None:
        """An interruption in the middle of a growth: planned, and perhaps run, but not booked."""
        if (model := self.pick(index)) and len(model.tokens) + 30 <= self.caches[index].max_seq_len:
            tickets, ask = array("q", [model.sequence.ticket]), Ask()
            cache = self.caches[index]
            with self.pool.lock:
                serial = entries.plan_growth(cache.address, tickets.buffer_info()[0], 1, 30, 0, 0, ask.address)
                if serial > 1 and self.random.random() < 0.7:
                    entries.run(self.pool.address, serial, 0)
            if serial in (0, 1):
                model.tokens += self.byte(30)
                self.write(model, len(model.tokens) - 30)

    # ------------------------------------------------------------------ the guest

    def do_commit(self, index: int) -> None:
        model = self.pick(index)
        if model and model.tokens and not model.start:
            self.commit(index, model, self.random.randint(1, len(model.tokens)))

    def commit(self, index: int, model: Model, tokens: int) -> None:
        """Has the guest hold the first tokens of a sequence."""
        cache, guest, size = self.caches[index], self.guests[index], self.pool.driver.page_size
        out, frames, covered = array("q", bytes(8 * 100)), [], tokens
        for part, g in enumerate(cache.ranges):
            count = entries.hold(cache.address, model.sequence.ticket, part, 0, tokens, out.buffer_info()[0], 100)
            if count < 0:
                assert cache.rows["broken"][
                    model.sequence.row
                ]  # a call has failed in it, and no growth has repaired it
                return
            frames.append(out[:count].tolist())
            pages = sum(int(self.pool.frames[frame]["pages"]) for frame in frames[-1])
            covered = min(covered, pages * size // int(g["record"]))
        guest.prefixes.append(Prefix(model.tokens[:covered], frames, model.key, model.home))

    def do_hit(self, index: int) -> None:
        cache, guest = self.caches[index], self.guests[index]
        if not guest.prefixes or cache.state[0]["key_of_sequence"]:
            return
        prefix = self.random.choice(guest.prefixes)
        self.device.current = prefix.stream
        if not prefix.tokens:
            return
        lists = array("q", [word for frames in prefix.frames for word in (len(frames), *frames)])
        guest.prefixes.remove(prefix)  # it is not evicted meanwhile
        try:
            sequence = share_left(cache, -1, len(prefix.tokens), lists, key=prefix.key)
            self.models[index].append(Model(sequence, prefix.stream, prefix.key, list(prefix.tokens)))
        finally:
            guest.prefixes.append(prefix)

    def do_adopt_kept(self, index: int) -> None:
        cache, guest = self.caches[index], self.guests[index]
        if guest.left:
            left = guest.left.pop(self.random.randrange(len(guest.left)))
            self.device.current = left.stream
            tokens = min(entries.kept(cache.address, left.row, left.last), len(left.tokens))
            tokens = self.random.randint(0, max(tokens, 0))
            if sequence := cache.adopt_kept(left.row, left.last, tokens):
                self.models[index].append(Model(sequence, left.stream, left.key, left.tokens[:tokens]))

    def do_copy_left(self, index: int) -> None:
        """A sequence that begins with copies of what lies on a parked row."""
        cache, guest = self.caches[index], self.guests[index]
        if guest.left and not cache.state[0]["key_of_sequence"]:
            left = self.random.choice(guest.left)
            stream = self.device.current = self.random.choice(self.device.streams[:3])
            tokens = min(entries.kept(cache.address, left.row, left.last), len(left.tokens))
            if tokens > 0:
                lists = array("q", [0] * len(cache.ranges))
                try:
                    sequence = share_left(cache, left.row, tokens, lists, key=left.key)
                except OutOfRowsError:
                    return
                except UseAfterFreeError:  # its pages were needed
                    assert entries.kept(cache.address, left.row, left.last) < tokens
                    return
                self.models[index].append(Model(sequence, stream, left.key, left.tokens[:tokens]))

    def do_forget(self, index: int) -> None:
        guest = self.guests[index]
        if guest.prefixes:
            guest.drop(self.random.choice(guest.prefixes))

    # ------------------------------------------------------------------ the end

    def run(self, steps: int) -> None:
        """Runs so many steps, and ends."""
        for _ in range(steps):
            self.step()
        for models in self.models:
            for model in models:
                self.read(model, model.home)
        self.device.finish()
        for guest in self.guests:
            guest.evict(1 << 30)
        for cache, models in zip(self.caches, self.models):
            models.clear()
            with suppress(VmmkvError):
                cache.close()
        self.pool.trim_to()
        assert self.pool.word("created") == self.device.num_pages == 0
