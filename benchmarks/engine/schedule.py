"""Continuous batching with chunked prefill, first come first served: arithmetic on the host.

A request has `known` tokens, those of its prompt and those sampled so far, and K and V of `computed` of them. A request
that lacks K and V of one token decodes, in every step; one that lacks more is a prompt, and gets a chunk of what the
step's budget leaves. Room is made step by step; where there is none, the request that came last is preempted: it keeps
its tokens and computes K and V anew.

With prefix reuse a request begins with known K and V. It commits what it computes: a prompt after each chunk, generated
tokens at its end, as far as the host has seen them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TypeVar

import numpy as np

from .backend import Ids, KVBackend, Numbers

T = TypeVar("T")

HEADROOM = 16
"""Tokens left free for each running request when another one is admitted: fewer are preempted soon after."""
NO_ROOM = "the budget has room for each request alone, the device has not: lower the budget"


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
        late: start a request only when a step has tokens left for its prompt, so that it finds what those before it
            have computed; otherwise as soon as there is room.
        ids: the tokens of a request that the host has seen, for prefix reuse; None: no reuse.

    Attributes:
        cached: by request, the tokens that were known when it first started.
        preempted: by request, how often it lost its room.
        recomputed: tokens whose K and V were computed anew.
        manager_ns: host time in the cache manager.

    Raises:
        ValueError: a request is too long for `kv`.
    """

    def __init__(
        self,
        kv: KVBackend,
        prompts: Numbers,
        outputs: Numbers,
        max_sequences: int,
        chunk: int,
        *,
        late: bool = False,
        ids: Callable[[int], Ids] | None = None,
    ) -> None:
        self.kv, self.max_sequences, self.chunk = kv, max_sequences, chunk
        self.late, self.ids = late, ids
        self.total = prompts + outputs
        if not kv.fits(int(self.total.max())):
            raise ValueError(f"got a request of {self.total.max()} tokens; this budget has no room for it")
        self.known = prompts.copy()
        self.computed = np.zeros_like(prompts)
        self.row = np.full_like(prompts, -1)
        self.cached = np.full_like(prompts, -1)
        self.waiting: deque[int] = deque()
        self.running: list[int] = []
        self.blocked = False
        """The first that waits did not fit; since then nothing was freed, and no prompt computed."""
        self.preempted, self.lost = np.zeros_like(prompts), np.zeros_like(prompts)
        self.recomputed = self.manager_ns = 0

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
                raise MemoryError(NO_ROOM)
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
        while self.waiting and not self.blocked and len(self.running) < self.max_sequences and self._has_tokens_left():
            request = self.waiting[0]
            begun = self._begin(request)
            if begun is None:
                if not self.running:
                    raise MemoryError(NO_ROOM)
                self.blocked = True
                return
            self.waiting.popleft()
            self.row[request], self.computed[request] = begun
            if self.cached[request] < 0:
                self.cached[request] = self.computed[request]
            self.recomputed += max(int(self.lost[request] - self.computed[request]), 0)
            self.lost[request] = 0
            self.running.append(request)

    def _has_tokens_left(self) -> bool:
        """Whether a step could take up one more prompt."""
        if not self.late:
            return True
        lacking = (self.known - self.computed)[self.running]
        return bool(lacking[lacking > 1].sum() < self.chunk)

    def _begin(self, request: int) -> tuple[int, int] | None:
        """Starts a request, if there is room for it beside what the others were promised; returns its row, and how many
        of its tokens are there."""
        tokens, others, spare = int(self.known[request]), len(self.running), None
        if others:
            spare = int((self.known - self.computed)[self.running].sum()) + HEADROOM * (others + 1)
        if self.ids is not None:
            return self._timed(self.kv.begin, self.ids(request), tokens, spare)
        if spare is not None and not self._timed(self.kv.fits, tokens, spare):
            return None
        return self._timed(self.kv.admit, tokens), 0

    def _preempt(self) -> None:
        request = self.running.pop()
        self.waiting.appendleft(request)
        self.preempted[request] += self.computed[request] > 0
        self._free([request])
        self.lost[request], self.computed[request] = self.computed[request], 0

    def advance(self, step: Step) -> list[int]:
        """Takes the last step for done; returns the requests that have all of their tokens, whose K and V are gone."""
        self.computed[step.decode] += 1
        self.computed[step.prefill] += step.counts
        self.known[step.sampled] += 1
        self._commit(step.prefill.tolist())
        if len(step.prefill):
            self.blocked = False  # what they were promised may lie in memory that their rows had already
        finished = step.sampled[self.known[step.sampled] == self.total[step.sampled]].tolist()
        self._remove(finished)
        self._admit()  # while the device is at work: what they expect is mapped meanwhile
        return finished

    def remove_all(self) -> None:
        """End all requests that run."""
        self._remove(np.flatnonzero(self.row >= 0).tolist())

    def _remove(self, requests: list[int]) -> None:
        if requests:
            ended = set(requests)
            self.running = [request for request in self.running if request not in ended]
            self._free(requests)

    def _commit(self, requests: list[int]) -> None:
        """Makes what requests have computed known, with prefix reuse."""
        if self.ids is not None:
            for request in requests:
                self._timed(self.kv.commit, int(self.row[request]), self.ids(request)[: self.computed[request]])

    def _free(self, requests: list[int]) -> None:
        self._commit(requests)
        self._timed(self.kv.free, self.row[requests].tolist())
        self.row[requests] = -1
        self.blocked = False

    def _timed(self, method: Callable[..., T], *args: object) -> T:
        start = perf_counter_ns()
        result = method(*args)
        self.manager_ns += perf_counter_ns() - start
        return result
