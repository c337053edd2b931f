"""A result of serving as tables and a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.output import Lines, Row
from vmmkv.cli.output import format_bytes

Figure = tuple[str, Callable[[Row], object]]
"""The name of a line, and its cell of a row."""


def by_case(rows: list[Row]) -> list[tuple[str, dict[str, Row]]]:
    """By trace and load, in the order in which they were first measured, a row for each backend."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(f"{row['trace']}, {row['load']}", {})[row["backend"]] = row
    return list(cases.items())


def typical(row: Row, key: str) -> float:
    """The median of a figure over the rounds."""
    return float(median(row["each_round"][key]))


def tables(result: Row) -> dict[str, Lines]:
    """A table for each trace and load, of the backends that finished a request: a column for each."""
    ended = [row for row in result["serving"] if row["finished"]]
    return {name: ((name, *backends), figure_lines(backends)) for name, backends in by_case(ended)}


def figure_lines(rows: dict[str, Row]) -> list[tuple[str, ...]]:
    """A name, and a cell for each backend, of all figures that some row has."""
    lines = [(what, *(shown(show, row) for row in rows.values())) for what, show in FIGURES]
    return [line for line in lines if any(line[1:])]


def shown(show: Callable[[Row], object], row: Row) -> str:
    """A cell; empty where a row lacks the figure, as rows of other engines do."""
    try:
        return str(show(row))
    except KeyError:
        return ""


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def all_rounds(row: Row, name: str, digits: int, scale: float = 1.0) -> str:
    """The median of a figure of all rounds, the least and the most."""
    values = [value for value in row["each_round"][name] if value is not None]
    if not values:
        return "-"
    middle, low, high = (number(each, digits, scale) for each in (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def quantile(row: Row, name: str, which: str, digits: int, scale: float = 1.0) -> str:
    return number(row[name][which], digits, scale)


FIGURES: tuple[Figure, ...] = (
    ("requests finished", lambda row: f"{row['finished']} of {row['requests']}"),
    ("output tokens/s", lambda row: f"{row['output_tokens_per_s']:,.0f}"),
    ("all rounds", lambda row: f"{min(row['rounds']):,.0f} to {max(row['rounds']):,.0f}"),
    ("time to first token behind the queue, s, p50", lambda row: quantile(row, "ttft_s", "p50", 3)),
    ("p99", lambda row: quantile(row, "ttft_s", "p99", 3)),
    ("p50, all rounds", lambda row: all_rounds(row, "first_token_s", 3)),
    ("time per output token, ms, p50", lambda row: quantile(row, "tpot_s", "p50", 1, 1e3)),
    ("prompt tokens that were there", lambda row: f"{row['hit_rate']:.1%}"),
    ("concurrency, peak", lambda row: row["peak_concurrency"]),
    ("mean while others wait", lambda row: number(row["crowded_concurrency"], 1)),
    ("preemptions", lambda row: row["preemptions"]),
    ("tokens computed anew", lambda row: f"{row['recomputed_tokens']:,}"),
    ("host, µs a step", lambda row: f"{row['host_us']:,.0f}"),
    ("cache manager, µs a step, all rounds", lambda row: all_rounds(row, "manager_us", 1)),
    ("p99, all rounds", lambda row: all_rounds(row, "manager_p99_us", 1)),
    ("of it driver calls", lambda row: f"{row['driver_us']:,.1f}"),
    ("mapper, driver calls, µs a step", lambda row: f"{row['mapper_us']:,.1f}"),
    ("memory, peak", lambda row: format_bytes(row["peak_bytes"])),
    ("mean", lambda row: format_bytes(row["mean_bytes"])),
    ("when idle", lambda row: format_bytes(row["idle_bytes"])),
    ("same tokens as the first", lambda row: f"{row['same_tokens']:.0%}" if row["same_tokens"] is not None else "-"),
)
"""The lines of a table. Rows of older results lack some."""


def rows_beside_blocks(*results: Row) -> Lines:
    """Output tokens a second of one engine with the same kernels on both, medians of all rounds."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        for name, measured in by_case(result["serving"]):
            for ours, other, with_reuse in (("vmm", "paged", ""), ("vmm+reuse", "paged+reuse", ", prefix reuse")):
                if {ours, other} <= measured.keys():
                    rows, blocks = (typical(measured[each], "output_tokens_per_s") for each in (ours, other))
                    case = f"{result['model']}, {name}{with_reuse}"
                    lines.append((case, f"{rows:,.0f}", f"{blocks:,.0f}", f"{rows / blocks:.3f}"))
    return ("output tokens/s", "rows", "blocks of 16", "rows over blocks"), lines


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw memory and concurrency over time: a column for each trace and load, a line for each backend."""
    from matplotlib.figure import Figure

    cases = by_case(result["serving"])
    figure = Figure(figsize=(3.5 * len(cases), 5.5), layout="constrained")  # legible on a phone
    axes = figure.subplots(2, len(cases), squeeze=False)
    for (memory, concurrency), (name, rows) in zip(axes.T, cases):
        for backend, row in rows.items():
            if "samples" not in row:
                continue
            times, taken, running = zip(*row["samples"])
            memory.plot(times, [nbytes / 2**30 for nbytes in taken], label=backend)
            concurrency.plot(times, running)
        memory.set(title=name.replace(", ", "\n", 1), ylabel="physical memory, GiB", ylim=(0, None))
        concurrency.set(xlabel="seconds", ylabel="requests that run", ylim=(0, None))
        memory.legend()
    figure.savefig(path, dpi=150)
