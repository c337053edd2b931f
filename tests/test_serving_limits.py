"""Requests to `vmmkv serve` that are too large, are no JSON, or whose client leaves."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from test_serving import save, server
from transformers import PreTrainedTokenizerFast

import vmmkv

pytest.importorskip("openai", reason="needs the extra serve")
pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")


from vmmkv.integrations.serving_gate import BESIDE_TEXT, BYTES_A_TOKEN, RequestGate

ROW = 2048
"""Tokens of a row."""
LIMIT = BYTES_A_TOKEN * ROW + BESIDE_TEXT
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def address(llama: str) -> Iterator[str]:
    """A server that was started with a model."""
    with server(llama, "--max-bytes", "64MiB", "--max-seq-len", str(ROW), "--idle-seconds", "0") as address:
        yield address


def post(address: str, path: str, body: Any, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """The status and the body of an answer; a client that sends all of its own body before it reads anything."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=300)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if answer.headers["content-type"] == "application/json" else text
    finally:
        connection.close()


def message(answer: tuple[int, Any]) -> str:
    return str(answer[1]["error"]["message"])


# ---------------------------------------------------------------------- the gate alone


class Client:
    """A client of an app in this process: what it sends, and what it is answered."""

    def __init__(self, *chunks: bytes, headers: dict[str, str] | None = None, leaves: bool = False) -> None:
        self.unsent, self.leaves, self.answer, self.bytes_taken = list(chunks), leaves, [], 0
        self.left, self.taken_before_answer = asyncio.Event(), 0
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.scope = {"type": "http", "path": "/v1/completions", "headers": raw}

    async def receive(self) -> dict[str, Any]:
        if self.unsent:
            body = self.unsent.pop(0)
            self.bytes_taken += len(body)
            return {"type": "http.request", "body": body, "more_body": bool(self.unsent) or self.leaves}
        if not self.leaves:
            await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if not self.answer:
            self.taken_before_answer = self.bytes_taken
        self.answer.append(message)

    @property
    def status(self) -> int | None:
        return self.answer[0]["status"] if self.answer else None

    async def ask(self, app: Any, limit: int = 1000) -> None:
        await RequestGate(app, limit, {"/closed": "it is closed"})(self.scope, self.receive, self.send)  # type: ignore[arg-type]


async def unreached(*_: Any) -> None:
    raise AssertionError("the app was asked")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body."""
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def chunks_of(size: int) -> list[bytes]:
    random, made = Random(), []
    while size:
        made.append(random.randbytes(random.randint(1, size)))
        size -= len(made[-1])
    return made


def test_a_body_that_is_told_to_be_too_large_is_refused_unread() -> None:
    """The answer comes first; then the rest is dropped, so that a client that sends on gets to the answer."""
    client = Client(*chunks_of(5000), headers={"content-length": "5000"})
    asyncio.run(client.ask(unreached))
    assert client.status == 413
    assert client.taken_before_answer == 0
    assert client.bytes_taken == 5000
    assert [each.get("more_body") for each in client.answer] == [None, True, False]
    assert "5,000 bytes; the limit is 1,000" in json.loads(client.answer[1]["body"])["error"]["message"]


def test_a_body_of_chunks_is_counted_while_it_is_read() -> None:
    chunks = [bytes(100)] * 50
    client = Client(*chunks)
    asyncio.run(client.ask(unreached))
    assert client.status == 413
    assert client.taken_before_answer == 1100
    assert client.bytes_taken == 5000


def test_a_body_up_to_the_limit_arrives_whole() -> None:
    for size in (0, 1, Random().randint(2, 999), 1000):
        chunks = chunks_of(size)
        client = Client(*chunks or [b""], headers={"content-length": str(size)})
        asyncio.run(client.ask(echo))
        assert client.status == 200
        assert client.answer[1]["body"] == b"".join(chunks)


def test_a_client_that_leaves_before_its_body_ends_asks_nothing() -> None:
    for headers in ({}, {"content-length": "900"}):
        client = Client(bytes(10), headers=headers, leaves=True)
        asyncio.run(client.ask(unreached))
        assert not client.answer
    client = Client(bytes(10), headers={"content-length": "9000"}, leaves=True)
    asyncio.run(client.ask(unreached))  # one that is refused, and does not wait for the answer


def test_a_request_ends_when_its_client_leaves_and_not_when_it_is_answered() -> None:
    ended: list[str] = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def goes_on(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        await asyncio.sleep(0)
        ended.append("by itself")

    async def both() -> None:
        leaving, staying = Client(b"x"), Client(b"x")
        asking = asyncio.create_task(leaving.ask(waits))
        await asyncio.sleep(0)
        leaving.left.set()
        await asking
        assert not leaving.answer
        staying.left.set()  # servers say so of every client that has its answer
        await staying.ask(goes_on)

    asyncio.run(both())
    assert ended == ["cancelled", "by itself"]


def test_a_server_that_ends_says_so_where_it_has_not_begun_to_answer() -> None:
    async def begins(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def end(app: Any) -> Client:
        client = Client(b"x")
        asking = asyncio.create_task(client.ask(app))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asking
        return client

    assert asyncio.run(end(waits)).status == 503
    assert len(asyncio.run(end(begins)).answer) == 1


# ---------------------------------------------------------------------- large requests


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("headers", [{}, {"connection": "close"}])
def test_a_client_that_sends_too_much_is_told_so(address: str, is_told: bool, headers: dict[str, str]) -> None:
    """Also one that reads nothing until it has sent everything, and wants the connection closed then."""
    body = b"x" * (8 << 20)
    chunks = iter([body[at : at + 50_000] for at in range(0, len(body), 50_000)])
    refused = post(address, "/v1/completions", body if is_told else chunks, JSON | headers)
    assert refused[0] == 413
    assert f"the limit is {LIMIT:,}" in message(refused) or f"more than {LIMIT:,}" in message(refused)


def test_a_limit_can_be_told(llama: str) -> None:
    with server(llama, "--max-bytes", "64MiB", "--max-seq-len", "64", "--max-request-bytes", "1KiB") as address:
        assert post(address, "/v1/completions", json.dumps({"prompt": "w1 " * 400}))[0] == 413
        assert post(address, "/v1/completions", json.dumps({"prompt": "w1 " * 40, "max_tokens": 2}))[0] == 200
    for wrong in ("much", "80%", "0"):
        with pytest.raises(vmmkv.BudgetError, match=wrong), server("--max-request-bytes", wrong):
            pass


def test_text_that_no_row_can_hold_is_never_tokenized(llama: str) -> None:
    """A model's rows say how much that is, whatever the limit in bytes."""
    text = "w1" * (BYTES_A_TOKEN * ROW // 2) + " "
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        "/v1/responses": {"input": text},
    }
    limits = ["--max-bytes", "64MiB", "--max-seq-len", str(ROW), "--max-request-bytes", "64MiB"]
    with (
        server(llama, *limits) as address,
        patch.object(PreTrainedTokenizerFast, "_encode_plus", side_effect=AssertionError) as encode,
    ):
        for path, body in asked.items():
            refused = post(address, path, json.dumps(body))
            assert refused[0] == 400
            assert re.search("a text of 65,5.. characters; a row has 2,048 tokens", message(refused))
    assert not encode.called


def test_others_are_answered_while_a_text_is_tokenized(address: str, llama: str) -> None:
    """Whose tokenizer does not come back before they are."""
    begun, answered, encode = threading.Event(), threading.Event(), PreTrainedTokenizerFast._encode_plus
    texts: list[str] = []

    def slowly(tokenizer: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        if "w7" in text:
            begun.set()
            assert answered.wait(300)
        return encode(tokenizer, text, *args, **kwargs)

    def ask(prompt: str) -> None:
        status, body = post(address, "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 2}))
        assert status == 200
        texts.append(body["choices"][0]["text"])

    with patch.object(PreTrainedTokenizerFast, "_encode_plus", slowly):
        waiting = threading.Thread(target=ask, args=["w7 w8"])
        waiting.start()
        try:
            assert begun.wait(300)
            ask("w5 w6")
            assert len(texts) == 1
        finally:
            answered.set()
            waiting.join()
    assert len(texts) == 2
