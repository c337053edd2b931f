"""The command `vmmkv top`: the pools of running processes, live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..publication import read_all
from .output import JsonOutput, console, format_bytes, print_json
from .pool import ledgers, read, tables

WIDTHS = {
    "limit": 9, "taken": 9, "used": 9, "sequences": 10, "tokens": 11, "cached": 7, "ahead": 7, "driver": 7, "mapper": 7,
}  # fmt: skip
"""The columns, which are 76 characters wide in all."""
ODD = KeyError, TypeError, ValueError, AttributeError, ArithmeticError
"""What reading a pool's statistics fails with if they are not those of this version."""
Record = dict[str, Any]
HINT = "No process of yours publishes its pools; one that calls vmmkv.publish() is shown here."


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table, and end.")] = False,
    json_output: JsonOutput = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show the pools of your running processes that call `vmmkv.publish()`, until Ctrl-C.

    `taken` is memory of the device, and `used` is the part of it that holds tokens. `cached` is the share of prompt
    tokens whose K and V were there already, in sequences that were started for reuse. `ahead` is the share of pages
    that were mapped before a sequence needed them. `driver` and `mapper` are milliseconds a second in calls of the
    memory system: those that callers waited for, and those of the mapper thread. `--json` prints the last snapshots,
    once.
    """
    records = read_all()
    if json_output:
        print_json(records)
        return
    shown = Group(draw(records, []), *shared())
    if not once:
        with suppress(KeyboardInterrupt), Live(shown, console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(interval)
                before, records = records, read_all()
                shown = Group(draw(records, before), *shared())
                live.update(shown, refresh=True)
    console.print(shown)


def shared() -> Iterator[Table | str]:
    if paths := ledgers():
        yield from tables([read(path) for path in paths])


def draw(records: list[Record], before: list[Record]) -> Text:
    """Two lines for each pool that is published, its process and its figures. `before` is what was published at the
    last look."""
    last = dict(_pools(before))
    lines = []
    for key, (record, pool) in _pools(records):
        with suppress(*ODD):
            name = f"{record['pid']} {' '.join(record['command'].split())}"
            figures = _figures(record, pool, last.get(key))
            name = name if len(name) <= 50 else f"{name[:24]}…{name[-25:]}"  # a server's port comes last
            lines += [f"{name}, pool {pool['number']} ({pool['device']})", _line(figures)]
    return Text("\n".join([_line(WIDTHS), *lines]) if lines else HINT)


def _line(cells: Any) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS.values()))


def _pools(records: list[Record]) -> Iterator[tuple[Any, tuple[Record, Record]]]:
    """Each pool and its process, by a key that stays the same as long as the pool lives."""
    for record in records:
        for pool in record["pools"]:
            yield (record["pid"], record["start"], str(pool.get("number"))), (record, pool)


def _figures(record: Record, pool: Record, last: tuple[Record, Record] | None) -> list[str]:
    mapped = pool["pages_mapped"]
    pages = sum(mapped.values())
    rates = ["", ""]
    if last and (seconds := record["time"] - last[0]["time"]):
        for index, calls in enumerate(("driver_calls", "mapper_calls")):
            now, before = (sum(call["seconds"] for call in each[calls].values()) for each in (pool, last[1]))
            rates[index] = f"{(now - before) / seconds * 1000:.1f}"
    return [
        *(format_bytes(pool[f"{name}_bytes"]) for name in ("limit", "physical", "used")),
        f"{pool['sequences']:,}",
        f"{pool['tokens']:,}",
        f"{pool['cached_tokens'] / pool['prompt_tokens']:.0%}" if pool["prompt_tokens"] else "",
        f"{mapped['ahead'] / pages:.0%}" if pages else "",
        *rates,
    ]
