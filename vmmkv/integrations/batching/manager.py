"""Takes requests, and runs them on rows."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching import continuous_api as their_api
from transformers.generation.continuous_batching.utils import WorkloadHints, drain_queue
from transformers.utils import logging

from ...errors import ArgumentError, BusyError, StoppedError, UnsupportedError
from ..model_weights import adapters, addresses, counting_writes, has_adapters, tensors, writes
from ..request_checks import (
    check_generation,
    check_length,
    check_sampling,
    end_ids,
    token_ids,
    vocabulary_of,
    within_vocabulary,
)
from ..row_caches import Options
from ..row_groups import can_be_captured, check_pool, devices_of
from ..with_names import with_names
from .attention import ATTENTION, compile_layers_whole, groups_of, run_tokens
from .cache import RowCache
from .config import check_processors, compiles, with_defaults
from .processor import RowProcessor
from .ranks import ranks_of
from .scheduler import SCHEDULERS, Cancelled

logger = logging.get_logger(__name__)


class RowManager(their_api.ContinuousBatchingManager):
    """See above."""

    options: Options

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: Any,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        config = with_defaults(continuous_batching_config, model.device)
        check_generation(generation_config)
        # A copy: what the caller changes in its own is not what logits processors were made for.
        generation_config = within_vocabulary(copy.deepcopy(generation_config), vocabulary_of(model))
        self._weights = 0
        self._makes_batches: RowProcessor | None = None
        self._starting = threading.Lock()
        self.asked = copy.deepcopy(continuous_batching_config)
        """What it was made for, by a caller who may keep it for others."""
        was_training = model.training
        try:
            super().__init__(model, generation_config, config, workload_hints)
            check_processors(self.logit_processor.logits_processor)
            self._allow_decode(config)
            self._compile_layers()
            is_told = continuous_batching_config.use_cuda_graph is not None
            self.continuous_batching_config.use_cuda_graph = self._may_capture(model, is_told)
        except BaseException:
            model.train(was_training)
            ATTENTION.give_back(model, self)
            raise
        if model.device.type == "cuda" and not self.groups[0].has_kernels:
            logger.warning("%s has heads without kernels: torch attends to a request at a time", type(model).__name__)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        model.eval()  # one that is kept may find that it has been trained since
        ATTENTION.borrow(model, self)
        self.groups = groups_of(model, self.options.kv_dtype)
        check_pool(self.options.pool, self.groups)

    def _allow_decode(self, config: Any) -> None:
        """Has decode a path of its own, compiled where `config` says so. transformers has one for its own kernels.

        Raises:
            UnsupportedError: forward passes are to be compiled over several devices, or as they cannot be on rows.
        """
        self._is_compiled = compiles(config, self.model.config)
        if self._is_compiled and len(devices_of(self.groups)) > 1:
            raise UnsupportedError("asked for compiled forward passes of a model on several devices; leave one out")
        self.continuous_batching_config.decode_compile_config = config.decode_compile_config
        self.continuous_batching_config.max_blocks_per_request = 1  # a row

    def _compile_layers(self) -> None:
        if self._is_compiled:
            compile_layers_whole(self.model)

    def _may_capture(self, model: Any, is_told: bool) -> tuple[bool, bool]:
        """Whether forward passes with prompts, and those of decode, can be CUDA graphs; tried out, where nobody has
        told."""
        if not self.groups[0].has_kernels or len(devices_of(self.groups)) > 1:
            return False, False
        if is_told:
            return self.continuous_batching_config.cuda_graph_booleans
        decode, least = can_be_captured(model, run_tokens, 1), self.continuous_batching_config.q_padding_interval_size
        return decode and can_be_captured(model, run_tokens, least), decode

    # ------------------------------------------------------------------ from start to end

    def start(self) -> None:
        """Starts taking requests: see `ContinuousBatchingManager.start`.

        Raises:
            BusyError: it runs, for another caller perhaps, who would take results of this one's and stop it.
        """
        with self._starting:
            self._check_idle("start")
            self.switch_to_cb_friendly_attn(self.model)  # it had its own again since `stop`
            self._compile_layers()
            self._weights += 1
            ranks = ranks_of(self.distributed_helper)
            self._take_weights()
            if self.batch_processor is not None and not ranks.least(self._made_for == self._found()):
                self.batch_processor = None  # graphs read weights where they were, and K and V may be kept otherwise
            super().start()

    def _found(self) -> tuple[Any, ...]:
        """What rows and graphs are made for: what layers keep of a token, and where weights were found."""
        return self.groups, self._addresses

    def forget_results(self) -> None:
        """Forgets what earlier requests have made and nobody has taken, unless it runs: `generate_batch` would take it
        for its own."""
        if not self.is_running():
            drain_queue(self.output_router.output_queue)

    def _check_idle(self, what: str) -> None:
        """Raises `BusyError` while it runs."""
        if self.is_running():
            raise BusyError(
                f"asked to {what} a manager that runs; a persistent one is the same for all callers. Wait until it has "
                "stopped, or do without persistent_manager=True"
            )

    def warmup(self) -> None:
        """Runs made-up batches: see `ContinuousBatchingManager.warmup`.

        Raises:
            BusyError: it runs, and these would take the place of its requests.
        """
        self._check_idle("warm up")
        try:
            with torch.inference_mode(False):  # what is made here, a thread that is not in this mode writes to
                super().warmup()
        except BaseException:
            self._end()
            raise

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stops: see `ContinuousBatchingManager.stop`."""
        super().stop(*args, **kwargs)
        if not self.is_running():
            self._end()

    def destroy(self) -> None:
        """Ends it: see `ContinuousBatchingManager.destroy`."""
        super().destroy()
        if not self.is_running():
            self._end()

    def _end(self) -> None:
        """Leaves the model to others, and the memory of its rows, if nobody has kept them for later."""
        self._makes_batches = None
        ATTENTION.give_back(self.model, self)

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._run_generation_loop(*args, **kwargs)
        finally:
            self._end()  # nobody may have waited for it

    def _generation_step(self) -> None:
        """Runs a batch, also where `stop` does not wait for the last one: it forgets at once who makes them."""
        cast(RowProcessor, self._makes_batches)._generation_step(self.model)

    def _create_batch_processor(self) -> Any:
        self._take_weights()
        self._made_for = self._found()
        made = functools.partial(
            RowCache, self.options, self.groups, self.weights, functools.partial(adapters, self.model)
        )
        create = with_names(
            their_api.ContinuousBatchingManager._create_batch_processor,
            PagedAttentionCache=made,
            ContinuousBatchProcessor=RowProcessor,
            FIFOScheduler=SCHEDULERS["fifo"],
            SCHEDULER_MAPPING=SCHEDULERS,
        )
        with torch.inference_mode(False):  # what is made here, a thread that is not in this mode may write to later
            self._makes_batches = create(self)
        return self._makes_batches

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Has the model for the caller, who may change its weights: see `ContinuousBatchingManager.pause`. The forward
        pass that runs is waited for, and so is what the caller launches. Later requests begin with nothing that was
        computed before, and graphs are made anew if weights have moved."""
        with super().pause():
            self._weights += 1
            processor = self._makes_batches
            self._wait_for_devices()
            try:
                yield
            finally:
                self._wait_for_devices()
                self._take_weights()
                if processor is not None and self._made_for != (found := self._found()):
                    self._made_for = found
                    processor.inputs_and_outputs.forget_graphs()

    def _wait_for_devices(self) -> None:
        for device in devices_of(self.groups):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def weights(self) -> str:
        """What K and V depend on beside tokens: weights, as far as can be told, and the adapters that PEFT has put into
        the model. As text, which is the adapter of sequences."""
        if has_adapters(self.model):
            self._look_for_others()
        return repr((self._weights, writes(self._counting), adapters(self.model)))

    def _take_weights(self) -> None:
        self._tensors = tensors(self.model)
        self._addresses, self._counting = addresses(self._tensors), counting_writes(self._tensors)

    def _look_for_others(self) -> None:
        """Looks whether the model has other weights: PEFT puts some in, takes some out, and swaps what is in them,
        under a manager that runs; one adapter may have the name of another that is gone."""
        found = tensors(self.model)
        if [*map(id, found)] != [*map(id, self._tensors)] or addresses(found) != self._addresses:
            self._take_weights()
            self._weights += 1

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: Any = None,
        **kwargs: Any,
    ) -> str | None:
        """Adds a request: see `ContinuousBatchingManager.add_request`.

        Raises:
            SequenceTooLongError: it would be longer than rows are.
            ArgumentError: it has no tokens, or some that the model does not know; or a name or a number that would end
                all requests.
            StoppedError: the manager was stopped, or has ended with an error.
        """
        ids = token_ids(input_ids, vocabulary_of(self.model))
        new = self._new_tokens(ids, max_new_tokens)
        if not isinstance(request_id, str | None):
            raise ArgumentError(f"got request_id={request_id!r}; give a name, a str")
        check_sampling(
            vocabulary_of(self.model), **{name: kwargs.get(name) for name in ("temperature", "top_k", "top_p")}
        )
        ends = end_ids(self.generation_config.eos_token_id if eos_token_id is None else eos_token_id)
        name: str | None = super().add_request(ids, request_id, new, streaming, record_timestamps, ends, **kwargs)
        if name is None and self.is_tp_driver:
            reason = self.background_thread_status.can_accept_new_requests()
            raise StoppedError(f"got a request that nobody would answer: {reason} start() lets it take requests again")
        return name

    def add_requests(
        self, inputs: list[list[int]], max_new_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Adds requests, all or none: see `ContinuousBatchingManager.add_requests`.

        Raises:
            SequenceTooLongError, ArgumentError, StoppedError: as `add_request` does.
        """
        ids: list[list[int]] = [token_ids(each, vocabulary_of(self.model)) for each in inputs]
        for each in ids:
            self._new_tokens(each, max_new_tokens)
        names: list[str] = super().add_requests(ids, max_new_tokens, *args, **kwargs)
        return names

    def _new_tokens(self, ids: list[int], wanted: int | None) -> int:
        """How many new tokens a request gets: see `check_length`."""
        wanted = self.generation_config.max_new_tokens if wanted is None else wanted
        return check_length(self.options.max_seq_len, len(ids), wanted)

    def cancel_request(self, request_id: str) -> None:
        """Cancels a request: see `ContinuousBatchingManager.cancel_request`. One of this name that is added later is
        another."""
        super().cancel_request(Cancelled(request_id))
