"""Of what kind the fields of a request are: what transformers would take for something else, or fail at, is refused."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Json, PositiveInt, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from ..errors import ArgumentError

TEXT = {"text", "input_text", "output_text"}
"""Parts of a message that a model of text reads."""
OF_THE_SERVER = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {
    "documents",
    "sanitize_control_tokens",
} | {"load_audio_from_video"}
"""What `chat_template_kwargs` cannot say: how a chat becomes tokens. The rest are the variables of a template."""

Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=0, le=1)]


class Fields(BaseModel):
    """Some of the fields of an object, of which none is another kind's."""

    model_config = ConfigDict(strict=True, extra="allow")

    @classmethod
    def check(cls, given: Any) -> None:
        """Raises `ArgumentError`, which names the field, where one is something else."""
        try:
            cls.model_validate(given)
        except ValidationError as error:
            raise ArgumentError(
                f"got a request that cannot be read: {'; '.join(map(_named, error.errors()))}"
            ) from None


def _named(error: Any) -> str:
    """What is wrong, and where: pydantic names types beside fields."""
    where = ".".join(name for name in map(str, error["loc"]) if "[" not in name)
    return f"{where}={reprlib.repr(error['input'])}: {error['msg']}" if where else str(error["msg"])


class Request(Fields):
    """What all requests for text have."""

    model: Annotated[str, Field(min_length=1)] | None = None
    stream: bool | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: int | None = None
    suffix: str | None = None
    instructions: str | None = None
    generation_config: str | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_thing_is_said_once(self) -> Request:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if taken := OF_THE_SERVER & (self.chat_template_kwargs or {}).keys():
            raise ValueError(f"chat_template_kwargs has {', '.join(sorted(taken))}, of which the server decides")
        return self


class Completion(Request):
    """A request to go on with a text."""

    prompt: str = ""


class Part(Fields):
    """A part of a message."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _text_has_text(self) -> Part:
        if self.type in TEXT and self.text is None:
            raise ValueError("a part of this type has a text")
        return self


class Function(Fields):
    """A function that a model has called."""

    arguments: dict[str, Any] | Json[dict[str, Any]]


class ToolCall(Fields):
    """A call, which may be the function itself."""

    function: Function | None = None

    @model_validator(mode="after")
    def _is_of_a_function(self) -> ToolCall:
        if self.function is None:
            Function.model_validate(self.model_extra)
        return self


class Message(Fields):
    """A message of a chat."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None


class Chat(Request):
    """A request to go on with a chat."""

    messages: Annotated[list[Message], Field(min_length=1)]


class Response(Request):
    """A request for a response."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]

    @model_validator(mode="after")
    def _both_are_read(self) -> Response:
        if self.instructions and isinstance(self.input, list) and self.input[0].get("role") == "system":
            raise ValueError("instructions would take the place of a first message of role system; give one of them")
        return self


class OwnConfig(Fields):
    """What of a `generation_config` a request may have of its own."""

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: TopP | None = None
    max_new_tokens: PositiveInt | None = None
    eos_token_id: int | list[int] | None = None


def without_null(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of an object those fields that say something."""
    return {name: value for name, value in given.items() if value is not None}
