"""Memory that goes back to the system when load falls, and what it costs to come back.

    python -m benchmarks.idle [--device cuda] [--trace FILE] [--json] [--plot FILE]

The load is busy, quiet, and busy again. Three allocators serve it: a `KVCache` that is trimmed while it is quiet, one
that is not, and a pool of blocks that is allocated beforehand. On a GPU the memory is what the device has less of than
before; on the host it is what the allocator has taken. Nothing is written and no model runs: the time is the
allocator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress

from benchmarks.environment import environment, print_result
from vmmkv import KVCache
from vmmkv.cli.batching import Batching
from vmmkv.cli.demo import STATIC_TOKENS, make_cache
from vmmkv.cli.options import Device, JsonOutput, LengthsSeed, TraceFile
from vmmkv.cli.output import check_plot, console, errors, format_bytes, make_table
from vmmkv.driver.driver import open_driver
from vmmkv.workload import Request, conversations, name_of, read_trace

from .virtual import BlockPool

MODES = TRIMMED, KEPT, POOL = ("vmmkv, trimmed", "vmmkv", "preallocated pool")
QUIET = 4
"""Sequences that run while it is quiet."""
TRIM_STEPS = 50
"""Steps from one trim to the next while it is quiet."""
TOKENS_A_ROW = 2048
"""Of the budget. Requests are some 1,300 tokens long."""
BLOCK_TOKENS = 16
CURVE_POINTS = 200


def serve(
    mode: str, device: torch.device, requests: list[Request], sequences: int, steps: int, row: dict[str, Any]
) -> Iterator[int]:
    """Three phases of `steps` steps; puts the figures into `row`, yields how many steps are done."""
    longest = max(request.total for request in requests)
    max_tokens = max(sequences * TOKENS_A_ROW, longest)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    with make_cache(str(device), sequences, max(longest, STATIC_TOKENS), max_tokens) as cache:
        budget = cache.stats().budget_bytes
        pool = torch.empty(budget if mode == POOL else 0, dtype=torch.uint8, device=device)
        blocks = BlockPool(budget // (BLOCK_TOKENS * cache.layout.token_bytes), BLOCK_TOKENS)

        def physical_bytes() -> int:
            if device.type == "cuda":
                return free - torch.cuda.mem_get_info(device)[0]
            return pool.nbytes or cache.stats().physical_bytes

        load = Load(blocks if mode == POOL else cache, requests, sequences, steps, physical_bytes)
        yield from load.run(trim=mode == TRIMMED)
    row |= {"mode": mode, "budget_bytes": budget} | load.result()


class Load:
    """Sequences that come and go over a busy, a quiet and again a busy phase."""

    def __init__(
        self,
        allocator: KVCache | BlockPool,
        requests: list[Request],
        sequences: int,
        steps: int,
        physical_bytes: Callable[[], int],
    ) -> None:
        self.allocator = allocator
        self.batching: Batching[Any] = Batching(allocator, requests, sequences)
        self.sequences = sequences
        self.phase_steps = steps
        self.physical_bytes = physical_bytes
        self.physical: list[int] = []
        self.running: list[int] = []
        self.seconds: list[float] = []
        self.calls: list[int] = []
        self.trims: list[dict[str, float]] = []

    def run(self, trim: bool) -> Iterator[int]:
        for step in range(3 * self.phase_steps):
            quiet = step // self.phase_steps == 1
            self.batching.max_running = min(QUIET, self.sequences) if quiet else self.sequences
            start = perf_counter()
            self.batching.admit()
            self.batching.decode()
            self.batching.retire()
            self.seconds.append(perf_counter() - start)
            if trim and quiet and (step - self.phase_steps) % TRIM_STEPS == 0:
                self.trim()
            self.physical.append(self.physical_bytes())
            self.running.append(len(self.batching.running))
            self.calls.append(self.driver_calls())
            yield step + 1

    def trim(self) -> None:
        assert isinstance(self.allocator, KVCache)
        start = perf_counter()
        returned = self.allocator.trim()
        self.trims.append({"bytes": returned, "ms": (perf_counter() - start) * 1e3})

    def driver_calls(self) -> int:
        if isinstance(self.allocator, BlockPool):
            return 0
        return sum(call.count for call in self.allocator.stats().driver_calls.values())

    def result(self) -> dict[str, Any]:
        """`return` is the first step of the second busy phase, in which the batch fills up again."""
        phase, back = self.phase_steps, 2 * self.phase_steps
        points = np.linspace(0, 3 * phase - 1, min(3 * phase, CURVE_POINTS)).astype(int)
        return {
            "phase_steps": phase,
            "sequences": self.sequences,
            "busy_bytes": max(self.physical[:phase]),
            "quiet_bytes": self.physical[back - 1],
            "mean_bytes": float(np.mean(self.physical)),
            "trims": len(self.trims),
            "trimmed_bytes": sum(trim["bytes"] for trim in self.trims),
            "trim_ms": sum(trim["ms"] for trim in self.trims),
            "return_sequences": self.running[back] - self.running[back - 1],
            "return_ms": self.seconds[back] * 1e3,
            "return_driver_calls": self.calls[back] - self.calls[back - 1],
            "step_ms": float(np.mean(self.seconds)) * 1e3,
            "driver_calls": self.calls[-1],
            "curve": {
                "steps": points.tolist(),
                "physical_bytes": np.array(self.physical)[points].tolist(),
                "sequences": np.array(self.running)[points].tolist(),
            },
        }


def main(
    device: Device = None,
    trace: TraceFile = None,
    sequences: Annotated[int, typer.Option(min=1, help="How many run while it is busy.")] = 64,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps of each of the three phases.")] = 1000,
    seed: LengthsSeed = 0,
    json_output: JsonOutput = False,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a picture of memory over time.")] = None,
) -> None:
    """Measure what memory goes back when load falls."""
    if plot_file:
        check_plot(plot_file)
    torch_device = open_driver(device).device
    work = read_trace(trace) if trace else conversations(1000, np.random.default_rng(seed))
    finish = 3 * steps * sequences / np.mean([request.output for request in work])
    work = list(islice(cycle(work), 2 * int(finish) + sequences))  # the queue never runs dry
    result: dict[str, Any] = {
        "environment": environment(torch_device),
        "trace": name_of(trace),
        "runs": [],
    }
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("Serving", total=len(MODES) * 3 * steps)
        for index, mode in enumerate(MODES):
            result["runs"].append({})
            for done in serve(mode, torch_device, work, sequences, steps, result["runs"][-1]):
                progress.update(task, completed=index * 3 * steps + done)
    if plot_file:
        plot(result, plot_file)
    if json_output:
        print_result(result)
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Prints a column per allocator."""
    title = f"Memory of {result['environment']['device']} while load falls and rises, requests: {result['trace']}"
    console.print(make_table(title, ("what", *MODES), table(result)))


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """What is told of each allocator: a name, and a cell per allocator."""
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        "memory taken, busy": lambda run: format_bytes(run["busy_bytes"]),
        "at the end of the quiet phase": lambda run: format_bytes(run["quiet_bytes"]),
        "mean": lambda run: format_bytes(run["mean_bytes"]),
        "given back by trim()": lambda run: f"{format_bytes(run['trimmed_bytes'])} in {run['trims']} calls",
        "time in trim()": lambda run: f"{run['trim_ms']:,.1f} ms",
        "sequences that start when load returns": lambda run: f"{run['return_sequences']}",
        "time of that step": lambda run: f"{run['return_ms']:,.1f} ms",
        "driver calls of that step": lambda run: f"{run['return_driver_calls']:,}",
        "mean time of a step": lambda run: f"{run['step_ms']:.2f} ms",
    }
    return [(what, *map(cell, result["runs"])) for what, cell in lines.items()]


def plot(result: dict[str, Any], path: Path) -> None:
    """Memory over decode steps, and below it the load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    memory, load = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for run in result["runs"]:
        points = run["curve"]
        memory.plot(points["steps"], np.array(points["physical_bytes"]) / 2**30, label=run["mode"])
    load.plot(points["steps"], points["sequences"], color="grey")
    memory.set(ylabel="GiB taken from the system", ylim=(0, None))
    memory.legend()
    load.set(xlabel="decode step", ylabel="sequences", ylim=(0, None))
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
