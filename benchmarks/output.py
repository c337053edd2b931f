"""How benchmarks print a result: JSON for programs, tables for people."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vmmkv.cli.output import console, make_table, print_json

from .environment import complete

Row = dict[str, Any]
Lines = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""The columns of a table, and its rows."""


def deliver(result: Row, json_output: bool, tables: Mapping[str, Callable[[Row], Lines]]) -> None:
    """Print a result as JSON, or as tables: by title the function that makes each. Tables without rows are left out."""
    if json_output:
        print_json(complete(result))
        return
    for title, table in tables.items():
        columns, rows = table(result)
        if rows:
            console.print(make_table(title, columns, rows))
    for what in result.get("missed", []):
        console.print(f"not reached in time: {what}")


def to_json(result: Row) -> str:
    """A result as JSON, with each list of numbers on one line."""
    return re.sub(r"\[[\d\s.,eE+\-\[\]]+\]", lambda found: "".join(found[0].split()), json.dumps(result, indent=2))


def name_of(trace: Path | None) -> str:
    """The name of the replayed requests in results."""
    return trace.name if trace else "lognormal, those of vmmkv.workload.conversations"
