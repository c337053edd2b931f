"""Caches of the compiled books on host memory, with a byte for each token: what tests write, and what they find."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from contextlib import suppress
from random import Random

import torch
from conftest import small_driver
from faulty import FaultyDriver

from vmmkv.core import entries
from vmmkv.core.cache import Cache
from vmmkv.core.check import check
from vmmkv.core.pool import LARGE, Ask, Pool
from vmmkv.core.sequence import Sequence
from vmmkv.driver.driver import Driver
from vmmkv.errors import OutOfPagesError, OutOfRowsError
from vmmkv.layout import KVLayout

LAYOUT = KVLayout(3, 1, 64, torch.float32, layers_per_range=2)
"""Two ranges, of 1,024 and 512 bytes a token: pages of the host hold 4 and 8."""


def new_pool(pages: int = 200, driver: Driver | None = None) -> Pool:
    """A pool on host memory, or on a driver."""
    return Pool(small_driver("cpu") if driver is None else driver, pages)


def new_cache(pool: Pool, rows: int = 8, tokens: int = 200, **options: object) -> Cache:
    """A cache of a small layout."""
    return Cache(pool, LAYOUT.record_bytes, rows, tokens, **options)  # type: ignore[arg-type]


def token_at(cache: Cache, row: int, part: int, token: int) -> tuple[int, int]:
    """Address and bytes of a token in a range."""
    g = cache.ranges[part]
    record = int(g["record"])
    return int(g["address"]) + row * int(g["row_pages"]) * cache.pool.driver.page_size + token * record, record


class Row:
    """A sequence, and the bytes that its tokens should hold."""

    def __init__(self, sequence: Sequence, tokens: list[int] | None = None, start: int = 0) -> None:
        self.sequence, self.tokens, self.start = sequence, tokens or [], start

    def write(self, random: Random, first: int) -> None:
        """Writes new bytes to the sequence's tokens from one on."""
        length = self.sequence.length
        del self.tokens[first:]
        self.tokens += [random.randrange(1, 255) for _ in range(length - first)]
        for part in range(len(self.sequence.cache.ranges)):
            place, record = token_at(self.sequence.cache, self.sequence.row, part, first)
            content = b"".join(bytes([byte]) * record for byte in self.tokens[first:])
            ctypes.memmove(place, content, len(content))

    def verify(self) -> None:
        """Compares each token with what was written."""
        cache, row = self.sequence.cache, self.sequence.row
        assert (self.sequence.start, self.sequence.length) == (self.start, len(self.tokens))
        for part in range(len(cache.ranges)):
            place, record = token_at(cache, row, part, self.start)
            there = ctypes.string_at(place, record * (len(self.tokens) - self.start))
            wanted = b"".join(bytes([byte]) * record for byte in self.tokens[self.start :])
            assert there == wanted, f"range {part} of row {row}"


def settled(pool: Pool) -> None:
    """Has a journal that an interruption left behind booked, as the next change would."""
    ask = Ask()
    pool.change(ask, entries.plan_limit, pool.address, -1, pool.word("budget"), 0)


def check_all(pool: Pool, *caches: Cache) -> None:
    """Checks the books, once what was collected has been freed."""
    for cache in caches:
        cache.sweep()
    settled(pool)
    check(pool, caches)


def check_mapped(pool: Pool, driver: FaultyDriver, *caches: Cache) -> None:
    """Compares what the books of a pool say of mappings with what its driver was asked for."""
    size, said = pool.driver.page_size, {}
    for cache in caches:
        for row in range(cache.max_sequences):
            for part in range(len(cache.ranges)):
                e = cache.extents[row * len(cache.ranges) + part]
                for page in range(int(e["first"]), int(e["mapped"])):
                    frame = pool.frames[int(cache.tables[part][row, page]) - 1]
                    said[token_at(cache, row, part, 0)[0] + page * size] = int(frame["handle"])
    staging = range(pool.staging, pool.staging + LARGE * size)
    assert said == {place: handle for place, handle in driver.mapped.items() if place not in staging}
    assert driver.num_pages == pool.word("created")


def given_up(pool: Pool, cache: Cache) -> None:
    """Gives up a copy that an interruption left in the staging range, as the next copy would."""
    with pool.copying:
        cache.pool.unstage()


def share_left(
    cache: Cache, row: int, tokens: int, frames: array[int], *, key: int = 0, last: int | None = None
) -> Sequence:
    """Starts a sequence with tokens that a guest knows: on frames, and copied from a parked row; -1 is no row."""
    left = int(cache.rows["last"][row]) if last is None else last
    sequence = cache.start(key=key, avoid=row)
    try:
        cache.share_into(sequence.ticket, left << 24 | row if row >= 0 else -1, tokens, frames.buffer_info()[0])
    except BaseException:
        cache.free((sequence,))
        raise
    return sequence


def use_everything(cache: Cache) -> None:
    """Makes calls of every kind, with other threads, until the process ends or somebody closes the cache."""
    random, live, pool = Random(), [cache.start()], cache.pool
    calls: list[Callable[[Sequence], object]] = [
        lambda _: cache.start(random.choice([0, 3, 40])),
        Sequence.fork,
        lambda each: each.extend(min(random.choice([0, 1, 7, 40]), 200 - each.length)),
        lambda _: cache.batch(each for each in live if each.length < 200).extend(),
        lambda each: each.truncate(random.randint(each.start, each.length)),
        lambda each: each.release_before(random.randint(each.start, each.length)),
        lambda each: cache.part(each.ticket, each.start),
        lambda _: pool.trim_to(random.choice([0, 50])),
        lambda _: pool.limit_to(random.choice([150, 190])),
    ]
    with suppress(BaseException):
        while True:
            with suppress(OutOfPagesError, OutOfRowsError):
                made = random.choice(calls)(random.choice(live))
                live += [made] if isinstance(made, Sequence) else []
            if len(live) > 5:
                gone = live.pop(random.randrange(len(live)))
                if random.random() < 0.5:  # others are collected
                    gone.free()
