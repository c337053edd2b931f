"""What attention kernels that people use do on awkward rows: `vmmkv.testing.check_attention` of each.

    python -m benchmarks.check_kernels [--device cpu] [--only NAME] [--tutorial 06-fused-attention.py] [--json]

Kernels that are not installed are left out. Triton's tutorial is a file of its repository, not of its package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.testing import TARGETS, Report, Verdict, check_attention

from .attention.peers import versions

Row = dict[str, Any]
TUTORIAL = "VMMKV_TUTORIAL"
"""Names the tutorial's file to the process that runs it."""
TRITON = f"{__name__ if __name__ != '__main__' else 'benchmarks.check_kernels'}:triton_tutorial"
SETTINGS: dict[str, Row] = {TRITON: {"heads": 1, "dtype": torch.float16}}
"""Of kernels that do not take the usual ones: the tutorial's takes fp16, and K as `[batch, heads, tokens, dim]`."""
AT_A_TIME = 4
ON_HOST = ("sdpa-math", "sdpa-flash", "sdpa-math-masked")


def triton_tutorial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The tutorial's kernel, which takes as many queries as keys, on slices of each row's length; neither causal nor
    warp-specialized, as the tutorial runs it on Hopper."""
    attention, counts = load_tutorial(), lengths.tolist()
    out = torch.zeros_like(q)
    groups = (
        [(slice(None), counts[0])] if len(set(counts)) == 1 else [(slice(i, i + 1), n) for i, n in enumerate(counts)]
    )
    for rows, count in groups:
        if count:
            padded = q.new_zeros(q[rows].shape[0], count, *q.shape[2:])
            padded[:, : q.shape[1]] = q[rows, :count]
            sides = (each.transpose(1, 2) for each in (padded, k[rows, :count], v[rows, :count]))
            out[rows] = attention(*sides, False, q.shape[3] ** -0.5, False).transpose(1, 2)[:, : q.shape[1]]
    return out


@cache
def load_tutorial() -> Any:
    """The tutorial's `attention`, with the first of its configurations: to choose one takes minutes for each length."""
    path = Path(os.environ[TUTORIAL])
    sys.path.insert(0, str(path.parent))
    module = import_module(path.stem)
    module._attn_fwd.configs = module._attn_fwd.configs[:1]
    return module.attention


def main(
    device: Device = None,
    only: Annotated[list[str] | None, typer.Option(help="Check these.")] = None,
    tutorial: Annotated[Path | None, typer.Option(exists=True, help="Triton's 06-fused-attention.py.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Check the kernels that this machine has."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = only or ([*TARGETS] if place.type == "cuda" else [*ON_HOST])
    if tutorial and not only:
        os.environ[TUTORIAL] = str(tutorial.resolve())
        names.append(TRITON)
    reports = run(names, str(place))
    result = {"environment": environment(place), "peers": versions(), "reports": [each.as_dict() for each in reports]}
    if json_output:
        print_result(result)
    else:
        console.print(make_table(str(place), *table(result)))


def run(names: Sequence[str], device: str) -> list[Report]:
    """A report of each kernel that is installed; several are checked at a time, each in a process of its own."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        reports = [*pool.map(lambda name: check_attention(name, device=device, **SETTINGS.get(name, {})), names)]
    for report in reports:
        told = report.findings[0].note if is_missing(report) else ", ".join(report.faults) or "right"
        errors.print(f"{report.kernel}: {told}", highlight=False, markup=False, soft_wrap=True)
    return [report for report in reports if not is_missing(report)]


def is_missing(report: Report) -> bool:
    """Whether the kernel is not installed."""
    first = report.findings[0]
    return first.verdict == Verdict.REFUSES and first.note.startswith("ModuleNotFoundError")


def table(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each kernel."""
    lines = []
    for report in result["reports"]:
        found = report["findings"]
        by_verdict = {verdict: [each for each in found if each["verdict"] == verdict] for verdict in Verdict}
        bad = "; ".join(f"{each['finding']} ({told(each)})" for each in found if each["finding"])
        refused = ", ".join(each["rows"] for each in by_verdict[Verdict.REFUSES])
        needed = "" if report["overread"] is None else f"{report['overread']}"
        right = f"{len(by_verdict[Verdict.RIGHT])} of {len(found) - len(by_verdict[Verdict.NOT_RUN])}"
        lines.append((report["kernel"].split(":")[-1], right, bad, refused, needed))
    return ("kernel", "right", "wrong or faults", "refuses", "overread"), lines


def told(finding: Row) -> str:
    """A verdict, and how far an output is off."""
    known = finding["verdict"] == Verdict.WRONG and finding["error"] is not None
    return f"off by {finding['error']:.0%}" if known else str(finding["verdict"])


def told_versions(result: Row) -> str:
    """A sentence on what was checked."""
    packages = {"torch": result["environment"]["torch"], "cuDNN": result["peers"]["cudnn"]}
    packages |= result["environment"]["packages"]
    names = ("torch", "cuDNN", "triton", "fa3-fwd", "flashinfer-python")
    return f"Checked: {', '.join(f'{name} {packages[name]}' for name in names if packages.get(name))}."


if __name__ == "__main__":
    typer.run(main)
