"""An ASGI middleware in front of transformers' server: it bounds bodies, refuses what is no JSON object, and ends
requests whose client has gone.

A body is read whole, up to the limit, before the server sees any of it. From then on the gate alone listens to the
client, and cancels the request when the client disconnects.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import anyio
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BYTES_A_TOKEN = 32
"""A limit in tokens becomes one in bytes, and in characters, with this many. Text has 2 to 6 characters a token; JSON
writes a letter that is not ASCII as 6 bytes at most, a rare one as 12."""
BESIDE_TEXT = 64 << 10
"""Bytes that a body may have beside its text."""
UPLOAD = 32 << 20
"""Bytes of a body with pictures or sound, for a model without rows."""
UPLOADS = {"/v1/audio/transcriptions"}
LINGER_SECONDS = 30
"""How long a refused client may go on sending: until it has sent everything, most clients read no answer."""


def bytes_for(tokens: int) -> int:
    """The largest body of a server whose rows have so many tokens."""
    return BYTES_A_TOKEN * tokens + BESIDE_TEXT


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's server writes it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class RequestGate:
    """The middleware.

    Args:
        app: the server behind it.
        max_bytes: the largest body; those of `UPLOADS` may have `UPLOAD` in any case.
        closed: by path, why all requests for it are refused.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, closed: Mapping[str, str]) -> None:
        self._app, self._max_bytes, self._closed = app, max_bytes, closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path, headers = scope["path"], Headers(scope=scope)
        limit = max(self._max_bytes, UPLOAD) if path in UPLOADS else self._max_bytes
        body = await _read(receive, int(headers.get("content-length", 0)), limit)
        if isinstance(body, _TooLarge):
            return await _refuse_unread(body, receive, send)
        if body is None:  # the client has gone
            return None
        if path in self._closed:
            return await _answer(send, 403, self._closed[path])
        if "json" in headers.get("content-type", "").lower() and (wrong := _wrong_json(body)):
            return await _answer(send, 400, wrong)
        return await _run(self._app, scope, body, receive, send)


class _TooLarge(str):
    """Why a body is refused."""


async def _read(receive: Receive, told: int, limit: int) -> bytes | _TooLarge | None:
    """Reads a body, or as much of it as shows that it is too large. None: the client has disconnected."""
    why = f"the limit is {limit:,}, which --max-request-bytes changes"
    if told > limit:
        return _TooLarge(f"got a request with a body of {told:,} bytes; {why}")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            return _TooLarge(f"got a request with a body of more than {limit:,} bytes; {why}")
        if not message.get("more_body", False):
            return bytes(body)


def _wrong_json(body: bytes) -> str | None:
    """Why a body is no JSON object. Stricter than Python's own reader: NaN, halves of characters and hundreds of nested
    lists are refused, with which answers could not be written."""
    if not body:
        return None  # the server decides whether it needs one
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        return f"got a body that is not JSON: {error}"
    return None if isinstance(value, dict) else f"got a body that is a JSON {type(value).__name__}; give an object"


async def _answer(send: Send, status: int, message: str, more_body: bool = False) -> None:
    """Answers with an error. With `more_body` the client has the whole answer, and the connection is still open."""
    body = json.dumps(error_body(message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if more_body:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def _refuse_unread(why: str, receive: Receive, send: Send) -> None:
    """Answers, and drops what the client still sends: if the connection were closed first, the client would see it
    reset, and not the answer."""
    await _answer(send, 413, why, more_body=True)
    with anyio.move_on_after(LINGER_SECONDS):
        while (await receive()).get("more_body", False):
            pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _run(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Runs a request until it is answered, its client disconnects, or the server cancels it because it ends."""
    unread, is_begun = [body], False

    async def read() -> Message:
        if not unread:
            await anyio.sleep_forever()  # what comes next is that the client disconnects, which ends the request
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def write(message: Message) -> None:
        nonlocal is_begun
        is_begun = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            watching.cancel()
        await send(message)

    with anyio.CancelScope() as running:
        watching = asyncio.create_task(_cancel_when_left(receive, running))
        try:
            await app(scope, read, write)
        except asyncio.CancelledError:
            if running.cancel_called:
                raise
            if not is_begun:
                await _answer(send, 503, "the server has ended")
        finally:
            watching.cancel()


async def _cancel_when_left(receive: Receive, running: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    running.cancel()
