"""transformers' continuous batching on rows with tensor parallelism: one GPU, and two with half of the heads each.

    python -m benchmarks.batching_ranks [--trace FILE] [--layers N] [--requests N] [--compiled] [--json]

The shape is Llama-3.1-70B's with fewer layers, as many as a GPU of 80 GB has room for beside K and V, and random
weights: of few layers a step is mostly the host's time, which two GPUs do not halve. Each process says how long it has
waited for the driver to map pages for those who grew, and how much of that delayed a step, and with it the others in
the step's collectives: pages are mapped while the device computes the step before, so most of it delays nobody.
Two GPUs and one take turns, in processes of their own, since memory has no room for both models; a run begins warm, and
without memory for K and V. Rounds that are not reached are named, and no result is written before there is a run of
two GPUs and one of one. Without two GPUs two processes run a tiny model on the host, over gloo, and speeds say nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from transformers.distributed.configuration_utils import DistributedConfig

from benchmarks import comparisons
from benchmarks.batching import COMPILED, ROWS, Answers, compare_answers, manager_of, run, warm_up
from benchmarks.batching_tables import compare_ranks, ranks_table
from benchmarks.environment import environment, print_result
from benchmarks.generate.models import build, token_bytes
from benchmarks.processes import run_processes
from benchmarks.serve import options
from benchmarks.serve.workloads import Limits, make_workload
from vmmkv import KVCache
from vmmkv.budget import parse_bytes
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table

Row = dict[str, Any]
Moment = float | torch.cuda.Event
"""A time of the host's clock, or when a stream gets there."""
Turn = tuple[int, int]
"""A round, and how many processes serve it."""
RANKS = 2, 1
"""How many processes serve a round, one after another."""


class Launch(NamedTuple):
    """A forward pass that was launched."""

    driver_s: float
    """In the driver, since the launch before."""
    was_idle: bool
    """Whether the device had done all that it had been given, and so may have waited for the driver."""
    began: Moment
    ended: Moment


class Asked(NamedTuple):
    """What processes are to measure."""

    on_gpus: bool
    system: str
    model: str
    layers: int | None
    trace: Path | None
    requests: int
    nbytes: int
    seconds: float


def main(
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Azure CSV; None: random.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 24,
    requests: Annotated[int, typer.Option(min=1, help="How many of the trace.")] = 100,
    memory: Annotated[str | None, typer.Option(help="For K and V on each GPU.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="After which who is not done is stopped.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of each number of GPUs.")] = 3,
    compiled: Annotated[bool, typer.Option("--compiled", help="Forward passes.")] = False,
    budget_seconds: options.BudgetSeconds = 480.0,
    json_output: JsonOutput = False,
) -> None:
    """Measure tensor parallelism under transformers' continuous batching on rows."""
    deadline = perf_counter() + budget_seconds
    on_gpus = torch.cuda.device_count() > 1
    name = "Llama-3.1-70B" if on_gpus else "tiny"
    nbytes = parse_bytes(memory or ("16GiB" if on_gpus else "128MiB"), free=0)
    system = COMPILED if compiled else ROWS
    asked = Asked(on_gpus, system, name, layers if on_gpus else None, trace, requests, nbytes, seconds)
    result = {
        "environment": environment(torch.device("cuda", 0) if on_gpus else torch.device("cpu")),
        "model": name,
        "layers": layers,
        "memory_bytes": nbytes,
        "requests": requests,
    }
    found: dict[Turn, tuple[Row, Answers]] = {}
    try:
        measure(found, asked, rounds, deadline)
    finally:
        result |= {"served": rows_of(found), "missed": missed(found, rounds)}
        is_whole = {ranks for _, ranks in found} == {*RANKS}
        if is_whole:
            report(result, json_output)
    if not is_whole:
        errors.print(f"No result, which needs a run of each: there was no time for {', '.join(result['missed'])}")
        raise typer.Exit(1)


def measure(found: dict[Turn, tuple[Row, Answers]], asked: Asked, rounds: int, deadline: float) -> None:
    """Adds what one process and two serve, in turns, as long as there is time for what the longest turn took. Who is
    interrupted, or fails, leaves what was measured before."""
    longest = 0.0
    for number, ranks in product(range(rounds), RANKS):
        began = perf_counter()
        if began + longest < deadline:
            with TemporaryDirectory() as folder:
                try:
                    run_processes(ranks, work, ranks, folder, began, number, asked)
                finally:
                    written = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
                    if all(path.exists() for path in written):
                        found[number, ranks] = together([json.loads(path.read_text()) for path in written])
            longest = max(longest, perf_counter() - began)


def together(written: list[Row]) -> tuple[Row, Answers]:
    """What processes have measured: the first one's row, with the time that each waited for the driver, and of each
    step by what share of it the driver delayed the one that it delayed most; and the answers of the first."""
    most = [max(delays) for delays in zip(*(each["delays"] for each in written))]
    row = written[0]["row"] | {
        "ranks": len(written),
        "driver_s": [each["driver_s"] for each in written],
        "steps": len(most),
        "delayed": sum(delay > 0 for delay in most),
        "delay_of_step": spread(most),
    }
    return row, written[0]["answers"]


def spread(delays: list[float]) -> Row | None:
    """Of steps' delays those of the typical, the slow and the slowest; None where there was one step."""
    if len(delays) < 2:
        return None
    return {"p50": median(delays), "p99": quantiles(delays, n=100, method="inclusive")[-1], "most": max(delays)}


def rows_of(found: dict[Turn, tuple[Row, Answers]]) -> list[Row]:
    """A row of each run, those of one process first; of two with how many answers are those of one in that round."""
    rows = []
    for (number, ranks), (row, answers) in sorted(found.items(), key=lambda turn: turn[0][::-1]):
        _, of_one = found.get((number, 1), (None, None))
        rows.append(row | (compare_answers(answers, of_one) if ranks > 1 and of_one is not None else {}))
    return rows


def missed(found: dict[Turn, tuple[Row, Answers]], rounds: int) -> list[str]:
    """Names of the runs that were not reached."""
    return [title(ranks, number) for number, ranks in product(range(rounds), RANKS) if (number, ranks) not in found]


def title(ranks: int, number: int) -> str:
    """What a run is called."""
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'}, round {number + 1}"


# ------------------------------------------------------------------ in each process


def work(rank: int, ranks: int, folder: str, began: float, number: int, asked: Asked) -> None:
    """What each process does: it serves a round, and writes what was found. The first says what it does when."""
    say = teller(title(ranks, number), began, is_heard=rank == 0)
    say("imported")
    device = torch.device("cuda", rank) if asked.on_gpus else torch.device("cpu")
    if asked.on_gpus:
        torch.cuda.set_device(device)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    model: Any = build(asked.model, asked.layers, device)
    config = model.config
    if ranks > 1:
        backend, meet = "nccl" if asked.on_gpus else "gloo", f"file://{folder}/store"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
        parallel, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=ranks), device_map=None)
        model = type(model).maybe_distribute_model(model, parallel, mesh)
        beside = dist.new_group(backend="gloo")  # the model's own group is the manager's while it runs
    say("model made")
    longest = min(asked.nbytes // token_bytes(config), config.max_position_embeddings)
    limits = Limits(asked.requests, 1 << 40, longest, 8192, 1 if asked.on_gpus else 16)
    workload = make_workload(asked.trace, limits, seed=0)
    with manager_of(model, asked.system, asked.nbytes, most=asked.requests) as manager:
        say("started")
        warm_up(manager, workload, asked.seconds)
        cache = manager.batch_processor.cache.kv_caches[0]
        cache.trim()
        if ranks > 1:
            dist.barrier(beside)
        say("warmed up")
        before = driver_seconds(cache)
        with watched(manager, cache) as launches:
            row, answers = run(manager, asked.system, workload, number, asked.seconds)
        driver_s = driver_seconds(cache) - before
        found = {"row": row, "answers": answers, "driver_s": driver_s, "delays": delays(launches)}
        unfinished = Path(folder) / f"{rank}.unfinished"
        unfinished.write_text(json.dumps(found))
        unfinished.rename(Path(folder) / f"{rank}.json")  # before anything else: who ends a manager may be interrupted
        served = f"{row['finished']} of {len(workload.requests)} requests"
        say(f"{served} in {row['seconds']:.1f} s, {row['tokens_per_s']:,.0f} tokens/s")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def teller(name: str, began: float, is_heard: bool) -> Callable[[str], None]:
    """Says on stderr what has been done of a run, and how long after it began, by a clock that processes share."""

    def say(what: str) -> None:
        if is_heard:
            errors.print(f"{name}, {perf_counter() - began:.1f} s: {what}", highlight=False)

    return say


def driver_seconds(cache: KVCache) -> float:
    """How long this process has been in the driver."""
    return int(cache.pool.meter.spent[:, 1].sum()) / 1e9


@contextmanager
def watched(manager: Any, cache: KVCache) -> Iterator[list[Launch]]:
    """Notes each forward pass that is launched."""
    processor = manager.batch_processor
    stream: torch.cuda.Stream | None = processor.inputs_and_outputs.compute_stream
    launch = processor._generation_step
    launches: list[Launch] = []
    before = driver_seconds(cache)

    def launch_watched(model: Any) -> None:
        nonlocal before
        was_idle = stream is None or stream.query()
        now = driver_seconds(cache)
        began = moment(stream)
        launch(model)
        launches.append(Launch(now - before, was_idle, began, moment(stream)))
        before = now

    processor._generation_step = launch_watched
    try:
        yield launches
    finally:
        del processor._generation_step


def moment(stream: torch.cuda.Stream | None) -> Moment:
    """When a stream has done what it was given; without one, now."""
    return perf_counter() if stream is None else stream.record_event(torch.cuda.Event(enable_timing=True))


def seconds_between(began: Moment, ended: Moment) -> float:
    """Seconds from one moment to a later one; waits for that."""
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    assert isinstance(began, float)
    assert isinstance(ended, float)
    return ended - began


def delays(launches: list[Launch]) -> list[float]:
    """By how much the driver delayed each forward pass, of the time that this took: by all that it took before the
    launch where the device may have waited, and not at all where it was still busy."""
    return [
        launch.driver_s / seconds_between(launch.began, launch.ended) if launch.was_idle else 0.0 for launch in launches
    ]


# ------------------------------------------------------------------ what comes of it


def report(result: Row, json_output: bool) -> None:
    """Compares and writes what has been measured."""
    result["comparisons"] = compare_ranks(result)
    if json_output:
        print_result(result)
    else:
        show(result)


def show(result: Row) -> None:
    console.print(make_table(f"{result['model']}, {result['layers']} layers", *ranks_table(result)))
    console.print(make_table("Comparisons", comparisons.COLUMNS, comparisons.lines(result["comparisons"])))
    for what in result["missed"]:
        console.print(f"not reached in time: {what}")


if __name__ == "__main__":
    typer.run(main)
