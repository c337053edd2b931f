"""A result as tables, in a terminal and in the docs."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
PARTS = "decode", "prefill", "append"
ORDERS = "rows, tokens first", "blocks, tokens first", "blocks, heads first"


def waste_table(result: Result) -> Table:
    """A line for each model and layers of a range, a column for each order."""
    found = {(row["model"], row["layers_per_range"], row["order"]): row for row in result["waste"]}
    orders = list(dict.fromkeys(row["order"] for row in result["waste"]))
    lines = [
        (model, layers, *(waste_of(found[model, layers, order]) for order in orders))
        for model, layers in dict.fromkeys((row["model"], row["layers_per_range"]) for row in result["waste"])
    ]
    columns = ("tokens first", "heads first", "heads first, blocks of a multiple of 16 tokens")
    return ("model", "layers of a range", *columns), lines


def waste_of(row: Result) -> str:
    if row["waste"] is None:
        return "a page is too small"
    return f"{row['waste']:.1%}, {row['tokens_of_page']:,} tokens a page"


def speed_table(result: Result) -> Table:
    """A line for each model and layers of a range, a column for each kernel and order: times of contiguous rows'."""
    found = {
        (row["model"], row["layers_per_range"], row["part"], row["order"]): f"{row['of_contiguous']:.2f}"
        for row in result["speed"]
    }
    kinds = dict.fromkeys((row["model"], row["layers_per_range"]) for row in result["speed"])
    lines = [(*kind, *(found.get((*kind, part, order), "") for part in PARTS for order in ORDERS)) for kind in kinds]
    columns = (f"{part}: {order}" for part in PARTS for order in ORDERS)
    return ("model", "layers of a range", *columns), lines
