"""Takes requests, and runs them on rows."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching import continuous_api as their_api
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from ...errors import ArgumentError, UnsupportedError
from ..model_weights import adapters, addresses, writes
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
from .attention import ATTENTION, compile_layers_whole, groups_of, run_token
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
        generation_config = within_vocabulary(generation_config, vocabulary_of(model))
        self._weights, self._addresses = 0, [0]
        was_training = model.training
        try:
            super().__init__(model.eval(), generation_config, config, workload_hints)
            check_processors(self.logit_processor.logits_processor)
            self._allow_decode(config)
            self._compile_layers()
            if not self._may_capture(model, is_told=continuous_batching_config.use_cuda_graph is not None):
                self.continuous_batching_config.use_cuda_graph = False, False
        except BaseException:
            model.train(was_training)
            ATTENTION.give_back(model, self)
            raise
        if model.device.type == "cuda" and not self.groups[0].has_kernels:
            logger.warning("%s has heads without kernels: torch attends to a request at a time", type(model).__name__)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
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

    def _may_capture(self, model: Any, is_told: bool) -> bool:
        """Whether forward passes can be CUDA graphs; tried out, where nobody has told."""
        if not self.groups[0].has_kernels or len(devices_of(self.groups)) > 1:
            return False
        return is_told or can_be_captured(model, run_token)

    # ------------------------------------------------------------------ from start to end

    def start(self) -> None:
        """Starts taking requests: see `ContinuousBatchingManager.start`."""
        if not self.is_running():
            self.switch_to_cb_friendly_attn(self.model)  # it had its own again since `stop`
            self._compile_layers()
            self._weights += 1
            ranks = ranks_of(self.distributed_helper)
            if self.batch_processor is not None and not ranks.least(self._addresses == addresses(self.model)):
                self.batch_processor = None  # graphs read weights where they were, and K and V may be of another dtype
        super().start()

    def warmup(self) -> None:
        """Runs made-up batches: see `ContinuousBatchingManager.warmup`."""
        try:
            with torch.inference_mode(False):  # what is made here, a thread that is not in this mode writes to
                super().warmup()
        except BaseException:
            ATTENTION.give_back(self.model, self)
            raise

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stops: see `ContinuousBatchingManager.stop`."""
        super().stop(*args, **kwargs)
        if not self.is_running():
            ATTENTION.give_back(self.model, self)

    def destroy(self) -> None:
        """Ends it: see `ContinuousBatchingManager.destroy`."""
        super().destroy()
        if not self.is_running():
            ATTENTION.give_back(self.model, self)

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._run_generation_loop(*args, **kwargs)
        finally:
            ATTENTION.give_back(self.model, self)  # nobody may have waited for the end

    def _create_batch_processor(self) -> Any:
        self._addresses = addresses(self.model)
        self._parameters = list(self.model.parameters())
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
        return create(self)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Has the model for the caller, who may change its weights: see `ContinuousBatchingManager.pause`. Later
        requests begin with nothing that was computed before."""
        with super().pause():
            self._weights += 1
            yield

    def weights(self) -> Hashable:
        """What K and V depend on beside tokens: weights, as far as can be told, and the adapters that PEFT has put into
        the model."""
        return self._weights, writes(self._parameters), adapters(self.model)

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
        """
        vocabulary = vocabulary_of(self.model)
        ids = token_ids(input_ids, vocabulary)
        if not isinstance(request_id, str | None):
            raise ArgumentError(f"got request_id={request_id!r}; give a name, a str")
        check_sampling(vocabulary, **{name: kwargs.get(name) for name in ("temperature", "top_k", "top_p")})
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        new = check_length(self.options.max_seq_len, len(ids), new)
        ends = end_ids(self.generation_config.eos_token_id if eos_token_id is None else eos_token_id)
        return super().add_request(ids, request_id, new, streaming, record_timestamps, ends, **kwargs)

    def cancel_request(self, request_id: str) -> None:
        """Cancels a request: see `ContinuousBatchingManager.cancel_request`. One of this name that is added later is
        another."""
        super().cancel_request(Cancelled(request_id))
