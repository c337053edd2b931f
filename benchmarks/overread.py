"""FlashAttention-3 on ragged rows that have memory for a tile behind their ends, beside padded rows, and our kernel.

    python -m benchmarks.overread [--trace FILE] [--json]

A decode step of 256 sequences, as in `benchmarks.attention`. Then once more with NaN behind every sequence: where that
comes through, what lies there must be numbers, as with `KVCache(scrub=True)`. Needs an NVIDIA GPU, and `fa3-fwd`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import environment, print_result
from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.workload import name_of

from .attention.batches import Batch, Case, Reference, make_batch
from .attention.cases import RAGGED, attention, decode_cases
from .attention.layouts import KV, OVERREAD, layouts
from .attention.peers import flash_attention_3, versions
from .attention.timing import Call, measure

Row = dict[str, Any]
LAYOUTS = PADDED, ROWS = ("contiguous", "token-major")
LABELS = {PADDED: "padded rows", ROWS: "rows of a cache"}
KERNELS = PEER, OURS = ("FlashAttention-3", "vmmkv")


def main(
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Lengths: a CSV or JSON lines trace.")
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Measure FlashAttention-3 on ragged rows."""
    if not torch.cuda.is_available():
        errors.print("This benchmark needs an NVIDIA GPU; torch sees none.", style="red")
        raise typer.Exit(1)
    device = torch.device("cuda", torch.cuda.current_device())
    case = next(case for case in decode_cases(trace) if case.name == RAGGED)
    result = {
        "environment": environment(device),
        "peers": versions(),
        "ragged_lengths": name_of(trace),
        "overread": OVERREAD,
        **run(case, device),
    }
    if json_output:
        print_result(result)
    else:
        show(result)


def run(case: Case, device: torch.device) -> Row:
    """A row for each kernel and layout, in turns; and by kernel, the error with NaN behind each row, None for NaN."""
    batch = make_batch(case, device)
    reference = Reference(batch)
    with layouts(batch, LAYOUTS) as kvs:
        calls = [(kernel, kv, call_of(kernel, batch, kv)) for kernel in KERNELS for kv in kvs]
        timings = measure([call for *_, call in calls])
        rows = [
            {
                "kernel": kernel,
                "layout": kv.name,
                "microseconds": timing.microseconds,
                "gb_per_s": case.kv_bytes / timing.microseconds / 1e3,
                "error": reference.error(timing.output),
            }
            for (kernel, kv, _), timing in zip(calls, timings)
        ]
        spoil(batch, kvs[-1])
        found = {kernel: reference.error(call()) for kernel, kv, call in calls if kv.name == ROWS}
    nan_behind = {kernel: error if error == error else None for kernel, error in found.items()}
    return {"sequences": len(case.seq_lens), "tokens": sum(case.seq_lens), "decode": rows, "nan_behind": nan_behind}


def call_of(kernel: str, batch: Batch, kv: KV) -> Call:
    return flash_attention_3(batch, kv) if kernel == PEER else attention(batch, kv, "auto")


def spoil(batch: Batch, kv: KV) -> None:
    """Writes NaN behind each sequence, as far as rows may be read."""
    for sequence, seq_len in enumerate(batch.case.seq_lens):
        kv.k[sequence, seq_len : seq_len + OVERREAD] = torch.nan
        kv.v[sequence, seq_len : seq_len + OVERREAD] = torch.nan


def table(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a line for each kernel."""
    found = {(row["kernel"], row["layout"]): row for row in result["decode"]}
    lines = []
    for kernel in KERNELS:
        padded, rows = (found[kernel, layout] for layout in LAYOUTS)
        cells = [f"{row['microseconds']:.0f} µs, {row['gb_per_s']:,.0f} GB/s" for row in (padded, rows)]
        ratio = f"{rows['microseconds'] / padded['microseconds']:.3f}"
        lines.append((kernel, *cells, ratio, f"{max(padded['error'], rows['error']):.2%}"))
    return ("decode", *LABELS.values(), "ratio of times", "off from float64 by at most"), lines


def verdict(result: Row) -> str:
    """A sentence on what NaN behind rows does."""
    clean = [kernel for kernel, error in result["nan_behind"].items() if error is not None and error < 0.02]
    spoilt = [kernel for kernel in result["nan_behind"] if kernel not in clean]
    parts = [f"{' and '.join(clean)} read right" if clean else "", f"{' and '.join(spoilt)} did not" if spoilt else ""]
    return f"With NaN behind every sequence {', '.join(filter(None, parts))}."


def show(result: Row) -> None:
    columns, lines = table(result)
    console.print(make_table(f"{result['sequences']} sequences, {result['tokens']:,} tokens", columns, lines))
    console.print(verdict(result))


if __name__ == "__main__":
    typer.run(main)
