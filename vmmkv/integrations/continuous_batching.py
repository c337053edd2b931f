"""Rows under transformers' continuous batching: `enable(model)`, then `generate_batch`, `init_continuous_batching` and
`transformers serve` as always.

Scheduler, streaming, logits processors and the server are transformers'; a request is a sequence here. This file is all
that knows how they ask for their cache:

    manager     chooses attention, and makes a processor        RowManager
    processor   makes what offloads                             RowProcessor
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakSet

import torch
import transformers
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging

from ..cache import KVCache
from ..errors import ArgumentError, OutOfPagesError, UnsupportedAttentionError, UnsupportedError
from ..layout import KVLayout
from ..memory.budget import parse_bytes
from ..memory.driver.limits import memory as host_memory
from ..memory.pool import FramePool
from ..space.arena import ADDRESS_LIMIT
from .attention import NOT_ABOUT_ATTENTION, can_attend, kernels_take
from .batch import check_size
from .packed_attention import Packed, attend, can_rotate, write
from .request_checks import check_length, check_positions, check_sampling, token_ids
from .rotation import as_rotated, defer_rotation, restore_rotation, rotation_of
from .row_ranks import RankedRequests, Ranks
from .row_requests import NO_ROOM, RowRequests
from .with_names import with_names

NAME = "vmmkv_rows"
"""What attention is called while a model runs on rows."""
TESTED = ("5.23",)
"""Versions of transformers whose continuous batching is known here."""

try:
    from transformers.generation.continuous_batching import cache as their_cache
    from transformers.generation.continuous_batching import continuous_api as their_api
    from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs, PagedAttentionArgs
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
    from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler
    from transformers.generation.continuous_batching.utils import WorkloadHints, stream_context
except ImportError as error:
    raise UnsupportedError(
        f"transformers {transformers.__version__} has no continuous batching that is known here ({error}); "
        f"install one of {', '.join(TESTED)}"
    ) from error

MAX_BATCH_TOKENS = 8192
"""Of one forward pass, as transformers has it where it is told nothing."""
WARMUP = "__warmup_"
"""What names of requests begin with that are made up, before there are any, and hold what was never computed."""
MANY_TOKENS = 1 << 40
"""More than a forward pass can read: attention reads rows, not copies of them."""
STUCK = "No requests can be scheduled and no requests can be offloaded."
"""What transformers says where nobody can go on for want of memory."""
KEPT = "_cached_continuous_batching_manager"
"""Where transformers keeps a persistent manager."""
CHILD = "__child#"
"""In names of requests that fork from one: between its own and a number."""

logger = logging.get_logger(__name__)

GONE = RequestState("__gone__", [], _status=RequestStatus.FINISHED)
"""In the place of a request that has ended while a batch with it runs."""

KNOWN = {*PagedAttentionArgs.__annotations__, *NOT_ABOUT_ATTENTION, "sliding_window", "logits_to_keep"}
"""Keywords of attention that are heeded, or mean nothing to it."""


@dataclass(frozen=True)
class Options:
    """What `enable` was told."""

    max_bytes: float | str | None
    pool: FramePool | None
    max_seq_len: int
    idle_seconds: float


def enable(
    model: PreTrainedModel,
    *,
    max_bytes: float | str | None = None,
    pool: FramePool | None = None,
    max_seq_len: int | None = None,
    idle_seconds: float = 10.0,
) -> None:
    """Has a model's continuous batching keep K and V in rows, from the next manager on.

    Of a `ContinuousBatchingConfig` these mean something else then: `cpu_offload_space` is taken when sequences go
    there, and `allow_block_sharing` shares pages. `page_size` and `num_blocks` are a budget of so many tokens, which
    `max_bytes` overrides; `max_memory_percent` is of the memory that is free. Refused are compiled forward passes, and
    CUDA graphs of those that hold prompts.

    Args:
        model: a decoder whose layers attend to all tokens, or to a window.
        max_bytes: the most that K and V may take: bytes, `"20GiB"`, or a share of the memory that is free. None is what
            the `ContinuousBatchingConfig` says, 80 % where it says nothing.
        pool: to lie on, with other models, instead of a limit.
        max_seq_len: tokens of the longest request, new ones included. Addresses only. None is the model's
            `max_position_embeddings`.
        idle_seconds: after so long without a request memory goes back to the system, and what is known with it.

    Raises:
        UnsupportedError: continuous batching of this version of transformers is not known here, or the model cannot
            run on rows.
        ArgumentError: there is no `max_seq_len`, or one that is no number, or a limit beside a pool.
        BudgetError, LayoutError: a number that cannot be.
    """
    check_version()
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            f"got {type(model).__name__}; give the PreTrainedModel inside, whose generate_batch it calls"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _not_for_rows(model, "no position_ids, so that it cannot tell requests apart that lie in one batch")
    if not can_attend(model):
        raise _not_for_rows(model, "an attention of its own, or does more with masks, K or V than to hand them to it")
    if _is_split_by_layers(model):
        raise _not_for_rows(model, "layers on several devices, and rows lie on one; tensor parallelism splits heads")
    if pool is not None and max_bytes is not None:
        raise ArgumentError(f"got max_bytes={max_bytes!r} beside a pool, which has a limit; give it to the FramePool")
    if max_bytes is not None:
        parse_bytes(max_bytes, free=0)
    if not idle_seconds >= 0:
        raise ArgumentError(f"got idle_seconds={idle_seconds!r}; it must be 0 or more, or infinity for never")
    if max_seq_len is None:
        max_seq_len = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_seq_len is None:
        raise ArgumentError("got no max_seq_len, and the model's config names no max_position_embeddings; give one")
    options = Options(max_bytes, pool, check_size("max_seq_len", max_seq_len), idle_seconds)
    check_positions(model, options.max_seq_len)
    manager = type("RowManager", (RowManager,), {"options": options})
    begin = with_names(
        inspect.unwrap(their_api.ContinuousMixin.init_continuous_batching), ContinuousBatchingManager=manager
    )
    _drop_kept(model)
    vars(model)["init_continuous_batching"] = MethodType(torch.no_grad()(begin), model)
    defer_rotation(model, RowCache)


def disable(model: PreTrainedModel) -> None:
    """Has a model's continuous batching keep K and V in blocks again, from the next manager on."""
    if isinstance(vars(model).get(KEPT), RowManager):
        _drop_kept(model)
    vars(model).pop("init_continuous_batching", None)
    restore_rotation(model)


def _drop_kept(model: PreTrainedModel) -> None:
    """Has a model forget its persistent manager, which would be the next, too."""
    kept = vars(model).pop(KEPT, None)
    if kept is not None and not kept.is_running():
        kept.destroy()


def _is_split_by_layers(model: PreTrainedModel) -> bool:
    """Whether layers run on several devices: of this process (`device_map`), or of others (pipeline parallelism)."""
    placed = {place for place in getattr(model, "hf_device_map", {}).values() if place not in ("cpu", "disk")}
    parallel = getattr(model.config, "distributed_config", None)
    return len(placed) > 1 or (getattr(parallel, "pp_size", None) or 1) > 1


def check_version() -> None:
    """Raises `UnsupportedError` where continuous batching is not what is known here."""
    if not transformers.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        raise UnsupportedError(
            f"transformers {transformers.__version__} is not among the versions whose continuous batching is known "
            f"here: {', '.join(TESTED)}. Install one of these, or a later vmmkv"
        )


# ---------------------------------------------------------------------- what is kept of a token


class Group(NamedTuple):
    """Layers that attend to as many tokens: their numbers, the window (0: all), what they keep of a token, and whether
    there are kernels for all layers of the model."""

    name: str
    layers: list[int]
    window: int
    layout: KVLayout
    has_kernels: bool


class Probe:
    """In the place of a cache: learns what layers keep of a token."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        """By layer: KV heads, the width of K, and of V."""
        self.dtypes: set[torch.dtype] = set()
        self.has_kernels = True
        """Whether there are kernels for all layers."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
        """Takes a layer's K and V, `[1, heads, tokens, head_dim]`; attends to nothing."""
        self.shapes[layer] = key.shape[1], key.shape[3], value.shape[3]
        self.dtypes |= {key.dtype, value.dtype}
        self.has_kernels &= kernels_take(key, value)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _groups(model: PreTrainedModel) -> list[Group]:
    """The layer groups of a model, by what it hands to attention for one token, as continuous batching calls it.

    Raises:
        UnsupportedError: its layers do not all keep K and V of their own, of one dtype.
    """
    config, probe = model.config.get_text_config(), Probe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        kinds = their_cache.group_layers_by_attn_type(config)
    except ValueError as error:
        raise _not_for_rows(model, f"a kind of layer that keeps something else ({error})") from None
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):  # as in the thread that runs the model
        model(input_ids=token, position_ids=token, cache=probe, use_cache=False)
    if sorted(probe.shapes) != sorted(layer for layers in kinds.values() for layer in layers) or len(probe.dtypes) > 1:
        raise _not_for_rows(model, f"{config.num_hidden_layers} layers, of which not all keep K and V of one dtype")
    (dtype,) = probe.dtypes
    groups = []
    for name, layers in kinds.items():
        heads, k_widths, v_widths = zip(*(probe.shapes[layer] for layer in layers))
        layout = KVLayout(len(layers), heads, k_widths, dtype, v_widths)
        window = config.sliding_window if name == SLIDING_ATTENTION else 0
        groups.append(Group(name, list(layers), window, layout, probe.has_kernels))
    return groups


def _can_be_captured(model: PreTrainedModel) -> bool:
    """Whether a forward pass can be a CUDA graph: some choose experts on the host."""
    if model.device.type != "cuda":
        return False
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            model(input_ids=token, position_ids=token, cache=Probe(), use_cache=False)
    except RuntimeError as error:
        logger.warning("%s runs without CUDA graphs: %s", type(model).__name__, error)
        return False
    return True


def _not_for_rows(model: PreTrainedModel, what: str) -> UnsupportedError:
    """Why a model cannot run on rows."""
    return UnsupportedError(
        f"{type(model).__name__} has {what}; vmmkv.integrations.continuous_batching.disable(model), or transformers "
        "serve instead of vmmkv serve, leaves it to transformers"
    )


# ---------------------------------------------------------------------- the five of them


class RowManager(their_api.ContinuousBatchingManager):
    """Takes requests, and runs them on rows."""

    options: Options
    started: ClassVar[WeakSet[RowManager]] = WeakSet()

    def __init__(
        self, model: Any, continuous_batching_config: Any, workload_hints: WorkloadHints | None = None, **kwargs: Any
    ) -> None:
        config = _with_defaults(continuous_batching_config, model.device)
        if workload_hints is not None:  # now, since `generate_batch` has no results where a request is refused later
            check_length(
                self.options.max_seq_len, workload_hints.max_prompt_length, workload_hints.max_generated_length
            )
        self._weights, self._addresses = 0, [0]
        before, was_training = model.config._attn_implementation, model.training
        is_told = continuous_batching_config.use_cuda_graph is not None
        try:
            super().__init__(
                model=model.eval(), continuous_batching_config=config, workload_hints=workload_hints, **kwargs
            )
            may_capture = self.groups[0].has_kernels and (is_told or _can_be_captured(model))
        except BaseException:
            model.train(was_training).set_attn_implementation(before)
            raise
        self.continuous_batching_config.max_blocks_per_request = 1  # a row; their own kernels need not be there
        if not may_capture:
            self.continuous_batching_config.use_cuda_graph = False, False
        if model.device.type == "cuda" and not self.groups[0].has_kernels:
            logger.warning("%s has heads without kernels: torch attends to a request at a time", type(model).__name__)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        before = model.config._attn_implementation
        if before != NAME:
            model.set_attn_implementation(NAME)
            self._original_attn_impl = before
        self.groups = _groups(model)

    def start(self) -> None:
        """Starts taking requests: see `ContinuousBatchingManager.start`."""
        if not self.is_running():
            self.switch_to_cb_friendly_attn(self.model)  # it had its own again since `stop`
            self._weights += 1
            ranks = Ranks(self.distributed_helper)
            if self.batch_processor is not None and not ranks.least(self._addresses == _addresses(self.model)):
                self.batch_processor = None  # graphs read weights where they were, and K and V may be of another dtype
        self.started.add(self)
        super().start()

    def warmup(self) -> None:
        """Runs made-up batches: see `ContinuousBatchingManager.warmup`."""
        try:
            with torch.inference_mode(False):  # what is made here, a thread that is not in this mode writes to
                super().warmup()
        except BaseException:
            self._give_attention_back()
            raise

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stops: see `ContinuousBatchingManager.stop`."""
        self._hand_attention_on()
        super().stop(*args, **kwargs)
        self._give_attention_back()

    def destroy(self) -> None:
        """Ends it: see `ContinuousBatchingManager.destroy`."""
        super().destroy()
        self._give_attention_back()

    def _hand_attention_on(self) -> None:
        """Leaves it to another manager that runs the model, if there is one, to have it attend as before."""
        for other in self.started:
            if other is not self and other.model is self.model and other.is_running() and self._original_attn_impl:
                other._original_attn_impl, self._original_attn_impl = self._original_attn_impl, None

    def _give_attention_back(self) -> None:
        """Has the model attend as before, also where there was nothing to stop."""
        self._hand_attention_on()
        if self._original_attn_impl is not None and not self.is_running():
            self.model.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None

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
        model: Any = self.model
        if not hasattr(model, "peft_config"):
            return self._weights
        tuned = [each for each in model.modules() if isinstance(getattr(each, "active_adapters", None), list)]
        return self._weights, frozenset((each.disable_adapters, *each.active_adapters) for each in tuned)

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
            ArgumentError: it has no tokens, or some that the model does not know; or a name or a number for sampling
                that would end all requests.
        """
        vocabulary = getattr(self.model.config.get_text_config(), "vocab_size", None)
        ids = token_ids(input_ids, vocabulary)
        if not isinstance(request_id, Hashable):
            raise ArgumentError(f"got request_id={request_id!r}; give a name")
        check_sampling(vocabulary, kwargs.get("temperature"), kwargs.get("top_k"))
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        room = check_length(self.options.max_seq_len, len(ids), 1 if new is None else new)
        return super().add_request(ids, request_id, room if new is None else new, *args, **kwargs)

    def _create_batch_processor(self) -> Any:
        self._addresses = _addresses(self.model)
        made = functools.partial(RowCache, self.options, self.groups, self.weights)
        create = with_names(
            their_api.ContinuousBatchingManager._create_batch_processor,
            PagedAttentionCache=made,
            ContinuousBatchProcessor=RowProcessor,
            FIFOScheduler=SCHEDULERS["fifo"],
            SCHEDULER_MAPPING=SCHEDULERS,
        )
        return create(self)


def _addresses(model: torch.nn.Module) -> list[int]:
    """Where the weights of a model are."""
    return [each.data_ptr() for each in (*model.parameters(), *model.buffers())]


def _with_defaults(config: Any, device: torch.device) -> Any:
    """A `ContinuousBatchingConfig` for rows.

    Raises:
        UnsupportedError: it asks for what cannot be done on them.
    """
    config = copy.deepcopy(config)
    if config.default_compile_level or config.varlen_compile_config or config.decode_compile_config:
        raise UnsupportedError("asked for compiled forward passes; on rows CUDA graphs run what is not compiled")
    if config.use_cuda_graph is True or (isinstance(config.use_cuda_graph, tuple) and config.use_cuda_graph[0]):
        raise UnsupportedError(
            "asked for CUDA graphs of forward passes with prompts; give use_cuda_graph=(False, True), for decode, and "
            "vmmkv serve no --cb-use-cuda-graph"
        )
    on_gpu = device.type == "cuda"
    if config.use_cuda_graph is None:
        config.use_cuda_graph = (False, on_gpu)
    if config.use_async_batching is None:
        config.use_async_batching = on_gpu
    if config.max_memory_percent is None:
        config.max_memory_percent = 0.8
    return config


class RowProcessor(their_api.ContinuousBatchProcessor):
    """Makes one forward pass after another."""

    cache: RowCache
    scheduler: RowScheduler
    offloading_manager: RowOffloading

    def __init__(self, **kwargs: Any) -> None:
        begin = with_names(their_api.ContinuousBatchProcessor.__init__, OffloadingManager=RowOffloading)
        begin(self, **kwargs)
        self.scheduler.handlers = self.output_router.result_handlers
        self.cache.stream = self.inputs_and_outputs.compute_stream
        self.cache.max_tokens_read = MANY_TOKENS  # only now: buffers were made of so many

    def prepare_next_batch(self) -> bool:
        self._let_go()
        try:
            found = bool(super().prepare_next_batch())
        except RuntimeError as error:
            if str(error) != STUCK:
                raise
            found = False
            if self._take_tokens():
                pass  # who has ended with them leaves memory
            elif self.cache.others_hold_memory():
                self._give_way()  # it may come yet, and others may wait for ours
            else:
                self._end_first()
        self.cache.note_work(found or self.has_pending_requests())
        return found

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
        needed, pool = self.cache.requests.pages_of(tokens), self.cache.kv_caches[0].pool
        error = OutOfPagesError(
            f"asked for {needed} pages, of {tokens} tokens, for request {state.request_id} alone; the limit is "
            f"{pool.limit} pages. A larger max_bytes helps",
            requested=needed,
            available=pool.limit,
        )
        self._handle_request_error(error, state)
        scheduler.set_request_cancellation(state.request_id)

    def _generation_step(self, model: Any) -> None:
        chosen = model.config._attn_implementation
        if chosen != NAME:
            raise UnsupportedAttentionError(
                f'{type(model).__name__} runs attn_implementation="{chosen}" under a manager whose K and V lie in '
                "rows. Another manager of this model has stopped, or somebody chose it; stop this one first"
            )
        batches: Any = self.inputs_and_outputs
        batch = batches.io_pairs[batches.current_pair].host_io if self.use_async_batching else batches
        lengths = [request.query_length for request in batch.requests_in_batch]
        if any(lengths):
            self.cache.batch_size, self.cache.max_prompts = len(lengths), sum(length > 1 for length in lengths)
            super()._generation_step(model)
        else:  # there is nothing to compute before all of them fork
            batches.retrieve_device_outputs()


class RowScheduler(Scheduler):
    """Chooses requests for a forward pass, with one of theirs."""

    handlers: dict[str, Any]
    """By request: who is told of what becomes of it."""

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

    def _request(self, name: str) -> RequestState | None:
        """The request of a name that is not done, if there is one."""
        return self.active_requests.get(name) or self.waiting_requests.get(name)

    def clear_cancelled_requests(self) -> list[RequestState]:
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        for state in cancelled:  # nobody is told of its end, nor of what a batch that runs has for it
            state.status = RequestStatus.FINISHED
            self.handlers.pop(state.request_id, None)
        if not self.active_requests:
            self.block_new_requests = False  # until one finishes, and there is none
        return cancelled


def _children(state: RequestState) -> list[str]:
    """Names of the requests that are to fork from one."""
    return [f"{state.request_id}{CHILD}{number}" for number in range(state.num_children)]


SCHEDULERS = {name: type(f"Row{kind.__name__}", (RowScheduler, kind), {}) for name, kind in SCHEDULER_MAPPING.items()}


class RowCache(their_cache.PagedAttentionCache):
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
        self._options, self._groups, self._weights = options, groups, weights
        self._idle_since: float | None = None
        self._ranks = Ranks(distributed_helper)
        host_bytes = _host_bytes(continuous_batching_config)
        make_rows = functools.partial(self._make_rows, continuous_batching_config, host_bytes)
        pages = int(self._ranks.attempt(make_rows)[1])
        pool = self.kv_caches[0].pool
        if options.pool is None and pages < pool.limit:
            pool.set_limit(pages * pool.page_size)
        self.allow_block_sharing = continuous_batching_config.allow_block_sharing
        windows = [group.window for group in groups]
        make_requests = functools.partial(RankedRequests, self._ranks) if self._ranks.size > 1 else RowRequests
        self.requests = make_requests(
            self.kv_caches, windows, reuse=self.allow_block_sharing, has_host=bool(host_bytes)
        )
        self.use_prefix_sharing = self.requests.reuse
        self._ranks.check_alike("bytes of a page", pool.page_size)
        self._ranks.check_alike("bytes of a token", _token_bytes(groups))
        self._ranks.check_alike("tokens of a row", options.max_seq_len)
        self._ranks.check_alike("whether blocks are shared", self.use_prefix_sharing)
        self.max_batch_tokens = continuous_batching_config.max_batch_tokens or MAX_BATCH_TOKENS
        self.num_blocks = pages * pool.page_size // _block_bytes(continuous_batching_config, groups)
        self.max_blocks_per_request, self.max_decode_fast_path_length = 1, options.max_seq_len
        self.max_tokens_read, self.read_cache_limit = 0, None
        self.pool: Any = SimpleNamespace(try_to_free_sectors=_nothing)
        self.cache_allocators: dict[str, Any] = {
            group.name: GroupRows(self.requests, index, group.name) for index, group in enumerate(groups)
        }
        self._places = {
            layer: (index, *self.kv_caches[index].kv(number))
            for index, group in enumerate(groups)
            for number, layer in enumerate(group.layers)
        }
        """By layer: its group, and K and V in rows."""
        self._batches: dict[int, Packed] = {}
        """By group: where the tokens of the current forward pass are."""
        self._committed: dict[str, int] = {}
        """By request: tokens that others may begin with."""

    def _make_rows(self, config: Any, host_bytes: int) -> int:
        """Makes the rows of each layer group; returns the pages that they may take."""
        options, groups = self._options, self._groups
        pool = options.pool or FramePool(_budget(options, config, groups), device=self.device)
        rows = _num_rows(options, groups, 2 * config.max_requests_per_batch)
        self.kv_caches = [
            KVCache(
                group.layout,
                rows,
                options.max_seq_len,
                pool=pool,
                large_frames=not group.window,
                host_bytes=host_bytes * group.layout.token_bytes // _token_bytes(groups),
                host_priority=None if any(each.window for each in groups) else 30,
            )
            for group in groups
        ]
        return pool.limit

    # ------------------------------------------------------------------ admission

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        name, held = state.request_id, state.current_len()
        tokens = held + request_len
        if name.startswith(WARMUP) and tokens > self._options.max_seq_len:
            return False  # what is made up may be longer than rows are
        if dry_run:
            fits = self.requests.pages_missing(name, tokens) <= self._ranks.least(self.requests.available_pages)
            return fits and tokens <= self._options.max_seq_len
        if self.requests.grow_in_place(name, held, tokens):  # most requests of most steps
            return True
        with stream_context(self.stream):
            is_new = name not in self.requests and not self.requests.is_away(name)
            if is_new and held and not name.startswith(WARMUP):
                raise UnsupportedError(f"request {name} has computed {held} tokens, and nobody has them here")
            has_room = (not is_new or self._begin(name, len(state.initial_tokens))) and self.requests.make_room(
                name, held, tokens
            )
            if not has_room and not held:
                self.requests.end(name)
            return has_room

    def _begin(self, name: str, expected: int, token_ids: list[int] | None = None) -> bool:
        """Starts a request; returns whether there is a row for it."""
        with suppress(*NO_ROOM):
            self._committed[name] = self.requests.begin(name, expected, token_ids, self._weights())
            return True
        return False

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        left = self._ranks.least(self.requests.available_pages)
        for count, needed in enumerate(list_blocks_needed):
            left -= sum(needed.values())
            if left < 0:
                return count
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        pages, pool = self.requests.available_pages, self.kv_caches[0].pool
        return self._ranks.least(pages / pool.limit if relative else pages * pool.page_size)

    def others_hold_memory(self) -> bool:
        """Whether others on the pool, in any process, use some of it."""
        stats = self.kv_caches[0].pool.stats()
        used = sum(cache.stats().pages["used"] for cache in self.kv_caches) * self.kv_caches[0].page_size
        return self._ranks.least(-max(stats.used_bytes - used, stats.leased_bytes)) < 0

    def evict_cached_blocks(self) -> bool:
        return False  # what is kept gives way by itself

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        with stream_context(self.stream):
            if no_cache:  # it is being offloaded, or started anew
                self.requests.put_away(request_id)
            else:
                self.requests.end(request_id)
                self._committed.pop(request_id, None)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        with stream_context(self.stream):
            self.requests.end_all()
            if clear_ledgers:
                self.requests.forget_known()

    def reset(self) -> None:
        self.free_all_requests(clear_ledgers=True)

    def note_work(self, is_busy: bool) -> None:
        """Gives memory back once nobody has asked for anything for a while."""
        if is_busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since > self._options.idle_seconds:
            self._idle_since = float("inf")
            self.requests.forget_known()

    # ------------------------------------------------------------------ prefixes and forks

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        with stream_context(self.stream):
            self.requests.end(request_id)  # from a step in which there was no room
            return self._committed[request_id] if self._begin(request_id, len(prompt_ids), prompt_ids) else 0

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        return {"tokens": state.current_len() + request_len} if self.use_prefix_sharing else {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        name, tokens = state.request_id, complete_blocks.get("tokens", 0)
        if name not in self.requests:
            return
        is_over = state.status == RequestStatus.FINISHED
        if is_over or self.requests.fills_pages(self._committed.get(name, 0), tokens):
            with stream_context(self.stream):
                self.requests.commit(name, (state.initial_tokens + state.generated_tokens)[:tokens])
            self._committed[name] = tokens

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: dict[str, Any]
    ) -> list[str]:
        with stream_context(self.stream):
            return self.requests.fork(src_state.request_id, dst_req_ids)

    def perform_cache_copy(self, copy_src_and_dst: dict[str, Any]) -> None:
        pass  # a fork has copied what it does not share

    # ------------------------------------------------------------------ forward passes

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor) -> None:
        rows = self.requests.rows(request_id)
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

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedAttentionError(f'K and V in rows are read by attn_implementation="{NAME}" alone')

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
        """Writes K and V of a layer's new tokens, and attends to all of their sequences'. All are `[1, heads, tokens,
        head_dim]`; `told` is what transformers tells a forward pass. Queries and keys may be `Unrotated`."""
        index, k, v = self._places[layer]
        group = self._groups[index]
        window = told.get("sliding_window")
        if window is not None and window != group.window:
            raise UnsupportedAttentionError(
                f"layer {layer} attends to {window} tokens, and its config says {group.window or 'all'} of them"
            )
        if layer == group.layers[0]:
            self._batches[index] = _packed(index, group.name, told, self.batch_size, self.max_prompts)
        batch = self._batches[index]
        rotation, angles = rotation_of(query, key), None
        if rotation is not None and can_rotate(rotation, value):
            query, key, angles = rotation.query, rotation.key, (rotation.cos.squeeze(0), rotation.sin.squeeze(0))
        query, key, value = (as_rotated(each).squeeze(0).transpose(0, 1) for each in (query, key, value))
        query = write(query, key, value, k, v, batch, angles)
        output = attend(query, k, v, batch, scale=scale, window=group.window, softcap=softcap, sinks=sinks)
        return output.unsqueeze(0)


class GroupRows:
    """What transformers asks about a layer group, as of its blocks."""

    write_trash_index = read_trash_index = 0

    def __init__(self, requests: RowRequests, index: int, layer_type: str) -> None:
        self._requests, self.index, self.layer_type = requests, index, layer_type
        self.block_table: dict[str, list[int]] = {}

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Tokens that a row holds after a forward pass."""
        return past_length + query_length

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Pages that a request lacks, in all groups: the first one says it for all."""
        return 0 if self.index else self._requests.pages_missing(request_id, past_length + query_length)


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


def _packed(index: int, name: str, told: dict[str, Any], batch_size: int, max_prompts: int) -> Packed:
    """Where the tokens of a forward pass are, in a layer group. Batches are padded by sequences without tokens."""
    cu_seqlens, cu_lengths = told["cu_seq_lens_q"], told["cu_seq_lens_k"][name]
    if told["block_table"] is None:
        cu_seqlens, cu_lengths = cu_seqlens[: batch_size + 1], cu_lengths[: batch_size + 1]
    lengths = cu_lengths.diff()
    starts = lengths - cu_seqlens.diff()
    if told["block_table"] is not None:
        return Packed(cu_seqlens, told["block_table"][index, :, 0].contiguous(), starts, lengths, max_prompts=0)
    homes = told["write_index"][index]
    rows = homes[cu_seqlens[:-1].clamp(max=homes.shape[0] - 1)].int()
    return Packed(cu_seqlens, rows, starts, lengths, max_prompts=max(max_prompts, 1))


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
    unknown = [name for name, value in told.items() if name not in KNOWN and not (value is None or value is False)]
    unknown += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    if not isinstance(cache, RowCache | Probe) or unknown:
        what = f"told its attention {', '.join(unknown)}" if unknown else "called it without a batch of requests"
        raise UnsupportedAttentionError(
            f"{type(module).__name__} {what}, and attention on rows knows none of that; "
            "vmmkv.integrations.continuous_batching.disable(model) leaves the model to transformers"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(module.layer_idx, query, key, value, told, scale, softcap or 0.0, s_aux), None


AttentionInterface.register(NAME, attend_rows)


# ---------------------------------------------------------------------- sizes


def _budget(options: Options, config: Any, groups: list[Group]) -> float | str:
    """The most that K and V may take."""
    if options.max_bytes is not None:
        return options.max_bytes
    if config.num_blocks is not None:
        return int(config.num_blocks * _block_bytes(config, groups))
    return f"{100 * config.max_memory_percent:g}%"


def _block_bytes(config: Any, groups: list[Group]) -> int:
    """Of one of transformers' blocks, of all layers."""
    return int(config.page_size * _token_bytes(groups))


def _token_bytes(groups: list[Group]) -> int:
    """Of a token, in all layers."""
    return sum(group.layout.token_bytes for group in groups)


def _host_bytes(config: Any) -> int:
    """What may be moved to the host."""
    if config.cpu_offload_space is None:
        _, total = host_memory()
        return int(config.cpu_offload_space_safety_threshold * total)
    return int(config.cpu_offload_space * 2**30)


def _num_rows(options: Options, groups: list[Group], wanted: int) -> int:
    """How many rows each group has: as many as are wanted, or as there are addresses for."""
    row_bytes = options.max_seq_len * _token_bytes(groups)
    return max(min(wanted, ADDRESS_LIMIT // 2 // row_bytes), 1)


def _nothing() -> None:
    """Does nothing: there are no sectors to free."""
