"""All that knows how transformers' continuous batching asks for its cache:

    manager     chooses attention, and makes a processor        RowManager
    processor   makes what offloads, and what runs the model    RowProcessor
    runner      pads batches, and makes graphs of them          RowRunner
    scheduler   chooses requests                                RowScheduler
    cache       admits, writes, forks, finds prefixes           RowCache
    offloading  moves tokens to the host                        RowOffloading

Each is a subclass that is put in the place of the name in their functions' globals, for these functions alone. A table
of blocks has one column here, the row of each request: so one captured graph serves every length.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any, cast

import torch
import transformers
from transformers import AttentionInterface, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..errors import ArgumentError, UnsupportedAttentionError, UnsupportedError
from .attention import NOT_ABOUT_ATTENTION
from .batching_config import block_bytes, budget, check_compiling, decode_sizes, host_bytes, with_defaults
from .borrowed_attention import BorrowedAttention
from .idle_memory import IdleMemory
from .left_to_attention import LeftToAttention
from .model_weights import adapters, addresses
from .packed_attention import Packed
from .pool_turns import PoolTurn, turn_at
from .request_checks import (
    check_generation,
    check_length,
    check_same,
    check_sampling,
    check_told,
    token_ids,
    vocabulary_of,
    within_vocabulary,
)
from .rotation import defer_rotation, restore_rotation
from .row_admission import Admission
from .row_attention import RowAttention
from .row_caches import Options, bytes_of_token, make_caches
from .row_groups import Group, Probe, can_be_captured, check_pool, devices_of, layer_groups, not_for_rows
from .row_ranks import Ranks
from .row_stages import make_requests
from .whole_layers import Inside, attend_inside, make_layers_whole, split_layers
from .with_names import with_names

NAME = "vmmkv_rows"
"""What attention is called while a model runs on rows."""
TESTED = ("5.23", "5.24")
"""Versions of transformers whose continuous batching is known here."""

try:
    from transformers.generation.continuous_batching import cache as their_cache
    from transformers.generation.continuous_batching import continuous_api as their_api
    from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
    from transformers.generation.continuous_batching.initialization import resolve_compile_configs
    from transformers.generation.continuous_batching.input_outputs import (
        ContinuousBatchingAsyncIOs,
        ContinuousBatchingIOs,
        HostDeviceIOPair,
        PagedAttentionArgs,
    )
    from transformers.generation.continuous_batching.model_runner import ModelRunner
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
    from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler
    from transformers.generation.continuous_batching.utils import WorkloadHints, stream_context
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError as error:
    raise UnsupportedError(
        f"transformers {transformers.__version__} has no continuous batching that is known here ({error}); "
        f"install one of {', '.join(TESTED)}"
    ) from error

MAX_BATCH_TOKENS = 8192
"""Of one forward pass, as transformers has it where it is told nothing."""
WARMUP = "__warmup_"
"""What names of requests begin with that are made up, before there are any, and hold what was never computed."""
ALIKE = (
    "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing", "scheduler_type", "safety_margin",
    "use_async_batching", "use_cuda_graph",
)  # fmt: skip
"""What of a `ContinuousBatchingConfig` decides which forward passes there are, and of what shape."""
SEQUENCES = 64
"""Batches with prompts have a multiple of so many, where they are padded."""
MANY_TOKENS = 1 << 40
"""More than a forward pass can read: attention reads rows, not copies of them."""
STUCK = "No requests can be scheduled and no requests can be offloaded."
"""What transformers says where nobody can go on for want of memory."""
KEPT = "_cached_continuous_batching_manager"
"""Where transformers keeps a persistent manager."""
CHILD = "__child#"
"""In names of requests that fork from one: between its own and a number."""

logger = logging.get_logger(__name__)

ATTENTION = BorrowedAttention(NAME, clear=split_layers)
"""Of models that managers run on rows."""

GONE = RequestState("__gone__", [], _status=RequestStatus.FINISHED)
"""In the place of a request that has ended while a batch with it runs."""

OF_BATCH = "block_table"
"""What layers are told with every batch, and hand on to attention."""
KNOWN = {*PagedAttentionArgs.__annotations__, *NOT_ABOUT_ATTENTION, "sliding_window", "logits_to_keep"}
"""Keywords of attention that are heeded, or mean nothing to it."""


FOR_ATTENTION = PagedAttentionArgs.__annotations__.keys() - {
    "input_ids", "attention_mask", "position_ids", "cache", "use_cache",
}  # fmt: skip
"""Of what layers are told, that which is for attention alone."""

OF_GENERATE_BATCH = inspect.signature(their_api.ContinuousMixin.generate_batch).parameters.keys() - {"kwargs"}
"""What transformers heeds."""


def check_version() -> None:
    """Raises `UnsupportedError` where continuous batching is not what is known here."""
    if not transformers.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        raise UnsupportedError(
            f"transformers {transformers.__version__} is not among the versions whose continuous batching is known "
            f"here: {', '.join(TESTED)}. Install one of these, or a later vmmkv"
        )


# ---------------------------------------------------------------------- a model on rows


def put_on_rows(model: PreTrainedModel, options: Options) -> None:
    """Has the next manager of a model keep K and V in rows."""
    manager = type("RowManager", (RowManager,), {"options": options})
    begin = with_names(
        inspect.unwrap(their_api.ContinuousMixin.init_continuous_batching), ContinuousBatchingManager=manager
    )
    _drop_kept(model)
    vars(model)["init_continuous_batching"] = MethodType(torch.no_grad()(begin), model)
    vars(model)["generate_batch"] = MethodType(_checked(options.max_seq_len), model)
    defer_rotation(model, RowCache | Inside)


def take_off_rows(model: PreTrainedModel) -> None:
    """Has the next manager of a model keep K and V in blocks again."""
    if isinstance(vars(model).get(KEPT), RowManager):
        _drop_kept(model)
    for name in ("init_continuous_batching", "generate_batch"):
        vars(model).pop(name, None)
    restore_rotation(model)


def compile_layers_whole(model: Any) -> None:
    """Has compiled layers of a model be one program each, as long as somebody runs it on rows."""
    make_layers_whole(model, GradientCheckpointingLayer, RowCache, FOR_ATTENTION)


def _checked(max_seq_len: int) -> Callable[..., Any]:
    """`generate_batch` that raises what `add_request` would: transformers' logs it, and gives no results of anybody."""

    @functools.wraps(their_api.ContinuousMixin.generate_batch)
    def generate_batch(
        model: Any,
        inputs: Any,
        generation_config: Any = None,
        *args: Any,
        max_new_tokens: int | None = None,
        **kwargs: Any,
    ) -> Any:
        config = generation_config or model.generation_config
        check_told({name: kwargs[name] for name in kwargs.keys() - OF_GENERATE_BATCH}, inputs, config)
        kept = vars(model).get(KEPT)
        if isinstance(kept, RowManager):
            check_same(within_vocabulary(config, vocabulary_of(model)), kept.generation_config)
        ids = [token_ids(each, vocabulary_of(model)) for each in inputs]
        new = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_length(max_seq_len, max(map(len, ids), default=0), new)
        return type(model).generate_batch(model, ids, generation_config, *args, max_new_tokens=max_new_tokens, **kwargs)

    return generate_batch


def _drop_kept(model: PreTrainedModel) -> None:
    """Has a model forget its persistent manager, which would be the next, too."""
    kept = vars(model).pop(KEPT, None)
    if kept is not None and not kept.is_running():
        kept.destroy()


def _groups(model: PreTrainedModel, kv_dtype: torch.dtype | None) -> list[Group]:
    """The layer groups of a model.

    Raises:
        UnsupportedError: some of its layers do not keep K and V of their own.
    """
    config = model.config.get_text_config()
    try:
        kinds = their_cache.group_layers_by_attn_type(config)
    except ValueError as error:
        raise not_for_rows(model, f"a kind of layer that keeps something else ({error})") from None
    windows = {SLIDING_ATTENTION: config.sliding_window} if SLIDING_ATTENTION in kinds else {}
    return layer_groups(model, kinds, windows, _run_token, kv_dtype)


def _run_token(model: PreTrainedModel, token: torch.Tensor, probe: Probe) -> None:
    """Runs a model on one token, as continuous batching calls it."""
    model(input_ids=token, position_ids=token, cache=probe, use_cache=False, **{OF_BATCH: None})


# ---------------------------------------------------------------------- the six of them


class RowManager(their_api.ContinuousBatchingManager):
    """Takes requests, and runs them on rows."""

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
        self.model, self._weights, self._addresses = model, 0, [0]
        was_training = model.training
        is_told = continuous_batching_config.use_cuda_graph is not None
        try:
            super().__init__(model.eval(), generation_config, config, workload_hints)
            self._allow_decode(config)
            self._compile_layers()
            may_capture = self.groups[0].has_kernels and len(devices_of(self.groups)) == 1
            may_capture = may_capture and (is_told or can_be_captured(model, _run_token))
        except BaseException:
            model.train(was_training)
            ATTENTION.give_back(self.model, self)
            raise
        if not may_capture:
            self.continuous_batching_config.use_cuda_graph = False, False
        if model.device.type == "cuda" and not self.groups[0].has_kernels:
            logger.warning("%s has heads without kernels: torch attends to a request at a time", type(model).__name__)

    def _allow_decode(self, config: Any) -> None:
        """Has decode a path of its own, compiled where `config` says so. transformers has one for its own kernels.

        Raises:
            UnsupportedError: forward passes are to be compiled over several devices, or as they cannot be on rows.
        """
        resolve_compile_configs(config, getattr(self.model.config, "compile_config", None), False, True)
        for each in (config.varlen_compile_config, config.decode_compile_config):
            check_compiling(each)
        is_compiled = config.decode_compile_config or config.varlen_compile_config
        if is_compiled and len(devices_of(self.groups)) > 1:
            raise UnsupportedError("asked for compiled forward passes of a model on several devices; leave one out")
        self._is_compiled = bool(is_compiled)
        self.continuous_batching_config.decode_compile_config = config.decode_compile_config
        self.continuous_batching_config.max_blocks_per_request = 1  # a row

    def _compile_layers(self) -> None:
        if self._is_compiled:
            compile_layers_whole(self.model)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        ATTENTION.borrow(model, self)
        self.groups = _groups(model, self.options.kv_dtype)
        check_pool(self.options.pool, self.groups)

    def start(self) -> None:
        """Starts taking requests: see `ContinuousBatchingManager.start`."""
        if not self.is_running():
            self.switch_to_cb_friendly_attn(self.model)  # it had its own again since `stop`
            self._compile_layers()
            self._weights += 1
            ranks = Ranks(self.distributed_helper)
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
        used = adapters(self.model)
        return self._weights if used is None else (self._weights, used)

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
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
        return super().add_request(ids, request_id, new, *args, **kwargs)

    def cancel_request(self, request_id: str) -> None:
        """Cancels a request: see `ContinuousBatchingManager.cancel_request`. One of this name that is added later is
        another."""
        super().cancel_request(Cancelled(request_id))

    def _create_batch_processor(self) -> Any:
        self._addresses = addresses(self.model)
        made = functools.partial(RowCache, self.options, self.groups, self.weights)
        create = with_names(
            their_api.ContinuousBatchingManager._create_batch_processor,
            PagedAttentionCache=made,
            ContinuousBatchProcessor=RowProcessor,
            FIFOScheduler=SCHEDULERS["fifo"],
            SCHEDULER_MAPPING=SCHEDULERS,
        )
        return create(self)


class Cancelled(str):
    """The name of a request, and when somebody cancelled it."""

    def __init__(self, name: str) -> None:
        self.time = time.perf_counter()


class RowProcessor(their_api.ContinuousBatchProcessor):
    """Makes one forward pass after another."""

    cache: RowCache
    scheduler: RowScheduler
    offloading_manager: RowOffloading

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

    def prepare_next_batch(self) -> bool:
        self._let_go()
        self.scheduler.begin_round()
        try:
            found = bool(super().prepare_next_batch())
        except RuntimeError as error:
            if str(error) != STUCK:
                raise
            found = False
            if self._take_tokens():
                pass  # who has ended with them leaves memory
            elif self.scheduler.keeps_its_memory():
                pass  # others give way, or end
            elif self.cache.admission.others_hold_memory():
                self._give_way()  # it may come yet, and others may wait for ours
            else:
                self._end_first()
        self.cache.idle_memory.note(found or self.has_pending_requests())
        return found

    def update_batch(self) -> None:
        before = set(self.scheduler.active_requests)
        self.scheduler.forget_parents_that_are_gone()
        super().update_batch()
        if not before <= self.scheduler.active_requests.keys():  # some are done
            self.scheduler.end_turn()

    @property
    def _running(self) -> ContinuousBatchingIOs | None:
        """The batch whose tokens nobody has taken yet, where batches are made ahead."""
        batches: Any = self.inputs_and_outputs
        return batches.io_pairs[1 - batches.current_pair].host_io if self.use_async_batching else None

    def _let_go(self) -> None:
        """Has the batch that runs know those no more that are out of it: ended, moved, or to begin anew. transformers
        knows them by name, which another may have by now, and would give that one their next token."""
        running, active = self._running, self.scheduler.active_requests
        if running is None:
            return
        gone = [each for each in running.requests_in_batch if active.get(each.state.request_id) is not each.state]
        if not gone:
            return
        names = {each.state.request_id for each in gone}
        running.req_id_to_new_token_position = {
            f"{name} {GONE.request_id}" if name in names else name: place  # as many: their order says whose a token is
            for name, place in running.req_id_to_new_token_position.items()
        }
        for each in gone:
            each.state = GONE

    def _take_tokens(self) -> bool:
        """Takes the tokens of the batch that runs before another one is made; returns whether there was one."""
        running, batches = self._running, cast(Any, self.inputs_and_outputs)
        if running is None or not running.requests_in_batch:
            return False
        batches.swap_io_pairs()
        self.update_batch()
        batches.swap_io_pairs()
        running.reset()
        return True

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        """Tells who waits for a request that it failed, and who waits for those that were to fork from it."""
        super()._handle_request_error(error, state)
        for name in _children(state):
            child = copy.copy(state)
            child.request_id = name
            self.output_router.fail_and_deliver(child, error)

    def _give_way(self) -> None:
        """Has requests that cannot grow begin anew later, with what is known of them by then."""
        self.scheduler.end_turn()
        for state, _ in self.scheduler.starved_requests:
            again = state.create_equivalent_initial_request()
            state.status = RequestStatus.FINISHED
            self.scheduler.finish_request(state.request_id)
            self.scheduler.add_waiting_request(again)

    def _end_first(self) -> None:
        """Ends the request that is next, for which there is no memory though nobody else has any."""
        scheduler = self.scheduler
        starved = [state for state, _ in scheduler.starved_requests]
        waiting = [scheduler.waiting_requests[name] for name in scheduler.waiting_requests_order]
        state = (starved + waiting)[0]
        tokens = len(state.initial_tokens) + state.generated_len()
        error = self.cache.admission.no_room_for(state.request_id, tokens)
        self._handle_request_error(error, state)
        scheduler.set_request_cancellation(state.request_id)

    def _generation_step(self, model: Any) -> None:
        chosen = model.config._attn_implementation
        if chosen != NAME:
            raise UnsupportedAttentionError(
                f'{type(model).__name__} runs attn_implementation="{chosen}" under a manager whose K and V lie in '
                "rows. Somebody chose it; stop this manager first"
            )
        batches: Any = self.inputs_and_outputs
        batch = batches.io_pairs[batches.current_pair].host_io if self.use_async_batching else batches
        lengths = [request.query_length for request in batch.requests_in_batch]
        if any(lengths):
            self.cache.batch_size, self.cache.max_prompts = len(lengths), sum(length > 1 for length in lengths)
            self.cache.begin_batch([request.state.request_id for request in batch.requests_in_batch])
            super()._generation_step(model)
        else:  # there is nothing to compute before all of them fork
            batches.retrieve_device_outputs()


class RowRunner(ModelRunner):
    """Runs forward passes. transformers pads those of decode to powers of two; here they are padded to closer sizes,
    see `decode_sizes`, of which a warm-up has made graphs or programs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._all_sizes = decode_sizes(cast(int, self.cb_config.max_requests_per_batch))
        self._sizes: list[int] = []
        """Those that a warm-up was for."""
        self._made_up = 0
        """The size of the batch that is made up now; 0: none is."""

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        tokens, read = super().maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)
        if use_decode_fast_path and self.pad_inputs:
            tokens = max(tokens, self._all_sizes[0])
            tokens = self._made_up or min((size for size in self._sizes if size >= num_q_tokens), default=tokens)
        return tokens, read

    def run_one_warmup(self, model: Any, num_q_tokens: int, max_kv_read: int | None) -> float:
        """Warms up a size: see `ModelRunner.run_one_warmup`. With a power of two, of decode, come those that would be
        padded to it otherwise. One request is made up for each, and the others are padding."""
        compiling, took = self.cb_config.decode_compile_config, 0.0
        if max_kv_read is not None or (compiling and compiling.dynamic is False):  # a program for each would be slow
            return float(super().run_one_warmup(model, num_q_tokens, max_kv_read))
        for size in self._all_sizes:
            if super().maybe_pad_inputs(size, 0, True)[0] == num_q_tokens:
                self._made_up = size
                try:
                    seconds = super().run_one_warmup(model, 1, None)
                finally:
                    self._made_up = 0
                if seconds:  # or else it failed
                    self._sizes = sorted({*self._sizes, size})
                    took += seconds
        return took


class RowBatch(ContinuousBatchingIOs):
    """What a forward pass reads, and what it makes."""

    def _get_num_sequences(self, use_padding: bool) -> int:
        """Sequences of a batch, some of them without tokens where it is padded. transformers computes logits of each; a
        batch with prompts has far fewer than it has tokens."""
        most = int(super()._get_num_sequences(use_padding))
        if use_padding and not self.use_block_table:
            return min(-(-self.num_request_in_batch // SEQUENCES) * SEQUENCES, most)
        return most


class RowBatchOnBothSides(HostDeviceIOPair):
    """The same on the host and on the device."""

    def __init__(self, **kwargs: Any) -> None:
        with_names(HostDeviceIOPair.__init__, ContinuousBatchingIOs=RowBatch)(self, **kwargs)


class RowBatchesAhead(ContinuousBatchingAsyncIOs):
    """Two of these: one is prepared while the other runs."""

    def __init__(self, **kwargs: Any) -> None:
        with_names(ContinuousBatchingAsyncIOs.__init__, HostDeviceIOPair=RowBatchOnBothSides)(self, **kwargs)


class RowScheduler(Scheduler):
    """Chooses requests for a forward pass, with one of theirs."""

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

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        """Chooses requests for a batch: see `Scheduler.schedule_batch`. Those that have no tokens in it, since all but
        the last one is known before they fork, are left out where others have some: transformers has room for no more
        requests than tokens, and would look for those of the batch before behind it."""
        batch, is_decode, tokens, read = super().schedule_batch(token_budget, cache_budget)  # type: ignore[safe-super]
        return [each for each in batch or () if each.query_length] or batch, is_decode, tokens, read

    def _get_waiting_candidates(self) -> list[RequestState]:
        if self._turn is not None and self._turn.is_anothers(self):
            return []
        waiting: list[RequestState] = super()._get_waiting_candidates()
        return waiting

    def add_waiting_request(self, state: RequestState) -> None:
        """Lets a request wait.

        Raises:
            ArgumentError: another one of its name, or of one that will fork from it, is not done or will fork. Both
                would write into one row.
        """
        for name in (state.request_id, *_children(state)):
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

    def forget_parents_that_are_gone(self) -> None:
        """Has no request fork that was cancelled, moved, or to begin anew while the batch with it ran: who comes back
        forks then."""
        active = self.active_requests
        self._requests_to_fork = [each for each in self._requests_to_fork if active.get(each.request_id) is each]


def _children(state: RequestState) -> list[str]:
    """Names of the requests that are to fork from one."""
    return [f"{state.request_id}{CHILD}{number}" for number in range(state.num_children)]


SCHEDULERS = {name: type(f"Row{kind.__name__}", (RowScheduler, kind), {}) for name, kind in SCHEDULER_MAPPING.items()}


class RowCache(LeftToAttention, their_cache.PagedAttentionCache):
    """K and V of all requests, in rows.

    Args:
        options: what `enable` was told.
        groups: the layer groups of the model.
        weights: says what K and V depend on beside tokens.
        config, continuous_batching_config, device, distributed_helper, dtype, model_supports_logits_to_keep: as
            transformers gives them.
    """

    def __init__(
        self,
        options: Options,
        groups: list[Group],
        weights: Callable[[], Hashable],
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        dtype: torch.dtype = torch.float16,
        model_supports_logits_to_keep: bool = False,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.stream: Any = None
        """On which forward passes run."""
        self.batch_size = self.max_prompts = continuous_batching_config.max_requests_per_batch or MAX_BATCH_TOKENS
        """Sequences of the next forward pass, and how many of them have more than one new token."""
        self._groups, self._max_seq_len = groups, options.max_seq_len
        ranks = Ranks(distributed_helper)
        self._make_caches(options, continuous_batching_config, ranks)
        self._rows: list[list[int]] | None = None
        """Of the next forward pass, where layers are on several devices: of each request the rows that it has."""
        has_host, reuse = host_bytes(continuous_batching_config) > 0, continuous_batching_config.allow_block_sharing
        self.requests = make_requests(groups, self.kv_caches, ranks, reuse=reuse, has_host=has_host)
        self._tell_sizes(continuous_batching_config)
        self.use_prefix_sharing = self.requests.reuse
        self._check_alike(options, continuous_batching_config, ranks)
        self.admission = Admission(self.requests, ranks, options.max_seq_len, weights)
        self.attention = RowAttention(groups, self.kv_caches)
        self.idle_memory = IdleMemory(options.idle_seconds, self.requests.forget_known)
        self.cache_allocators: dict[str, Any] = {
            name: GroupRows(self.admission, index, name)
            for index, name in enumerate(dict.fromkeys(group.name for group in groups))
        }

    def _make_caches(self, options: Options, config: Any, ranks: Ranks) -> None:
        """Makes the rows of each layer group, which may take as much in every process."""
        limit, requests = functools.partial(budget, config), 2 * config.max_requests_per_batch

        def make() -> int:
            self.kv_caches = make_caches(options, self._groups, limit, requests, host_bytes(config))
            return self.kv_caches[0].pool.limit_pages

        pages = int(ranks.attempt(make)[1])
        pool = self.kv_caches[0].pool
        if options.pool is None and pages < pool.limit_pages:
            pool.set_limit(pages * pool.page_size)

    def _tell_sizes(self, config: Any) -> None:
        """Sets what transformers reads from a cache."""
        self.allow_block_sharing = config.allow_block_sharing
        self.max_batch_tokens = config.max_batch_tokens or MAX_BATCH_TOKENS
        stages = self.requests.stages
        pools = {stage.caches[0].pool: sum(cache.layout.token_bytes for cache in stage.caches) for stage in stages}
        self.num_blocks = min(
            pool.limit_pages * pool.page_size // block_bytes(config, size) for pool, size in pools.items()
        )
        self.max_blocks_per_request, self.max_decode_fast_path_length = 1, self._max_seq_len
        self.max_tokens_read, self.read_cache_limit = 0, None
        self.pool: Any = SimpleNamespace(try_to_free_sectors=_nothing)

    def _check_alike(self, options: Options, config: Any, ranks: Ranks) -> None:
        """Raises `UnsupportedError` where requests look otherwise in other processes, or would be chosen otherwise."""
        ranks.check_alike(
            page_size=self.kv_caches[0].pool.page_size,
            bytes_of_a_token=bytes_of_token(self._groups),
            kv_dtype=options.kv_dtype,
            max_seq_len=self._max_seq_len,
            **{name: getattr(config, name) for name in ALIKE},
        )

    # ------------------------------------------------------------------ admission

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        name, held = state.request_id, state.current_len()
        tokens, is_made_up = held + request_len, name.startswith(WARMUP)
        if is_made_up and tokens > self._max_seq_len:
            return False  # what is made up may be longer than rows are
        if dry_run:
            return self.admission.fits(name, tokens)
        if self.requests.grow_in_place(name, held, tokens):  # most requests of most steps
            return True
        if held and not is_made_up and name not in self.requests and not self.requests.is_away(name):
            raise UnsupportedError(f"request {name} has computed {held} tokens, and nobody has them here")
        with stream_context(self.stream):
            return self.admission.admit(name, held, tokens, expected=len(state.initial_tokens))

    def count_storable_requests(self, list_blocks_needed: list[dict[str, Any]]) -> int:
        return self.admission.count_that_fit(next(iter(needed.values())) for needed in list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        return self.admission.free_pages(relative)

    def evict_cached_blocks(self) -> bool:
        return False  # what is kept gives way by itself

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        with stream_context(self.stream):
            if no_cache:  # it is being offloaded, or started anew
                self.requests.put_away(request_id)
            else:
                self.admission.end(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        with stream_context(self.stream):
            self.admission.end_all()
            if clear_ledgers:
                self.requests.forget_known()

    def reset(self) -> None:
        self.free_all_requests(clear_ledgers=True)

    # ------------------------------------------------------------------ prefixes and forks

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        with stream_context(self.stream):
            return self.admission.begin_known(request_id, prompt_ids)

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        return {"tokens": state.current_len() + request_len} if self.use_prefix_sharing else {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        name, tokens = state.request_id, complete_blocks.get("tokens", 0)
        if self.admission.commits(name, tokens, is_over=state.status == RequestStatus.FINISHED):
            with stream_context(self.stream):
                self.admission.commit(name, tokens, state.initial_tokens + state.generated_tokens)

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: dict[str, Any]
    ) -> list[str]:
        with stream_context(self.stream):
            return self.requests.fork(src_state.request_id, dst_req_ids)

    def perform_cache_copy(self, copy_src_and_dst: dict[str, Any]) -> None:
        pass  # a fork has copied what it does not share

    # ------------------------------------------------------------------ forward passes

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor) -> None:
        rows = self.requests.rows(request_id)[: block_table.shape[0]]
        if block_table.is_cpu:  # each request of each step comes by here
            block_table.numpy()[:, 0] = rows
        else:
            block_table[:, 0] = torch.tensor(rows, dtype=block_table.dtype)

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        for row, indices in zip(self.requests.rows(request_id), write_index):
            indices += [row] * query_length

    def begin_batch(self, names: list[str]) -> None:
        """Takes the requests of the next forward pass. What transformers' tensors hold of rows is for one device."""
        if len(self.requests.stages) > 1:
            self._rows = [self.requests.rows(name) for name in names]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        told: dict[str, Any],
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes K and V of a layer's new tokens, and attends to all of their sequences', see `RowAttention`; `told` is
        what transformers tells a forward pass."""
        packed, window = functools.partial(self._packed, told), told.get("sliding_window")
        return self.attention.attend(
            layer, query, key, value, packed, window=window, scale=scale, softcap=softcap, sinks=sinks
        )

    def _packed(self, told: dict[str, Any], index: int) -> Packed:
        """Where the tokens of a forward pass are, in a layer group. Batches are padded by sequences without tokens."""
        kind, table = self.cache_allocators[self._groups[index].name], told["block_table"]
        cu_seqlens, cu_lengths = told["cu_seq_lens_q"], told["cu_seq_lens_k"][kind.layer_type]
        if table is None:
            cu_seqlens, cu_lengths = cu_seqlens[: self.batch_size + 1], cu_lengths[: self.batch_size + 1]
        lengths = cu_lengths.diff()
        if self._rows is not None:
            rows = lengths.new_tensor([rows[index] for rows in self._rows])
        elif table is not None:
            rows = table[kind.index, :, 0].contiguous()
        else:  # each token has the row of its sequence
            homes = told["write_index"][kind.index]
            rows = homes[cu_seqlens[:-1].clamp(max=homes.shape[0] - 1)].int()
        max_prompts = max(self.max_prompts, 1) if table is None else 0
        return Packed(cu_seqlens, rows, lengths - cu_seqlens.diff(), lengths, max_prompts)


class GroupRows:
    """What transformers asks about a layer group, as of its blocks."""

    write_trash_index = read_trash_index = 0

    def __init__(self, admission: Admission, index: int, layer_type: str) -> None:
        self._admission, self.index, self.layer_type = admission, index, layer_type
        self.block_table: dict[str, list[int]] = {}

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Tokens that a row holds after a forward pass."""
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Pages that a request lacks on each device, in all groups."""
        return self._admission.pages_missing(request_id, past_length + query_length)


class RowOffloading(OffloadingManager):
    """Moves requests to the host, and has them started anew where there is no room."""

    cache: RowCache

    def __init__(self, cpu_offload_space_gib: float | None, **kwargs: Any) -> None:
        super().__init__(cpu_offload_space_gib=0.0, **kwargs)  # rows have a place of their own there

    def _compute_num_cpu_sectors(self, *args: Any) -> int:
        return 0

    def _offload_to_cpu(self, victims: list[RequestState], victim_block_tables: dict[str, Any]) -> set[str]:
        moved = {state.request_id for state in victims if self.cache.requests.is_away(state.request_id)}
        for state in victims:
            state.is_cpu_offloaded = state.request_id in moved
        return moved

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        for future_state in requests_in_batch:
            future_state.state.is_cpu_offloaded = False  # its tokens came back when it was given room

    def free_request_cpu_cache(self, state: RequestState) -> None:
        self.cache.requests.end_away(state.request_id)
        state.is_cpu_offloaded = False


# ---------------------------------------------------------------------- attention


def attend_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: Any = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **told: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention while a model runs on rows.

    Raises:
        UnsupportedAttentionError: it was called otherwise, or is told what is not known here.
    """
    unknown = [name for name in told.keys() - KNOWN if told[name] is not None and told[name] is not False]
    unknown += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    is_in_batch = isinstance(cache, Inside) or (isinstance(cache, RowCache | Probe) and OF_BATCH in told)
    if not is_in_batch or unknown:
        what = f"told its attention {', '.join(unknown)}" if unknown else "called it without a batch of requests"
        raise UnsupportedAttentionError(
            f"{type(module).__name__} {what}, and attention on rows knows none of that; "
            "vmmkv.integrations.continuous_batching.disable(model) leaves the model to transformers"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(cache, Inside):  # its layer was entered, and is not asked for its number: all are one program
        return attend_inside(query, key, value, told.get("sliding_window"), scale, softcap or 0.0, s_aux), None
    return cache.attend(module.layer_idx, query, key, value, told, scale, softcap or 0.0, s_aux), None


def attend_rows_or_go_around(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """`attend_rows`, which the compiler goes around in layers that were not entered."""
    attend = attend_rows if isinstance(kwargs.get("cache"), Inside) else _attend_apart
    return attend(*args, **kwargs)


_attend_apart = torch.compiler.disable(attend_rows)  # type: ignore[no-untyped-call]
AttentionInterface.register(NAME, attend_rows_or_go_around)


def _nothing() -> None:
    """Does nothing: there are no sectors to free."""
