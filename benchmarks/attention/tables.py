"""A result of attention kernels as tables."""

from __future__ import annotations

from benchmarks.output import Lines, Row

LAYOUTS = {"contiguous": "contiguous", "token-major": "token-major", "paged-16": "blocks of 16"}
KERNELS = {
    "vmmkv, auto": "**vmmkv**",
    "SDPA, cuDNN": "cuDNN through SDPA",
    "FlashAttention-3": "FlashAttention-3",
    "FlashInfer, tensor cores": "FlashInfer, tensor cores",
    "FlashInfer": "FlashInfer",
}
ABSENT = {("SDPA, cuDNN", "paged-16"): "cannot", ("FlashAttention-3", "paged-16"): "not in this build"}
DECODE = {
    "16 x 4096": "16 x 4,096 tokens",
    "64 x 4096": "64 x 4,096 tokens",
    "ragged": "256 sequences of the Azure trace",
}
PREFILL = {"1 x 16384": "1 x 16,384 tokens", "2048 after 30000": "2,048 tokens after 30,000"}


def decode_table(result: Row) -> Lines:
    rows = kernel_rows(result["decode"], DECODE, "gb_per_s")
    rows.append(("for comparison, a device copy", f"{result['bandwidth']['copy_gb_per_s']:.0f}", "", ""))
    return ("decode, GB/s of K and V read", *LAYOUTS.values()), rows


def prefill_table(result: Row) -> Lines:
    return ("prefill, causal, TFLOP/s", *LAYOUTS.values()), kernel_rows(result["prefill"], PREFILL, "tflops")


def kernel_rows(measured: list[Row], cases: dict[str, str], figure: str) -> list[tuple[str, ...]]:
    """A row for each case and each kernel that ran in it, a cell for each layout."""
    found = {(row["case"], row["kernel"], row["layout"]): f"{row[figure]:.0f}" for row in measured}
    rows = []
    for case, label in cases.items():
        for kernel, name in KERNELS.items():
            cells = [found.get((case, kernel, layout)) for layout in LAYOUTS]
            if any(cells):
                name += f", {label}" if kernel == "vmmkv, auto" else ""
                rows.append((name, *(cell or ABSENT.get((kernel, layout), "") for cell, layout in zip(cells, LAYOUTS))))
    return rows


def shapes_table(result: Row) -> Lines:
    """A line for each shape; a rate for each batch, and its time beside that of the first shape."""
    cases = list(dict.fromkeys(row["case"] for row in result["shapes"]))
    cells = {(row["shape"], row["case"]): row for row in result["shapes"]}
    named = [" x ".join(f"{int(number):,}" for number in case.split(" x ")) for case in cases]
    columns = [column for name in named for column in (f"{name} tokens, GB/s", "time of the first line's")]
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in result["shapes"]):
        found = [cells[shape, case] for case in cases]
        texts = [text for row in found for text in (f"{row['gb_per_s']:.0f}", f"{row['of_first_time']:.2f}")]
        lines.append((shape, *texts))
    return ("decode, heads", *columns), lines


def prompts_table(result: Row) -> Lines:
    return ("prefill of 8,192 tokens, heads", "TFLOP/s", "of the first line's"), [
        (row["shape"], f"{row['tflops']:.0f}", f"{row['of_first_rate']:.2f}") for row in result["prompts"]
    ]


def part_table(rows: list[Row]) -> Lines:
    """A line for each row, with all of its figures."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return tuple(columns), [tuple(cell(row.get(name)) for name in columns) for row in rows]


def cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
