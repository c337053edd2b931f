"""What bounds our kernels: hardware counters of one call of each, read by Nsight Compute.

    python -m benchmarks.counters [--json]

Starts itself once more under `ncu`, which has to be on the PATH and allowed to read counters, and which runs each
kernel several times. Clocks are left as they are. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table

from .attention.batches import Case, make_batch
from .attention.cases import attention
from .attention.layouts import layouts


class Counter(NamedTuple):
    """One of Nsight Compute's metrics, and what it is multiplied by."""

    metric: str
    scale: float = 1.0


CALLS = {
    "decode, mma, 64 x 4096": (Case("decode", "64 x 4096", (4096,) * 64), "auto"),
    "prefill, wgmma, causal 1 x 16384": (Case("prefill", "1 x 16384", (16384,), 16384), "auto"),
    "prefill, mma, causal 1 x 16384": (Case("prefill", "1 x 16384", (16384,), 16384), "mma"),
}
"""Cases and kernels, on contiguous tensors; on Hopper prefill's own choice is wgmma."""
COUNTERS = {
    "microseconds": Counter("gpu__time_duration.sum", 1e-3),
    "dram_gigabytes_read": Counter("dram__bytes_read.sum", 1e-9),
    "dram_throughput_percent_of_peak": Counter("dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    "tensor_pipe_active_percent": Counter("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"),
    "issue_slots_used_percent": Counter("smsp__issue_active.avg.pct_of_peak_sustained_active"),
    "l2_hit_percent": Counter("lts__t_sector_hit_rate.pct"),
    "registers": Counter("launch__registers_per_thread"),
    "warps_per_multiprocessor": Counter("sm__warps_active.avg.per_cycle_active"),
    "sm_ghz": Counter("sm__cycles_elapsed.avg.per_second", 1e-9),
}
"""By their names in the result."""
OURS = "regex:vmmkv"
"""What the names of our kernels contain."""


def main(
    inside: Annotated[bool, typer.Option("--inside", hidden=True, help="Make the calls, under ncu.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Read hardware counters of our kernels."""
    if not torch.cuda.is_available():
        errors.print("This benchmark needs an NVIDIA GPU; torch sees none.", style="red")
        raise typer.Exit(1)
    if inside:
        make_calls()
        return
    told = environment(torch.device("cuda"))
    rows = parse(run_ncu())
    if len(rows) != len(CALLS):
        errors.print(f"ncu has seen {len(rows)} kernels of {len(CALLS)}.", style="red")
        raise typer.Exit(1)
    result = {"environment": told, "kernels": dict(zip(CALLS, rows))}
    if json_output:
        print_result(result)
    else:
        show(result)


def make_calls() -> None:
    """Makes each call once for counters, when it has been compiled and has run before."""
    for case, kernel in CALLS.values():
        batch = make_batch(case, torch.device("cuda"))
        with layouts(batch, ("contiguous",)) as (kv,):
            call = attention(batch, kv, kernel)
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def run_ncu() -> str:
    """Runs this benchmark inside of ncu; returns what that prints."""
    ncu = shutil.which("ncu")
    if ncu is None:
        errors.print("There is no ncu on the PATH: it comes with the CUDA toolkit.", style="red")
        raise typer.Exit(1)
    what = ["--metrics", ",".join(counter.metric for counter in COUNTERS.values()), "--kernel-name", OURS]
    how = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    done = subprocess.run(
        [ncu, *what, *how, sys.executable, "-m", "benchmarks.counters", "--inside"], capture_output=True, text=True
    )
    if done.returncode:
        errors.print(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", markup=False)
        raise typer.Exit(1)
    return done.stdout


def parse(printed: str) -> list[dict[str, Any]]:
    """Counters by our names, for each kernel in the order of calls. A header and units come before them, and lines of
    ncu's own, which begin with `==`."""
    table = csv.DictReader(line for line in printed.splitlines() if line.startswith('"'))
    _units, *rows = table
    return [{name: value(row[counter.metric]) * counter.scale for name, counter in COUNTERS.items()} for row in rows]


def value(cell: str) -> float:
    """A number as ncu writes it, with commas between thousands."""
    return float(cell.replace(",", ""))


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, one for each kernel, and lines."""
    formats = {
        "memory, of its peak rate": "{dram_throughput_percent_of_peak:.0f} %",
        "tensor cores busy": "{tensor_pipe_active_percent:.0f} %",
        "issue slots used": "{issue_slots_used_percent:.0f} %",
        "hits in the second cache": "{l2_hit_percent:.0f} %",
        "registers a thread": "{registers:.0f}",
        "warps on a multiprocessor": "{warps_per_multiprocessor:.0f}",
        "multiprocessor's clock": "{sm_ghz:.2f} GHz",
    }
    kernels = result["kernels"]
    columns = [name.replace("causal ", "").replace("4096", "4,096").replace("16384", "16,384") for name in kernels]
    lines = [(what, *(cell.format(**counters) for counters in kernels.values())) for what, cell in formats.items()]
    return ("", *columns), lines


def show(result: dict[str, Any]) -> None:
    console.print(make_table("Counters", *table(result)))


if __name__ == "__main__":
    typer.run(main)
