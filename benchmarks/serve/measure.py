"""Requests served by each backend, all of them waiting from the start."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import reduce
from itertools import product
from operator import getitem
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.engine.engine import Engine
from benchmarks.engine.model import Model
from benchmarks.engine.run import Run
from benchmarks.geometry import free_memory
from benchmarks.output import Row
from vmmkv import FramePool
from vmmkv.cli.output import errors

from .workloads import Workload

Values = np.ndarray[Any, np.dtype[np.float64]]

SATURATION, WAITING = "saturation", "saturation, each step waited for"
"""Loads. With the other, the engine waits for the tokens of each step, see `Engine.run`."""
REUSE = "reuse"
"""Behind the `+` of a backend that reuses prefixes."""
BACKENDS = "vmm", "paged", f"vmm+{REUSE}", f"paged+{REUSE}"
P99_VALUES = 368
"""With fewer values all may lie below the percentile, with a chance of more than 2.5 %."""
SEED = 0
"""Of prompts and random requests."""
WARM_UPS = 16
"""Sizes of prompts that an engine serves before it is measured, up to a whole chunk."""


class Settings(NamedTuple):
    """Arguments that all measurements share."""

    model: Model
    max_bytes: int
    deadline: float
    max_sequences: int = 256
    chunk: int = 2048
    pool: FramePool | None = None
    late: bool = False


def serve(
    result: Row, settings: Settings, workload: Workload, backends: list[str], loads: list[str], rounds: int
) -> None:
    """Add a row for each backend and load to a result, and what the deadline left out.

    Backends take turns, in one order and then in the other. A row is of the run with the median throughput, and holds
    those of all rounds.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    engines: dict[str, Engine] = {}
    first: Run | None = None
    with ExitStack() as stack:
        stack.callback(lambda: result["serving"].extend(map(middle, found.values())))  # also if something fails
        for number, load in product(range(rounds), loads):
            for backend in backends[:: -1 if number % 2 else 1]:
                name = f"{workload.name}, {load}, {backend}" + (f", round {number + 1}" if number else "")
                if perf_counter() > settings.deadline:
                    result["missed"].append(name)
                    continue
                if backend not in engines:
                    engines[backend] = stack.enter_context(closing(make_engine(settings, workload, backend)))
                run, row = run_load(settings, workload, engines[backend], load)
                free_memory()
                if run.finished < len(run.outputs):
                    result["missed"].append(f"{name}: {len(run.outputs) - run.finished} of {len(run.outputs)} requests")
                if run.running:
                    speed = f"{row['output_tokens_per_s']:,.0f} tokens/s"
                    errors.print(f"{name}: {run.seconds:.1f} s, {speed}", highlight=False)
                    first = first or run
                    about = {"trace": workload.name, "load": load, "backend": backend}
                    found.setdefault((load, backend), []).append(about | row | {"same_tokens": same_tokens(run, first)})


EACH_ROUND = {
    "output_tokens_per_s": ("output_tokens_per_s",),
    "first_token_s": ("ttft_s", "p50"),
    "crowded_concurrency": ("crowded_concurrency",),
    "manager_us": ("manager_us",),
    "manager_p99_us": ("manager_step_us", "p99"),
}
"""Figures that are reported of all rounds, as far as a row has them, and where they stand in it."""


def middle(rows: list[Row]) -> Row:
    """The run with the median throughput, of the runs that came to their end if one did; some figures of each, and all
    rows."""
    ended = [row for row in rows if row["finished"] == row["requests"]] or rows
    ordered = sorted(ended, key=lambda row: float(row["output_tokens_per_s"]))
    each = {
        name: [reduce(getitem, path, row) for row in ended] for name, path in EACH_ROUND.items() if path[0] in ended[0]
    }
    all_rounds = {"rounds": each["output_tokens_per_s"], "each_round": each, "all_rounds": rows}
    return ordered[(len(ordered) - 1) // 2] | all_rounds


def make_engine(settings: Settings, workload: Workload, backend: str) -> Engine:
    """An engine that has served prompts of many sizes already, and holds as little memory as it can.

    For each size libraries choose among kernels, which are loaded when they first run: the first backend would wait.
    """
    name, _, beside = backend.partition("+")
    engine = Engine(
        settings.model,
        name,
        settings.max_bytes,
        settings.max_sequences,
        workload.max_seq_len,
        max(workload.tokens + len(workload.requests), 2 * settings.chunk),
        chunk=settings.chunk,
        reuse=beside == REUSE,
        late=settings.late,
        options={"pool": settings.pool} if name == "vmm" else {},
    )
    longest = min(settings.chunk, workload.max_seq_len - 2)
    for prompt in range(longest, 0, -max(longest // WARM_UPS, 1)):
        engine.run([torch.full((prompt,), prompt % settings.model.config.vocab_size)], [2])
    # One decodes beside the end of the other's prompt, which no longer fits the first step.
    engine.run([torch.zeros(8, dtype=torch.int64), torch.ones(longest, dtype=torch.int64)], [4, 2])
    engine.kv.give_back()
    return engine


def run_load(settings: Settings, workload: Workload, engine: Engine, load: str) -> tuple[Run, Row]:
    """Serve the workload. An engine has no memory that it can give back, neither at the beginning nor at the end."""
    prompts = workload.prompts(settings.model.config.vocab_size, SEED)
    outputs = [request.output for request in workload.requests]
    before = engine.kv.work()
    run = engine.run(prompts, outputs, wait=load == WAITING, deadline=settings.deadline)
    row = figures(run) if run.running else {}
    done = {name: value - before[name] for name, value in engine.kv.work().items()}
    row |= {f"{name}_us": done.get(name, 0.0) * 1e6 / max(len(run.running), 1) for name in ("driver", "mapper")}
    row |= {"pages_mapped": {when: done[when] for when in ("ahead", "in need") if done}}
    engine.kv.give_back()
    return run, row | {"idle_bytes": engine.kv.physical_bytes()}


def figures(run: Run) -> Row:
    """Figures of a run that had steps. Times are in seconds, host times in microseconds a step.

    Mean concurrency is over time, `crowded_concurrency` over the steps in which a request waited for room."""
    done = np.isfinite(run.finish)
    several = done & (run.outputs > 1)
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
        "output_tokens_per_s": run.generated / run.seconds,
        "ttft_s": quantiles(run.first[done]),
        "tpot_s": quantiles(each),
        "steps": steps,
        "peak_concurrency": int(running.max()),
        "mean_concurrency": float(np.average(running, weights=took)),
        "crowded_concurrency": float(running[crowded].mean()) if crowded.any() else None,
        "preemptions": run.preemptions,
        "recomputed_tokens": run.recomputed,
        "hit_rate": float(run.cached[run.cached >= 0].sum() / max(run.prompts[run.cached >= 0].sum(), 1)),
        "manager_us": sum(run.manager_ns) / 1e3 / steps,
        "manager_step_us": quantiles(np.array(run.manager_ns) / 1e3),
        "host_us": run.host_ns / 1e3 / steps,
        "peak_bytes": int(taken.max()),
        "mean_bytes": float(np.average((taken[1:] + taken[:-1]) / 2, weights=np.diff(seen))),
        "samples": [[round(seconds, 3), nbytes, count] for seconds, nbytes, count in run.samples],
    }


def quantiles(values: Values) -> dict[str, float | None]:
    """The median, the 99th percentile and the most; None where there are too few values."""
    if not len(values):
        return dict.fromkeys(("p50", "p99", "most"))
    p50, p99, most = np.percentile(values, (50, 99, 100)).tolist()
    return {"p50": p50, "p99": p99 if len(values) >= P99_VALUES else None, "most": most}


def same_tokens(run: Run, other: Run) -> float | None:
    """Of the requests that finished in both runs, the share with the same tokens. Another schedule rounds otherwise."""
    both = np.flatnonzero(np.isfinite(run.finish) & np.isfinite(other.finish))
    return float(np.mean([run.output(i) == other.output(i) for i in both])) if len(both) else None
