"""Chooses requests for a forward pass: transformers' schedulers, each with what rows need beside it.

Schedulers of several managers on a pool may wait for each other's memory. Then the one that was stuck first has the
turn: it keeps what its requests hold, and the others admit no request until one of these is done, and give way where
they are stuck. If all gave way, each could take what the other had just given back, and none need ever be done.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler

from ...errors import ArgumentError
from ...pool import FramePool
from .cache import RowCache

CHILD = "__child#"
"""In names of requests that fork from one: between its own and a number."""
NEVER = float("inf")
_stuck = itertools.count()  # numbers schedulers in the order in which they get stuck
_on_pool: WeakKeyDictionary[FramePool, WeakSet[RowScheduler]] = WeakKeyDictionary()
_lock = threading.Lock()  # guards the schedulers on each pool


class Cancelled(str):
    """The name of a request, and when it was cancelled."""

    def __init__(self, name: str) -> None:
        self.time = time.perf_counter()


def children_of(state: RequestState) -> list[str]:
    """Names of the requests that are to fork from one."""
    return [f"{state.request_id}{CHILD}{number}" for number in range(state.num_children)]


def _prompt_of(state: RequestState) -> int:
    """A number that requests with one prompt share. It is kept: each step asks for those of all requests."""
    own = vars(state)
    if "prompt" not in own:
        own["prompt"] = hash(tuple(state.initial_tokens))
    return int(own["prompt"])


class RowScheduler(Scheduler):
    """Chooses requests, with a scheduler of transformers'."""

    cache: RowCache
    handlers: dict[str, Any]  # by request: the callback that its results go to
    stuck: float = NEVER  # the number of its turn, once it is stuck

    def reset(self) -> None:
        super().reset()
        self._new: dict[str, RequestState] = {}

    def begin_round(self) -> None:
        """Take the requests that are added from now on as new."""
        self._new = {}

    def join(self, pool: FramePool) -> None:
        """Take turns with the schedulers of other managers on a pool."""
        with _lock:
            _on_pool.setdefault(pool, WeakSet()).add(self)

    def _others(self) -> list[RowScheduler]:
        """The schedulers of other managers on the pool; none under tensor parallelism."""
        with _lock:
            return [each for those in _on_pool.values() if self in those for each in those if each is not self]

    def _has_turn(self) -> bool:
        return not any(each.stuck < self.stuck and each.has_pending_requests() for each in self._others())

    def keeps_its_memory(self) -> bool:
        """Whether its requests, which are stuck, need not give way, since those of other managers will."""
        if self.stuck == NEVER:
            self.stuck = next(_stuck)
        return self._has_turn() and any(each.active_requests for each in self._others())

    def end_turn(self) -> None:
        """Leave the turn to other managers."""
        self.stuck = NEVER

    def _get_waiting_candidates(self) -> list[RequestState]:
        """The requests that may begin. Of those with one prompt, one begins, and the others when they can share it."""
        if not self._has_turn():
            return []
        candidates = list(super()._get_waiting_candidates())
        if not self.cache.use_prefix_sharing:
            return candidates
        active = self.active_requests.values()
        computed = {_prompt_of(each) for each in active if each.generated_len()}
        begun = {_prompt_of(each) for each in active} - computed
        chosen = []
        for each in candidates:
            prompt = _prompt_of(each)
            if prompt not in begun:
                chosen.append(each)
            if prompt not in computed:
                begun.add(prompt)
        return chosen

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        """Choose requests for a batch. A request that forks before it has tokens to compute is left out if others have
        some: transformers has no room for more requests than tokens."""
        self.cache.begin_step([*self.active_requests.values()])
        batch, is_decode, tokens, read = super().schedule_batch(token_budget, cache_budget)  # type: ignore[safe-super]
        return [each for each in batch or () if each.query_length] or batch, is_decode, tokens, read

    def add_waiting_request(self, state: RequestState) -> None:
        """Let a request wait. Raises `ArgumentError` if its name, or that of one that will fork from it, is that of
        another request, which would have the same row."""
        for name in (state.request_id, *children_of(state)):
            parent = self._request(str(name).rpartition(CHILD)[0])
            if self._request(name) or (parent and parent.num_children):
                raise ArgumentError(
                    f"got request_id={name!r}, which another request has that is not done; give another"
                )
        super().add_waiting_request(state)
        self._new[state.request_id] = state

    def _request(self, name: str) -> RequestState | None:
        return self.active_requests.get(name) or self.waiting_requests.get(name)

    def next_without_room(self) -> RequestState:
        """The request that would go on next if there were memory."""
        if self.starved_requests:
            return self.starved_requests[0][0]
        return self.waiting_requests[self.waiting_requests_order[0]]

    def give_way(self, states: list[RequestState]) -> None:
        """Have active requests begin anew later, with the tokens that they have by now as their prompt."""
        self.end_turn()
        for state in states:
            again = state.create_equivalent_initial_request()
            state.status = RequestStatus.FINISHED
            self.finish_request(state.request_id)
            self.add_waiting_request(again)

    def forget_parents_that_are_gone(self) -> None:
        """Have no request fork that was cancelled, moved, or is to begin anew: it forks when it is back."""
        active = self.active_requests
        self._requests_to_fork = [each for each in self._requests_to_fork if active.get(each.request_id) is each]

    def set_request_cancellation(self, request_id: str) -> None:
        """Mark a request to be cancelled, unless it is a later one of its name: of one round, requests are added before
        any is cancelled."""
        new = self._new.get(request_id)
        if new is None or not isinstance(request_id, Cancelled) or new.created_time <= request_id.time:
            super().set_request_cancellation(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        for state in cancelled:  # no result of it follows, not even of a batch that runs
            state.status = RequestStatus.FINISHED
            self.handlers.pop(state.request_id, None)
        if not self.active_requests:
            self.block_new_requests = False  # transformers unblocks when a request finishes, and there is none
        return cancelled


SCHEDULERS = {name: type(f"Row{kind.__name__}", (RowScheduler, kind), {}) for name, kind in SCHEDULER_MAPPING.items()}
"""By transformers' names."""
