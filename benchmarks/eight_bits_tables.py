"""What the benchmark of 8-bit K and V shows, in a terminal and in the docs."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def logits_table(result: Result) -> Table:
    """A line for each cache and length of prompts, a column for each kind of outliers."""
    found = {(row["cache"], row["length"], row["outliers"]): row for row in result["logits"]}
    kinds = sorted({row["outliers"] for row in result["logits"]})
    lines = []
    for length, cache in dict.fromkeys((row["length"], row["cache"]) for row in result["logits"]):
        of = [found[cache, length, kind] for kind in kinds]
        lines.append((f"{length:,}", cache, *(f"{row['distance']:.1%}, {row['agreement']:.0%}" for row in of)))
    return ("prompt", "K and V in", *(_outliers(kind) for kind in kinds)), lines


def rounding_table(result: Result) -> Table:
    """A line for each format: how far it is off, of the norm."""
    kept = result["round_trips"]
    lines = [
        (
            f"vmmkv {name}",
            f"{error:.2%}",
            *(f"{of['error'][name]['K']:.2%}, {of['error'][name]['V']:.2%}" for of in kept),
        )
        for name, error in result["attention"].items()
    ]
    columns = (f"K, V: {_outliers(of['outliers'])}" for of in kept)
    return ("K and V in", "attention to normal K and V", *columns), lines


def _outliers(times: int) -> str:
    return f"outliers of K {times} x" if times > 1 else "no outliers"
