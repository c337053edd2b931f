"""A random machine: caches on a device whose work runs when it likes, and users who do all that is allowed there.

They start, fork, grow, truncate, slide, write over, reorder, suspend, resume and free sequences on any streams, of
several tenants, with beginnings that others have made known; some of that while the mapper is at work, and beside what
others are guaranteed. Calls fail, and Ctrl-C comes at any line.

The number that each token holds follows from its id, from those before it and from whose it is. Who reads it expects
that number, whenever the reading runs; who has a new token expects no other tenant's, and where pages are cleaned
nobody else's.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import on_driver
from interruption import SOURCES, interrupted
from simulated_device import Event, SimulatedDevice, Stream

import vmmkv
from vmmkv.errors import BusyError
from vmmkv.reuse import host_tier
from vmmkv.rows.reordering import Reordering

LAYOUTS = {
    vmmkv.KVLayout(2, 2, 16, torch.float32): 1,
    vmmkv.KVLayout(3, [2, 1, 2], 24, torch.float32, layers_per_range=1): 1,
    vmmkv.KVLayout(2, 2, 128, torch.float32): 3,  # rows of several large frames
    vmmkv.KVLayout(3, [2, 1, 2], 120, torch.float32, layers_per_range=1): 3,
}
"""And how many times as many pages there are."""
TENANTS = [None, "tenant"]
KEYS = [(None, None), ("salt", None), (None, "tenant")]
"""Salts and tenants of sequences."""
MAX_SEQ_LEN = 200
STEPS = {
    "start": 30,
    "commit": 20,
    "extend": 16,
    "truncate": 12,
    "fork": 6,
    "reorder": 10,
    "free": 8,
    "read": 5,
    "slide": 3,
    "overwrite": 2,
    "suspend": 8,
    "resume": 10,
    "begin_late": 2,
    "trim": 2,
    "prewarm": 3,
    "limit": 3,
}
"""What is done, and how often."""
WHOLE, UNKNOWN_WHOLE = {"extend", "fork", "resume"}, {"reorder", "overwrite"}
"""What is one operation, which does all or nothing where the budget does not do; and what does if no token is known."""
CHANGING = {"extend", "truncate", "reorder", "free", "slide", "overwrite", "begin_late"}
"""What leaves sequences of which nobody knows what they hold, if it is interrupted."""
INTERRUPTED = ["", "/reuse/host_tier", "/memory/fence", "/rows/reordering", "/rows/sharing", "/rows/laying", "/space"]
"""Where Ctrl-C comes: anywhere, and more often where bytes are copied, and pages moved."""

Words = npt.NDArray[np.int64]


@dataclass(eq=False)
class User:
    """One who uses a sequence as the documentation says.

    Attributes:
        number: the step of the log in which it began.
        key: whose it is, which K and V depend on; the tenant is its second part.
        ids: those of its tokens.
        values: what these hold, as work sees it that is submitted from now on.
        todo: what is still to come of its prompt.
        past: all that it has written, or those from whom it has tokens.
        readers: streams that may still read it.
    """

    number: int
    device: SimulatedDevice
    cache: vmmkv.KVCache
    sequence: vmmkv.Sequence
    key: tuple[Any, ...]
    ids: list[int]
    values: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    past: set[int] = field(default_factory=set)
    readers: set[Stream] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.own = self.device.current

    def __repr__(self) -> str:
        return f"user {self.number} of {len(self.ids)} tokens"

    @property
    def is_live(self) -> bool:
        try:
            self.sequence.check_usable()
        except vmmkv.UseAfterFreeError:
            return False
        return True

    @property
    def has_hole(self) -> bool:
        """Whether a failure has left a hole behind its tokens, until it grows again, of which the books know."""
        has_hole = any(arena.table.has_hole(self.sequence.row) for arena, _ in self.cache._rows.ranges)
        assert not has_hole or self.device.failures
        return has_hole

    def compute(self, end: int) -> None:
        """Works out what its tokens hold."""
        while len(self.values) < end:
            state = repr((self.key, self.values[-1:], self.ids[len(self.values)])).encode()
            digest = int.from_bytes(blake2b(state, digest_size=6).digest(), "little")
            self.values.append(digest << 8 | TENANTS.index(self.key[1]) + 1)
        self.past.update(self.values)

    def become(self, ids: list[int], values: list[int], key: tuple[Any, ...], past: set[int]) -> None:
        """Holds what another did."""
        self.ids, self.values, self.key, self.todo = ids.copy(), values.copy(), key, []
        self.past |= past

    # ------------------------------------------------------------------ work on streams

    def submit(self, stream: Stream, first: int, end: int, work: Callable[[Words], object]) -> None:
        """Has a stream do some work on tokens, of each range."""
        for arena, record in self.cache._rows.ranges if first < end else ():
            address, nbytes = arena.table.address_of(self.sequence.row, 0) + first * record, (end - first) * record
            words = np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.int64).reshape(end - first, -1)

            def touch(address: int = address, nbytes: int = nbytes, words: Words = words) -> None:
                self.device.touch(address, nbytes, lambda: work(words))

            stream.submit(touch)

    def order(self, stream: Stream, others: Iterable[Stream]) -> None:
        """Has a stream go on behind what others have to do so far."""
        for other in others:
            if other is not stream:
                stream.submit(Event(other, other.submitted).is_past)

    def use(self, stream: Stream) -> None:
        """Orders a stream behind the sequence's own, and names it."""
        if stream is not self.own:
            self.sequence.record_stream(stream)
            self.order(stream, [self.own])

    def write(self, stream: Stream) -> None:
        """Writes the tokens that are not written yet, behind readers of what was there."""
        first, end = len(self.values), len(self.ids)
        if first == end:
            return
        self.use(stream)
        self.order(stream, self.readers)
        self.readers.clear()
        self.expect_clean(stream, first, end)
        self.compute(end)
        values = np.array(self.values[first:end])
        self.submit(stream, first, end, lambda words: words.__setitem__(slice(None), values[:, None]))
        self.order(self.own, [stream])

    def read(self, stream: Stream) -> None:
        """Reads all tokens, and expects what was written; with a zero tail as dense attention under a mask does."""
        first, end = self.sequence.start, len(self.values)
        if first >= end:
            return
        self.use(stream)
        self.readers.add(stream)
        values, text = np.array(self.values[first:end]), f"{self}, from {first} on, on {stream}"

        def check(words: Words) -> None:
            wrong = (words != values[:, None]).any(1)
            assert not wrong.any(), f"{text}: wrong tokens {np.flatnonzero(wrong) + first}"

        self.submit(stream, first, end, check)
        if self.cache._rows.rules.zero_tail and not self.has_hole:
            self.expect_clean(stream, end, MAX_SEQ_LEN)

    def expect_clean(self, stream: Stream, first: int, end: int) -> None:
        """Expects nothing of others in tokens that it has not written."""
        rules, own, text = self.cache._rows.rules, TENANTS.index(self.key[1]) + 1, repr(self)
        nobodys = [0, -1] if rules.poison else [0]
        past = np.array([*self.past, *nobodys])

        def check(words: Words) -> None:
            assert np.isin(words & 255, [own, *(word & 255 for word in nobodys)]).all(), (
                f"{text}: another tenant's bytes"
            )
            assert not rules.cleans or np.isin(words, past).all(), f"{text}: another sequence's bytes"

        self.submit(stream, first, end, check)


class Late(torch.Tensor):
    """Tokens on a row, which are copied from there, and to there, when the stream comes to it."""

    submit: ClassVar[Callable[[torch.Tensor, torch.Tensor], None]]
    """Has it come to a copy, to the first one."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is not torch.Tensor.copy_:
            return super().__torch_function__(function, types, arguments, options)
        cls.submit(*arguments)
        return arguments[0]


class WatchedDevice(SimulatedDevice):
    """One in the middle of whose calls something else may happen."""

    meanwhile: Callable[[], None] | None = None

    def meet(self, name: str) -> None:
        super().meet(name)
        if self.meanwhile:
            self.meanwhile()


class Machine:
    """See above.

    Args:
        random: what it draws everything from.
        policy: of its caches; else anything.
    """

    def __init__(self, random: Random, **policy: bool) -> None:
        self.random, self.device = random, WatchedDevice(random)
        self.streams = self.device.streams.copy()
        self.fails, self.is_interrupted = random.random() < 0.3, random.random() < 0.3
        self.device.unmaps_anything = self.is_interrupted
        options: dict[str, Any] = {
            "lookahead": random.choice([0, 0, 8, 32]),
            "overread": random.choice([0, 0, 0, 5]),
            "scrub": random.random() < 0.2,
            "large_frames": random.random() < 0.7,
        } | policy
        if options.get("zero_tail"):  # which goes with neither
            options["lookahead"] = options["overread"] = 0
        layout, factor = random.choice(list(LAYOUTS.items()))
        nbytes = factor * random.choice([40, 80, 200, 3000]) * self.device.page_size
        self.nbytes = nbytes
        self.pool = on_driver(self.device, vmmkv.FramePool, max_bytes=nbytes)
        guarantees = [{}, {}, {"guaranteed": nbytes // 4}, {"guaranteed": nbytes // 2}]
        self.caches = [
            vmmkv.KVCache(
                layout,
                random.choice([3, 6]),
                MAX_SEQ_LEN,
                pool=self.pool,
                host_bytes="1GiB",
                host_priority=None,
                **options,
                **random.choice(guarantees),
            )
            for _ in range(random.choice([1, 2]))
        ]
        self.used_caches = self.caches[: random.choice([1, 2])]
        """Others have what they are guaranteed, and never use it."""
        self.mapper: Any = self.pool.mapper
        if self.mapper:  # works when it is told to
            self.mapper.ring = self.mapper.ring_later = lambda: None
        self.keys = random.choice([KEYS, KEYS[:2]])
        self.users: list[User] = []
        self.away: list[User] = []
        """Those whose sequences are suspended."""
        self.scratch: list[torch.Tensor] = []
        self.known: list[list[int]] = [[]]
        """What new prompts begin like."""
        self.log = [f"{layout}, {nbytes // self.device.page_size} pages, {len(self.caches)} caches, {options}"]

    def run(self, steps: int = 70) -> None:
        """Does so many steps, and ends."""
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Reordering, "_scratch", self.watched(Reordering._scratch))
                states_of = host_tier.states_of
                patch.setattr(host_tier, "states_of", lambda *row: [each.as_subclass(Late) for each in states_of(*row)])
                patch.setattr(Late, "submit", self.copy, raising=False)
                with suppress(vmmkv.InterruptedChangeError) if self.is_interrupted else nullcontext():
                    for _ in range(steps):
                        self.step()
                        self.go_on()
                    for user in self.users:
                        self.read(user)
            self.device.finish()
            for cache in self.caches:
                cache.close()
            self.pool.close()
            assert not self.device.mapped
            assert not self.device.handles
        except BaseException as error:
            error.add_note("\n".join(self.log))
            raise

    def watched(self, scratch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Has what sequences that turn in a circle keep aside stay until the end: on a GPU torch gives it to nobody
        before their stream has come by."""

        def watch(reordering: Reordering, turns: object) -> torch.Tensor:
            memory = scratch(reordering, turns)
            self.keep(memory)
            return memory

        return watch

    def keep(self, memory: torch.Tensor) -> None:
        """Has some of the host's memory stay until the end."""
        self.scratch.append(memory)
        self.device.host[memory.data_ptr()] = memory.nbytes
        weakref.finalize(memory, self.device.host.pop, memory.data_ptr(), None)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Has the current stream move tokens to the host, or back."""
        if not isinstance(target, Late):
            self.keep(target)
        self.device.copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def any_stream(self, user: User) -> Stream:
        """One that a user works on."""
        return self.random.choice([user.own, self.random.choice(self.streams)])

    def go_on(self) -> None:
        """Has the mapper make changes, users read, and streams go on."""
        for _ in range(self.random.choice([0, 0, 1, 3]) if self.mapper else 0):
            self.work()
        for cache in self.caches:
            cache.check()
        for user in self.users:
            if self.random.random() < 0.3:
                user.read(self.any_stream(user))
        self.device.run(self.random.choice([0, 0, 5, 30, 200]))

    def work(self) -> None:
        """Has the mapper make a change. Somebody may do something between its calls, and one of them fail."""

        def meanwhile() -> None:
            if self.random.random() < 0.25:
                self.device.meanwhile = None
                self.step(is_nested=True)
                self.device.meanwhile = meanwhile

        if self.random.random() < 0.7:
            self.device.meanwhile = meanwhile
        if self.fails and self.random.random() < 0.1:
            self.device.fail("any", self.random.randrange(4))
        try:
            self.mapper.work()
        except vmmkv.DriverError:
            assert self.fails
        finally:
            self.device.meanwhile = None
            self.device.heal()

    # ------------------------------------------------------------------ steps

    def step(self, is_nested: bool = False) -> None:
        """Does something at random."""
        random = self.random
        if random.random() < 0.5:
            self.device.current = random.choice(self.streams)
        (name,) = random.choices(list(STEPS), [*STEPS.values()])
        concerned = {"resume": self.away, "free": self.users + self.away}.get(name, self.users)
        users = [random.choice(concerned)] if concerned else []
        if name == "reorder" and users:
            alike = [user for user in self.users if (user.cache, user.key[1]) == (users[0].cache, users[0].key[1])]
            users = random.sample(alike, random.randint(1, len(alike)))
        if name == "start" or not users:
            name, users = "start", []
        self.log.append(f"{name} {users} on {self.device.current}{' meanwhile' * is_nested}")
        line = 0
        if not is_nested:
            if self.is_interrupted and random.random() < 0.2:
                line = random.randrange(1, random.choice([20, 100, 500]))
            if self.fails and random.random() < 0.12:
                self.device.fail(random.choice(["any", *self.device.calls]), random.choice([0, 0, 1, 2, 5]))
        is_full = self.attempt(name, users, line, is_nested)
        if not is_nested:
            self.device.heal()
            if is_full and (users := self.users + self.away):
                self.free(random.choice(users))

    def used(self) -> int:
        """Pages that hold tokens."""
        return sum(cache.stats().pages["used"] for cache in self.caches)

    def attempt(self, name: str, users: list[User], line: int, is_nested: bool) -> bool:
        """Does something with users, interrupted at a line if it comes to that; returns whether memory did not do."""
        step, before = getattr(self, name), len(self.users)
        is_whole = name in WHOLE or (name in UNKNOWN_WHOLE and len(self.known) == 1)
        is_whole &= not (line or is_nested or self.fails)
        used = self.used() if is_whole else 0
        sources = SOURCES + self.random.choice(INTERRUPTED)
        try:
            if not line:
                step(*users)
            elif interrupted(lambda: step(*users), line, sources) is None:
                self.log.append(f"interrupted at line {line} of {sources}")
                doubtful = self.users[before:] + (users if name in CHANGING else [])
                self.leave(doubtful)
                for user in doubtful:
                    with suppress(vmmkv.UseAfterFreeError):
                        user.sequence.free()
        except (vmmkv.OutOfPagesError, vmmkv.OutOfRowsError) as error:
            self.log.append(repr(error)[:100])
            assert not is_whole or self.used() == used, "who was refused has got some"
            return True
        except vmmkv.UnsupportedError:
            assert name == "reorder"
            assert any(user.sequence.start for user in users)
        except BusyError:
            assert is_nested
        except vmmkv.DriverError as error:
            self.log.append(repr(error)[:100])
            assert self.fails
            gone = [user for user in self.users + self.away if not user.is_live]
            assert not gone or (name == "reorder" and set(gone) <= set(users)), "a failed call has ended a sequence"
            self.leave(gone)
        finally:
            if name in ("suspend", "resume"):  # whether it was done or not
                here = [user for user in self.users + self.away if not user.sequence.is_suspended]
                self.away = [user for user in self.users + self.away if user not in here]
                self.users = here
        return False

    def leave(self, users: list[User]) -> None:
        """Has users go whose sequences have ended, or are to."""
        self.users = [user for user in self.users if user not in users]
        self.away = [user for user in self.away if user not in users]

    def ids(self, count: int) -> list[int]:
        """Any new ones."""
        return [self.random.randrange(3) for _ in range(count)]

    def start(self) -> None:
        """A sequence that begins like others, or not; not always with all of its prompt at once."""
        random, known = self.random, self.random.choice(self.known)
        known = known[: random.choice([len(known), random.randint(0, len(known)), len(known) // 8 * 8])]
        ids = (known + self.ids(random.choice([1, 2, random.randint(1, 60), random.randint(1, 120)])))[:MAX_SEQ_LEN]
        cache, (salt, tenant) = random.choice(self.used_caches), random.choice(self.keys)
        expected = random.choice([0, 0, min(len(ids) + 40, MAX_SEQ_LEN), MAX_SEQ_LEN])
        key: tuple[Any, ...] = salt, tenant
        if cache._rows.rules.zero_tail:
            sequence = cache.sequence(len(ids), expected_tokens=expected, tenant=tenant)
            key = salt, tenant, len(self.log)
        else:
            sequence = cache.sequence(
                token_ids=ids, salt=salt, tenant=tenant, whole=random.random() < 0.6, expected_tokens=expected
            )
        user = User(len(self.log), self.device, cache, sequence, key, ids[: sequence.length])
        user.todo = ids[sequence.length :]
        self.users.append(user)
        user.compute(sequence.cached_tokens)
        user.read(self.any_stream(user))
        user.write(self.any_stream(user))

    def commit(self, user: User) -> None:
        if user.sequence.key is not None and not user.sequence.start:
            ids = user.ids[: self.random.choice([len(user.ids), self.random.randint(0, len(user.ids))])]
            user.sequence.commit(ids)
            self.known = [*self.known[-11:], ids]
            for other in self.users:  # with whom nobody can have it hold other tokens
                if other.is_live and self.share_page(user, other, min(len(ids), len(other.ids))):
                    with pytest.raises(ValueError, match="other token ids"):
                        other.sequence.commit([ids[0] + 1, *other.ids[1:]])

    def share_page(self, user: User, other: User, tokens: int) -> bool:
        """Whether two have a page that is full of their first tokens."""
        if user.cache is not other.cache or other.sequence.start:
            return False
        for arena, record in user.cache._rows.ranges:
            end = tokens * record // arena.page_size
            here, there = (arena.table.pages_in(each.sequence.row, 0, end) for each in (user, other))
            if (here == there).any():
                return True
        return False

    def extend(self, user: User) -> None:
        count = self.random.randint(0, min(MAX_SEQ_LEN - len(user.ids), self.random.choice([1, 5, 30, 100])))
        user.sequence.extend(count)
        user.ids += (user.todo + self.ids(count))[:count]
        del user.todo[:count]
        user.write(self.any_stream(user))

    def truncate(self, user: User, tokens: int | None = None) -> None:
        if tokens is None:
            tokens = len(user.ids) - self.random.randint(0, self.random.choice([10, len(user.ids)]))
            tokens = max(tokens, user.sequence.start)
        user.sequence.truncate(tokens)
        del user.ids[tokens:], user.values[tokens:]
        user.todo = []
        if self.random.random() < 0.5:
            self.extend(user)

    def fork(self, user: User) -> None:
        child = user.sequence.fork()
        self.users.append(User(len(self.log), self.device, user.cache, child, user.key, []))
        self.users[-1].become(user.ids, user.values, user.key, user.past)

    def reorder(self, *users: User) -> None:
        indices = [self.random.randrange(len(users)) for _ in users]
        users[0].cache.reorder([user.sequence for user in users], indices, share=self.random.random() < 0.7)
        held = [(users[index].ids, users[index].values, users[index].key, users[index].past) for index in indices]
        for user, each in zip(users, held):
            user.become(*each)

    def free(self, user: User) -> None:
        user.sequence.free()
        self.leave([user])

    def read(self, user: User) -> None:
        user.read(self.any_stream(user))

    def slide(self, user: User) -> None:
        user.sequence.release_before(self.random.randint(user.sequence.start, len(user.ids)))

    def overwrite(self, user: User) -> None:
        """Writes other tokens where there are some, which others may have, too."""
        token = self.random.randint(user.sequence.start, len(user.ids))
        user.cache.unshare([user.sequence], token)
        user.ids[token:] = self.ids(len(user.ids) - token)
        del user.values[token:]
        user.write(self.any_stream(user))

    def suspend(self, user: User) -> None:
        user.sequence.suspend()

    def resume(self, user: User) -> None:
        user.sequence.resume()

    def begin_late(self, user: User) -> None:
        """Drops all tokens, and begins with a later one."""
        if user.sequence.start == 0:
            self.truncate(user, 0)
        if not user.ids:
            tokens = self.random.randint(0, MAX_SEQ_LEN)
            start = self.random.choice([self.random.randint(0, tokens), tokens])
            user.cache.extend([user.sequence], tokens, starts=[start])
            user.ids, user.values = self.ids(tokens), [0] * start
            user.write(self.any_stream(user))

    def trim(self, user: User) -> None:
        user.cache.trim()

    def prewarm(self, user: User) -> None:
        """Of all that is idle, or of a part of the pool."""
        tokens = self.random.choice([0, self.random.randint(1, 30), self.random.randint(1, MAX_SEQ_LEN)])
        user.cache.prewarm(self.random.choice([None, None, self.random.uniform(0.1, 1)]), tokens=tokens)

    def limit(self, user: User) -> None:
        """Of the pool, down or up again."""
        with suppress(vmmkv.BudgetError):  # less than what is guaranteed
            self.pool.set_limit(int(self.nbytes * self.random.uniform(0.3, 1)))
