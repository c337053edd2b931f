"""Continuous batching: requests wait in order, start while there is memory, grow together, and finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import OutOfPagesError
from ..workload import Request


@dataclass(slots=True)
class Running:
    """A request that has a sequence."""

    request: Request
    sequence: Any
    generated: int

    @property
    def length(self) -> int:
        return self.request.prompt + self.generated

    @property
    def left(self) -> int:
        return self.request.output - self.generated


class Batching:
    """Replays `requests` on a cache, as many at a time as it has memory for, and at most `max_running`.

    A step is `admit`, `decode`, `retire`.

    Args:
        allocator: what has `sequence`, `extend` and `free` as a cache has them. The first two raise `OutOfPagesError`
            and change nothing where there is no memory.
        start: starts a sequence with a request's prompt and so many generated tokens; without it that is
            `allocator.sequence`.

    Attributes:
        waiting: requests that wait, in order, and how many tokens of each were generated before it was preempted.
        running: requests that run, the newest last.
        steps: decode steps so far.
        preemptions: sequences that were freed to make room, to be computed again.
    """

    def __init__(
        self,
        allocator: Any,
        requests: Iterable[Request],
        max_running: int,
        start: Callable[[Request, int], Any] | None = None,
    ) -> None:
        self.allocator = allocator
        self._start = start or (lambda request, generated: allocator.sequence(request.prompt + generated))
        self.max_running = max_running
        self.waiting = deque((request, 0) for request in requests)
        self.running: list[Running] = []
        self.steps = 0
        self.preemptions = 0

    def admit(self) -> list[Running]:
        """Starts waiting requests, in order, while there is memory; returns those that it started."""
        running = len(self.running)
        while self.waiting and len(self.running) < self.max_running:
            request, generated = self.waiting[0]
            try:
                sequence = self._start(request, generated)
            except OutOfPagesError:
                if not self.running:
                    raise
                break
            self.waiting.popleft()
            self.running.append(Running(request, sequence, generated))
        return self.running[running:]

    def decode(self, most: int = 1) -> int:
        """Steps until a sequence finishes or memory runs short, at most `most`; returns how many.

        Where there is no memory for one step, the newest make room: the result is that of single steps.
        """
        steps = min([most, *(running.left for running in self.running)])
        while True:
            try:
                self.allocator.extend([running.sequence for running in self.running], steps)
                break
            except OutOfPagesError:
                if steps > 1:
                    steps //= 2
                elif len(self.running) == 1:
                    raise
                else:
                    victim = self.running.pop()
                    self.allocator.free([victim.sequence])
                    self.waiting.appendleft((victim.request, victim.generated))
                    self.preemptions += 1
        for running in self.running:
            running.generated += steps
        self.steps += steps
        return steps

    def retire(self) -> int:
        """Frees the sequences that are finished; returns how many."""
        done = [running.sequence for running in self.running if not running.left]
        if done:
            self.allocator.free(done)
            self.running = [running for running in self.running if running.left]
        return len(done)
