"""The record of a run, and the steps that the device has been given and not yet done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from .backend import Ids, Numbers
from .schedule import Step

SAMPLE_SECONDS = 0.1
"""Between two looks at memory."""


@dataclass
class Run:
    """By number of request; seconds count from the start of the run, NaN where it did not come to it.

    Attributes:
        prompts, outputs: its tokens.
        first, finish: when its first token, and its last one, were there.
        tokens: prompt and output of each request, one after another; 0 where a token was not generated.
        seconds: until the last request had finished, or the run was stopped.
        generated: tokens.
        running, waiting: requests in each step, and `step_seconds`, how long it took.
        preempted, recomputed, cached: see `Schedule`.
        manager_ns: host time in the cache manager for each step, waits for the device included.
        host_ns: host time in all that prepares and launches steps, the cache manager's included.
        samples: `(seconds, physical bytes, running requests)` over time.
    """

    prompts: Numbers
    outputs: Numbers
    first: npt.NDArray[np.float64] = field(init=False)
    finish: npt.NDArray[np.float64] = field(init=False)
    tokens: Numbers = field(init=False)
    seconds: float = 0.0
    generated: int = 0
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    preempted: Numbers = field(init=False)
    recomputed: int = 0
    cached: Numbers = field(init=False)
    manager_ns: list[int] = field(default_factory=list)
    host_ns: int = 0
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first, self.finish = np.full((2, len(self.prompts)), np.nan)
        self.cached, self.preempted = np.full_like(self.prompts, -1), np.zeros_like(self.prompts)
        self.missing = self.outputs.copy()
        """Tokens that each request still waits for."""

    @property
    def finished(self) -> int:
        return int(np.isfinite(self.finish).sum())

    @property
    def preemptions(self) -> int:
        return int(self.preempted.sum())

    def output(self, request: int) -> list[int]:
        """The tokens generated for a request."""
        end = int((self.prompts + self.outputs)[: request + 1].sum())
        return self.tokens[end - int(self.outputs[request]) : end].tolist()

    def take_down(self, step: Step, begin: float, end: float) -> None:
        """Record a step that the device began and ended at these times."""
        sampled = step.sampled
        self.first[sampled[self.missing[sampled] == self.outputs[sampled]]] = end
        self.missing[sampled] -= 1
        self.finish[sampled[self.missing[sampled] == 0]] = end
        self.generated += len(sampled)
        self.step_seconds.append(end - begin)

    def wants_sample(self, now: float) -> bool:
        return not self.samples or now >= self.samples[-1][0] + SAMPLE_SECONDS


class SeenTokens:
    """Tokens of requests that the host has seen: prompts from the start, samples when their step is done.

    Args:
        totals: tokens of each request at its end.
    """

    def __init__(self, prompts: list[torch.Tensor], totals: Numbers) -> None:
        self._begins = totals.cumsum() - totals
        self._tokens = np.zeros(int(totals.sum()), np.int64)
        self._counts = np.array([len(prompt) for prompt in prompts])
        for begin, prompt in zip(self._begins, prompts):
            self._tokens[begin : begin + len(prompt)] = prompt.numpy()

    def of(self, request: int) -> Ids:
        """The tokens of a request so far."""
        begin = self._begins[request]
        return self._tokens[begin : begin + self._counts[request]]

    def take(self, requests: Numbers, tokens: Ids) -> None:
        """Add a token to each of these requests."""
        self._tokens[self._begins[requests] + self._counts[requests]] = tokens
        self._counts[requests] += 1


class InFlight:
    """Steps that the device has been given and not yet done, in order.

    Args:
        run: records the steps.
        seen: takes the tokens that steps sample; None: the host needs no tokens.
    """

    def __init__(self, run: Run, seen: SeenTokens | None) -> None:
        self.run = run
        self.seen = seen
        self.begin = perf_counter()
        self._steps: deque[tuple[torch.cuda.Event | None, Step, torch.Tensor | None]] = deque()
        self._began = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def now(self) -> float:
        """Seconds since the start of the run."""
        return perf_counter() - self.begin

    def append(self, event: torch.cuda.Event | None, step: Step, sampled: torch.Tensor | None) -> None:
        """Add a step that is done when the event has happened, and with reuse the tokens that it samples."""
        self._steps.append((event, step, sampled))

    def complete(self) -> None:
        """Wait for the oldest step."""
        event, step, sampled = self._steps.popleft()
        if event:
            event.synchronize()
        if self.seen and sampled is not None:
            self.seen.take(step.sampled, sampled.numpy())
        now = self.now()
        self.run.take_down(step, self._began, now)
        self._began = now
