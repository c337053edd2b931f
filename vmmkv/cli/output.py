"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from ..stats import format_bytes as format_bytes

console = Console()
errors = Console(stderr=True)


def print_json(data: Any) -> None:
    """Prints JSON and nothing else: never coloured, whatever the terminal or the environment says."""
    print(json.dumps(data, indent=2))


def make_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table of whatever `str` makes of the cells: names in the first column, values in those behind it."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(str, row))
    return table
