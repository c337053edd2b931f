"""Failing calls: each driver call of each operation fails once, also while the operation is being taken back.

Afterwards lengths and contents are as before, the books are right, and the operation succeeds when it is tried again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
from conftest import some
from core_rows import Row, check_all, check_mapped, given_up, new_cache
from simulated_device import SimulatedDevice

from vmmkv.core import entries
from vmmkv.core.pool import Ask, Pool
from vmmkv.errors import DriverError, OutOfPagesError


class Stage:
    """A pool on a device with late streams, two caches, and rows of every kind."""

    def __init__(self, seed: int) -> None:
        random = self.random = Random(seed)
        self.device = SimulatedDevice(random)
        self.device.memory = 1 << 20
        self.pool = Pool(self.device.inner, 80)
        self.cache = new_cache(self.pool, rows=7, large=seed % 2 == 0, overread=seed % 3)
        self.other = new_cache(self.pool, rows=3, scrub=True)
        first, second, third = self.device.streams
        self.rows: list[Row] = []
        for stream, length in ((first, 20), (second, 9), (first, 0), (second, 14)):
            self.device.current = stream
            self.rows.append(self.new_row(self.cache.start(length)))
        self.device.current = first
        self.rows.append(self.new_row(self.other.start(25)))
        self.rows.append(Row(self.cache.share(self.rows[0].sequence, 20), list(self.rows[0].tokens)))
        for length in (30, 6):
            self.device.current = random.choice([first, second, third])
            parked = self.cache.start(length)
            self.left = parked.row, parked.ticket >> 24
            parked.free()
        self.device.finish()

    def new_row(self, sequence: object) -> Row:
        row = Row(sequence)  # type: ignore[arg-type]
        self.device.finish()
        row.write(self.random, 0)
        return row

    # Operations. Each returns what it has made, if anything.

    def begin(self) -> object:
        return self.cache.start(70)

    def begin_elsewhere(self) -> object:
        self.device.current = self.device.streams[2]
        return self.cache.start(6)

    def adopt(self) -> object:
        return self.cache.adopt_kept(*self.left, 3)

    def begin_scrubbed(self) -> object:
        return self.other.start(12)

    def extend(self) -> None:
        self.rows[0].sequence.extend(30)

    def extend_many(self) -> None:
        self.cache.extend([row.sequence for row in self.rows[:4]], [30, 20, 5, 7])

    def extend_beyond_free_memory(self) -> None:
        """Onto pages of parked rows."""
        self.rows[1].sequence.extend(110)

    def extend_a_fork(self) -> None:
        if self.rows[5].sequence.length == 20:
            self.rows[5].sequence.extend(10)

    def fork(self) -> object:
        return self.rows[0].sequence.fork()

    def fork_elsewhere(self) -> object:
        self.device.current = self.device.streams[2]
        return self.cache.share(self.rows[3].sequence, 11)

    def part(self) -> None:
        self.cache.part(self.rows[0].sequence.ticket, 0)

    def truncate(self) -> None:
        self.rows[0].sequence.truncate(20)
        self.rows[3].sequence.truncate(14)

    def free(self) -> None:
        """Twice, where it fails first."""
        self.cache.free([row.sequence for row in self.rows[1:4:2]])

    def trim(self) -> None:
        self.pool.trim_to()

    def limit(self) -> None:
        self.pool.limit_to(self.pool.word("committed"))

    def ahead(self) -> None:
        self.pool.change(Ask(), entries.plan_ahead, self.pool.address, 4)

    # Checks.

    def lengths(self) -> list[tuple[int, int]]:
        return [(row.sequence.start, row.sequence.length) for row in self.rows]

    def verify(self) -> None:
        check_all(self.pool, self.cache, self.other)
        if not self.cache.rows["broken"].any():
            check_mapped(self.pool, self.device, self.cache, self.other)
            self.device.finish()
            for row in self.rows:
                row.verify()


OPERATIONS: list[Callable[[Stage], object]] = [
    Stage.begin, Stage.begin_elsewhere, Stage.adopt, Stage.begin_scrubbed, Stage.extend, Stage.extend_many,
    Stage.extend_beyond_free_memory, Stage.extend_a_fork, Stage.fork, Stage.fork_elsewhere, Stage.part, Stage.truncate,
    Stage.free, Stage.trim, Stage.limit, Stage.ahead,
]  # fmt: skip


QUIET = Stage.begin_elsewhere, Stage.adopt, Stage.truncate, Stage.ahead
"""What may need no call."""


def fail(stage: Stage, operation: Callable[[Stage], object], skip: int, again: int) -> bool:
    """Makes an operation whose driver calls fail: one behind `skip` others, and if `again` is positive one more, as
    many calls later; if it is 5 all from there on. Returns whether it came to that."""
    device = stage.device
    device.fail("any", skip, out_of_memory=skip % 2 == 0, lasting=again == 5)
    if 0 < again < 5:
        device.fail("any", skip + again)
    before, live, failures = (
        stage.lengths(),
        stage.cache.state[0]["live"] + stage.other.state[0]["live"],
        device.failures,
    )
    made, failed = None, False
    try:
        made = operation(stage)
    except (DriverError, OutOfPagesError):
        failed = True
    if failed:  # outside of the handler: errors hold sequences
        device.heal()
        device._raised.clear()
        assert device.failures > failures
        assert stage.lengths() == before
        assert again or not stage.cache.rows["broken"].any()
        gc.collect()
        stage.verify()
        assert stage.cache.state[0]["live"] + stage.other.state[0]["live"] == live
        device.finish()
        made = operation(stage)
    device.heal()
    if operation is not Stage.free:
        for row in stage.rows:
            if row.sequence.length > len(row.tokens):
                device.finish()
                row.write(stage.random, len(row.tokens))
        stage.verify()
    check_all(stage.pool, stage.cache, stage.other)
    if operation is Stage.part:
        assert not stage.cache.rows["broken"].any()
        stage.rows[0].write(stage.random, 0)
        stage.verify()
    del made
    given_up(stage.pool, stage.cache)
    for cache in (stage.cache, stage.other):
        cache.close()
    stage.pool.trim_to()
    assert (device.num_pages, stage.pool.word("used"), stage.pool.word("committed")) == (0, 0, 0)
    return device.failures > failures


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_each_call_fails_once(operation: Callable[[Stage], object]) -> None:
    """And the next one, or one soon behind it, or all."""
    for again in (0, *some(6, 1)):
        skip = 0
        while fail(Stage(skip), operation, skip, again):
            skip += 1
        assert skip or operation in QUIET


def test_a_row_that_is_broken_is_repaired_by_what_needs_it() -> None:
    """Where a call fails while a copy takes the place of a page, and all behind it, the tokens are in the copy."""
    uses = Stage.extend, Stage.fork, Stage.part, lambda stage: stage.rows.pop(0).sequence.free()
    for use in uses:
        found = 0
        for skip in range(40):
            stage = Stage(1)
            stage.device.fail("any", skip, lasting=True)
            with suppress(DriverError):
                stage.part()
            stage.device.heal()
            if not stage.cache.rows["broken"].any():
                continue
            found += 1
            made = use(stage)
            stage.device.finish()
            for row in stage.rows:
                row.write(stage.random, len(row.tokens))
            stage.verify()
            assert not any(stage.cache.rows["broken"][each.sequence.row] for each in stage.rows[:3])
            del made
        assert found
