"""Serving with vmmkv, with a block table and with static slots: the same requests, model, kernels and budget.

    python -m benchmarks.serve [--quick | --reuse] [--trace FILE]... [--json FILE] [--plot FILE]

Replays a trace with `benchmarks.engine`: at saturation, all requests waiting, in several rounds of which the median is
reported, and at shares of the rate that the block table reached there, with several seeds. Then long prompts, with the
fastest prefill kernels of rows and of blocks. `--quick` is saturation alone, of rows and blocks, in more rounds, with
the host a step ahead of the device and with one that waits for each step's tokens. `--reuse` is saturation alone, of
rows and of blocks with a radix tree, each with prefix reuse and without, in rounds of all traces and of random
conversations behind shared system prompts; requests start when a step has tokens left for them, so that they find what
came before. Without a GPU it runs a tiny model, with lengths divided by 16, and speeds say nothing: blocks are copied
together there for torch's attention.

`--unknown` and `--busy` serve at saturation in other ways, too: as if answers ended with an EOS token, which the
schedule learns of when it has been seen; and with a host that waits, beside a thread that keeps the interpreter busy.

vLLM serves the same, where it is installed, or `--vllm` names a folder in which it is unpacked; with `--reuse` once
without prefix caching and once with it.

`--backends vmm+fa3` and `paged+flashinfer` attend with kernels of others, to prompts and in decode; what cannot be had
is named with the reason. `--backends vmm+suspend` moves what is preempted to the host and back, if that costs less than
to compute it anew; `preempting` in the result says what either costs a token. `--lengthen` makes answers longer: with
memory for few of them many requests are preempted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich import progress as progress_bar

from benchmarks.attention.peers import versions
from benchmarks.engine.engine import BACKENDS, REUSING, SUSPENDING
from benchmarks.engine.model import MODELS, Config, load_model, random_model, read_config
from benchmarks.engine.suspending import PREFILL_TOKENS_PER_S, costs
from benchmarks.environment import complete, environment, to_json
from vmmkv.cli.options import Device
from vmmkv.cli.output import check_plot, console, errors
from vmmkv.memory.budget import parse_bytes
from vmmkv.memory.driver import open_driver

from .measure import LONGEST, REUSE, SUSPEND, Load, Progress, Settings, free_memory, serve
from .prompts import compare_prefill
from .report import compare, draw, tables
from .vllm_peer import SHARE, VLLM, Task, Vllm
from .workloads import Limits, Usual, Workload, make_workload, system_prompts

GPU = Usual("llama-3.1-8b", "16GiB", 8192, 16_384, shorten=1)
HOST = Usual("tiny", "1MiB", 512, 512, shorten=16)
CHOICES = [
    *BACKENDS,
    *(f"{name}+{REUSE}" for name in REUSING),
    *(f"{name}+{SUSPEND}" for name in SUSPENDING),
    *("vmm+fa3", "paged+flashinfer", f"static+{LONGEST}", *VLLM),
]
"""Backends."""


class Plan(NamedTuple):
    """What is measured, of the main trace, unless one asks for something else."""

    backends: list[str]
    rates: list[float]
    rounds: int
    seeds: int
    requests: int
    wait: bool
    prompts: bool


FULL = Plan(
    [*BACKENDS, f"static+{LONGEST}", VLLM[0]], [0.5, 0.8], rounds=3, seeds=3, requests=300, wait=False, prompts=True
)
QUICK = Plan(["vmm", "paged"], [], rounds=5, seeds=3, requests=150, wait=True, prompts=False)
SHARING = Plan(
    ["vmm", "paged", "vmm+reuse", "paged+reuse", *VLLM], [], rounds=3, seeds=3, requests=300, wait=False, prompts=False
)
LARGEST = 0.9
"""Of the budget: requests that would take more are left out."""


def main(
    trace: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Azure CSV or Mooncake JSON lines; the first is the main one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"{', '.join(MODELS)}, or a folder of safetensors.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for K and V, of each backend.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Saturation alone, of rows and blocks; see above.")] = False,
    reuse: Annotated[bool, typer.Option("--reuse", help="With prefix reuse and without; see above.")] = False,
    shared_prompts: Annotated[int, typer.Option(min=1, help="System prompts, with --reuse.")] = 8,
    backends: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CHOICES)}.")] = None,
    vllm: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="vLLM, unpacked; None: it may be installed.")
    ] = None,
    rates: Annotated[list[float] | None, typer.Option(help="Of the main trace: shares of saturation.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Of the main trace at saturation; the median is reported.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="At each rate: prompts and pauses anew; the median is reported.")
    ] = None,
    wait: Annotated[
        bool | None, typer.Option(help="Of the main trace at saturation, also wait for each step's tokens.")
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Likewise, with lengths of answers that the schedule does not know.")
    ] = False,
    busy: Annotated[bool, typer.Option("--busy", help="Likewise, waiting, beside a busy Python thread.")] = False,
    requests: Annotated[int | None, typer.Option(min=1, help="Most requests of a trace.")] = None,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Most tokens of the main trace, or of each with --reuse; else of others half."),
    ] = 400_000,
    max_sequences: Annotated[int, typer.Option(min=1, help="Most requests that run at a time.")] = 256,
    max_seq_len: Annotated[
        int | None, typer.Option(help="What static slots are made for, if no request is longer.")
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Most tokens of prompts in a step.")] = 2048,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Of the long prompts.")] = None,
    shorten: Annotated[int | None, typer.Option(min=1, help="Divide the lengths of a trace.")] = None,
    lengthen: Annotated[int, typer.Option(min=1, help="Multiply the lengths of answers.")] = 1,
    lookahead: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that are mapped ahead of each sequence; 0 without a mapper, else the usual."),
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and random requests.")] = 0,
    budget_seconds: Annotated[float, typer.Option(help="When to stop, and say what was not reached.")] = 480.0,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write the result.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and concurrency over time.")] = None,
) -> None:
    """Measure serving with each KV backend."""
    deadline = perf_counter() + budget_seconds
    if quick and reuse:
        raise typer.BadParameter("--quick and --reuse are two benchmarks")
    plan = QUICK if quick else SHARING if reuse else FULL
    asked = backends or plan.backends
    peers = [name for name in VLLM if name in asked or (vllm and name in VLLM[: 1 + reuse])]
    peer = Vllm(peers, vllm, Path(model) if model and model not in MODELS else None)
    backends = [name for name in asked if name not in VLLM]
    rates = sorted(set(rates or plan.rates))
    for backend in asked:
        if backend not in CHOICES:
            raise typer.BadParameter(f"{backend}: backends are {', '.join(CHOICES)}")
    if rates and rates[0] <= 0:
        raise typer.BadParameter(f"--rates {rates[0]:g}: a share of saturation is more than 0")
    if plot:
        check_plot(plot)
    if json_output and not json_output.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json_output}: write it in a folder that exists")
    driver = open_driver(device)
    usual = GPU if driver.device.type == "cuda" else HOST
    name = model or usual.model
    config = find_config(name)
    dtype = torch.bfloat16 if usual is GPU else torch.float32
    max_bytes = parse_bytes(memory or usual.memory, driver.memory_info()[0])
    token_bytes = config.kv_layout(dtype).token_bytes
    limits = Limits(
        requests or plan.requests,
        tokens,
        longest=int(LARGEST * max_bytes) // token_bytes,
        max_seq_len=max_seq_len or usual.max_seq_len,
        shorten=shorten or usual.shorten,
        lengthen=lengthen,
    )
    if reuse:
        workloads = [make_workload(path, limits, seed) for path in trace or []]
        workloads.append(system_prompts(shared_prompts, limits._replace(shorten=usual.shorten), seed))
    else:
        first, *others = trace or [None]
        workloads = [make_workload(first, limits, seed)]
        workloads += [make_workload(path, limits._replace(tokens=tokens // 2), seed) for path in others]
    prompt = prompt_tokens or usual.prompt_tokens
    positions = max(prompt, *(workload.max_seq_len for workload in workloads))
    make = random_model if name in MODELS else load_model
    weights = make(config if name in MODELS else Path(name), positions, driver.device, dtype)
    settings = Settings(
        weights, max_bytes, max_sequences, chunk, deadline, seed, lookahead, late=reuse, seeds=seeds or plan.seeds
    )
    if name in PREFILL_TOKENS_PER_S:
        settings = settings._replace(tokens_per_s=PREFILL_TOKENS_PER_S[name])
    elif any(backend.endswith(f"+{SUSPEND}") for backend in backends):
        raise typer.BadParameter(f"{name}: nobody has measured how fast it computes prompts, so what suspending saves")
    result: dict[str, Any] = {
        "environment": environment(driver.device),
        "peers": versions(),
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "budget_bytes": max_bytes,
        "token_bytes": token_bytes,
        "preempting": costs(token_bytes, settings.tokens_per_s) if name in PREFILL_TOKENS_PER_S else None,
        "max_sequences": max_sequences,
        "chunk": chunk,
        "lookahead": lookahead,
        "workloads": [describe(workload) for workload in workloads],
        "serving": [],
        "prefill": [],
        "skipped": [],
        "missed": [],
    }
    try:
        ways = [
            (plan.wait if wait is None else wait, Load(wait=True)),
            (unknown, Load(unknown=True)),
            (busy, Load(wait=True, busy=True)),
        ]
        loads = [Load(), *(load for is_asked, load in ways if is_asked), *map(Load, rates)]
        rounds = rounds or plan.rounds
        ours = settings
        if peer.names and peer.can_be_had:
            ours = settings._replace(deadline=deadline - SHARE * budget_seconds)
        if reuse:
            measure_all(result, ours, workloads, backends, rounds)
            tasks = [Task(workload, [Load()], rounds) for workload in workloads]
        else:
            measure(result, ours, workloads, backends, loads, rounds, prompt if plan.prompts else None)
            tasks = [Task(workloads[0], [Load(), *map(Load, rates)], rounds)]
        peer.serve(result, settings, tasks)
    except BaseException as error:
        result["missed"].append(f"all that was to follow: {type(error).__name__} {error}".rstrip())
        raise
    finally:  # what was measured is not lost to what fails behind it
        result["comparisons"] = compare(result)
        if json_output:
            json_output.write_text(to_json(complete(result)) + "\n")
        for table in tables(result):
            console.print(table)
        if plot and result["serving"]:
            draw(result, plot)


def find_config(model: str) -> Config:
    """Of a model by name, or in a folder."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model) / "config.json"
    if not path.is_file():
        raise typer.BadParameter(f"{model}: it must be one of {', '.join(MODELS)}, or a folder with a config.json")
    return read_config(json.loads(path.read_text()))


def describe(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "requests": len(workload.requests),
        "tokens": workload.tokens,
        "prompt_tokens": sum(request.prompt for request in workload.requests),
        "known_tokens": workload.known_tokens(),
        "output_tokens": sum(request.output for request in workload.requests),
        "max_seq_len": workload.max_seq_len,
        "longest": workload.longest,
        "left_out": workload.left_out,
    }


def measure(
    result: dict[str, Any],
    settings: Settings,
    workloads: list[Workload],
    backends: list[str],
    loads: list[Load],
    rounds: int,
    prompt_tokens: int | None,
) -> None:
    """Adds to a result the main trace, long prompts, other traces: what matters most comes first."""
    with shown_progress() as progress:
        for index, workload in enumerate(workloads):
            if index:
                serve(result, settings, workload, backends, [Load()], 1, progress)
            else:
                serve(result, settings, workload, backends, loads, rounds, progress)
                free_memory()
                if prompt_tokens:
                    compare_prefill(result, settings, prompt_tokens, progress)
                    free_memory()


def measure_all(
    result: dict[str, Any], settings: Settings, workloads: list[Workload], backends: list[str], rounds: int
) -> None:
    """Adds to a result all traces at saturation; each has the same share of the time."""
    with shown_progress() as progress:
        for index, workload in enumerate(workloads):
            share = (settings.deadline - perf_counter()) / (len(workloads) - index)
            within = settings._replace(deadline=perf_counter() + share)
            serve(result, within, workload, backends, [Load()], rounds, progress)
            free_memory()


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A bar, on a terminal."""
    with progress_bar.Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("Preparing", total=None)
        yield lambda name, finished, total: bar.update(task, description=name, completed=finished, total=total)


if __name__ == "__main__":
    typer.run(main)
