"""Host time of the compiled books, beside the same driver calls by hand, in turns.

    python -m benchmarks.core [--device cuda|cpu|null] [--rounds N] [--json]

By hand are the calls that a change takes and nothing else: they keep no books and wait for no work. `null` is a driver
that does nothing, so that the books alone are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import typer

from vmmkv import KVLayout
from vmmkv.cli.output import JsonOutput
from vmmkv.core.cache import Cache
from vmmkv.core.pool import LARGE, Pool
from vmmkv.core.sequence import Sequence
from vmmkv.driver.driver import Driver, open_driver
from vmmkv.driver.host import NullDriver

from .environment import environment
from .host_time import ByHand, in_turns, microseconds, ranged, spread
from .output import Lines, Row, deliver

LAYOUT = KVLayout(32, 8, 128, torch.bfloat16)
"""Llama-3.1-8B's: 16 tokens in a page of 2 MiB."""
TOKENS = 16
PARKED = 32_000
BATCH = 256

Sides = dict[str, Callable[[], float]]


class Bench:
    """The cases, on one driver. Each side of a case returns the microseconds of one round."""

    def __init__(self, driver: Driver, parked: int) -> None:
        self.driver, self.parked = driver, parked
        self.hand, self.size = ByHand(driver), driver.page_size

    def cache(self, pages: int, sequences: int, row_pages: int, *, large: bool = False) -> Cache:
        """A cache of the core, on a pool of its own."""
        return Cache(Pool(self.driver, pages), LAYOUT.record_bytes, sequences, row_pages * TOKENS, large=large)

    def growth(self, step: int, *, large: bool = False) -> Sides:
        """Grow by new pages: `step` pages at a time, 64 in all, from an empty pool."""
        most, pages = 64, step if large else 1
        base, cache = self.driver.reserve(most * self.size), self.cache(most, 2, most, large=large)

        def by_core() -> float:
            sequence = cache.start()
            took = microseconds(lambda: [sequence.extend(step * TOKENS) for _ in range(most // step)])
            sequence.free()
            cache.pool.trim_to()
            return took * step / most

        def by_hand() -> float:
            handles: list[int] = []

            def grow() -> None:
                for begin in range(0, most, step):
                    for page in range(begin, begin + step, pages):
                        handles.append(self.hand.create(pages))
                        self.hand.map(base + page * self.size, handles[-1], pages)
                    self.hand.access(base + begin * self.size, step)

            took = microseconds(grow)
            self.hand.unmap(base, most)
            for handle in handles:
                self.hand.release(handle)
            return took * step / most

        return {"core": by_core, "by hand": by_hand}

    def reclaimed(self) -> Sides:
        """Grow by a page that a parked row gives."""
        places, handle = [self.driver.reserve(self.size) for _ in range(2)], self.hand.create()
        self.hand.map(places[0], handle)
        self.hand.access(places[0])
        cache = self.cache(1, 2, 1)

        def by_core() -> float:
            gone, growing = cache.start(TOKENS), cache.start()
            gone.free()
            self.driver.synchronize()
            took = microseconds(growing.extend, TOKENS)
            growing.free()
            return took

        def move() -> None:
            self.hand.unmap(places[0])
            self.hand.map(places[1], handle)
            self.hand.access(places[1])

        def by_hand() -> float:
            took = microseconds(move)
            places.reverse()
            return took

        return {"core": by_core, "by hand": by_hand}

    def step(self, crossing: int) -> Sides:
        """Extend 256 sequences by a token, of which `crossing` need a page."""
        cache = self.cache(4 * BATCH, BATCH, 4)
        base = self.driver.reserve(BATCH * 4 * self.size)

        def by_core() -> float:
            sequences = [cache.start(TOKENS - 3 if index < crossing else 1) for index in range(BATCH)]
            grow = cache.batch(sequences).extend
            for _ in range(3):
                grow()
            took = microseconds(grow)
            cache.free(sequences)
            cache.pool.trim_to()
            return took

        def by_hand() -> float:
            handles: list[int] = []

            def grow() -> None:
                for index in range(crossing):
                    handles.append(self.hand.create())
                    self.hand.map(base + index * 4 * self.size, handles[-1])
                for index in range(crossing):
                    self.hand.access(base + index * 4 * self.size)

            took = microseconds(grow)
            for index, each in enumerate(handles):
                self.hand.unmap(base + index * 4 * self.size)
                self.hand.release(each)
            return took

        return {"core": by_core} | ({"by hand": by_hand} if crossing else {})

    def ending(self, parked: int) -> tuple[Sides, Sides]:
        """Free a sequence of four pages, and start one on its row, beside parked rows."""
        cache, tokens = self.cache(parked + 64, parked + 64, 4), 4 * TOKENS
        cache.free([cache.start(1) for _ in range(parked)])
        held = [cache.start(tokens)]

        def free() -> float:
            took = microseconds(held[0].free)
            held[0] = cache.start(tokens)
            return took

        def adopt() -> float:
            held[0].free()
            return microseconds(lambda: held.__setitem__(0, cache.start(tokens)))

        return {"core": free}, {"core": adopt}

    def fork(self, pages: int = 512) -> Sides:
        """Fork a sequence of full pages."""
        base, handles = self.driver.reserve(pages * self.size), [self.hand.create() for _ in range(pages)]
        cache = self.cache(pages + 8, 2, pages + 8)
        parent, children = cache.start(pages * TOKENS), list[Sequence]()

        def by_core() -> float:
            took = microseconds(lambda: children.append(parent.fork()))
            children.pop().free()
            cache.pool.trim_to()
            return took

        def share() -> None:
            for page, handle in enumerate(handles):
                self.hand.map(base + page * self.size, handle)
            self.hand.access(base, pages, False)

        def by_hand() -> float:
            took = microseconds(share)
            self.hand.unmap(base, pages)
            return took

        return {"core": by_core, "by hand": by_hand}

    def prompt(self, tokens: int, sequences: int = 1) -> Sides:
        """Start sequences with a prompt, on large frames, from an empty pool."""
        pages = -(-tokens // TOKENS)
        larges, stride = pages // LARGE, pages * self.size
        base = self.driver.reserve(sequences * stride)
        rows = range(base, base + sequences * stride, stride)
        cache = self.cache(sequences * pages, sequences, pages, large=True)

        def by_core() -> float:
            started: list[Sequence] = []
            took = microseconds(lambda: started.extend(cache.start(tokens) for _ in range(sequences)))
            cache.free(started)
            cache.pool.trim_to()
            return took

        def by_hand() -> float:
            handles: list[int] = []

            def start() -> None:
                for row in rows:
                    for frame in range(larges):
                        handles.append(self.hand.create(LARGE))
                        self.hand.map(row + frame * LARGE * self.size, handles[-1], LARGE)
                    self.hand.access(row, larges * LARGE)

            took = microseconds(start)
            for row in rows:
                self.hand.unmap(row, larges * LARGE)
            for handle in handles:
                self.hand.release(handle)
            return took

        return {"core": by_core, "by hand": by_hand}

    def cases(self) -> Iterator[tuple[str, Sides]]:
        """Each case, made when it is its turn."""
        yield "grow by a new page", self.growth(1)
        yield "grow by a reclaimed page", self.reclaimed()
        yield "grow by 16 pages, a large frame", self.growth(LARGE, large=True)
        for crossing in (0, 1, 16):
            yield f"step of {BATCH}, {crossing} onto a page", self.step(crossing)
        for parked in (0, self.parked):
            free, adopt = self.ending(parked)
            yield f"free, beside {parked:,} parked rows", free
            yield f"adopt, beside {parked:,} parked rows", adopt
        yield "fork 512 pages", self.fork()
        yield "a prompt of 8,192 tokens", self.prompt(8192)
        yield "60 prompts of 1,024 tokens", self.prompt(1024, 60)


def main(
    device: Annotated[str, typer.Option(help="cuda, cpu, or null: a driver that does nothing.")] = "cuda",
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 60,
    parked: Annotated[int, typer.Option(min=1, help="Rows beside which sequences end and begin.")] = PARKED,
    json_output: JsonOutput = False,
) -> None:
    """Measure host time of the books."""
    driver = NullDriver(128 << 30) if device == "null" else open_driver(device)
    bench = Bench(driver, parked if device != "cpu" else min(parked, 1000))
    result: Row = {"environment": environment(driver.device), "driver": device, "rounds": rounds}
    result["cases"] = [
        {"case": name, "sides": {side: spread(took) for side, took in in_turns(sides, rounds).items()}}
        for name, sides in bench.cases()
    ]
    deliver(result, json_output, {"The books": table})


def table(result: Row) -> Lines:
    """A line for each case."""
    cases = [(case["case"], case["sides"]) for case in result["cases"] if "core" in case["sides"]]
    return ("µs", "core", "the same driver calls by hand"), [
        (name, *(ranged(sides[side], digits=1) if side in sides else "" for side in ("core", "by hand")))
        for name, sides in cases
    ]


if __name__ == "__main__":
    typer.run(main)
