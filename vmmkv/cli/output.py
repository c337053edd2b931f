"""Options that commands share, and how they print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..stats import format_bytes as format_bytes

TraceFile = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Azure CSV or Mooncake JSON lines.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is a GPU.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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


def check_plot(path: Path) -> None:
    """Refuses, before the work, what could not be drawn after it."""
    if not find_spec("matplotlib"):
        raise typer.BadParameter('--plot needs matplotlib: pip install "vmmkv[bench]"')
    if path.suffix not in (".png", ".pdf", ".svg") or not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--plot {path}: write a .png, .pdf or .svg file in a folder that exists")
