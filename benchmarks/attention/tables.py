"""A result as tables for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.table import Table

from vmmkv.cli.output import make_table


def tables(result: dict[str, Any]) -> list[Table]:
    """A table for each case, for the small kernels and for host time, and for what was skipped."""
    found = [decode_table(name, rows) for name, rows in by_case(result.get("decode", []))]
    found += [prefill_table(name, rows) for name, rows in by_case(result.get("prefill", []))]
    found += [shapes_table(name, rows) for name, rows in by_case(result.get("shapes", []))]
    if "prompts" in result:
        columns = "heads", "µs", "TFLOP/s", "of the first", "error"
        rows = [(row["shape"], time_of(row), *prompt_cells(row), f"{row['error']:.1e}") for row in result["prompts"]]
        found.append(make_table("a prompt of 8,192 tokens", columns, rows))
    if "mixed" in result:
        columns = "call", "µs", "µs of the host", "error"
        rows = [
            (row["call"], time_of(row), f"{row['host_microseconds']:.1f}", f"{row['error']:.1e}")
            for row in result["mixed"]
        ]
        found.append(make_table("a step of prompts and decode", columns, rows))
    found += [cascade_table(name, rows) for name, rows in by_case(result.get("cascade", []))]
    if "copies" in result:
        columns = "kernel", "layout", "µs", "GB/s", "of copy", "exact"
        rows = [
            (row["kernel"], layout_of(row), time_of(row), *rates_of(row), "yes" if row["exact"] else "NO")
            for row in result["copies"]
        ]
        found.append(make_table("K and V of a prompt of 16,384 tokens, read and written", columns, rows))
    if "rotary" in result:
        columns = "kernel", "sequences", "µs", "µs of the host", "error"
        rows = [
            (
                row["kernel"],
                str(row["sequences"]),
                time_of(row),
                f"{row['host_microseconds']:.1f}",
                f"{row['error']:.1e}",
            )
            for row in result["rotary"]
        ]
        found.append(make_table("Rotary embedding, and K and V, of a token each, one layer", columns, rows))
    if "host" in result:
        rows = [(row["call"], f"{row['host_microseconds']:.1f}") for row in result["host"]]
        found.append(make_table("Host time of a call", ("call", "µs"), rows))
    if result["skipped"]:
        found.append(skipped_table(result["skipped"]))
    return found


def by_case(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(name, list(group)) for name, group in groupby(rows, lambda row: row["case"])]


def decode_table(name: str, rows: list[dict[str, Any]]) -> Table:
    columns = ["kernel", "layout", "µs", "GB/s", "of copy", "of contiguous", "error"]
    cells = [
        [row["kernel"], layout_of(row), time_of(row), *rates_of(row), ratio_of(row), f"{row['error']:.1e}"]
        for row in rows
    ]
    if "of_even" in rows[0]:
        columns.append("of even")
        for line, row in zip(cells, rows):
            line.append(f"{row['of_even']:.1%}" if row["of_even"] else "-")
    return make_table(f"decode, {name}", columns, cells)


def prefill_table(name: str, rows: list[dict[str, Any]]) -> Table:
    columns = "kernel", "layout", "µs", "TFLOP/s", "of contiguous", "error"
    cells = [
        (row["kernel"], layout_of(row), time_of(row), f"{row['tflops']:.0f}", ratio_of(row), f"{row['error']:.1e}")
        for row in rows
    ]
    return make_table(f"prefill, {name}", columns, cells)


def shapes_table(name: str, rows: list[dict[str, Any]]) -> Table:
    columns = "heads", "µs", "of the first", "GB/s", "of the first", "error"
    cells = [
        (
            row["shape"],
            time_of(row),
            f"{row['of_first_time']:.2f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['of_first_rate']:.2f}",
            f"{row['error']:.1e}",
        )
        for row in rows
    ]
    return make_table(f"decode of other shapes, {name}", columns, cells)


def prompt_cells(row: dict[str, Any]) -> tuple[str, str]:
    """TFLOP/s, and their share of the first shape's."""
    return f"{row['tflops']:.0f}", f"{row['of_first_rate']:.2f}"


def cascade_table(name: str, rows: list[dict[str, Any]]) -> Table:
    columns = "kernel", "layout", "µs", "times as fast as decode", "error"
    cells = [(row["kernel"], layout_of(row), time_of(row), f"{row['gain']:.2f}", f"{row['error']:.1e}") for row in rows]
    return make_table(f"shared prefixes, {name}", columns, cells)


def skipped_table(entries: list[dict[str, Any]]) -> Table:
    """One line for each kernel and reason."""
    cases: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        cases.setdefault((entry["kernel"], entry["reason"]), []).append(entry["case"])
    rows = [(kernel, "; ".join(dict.fromkeys(names)), reason) for (kernel, reason), names in cases.items()]
    return make_table("Skipped", ("kernel", "cases", "reason"), rows)


def layout_of(row: dict[str, Any]) -> str:
    return f"{row['layout']}, {row['layers']} layers" if row["layout"] == "token-major" else row["layout"]


def time_of(row: dict[str, Any]) -> str:
    """Microseconds; those of a call that no CUDA graph could capture are named."""
    return f"{row['microseconds']:.1f}" + ("" if row["captured"] else " (stream)")


def rates_of(row: dict[str, Any]) -> tuple[str, str]:
    """GB/s, and their share of the device copy's."""
    return f"{row['gb_per_s']:.0f}", f"{row['of_copy']:.1%}"


def ratio_of(row: dict[str, Any]) -> str:
    """Time relative to that of the same kernel on contiguous tensors."""
    return f"{row['of_contiguous']:.3f}" if row["of_contiguous"] else "-"
