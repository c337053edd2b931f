"""The command `vmmkv pool`: budgets that processes share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from ..budget import parse_bytes
from ..errors import ArgumentError, BudgetError
from ..ledger import Book, Ledger, folder
from .output import JsonOutput, console, format_bytes, make_table, print_json

COLUMNS = "process", "granted", "used", "surplus", "reserved", "wanted"
HINT = "No process of yours shares a budget; one that makes vmmkv.FramePool(shared=NAME) is shown here."


def pool(
    name: Annotated[str, typer.Argument(help="A budget's name, or NAME@DEVICE; all without one.")] = "",
    limit: Annotated[str | None, typer.Option(help="Set the limit of all processes: bytes, 60GiB.")] = None,
    reserve: Annotated[str | None, typer.Option(help="Reserve memory for a process: PID=8GiB.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Show budgets that your processes share (`FramePool(shared=NAME)`), or change one while they run.

    `granted` is memory that a process may hold, `used` the part with live tokens and reservations of its caches,
    `surplus` the rest, which goes to processes that lack memory, as far as it is not `reserved`.
    """
    paths = ledgers(name)
    if (name and not paths) or ((limit or reserve) and not (name and len(paths) == 1)):
        known = ", ".join(path.stem for path in ledgers()) or "none"
        raise ArgumentError(f"asked for budget {name!r}; there are: {known}. Name one")
    for path in paths if limit or reserve else []:
        change(path, limit, reserve)
    found = [read(path) for path in paths]
    if json_output:
        print_json(found)
    else:
        for each in tables(found):
            console.print(each)


def ledgers(name: str = "") -> list[Path]:
    """The ledgers of this user that have a name; all without one."""
    return [path for path in sorted(folder().glob("*.ledger")) if name in ("", path.stem, path.stem.partition("@")[0])]


def change(path: Path, limit: str | None, reserve: str | None) -> None:
    ledger = Ledger(path)
    if limit:
        ledger.set_limit(parse_bytes(limit, free=0))
    if reserve:
        pid, sign, size = reserve.partition("=")
        if not (sign and pid.isdecimal()):
            raise ArgumentError(f"got --reserve {reserve}; write PID=SIZE, e.g. 1234=8GiB")
        ledger.change(partial(_reserve, ledger, int(pid), parse_bytes(size, free=0)))
    ledger.close()


def _reserve(ledger: Ledger, pid: int, nbytes: int, book: Book) -> None:
    """Sets what is reserved for a process: it keeps so much from now on."""
    found = np.flatnonzero(book.lines["pid"] == pid).tolist()
    if not found:
        raise BudgetError(f"asked to reserve memory for process {pid}, which does not use {ledger.path.stem}")
    book.reserve(book.lines[found[0]], nbytes)
    ledger.write(book, found[0])


def read(path: Path) -> dict[str, Any]:
    """What a ledger says, in bytes."""

    def shown(book: Book) -> dict[str, Any]:
        words = ["pid", "granted", "used", "reserved", "wanted"]
        lines = book.lines[words][book.lines["pid"] != 0].tolist()
        processes = [dict(zip(words, line)) for line in lines]
        return {"name": path.stem, "limit": book.limit, "free": book.free, "processes": processes}

    ledger = Ledger(path)
    found = ledger.change(shown)
    ledger.close()
    return found


def tables(found: list[dict[str, Any]]) -> Iterator[Table | str]:
    for each in found:
        title = f"{each['name']}: {format_bytes(each['limit'])}, {format_bytes(max(each['free'], 0))} not granted"
        lines = [line | {"surplus": max(line["granted"] - line["used"], 0)} for line in each["processes"]]
        rows = ([line["pid"], *(format_bytes(line[name]) for name in COLUMNS[1:])] for line in lines)
        yield make_table(title, COLUMNS, rows)
    if not found:
        yield HINT
