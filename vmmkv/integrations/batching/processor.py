"""Chooses requests, and makes one forward pass after another: transformers' schedulers and `ContinuousBatchProcessor`.

Schedulers of several managers on a pool may wait for each other's memory. Then the one that was stuck first has the
turn: it keeps what its requests hold, and the others admit no request until one of these is done, and give way where
they are stuck. If all gave way, each could take what the other had just given back, and none need ever be done.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers.generation.continuous_batching import continuous_api as their_api
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler
from transformers.generation.continuous_batching.utils import drain_queue

from ...errors import ArgumentError, UnsupportedAttentionError
from ...pool import FramePool
from .attention import NAME
from .batches import RowBatch, RowBatchesAhead, RowRunner, sides
from .cache import RowCache, RowOffloading
from .config import with_names

MANY_TOKENS = 1 << 40  # more than a forward pass can read: attention reads rows, not copies of them
STUCK = "No requests can be scheduled and no requests can be offloaded."
"""transformers' error where no request can go on for want of memory."""
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
        self.new: dict[str, RequestState] = {}  # the requests that were added in this round

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

    def _get_waiting_candidates(self) -> list[RequestState]:
        """The requests that may begin. Of those with one prompt, one begins, and the others when they can share it."""
        if not self.waiting_requests or not self._has_turn():
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
        self.new[state.request_id] = state

    def _request(self, name: str) -> RequestState | None:
        return self.active_requests.get(name) or self.waiting_requests.get(name)

    def give_way(self, states: list[RequestState]) -> None:
        """Have active requests begin anew later, with the tokens that they have by now as their prompt."""
        self.stuck = NEVER  # the turn is other managers'
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
        new = self.new.get(request_id)
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


def _drain(queue: Any) -> list[Any]:
    """Take all that is in a queue, and keep it as an attribute."""
    queue.drained = drain_queue(queue)
    return cast(list[Any], queue.drained)


_TAKE_REQUESTS = with_names(their_api.ContinuousBatchProcessor._update_tp_group_state, drain_queue=_drain)
_BEGIN = with_names(
    their_api.ContinuousBatchProcessor.__init__,
    OffloadingManager=RowOffloading,
    ContinuousBatchingIOs=RowBatch,
    ContinuousBatchingAsyncIOs=RowBatchesAhead,
    ModelRunner=RowRunner,
)


class RowProcessor(their_api.ContinuousBatchProcessor):
    """Makes one forward pass after another."""

    cache: RowCache
    scheduler: RowScheduler
    inputs_and_outputs: RowBatch | RowBatchesAhead

    def __init__(self, **kwargs: Any) -> None:
        _BEGIN(self, **kwargs)
        self.scheduler.handlers = self.output_router.result_handlers
        self.cache.stream = self.inputs_and_outputs.compute_stream
        self.cache.max_tokens_read = MANY_TOKENS  # only now: buffers were made of so many
        self._idle_since: float | None = None
        """When the last request ended; None: there are some; infinity: memory went back to the system since."""
        if self.distributed_helper.tp_size == 1:
            self.scheduler.join(self.cache.kv_caches[0].pool)
        self._wait_for_zeros()

    def reset(self) -> None:
        super().reset()
        self._wait_for_zeros()

    def _wait_for_zeros(self) -> None:
        """Wait until the device's inputs and outputs are zero. transformers zeroes them on this thread's current
        stream, and waits for other streams alone: a busy GPU would zero the first batch after it was copied there."""
        if self.model_device.type == "cuda":
            torch.cuda.current_stream(self.model_device).synchronize()

    def _update_tp_group_state(self) -> bool:
        """Take new requests; returns whether all requests end now, of which transformers tells only older ones."""
        is_over: bool = _TAKE_REQUESTS(self)
        if is_over and self.input_queue is not None:
            for state in vars(self.input_queue)["drained"]:
                self._handle_request_error(RuntimeError("The manager was stopped before this request began"), state)
        return is_over

    def prepare_next_batch(self) -> bool:
        if isinstance(self.inputs_and_outputs, RowBatchesAhead):
            sides(self.inputs_and_outputs, running=True)[0].keep_only(self.scheduler.active_requests)
        self.scheduler.new = {}
        try:
            found = bool(super().prepare_next_batch())
        except RuntimeError as error:
            if str(error) != STUCK:
                raise
            found = False
            self._come_unstuck()
        self._trim_when_idle(found or self.has_pending_requests())
        return found

    def _trim_when_idle(self, is_busy: bool) -> None:
        """Give memory back to the system once there were no requests for `idle_seconds`."""
        now = time.monotonic()
        if is_busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > self.cache.options.idle_seconds:
            self._idle_since = float("inf")
            self.cache.requests.trim()

    def _come_unstuck(self) -> None:
        """Make room where no request can go on: the next round may find memory."""
        if self._take_tokens() or self.scheduler.keeps_its_memory():
            pass  # requests that end with these tokens leave memory; those of other managers give way, or end
        elif self.cache.requests.others_hold_memory():
            # Their memory may come yet, and others may wait for ours.
            self.scheduler.give_way([state for state, _ in self.scheduler.starved_requests])
        else:
            self._end_first_without_room()

    def _take_tokens(self) -> bool:
        """Take the tokens of the batch that runs before another one is made; returns whether there was one."""
        batches = self.inputs_and_outputs
        running = sides(batches, running=True)[0]
        if not isinstance(batches, RowBatchesAhead) or not running.requests_in_batch:
            return False
        batches.swap_io_pairs()
        self.update_batch()
        batches.swap_io_pairs()
        running.reset()
        return True

    def _end_first_without_room(self) -> None:
        """End the request that is next, unless there is memory for it by now."""
        starved, waiting = self.scheduler.starved_requests, self.scheduler.waiting_requests
        state = starved[0][0] if starved else waiting[self.scheduler.waiting_requests_order[0]]
        name, tokens = state.request_id, len(state.initial_tokens) + state.generated_len()
        if not self.cache.requests.fits(name, tokens):
            self._handle_request_error(self.cache.requests.no_room_for(name, tokens), state)
            self.scheduler.set_request_cancellation(name)

    def update_batch(self) -> None:
        self.cache.weights.switches()
        before = set(self.scheduler.active_requests)
        self.scheduler.forget_parents_that_are_gone()
        super().update_batch()
        if before - self.scheduler.active_requests.keys():
            self.scheduler.stuck = NEVER  # the turn is other managers'

    def fail_all_requests(self, error: Exception) -> None:
        super().fail_all_requests(error)
        self.cache.requests.end_all()

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        """Tell the callers of a request, and of those that were to fork from it, that it failed."""
        super()._handle_request_error(error, state)
        for name in children_of(state):
            child = copy.copy(state)
            child.request_id = name
            self.output_router.fail_and_deliver(child, error)

    def _generation_step(self, model: Any) -> None:
        chosen = model.config._attn_implementation
        if chosen != NAME:
            raise UnsupportedAttentionError(
                f'{type(model).__name__} runs attn_implementation="{chosen}" under a manager that keeps K and V '
                "in rows; stop this manager first"
            )
        batch = sides(self.inputs_and_outputs)[0]
        if any(request.query_length for request in batch.requests_in_batch):
            self.cache.begin_pass(batch.requests_in_batch, is_graph_of_prompts=batch.is_graph_of_prompts)
            super()._generation_step(model)
        else:  # all of them fork before they have tokens to compute
            self.inputs_and_outputs.retrieve_device_outputs()
