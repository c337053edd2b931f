"""What it takes to begin with what is known: host time, and driver calls.

    python -m benchmarks.prefixes [--device cuda] [--tokens 8192] [--rounds 50] [--json]

A chat's next turn takes its own row again, which no sequence has had meanwhile. A hit beside a live sequence maps its
frames once more: large ones, or single pages. Without reuse pages are made, and all has to be computed. Token ids come
as an array; what a list of them costs is said, too. `ratio` is the host's time over that of its driver calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from benchmarks.environment import environment, print_result
from vmmkv import KVCache, KVLayout
from vmmkv.cli.options import Device, JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.driver.driver import Driver

from .allocator import microseconds, spread
from .geometry import LAYOUT, memory_of, open_geometry
from .sharing import calls_of, calls_since

Row = dict[str, Any]
TURN = 8
"""Tokens that a chat's next turn, or a request, has behind what is known."""
NEXT_TURN, HIT = "a chat's next turn", "a hit beside a live sequence"


def beginnings(driver: Driver, layout: KVLayout, tokens: int, large: bool, rounds: int) -> list[Row]:
    """What starts of prompts take whose first tokens are known."""
    pages = layout.pages(tokens + 2 * TURN, driver.page_size)
    max_bytes = (4 * pages + 64) * driver.page_size
    known = np.random.default_rng().integers(1 << 17, size=tokens + TURN)
    with KVCache(
        layout, 4, tokens + 2 * TURN, max_bytes=max_bytes, lookahead=0, large_frames=large, **memory_of(driver)
    ) as cache:
        holder = cache.sequence(token_ids=known[:tokens], expected_tokens=tokens + 2 * TURN)
        holder.extend(2 * TURN)  # what the chat will have has its pages
        holder.truncate(tokens)
        holder.commit(known[:tokens])
        rows = [start(cache, HIT, known, large, rounds, trims=True)]
        holder.free()
        rows.append(start(cache, NEXT_TURN, known, large, rounds))
        rows.append(start(cache, f"{NEXT_TURN}, ids in a list", known.tolist(), large, rounds))
        rows.append(start(cache, "without reuse", known, large, rounds, trims=True, reuse=False))
        cache.check()
    return rows


def start(
    cache: KVCache, what: str, ids: Any, large: bool, rounds: int, *, trims: bool = False, reuse: bool = True
) -> Row:
    """What it takes to start a sequence with these ids; a round before the others is not counted.

    Args:
        trims: whether parked rows are given up before.
        reuse: see `KVCache.sequence`.
    """
    took, driver_us, cached = [], [], 0
    calls: dict[str, int] = {}
    begin: Callable[[], None] = lambda: sequences.append(cache.sequence(token_ids=ids, reuse=reuse))  # noqa: E731
    for number in range(rounds + 1):
        sequences: list[Any] = []
        if trims:
            cache.trim()
        before, seconds = calls_of(cache), cache.stats().driver_seconds
        microseconds_taken = microseconds(begin)
        if number:
            took.append(microseconds_taken)
            driver_us.append((cache.stats().driver_seconds - seconds) * 1e6)
        calls = calls_since(cache, before)
        (sequence,) = sequences
        cached = sequence.cached_tokens
        sequence.truncate(cached)
        sequence.free()
        cache.pool.driver.synchronize()
    row: Row = {"what": what, "large_frames": large, "tokens": len(ids), "cached_tokens": cached, "calls": calls}
    row |= spread("start", took) | spread("driver", driver_us)
    return row | {"ratio": row["start_us"] / row["driver_us"] if row["driver_us"] else None}


def main(
    device: Device = None,
    tokens: Annotated[int | None, typer.Option(min=64, help="That are known: 8,192, or 512 on a CPU.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 50,
    json_output: JsonOutput = False,
) -> None:
    """Measure starts on what is known."""
    driver, layout = open_geometry(device)
    tokens = tokens or (8192 if layout is LAYOUT else 512)
    result: Row = {"environment": environment(driver.device), "rounds": rounds, "token_bytes": layout.token_bytes}
    result["starts"] = [
        row
        for large in track((True, False), "Starting", console=errors, disable=not errors.is_terminal)
        for row in beginnings(driver, layout, tokens, large, rounds)
    ]
    if json_output:
        print_result(result)
    else:
        console.print(make_table(f"Starts on {tokens:,} known tokens", *start_table(result)))


def start_table(result: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns of a table, and a line for each way to start."""
    columns = "", "frames", "cached tokens", "µs (most)", "driver's part", "driver calls"
    return columns, [
        (
            row["what"],
            "large" if row["large_frames"] else "single pages",
            f"{row['cached_tokens']:,}",
            f"{row['start_us']:,.0f} ({row['start_p10_us']:,.0f} to {row['start_p90_us']:,.0f})",
            f"{row['driver_us']:,.0f}",
            f"{sum(row['calls'].values()):,}",
        )
        for row in result["starts"]
    ]


if __name__ == "__main__":
    typer.run(main)
