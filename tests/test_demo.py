"""The main job, and that it fails loudly when something is wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import vmmkv
from vmmkv.cli.app import app
from vmmkv.workload import BLOCK, Request, conversations, known_tokens, read_trace


def demo(*args: str):
    return CliRunner().invoke(app, ["demo", "--requests", "25", "--budget-tokens", "9000", *args])


def test_demo(device: str) -> None:
    result = demo("--device", device, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["requests"] == 25
    waste = figures["waste"]
    assert 0 < waste["vmmkv"] <= 0.02 < waste["per_layer"] < waste["static"] < 1
    assert waste["block_table_16"] == pytest.approx(waste["vmmkv"], abs=1e-3)
    assert figures["waste_measured"] == pytest.approx(waste["vmmkv"], abs=5e-3)
    assert figures["reuse_factor"] == figures["page_uses"] / figures["pages_created"] > 1
    assert 0 < figures["max_error"] < figures["error_bound"]
    assert figures["driver_calls"]["map"] >= figures["pages_created"]
    assert figures["device"] == ("cpu" if device == "cpu" else torch.cuda.get_device_name())


def test_the_budget_holds_and_sequences_are_preempted_under_it() -> None:
    figures = json.loads(demo("--device", "cpu", "--sequences", "16", "--json").stdout)
    assert figures["preemptions"] > 0
    assert figures["peak_tokens"] * figures["token_bytes"] <= figures["budget_bytes"]
    assert figures["pages_created"] * figures["page_size"] <= figures["budget_bytes"]


def test_demo_prints_tables_and_a_picture(tmp_path: Path) -> None:
    result = demo("--device", "cpu", "--plot", str(tmp_path / "pages.png"))
    assert result.exit_code == 0, result.output
    for words in ("Replayed 25 requests", "Checked attention", "Waste", "static reservation", "block table", "vmmkv"):
        assert words in " ".join(result.stdout.split())
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_demo_replays_traces(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"trace.{form}"
    if form == "csv":
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,300,10\n2023-11-16,40,8\n")
    else:
        lines = [
            {"timestamp": 0, "input_length": n, "output_length": m, "hash_ids": [0]} for n, m in ((300, 10), (40, 8))
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
    figures = json.loads(demo("--device", "cpu", "--trace", str(path), "--json").stdout)
    assert (figures["requests"], figures["steps"], figures["peak_tokens"]) == (2, 10, 300 + 40 + 16)


def test_on_the_host_a_trace_is_replayed_as_far_as_it_takes_no_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that is asked for; and it is said how far."""
    path = tmp_path / "trace.csv"
    path.write_text("ContextTokens,GeneratedTokens\n300,10\n40,8\n300,5\n")
    monkeypatch.setattr("vmmkv.cli.demo.HOST_TOKENS", 320)
    for options, requests, tokens in (([], 2, 358), (["--requests", "3"], 3, 663)):
        result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--trace", str(path), "--json", *options])
        assert json.loads(result.stdout)["requests"] == requests
        assert f"Replaying {requests} of 3 requests, {tokens} tokens" in result.stderr


def chats(count: int) -> list[Request]:
    """Requests whose prompts often begin alike, in blocks."""
    prompts: list[list[int]] = [[]]
    new = iter(range(count * 3))
    for _ in range(count):
        begin = random.choice(prompts)
        common = begin[: random.randint(0, min(len(begin), 6))]
        prompts.append(common + [next(new) for _ in range(random.randint(not common, 2))])
    lengths = [BLOCK * len(prompt) - random.choice([0, random.randrange(BLOCK)]) for prompt in prompts[1:]]
    return [Request(length, random.randint(1, 20), 0.0, tuple(prompt)) for length, prompt in zip(lengths, prompts[1:])]


def write(path: Path, requests: list[Request]) -> str:
    keys = "input_length", "output_length", "hash_ids"
    path.write_text("".join(json.dumps(dict(zip(keys, (r.prompt, r.output, r.blocks)))) + "\n" for r in requests))
    assert read_trace(path) == requests
    return str(path)


def known_beginnings(requests: list[Request]) -> list[int]:
    """By request how many tokens it has in common with one before it, token by token, but for its last."""
    tokens = [[(block, at) for block in each.blocks for at in range(BLOCK)][: each.prompt] for each in requests]
    longest = []
    for index, mine in enumerate(tokens):
        same = [next((n for n, pair in enumerate(zip(mine, o)) if len(set(pair)) > 1), len(o)) for o in tokens[:index]]
        longest.append(min([len(mine) - 1, max(same, default=0)]))
    return longest


def test_prompts_that_begin_alike_are_found(tmp_path: Path) -> None:
    """With room for all, all whole pages of 16 tokens that they have in common; and attention on them is right."""
    requests = chats(25)
    known = known_beginnings(requests)
    assert known_tokens(requests) == known
    trace = write(tmp_path / "trace.jsonl", requests)
    result = demo("--device", "cpu", "--trace", trace, "--budget-tokens", "200000", "--check-every", "2", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["prompt_tokens"] == sum(request.prompt for request in requests)
    assert figures["known_tokens"] == sum(known)
    assert sum(tokens // 16 * 16 for tokens in known) <= figures["cached_tokens"] <= sum(known)


def test_what_is_reused_is_right_where_memory_is_short(tmp_path: Path) -> None:
    requests = chats(25)
    trace = write(tmp_path / "trace.jsonl", requests)
    result = demo("--device", "cpu", "--trace", trace, "--check-every", "2", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["cached_tokens"] <= figures["known_tokens"] == sum(known_beginnings(requests))
    assert figures["pages_created"] * figures["page_size"] <= figures["budget_bytes"]


def test_what_is_reused_and_should_not_be_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prompts that are taken for one another."""
    sequence, commit = vmmkv.KVCache.sequence, vmmkv.Sequence.commit
    monkeypatch.setattr(vmmkv.KVCache, "sequence", lambda cache, *, token_ids: sequence(cache, token_ids=token_ids * 0))
    monkeypatch.setattr(vmmkv.Sequence, "commit", lambda each, token_ids: commit(each, token_ids * 0))
    trace = write(tmp_path / "trace.jsonl", [Request(BLOCK, 3, 0.0, (block,)) for block in range(4)])
    result = demo("--device", "cpu", "--trace", trace, "--check-every", "1")
    assert result.exit_code == 1
    assert "Attention is wrong" in result.output


def test_demo_says_what_was_reused(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [Request(BLOCK + 512, 2, 0.0, (1, each)) for each in (2, 3)])
    result = demo("--device", "cpu", "--trace", trace)
    assert "25.0% were cached already (the trace allows 25.0%)" in " ".join(result.stdout.split())
    assert "cached" not in demo("--device", "cpu", "--requests", "3").stdout


@pytest.mark.parametrize("plot", ["missing/folder.png", "pages.doc"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(plot: str) -> None:
    assert demo("--device", "cpu", "--plot", plot).exit_code == 2


def test_conversations_are_about_as_long_as_those_of_a_chat_service() -> None:
    requests = conversations(5000, np.random.default_rng())
    assert 1000 < np.mean([request.total for request in requests]) < 1600


@pytest.mark.few(1)
@pytest.mark.parametrize("stray", [1.0, float("nan")])
def test_wrong_contents_show_as_a_wrong_answer(monkeypatch: pytest.MonkeyPatch, stray: float) -> None:
    """The books are right, the contents are not."""
    extend = vmmkv.KVCache.extend

    def stray_write(cache, sequences, tokens):
        extend(cache, sequences, tokens)
        for layer in range(4):
            sequences[0].v(layer)[:] += stray

    monkeypatch.setattr(vmmkv.KVCache, "extend", stray_write)
    result = demo("--device", "cpu", "--check-every", "1", "--requests", "4")
    assert result.exit_code == 1
    assert "Attention is wrong" in result.output


def test_a_broken_invariant_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = vmmkv.KVCache.extend

    def leaky(cache, *args):
        extend(cache, *args)
        cache.pool.accounts["used"][cache.account] -= 1

    monkeypatch.setattr(vmmkv.KVCache, "extend", leaky)
    result = demo("--device", "cpu")
    assert result.exit_code == 1
    assert "An invariant broke" in result.output
