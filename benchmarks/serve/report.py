"""A result as comparisons, tables and a picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from vmmkv.cli.output import format_bytes, make_table

Row = dict[str, Any]


def compare(result: dict[str, Any]) -> list[Row]:
    """The ratios that the benchmark is for, and what we aim at: at saturation of the main trace, and for prompts. Where
    there are several rounds, of their medians.

    There are no aims for speed without a GPU.
    """
    found: list[Row] = []
    on_gpu = "cuda_driver" in result["environment"]

    def add(what: str, pair: tuple[Any, Any], at_least: float | None = None, at_most: float = inf) -> None:
        if pair[0] is not None and pair[1]:
            value = pair[0] / pair[1]
            row = {"what": what, "value": value}
            if at_least is not None:
                aim = f">= {at_least:g}" if at_most == inf else f"<= {at_most:g}"
                row |= {"aim": aim, "met": at_least <= value <= at_most}
            found.append(row)

    cases = by_case(result["serving"])
    trace = result["serving"][0]["trace"] if cases else ""
    for name, measured in cases:
        rows = {backend: row for backend, row in measured.items() if row["finished"] == row["requests"]}
        main = name.startswith(f"{trace}, saturation")
        timed = main and on_gpu
        at_most: dict[str, float | None] = {"at_least": 0.0 if timed else None, "at_most": 1.0}
        if {"vmm", "paged"} <= rows.keys():
            names, both = f"{name}: vmm over paged", partial(typical, rows["vmm"], rows["paged"])
            add(f"{names}, tokens/s", both("output_tokens_per_s"), 1.0 if timed else None)
            add(f"{names}, concurrency while others wait", both("crowded_concurrency"), 0.99 if main else None)
            add(f"{names}, time to first token", both("first_token_s"), **at_most)
            add(f"{names}, cache manager's host time a step", both("manager_us"), **at_most)
            add(f"{names}, in the slowest hundredth", both("manager_p99_us"), **at_most)
            idle = rows["vmm"]["idle_bytes"], rows["paged"]["idle_bytes"]
            add(f"{names}, memory when idle", idle, 0.0 if main else None, at_most=0.01)
        for slots, aim in (("static", 3.0), ("static+longest", None)):
            if {"vmm", slots} <= rows.keys():
                names, both = f"{name}: vmm over {slots}", partial(typical, rows["vmm"], rows[slots])
                add(f"{names}, tokens/s", both("output_tokens_per_s"))
                add(f"{names}, concurrency while others wait", both("crowded_concurrency"), aim if main else None)
        for ours, other in (("vmm", "vllm"), ("vmm+reuse", "vllm+reuse")):
            if {ours, other} <= rows.keys():
                names, both = f"{name}: {ours} over {other}", partial(typical, rows[ours], rows[other])
                add(f"{names}, tokens/s", both("output_tokens_per_s"), 1.0 if timed else None)
                if "first_token_s" in rows[other]["each_round"]:
                    add(f"{names}, time to first token", both("first_token_s"), 0.0 if on_gpu else None, at_most=1.0)
        if {"vmm+reuse", "paged+reuse"} <= rows.keys():
            names, both = (
                f"{name}: vmm+reuse over paged+reuse",
                partial(typical, rows["vmm+reuse"], rows["paged+reuse"]),
            )
            add(f"{names}, tokens/s", both("output_tokens_per_s"), 1.0 if on_gpu else None)
            add(f"{names}, time to first token", both("first_token_s"), 0.0 if on_gpu else None, at_most=1.0)
            add(f"{names}, prompt tokens that were there", both("hit_rate"))
        for ours, other in (("vmm+fa3", "paged+flashinfer"), ("vmm+fa3", "vmm"), ("paged+flashinfer", "paged")):
            if {ours, other} <= rows.keys():
                both = partial(typical, rows[ours], rows[other])
                add(f"{name}: {ours} over {other}, tokens/s", both("output_tokens_per_s"))
        for other in ("vmm", "paged"):
            if {"vmm+suspend", other} <= rows.keys():
                names, both = f"{name}: vmm+suspend over {other}", partial(typical, rows["vmm+suspend"], rows[other])
                add(f"{names}, tokens/s", both("output_tokens_per_s"))
                add(f"{names}, tokens computed anew", both("recomputed_tokens"))
        for backend in ("vmm", "paged"):
            if {backend, f"{backend}+reuse"} <= rows.keys():
                names = f"{name}: {backend}+reuse over {backend}"
                both = partial(typical, rows[f"{backend}+reuse"], rows[backend])
                add(f"{names}, tokens/s", both("output_tokens_per_s"))
                add(f"{names}, time to first token", both("first_token_s"))
    prompts = {(row["backend"], row["kernel"]): row for row in result["prefill"]}
    for aim, *both in ((1.2, ("vmm", "fa3"), ("paged", "flashinfer")), (None, ("vmm", "numba"), ("paged", "numba"))):
        if prompts.keys() >= set(both):
            names = "prompts: {} {} over {} {}".format(*both[0], *both[1])
            for what, key in (("whole prefill", "tokens_per_s"), ("attention alone", "attention_tokens_per_s")):
                add(f"{names}, {what}", (prompts[both[0]][key], prompts[both[1]][key]), aim)
    return found


def typical(one: Row, other: Row, key: str) -> tuple[float | None, float | None]:
    """The median over the rounds of a figure, of two backends."""
    first, second = (row["each_round"][key] for row in (one, other))
    return (None, None) if None in first + second else (median(first), median(second))


def by_case(rows: list[Row]) -> list[tuple[str, dict[str, Row]]]:
    """By trace and load, in the order in which they were first measured, a row for each backend."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(f"{row['trace']}, {row['load']}", {})[row["backend"]] = row
    return list(cases.items())


def tables(result: dict[str, Any]) -> list[Table]:
    """A table for each trace and load, for prompts, for the comparisons, and for what is missing."""
    found = []
    for name, rows in by_case(result["serving"]):
        found.append(make_table(name, ("", *rows), figure_lines(rows)))
    if result["prefill"]:
        columns = "backend, kernel", "tokens/s", "attention alone", "its share of the time"
        title = f"Prompts of {result['prefill'][0]['prompt_tokens']:,} tokens"
        found.append(make_table(title, columns, map(prompt_line, result["prefill"])))
    if result["comparisons"]:
        columns = "what", "measured", "aim", "met"
        found.append(make_table("Comparisons", columns, map(comparison_line, result["comparisons"])))
    missing = [(f"{row['backend']} {row['kernel']}".strip(), row["reason"]) for row in result["skipped"]]
    missing += [(name, "not reached in time") for name in result["missed"]]
    if missing:
        found.append(make_table("Not measured", ("what", "why"), missing))
    return found


def figure_lines(rows: dict[str, Row]) -> list[tuple[str, ...]]:
    """A name, and a cell for each backend, of all figures that the result has."""
    lines = []
    for what, show in FIGURES:
        cells = [shown(show, row) for row in rows.values()]
        if any(cells):  # older results lack some
            lines.append((what, *cells))
    return lines


def shown(show: Callable[[Row], object], row: Row) -> str:
    """A cell; empty where a row lacks the figure, as those of other engines lack some."""
    try:
        return str(show(row))
    except KeyError:
        return ""


FIGURES: tuple[tuple[str, Callable[[Row], object]], ...] = (
    ("requests finished", lambda row: f"{row['finished']} of {row['requests']}"),
    ("output tokens/s", lambda row: f"{row['output_tokens_per_s']:,.0f}"),
    ("all rounds", lambda row: f"{min(row['rounds']):,.0f} to {max(row['rounds']):,.0f}"),
    ("time to first token, s, p50", lambda row: number(row["ttft_s"]["p50"], 2)),
    ("p99", lambda row: tail_cell(row["ttft_s"], 2)),
    ("p50 of all rounds", lambda row: rounds_cell(row["each_round"]["first_token_s"], 2)),
    ("longest gap of a request, s, p50", lambda row: number(row["gap_s"]["p50"], 3)),
    ("p99", lambda row: tail_cell(row["gap_s"], 3)),
    ("the longest", lambda row: number(row["gap_s"]["most"], 3)),
    ("the longest, all rounds", lambda row: rounds_cell(row["each_round"]["longest_gap_s"], 3)),
    ("time per output token, ms, p50", lambda row: number(row["tpot_s"]["p50"], 1, 1e3)),
    ("p99", lambda row: tail_cell(row["tpot_s"], 1, 1e3)),
    ("prompt tokens that were there", lambda row: f"{row['hit_rate']:.1%}"),
    ("concurrency, peak", lambda row: row["peak_concurrency"]),
    ("mean", lambda row: number(row["mean_concurrency"], 1)),
    ("mean while others wait", lambda row: number(row["crowded_concurrency"], 1)),
    ("preemptions", lambda row: row["preemptions"]),
    ("of them suspended", lambda row: row["suspensions"]),
    ("requests preempted", lambda row: f"{row['preempted_share']:.0%}"),
    ("tokens computed anew", lambda row: f"{row['recomputed_tokens']:,}"),
    ("host, µs a step", lambda row: f"{row['host_us']:,.0f}"),
    ("cache manager, µs a step", lambda row: f"{row['manager_us']:,.1f}"),
    ("of it driver calls", lambda row: f"{row['driver_us']:,.1f}"),
    ("mapper, driver calls, µs a step", lambda row: f"{row['mapper_us']:,.1f}"),
    ("pages mapped ahead, in need", lambda row: mapped_cell(row["pages_mapped"])),
    ("in a step, p50", lambda row: number(row["manager_step_us"]["p50"], 1)),
    ("p99", lambda row: tail_cell(row["manager_step_us"], 1)),
    ("a step, all rounds", lambda row: rounds_cell(row["each_round"]["manager_us"], 1)),
    ("p99, all rounds", lambda row: rounds_cell(row["each_round"]["manager_p99_us"], 1)),
    ("memory, peak", lambda row: format_bytes(row["peak_bytes"])),
    ("mean", lambda row: format_bytes(row["mean_bytes"])),
    ("when idle", lambda row: format_bytes(row["idle_bytes"])),
    ("same tokens as the first", lambda row: f"{row['same_tokens']:.0%}" if row["same_tokens"] is not None else "-"),
)
"""Lines of the serving tables."""


def mapped_cell(pages: dict[str, int]) -> str:
    """Pages mapped ahead and in need; blocks are mapped never."""
    return ", ".join(f"{pages[when]:,}" for when in ("ahead", "in need")) if pages else "-"


def rounds_cell(values: list[float | None], digits: int) -> str:
    """The median of a figure of all rounds, the least and the most."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    return f"{number(median(there), digits)} ({number(min(there), digits)} to {number(max(there), digits)})"


def tail_cell(values: dict[str, Any], digits: int, scale: float = 1.0) -> str:
    """The 99th percentile, and where it lies at 95 %, which older results do not say."""
    cell = number(values["p99"], digits, scale)
    low, high = values.get("p99_interval") or (None, None)
    return cell if low is None else f"{cell} ({number(low, digits, scale)} to {number(high, digits, scale)})"


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def prompt_line(row: Row) -> tuple[str, ...]:
    name = f"{row['backend']}, {row['kernel']}"
    return name, f"{row['tokens_per_s']:,.0f}", f"{row['attention_tokens_per_s']:,.0f}", f"{row['attention_share']:.0%}"


def comparison_line(row: Row) -> tuple[str, ...]:
    value = "not measured" if row["value"] is None else f"{row['value']:.4g}"
    return row["what"], value, row.get("aim", ""), {True: "yes", False: "no"}.get(row.get("met"), "")


def draw(result: dict[str, Any], path: Path) -> None:
    """Memory and concurrency over time, a column for each trace and load, a line for each backend."""
    from matplotlib.figure import Figure

    cases = by_case(result["serving"])
    figure = Figure(figsize=(5 * len(cases), 6), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for (memory, concurrency), (name, rows) in zip(axes.T, cases):
        for backend, row in rows.items():
            if "samples" not in row:
                continue
            times, taken, running = zip(*row["samples"])
            memory.plot(times, [nbytes / 2**30 for nbytes in taken], label=backend)
            concurrency.plot(times, running)
        memory.set(title=name, ylabel="physical memory, GiB", ylim=(0, None))
        concurrency.set(xlabel="seconds", ylabel="requests that run", ylim=(0, None))
        memory.legend()
    figure.savefig(path, dpi=150)
