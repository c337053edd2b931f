"""Serving with vmmkv, with a block table and with static slots: the same requests, model, kernels and budget.

    python -m benchmarks.serve [--quick | --reuse] [--trace FILE]... [--json FILE] [--plot FILE]

Replays a trace with `benchmarks.engine`: at saturation, all requests waiting, in several rounds of which the median is
reported, and at shares of the rate that the block table reached there, with several seeds. Then long prompts, with the
fastest prefill kernels of rows and of blocks. Rows begin each run without memory; blocks have theirs before the clock
starts. `--quick` is saturation alone, of rows and blocks, in more rounds, with the host a step ahead of the device and
with one that waits for each step's tokens. `--reuse` is saturation alone, of rows and of blocks with a radix tree, each
with prefix reuse and without, in rounds of all traces and of random conversations behind shared system prompts;
requests start when a step has tokens left for them, so that they find what came before. Without a GPU it runs a tiny
model, with lengths divided by 16, and speeds say nothing: blocks are copied together there for torch's attention.

`--unknown` and `--busy` serve at saturation in other ways, too: as if answers ended with an EOS token, which the
schedule learns of when it has been seen; and with a host that waits, beside a thread that keeps the interpreter busy.

vLLM serves the same, where it is installed, or `--vllm` names a folder in which it is unpacked; with `--reuse` once
without prefix caching and once with it. Where `--backends` say what is measured, it is one of them.

`--backends vmm+fa3` and `paged+flashinfer` attend with kernels of others, to prompts and in decode; what cannot be had
is named with the reason. `--backends vmm+suspend` moves what is preempted to the host and back, if that costs less than
to compute it anew; `preempting` in the result says what either costs a token. `--lengthen` makes answers longer: with
memory for few of them many requests are preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import typer
from rich import progress as progress_bar

from benchmarks.attention.peers import versions
from benchmarks.engine.engine import BACKENDS
from benchmarks.engine.model import MODELS
from benchmarks.engine.suspending import PREFILL_TOKENS_PER_S, costs
from benchmarks.environment import complete, environment, to_json
from vmmkv.budget import parse_bytes
from vmmkv.cli.options import Device
from vmmkv.cli.output import check_plot, console, errors
from vmmkv.driver.driver import open_driver

from . import options
from .measure import LONGEST, SUSPEND, Load, Progress, Settings, free_memory, serve
from .prompts import compare_prefill
from .report import compare, draw, tables
from .setup import GPU, HOST, describe, find_config, longest_request, make_model
from .vllm_peer import SHARE, VLLM, Task, Vllm
from .workloads import Limits, Workload, make_workload, system_prompts


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


def main(
    trace: options.Traces = None,
    model: options.ModelName = None,
    memory: options.Memory = None,
    quick: options.Quick = False,
    reuse: options.Reuse = False,
    shared_prompts: options.SharedPrompts = 8,
    backends: options.Backends = None,
    vllm: options.VllmFolder = None,
    rates: options.Rates = None,
    rounds: options.Rounds = None,
    seeds: options.Seeds = None,
    wait: options.Wait = None,
    unknown: options.Unknown = False,
    busy: options.Busy = False,
    requests: options.Requests = None,
    tokens: options.Tokens = 400_000,
    max_sequences: options.MaxSequences = 256,
    max_seq_len: options.MaxSeqLen = None,
    chunk: options.Chunk = 2048,
    prompt_tokens: options.PromptTokens = None,
    shorten: options.Shorten = None,
    lengthen: options.Lengthen = 1,
    lookahead: options.Lookahead = None,
    device: Device = None,
    seed: options.Seed = 0,
    budget_seconds: options.BudgetSeconds = 480.0,
    json_output: options.JsonFile = None,
    plot: options.Plot = None,
) -> None:
    """Measure serving with each KV backend."""
    deadline = perf_counter() + budget_seconds
    plan = make_plan(
        quick, reuse, backends=backends, rates=rates, rounds=rounds, seeds=seeds, requests=requests, wait=wait
    )
    peers = [name for name in VLLM if name in plan.backends or (vllm and not backends and name in VLLM[: 1 + reuse])]
    peer = Vllm(peers, vllm, Path(model) if model and model not in MODELS else None)
    check_files(json_output, plot)

    driver = open_driver(device)
    usual = GPU if driver.device.type == "cuda" else HOST
    name = model or usual.model
    config, dtype = find_config(name), torch.bfloat16 if usual is GPU else torch.float32
    max_bytes = parse_bytes(memory or usual.memory, driver.memory_info()[0])
    limits = Limits(
        plan.requests,
        tokens,
        longest=longest_request(config, dtype, max_bytes),
        max_seq_len=max_seq_len or usual.max_seq_len,
        shorten=shorten or usual.shorten,
        lengthen=lengthen,
    )
    if reuse:
        workloads = [make_workload(path, limits, seed) for path in trace or []]
        workloads.append(system_prompts(shared_prompts, limits._replace(shorten=usual.shorten), seed))
    else:
        workloads = make_workloads(trace or [], limits, seed)
    prompt = prompt_tokens or usual.prompt_tokens
    positions = max(prompt, *(workload.max_seq_len for workload in workloads))
    weights = make_model(name, config, positions, driver.device, dtype)
    speed = prefill_speed(name, plan.backends)
    settings = Settings(weights, max_bytes, max_sequences, chunk, deadline, seed, lookahead, late=reuse)
    settings = ours = settings._replace(tokens_per_s=speed, seeds=plan.seeds)
    if peer.names and peer.can_be_had:
        ours = settings._replace(deadline=deadline - SHARE * budget_seconds)
    backends = [backend for backend in plan.backends if backend not in VLLM]
    result = begin_result(name, settings, workloads)
    with reported(result, json_output, plot):
        if reuse:
            measure_all(result, ours, workloads, backends, plan.rounds)
            tasks = [Task(workload, [Load()], plan.rounds) for workload in workloads]
        else:
            loads = make_loads(plan, unknown, busy)
            measure(result, ours, workloads, backends, loads, plan.rounds, prompt if plan.prompts else None)
            tasks = [Task(workloads[0], [Load(), *map(Load, plan.rates)], plan.rounds)]
        peer.serve(result, settings, tasks)


def make_plan(quick: bool, reuse: bool, **asked: Any) -> Plan:
    """What is measured: what one asks for, and the rest as of one of the plans."""
    if quick and reuse:
        raise typer.BadParameter("--quick and --reuse are two benchmarks")
    plan = QUICK if quick else SHARING if reuse else FULL
    plan = plan._replace(**{name: value for name, value in asked.items() if value not in (None, [])})
    for backend in plan.backends:
        if backend not in options.CHOICES:
            raise typer.BadParameter(f"{backend}: backends are {', '.join(options.CHOICES)}")
    if min(plan.rates, default=1) <= 0:
        raise typer.BadParameter(f"--rates {min(plan.rates):g}: a share of saturation is more than 0")
    return plan._replace(rates=sorted(set(plan.rates)))


def make_loads(plan: Plan, unknown: bool, busy: bool) -> list[Load]:
    """How requests of the main trace come, and are served."""
    ways = [(plan.wait, Load(wait=True)), (unknown, Load(unknown=True)), (busy, Load(wait=True, busy=True))]
    return [Load(), *(load for is_asked, load in ways if is_asked), *map(Load, plan.rates)]


def check_files(json_output: Path | None, plot: Path | None) -> None:
    """Refuses, before anything is measured, files that could not be written."""
    if plot:
        check_plot(plot)
    if json_output and not json_output.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json_output}: write it in a folder that exists")


def prefill_speed(model: str, backends: list[str]) -> float:
    """Tokens of prompts that a model computes in a second, which says whether suspending saves time."""
    if model not in PREFILL_TOKENS_PER_S and any(backend.endswith(f"+{SUSPEND}") for backend in backends):
        raise typer.BadParameter(f"{model}: nobody has measured how fast it computes prompts, so what suspending saves")
    return PREFILL_TOKENS_PER_S.get(model, inf)


def make_workloads(traces: list[Path], limits: Limits, seed: int) -> list[Workload]:
    """The main trace, or random conversations where there is none, and half as many tokens of others."""
    halved = limits._replace(tokens=limits.tokens // 2)
    first, *others = traces or [None]
    return [make_workload(first, limits, seed), *(make_workload(path, halved, seed) for path in others)]


def begin_result(model: str, settings: Settings, workloads: list[Workload]) -> dict[str, Any]:
    """What was asked for; what is measured is added."""
    device, dtype = settings.model.device, settings.model.dtype
    token_bytes = settings.model.config.kv_layout(dtype).token_bytes
    return {
        "environment": environment(device),
        "peers": versions(),
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "budget_bytes": settings.max_bytes,
        "token_bytes": token_bytes,
        "preempting": costs(token_bytes, settings.tokens_per_s) if model in PREFILL_TOKENS_PER_S else None,
        "max_sequences": settings.max_sequences,
        "chunk": settings.chunk,
        "lookahead": settings.lookahead,
        "workloads": [describe(workload) for workload in workloads],
        "serving": [],
        "prefill": [],
        "skipped": [],
        "missed": [],
    }


@contextmanager
def reported(result: dict[str, Any], json_output: Path | None, plot: Path | None) -> Iterator[None]:
    """Compares, writes and shows what has been measured, even if something fails: it is not lost to that."""
    try:
        yield
    except BaseException as error:
        result["missed"].append(f"all that was to follow: {type(error).__name__} {error}".rstrip())
        raise
    finally:
        result["comparisons"] = compare(result)
        if json_output:
            json_output.write_text(to_json(complete(result)) + "\n")
        for table in tables(result):
            console.print(table)
        if plot and result["serving"]:
            draw(result, plot)


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
