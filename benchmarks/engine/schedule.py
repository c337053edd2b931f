"""Who runs: continuous batching with chunked prefill, first come first served. Arithmetic on the host, no device.

A request has `known` tokens, those of its prompt and those sampled so far, and K and V of `computed` of them. One that
lacks K and V of one token decodes: it takes part in every step. One that lacks more is a prompt, and gets a chunk of
what the step's budget leaves. Room is made step by step, for the tokens that it computes; where there is none, the
request that came last is preempted: it keeps its tokens and computes K and V anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .backend import KVBackend

Numbers = npt.NDArray[np.int64]
T = TypeVar("T")

HEADROOM = 16
"""Tokens left free for each running request when another one is admitted: fewer are preempted soon after."""


@dataclass(frozen=True)
class Step:
    """The work of a step, by number of request.

    Attributes:
        decode: requests that compute their last token.
        prefill: requests that compute a chunk of several tokens, and `counts`, how many.
        sampled: requests that get a new token.
    """

    decode: Numbers
    prefill: Numbers
    counts: Numbers
    sampled: Numbers


class Schedule:
    """Plans steps for requests that are numbered in order of arrival.

    Args:
        kv: where K and V go.
        prompts: tokens of each prompt.
        outputs: tokens to generate for each; nothing stops earlier.
        max_sequences: requests that run at a time.
        chunk: tokens of prompts in a step.

    Attributes:
        preemptions: requests that lost K and V to others.
        manager_ns: host time in the cache manager.

    Raises:
        ValueError: a request is too long for `kv`.
    """

    def __init__(self, kv: KVBackend, prompts: Numbers, outputs: Numbers, max_sequences: int, chunk: int) -> None:
        self.kv = kv
        self.max_sequences = max_sequences
        self.chunk = chunk
        self.total = prompts + outputs
        if not kv.fits(int(self.total.max())):
            raise ValueError(f"got a request of {self.total.max()} tokens; this budget has no room for it")
        self.known = prompts.copy()
        self.computed = np.zeros_like(prompts)
        self.row = np.full_like(prompts, -1)
        self.waiting: deque[int] = deque()
        self.running: list[int] = []
        self.blocked = False
        """The first that waits did not fit; since then nothing was freed, and no prompt computed."""
        self.preemptions = 0
        self.manager_ns = 0

    def next(self) -> Step | None:
        """The next step, for whose tokens there is room; None: nothing to do."""
        self._admit()
        while self.running:
            step = self._plan()
            rows, counts = self.row[step.decode], 1
            if len(step.prefill):
                rows = np.concatenate([rows, self.row[step.prefill]])
                counts = np.concatenate([np.ones_like(step.decode), step.counts])
            if self._timed(self.kv.extend, rows, counts):
                return step
            if len(self.running) == 1:
                raise MemoryError("the budget has room for each request alone, the device has not: lower the budget")
            self._preempt()
        return None

    def _plan(self) -> Step:
        """A step of those that run."""
        running = np.array(self.running, np.int64)
        lacking = self.known[running] - self.computed[running]
        decode, prefill = running[lacking == 1], running[lacking > 1]
        wanted = lacking[lacking > 1]
        counts = np.minimum(wanted, self.chunk - (wanted.cumsum() - wanted))
        prefill, counts, wanted = (array[counts > 0] for array in (prefill, counts, wanted))
        return Step(decode, prefill, counts, np.concatenate([decode, prefill[counts == wanted]]))

    def _admit(self) -> None:
        while self.waiting and not self.blocked and len(self.running) < self.max_sequences:
            request, others = self.waiting[0], len(self.running)
            tokens, promised = int(self.known[request]), int((self.known - self.computed)[self.running].sum())
            if others and not self._timed(self.kv.fits, tokens, promised + HEADROOM * (others + 1)):
                self.blocked = True
                return
            self.waiting.popleft()
            self.row[request] = self._timed(self.kv.admit, tokens)
            self.running.append(request)

    def _preempt(self) -> None:
        request = self.running.pop()
        self._free([request])
        self.preemptions += bool(self.computed[request])
        self.computed[request] = 0
        self.waiting.appendleft(request)

    def advance(self, step: Step) -> list[int]:
        """Takes the last step for done; returns the requests that have all of their tokens, whose K and V are gone."""
        self.computed[step.decode] += 1
        self.computed[step.prefill] += step.counts
        self.known[step.sampled] += 1
        if len(step.prefill):
            self.blocked = False  # what they were promised may lie in memory that their rows had already
        finished = step.sampled[self.known[step.sampled] == self.total[step.sampled]].tolist()
        self.remove(finished)
        return finished

    def remove(self, requests: list[int]) -> None:
        """Ends running requests."""
        if requests:
            ended = set(requests)
            self.running = [request for request in self.running if request not in ended]
            self._free(requests)

    def _free(self, requests: list[int]) -> None:
        self._timed(self.kv.free, self.row[requests].tolist())
        self.row[requests] = -1
        self.blocked = False

    def _timed(self, method: Callable[..., T], *args: object) -> T:
        start = perf_counter_ns()
        result = method(*args)
        self.manager_ns += perf_counter_ns() - start
        return result
