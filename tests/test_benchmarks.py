"""Each benchmark on the host, with its smallest arguments: figures add up, wrong answers are found, tables are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner, Result

import vmmkv
from benchmarks import (
    core,
    eight_bits,
    fragmentation,
    mapper,
    pools,
    prefix_trace,
    prefix_tree,
    prefixes,
    sharing,
    swap,
    tables,
    transfer,
)
from benchmarks.geometry import SMALL
from benchmarks.serve import measure
from vmmkv.workload import Request

SIZE = 16 * SMALL.token_bytes


def invoke(module: ModuleType, *args: str) -> Result:
    app = Typer()
    app.command()(module.main)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, args)


def measured(module: ModuleType, arguments: str, *names: str) -> Any:
    """The result of a benchmark; of each table that is named, the number of its lines is that of the rows."""
    done = invoke(module, *arguments.split(), "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    for name in names:
        columns, rows = tables.TABLES[name].write(result)
        assert rows
        assert all(len(row) == len(columns) for row in rows)
    return result


def test_core() -> None:
    result = measured(core, "--device null --rounds 2 --parked 100", "core", "core-null")
    for case in result["cases"]:
        assert all(0 < side["p10_us"] <= side["us"] <= side["p90_us"] for side in case["sides"].values())
    assert sum("by hand" in case["sides"] for case in result["cases"]) == 8


def test_mapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapper, "PROMPT_ROUNDS", 1)
    monkeypatch.setattr(mapper, "RESTLESS_SECONDS", 0.05)
    sizes = "--device cpu --steps 40 --sequences 8 --rounds 2"
    result = measured(mapper, sizes, "mapper-decode", "mapper-launches", "mapper-prompts")
    before, _, need = result["decode"]
    assert (before["of_mapped_before"], before["extends_with_a_call"], before["steps_with_a_call"]) == (1, 0, 0)
    assert need["extends_with_a_call"] == pytest.approx(1 / 16, rel=0.5)  # a page holds 16 tokens
    assert result["restless"]["pages_per_s"]["min"] > 0
    assert result["missed"] == []
    missed = measured(mapper, f"{sizes} --budget-seconds 0")["missed"]
    assert {name.split(",")[0] for name in missed} >= {"prompts", "decoding", "decoding without a mapper"}


def test_sharing() -> None:
    sizes = "--device cpu --tokens 520 --samples 3 --new-tokens 20 --rounds 1"
    result = measured(sharing, sizes, "forking", "samples")
    assert [(row["tokens"], row["forks"]) for row in result["forking"]] == [(520, 1), (520, 3), (513, 1), (513, 3)] * 2
    assert all(0 < row["driver_us"] < row["fork_us"] for row in result["forking"])
    for row in result["sampling"]:
        assert row["pages_separate"] == 3 * SMALL.pages(row["tokens"] + 20, SIZE)
        assert row["pages_once_and_own"] <= row["pages"] <= row["pages_separate"]


def test_prefixes() -> None:
    result = measured(prefixes, "--device cpu --tokens 512 --rounds 2", "beginnings")
    for large, (hit, turn, listed, without) in zip((True, False), (result["starts"][:4], result["starts"][4:])):
        assert hit["cached_tokens"] == turn["cached_tokens"] == listed["cached_tokens"] == 512
        assert without["cached_tokens"] == 0
        assert hit["calls"]["map"] == (2 if large else 32) + 1, "the known pages, and a page behind them"
        assert turn["calls"] == listed["calls"] == {}


def test_prefix_tree() -> None:
    result = measured(prefix_tree, "--pages 1000 --tokens 2500 --repeats 20", "prefix-matches")
    assert result["pages"] >= 1000
    assert [row["found_tokens"] for row in result["matches"]] == [2499, 2500 - 1024, 512, 0]
    for row in result["matches"]:
        assert row["mb_per_s"] == row["found_tokens"] * 8 / row["us"]["median"]


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


def write_trace(path: Path, requests: list[tuple[int, ...]]) -> str:
    lines = [{"input_length": 512 * len(blocks), "output_length": 1, "hash_ids": blocks} for blocks in requests]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"--trace {path}"


def test_prefix_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(np.random.default_rng(), 60, 40)
    trace, longest = write_trace(tmp_path / "trace.jsonl", requests), max(map(len, requests))
    result = measured(prefix_trace, f"{trace} --pages {longest} --pages {2 * longest}", "prefix-trace")
    *limited, room_for_all = result["runs"]
    assert room_for_all["exact"]
    assert room_for_all["hit_rate"] == room_for_all["optimal_hit_rate"] == result["known_rate"]
    for alone, tiered in zip(limited[::2], limited[1::2]):
        assert 0 < alone["hit_rate"] <= alone["optimal_hit_rate"] <= tiered["optimal_hit_rate"] <= result["known_rate"]
        assert alone["hit_rate"] <= tiered["hit_rate"] <= tiered["optimal_hit_rate"]
    assert "the longest prompt has" in invoke(prefix_trace, *trace.split(), "--pages", "1").output
    sequence, commit = vmmkv.KVCache.sequence, vmmkv.Sequence.commit  # prompts that are taken for one another
    monkeypatch.setattr(vmmkv.KVCache, "sequence", lambda cache, *, token_ids: sequence(cache, token_ids=token_ids * 0))
    monkeypatch.setattr(vmmkv.Sequence, "commit", lambda each, token_ids: commit(each, token_ids * 0))
    wrong = write_trace(tmp_path / "wrong.jsonl", [(1, 2), (3, 4)])
    assert "K of other tokens" in str(invoke(prefix_trace, *wrong.split(), "--pages", "2").exception)


def test_swap() -> None:
    result = measured(swap, "--device cpu --tokens 70 --rounds 1", "swapping")
    assert result["tokens"] == 64
    assert [row["way"] for row in result["out"]] == [row["way"] for row in result["back"]]
    assert len(result["out"]) == 4


def test_transfer() -> None:
    result = measured(transfer, "--device cpu --tokens 70 --rounds 1", "handing-over")
    assert (result["backend"], result["tokens"], len(result["ways"])) == ("gloo", 64, 5)
    plain, other = transfer.figures({transfer.PLAIN: [1.0, 2.0, 3.0], "other": [3.0, 4.0, 8.0]}, 8 * 10**9)
    assert (plain["ms"], plain["gb_per_s"], plain["ratio"]) == (2000, 4, 1)
    assert (other["ms"], other["gb_per_s"], other["ratio"]) == (4000, 2, 0.5)
    assert other["gb_per_s_p10"] < 2 < other["gb_per_s_p90"]


def test_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UPS", 1)
    result = measured(pools, "--device cpu --requests 6 --rounds 1", "pools", "pool-moves")
    assert [row["mode"] for row in result["runs"]] == list(pools.MODES)
    for row in result["runs"]:
        limit = result["memory_bytes"] // (1 if row["mode"] == pools.SHARED else 2)
        assert all(0 < burst["peak_bytes"] <= limit for burst in row["bursts"])
        assert 0 <= row["tokens_in_time_per_s"] <= row["tokens_per_s"]
    missed = measured(pools, "--device cpu --rounds 1 --requests 9 --budget-seconds 0")["missed"]
    assert missed == [f"bursts of 9, {mode}, round 1" for mode in pools.MODES]


class Here(Executor):
    """Does the work of processes at once, in this one."""

    def __init__(self, **_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **options))
        return done


def test_fragmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "ProcessPoolExecutor", Here)
    trace = tmp_path / "trace.csv"
    rows = [(prompt, 50) for prompt in np.random.default_rng().integers(500, 2000, 60)] + [(9000, 1)]
    trace.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{prompt},{output}\n" for prompt, output in rows))
    names = "static-reservation", "fragmentation-waste", "fragmentation-batch"
    result = measured(fragmentation, f"--trace {trace}", *names)
    assert (result["requests"], result["left_out"], result["trace"]) == (60, 1, "trace.csv")
    waste = {row["scheme"]: row["waste"] for row in result["runs"] if row["model"] == "Llama-3.1-8B"}
    assert waste["token-major"] == waste["block 16"] < waste["block 64"] < waste["block 256"] < waste["per layer"]
    assert waste["per layer"] < waste["static"]
    monkeypatch.setattr(fragmentation, "GIB", 1)
    row = fragmentation.simulate("Llama-2-7B", "static", [Request(10, 10)], 4096)
    assert (row["sequences"], "4096 tokens" in row["error"]) == (0, True)


def test_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "OUTLIERS", (1, 10))
    monkeypatch.setattr(eight_bits, "version_of", lambda package: None)  # they take seconds to import
    result = measured(eight_bits, "--lengths 20 --batch 1 --steps 3 --layers 1", "eight-bits")
    distances = {(row["cache"], row["outliers"]): row["distance"] for row in result["logits"]}
    for outliers in (1, 10):
        assert 0 < distances["bf16", outliers] < distances["vmmkv int8", outliers] < 1
        assert distances["vmmkv int8", outliers] < distances["vmmkv fp8", outliers] < 1
