"""The benchmarks of the prefix tree: what they report adds up, the optimum is one, and what is no trace is refused."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import prefix_trace, prefix_tree
from vmmkv.workload import TraceError


def run(main: Any, *args: str) -> Any:
    app = Typer()
    app.command()(main)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*args, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def random_requests(rng: np.random.Generator, count: int, blocks: int) -> list[list[int]]:
    """Walks down a random tree of blocks, so that equal ids have equal beginnings."""
    below = [int(rng.integers(-1, block)) if block else -1 for block in range(blocks)]
    requests = []
    for _ in range(count):
        path = [int(rng.integers(blocks))]
        while below[path[0]] >= 0:
            path.insert(0, below[path[0]])
        requests.append(path)
    return requests


def most_hits(requests: list[list[int]], pages: int) -> int:
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


def test_a_trace_is_found_to_the_token(tmp_path: Path) -> None:
    requests = random_requests(np.random.default_rng(), 300, 100)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": blocks}) + "\n" for blocks in requests))
    result = run(prefix_trace.main, str(trace), "--pages", "8", "--pages", "30", "--page-tokens", "5")
    *limited, all_of_them = result["runs"]
    assert result["blocks"] == sum(map(len, requests))
    assert all_of_them["pages"] == result["distinct_blocks"]
    assert all_of_them["exact"]
    assert all_of_them["hit_tokens"] == 5 * result["known_blocks"]
    assert all_of_them["hit_rate"] == all_of_them["optimal_hit_rate"] == result["known_rate"]
    for row in limited:
        assert 0 < row["hit_rate"] <= row["optimal_hit_rate"] <= result["known_rate"]
        assert row["evicted"] > 0
    prefix_trace.show(result)


@pytest.mark.parametrize("text", ["", "{}", "no JSON", '{"hash_ids": 3}', '{"hash_ids": [null]}', '{"hash_ids": []}'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    with pytest.raises(TraceError):
        prefix_trace.read_blocks(trace)


def test_the_tree_is_measured() -> None:
    result = run(prefix_tree.main, "--pages", "1000", "--tokens", "2500", "--repeats", "20")
    assert result["pages"] >= 1000
    assert [row["found_tokens"] for row in result["matches"]] == [2496, 2500 - 1024, 512, 0]
    for row in result["matches"]:
        assert 0 < row["us"]["p10"] <= row["us"]["median"] <= row["us"]["p90"]
        assert row["mb_per_s"] == row["found_tokens"] * 8 / row["us"]["median"]
    assert all(row["median"] > 0 for row in result["changes"].values() if isinstance(row, dict))
    assert len(result["comparisons"]) == 2
    prefix_tree.show(result)
