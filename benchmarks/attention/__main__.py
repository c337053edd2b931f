"""Attention kernels on plain tensors, on rows of a cache and on blocks of a block table, beside their peers.

    python -m benchmarks.attention [--json] [--trace FILE] [--only PART]

Needs an NVIDIA GPU. Random data in bf16, 32 heads over 8 KV heads of 128; in the parts `shapes` and `prompts` other
heads, several queries and K and V in 8 bits, too. Figures are medians, from replayed CUDA graphs; calls that
are compared are measured in turn, in the same run. Every answer is compared with float64.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.environment import environment
from benchmarks.output import Row, deliver, name_of
from vmmkv.cli.output import JsonOutput, errors

from .cases import compile_kernels, decode_cases, prefill_cases, run_case
from .peers import versions
from .shapes import run_prompts, run_shapes
from .tables import part_table
from .timing import copy_bandwidth

ERROR_BOUND = 2e-2
"""A relative error that rounding to bf16 can explain."""


class Part(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"
    SHAPES = "shapes"
    PROMPTS = "prompts"


def main(
    json_output: JsonOutput = False,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Ragged lengths: a CSV or JSON lines trace.")
    ] = None,
    only: Annotated[list[Part] | None, typer.Option(help="These parts; all by default.")] = None,
) -> None:
    """Measure attention kernels on the current GPU."""
    if not torch.cuda.is_available():
        errors.print("This benchmark needs an NVIDIA GPU; torch sees none.", style="red")
        raise typer.Exit(1)
    result = run(trace, only or list(Part))
    parts = [part for part in (*Part, "skipped") if part in result]
    deliver(result, json_output, {part: lambda result, part=part: part_table(result[part]) for part in parts})
    wrong = wrong_rows(result)
    for row in wrong:
        errors.print(f"Wrong: {row}", style="red", markup=False)
    if wrong:
        raise typer.Exit(1)


def run(trace: Path | None, parts: list[Part]) -> Row:
    """The whole result."""
    cases = [case for case in decode_cases(trace) + prefill_cases() if case.part in parts]
    device = torch.device("cuda", torch.cuda.current_device())
    result: Row = {"environment": environment(device), "peers": versions(), "ragged_lengths": name_of(trace)}
    result["skipped"] = []
    compile_kernels(cases)
    result["bandwidth"] = copy_bandwidth(device)
    for case in cases:
        errors.print(f"{case.part}, {case.name}")
        rows, skipped = run_case(case, device)
        result.setdefault(case.part, []).extend(rows)
        result["skipped"] += skipped
    if Part.SHAPES in parts:
        result["shapes"] = run_shapes(device)
    if Part.PROMPTS in parts:
        result["prompts"] = run_prompts(device)
    for row in result.get("decode", []):
        row["of_copy"] = row["gb_per_s"] / result["bandwidth"]["copy_gb_per_s"]
    return result


def wrong_rows(result: Row) -> list[Row]:
    """Rows of ours that rounding cannot explain."""
    rows = [row for part in Part for row in result.get(part, [])]
    return [row for row in rows if row["kernel"].startswith("vmmkv") and not row["error"] <= ERROR_BOUND]


if __name__ == "__main__":
    typer.run(main)
