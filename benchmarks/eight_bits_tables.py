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


HEAD_DIM = 128
SCALES = "fp32", "fp16"
"""Of a token and head; those that are kept are the first."""


def tokens_for_bf16(scales: str) -> float:
    """Tokens in the bytes of one in bf16, with scales: by arithmetic, of any number of heads of `HEAD_DIM`."""
    scale_bytes = {"fp32": 4, "fp16": 2}[scales]
    return 2 * HEAD_DIM / (HEAD_DIM + scale_bytes)


def rounding_table(result: Result) -> Table:
    """A line for each format: how far it is off, of the norm, and how much more fits."""
    kept = result["round_trips"]
    lines = [
        (
            f"vmmkv {name}",
            f"{error:.2%}",
            *(f"{of['error'][name]['K']:.2%}, {of['error'][name]['V']:.2%}" for of in kept),
            *(f"{tokens_for_bf16(scales):.2f}" for scales in SCALES),
        )
        for name, error in result["attention"].items()
    ]
    columns = [f"K, V: {_outliers(of['outliers'])}" for of in kept]
    columns += [f"tokens for one in bf16, scales in {scales} (arithmetic)" for scales in SCALES]
    return ("K and V in", "attention to normal K and V", *columns), lines


def _outliers(times: int) -> str:
    return f"outliers of K {times} x" if times > 1 else "no outliers"
