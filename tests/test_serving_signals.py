"""`vmmkv serve` ends by one Ctrl-C, or by several, whatever its clients do, and without a traceback."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import pytest
from conftest import soon
from test_serving import ENDLESS, metrics, save

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

LONG = 300
"""Seconds after which a test gives up. An answer of `ENDLESS` tokens would take longer by far."""


class Child(NamedTuple):
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama-gqa", tmp_path_factory.mktemp("llama"))


@contextmanager
def child(model: str) -> Iterator[Child]:
    """A server that has begun to serve, on a port that it was given by the kernel."""
    command = [sys.executable, "-c", "from vmmkv.cli import main; main()", "serve", model, "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", "0", "--max-bytes", "64MiB", "--max-seq-len", "131072"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            written: list[str] = []
            for line in process.stdout:
                written.append(line)
                if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                raise AssertionError("".join(written))
            yield Child(process, int(found[1]))
        finally:
            process.kill()


def ask(port: int, **fields: Any) -> http.client.HTTPConnection:
    """A client that has asked for more tokens than anybody waits for."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    body = json.dumps({"prompt": "w5 w6", "max_tokens": ENDLESS} | fields)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


@pytest.mark.few(1)
@pytest.mark.parametrize("is_impatient", [False, True])
def test_a_signal_ends_a_server_whose_clients_wait_or_have_gone(llama: str, is_impatient: bool) -> None:
    """One client streams, one waits for an answer in one piece, and both are told why it ends; one client has gone."""
    with child(llama) as server, closing(ask(server.port, stream=True)) as streaming:
        answer = streaming.getresponse()
        assert answer.read(1)
        with closing(ask(server.port)) as waiting:
            gone = ask(server.port)
            soon(lambda: metrics(f"http://127.0.0.1:{server.port}")["vmmkv:num_sequences"] == 3)
            gone.close()
            server.process.send_signal(signal.SIGINT)
            while is_impatient and server.process.poll() is None:
                server.process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    server.process.wait(timeout=0.1)
            refused = waiting.getresponse()
            assert refused.status == 503
            assert "finished before" in json.loads(refused.read())["error"]["message"]
        assert b'"error": "Generation loop finished before' in answer.read().splitlines()[-2]
        written = server.process.communicate(timeout=LONG)[0]
    assert "Traceback" not in written
    assert "Application shutdown complete" in written
