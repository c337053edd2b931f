"""`transformers serve` on rows: its server, in which each model that is batched continuously keeps K and V in rows.

This file is all that knows how that server is made. Some names mean something else for who uses them:

    Serve               GenerationState, which says whether a model is batched      RowState puts it on rows, or refuses
    Serve               build_server, which makes the app                           _build: /metrics, errors as answers
    Serve               ...Handler, which read requests                             RowHandler refuses what is not done
    GenerationState     CBGenerateManager, which hands tokens to clients            RowGenerateManager loses none
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, cast
from weakref import WeakSet

import torch
import typer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving import chat_completion as their_chat
from transformers.cli.serving import completion as their_completion
from transformers.cli.serving import response as their_response
from transformers.cli.serving import server as their_server
from transformers.cli.serving import utils as their_utils
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBWorkerDeadError,
    GenerationState,
    Modality,
    split_model_id,
)

from ..errors import ArgumentError, SequenceTooLongError, StoppedError, UnsupportedError, VmmkvError
from ..layout import kv_dtype_from_name
from ..memory.budget import parse_bytes
from ..metrics import PoolCollector
from ..publication import publish
from . import serving_fields
from .batching import check_version
from .batching.manager import RowManager
from .batching.sampling import sampling, sampling_manager
from .continuous_batching import enable
from .request_checks import check_length
from .serving_requests import RowHandler, UnknownModelError
from .with_names import with_names

HANDLERS = (
    (their_chat, "ChatCompletionHandler", serving_fields.Chat),
    (their_completion, "CompletionHandler", serving_fields.Completion),
    (their_response, "ResponseHandler", serving_fields.Response),
)
"""Where those are that read requests for text, and what these have."""
NAMES = {"GenerationState", "build_server", *(name for _, name, _ in HANDLERS)}
"""What `Serve` imports while it is made, and finds something else."""
OFF = "--no-continuous-batching"
COLLECTIONS = 3
"""How often garbage is collected for a model that was unloaded: one collection does nothing while another thread
collects, or a request that has just been answered still holds the model."""


def serve(
    arguments: list[str],
    *,
    max_bytes: float | str | None = None,
    max_seq_len: int | None = None,
    idle_seconds: float = 10.0,
    kv_dtype: str | None = None,
) -> Serve:
    """Runs the server until it ends, and publishes its pools for `vmmkv top`.

    A model that transformers would batch continuously, but that cannot run on rows, is refused: at once if the server
    is started with it, otherwise when a client asks for it. Models that transformers runs one request at a time are
    served as usual.

    Args:
        arguments: those of `transformers serve`.
        max_bytes: the most that K and V may take; this and the others as in `continuous_batching.enable`.
        max_seq_len: tokens of the longest request.
        idle_seconds: after that long without a request memory goes back.
        kv_dtype: "fp8", "int8", or None, the model's.

    Returns:
        transformers' server: at once if it was told to run in a thread, otherwise when it has ended.

    Raises:
        UnsupportedError: this version of transformers is not supported, or the model that the server is started with
            cannot run on rows.
        ArgumentError: the arguments forbid continuous batching.
        BudgetError: `max_bytes` is no number of bytes.
        DtypeError: there is no such kv_dtype.
    """
    check_version()
    kv_dtype_from_name(kv_dtype)
    if OFF in arguments:
        raise ArgumentError(
            f"got {OFF}; rows are for requests that are batched. Leave it out, or run transformers serve"
        )
    if max_bytes is not None:
        parse_bytes(max_bytes, free=0)
    if moved := NAMES - {*Serve.__init__.__code__.co_names}:
        raise UnsupportedError(f"transformers' Serve does not use {', '.join(sorted(moved))} any more")
    to_rows = functools.partial(
        enable, max_bytes=max_bytes, max_seq_len=max_seq_len, idle_seconds=idle_seconds, kv_dtype=kv_dtype
    )
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    command = typer.main.get_command(app)
    with ExitStack() as stack:
        stack.enter_context(_in_place_of(their_utils, GenerationState=functools.partial(RowState, to_rows)))
        build = functools.partial(_build, their_server.build_server)
        stack.enter_context(_in_place_of(their_server, build_server=build))
        for module, name, fields in HANDLERS:
            handler = type(name, (RowHandler, getattr(module, name)), {"fields": fields})
            stack.enter_context(_in_place_of(module, **{name: handler}))
        made: Serve = command.main(
            ["--continuous-batching", *_device(), *arguments], prog_name="vmmkv serve", standalone_mode=False
        )
    return made


def _device() -> list[str]:
    """Where a model runs if nobody says it: transformers would share its layers out to all GPUs, which would wait for
    each other."""
    return ["--device", "cuda:0"] if torch.cuda.device_count() > 1 else []


@contextmanager
def _in_place_of(module: Any, **names: Any) -> Iterator[None]:
    """Puts other things in the place of a module's."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


class RowState(GenerationState):  # type: ignore[misc, unused-ignore]
    """How requests are run: of models that are batched continuously, on rows."""

    def __init__(self, to_rows: Callable[[PreTrainedModel], None], **options: Any) -> None:
        super().__init__(**options)
        self._to_rows = to_rows
        self._on_rows: WeakSet[PreTrainedModel] = WeakSet()
        self._uncollected = 0
        """How often to collect garbage until a model whose batches have ended is gone."""

    def use_continuous_batching(self, model: PreTrainedModel, modality: Modality) -> bool:
        """Says whether a model is batched continuously, and sees to it that it can be.

        Raises:
            UnsupportedError: it cannot run on rows, or not as the server was told to run models.
        """
        if not super().use_continuous_batching(model, modality):
            return False
        if model not in self._on_rows:
            self._to_rows(model)
            self._try_manager(model)
            self._on_rows.add(model)
        self.leave_all_but([model])
        return True

    def leave_all_but(self, models: Iterable[Any]) -> None:
        """Ends the batches of a model that is none of these, behind its requests. It was unloaded, or has the name of
        another: it would answer for one that was loaded in its place, beside which it would keep its memory."""
        batches = getattr(self._cb_manager, "_cb", None)
        if batches is not None and not any(batches.model is each for each in models):
            self.shutdown()
            del batches
            self._uncollected = COLLECTIONS
        if self._uncollected:
            self._uncollected -= 1
            gc.collect()  # a model on rows holds itself

    def answering(self) -> Any:
        """The model of which somebody waits for an answer, or None."""
        batches = getattr(self._cb_manager, "_cb", None)
        return batches.model if batches is not None and batches.output_router.result_handlers else None

    def warm_up(self, name: str, model: Any) -> None:
        """Makes the batches of a model before anybody asks for it, with graphs of all of them."""
        self.get_manager(name, use_cb=True).warm_up(model)

    def start(self) -> None:
        """Has batches that were made before anybody asked take requests."""
        if self._cb_manager is not None:
            cast(RowGenerateManager, self._cb_manager).start()

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        get = with_names(GenerationState.get_manager, CBGenerateManager=RowGenerateManager)
        return get(self, model_id, use_cb)

    def _try_manager(self, model: Any) -> None:
        """Makes a manager and drops it: so what is refused is refused before the first request."""
        sampling_manager(model, self._cb_config).destroy()


class FailedRequestError(VmmkvError, RuntimeError):
    """A request has ended with an error, though it could be read: for want of memory, or in a forward pass."""


class SampledManager:
    """A manager, as a request that is sampled in its own way sees it."""

    def __init__(self, manager: Any, told: dict[str, Any]) -> None:
        self._manager, self._told = manager, told

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the request, and tells how it is sampled."""
        try:
            return self._manager.add_request(*args, **kwargs, **self._told)
        except StoppedError as error:
            raise CBWorkerDeadError(str(error)) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class StreamedManager(SampledManager):
    """The same, for a request whose answer is streamed: transformers writes an error between quotes as it is."""

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Has somebody told of what becomes of a request, in words that JSON can have between quotes."""

        def tell(output: Any) -> None:
            if output.error is not None:
                output.error = json.dumps(output.error)[1:-1]
            callback(output)

        self._manager.register_result_handler(request_id, tell)


class RowGenerateManager(CBGenerateManager):  # type: ignore[misc, unused-ignore]
    """Hands the tokens of a model to who waits for them. Each request has a name of its own: clients choose
    `x-request-id`, and two may choose the same."""

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Starts the model's batches, which have nothing of the request that is the first. They are not warmed up: that
        takes seconds on a GPU, in which the event loop would answer nobody."""
        if self._cb is None:
            self._cb = sampling_manager(model, self._cb_config)
            self._cb.start()

    def warm_up(self, model: Any) -> None:
        """Makes the model's batches, with all graphs, before there is an event loop."""
        self._cb = sampling_manager(model, self._cb_config)
        self._cb.warmup()

    def start(self) -> None:
        """Starts what was warmed up."""
        cast(RowManager, self._cb).start()

    def stop(self) -> None:
        """Ends the batches: behind answers that take two seconds at most, and the others with an error."""
        super().stop()
        if self._cb is not None and self._cb.is_running():
            self._cb.stop(hard_stop=True)

    def _for_one(self, kind: type[SampledManager], inputs: dict[str, Any], gen_config: Any) -> CBGenerateManager:
        """This, as it is for a request, whose config says from now on how long its answer can be: transformers tells
        clients that an answer of this length was cut off."""
        assert self._cb is not None
        ids, most = inputs["input_ids"], cast(RowManager, self._cb).options.max_seq_len
        if ids:  # or else it is refused
            gen_config.max_new_tokens = check_length(most, len(ids), gen_config.max_new_tokens)
        one = CBGenerateManager(self._cb_config)
        one._cb = cast(Any, kind(self._cb, sampling(self._cb, gen_config)))
        return one

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        """Starts a request. transformers names who is to be told only then, when there may be tokens already: they wait
        in the event loop, behind this call, for whoever is named by its end."""
        assert self._cb is not None
        one, name = self._for_one(StreamedManager, inputs, gen_config), str(uuid.uuid4())
        handlers = self._cb.output_router.result_handlers
        self._cb.register_result_handler(name, lambda output: handlers[name][0](output))
        try:
            return one.generate_streaming(model, processor, inputs, gen_config, name, response_parser)
        except BaseException:
            handlers.pop(name, None)
            raise

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> Any:
        """Waits for the answer to a request.

        Raises:
            FailedRequestError: it ended with an error; transformers would answer with a status alone.
        """
        assert self._cb is not None
        one, name = self._for_one(SampledManager, inputs, gen_config), str(uuid.uuid4())
        try:
            return await one.generate_non_streaming(model, processor, inputs, gen_config, name)
        except Exception as error:
            if isinstance(error, RuntimeError) and not isinstance(error, VmmkvError | CBWorkerDeadError):
                raise FailedRequestError(str(error)) from error
            self._cb.output_router.result_handlers.pop(name, None)  # it was refused, and nobody is told of its end
            raise


def _build(build: Callable[..., FastAPI], models: ModelManager, *handlers: Any, **options: Any) -> FastAPI:
    """Makes the app that `build` makes, and adds what is ours.

    Raises:
        UnsupportedError: the model that is loaded already cannot run on rows.
        BudgetError: nor is there memory for its K and V.
    """
    state: RowState = options["generation_state"]
    for name, loaded in models.loaded_models.items():
        _make_ready(state, name, loaded)
    app = build(models, *handlers, **options)
    for kind in (ArgumentError, SequenceTooLongError, UnsupportedError, FailedRequestError):
        app.add_exception_handler(kind, _refuse)
    registry = CollectorRegistry()
    registry.register(PoolCollector())

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    before = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with before(app) as told:
            minding = asyncio.create_task(_mind_unloading(state, models))
            try:
                state.start()
                yield told
            finally:
                minding.cancel()
                state.shutdown()  # its thread would keep the process alive

    app.router.lifespan_context = lifespan
    publish()
    return app


async def _mind_unloading(state: RowState, models: ModelManager) -> None:
    """Looks after models that are unloaded if nobody asks for them; where none ever is, it does nothing."""
    while models.model_timeout > 0:
        await asyncio.sleep(0.25)  # timeouts are whole seconds
        _leave_unloaded(state, models)  # a function: what it holds of a model is not held while this one sleeps


def _leave_unloaded(state: RowState, models: ModelManager) -> None:
    """Has no model unloaded that still answers, since transformers' timers know of its last request alone; and gives
    back what is left of one that was unloaded, once nobody waits for its answers."""
    answering, loaded = state.answering(), list(models.loaded_models.values())
    there = [getattr(each, "model", None) for each in loaded]  # a thread may be unloading it
    if answering is None:
        state.leave_all_but(there)
    else:
        for each in (each for each, model in zip(loaded, there) if model is answering):
            each.reset_timer()


def _make_ready(state: RowState, name: str, loaded: TimedModel) -> None:
    """Warms up a model that is loaded before anybody asks for it, if it is batched."""
    try:
        modality = ModelManager.get_model_modality(loaded.model, loaded.processor)
    except ValueError:  # it is not for text
        return
    if state.use_continuous_batching(loaded.model, modality):
        state.warm_up(split_model_id(name)[0], loaded.model)  # requests for a file are named by its repository


def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Answers a request that cannot be served, now or later, as OpenAI's server does."""
    status, kind, code = 400, "invalid_request_error", None
    if isinstance(error, UnknownModelError):
        status, code = 404, "model_not_found"
    elif isinstance(error, FailedRequestError):
        status, kind = 500, "server_error"
    told = {"message": str(error), "type": kind, "param": None, "code": code}
    return JSONResponse({"error": told}, status_code=status)
