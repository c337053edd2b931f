"""What a caller waits for with mapping ahead and large frames, and without.

    python -m benchmarks.mapper [--device cuda] [--steps 2000] [--rounds 3] [--json]

Decoding: a step extends all sequences by a token and waits for a piece of work on the device that takes as long as a
step of a model; on rows that were mapped before, with a mapper, and once without either. Launching: small kernels, one
by one, alone and beside a mapper that never rests. Prompts: onto an empty pool, and after a trim, with large frames and
without. Ways that are compared take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter, sleep
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from vmmkv import FramePool, KVCache, KVLayout
from vmmkv.cli.output import Device, JsonOutput, errors
from vmmkv.driver.driver import Driver
from vmmkv.driver.table import MAP

from .environment import environment
from .geometry import memory_of, open_geometry, synchronize
from .output import Lines, Row, deliver

MAPPED, AHEAD, IN_NEED = "mapped before", "mapper", "no mapper"
FRAMES = LARGE, SINGLE = ("large frames", "single pages")
PROMPT_ROUNDS = 10
RESTLESS_SECONDS = 0.3
"""How long launches are counted beside a mapper that never rests: it has work for longer."""


class Bench(NamedTuple):
    """What all measurements share.

    Attributes:
        deadline: `perf_counter()` when no further round is begun.
        lookahead: tokens, of caches with a mapper.
        missed: what was not reached.
    """

    driver: Driver
    layout: KVLayout
    lookahead: int | None
    deadline: float
    missed: list[str]

    @property
    def on_gpu(self) -> bool:
        return self.driver.device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        synchronize(self.driver.device)

    def rounds(self, name: str, count: int) -> Iterator[int]:
        """Numbers of rounds, as long as there is time."""
        for number in range(count):
            if perf_counter() > self.deadline:
                self.missed.append(f"{name}, round {number + 1} of {count}")
                return
            began = perf_counter()
            yield number
            errors.print(f"{name}, round {number + 1} of {count}: {perf_counter() - began:.1f} s")


def main(
    device: Device = None,
    steps: Annotated[
        int | None, typer.Option(min=10, help="Of a round of decoding: 2,000 on a GPU, 100 without.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each comparison.")] = 3,
    sequences: Annotated[int, typer.Option(min=1, help="That grow together.")] = 256,
    step_ms: Annotated[float, typer.Option(help="How long the device works in a step.")] = 10.0,
    budget_seconds: Annotated[float, typer.Option(help="When to begin no further round, and say which.")] = 300.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure what mapping ahead, and large frames, save."""
    driver, layout = open_geometry(device)
    on_gpu = driver.device.type == "cuda"
    steps = steps or (2000 if on_gpu else 100)
    bench = Bench(driver, layout, None if on_gpu else 32, perf_counter() + budget_seconds, [])
    result: Row = {"environment": environment(driver.device), "sequences": sequences, "steps": steps}
    result |= {"step_ms": step_ms, "prompts": prompts(bench)}
    # Decoding takes the most time by far: it comes last.
    result["restless"] = restless(bench, rounds)
    result["decode"] = decoding(bench, sequences, steps, rounds, device_work(bench, step_ms))
    result["missed"] = bench.missed
    tables = {"Launching small kernels": launch_table, "Waiting for prompts": prompt_table}
    deliver(result, json_output, {f"{sequences} sequences, steps of {step_ms:g} ms": decode_table, **tables})


def device_work(bench: Bench, milliseconds: float) -> Callable[[], None]:
    """Launches a piece of work that takes the device so long; without one it takes no time."""
    if not bench.on_gpu:
        return lambda: None
    cycles = 100_000_000
    for _ in range(2):  # once until the clock is up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    wanted = int(cycles * milliseconds / start.elapsed_time(end))
    return lambda: torch.cuda._sleep(wanted)


def decoding(bench: Bench, sequences: int, steps: int, rounds: int, work: Callable[[], None]) -> list[Row]:
    """For each way the medians of its rounds, and seconds relative to rows mapped before in the same round. The way
    without a mapper has one round."""
    found: dict[str, list[Row]] = {MAPPED: [], AHEAD: [], IN_NEED: []}
    for number in bench.rounds("decoding", rounds):
        for way in (MAPPED, AHEAD)[:: -1 if number % 2 else 1]:
            found[way].append(decode(bench, way, sequences, steps, work))
    for _ in bench.rounds("decoding without a mapper", 1):
        found[IN_NEED].append(decode(bench, IN_NEED, sequences, steps, work))
    base = [row["seconds"] for row in found[MAPPED]]
    return [
        {"way": way}
        | {name: median(row[name] for row in rows) for name in rows[0]}
        | {"rounds": [row["seconds"] for row in rows]}
        | {"of_mapped_before": median(row["seconds"] / before for row, before in zip(rows, base))}
        for way, rows in found.items()
        if rows
    ]


@contextmanager
def growing(bench: Bench, way: str, sequences: int, steps: int) -> Iterator[tuple[KVCache, list[Any]]]:
    """A cache, and sequences of a few tokens with room for so many steps."""
    most = steps + 64
    budget = sequences * bench.layout.pages(most, bench.driver.page_size) * bench.driver.page_size
    lookahead = bench.lookahead if way == AHEAD else 0
    with KVCache(
        bench.layout, sequences, most, max_bytes=budget, lookahead=lookahead, **memory_of(bench.driver)
    ) as cache:
        lengths = np.random.default_rng(0).integers(1, 33, sequences).tolist()
        batch = [cache.sequence(length) for length in lengths]
        if way == MAPPED:
            cache.extend(batch, steps + 1)
            for sequence, length in zip(batch, lengths):
                sequence.truncate(length)
        bench.wait()
        yield cache, batch
        cache.check()


def decode(bench: Bench, way: str, sequences: int, steps: int, work: Callable[[], None]) -> Row:
    """Seconds of one round, the host's microseconds a step in `extend`, and the shares of extends of a sequence and
    of steps, in which this thread called the driver."""
    with growing(bench, way, sequences, steps) as (cache, batch):
        meter = cache.pool.meter
        extending, mapped, called = 0.0, 0, 0
        start = perf_counter()
        for _ in range(steps):
            maps, calls = meter.spent[MAP, 0], meter.spent[:, 0].sum()  # the second, of this thread
            began = perf_counter()
            cache.extend(batch, 1)
            extending += perf_counter() - began
            work()
            bench.wait()
            mapped, called = mapped + meter.spent[MAP, 0] - maps, called + bool(meter.spent[:, 0].sum() > calls)
        seconds = perf_counter() - start
        ahead = cache.stats().pages_mapped["ahead"]
    return {
        "seconds": seconds,
        "extend_us": extending / steps * 1e6,
        "extends_with_a_call": mapped / (steps * sequences),
        "steps_with_a_call": called / steps,
        "pages_ahead": ahead,
    }


def restless(bench: Bench, rounds: int) -> Row:
    """Launches a second, alone and beside a mapper that has more to map than it can, page by page."""
    layout, driver = bench.layout, bench.driver
    count, tokens = (32, 8192) if bench.on_gpu else (8, 256)
    pages = count * layout.pages(tokens, driver.page_size)
    alone, beside, rates = [], [], []
    options: Row = {**memory_of(driver), "lookahead": bench.lookahead, "large_frames": False}
    with KVCache(layout, count, tokens, max_bytes=pages * driver.page_size, **options) as cache:
        for number in bench.rounds("launching beside a mapper that never rests", rounds):
            for busy in (False, True) if number % 2 == 0 else (True, False):
                if not busy:
                    alone.append(launches_a_second(bench, lambda: False))
                    continue
                before, began = pages_ahead(cache), perf_counter()
                batch = [cache.sequence(expected_tokens=tokens) for _ in range(count)]
                end = before + pages // 20 * 19
                while pages_ahead(cache) == before and perf_counter() < bench.deadline:  # until it is at work
                    sleep(1e-4)
                beside.append(launches_a_second(bench, lambda end=end: pages_ahead(cache) >= end))
                rates.append((pages_ahead(cache) - before) / (perf_counter() - began))
                cache.free(batch)
                bench.wait()
                cache.trim()
    if not alone:
        return {}
    speeds = {"alone_per_s": spread(alone), "beside_per_s": spread(beside), "pages_per_s": spread(rates)}
    return speeds | {"of_alone": median(one / other for one, other in zip(beside, alone))}


def pages_ahead(cache: KVCache) -> int:
    """Pages that the mapper has mapped so far."""
    return cache.pool.word("mapped_ahead")


def launches_a_second(bench: Bench, over: Callable[[], bool]) -> float:
    """Launches a second of small kernels, one by one, for a while or until it is over."""
    x = torch.zeros(16, device=bench.driver.device)
    bench.wait()
    count, start = 0, perf_counter()
    while not count or (perf_counter() - start < RESTLESS_SECONDS and not over()):
        for _ in range(100):
            x.add_(1)
        count += 100
    seconds = perf_counter() - start
    bench.wait()
    return count / seconds


def prompts(bench: Bench) -> list[Row]:
    """Milliseconds that a thread waits for a prompt on an empty pool, and for 60 sequences after a trim."""
    tokens = 8192 if bench.on_gpu else 512
    cases = {
        f"a prompt of {tokens} tokens, empty pool": [tokens],
        f"60 sequences of {tokens // 8} tokens, after trim()": [tokens // 8] * 60,
    }
    found: dict[tuple[str, str], list[float]] = {(what, frames): [] for what in cases for frames in FRAMES}
    pages = sum(bench.layout.pages(length, bench.driver.page_size) for length in max(cases.values(), key=sum))
    with ExitStack() as stack:
        caches = {}
        for frames in FRAMES:
            pool = FramePool(2 * pages * bench.driver.page_size, **memory_of(bench.driver))
            stack.callback(pool.close)
            options: Row = {"pool": pool, "lookahead": bench.lookahead, "large_frames": frames == LARGE}
            caches[frames] = stack.enter_context(KVCache(bench.layout, 64, tokens, **options))
        for number in bench.rounds("prompts", PROMPT_ROUNDS):
            for what, lengths in cases.items():
                for frames in FRAMES[:: -1 if number % 2 else 1]:
                    found[what, frames].append(start_after_trim(bench, caches[frames], lengths))
    return [
        {"what": what, "frames": frames, "sequences": len(cases[what]), "tokens": sum(cases[what])} | spread(values)
        for (what, frames), values in found.items()
        if values
    ]


def start_after_trim(bench: Bench, cache: KVCache, lengths: list[int]) -> float:
    """Milliseconds until sequences of these lengths have their memory, all of which has gone before."""
    cache.trim()
    assert not cache.pool.stats().physical_bytes
    began = perf_counter()
    batch = [cache.sequence(length) for length in lengths]
    milliseconds = (perf_counter() - began) * 1e3
    cache.free(batch)
    bench.wait()
    return milliseconds


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def decode_table(result: Row) -> Lines:
    """A line for each way to have pages."""
    columns = "", "s a round", "of mapped before", "extend, µs a step", "extends with a driver call", "steps with one"
    return columns, [
        (
            row["way"],
            f"{min(row['rounds']):.3f} to {max(row['rounds']):.3f}",
            f"{row['of_mapped_before']:.4f}",
            f"{row['extend_us']:.0f}",
            f"{row['extends_with_a_call']:.3%}",
            f"{row['steps_with_a_call']:.2%}",
        )
        for row in result["decode"]
    ]


def launch_table(result: Row) -> Lines:
    """Launches alone, and beside a mapper that never rests."""
    lines = []
    if speeds := result["restless"]:
        for name, key, of_alone in (
            ("without a mapper", "alone_per_s", 1.0),
            ("beside a mapper that never rests", "beside_per_s", 1 / speeds["of_alone"]),
        ):
            low, middle, high = (1e6 / speeds[key][name] for name in ("max", "median", "min"))
            lines.append((name, f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{of_alone:.3f}"))
    return ("", "µs a launch", "of that without a mapper at work"), lines


def prompt_table(result: Row) -> Lines:
    """A line for each case, with large frames beside single pages."""
    cells: dict[str, dict[str, str]] = {}
    for row in result["prompts"]:
        cell = f"{row['median']:.2f} ({row['min']:.2f} to {row['max']:.2f})"
        cells.setdefault(row["what"], {})[row["frames"]] = cell
    return ("waiting, ms", *FRAMES), [(what, *(each[frames] for frames in FRAMES)) for what, each in cells.items()]


if __name__ == "__main__":
    typer.run(main)
