"""Makes one forward pass after another: transformers' `ContinuousBatchProcessor`."""

from __future__ import annotations

import copy
import time
from typing import Any, cast

import torch
from transformers.generation.continuous_batching import continuous_api as their_api
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import drain_queue

from ...errors import UnsupportedAttentionError
from .attention import NAME
from .batches import RowBatch, RowBatchesAhead, RowRunner, sides
from .cache import RowCache, RowOffloading
from .config import with_names
from .scheduler import RowScheduler, children_of

MANY_TOKENS = 1 << 40  # more than a forward pass can read: attention reads rows, not copies of them
STUCK = "No requests can be scheduled and no requests can be offloaded."
"""transformers' error where no request can go on for want of memory."""


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
        self.scheduler.begin_round()
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
        state = self.scheduler.next_without_room()
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
            self.scheduler.end_turn()

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
