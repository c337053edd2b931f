"""Comparisons that no table of one result has: the slowest of several cases, with its layout and peer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Row = dict[str, Any]
OURS = "vmmkv, auto"


class Found(NamedTuple):
    """A figure, and the case or layout in which it was measured."""

    value: float
    where: str


def compare(attention: Row, small: Row) -> list[Row]:
    """Compares kernels of the whole benchmark, and of `--only small`."""
    cells = {(row["case"], row["layout"], row["kernel"]): row for row in attention["decode"]}
    prefill = {(row["case"], row["layout"], row["kernel"]): row["tflops"] for row in attention["prefill"]}
    lines = [token_major(cells), *beside_peers(cells)]
    lines.append(line("prefill, 4 x 4096, TFLOP/s over FlashAttention-3's", min(over_peer(prefill), default=None)))
    for call in ("append", "copy_tokens"):
        found = [Found(row["of_copy"], row["layout"]) for row in small["copies"] if row["kernel"] == call]
        lines.append(line(f"{call}, GB/s over a device copy's", min(found, default=None)))
    hosts = ((f"{row['call']}, µs of the host for a call", row["host_microseconds"]) for row in small["host"])
    return [*lines, *({"what": what, "value": value} for what, value in hosts)]


def token_major(cells: dict[tuple[str, str, str], Row]) -> Row:
    found = [
        Found(row["of_contiguous"], case)
        for (case, layout, kernel), row in cells.items()
        if (layout, kernel) == ("token-major", OURS) and row["gb_per_s"] * row["microseconds"] * 1e3 >= 2**30
    ]
    return line("decode, token-major, time over contiguous's, from 1 GiB on", max(found, default=None))


def beside_peers(cells: dict[tuple[str, str, str], Row]) -> Iterator[Row]:
    """Compares our kernel with the fastest peer in the same layout, in each case."""
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
        yield line(f"decode, {case}, GB/s over the fastest peer's", min(found, default=None))


def over_peer(prefill: dict[tuple[str, str, str], float]) -> Iterable[Found]:
    return (
        Found(prefill[case, layout, OURS] / tflops, layout)
        for (case, layout, kernel), tflops in prefill.items()
        if (case, kernel) == ("4 x 4096", "FlashAttention-3")
    )


def line(what: str, slowest: Found | None) -> Row:
    """A comparison; None was not measured."""
    if slowest is None:
        return {"what": what, "value": None}
    return {"what": f"{what} ({slowest.where})" if slowest.where else what, "value": slowest.value}
