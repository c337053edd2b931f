"""How long work takes on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], torch.Tensor]
ROUNDS = 15
MOST_CALLS = 20
TARGET_US = 2000.0
"""What is timed is repeated until it takes about as long, at most `MOST_CALLS` times."""


@dataclass(frozen=True)
class Repeated:
    """A call made several times over, in a CUDA graph where it can be captured."""

    run: Callable[[], object]
    calls: int
    output: torch.Tensor
    captured: bool


@dataclass(frozen=True)
class Timing:
    """Median microseconds of a call on the device, and what it returned there."""

    microseconds: float
    output: torch.Tensor
    captured: bool


def measure(calls: list[Call], graph: bool = True) -> list[Timing]:
    """Times calls in turn, so that what the device does over time meets all of them.

    Args:
        calls: each leaves its work on the current stream and returns its result.
        graph: replay CUDA graphs; a call that cannot be captured is timed on the stream.
    """
    repeats = [repeat(call, graph) for call in calls]
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for repeated, pairs in zip(repeats, events):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            repeated.run()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize()
    return [
        Timing(
            median(start.elapsed_time(end) for start, end in pairs) * 1e3 / repeated.calls,
            repeated.output,
            repeated.captured,
        )
        for repeated, pairs in zip(repeats, events)
    ]


def repeat(call: Call, graph: bool) -> Repeated:
    """Warms a call up and makes it long enough to be timed."""
    for _ in range(2):
        output = call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    calls = min(max(round(TARGET_US / (start.elapsed_time(end) * 1e3)), 2), MOST_CALLS)
    if graph:
        try:
            return capture(call, calls)
        except Exception:
            torch.cuda.synchronize()

    def run() -> None:
        for _ in range(calls):
            call()

    return Repeated(run, calls, output, captured=False)


def capture(call: Call, calls: int) -> Repeated:
    """A CUDA graph of several calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            output = call()
    graph.replay()
    return Repeated(graph.replay, calls, output, captured=True)


def copy_bandwidth(device: torch.device, nbytes: int = 4 << 30) -> dict[str, float]:
    """GB/s of a large device copy, bytes read and bytes written, and of reading alone.

    Not from a graph: a copy captured in one becomes a node that is slower.
    """
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copy, read = measure([lambda: target.copy_(source), source.sum], graph=False)
    return {"copy_gb_per_s": 2 * nbytes / copy.microseconds / 1e3, "read_gb_per_s": nbytes / read.microseconds / 1e3}
