"""What is compiled when it first runs, compiled once, so that other benchmarks find it on disk.

    python -m benchmarks.compiling [--json]

A process for each, all at a time: the serving engine with the shape of each model, on rows and on blocks, and
FlashInfer's attention as that engine calls it. Its result says how long each took; of a second run, what still has to
be done in every process. What cannot be had is named with the reason. Without a GPU a tiny model is run.
"""

from __future__ import annotations

import json
from contextlib import closing
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import typer

from benchmarks.engine.model import MODELS, random_model
from benchmarks.environment import environment, print_result
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, make_table

from .processes import run_processes
from .serve.measure import Settings, make_engine
from .serve.workloads import Limits, make_workload

Row = dict[str, Any]
GPU = (
    ("llama-3.1-8b", "vmm"),
    ("llama-3.1-8b", "paged"),
    ("qwen3-0.6b", "vmm"),
    ("qwen3-0.6b", "paged"),
    ("qwen3-0.6b", "vmm+fa3"),
    ("qwen3-0.6b", "paged+flashinfer"),
)
HOST = (("tiny", "vmm"), ("tiny", "paged"))
"""Models, and backends of the engine; a process each."""
MEMORY = 1 << 30
"""Bytes for K and V: enough for prompts that fill a step."""
COLUMNS = "model", "backend", "seconds, once compiled and warmed up", ""


def main(json_output: JsonOutput = False) -> None:
    """Compile what other benchmarks run."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    result: Row = {"environment": environment(device)}
    with TemporaryDirectory() as folder:
        begin = perf_counter()
        run_processes(len(GPU if device.type == "cuda" else HOST), compile_all, device.type, folder)
        result["seconds"] = perf_counter() - begin
        files = sorted(Path(folder).iterdir())
        result["compiled"] = [json.loads(file.read_text()) for file in files]
    if json_output:
        print_result(result)
    else:
        console.print(make_table("Compiling", COLUMNS, lines(result)))


def compile_all(rank: int, kind: str, folder: str) -> None:
    """Warms an engine up with a model and a backend; writes how long it took, or why it could not."""
    begin = perf_counter()
    name, backend = (GPU if kind == "cuda" else HOST)[rank]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    limits = Limits(requests=4, tokens=1 << 20, longest=4096, max_seq_len=4096, shorten=1 if kind == "cuda" else 16)
    workload = make_workload(None, limits, seed=0)
    about: Row = {"model": name, "backend": backend}
    try:
        model = random_model(MODELS[name], workload.max_seq_len, torch.device(kind), dtype)
        settings = Settings(model, MEMORY, max_sequences=256, chunk=2048, deadline=inf, seed=0)
        with closing(make_engine(settings, workload, backend)):
            about["seconds"] = perf_counter() - begin
    except Exception as error:  # whatever a peer raises is its reason
        about["reason"] = f"{type(error).__name__}: {error}"
    Path(folder, str(rank)).write_text(json.dumps(about))


def lines(result: Row) -> list[tuple[str, ...]]:
    """A line for each model and backend."""
    return [
        (row["model"], row["backend"], f"{row['seconds']:.0f}" if "seconds" in row else "-", row.get("reason", ""))
        for row in result["compiled"]
    ]


if __name__ == "__main__":
    typer.run(main)
