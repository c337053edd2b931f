"""Two models on one card: one pool for both, against a fixed half each.

    python -m benchmarks.pools [--device cuda] [--model NAME]... [--memory 8GiB] [--json]

Bursts come in turns: all requests of one model at once, and those of the other when the burst has been served, as where
one model reads what the other wrote. On one pool each burst finds all memory, in halves never more than its own. That
is worth as much as a burst needs more than a half; `crowded` is the share of the time in which requests wait for
memory. And how long memory takes to move: one cache fills the pool and is left, and the next prompts come to the other.

The models have random weights; the same name twice is two caches over the same weights. Without a GPU they are tiny,
and speeds say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer

from vmmkv import FramePool, KVCache, KVLayout
from vmmkv.budget import parse_bytes
from vmmkv.cli.options import Device, JsonOutput, TraceFile
from vmmkv.cli.output import errors, format_bytes
from vmmkv.driver.driver import open_driver

from .engine.engine import Engine
from .engine.model import MODELS, random_model
from .engine.rows import memory_for
from .environment import environment
from .geometry import calls_of, synchronize
from .output import Lines, Row, deliver
from .serve import options
from .serve.measure import Settings, figures, free_memory, make_engine
from .serve.workloads import Limits, Workload, make_workload

MODES = SHARED, HALVES = ("one pool", "a fixed half each")
KEPT = "seconds", "output_tokens_per_s", "peak_concurrency", "preemptions", "ttft_s", "peak_bytes"
"""Figures of a burst."""
MOVED = 10 << 30
"""Bytes that the time of a move is told for."""
SIZES = [60, 150, 240]
"""Requests of a burst."""
IN_TIME = 5.0
"""Seconds in which a first token is in time."""


class Usual(NamedTuple):
    """The defaults of a kind of machine."""

    model: str
    memory: str
    max_seq_len: int
    prompt_tokens: int
    shorten: int


GPU = Usual("llama-3.1-8b", "4GiB", 8192, 8192, shorten=1)
HOST = Usual("tiny", "512KiB", 256, 128, shorten=16)


# ------------------------------------------------------------------ bursts


def pools_of(mode: str, layouts: list[KVLayout], memory: int, device: torch.device) -> list[FramePool]:
    """For each model the pool that it lies on; pages are as large in all of them."""
    if mode == SHARED:
        return [FramePool(memory, **memory_for(layouts[0], device))] * len(layouts)
    return [FramePool(memory // len(layouts), **memory_for(layouts[0], device)) for _ in layouts]


def serve(engines: list[Engine], settings: list[Settings], works: list[Workload], bursts: int) -> Row:
    """Serves `bursts` bursts of each model, one after another; returns what both served together. No memory is taken
    when it begins, nor when it has ended."""
    rows = []
    for number in range(bursts * len(engines)):
        index = number % len(engines)
        rows.append({"model": index} | serve_burst(engines[index], works[index], settings[index]))
    for engine in engines:
        engine.kv.give_back()
    free_memory()
    tokens, in_time, seconds = (sum(row[name] for row in rows) for name in ("tokens", "tokens_in_time", "seconds"))
    speeds = {"tokens_per_s": tokens / seconds, "tokens_in_time_per_s": in_time / seconds}
    return {"tokens": tokens, "seconds": seconds} | speeds | {"bursts": rows}


def serve_burst(engine: Engine, work: Workload, settings: Settings) -> Row:
    """All requests of a workload at once."""
    prompts = work.prompts(settings.model.config.vocab_size, settings.seed)
    before = engine.kv.work()
    run = engine.run(prompts, [request.output for request in work.requests], deadline=settings.deadline)
    row = figures(run) if run.running else dict.fromkeys(KEPT)
    driver = engine.kv.work()["driver"] - before["driver"]
    return {name: row[name] for name in KEPT} | {
        "seconds": run.seconds,
        "tokens": run.generated,
        "tokens_in_time": int(run.outputs[run.first <= IN_TIME].sum()),
        "crowded": sum(took for took, waiting in zip(run.step_seconds, run.waiting) if waiting) / run.seconds,
        "unfinished": len(run.outputs) - run.finished,
        "driver_ms": driver * 1e3,
    }


# ------------------------------------------------------------------ moves


def move(
    layouts: list[KVLayout], memory: int, prompt: int, device: torch.device, lookahead: int | None, large_frames: bool
) -> list[Row]:
    """Fills the pool with prompts of one cache, and, when they are gone, of the other; three times in turns."""
    (pool, *_) = pools_of(SHARED, layouts, memory, device)
    counts = [
        max(pool.limit_pages * pool.page_size // (layout.pages(prompt, pool.page_size) * pool.page_size), 1)
        for layout in layouts
    ]
    rows = []
    with ExitStack() as stack:
        caches = [
            stack.enter_context(
                KVCache(layout, count, prompt, pool=pool, lookahead=lookahead, large_frames=large_frames)
            )
            for layout, count in zip(layouts, counts)
        ]
        for number in range(3 * len(caches)):
            index = number % len(caches)
            row = {"to": index, "filled": number > 0, "large_frames": large_frames}
            rows.append(row | fill(caches[index], counts[index], prompt, device))
    return rows


def fill(cache: KVCache, count: int, prompt: int, device: torch.device) -> Row:
    """Starts `count` sequences of a prompt each and frees them; returns what it took until all had their memory."""
    calls = sum(calls_of(cache).values())
    slowest, begin = 0.0, perf_counter()
    sequences = []
    for _ in range(count):
        start = perf_counter()
        sequences.append(cache.sequence(prompt))
        slowest = max(slowest, perf_counter() - start)
    seconds = perf_counter() - begin
    nbytes = cache.stats().pages["used"] * cache.page_size
    cache.free(sequences)
    synchronize(device)
    return {
        "bytes": nbytes,
        "prompts": count,
        "ms": seconds * 1e3,
        "slowest_prompt_ms": slowest * 1e3,
        "ms_per_10_gib": seconds * 1e3 * MOVED / nbytes,
        "driver_calls": sum(calls_of(cache).values()) - calls,
    }


# ------------------------------------------------------------------ the whole


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; two.")] = None,
    memory: Annotated[str | None, typer.Option(help="For K and V of both.")] = None,
    trace: TraceFile = None,
    requests: Annotated[
        list[int] | None, typer.Option(min=1, help=f"Of a burst, in turn; {', '.join(map(str, SIZES))} on a GPU.")
    ] = None,
    bursts: Annotated[int, typer.Option(min=1, help="Of each model.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of each mode, in turns; the median is reported.")] = 3,
    max_sequences: options.MaxSequences = 256,
    chunk: options.Chunk = 2048,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of the prompts for which memory moves.")] = None,
    move_memory: Annotated[str | None, typer.Option(help="That moves; as much as --memory by default.")] = None,
    lookahead: options.Lookahead = None,
    device: Device = None,
    seed: options.Seed = 0,
    budget_seconds: options.BudgetSeconds = 480.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure two models on one pool."""
    deadline = perf_counter() + budget_seconds
    driver = open_driver(device)
    usual = GPU if driver.device.type == "cuda" else HOST
    names = model or [usual.model] * 2
    if len(names) != 2 or not MODELS.keys() >= set(names):
        raise typer.BadParameter(f"--model {' '.join(names)}: give two of {', '.join(MODELS)}")
    dtype = torch.bfloat16 if usual is GPU else torch.float32
    layouts = [MODELS[name].kv_layout(dtype) for name in names]
    free = driver.memory_info()[0]
    nbytes, moved = parse_bytes(memory or usual.memory, free), parse_bytes(move_memory or memory or usual.memory, free)
    sizes = sorted(set(requests or (SIZES if usual is GPU else SIZES[:1])), reverse=True)
    works = {size: [workload(trace, layout, nbytes // 2, size, usual, seed) for layout in layouts] for size in sizes}
    longest = max(work.max_seq_len for work in works[sizes[0]])
    models = {name: random_model(MODELS[name], longest, driver.device, dtype) for name in dict.fromkeys(names)}
    settings = [Settings(models[name], nbytes, max_sequences, chunk, deadline, seed, lookahead) for name in names]
    prompt = prompt_tokens or usual.prompt_tokens
    result = begin_result(names, settings[0], works, prompt)
    for large in (True, False):
        result["moves"] += move(layouts, moved, prompt, driver.device, lookahead, large)
    measure(result, settings, works, layouts, bursts, rounds)
    tables = {"Memory that moves": move_table}
    deliver(result, json_output, {f"{' and '.join(names)}, bursts in turns": table, **tables})


def begin_result(names: list[str], settings: Settings, works: dict[int, list[Workload]], prompt: int) -> Row:
    """What was asked for; what is measured is added."""
    return {
        "environment": environment(settings.model.device),
        "models": names,
        "dtype": str(settings.model.dtype).removeprefix("torch."),
        "memory_bytes": settings.max_bytes,
        "requests": list(works),
        "in_time_s": IN_TIME,
        "trace": next(iter(works.values()))[0].name,
        "lookahead": settings.lookahead,
        "prompt_tokens": prompt,
        "moves": [],
        "runs": [],
        "missed": [],
    }


def workload(trace: Path | None, layout: KVLayout, half: int, requests: int, usual: Usual, seed: int) -> Workload:
    """Requests that each have room in a half."""
    longest = int(0.9 * half) // layout.token_bytes
    return make_workload(trace, Limits(requests, 10**9, longest, usual.max_seq_len, usual.shorten), seed)


def measure(
    result: Row,
    settings: list[Settings],
    works: dict[int, list[Workload]],
    layouts: list[KVLayout],
    bursts: int,
    rounds: int,
) -> None:
    """Adds to a result, for each size of bursts and mode, the run with the median throughput, and what was not reached.

    Args:
        works: for each size that of each model, the largest first.
    """
    found: dict[tuple[int, str], list[Row]] = {(size, mode): [] for size in sorted(works) for mode in MODES}
    largest = next(iter(works.values()))
    engines: dict[str, list[Engine]] = {}
    with ExitStack() as stack:
        for number, size in product(range(rounds), works):
            for mode in MODES[:: -1 if number % 2 else 1]:
                name = f"bursts of {size}, {mode}, round {number + 1}"
                if perf_counter() < settings[0].deadline:
                    if mode not in engines:
                        pools = pools_of(mode, layouts, settings[0].max_bytes, settings[0].model.device)
                        each = [one._replace(pool=pool) for one, pool in zip(settings, pools)]
                        made = [make_engine(one, work, "vmm") for one, work in zip(each, largest)]
                        engines[mode] = [stack.enter_context(closing(engine)) for engine in made]
                    run = serve(engines[mode], settings, works[size], bursts)
                    if not any(burst["unfinished"] for burst in run["bursts"]):
                        speed = f"{run['tokens_per_s']:,.0f} tokens/s"
                        errors.print(f"{name}: {run['seconds']:.1f} s, {speed}", highlight=False)
                        found[size, mode].append(run)
                        continue
                result["missed"].append(name)
    for (size, mode), runs in found.items():
        ordered = sorted(runs, key=lambda run: run["tokens_per_s"])
        if ordered:
            speeds = [run["tokens_per_s"] for run in runs]
            chosen = ordered[(len(ordered) - 1) // 2]
            result["runs"].append({"requests": size, "mode": mode} | chosen | {"rounds": speeds})


def table(result: Row) -> Lines:
    """A column for each run, a line for each figure."""

    def peak(run: Row, key: str) -> float:
        return max(burst[key] for burst in run["bursts"])

    lines: dict[str, Callable[[Row], str]] = {
        "output tokens/s, both models": lambda run: f"{run['tokens_per_s']:,.0f}",
        "all rounds": lambda run: f"{min(run['rounds']):,.0f} to {max(run['rounds']):,.0f}",
        "of requests with a first token in time": lambda run: f"{run['tokens_in_time_per_s']:,.0f}",
        "of the time requests wait for memory": lambda run: f"{median(b['crowded'] for b in run['bursts']):.0%}",
        "requests at a time, peak": lambda run: f"{peak(run, 'peak_concurrency'):,.0f}",
        "time to first token behind the queue, s, p50, slowest burst": lambda run: (
            f"{max(b['ttft_s']['p50'] for b in run['bursts']):.2f}"
        ),
        "memory of one model, peak": lambda run: format_bytes(peak(run, "peak_bytes")),
        "driver calls, ms a burst": lambda run: f"{median(b['driver_ms'] for b in run['bursts']):,.0f}",
        "preemptions": lambda run: f"{sum(b['preemptions'] for b in run['bursts']):,}",
    }
    columns = "", *(f"{run['mode']}, bursts of {run['requests']}" for run in result["runs"])
    return columns, [(what, *map(cell, result["runs"])) for what, cell in lines.items()]


def move_table(result: Row) -> Lines:
    """A line for each time that the pool was filled."""
    columns = "prompts come to", "in", "memory", "ms", "ms per 10 GiB", "slowest prompt, ms", "driver calls"
    return columns, [
        (
            f"{result['models'][row['to']]} ({'from the other' if row['filled'] else 'from an empty pool'})",
            "large frames" if row["large_frames"] else "single pages",
            format_bytes(row["bytes"]),
            f"{row['ms']:,.1f}",
            f"{row['ms_per_10_gib']:,.0f}",
            f"{row['slowest_prompt_ms']:,.2f}",
            f"{row['driver_calls']:,}",
        )
        for row in result["moves"]
    ]


if __name__ == "__main__":
    typer.run(main)
