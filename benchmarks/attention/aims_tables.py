"""What attention is to reach, and what it reached: read off results, the worst of all that an aim is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from vmmkv import KVLayout

Row = dict[str, Any]
OURS = "vmmkv, auto"
RAGGED = "ragged"
CALL_MICROSECONDS = 6
EIGHT_BITS = {"fp8": ("float8_e4m3fn", torch.float8_e4m3fn, 1.8), "int8": ("int8", torch.int8, 1.7)}
"""What tables of results call them, their dtypes, and how many times as fast as bf16 decode is to be."""


class Found(NamedTuple):
    """A figure, and where it was found."""

    value: float
    where: str


def compare(attention: Row, shapes: Row, small: Row, eight_bits: Row) -> list[Row]:
    """A line for each aim, from the results of the whole benchmark, of `--only shapes` and `small`, and of
    `eight_bits`."""
    cells = {(row["case"], row["layout"], row["kernel"]): row for row in attention["decode"]}
    prefill = {(row["case"], row["layout"], row["kernel"]): row["tflops"] for row in attention["prefill"]}
    lines = [*narrow_heads(shapes), *more_queries(shapes), token_major(cells), *beside_peers(cells)]
    lines.append(at_least("prefill, 1 x 16384, TFLOP/s", [Found(prefill["1 x 16384", "contiguous", OURS], "")], 700))
    lines.append(at_least("prefill, 4 x 4096, TFLOP/s over FlashAttention-3's", over_peer(prefill), 0.95))
    for call in ("append", "copy_tokens"):
        found = [Found(row["of_copy"], row["layout"]) for row in small["copies"] if row["kernel"] == call]
        lines.append(at_least(f"{call}, GB/s over a device copy's", found, 0.85))
    lines += host_time(small["host"])
    lines += [*eight_bit_lines(shapes, eight_bits), cascade(attention.get("cascade", []))]
    return lines


def narrow_heads(shapes: Row) -> Iterator[Row]:
    for dim in (64, 80, 96):
        found = of_shape(shapes, f"32/8 x {dim}, bfloat16", "of_first_rate")
        yield at_least(f"decode, heads of {dim}, GB/s over those of 128", found, 0.9)


def more_queries(shapes: Row) -> Iterator[Row]:
    for queries in (2, 4, 8):
        found = of_shape(shapes, f"32/8 x 128, bfloat16, {queries} queries", "of_first_time")
        yield at_most(f"decode, {queries} queries, time over one's", found, 1.1)


def of_shape(shapes: Row, name: str, figure: str) -> list[Found]:
    return [Found(row[figure], row["case"]) for row in shapes["shapes"] if row["shape"] == name]


def token_major(cells: dict[tuple[str, str, str], Row]) -> Row:
    found = [
        Found(row["of_contiguous"], case)
        for (case, layout, kernel), row in cells.items()
        if (layout, kernel) == ("token-major", OURS) and row["gb_per_s"] * row["microseconds"] * 1e3 >= 2**30
    ]
    return at_most("decode, token-major, time over contiguous's, from 1 GiB on", found, 1.02)


def beside_peers(cells: dict[tuple[str, str, str], Row]) -> Iterator[Row]:
    """For each case ours over the fastest peer in the same layout."""
    for case in dict.fromkeys(case for case, _, _ in cells):
        found = []
        for layout in dict.fromkeys(layout for of, layout, _ in cells if of == case):
            peers = {
                kernel: row["gb_per_s"]
                for (of, place, kernel), row in cells.items()
                if (of, place) == (case, layout) and not kernel.startswith("vmmkv")
            }
            if peers:
                best = max(peers, key=peers.__getitem__)
                found.append(Found(cells[case, layout, OURS]["gb_per_s"] / peers[best], f"{layout}, {best}"))
        yield at_least(f"decode, {case}, GB/s over the fastest peer's", found, 1.0 if case == RAGGED else 0.97)


def over_peer(prefill: dict[tuple[str, str, str], float]) -> list[Found]:
    return [
        Found(prefill[case, layout, OURS] / tflops, layout)
        for (case, layout, kernel), tflops in prefill.items()
        if (case, kernel) == ("4 x 4096", "FlashAttention-3")
    ]


def host_time(calls: list[Row]) -> Iterator[Row]:
    """Of each call of ours; those of torch have no aim."""
    for row in calls:
        found = [Found(row["host_microseconds"], "")]
        aim = None if row["call"].startswith("torch") else CALL_MICROSECONDS
        yield at_most(f"{row['call']}, µs of the host for a call", found, aim)


def eight_bit_lines(shapes: Row, eight_bits: Row) -> Iterator[Row]:
    for name, (called, dtype, aim) in EIGHT_BITS.items():
        rows = of_shape(shapes, f"32/8 x 128, {called}", "of_first_time")
        found = [Found(1 / time, case) for time, case in rows if case == "64 x 16384"]
        yield at_least(f"decode, {name}, times as fast as bf16", found, aim)
        yield at_most(f"{name}, attention's error, of the norm", [Found(eight_bits["attention"][name], "")], 0.03)
        bf16, kept = KVLayout(32, 8, 128), KVLayout(32, 8, 128, dtype, scales="token_head")
        times = Found(bf16.token_bytes / kept.token_bytes, "by arithmetic")
        yield at_least(f"{name}, tokens in the same bytes, over bf16's, scales included", [times], 1.9)


def cascade(rows: list[Row]) -> Row:
    case = "1 x 64 sequences, 8192 + 512 tokens"
    found = [
        Found(row["gain"], row["layout"])
        for row in rows
        if (row["case"], row["kernel"]) == (case, "vmmkv, cascade, auto")
    ]
    return at_least(f"cascade, {case}, times as fast as decode", found, 5)


def at_least(what: str, found: Iterable[Found], aim: float) -> Row:
    """A comparison of the smallest figure; without any, nothing was measured."""
    worst = min(found, default=None)
    return line(what, worst, f">= {aim:g}", worst is not None and worst.value >= aim)


def at_most(what: str, found: Iterable[Found], aim: float | None) -> Row:
    """The same of the largest; there may be no aim."""
    worst = max(found, default=None)
    if aim is None:
        return line(what, worst, None, False)
    return line(what, worst, f"<= {aim:g}", worst is not None and worst.value <= aim)


def line(what: str, worst: Found | None, aim: str | None, met: bool) -> Row:
    if worst is None:
        return {"what": what, "value": None, "aim": aim}
    where = f" ({worst.where})" if worst.where else ""
    return {"what": what + where, "value": worst.value} | ({"aim": aim, "met": met} if aim else {})
