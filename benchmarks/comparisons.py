"""A result's comparisons, each with `what` was compared and its `value`, as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COLUMNS = "what", "measured"


def lines(comparisons: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each comparison; a value of None was not measured."""
    return [(row["what"], "not measured" if row["value"] is None else f"{row['value']:.4g}") for row in comparisons]
