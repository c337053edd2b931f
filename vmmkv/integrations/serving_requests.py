"""What clients ask of the server, and what no batch does for one of its requests."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import anyio
from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving.utils import BaseHandler, Modality

from ..errors import ArgumentError, SequenceTooLongError, UnsupportedError, VmmkvError
from .request_checks import NOT_IN_BATCHES, AtMost
from .serving_fields import TEXT, Fields, Message, OwnConfig, without_null
from .serving_gate import BYTES_A_TOKEN
from .serving_models import known_model

HEEDED = {
    "chat_template_kwargs", "generation_config", "input", "instructions", "max_completion_tokens", "max_output_tokens",
    "max_tokens", "messages", "model", "prompt", "stream", "suffix", "temperature", "tools", "top_p",
}  # fmt: skip
"""Fields of a request that are done as they say."""
NOT_ABOUT_ANSWERS = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "stream_options", "user",
}  # fmt: skip
"""Fields of a request that change nothing of what the model says."""
CHANGE_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "reasoning": ({},),
    "stop": ([], ""),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Of other fields, what they may say beside null."""
WITHOUT_TOOLS: dict[str, tuple[Any, ...]] = {"parallel_tool_calls": (False,), "tool_choice": ("none",)}
"""And what they may say in a request that has no tools."""
NEUTRAL = NOT_IN_BATCHES | {
    "early_stopping": (False,),
    "length_penalty": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1,),
    "typical_p": (1,),
}
"""Of a `generation_config`, what changes nothing where the model's own has None."""
PER_REQUEST = OwnConfig.model_fields.keys()
"""What of a `generation_config` a request may have of its own."""
TEXTS = ("prompt", "messages", "input", "instructions", "tools")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class RowHandler(BaseHandler):  # type: ignore[misc, unused-ignore]
    """Takes requests. Those for a batch are refused where they ask for what it cannot do for one of its requests."""

    fields: ClassVar[type[Fields]]
    """Of what kind the fields of its requests are."""
    _streaming: Callable[..., Any]
    _non_streaming: Callable[..., Any]

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answers a request. Models and managers are looked up on the event loop; chat templates and tokenizers, which
        may take seconds, run in a thread.

        Raises:
            SequenceTooLongError: its text is longer than all tokens of a row.
            ArgumentError: it cannot be read.
        """
        self._validate_request(body)
        found, state = self._resolve_model(body), cast(Any, self.generation_state)
        name, model, processor = found
        try:
            modality = self.model_manager.get_model_modality(model, processor=processor)
        except ValueError as error:
            raise UnsupportedError(f"asked for text of {body['model']!r}, which makes none: {error}") from None
        is_batched = state.use_continuous_batching(model, modality)
        if is_batched:
            check_characters(body, state.row_tokens(model))
        manager = state.get_manager(name, use_cb=is_batched)
        known = copy.copy(state)
        vars(known).update(use_continuous_batching=lambda *_: is_batched, get_manager=lambda *_, **__: manager)
        read = functools.partial(self._read, body, request_id, found, known)
        answer = (await anyio.to_thread.run_sync(read, limiter=state.readers))()
        return await answer if inspect.isawaitable(answer) else answer

    def _read(self, body: dict[str, Any], request_id: str, found: Any, known: Any) -> Callable[[], Any]:
        """Reads a request as transformers' handler does, up to the call that answers it, which it returns. The handler
        waits for nothing before that call."""

        async def answer_later(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            return functools.partial(self._non_streaming, *args, **kwargs)

        reader = copy.copy(self)
        vars(reader).update(
            generation_state=known,
            _validate_request=lambda _: None,
            _resolve_model=lambda _: found,
            _streaming=functools.partial(functools.partial, self._streaming),
            _non_streaming=answer_later,
        )
        reading = super(RowHandler, reader).handle_request(body, request_id)  # type: ignore[misc, unused-ignore]
        try:
            reading.send(None)
        except StopIteration as done:
            return cast(Callable[[], Any], done.value)
        except (VmmkvError, HTTPException, MemoryError):
            raise
        except Exception as error:
            raise ArgumentError(f"got a request that cannot be read: {type(error).__name__}: {error}") from error
        raise UnsupportedError("transformers' handler of requests waits for something that is not known here")

    def _validate_request(self, body: dict[str, Any]) -> None:
        others = body.keys() - cast(Any, self._valid_params_class).__mutable_keys__
        check_fields({name: body.pop(name) for name in others}, HEEDED)  # what is heeded elsewhere is not here
        self.fields.check(body)
        body.setdefault("stream", False)  # transformers' /v1/responses would stream
        if body.get("chat_template_kwargs", {}) is None:  # transformers would unpack it
            del body["chat_template_kwargs"]

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        body["model"] = known_model(body.get("model"), self.model_manager)
        loaded = list(self.model_manager.loaded_models.values())
        cast(Any, self.generation_state).leave_all_but(getattr(each, "model", None) for each in loaded)
        found = super()._resolve_model(body)
        template = str(getattr(found[2], "chat_template", None))
        if body.get("tools") and "tools" not in template:
            raise UnsupportedError("asked for tools; the chat template of this model does not know any")
        return found

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        for message in messages:
            Message.check(message)
        messages = [without_null(message) for message in messages]
        lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        others = {part["type"] for parts in lists for part in parts} - TEXT
        if modality is Modality.LLM and others:
            raise UnsupportedError(
                f"asked about {', '.join(sorted(others))}; this model reads text, in parts of type text. Leave it out"
            )
        return cast(list[dict[str, Any]], BaseHandler.get_processor_inputs_from_messages(messages, modality))

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        if not use_cb:
            super()._validate_request(body)  # logs the fields that transformers ignores
            return super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        check_fields(body, self._unused_fields)
        given = own_config(body.get("generation_config"), model_generation_config)
        plain = {name: value for name, value in body.items() if name not in ("generation_config", "seed")}
        config = super()._build_generation_config(plain, model_generation_config, use_cb=use_cb)
        is_length_told = any(body.get(name) is not None for name in LENGTHS)
        if is_length_told:
            given.pop("max_new_tokens", None)
        for name in PER_REQUEST & given.keys():
            if body.get(name) is None:
                setattr(config, name, given[name])
        if not is_length_told and "max_new_tokens" not in given:
            config.max_new_tokens = AtMost(config.max_new_tokens)
        is_told = body.get("temperature") is not None or given.get("temperature") is not None
        config.do_sample = bool(given.get("do_sample", is_told or config.do_sample)) and config.temperature != 0
        if config.do_sample and body.get("seed") is not None:
            raise UnsupportedError(
                "asked for a seed; requests of a batch draw from one generator. temperature=0 draws none"
            )
        return config


def check_characters(body: Mapping[str, Any], row_tokens: int) -> None:
    """Raises `SequenceTooLongError` where the text of a request has too many characters for a row of so many tokens:
    a tokenizer would take seconds, and a gigabyte, to find that out."""
    characters, unread = 0, [body.get(name) for name in TEXTS]
    while unread:
        each = unread.pop()
        if isinstance(each, str):
            characters += len(each)
        elif isinstance(each, list | dict):
            unread += each.values() if isinstance(each, dict) else each
    if characters > (most := BYTES_A_TOKEN * row_tokens):
        raise SequenceTooLongError(
            f"asked for a text of {characters:,} characters; a row has {row_tokens:,} tokens, for which {most:,} "
            "characters are the limit. A larger max_seq_len takes addresses, not memory"
        )


def check_fields(body: Mapping[str, Any], unused: set[str]) -> None:
    """Raises `UnsupportedError` where a request has a field that would change its answer, and does not. `unused` are
    those of which transformers knows it."""
    known = (HEEDED - unused) | NOT_ABOUT_ANSWERS | {"seed"}
    for name, value in body.items():
        if name in known or value is None or _is_one_of(value, CHANGE_NOTHING.get(name, ())):
            continue
        if _is_one_of(value, WITHOUT_TOOLS.get(name, ())) and not body.get("tools"):
            continue
        allowed = " or ".join(json.dumps(each) for each in CHANGE_NOTHING.get(name, ()))
        instead = f"; {allowed} is served" if allowed else ""
        raise UnsupportedError(f"asked for {name}={value!r}, which is not done here{instead}. Leave it out")


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is among others, of which True is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)


def own_config(given: str | None, of_model: GenerationConfig) -> dict[str, Any]:
    """What a request's `generation_config`, as JSON, has of its own.

    Raises:
        ArgumentError: it is none.
        UnsupportedError: it asks for what all requests of a batch share, and has it otherwise than the model.
    """
    if given is None:
        return {}
    try:
        own = json.loads(given)
        if not isinstance(own, dict) or not own.keys() <= vars(of_model).keys():
            raise ValueError("its names are those of GenerationConfig")
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"got generation_config={reprlib.repr(given)}; give JSON of one ({error})") from None
    OwnConfig.check(own)
    own = without_null(own)
    for name in own.keys() - PER_REQUEST - {"transformers_version"}:
        shared = getattr(of_model, name)
        if own[name] != shared and not (shared is None and _is_one_of(own[name], NEUTRAL.get(name, ()))):
            raise UnsupportedError(
                f"asked for generation_config with {name}={own[name]!r}; requests of a batch share the model's, "
                f"{shared!r}. Of its own a request has {', '.join(sorted(PER_REQUEST))}"
            )
    return own
