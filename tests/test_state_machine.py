"""Every operation of the API in any order, with failing driver calls and interruptions, against a plain model.

After each step: the books add up, they equal what the driver was really asked for, and every token of every
sequence holds what was written to it. An interrupted operation was done, or was not; a cache that cannot tell says so,
gives its memory back, and another takes its place.
"""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_driver, small_driver, small_layout
from faulty import FaultyDriver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from interruption import interrupted
from loopback import looped

import vmmkv
from vmmkv.memory.frames import LARGE

ROWS, MAX_SEQ_LEN = 4, 40


@dataclass(eq=False)
class Model:
    """A sequence as it should be. `content[layer, token, k or v]`; the last axis is all of a head vector."""

    sequence: vmmkv.Sequence
    content: torch.Tensor = field(repr=False)
    start: int = 0
    length: int = 0
    failures: int = 0
    """Failed driver calls when the sequence last grew beyond its capacity."""
    salt: str | None = None
    ids: str | None = None
    """What its tokens are known under, where they may be, and a letter for each: K and V follow from both then."""

    def copy(self, sequence: vmmkv.Sequence | None) -> Model:
        """What another sequence, or none, should be as well."""
        return replace(self, sequence=sequence, content=self.content.clone())

    def become(self, other: Model) -> None:
        """Takes what another held. What lies behind its own tokens stays; in front of them it may be either's."""
        self.content[:, : other.start] = torch.nan
        self.content[:, other.start : other.length] = other.content[:, other.start : other.length]
        self.start, self.length, self.salt, self.ids = other.start, other.length, other.salt, other.ids


class CacheMachine(RuleBasedStateMachine):
    device = "cpu"
    zero_tail = False
    large_frames = False
    budget = 24

    @initialize(layers_per_range=st.sampled_from([None, 1, 2]), scrub=st.booleans(), spare=st.integers(0, 3))
    def make(self, layers_per_range: int | None, scrub: bool, spare: int, host_priority: int | None = None) -> None:
        self.policy = {"scrub": scrub, "zero_tail": self.zero_tail, "large_frames": self.large_frames}
        self.policy["host_priority"] = host_priority
        self.layers_per_range, self.spare, self.scrub = layers_per_range, spare, scrub or self.zero_tail
        self.interrupt_at = 0
        self.begin()

    def begin(self) -> None:
        """A cache without sequences."""
        self.driver = FaultyDriver(small_driver(self.device))
        self.layout = small_layout(self.driver, layers_per_range=self.layers_per_range)
        if self.large_frames:  # a token record of 15/16 of a page, so that rows are of two large frames and more
            self.layout = replace(self.layout, head_dim=5 * self.layout.head_dim)
        max_bytes = (self.budget + self.zero_tail) * self.driver.page_size
        self.cache = on_driver(
            self.driver,
            vmmkv.KVCache,
            self.layout,
            ROWS,
            MAX_SEQ_LEN,
            max_bytes=max_bytes,
            lookahead=0,
            host_bytes="1GiB",
            **self.policy,
        )
        self.cache._rows.reclaimer.spare = self.spare  # so small a budget would have none
        self.zero = self.driver.handles.copy()
        self.compared = -1
        self.live: list[Model] = []
        self.away: list[Model] = []
        """Those that are suspended."""
        self.sent: Model | None = None
        self.may_share = False
        """Whether sequences may have pages in common, or copy some."""
        self.addresses = [self.cache.kv(layer)[0].data_ptr() for layer in range(3)]

    # ------------------------------------------------------------------ the model

    def pages(self, start: int, length: int) -> int:
        """Pages that tokens [start, length) take, counted byte by byte's page rather than by a formula."""
        size = self.driver.page_size
        return sum(
            len({byte // size for token in range(start, length) for byte in (token * record, (token + 1) * record - 1)})
            for record in self.layout.record_bytes
        )

    def taken(self, start: int, length: int) -> int:
        """Pages of a sequence with tokens [start, length): if all were dropped, those that it would go on in, wherever
        it comes from."""
        return self.pages(start, length) if start < length else self.partial_pages(length)

    def needed(self, changes: dict[int, int]) -> int:
        """Pages that live sequences of these new lengths (by index) would take, if they had none in common."""
        needed = 0
        for index, model in enumerate(self.live):
            length = changes.get(index, model.length)
            needed += self.taken(model.start, length)
            needed += self.bound_pages(model, length) + self.frame_pages(model, length)
        return needed

    def copied(self, model: Model, token: int) -> int:
        """Pages at most that a sequence has copied, so that it can write from a token on."""
        if not self.may_share:
            return 0
        frame = LARGE if self.large_frames else 1  # that the token lies in
        return self.pages(token, model.length) + frame * len(self.layout.record_bytes)

    def bound_pages(self, model: Model, length: int) -> int:
        """With `zero_tail`: pages behind a sequence of this length, which may be read, and are nobody else's."""
        if not self.zero_tail or not length or model.sequence.is_suspended:
            return 0
        size = self.driver.page_size
        mapped = ((arena.table.end[model.sequence.row], record) for arena, record in self.cache._rows.ranges)
        return sum(max(end - -(-length * record // size), 0) for end, record in mapped)

    def frame_pages(self, model: Model, length: int) -> int:
        """Pages that hold no token of a sequence of this length, but lie in a frame with such as do."""
        size, driver, count = self.driver.page_size, self.driver, 0
        for arena, record in self.cache._rows.ranges if length and self.large_frames else ():
            base = arena.table.address_of(model.sequence.index, 0)
            touched = range(base + model.start * record // size * size, base + length * record, size)
            frames = {driver.mapped[page] for page in touched if page in driver.mapped}
            row = range(base, base + arena.row_bytes, size)
            count += sum(driver.mapped.get(page) in frames for page in row if page not in touched)
        return count

    def bound(self) -> int:
        """Pages behind sequences, each once, that hold no token of another."""
        bound, used, driver = set(), set(), self.driver
        for model in self.live if self.zero_tail else []:
            for arena, record in self.cache._rows.ranges if model.length else ():
                base, row = arena.table.address_of(model.sequence.row, 0), model.sequence.row
                used_end = base + -(-model.length * record // driver.page_size) * driver.page_size
                for page in range(base, base + arena.table.end[row] * driver.page_size, driver.page_size):
                    if page >= used_end:
                        bound.add(driver.mapped.get(page))
                    elif page >= base + model.start * record // driver.page_size * driver.page_size:
                        used.add(driver.mapped.get(page))
        return len(bound - used - {None})

    def used(self) -> int:
        """Pages of frames that hold tokens of live sequences, each once, by what was asked of the driver."""
        size, driver, frames = self.driver.page_size, self.driver, set()
        for model in self.live:
            for arena, record in self.cache._rows.ranges:
                base = arena.table.address_of(model.sequence.index, 0)
                begin, end = model.start * record, model.length * record
                if begin == end and end % size:
                    begin -= 1  # the page that it would go on in
                frames.update(driver.mapped[page] for page in range(base + begin // size * size, base + end, size))
        return sum(driver.sizes[frame] for frame in frames)

    def partial_pages(self, token: int) -> int:
        return sum(token * record % self.driver.page_size > 0 for record in self.layout.record_bytes)

    def states(self, model: Model, begin: int) -> torch.Tensor:
        """Fresh random K and V for the tokens from `begin` on."""
        return torch.randn(3, MAX_SEQ_LEN, 2, 2, self.layout.head_dim)[:, : model.length - begin]

    def write(self, model: Model, begin: int) -> None:
        """Writes new K and V to the tokens from `begin` on, and to the model."""
        self.put(model, begin, self.states(model, begin))

    def put(self, model: Model, begin: int, new: torch.Tensor) -> None:
        """Writes these."""
        tokens, new = model.length - begin, new.to(self.device)
        for layer in range(3):
            for which, view in enumerate((model.sequence.k(layer), model.sequence.v(layer))):
                if self.scrub:
                    found = view[begin - model.start :]
                    own = model.content[layer, begin : model.length, which]
                    assert (self.is_own(found, own) | self.is_poison(found)).all(), "another sequence's bytes"
            if tokens:
                model.sequence.write(layer, new[layer, :, 0], new[layer, :, 1])
        model.content[:, begin : model.length] = new

    def is_own(self, found: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Where a sequence finds nothing, or what it has written."""
        return (found == 0) | (found == own) | own.isnan()

    def is_poison(self, found: torch.Tensor) -> torch.Tensor:
        """Where tokens hold what is no number, as they may while debugging."""
        return found.isnan() & self.cache._rows.rules.poison

    def outcome(
        self, operation, expected: type[Exception] | None, done=lambda: False, pages: int = 0, ends: bool = False
    ) -> bool:
        """Runs an operation; it must raise what is expected, or what was injected. Returns whether it was done: of one
        that was interrupted, `done` says that.

        Args:
            pages: that it takes: where these are not available it fails, and only there. Where sequences may have some
                in common it may need less.
            ends: whether the caller looks for sequences that a failure has ended.
        """
        if expected is None and pages > self.available:
            expected = vmmkv.OutOfPagesError
        armed, failures = bool(self.driver._faults), self.driver.failures
        line, self.interrupt_at, used = self.interrupt_at, 0, self.cache.stats().pages["used"]
        self.driver.unmaps_anything = bool(line)
        try:
            if not line:
                operation()
            elif interrupted(operation, line) is None:
                return self.survives() and done()
        except vmmkv.DriverError:
            assert armed
            if not ends:
                self.lose(failures)
            return False
        except vmmkv.VmmkvError as error:
            if type(error) is not expected and not (armed and isinstance(error, vmmkv.OutOfPagesError)):
                raise
            if not armed and isinstance(error, vmmkv.OutOfPagesError) and not any(model.ids for model in self.live):
                assert self.cache.stats().pages["used"] <= used, "who was refused has got some"  # less: if some ended
            return False
        assert expected is None or (expected is vmmkv.OutOfPagesError and self.may_share)
        return True

    def lose(self, failures: int) -> None:
        """Gives up sequences that have ended: what they shared was unmapped, and could not be mapped again."""
        lost = [model for model in self.live if self.is_gone(model)]
        assert not lost or self.driver.failures >= failures + 2, "one failure has ended a sequence"
        self.live = [model for model in self.live if model not in lost]

    def survives(self) -> bool:
        """Whether the cache has got over an interruption; if not, another has taken its place."""
        self.driver.failures += 1
        gc.collect()  # what was interrupted may hang on the frames that were traced
        try:
            self.cache.check()
        except vmmkv.InterruptedChangeError:
            self.driver.heal()
            self.cache.close()
            assert not self.driver.mapped
            self.begin()
            return False
        return True

    # ------------------------------------------------------------------ operations

    @rule(tokens=st.integers(0, MAX_SEQ_LEN + 1), expect=st.integers(0, MAX_SEQ_LEN))
    def start_sequence(self, tokens: int, expect: int) -> None:
        expected: type[Exception] | None = None
        if tokens > MAX_SEQ_LEN:
            expected = vmmkv.SequenceTooLongError
        elif len(self.live) + len(self.away) == ROWS:
            expected = vmmkv.OutOfRowsError
        made: list[vmmkv.Sequence] = []
        start = lambda: made.append(self.cache.sequence(tokens, expected_tokens=expect))  # noqa: E731
        if self.outcome(start, expected, lambda: bool(made), self.pages(0, tokens)):
            self.live.append(self.model(made.pop(), tokens))
            self.write(self.live[-1], 0)

    def model(self, sequence: vmmkv.Sequence, tokens: int) -> Model:
        """That of a new sequence, whose tokens are to be written."""
        content = torch.zeros(3, MAX_SEQ_LEN, 2, 2, self.layout.head_dim, device=self.device)
        return Model(sequence, content, 0, tokens, self.driver.failures)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, MAX_SEQ_LEN))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.grow({index: tokens}, lambda: self.live[index].sequence.extend(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def extend_batch(self, data: st.DataObject) -> None:
        chosen = [index for index in range(len(self.live)) if data.draw(st.booleans())]
        counts = {index: data.draw(st.sampled_from([0, 1, 1, 1, 5, 20])) for index in chosen}
        sequences = [self.live[index].sequence for index in counts]
        self.grow(counts, lambda: self.cache.extend(sequences, list(counts.values())))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 2))
    def fork(self, data: st.DataObject, count: int) -> None:
        parent = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        expected = vmmkv.OutOfRowsError if len(self.live) + len(self.away) + count > ROWS else None
        self.may_share = True
        made: list[vmmkv.Sequence] = []
        fork = lambda: made.extend(self.cache.fork_many(parent.sequence, count))  # noqa: E731
        if self.outcome(fork, expected, lambda: bool(made), count * self.copied(parent, parent.length)):
            for _ in range(len(made)):
                self.live.append(parent.copy(made.pop()))
                self.live[-1].failures = self.driver.failures

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.live))))
        models = [self.live[index] for index in order[: data.draw(st.integers(1, len(order)))]]
        indices = data.draw(st.lists(st.integers(0, len(models) - 1), min_size=len(models), max_size=len(models)))
        after = [models[index].copy(models[index].sequence) for index in indices]
        changed = {number for number, index in enumerate(indices) if number != index}
        self.may_share = True
        cache, failures = self.cache, self.driver.failures

        def is_done() -> bool:
            return all(self.is_gone(models[number]) or self.holds(models[number], after[number]) for number in changed)

        def reorder() -> None:
            try:
                cache.reorder([model.sequence for model in models], indices)
            except vmmkv.UnsupportedError:
                assert any(model.start for model in models)
                refused.append(True)

        refused: list[bool] = []
        pages = sum(self.copied(after[number], after[number].start) for number in changed)
        done = self.outcome(reorder, None, is_done, pages, ends=True) and not refused
        if self.cache is not cache:
            return
        gone = [number for number in changed if self.is_gone(models[number])]
        assert not gone or set(gone) == changed or self.driver.failures >= failures + 2
        assert not gone or self.driver.failures
        self.live = [model for model in self.live if not self.is_gone(model)]
        for number in changed if done and not gone else ():
            models[number].become(after[number])

    def is_gone(self, model: Model) -> bool:
        """Whether a sequence was ended that a failure has left between what it held and what it was to hold."""
        try:
            return model.sequence.length < 0
        except vmmkv.UseAfterFreeError:
            return True

    def holds(self, model: Model, other: Model) -> bool:
        """Whether what there is of one sequence is what there should be of another."""
        sequence = model.sequence
        if (sequence.start, sequence.length) != (other.start, other.length):
            return False
        held = [(sequence.k(layer), sequence.v(layer)) for layer in range(3)]
        wanted = other.content[:, other.start : other.length]
        return all(torch.equal(kv[which], wanted[layer, :, which]) for layer, kv in enumerate(held) for which in (0, 1))

    @precondition(lambda self: any(not model.length for model in self.live))
    @rule(tokens=st.integers(0, MAX_SEQ_LEN), before=st.integers(0, MAX_SEQ_LEN))
    def extend_from(self, tokens: int, before: int) -> None:
        index = next(index for index, model in enumerate(self.live) if not model.length)
        model, start = self.live[index], min(before, tokens)
        used, model.start = self.needed({}), start  # what it will need
        self.grow({index: tokens}, lambda: self.cache.extend([model.sequence], tokens, starts=[start]), used)
        if self.live and not model.length:
            model.start = 0

    def grow(self, counts: dict[int, int], operation, used: int | None = None) -> None:
        lengths = {index: self.live[index].length + tokens for index, tokens in counts.items()}
        pages = self.needed(lengths) - (self.needed({}) if used is None else used)
        pages += sum(self.copied(self.live[index], self.live[index].length) for index in counts)
        expected: type[Exception] | None = None
        if max(lengths.values(), default=0) > MAX_SEQ_LEN:
            expected = vmmkv.SequenceTooLongError
        capacities = [model.sequence.capacity for model in self.live]

        def has_grown() -> bool:
            found = [self.live[index].sequence.length for index in lengths]
            assert found in (list(lengths.values()), [self.live[index].length for index in lengths]), "all or none"
            return found == list(lengths.values())

        if self.outcome(operation, expected, has_grown, pages):
            for index, length in lengths.items():
                model = self.live[index]
                if length > capacities[index]:
                    model.failures = self.driver.failures
                begin, model.length = max(model.length, model.start), length
                self.write(model, begin)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def write_over(self, data: st.DataObject) -> None:
        """Old tokens, which others may have, too."""
        model, cache = self.live[data.draw(st.integers(0, len(self.live) - 1))], self.cache
        token = data.draw(st.integers(model.start, model.length))
        if self.outcome(lambda: cache.unshare([model.sequence], token), None, pages=self.copied(model, token)):
            self.write(model, token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        model = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        length = data.draw(st.integers(model.start, model.length))
        if self.outcome(lambda: model.sequence.truncate(length), None, lambda: model.sequence.length == length):
            model.length = length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release_before(self, data: st.DataObject) -> None:
        model = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        token = data.draw(st.integers(model.start, model.length))
        if self.outcome(lambda: model.sequence.release_before(token), None, lambda: model.sequence.start == token):
            model.start = token

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        model, cache = self.live[data.draw(st.integers(0, len(self.live) - 1))], self.cache
        if self.outcome(model.sequence.suspend, None, lambda: model.sequence.is_suspended) and self.cache is cache:
            self.live.remove(model)
            self.away.append(model)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        model, cache = self.away[data.draw(st.integers(0, len(self.away) - 1))], self.cache
        pages = self.taken(model.start, model.length)
        done = self.outcome(model.sequence.resume, None, lambda: not model.sequence.is_suspended, pages)
        if done and self.cache is cache:
            self.away.remove(model)
            self.live.append(model)
            model.failures = self.driver.failures

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        """To whoever receives next."""
        model = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        with looped():
            is_sent = self.outcome(lambda: model.sequence.send(0), None)
        self.sent = model.copy(None) if is_sent else None

    @precondition(lambda self: self.sent)
    @rule()
    def receive(self) -> None:
        assert self.sent
        expected = vmmkv.OutOfRowsError if len(self.live) + len(self.away) == ROWS else None
        made: list[vmmkv.Sequence] = []
        with looped():
            pages = self.taken(self.sent.start, self.sent.length)
            if self.outcome(lambda: made.append(self.cache.receive(0)), expected, lambda: bool(made), pages):
                self.live.append(self.sent.copy(made.pop()))
                self.live[-1].failures = self.driver.failures

    @precondition(lambda self: self.live or self.away)
    @rule(data=st.data(), how=st.sampled_from(["free", "abandon", "all"]))
    def free(self, data: st.DataObject, how: str) -> None:
        if how == "all":
            gone, self.live, self.away = self.live + self.away, [], []
            self.outcome(lambda: self.cache.free([model.sequence for model in gone]), None)
        else:
            number = data.draw(st.integers(0, len(self.live) + len(self.away) - 1))  # who draws a model holds it
            model = self.live.pop(number) if number < len(self.live) else self.away.pop(number - len(self.live))
            if how == "free" and self.outcome(model.sequence.free, None):
                with pytest.raises(vmmkv.UseAfterFreeError):
                    model.sequence.extend(1)
            del model  # the last reference: an abandoned sequence is freed by the cache's next operation

    @precondition(lambda self: self.driver.handles)
    @rule()
    def trim(self) -> None:
        if self.outcome(self.cache.trim, None):
            stats = self.cache.stats()
            assert stats.pages["free"] == 0
            assert stats.pages["surplus"] == self.bound()
            kept = stats.pages["used"] + stats.pages["surplus"] + self.zero_tail
            assert stats.physical_bytes == kept * self.driver.page_size

    @rule(share=st.none() | st.sampled_from([0.25, 0.5, 0.75, 1.0]), tokens=st.integers(0, MAX_SEQ_LEN))
    def prewarm(self, share: float | None, tokens: int) -> None:
        def prewarm() -> None:
            with suppress(vmmkv.OutOfPagesError):
                made.append(self.cache.prewarm(share, tokens=tokens))

        made: list[int] = []
        before, failures, cache = self.driver.num_pages, self.driver.failures, self.cache
        self.outcome(prewarm, None)
        if self.cache is cache and failures == self.driver.failures:
            assert self.driver.num_pages == before + sum(made) // self.driver.page_size
            assert not made or self.driver.num_pages >= int((share or 1) * (self.budget + self.zero_tail))

    @rule(
        call=st.sampled_from(["any", "create", "map", "set_access", "unmap", "release", "fill"]),
        skip=st.integers(0, 6),
        out_of_memory=st.booleans(),
    )
    def arm(self, call: str, skip: int, out_of_memory: bool) -> None:
        self.driver.fail(call, skip, out_of_memory)

    @precondition(lambda self: not self.interrupt_at)
    @rule(line=st.integers(1, 400))
    def interrupt(self, line: int) -> None:
        self.interrupt_at = line

    @precondition(lambda self: self.driver._faults)
    @rule()
    def heal(self) -> None:
        self.driver.heal()

    # ------------------------------------------------------------------ after each step

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        if self.device == "cuda":
            torch.cuda.synchronize()  # pages behind a row that work may still read are not available
        self.cache.check()
        stats = self.cache.stats()
        pages = {address: handle for address, handle in self.driver.mapped.items() if handle not in self.zero}
        places = Counter(pages.values())
        page_map = self.cache.page_map()
        kept = self.cache.pool.frames.handles[np.flatnonzero(page_map == vmmkv.KEPT_PAGE)].tolist()
        apart = set(kept) - places.keys()
        assert len(apart) <= stats.prefix_pages, "kept, on no row, and for nothing"
        taken = sum(self.driver.sizes[handle] for handle in (*places, *apart))
        assert stats.pages["used"] + stats.pages["surplus"] == taken
        assert sum(stats.pages.values()) == self.driver.num_pages
        assert stats.physical_bytes == self.driver.num_pages * self.driver.page_size <= stats.budget_bytes
        self.available = self.cache.available_pages
        assert self.available == self.budget - stats.pages["used"] - self.bound()
        assert stats.pages["used"] == self.used()
        assert stats.tokens == sum(model.length - model.start for model in self.live)
        assert stats.rows["live"] == len(self.live) + len(self.away)
        assert all(places[handle] % self.driver.sizes[handle] == 0 for handle in places), "a frame is mapped in part"
        count = Counter(pages[address] for address in self.driver.writable)
        assert all(count[handle] <= self.driver.sizes[handle] for handle in count), (
            "one page can be written in two rows"
        )
        assert self.driver.writable <= pages.keys(), "the zero page can be written"
        assert (page_map == vmmkv.ZERO_PAGE).sum() == len(self.zero) == self.zero_tail
        assert ((page_map >= 0) | (page_map == vmmkv.SHARED_PAGE)).sum() == stats.pages["used"]
        if self.device == "cpu":
            assert os.fstat(self.driver.inner.fd).st_blocks * 512 == stats.physical_bytes
            if self.compared != self.driver.changes:  # looking takes longer than most operations
                assert self.mapped_by_linux() == len(self.driver.mapped) * self.driver.page_size
                self.compared = self.driver.changes

    def mapped_by_linux(self) -> int:
        """Bytes of the memfd that this process has mapped, by the kernel's own account."""
        inode = os.fstat(self.driver.inner.fd).st_ino
        lines = re.findall(rf"^(\w+)-(\w+) .* {inode} +/memfd:vmmkv", Path("/proc/self/maps").read_text(), re.MULTILINE)
        return sum(int(last, 16) - int(first, 16) for first, last in lines)

    @invariant()
    def contents_are_intact(self) -> None:
        for model in getattr(self, "live", []):
            assert self.holds(model, model)
            assert [self.cache.kv(layer)[0].data_ptr() for layer in range(3)] == self.addresses

    @invariant()
    def rows_can_be_read_to_their_ends(self) -> None:
        """With `zero_tail`; but for rows with a hole that a failure has left, of which the books know."""
        for model in getattr(self, "live", []) if self.zero_tail else []:
            if not model.sequence.length:
                continue
            row = model.sequence.row
            if any(arena.table.has_hole(row) for arena, _ in self.cache._rows.ranges):
                assert self.driver.failures > model.failures
                continue
            for arena, record in self.cache._rows.ranges:
                address, size = arena.table.address_of(row, 0), arena.page_size
                first = address + model.start * record // size * size
                assert self.driver.accessible.issuperset(range(first, address + arena.row_bytes, size))
            for layer in range(3):
                for which, view in enumerate(self.cache.kv(layer)):
                    found, own = view[row, model.start :], model.content[layer, model.start :, which]
                    assert self.is_own(found, own).all(), "another sequence's bytes"

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.driver.heal()
            self.cache.close()
            assert not self.driver.mapped
            assert not self.driver.handles


def run(base: type[CacheMachine], device: str, kind: dict[str, Any]) -> None:
    """Runs a machine a third as often as a profile says."""
    machine = type("Machine", (base,), {"device": device, **kind})
    usual = machine.TestCase.settings
    run_state_machine_as_test(machine, settings=settings(usual, max_examples=usual.max_examples // 3))


@pytest.mark.parametrize("kind", [{}, {"zero_tail": True}, {"large_frames": True, "budget": 90}], ids=str)
def test_any_operations_in_any_order(device: str, kind: dict[str, Any]) -> None:
    run(CacheMachine, device, kind)
