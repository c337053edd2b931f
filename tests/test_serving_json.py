"""Bodies that are no requests, for `vmmkv serve`: each is refused, and none is a fault of the server."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from conftest import ROUNDS
from test_serving import save, server
from test_serving_limits import JSON, post

# A thread that ends by `sys.exit` ends well, though pytest warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["of one model", "of any"])
def address(llama: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A server, which asks no hub. Answers are short, since a row is."""
    arguments = [llama] if request.param == "of one model" else []
    limits = ["--max-bytes", "64MiB", "--max-seq-len", "32", "--max-request-bytes", "1MiB"]
    with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True), server(*arguments, *limits) as address:
        yield address


NO_OBJECTS = [
    b"", b"NaN", b"Infinity", b"[]", b'"text"', b"3", b"null", b"{", b'{"prompt": NaN}', b"[" * 100_000, b"\xff{}",
    b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"a":' * 5000 + b"1" + b"}" * 5000, b"{} {}", b"\x00",
    '{"prompt": "w5"}'.encode("utf-16"),
]  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/systemone", "/load_model"]


def test_what_is_no_object_is_refused_as_such(address: str) -> None:
    for path, body in itertools.product(PATHS, NO_OBJECTS):
        for headers in (JSON, {"content-type": "text/plain"}, {}):
            status, told = post(address, path, body, headers)
            assert status in (400, 403), (body[:50], status, told)
            assert told["error"]["type"] == "invalid_request_error"


def anything(random: Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kinds = 5 if depth > 3 else 7
    kind = random.randrange(kinds)
    if kind == 0:
        return random.choice([None, True, False])
    if kind == 1:
        return random.choice([0, -1, 1, 2**31, 2**63, -(2**64), 10**400, random.randint(-9, 9)])
    if kind == 2:
        return random.choice([0.0, -0.0, 1.5, 1e308, 1e-320, random.random()])
    if kind in (3, 4):
        strange = ["", "\0", "\n", "'", '"', "é", "\U0001fae8", "\u2028", "w5", "text", "system", "{}", "{{ x }}", "%s"]
        return "".join(random.choices(strange, k=random.randint(0, 3)))
    if kind == 5:
        return [anything(random, depth + 1) for _ in range(random.randint(0, 3))]
    return {name: anything(random, depth + 1) for name in random.choices(NAMES, k=random.randint(0, 3))}


FIELDS = [
    "model", "prompt", "messages", "input", "instructions", "stream", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "temperature", "top_p", "seed", "n", "suffix", "tools", "tool_choice", "generation_config",
    "chat_template_kwargs", "metadata", "user", "stop", "logit_bias", "response_format", "state", "questions", "assets",
    "\0", "é",
]  # fmt: skip
NAMES = [*FIELDS, "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "call_id", "output"]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "w5"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}]},
    "/v1/responses": {"input": "w5"},
    "/v1/systemone": {"state": "w5", "questions": {"q": {"type": "noul", "instructions": "w6"}}},
    "/load_model": {"model": "/nowhere/at/all"},
}


def changed(random: Random, path: str) -> dict[str, Any]:
    """A request with some fields that are anything, or whose parts are."""
    body = json.loads(json.dumps(PLAIN[path]))
    for name in random.choices(FIELDS, k=random.randint(1, 2)):
        body[name] = anything(random)
    if random.random() < 0.5:
        parts = [each for value in body.values() if isinstance(value, list) for each in value]
        for each in parts:
            if isinstance(each, dict):
                each[random.choice(NAMES)] = anything(random)
    return body


def test_no_json_is_a_fault_of_the_server(address: str, llama: str) -> None:
    """Whatever its fields are; and others are answered afterwards."""
    random = Random()
    for path in PATHS * 60 * ROUNDS:
        body = ({} if path == "/load_model" else {"model": llama}) | changed(random, path)
        status, told = post(address, path, json.dumps(body).replace("1e+308", "1e999"))
        assert status < 500, (body, told)
    plain = {"model": llama, "prompt": "w5", "max_tokens": 1}
    assert post(address, "/v1/completions", json.dumps(plain))[0] == 200


def test_a_server_ends_the_thread_that_answers_one_request_at_a_time(address: str, llama: str) -> None:
    """The fixture that looks for threads says so."""
    body = {"model": llama} | PLAIN["/v1/systemone"]
    assert post(address, "/v1/systemone", json.dumps(body))[0] < 500
    assert any("_run" in each.name for each in threading.enumerate())
