"""Hands requests of clients to a model's batches on rows, and tokens back to the clients."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any, cast

from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError

from ..errors import StoppedError, VmmkvError
from .batching.manager import RowManager
from .batching.sampling import sampling, sampling_manager
from .request_checks import check_length


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


class LaterManager:
    """The manager of a request's model, looked up when the request has been read: requests for other models, which are
    read meanwhile, end its batches.

    Args:
        find: gives the manager at work, of a model and a `GenerationConfig`.
    """

    def __init__(self, find: Callable[[Any, Any], RowGenerateManager]) -> None:
        self._find = find

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Does nothing: the request has not been read."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Starts a request: see `RowGenerateManager.generate_streaming`."""
        return self._find(model, gen_config).generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Waits for the answer to a request: see `RowGenerateManager.generate_non_streaming`."""
        manager = self._find(model, gen_config)
        return await manager.generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)


class RowGenerateManager(CBGenerateManager):  # type: ignore[misc, unused-ignore]
    """Hands the tokens of a model to who waits for them. Each request has a name of its own: clients choose
    `x-request-id`, and two may choose the same."""

    @property
    def batches(self) -> RowManager | None:
        """The model's batches, if they were made."""
        return cast(RowManager | None, self._cb)

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
        except asyncio.CancelledError:  # the client has gone, or the server ends
            self._cb.cancel_request(name)
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and not isinstance(error, VmmkvError | CBWorkerDeadError):
                raise FailedRequestError(str(error)) from error
            self._cb.output_router.result_handlers.pop(name, None)  # it was refused, and nobody is told of its end
            raise
