"""What the books cost: the compiled core, today's cache, and the driver's calls by hand, in turns.

    python -m benchmarks.core [--device cuda|cpu|null] [--rounds N] [--json]

By hand are the calls that a change takes and nothing else: `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`, `cuMemUnmap`
through `cuda.bindings`; on the host the same functions through ctypes. They keep no books and wait for no work. `null`
is a driver whose calls do nothing, so that the books alone are measured.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from array import array
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any

import torch
import typer

from vmmkv import KVCache, KVLayout
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, make_table
from vmmkv.core.cache import Cache
from vmmkv.core.pool import LARGE, Pool
from vmmkv.core.sequence import Sequence
from vmmkv.driver.driver import Driver, open_driver
from vmmkv.driver.host import NullDriver
from vmmkv.driver.table import FUNCTIONS

from .environment import environment, print_result


class Core(Cache):
    """A cache of the core that starts sequences under the name that `KVCache` has for it."""

    sequence = Cache.start


LAYOUT = KVLayout(32, 8, 128, torch.bfloat16)
"""Llama-3.1-8B's: 16 tokens in a page of 2 MiB."""
TOKENS = 16
PARKED = 32_000

Sides = dict[str, Callable[[], float]]


class ByHand:
    """Calls of a driver's functions, one by one: through `cuda.bindings` on a GPU, else through ctypes."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.size, self._cell = driver, driver.page_size, array("q", [0])
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * FUNCTIONS[name])(int(driver.table[name]))
            for name in ("create", "release", "map", "set_access", "unmap")
        }
        self._cuda: Any = None
        if driver.device.type == "cuda":
            import cuda.bindings.driver as cu

            self._cuda = cu

    def create(self, pages: int = 1) -> int:
        """Makes memory; returns its handle."""
        if self._cuda:
            return int(self._cuda.cuMemCreate(pages * self.size, self.driver.allocation, 0)[1])  # type: ignore[attr-defined]
        out = self._cell.buffer_info()[0]
        self._functions["create"](out, pages * self.size, int(self.driver.table["property"]), 0)
        return self._cell[0]

    def map(self, address: int, handle: int, pages: int = 1) -> None:
        """Maps memory."""
        if self._cuda:
            self._cuda.cuMemMap(address, pages * self.size, 0, handle, 0)
        else:
            self._functions["map"](address, pages * self.size, 0, handle, 0)

    def access(self, address: int, pages: int = 1, writable: bool = True) -> None:
        """Allows access."""
        if self._cuda:
            self._cuda.cuMemSetAccess(address, pages * self.size, self.driver.access[writable], 1)  # type: ignore[attr-defined]
        else:
            access = int(self.driver.table["access" if writable else "read_access"])
            self._functions["set_access"](address, pages * self.size, access, 1)

    def unmap(self, address: int, pages: int = 1) -> None:
        """Unmaps memory."""
        if self._cuda:
            self._cuda.cuMemUnmap(address, pages * self.size)
        else:
            self._functions["unmap"](address, pages * self.size)

    def release(self, handle: int) -> None:
        """Gives memory back."""
        if self._cuda:
            self._cuda.cuMemRelease(handle)
        else:
            self._functions["release"](handle)


class Bench:
    """What is measured, on one driver."""

    def __init__(self, driver: Driver, rounds: int, parked: int) -> None:
        self.driver, self.rounds, self.parked = driver, rounds, parked
        self.hand, self.size = ByHand(driver), driver.page_size
        self.has_memory = not isinstance(driver, NullDriver)

    def core(self, pages: int, sequences: int, row_pages: int, *, large: bool = False) -> Cache:
        """The core's cache, on a pool of its own."""
        return Core(Pool(self.driver, pages), LAYOUT.record_bytes, sequences, row_pages * TOKENS, large=large)

    def today(self, pages: int, sequences: int, row_pages: int, *, large: bool = False) -> KVCache | None:
        """Today's cache; none on a driver without memory, which it cannot be given."""
        if not self.has_memory:
            return None
        nbytes, device = pages * self.size, str(self.driver.device)
        return KVCache(
            LAYOUT, sequences, row_pages * TOKENS, max_bytes=nbytes, device=device, lookahead=0, large_frames=large
        )

    def growth(self, step: int, *, large: bool = False) -> Sides:
        """Microseconds to grow by new pages: `step` pages at a time, 64 in all, from an empty pool."""
        most, base = 64, self.driver.reserve(64 * self.size)

        def by_cache(cache: Any) -> Callable[[], float]:
            def run() -> float:
                sequence = cache.sequence()
                took = timed(lambda: [sequence.extend(step * TOKENS) for _ in range(most // step)])
                sequence.free()
                trim(cache)
                return took * step / most

            return run

        def by_hand() -> float:
            pages, handles = (step if large else 1), []

            def grow() -> None:
                for begin in range(0, most, step):
                    for page in range(begin, begin + step, pages):
                        handles.append(self.hand.create(pages))
                        self.hand.map(base + page * self.size, handles[-1], pages)
                    self.hand.access(base + begin * self.size, step)

            took = timed(grow)
            self.hand.unmap(base, most)
            for handle in handles:
                self.hand.release(handle)
            return took * step / most

        return self._sides(by_cache, by_hand, (most, 2, most), large=large)

    def reclaimed(self) -> Sides:
        """Microseconds to grow by a page that a parked row gives."""
        places, handle = [self.driver.reserve(self.size) for _ in range(2)], self.hand.create()
        self.hand.map(places[0], handle)
        self.hand.access(places[0])

        def by_cache(cache: Any) -> Callable[[], float]:
            def run() -> float:
                gone, growing = cache.sequence(TOKENS), cache.sequence()
                gone.free()
                self.driver.synchronize()
                took = timed(lambda: growing.extend(TOKENS))
                growing.free()
                return took

            return run

        def move() -> None:
            self.hand.unmap(places[0])
            self.hand.map(places[1], handle)
            self.hand.access(places[1])

        def by_hand() -> float:
            took = timed(move)
            places.reverse()
            return took

        return self._sides(by_cache, by_hand, (1, 2, 1))

    def step(self, crossing: int) -> Sides:
        """Microseconds of a step of 256 sequences by a token, of which some need a page."""
        batch, cache = 256, self.core(1024, 256, 4)
        base = self.driver.reserve(batch * 4 * self.size)

        def with_sequences(extend: Callable[[list[Sequence]], Callable[[], object]]) -> Callable[[], float]:
            def run() -> float:
                sequences = [cache.sequence(TOKENS - 3 if index < crossing else 1) for index in range(batch)]
                grow = extend(sequences)
                for _ in range(3):
                    grow()
                took = timed(grow)
                cache.free(sequences)
                trim(cache)
                return took

            return run

        def handle(sequences: list[Sequence]) -> Callable[[], object]:
            return cache.batch(sequences).extend

        def by_hand() -> float:
            handles: list[int] = []

            def grow() -> None:
                for index in range(crossing):
                    handles.append(self.hand.create())
                    self.hand.map(base + index * 4 * self.size, handles[-1])
                for index in range(crossing):
                    self.hand.access(base + index * 4 * self.size)

            took = timed(grow)
            for index, each in enumerate(handles):
                self.hand.unmap(base + index * 4 * self.size)
                self.hand.release(each)
            return took

        sides = {
            "core": with_sequences(handle),
            "core, by list": with_sequences(lambda sequences: lambda: cache.extend(sequences, 1)),
        }
        return sides | ({"by hand": by_hand} if crossing else {})

    def ending(self, parked: int) -> Iterator[tuple[str, Sides]]:
        """Microseconds to free a sequence of four pages, and to start one on its row, beside parked rows."""
        cache, tokens = self.core(parked + 64, parked + 64, 4), 4 * TOKENS
        cache.free([cache.sequence(1) for _ in range(parked)])
        held = [cache.sequence(tokens)]

        def free() -> float:
            took = timed(held[0].free)
            held[0] = cache.sequence(tokens)
            return took

        def adopt() -> float:
            held[0].free()
            return timed(lambda: held.__setitem__(0, cache.sequence(tokens)))

        yield f"free, beside {parked:,} parked rows", {"core": free}
        yield f"adopt, beside {parked:,} parked rows", {"core": adopt}

    def fork(self, pages: int = 512) -> Sides:
        """Microseconds to fork a sequence of full pages."""
        base, handles = self.driver.reserve(pages * self.size), [self.hand.create() for _ in range(pages)]

        def by_cache(cache: Any) -> Callable[[], float]:
            parent, children = cache.sequence(pages * TOKENS), []

            def run() -> float:
                took = timed(lambda: children.append(parent.fork()))
                children.pop().free()
                trim(cache)
                return took

            return run

        def by_hand() -> float:
            def share() -> None:
                for page, handle in enumerate(handles):
                    self.hand.map(base + page * self.size, handle)
                self.hand.access(base, pages, False)

            took = timed(share)
            self.hand.unmap(base, pages)
            return took

        return self._sides(by_cache, by_hand, (pages + 8, 2, pages + 8))

    def prompt(self, tokens: int, sequences: int = 1) -> Sides:
        """Microseconds to start sequences with a prompt, on large frames, from an empty pool."""
        pages = -(-tokens // TOKENS)
        base, larges = self.driver.reserve(sequences * pages * self.size), pages // LARGE

        def by_cache(cache: Any) -> Callable[[], float]:
            def run() -> float:
                started: list[Any] = []
                took = timed(lambda: started.extend(cache.sequence(tokens) for _ in range(sequences)))
                cache.free(started)
                trim(cache)
                return took

            return run

        def by_hand() -> float:
            handles: list[int] = []

            def start() -> None:
                for place in range(base, base + sequences * pages * self.size, pages * self.size):
                    for frame in range(larges):
                        handles.append(self.hand.create(LARGE))
                        self.hand.map(place + frame * LARGE * self.size, handles[-1], LARGE)
                    self.hand.access(place, larges * LARGE)

            took = timed(start)
            for place in range(base, base + sequences * pages * self.size, pages * self.size):
                self.hand.unmap(place, larges * LARGE)
            for handle in handles:
                self.hand.release(handle)
            return took

        return self._sides(by_cache, by_hand, (sequences * pages, sequences, pages), large=True)

    def _sides(
        self, by_cache: Callable[[Any], Callable[[], float]], by_hand: Callable[[], float], shape: tuple[int, int, int],
        *, large: bool = False,
    ) -> Sides:  # fmt: skip
        sides = {"core": by_cache(self.core(*shape, large=large)), "by hand": by_hand}
        today = self.today(*shape, large=large)
        return sides | ({"today": by_cache(today)} if today else {})

    def cases(self) -> Iterator[tuple[str, Sides]]:
        """What is measured, one after another."""
        yield "grow by a new page", self.growth(1)
        yield "grow by a reclaimed page", self.reclaimed()
        yield "grow by 16 pages, a large frame", self.growth(LARGE, large=True)
        for crossing in (0, 1, 16):
            yield f"step of 256, {crossing} onto a page", self.step(crossing)
        yield from self.ending(0)
        yield from self.ending(self.parked)
        yield "fork 512 pages", self.fork()
        yield "a prompt of 8,192 tokens", self.prompt(8192)
        yield "60 prompts of 1,024 tokens", self.prompt(1024, 60)

    def handover(self) -> float:
        """Milliseconds in which a cache grows onto 10 GiB of large frames that another cache's parked rows have."""
        pages = min(10 << 30, self.driver.memory_info()[0] // 2) // self.size // LARGE * LARGE
        pool = Pool(self.driver, pages)
        first, second = (Core(pool, LAYOUT.record_bytes, 8, pages * TOKENS) for _ in range(2))
        first.sequence(pages * TOKENS).free()
        self.driver.synchronize()
        took = timed(lambda: second.sequence(pages * TOKENS).free()) / 1e3
        pool.trim_to()
        return took


def trim(cache: Any) -> None:
    """Gives all surplus back."""
    if isinstance(cache, Cache):
        cache.pool.trim_to()
    else:
        cache.trim()


def timed(operation: Callable[[], object]) -> float:
    """Microseconds that an operation takes."""
    start = perf_counter_ns()
    operation()
    return (perf_counter_ns() - start) / 1e3


def in_turns(sides: Sides, rounds: int) -> dict[str, dict[str, float]]:
    """What each side takes: median, and where four of five lie. Who begins changes from round to round, and the first
    round is not counted."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    gc.collect()
    gc.disable()
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took[name].append(sides[name]())
    gc.enable()
    found = {}
    for name, values in took.items():
        ordered = sorted(values[1:])
        tenth = len(ordered) // 10
        found[name] = {"us": median(ordered), "p10_us": ordered[tenth], "p90_us": ordered[-1 - tenth]}
    return found


def python_calls(driver: Driver) -> dict[str, int]:
    """Python functions that are called, by operation."""
    cache = Core(Pool(driver, 4096), LAYOUT.record_bytes, 512, 64 * TOKENS, large=False)
    one, many = cache.sequence(), cache.batch(cache.sequence(1) for _ in range(256))
    parent, born = cache.sequence(8 * TOKENS), [cache.sequence(TOKENS)]
    return {
        "growth onto a page": count(lambda: one.extend(TOKENS)),
        "free": count(born[0].free),
        "adopt": count(lambda: born.append(cache.sequence(TOKENS))),
        "fork": count(lambda: born.append(parent.fork())),
        "step of 256": count(many.extend),
    }


def count(operation: Callable[[], object]) -> int:
    """Calls of Python functions that an operation makes, itself not among them."""
    calls = 0

    def note(_frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    operation()
    sys.setprofile(None)
    return calls - (getattr(operation, "__name__", "") == "<lambda>")


def main(
    device: Annotated[str, typer.Option(help="cuda, cpu, or null: a driver that does nothing.")] = "cuda",
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 60,
    parked: Annotated[int, typer.Option(min=1, help="Rows beside which sequences end and begin.")] = PARKED,
    json_output: JsonOutput = False,
) -> None:
    """Measure what the books cost."""
    driver = NullDriver(128 << 30) if device == "null" else open_driver(device)
    bench = Bench(driver, rounds, parked if device != "cpu" else min(parked, 1000))
    result: dict[str, Any] = {"environment": environment(driver.device), "driver": device, "rounds": rounds}
    result["cases"] = [{"case": name, "sides": in_turns(sides, rounds)} for name, sides in bench.cases()]
    if device != "cpu":
        result["handover_ms"] = [bench.handover() for _ in range(5)]
    result["python_calls"] = python_calls(driver)
    if json_output:
        print_result(result)
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Prints tables."""
    names = ("core", "core, by list", "by hand", "today")
    rows = []
    for row in result["cases"]:
        sides = row["sides"]
        rows.append((row["case"], *(f"{sides[name]['us']:.1f}" if name in sides else "" for name in names)))
    console.print(make_table("The books, µs", ("", *names), rows))
    console.print(make_table("Python calls", ("", ""), [(name, str(n)) for name, n in result["python_calls"].items()]))


if __name__ == "__main__":
    typer.run(main)
