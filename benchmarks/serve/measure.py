"""Requests served by each backend, at saturation and at other rates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.engine.backend import Work
from benchmarks.engine.engine import Engine
from benchmarks.engine.model import Model
from benchmarks.engine.run import Run
from vmmkv import FramePool

from .workloads import Workload, arrivals

Row = dict[str, Any]
Progress = Callable[[str, int, int], object]
"""Told what runs, how many requests have finished, and of how many."""

REFERENCE = "paged"
"""Whose throughput at saturation the other arrival rates are shares of; the first backend where it is not measured."""

WARM_UPS = 16
"""Sizes of prompts that an engine serves before it is measured, up to a whole chunk."""


class Settings(NamedTuple):
    """What all measurements share."""

    model: Model
    max_bytes: int
    max_sequences: int
    chunk: int
    deadline: float
    seed: int
    lookahead: int | None = None
    pool: FramePool | None = None

    def options(self, backend: str) -> dict[str, Any]:
        """Of an engine with this backend."""
        return {"lookahead": self.lookahead, "pool": self.pool} if backend == "vmm" else {}


def serve(
    result: dict[str, Any],
    settings: Settings,
    workload: Workload,
    backends: list[str],
    rates: list[float],
    rounds: int,
    progress: Progress,
) -> None:
    """Adds to a result a row for each backend at saturation and at each rate, and what the deadline left out.

    Backends take turns, in one order and then in the other: at saturation `rounds` times, at other rates once. A row is
    of the run with the median throughput.

    Args:
        backends: names of backends, as `vmm`, or with a prefill kernel of their own, as `vmm+fa3`.
        rates: shares of the throughput of `REFERENCE` at saturation.
    """
    order = sorted(backends, key=lambda name: name != REFERENCE)
    plan = [
        (number, backend, rate)
        for number in range(rounds)
        for backend in (order[::-1] if number % 2 else order)
        for rate in ((None,) if number else (None, *rates))
    ]
    found: dict[tuple[str, str], list[Row]] = {}
    reference: Run | None = None
    try:
        for number, backend, rate in plan:
            load = "saturation" if rate is None else f"{rate * 100:g}% load"
            name = f"{workload.name}, {load}, {backend}" + (f", round {number + 1}" if number else "")
            if perf_counter() > settings.deadline:
                result["missed"].append(name)
                continue
            run, row = run_load(settings, workload, backend, rate, reference, partial(progress, name))
            free_memory()
            if run.finished < len(run.outputs):
                result["missed"].append(f"{name}: {len(run.outputs) - run.finished} of {len(run.outputs)} requests")
            if run.running:
                reference = reference or run
                about = {"trace": workload.name, "load": load, "rate": rate, "backend": backend}
                same = {"same_tokens": same_tokens(run, reference) if rate is None else None}
                found.setdefault((load, backend), []).append(about | row | same)
    finally:  # what was measured is not lost to what fails behind it
        result["serving"] += map(middle, found.values())


def middle(rows: list[Row]) -> Row:
    """The run with the median throughput, of those that came to their end if one did; and the throughput of each."""
    ended = [row for row in rows if row["finished"] == row["requests"]] or rows
    ordered = sorted(ended, key=lambda row: float(row["output_tokens_per_s"]))
    rounds = [row["output_tokens_per_s"] for row in ended]
    return ordered[(len(ordered) - 1) // 2] | {"rounds": rounds}


def make_engine(settings: Settings, workload: Workload, backend: str) -> Engine:
    """An engine that has served prompts of many sizes already, and holds as little memory as it can.

    For each size libraries choose among kernels, which are loaded when they first run: the first backend would wait.
    """
    max_tokens = max(workload.tokens, 2 * settings.chunk)
    name, _, prefill = backend.partition("+")
    engine = Engine(
        settings.model,
        name,
        settings.max_bytes,
        settings.max_sequences,
        workload.max_seq_len,
        max_tokens,
        chunk=settings.chunk,
        prefill=prefill or None,
        options=settings.options(name),
    )
    longest = min(settings.chunk, workload.max_seq_len - 2)
    for prompt in range(longest, 0, -max(longest // WARM_UPS, 1)):
        engine.run([torch.zeros(prompt, dtype=torch.int64)], [2])
    engine.kv.give_back()
    return engine


def run_load(
    settings: Settings,
    workload: Workload,
    backend: str,
    rate: float | None,
    reference: Run | None,
    progress: Callable[[int, int], object],
) -> tuple[Run, Row]:
    """The workload at once, or a share of it at this share of the reference's rate, which takes about as long."""
    requests = workload.first(round((rate or 1) * len(workload.requests)))
    prompts = workload.prompts(settings.model.config.vocab_size, settings.seed)[: len(requests)]
    times = None
    if rate and reference:
        times = arrivals(requests, rate * reference.finished / reference.seconds, settings.seed).tolist()
    with closing(make_engine(settings, workload, backend)) as engine:
        before = engine.kv.work()
        run = engine.run(
            prompts,
            [request.output for request in requests],
            times,
            deadline=settings.deadline,
            progress=lambda finished: progress(finished, len(requests)),
        )
        row = figures(run) if run.running else {}
        row |= work_figures(engine.kv.work() - before, max(len(run.running), 1))
        engine.kv.give_back()
        row["idle_bytes"] = engine.kv.physical_bytes()
    return run, row


def figures(run: Run) -> Row:
    """What is reported of a run that had steps. Times are in seconds, host times in microseconds a step.

    Mean concurrency is over time, `crowded_concurrency` over the steps in which a request waited for room.
    """
    done = np.isfinite(run.finish)
    several = done & (run.outputs > 1)
    first = (run.first - run.arrivals)[done]
    each = ((run.finish - run.first)[several]) / (run.outputs - 1)[several]
    running, waiting = np.array(run.running), np.array(run.waiting)
    took = np.array(run.step_seconds)
    crowded = waiting > 0
    steps = len(running)
    seen, taken = (np.array([sample[index] for sample in run.samples]) for index in (0, 1))
    return {
        "requests": len(run.outputs),
        "finished": run.finished,
        "seconds": run.seconds,
        "requests_per_s": run.finished / run.seconds,
        "output_tokens_per_s": run.generated / run.seconds,
        "tokens_per_s": (run.generated + int(run.prompts[np.isfinite(run.first)].sum())) / run.seconds,
        "ttft_s": quantiles(first),
        "tpot_s": quantiles(each),
        "steps": steps,
        "peak_concurrency": int(running.max()),
        "mean_concurrency": float(np.average(running, weights=took)),
        "crowded_concurrency": float(running[crowded].mean()) if crowded.any() else None,
        "preemptions": run.preemptions,
        "manager_us": sum(run.manager_ns) / 1e3 / steps,
        "manager_step_us": quantiles(np.array(run.manager_ns) / 1e3),
        "host_us": run.host_ns / 1e3 / steps,
        "peak_bytes": int(taken.max()),
        "mean_bytes": float(np.average((taken[1:] + taken[:-1]) / 2, weights=np.diff(seen))),
        "samples": [[round(seconds, 3), nbytes, count] for seconds, nbytes, count in run.samples],
    }


def work_figures(work: Work, steps: int) -> Row:
    """What is reported of the driver's work in a run. Times are in microseconds a step."""
    return {
        "driver_us": work.driver_seconds * 1e6 / steps,
        "mapper_us": work.mapper_seconds * 1e6 / steps,
        "mapper_calls": dict(work.mapper_calls),
        "pages_mapped": dict(work.pages_mapped),
    }


def quantiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float | None]:
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else None for p in (50, 99)}


def same_tokens(run: Run, other: Run) -> float | None:
    """Of the requests that finished in both runs, the share with the same tokens. Another schedule rounds otherwise."""
    both = np.flatnonzero(np.isfinite(run.finish) & np.isfinite(other.finish))
    return float(np.mean([run.output(i) == other.output(i) for i in both])) if len(both) else None


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
