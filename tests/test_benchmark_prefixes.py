"""The benchmarks of what prompts have in common: what they report adds up, the optimum is one, what is wrong shows."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer import Typer
from typer.testing import CliRunner

import vmmkv
from benchmarks import prefix_trace, prefix_tree, room, tables
from vmmkv.workload import TraceError


def invoke(main: Any, *args: str) -> Result:
    app = Typer()
    app.command()(main)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, args)


def run(main: Any, *args: str) -> Any:
    done = invoke(main, *args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def random_requests(rng: np.random.Generator, count: int, blocks: int) -> list[tuple[int, ...]]:
    """Walks down a random tree of blocks, so that equal ids have equal beginnings."""
    below = [int(rng.integers(-1, block)) if block else -1 for block in range(blocks)]
    requests = []
    for _ in range(count):
        path = [int(rng.integers(blocks))]
        while below[path[0]] >= 0:
            path.insert(0, below[path[0]])
        requests.append(tuple(path))
    return requests


def most_hits(requests: list[tuple[int, ...]], pages: int) -> int:
    """Tries out whatever could be kept after each request."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            found = next((n for n, block in enumerate(blocks) if block not in kept), len(blocks))
            there = kept | set(blocks)
            for choice in map(frozenset, combinations(there, min(pages, len(there)))):
                after[choice] = max(after.get(choice, 0), hits + found)
        best = after
    return max(best.values())


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_the_optimum_is_what_no_choice_betters(pages: int) -> None:
    rng = np.random.default_rng()
    for _ in range(20):
        requests = random_requests(rng, 10, 7)
        hits = prefix_trace.optimum(requests, pages)
        assert sum(hits) == most_hits(requests, pages)
        assert all(found <= known for found, known in zip(hits, prefix_trace.known_blocks(requests)))


def write(path: Path, requests: list[tuple[int, ...]]) -> str:
    lines = [{"input_length": 512 * len(blocks), "output_length": 1, "hash_ids": blocks} for blocks in requests]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def common(blocks: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, pair in enumerate(zip(blocks, other)) if len(set(pair)) > 1), min(len(blocks), len(other)))


def test_a_trace_is_found_to_the_token(tmp_path: Path) -> None:
    requests = random_requests(np.random.default_rng(), 60, 40)
    known = [max((common(blocks, other) for other in requests[:n]), default=0) for n, blocks in enumerate(requests)]
    longest = max(map(len, requests))
    sizes = "--pages", str(longest), "--pages", str(2 * longest)
    result = run(prefix_trace.main, "--trace", write(tmp_path / "trace.jsonl", requests), *sizes)
    *limited, room_for_all = result["runs"]
    assert result["blocks"] == sum(map(len, requests))
    assert result["known_blocks"] == sum(known)
    assert room_for_all["exact"]
    assert room_for_all["hit_tokens"] == prefix_trace.PAGE_TOKENS * sum(known)
    assert room_for_all["hit_rate"] == room_for_all["optimal_hit_rate"] == result["known_rate"]
    assert room_for_all["evicted"] == 0
    for alone, tiered in zip(limited[::2], limited[1::2]):
        assert 0 < alone["hit_rate"] <= alone["optimal_hit_rate"] <= tiered["optimal_hit_rate"] <= result["known_rate"]
        assert tiered["hit_rate"] <= tiered["optimal_hit_rate"]
        assert tiered["evicted"] == alone["evicted"] > 0, "events are of the device"
        assert tiered["hit_tokens"] >= alone["hit_tokens"]
    assert tables.TABLES["prefix-trace-hits"].write(result).count("\n") == 6


def test_prompts_that_are_taken_for_one_another_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sequence, commit = vmmkv.KVCache.sequence, vmmkv.Sequence.commit
    monkeypatch.setattr(vmmkv.KVCache, "sequence", lambda cache, *, token_ids: sequence(cache, token_ids=token_ids * 0))
    monkeypatch.setattr(vmmkv.Sequence, "commit", lambda each, token_ids: commit(each, token_ids * 0))
    trace = write(tmp_path / "trace.jsonl", [(1, 2), (3, 4)])
    done = invoke(prefix_trace.main, "--trace", trace, "--pages", "2")
    assert "K of other tokens" in str(done.exception)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = invoke(prefix_trace.main, "--trace", write(trace, [(1, 2, 3)]), "--pages", "2")
    assert done.exit_code == 2
    assert "the longest prompt has 3 blocks" in done.output
    done = invoke(prefix_trace.main, "--trace", write(trace, [()]))
    assert isinstance(done.exception, TraceError)


def test_the_tree_is_measured() -> None:
    result = run(prefix_tree.main, "--pages", "1000", "--tokens", "2500", "--repeats", "20")
    assert result["pages"] >= 1000
    assert [row["found_tokens"] for row in result["matches"]] == [2499, 2500 - 1024, 512, 0]
    for row in result["matches"]:
        assert 0 < row["us"]["p10"] <= row["us"]["median"] <= row["us"]["p90"]
        assert row["mb_per_s"] == row["found_tokens"] * 8 / row["us"]["median"]
    assert all(row["median"] > 0 for row in result["changes"].values() if isinstance(row, dict))
    prefix_tree.show(result)


def test_who_shares_pages_has_room_for_more() -> None:
    result = run(room.main, "--requests", "90", "--memory", "4GiB")
    blocks, rows, single = result["runs"]
    workload = result["workload"]
    for each in (blocks, rows, single):
        found = each["cached_share"] * workload["prompt_tokens"]
        anew = each["prompt_tokens_computed"] + found - workload["prompt_tokens"]
        assert -1 < anew < 0.05 * workload["prompt_tokens"], "of the few that are preempted"
        assert each["mean_running"] <= each["crowded_concurrency"] < workload["requests"]
    assert rows["crowded_concurrency"] < single["crowded_concurrency"]
    assert single["crowded_concurrency"] == pytest.approx(blocks["crowded_concurrency"], rel=0.05)
    assert single["cached_share"] >= blocks["cached_share"], "rows reuse to the token"
    assert tables.TABLES["room-for-requests"].write(result).count("\n") == 4
