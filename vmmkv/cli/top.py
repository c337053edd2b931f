"""The command `vmmkv top`: the pools of running processes, live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..publication import read_all
from .options import JsonOutput
from .output import console, format_bytes, make_table, print_json
from .pool import ledgers, read, tables

COLUMNS = (
    *("process", "pool", "limit", "taken", "used", "sequences", "tokens"),
    *("cached", "ahead", "driver ms/s", "mapper ms/s"),
)
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

    `taken` is memory of the device, `used` what of it holds tokens. `cached` is the share of prompts' tokens whose K
    and V were there already, of sequences that were started for reuse. `ahead` is the share of pages that were mapped
    before somebody needed them; `driver` is time that callers have spent in calls of the memory system since the last
    look, `mapper` that of the thread that nobody waits for. `--json` prints the last snapshots, once.
    """
    if json_output:
        print_json(read_all())
        return
    records = read_all()
    if once:
        console.print(Group(draw(records, []), *shared()))
        return
    with suppress(KeyboardInterrupt), Live(draw(records, []), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before, records = records, read_all()
            live.update(Group(draw(records, before), *shared()), refresh=True)


def shared() -> Iterator[Table | str]:
    """Tables of budgets that processes share, if there are any."""
    if paths := ledgers():
        yield from tables([read(path) for path in paths])


def draw(records: list[Record], before: list[Record]) -> Table | str:
    """A table of what processes have published; `before` is what they had at the last look."""
    last = dict(_pools(before))
    rows = []
    for key, both in _pools(records):
        with suppress(*ODD):
            rows.append(_row(*both, last.get(key)))
    return make_table("Pools", COLUMNS, rows) if rows else HINT


def _pools(records: list[Record]) -> Iterator[tuple[Any, tuple[Record, Record]]]:
    """Each pool, and its process, by what names it for as long as it lives."""
    for record in records:
        for pool in record["pools"]:
            yield (record["pid"], record["start"], str(pool.get("number"))), (record, pool)


def _row(record: Record, pool: Record, last: tuple[Record, Record] | None) -> list[str]:
    mapped = pool["pages_mapped"]
    pages = sum(mapped.values())
    rates = ["", ""]
    if last and (seconds := record["time"] - last[0]["time"]):
        spent = (_seconds(pool[calls]) - _seconds(last[1][calls]) for calls in ("driver_calls", "mapper_calls"))
        rates = [f"{each / seconds * 1000:.1f}" for each in spent]
    return [
        escape(f"{record['pid']} {record['command'][:30]}"),
        escape(f"{pool['number']} ({pool['device']})"),
        *(format_bytes(pool[f"{name}_bytes"]) for name in ("limit", "physical", "used")),
        f"{pool['sequences']:,}",
        f"{pool['tokens']:,}",
        f"{pool['cached_tokens'] / pool['prompt_tokens']:.0%}" if pool["prompt_tokens"] else "",
        f"{mapped['ahead'] / pages:.0%}" if pages else "",
        *rates,
    ]


def _seconds(calls: dict[str, dict[str, float]]) -> float:
    return sum(call["seconds"] for call in calls.values())
