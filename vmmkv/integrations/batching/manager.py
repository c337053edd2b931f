"""Takes requests, and runs them on rows: transformers' `ContinuousBatchingManager`."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching import continuous_api as their_api
from transformers.generation.continuous_batching.utils import drain_queue
from transformers.utils import logging

from ...errors import ArgumentError, BusyError, StoppedError, UnsupportedError
from . import config as asked
from .attention import borrow, give_back
from .batches import forget_graphs
from .cache import RowCache
from .model import Options, Weights, can_be_captured, check_pool, devices_of, groups_of
from .processor import SCHEDULERS, Cancelled, RowProcessor
from .requests import Ranks

logger = logging.get_logger(__name__)


started: WeakKeyDictionary[Any, WeakSet[RowManager]] = WeakKeyDictionary()  # by model: the managers that were started


def settings(config: Any) -> str:
    """A text that differs between a persistent manager's config and one that asks for something else; new tokens are
    each call's."""
    told = {name: value for name, value in sorted(vars(config).items()) if name != "max_new_tokens"}
    if isinstance(config, GenerationConfig):
        told["eos_token_id"] = asked.end_ids(config.eos_token_id)
    return repr(told)


class RowManager(their_api.ContinuousBatchingManager):
    """Takes requests, and runs them on rows. Methods of transformers' refuse here what would end all requests."""

    options: Options

    def __init__(
        self, model: Any, generation_config: Any, continuous_batching_config: Any, workload_hints: Any = None
    ) -> None:
        made_by = settings(generation_config), settings(continuous_batching_config)
        config = asked.with_defaults(continuous_batching_config, model.device)
        asked.check_generation(generation_config)
        # A copy: logits processors are made for it, and the caller may change its own.
        generation_config = asked.within_vocabulary(copy.deepcopy(generation_config), asked.vocabulary_of(model))
        self._processor: RowProcessor | None = None
        self._asleep: ExitStack | None = None  # what ends a sleep, while requests wait for that
        self._sleeping = threading.Lock()  # guards it
        self._pauses = 0  # how many callers have the model
        self._pausing = threading.Lock()  # guards their number
        self._starting = threading.Lock()
        self.made_by = made_by  # the settings that it was made for; a caller may keep the manager for others
        was_training = model.training
        try:
            super().__init__(model, generation_config, config, workload_hints)
            for each in self.logit_processor.logits_processor:
                if getattr(each, "supports_continuous_batching", None) is False:
                    raise UnsupportedError(
                        f"asked for {type(each).__name__} with drop_unsupported_processors=False; of a batch it would "
                        "see the last token of each request alone. Leave out what asks for it (repetition_penalty, "
                        "say), or the False"
                    )
            if asked.compiles(config, self.model.config) and len(devices_of(self.groups)) > 1:
                raise UnsupportedError("asked for compiled forward passes of a model on several devices; leave one out")
            self._weights = Weights(model)
            resolved = self.continuous_batching_config
            resolved.decode_compile_config = config.decode_compile_config  # transformers drops it with its own kernels
            resolved.max_blocks_per_request = 1  # a row
            is_told = continuous_batching_config.use_cuda_graph is not None
            resolved.use_cuda_graph = self._may_capture(model, is_told)
        except BaseException:
            model.train(was_training)
            give_back(model, self)
            raise
        if model.device.type == "cuda" and not self.groups[0].has_kernels:
            logger.warning("%s has heads without kernels: torch attends to a request at a time", type(model).__name__)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        if self._pauses:
            return  # a caller has the model
        model.eval()  # the model of a kept manager may have been trained since
        borrow(model, self)
        self.groups = groups_of(model, self.options.kv_dtype)
        check_pool(self.options.pool, self.groups)

    def _may_capture(self, model: Any, is_told: bool) -> tuple[bool, bool]:
        """Whether passes with prompts, and those of decode, can be CUDA graphs: tried out unless a config says so."""
        if not self.groups[0].has_kernels or len(devices_of(self.groups)) > 1:
            return False, False
        if is_told:
            return self.continuous_batching_config.cuda_graph_booleans
        decode, least = can_be_captured(model, 1), self.continuous_batching_config.q_padding_interval_size
        return decode and can_be_captured(model, least), decode

    # ------------------------------------------------------------------ from start to end

    def start(self) -> None:
        """Start taking requests. Raises `BusyError` while it runs, perhaps for another caller: each would take results
        of the other, and stop it."""
        with self._starting:
            self._check_idle("start")
            self.switch_to_cb_friendly_attn(self.model)  # `stop` has given it back
            self._weights.change()
            is_same = self.batch_processor is None or self._made_for == self._found()
            if not Ranks(self.distributed_helper).least(is_same):
                self.batch_processor = None  # graphs read weights where they were, or layers keep something else
            started.setdefault(self.model, WeakSet()).add(self)
            super().start()

    def _found(self) -> tuple[Any, ...]:
        """What rows and graphs are made for: what layers keep of a token, and where weights are."""
        return self.groups, self._weights.addresses

    def forget_results(self) -> None:
        """Drop results that were not taken, unless it runs: `generate_batch` would take them for its own."""
        if not self.is_running():
            drain_queue(self.output_router.output_queue)

    def _check_idle(self, what: str) -> None:
        if self.is_running():
            raise BusyError(
                f"asked to {what} a manager that runs; a persistent one is the same for all callers. Wait until it has "
                "stopped, or do without persistent_manager=True"
            )

    def warmup(self) -> None:
        """Run made-up batches. Raises `BusyError` while it runs: they would take the place of its requests."""
        self._check_idle("warm up")
        try:
            with torch.inference_mode(False):  # a thread that is not in this mode writes to these tensors later
                super().warmup()
        except BaseException:
            self._end()
            raise

    @property
    def is_asleep(self) -> bool:
        """Whether requests wait for `wake`."""
        return self._asleep is not None

    def sleep(self, *, offload: bool = False) -> int:
        """Give the memory of K and V back to the system; see `continuous_batching.sleep`. Returns its bytes."""
        with self._sleeping:
            if self.is_running() and self._asleep is None:
                with ExitStack() as pause:
                    if self._pause_for_sleep(pause):
                        self._check_may_sleep(offload)
                        self._asleep = pause.pop_all()
            return self._trim()

    def _pause_for_sleep(self, pause: ExitStack) -> bool:
        """Pause until any thread wakes the manager; returns whether it runs."""
        try:
            pause.enter_context(self.pause())
        except RuntimeError:
            if self.background_thread_status.local_status == self.background_thread_status.STOPPED:
                return False
            raise
        pauses = self.background_thread_status._local_pauses_requested  # a thread with some may not `stop`
        pauses.value -= 1
        pause.callback(lambda: setattr(pauses, "value", pauses.value + 1))  # of the thread that wakes it
        return True

    def _check_may_sleep(self, offload: bool) -> None:
        """Have requests begin anew later, or raise `BusyError` if there are some."""
        Ranks(self.distributed_helper).least(0)  # fails in time where other processes do not sleep
        running = cast(RowProcessor, self._processor)
        active = [*running.scheduler.active_requests.values()]
        if offload:
            running.scheduler.give_way(active)
        elif active:
            raise BusyError(
                f"asked a manager to sleep that runs {len(active)} requests; wait until they are done, or ask for "
                "offload=True"
            )

    def _trim(self) -> int:
        processor: Any = self.batch_processor
        return processor.cache.requests.trim() if processor is not None else 0

    def wake(self) -> None:
        """Have requests go on."""
        with self._sleeping:
            if self._asleep is not None:
                pause, self._asleep = self._asleep, None
                pause.close()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        if not self.background_thread_status.is_pause_requested(local=True):  # else it is refused
            self.wake()
        super().stop(*args, **kwargs)
        if not self.is_running():
            self._end()

    def destroy(self) -> None:
        super().destroy()
        if not self.is_running():
            self._end()

    def _end(self) -> None:
        """Give the model back, and drop the processor, with its rows unless the manager is kept for later."""
        self._processor = None
        give_back(self.model, self)

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._run_generation_loop(*args, **kwargs)
        finally:
            try:
                if self.options.persistent:  # the next call may be long after
                    self._trim()
            finally:
                self._end()  # `stop` may not have waited

    def _generation_step(self) -> None:
        """Run a batch. A `stop` that does not wait drops `batch_processor` at once."""
        cast(RowProcessor, self._processor)._generation_step(self.model)

    def _create_batch_processor(self) -> Any:
        self._weights.change()
        self._made_for = self._found()
        create = asked.with_names(
            their_api.ContinuousBatchingManager._create_batch_processor,
            PagedAttentionCache=functools.partial(RowCache, self.options, self.groups, self._weights),
            ContinuousBatchProcessor=RowProcessor,
            FIFOScheduler=SCHEDULERS["fifo"],
            SCHEDULER_MAPPING=SCHEDULERS,
        )
        with torch.inference_mode(False):  # a thread that is not in this mode may write to these tensors later
            self._processor = create(self)
        return self._processor

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Have the model for the caller, which may change its weights and train it, behind all passes so far and before
        later ones. Later requests begin with no prefix from before, and graphs are captured anew if weights have
        moved."""
        with super().pause():
            processor = self._processor
            self._wait_for_devices()
            with self._pausing:
                self._pauses += 1
                give_back(self.model, self)
            try:
                yield
            finally:
                self._wait_for_devices()
                with self._pausing:
                    self._pauses -= 1
                    if not self._pauses:  # callers may have changed the model
                        self.model.eval()
                        borrow(self.model, self)
                        self._weights.change()
                        if processor is not None and self._made_for != (found := self._found()):
                            self._made_for = found
                            forget_graphs(processor.inputs_and_outputs)

    def _wait_for_devices(self) -> None:
        for device in devices_of(self.groups):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

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
        """Add a request."""
        ids = asked.token_ids(input_ids, asked.vocabulary_of(self.model))
        new = self._new_tokens(ids, max_new_tokens)
        if not isinstance(request_id, str | None):
            raise ArgumentError(f"got request_id={request_id!r}; give a name, a str")
        sampling = {name: kwargs.get(name) for name in ("temperature", "top_k", "top_p")}
        asked.check_sampling(asked.vocabulary_of(self.model), **sampling)
        ends = asked.end_ids(self.generation_config.eos_token_id if eos_token_id is None else eos_token_id)
        name: str | None = super().add_request(ids, request_id, new, streaming, record_timestamps, ends, **kwargs)
        if name is None and self.is_tp_driver:
            reason = self.background_thread_status.can_accept_new_requests()
            raise StoppedError(
                f"got a request that would not be answered: {reason} start() lets it take requests again"
            )
        return name

    def add_requests(
        self, inputs: list[list[int]], max_new_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> list[str]:
        """Add requests, all or none. Errors are those of `add_request`."""
        ids: list[list[int]] = [asked.token_ids(each, asked.vocabulary_of(self.model)) for each in inputs]
        for each in ids:
            self._new_tokens(each, max_new_tokens)
        names: list[str] = super().add_requests(ids, max_new_tokens, *args, **kwargs)
        return names

    def _new_tokens(self, ids: list[int], wanted: int | None) -> int:
        """How many new tokens a request gets: see `check_length`."""
        wanted = self.generation_config.max_new_tokens if wanted is None else wanted
        return asked.check_length(self.options.max_seq_len, len(ids), wanted)

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request, but none of this name that is added later."""
        super().cancel_request(Cancelled(request_id))
