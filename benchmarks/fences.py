"""What a fence costs: calls of the CUDA driver by address, from machine code, and whole fences from Python.

    python -m benchmarks.fences [--rounds N] [--json]

A loop of machine code makes many calls of one function; what a call takes is the loop's time over their number. Events
are recorded on a stream without work, asked for while work goes on before them, and waited for by a stream that has
none. A whole fence is what freeing a row takes: torch's current stream, the question whether it is captured, contexts,
capture modes, and an event.
"""

from __future__ import annotations

import ctypes
from array import array
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any

import torch
import typer
from llvmlite.binding import parse_assembly

from vmmkv.cli.options import JsonOutput
from vmmkv.cli.output import console, errors, make_table
from vmmkv.compiled.code import load
from vmmkv.driver.driver import Driver, open_driver
from vmmkv.driver.fence import Fence

from .environment import environment, print_result

CALLS = 100
"""Of a loop."""
CYCLES = 400_000_000
"""Of work: a fifth of a second."""
LOOP = """
define i64 @vmmkv_loop(i64 %function, i64 %count, i64 %first, i64 %second, i64 %third) {
entry:
  %call = inttoptr i64 %function to ptr
  br label %body
body:
  %index = phi i64 [ 0, %entry ], [ %next, %body ]
  %status = call i32 %call(i64 %first, i64 %second, i64 %third)
  %next = add i64 %index, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %body, label %done
done:
  ret i64 0
}
"""


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
    idle, busy = (torch.cuda.Stream(driver.device) for _ in range(2))
    cell = array("q", [0])
    at = cell.buffer_info()[0]
    loop = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(load(parse_assembly(LOOP), ["loop"])[0])
    events = [torch.cuda.Event() for _ in range(2)]
    for event, stream in zip(events, (idle, busy)):
        event.record(stream)
    passed, pending = (event.cuda_event for event in events)
    found: dict[str, list[float]] = {}

    def note(name: str, function: str, *words: int) -> float:
        start = perf_counter_ns()
        loop(int(driver.table[function]), CALLS, *words, *[0] * (3 - len(words)))
        us = (perf_counter_ns() - start) / 1e3 / CALLS
        found.setdefault(name, []).append(us)
        return us

    for _ in range(rounds + 1):
        with torch.cuda.stream(busy):
            torch.cuda._sleep(CYCLES // rounds)
        events[1].record(busy)
        note("record an event", "record", passed, idle.cuda_stream)
        note("ask for an event that has not passed", "query", pending)
        note("have a stream wait", "wait", idle.cuda_stream, pending, 0)
        note("ask whether a stream is captured", "is_capturing", idle.cuda_stream, at)
        context = int(driver.table["context"])
        pushed, popped = note("push a context", "push", context), note("pop a context", "pop", at)
        found.setdefault("push and pop a context", []).append(pushed + popped)
        torch.cuda.synchronize(driver.device)
        start = perf_counter_ns()
        for _ in range(CALLS):
            Fence.after(driver, [idle])
        found.setdefault("a whole fence, from Python", []).append((perf_counter_ns() - start) / 1e3 / CALLS)
    return [{"call": name, **spread(values[1:])} for name, values in found.items()]


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
