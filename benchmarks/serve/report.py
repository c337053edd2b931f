"""A result as comparisons, tables and a picture."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from vmmkv.cli.output import format_bytes, make_table

Row = dict[str, Any]


def compare(result: dict[str, Any]) -> list[Row]:
    """The ratios that the benchmark is for, each with what we aim at; those that were measured."""
    found: list[Row] = []

    def add(what: str, value: float | None, aim: float, at_most: bool = False) -> None:
        if value is not None:
            met = value <= aim if at_most else value >= aim
            found.append({"what": what, "value": value, "aim": f"{'<=' if at_most else '>='} {aim:g}", "met": met})

    for (trace, load), group in groupby(result["serving"], key=case_of):
        rows = {row["backend"]: row for row in group}
        name = f"{trace}, {load}"
        if {"vmm", "paged"} <= rows.keys():
            pair = rows["vmm"], rows["paged"]
            add(f"{name}: tokens/s, vmm over paged", ratio(*pair, "output_tokens_per_s"), 1.0)
            add(f"{name}: concurrency, vmm over paged", ratio(*pair, concurrency_key(pair)), 0.99)
            add(f"{name}: cache manager's host time, vmm over paged", ratio(*pair, "manager_us"), 1.0, True)
        if {"vmm", "static"} <= rows.keys():
            pair = rows["vmm"], rows["static"]
            add(f"{name}: tokens/s, vmm over static", ratio(*pair, "output_tokens_per_s"), 1.0)
            add(f"{name}: concurrency, vmm over static", ratio(*pair, concurrency_key(pair)), 3.0)
        for backend, row in rows.items():
            if backend == "vmm" and row["peak_bytes"]:
                add(
                    f"{name}: memory kept when idle, of the peak, vmm", row["idle_bytes"] / row["peak_bytes"], 0.0, True
                )
    rows = {(row["backend"], row["kernel"]): row for row in result["prefill"]}
    peers = ("vmm", "fa3"), ("paged", "flashinfer")
    for pair in (peers, (("vmm", "numba"), ("paged", "numba"))):
        if set(pair) <= rows.keys():
            names = " over ".join(" ".join(name) for name in pair)
            for key, what in (("tokens_per_s", "prefill"), ("attention_tokens_per_s", "attention alone")):
                add(f"{what}, {names}", ratio(*(rows[name] for name in pair), key), 1.2 if pair == peers else 1.0)
    return found


def case_of(row: Row) -> tuple[str, str]:
    return row["trace"], row["load"]


def by_case(rows: list[Row]) -> list[Row]:
    """Rows of a trace and a load together, in the order in which the loads were first measured."""
    order = list(dict.fromkeys(map(case_of, rows)))
    return sorted(rows, key=lambda row: order.index(case_of(row)))


def concurrency_key(rows: tuple[Row, Row]) -> str:
    """Concurrency is compared while requests wait for room, if they did in both runs."""
    return "crowded_concurrency" if all(row["crowded_concurrency"] for row in rows) else "mean_concurrency"


def ratio(row: Row, other: Row, key: str) -> float | None:
    return row[key] / other[key] if row[key] is not None and other[key] else None


def tables(result: dict[str, Any]) -> list[Table]:
    """A table for each trace and load, for prompts, for the comparisons, and for what is missing."""
    found = []
    for (trace, load), rows in groupby(result["serving"], key=case_of):
        table = make_table(f"{trace}, {load}", SERVING.keys(), [])
        for row in rows:
            table.add_row(*(str(cell(row)) for cell in SERVING.values()))
        found.append(table)
    if result["prefill"]:
        tokens = result["prefill"][0]["prompt_tokens"]
        columns = "backend", "kernel", "tokens/s", "attention alone, tokens/s", "attention's share"
        rows = [
            (
                row["backend"],
                row["kernel"],
                f"{row['tokens_per_s']:,.0f}",
                f"{row['attention_tokens_per_s']:,.0f}",
                f"{row['attention_share']:.0%}",
            )
            for row in result["prefill"]
        ]
        found.append(make_table(f"Prompts of {tokens:,} tokens", columns, rows))
    if result["comparisons"]:
        rows = [
            (row["what"], f"{row['value']:.3f}", row["aim"], "yes" if row["met"] else "no") for row in compare(result)
        ]
        found.append(make_table("Comparisons", ("what", "measured", "aim", "met"), rows))
    missing = [(f"{row['backend']} {row['kernel']}", row["reason"]) for row in result["skipped"]]
    missing += [(name, "not reached in time") for name in result["missed"]]
    if missing:
        found.append(make_table("Not measured", ("what", "why"), missing))
    return found


def seconds(quantiles: dict[str, float | None], scale: float, digits: int) -> str:
    return " / ".join("-" if value is None else f"{value * scale:.{digits}f}" for value in quantiles.values())


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


SERVING = {
    "backend": lambda row: row["backend"],
    "finished": lambda row: f"{row['finished']} of {row['requests']}",
    "output tokens/s": lambda row: f"{row['output_tokens_per_s']:,.0f}",
    "first token, s, p50 / p99": lambda row: seconds(row["ttft_s"], 1, 2),
    "per token, ms, p50 / p99": lambda row: seconds(row["tpot_s"], 1e3, 1),
    "concurrency: peak": lambda row: row["peak_concurrency"],
    "mean": lambda row: count(row["mean_concurrency"]),
    "while others wait": lambda row: count(row["crowded_concurrency"]),
    "preempted": lambda row: row["preemptions"],
    "host, µs a step: all": lambda row: f"{row['host_us']:.0f}",
    "cache manager": lambda row: f"{row['manager_us']:.0f}",
    "memory: peak": lambda row: format_bytes(row["peak_bytes"]),
    "mean ": lambda row: format_bytes(row["mean_bytes"]),
    "idle": lambda row: format_bytes(row["idle_bytes"]),
}
"""Columns of the serving tables."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Memory and concurrency over time, a column for each trace and load, a line for each backend."""
    from matplotlib.figure import Figure

    cases = [(case, list(rows)) for case, rows in groupby(result["serving"], key=case_of)]
    figure = Figure(figsize=(5 * max(len(cases), 1), 6), layout="constrained")
    axes = figure.subplots(2, max(len(cases), 1), squeeze=False)
    for column, ((trace, load), rows) in enumerate(cases):
        for row in rows:
            times, taken, running = zip(*row["samples"])
            axes[0, column].plot(times, [nbytes / 2**30 for nbytes in taken], label=row["backend"])
            axes[1, column].plot(times, running)
        axes[0, column].set(title=f"{trace}, {load}", ylabel="physical memory, GiB", ylim=(0, None))
        axes[1, column].set(xlabel="seconds", ylabel="requests that run", ylim=(0, None))
        axes[0, column].legend()
    figure.savefig(path, dpi=150)
