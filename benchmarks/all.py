"""All benchmarks that one kind of machine runs, one after another, with their results where the report reads them.

    python -m benchmarks.all [--kind gpu|serving|gpus|host] [--traces DIR] [--vllm DIR] [--only NAME]...
                             [--skip NAME]... [--seconds N] [--list]

Each has some minutes, and may take twice as many on a slow machine: what is stopped is mostly lost. The next begins
whatever has become of it, as long as the minutes of all are not over: of no kind are they more than 30. What failed, or
was not begun, is named at the end. With `--only`, each that was asked for may take its double. With `--seconds` all of
them end within so many: what has no room for its minutes is not begun, and one that knows a budget gets what is left at
most. The first of those that serve compiles what others run. A result takes the place
of the old one when it is whole; one whose benchmark had to be stopped says itself what it misses, if it could still be
written.
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
    """Of a machine: with one GPU, what a second and a third half hour with one are for, with two, or none."""

    GPU = "gpu"
    SERVING = "serving"
    CHECKS = "checks"
    GPUS = "gpus"
    HOST = "host"


class Benchmark(NamedTuple):
    """A command of Python.

    Attributes:
        kind: of the machine that it is for.
        minutes: that it takes, with some to spare; it is stopped after twice as many.
        command: behind `python`. It prints JSON, or writes it to {json}; {conv}, {code}, {mooncake} are traces,
            {seconds} is a part of the minutes, in which it stops by itself and says what is missing. With {vllm}, the
            folder of `--vllm`, it runs only if there is one.
        beside: what is added to the command with `--vllm`.
    """

    kind: Kind
    minutes: float
    command: str
    beside: str = ""


TRACES = {
    "conv": "azure_llm_2023_conv.csv",
    "code": "azure_llm_2023_code.csv",
    "mooncake": "mooncake_conversation.jsonl",
}
ENDING = 0.95
"""The part of its minutes in which a benchmark that knows a budget begins nothing new."""
GRACE = 10.0
"""Seconds in which a benchmark that is stopped may write what it has."""
SERVE = "-m benchmarks.serve --budget-seconds {seconds} --json {json}"
BENCHMARKS = {
    "compiling": Benchmark(Kind.SERVING, 2.0, "-m benchmarks.compiling --json"),
    # Of each kind what the README says comes first: a machine may be lost.
    "serve_rounds": Benchmark(Kind.SERVING, 2.5, f"{SERVE} --quick --memory 8GiB --requests 90 --trace {{conv}}"),
    "serve_rounds_qwen3": Benchmark(
        Kind.SERVING, 2.5, f"{SERVE} --quick --memory 4GiB --requests 150 --trace {{conv}} --model qwen3-0.6b"
    ),
    "serve_vllm": Benchmark(
        Kind.SERVING,
        4.3,
        f"{SERVE} --vllm {{vllm}} --quick --no-wait --rounds 2 --memory 16GiB --requests 300 --trace {{conv}}"
        " --backends vmm --backends vllm",
    ),
    "serve_pressure": Benchmark(
        Kind.SERVING,
        1.8,
        f"{SERVE} --quick --no-wait --rounds 2 --memory 3GiB --requests 30 --lengthen 8 --trace {{conv}}"
        " --backends vmm --backends vmm+suspend --backends paged",
    ),
    "serve_peers": Benchmark(
        Kind.SERVING,
        2.7,
        f"{SERVE} --quick --no-wait --rounds 2 --memory 8GiB --requests 90 --trace {{conv}} --backends vmm"
        " --backends vmm+fa3 --backends paged --backends paged+flashinfer",
    ),
    "generate": Benchmark(Kind.GPU, 4, "-m benchmarks.generate --only Llama-3.1-8B --budget-seconds {seconds} --json"),
    "generate_qwen3": Benchmark(
        Kind.GPU, 3, "-m benchmarks.generate --only Qwen3-0.6B --budget-seconds {seconds} --json"
    ),
    "demo_azure": Benchmark(
        Kind.GPU, 1.2, "-m benchmarks.demo --trace {conv} --requests 2000 --sequences 64 --budget-tokens 65536 --json"
    ),
    "batching": Benchmark(
        Kind.GPU,
        3.2,
        "-m benchmarks.batching --trace {conv} --model Llama-3.1-8B --memory 16GiB --seconds 20 --rounds 1 --json",
        beside="--vllm {vllm} --budget-seconds {seconds}",
    ),
    "batching_qwen3": Benchmark(
        Kind.GPU,
        3,
        "-m benchmarks.batching --trace {conv} --model Qwen3-0.6B --memory 16GiB --seconds 20 --rounds 1 --json",
        beside="--vllm {vllm} --budget-seconds {seconds}",
    ),
    "attention": Benchmark(Kind.GPU, 2.7, "-m benchmarks.attention --trace {conv} --json"),
    "serve_reuse": Benchmark(
        Kind.SERVING,
        3.9,
        f"{SERVE} --reuse --trace {{mooncake}} --model qwen3-0.6b --memory 8GiB --shorten 8 --requests 600"
        " --tokens 500000 --max-sequences 128 --rounds 2 --backends vmm --backends paged --backends vmm+reuse"
        " --backends paged+reuse --backends vllm+reuse",
        beside="--vllm {vllm}",
    ),
    "allocator": Benchmark(Kind.GPU, 0.4, "-m benchmarks.allocator --rounds 50 --json"),
    "fences": Benchmark(Kind.GPU, 0.1, "-m benchmarks.fences --json"),
    "core": Benchmark(Kind.CHECKS, 1.2, "-m benchmarks.core --json"),
    "core_null": Benchmark(Kind.CHECKS, 0.4, "-m benchmarks.core --device null --rounds 30 --json"),
    "mapper": Benchmark(
        Kind.GPU, 1.6, "-m benchmarks.mapper --steps 2000 --rounds 1 --budget-seconds {seconds} --json"
    ),
    "sharing": Benchmark(Kind.GPU, 0.8, "-m benchmarks.sharing --rounds 4 --json"),
    "prefixes": Benchmark(Kind.GPU, 0.3, "-m benchmarks.prefixes --json"),
    "attention_shapes": Benchmark(Kind.GPU, 0.4, "-m benchmarks.attention --only shapes --json"),
    "attention_small": Benchmark(Kind.GPU, 0.4, "-m benchmarks.attention --only small --json"),
    "attention_prompts": Benchmark(Kind.GPU, 1, "-m benchmarks.attention --only prompts --json"),
    "layout_order": Benchmark(Kind.GPU, 1, "-m benchmarks.layout_order --speed --json"),
    "overread": Benchmark(Kind.GPU, 0.3, "-m benchmarks.overread --trace {conv} --json"),
    "check_kernels": Benchmark(Kind.CHECKS, 5, "-m benchmarks.check_kernels --json"),
    "reuse": Benchmark(Kind.GPU, 0.8, "-m benchmarks.reuse --device cuda --trace {conv} --json"),
    "idle": Benchmark(Kind.GPU, 0.3, "-m benchmarks.idle --device cuda --trace {conv} --json"),
    "serve_vllm_qwen3": Benchmark(
        Kind.SERVING,
        4.8,
        f"{SERVE} --vllm {{vllm}} --quick --no-wait --rounds 3 --rates 0.8 --seeds 1 --memory 16GiB --requests 300"
        " --trace {conv} --model qwen3-0.6b --backends vmm --backends paged --backends vllm",
    ),
    "pools": Benchmark(
        Kind.GPUS,
        2.7,
        "-m benchmarks.pools --rounds 1 --requests 240 --move-memory 40GiB --trace {conv} --budget-seconds {seconds}"
        " --json",
    ),
    "sleeping": Benchmark(Kind.SERVING, 1.7, "-m benchmarks.sleeping --vllm {vllm} --json"),
    "counters": Benchmark(Kind.GPU, 2.5, "-m benchmarks.counters --json"),
    "swap": Benchmark(Kind.GPU, 1, "-m benchmarks.swap --json"),
    "serve_rates": Benchmark(
        Kind.GPUS,
        7,
        f"{SERVE} --rounds 1 --seeds 1 --rates 0.8 --unknown --busy --memory 8GiB --requests 90 --trace {{conv}}"
        " --trace {code} --backends vmm --backends paged --backends static --backends static+longest",
    ),
    "serve_rates_qwen3": Benchmark(
        Kind.GPUS,
        7,
        f"{SERVE} --rounds 1 --seeds 3 --rates 0.5 --rates 0.8 --rates 1.1 --memory 16GiB --requests 1000"
        " --tokens 2000000 --trace {conv} --model qwen3-0.6b --backends vmm --backends paged",
    ),
    "step_times_conv": Benchmark(
        Kind.SERVING,
        2,
        "-m benchmarks.step_times --memory 4GiB --trace {conv} --model qwen3-0.6b --json",
    ),
    "step_times_reuse": Benchmark(
        Kind.GPUS,
        4,
        "-m benchmarks.step_times --reuse --memory 8GiB --requests 600 --tokens 500000 --max-sequences 128 --rounds 2"
        " --model qwen3-0.6b --json",
    ),
    "step_times_wait": Benchmark(
        Kind.GPU,
        2,
        "-m benchmarks.step_times --wait --memory 4GiB --trace {conv} --model qwen3-0.6b --json",
    ),
    "step_times_8b": Benchmark(
        Kind.GPUS,
        3,
        "-m benchmarks.step_times --memory 8GiB --requests 90 --rounds 2 --trace {conv} --model llama-3.1-8b --json",
    ),
    "step_times_mooncake": Benchmark(
        Kind.SERVING,
        1.7,
        "-m benchmarks.step_times --memory 8GiB --requests 300 --tokens 500000 --max-sequences 128 --shorten 8"
        " --trace {mooncake} --model qwen3-0.6b --json",
    ),
    "transfer": Benchmark(Kind.GPUS, 0.6, "-m benchmarks.transfer --rounds 10 --json"),
    "batching_ranks": Benchmark(
        Kind.GPUS,
        4,
        "-m benchmarks.batching_ranks --trace {conv} --rounds 2 --seconds 35 --budget-seconds {seconds} --json",
    ),
    "scale": Benchmark(Kind.HOST, 4, "-m benchmarks.scale --json"),
    "prefix_tree": Benchmark(Kind.HOST, 1, "-m benchmarks.prefix_tree --json"),
    "prefix_trace": Benchmark(Kind.HOST, 6, "-m benchmarks.prefix_trace --trace {mooncake} --json"),
    "check_kernels_cpu": Benchmark(Kind.HOST, 1, "-m benchmarks.check_kernels --device cpu --json"),
    "room": Benchmark(Kind.HOST, 1, "-m benchmarks.room --json"),
    "eight_bits": Benchmark(Kind.HOST, 2, "-m benchmarks.eight_bits --json"),
    "layout_order_waste": Benchmark(Kind.HOST, 1, "-m benchmarks.layout_order --trace {conv} --json"),
    "fragmentation_ahead": Benchmark(Kind.HOST, 3, "-m benchmarks.fragmentation --trace {conv} --ahead --json"),
    "fragmentation": Benchmark(Kind.HOST, 8, "-m benchmarks.fragmentation --trace {conv} --json"),
}
"""By the name of their result, without the machine's: in the order in which they run."""


def main(
    kind: Annotated[Kind | None, typer.Option(help="Of this machine; gpu where there is one.")] = None,
    traces: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Where traces are.")] = Path(),
    only: Annotated[list[str] | None, typer.Option(help="Run these.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Run all but these.")] = None,
    vllm: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="In which vLLM is unpacked.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="That all of them may take together.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Say what would run, and for how long at most.")] = False,
) -> None:
    """Run all benchmarks of a kind of machine."""
    kind = kind or (Kind.GPU if torch.cuda.is_available() else Kind.HOST)
    unknown = {*(only or []), *(skip or [])} - BENCHMARKS.keys()
    if unknown:
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    lacking = [name for name in only or [] if "{vllm}" in BENCHMARKS[name].command and not vllm]
    if lacking:
        raise typer.BadParameter(f"--only {', '.join(lacking)}: say with --vllm where vLLM is")
    chosen = {
        name: benchmark
        for name, benchmark in BENCHMARKS.items()
        if (name in only if only else benchmark.kind == kind) and name not in (skip or [])
        if vllm or "{vllm}" not in benchmark.command
    }
    if show:
        rows = [
            (name, benchmark.kind, f"{benchmark.minutes:g}", benchmark.command) for name, benchmark in chosen.items()
        ]
        rows.append(("all", "", f"{sum(benchmark.minutes for benchmark in chosen.values()):g}", ""))
        console.print(make_table("Benchmarks", ("name", "machine", "minutes", "python"), rows))
        return
    # Scripts begin what they do not wait for with ctrl-C ignored, which what we begin would take over.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    left = 60 * sum(benchmark.minutes for benchmark in chosen.values()) * (2 if only else 1)
    outcomes = run_all(chosen, seconds or left, seconds is not None, traces.absolute(), vllm)
    console.print(make_table("Benchmarks", ("name", "seconds", ""), outcomes))
    if any(reason != "written" for *_, reason in outcomes):
        raise typer.Exit(1)


def run_all(
    chosen: dict[str, Benchmark], left: float, strict: bool, traces: Path, vllm: Path | None
) -> list[tuple[str, str, str]]:
    """Runs benchmarks as long as there are seconds left; returns what each took, and what has become of it. Where time
    is strict, one that knows no budget begins only if all of its minutes are left."""
    outcomes = []
    for name, benchmark in chosen.items():
        start, own = perf_counter(), benchmark.minutes * 60
        whole = strict and "{seconds}" not in benchmark.command
        reason = "not begun: too little is left of the time of all"
        if left >= (own if whole else own / 2):
            reason = run(name, benchmark, min(2 * own, left), traces, vllm)
        took = perf_counter() - start
        left -= took
        outcomes.append((name, f"{took:.0f}", reason or "written"))
        errors.print(": ".join(outcomes[-1]), highlight=False, markup=False)
    return outcomes


def run(name: str, benchmark: Benchmark, seconds: float, traces: Path, vllm: Path | None) -> str:
    """Runs a benchmark for so long at most, and puts its result in the place of the old one; says what went wrong."""
    path = result_of(name, benchmark)
    partial = path.with_suffix(".partial")
    missing = [
        file for key, file in TRACES.items() if f"{{{key}}}" in benchmark.command and not (traces / file).exists()
    ]
    if missing:
        return f"there is no {', '.join(missing)} in {traces}"
    places = {key: str(traces / file) for key, file in TRACES.items()} | {"vllm": str(vllm and vllm.absolute())}
    budget = str(round((seconds - GRACE) * ENDING))
    command = f"{benchmark.command} {benchmark.beside if vllm else ''}"
    words = [word.format(json=partial, seconds=budget, **places) for word in shlex.split(command)]
    writes = "{json}" in benchmark.command
    try:
        with open(os.devnull if writes else partial, "w") as output:
            status = run_command(
                [sys.executable, *words], seconds, stdout=output.fileno(), folder=ROOT, grace=min(GRACE, seconds / 2)
            )
        if status:
            return f"it ended with {status}"
        problem = unreadable(partial)
        if not problem:
            partial.replace(path)
        if status is None:
            return f"stopped after {seconds / 60:.2g} minutes{'' if problem else ', and written'}"
        return problem
    finally:
        partial.unlink(missing_ok=True)


def unreadable(path: Path) -> str:
    """Why a file is no result, if so."""
    try:
        return "" if "environment" in json.loads(path.read_text()) else "its result does not say how it was made"
    except (OSError, ValueError) as error:
        return f"it wrote no result: {error}"


def result_of(name: str, benchmark: Benchmark) -> Path:
    """Where its result goes: one of each kind of GPU, or one of all machines if it needs none."""
    kind = ""
    if benchmark.kind != Kind.HOST:
        if not torch.cuda.is_available():
            raise typer.BadParameter(f"{name}: its result is named after the GPU, and torch sees none")
        kind = f"_{torch.cuda.get_device_name().split()[1].lower()}"
    return ROOT / RESULTS / f"{name}{kind}.json"


if __name__ == "__main__":
    typer.run(main)
