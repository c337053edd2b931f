"""`vmmkv.testing.check_attention` of attention kernels that people use.

    python -m benchmarks.check_kernels [--device cpu] [--only NAME] [--json]

Kernels that are not installed are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import torch
import typer

from vmmkv.cli.output import Device, JsonOutput, errors
from vmmkv.testing import TARGETS, Report, Verdict, check_attention

from .attention.peers import versions
from .environment import environment
from .output import Lines, Row, deliver

AT_A_TIME = 4
ON_HOST = ("sdpa-math", "sdpa-flash", "sdpa-math-masked")


def main(
    device: Device = None,
    only: Annotated[list[str] | None, typer.Option(help="Check these.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Check the kernels that this machine has."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = only or ([*TARGETS] if place.type == "cuda" else [*ON_HOST])
    reports = run(names, str(place))
    result: Row = {
        "environment": environment(place),
        "peers": versions(),
        "reports": [each.as_dict() for each in reports],
    }
    deliver(result, json_output, {str(place): table})


def run(names: Sequence[str], device: str) -> list[Report]:
    """A report of each kernel that is installed; several are checked at a time, each in a process of its own."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        reports = [*pool.map(lambda name: check_attention(name, device=device), names)]
    for report in reports:
        told = report.findings[0].note if is_missing(report) else ", ".join(report.faults) or "right"
        errors.print(f"{report.kernel}: {told}", highlight=False, markup=False, soft_wrap=True)
    return [report for report in reports if not is_missing(report)]


def is_missing(report: Report) -> bool:
    """Whether the kernel is not installed."""
    first = report.findings[0]
    return first.verdict == Verdict.REFUSES and first.note.startswith("ModuleNotFoundError")


def table(result: Row) -> Lines:
    """A line for each kernel."""
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
