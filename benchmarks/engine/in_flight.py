"""Steps that the device has been given and not yet done: waiting for them, in order."""

from __future__ import annotations

from collections import deque
from time import perf_counter, sleep

import torch

from .run import Run
from .schedule import Step
from .seen import SeenTokens


class InFlight:
    """Steps of a run, of which each is taken down when it is done.

    Args:
        run: what the steps are taken down in.
        seen: takes the tokens that they sample; None: nobody looks at them.

    Attributes:
        begin: `perf_counter()` at the start of the run.
        ended: requests whose last token was there when a step was done; whoever reads them clears them.
    """

    def __init__(self, run: Run, seen: SeenTokens | None) -> None:
        self.run = run
        self.seen = seen
        self.begin = perf_counter()
        self.ended: list[int] = []
        self._steps: deque[tuple[torch.cuda.Event | None, Step, torch.Tensor | None]] = deque()
        self._began = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def now(self) -> float:
        """Seconds since the start of the run."""
        return perf_counter() - self.begin

    def append(self, event: torch.cuda.Event | None, step: Step, sampled: torch.Tensor | None) -> None:
        """A step that is done when the event has happened; where tokens are looked at, with those that it samples."""
        self._steps.append((event, step, sampled))

    def complete(self) -> None:
        """Waits for the oldest step."""
        event, step, sampled = self._steps.popleft()
        if event:
            event.synchronize()
        if self.seen and sampled is not None:
            self.seen.take(step.sampled, sampled.numpy())
        now = self.now()
        self.ended.extend(self.run.take_down(step, self._began, now))
        self._began = now

    def pause(self, seconds: float) -> None:
        """Sleeps while the device has nothing to do, which is no part of a step."""
        sleep(max(seconds, 0))
        self._began = self.now()
