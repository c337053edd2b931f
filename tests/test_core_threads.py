"""Threads: eight of them on four caches of one pool, with contents that are checked, and a mapper."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import suppress
from random import Random

from conftest import ROUNDS, join
from core_rows import Row, check_all, new_cache, new_pool

from vmmkv.core.cache import Cache
from vmmkv.errors import OutOfPagesError, OutOfRowsError

STEPS = 700
"""Operations of a thread."""
NAMES = [
    "begin",
    "begin",
    "extend",
    "extend",
    "extend",
    "batch",
    "fork",
    "truncate",
    "release",
    "part",
    "free",
    "collect",
    "trim",
]


class Worker:
    """A thread's sequences in a cache that others use, too."""

    def __init__(self, cache: Cache, random: Random) -> None:
        self.cache, self.random = cache, random
        self.rows: list[Row] = []
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(STEPS * ROUNDS):
                self.step()
        except BaseException as error:
            self.error = error

    def step(self) -> None:
        random = self.random
        name = random.choice(NAMES)
        row = random.choice(self.rows) if self.rows else None
        with suppress(OutOfPagesError, OutOfRowsError):
            if name == "begin" and len(self.rows) < 5:
                self.rows.append(Row(self.cache.start(random.choice([0, 3, 40]))))
                self.rows[-1].write(random, 0)
            elif name == "trim" and random.random() < 0.2:
                self.cache.pool.trim_to(random.choice([0, 50]))
                self.cache.pool.limit_to(random.choice([150, 190]))
            elif row is not None:
                self.use(name, row)
            self.done[name] += 1
        for each in random.sample(self.rows, min(len(self.rows), 2)):
            each.verify()

    def use(self, name: str, row: Row) -> None:
        random, sequence = self.random, row.sequence
        if name == "extend":
            sequence.extend(min(random.choice([0, 1, 1, 7, 40]), 200 - sequence.length))
            row.write(random, len(row.tokens))
        elif name == "batch":
            rows = [each for each in self.rows if each.sequence.length < 200]
            self.cache.batch(each.sequence for each in rows).extend()
            for each in rows:
                each.write(random, len(each.tokens))
        elif name == "fork" and len(self.rows) < 5:
            self.rows.append(Row(sequence.fork(), list(row.tokens), row.start))
        elif name == "truncate":
            length = random.randint(row.start, len(row.tokens))
            sequence.truncate(length)
            del row.tokens[length:]
        elif name == "release" and random.random() < 0.2:
            row.start = random.randint(row.start, len(row.tokens))
            sequence.release_before(row.start)
        elif name == "part":
            token = random.randint(row.start, len(row.tokens))
            self.cache.part(sequence.ticket, token)
            row.write(random, token)
        elif name in ("free", "collect"):
            self.rows.remove(row)
            if name == "free":
                sequence.free()


def test_eight_threads_on_four_caches() -> None:
    seed = Random().randrange(1 << 32)
    pool = new_pool(190)
    caches = [
        new_cache(pool, rows=9, lookahead=12, large=False),
        new_cache(pool, rows=9, overread=5, reserved=10),
        new_cache(pool, rows=9, lookahead=20, limit=80),
        new_cache(pool, rows=9),
    ]
    workers = [Worker(caches[index % 4], Random(seed + index)) for index in range(8)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    join(*threads)
    pool.mapper.stop()
    errors = [worker.error for worker in workers if worker.error]
    if errors:
        errors[0].add_note(f"seed {seed}; {len(errors)} threads have failed")
        raise errors[0]
    check_all(pool, *caches)
    for cache in caches:
        assert cache.state[0]["live"] == sum(len(each.rows) for each in workers if each.cache is cache)
    print(sum((worker.done for worker in workers), Counter()), pool.mapper.changes, "changes of the mapper")
    for worker in workers:
        for row in worker.rows:
            row.verify()
    gc.collect()
    for cache in caches:
        cache.close()
    pool.trim_to()
    assert (pool.word("used"), pool.word("created"), pool.word("committed")) == (0, 0, 0)
