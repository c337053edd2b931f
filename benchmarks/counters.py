"""What bounds our kernels: hardware counters of one call of each, read by Nsight Compute.

    python -m benchmarks.counters [--json]

Starts itself once more under `ncu`, which has to be on the PATH and allowed to read counters, and which runs each
kernel several times, with empty caches. Clocks are left as they are. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.kernels.launches import Launch

from .counters_calls import CALLS, Making
from .counters_tables import STALL, bounds, stalls

Counters = dict[str, float | None]
"""By our names; None: ncu does not tell."""


class Counter(NamedTuple):
    """One of Nsight Compute's metrics, and what it is multiplied by."""

    metric: str
    scale: float = 1.0


REASONS = (
    "long_scoreboard",
    "short_scoreboard",
    "barrier",
    "wait",
    "math_pipe_throttle",
    "mio_throttle",
    "lg_throttle",
    "gmma",
    "branch_resolving",
    "no_instruction",
    "not_selected",
    "sleeping",
)
"""Why a warp issues nothing, by Nsight Compute's names; gmma is Hopper's alone."""
COUNTERS = {
    "microseconds": Counter("gpu__time_duration.sum", 1e-3),
    "dram_gigabytes_read": Counter("dram__bytes_read.sum", 1e-9),
    "dram_gigabytes_written": Counter("dram__bytes_write.sum", 1e-9),
    "dram_throughput_percent_of_peak": Counter("dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    "tensor_pipe_active_percent": Counter("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"),
    "issue_slots_used_percent": Counter("smsp__issue_active.avg.pct_of_peak_sustained_active"),
    "l2_hit_percent": Counter("lts__t_sector_hit_rate.pct"),
    "l2_throughput_percent_of_peak": Counter("lts__t_sectors.avg.pct_of_peak_sustained_elapsed"),
    "shared_memory_throughput_percent_of_peak": Counter(
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed"
    ),
    "million_bank_conflicts": Counter("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", 1e-6),
    "registers": Counter("launch__registers_per_thread"),
    "warps_per_multiprocessor": Counter("sm__warps_active.avg.per_cycle_active"),
    "waves": Counter("launch__waves_per_multiprocessor"),
    "sm_ghz": Counter("sm__cycles_elapsed.avg.per_second", 1e-9),
    "cycles_per_instruction": Counter("smsp__average_warp_latency_per_inst_issued.ratio"),
    **{
        STALL + reason: Counter(f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio")
        for reason in REASONS
    },
}
"""By their names in the result."""
OURS = "vmmkv"
"""What the names of our kernels begin with."""


def main(
    inside: Annotated[
        Path | None, typer.Option("--inside", hidden=True, help="Make the calls, under ncu; say here what they launch.")
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Read hardware counters of our kernels."""
    if not torch.cuda.is_available():
        errors.print("This benchmark needs an NVIDIA GPU; torch sees none.", style="red")
        raise typer.Exit(1)
    if inside:
        device = torch.device("cuda")
        inside.write_text(json.dumps({name: launched_by(making, device) for name, making in CALLS.items()}))
        return
    told = environment(torch.device("cuda"))
    printed, launched = run_ncu()
    try:
        result = {"environment": told, "kernels": by_call(parse(printed), launched)}
    except ValueError as error:
        refuse(str(error), printed)
    if json_output:
        print_result(result)
    else:
        show(result)


def launched_by(making: Making, device: torch.device) -> list[str]:
    """Makes a call once for counters, when it has been compiled and has run before; returns the kernels it launches."""
    torch.cuda.empty_cache()  # ncu keeps a copy of all memory
    with making(device) as call:
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with launches() as names:
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return names


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of our kernels, in the order in which they are launched meanwhile."""
    names: list[str] = []
    run = Launch.run

    def noting(launch: Launch, *changing: Any) -> None:
        names.append(launch.kernel.name)
        run(launch, *changing)

    with patch.object(Launch, "run", noting):
        yield names


def run_ncu() -> tuple[str, dict[str, list[str]]]:
    """Runs this benchmark inside of ncu; returns what that prints, and the kernels that each call launched."""
    ncu = shutil.which("ncu")
    if ncu is None:
        refuse("There is no ncu on the PATH: it comes with the CUDA toolkit.")
    what = ["--metrics", ",".join(counter.metric for counter in COUNTERS.values()), "--kernel-name", f"regex:{OURS}"]
    how = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    with TemporaryDirectory() as folder:
        launched = Path(folder) / "launched.json"
        again = [sys.executable, "-m", "benchmarks.counters", "--inside", str(launched)]
        done = subprocess.run([ncu, *what, *how, *again], capture_output=True, text=True)
        if done.returncode or not launched.exists():
            refuse(f"ncu ended with {done.returncode}", done.stdout + done.stderr)
        return done.stdout, json.loads(launched.read_text())


def refuse(reason: str, printed: str = "") -> NoReturn:
    """Says why, behind all that ncu printed, if it ran, since there may be figures in it; ends."""
    if printed:
        errors.print(printed, markup=False, highlight=False, soft_wrap=True)
    errors.print(reason, style="red", markup=False)
    raise typer.Exit(1)


def parse(printed: str) -> list[tuple[str, Counters]]:
    """Names and counters of kernels in the order of launches. A header and units come before them, and lines of ncu's
    own, which begin with `==`."""
    rows = list(csv.DictReader(line for line in printed.splitlines() if line.startswith('"')))[1:]
    return [
        (
            name_in(row["Kernel Name"]),
            {name: value(row.get(metric), scale) for name, (metric, scale) in COUNTERS.items()},
        )
        for row in rows
    ]


def name_in(cell: str) -> str:
    """A kernel's name, without what ncu writes of its parameters."""
    found = re.search(rf"{OURS}\w+", cell)
    return found[0] if found else cell


def value(cell: str | None, scale: float) -> float | None:
    """A number as ncu writes it, with commas between thousands; None where it says n/a, nan, or nothing."""
    if not cell or "n/a" in cell:
        return None
    number = float(cell.replace(",", "")) * scale
    return number if isfinite(number) else None


def by_call(rows: list[tuple[str, Counters]], launched: dict[str, list[str]]) -> dict[str, Counters]:
    """Counters by calls, and by kernels where a call launches several.

    Raises:
        ValueError: these are not the kernels that were launched, or not all calls were made.
    """
    silent = [name for name in CALLS if not launched.get(name)]
    if silent or launched.keys() != CALLS.keys():
        raise ValueError(f"There were calls {', '.join(launched)}; without a kernel of ours: {', '.join(silent)}")
    expected = [kernel for kernels in launched.values() for kernel in kernels]
    seen = [kernel for kernel, _ in rows]
    if seen != expected:
        raise ValueError(f"ncu has seen {', '.join(seen) or 'no kernel'}; launched were {', '.join(expected)}")
    counters = iter(rows)
    found = {}
    for call, kernels in launched.items():
        for place, kernel in enumerate(kernels, 1):
            short = kernel.removeprefix(f"{OURS}_")
            which = f", {short}, {place} of {len(kernels)}" if len(kernels) > 1 else ""
            found[call + which] = next(counters)[1]
    return found


def show(result: dict[str, Any]) -> None:
    console.print(make_table("Counters", *bounds(result)))
    console.print(make_table("Cycles an instruction of a warp, by what it waits for", *stalls(result)))


if __name__ == "__main__":
    typer.run(main)
