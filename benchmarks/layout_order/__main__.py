"""The order of K and V within a page: what tokens first and heads first waste, and how fast kernels are on them.

    python -m benchmarks.layout_order [--trace FILE] [--speed] [--json]

For five models and all, half, four and one of their layers in a token record. Waste is arithmetic; `--speed` times
today's kernels on both orders instead, and needs an NVIDIA GPU. Every answer that is timed is compared with float64.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv.cli.options import JsonOutput, TraceFile
from vmmkv.cli.output import console, errors, make_table
from vmmkv.workload import conversations, name_of, read_trace

from .speed import ERROR_BOUND, run_speed
from .tables import speed_table, waste_table
from .waste import run_waste

REQUESTS = 2000
"""Random ones, where there is no trace."""


def main(
    trace: TraceFile = None,
    speed: Annotated[bool, typer.Option("--speed", help="Time kernels, on the current GPU.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Measure the orders in which K and V can lie in a page."""
    if speed and not torch.cuda.is_available():
        errors.print("--speed needs an NVIDIA GPU; torch sees none.", style="red")
        raise typer.Exit(1)
    device = torch.device("cuda", torch.cuda.current_device()) if speed else torch.device("cpu")
    result: dict[str, Any] = {"environment": environment(device)}
    if speed:
        result["speed"] = run_speed(device)
    else:
        requests = read_trace(trace) if trace else conversations(REQUESTS, np.random.default_rng(0))
        result |= {"lengths": name_of(trace), "requests": len(requests), "waste": run_waste(requests)}
    if json_output:
        print_result(result)
    elif speed:
        console.print(make_table("Times of those on contiguous rows", *speed_table(result)))
    else:
        console.print(make_table("Bytes of pages without a token", *waste_table(result)))
    wrong = [row for row in result.get("speed", []) if not row["error"] <= ERROR_BOUND]
    for row in wrong:
        errors.print(f"Wrong: {row}", style="red", markup=False)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
