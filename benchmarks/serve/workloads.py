"""Which requests are served, and when they come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.workload import Request, conversations, read_trace


@dataclass(frozen=True)
class Workload:
    """Requests of a trace.

    Attributes:
        name: of the trace.
        max_seq_len: tokens of the longest request that a server would take, at least those of the longest here.
        left_out: requests between them that are too long for the budget.
    """

    name: str
    requests: list[Request]
    max_seq_len: int
    left_out: int

    @property
    def tokens(self) -> int:
        return sum(request.total for request in self.requests)

    def first(self, count: int) -> list[Request]:
        return self.requests[: max(count, 1)]

    def prompts(self, vocab_size: int, seed: int) -> list[torch.Tensor]:
        """Random tokens."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(vocab_size, (request.prompt,), generator=generator) for request in self.requests]


def make_workload(
    trace: Path | None, requests: int, tokens: int, shorten: int, max_seq_len: int, capacity: int, seed: int
) -> Workload:
    """The first requests of a trace, or random conversations.

    Args:
        requests, tokens: the most of both.
        shorten: divides lengths.
        max_seq_len: of the server, see `Workload`.
        capacity: tokens that the budget holds; longer requests are left out.
    """
    found = read_trace(trace) if trace else conversations(requests, np.random.default_rng(seed))
    short = [Request(-(-r.prompt // shorten), -(-r.output // shorten), r.arrival) for r in found]
    taken: list[Request] = []
    left_out = total = 0
    for request in short:
        if request.total > capacity:
            left_out += 1
            continue
        if len(taken) == requests or total + request.total > tokens:
            break
        taken.append(request)
        total += request.total
    if not taken:
        raise ValueError(f"no request of {trace or 'these conversations'} is within {tokens} tokens")
    longest = max(request.total for request in taken)
    return Workload(trace.stem if trace else "conversations", taken, max(longest, min(max_seq_len, capacity)), left_out)


def arrivals(requests: list[Request], rate: float, seed: int) -> npt.NDArray[np.float64]:
    """Seconds after the start: the trace's own times at another pace, so that `rate` requests come in a second.

    Without times in the trace they come at random, as a Poisson process.
    """
    times = np.maximum.accumulate([request.arrival - requests[0].arrival for request in requests])
    if times[-1] == 0:
        times = np.random.default_rng(seed).exponential(1.0, len(requests)).cumsum()
        times -= times[0]
    return times * ((len(times) - 1) / rate / times[-1]) if len(times) > 1 else times
