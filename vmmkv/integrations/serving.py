"""`transformers serve` with K and V of all requests in rows.

The server is transformers': this file replaces three names that `Serve` looks up while it is made.

    GenerationState     RowState puts each model that is batched on rows, and has its requests sampled one by one
    build_server        _build adds metrics, errors as JSON, and the end of a request whose client disconnects
    uvicorn.Server      EndingServer ends the batches before the connections
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any
from unittest.mock import patch

import anyio
import torch
import typer
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving import server as their_server
from transformers.cli.serving import utils as their_utils
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

from ..budget import parse_bytes
from ..errors import ArgumentError, BudgetError, SequenceTooLongError, StoppedError, UnsupportedError, VmmkvError
from ..layout import kv_dtype_from_name
from ..ledger import path_of
from ..metrics import PoolCollector
from ..pool import FramePool
from ..publication import publish
from .batching import check_version
from .batching.config import LEAST_TEMPERATURE, NOT_IN_BATCHES, give_each_its_temperature
from .continuous_batching import enable

PER_REQUEST = {
    "max_new_tokens", "eos_token_id", "do_sample", "temperature", "top_k", "top_p",
    "use_cache", "cache_implementation", "transformers_version",
}  # fmt: skip
"""Settings of a `GenerationConfig` that may differ between requests of one batch; the last three mean nothing there."""
NEUTRAL = NOT_IN_BATCHES | {"repetition_penalty": (1,)}
"""Values of other settings with which a batch does what it does anyway, also where the model has another."""
END_SECONDS = 2  # how long connections may stay open behind the end of the batches, which take two seconds at most
LEAVING: ContextVar[ExitStack] = ContextVar("LEAVING")  # what to do at the end of the HTTP request that runs


def serve(
    arguments: list[str],
    *,
    max_bytes: float | str | None = None,
    max_seq_len: int | None = None,
    idle_seconds: float = 10.0,
    kv_dtype: str | None = None,
    pool: str | None = None,
    reserved: float | str = 0,
) -> Serve:
    """Runs the server until it ends, and publishes its pools for `vmmkv top`.

    A model that transformers would batch, but that cannot run on rows, is refused: at once if the server is started
    with the model, otherwise when a client asks for it. Models that transformers runs one request at a time are served
    as usual.

    Args:
        arguments: those of `transformers serve`.
        max_bytes: the most that K and V may take; this and the others as in `continuous_batching.enable`.
        max_seq_len: tokens of the longest request.
        idle_seconds: after so many seconds without a request memory goes back.
        kv_dtype: "fp8", "int8", or None, the model's.
        pool: the name of a budget that processes share; `max_bytes` is its limit, where this process is the first.
        reserved: with `pool`, bytes that this process can have at any time; see `FramePool`.

    Returns:
        transformers' server: at once if it was told to run in a thread, otherwise when it has ended.

    Raises:
        UnsupportedError: this version of transformers is not supported, or the model that the server is started with
            cannot run on rows.
        ArgumentError: the arguments forbid continuous batching, or transformers cannot load the model; or `pool` is no
            name, or there is `reserved` without it.
        BudgetError: `max_bytes` or `reserved` is no number of bytes, or what is reserved cannot be had.
        DtypeError: there is no such kv_dtype.
    """
    check_version()
    kv_dtype_from_name(kv_dtype)
    if max_bytes is not None:
        parse_bytes(max_bytes, free=0)
    parse_bytes(reserved, free=0)
    how: dict[str, Any] = {"max_seq_len": max_seq_len, "idle_seconds": idle_seconds, "kv_dtype": kv_dtype}
    make_pool = None
    if pool is not None:
        path_of(pool, "")  # checks the name
        make_pool = functools.partial(FramePool, max_bytes or "80%", shared=pool, reserved=reserved)
    elif reserved:
        raise ArgumentError(f"got reserved={reserved!r} without pool; a server by itself has all of max_bytes")
    else:
        how["max_bytes"] = max_bytes
    to_rows = functools.partial(enable, **how)
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    # transformers' own default would spread the layers of a model over all GPUs, which wait for each other.
    device = ["--device", "cuda:0"] if torch.cuda.device_count() > 1 else []
    with (
        patch.object(their_utils, "GenerationState", functools.partial(RowState, to_rows, make_pool)),
        patch.object(their_server, "build_server", _build),
        patch.object(uvicorn, "Server", EndingServer),
    ):
        try:
            made: Serve = typer.main.get_command(app).main(
                ["--continuous-batching", *device, *arguments], prog_name="vmmkv serve", standalone_mode=False
            )
        except OSError as error:
            raise ArgumentError(f"asked for a model that transformers cannot load: {error}") from error
    return made


class RowState(their_utils.GenerationState):  # type: ignore[misc, unused-ignore]
    """How requests are run: in batches on rows where transformers would batch them.

    Args:
        to_rows: puts a model on rows.
        make_pool: makes the pool of all models, on the device of the first; None: each has a pool of its own.
        options: those of `GenerationState`.
    """

    def __init__(
        self, to_rows: Callable[..., None], make_pool: Callable[..., FramePool] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if not options.get("continuous_batching"):
            raise ArgumentError("got --no-continuous-batching, and only batches run on rows; leave it out")
        self._to_rows, self._make_pool = to_rows, make_pool
        self._pool: FramePool | None = None
        self._has_ended = False

    def use_continuous_batching(self, model: PreTrainedModel, modality: their_utils.Modality) -> bool:
        """Says whether a model is batched, and puts it on rows if so."""
        if not super().use_continuous_batching(model, modality):
            return False
        if "init_continuous_batching" not in vars(model):  # else it is on rows
            if self._make_pool and self._pool is None:
                self._pool = self._make_pool(device=model.device)
            self._to_rows(model, pool=self._pool)
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """Returns what runs the requests of a model: see `GenerationState.get_manager`."""
        if self._has_ended:
            raise StoppedError("the server has ended")
        if not use_cb:
            return super().get_manager(model_id)
        if self._cb_manager is None:
            self._cb_manager = RowGenerateManager(self._cb_config)
        return self._cb_manager

    def end(self) -> None:
        """Ends the batches, takes no more requests, and gives back what was reserved."""
        self._has_ended = True
        self.shutdown()
        if self._pool is not None:
            gc.collect()  # rows of batches that have ended
            with suppress(BudgetError):  # a batch has not ended yet
                self._pool.close()


class RowGenerateManager(their_utils.CBGenerateManager):  # type: ignore[misc, unused-ignore]
    """Runs the requests of one model at a time in batches on rows. Requests get new names: clients choose
    `x-request-id`, and two clients may choose the same."""

    _cb: Any

    def init_cb(self, model: Any, gen_config: Any = None, *, warm_up: bool = False) -> None:
        """Starts the batches of a model, and ends those of another model. They have the model's own generation config,
        and each request its own sampling; `gen_config` would be that of the first. `top_k` and `top_p` sort a
        vocabulary, and are there if the model's config has them."""
        if self._cb is not None and self._cb.model is not model:
            self.stop()
            self._cb = None
        if self._cb is None:
            config, own = copy.deepcopy((self._cb_config or ContinuousBatchingConfig(), model.generation_config))
            config.per_request_processors = True
            own.do_sample, own.num_return_sequences = True, 1
            own.temperature = 0.5  # each request has its own; for 1.0 there would be no processor
            self._cb = model.init_continuous_batching(own, config)
            give_each_its_temperature(self._cb.logit_processor.logits_processor)
            if warm_up:
                self._cb.warmup()
            self._cb.start()

    def stop(self) -> None:
        """Ends the batches. Answers may go on for two seconds; those that take longer end with an error."""
        super().stop()
        if self._cb is not None and self._cb.is_running():
            self._cb.stop(hard_stop=True)

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], their_utils.CBStreamer]:
        """Starts a request: see `CBGenerateManager.generate_streaming`, which may lose the first tokens."""
        name, texts, loop = str(uuid.uuid4()), asyncio.Queue[Any](), asyncio.get_running_loop()
        tokenizer = getattr(processor, "tokenizer", processor).backend_tokenizer
        streamer = their_utils.CBStreamer(self._cb, name, tokenizer, loop, texts, response_parser=response_parser)

        def tell(output: Any) -> None:
            try:
                streamer.put(output)
                error = output.error
            except Exception as failed:  # a tokenizer or a parser failed; the client would wait for ever
                error = str(failed)
            if error is not None:  # transformers puts the message into JSON as it is
                texts.put_nowait(their_utils._StreamError(json.dumps(error)[1:-1]))
            elif output.is_finished():
                streamer.end()

        self._add(name, inputs["input_ids"], gen_config, tell, streaming=True)
        return texts, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Waits for the answer to a request: see `CBGenerateManager.generate_non_streaming`."""
        batches, done = self._cb, asyncio.get_running_loop().create_future()

        def tell(output: Any) -> None:
            if not done.done():
                done.set_result(output)

        self._add(str(uuid.uuid4()), inputs["input_ids"], gen_config, tell, streaming=False)
        output = await done
        if output.error is not None:
            has_ended = batches.background_thread_status.can_accept_new_requests() is not None
            raise (StoppedError if has_ended else VmmkvError)(output.error)
        text = processor.decode(output.generated_tokens, skip_special_tokens=True)
        return text, len(inputs["input_ids"]), output.generated_tokens

    def _add(
        self, name: str, ids: list[int], config: GenerationConfig, tell: Callable[[Any], None], *, streaming: bool
    ) -> None:
        """Adds a request, and cancels it at the end of its HTTP request if it still runs then. Lets `config` ask for no
        more tokens than the row has room for, so that transformers sees that an answer was cut off."""
        batches, handlers = self._cb, self._cb.output_router.result_handlers
        check_shared(config, batches.model.generation_config)
        room = max(1, batches.options.max_seq_len - len(ids))
        new = config.max_new_tokens
        config.max_new_tokens = room if new is None or (isinstance(new, int) and new > room) else new
        how = sampling(batches, config)
        batches.register_result_handler(name, tell)
        try:
            batches.add_request(
                ids, name, config.max_new_tokens, streaming=streaming, eos_token_id=config.eos_token_id, **how
            )
        except BaseException:
            handlers.pop(name, None)
            raise
        LEAVING.get().callback(lambda: batches.cancel_request(name) if name in handlers else None)


def sampling(manager: Any, config: GenerationConfig) -> dict[str, Any]:
    """The keywords of `add_request` for a request's sampling. Raises `UnsupportedError` if the manager has no processor
    for it."""
    if not config.do_sample:
        return {"temperature": LEAST_TEMPERATURE}
    supported: Mapping[str, type] = manager.logit_processor.supported_keys
    numbers = {"temperature": 1.0 if config.temperature is None else config.temperature}
    numbers |= {name: getattr(config, name) for name in ("top_k", "top_p") if getattr(config, name) is not None}
    for name, neutral in {"top_k": 0, "top_p": 1}.items():
        if name not in supported and numbers.get(name, neutral) != neutral:
            raise UnsupportedError(
                f"asked for {name}={numbers[name]}; this model's generation_config.json has none, and the server sorts "
                f"vocabularies for none of its requests. Put {name} there, or leave it out"
            )
    return {name: supported[name](value) for name, value in numbers.items() if name in supported}


def check_shared(asked: GenerationConfig, shared: GenerationConfig) -> None:
    """Raises `UnsupportedError` where the config of a request has a setting that all requests of a batch share, and
    the model has another."""
    for name, value in vars(asked).items():
        if name in PER_REQUEST or not name[0].isalpha() or value is None:
            continue
        own = getattr(shared, name, None)
        if value != own and value not in NEUTRAL.get(name, ()):
            raise UnsupportedError(
                f"asked for {name}={value!r}; all requests of a batch share the model's {name}={own!r}. Leave it out"
            )


def _build(models: ModelManager, *handlers: Any, **options: Any) -> FastAPI:
    """Makes transformers' app with `/metrics`, errors as JSON and `EndWithClient`, and warms up the loaded model."""
    state: RowState = options["generation_state"]
    for name, loaded in models.loaded_models.items():
        try:
            modality = models.get_model_modality(loaded.model, loaded.processor)
        except ValueError:  # a model of sound
            continue
        if state.use_continuous_batching(loaded.model, modality):
            state.get_manager(their_utils.split_model_id(name)[0], use_cb=True).init_cb(loaded.model, warm_up=True)
    app = build_server(models, *handlers, **options)
    app.state.end = state.end
    app.add_exception_handler(VmmkvError, _refuse)
    app.add_middleware(EndWithClient)
    registry = CollectorRegistry()
    registry.register(PoolCollector())

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    unload = models.shutdown

    def end_and_unload() -> None:
        state.shutdown()  # batches would keep models, and answer for models that are loaded in their place
        unload()

    models.shutdown = end_and_unload  # type: ignore[method-assign, unused-ignore]
    publish()
    return app


def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Answers a request that was refused, or that ended with an error, as OpenAI's server does."""
    status, kind = 503 if isinstance(error, StoppedError) else 500, "server_error"
    if isinstance(error, ArgumentError | SequenceTooLongError | UnsupportedError):
        status, kind = 400, "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": body}, status_code=status)


class EndWithClient:
    """ASGI middleware that ends a request when its client disconnects, and cancels what the request left in a batch.
    transformers does so only while an answer is streamed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        messages: asyncio.Queue[Message] = asyncio.Queue(1)

        async def listen() -> None:
            while (message := await receive())["type"] != "http.disconnect":
                await messages.put(message)
            tasks.cancel_scope.cancel()

        with ExitStack() as leaving:
            LEAVING.set(leaving)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                await self._app(scope, messages.get, send)
                tasks.cancel_scope.cancel()
        return None


class EndingServer(uvicorn.Server):
    """A server that ends its batches before its connections, so that each client gets an error, and that ignores
    further signals."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        app: Any = self.config.app
        self.config.timeout_graceful_shutdown = END_SECONDS
        await anyio.to_thread.run_sync(app.state.end)  # the event loop answers requests meanwhile
        await super().shutdown(sockets)
