"""How many requests have room at a time where prompts begin alike: in blocks, on rows, and on rows of single pages.

    python -m benchmarks.room [--trace FILE] [--model NAME] [--memory 8GiB] [--requests N] [--json]

The engine's schedule plans steps with prefix reuse, as `benchmarks.serve --reuse` has it, and its KV backends keep
their books, but no model runs, and rows are on a driver without memory: what is counted follows from lengths and ids
alone, and is the same on every machine. Without a trace prompts begin with one of some system prompts.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv import FramePool
from vmmkv.budget import parse_bytes
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, make_table
from vmmkv.driver.host import NullDriver

from .engine.model import Config
from .engine.reusing_blocks import ReusingPagedKV
from .engine.reusing_rows import ReusingVmmKV
from .engine.schedule import Schedule, Step
from .engine.seen import SeenTokens
from .serve import options
from .serve.setup import GPU, describe, find_config, longest_request
from .serve.workloads import Limits, Workload, make_workload, system_prompts

Row = dict[str, Any]
DEVICE_BYTES = 80 << 30
DTYPE = torch.bfloat16
NAMES = {"blocks": "blocks of 16", "rows": "rows", "single pages": "rows, `large_frames=False`"}


def main(
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Mooncake's JSON lines.")] = None,
    model: options.ModelName = "qwen3-0.6b",
    memory: options.Memory = "8GiB",
    requests: Annotated[int, typer.Option(min=1, help="At most.")] = 600,
    tokens: options.Tokens = 500_000,
    max_sequences: options.MaxSequences = 128,
    chunk: options.Chunk = 2048,
    shorten: options.Shorten = 1,
    json_output: JsonOutput = False,
) -> None:
    """Count the requests that have room at a time."""
    config, nbytes = find_config(model), parse_bytes(memory, free=0)
    limits = Limits(requests, tokens, longest_request(config, DTYPE, nbytes), GPU.max_seq_len, shorten)
    workload = make_workload(trace, limits, 0) if trace else system_prompts(8, limits, 0)
    result = {
        "environment": environment(torch.device("cpu")),
        "model": model,
        "budget_bytes": nbytes,
        "workload": describe(workload),
        "runs": [serve(workload, config, nbytes, max_sequences, chunk, name) for name in NAMES],
    }
    if json_output:
        print_result(result)
    else:
        console.print(make_table("Room", *table(result)))


def serve(workload: Workload, config: Config, nbytes: int, max_sequences: int, chunk: int, name: str) -> Row:
    """What a backend has room for, all requests at once, from the first step to the last."""
    with closing(make_backend(workload, config, nbytes, max_sequences, name)) as kv:
        prompts = workload.prompts(config.vocab_size, 0)
        sizes, outputs = (np.array([getattr(each, of) for each in workload.requests]) for of in ("prompt", "output"))
        seen = SeenTokens(prompts, sizes + outputs + 1)
        schedule = Schedule(kv, sizes, outputs, max_sequences, chunk, late=True, ids=seen.of)
        schedule.waiting.extend(range(len(sizes)))
        running, crowded, computed = [], [], 0
        in_flight: deque[Step] = deque()
        while (step := schedule.next()) is not None:
            running.append(len(schedule.running))
            if schedule.waiting:
                crowded.append(len(schedule.running))
            computed += int(step.counts.sum())
            schedule.advance(step)
            in_flight.append(step)
            if len(in_flight) > 1:  # the host is a step ahead
                sampled = in_flight.popleft().sampled
                seen.take(sampled, sampled)  # which tokens follows from nothing here
    return {
        "backend": name,
        "steps": len(running),
        "mean_running": float(np.mean(running)),
        "crowded_concurrency": float(np.mean(crowded)) if crowded else None,
        "prompt_tokens_computed": computed,
        "cached_share": float(schedule.cached.sum() / sizes.sum()),
        "preemptions": int(schedule.preempted.sum()),
    }


def make_backend(
    workload: Workload, config: Config, nbytes: int, max_sequences: int, name: str
) -> ReusingPagedKV | ReusingVmmKV:
    """Blocks, or rows, without memory."""
    sizes = config.kv_layout(DTYPE), max_sequences, workload.max_seq_len, nbytes
    if name == "blocks":
        return ReusingPagedKV(*sizes, torch.device("meta"))
    pool = FramePool.on(NullDriver(DEVICE_BYTES), nbytes)
    return ReusingVmmKV(*sizes, torch.device("cpu"), pool=pool, large_frames=name == "rows")


def table(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each backend."""
    columns = "requests at a time while others wait", "steps", "prompt tokens that were there"
    lines = [
        (
            NAMES[row["backend"]],
            "-" if row["crowded_concurrency"] is None else f"{row['crowded_concurrency']:.1f}",
            f"{row['steps']:,}",
            f"{row['cached_share']:.1%}",
        )
        for row in result["runs"]
    ]
    return (result["workload"]["name"], *columns), lines


if __name__ == "__main__":
    typer.run(main)
