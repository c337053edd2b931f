"""Run all benchmarks of one kind of machine, one after another, and put their results where the report reads them.

    python -m benchmarks.all [--kind gpu|serving|gpus|host] [--traces DIR] [--vllm DIR] [--only NAME]...
                             [--seconds N] [--list]

Each benchmark has some minutes, and is stopped after twice as many. The next one begins whatever has become of it, as
long as the minutes of all are not over (with `--only`, twice as many; or `--seconds`). A result takes the place of the
old one when it is whole. Benchmarks that failed, or were not begun, are named at the end.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

import torch
import typer

from vmmkv.cli.output import console, errors, make_table

from .newest import RESULTS, ROOT
from .processes import run_command


class Kind(StrEnum):
    """Of a machine: with one GPU (two half hours), with two GPUs, or with none."""

    GPU = "gpu"
    SERVING = "serving"
    GPUS = "gpus"
    HOST = "host"


class Benchmark(NamedTuple):
    """A command of Python.

    Attributes:
        kind: of the machine.
        minutes: that it takes, with some to spare.
        command: behind `python -m benchmarks.`. It prints JSON, or writes it to {json}; {conv} and {mooncake} are
            traces; after {seconds} it stops by itself and says what is missing. With {vllm}, the folder of `--vllm`, it
            runs only if there is one.
        beside: added to the command with `--vllm`.
    """

    kind: Kind
    minutes: float
    command: str
    beside: str = ""


TRACES = {"conv": "azure_llm_2023_conv.csv", "mooncake": "mooncake_conversation.jsonl"}
ENDING = 0.95
"""The part of its minutes after which a benchmark with {seconds} begins nothing new."""
GRACE = 10.0
"""Seconds in which a benchmark that is stopped may write what it has."""
SERVE = "serve --budget-seconds {seconds} --json {json}"
BATCHING = "batching --trace {conv} --memory 16GiB --seconds 20 --rounds 1 --json --model"
BATCHING_VLLM = "--vllm {vllm} --budget-seconds {seconds}"
GPU, SERVING, GPUS, HOST = Kind
BENCHMARKS = {
    # The results of the README come first: a machine may be lost.
    "serve_rounds": Benchmark(SERVING, 3.5, f"{SERVE} --wait --rounds 5 --memory 8GiB --requests 90 --trace {{conv}}"),
    "serve_rounds_qwen3": Benchmark(
        SERVING, 3, f"{SERVE} --wait --rounds 5 --memory 4GiB --requests 150 --trace {{conv}} --model qwen3-0.6b"
    ),
    "serve_vllm": Benchmark(
        SERVING,
        4.3,
        f"{SERVE} --vllm {{vllm}} --rounds 2 --memory 16GiB --requests 300 --trace {{conv}} --backends vmm"
        " --backends vllm",
    ),
    "serve_reuse": Benchmark(
        SERVING,
        3.9,
        f"{SERVE} --reuse --trace {{mooncake}} --model qwen3-0.6b --memory 8GiB --shorten 8 --requests 600"
        " --tokens 500000 --max-sequences 128 --rounds 2 --backends vmm --backends paged --backends vmm+reuse"
        " --backends paged+reuse --backends vllm+reuse",
        "--vllm {vllm}",
    ),
    "generate": Benchmark(GPU, 4, "generate --budget-seconds {seconds} --json --only Llama-3.1-8B"),
    "batching": Benchmark(GPU, 3.2, f"{BATCHING} Llama-3.1-8B", BATCHING_VLLM),
    "batching_qwen3": Benchmark(GPU, 3, f"{BATCHING} Qwen3-0.6B", BATCHING_VLLM),
    "core": Benchmark(GPU, 1.2, "core --json"),
    "core_null": Benchmark(GPU, 0.4, "core --device null --rounds 30 --json"),
    "attention": Benchmark(GPU, 2.7, "attention --trace {conv} --only decode --only prefill --json"),
    "mapper": Benchmark(GPU, 1.6, "mapper --steps 2000 --rounds 1 --budget-seconds {seconds} --json"),
    "sharing": Benchmark(GPU, 0.8, "sharing --json"),
    "prefixes": Benchmark(GPU, 0.3, "prefixes --json"),
    "swap": Benchmark(GPU, 1, "swap --json"),
    "attention_shapes": Benchmark(GPU, 0.4, "attention --only shapes --json"),
    "attention_prompts": Benchmark(GPU, 1, "attention --only prompts --json"),
    "check_kernels": Benchmark(SERVING, 5, "check_kernels --json"),
    "pools": Benchmark(
        GPU,
        2.5,
        "pools --rounds 1 --requests 120 --move-memory 40GiB --trace {conv} --budget-seconds {seconds} --json",
    ),
    "rollouts": Benchmark(GPU, 3, "rollouts --json"),
    "transfer": Benchmark(GPUS, 0.6, "transfer --rounds 10 --json"),
    "prefix_tree": Benchmark(HOST, 1, "prefix_tree --json"),
    "eight_bits": Benchmark(HOST, 2, "eight_bits --json"),
    "fragmentation": Benchmark(HOST, 8, "fragmentation --trace {conv} --json"),
}
"""By the name of their result, without the machine's: in the order in which they run."""


def main(
    kind: Annotated[Kind | None, typer.Option(help="Of this machine; gpu where there is one.")] = None,
    traces: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the traces.")] = Path(),
    only: Annotated[list[str] | None, typer.Option(help="Run these.")] = None,
    vllm: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="In which vLLM is unpacked.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="For all of them together.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Print the commands, and their minutes.")] = False,
) -> None:
    """Run all benchmarks of a kind of machine."""
    kind = kind or (Kind.GPU if torch.cuda.is_available() else Kind.HOST)
    unknown = {*(only or [])} - BENCHMARKS.keys()
    if unknown:
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    lacking = [name for name in only or [] if "{vllm}" in BENCHMARKS[name].command and not vllm]
    if lacking:
        raise typer.BadParameter(f"--only {', '.join(lacking)}: say with --vllm where vLLM is")
    chosen = {
        name: benchmark
        for name, benchmark in BENCHMARKS.items()
        if (name in only if only else benchmark.kind == kind)
        if vllm or "{vllm}" not in benchmark.command
    }
    minutes = sum(benchmark.minutes for benchmark in chosen.values())
    if show:
        rows = [(name, each.kind, f"{each.minutes:g}", each.command) for name, each in chosen.items()]
        columns = "name", "machine", "minutes", "python -m benchmarks."
        console.print(make_table("Benchmarks", columns, [*rows, ("all", "", f"{minutes:g}", "")]))
        return
    # Scripts start background processes with ctrl-C ignored, which the benchmarks would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    left = seconds or 60 * minutes * (2 if only else 1)
    outcomes = []
    for name, benchmark in chosen.items():
        start = perf_counter()
        reason = "not begun: too little is left of the time of all"
        if left >= 60 * benchmark.minutes / 2:
            reason = run(name, benchmark, min(120 * benchmark.minutes, left), traces.absolute(), vllm) or "written"
        took = perf_counter() - start
        left -= took
        outcomes.append((name, f"{took:.0f}", reason))
        errors.print(": ".join(outcomes[-1]), highlight=False, markup=False)
    console.print(make_table("Benchmarks", ("name", "seconds", ""), outcomes))
    if any(reason != "written" for *_, reason in outcomes):
        raise typer.Exit(1)


def run(name: str, benchmark: Benchmark, seconds: float, traces: Path, vllm: Path | None) -> str:
    """Run a benchmark for so long at most, and put its result in the place of the old one; return what went wrong."""
    path = result_of(name, benchmark)
    partial = path.with_suffix(".partial")
    missing = [
        file for key, file in TRACES.items() if f"{{{key}}}" in benchmark.command and not (traces / file).exists()
    ]
    if missing:
        return f"there is no {', '.join(missing)} in {traces}"
    places = {key: str(traces / file) for key, file in TRACES.items()} | {"vllm": str(vllm and vllm.absolute())}
    budget = str(round((seconds - GRACE) * ENDING))
    module, *words = (
        word.format(json=partial, seconds=budget, **places)
        for word in shlex.split(f"{benchmark.command} {benchmark.beside if vllm else ''}")
    )
    command = [sys.executable, "-m", f"{__package__}.{module}", *words]
    try:
        with open(os.devnull if "{json}" in benchmark.command else partial, "w") as output:
            status = run_command(command, seconds, stdout=output.fileno(), folder=ROOT, grace=min(GRACE, seconds / 2))
        if status:
            return f"it ended with {status}"
        problem = ""
        try:
            if "environment" in json.loads(partial.read_text()):
                partial.replace(path)
            else:
                problem = "its result does not say how it was made"
        except (OSError, ValueError) as error:
            problem = f"it wrote no result: {error}"
        if status is None:
            return f"stopped after {seconds / 60:.2g} minutes{'' if problem else ', and written'}"
        return problem
    finally:
        partial.unlink(missing_ok=True)


def result_of(name: str, benchmark: Benchmark) -> Path:
    """The path of a result: one for each kind of GPU, or one for all machines if it needs none."""
    kind = ""
    if benchmark.kind != Kind.HOST:
        if not torch.cuda.is_available():
            raise typer.BadParameter(f"{name}: its result is named after the GPU, and torch sees none")
        kind = f"_{torch.cuda.get_device_name().split()[1].lower()}"
    return ROOT / RESULTS / f"{name}{kind}.json"


if __name__ == "__main__":
    typer.run(main)
