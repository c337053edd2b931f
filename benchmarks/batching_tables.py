"""What the benchmarks of continuous batching show, in a terminal and in the docs."""

from __future__ import annotations

from typing import Any

from vmmkv.stats import format_bytes

Result = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def batching_table(result: Result) -> Table:
    """Of each round what it reached."""
    columns = "on", "finished", "output tokens/s", "first token, median", "memory, peak", "waste, median", "most"
    rows = [
        (
            row["system"],
            f"{row['finished']} of {result['requests']}",
            f"{row['tokens_per_s']:,.0f}",
            "" if row["first_token_s"] is None else f"{row['first_token_s']:.1f} s",
            format_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
            *("" if row[name] is None else f"{row[name]:.1%}" for name in ("waste", "most_waste")),
        )
        for row in result["served"]
    ]
    return columns, rows


def first_tokens_table(result: Result) -> Table:
    """How long first tokens take, of prompts that are new and of those of which most is known."""
    first = result["first_tokens"]
    columns = f"a prompt of {first['tokens']:,} tokens", "first token after", "times as early"
    kinds = {"new": "new", "known": f"{first['known']:.0%} of it known"}
    rows = [
        (label, f"{first[f'{kind}_s'] * 1e3:,.0f} ms", f"{first['new_s'] / first[f'{kind}_s']:.1f}")
        for kind, label in kinds.items()
    ]
    return columns, rows


def ranks_table(result: Result) -> Table:
    """Of each round on one and on two GPUs what it reached, and the part of the time that the driver took to map pages
    for who waited for them, on the GPU where it was more."""
    columns = "GPUs", "finished", "output tokens/s", "of the time in the driver, most of a GPU"
    rows = [
        (
            str(row["ranks"]),
            f"{row['finished']} of {result['requests']}",
            f"{row['tokens_per_s']:,.0f}",
            f"{max(row['driver_s']) / row['seconds']:.2%}",
        )
        for row in result["served"]
    ]
    return columns, rows
