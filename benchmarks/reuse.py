"""How physical pages are reused: how long each serves a sequence, how often, and how many driver calls that takes.

    python -m benchmarks.reuse [--device cuda] [--trace FILE] [--requests N] [--json] [--plot FILE]

Replays requests with continuous batching on a `KVCache`, once with fewer pages than its rows would fill and once with
enough. Nothing is written and no model runs: the time is the allocator's. On a GPU with Llama-3.1-8B's geometry, on the
host at 1/32 of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.progress import Progress

from benchmarks.environment import environment, print_result
from vmmkv import VACANT_PAGE, KVCache
from vmmkv.cli.batching import Batching
from vmmkv.cli.demo import STATIC_TOKENS, make_cache
from vmmkv.cli.options import Device, JsonOutput, LengthsSeed, TraceFile
from vmmkv.cli.output import check_plot, console, errors, make_table
from vmmkv.driver.driver import open_driver
from vmmkv.workload import Request, conversations, name_of, read_trace

BUDGETS = {"tight": 1024, "roomy": 2048}
"""Tokens of the budget for each row. Requests are some 1,300 tokens long."""
OBSERVE_STEPS = 4
CURVE_POINTS = 100
PERCENTILES = (10, 50, 90, 99)


class Tenancies:
    """How long pages serve one sequence, and how long they then wait for the next, from successive page maps.

    Attributes:
        served: per tenancy that has ended, its length in steps and in seconds.
        waited: likewise from the end of a tenancy to the next on the same page.
    """

    def __init__(self) -> None:
        self.served: list[npt.NDArray[np.float64]] = []
        self.waited: list[npt.NDArray[np.float64]] = []
        self._owners = np.empty(0, np.int64)
        self._since = np.empty((0, 2))

    def observe(self, page_map: npt.NDArray[np.int64], step: int, seconds: float) -> None:
        """Takes down who has which page now."""
        now = np.array([step, seconds])
        new = len(page_map) - len(self._owners)
        old = np.concatenate([self._owners, np.full(new, VACANT_PAGE)])
        self._since = np.concatenate([self._since, np.tile(now, (new, 1))])
        changed = old != page_map
        left, taken = changed & (old >= 0), changed & (page_map >= 0)
        self.served.append(now - self._since[left])
        # From one sequence to the next between two observations: it did not wait.
        self.waited.append(np.where(left[taken, None], 0, now - self._since[taken])[old[taken] != VACANT_PAGE])
        # A page that changes from surplus to free still waits since its sequence left.
        self._since[left | taken | (old == VACANT_PAGE)] = now
        self._owners = page_map


def replay(name: str, cache: KVCache, requests: list[Request], result: dict[str, Any]) -> Iterator[int]:
    """Runs to the end and puts the figures into `result`; yields how many requests have finished."""
    batching = Batching(cache, requests, cache.max_sequences)
    tenancies = Tenancies()
    history = []
    finished, watching, start = 0, 0.0, perf_counter()
    while batching.waiting or batching.running:
        batching.admit()
        batching.decode()
        if batching.steps % OBSERVE_STEPS == 0 or not history:
            seen = perf_counter()
            tenancies.observe(cache.page_map(), batching.steps, seen - start - watching)
            history.append((batching.steps, finished, *counts(cache, batching, len(requests))))
            watching += perf_counter() - seen
        finished += batching.retire()
        yield finished
    seconds = perf_counter() - start - watching
    stats = cache.stats()
    started, _, _, _, calls = counts(cache, batching, len(requests))
    points = np.array(history)[np.linspace(0, len(history) - 1, min(len(history), CURVE_POINTS)).astype(int)]
    names = ("steps", "finished", "started", "adoptions", "pages_created", "page_uses", "driver_calls")
    result |= {
        "case": name,
        "sequences": cache.max_sequences,
        "budget_bytes": stats.budget_bytes,
        "page_size": cache.page_size,
        "requests": len(requests),
        "started": started,
        "preemptions": batching.preemptions,
        "steps": batching.steps,
        "seconds": seconds,
        "pages_created": stats.pages_created,
        "page_uses": stats.page_uses,
        "reuse_factor": stats.reuse_factor,
        "adoption_rate": stats.adoptions / started,
        "maps_a_use": stats.driver_calls["map"].count / stats.page_uses,
        "driver_calls": {call: of.count for call, of in stats.driver_calls.items()},
        "driver_calls_a_request": calls / len(requests),
        "driver_ms_a_request": stats.driver_seconds * 1e3 / len(requests),
        "served": distribution(tenancies.served),
        "waited": distribution(tenancies.waited),
        "curve": dict(zip(names, points.T.tolist())),
    }


def counts(cache: KVCache, batching: Batching[Any], requests: int) -> tuple[int, int, int, int, int]:
    """Since the beginning: sequences started, adoptions, pages created, page uses, driver calls."""
    stats = cache.stats()
    started = requests - len(batching.waiting) + batching.preemptions
    calls = sum(call.count for call in stats.driver_calls.values())
    return started, stats.adoptions, stats.pages_created, stats.page_uses, calls


def distribution(parts: list[npt.NDArray[np.float64]]) -> dict[str, Any]:
    """Mean and percentiles of steps and of seconds."""
    times = np.concatenate(parts)
    if not len(times):
        return {"count": 0}
    return {"count": len(times)} | {
        unit: {"mean": float(of.mean())} | dict(zip(map("p{}".format, PERCENTILES), np.percentile(of, PERCENTILES)))
        for unit, of in zip(("steps", "seconds"), times.T)
    }


def main(
    device: Device = None,
    trace: TraceFile = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests to replay.")] = 2000,
    sequences: Annotated[int, typer.Option(min=1, help="How many may run at a time.")] = 64,
    seed: LengthsSeed = 0,
    json_output: JsonOutput = False,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a picture of reuse over time.")] = None,
) -> None:
    """Measure how pages are reused."""
    if plot_file:
        check_plot(plot_file)
    work = read_trace(trace)[:requests] if trace else conversations(requests, np.random.default_rng(seed))
    longest = max(request.total for request in work)
    result: dict[str, Any] = {
        "environment": environment(open_driver(device).device),
        "trace": name_of(trace),
        "cases": [],
    }
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("Replaying", total=len(work) * len(BUDGETS))
        for index, (name, tokens) in enumerate(BUDGETS.items()):
            result["cases"].append({})
            max_tokens = max(sequences * tokens, longest)
            with make_cache(device, sequences, max(longest, STATIC_TOKENS), max_tokens) as cache:
                for finished in replay(name, cache, work, result["cases"][-1]):
                    progress.update(task, completed=index * len(work) + finished)
    if plot_file:
        plot(result, plot_file)
    if json_output:
        print_result(result)
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Prints a column per case."""
    names = [case["case"] for case in result["cases"]]
    rows = [(what, *cells) for what, *cells in table(result)]
    title = f"Pages of {result['environment']['device']}, requests: {result['trace']}"
    console.print(make_table(title, ("what", *names), rows))


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """What is told of each case: a name, and a cell per case."""
    lines: dict[str, Any] = {
        "budget, pages": lambda case: f"{case['budget_bytes'] // case['page_size']:,}",
        "requests, decode steps": lambda case: f"{case['requests']:,}, {case['steps']:,}",
        "sequences preempted": lambda case: f"{case['preemptions']:,}",
        "pages created": lambda case: f"{case['pages_created']:,}",
        "uses of a page (reuse factor)": lambda case: f"{case['reuse_factor']:.1f}",
        "sequences that adopted a mapped row": lambda case: f"{case['adoption_rate']:.1%}",
        "pages mapped for each use": lambda case: f"{case['maps_a_use']:.2f}",
        "driver calls a request": lambda case: f"{case['driver_calls_a_request']:,.0f}",
        "time in them": lambda case: f"{case['driver_ms_a_request']:.2f} ms a request",
        "a page serves a sequence, median": lambda case: duration(case["served"], "p50"),
        "of ten, one serves longer than": lambda case: duration(case["served"], "p90"),
        "and waits for the next, median": lambda case: duration(case["waited"], "p50"),
        "of ten, one waits longer than": lambda case: duration(case["waited"], "p90"),
    }
    return [(what, *map(cell, result["cases"])) for what, cell in lines.items()]


def duration(times: dict[str, Any], quantile: str) -> str:
    if not times["count"]:
        return "-"
    return f"{times['steps'][quantile]:,.0f} steps, {times['seconds'][quantile] * 1e3:,.0f} ms"


def plot(result: dict[str, Any], path: Path) -> None:
    """Over decode steps, of each part of the time: uses a page, share of adoptions, driver calls a request."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for case in result["cases"]:
        history = {name: np.array(values, np.float64) for name, values in case["curve"].items()}
        steps = history["steps"]
        axes[0].plot(steps, history["page_uses"] / history["pages_created"], label=case["case"])
        for axis, name, base in ((axes[1], "adoptions", "started"), (axes[2], "driver_calls", "finished")):
            change, of = np.diff(history[name]), np.diff(history[base])
            axis.plot(steps[1:][of > 0], change[of > 0] / of[of > 0], label=case["case"])
    axes[0].set_title("uses of a page so far")
    axes[1].set_title("sequences that adopted a mapped row")
    axes[2].set_title("driver calls a request")
    for axis in axes:
        axis.set(xlabel="decode step", ylim=(0, None))
        axis.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
