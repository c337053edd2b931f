"""Serving on rows of vmmkv and on a block table: the same requests, model, kernels and budget.

    python -m benchmarks.serve [--trace FILE]... [--reuse] [--wait] [--vllm DIR] [--json FILE]

Replays traces with `benchmarks.engine`, all requests waiting from the start, in several rounds of which the median is
reported; with `--wait` also with a host that waits for each step's tokens. Rows begin each run without memory; blocks
have theirs before the clock starts. Without a GPU it runs a tiny model, with lengths divided by 16, and speeds say
nothing.

`--reuse` serves with prefix reuse and without, of rows and of blocks with a radix tree, all traces and random
conversations behind shared system prompts; a request starts when a step has tokens left for it, so that it finds the
K and V of those before it. vLLM serves the same, where it is installed, or `--vllm` names a folder in which it is
unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer

from benchmarks.attention.peers import versions
from benchmarks.engine.model import MODELS, random_model
from benchmarks.environment import complete, environment
from benchmarks.geometry import free_memory
from benchmarks.output import Row, to_json
from vmmkv.budget import parse_bytes
from vmmkv.cli.output import Device, console, make_table
from vmmkv.driver.driver import open_driver

from . import report, vllm_peer
from .measure import BACKENDS, SATURATION, SEED, WAITING, Settings, serve
from .workloads import Limits, make_workload, system_prompts

CHOICES = [*BACKENDS, *vllm_peer.NAMES]
SYSTEM_PROMPTS = 8
LARGEST = 0.9
"""Of the budget: longer requests are left out."""


class Usual(NamedTuple):
    """The defaults of a kind of machine."""

    model: str
    memory: str
    max_seq_len: int
    shorten: int
    dtype: torch.dtype


GPU = Usual("llama-3.1-8b", "16GiB", 8192, 1, torch.bfloat16)
HOST = Usual("tiny", "1MiB", 512, 16, torch.float32)


def main(
    trace: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Azure CSV or Mooncake JSON lines.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(MODELS)}.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for K and V, of each backend.")] = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="With prefix reuse and without.")] = False,
    backends: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CHOICES)}.")] = None,
    vllm: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="vLLM, unpacked.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="The median is reported.")] = 3,
    wait: Annotated[bool, typer.Option("--wait", help="Also wait for each step's tokens.")] = False,
    requests: Annotated[int, typer.Option(min=1, help="Most requests of a trace.")] = 300,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a trace.")] = 400_000,
    max_sequences: Annotated[int, typer.Option(min=1, help="Most requests that run at a time.")] = 256,
    chunk: Annotated[int, typer.Option(min=1, help="Most tokens of prompts in a step.")] = 2048,
    shorten: Annotated[int | None, typer.Option(min=1, help="Divide the lengths of a trace.")] = None,
    device: Device = None,
    budget_seconds: Annotated[float, typer.Option(help="When to stop, and say what was not reached.")] = 480.0,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write the result.")] = None,
) -> None:
    """Measure serving with each KV backend."""
    deadline = perf_counter() + budget_seconds
    names = backends or (["vmm", "paged", "vmm+reuse", "paged+reuse"] if reuse else ["vmm", "paged"])
    if vllm and not backends:
        names += vllm_peer.NAMES[: 1 + reuse]
    for each in names:
        if each not in CHOICES:
            raise typer.BadParameter(f"{each}: backends are {', '.join(CHOICES)}")
    if json_output and not json_output.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json_output}: write it in a folder that exists")
    driver = open_driver(device)
    usual = GPU if driver.device.type == "cuda" else HOST
    name = model or usual.model
    if name not in MODELS:
        raise typer.BadParameter(f"--model {name}: it must be one of {', '.join(MODELS)}")
    token_bytes = MODELS[name].kv_layout(usual.dtype).token_bytes
    max_bytes = parse_bytes(memory or usual.memory, driver.memory_info()[0])
    longest = int(LARGEST * max_bytes) // token_bytes
    limits = Limits(requests, tokens, longest, usual.max_seq_len, shorten or usual.shorten)
    workloads = [make_workload(path, limits, SEED) for path in trace or ([] if reuse else [None])]
    if reuse:
        workloads.append(system_prompts(SYSTEM_PROMPTS, limits._replace(shorten=usual.shorten), SEED))
    positions = max(workload.max_seq_len for workload in workloads)
    weights = random_model(MODELS[name], positions, driver.device, usual.dtype)
    settings = Settings(weights, max_bytes, deadline, max_sequences, chunk, late=reuse)
    loads = [SATURATION, WAITING] if wait else [SATURATION]
    peers = [each for each in names if each in vllm_peer.NAMES]
    share = vllm_peer.SHARE * budget_seconds if peers and vllm_peer.can_be_had(vllm) else 0
    result: Row = {
        "environment": environment(driver.device),
        "peers": versions(),
        "model": name,
        "dtype": str(usual.dtype).removeprefix("torch."),
        "budget_bytes": max_bytes,
        "token_bytes": token_bytes,
        "workloads": [workload.describe() for workload in workloads],
        "serving": [],
        "skipped": [],
        "missed": [],
    }
    with written(result, json_output):
        ours = [each for each in names if each in BACKENDS]
        for number, workload in enumerate(workloads):  # each has the same share of the time
            now, end = perf_counter(), deadline - share
            within = settings._replace(deadline=now + (end - now) / (len(workloads) - number))
            serve(result, within, workload, ours, loads, rounds)
            free_memory()
        for each in peers:
            vllm_peer.serve_beside(result, settings, workloads, rounds, vllm, each)


@contextmanager
def written(result: Row, json_output: Path | None) -> Iterator[None]:
    """Write and show what has been measured, even if something fails."""
    try:
        yield
    except BaseException as error:
        result["missed"].append(f"all that was to follow: {type(error).__name__} {error}".rstrip())
        raise
    finally:
        if json_output:
            json_output.write_text(to_json(complete(result)) + "\n")
        for title, (columns, rows) in report.tables(result).items():
            console.print(make_table(title, columns, rows))
        missing = [(row["backend"], row["reason"]) for row in result["skipped"]]
        missing += [(name, "not reached in time") for name in result["missed"]]
        if missing:
            console.print(make_table("Not measured", ("what", "why"), missing))


if __name__ == "__main__":
    typer.run(main)
