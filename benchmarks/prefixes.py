"""Host time and driver calls of a start on a known prompt.

    python -m benchmarks.prefixes [--device cuda] [--tokens 8192] [--rounds 50] [--json]

A chat's next turn adopts its own row, which no sequence has had meanwhile. A hit beside a live sequence shares its
frames: large frames, or single pages. Without reuse pages are created, and K and V have yet to be computed. Token ids
come as an array; a line says what a list of ids costs.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from vmmkv import KVCache, KVLayout, Sequence
from vmmkv.cli.output import Device, JsonOutput, errors
from vmmkv.driver.driver import Driver

from .environment import environment
from .geometry import LAYOUT, calls_of, calls_since, memory_of, open_geometry
from .host_time import microseconds, ranged, spread
from .output import Lines, Row, deliver

TURN = 8
"""Tokens of a chat's next turn, or of a request, behind the known ones."""
NEXT_TURN, HIT = "a chat's next turn", "a hit beside a live sequence"


def beginnings(driver: Driver, layout: KVLayout, tokens: int, large: bool, rounds: int) -> list[Row]:
    """A row for each way to start a prompt whose first tokens are known."""
    pages = layout.pages(tokens + 2 * TURN, driver.page_size)
    max_bytes = (4 * pages + 64) * driver.page_size
    known = np.random.default_rng().integers(1 << 17, size=tokens + TURN)
    with KVCache(
        layout, 4, tokens + 2 * TURN, max_bytes=max_bytes, lookahead=0, large_frames=large, **memory_of(driver)
    ) as cache:
        holder = cache.sequence(token_ids=known[:tokens], expected_tokens=tokens + 2 * TURN)
        holder.extend(2 * TURN)  # maps the pages of the next turn
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
    """Start a sequence with these ids in each round; the first round is not counted.

    Args:
        trims: give parked rows back before each round.
        reuse: as of `KVCache.sequence`.
    """
    took, driver_us = list[float](), list[float]()
    sequences = list[Sequence]()
    for number in range(rounds + 1):
        if trims:
            cache.trim()
        before, seconds = calls_of(cache), cache.stats().driver_seconds
        us = microseconds(lambda: sequences.append(cache.sequence(token_ids=ids, reuse=reuse)))
        if number:
            took.append(us)
            driver_us.append((cache.stats().driver_seconds - seconds) * 1e6)
        calls = calls_since(cache, before)
        sequence = sequences.pop()
        cached = sequence.cached_tokens
        sequence.truncate(cached)
        sequence.free()
        cache.pool.driver.synchronize()
    row: Row = {"what": what, "large_frames": large, "tokens": len(ids), "cached_tokens": cached, "calls": calls}
    row |= spread(took, "start") | spread(driver_us, "driver")
    return row | {"ratio": row["start_us"] / row["driver_us"] if row["driver_us"] else None}


def main(
    device: Device = None,
    tokens: Annotated[int | None, typer.Option(min=64, help="Known tokens: 8,192, or 512 on a CPU.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 50,
    json_output: JsonOutput = False,
) -> None:
    """Measure starts on known prompts."""
    driver, layout = open_geometry(device)
    tokens = tokens or (8192 if layout is LAYOUT else 512)
    result: Row = {"environment": environment(driver.device), "rounds": rounds, "token_bytes": layout.token_bytes}
    result["starts"] = [
        row
        for large in track((True, False), "Starting", console=errors, disable=not errors.is_terminal)
        for row in beginnings(driver, layout, tokens, large, rounds)
    ]
    deliver(result, json_output, {f"Starts on {tokens:,} known tokens": table})


def table(result: Row) -> Lines:
    """A line for each way to start."""
    return ("", "frames", "cached tokens", "µs (most)", "driver's part", "driver calls"), [
        (
            row["what"],
            "large" if row["large_frames"] else "single pages",
            f"{row['cached_tokens']:,}",
            ranged(row, "start"),
            f"{row['driver_us']:,.0f}",
            f"{sum(row['calls'].values()):,}",
        )
        for row in result["starts"]
    ]


if __name__ == "__main__":
    typer.run(main)
