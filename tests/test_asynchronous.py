"""Sequences on several streams, whose work runs much later: nobody sees another's bytes, or loses its own."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from conftest import ROUNDS, small_layout
from simulated_device import SimulatedDevice, Stream

import vmmkv

ROWS, MAX_SEQ_LEN, BUDGET = 4, 40, 24


class User:
    """One who uses a sequence as the documentation says, on streams that run when they like.

    Every token of it is written with a number that nobody else writes.
    """

    def __init__(self, cache: vmmkv.KVCache, device: SimulatedDevice, number: int, tokens: int) -> None:
        self.begin(cache, device, number, cache.sequence(tokens))
        self.write(self.own)

    def begin(self, cache: vmmkv.KVCache, device: SimulatedDevice, number: int, sequence: vmmkv.Sequence) -> None:
        self.cache, self.device, self.number, self.sequence = cache, device, number, sequence
        self.own = device.current
        self.written = 0
        self.values: list[int] = []  # of tokens that are written, as work submitted from now on sees them
        self.readers: set[Stream] = set()
        self.numbers = [number]  # its own, and those of whom it was forked from

    def fork(self, number: int) -> User:
        """One who begins with all tokens of this one, which may not even be written yet."""
        child = object.__new__(User)
        child.begin(self.cache, self.device, number, self.sequence.fork())
        child.values, child.numbers = self.values.copy(), [number, *self.numbers]
        return child

    def records(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """Address, bytes and number of tokens of `[first, end)` in each range."""
        places = []
        for arena, record in self.cache._rows.ranges:
            address = arena.table.address_of(self.sequence.row, 0)
            places.append((address + first * record, (end - first) * record, end - first))
        return places

    def use(self, stream: Stream) -> None:
        """Orders a stream behind the sequence's own, and names it."""
        if stream is not self.own:
            self.cache._rows.table.streams[self.sequence.row].add(stream)
            self.device.record(self.own).wait(stream)

    def write(self, stream: Stream) -> None:
        """Writes the tokens that are not written yet, on a stream that it uses, behind readers of what was there."""
        first, end = len(self.values), self.sequence.length
        if first == end:
            return
        for reader in self.readers:
            self.device.record(reader).wait(stream)
        self.readers = set()
        self.check_clean(stream, first, end)
        for token in range(first, end):
            self.written += 1
            value = self.number << 32 | self.written
            self.values.append(value)
            for address, nbytes, _ in self.records(token, token + 1):
                self.submit(stream, address, nbytes, lambda words, value=value: words.fill(value))
        if stream is not self.own:
            self.device.record(stream).wait(self.own)

    def truncate(self, tokens: int) -> None:
        """Drops tokens, which anybody may still read."""
        self.sequence.truncate(tokens)
        del self.values[tokens:]
        self.readers = set(self.device.streams)

    def read(self, stream: Stream) -> None:
        """Reads all tokens, and expects what was written."""
        first, end = self.sequence.start, len(self.values)
        if first == end:
            return
        self.use(stream)
        values = np.array(self.values[first:end])

        def check(words: np.ndarray) -> None:
            found = words.reshape(len(values), -1)
            assert (found == values[:, None]).all(), f"{stream} reads {found[:, 0]} for {values}"

        for address, nbytes, _ in self.records(first, end):
            self.submit(stream, address, nbytes, check)

    def check_clean(self, stream: Stream, first: int, end: int) -> None:
        """What tokens hold that nobody has written yet is nobody else's."""
        if not self.cache._rows.rules.cleans:
            return

        def check(words: np.ndarray) -> None:
            nobodys = (0, -1) if self.cache._rows.rules.poison else (0,)
            assert (np.isin(words, nobodys) | np.isin(words >> 32, self.numbers)).all(), "another sequence's bytes"

        for address, nbytes, _ in self.records(first, end):
            self.submit(stream, address, nbytes, check)

    def read_to_the_end(self, stream: Stream) -> None:
        """As dense attention under a mask does."""
        self.use(stream)
        self.check_clean(stream, self.sequence.start, MAX_SEQ_LEN)

    def submit(self, stream: Stream, address: int, nbytes: int, work) -> None:
        words = np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.int64)
        stream.submit(lambda: self.device.touch(address, nbytes, lambda: work(words)))


@pytest.mark.parametrize("policy", [{}, {"scrub": True}, {"zero_tail": True}], ids=str)
def test_streams_that_run_late_see_their_own_bytes(policy: dict) -> None:
    for _ in range(20 * ROUNDS):
        seed = Random().randrange(1 << 32)
        try:
            run_late(policy, Random(seed))
        except BaseException as error:
            error.add_note(f"run_late({policy}, Random({seed}))")
            raise


def run_late(policy: dict, random: Random) -> None:
    """Uses a cache at random."""
    device = SimulatedDevice(random)
    layout, times = small_layout(device, layers_per_range=random.choice([None, 2])), random.choice([1, 8])
    layout = replace(layout, num_kv_heads=times * layout.num_kv_heads)  # in so many pages more there are large frames
    nbytes = times * BUDGET * device.page_size
    cache = vmmkv.KVCache(layout, ROWS, MAX_SEQ_LEN, max_bytes=nbytes, driver=device, **policy)
    users: list[User] = []
    operations = [
        "start",
        "grow",
        "grow",
        "begin late",
        "read",
        "read",
        "truncate",
        "release",
        "free",
        "trim",
        "fork",
        "fork",
    ]
    for number in range(1, 40):
        device.current = random.choice(device.streams)
        operation = random.choice(operations)
        user = random.choice(users) if users else None
        try:
            if operation == "start" or user is None:
                users.append(User(cache, device, number, random.randint(0, MAX_SEQ_LEN)))
            elif operation == "grow":
                room = MAX_SEQ_LEN - user.sequence.length
                tokens = random.choice([random.randint(0, room), room])
                user.use(device.current)
                user.sequence.extend(tokens)
                user.write(random.choice([user.own, device.current]))
            elif operation == "begin late" and user.sequence.start == 0:
                user.truncate(0)
                user.use(device.current)
                tokens = random.choice([0, random.randint(0, MAX_SEQ_LEN)])
                start = random.choice([random.randint(0, tokens), tokens])
                cache.extend([user.sequence], tokens, starts=[start])
                user.values = [0] * start
                user.write(random.choice([user.own, device.current]))
            elif operation == "read":
                stream = random.choice(device.streams)
                user.read(stream)
                if cache._rows.rules.zero_tail and user.values:
                    user.read_to_the_end(stream)
            elif operation == "truncate":
                user.truncate(random.randint(user.sequence.start, user.sequence.length))
            elif operation == "release":
                user.sequence.release_before(random.randint(user.sequence.start, user.sequence.length))
            elif operation == "fork":
                users.append(user.fork(number))
            elif operation == "free":
                users.remove(user)
                user.sequence.free()
            else:
                cache.trim()
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError):
            if users:
                users.pop(0).sequence.free()
        cache.check()
        device.run(random.choice([0, 0, 10, 50]))
    device.synchronize()
    cache.close()
    assert not device.mapped
