"""Tables of hardware counters: a line for each kernel."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Titles of columns, and lines."""
STALL = "stall_"
"""What the names of counters begin with that say why a warp issues nothing."""
WORTH = 0.2
"""Cycles that some kernel waits for a reason, for it to have a column."""


class Column(NamedTuple):
    """A counter's name, and how it is written."""

    name: str
    form: str


BOUNDS = {
    "µs": Column("microseconds", "{:,.4g}"),
    "memory, of its peak rate": Column("dram_throughput_percent_of_peak", "{:.0f} %"),
    "second cache, of its peak rate": Column("l2_throughput_percent_of_peak", "{:.0f} %"),
    "hits in the second cache": Column("l2_hit_percent", "{:.0f} %"),
    "shared memory, of its peak rate": Column("shared_memory_throughput_percent_of_peak", "{:.0f} %"),
    "bank conflicts": Column("million_bank_conflicts", "{:.2f} M"),
    "tensor cores busy": Column("tensor_pipe_active_percent", "{:.0f} %"),
    "issue slots used": Column("issue_slots_used_percent", "{:.0f} %"),
    "registers a thread": Column("registers", "{:.0f}"),
    "warps on a multiprocessor": Column("warps_per_multiprocessor", "{:.0f}"),
    "waves of blocks": Column("waves", "{:.2f}"),
    "multiprocessor's clock": Column("sm_ghz", "{:.2f} GHz"),
}


def bounds(result: dict[str, Any]) -> Table:
    """What is busy while a kernel runs."""
    return table(result, BOUNDS)


def stalls(result: dict[str, Any]) -> Table:
    """Cycles from one of a warp's instructions to the next, and how many of them it waits for what, where some kernel's
    does for `WORTH` of one. Few are of other reasons, and one issues the instruction."""
    waits = [(name, cycles) for row in result["kernels"].values() for name, cycles in row.items()]
    names = dict.fromkeys(name for name, cycles in waits if name.startswith(STALL) and (cycles or 0) >= WORTH)
    reasons = {name.removeprefix(STALL): Column(name, "{:.1f}") for name in names}
    columns = {"cycles": Column("cycles_per_instruction", "{:.1f}")} | reasons
    return table(result, {title.replace("_", " "): column for title, column in columns.items()})


def table(result: dict[str, Any], columns: dict[str, Column]) -> Table:
    """Those of the columns that a result has; no lines if it has none."""
    kernels = result["kernels"]
    shown = {title: each for title, each in columns.items() if any(each.name in row for row in kernels.values())}
    lines = [
        (told(name), *(cell(row.get(each.name), each.form) for each in shown.values())) for name, row in kernels.items()
    ]
    return ("", *shown), lines if shown else []


def told(name: str) -> str:
    """A kernel's name as documents write it."""
    return re.sub(r"\d{4,}", lambda found: f"{int(found[0]):,}", name.replace("causal ", ""))


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
