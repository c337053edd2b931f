"""Where the time of serving goes on rows and in blocks: kernels of the device, and what the host does between them.

    python -m benchmarks.step_times [--trace FILE]... [--reuse] [--wait] [--model NAME] [--memory BYTES] [--rounds N]
                                    [--json]

Requests are served as in `benchmarks.serve`, all waiting from the beginning, in rounds in turns; then once more under
torch's profiler, which adds up the time of each kernel. A run that takes longer than its kernels waits for the host:
for its cache manager, the driver calls in it, scheduling, and launches. With `--reuse` requests begin with what others
have computed, on rows and in blocks; without a trace their prompts begin with one of a few. With `--wait` the host
takes the tokens of each step before it plans the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from math import inf
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.comparisons import COLUMNS, lines
from benchmarks.environment import environment, print_result
from vmmkv.budget import parse_bytes
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import console, make_table
from vmmkv.driver.driver import open_driver

from .engine.engine import Engine
from .serve import options
from .serve.measure import REUSE, Load, Settings, free_memory, make_engine, middle, run_load, turns
from .serve.setup import GPU, HOST, describe, find_config, longest_request, make_model
from .serve.workloads import Limits, Workload, make_workload, system_prompts

Row = dict[str, Any]
BACKENDS = BLOCKS, ROWS = "paged", "vmm"
PROMPTS = 8
"""That requests begin with, with reuse and without a trace."""
SHOWN = 8
"""Kernels that are named, of those that take the most time; of the others the sum is told."""


class Kernel(NamedTuple):
    """What a run spent in kernels of one name, or in copies of one kind."""

    name: str
    calls: int
    us: float


def main(
    trace: options.Traces = None,
    reuse: Annotated[bool, typer.Option("--reuse", help="With prefix reuse.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="For the tokens of each step.")] = False,
    model: options.ModelName = None,
    memory: options.Memory = None,
    requests: Annotated[int, typer.Option(min=1, help="Most requests of a trace.")] = 150,
    tokens: options.Tokens = 400_000,
    max_sequences: options.MaxSequences = 256,
    chunk: options.Chunk = 2048,
    shorten: options.Shorten = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each backend; the median is reported.")] = 3,
    device: Device = None,
    seed: options.Seed = 0,
    json_output: JsonOutput = False,
) -> None:
    """Measure where the time of serving goes."""
    driver = open_driver(device)
    usual = GPU if driver.device.type == "cuda" else HOST
    name, dtype = model or usual.model, torch.bfloat16 if usual is GPU else torch.float32
    config, max_bytes = find_config(name), parse_bytes(memory or usual.memory, driver.memory_info()[0])
    longest = longest_request(config, dtype, max_bytes)
    limits = Limits(requests, tokens, longest, usual.max_seq_len, shorten or usual.shorten)
    workloads = [make_workload(path, limits, seed) for path in trace or [None]]
    if reuse and not trace:
        workloads = [system_prompts(PROMPTS, limits, seed)]
    positions = max(workload.max_seq_len for workload in workloads)
    weights = make_model(name, config, positions, driver.device, dtype)
    settings = Settings(weights, max_bytes, max_sequences, chunk, inf, seed, late=reuse)
    result = {
        "environment": environment(driver.device),
        "model": name,
        "reuse": reuse,
        "wait": wait,
        "budget_bytes": max_bytes,
        "chunk": chunk,
        "workloads": [describe(workload) for workload in workloads],
        "serving": [
            row for workload in workloads for row in measure(settings, workload, Load(wait=wait), rounds, reuse)
        ],
    }
    result["comparisons"] = compare(result)
    if json_output:
        print_result(result)
    else:
        show(result)


def measure(settings: Settings, workload: Workload, load: Load, rounds: int, reuse: bool) -> list[Row]:
    """A row for each backend: of the run with the median throughput, with the kernels of one more."""
    found: dict[str, list[Row]] = {name: [] for name in BACKENDS}
    with ExitStack() as stack:
        made = {name: make_engine(settings, workload, f"{name}+{REUSE}" if reuse else name) for name in BACKENDS}
        engines = {name: stack.enter_context(closing(engine)) for name, engine in made.items()}
        for _, name, _ in turns(list(BACKENDS), [load], rounds, 0):
            found[name].append(serve(settings, workload, engines[name], load))
        about = {name: {"trace": workload.name, "backend": name} for name in BACKENDS}
        return [
            about[name] | middle(found[name]) | profiled(settings, workload, engines[name], load) for name in BACKENDS
        ]


def serve(settings: Settings, workload: Workload, engine: Engine, load: Load) -> Row:
    """What one run took, all requests at once."""
    _, row = run_load(settings, workload, engine, load, 0, None, lambda finished, total: None)
    free_memory()
    return row


def profiled(settings: Settings, workload: Workload, engine: Engine, load: Load) -> Row:
    """What kernels and copies of the device take in a step of a run; nothing where there is no GPU."""
    activity = ProfilerActivity.CUDA if settings.model.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        row = serve(settings, workload, engine, load)
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    kernels = [Kernel(event.key, event.count, event.self_device_time_total) for event in events]
    return {
        "device_us": sum(kernel.us for kernel in kernels) / row["steps"],
        "kernels": [{**kernel._asdict(), "us": kernel.us / row["steps"]} for kernel in largest(kernels)],
    }


def largest(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Those that take the most time, and one for all others."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.us)
    shown, others = ordered[:SHOWN], ordered[SHOWN:]
    rest = Kernel("others", sum(kernel.calls for kernel in others), sum(kernel.us for kernel in others))
    return [*shown, *([rest] if others else [])]


def step_us(row: Row) -> float:
    """Of a run, microseconds of a step."""
    return float(row["seconds"]) * 1e6 / float(row["steps"])


def compare(result: Row) -> list[Row]:
    """Rows over blocks, for each trace."""
    rows = {(row["trace"], row["backend"]): row for row in result["serving"]}
    found = []
    for trace in dict.fromkeys(row["trace"] for row in result["serving"]):
        ours, others = rows[trace, ROWS], rows[trace, BLOCKS]
        speed = ours["output_tokens_per_s"] / others["output_tokens_per_s"]
        found.append({"what": f"{trace}: tokens/s on rows over blocks", "value": speed})
        kernels = ours["device_us"] / others["device_us"] if others["device_us"] else None
        found.append({"what": f"{trace}: kernels' time on rows over blocks", "value": kernels})
    return found


def table(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and lines of what a step takes, in microseconds."""
    rows = result["serving"]
    parts: list[tuple[str, Callable[[Row], float]]] = [
        ("a step", step_us),
        ("kernels and copies", itemgetter("device_us")),
        ("the device has none", lambda row: max(step_us(row) - row["device_us"], 0.0)),
        ("host, scheduling and launching", itemgetter("host_us")),
        ("of it the cache manager", itemgetter("manager_us")),
        ("of it driver calls", itemgetter("driver_us")),
        ("driver calls of the mapper, beside it", itemgetter("mapper_us")),
    ]
    lines = [(name, *(f"{part(row):,.0f}" for row in rows)) for name, part in parts]
    return ("µs a step", *(f"{row['trace']}, {row['backend']}" for row in rows)), lines


def kernel_lines(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each run and kernel."""
    lines = [
        (row["trace"], row["backend"], kernel["name"][:60], f"{kernel['calls']:,}", f"{kernel['us']:,.0f}")
        for row in result["serving"]
        for kernel in row["kernels"]
    ]
    return ("trace", "backend", "kernel", "calls", "µs a step"), lines


def show(result: Row) -> None:
    console.print(make_table("Serving", *table(result)))
    console.print(make_table("Kernels", *kernel_lines(result)))
    console.print(make_table("Comparisons", COLUMNS, lines(result["comparisons"])))


if __name__ == "__main__":
    typer.run(main)
