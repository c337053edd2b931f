"""`vmmkv serve`: many clients of transformers' server on rows get the text that `generate` makes, and leave nothing.

The server runs in a thread of its test, and ends with the test. Prompts are random words, of which the model is never
in doubt what follows.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
import torch
import typer
from conftest import PATIENCE, calls, join
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.logits_process import TemperatureLogitsWarper
from typer.testing import CliRunner

import vmmkv
from vmmkv.cli.app import app
from vmmkv.integrations import batching
from vmmkv.integrations.batching.manager import RowManager
from vmmkv.integrations.batching.processor import RowProcessor
from vmmkv.integrations.batching.sampling import OneTemperatureEach

openai = pytest.importorskip("openai", reason="needs the extra serve")
pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

import uvicorn  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from transformers.cli.serving import utils as their_utils  # noqa: E402
from transformers.cli.serving.model_manager import ModelManager, TimedModel  # noqa: E402
from transformers.cli.serving.utils import CBStreamer, Modality  # noqa: E402

from vmmkv.integrations import serving  # noqa: E402
from vmmkv.integrations.serving_requests import check_fields  # noqa: E402

NEW = 24
"""Tokens of an answer."""
ENDLESS = 8_000
"""Tokens of an answer that its test does not wait for."""
ROW = 8_192
"""Tokens of the longest request."""
RAISES = "a message that the chat template refuses"
TEMPLATE = (
    "{% for message in messages %}{{ raise_exception('no') if message['content'] == '"
    + RAISES
    + "' else message['content'] }}{% endfor %}"
)


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


def client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)


def metrics(address: str) -> dict[str, float]:
    """What Prometheus is told of the one pool, where there is no other label."""
    with openai.OpenAI(base_url=address, api_key="none", timeout=300) as plain:
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
    greedy = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    while len(made) < count:
        length = random.randint(1, 60)
        prompts = torch.tensor(
            [[random.randrange(VOCABULARY) for _ in range(length)] for _ in range(16)], device=device
        )
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


async def leave(model: str, server: openai.AsyncOpenAI, prompt: str) -> None:
    """A client that goes away in the middle of an answer."""
    stream = await server.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=ENDLESS, stream=True)
    words = (word async for chunk in stream for word in chunk.choices[0].text.split())
    for _ in range(3):
        await anext(words)
    await stream.close()


@pytest.mark.filterwarnings(  # the client's, of a stream that is closed while the event loop ends
    "ignore:Exception ignored in. <async_generator object Response:pytest.PytestUnraisableExceptionWarning"
)
def test_64_clients_get_the_text_of_generate_and_leave_nothing(address: str, llama: str) -> None:
    """Of whom some stream, and eight go away in the middle; memory goes back, as `vmmkv top` and Prometheus see."""
    expected = answers(56)

    async def all_at_once() -> list[str | None]:
        async with client(address) as server:
            asked = [
                ask(llama, server, answer.prompt, chat=number % 2 == 0, stream=number % 4 < 2)
                for number, answer in enumerate(expected)
            ]
            left = [leave(llama, server, answer.prompt) for answer in expected[:8]]
            return await asyncio.gather(*asked, *left)

    with patch.object(RowManager, "cancel_request", autospec=True, side_effect=RowManager.cancel_request) as cancel:
        assert asyncio.run(all_at_once())[:56] == [answer.text for answer in expected]
        with calls(RowManager, "_generation_loop_body") as until:
            until(lambda: cancel.call_count == 8)
            until(lambda: metrics(address)["vmmkv:num_sequences"] == 0)
            until(lambda: metrics(address)["vmmkv:physical_bytes"] == 0)
    told = metrics(address)
    assert told["vmmkv:pages_created_total"] > 0
    assert told["vmmkv:limit_bytes"] == 256 << 20
    with calls(vmmkv.publication.Publisher, "write") as until:
        until(lambda: (pool := published()) and pool["pages_created"] > 0 and pool["physical_bytes"] == 0)


@pytest.mark.gpu
def test_on_a_gpu_clients_get_the_text_of_generate_from_graphs(tmp_path: Path) -> None:
    """Which the server has made of decode and prompts before they ask; none is made while it serves."""
    name, expected = save("llama-gqa-wide", tmp_path), answers(40, "llama-gqa-wide", "cuda")
    capture = ModelRunner._capture_graph

    async def all_at_once() -> list[str]:
        async with client(address) as server:
            asked = [
                ask(name, server, answer.prompt, chat=number % 2 == 0, stream=number % 4 < 2)
                for number, answer in enumerate(expected)
            ]
            return await asyncio.gather(*asked)

    with patch.object(ModelRunner, "_capture_graph", autospec=True, side_effect=capture) as captured:
        with server(name, "--max-bytes", "1GiB", "--max-seq-len", "300", device="cuda:0") as address:
            before = captured.call_count
            assert before > 40  # of each size two, since one batch is made while another runs
            for _ in range(2):
                assert asyncio.run(all_at_once()) == [answer.text for answer in expected]
        assert captured.call_count == before


def published() -> dict[str, Any] | None:
    """The server's pool, as `vmmkv top` shows it."""
    records = json.loads(CliRunner().invoke(app, ["top", "--json"]).stdout)
    pools = [pool for record in records if record["pid"] == os.getpid() for pool in record["pools"]]
    return next((pool for pool in pools if pool["limit_bytes"] == 256 << 20), None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("told", [{}, {"max_tokens": 60}])
def test_who_is_cut_off_at_the_end_of_a_row_is_told_so(llama: str, stream: bool, told: dict[str, int]) -> None:
    """As who gets as many tokens as he has asked for."""

    async def ends() -> list[str]:
        async with client(address) as server:
            plain: dict[str, Any] = {"model": llama, "temperature": 0, "stream": stream} | told
            found = [
                await server.completions.create(prompt="w5 w6", **plain),
                await server.chat.completions.create(messages=[{"role": "user", "content": "w5 w6"}], **plain),
            ]
            if stream:
                found = [[chunk async for chunk in each][-1] for each in found]
            assert all(each.usage.completion_tokens == told.get("max_tokens", 62) for each in found)
            return [each.choices[0].finish_reason for each in found]

    with server("--max-bytes", "64MiB", "--max-seq-len", "64") as address:
        assert asyncio.run(ends()) == ["length", "length"]


def test_who_was_served_is_told_of_the_end_of_a_batch(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON, whatever the error says. Who comes later is told as well."""
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


def test_who_does_not_fit_is_told_what_would_help(llama: str) -> None:
    """By a request that nobody else keeps from memory; and others are served."""
    [answer] = answers(1)

    async def told() -> str:
        with server("--max-bytes", "2MiB", "--max-seq-len", str(ROW)) as address:
            async with client(address) as server_of_ours:
                prompt = " ".join(["w5"] * 5_000)
                with pytest.raises(openai.InternalServerError, match="A larger max_bytes helps"):
                    await server_of_ours.completions.create(model=llama, prompt=prompt, max_tokens=2)
                return await ask(llama, server_of_ours, answer.prompt, chat=False, stream=False)

    assert asyncio.run(told()) == answer.text


def test_half_a_character_is_refused(address: str, llama: str) -> None:
    """JSON can say it, and no tokenizer reads it."""
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as plain:
        for name in ("prompt", "suffix"):
            body = json.dumps({"model": llama, "prompt": "w5", "max_tokens": 2} | {name: "w5 \ud800"})
            with pytest.raises(openai.BadRequestError, match="not JSON"):
                plain.post("/v1/completions", cast_to=str, content=body.encode())


def test_who_is_named_late_misses_no_token(address: str, llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole answer is there before transformers says whom to tell."""
    [answer] = answers(1)

    class LateStreamer(CBStreamer):
        def __init__(self, manager: Any, *args: Any, **kwargs: Any) -> None:
            with calls(RowManager, "_generation_loop_body") as until:
                until(lambda: manager.input_queue.empty() and not manager.batch_processor.has_pending_requests())
            super().__init__(manager, *args, **kwargs)

    async def one() -> str:
        async with client(address) as server:
            await ask(llama, server, answer.prompt, chat=False, stream=False)
            monkeypatch.setattr(their_utils, "CBStreamer", LateStreamer)
            return await ask(llama, server, answer.prompt, chat=False, stream=True)

    assert asyncio.run(one()) == answer.text


# ---------------------------------------------------------------------- what is refused


def test_clients_are_told_why_they_are_refused(address: str, llama: str, keeps_states: str) -> None:
    """And others are served meanwhile, and afterwards."""
    [answer] = answers(1)

    async def refused() -> str:
        async with client(address) as server:
            with pytest.raises(openai.BadRequestError, match="keeps something else"):
                await ask(keeps_states, server, answer.prompt, chat=False, stream=False)
            with pytest.raises(openai.BadRequestError, match=f"{ENDLESS + 2000} new ones; a row is {ROW} long"):
                await server.completions.create(model=llama, prompt=answer.prompt, max_tokens=ENDLESS + 2000)
            with pytest.raises(openai.BadRequestError, match="no input_ids"):
                await ask(llama, server, "", chat=False, stream=False)
            return await ask(llama, server, answer.prompt, chat=False, stream=False)

    assert asyncio.run(refused()) == answer.text


NOT_DONE: list[dict[str, Any]] = [
    {"n": 3}, {"best_of": 3}, {"echo": True}, {"logprobs": 0}, {"logprobs": 2}, {"stop": "w5"}, {"stop": ["w5"]},
    {"logit_bias": {"5": 3.0}}, {"presence_penalty": 2.0}, {"frequency_penalty": 0.5}, {"top_p": 0.1, "temperature": 2},
    {"temperature": 2, "seed": 1}, {"temperature": -1}, {"max_tokens": 0},
    {"max_tokens": 1.5}, {"max_tokens": True}, {"max_tokens": "3"}, {"top_p": 2}, {"top_p": "x"}, {"top_p": True},
    {"temperature": True}, {"temperature": "0"}, {"seed": "x"}, {"model": ""},
    *({"extra_body": each} for each in (
        {"stream": "false"}, {"stream": 1}, {"suffix": 3}, {"suffix": ["w5"]}, {"model": None}, {"model": 5},
        {"model": {"name": "m"}}, {"stream_options": 5}, {"user": 5}, {"generation_config": "[" * 100_000},
    )),
    *({"extra_body": each} for each in ({"tools": []}, {"messages": []}, {"nonsense": 1}, {"min_p": 0.1})),
    {"temperature": 2, "extra_body": {"generation_config": '{"top_k": 3}'}},
    {"max_tokens": None, "extra_body": {"generation_config": '{"max_new_tokens": true}'}},
    *({"extra_body": {"generation_config": json.dumps(each)}} for each in (
        {"guidance_scale": 3.0}, {"forced_eos_token_id": 3}, {"num_beams": 3}, {"num_beams": True},
        {"stop_strings": ["w5"]},
        {"eos_token_id": "x"}, {"eos_token_id": [1, "x"]}, {"eos_token_id": 1.5}, {"do_sample": "no"},
        {"top_p": "x"}, {"top_p": 2, "do_sample": False},
        {"repetition_penalty": 2.0}, {"sequence_bias": [[[5], 3.0]]}, {"max_time": 1.0}, {"nonsense": 1}, [],
    )),
]  # fmt: skip
"""What no batch does for one of its requests, or nobody."""
SEEN: list[dict[str, Any]] = [
    {"role": "user", "content": [
        {"type": "text", "text": "w5"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
    ]},
]  # fmt: skip
NOT_DONE_IN_CHATS: list[dict[str, Any]] = [
    {"n": 2}, {"logprobs": True}, {"top_logprobs": 2}, {"response_format": {"type": "json_object"}}, {"stop": ["w5"]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, {"tool_choice": "required"},
    {"logit_bias": {"5": 3.0}}, {"reasoning_effort": "high"}, {"messages": SEEN}, {"messages": SEEN, "stream": True},
    {"max_completion_tokens": NEW - 1}, {"parallel_tool_calls": "x"}, {"metadata": 5},
    *({"extra_body": {"messages": each}} for each in (
        None, [], "w5", {"role": "user", "content": "w5"}, ["w5"], [None], [{}], [{"content": "w5"}],
        [{"role": 5, "content": "w5"}],
    )),
    *({"extra_body": {"messages": [{"role": "user", **each}]}} for each in (
        {"content": 5}, {"content": {"type": "text", "text": "w5"}}, {"content": ["w5"]}, {"content": [["w5"]]},
        {"content": [{"type": "text"}]}, {"content": [{"type": "text", "text": 5}]}, {"content": RAISES},
        {"tool_calls": 5}, {"tool_calls": [{}]}, {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    )),
    *({"extra_body": {"chat_template_kwargs": each}} for each in (
        5, "x", {"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 99}, {"tokenize": False},
        {"tokenizer_kwargs": {"truncation": True, "max_length": 2}}, {"return_tensors": "pt"}, {"return_dict": False},
        {"add_generation_prompt": False}, {"tools": []}, {"conversation": []}, {"conversations": []},
        {"continue_final_message": True}, {"load_audio_from_video": True}, {"chat_template": "w5"},
    )),
]  # fmt: skip
NOT_DONE_IN_RESPONSES: list[dict[str, Any]] = [
    {"input": []}, {"instructions": 5}, {"parallel_tool_calls": "x"}, {"extra_body": {"n": 2}},
    {"extra_body": {"max_tokens": 5}},
    {"instructions": "w6", "input": [{"role": "system", "content": "w5"}, {"role": "user", "content": "w7"}]},
    *({"input": [each]} for each in (
        5, {}, {"role": "user", "content": 5}, {"type": "function_call_output", "output": "w5"},
    )),
    {"input": [{"role": "user", "content": "w5"}, {"type": "function_call_output", "output": "w5"}]},
]  # fmt: skip
CHANGES_NOTHING: dict[str, Any] = {
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop": None, "top_p": 1.0, "seed": 7,
    "user": "somebody", "extra_body": {
        "generation_config": '{"num_beams": 1, "repetition_penalty": 1.0}', "metadata": {"a": "b"}, "min_p": None,
    },
}  # fmt: skip


def test_what_is_asked_is_done_or_refused_and_never_anothers(llama: str) -> None:
    """The first client of all, too, cannot have others' answers made otherwise, nor end them."""
    [answer] = answers(1)
    messages: Any = [{"role": "user", "content": answer.prompt}]

    async def all_of_them() -> list[str]:
        with server("--max-bytes", "64MiB", "--max-seq-len", "4096") as address:
            async with client(address) as openai_client:
                plain: dict[str, Any] = {"model": llama, "max_tokens": NEW, "temperature": 0}
                texts = openai_client.completions
                for wrong in NOT_DONE:
                    with pytest.raises(openai.BadRequestError) as refused:
                        await texts.create(prompt=answer.prompt, **plain | wrong)
                    assert refused.value.type == "invalid_request_error"
                for wrong in NOT_DONE_IN_CHATS:
                    with pytest.raises(openai.BadRequestError) as refused:
                        await openai_client.chat.completions.create(**{"messages": messages} | plain | wrong)
                    assert refused.value.type == "invalid_request_error"
                for wrong in NOT_DONE_IN_RESPONSES:
                    with pytest.raises(openai.BadRequestError) as refused:
                        await openai_client.responses.create(**{"model": llama, "input": answer.prompt} | wrong)
                    assert refused.value.type == "invalid_request_error"
                random = await texts.create(prompt=answer.prompt, **plain | {"temperature": 1e9})
                assert random.choices[0].text != answer.text
                greedy = json.dumps({"max_new_tokens": NEW, "do_sample": False})
                found = [
                    await texts.create(prompt=answer.prompt, **plain),
                    await texts.create(prompt=answer.prompt, **plain, **CHANGES_NOTHING, logprobs=None, echo=False),
                    await texts.create(prompt=answer.prompt, model=llama, extra_body={"generation_config": greedy}),
                    await texts.create(prompt=answer.prompt, model=llama, max_tokens=NEW),  # the model's own way
                ]
                chat = await openai_client.chat.completions.create(
                    messages=messages,
                    **plain,
                    **CHANGES_NOTHING,
                    logprobs=False,
                    response_format={"type": "text"},
                    tool_choice="none",
                    verbosity="medium",
                    max_completion_tokens=NEW,
                )
                return [each.choices[0].text for each in found] + [chat.choices[0].message.content or ""]

    assert asyncio.run(all_of_them()) == [answer.text] * 5


def test_who_has_tools_and_wants_one_call_at_a_time_is_refused() -> None:
    """The model may make several calls. Without tools it makes none."""
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    check_fields({"parallel_tool_calls": False}, set())
    check_fields(tools | {"parallel_tool_calls": True}, set())
    with pytest.raises(vmmkv.UnsupportedError, match="parallel_tool_calls=False"):
        check_fields(tools | {"parallel_tool_calls": False}, set())


def test_who_asks_for_another_model_is_told_that_it_is_not_there(address: str, llama: str, tmp_path: Path) -> None:
    """At once, whether the server has one model or those of its machine: nothing is fetched while others wait."""

    async def ask_for(address: str, *names: str) -> None:
        async with client(address) as server:
            for name in names:
                with pytest.raises(openai.NotFoundError, match=re.escape(name)) as unknown:
                    await ask(name, server, "w5", chat=False, stream=False)
                assert unknown.value.code == "model_not_found"
            for name in (llama, ModelManager.process_model_name(llama)):  # folders had a revision until 5.23
                await ask(name, server, "w5", chat=True, stream=False)
            nulls: dict[str, Any] = {"role": "assistant", "content": "w5", "tool_calls": None}
            await server.chat.completions.create(
                model=llama, messages=[cast(Any, nulls)], max_tokens=1, extra_body={"chat_template_kwargs": None}
            )

    asyncio.run(ask_for(address, "nobody/has-it", "nobody/has-it@v1", "nobody/has-it:q4.gguf", str(tmp_path), "/a/b/c"))
    with server(llama, "--max-bytes", "64MiB", "--max-seq-len", "4096") as of_one:
        asyncio.run(ask_for(of_one, "nobody/has-it", f"{llama}@v1", str(tmp_path)))


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

    async def three() -> list[str]:
        with server("--max-bytes", "64MiB", "--max-seq-len", "4096") as address:
            async with client(address) as server_:
                hot = {"model": folder, "prompt": answer.prompt, "temperature": 100.0, "max_tokens": NEW}
                found = [await server_.completions.create(**hot, top_p=share) for share in (1e-9, 1.0)]
                return [each.choices[0].text for each in found]

    narrow, wide = asyncio.run(three())
    assert narrow == answer.text != wide


def test_clients_may_choose_the_same_request_id(address: str, llama: str) -> None:
    """As proxies do that send a request again; each gets its own answer."""
    expected = answers(4)

    async def all_at_once() -> list[str]:
        async with client(address).with_options(default_headers={"x-request-id": "same"}) as server:
            asked = [
                ask(llama, server, each.prompt, chat=False, stream=at % 2 == 0) for at, each in enumerate(expected)
            ]
            return await asyncio.gather(*asked)

    assert asyncio.run(all_at_once()) == [each.text for each in expected]


def test_a_server_that_has_its_model_warms_up_before_anybody_asks(llama: str) -> None:
    """And serves with what it made then; another model's first request does not wait for all graphs."""
    warmup = RowManager.warmup
    with patch.object(RowManager, "warmup", autospec=True, side_effect=warmup) as warm:
        with server(llama, "--max-bytes", "64MiB") as address:
            assert warm.call_count == 1
            (manager,) = warm.call_args.args
            assert manager.is_running()
            with patch.object(RowManager, "add_request", autospec=True, side_effect=RowManager.add_request) as asked:
                complete(address, llama)
            assert asked.call_args.args[0] is manager
        with server("--max-bytes", "64MiB") as address:
            complete(address, llama)
        assert warm.call_count == 1


def test_a_server_does_not_start_with_what_cannot_run_on_rows(keeps_states: str) -> None:
    with pytest.raises(vmmkv.UnsupportedError, match="keeps something else"), server(keeps_states):
        pass


def test_a_server_does_not_start_with_options_that_cannot_be() -> None:
    with pytest.raises(vmmkv.ArgumentError, match="got --no-continuous-batching"), server("--no-continuous-batching"):
        pass
    with pytest.raises(vmmkv.BudgetError, match="much"), server("--max-bytes", "much"):
        pass


def test_what_transformers_does_not_batch_stays_with_it() -> None:
    state = serving.RowState(pytest.fail, continuous_batching=True)
    assert not state.use_continuous_batching(tiny_model("llama-gqa", "eager", "cpu"), Modality.VLM)


def test_a_server_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, names that have moved, and a library that is missing."""
    monkeypatch.setattr(batching.transformers, "__version__", "6.0.1")
    with pytest.raises(vmmkv.UnsupportedError, match=r"6\.0\.1 is not among the versions"), server():
        pass
    monkeypatch.undo()
    monkeypatch.setattr(serving, "Serve", type("Serve", (), {"__init__": lambda self: None}))
    with pytest.raises(vmmkv.UnsupportedError, match=r"GenerationState, .* build_server, uvicorn any more"), server():
        pass
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, serving.__name__)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(vmmkv.UnsupportedError, match=r"fastapi.*pip install \"vmmkv\[serve\]\""), server():
        pass


def complete(address: str, model: str) -> str:
    """What follows two words."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as plain:
        made = plain.completions.create(model=model, prompt="w1 w2", max_tokens=NEW, temperature=0)
    return made.choices[0].text


@contextmanager
def loaded_models(when_gone: Callable[[Any], object] | None = None) -> Iterator[list[weakref.ref[Any]]]:
    """The models that servers have loaded meanwhile; `when_gone` is called at the end of each."""
    models, load = [], ModelManager._load_model

    def note(manager: ModelManager, *args: Any, **kwargs: Any) -> Any:
        model = load(manager, *args, **kwargs)
        models.append(weakref.ref(model, when_gone))
        return model

    with patch.object(ModelManager, "_load_model", note):
        yield models


def test_a_model_that_was_unloaded_answers_nobody(tmp_path: Path) -> None:
    """Its folder may have other weights by then; its memory is given back before they are loaded."""
    folder = save("llama-gqa", tmp_path)
    with server("--max-bytes", "64MiB") as address, openai.OpenAI(base_url=address, api_key="x") as plain:
        before = complete(address, folder)
        other = tiny_model("llama-gqa", "eager", "cpu")
        with torch.no_grad():
            other.lm_head.weight.copy_(other.lm_head.weight.roll(7, dims=0))
        other.save_pretrained(folder)
        plain.post("/reset", cast_to=object)
        after = complete(address, folder)
    with server("--max-bytes", "64MiB") as address:
        assert before != complete(address, folder) == after


def test_a_model_that_is_loaded_again_is_there_once(llama: str) -> None:
    there: list[int] = []
    with loaded_models() as models, server("--max-bytes", "64MiB") as address:
        complete(address, llama)
        load = ModelManager._load_model

        def count(manager: ModelManager, *args: Any, **kwargs: Any) -> Any:
            there.append(sum(model() is not None for model in models))
            return load(manager, *args, **kwargs)

        with patch.object(ModelManager, "_load_model", count), openai.OpenAI(base_url=address, api_key="x") as plain:
            plain.post("/reset", cast_to=object)
            complete(address, llama)
    assert len(models) == 2
    assert there == [0]


def test_a_model_that_was_unloaded_leaves_nothing(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody asks for another one, and garbage is not collected while another thread collects it."""
    gone, counts = threading.Semaphore(0), itertools.count()
    monkeypatch.setattr(serving, "gc", SimpleNamespace(collect=lambda: next(counts) % 2 and gc.collect()))
    options = ["--max-bytes", "64MiB", "--model-timeout", "1"]
    with loaded_models(lambda _: gone.release()) as models, server(*options) as address:
        for _ in range(2):
            complete(address, llama)
            assert gone.acquire(timeout=PATIENCE)
    assert len(models) == 2


class StoppedTimer:
    """Stands in for `threading.Timer`: the test's machine may be too busy for timers to be set back in time."""

    def __init__(self, *_: object) -> None: ...

    def start(self) -> None: ...

    cancel = start


def test_a_model_that_answers_is_not_unloaded(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes, its timer is set back: who asks meanwhile would end the answer."""
    monkeypatch.setattr(threading, "Timer", StoppedTimer)

    async def two(address: str, until: Callable[[Callable[[], object]], None]) -> None:
        async with client(address) as server:
            stream = await server.completions.create(model=llama, prompt="w5", max_tokens=ENDLESS, stream=True)
            chunks = aiter(stream)
            await anext(chunks)
            before = reset.call_count
            await asyncio.to_thread(until, lambda: reset.call_count >= before + 3)
            await ask(llama, server, "w6", chat=False, stream=False)
            await anext(chunks)
            await stream.close()

    limits = ["--max-bytes", "64MiB", "--max-seq-len", str(ROW), "--model-timeout", "1"]
    spy = patch.object(TimedModel, "reset_timer", autospec=True, side_effect=TimedModel.reset_timer)
    with spy as reset, calls(TimedModel, "reset_timer") as until, loaded_models() as models, server(*limits) as address:
        asyncio.run(two(address, until))
        assert len(models) == 1


def test_who_is_answered_longer_than_a_batch_may_go_on_is_told_so(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for another model ends it, and is answered."""
    other = save("llama-gqa", tmp_path)
    may_go_on, step, stop = threading.Event(), RowProcessor._generation_step, RowManager.stop
    may_go_on.set()

    def wait_and_step(*args: Any) -> None:
        assert may_go_on.wait(PATIENCE)
        step(*args)

    def stop_at_once(*args: Any, hard_stop: bool = False, **kwargs: Any) -> None:
        if hard_stop:
            may_go_on.set()
        stop(*args, hard_stop=hard_stop, **kwargs)

    monkeypatch.setattr(RowProcessor, "_generation_step", wait_and_step)
    monkeypatch.setattr(RowManager, "stop", stop_at_once)
    spy = patch.object(RowManager, "add_request", autospec=True, side_effect=RowManager.add_request)

    async def two(address: str) -> None:
        async with client(address) as server:
            given: dict[str, Any] = {"model": llama, "prompt": "w5", "max_tokens": ENDLESS}
            with spy as added, calls(RowManager, "add_request") as until:
                stream = await server.completions.create(**given, stream=True)
                plain = asyncio.create_task(server.completions.create(**given))
                await asyncio.to_thread(until, lambda: added.call_count == 2)
            await anext(aiter(stream))
            may_go_on.clear()  # these answers take as long as they may
            assert await ask(other, server, "w6", chat=False, stream=False)
            with pytest.raises(openai.InternalServerError, match="finished before this request"):
                await plain
            with pytest.raises(openai.APIError) as cut_off:
                async for _ in stream:
                    pass
            assert "finished before this request" in f"{cut_off.value.body}"

    with server("--max-bytes", "64MiB", "--max-seq-len", str(ROW)) as address:
        asyncio.run(two(address))


def test_files_of_one_repository_are_models_of_their_own(llama: str, tmp_path: Path) -> None:
    """transformers calls both by the repository, also the one that the server was started with."""
    files = {"one.gguf": llama, "two.gguf": save("llama-gqa", tmp_path)}
    other = tiny_model("llama-gqa", "eager", "cpu")
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(7, dims=0))
    other.save_pretrained(tmp_path)
    for name in files:
        (tmp_path / name).touch()
    load = ModelManager.load_model_and_processor

    def load_file(manager: ModelManager, name: str, *args: Any, gguf_file: str | None = None, **kwargs: Any) -> Any:
        """Without the package that reads such files."""
        folder = ModelManager.process_model_name(files[gguf_file])
        found = load(manager, folder, *args, **kwargs)
        manager.loaded_models[f"{name}:{gguf_file}"] = manager.loaded_models.get(folder)
        return found

    with patch.object(ModelManager, "load_model_and_processor", load_file):
        with server("--max-bytes", "64MiB") as address:
            made = [complete(address, f"{tmp_path}:{name}") for name in files]
            assert [complete(address, f"{tmp_path}:{name}") for name in files] == made
        assert made[0] != made[1]
        started = patch.object(RowManager, "start", autospec=True, side_effect=RowManager.start)
        with started as starts, server("--max-bytes", "64MiB", f"{tmp_path}:two.gguf") as address:
            assert complete(address, f"{tmp_path}:two.gguf") == made[1]
        assert starts.call_count == 1


def test_a_server_whose_warm_up_fails_says_why_and_is_none(llama: str) -> None:
    """To who started it, not to a log of the event loop's."""
    with pytest.raises(vmmkv.BudgetError, match="1KiB"), server("--max-bytes", "1KiB", llama):
        pass
    fails = patch.object(ModelRunner, "warmup", side_effect=RuntimeError("no graph"))
    with fails, pytest.raises(RuntimeError, match="no graph"), server("--max-bytes", "64MiB", llama):
        pass


def test_a_server_whose_port_is_taken_ends(llama: str) -> None:
    """With the batches that it had started."""
    start = RowManager.start
    with server("--max-bytes", "64MiB") as address, patch.object(RowManager, "start", autospec=True) as started:
        started.side_effect = start
        arguments = ["serve", "--device", "cpu", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], llama]
        with pytest.raises(SystemExit):
            typer.main.get_command(app).main([*arguments, "--max-bytes", "64MiB"], standalone_mode=False)
    assert started.call_count == 1


def test_a_server_of_what_is_not_text_starts() -> None:
    """transformers knows no modality of it, and transcribes with it."""
    state = serving.RowState(pytest.fail, continuous_batching=True)
    whisper = type("WhisperForConditionalGeneration", (), {})()
    loaded = SimpleNamespace(model=whisper, processor=object())
    with pytest.raises(ValueError, match="modality"):
        ModelManager.get_model_modality(loaded.model, loaded.processor)
    serving._make_ready(state, "whisper@main", loaded)
    state.start()
    assert state.is_cb_alive()
