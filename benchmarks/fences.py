"""What a fence costs in compiled code: recording an event, asking for one, having a stream wait, changing the context.

    python -m benchmarks.fences [--rounds N] [--json]

Compiled functions are called with one stream and with many, all of which have work that goes on; what a stream costs is
the difference, so that the call from Python does not count. Recording includes the question whether the stream is being
captured. Changing the context is a run without steps beside the same call of a function that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any

import torch
import typer

from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.driver import entries
from vmmkv.driver.driver import Driver, handle_of, new_scratch, open_driver

from .environment import environment, print_result

STREAMS = 32
CYCLES = 2_000_000_000
"""Of work on each stream: about a second."""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 200, json_output: JsonOutput = False
) -> None:
    """Measure what a fence costs, on a GPU."""
    if not torch.cuda.is_available():
        errors.print("Fences are of streams, and there is no GPU here.", style="yellow")
        raise typer.Exit(1)
    driver = open_driver("cuda")
    result = {"environment": environment(driver.device), "rounds": rounds, "calls": measure(driver, rounds)}
    if json_output:
        print_result(result)
    else:
        show(result)


def measure(driver: Driver, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of each call: the median, and where four of five lie."""
    streams = [torch.cuda.Stream(driver.device) for _ in range(STREAMS)]
    slots = [driver.slots([stream]) for stream in streams]
    one, many = slots[0], sum(slots)
    current = handle_of(driver.current_stream())
    scratch, at = new_scratch()
    address = driver.address
    calls: dict[str, Callable[[int], object]] = {
        "record an event": lambda chosen: entries.record(address, chosen, current, at),
        "ask for an event": lambda chosen: entries.pending(address, chosen, 1 << 40, at),
        "have a stream wait": lambda chosen: entries.order(address, chosen, 1 << 40, current, at),
    }
    found: dict[str, list[float]] = {name: [] for name in (*calls, "change the context and back")}
    for number in range(rounds + 1):
        if number % 8 == 0:
            torch.cuda.synchronize(driver.device)
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(CYCLES)
        for name, call in calls.items():
            found[name].append((took(call, many) - took(call, one)) / (STREAMS - 1))
        empty = took(lambda _: entries.run(address, 0, 0, 0, at), 0)
        found["change the context and back"].append(empty - took(lambda _: entries.first_event(address, 0, 0), 0))
    torch.cuda.synchronize(driver.device)
    del scratch
    return [{"call": name, **spread(values[1:])} for name, values in found.items()]


def took(call: Callable[[int], object], chosen: int) -> float:
    """Microseconds of a call."""
    start = perf_counter_ns()
    call(chosen)
    return (perf_counter_ns() - start) / 1e3


def spread(values: list[float]) -> dict[str, float]:
    """A median, and where four of five values lie."""
    ordered = sorted(values)
    return {"us": median(ordered), "p10_us": ordered[len(ordered) // 10], "p90_us": ordered[len(ordered) * 9 // 10]}


def show(result: dict[str, Any]) -> None:
    """Prints a table."""
    rows = [(row["call"], *(f"{row[name]:.2f}" for name in ("us", "p10_us", "p90_us"))) for row in result["calls"]]
    console.print(make_table("Fences, µs a call", ("call", "median", "10 %", "90 %"), rows))


if __name__ == "__main__":
    typer.run(main)
