"""The benchmark of two models on one pool, on the host: what it reports adds up, and it says what it left out."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner, Result

from benchmarks import pools, tables
from benchmarks.engine.model import MODELS
from benchmarks.serve import measure

APP = Typer()
APP.command()(pools.main)


def run(*args: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--device", "cpu", *args])


def test_it_measures_one_pool_and_fixed_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UPS", 1)
    done = run("--requests", "2", "--requests", "6", "--rounds", "1", "--lookahead", "32", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [(row["requests"], row["mode"]) for row in result["runs"]] == list(product((2, 6), pools.MODES))
    assert result["missed"] == []
    for row in result["runs"]:
        assert [burst["model"] for burst in row["bursts"]] == [0, 1]
        assert row["tokens"] == sum(burst["tokens"] for burst in row["bursts"])
        assert row["tokens_per_s"] == row["tokens"] / row["seconds"] == row["rounds"][0]
        limit = result["memory_bytes"] // (1 if row["mode"] == pools.SHARED else 2)
        assert all(0 < burst["peak_bytes"] <= limit for burst in row["bursts"])
        assert 0 <= row["tokens_in_time_per_s"] <= row["tokens_per_s"]
        assert all(0 <= burst["crowded"] <= 1 for burst in row["bursts"])
    assert any(burst["pages_mapped"]["ahead"] for row in result["runs"] for burst in row["bursts"])
    values = {row["what"]: row["value"] for row in result["comparisons"]}
    for size, (shared, halves) in zip((2, 6), (result["runs"][:2], result["runs"][2:])):
        assert shared["tokens"] == halves["tokens"]
        value = values[f"bursts of {size}: tokens/s of both, one pool over fixed halves"]
        assert value == shared["tokens_per_s"] / halves["tokens_per_s"]
    pools.show(result)
    for write in ("pools", "pool-moves", "pool-comparisons"):
        assert tables.TABLES[write].write(result).count("\n") >= 2


@pytest.mark.parametrize("names", [["tiny", "tiny"], ["tiny", "qwen3-0.6b"]])
@pytest.mark.parametrize("large", [False, True])
def test_all_memory_moves_from_one_cache_to_the_other(names: list[str], large: bool) -> None:
    layouts = [MODELS[name].kv_layout(torch.float32) for name in names]
    prompt, memory = (64, 256 << 10) if names[0] == names[1] else (2, 1 << 20)
    rows = pools.move(layouts, memory, prompt, torch.device("cpu"), 0, large_frames=large)
    assert [(row["to"], row["filled"]) for row in rows] == [(number % 2, number > 0) for number in range(6)]
    assert {row["large_frames"] for row in rows} == {large}
    page = pools.pools_of(pools.SHARED, layouts, memory, torch.device("cpu"))[0].page_size
    for row in rows:
        pages = row["prompts"] * layouts[row["to"]].pages(prompt, page)
        assert row["bytes"] == pages * page <= memory
        assert row["ms_per_10_gib"] == pytest.approx(row["ms"] * 10 * 2**30 / row["bytes"])
        assert 0 < row["slowest_prompt_ms"] <= row["ms"]
        assert row["driver_calls"] > 0


def test_it_says_what_it_did_not_reach() -> None:
    done = run("--rounds", "2", "--requests", "9", "--budget-seconds", "0", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["runs"] == []
    assert sorted(result["missed"]) == sorted(f"bursts of 9, {mode}, round {n}" for mode in pools.MODES for n in (1, 2))
    pools.show(result)


@pytest.mark.parametrize("names", [["tiny"], ["tiny", "small"], ["tiny"] * 3])
def test_two_known_models_are_needed(names: list[str]) -> None:
    assert run(*(word for name in names for word in ("--model", name))).exit_code == 2


def test_comparisons_are_of_moves_onto_a_filled_pool() -> None:
    result: dict[str, Any] = {
        "requests": [60, 240],
        "in_time_s": 5.0,
        "runs": [
            {"requests": size, "mode": mode, "tokens_per_s": speed, "tokens_in_time_per_s": 0.0}
            for size, speeds in ((60, (100.0, 100.0)), (240, (151.0, 100.0)))
            for mode, speed in zip(pools.MODES, speeds)
        ],
        "moves": [
            {"filled": filled, "ms_per_10_gib": ms, "large_frames": large}
            for filled, ms, large in ((False, 1e6, True), (True, 90, True), (True, 120, True), (True, 50, False))
        ],
    }
    assert [row["value"] for row in pools.compare(result)] == [1.0, 1.51, 105, 50]
