"""transformers' continuous batching on rows with tensor parallelism: one GPU, and two with half of the heads each.

    python -m benchmarks.batching_ranks [--trace FILE] [--layers N] [--requests N] [--compiled] [--json]

The shape is Llama-3.1-70B's with fewer layers, as many as a GPU of 80 GB has room for beside K and V, and random
weights: of few layers a step is mostly the host's time, which two GPUs do not halve. Each process says how long it has
waited for the driver to map pages for those who grew: while one does the others wait for it in the next collective.
Without two GPUs two processes run a tiny model on the host, over gloo, and speeds say nothing.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from transformers.distributed.configuration_utils import DistributedConfig

from benchmarks import aims
from benchmarks.batching import COMPILED, ROWS, Answers, compare_answers, manager_of, run
from benchmarks.batching_tables import compare_ranks, ranks_table
from benchmarks.environment import environment, print_result
from benchmarks.generate.models import build, token_bytes
from benchmarks.processes import run_processes
from benchmarks.serve.workloads import Limits, make_workload
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, make_table
from vmmkv.memory.budget import parse_bytes

Row = dict[str, Any]


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
    rounds: int


def main(
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Azure CSV; None: random.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 24,
    requests: Annotated[int, typer.Option(min=1, help="How many of the trace.")] = 150,
    memory: Annotated[str | None, typer.Option(help="For K and V on each GPU.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="After which who is not done is stopped.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of each number of GPUs.")] = 3,
    compiled: Annotated[bool, typer.Option("--compiled", help="Forward passes.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Measure tensor parallelism under transformers' continuous batching on rows."""
    on_gpus = torch.cuda.device_count() > 1
    name = "Llama-3.1-70B" if on_gpus else "tiny"
    nbytes = parse_bytes(memory or ("16GiB" if on_gpus else "128MiB"), free=0)
    system = COMPILED if compiled else ROWS
    asked = Asked(on_gpus, system, name, layers if on_gpus else None, trace, requests, nbytes, seconds, rounds)
    result = {
        "environment": environment(torch.device("cuda", 0) if on_gpus else torch.device("cpu")),
        "model": name,
        "layers": layers,
        "memory_bytes": nbytes,
        "requests": requests,
        "served": served_by_one_and_two(asked),
    }
    result["comparisons"] = compare_ranks(result)
    if json_output:
        print_result(result)
    else:
        show(result)


def served_by_one_and_two(asked: Asked) -> list[Row]:
    """What one process measures, and two: of each round a row, for two with how many answers are those of one."""
    (one, alone), (two, together) = (served_by(ranks, asked) for ranks in (1, 2))
    return one + [row | compare_answers(ours, theirs) for row, ours, theirs in zip(two, together, alone)]


def served_by(ranks: int, asked: Asked) -> tuple[list[Row], list[Answers]]:
    """What so many processes measure together: a row of each round, with the time that each waited for the driver, and
    the answers of the first."""
    with TemporaryDirectory() as folder:
        run_processes(ranks, work, ranks, free_port(), folder, asked)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    measured = [[row for row, _ in each] for each in found]
    rows = [row | {"ranks": ranks} for row in measured[0]]
    rows = [row | {"driver_s": [each["driver_s"] for each in all_of]} for row, *all_of in zip(rows, *measured)]
    return rows, [answers for _, answers in found[0]]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def work(rank: int, ranks: int, port: int, folder: str, asked: Asked) -> None:
    """What each process does: it serves all rounds, and writes what was found."""
    device = torch.device("cuda", rank) if asked.on_gpus else torch.device("cpu")
    if asked.on_gpus:
        torch.cuda.set_device(device)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model: Any = build(asked.model, asked.layers, device)
    config = model.config
    if ranks > 1:
        dist.init_process_group("nccl" if asked.on_gpus else "gloo", timeout=timedelta(minutes=5))
        parallel, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=ranks), device_map=None)
        model = type(model).maybe_distribute_model(model, parallel, mesh)
    longest = min(asked.nbytes // token_bytes(config), config.max_position_embeddings)
    limits = Limits(asked.requests, 1 << 40, longest, 8192, 1 if asked.on_gpus else 16)
    workload = make_workload(asked.trace, limits, seed=0)
    rows = []
    with manager_of(model, asked.system, asked.nbytes) as manager:
        cache = manager.batch_processor.cache.kv_caches[0]
        for number in range(asked.rounds):
            before = cache.stats().driver_seconds
            row, answers = run(manager, asked.system, workload, number, asked.seconds)
            rows.append((row | {"driver_s": cache.stats().driver_seconds - before}, answers))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(rows))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def show(result: Row) -> None:
    console.print(make_table(f"{result['model']}, {result['layers']} layers", *ranks_table(result)))
    console.print(make_table("Aims", aims.COLUMNS, aims.lines(result["comparisons"])))


if __name__ == "__main__":
    typer.run(main)
