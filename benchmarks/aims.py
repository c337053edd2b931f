"""What benchmarks aim at, on a GPU, beside what they measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
COLUMNS = "what", "measured", "aim", "met"


def compared(
    result: Row, what: str, value: float | None, *, most: float | None = None, least: float | None = None
) -> Row:
    """One of a result's comparisons: a value that is to be so much at most, or at least; or that is only told, as on a
    machine without a GPU. None was not measured."""
    row: Row = {"what": what, "value": value}
    if value is None or "cuda_driver" not in result["environment"]:
        return row
    if most is not None:
        row |= {"aim": f"<= {most:g}", "met": value <= most}
    if least is not None:
        row |= {"aim": f">= {least:g}", "met": value >= least}
    return row


def lines(comparisons: Iterable[Row]) -> list[tuple[str, ...]]:
    """Those of a table; a value of None was not measured."""
    return [
        (
            row["what"],
            "not measured" if row["value"] is None else f"{row['value']:.4g}",
            row.get("aim", ""),
            {True: "yes", False: "no"}.get(row.get("met"), ""),
        )
        for row in comparisons
    ]
