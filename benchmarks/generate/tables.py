"""A result as tables for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.table import Table

from vmmkv.cli.output import format_bytes, make_table

SPEED = "speed", "ms", "tokens/s", "speed-up", "/ floor", "TTFT", "chunked"
MEMORY = "memory", "peak", "KV peak", "KV held", "copied", "SDPA", "error"


def tables(result: dict[str, Any]) -> list[Table]:
    """Two tables for each model, batch and prompt, and one of what there is no figure of.

    Times are milliseconds: of a decode step, to the first token, and to it where the prompt comes in chunks. Speed-ups
    are against `DynamicCache` left alone. Peaks are of decode steps, above the weights; those of K and V, and what
    the cache holds at the end, are relative to the tokens' own bytes. `copied` is bytes a step, `error` of logits.
    """
    cells = sorted(result["cells"], key=shape)
    found = [table for _, group in groupby(filter(measured, cells), key=shape) for table in shape_tables(list(group))]
    others = [
        (f"{cell['model']}, {cell['batch']} x {cell['prompt']}", cell["contender"], cell["status"], cell["reason"])
        for cell in cells
        if not measured(cell)
    ]
    return [*found, make_table("No figures", ("cell", "contender", "", "why"), others)] if others else found


def shape(cell: dict[str, Any]) -> tuple[str, int, int]:
    return cell["model"], cell["batch"], cell["prompt"]


def measured(cell: dict[str, Any]) -> bool:
    return bool(cell["status"] == "measured")


def shape_tables(cells: list[dict[str, Any]]) -> tuple[Table, Table]:
    first = cells[0]
    model, batch, prompt = shape(first)
    title = f"{model}, {batch} x {prompt} ({first['prompt_kv']} K and V), {first['steps_timed']} steps"
    if first["floor_ms"]:
        title += f"; floor {first['floor_ms']:.2f} ms"
    return make_table(title, SPEED, map(speed, cells)), make_table("", MEMORY, map(memory, cells))


def speed(cell: dict[str, Any]) -> tuple[str, ...]:
    return (
        cell["contender"],
        number(cell["step_ms"], ".2f"),
        number(cell["tokens_per_s"], ".0f"),
        number(cell["of_baseline"], ".2f"),
        number(cell["of_floor"], ".2f"),
        number(cell["ttft_ms"], ".1f"),
        number(cell["ttft_chunked_ms"], ".1f"),
    )


def memory(cell: dict[str, Any]) -> tuple[str, ...]:
    live, kv_peak = cell["live_bytes"], cell["kv_peak_bytes"]
    return (
        cell["contender"],
        size(cell["peak_bytes"]),
        number(None if kv_peak is None else kv_peak / live, ".3f"),
        number(cell["held_bytes"] / live, ".3f"),
        size(cell["copied_bytes"]),
        ", ".join(cell["sdpa_kernels"]) or "-",
        f"{cell['logits_error']:.1e}",
    )


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def size(nbytes: float | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
