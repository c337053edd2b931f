"""Interruptions at any moment: a timer's signal handler raises KeyboardInterrupt in operations of every kind.

After each the books are right, contents are intact, the operation is done or is not, and all can be used.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from random import Random

import pytest
from conftest import ROUNDS, randoms
from core_rows import Row, check_all, given_up, new_cache, new_pool
from interruption import interrupted_after

from vmmkv.core.pool import Pool
from vmmkv.errors import BudgetError, OutOfPagesError, OutOfRowsError

OPERATIONS = 1500
"""Operations of a run. `VMMKV_ROUNDS=67` makes over 200,000 of both kinds."""


class World:
    """Caches of one pool, whose operations are interrupted."""

    def __init__(self, random: Random, lookahead: int) -> None:
        self.random, self.pool = random, new_pool(90)
        self.caches = [
            new_cache(self.pool, rows=6, large=False, lookahead=lookahead),
            new_cache(self.pool, rows=4, overread=3, reserved=4),
        ]
        self.rows: list[list[Row]] = [[], []]
        self.interrupted: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        """One operation, and all checks if it was interrupted."""
        index = self.random.randrange(2)
        names = [name for name in dir(self) if name.startswith("do_")]
        name = self.random.choices(names, [3 if name in ("do_begin", "do_extend") else 1 for name in names])[0]
        self.came = False
        with suppress(OutOfPagesError, OutOfRowsError, BudgetError):
            getattr(self, name)(index)
        (self.interrupted if self.came else self.done)[name[3:]] += 1
        if self.came:
            self.check()

    def run(self, operation: partial[object]) -> bool:
        """Makes an operation; returns whether it was interrupted."""
        self.came = interrupted_after(operation, self.random.choice([3e-5, 1e-4, 4e-4]) * self.random.random() + 1e-6)
        return self.came

    def check(self) -> None:
        check_all(self.pool, *self.caches)
        for cache, rows in zip(self.caches, self.rows):
            assert cache.state[0]["live"] == len(rows), "a sequence that nothing holds is live"
            for row in rows:
                row.verify()
        given_up(self.pool, self.caches[0])
        assert self.pool.word("staged") == 0

    def pick(self, index: int) -> Row | None:
        return self.random.choice(self.rows[index]) if self.rows[index] else None

    def count(self, row: Row) -> int:
        return min(self.random.choice([0, 1, 1, 5, 30]), 200 - row.sequence.length)

    # ------------------------------------------------------------------ operations

    def begin(self, index: int, call: partial[object], tokens: list[int], start: int = 0) -> None:
        """Starts a sequence. One that was interrupted has no holder, and is freed."""
        made: list[object] = []
        self.run(partial(lambda: made.append(call())))
        for sequence in made:
            self.rows[index].append(Row(sequence, list(tokens), start))  # type: ignore[arg-type]

    def do_begin(self, index: int) -> None:
        count = self.random.choice([0, 1, 8, 60])
        self.begin(index, partial(self.caches[index].start, count, expected=self.random.choice([0, 70])), [])
        for row in self.rows[index]:
            if row.sequence.length > len(row.tokens):
                row.write(self.random, len(row.tokens))

    def do_fork(self, index: int) -> None:
        if row := self.pick(index):
            self.begin(index, partial(row.sequence.fork), row.tokens, row.start)

    def do_share(self, index: int) -> None:
        if row := self.pick(index):
            count = self.random.randint(row.start, len(row.tokens))
            self.begin(index, partial(row.sequence.cache.share, row.sequence, count), row.tokens[:count], row.start)

    def grow(self, rows: list[Row], counts: list[int], operation: partial[object]) -> None:
        """Grows sequences: all of them or none."""
        before = [len(row.tokens) for row in rows]
        self.run(operation)
        lengths = [row.sequence.length for row in rows]
        assert lengths in (before, [length + count for length, count in zip(before, counts)])
        for row in rows:
            if row.sequence.length > len(row.tokens):
                row.write(self.random, len(row.tokens))

    def do_extend(self, index: int) -> None:
        if row := self.pick(index):
            count = self.count(row)
            self.grow([row], [count], partial(row.sequence.extend, count))

    def do_extend_many(self, index: int) -> None:
        rows = self.random.sample(self.rows[index], self.random.randint(0, len(self.rows[index])))
        counts = [self.count(row) for row in rows]
        self.grow(rows, counts, partial(self.caches[index].extend, [row.sequence for row in rows], counts))

    def do_extend_batch(self, index: int) -> None:
        rows = [row for row in self.rows[index] if row.sequence.length < 200]
        batch = self.caches[index].batch(row.sequence for row in rows)
        self.grow(rows, [1] * len(rows), partial(batch.extend, 1))

    def do_truncate(self, index: int) -> None:
        if row := self.pick(index):
            length = self.random.randint(row.start, len(row.tokens))
            self.run(partial(row.sequence.truncate, length))
            assert row.sequence.length in (length, len(row.tokens))
            del row.tokens[row.sequence.length :]

    def do_release(self, index: int) -> None:
        if (row := self.pick(index)) and self.random.random() < 0.5:
            start = self.random.randint(row.start, len(row.tokens))
            self.run(partial(row.sequence.release_before, start))
            assert row.sequence.start in (start, row.start)
            row.start = row.sequence.start

    def do_part(self, index: int) -> None:
        if row := self.pick(index):
            token = self.random.randint(row.start, len(row.tokens))
            part = partial(row.sequence.cache.part, row.sequence.ticket, token)
            if self.run(part):
                self.check()
                part()
            row.write(self.random, token)

    def do_free(self, index: int) -> None:
        rows = self.random.sample(self.rows[index], min(len(self.rows[index]), self.random.choice([1, 2, 5])))
        cache = self.caches[index]
        before = int(cache.state[0]["live"])
        self.run(partial(cache.free, [row.sequence for row in rows]))
        assert before - cache.state[0]["live"] in (0, len(rows))
        if cache.state[0]["live"] < before:
            self.rows[index] = [row for row in self.rows[index] if row not in rows]

    def do_trim(self, index: int) -> None:
        self.run(partial(self.pool.trim_to, self.random.choice([0, 10, 40])))

    def do_limit(self, index: int) -> None:
        before, pages = self.pool.word("budget"), self.random.choice([40, 60, 90])
        self.run(partial(self.pool.limit_to, pages))
        assert self.pool.word("budget") in (before, pages)

    def end(self) -> None:
        for cache in self.caches:
            cache.close()
        self.pool.trim_to()
        assert (self.pool.word("created"), self.pool.word("used"), self.pool.word("committed")) == (0, 0, 0)
        stop(self.pool)


def stop(pool: Pool) -> None:
    """Ends a pool's mapper."""
    if pool.mapper is not None:
        pool.mapper.stop()


@pytest.mark.parametrize("lookahead", [0, 12], ids=["without a mapper", "with a mapper"])
def test_interruptions_at_any_moment(lookahead: int) -> None:
    interrupted: Counter[str] = Counter()
    for random in randoms(5):
        world = World(random, lookahead)
        try:
            for _ in range(OPERATIONS // 5):
                world.step()
            world.check()
        finally:
            stop(world.pool)
        world.end()
        interrupted += world.interrupted
    print(f"{interrupted.total()} of {OPERATIONS * ROUNDS} were interrupted: {dict(interrupted)}")
    assert len(interrupted) > 5
