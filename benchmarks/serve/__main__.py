"""Serving with vmmkv, with a block table and with static slots: the same requests, model, kernels and budget.

    python -m benchmarks.serve [--trace FILE]... [--json FILE] [--plot FILE]

Replays a trace with `benchmarks.engine`: at saturation, all requests waiting, and at shares of the throughput that the
block table reached there. Then long prompts, with the fastest prefill kernels of rows and of blocks. Without a GPU
it runs a tiny model, with lengths divided by 16.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks.attention.peers import versions
from benchmarks.engine.engine import BACKENDS
from benchmarks.engine.model import MODELS, Model, load_model, random_model, read_config
from vmmkv import KVLayout
from vmmkv.budget import parse_bytes
from vmmkv.cli.output import console, errors
from vmmkv.driver import open_driver
from vmmkv.environment import environment

from .measure import Settings, free_memory, serve
from .prompts import compare_prefill
from .report import compare, draw, tables
from .workloads import Workload, make_workload

GPU = {"model": "llama-3.1-8b", "memory": "16GiB", "max_seq_len": 8192, "shorten": 1, "prompt_tokens": 16_384}
HOST = {"model": "tiny", "memory": "1MiB", "max_seq_len": 512, "shorten": 16, "prompt_tokens": 512}

LARGEST = 0.9
"""Of the budget: requests that would take more are left out."""


def main(
    trace: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Azure CSV or Mooncake JSON lines; the first is the main one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"{', '.join(MODELS)}, or a folder of safetensors.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for K and V, of each backend.")] = None,
    backends: Annotated[
        list[str], typer.Option(help=f"Of {', '.join(BACKENDS)}; also vmm+fa3, paged+flashinfer.")
    ] = list(BACKENDS),  # noqa: B006
    rates: Annotated[list[float], typer.Option(help="Of the main trace: shares of saturation.")] = [0.5],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="Most requests of a trace.")] = 500,
    tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of the main trace; of others a quarter, at saturation only.")
    ] = 800_000,
    max_sequences: Annotated[int, typer.Option(min=1, help="Most requests that run at a time.")] = 256,
    max_seq_len: Annotated[
        int | None, typer.Option(help="What static slots are made for, if no request is longer.")
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Most tokens of prompts in a step.")] = 2048,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of the long prompts.")] = None,
    shorten: Annotated[int | None, typer.Option(min=1, help="Divide the lengths of a trace.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is a GPU.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, prompts and random requests.")] = 0,
    budget_seconds: Annotated[float, typer.Option(help="When to stop, and say what was not reached.")] = 480.0,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write the result.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and concurrency over time.")] = None,
) -> None:
    """Measure serving with each KV backend."""
    deadline = perf_counter() + budget_seconds
    unknown = {name.partition("+")[0] for name in backends} - set(BACKENDS)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: backends are {', '.join(BACKENDS)}")
    where = open_driver(device).device
    usual = GPU if where.type == "cuda" else HOST
    name = model or str(usual["model"])
    max_bytes = parse_bytes(memory or str(usual["memory"]), open_driver(where).memory_info()[0])
    config = MODELS[name] if name in MODELS else read_config(json.loads((Path(name) / "config.json").read_text()))
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    longest = max_seq_len or int(usual["max_seq_len"])
    prompt = prompt_tokens or int(usual["prompt_tokens"])
    capacity = int(LARGEST * max_bytes) // layout.token_bytes
    workloads = [
        make_workload(
            path, requests, tokens // (4 if index else 1), shorten or int(usual["shorten"]), longest, capacity, seed
        )
        for index, path in enumerate(trace or [None])
    ]
    positions = max(2 * prompt, *(workload.max_seq_len for workload in workloads))
    weights = make_model(name, positions, where, dtype, seed)
    settings = Settings(weights, max_bytes, max_sequences, chunk, deadline, seed)
    result = {
        "environment": environment(where),
        "peers": versions(),
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "budget_bytes": max_bytes,
        "token_bytes": layout.token_bytes,
        "max_sequences": max_sequences,
        "chunk": chunk,
        "workloads": [describe(workload) for workload in workloads],
    } | measure(settings, workloads, backends, rates, prompt)
    for table in tables(result):
        console.print(table)
    if json_output:
        json_output.write_text(json.dumps(result, indent=2) + "\n")
    if plot:
        draw(result, plot)


def make_model(name: str, positions: int, device: torch.device, dtype: torch.dtype, seed: int) -> Model:
    if name in MODELS:
        return random_model(MODELS[name], positions, device, dtype, seed)
    return load_model(Path(name), positions, device, dtype)


def describe(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "requests": len(workload.requests),
        "tokens": workload.tokens,
        "output_tokens": sum(request.output for request in workload.requests),
        "max_seq_len": workload.max_seq_len,
        "left_out": workload.left_out,
    }


def measure(
    settings: Settings, workloads: list[Workload], backends: list[str], rates: list[float], prompt_tokens: int
) -> dict[str, Any]:
    """The main trace, long prompts, other traces: what matters most comes first."""
    result: dict[str, Any] = {"serving": [], "prefill": [], "skipped": [], "missed": []}
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("Preparing", total=None)

        def progress(name: str, finished: int, total: int) -> None:
            bar.update(task, description=name, completed=finished, total=total)

        for index, workload in enumerate(workloads):
            rows, missed = serve(settings, workload, backends, [] if index else rates, progress)
            result["serving"] += rows
            result["missed"] += missed
            if index == 0:
                if perf_counter() < settings.deadline:
                    result["prefill"], result["skipped"] = compare_prefill(settings, prompt_tokens, progress)
                    free_memory()
                else:
                    result["missed"].append(f"prompts of {prompt_tokens} tokens")
    return result | {"comparisons": compare(result)}


if __name__ == "__main__":
    typer.run(main)
