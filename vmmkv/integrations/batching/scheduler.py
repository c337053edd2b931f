"""Chooses requests for a forward pass: transformers' schedulers, each with what rows need beside it."""

from __future__ import annotations

import time
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler

from ...errors import ArgumentError
from ..pool_turns import PoolTurn

CHILD = "__child#"
"""In names of requests that fork from one: between its own and a number."""


class Cancelled(str):
    """The name of a request, and when somebody cancelled it."""

    def __init__(self, name: str) -> None:
        self.time = time.perf_counter()


def children_of(state: RequestState) -> list[str]:
    """Names of the requests that are to fork from one."""
    return [f"{state.request_id}{CHILD}{number}" for number in range(state.num_children)]


class RowScheduler(Scheduler):
    """Chooses requests, with a scheduler of theirs."""

    handlers: dict[str, Any]
    """By request: who is told of what becomes of it."""
    _turn: PoolTurn | None = None
    """Among managers on one pool. Not where several processes would have to agree on it."""

    def reset(self) -> None:
        """Begins anew: see `Scheduler.reset`."""
        super().reset()
        self.begin_round()

    def begin_round(self) -> None:
        """Requests that are added from now on are new."""
        self._new: dict[str, RequestState] = {}

    # ------------------------------------------------------------------ turns at a pool

    def take_turns(self, turn: PoolTurn) -> None:
        """Takes turns with other managers on a pool, where each waits for the others' memory."""
        self._turn = turn
        turn.join(self)

    def holds_memory(self) -> bool:
        """Whether requests of its hold memory."""
        return bool(self.active_requests)

    def keeps_its_memory(self) -> bool:
        """Whether it need not give way, since other managers will."""
        return self._turn is not None and self._turn.take(self) and self._turn.others_hold_memory(self)

    def end_turn(self) -> None:
        """Leaves the turn to other managers, if it had it."""
        if self._turn is not None:
            self._turn.end(self)

    def _get_waiting_candidates(self) -> list[RequestState]:
        if self._turn is not None and self._turn.is_anothers(self):
            return []
        waiting: list[RequestState] = super()._get_waiting_candidates()
        return waiting

    # ------------------------------------------------------------------ what becomes of requests

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        """Chooses requests for a batch: see `Scheduler.schedule_batch`. Those that have no tokens in it, since all but
        the last one is known before they fork, are left out where others have some: transformers has room for no more
        requests than tokens, and would look for those of the batch before behind it."""
        batch, is_decode, tokens, read = super().schedule_batch(token_budget, cache_budget)  # type: ignore[safe-super]
        return [each for each in batch or () if each.query_length] or batch, is_decode, tokens, read

    def add_waiting_request(self, state: RequestState) -> None:
        """Lets a request wait.

        Raises:
            ArgumentError: another one of its name, or of one that will fork from it, is not done or will fork. Both
                would write into one row.
        """
        for name in (state.request_id, *children_of(state)):
            parent = self._request(str(name).rpartition(CHILD)[0])
            if self._request(name) or (parent and parent.num_children):
                raise ArgumentError(
                    f"got request_id={name!r}, which another request has that is not done; give another"
                )
        super().add_waiting_request(state)
        self._new[state.request_id] = state

    def _request(self, name: str) -> RequestState | None:
        """The request of a name that is not done, if there is one."""
        return self.active_requests.get(name) or self.waiting_requests.get(name)

    def next_without_room(self) -> RequestState:
        """The request that would go on next, if there were memory for it."""
        if self.starved_requests:
            return self.starved_requests[0][0]
        return self.waiting_requests[self.waiting_requests_order[0]]

    def give_way(self) -> None:
        """Has requests that cannot grow begin anew later, with what is known of them by then."""
        self.end_turn()
        for state, _ in self.starved_requests:
            again = state.create_equivalent_initial_request()
            state.status = RequestStatus.FINISHED
            self.finish_request(state.request_id)
            self.add_waiting_request(again)

    def forget_parents_that_are_gone(self) -> None:
        """Has no request fork that was cancelled, moved, or to begin anew while the batch with it ran: who comes back
        forks then."""
        active = self.active_requests
        self._requests_to_fork = [each for each in self._requests_to_fork if active.get(each.request_id) is each]

    def set_request_cancellation(self, request_id: str) -> None:
        """Marks a request to be cancelled, unless it is a later one of its name: of what came together requests are
        added before any is cancelled, and one that ended in between may have been meant."""
        new = self._new.get(request_id)
        if new is None or not isinstance(request_id, Cancelled) or new.created_time <= request_id.time:
            super().set_request_cancellation(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        for state in cancelled:  # nobody is told of its end, nor of what a batch that runs has for it
            state.status = RequestStatus.FINISHED
            self.handlers.pop(state.request_id, None)
        if not self.active_requests:
            self.block_new_requests = False  # until one finishes, and there is none
        return cancelled


SCHEDULERS = {name: type(f"Row{kind.__name__}", (RowScheduler, kind), {}) for name, kind in SCHEDULER_MAPPING.items()}
"""As transformers names them."""
