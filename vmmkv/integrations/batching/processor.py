"""Makes one forward pass after another."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers.generation.continuous_batching import continuous_api as their_api
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import drain_queue

from ...errors import UnsupportedAttentionError
from ..pool_turns import turn_at
from ..with_names import with_names
from .attention import NAME
from .cache import RowCache
from .inputs import RowBatch, RowBatchesAhead
from .offloading import RowOffloading
from .runner import RowRunner
from .scheduler import RowScheduler, children_of

MANY_TOKENS = 1 << 40
"""More than a forward pass can read: attention reads rows, not copies of them."""
STUCK = "No requests can be scheduled and no requests can be offloaded."
"""What transformers says where nobody can go on for want of memory."""


def _drain(queue: Any) -> list[Any]:
    """Takes all that is in a queue, and has it know what that was."""
    queue.drained = drain_queue(queue)
    return cast(list[Any], queue.drained)


_TAKE_REQUESTS = with_names(their_api.ContinuousBatchProcessor._update_tp_group_state, drain_queue=_drain)


class RowProcessor(their_api.ContinuousBatchProcessor):
    """See above."""

    cache: RowCache
    scheduler: RowScheduler
    inputs_and_outputs: RowBatch | RowBatchesAhead

    def __init__(self, **kwargs: Any) -> None:
        begin = with_names(
            their_api.ContinuousBatchProcessor.__init__,
            OffloadingManager=RowOffloading,
            ContinuousBatchingIOs=RowBatch,
            ContinuousBatchingAsyncIOs=RowBatchesAhead,
            ModelRunner=RowRunner,
        )
        begin(self, **kwargs)
        self.scheduler.handlers = self.output_router.result_handlers
        self.cache.stream = self.inputs_and_outputs.compute_stream
        self.cache.max_tokens_read = MANY_TOKENS  # only now: buffers were made of so many
        if self.distributed_helper.tp_size == 1:
            self.scheduler.take_turns(turn_at(self.cache.kv_caches[0].pool))
        self._wait_for_zeros()

    def reset(self) -> None:
        """Begins anew: see `ContinuousBatchProcessor.reset`."""
        super().reset()
        self._wait_for_zeros()

    def _wait_for_zeros(self) -> None:
        """Waits until the device's inputs and outputs are as new. transformers zeroes them on this thread's current
        stream, and waits for others alone: on a busy GPU the first batch would be copied there before that, and lost.
        """
        if self.model_device.type == "cuda":
            torch.cuda.current_stream(self.model_device).synchronize()

    def _update_tp_group_state(self) -> bool:
        """Takes new requests; returns whether all of them end now, of which transformers would tell only older ones."""
        is_over: bool = _TAKE_REQUESTS(self)
        if is_over and self.input_queue is not None:
            for state in vars(self.input_queue)["drained"]:
                self._handle_request_error(RuntimeError("The manager was stopped before this request began"), state)
        return is_over

    def prepare_next_batch(self) -> bool:
        if isinstance(self.inputs_and_outputs, RowBatchesAhead):
            self.inputs_and_outputs.running.keep_only(self.scheduler.active_requests)
        self.scheduler.begin_round()
        try:
            found = bool(super().prepare_next_batch())
        except RuntimeError as error:
            if str(error) != STUCK:
                raise
            found = False
            self._come_unstuck()
        self.cache.idle_memory.note(found or self.has_pending_requests())
        return found

    def _come_unstuck(self) -> None:
        """Does what it can where no request can go on: the next round may find memory."""
        if self._take_tokens():
            pass  # who has ended with them leaves memory
        elif self.scheduler.keeps_its_memory():
            pass  # others give way, or end
        elif self.cache.admission.others_hold_memory():
            self.scheduler.give_way()  # it may come yet, and others may wait for ours
        else:
            self._end_first_without_room()

    def _take_tokens(self) -> bool:
        """Takes the tokens of the batch that runs before another one is made; returns whether there was one."""
        batches = self.inputs_and_outputs
        if not isinstance(batches, RowBatchesAhead) or not batches.running.requests_in_batch:
            return False
        running = batches.running
        batches.swap_io_pairs()
        self.update_batch()
        batches.swap_io_pairs()
        running.reset()
        return True

    def _end_first_without_room(self) -> None:
        """Ends the request that is next, unless there is memory for it: nobody else has any now, who did perhaps when
        it was asked for."""
        state = self.scheduler.next_without_room()
        tokens = len(state.initial_tokens) + state.generated_len()
        if self.cache.admission.fits(state.request_id, tokens):
            return
        self._handle_request_error(self.cache.admission.no_room_for(state.request_id, tokens), state)
        self.scheduler.set_request_cancellation(state.request_id)

    def update_batch(self) -> None:
        self.cache.admission.look_at_adapters()
        before = set(self.scheduler.active_requests)
        self.scheduler.forget_parents_that_are_gone()
        super().update_batch()
        if not before <= self.scheduler.active_requests.keys():  # some are done
            self.scheduler.end_turn()

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        """Tells who waits for a request that it failed, and who waits for those that were to fork from it."""
        super()._handle_request_error(error, state)
        for name in children_of(state):
            child = copy.copy(state)
            child.request_id = name
            self.output_router.fail_and_deliver(child, error)

    def _generation_step(self, model: Any) -> None:
        chosen = model.config._attn_implementation
        if chosen != NAME:
            raise UnsupportedAttentionError(
                f'{type(model).__name__} runs attn_implementation="{chosen}" under a manager whose K and V lie in '
                "rows. Somebody chose it; stop this manager first"
            )
        batch = self.inputs_and_outputs.prepared
        if any(request.query_length for request in batch.requests_in_batch):
            self.cache.begin_batch(batch.requests_in_batch, is_graph_of_prompts=batch.is_graph_of_prompts)
            super()._generation_step(model)
        else:  # there is nothing to compute before all of them fork
            self.inputs_and_outputs.retrieve_device_outputs()
