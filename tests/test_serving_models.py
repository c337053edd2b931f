"""Which models `vmmkv serve` lists, keeps and refuses; and small things that clients of OpenAI's server rely on."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from conftest import soon
from test_serving import ENDLESS, metrics, save, server
from test_serving_limits import message, post
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from vmmkv.cli.app import app

openai = pytest.importorskip("openai", reason="needs the extra serve")
serving_models = pytest.importorskip("vmmkv.integrations.serving_models", reason="needs the extra serve")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def address(llama: str) -> Iterator[str]:
    """A server that was started with a model."""
    with server(llama, "--max-bytes", "64MiB", "--max-seq-len", "131072", "--idle-seconds", "0") as address:
        yield address


def listed(address: str) -> list[str]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as plain:
        return [each.id for each in plain.models.list()]


def test_a_server_lists_the_models_that_it_has(llama: str, address: str, tmp_path: Path) -> None:
    """Also where the hub has no folder on this machine."""
    with patch("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "nowhere")):
        assert listed(address) == [llama]
        with server("--max-bytes", "64MiB", "--max-seq-len", "64", "--model-timeout", "-1") as of_any:
            assert listed(of_any) == []
            assert post(of_any, "/v1/completions", json.dumps({"model": llama, "prompt": "w5"}))[0] == 200
            assert listed(of_any) == [llama]


def test_a_server_keeps_the_model_that_it_was_started_with(llama: str, address: str, tmp_path: Path) -> None:
    """Nobody has it load another, or lose its own."""
    other = save("llama-gqa", tmp_path)
    for path in ("/load_model", "/reset"):
        status, told = post(address, path, json.dumps({"model": other}))
        assert status == 403
        assert llama in told["error"]["message"]
    assert post(address, "/v1/systemone", json.dumps({"model": other, "state": "w5", "questions": {"q": {}}}))[0] == 422
    assert listed(address) == [llama]
    assert post(address, "/v1/completions", json.dumps({"prompt": "w5", "max_tokens": 1}))[0] == 200


def test_no_other_model_is_loaded_beside_the_one(llama: str, tmp_path: Path) -> None:
    """Whichever way a request comes: sound and decisions name models, too."""
    models = serving_models.RowModelManager(device="cpu", force_model=llama)
    try:
        before = dict(models.loaded_models)
        for name, file in ((save("llama-gqa", tmp_path), None), (llama, "one.gguf")):
            with pytest.raises(serving_models.UnknownModelError, match=name):
                models.load_model_and_processor(models.process_model_name(name), gguf_file=file)
        assert models.loaded_models == before
    finally:
        models.shutdown()


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    """In one line, whether there is no folder or no model in it."""
    for name in (str(tmp_path / "mistyped"), str(tmp_path), f"{tmp_path}:one.gguf"):
        with pytest.raises(serving_models.UnknownModelError) as refused, server(name):
            pass
        assert name in str(refused.value)
        assert "\n" not in str(refused.value)


def test_help_names_the_model() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert "MODEL" in shown
    assert "--max-request-bytes" in shown


def test_a_server_without_a_model_says_what_requests_need(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), server("--max-bytes", "64MiB"):
        assert "no MODEL was given, so that each request needs a model" in caplog.text


def test_only_a_request_that_asks_for_a_stream_has_one(address: str, llama: str) -> None:
    """As of OpenAI's server."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as plain:
        response = plain.responses.create(model=llama, input="w5", max_output_tokens=3)
        assert response.status == "completed"
        assert response.usage.output_tokens == 3
        events = list(plain.responses.create(model=llama, input="w5", max_output_tokens=3, stream=True))
        assert events[-1].type == "response.completed"
    for path, body in {
        "/v1/completions": {"prompt": "w5"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}]},
    }.items():  # fmt: skip
        for stream in ({}, {"stream": None}, {"stream": False}):
            status, told = post(address, path, json.dumps(body | {"max_tokens": 2} | stream))
            assert (status, len(told["choices"])) == (200, 1)


def test_a_field_is_refused_and_not_called_ignored(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert "asked for n=2" in message(post(address, "/v1/completions", json.dumps({"prompt": "w5", "n": 2})))
    assert "gnoring" not in caplog.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_request_whose_client_leaves_ends(address: str, path: str) -> None:
    """Though its answer is not streamed. Its row is given back."""
    plain: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "w5", "max_tokens": ENDLESS},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}], "max_tokens": ENDLESS},
        "/v1/responses": {"input": "w5", "max_output_tokens": ENDLESS},
    }
    leaving = http.client.HTTPConnection(address.removeprefix("http://"))
    leaving.request("POST", path, json.dumps(plain[path]), {"content-type": "application/json"})
    soon(lambda: metrics(address)["vmmkv:num_sequences"] == 1)
    leaving.close()
    soon(lambda: metrics(address)["vmmkv:num_sequences"] == 0)


def test_another_model_answers_while_a_request_is_read(llama: str, tmp_path: Path) -> None:
    """However long that takes. Then the first has its turn."""
    other, encode = save("llama-gqa", tmp_path), PreTrainedTokenizerFast._encode_plus
    begun, answered, told = threading.Event(), threading.Event(), []

    def slowly(tokenizer: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        if "w7" in text:
            begun.set()
            assert answered.wait(300)
        return encode(tokenizer, text, *args, **kwargs)

    def ask(address: str, model: str, prompt: str) -> tuple[int, Any]:
        return post(
            address,
            "/v1/completions",
            json.dumps({"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}),
        )

    with server("--max-bytes", "64MiB", "--max-seq-len", "64", "--model-timeout", "-1") as of_any:
        with patch.object(PreTrainedTokenizerFast, "_encode_plus", slowly):
            waiting = threading.Thread(target=lambda: told.append(ask(of_any, llama, "w7 w8")))
            waiting.start()
            try:
                assert begun.wait(300)
                assert ask(of_any, other, "w5 w6")[0] == 200
            finally:
                answered.set()
                waiting.join()
        again = ask(of_any, llama, "w7 w8")
        assert told[0][0] == again[0] == 200
        assert told[0][1]["choices"] == again[1]["choices"]
