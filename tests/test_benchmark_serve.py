"""The serving benchmark on the host: its figures add up, and it says what it left out."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_benchmarks import invoke
from test_benchmarks import measured as measured_at_once

from benchmarks import batching, tables
from benchmarks.engine.model import MODELS
from benchmarks.engine.run import Run
from benchmarks.serve import __main__ as command
from benchmarks.serve.measure import figures, quantiles, same_tokens
from benchmarks.serve.workloads import Limits, make_workload
from vmmkv.workload import Request


def measured(tmp_path: Path, *args: str) -> Any:
    path = tmp_path / "result.json"
    done = invoke(command, "--device", "cpu", "--shorten", "1", *args, "--json", str(path))
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text())


@pytest.fixture
def trace(tmp_path: Path) -> list[str]:
    rng, path = np.random.default_rng(), tmp_path / "main.csv"
    lines = (f"2023-11-16 18:15:{second:02},{rng.integers(1, 90)},{rng.integers(2, 12)}" for second in range(24))
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return ["--trace", str(path), "--memory", "512KiB"]


def test_it_measures_rows_and_blocks(trace: list[str], tmp_path: Path) -> None:
    result = measured(tmp_path, *trace, "--wait", "--rounds", "3")
    rows = {(row["load"], row["backend"]): row for row in result["serving"]}
    loads = "saturation", "saturation, each step waited for"
    assert rows.keys() == {(load, backend) for load in loads for backend in ("vmm", "paged")}
    assert result["missed"] == result["skipped"] == []
    for (_, backend), row in rows.items():
        assert row["finished"] == row["requests"] == 24
        assert row["same_tokens"] >= 0.9  # another schedule rounds otherwise
        assert [each["output_tokens_per_s"] for each in row["all_rounds"]] == row["rounds"]
        assert row["output_tokens_per_s"] == sorted(row["rounds"])[1]
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["most"] <= row["seconds"]
        assert row["ttft_s"]["p99"] is None  # of too few requests
        assert 0 < row["manager_us"] < row["host_us"]
        if backend == "vmm":
            assert row["pages_mapped"]["in need"] > 0 == row["pages_mapped"]["ahead"]
            assert 0 < row["driver_us"] <= row["manager_us"]
        assert row["peak_concurrency"] >= row["mean_concurrency"] > 0
        assert row["mean_bytes"] <= row["peak_bytes"] <= result["budget_bytes"] + (32 << 10)  # of the block table
        assert row["idle_bytes"] == (0 if backend == "vmm" else row["peak_bytes"])
    text = str(tables.TABLES["serve-rounds"].write(result))
    assert all(f"| main, {load} | vmm | paged |" in text for load in loads)
    _, lines = tables.TABLES["rows-beside-blocks"].write(result, result, result)
    assert len(lines) == 3 * len(loads)


VLLM = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace

assert not {"vmmkv", "torch", "benchmarks"} & sys.modules.keys()
__version__ = "0.23.0"


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert ignore_eos and not detokenize and not temperature
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, **options):
        config = json.loads((Path(options["model"]) / "config.json").read_text())
        told = options | {"config": config, "offline": os.environ["HF_HUB_OFFLINE"]}
        Path(__file__).with_name("told.json").write_text(json.dumps(told))

    def generate(self, prompts, params, use_tqdm):
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * each.max_tokens)]) for each in params]
"""
"""Stands in for vLLM: it answers at once, and writes down its options."""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder with a module of this name."""
    folder = tmp_path / "peer" / "vllm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(VLLM)
    return folder


def test_vllm_serves_the_same_in_a_process_of_its_own(vllm: Path, trace: list[str], tmp_path: Path) -> None:
    both = "--backends", "vmm", "--backends", "vllm", "--vllm", str(vllm.parent)
    result = measured(tmp_path, *trace, *both, "--rounds", "2", "--wait")
    ours, other = (next(row for row in result["serving"] if row["backend"] == name) for name in ("vmm", "vllm"))
    assert [row["load"] for row in result["serving"] if row["backend"] == "vllm"] == ["saturation"]
    assert result["peers"]["vllm"] == "0.23.0"
    assert result["missed"] == result["skipped"] == []
    assert other["finished"] == other["requests"] == ours["finished"] == ours["requests"]
    assert len(other["rounds"]) == 2
    tokens = ours["output_tokens_per_s"] * ours["seconds"]
    assert other["output_tokens_per_s"] * other["seconds"] == pytest.approx(tokens)
    told = json.loads((vllm / "told.json").read_text())
    assert told["num_gpu_blocks_override"] * 16 * result["token_bytes"] == result["budget_bytes"]
    assert (told["max_num_batched_tokens"], told["max_num_seqs"]) == (8192, 256)
    assert (told["max_model_len"], told["offline"]) == (512, "1")
    shape, config = MODELS["tiny"], told["config"]
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (shape.num_layers, shape.num_kv_heads)
    assert (config["vocab_size"], config["hidden_size"]) == (shape.vocab_size, shape.hidden_size)
    options = result["vllm_options"]["vllm"]
    assert options.items() >= {"max_num_seqs": 256, "enable_prefix_caching": False, "stand_ins": []}.items()
    assert options["packages"]["torch"] == version("torch")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_continuous_batching_is_measured_on_rows_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = measured_at_once(batching, "--requests 4 --rounds 1 --seconds 600 --memory 8MiB")
    assert [(row["system"], row["round"]) for row in result["served"]] == [("rows", 0), ("blocks, sdpa", 0)]
    for row in result["served"]:
        assert row["finished"] == result["requests"] == 4
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(result["output_tokens"])
        assert row["peak_bytes"] <= result["memory_bytes"]
    rows, blocks = result["served"]
    assert rows["idle_bytes"] == 0 < result["memory_bytes"] / 2 < blocks["idle_bytes"]
    assert result["first_tokens"]["new_s"] > 0 < result["first_tokens"]["known_s"]
    for name in ("batching", "batching-first-tokens"):
        assert len(tables.TABLES[name].write(result)[1]) == 2


def test_requests_that_are_stopped_do_not_run_on_beside_the_next_measurement() -> None:
    workload = make_workload(None, Limits(20, 1 << 40, 512, 512, 4), seed=0)
    with batching.manager_of(batching.build("tiny", None, torch.device("cpu")), "rows", 64 << 20) as manager:
        row = batching.run(manager, "rows", workload, 0, 0.05)
        assert row["finished"] < len(workload.requests)
        batching.first_tokens(manager, manager.model.config.vocab_size, 64, rounds=1)
        scheduler = manager.batch_processor.scheduler
        left = {*scheduler.active_requests, *scheduler.waiting_requests}
        assert not left & {f"0-{number}" for number in range(len(workload.requests))}


def test_reuse_is_measured_on_rows_and_blocks(tmp_path: Path) -> None:
    """On four conversations of five turns, each of which begins with all of the turn before it."""
    rng, mooncake = np.random.default_rng(), tmp_path / "turns.jsonl"
    begins = [rng.integers(600, 1400, 5).cumsum().tolist() for _ in range(4)]
    fields = (
        {"timestamp": 0, "input_length": begins[chat][turn], "output_length": 160}
        | {"hash_ids": list(range(100 * chat, 100 * chat - (begins[chat][turn] // -512)))}
        for turn in range(5)
        for chat in range(4)
    )
    mooncake.write_text("\n".join(map(json.dumps, fields)))
    sizes = "--memory", "1MiB", "--shorten", "32", "--requests", "20", "--rounds", "1", "--chunk", "64"
    result = measured(tmp_path, "--reuse", "--trace", str(mooncake), *sizes)
    rows = {(row["trace"], row["backend"]): row for row in result["serving"]}
    names, backends = ("turns", "8 system prompts"), ("vmm", "paged", "vmm+reuse", "paged+reuse")
    assert rows.keys() == {(name, backend) for name in names for backend in backends}
    for (_, backend), row in rows.items():
        assert row["finished"] == row["requests"] == 20
        assert row["same_tokens"] > 0.5
        assert 0.1 < row["hit_rate"] < 0.9 if "reuse" in backend else row["hit_rate"] == 0
        assert row["idle_bytes"] == (0 if "vmm" in backend else row["peak_bytes"])
    _, lines = tables.TABLES["rows-beside-blocks"].write(result)
    assert len(lines) == 4


def test_it_stops_in_time_and_says_what_it_did_not_reach(tmp_path: Path) -> None:
    sizes = "--requests", "2000", "--tokens", "10000000", "--budget-seconds", "1"
    missed = measured(tmp_path, *sizes)["missed"]
    assert "conversations, saturation, vmm, round 3" in missed


def test_workloads_are_the_first_requests_that_fit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"input_length": {n}, "output_length": 10}}\n' for n in (90, 990, 50, 40, 30)))
    limits = Limits(requests=3, tokens=10**6, longest=500, max_seq_len=64)
    workload = make_workload(path, limits, 0)
    assert [request.prompt for request in workload.requests] == [90, 50, 40]
    assert (workload.left_out, workload.max_seq_len) == (1, 100)
    assert [request.prompt for request in make_workload(path, limits._replace(tokens=209), 0).requests] == [90, 50]
    assert make_workload(path, limits._replace(shorten=10), 0).requests[1] == Request(99, 1)
    with pytest.raises(ValueError, match="no request"):
        make_workload(path, limits._replace(tokens=50), 0)


def make_run() -> Run:
    """Three requests of which the last did not finish."""
    run = Run(*np.array([[7, 8, 9], [5, 1, 4]]))
    run.first[:], run.finish[:] = [0.5, 2.0, 3.0], [2.5, 2.0, np.nan]
    run.tokens = np.arange(34)
    run.seconds, run.generated, run.manager_ns, run.host_ns = 4.0, 8, [4000, 5000, 11_000], 90_000
    run.running, run.waiting, run.step_seconds = [1, 3, 2], [0, 1, 0], [1.0, 1.0, 2.0]
    run.samples = [(0.0, 0, 1), (1.0, 100, 3), (4.0, 100, 0)]
    return run


def test_figures_of_a_run() -> None:
    expected = {"requests": 3, "finished": 2, "output_tokens_per_s": 2.0, "peak_bytes": 100, "mean_bytes": 87.5}
    expected |= {"peak_concurrency": 3, "mean_concurrency": 2.0, "crowded_concurrency": 3.0}
    expected |= {"ttft_s": {"p50": 1.25, "p99": None, "most": 2.0}, "manager_us": pytest.approx(20 / 3), "host_us": 30}
    row = figures(make_run())
    assert {name: row[name] for name in expected} == expected
    assert row["tpot_s"]["p50"] == 0.5  # two seconds for four tokens behind the first
    assert quantiles(np.empty(0)) == {"p50": None, "p99": None, "most": None}
    assert quantiles(np.arange(1000.0))["p99"] == pytest.approx(989.01)
    run, other = make_run(), make_run()
    other.tokens[[0, 33]] = -1  # a prompt, and a request that did not finish
    assert same_tokens(run, other) == 1.0
    other.tokens[20] = -1  # the only output of the second
    assert same_tokens(run, other) == 0.5
