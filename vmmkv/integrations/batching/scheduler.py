"""Chooses requests for a forward pass: transformers' schedulers, each with what rows need beside it; and the turn at a
pool where the schedulers of several managers wait for each other's memory."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler

from ...errors import ArgumentError
from ...pool import FramePool
from .cache import RowCache

CHILD = "__child#"
"""In names of requests that fork from one: between its own and a number."""


class PoolTurn:
    """The turn at a pool. The scheduler that has it keeps what its requests hold; the others admit no request until one
    of these is done, and give way where they cannot go on. If all gave way, each could take what the other had just
    given back, and none need ever be done."""

    def __init__(self) -> None:
        self._holder: Callable[[], RowScheduler | None] = lambda: None
        self._schedulers: weakref.WeakSet[RowScheduler] = weakref.WeakSet()

    def join(self, scheduler: RowScheduler) -> None:
        """Add a scheduler of a manager on the pool."""
        with _lock:
            self._schedulers.add(scheduler)

    def take(self, scheduler: RowScheduler) -> bool:
        """Give the turn to a scheduler unless another has it; returns whether it has the turn."""
        with _lock:
            if is_free := not self.is_taken(scheduler):
                self._holder = weakref.ref(scheduler)
            return is_free

    def end(self, scheduler: RowScheduler) -> None:
        """Take the turn from a scheduler, if it has it."""
        with _lock:
            if self._holder() is scheduler:
                self._holder = lambda: None

    def is_taken(self, scheduler: RowScheduler) -> bool:
        """Whether another scheduler, one with requests, has the turn."""
        holder = self._holder()
        return holder is not None and holder is not scheduler and bool(holder.has_pending_requests())

    def others_hold_memory(self, scheduler: RowScheduler) -> bool:
        """Whether requests of other schedulers hold memory of the pool."""
        with _lock:  # others may join
            schedulers = list(self._schedulers)
        return any(each is not scheduler and each.active_requests for each in schedulers)


_turns: weakref.WeakKeyDictionary[FramePool, PoolTurn] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
"""Guards the turns."""


def turn_at(pool: FramePool) -> PoolTurn:
    """The turn at a pool."""
    with _lock:
        return _turns.setdefault(pool, PoolTurn())


class Cancelled(str):
    """The name of a request, and when it was cancelled."""

    def __init__(self, name: str) -> None:
        self.time = time.perf_counter()


def children_of(state: RequestState) -> list[str]:
    """Names of the requests that are to fork from one."""
    return [f"{state.request_id}{CHILD}{number}" for number in range(state.num_children)]


class RowScheduler(Scheduler):
    """Chooses requests, with a scheduler of transformers'."""

    cache: RowCache
    handlers: dict[str, Any]
    """By request: the callback that its results go to."""
    turn: PoolTurn | None = None
    """None if several processes would have to agree on it."""

    def reset(self) -> None:
        super().reset()
        self._new: dict[str, RequestState] = {}

    def begin_round(self) -> None:
        """Take the requests that are added from now on as new."""
        self._new = {}

    def keeps_its_memory(self) -> bool:
        """Whether its requests need not give way, since those of other managers will."""
        return self.turn is not None and self.turn.take(self) and self.turn.others_hold_memory(self)

    def end_turn(self) -> None:
        """Leave the turn to other managers."""
        if self.turn is not None:
            self.turn.end(self)

    def _get_waiting_candidates(self) -> list[RequestState]:
        is_taken = self.turn is not None and self.turn.is_taken(self)
        return [] if is_taken else list(super()._get_waiting_candidates())

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

    def give_way(self) -> None:
        """Have requests that cannot grow begin anew later, with the tokens that they have by now as their prompt."""
        self.end_turn()
        for state, _ in self.starved_requests:
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
