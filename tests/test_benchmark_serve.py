"""The serving benchmark on the host: what it reports adds up, and it says what it left out."""

from __future__ import annotations

import json
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import tables
from benchmarks.engine.checkpoints import read_config
from benchmarks.engine.model import MODELS
from benchmarks.engine.run import Run
from benchmarks.engine.schedule import Step
from benchmarks.serve.__main__ import main
from benchmarks.serve.measure import figures, middle, quantiles, same_tokens
from benchmarks.serve.report import compare, figure_lines
from benchmarks.serve.vllm_start import model_config
from benchmarks.serve.workloads import Limits, arrivals, make_workload, system_prompts
from vmmkv.workload import Request

APP = typer.Typer()
APP.command()(main)


def run_benchmark(*args: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--device", "cpu", "--shorten", "1", *args])


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng()
    main, other = tmp_path / "main.csv", tmp_path / "other.jsonl"
    lines = (f"2023-11-16 18:15:{second:02},{rng.integers(1, 90)},{rng.integers(2, 12)}" for second in range(24))
    main.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    fields = ({"timestamp": 0, "input_length": size, "output_length": 3} for size in (70, 5000, 20))
    other.write_text("\n".join(map(json.dumps, fields)))
    return ["--trace", str(main), "--trace", str(other)]


def test_it_measures_all_backends_and_writes_what_it_found(traces: list[str], tmp_path: Path) -> None:
    files = "--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "result.png")
    sizes = "--memory", "512KiB", "--max-seq-len", "128", "--tokens", "4000", "--prompt-tokens", "64"
    done = run_benchmark(*traces, *files, *sizes, "--rates", "0.5", "--seeds", "2")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "result.json").read_text())
    rows = {(row["trace"], row["load"], row["backend"]): row for row in result["serving"]}
    loads = [("main", "saturation"), ("main", "50% load"), ("other", "saturation")]
    slots = "static", "static+longest"
    assert rows.keys() == {
        (*load, backend)
        for load in loads
        for backend in ("vmm", "paged", *slots)
        if "50" not in load[1] or backend not in slots
    }
    assert [(work["requests"], work["left_out"]) for work in result["workloads"]] == [(24, 0), (2, 1)]
    for (trace, load, backend), row in rows.items():
        assert row["finished"] == row["requests"] == {"main": 12 if "50" in load else 24, "other": 2}[trace]
        if load == "saturation":
            assert row["same_tokens"] >= (0.9 if trace == "main" else 0.5)  # another schedule rounds otherwise
        else:
            assert row["same_tokens"] is None
        rounds = {("main", "saturation"): 3, ("main", "50% load"): 2}.get((trace, load), 1)
        assert len(row["rounds"]) == (1 if backend in slots else rounds)
        assert [each["output_tokens_per_s"] for each in row["all_rounds"]] == row["rounds"]
        assert [each["seed"] for each in row["all_rounds"]] == ([0, 1] if "50" in load else [0] * len(row["rounds"]))
        assert row["output_tokens_per_s"] == sorted(row["rounds"])[(len(row["rounds"]) - 1) // 2]
        assert all(len(values) == len(row["rounds"]) for values in row["each_round"].values())
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["most"] <= row["seconds"]
        assert 0 < row["gap_s"]["p50"] <= row["gap_s"]["most"] <= row["seconds"]
        assert row["ttft_s"]["p99"] is None  # of so few requests nobody knows it
        assert sum(row["step_ms"]) <= 1e3 * row["seconds"] + len(row["step_ms"])
        assert (row["offered_requests_per_s"] is None) == (load == "saturation")
        assert 0 < row["manager_us"] < row["host_us"]
        if backend == "vmm":
            assert row["pages_mapped"]["in need"] > 0 == row["pages_mapped"]["ahead"]
            assert sum(row["driver_seconds"].values()) == pytest.approx(row["driver_us"] * row["steps"] / 1e6)
        else:
            assert row["pages_mapped"] == {}
        assert row["mapper_calls"] == {}
        assert row["peak_concurrency"] >= row["mean_concurrency"] > 0
        budget = result["budget_bytes"] + (32 << 10)  # of the block table
        assert row["mean_bytes"] <= row["peak_bytes"] <= budget
        assert row["idle_bytes"] == (0 if backend == "vmm" else row["peak_bytes"])
    (longest,) = (work["longest"] for work in result["workloads"] if work["name"] == "main")
    for backend, length in (("static", 128), ("static+longest", longest)):
        concurrency = rows["main", "saturation", backend]["peak_concurrency"]
        assert concurrency == min((512 << 10) // (length * result["token_bytes"]), 24)
    assert [(row["backend"], row["kernel"]) for row in result["prefill"]] == [("vmm", "torch"), ("paged", "torch")]
    assert all(row["attention_share"] > 0 for row in result["prefill"])
    assert [row["kernel"] or row["backend"] for row in result["skipped"]] == ["fa3", "flashinfer", "vllm"]
    assert "no module vllm" in result["skipped"][-1]["reason"]
    assert result["missed"] == []
    for words in ("main, saturation", "main, 50% load", "vmm over paged, tokens/s", "Prompts of 64 tokens", "fa3"):
        assert words in done.stdout
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_the_mapper_maps_ahead_where_it_is_wanted(traces: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = "--memory", "512KiB", "--max-seq-len", "128", "--prompt-tokens", "64", "--rounds", "1"
    done = run_benchmark(*traces[:2], *sizes, "--backends", "vmm", "--lookahead", "64", "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert result["lookahead"] == 64
    for row in result["serving"]:
        assert row["finished"] == row["requests"]
        assert row["pages_mapped"]["ahead"] > 0
        assert row["mapper_calls"]["map"] > 0
        assert sum(row["mapper_seconds"].values()) == pytest.approx(row["mapper_us"] * row["steps"] / 1e6)
        assert row["mapper_us"] > 0
    assert "pages mapped ahead, in need" in done.stdout


def test_quick_is_saturation_of_rows_and_blocks_ahead_and_waiting(traces: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = "--memory", "512KiB", "--max-seq-len", "128", "--rounds", "2"
    done = run_benchmark(*traces[:2], "--quick", "--unknown", *sizes, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    waiting, unknown = "saturation, each step waited for", "saturation, lengths unknown"
    loads = ("saturation", False), (waiting, True), (unknown, False)
    found = {(row["load"], row["wait"], row["backend"]): row for row in result["serving"]}
    assert found.keys() == {(*load, backend) for load in loads for backend in ("vmm", "paged")}
    assert all(len(row["rounds"]) == 2 and row["finished"] == row["requests"] == 24 for row in found.values())
    for (_, _, backend), row in found.items():
        calls = [each["driver_seconds"].get("create", 0.0) for each in row["all_rounds"]]
        assert all(seconds > 0 for seconds in calls) if backend == "vmm" else not any(calls)
        assert row["idle_bytes"] == (row["peak_bytes"] if backend == "paged" else 0)
    assert all(row["same_tokens"] > 0.9 for row in found.values())
    assert result["prefill"] == result["missed"] == []
    whats = [line["what"].split(": ")[0] for line in result["comparisons"]]
    assert set(whats) == {f"main, {name}" for name, _ in loads}
    for name, load in (("rounds-ahead", "| main, saturation |"), ("rounds-waiting", "each step waited for |")):
        assert load in tables.TABLES[name].write(result)


def test_it_serves_beside_a_busy_thread(traces: list[str], tmp_path: Path) -> None:
    path, threads = tmp_path / "result.json", threading.active_count()
    few = "--quick", "--no-wait", "--rounds", "1", "--requests", "2", "--backends", "vmm", "--memory", "512KiB"
    assert run_benchmark(*traces[:2], *few, "--busy", "--json", str(path)).exit_code == 0
    _, beside = json.loads(path.read_text())["serving"]
    assert beside["load"] == "saturation, each step waited for, a busy thread beside"
    assert (beside["busy"], beside["finished"]) == (True, 2)
    assert threading.active_count() <= threads


VLLM = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from vllm.sampling_params import SamplingParams

assert not {"vmmkv", "torch", "benchmarks"} & sys.modules.keys()
__version__ = "0.23.0"


class LLM:
    def __init__(self, **options):
        config = json.loads((Path(options["model"]) / "config.json").read_text())
        told = options | {"config": config, "offline": os.environ["HF_HUB_OFFLINE"], "resets": 0}
        self.path = Path(__file__).with_name(f"told-{options['enable_prefix_caching']}.json")
        self.told, self.live = told, {}
        self.llm_engine = self
        self.write()

    def write(self):
        self.path.write_text(json.dumps(self.told))

    def reset_prefix_cache(self):
        self.told["resets"] += 1
        self.write()

    def answer(self, name, tokens):
        return SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7] * tokens)])

    def generate(self, prompts, params, use_tqdm):
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        time.sleep(0.001)
        return [self.answer("", each.max_tokens) for each in params]

    def add_request(self, name, prompt, params):
        assert params.output_kind == "delta" and name not in self.live
        self.live[name] = params.max_tokens

    def has_unfinished_requests(self):
        return bool(self.live)

    def step(self):
        time.sleep(0.001)
        self.live = {name: left - 1 for name, left in self.live.items()}
        answers = [self.answer(name, 1) for name in self.live]
        self.live = {name: left for name, left in self.live.items() if left}
        return answers
"""
"""Stands in for vLLM: it answers at once, or a token a step, and says what it was told."""
SAMPLING = """
from types import SimpleNamespace

RequestOutputKind = SimpleNamespace(DELTA="delta")


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize, output_kind="all"):
        assert ignore_eos and not detokenize
        self.max_tokens, self.output_kind = max_tokens, output_kind
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder with a module of this name."""
    folder = tmp_path / "peer" / "vllm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(VLLM)
    (folder / "sampling_params.py").write_text(SAMPLING)
    return folder


def test_vllm_serves_the_same_in_a_process_of_its_own(vllm: Path, traces: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = "--memory", "512KiB", "--max-seq-len", "128", "--rounds", "2", "--rates", "0.5", "--seeds", "2"
    both = "--backends", "vmm", "--backends", "vllm"
    plan = "--quick", "--no-wait", *both, "--vllm", str(vllm.parent), *sizes
    done = run_benchmark(*traces[:2], *plan, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    rows = {(row["load"], row["backend"]): row for row in result["serving"]}
    assert rows.keys() == {(load, name) for load in ("saturation", "50% load") for name in ("vmm", "vllm")}
    assert result["peers"]["vllm"] == "0.23.0"
    assert result["missed"] == result["skipped"] == []
    for load in ("saturation", "50% load"):
        ours, other = rows[load, "vmm"], rows[load, "vllm"]
        for name in ("requests", "finished", "offered_requests_per_s"):
            assert other[name] == ours[name]
        assert other["finished"] == other["requests"]
        assert len(other["rounds"]) == 2
        tokens = ours["output_tokens_per_s"] * ours["seconds"]
        assert other["output_tokens_per_s"] * other["seconds"] == pytest.approx(tokens)
    coming = rows["50% load", "vllm"]
    assert "ttft_s" not in rows["saturation", "vllm"]
    assert 0 < coming["ttft_s"]["p50"] <= coming["ttft_s"]["most"] < coming["seconds"]
    assert 0 < coming["gap_s"]["p50"] <= coming["gap_s"]["most"] < coming["seconds"]
    told = json.loads((vllm / "told-False.json").read_text())
    assert told["num_gpu_blocks_override"] * 16 * result["token_bytes"] == result["budget_bytes"]
    assert (told["max_num_batched_tokens"], told["max_num_seqs"]) == (8192, 256)
    assert (told["max_model_len"], told["offline"], told["resets"]) == (128, "1", 0)
    assert read_config(told["config"]) == MODELS["tiny"]
    options = result["vllm_options"]["vllm"]
    assert options.items() >= {"max_num_seqs": 256, "enable_prefix_caching": False, "stand_ins": []}.items()
    assert options["packages"]["torch"] == version("torch")
    assert {"main, saturation: vmm over vllm, tokens/s", "main, 50% load: vmm over vllm, time to first token"} <= {
        line["what"] for line in result["comparisons"]
    }
    assert "vllm" in done.stdout


def test_attention_that_cannot_be_had_is_named_with_the_reason(traces: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    names = "vmm", "vmm+fa3", "paged+flashinfer"
    plan = "--quick", "--no-wait", "--rounds", "2", "--memory", "512KiB", "--max-seq-len", "128"
    backends = [word for name in names for word in ("--backends", name)]
    done = run_benchmark(*traces[:2], *plan, *backends, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert [(row["backend"], len(row["rounds"])) for row in result["serving"]] == [("vmm", 2)]
    reasons = {row["backend"]: row["reason"] for row in result["skipped"]}
    assert reasons.keys() == {"vmm+fa3", "paged+flashinfer"}
    assert "fa3_fwd_interface" in reasons["vmm+fa3"]
    assert "flashinfer" in reasons["paged+flashinfer"]
    assert result["missed"] == []


def test_vllm_that_does_not_start_is_named_with_the_reason(vllm: Path, traces: list[str], tmp_path: Path) -> None:
    (vllm / "__init__.py").write_text("raise ImportError('there are no kernels for this device')")
    path = tmp_path / "result.json"
    sizes = "--memory", "512KiB", "--max-seq-len", "128", "--rounds", "1", "--vllm", str(vllm.parent)
    both = "--backends", "vmm", "--backends", "vllm"
    done = run_benchmark(*traces[:2], "--quick", "--no-wait", *both, *sizes, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert [row["backend"] for row in result["serving"]] == ["vmm"]
    ((name, reason),) = ((row["backend"], row["reason"]) for row in result["skipped"])
    assert (name, reason) == ("vllm", "ImportError: there are no kernels for this device")
    assert reason in done.stdout


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_told_in_the_words_of_their_files(name: str) -> None:
    assert read_config(model_config(MODELS[name], 512)) == MODELS[name]


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Four conversations of five turns, each of which begins with all of the turn before it."""
    rng = np.random.default_rng()
    path = tmp_path / "turns.jsonl"
    begins = [rng.integers(600, 1400, 5).cumsum().tolist() for _ in range(4)]
    fields = (
        {"timestamp": 0, "input_length": begins[chat][turn], "output_length": 160}
        | {"hash_ids": list(range(100 * chat, 100 * chat - (begins[chat][turn] // -512)))}
        for turn in range(5)
        for chat in range(4)
    )
    path.write_text("\n".join(map(json.dumps, fields)))
    return path


def test_reuse_is_measured_on_rows_and_blocks_next_to_none(mooncake: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = "--memory", "1MiB", "--shorten", "32", "--requests", "20", "--rounds", "1", "--chunk", "64"
    done = run_benchmark("--reuse", "--trace", str(mooncake), *sizes, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    about = {work["name"]: work for work in result["workloads"]}
    rows = {(row["trace"], row["backend"]): row for row in result["serving"]}
    backends = ("vmm", "paged", "vmm+reuse", "paged+reuse")
    assert [row["backend"] for row in result["skipped"]] == ["vllm", "vllm+reuse"]
    assert rows.keys() == {(name, backend) for name in ("turns", "8 system prompts") for backend in backends}
    for (name, backend), row in rows.items():
        assert row["finished"] == row["requests"] == 20
        assert row["same_tokens"] > 0.5
        best = about[name]["known_tokens"] / about[name]["prompt_tokens"]
        if "reuse" in backend:
            assert 0.3 * best < row["hit_rate"] < best + 0.01  # two tokens may be the same where prompts part
        else:
            assert row["hit_rate"] == 0
        assert row["idle_bytes"] == (0 if "vmm" in backend else row["peak_bytes"])
    assert result["prefill"] == result["missed"] == []
    whats = {line["what"] for line in result["comparisons"]}
    for name in ("turns", "8 system prompts"):
        for words in ("vmm+reuse over paged+reuse, tokens/s", "vmm+reuse over vmm, tokens/s"):
            assert f"{name}, saturation: {words}" in whats
    assert "8 system prompts, saturation |" in tables.TABLES["serve-reuse-system"].write(result)


def test_prompts_have_in_common_what_their_traces_say(mooncake: Path) -> None:
    limits = Limits(requests=20, tokens=10**6, longest=10**5, max_seq_len=64, shorten=8)
    for workload in (make_workload(mooncake, limits, 0), system_prompts(3, limits, 0)):
        prompts = workload.prompts(2**40, seed=1)
        assert [len(prompt) for prompt in prompts] == [request.prompt for request in workload.requests]
        known = 0
        for number, prompt in enumerate(prompts):
            common = [
                int((prompt[: len(other)] == other[: len(prompt)]).cumprod(0).sum()) for other in prompts[:number]
            ]
            known += min(max(common, default=0), len(prompt) - 1)
        assert known == workload.known_tokens() > 0


def test_long_answers_are_preempted_and_suspended_if_one_asks_for_it(tmp_path: Path) -> None:
    path, trace = tmp_path / "result.json", tmp_path / "long.jsonl"
    trace.write_text('{"input_length": 8, "output_length": 50}\n' * 8)
    sizes = "--memory", "256KiB", "--chunk", "64", "--rounds", "1", "--backends", "vmm", "--backends", "vmm+suspend"
    done = run_benchmark("--quick", "--no-wait", "--trace", str(trace), "--lengthen", "4", *sizes, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    anew, suspended = (next(row for row in result["serving"] if row["backend"] == n) for n in ("vmm", "vmm+suspend"))
    assert anew["finished"] == suspended["finished"] == 8
    assert anew["preemptions"] > anew["suspensions"] == 0
    assert 0 < suspended["suspensions"] <= suspended["preemptions"]  # as far as the host has room
    assert result["preempting"]["suspends"]
    assert result["workloads"][0]["output_tokens"] == 8 * 200
    for row in (anew, suspended):
        assert row["trace"] == "long, answers x 4"
        assert row["preemptions"] / 8 >= row["preempted_share"] > 0.1
    assert anew["recomputed_tokens"] >= 8 * anew["preemptions"]  # prompts, and what there was of answers
    assert suspended["recomputed_tokens"] < anew["recomputed_tokens"]
    whats = [line["what"] for line in result["comparisons"]]
    assert "long, answers x 4, saturation: vmm+suspend over vmm, tokens/s" in whats
    assert "requests preempted" in done.stdout


def test_it_stops_in_time_and_says_what_it_did_not_reach(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = run_benchmark("--requests", "2000", "--tokens", "10000000", "--budget-seconds", "1", "--json", str(path))
    assert done.exit_code == 0, done.output
    missed = json.loads(path.read_text())["missed"]
    assert {name.split(":")[0] for name in missed} >= {"conversations, saturation, static", "prompts of 512 tokens"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--backends", "stack"),
        ("--backends", "paged+fa3"),
        ("--rates", "0"),
        ("--model", "no/such/folder"),
        ("--json", "no/such/folder/result.json"),
        ("--plot", "result.txt"),
    ],
)
def test_what_is_unknown_is_refused(option: str, value: str) -> None:
    assert run_benchmark(option, value).exit_code == 2


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=50), st.floats(0.1, 100))
def test_arrivals_keep_the_pace_of_the_trace(milliseconds: list[int], rate: float) -> None:
    times = np.sort(milliseconds) / 1000
    requests = [Request(1, 1, time) for time in times.tolist()]
    scaled = arrivals(requests, rate, seed=0)
    assert scaled[0] == 0
    assert scaled[-1] == pytest.approx((len(times) - 1) / rate)
    assert (np.diff(scaled) >= 0).all()
    if times[-1] > times[0]:
        assert scaled == pytest.approx((times - times[0]) * scaled[-1] / (times[-1] - times[0]))
    another = arrivals(requests, rate, seed=0, number=1)
    assert another[[0, -1]] == pytest.approx(scaled[[0, -1]])
    if times[-1] > times[0]:
        assert sorted(np.diff(another)) == pytest.approx(sorted(np.diff(scaled)))


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
    run = Run(np.array([0.0, 1.0, 2.0]), *np.array([[7, 8, 9], [5, 1, 4]]))
    run.first[:], run.finish[:] = [0.5, 2.0, 3.0], [2.5, 2.0, np.nan]
    run.tokens = np.arange(34)
    run.seconds, run.generated, run.manager_ns, run.host_ns = 4.0, 8, [4000, 5000, 11_000], 90_000
    run.running, run.waiting, run.step_seconds = [1, 3, 2], [0, 1, 0], [1.0, 1.0, 2.0]
    run.samples = [(0.0, 0, 1), (1.0, 100, 3), (4.0, 100, 0)]
    return run


def test_figures_of_a_run() -> None:
    row = figures(make_run())
    assert (row["requests"], row["finished"], row["output_tokens_per_s"]) == (3, 2, 2.0)
    assert row["ttft_s"] == {"p50": 0.75, "p99": None, "p99_interval": None, "most": 1.0}
    assert row["tpot_s"]["p50"] == 0.5  # two seconds for four tokens behind the first
    assert (row["peak_concurrency"], row["mean_concurrency"], row["crowded_concurrency"]) == (3, 2.0, 3.0)
    assert (row["manager_us"], row["host_us"]) == (pytest.approx(20 / 3), 30.0)
    assert (row["manager_step_us"]["p50"], row["manager_step_us"]["most"]) == (5.0, 11.0)
    assert (row["peak_bytes"], row["mean_bytes"]) == (100, 87.5)
    assert row["tokens_per_s"] == (8 + 24) / 4


def test_gaps_are_between_tokens_of_a_request() -> None:
    rng = np.random.default_rng()
    run = Run(np.zeros(3), np.ones(3, np.int64), np.array([1, 4, 6]))
    ends = rng.exponential(1.0, 20).cumsum()
    times: list[list[float]] = [[], [], []]
    for end in ends:
        sampled = np.flatnonzero(list(map(len, times)) < run.outputs)
        sampled = sampled[rng.random(len(sampled)) < 0.7]
        run.take_down(Step(sampled, sampled[:0], sampled[:0], sampled), end - 0.1, end)
        for request in sampled:
            times[request].append(float(end))
    for request, those in enumerate(times):
        if len(those) > 1:
            assert run.longest_gap[request] == max(np.diff(those))
        else:
            assert np.isnan(run.longest_gap[request])


def test_a_percentile_is_told_where_it_is_known() -> None:
    assert quantiles(np.empty(0)) == {"p50": None, "p99": None, "p99_interval": None, "most": None}
    assert quantiles(np.arange(367.0))["p99"] is None  # 0.99 ** 367 is more than 0.025: all may lie below it
    assert quantiles(np.arange(368.0))["p99"] is not None
    rng, held = np.random.default_rng(), 0
    for values in rng.exponential(1.0, (400, 1000)):
        low, high = quantiles(values)["p99_interval"]
        assert low <= np.percentile(values, 99) <= high
        held += low <= np.log(100) <= high
    assert held > 350  # 95 % of 400, less seven standard deviations


def test_same_tokens_looks_at_outputs_of_finished_requests() -> None:
    run, other = make_run(), make_run()
    other.tokens[[0, 33]] = -1  # a prompt, and a request that did not finish
    assert same_tokens(run, other) == 1.0
    other.tokens[20] = -1  # the only output of the second
    assert same_tokens(run, other) == 0.5


def test_comparisons_are_ratios_of_medians() -> None:
    def row(backend: str, load: str, **changes: float) -> dict[str, Any]:
        usual = {"output_tokens_per_s": 100.0, "crowded_concurrency": 50.0, "manager_us": 10.0}
        usual |= {"first_token_s": 1.0, "manager_p99_us": 20.0} | changes
        each = {name: [value / 2, value, 3 * value] for name, value in usual.items()}
        about = {"trace": "t", "load": load, "backend": backend, "requests": 3, "finished": 3}
        about |= {"rate": None if load == "saturation" else float(load.split("%")[0]) / 100}
        return about | {"idle_bytes": 0 if backend == "vmm" else 8, "each_round": each}

    serving = [row("paged", "saturation"), row("vmm", "saturation", manager_us=11.0)]
    serving += [row("static", "saturation", crowded_concurrency=10.0), row("paged", "50% load"), row("vmm", "50% load")]
    serving += [row("vllm", "saturation"), row("vllm", "50% load"), row("paged", "110% load"), row("vmm", "110% load")]
    prompts = [
        {"backend": backend, "kernel": kernel, "tokens_per_s": speed, "attention_tokens_per_s": 2 * speed}
        for backend, kernel, speed in (("vmm", "fa3", 118.0), ("paged", "flashinfer", 100.0))
    ]
    result = {"serving": serving, "prefill": prompts}
    found = {line["what"]: line["value"] for line in compare(result)}
    assert {what: value for what, value in found.items() if "load" not in what} == {
        "t, saturation: vmm over paged, tokens/s": 1.0,
        "t, saturation: vmm over paged, concurrency while others wait": 1.0,
        "t, saturation: vmm over paged, time to first token behind the queue": 1.0,
        "t, saturation: vmm over paged, cache manager's host time a step": 1.1,
        "t, saturation: vmm over paged, in the slowest hundredth": 1.0,
        "t, saturation: vmm over paged, memory when idle": 0.0,
        "t, saturation: vmm over vllm, tokens/s": 1.0,
        "t, saturation: vmm over vllm, time to first token behind the queue": 1.0,
        "t, saturation: vmm over static, tokens/s": 1.0,
        "t, saturation: vmm over static, concurrency while others wait": 5.0,
        "prompts: vmm fa3 over paged flashinfer, whole prefill": 1.18,
        "prompts: vmm fa3 over paged flashinfer, attention alone": 1.18,
    }
    assert "t, 50% load: vmm over vllm, time to first token" in found
    assert "t, 110% load: vmm over paged, time to first token behind the queue" in found
    serving[0]["finished"] = 2
    assert not any("t, saturation: vmm over paged" in line["what"] for line in compare(result))


def test_first_tokens_are_told_in_milliseconds_where_nobody_queues() -> None:
    row = {"ttft_s": {"p50": 0.0246, "p99": 1.5, "p99_interval": [1.25, None]}, "each_round": {"first_token_s": [0.02]}}
    lines = [dict(line[::-1] for line in figure_lines({"vmm": row | {"rate": rate}})) for rate in (None, 0.8, 1.1)]
    queued = {
        "0.02": "time to first token behind the queue, s, p50",
        "1.50 (1.25 to -)": "p99",
        "0.02 (0.02 to 0.02)": "p50 of all rounds",
    }
    below = {
        "24.6": "time to first token, ms, p50",
        "1,500.0 (1,250.0 to -)": "p99",
        "20.0 (20.0 to 20.0)": "p50 of all rounds",
    }
    assert lines == [queued, below, queued]


def test_the_run_with_the_median_throughput_is_reported() -> None:
    def row(speed: float, finished: int = 3) -> dict[str, Any]:
        figures = {
            "output_tokens_per_s": speed,
            "crowded_concurrency": None,
            "manager_us": speed,
            "ttft_s": {"p50": 1.0, "p99": None},
            "hit_rate": 0.25,
        }
        times = {"manager_step_us": {"p99": 2 * speed}, "seconds": 100 / speed}
        return figures | times | {"finished": finished, "requests": 3}

    rows = [row(5.0), row(9.0), row(7.0), row(1.0, finished=2), row(8.0)]
    found = middle(rows)
    assert found.items() >= (row(7.0) | {"rounds": [5.0, 9.0, 7.0, 8.0]}).items()
    assert found["each_round"]["manager_p99_us"] == [10.0, 18.0, 14.0, 16.0]
    assert middle(rows[3:4]).items() >= (rows[3] | {"rounds": [1.0]}).items()
