"""What happened to requests: the record of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .backend import Numbers
from .schedule import Step

SAMPLE_SECONDS = 0.1
"""Between two looks at memory."""


@dataclass
class Run:
    """By number of request; seconds count from the start of the run, NaN where it did not come to it.

    Attributes:
        arrivals: when each request comes.
        prompts, outputs: its tokens.
        first, finish: when its first token, and its last one, were there.
        longest_gap: between two of its tokens, and `latest`, when it had one last.
        tokens: prompt and output of each request, one after another; 0 where a token was not generated.
        seconds: until the last request had finished, or the run was stopped.
        generated: tokens.
        running, waiting: requests in each step, and `step_seconds`, how long it took.
        preempted, suspensions, recomputed, cached: see `Schedule`.
        manager_ns: host time in the cache manager for each step, waits for the device included.
        host_ns: host time in all that prepares and launches steps, the cache manager's included.
        samples: `(seconds, physical bytes, running requests)` over time.
    """

    arrivals: npt.NDArray[np.float64]
    prompts: Numbers
    outputs: Numbers
    first: npt.NDArray[np.float64] = field(init=False)
    finish: npt.NDArray[np.float64] = field(init=False)
    longest_gap: npt.NDArray[np.float64] = field(init=False)
    latest: npt.NDArray[np.float64] = field(init=False)
    tokens: Numbers = field(init=False)
    seconds: float = 0.0
    generated: int = 0
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    preempted: Numbers = field(init=False)
    suspensions: int = 0
    recomputed: int = 0
    cached: Numbers = field(init=False)
    manager_ns: list[int] = field(default_factory=list)
    host_ns: int = 0
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first, self.finish, self.longest_gap, self.latest = np.full((4, len(self.arrivals)), np.nan)
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

    def take_down(self, step: Step, begin: float, end: float) -> list[int]:
        """The device has done a step, which it began at the one time and ended at the other. Returns who has all tokens
        now; what one gets beyond these does not count."""
        sampled = step.sampled[self.missing[step.sampled] > 0]
        self.first[sampled[self.missing[sampled] == self.outputs[sampled]]] = end
        self.longest_gap[sampled] = np.fmax(self.longest_gap[sampled], end - self.latest[sampled])
        self.latest[sampled] = end
        self.missing[sampled] -= 1
        ended = sampled[self.missing[sampled] == 0]
        self.finish[ended] = end
        self.generated += len(sampled)
        self.step_seconds.append(end - begin)
        return ended.tolist()  # type: ignore[no-any-return]

    def wants_sample(self, now: float) -> bool:
        return not self.samples or now >= self.samples[-1][0] + SAMPLE_SECONDS
