"""Which requests are served, and when they come."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


class Usual(NamedTuple):
    """What is measured unless one asks for something else."""

    model: str
    memory: str
    max_seq_len: int
    prompt_tokens: int
    shorten: int


class Limits(NamedTuple):
    """What is taken of a trace.

    Attributes:
        requests, tokens: the most of both.
        longest: tokens that the budget has room for; longer requests are left out.
        max_seq_len: of the server, see `Workload`.
        shorten: divides all lengths.
    """

    requests: int
    tokens: int
    longest: int
    max_seq_len: int
    shorten: int = 1


def make_workload(trace: Path | None, limits: Limits, seed: int) -> Workload:
    """The first requests of a trace, or random conversations.

    Raises:
        ValueError: there are none within these limits.
    """
    taken: list[Request] = []
    left_out = total = 0
    for request in read_trace(trace) if trace else conversations(limits.requests, np.random.default_rng(seed)):
        prompt, output = (-(-count // limits.shorten) for count in (request.prompt, request.output))
        if prompt + output > limits.longest:
            left_out += 1
            continue
        total += prompt + output
        if len(taken) == limits.requests or total > limits.tokens:
            break
        taken.append(Request(prompt, output, request.arrival))
    name = trace.stem if trace else "conversations"
    if not taken:
        raise ValueError(f"no request of {name} is within {limits}")
    longest = max(request.total for request in taken)
    return Workload(name, taken, max(longest, min(limits.max_seq_len, limits.longest)), left_out)


def arrivals(requests: list[Request], rate: float, seed: int) -> npt.NDArray[np.float64]:
    """Seconds after the start: the trace's own times at another pace, so that `rate` requests come in a second.

    Without times in the trace they come at random, as a Poisson process.
    """
    times = np.maximum.accumulate([request.arrival - requests[0].arrival for request in requests])
    if times[-1] == 0:
        times = np.random.default_rng(seed).exponential(1.0, len(requests)).cumsum()
        times -= times[0]
    return times * ((len(times) - 1) / rate / times[-1]) if len(times) > 1 else times
