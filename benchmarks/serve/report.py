"""A result as comparisons, tables and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from vmmkv.cli.output import format_bytes, make_table

from .. import comparisons

Row = dict[str, Any]
Figure = tuple[str, Callable[[Row], object]]
"""What a line of a table is called, and its cell of a row."""


# What is compared, and where it is in a row.
SPEED, FIRST = ("tokens/s", "output_tokens_per_s"), ("time to first token", "first_token_s")
CROWD = "concurrency while others wait", "crowded_concurrency"
RECOMPUTED, FOUND = ("tokens computed anew", "recomputed_tokens"), ("prompt tokens that were there", "hit_rate")
MANAGER, TAIL = ("cache manager's host time a step", "manager_us"), ("in the slowest hundredth", "manager_p99_us")
IDLE = "memory when idle", "idle_bytes"
Ratios = tuple[tuple[str, str], ...]
BESIDE_BLOCKS: Ratios = (SPEED, CROWD, FIRST, MANAGER, TAIL, IDLE)
PAIRS: list[tuple[str, str, Ratios]] = [
    ("vmm", "paged", BESIDE_BLOCKS),
    ("vmm", "static", (SPEED, CROWD)),
    ("vmm", "static+longest", (SPEED, CROWD)),
    ("vmm", "vllm", (SPEED, FIRST)),
    ("vmm+reuse", "vllm+reuse", (SPEED, FIRST)),
    ("vmm+reuse", "paged+reuse", (SPEED, FIRST, FOUND)),
    ("vmm+fa3", "paged+flashinfer", (SPEED,)),
    ("vmm+fa3", "vmm", (SPEED,)),
    ("paged+flashinfer", "paged", (SPEED,)),
    ("vmm+suspend", "vmm", (SPEED, RECOMPUTED)),
    ("vmm+suspend", "paged", (SPEED, RECOMPUTED)),
    ("vmm+reuse", "vmm", (SPEED, FIRST)),
    ("paged+reuse", "paged", (SPEED, FIRST)),
]
"""Backends that are compared, and of which figures."""
KERNELS = [(("vmm", "fa3"), ("paged", "flashinfer")), (("vmm", "numba"), ("paged", "numba"))]
"""Of prompts, the backends and kernels that are compared."""


def compare(result: dict[str, Any]) -> list[Row]:
    """The ratios that the benchmark is for: of each trace and load, and for prompts. Where there are several rounds, of
    their medians."""
    return [*compare_serving(result), *compare_prompts(result["prefill"])]


def compare_serving(result: dict[str, Any]) -> Iterator[Row]:
    """Those of backends that have finished all requests, for each trace and load."""
    for name, measured in by_case(result["serving"]):
        rows = {backend: row for backend, row in measured.items() if row["finished"] == row["requests"]}
        is_queued = queues(next(iter(measured.values())))
        for ours, other, ratios in PAIRS:
            if {ours, other} <= rows.keys():
                for what, key in ratios:
                    names = f"{name}: {ours} over {other}, {with_queue(what) if is_queued else what}"
                    yield from ratio(names, typical(rows[ours], key), typical(rows[other], key))


def compare_prompts(prefill: list[Row]) -> Iterator[Row]:
    """Those of long prompts."""
    rows = {(row["backend"], row["kernel"]): row for row in prefill}
    for ours, other in KERNELS:
        if {ours, other} <= rows.keys():
            names = "prompts: {} {} over {} {}".format(*ours, *other)
            for what, key in (("whole prefill", "tokens_per_s"), ("attention alone", "attention_tokens_per_s")):
                yield from ratio(f"{names}, {what}", rows[ours][key], rows[other][key])


def ratio(what: str, ours: float | None, other: float | None) -> Iterator[Row]:
    """A comparison, where both were measured."""
    if ours is not None and other:
        yield {"what": what, "value": ours / other}


def queues(row: Row) -> bool:
    """Whether requests come as fast as they are served, or faster: then first tokens are mostly places in the queue."""
    rate = row.get("rate")
    return rate is None or rate >= 1


def with_queue(name: str) -> str:
    """What a figure is called where it is one of the queue."""
    return name.replace(FIRST[0], f"{FIRST[0]} behind the queue")


def typical(row: Row, key: str) -> float | None:
    """The median of a figure over the rounds; None where one lacks it, as those of other engines may."""
    values = row["each_round"].get(key, [row.get(key)])
    return None if None in values else median(values)


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
        found.append(make_table("Comparisons", comparisons.COLUMNS, comparisons.lines(result["comparisons"])))
    missing = [(f"{row['backend']} {row['kernel']}".strip(), row["reason"]) for row in result["skipped"]]
    missing += [(name, "not reached in time") for name in result["missed"]]
    if missing:
        found.append(make_table("Not measured", ("what", "why"), missing))
    return found


def figure_lines(rows: dict[str, Row]) -> list[tuple[str, ...]]:
    """A name, and a cell for each backend, of all figures that the result has."""
    lines, is_queued = [], any(map(queues, rows.values()))
    for what, show in (*THROUGHPUT, *first_tokens(is_queued), *FIGURES):
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


def first_tokens(is_queued: bool) -> tuple[Figure, ...]:
    """Lines of first tokens: in seconds behind the queue, and in milliseconds where nobody waits long."""
    name, unit, digits, scale = (with_queue(FIRST[0]), "s", 2, 1.0) if is_queued else (FIRST[0], "ms", 1, 1e3)
    return (
        (f"{name}, {unit}, p50", lambda row: number(row["ttft_s"]["p50"], digits, scale)),
        ("p99", lambda row: tail_cell(row["ttft_s"], digits, scale)),
        ("p50 of all rounds", lambda row: rounds_cell(row["each_round"]["first_token_s"], digits, scale)),
    )


THROUGHPUT: tuple[Figure, ...] = (
    ("requests finished", lambda row: f"{row['finished']} of {row['requests']}"),
    ("output tokens/s", lambda row: f"{row['output_tokens_per_s']:,.0f}"),
    ("all rounds", lambda row: f"{min(row['rounds']):,.0f} to {max(row['rounds']):,.0f}"),
)
"""The first lines of the serving tables."""
FIGURES: tuple[Figure, ...] = (
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
"""Their lines behind those of first tokens."""


def mapped_cell(pages: dict[str, int]) -> str:
    """Pages mapped ahead and in need; blocks are mapped never."""
    return ", ".join(f"{pages[when]:,}" for when in ("ahead", "in need")) if pages else "-"


def rounds_cell(values: list[float | None], digits: int, scale: float = 1.0) -> str:
    """The median of a figure of all rounds, the least and the most."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    middle, low, high = (number(each, digits, scale) for each in (median(there), min(there), max(there)))
    return f"{middle} ({low} to {high})"


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
