"""`transformers serve` on rows: its server, in which each model that is batched continuously keeps K and V in rows.

This file is all that knows how that server is made. Some names mean something else for who uses them:

    Serve               GenerationState, which says whether a model is batched      RowState puts it on rows, or refuses
    Serve               build_server, which makes the app                           _build: /metrics, errors as answers
    Serve               ...Handler, which read requests                             RowHandler refuses what is not done
    Serve               ModelManager, which loads models                            RowModelManager loads its one alone
    Serve               uvicorn's Config and Server, which end it                   within a few seconds
    GenerationState     CBGenerateManager, which hands tokens to clients            RowGenerateManager loses none
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

import anyio
import torch
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving import chat_completion as their_chat
from transformers.cli.serving import completion as their_completion
from transformers.cli.serving import model_manager as their_models
from transformers.cli.serving import response as their_response
from transformers.cli.serving import server as their_server
from transformers.cli.serving import utils as their_utils
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.utils import GenerationState, Modality, split_model_id

from ..budget import parse_bytes
from ..errors import ArgumentError, BudgetError, SequenceTooLongError, UnsupportedError
from ..layout import kv_dtype_from_name
from ..metrics import PoolCollector
from ..publication import publish
from . import serving_fields
from .batching import check_version
from .batching.manager import RowManager
from .batching.sampling import sampling_manager
from .continuous_batching import enable
from .serving_gate import UPLOAD, RequestGate, bytes_for, error_body
from .serving_managers import FailedRequestError, LaterManager, RowGenerateManager
from .serving_models import RowModelManager, UnknownModelError, split_name
from .serving_requests import RowHandler
from .with_names import with_names

logger = logging.getLogger(__name__)

HANDLERS = (
    (their_chat, "ChatCompletionHandler", serving_fields.Chat),
    (their_completion, "CompletionHandler", serving_fields.Completion),
    (their_response, "ResponseHandler", serving_fields.Response),
)
"""Where those are that read requests for text, and what these have."""
NAMES = {"GenerationState", "ModelManager", "build_server", "uvicorn", *(name for _, name, _ in HANDLERS)}
"""What `Serve` imports while it is made, and finds something else."""
OFF = "--no-continuous-batching"
USUAL_TOKENS = 131_072
"""Tokens of a row by which bodies are limited where neither a model nor an option says how many there are."""
READERS = 2
"""Requests that are read at a time: to tokenize a text may take 200 times its memory."""
COLLECTIONS = 20
"""Attempts to collect a model that was unloaded, four a second: something else may hold it for ever."""
END_SECONDS = 2
"""How long answers may go on when the server is told to end. A manager that stops waits as long."""


def serve(
    arguments: list[str],
    *,
    max_bytes: float | str | None = None,
    max_seq_len: int | None = None,
    idle_seconds: float = 10.0,
    kv_dtype: str | None = None,
    max_request_bytes: float | str | None = None,
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
        max_request_bytes: the largest body of a request. None: 32 bytes for each token of a row, and 64 KiB; if the
            model has no rows, 32 MiB.

    Returns:
        transformers' server: at once if it was told to run in a thread, otherwise when it has ended.

    Raises:
        UnsupportedError: this version of transformers is not supported, or the model that the server is started with
            cannot run on rows.
        ArgumentError: the arguments forbid continuous batching, or there is no such model.
        BudgetError: `max_bytes` or `max_request_bytes` is no number of bytes.
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
    body_bytes = None if max_request_bytes is None else parse_bytes(max_request_bytes, free=0)
    if body_bytes == 0:  # a share of nothing is nothing, too
        raise BudgetError(f"asked for max_request_bytes={max_request_bytes!r}; give a number of bytes, such as '1MiB'")
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
        stack.enter_context(_in_place_of(their_models, ModelManager=RowModelManager))
        ends_soon = functools.partial(uvicorn.Config, timeout_graceful_shutdown=END_SECONDS)
        stack.enter_context(_in_place_of(uvicorn, Config=ends_soon, Server=EndingServer))
        limit = functools.partial(_limit, body_bytes, max_seq_len)
        make_app = with_names(their_server.build_server, split_model_id=split_name)
        build = functools.partial(_build, make_app, limit)
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


class EndingServer(uvicorn.Server):
    """A server that ends a few seconds after the first signal, and passes over others: uvicorn would leave the app as
    it is, and print tracebacks of what is cut off."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)


class RowState(GenerationState):  # type: ignore[misc, unused-ignore]
    """How requests are run: of models that are batched continuously, on rows."""

    def __init__(self, to_rows: Callable[[PreTrainedModel], None], **options: Any) -> None:
        super().__init__(**options)
        self._to_rows = to_rows
        self._row_tokens: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
        self.readers = anyio.CapacityLimiter(READERS)
        """Threads that read requests."""
        self._collections = 0
        """Attempts to collect a model that was unloaded."""

    def use_continuous_batching(self, model: PreTrainedModel, modality: Modality) -> bool:
        """Says whether a model is batched continuously, and sees to it that it can be.

        Raises:
            UnsupportedError: it cannot run on rows, or not as the server was told to run models.
        """
        if not super().use_continuous_batching(model, modality):
            return False
        if model not in self._row_tokens:
            self._to_rows(model)
            self._row_tokens[model] = self._try_manager(model)
        return True

    def leave_all_but(self, models: Iterable[Any]) -> None:
        """Ends the batches of a model that is none of these, behind its requests. It was unloaded, or has the name of
        another: it would answer for one that was loaded in its place, beside which it would keep its memory."""
        batches = getattr(self._cb_manager, "batches", None)
        if batches is not None and not any(batches.model is each for each in models):
            self.shutdown()
            del batches
            gc.collect()  # a model on rows holds itself

    def collect_all_but(self, models: list[Any]) -> None:
        """Collects garbage while a model that was on rows, and is none of these, is still in memory: Python collects
        nothing while another thread does, as the one that has unloaded the model. Gives up after some attempts."""
        is_left = any(all(model is not each for each in models) for model in list(self._row_tokens))
        self._collections = self._collections + 1 if is_left else 0
        if 0 < self._collections <= COLLECTIONS:
            gc.collect()

    def answering(self) -> Any:
        """The model of which somebody waits for an answer, or None."""
        batches = getattr(self._cb_manager, "batches", None)
        return batches.model if batches is not None and batches.output_router.result_handlers else None

    def warm_up(self, name: str, model: Any) -> None:
        """Makes the batches of a model before anybody asks for it, with graphs of all of them."""
        self._manager(name).warm_up(model)

    def start(self) -> None:
        """Has batches that were made before anybody asked take requests."""
        if self._cb_manager is not None:
            cast(RowGenerateManager, self._cb_manager).start()

    def end(self) -> None:
        """Ends the batches, and the threads of models that answer one request at a time: transformers lets these wait
        for requests until the process ends."""
        self.shutdown()
        while self._generate_managers:
            self._generate_managers.popitem()[1].submit(sys.exit)  # ends the thread, behind what it does

    def row_tokens(self, model: Any) -> int | None:
        """How many tokens a row of a model has, if the model is on rows."""
        return self._row_tokens.get(model)

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        if use_cb:
            return LaterManager(functools.partial(self._running, model_id))
        return super().get_manager(model_id)

    def _running(self, model_id: str, model: Any, gen_config: Any) -> RowGenerateManager:
        """The manager of a model, at work. Batches of another model end."""
        self.leave_all_but([model])
        manager = self._manager(model_id)
        manager.init_cb(model, gen_config)
        return manager

    def _manager(self, model_id: str) -> RowGenerateManager:
        get = with_names(GenerationState.get_manager, CBGenerateManager=RowGenerateManager)
        return cast(RowGenerateManager, get(self, model_id, use_cb=True))

    def _try_manager(self, model: Any) -> int:
        """Makes a manager and drops it: so what is refused is refused before the first request. Returns how many tokens
        a row has."""
        manager = sampling_manager(model, self._cb_config)
        manager.destroy()
        return cast(RowManager, manager).options.max_seq_len


def _build(
    build: Callable[..., FastAPI],
    limit: Callable[[RowState, ModelManager], int],
    models: ModelManager,
    *handlers: Any,
    **options: Any,
) -> FastAPI:
    """Makes the app that `build` makes, and adds what is ours.

    Raises:
        UnsupportedError: the model that is loaded already cannot run on rows.
        BudgetError: nor is there memory for its K and V.
    """
    state: RowState = options["generation_state"]
    for name, loaded in models.loaded_models.items():
        _make_ready(state, name, loaded)
    app = build(models, *handlers, **options)
    for kind in REFUSED:
        app.add_exception_handler(kind, _refuse)
    closed = {}
    if models.force_model is None:
        logger.warning(
            "vmmkv serve: no MODEL was given, so that each request needs a model of its own: a folder, or a repository "
            "in the hub's cache on this machine"
        )
    else:
        why = (
            f"this server was started with {models.force_model!r}, and keeps it; one started without a model does this"
        )
        closed = dict.fromkeys(("/load_model", "/reset"), why)
    app.add_middleware(RequestGate, max_bytes=limit(state, models), closed=closed)
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
                # Its thread would keep the process alive. Requests that are cancelled need the event loop meanwhile.
                await anyio.to_thread.run_sync(state.end)

    app.router.lifespan_context = lifespan
    publish()
    return app


def _limit(told: int | None, max_seq_len: int | None, state: RowState, models: ModelManager) -> int:
    """The largest body of a request, in bytes."""
    if told is not None:
        return told
    if models.force_model is None:
        return bytes_for(max_seq_len or USUAL_TOKENS)
    tokens = [state.row_tokens(each.model) for each in models.loaded_models.values()]
    return max(UPLOAD if each is None else bytes_for(each) for each in tokens)


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
        state.collect_all_but(there)
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
    status, kind, code, message = 400, "invalid_request_error", None, str(error)
    if isinstance(error, UnknownModelError):
        status, code = 404, "model_not_found"
    elif isinstance(error, FailedRequestError):
        status, kind = 500, "server_error"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        message = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    message = message.encode(errors="backslashreplace").decode()  # halves of characters cannot be written
    return JSONResponse(error_body(message, kind, code), status_code=status)


REFUSED = (
    ArgumentError, SequenceTooLongError, UnsupportedError, FailedRequestError, HTTPException, RequestValidationError,
)  # fmt: skip
"""Errors of requests that are answered in words."""
