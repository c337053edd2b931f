"""Attention kernels on plain tensors, on rows of a cache and on blocks of a block table, beside their peers.

    python -m benchmarks.attention [--json] [--quick] [--trace FILE] [--only PART]

Needs an NVIDIA GPU. Parts are `decode`, `prefill`, `shapes`, `cascade` and `small`, and, only if it is asked for,
`prompts`. Random data in bf16, 32 heads over 8 KV heads of 128 (other heads, several queries and K and V in 8 bits:
`shapes`, and `prompts`, which has a step of prompts and decode, too); medians, from replayed CUDA graphs; what is
compared is measured in turn, in the same run. Every answer is compared with float64.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks.environment import environment, print_result
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors
from vmmkv.workload import name_of

from .cascade import SHAPES, run_cascade
from .cases import compare_ragged, compile_kernels, decode_cases, prefill_cases, quick_cases, run_case
from .peers import versions
from .prompts import run_mixed, run_prompts
from .rotary import run_rotary
from .shapes import run_shapes
from .small import run_copies, run_host
from .tables import tables
from .timing import copy_bandwidth

ERROR_BOUND = 2e-2
"""A relative error that rounding to bf16 can explain."""


class Part(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"
    SHAPES = "shapes"
    PROMPTS = "prompts"
    CASCADE = "cascade"
    SMALL = "small"


def main(
    json_output: JsonOutput = False,
    quick: Annotated[bool, typer.Option("--quick", help="One shape of each.")] = False,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Ragged lengths: a CSV or JSON lines trace.")
    ] = None,
    only: Annotated[Part | None, typer.Option(help="One part.")] = None,
) -> None:
    """Measure attention kernels on the current GPU."""
    if not torch.cuda.is_available():
        errors.print("This benchmark needs an NVIDIA GPU; torch sees none.", style="red")
        raise typer.Exit(1)
    result = run(quick, trace, only)
    if json_output:
        print_result(result)
    else:
        show(result)
    wrong = wrong_rows(result)
    for row in wrong:
        errors.print(f"Wrong: {row}", style="red", markup=False)
    if wrong:
        raise typer.Exit(1)


def run(quick: bool, trace: Path | None, only: Part | None) -> dict[str, Any]:
    """The whole result: a document of numbers and strings."""
    cases = quick_cases() if quick else decode_cases(trace) + prefill_cases()
    cases = [case for case in cases if only in (None, case.part)]
    device = torch.device("cuda", torch.cuda.current_device())
    result: dict[str, Any] = {
        "environment": environment(device),
        "peers": versions(),
        "ragged_lengths": name_of(trace),
        "skipped": [],
    }
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("Compiling", total=len(cases) + 6)
        compile_kernels(cases)
        progress.update(task, advance=1, description="Device copy")
        result["bandwidth"] = copy_bandwidth(device)
        progress.advance(task)
        for case in cases:
            progress.update(task, description=f"{case.part}, {case.name}")
            rows, skipped = run_case(case, device)
            result.setdefault(case.part, []).extend(rows)
            result["skipped"] += skipped
            progress.advance(task)
        if only in (None, Part.SHAPES):
            progress.update(task, description="Other shapes")
            result["shapes"] = run_shapes(device)
        progress.advance(task)
        if only == Part.PROMPTS:
            progress.update(task, description="Prompts of other shapes, and a step of prompts and decode")
            result |= {"prompts": run_prompts(device), "mixed": run_mixed(device)}
        progress.advance(task)
        if only in (None, Part.CASCADE):
            progress.update(task, description="Shared prefixes")
            result["cascade"], skipped = run_cascade(SHAPES[:1] if quick else SHAPES, device)
            result["skipped"] += skipped
        progress.advance(task)
        if only in (None, Part.SMALL):
            progress.update(task, description="Small kernels")
            result |= {"copies": run_copies(device), "rotary": run_rotary(device), "host": run_host(device)}
        progress.advance(task)
    for row in result.get("decode", []) + result.get("copies", []):
        row["of_copy"] = row["gb_per_s"] / result["bandwidth"]["copy_gb_per_s"]
    compare_ragged(result.get("decode", []))
    return result


def wrong_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of ours that rounding cannot explain."""
    parts = "decode", "prefill", "shapes", "cascade"
    ours = [row for part in parts for row in result.get(part, []) if row["kernel"].startswith("vmmkv")]
    ours += [row for part in ("prompts", "mixed", "rotary") for row in result.get(part, [])]
    wrong = [row for row in ours if not row["error"] <= ERROR_BOUND]
    return wrong + [row for row in result.get("copies", []) if not row["exact"]]


def show(result: dict[str, Any]) -> None:
    console.print(result["environment"]["device"], *(f"{name} {found}" for name, found in result["peers"].items()))
    console.print(
        "Device copy {copy_gb_per_s:.0f} GB/s, reading alone {read_gb_per_s:.0f}".format(**result["bandwidth"])
    )
    for table in tables(result):
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
