"""`vmmkv serve`: clients of transformers' server on rows get the text that `generate` makes, and leave no row behind.

The server runs in a thread of its test, and ends with the test. Prompts are random words after which no token is a
close decision of the model.
"""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import typer
from conftest import PATIENCE, join, soon
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.logits_process import TemperatureLogitsWarper
from typer.testing import CliRunner

import vmmkv
from vmmkv.cli.app import app
from vmmkv.integrations import batching
from vmmkv.integrations.batching.config import OneTemperatureEach
from vmmkv.integrations.batching.manager import RowManager
from vmmkv.integrations.batching.processor import RowProcessor

openai = pytest.importorskip("openai", reason="needs the extra serve")
pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

import uvicorn  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from vmmkv.integrations import serving  # noqa: E402

NEW = 24
"""Tokens of an answer."""
ENDLESS = 130_000
"""Tokens of an answer that its test does not wait for."""
ROW = 1 << 17
"""Tokens of the longest request."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save(name: str, folder: Path) -> str:
    """A model, and a tokenizer of whole words, as files; returns what a client calls it."""
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE).save_pretrained(folder)
    tiny_model(name, "eager", "cpu").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("llama-gqa", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def keeps_states(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that cannot run on rows."""
    return save("qwen3-next", tmp_path_factory.mktemp("qwen3-next"))


@contextmanager
def server(*arguments: str, device: str = "cpu") -> Iterator[str]:
    """Runs the server as the command line does, but for how it shows errors; yields its address."""
    options = ["--device", device, "--host", "127.0.0.1", "--port", "0", "--non-blocking"]
    command = typer.main.get_command(app)
    started, startup = threading.Event(), uvicorn.Server.startup

    async def start(*args: Any, **kwargs: Any) -> None:
        try:
            await startup(*args, **kwargs)
        finally:
            started.set()

    with patch.object(uvicorn.Server, "startup", start):
        made: Any = command.main(["serve", *options, *arguments], standalone_mode=False)
        assert started.wait(PATIENCE)
    try:
        yield "http://127.0.0.1:{1}".format(*made.server.servers[0].sockets[0].getsockname())
    finally:
        made.server.should_exit = True
        vmmkv.publication.unpublish()
        join(made._thread)


@pytest.fixture
def address(llama: str) -> Iterator[str]:
    with server("--max-bytes", "256MiB", "--max-seq-len", str(ROW), "--idle-seconds", "0") as address:
        yield address


OPTIONS: dict[str, Any] = {
    "api_key": "none",
    "max_retries": 0,
    "timeout": PATIENCE,
    "default_headers": {"x-request-id": "same"},  # as proxies do that send a request again
}


def client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", **OPTIONS)


def text_of(address: str, model: str, prompt: str = "w1 w2", **told: Any) -> str:
    """What follows a prompt."""
    with openai.OpenAI(base_url=f"{address}/v1", **OPTIONS) as plain:
        told = {"max_tokens": NEW, "temperature": 0} | told
        return plain.completions.create(model=model, prompt=prompt, **told).choices[0].text


def metrics(address: str) -> dict[str, float]:
    """What Prometheus is told of the one pool, where there is no other label."""
    with openai.OpenAI(base_url=address, **OPTIONS) as plain:
        text = plain.get("/metrics", cast_to=str)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels.keys() == {"pool", "device"}}


# ---------------------------------------------------------------------- the same text


class Answer(NamedTuple):
    """A prompt, and what `generate` makes of it."""

    prompt: str
    text: str


def answers(count: int, name: str = "llama-gqa", device: str = "cpu") -> list[Answer]:
    """Of random prompts those of which no token is a close decision, which another order of sums could turn."""
    random, model, made = Random(), tiny_model(name, "eager", device), []
    told = {"output_logits": True, "return_dict_in_generate": True}
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, **told)
    while len(made) < count:
        length = random.randint(1, 60)
        prompts = torch.randint(VOCABULARY, (16, length), device=device)
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=greedy)
        best = torch.stack(output.logits).topk(2).values
        is_clear = ((best[..., 0] - best[..., 1]) > 1e-4).all(dim=0)
        for tokens in output.sequences[is_clear].tolist():
            words = [f"w{token}" for token in tokens]
            made.append(Answer(" ".join(words[:length]), " ".join(words[length:])))
    return made[:count]


async def ask(model: str, server: openai.AsyncOpenAI, prompt: str, *, chat: bool, stream: bool) -> str:
    """The text that a client gets."""
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": NEW, "stream": stream}
    if chat:
        got = await server.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
    else:
        got = await server.completions.create(prompt=prompt, **options)
    if stream:
        choices = [chunk.choices[0] async for chunk in got]
        return "".join((choice.delta.content if chat else choice.text) or "" for choice in choices)
    return got.choices[0].message.content if chat else got.choices[0].text


async def ask_all(model: str, address: str, asked: list[Answer]) -> list[str]:
    """The texts that clients get, half of them in chats and half streamed."""
    async with client(address) as server:
        waiting = [
            ask(model, server, answer.prompt, chat=number % 2 == 0, stream=number % 4 < 2)
            for number, answer in enumerate(asked)
        ]
        return await asyncio.gather(*waiting)


@pytest.mark.gpu
def test_on_a_gpu_clients_get_the_text_of_generate_from_graphs(tmp_path: Path) -> None:
    """Which the server has made of decode and prompts before they ask; none is made while it serves."""
    name, expected = save("llama-gqa-wide", tmp_path), answers(40, "llama-gqa-wide", "cuda")
    capture = ModelRunner._capture_graph
    with patch.object(ModelRunner, "_capture_graph", autospec=True, side_effect=capture) as captured:
        with server(name, "--max-bytes", "1GiB", "--max-seq-len", "300", device="cuda:0") as address:
            before = captured.call_count
            assert before > 40  # of each size two, since one batch is made while another runs
            for _ in range(2):
                assert asyncio.run(ask_all(name, address, expected)) == [answer.text for answer in expected]
        assert captured.call_count == before


def published() -> dict[str, Any] | None:
    """The server's pool, as `vmmkv top` shows it."""
    records = json.loads(CliRunner().invoke(app, ["top", "--json"]).stdout)
    pools = [pool for record in records if record["pid"] == os.getpid() for pool in record["pools"]]
    return next((pool for pool in pools if pool["limit_bytes"] == 256 << 20), None)


def test_64_clients_get_the_text_of_generate_and_leave_nothing(llama: str) -> None:
    """While 200 others disconnect at random moments, on every path, whether or not an answer is streamed. No request
    is left, and memory goes back, as `vmmkv top` and Prometheus see."""
    expected, random = answers(64), Random()
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "w5", "max_tokens": ENDLESS},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}], "max_tokens": ENDLESS},
        "/v1/responses": {"input": "w5", "max_output_tokens": ENDLESS},
    }

    async def disconnect(port: int) -> None:
        path, body = random.choice([*bodies.items()])
        data = json.dumps(body | {"model": llama, "stream": random.random() < 0.5}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"\r\n" + data[: random.choice([3, len(data), len(data)])])
        await asyncio.sleep(random.random() * 0.4)
        writer.close()

    async def all_of_them(address: str) -> list[str]:
        await ask_all(llama, address, expected[:1])  # until there is a model none can begin
        port = int(address.rpartition(":")[2])
        got, *_ = await asyncio.gather(ask_all(llama, address, expected), *(disconnect(port) for _ in range(200)))
        return got

    start = patch.object(RowManager, "start", autospec=True, side_effect=RowManager.start)
    with start as started, server("--max-bytes", "256MiB", "--max-seq-len", str(ROW), "--idle-seconds", "0") as address:
        assert asyncio.run(all_of_them(address)) == [answer.text for answer in expected]
        manager = started.call_args.args[0]
        soon(lambda: not manager.output_router.result_handlers)
        soon(lambda: not manager.batch_processor.has_pending_requests())
        soon(lambda: metrics(address)["vmmkv:num_sequences"] == metrics(address)["vmmkv:physical_bytes"] == 0)
        told = metrics(address)
        assert told["vmmkv:pages_created_total"] > 0
        assert told["vmmkv:limit_bytes"] == 256 << 20
        soon(lambda: (pool := published()) and pool["pages_created"] > 0 and pool["physical_bytes"] == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("told", [{}, {"max_tokens": 60}, {"max_tokens": 1000}])
def test_an_answer_that_reaches_the_end_of_its_row_says_so(llama: str, stream: bool, told: dict[str, int]) -> None:
    plain: dict[str, Any] = {"model": llama, "temperature": 0, "stream": stream} | told
    messages = [{"role": "user", "content": "w5 w6"}]
    with server("--max-bytes", "64MiB", "--max-seq-len", "64") as address:
        sync = openai.OpenAI(base_url=f"{address}/v1", **OPTIONS)
        found = [sync.completions.create(prompt="w5 w6", **plain)]
        found.append(sync.chat.completions.create(messages=messages, **plain))
        for each in [[*each][-1] for each in found] if stream else found:
            assert each.usage.completion_tokens == min(told.get("max_tokens", 62), 62)
            assert each.choices[0].finish_reason == "length"
        sync.close()


# ---------------------------------------------------------------------- errors


def test_an_error_in_a_batch_is_told_to_all_clients(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON, whatever the error says; later clients are told as well, and so is who asks for the server's health."""
    says, step = 'it says "no"\nand goes', RowProcessor._generation_step
    seen: list[Any] = []

    def fail(processor: Any, model: Any) -> None:
        seen.append(model)
        if len(seen) > 3:
            raise RuntimeError(says)
        step(processor, model)

    async def streamed(server: openai.AsyncOpenAI) -> None:
        async for _ in await server.completions.create(model=llama, prompt="w5", max_tokens=ENDLESS, stream=True):
            pass

    async def told() -> None:
        async with client(address) as server:
            plain = server.completions.create(model=llama, prompt="w6", max_tokens=ENDLESS)
            for error in await asyncio.gather(streamed(server), plain, return_exceptions=True):
                assert isinstance(error, openai.APIError)
                assert says in f"{error.body}" or repr(says)[1:-1] in f"{error.body}"
            with pytest.raises(openai.InternalServerError, match="503"):
                await streamed(server)

    monkeypatch.setattr(RowProcessor, "_generation_step", fail)
    with server("--max-bytes", "64MiB", "--max-seq-len", str(ROW)) as address:
        asyncio.run(told())
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request("GET", "/health")
        assert connection.getresponse().status == 503
        connection.close()


def test_servers_share_a_budget(llama: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory goes to a server that asks for it from a cache that has been left, here of the same process."""
    monkeypatch.setattr("vmmkv.ledger.cache_folder", lambda: tmp_path)
    layout, [answer] = vmmkv.KVLayout(2, 2, 16, torch.float32), answers(1)
    pool = vmmkv.FramePool("32MiB", device="cpu", shared="chat", reserved="8MiB")
    with closing(pool), vmmkv.KVCache(layout, 1, 80_000, pool=pool) as other:
        other.sequence(60_000).free()
        with server("--pool", "chat", "--reserved", "4MiB", "--max-seq-len", str(ROW)) as address:

            async def told() -> str:
                async with client(address) as openai_client:
                    await ask(llama, openai_client, "w5 " * 5_000, chat=False, stream=False)
                    return await ask(llama, openai_client, answer.prompt, chat=False, stream=False)

            assert asyncio.run(told()) == answer.text
            made = json.loads(CliRunner().invoke(app, ["pool", "chat", "--json"]).stdout)
            assert [line["reserved"] for line in made[0]["processes"]] == [8 << 20, 4 << 20]
            assert made[0]["limit"] == 32 << 20
    for wrong in (["--reserved", "1GiB"], ["--pool", "no name"], ["--pool", "chat", "--reserved", "much"]):
        with pytest.raises(vmmkv.VmmkvError, match=r"reserved|shared|much"), server(*wrong):
            pass


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": "w5 " * ROW}, f"a row is {ROW} long"),
    ({"max_tokens": 0}, "max_new_tokens=0"),
    ({"stop": ["w5"]}, "stop_strings"),
    ({"frequency_penalty": 0.5}, "repetition_penalty=1.5"),
    *(({"extra_body": {"generation_config": json.dumps(each)}}, next(iter(each))) for each in (
        {"num_beams": 3}, {"guidance_scale": 3.0}, {"forced_eos_token_id": 3}, {"suppress_tokens": [5]},
        {"sequence_bias": [[[5], 3.0]]}, {"max_time": 1.0}, {"nonsense": 1}, {"eos_token_id": "x"},
    )),
    *(({"temperature": None, "extra_body": {"generation_config": json.dumps({"do_sample": True, **each})}}, reason)
      for each, reason in (({"top_p": 0.5}, "top_p=0.5"), ({"temperature": -1.0}, "temperature=-1.0"))),
]  # fmt: skip
"""Requests whose answer a batch cannot give, and the name that the refusal has for the reason."""


def test_what_a_batch_cannot_do_for_one_request_is_refused_by_name(address: str, llama: str, keeps_states: str) -> None:
    """Also as the first request of all, which decides nothing for later ones; and others are answered."""
    [answer] = answers(1)
    for wrong, reason in [*REFUSED, ({"model": keeps_states}, "keeps something else")]:
        with pytest.raises(openai.BadRequestError, match=reason) as refused:
            text_of(address, **{"model": llama, "prompt": answer.prompt} | wrong)
        assert refused.value.type == "invalid_request_error"
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "max_new_tokens": NEW}
    neutral, hot = (
        {"extra_body": {"generation_config": json.dumps(each)}}
        for each in (neutral, {"do_sample": True, "temperature": 1e9})
    )
    for told in ({"n": 1, "frequency_penalty": 0.0, "seed": 7, "user": "somebody"}, neutral):
        assert text_of(address, llama, answer.prompt, **told) == answer.text
    assert text_of(address, llama, answer.prompt, temperature=None, **hot) != answer.text


def test_requests_of_one_batch_are_sampled_each_in_its_own_way() -> None:
    """At temperature 0 the first of the likeliest tokens, also where two are as likely; otherwise as told."""
    scores = torch.randn(64, 50)
    scores[::2] = scores[::2].round()  # many are alike
    temperatures = torch.rand(64).where(torch.arange(64) % 4 < 2, 0.0) + 1e-30
    alone = OneTemperatureEach(TemperatureLogitsWarper(0.5))(scores, temperatures.view(torch.int32))
    drawn = alone.softmax(-1)
    expected = (scores.double() / temperatures.double()[:, None]).softmax(-1)
    is_drawn = temperatures > 1e-29
    torch.testing.assert_close(drawn[is_drawn].double(), expected[is_drawn], rtol=1e-4, atol=1e-6)
    best = torch.nn.functional.one_hot(scores.argmax(-1), 50).float()
    torch.testing.assert_close(drawn[~is_drawn], best[~is_drawn], rtol=0, atol=0)


def test_top_p_is_each_requests_where_the_model_has_one(tmp_path: Path) -> None:
    """A share of next to nothing leaves the likeliest token alone, whatever the temperature; the next has another."""
    folder = save("llama-gqa", tmp_path)
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=NEW).save_pretrained(folder)
    [answer] = answers(1)
    with server("--max-bytes", "64MiB", "--max-seq-len", "4096") as address:
        narrow, wide = (text_of(address, folder, answer.prompt, temperature=100.0, top_p=p) for p in (1e-9, 1.0))
    assert narrow == answer.text != wide


# ---------------------------------------------------------------------- models


def test_several_models_answer_one_after_another(llama: str, tmp_path: Path) -> None:
    """Each gives what it gives alone. After `/reset` a folder's model has the weights that the folder has by then."""
    folder = save("llama-gqa", tmp_path)
    other = copy.deepcopy(tiny_model("llama-gqa", "eager", "cpu"))
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(7, dims=0))
    with server("--max-bytes", "64MiB") as address, openai.OpenAI(base_url=address, **OPTIONS) as plain:
        first = text_of(address, llama)
        assert text_of(address, folder) == first == text_of(address, llama)
        other.save_pretrained(folder)
        plain.post("/reset", cast_to=object)
        second = text_of(address, folder)
        assert second != first == text_of(address, llama)
        assert text_of(address, folder) == second
        soon(lambda: metrics(address)["vmmkv:num_sequences"] == 0)
    with server("--max-bytes", "64MiB", folder) as address:
        assert text_of(address, folder) == second


# ---------------------------------------------------------------------- start and end


def test_a_server_that_has_its_model_warms_up_before_anybody_asks(llama: str) -> None:
    """And serves with what it made then; another model's first request does not wait for all graphs."""
    warmup = RowManager.warmup
    with patch.object(RowManager, "warmup", autospec=True, side_effect=warmup) as warm:
        with server(llama, "--max-bytes", "64MiB") as address:
            (manager,) = warm.call_args.args
            with patch.object(RowManager, "add_request", autospec=True, side_effect=RowManager.add_request) as asked:
                text_of(address, llama)
            assert asked.call_args.args[0] is manager
        with server("--max-bytes", "64MiB") as address:
            text_of(address, llama)
        assert warm.call_count == 1


def test_a_server_that_cannot_serve_says_why_and_does_not_start(
    llama: str, keeps_states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, error, reason in (
        ([keeps_states], vmmkv.UnsupportedError, "keeps something else"),
        (["--no-continuous-batching"], vmmkv.ArgumentError, "got --no-continuous-batching"),
        ([str(tmp_path / "mistyped")], vmmkv.ArgumentError, "mistyped"),
        (["--max-bytes", "much"], vmmkv.BudgetError, "much"),
        (["--max-bytes", "1KiB", llama], vmmkv.BudgetError, "1KiB"),
        (["--kv-dtype", "int9"], vmmkv.DtypeError, "int9"),
    ):
        with pytest.raises(error, match=reason), server(*arguments):
            pass
    fails = patch.object(ModelRunner, "warmup", side_effect=RuntimeError("no graph"))
    with fails, pytest.raises(RuntimeError, match="no graph"), server("--max-bytes", "64MiB", llama):
        pass
    monkeypatch.setattr(batching.transformers, "__version__", "6.0.1")
    with pytest.raises(vmmkv.UnsupportedError, match=r"6\.0\.1 is not among the versions"), server():
        pass
    monkeypatch.delitem(sys.modules, serving.__name__)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(vmmkv.UnsupportedError, match=r"fastapi.*pip install \"vmmkv\[serve\]\""), server():
        pass


def test_a_server_whose_port_is_taken_ends(llama: str) -> None:
    """With the batches that it had started."""
    start = RowManager.start
    with server("--max-bytes", "64MiB") as address, patch.object(RowManager, "start", autospec=True) as started:
        started.side_effect = start
        arguments = ["serve", "--device", "cpu", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], llama]
        with pytest.raises(SystemExit):
            typer.main.get_command(app).main([*arguments, "--max-bytes", "64MiB"], standalone_mode=False)
    assert not started.call_args.args[0].is_running()


# ---------------------------------------------------------------------- signals


class Child(NamedTuple):
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int


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


def connect(port: int, **fields: Any) -> http.client.HTTPConnection:
    """A client that has asked for more tokens than anybody waits for."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    body = json.dumps({"prompt": "w5 w6", "max_tokens": ENDLESS} | fields)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


@pytest.mark.few(1)
@pytest.mark.parametrize("is_impatient", [False, True])
def test_a_signal_ends_a_server_whose_clients_wait_or_have_gone(llama: str, is_impatient: bool) -> None:
    """One client streams, one waits for an answer in one piece, and both are told why it ends; one client has gone."""
    with child(llama) as server, closing(connect(server.port, stream=True)) as streaming:
        answer = streaming.getresponse()
        assert answer.read(1)
        with closing(connect(server.port)) as waiting:
            gone = connect(server.port)
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
        written = server.process.communicate(timeout=PATIENCE)[0]
    assert "Traceback" not in written
    assert "Application shutdown complete" in written
