"""Which requests are served, of which tokens, and when they come."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.workload import BLOCK, Request, conversations, read_trace


class Part(NamedTuple):
    """Tokens of a prompt: equal names are equal tokens. A prompt may end within its last part."""

    name: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests of a trace.

    Attributes:
        name: of the trace.
        parts: of the prompt of each request.
        max_seq_len: tokens of the longest request that a server would take, at least those of the longest here.
        left_out: requests that are too long for the budget.
    """

    name: str
    requests: list[Request]
    parts: list[list[Part]]
    max_seq_len: int
    left_out: int

    @property
    def tokens(self) -> int:
        return sum(request.total for request in self.requests)

    def prompts(self, vocab_size: int, seed: int) -> list[torch.Tensor]:
        """Random tokens, the same for parts of the same name."""

        def tokens(part: Part) -> npt.NDArray[np.int64]:
            return np.random.default_rng([seed, *part.name]).integers(vocab_size, size=part.tokens)

        made = (np.concatenate([tokens(part) for part in parts]) for parts in self.parts)
        return [torch.from_numpy(ids[: request.prompt]) for ids, request in zip(made, self.requests)]

    def describe(self) -> dict[str, Any]:
        """What a result says of it."""
        return {
            "name": self.name,
            "requests": len(self.requests),
            "tokens": self.tokens,
            "prompt_tokens": sum(request.prompt for request in self.requests),
            "output_tokens": sum(request.output for request in self.requests),
            "max_seq_len": self.max_seq_len,
            "left_out": self.left_out,
        }


class Limits(NamedTuple):
    """Which requests of a trace are served.

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

    def lengths(self, request: Request) -> tuple[int, int]:
        """Of a prompt and its answer."""
        return -(-request.prompt // self.shorten), -(-request.output // self.shorten)


def make_workload(trace: Path | None, limits: Limits, seed: int) -> Workload:
    """The first requests of a trace, or random conversations. Prompts have in common what a trace says.

    Raises:
        ValueError: there are none within these limits.
    """
    requests = read_trace(trace) if trace else conversations(limits.requests, np.random.default_rng(seed))
    number, block = count(), -(-BLOCK // limits.shorten)
    cases = []
    for request in requests:
        prompt, output = limits.lengths(request)
        parts = [Part((SHARED, name), block) for name in request.blocks] or [Part((OWN, next(number)), prompt)]
        cases.append((Request(prompt, output, request.arrival, request.blocks), parts))
    name = trace.stem if trace else "conversations"
    return within(limits, name, cases)


def system_prompts(prompts: int, limits: Limits, seed: int) -> Workload:
    """Random conversations, each of which begins with one of some system prompts of `SYSTEM_TOKENS` tokens: the first
    with half of the requests, each other one with half of those that are left.

    Raises:
        ValueError: there are none within these limits.
    """
    rng = np.random.default_rng([seed, prompts])
    lengths = -(-rng.integers(*SYSTEM_TOKENS, prompts) // limits.shorten)
    cases = []
    for number, request in enumerate(conversations(limits.requests, rng)):
        prompt, output = limits.lengths(request)
        which = min(int(rng.geometric(0.5)) - 1, prompts - 1)
        parts = [Part((SHARED, which), int(lengths[which])), Part((OWN, number), prompt)]
        cases.append((Request(int(lengths[which]) + prompt, output), parts))
    return within(limits, f"{prompts} system prompts", cases)


SYSTEM_TOKENS = 1000, 4000
"""Of a system prompt, with tools, at least and at most; they fill neither pages nor blocks."""
SHARED, OWN = 0, 1
"""Kinds of parts."""


def within(limits: Limits, name: str, cases: list[tuple[Request, list[Part]]]) -> Workload:
    """The first requests, with their parts, that are within limits."""
    taken: list[tuple[Request, list[Part]]] = []
    left_out = total = 0
    for request, parts in cases:
        if request.total > limits.longest:
            left_out += 1
            continue
        total += request.total
        if len(taken) == limits.requests or total > limits.tokens:
            break
        taken.append((request, parts))
    if not taken:
        raise ValueError(f"no request of {name} is within {limits}")
    longest = max(request.total for request, _ in taken)
    max_seq_len = max(longest, min(limits.max_seq_len, limits.longest))
    return Workload(name, [request for request, _ in taken], [parts for _, parts in taken], max_seq_len, left_out)
