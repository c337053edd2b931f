"""Times of the compiled books on the driver that does nothing, by the number of rows and of parked rows.

python benchmarks/core_sizes.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from vmmkv.core.cache import Cache
from vmmkv.core.pool import Pool
from vmmkv.driver.host import NullDriver
from vmmkv.layout import KVLayout

PAGE = 4096
LAYOUT = KVLayout(1, 1, 128, torch.float32)
"""A token takes 1,024 bytes: a page holds four."""


def microseconds(call: Callable[[], object], times: int = 400) -> float:
    """The median of a call."""
    took = []
    for _ in range(times):
        start = perf_counter()
        call()
        took.append(perf_counter() - start)
    return median(took) * 1e6


def parked(count: int, pages: int = 1, rows: int = 0) -> tuple[Pool, Cache]:
    """A cache with so many parked rows of so many pages."""
    pool = Pool(NullDriver(4 * 1024**3, PAGE), 1 << 20)
    cache = Cache(pool, LAYOUT.record_bytes, rows or count + 64, 8192, large=False)
    cache.free([cache.sequence(4 * pages) for _ in range(count)])
    return pool, cache


def main() -> None:
    gc.disable()
    for count in (2_000, 32_000):
        pool, cache = parked(count)
        sequence = None

        def adopt(cache: Cache = cache) -> None:
            nonlocal sequence
            sequence = cache.sequence(4)

        took = []
        for _ in range(400):
            start = perf_counter()
            adopt()
            middle = perf_counter()
            cache.free((sequence,))
            took.append((middle - start, perf_counter() - middle))
        adopted, freed = (median(each) * 1e6 for each in zip(*took))
        before = pool.word("created")
        start = perf_counter()
        pool.trim(before - 1500)
        trimmed = (perf_counter() - start) / 1500 * 1e6
        live = cache.sequence(4)
        start = perf_counter()
        pool.set_limit(pool.word("created") - 400)
        limited = (perf_counter() - start) / 400 * 1e6
        start = perf_counter()
        for _ in range(50):  # created pages are as many as the limit: each is a parked row's
            live.extend(4)
        reclaimed = (perf_counter() - start) / 50 * 1e6
        print(f"{count:6} parked rows: adopt and extend {adopted:.1f} us, free {freed:.1f}, trim {trimmed:.2f} a page, "
              f"set_limit {limited:.2f} a page, grow by a reclaimed page {reclaimed:.1f}")  # fmt: skip
    for rows in (1_000, 100_000):
        pool, cache = Pool(NullDriver(4 * 1024**3, PAGE), 1 << 20), None
        cache = Cache(pool, LAYOUT.record_bytes, rows, 8192, large=False)
        sequences = [cache.sequence(4 * (10 if rows > 1000 else 1)) for _ in range(rows - 2)]
        one = sequences[rows // 2]
        inside = microseconds(lambda: one.extend(0))  # noqa: B023
        page = microseconds(lambda: one.extend(4))  # noqa: B023
        batch = cache.batch(sequences[:256])
        step = microseconds(lambda: batch.extend(0))  # noqa: B023
        fork = microseconds(lambda: one.fork() and None, 100) if rows > 1000 else 0.0  # noqa: B023
        print(f"{rows:6} rows, {pool.word('created'):8} pages: extend inside {inside:.2f} us, by a page {page:.1f}, "
              f"a step of 256 {step:.1f}, fork {fork:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
