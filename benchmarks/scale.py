"""What gets slower with more rows and more pages, and what does not: the books alone, of up to a million pages.

    python -m benchmarks.scale [--rows N]... [--rounds 21] [--json]

A cache of 1,000, 10,000 and 100,000 rows, ten pages to a row: most of them live, some parked, some empty. Pages are
numbers, as in `benchmarks.virtual`, so that only the books are timed, in microseconds of this thread on a processor.
The mapper has no thread of its own here. Then one sequence of 10 and of 10,000 pages, which is freed, and
whose row is adopted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from statistics import median
from time import thread_time_ns
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv import FramePool, KVCache, OutOfPagesError, Sequence
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.driver.host import NullDriver

from .geometry import LAYOUT
from .virtual import Rested

Row = dict[str, Any]
PAGE = 16
TOKENS, AHEAD, MOST = 8 * PAGE, 2 * PAGE, 256 * PAGE
"""Of a sequence, mapped behind it, and of a row."""
KNOWN = 3 * PAGE // 2
"""Tokens that a sequence begins with which another one has: a page of them, and half of the next one."""
BATCH, CROSSING = 256, 16
"""Sequences of a step, and those of them that begin a page in it."""
PAGES = 10, 10_000
"""Of one sequence."""
CHECKED = 2000
"""Rows of caches whose books are checked afterwards: that takes minutes for many."""
PAGE_ROUNDS = 20
"""So many times as many rounds are for these, which are short."""


class House(NamedTuple):
    """A cache of many rows, and its live sequences: those that a measurement grows are the first and the last ones."""

    cache: KVCache
    mapper: Rested
    live: list[Sequence]

    def fill_up(self) -> None:
        """Lowers the limit until no page is free."""
        pool = self.cache.pool
        pool.set_limit((pool.word("created") - pool.free_pages()) * pool.page_size)

    def map_ahead(self) -> None:
        """All that there is to do for the mapper."""
        while self.mapper.work():
            pass


def build(rows: int) -> House:
    """Seven of ten rows are live, with a lookahead behind them; two are parked, one is empty."""
    pages = rows * (TOKENS + AHEAD) // PAGE + BATCH * MOST // PAGE
    nbytes = pages * NullDriver(0).page_size
    pool = FramePool.on(NullDriver(nbytes), nbytes)
    pool.mapper = mapper = Rested(pool)
    cache = KVCache(LAYOUT, rows, MOST, pool=pool, lookahead=AHEAD)
    live = [cache.sequence(TOKENS + AHEAD) for _ in range(rows * 9 // 10)]
    cache.free(live[rows * 7 // 10 :])
    del live[rows * 7 // 10 :]
    for sequence in live:
        sequence.truncate(TOKENS)
    return House(cache, mapper, live)


def microseconds(operation: Callable[..., Any], *args: Any) -> float:
    start = thread_time_ns()
    operation(*args)
    return (thread_time_ns() - start) / 1e3


# ------------------------------------------------------------------ what is measured: a round at each `yield`


def extend_within(house: House) -> Iterator[float]:
    sequence = house.live[0]
    while True:
        yield microseconds(sequence.extend, 1)
        sequence.truncate(TOKENS)


def extend_many_within(house: House) -> Iterator[float]:
    batch = house.live[:BATCH]
    while True:
        yield microseconds(house.cache.extend, batch, 1)
        for sequence in batch:
            sequence.truncate(TOKENS)


def extend_onto_a_page(house: House) -> Iterator[float]:
    sequence = house.live[0]
    sequence.extend(AHEAD)
    while True:
        yield microseconds(sequence.extend, PAGE)


def extend_many_onto_pages(house: House) -> Iterator[float]:
    batch, counts = house.live[1 : 1 + BATCH], [PAGE] * CROSSING + [0] * (BATCH - CROSSING)
    house.cache.extend(batch[:CROSSING], AHEAD)
    while True:
        yield microseconds(house.cache.extend, batch, counts)


def shorten(house: House) -> Iterator[float]:
    sequence = house.live[-1]
    while True:
        sequence.extend(AHEAD)
        yield microseconds(sequence.truncate, TOKENS)


def free(house: House) -> Iterator[float]:
    while True:
        yield microseconds(house.live.pop().free)
        house.live.append(house.cache.sequence(TOKENS))


def adopt(house: House) -> Iterator[float]:
    while True:
        house.live.pop().free()
        yield microseconds(lambda: house.live.append(house.cache.sequence(TOKENS)))


def adopt_one_after_another(house: House) -> Iterator[float]:
    parked = house.cache.stats().rows["parked"]
    adopted = [house.cache.sequence(TOKENS) for _ in range(parked // 2)]
    for _ in range(parked // 4):
        yield microseconds(lambda: adopted.append(house.cache.sequence(TOKENS)))
    house.cache.free(adopted)


def start_with_shared_pages(house: House) -> Iterator[float]:
    ids = np.arange(3 * PAGE)
    holder = house.cache.sequence(token_ids=ids[:KNOWN])
    holder.commit(ids[:KNOWN])
    begun: list[Sequence] = []

    def start() -> None:
        begun.append(house.cache.sequence(token_ids=ids, whole=False, expected_tokens=TOKENS))

    def end(sequence: Sequence) -> None:
        sequence.truncate(0)  # so that its row is not kept
        sequence.free()

    try:
        while True:
            yield microseconds(start)
            assert begun[0].cached_tokens == KNOWN
            end(begun.pop())
    finally:
        for sequence in [*begun, holder]:
            end(sequence)


def ask_what_is_available(house: House) -> Iterator[float]:
    while True:
        yield microseconds(lambda: house.cache.available_pages)


def ask_for_statistics(house: House) -> Iterator[float]:
    while True:
        yield microseconds(house.cache.stats)


def map_nothing(house: House) -> Iterator[float]:
    house.map_ahead()
    while True:
        yield microseconds(house.mapper.work)


def map_for_some(house: House) -> Iterator[float]:
    yield from map_for(house, house.live[-CROSSING:])


def map_for_many(house: House) -> Iterator[float]:
    house.cache.pool.set_limit(house.cache.pool.driver.memory_info()[1])
    yield from map_for(house, house.live[-BATCH:])


def map_for(house: House, batch: list[Sequence]) -> Iterator[float]:
    house.map_ahead()
    while True:
        house.cache.extend(batch, AHEAD)
        yield microseconds(house.map_ahead)


def extend_onto_a_page_of_others(house: House) -> Iterator[float]:
    sequence = house.live[BATCH + 1]
    sequence.extend(AHEAD)
    while True:
        house.fill_up()
        yield microseconds(sequence.extend, PAGE)


def extend_onto_the_last_page(house: House) -> Iterator[float]:
    house.cache.trim()
    house.fill_up()
    sequence, other = house.live[BATCH + 1], house.live[-1]
    while True:
        other.truncate(other.length - PAGE)
        yield microseconds(sequence.extend, PAGE)
        sequence, other = other, sequence


def find_no_page(house: House) -> Iterator[float]:
    house.cache.trim()

    def fail() -> None:
        with suppress(OutOfPagesError):
            sequence.extend(MOST - sequence.length)
            raise AssertionError("there was memory")

    sequence = house.live[-1]
    while True:
        house.fill_up()
        yield microseconds(fail)


OPERATIONS: dict[str, Callable[[House], Iterator[float]]] = {
    "extend within its capacity": extend_within,
    f"extend {BATCH} sequences within theirs": extend_many_within,
    "truncate": shorten,
    "free": free,
    "start on a parked row": adopt,
    "start on parked rows, one after another": adopt_one_after_another,
    "start with a shared page, and a copied one": start_with_shared_pages,
    "available_pages": ask_what_is_available,
    "stats()": ask_for_statistics,
    "extend onto a page": extend_onto_a_page,
    f"extend {BATCH}, {CROSSING} of them onto a page": extend_many_onto_pages,
    "mapper, with nothing to do": map_nothing,
    f"mapper, {CROSSING} rows have no lookahead left": map_for_some,
    "extend onto a page that others give up": extend_onto_a_page_of_others,
    "extend onto the last page that there is": extend_onto_the_last_page,
    "extend where no page is left": find_no_page,
    f"mapper, {BATCH} rows have no lookahead left": map_for_many,
}
"""What measures each operation; in this order, as memory gets scarce, and is there again."""


def measure(rows: int, rounds: int) -> list[Row]:
    """A row for each operation, on a cache of so many rows."""
    house = build(rows)
    found = []
    for what, operation in OPERATIONS.items():
        took = list(islice(operation(house), rounds))
        found.append({"what": what, "rows": rows, "us": median(took), "max_us": max(took)})
    if rows <= CHECKED:
        house.cache.check()
    return found


def measure_pages(large: bool, rounds: int) -> list[Row]:
    """A row for free and one for adoption, of one sequence of each size, on single pages or large frames. Sizes take
    turns, so that what else the machine does meets all of them."""
    caches, live, took = {}, dict[int, Sequence](), dict[tuple[str, int], list[float]]()
    for pages in PAGES:
        driver = NullDriver(2 * pages * NullDriver(0).page_size)
        caches[pages] = KVCache(LAYOUT, 8, pages * PAGE, pool=FramePool.on(driver, "50%"), large_frames=large)
        live[pages] = caches[pages].sequence(pages * PAGE)

    def start(pages: int) -> None:
        live[pages] = caches[pages].sequence(pages * PAGE)

    for _ in range(rounds):
        for pages in PAGES:
            took.setdefault(("free", pages), []).append(microseconds(live.pop(pages).free))
            took.setdefault(("start on its row", pages), []).append(microseconds(start, pages))
    for pages, cache in caches.items():
        assert cache.stats().pages_created == pages
        cache.check()
    return [
        {"what": what, "large_frames": large, "pages": pages, "us": median(each), "best_us": min(each)}
        for (what, pages), each in took.items()
    ]


def main(
    rows: Annotated[list[int] | None, typer.Option(min=1000, help="Of a cache; from few to many.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Of which the median is told.")] = 21,
    json_output: JsonOutput = False,
) -> None:
    """Measure what grows with rows and pages."""
    result: Row = {"environment": environment(torch.device("cpu")), "rounds": rounds, "measured": []}
    for count in rows or (1000, 10_000, 100_000):
        with errors.status(f"{count:,} rows"):
            result["measured"] += measure(count, rounds)
    result["pages"] = [row for large in (False, True) for row in measure_pages(large, PAGE_ROUNDS * rounds)]
    if json_output:
        print_result(result)
    else:
        show(result)


def by_operation(result: Row) -> dict[str, list[Row]]:
    """The rows of each operation, from few rows of a cache to many."""
    found: dict[str, list[Row]] = {}
    for row in result["measured"]:
        found.setdefault(row["what"], []).append(row)
    return found


def table(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each operation, with its time in the largest cache over that in the smallest."""
    cases = by_operation(result)
    sizes = [f"{row['rows']:,} rows, µs" for row in next(iter(cases.values()))]
    lines = [
        (what, *(f"{row['us']:,.1f}" for row in rows), f"{rows[-1]['us'] / rows[0]['us']:.1f}")
        for what, rows in cases.items()
    ]
    return ("", *sizes, "times as long"), lines


def table_of_pages(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each operation on one sequence."""
    cases: dict[tuple[str, bool], list[Row]] = {}
    for row in result["pages"]:
        cases.setdefault((row["what"], row["large_frames"]), []).append(row)
    columns = [f"{pages:,} pages, µs{of}" for pages in PAGES for of in ("", ", best")]
    lines = []
    for (what, large), rows in cases.items():
        figures = [f"{row[of]:.1f}" for row in rows for of in ("us", "best_us")]
        lines.append((f"{what}, {'large frames' if large else 'single pages'}", *figures))
    return ("", *columns), lines


def show(result: Row) -> None:
    """Prints a line for each operation."""
    columns, lines = table(result)
    console.print(make_table("Books alone, ten pages to a row", columns, lines))
    columns, lines = table_of_pages(result)
    console.print(make_table("Books alone, one sequence", columns, lines))


if __name__ == "__main__":
    typer.run(main)
