"""The benchmark of continuous batching, on the host with its tiny model: what it reports adds up."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from test_benchmark_serve import vllm as vllm
from typer import Typer
from typer.testing import CliRunner

from benchmarks import batching, batching_tables, comparisons
from benchmarks.batching_vllm import serve_beside
from benchmarks.generate.models import CONFIGS, token_bytes
from benchmarks.serve.workloads import Limits, make_workload

APP = Typer()
APP.command()(batching.main)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_it_measures_rows_and_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attentions = ["--attention", "eager", "--attention", "sdpa"]
    done = CliRunner().invoke(
        APP, ["--requests", "4", "--rounds", "1", "--seconds", "600", "--memory", "8MiB", *attentions, "--json"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    systems = ["rows", "blocks, eager", "blocks, sdpa"]
    assert [(row["system"], row["round"]) for row in result["served"]] == [(system, 0) for system in systems]
    for row in result["served"]:
        assert row["finished"] == result["requests"] == 4
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(result["output_tokens"])
        assert row["peak_bytes"] <= result["memory_bytes"]
    rows, blocks, _ = result["served"]
    assert rows["idle_bytes"] == 0 < result["memory_bytes"] / 2 < blocks["idle_bytes"]
    assert (rows["compared"], rows["equal"], rows["equal_tokens"]) == (4, 1.0, 1.0)  # in fp32 there are no ties
    assert {row["what"] for row in result["comparisons"]} >= {
        "tokens/s on rows over blocks, eager",
        "tokens/s on rows over blocks, sdpa",
    }
    assert result["first_tokens"]["new_s"] > 0 < result["first_tokens"]["known_s"]
    assert 0 < result["logits"]["rows"] < 2 * result["logits"]["own"] < 0.1
    batching.show(result)
    assert f"4 of {result['requests']}" in capsys.readouterr().out


def test_who_is_stopped_does_not_run_on_beside_what_is_measured_next() -> None:
    workload = make_workload(None, Limits(20, 1 << 40, 512, 512, 4), seed=0)
    with batching.manager_of(batching.build("tiny", None, torch.device("cpu")), "rows", 64 << 20) as manager:
        row, _ = batching.run(manager, "rows", workload, 0, 0.05)
        assert row["finished"] < len(workload.requests)
        batching.first_tokens(manager, manager.model.config.vocab_size, 64, rounds=1)
        scheduler = manager.batch_processor.scheduler
        left = {*scheduler.active_requests, *scheduler.waiting_requests}
        assert not left & {f"0-{number}" for number in range(len(workload.requests))}


def test_vllm_serves_the_same_requests_in_a_process_of_its_own(vllm: Path) -> None:
    workload = make_workload(None, Limits(6, 1 << 40, 512, 512, 16), seed=0)
    told = serve_beside(vllm.parent, "tiny", workload, 1 << 20, 60, 2)
    assert (told["version"], told["reason"]) == ("0.23.0", "")
    assert told["options"]["num_gpu_blocks_override"] * 16 * token_bytes(CONFIGS["tiny"]) == 1 << 20
    assert [row["round"] for row in told["served"]] == [0, 1]
    for row in told["served"]:
        assert row["finished"] == 6
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(sum(each.output for each in workload.requests))
    served = [
        {"system": system, "round": 0, "tokens_per_s": speed, "waste": None, "most_waste": None}
        for system, speed in (("rows", 1.5 * median(row["tokens_per_s"] for row in told["served"])), ("blocks, x", 1.0))
    ]
    first = {"tokens": 100, "known": 0.9, "new_s": 4.0, "known_s": 1.0}
    about = {"memory_bytes": 1 << 20, "requests": 6}
    result = about | {"served": served, "first_tokens": first, "vllm": told}
    (line,) = (row for row in batching_tables.compare(result) if "vLLM" in row["what"])
    assert line["what"] == "tokens/s on rows over vLLM"
    assert line["value"] == pytest.approx(1.5)
    columns = ("first_token_s", "peak_bytes", "idle_bytes", "surplus_bytes")
    result["served"] = [row | dict.fromkeys(columns) | {"finished": 6} for row in served]
    assert [row[:2] for row in batching_tables.batching_table(result)[1]][-2:] == [("vLLM", "6 of 6")] * 2


def test_vllm_that_cannot_be_had_is_named_with_the_reason(vllm: Path) -> None:
    (vllm / "__init__.py").write_text("raise ImportError('there are no kernels for this device')")
    workload = make_workload(None, Limits(2, 1 << 40, 512, 512, 16), seed=0)
    told = serve_beside(vllm.parent, "tiny", workload, 1 << 20, 60, 2)
    assert (told["served"], told["reason"]) == ([], "ImportError: there are no kernels for this device")
    assert "no module vllm" in serve_beside(None, "tiny", workload, 1 << 20, 60, 2)["reason"]


def test_answers_are_compared_as_far_as_both_go() -> None:
    ours = {"0": [1, 2, 3, 4], "1": [5, 6], "2": [7, 8, 9], "3": [1], "4": [2]}
    theirs = {"0": [1, 2], "1": [5, 6], "2": [7, 1, 9], "3": []}
    assert batching.compare_answers(ours, theirs) == {"compared": 3, "equal": 2 / 3, "equal_tokens": 5 / 7}


def test_medians_of_the_rounds_are_compared() -> None:
    speeds = {"rows": (100.0, 4000.0, 5000.0), "blocks, sdpa": (300.0,), "blocks, flash": (4001.0,)}
    served = [
        {"system": system, "round": at, "tokens_per_s": speed, "waste": 0.01, "most_waste": 0.5, "surplus_bytes": 25}
        for system, each in speeds.items()
        for at, speed in enumerate(each)
    ]
    first = {"tokens": 100, "known": 0.9, "new_s": 4.0, "known_s": 1.0}
    result = {"memory_bytes": 100, "served": served, "first_tokens": first}
    assert {row["what"]: row["value"] for row in batching_tables.compare(result)} == {
        "tokens/s on rows over blocks, sdpa": 4000 / 300,
        "tokens/s on rows over blocks, flash": 4000 / 4001,
        "memory beside live tokens on rows, of theirs, median": 0.01 / 0.99,
        "memory beside live tokens on rows, of theirs, most": 1.0,
        "mapped ahead, known or parked beside that on rows, of all memory, median": 0.25,
        "first token of 100 tokens, 90% of them known: times as early": 4.0,
    }


def test_who_has_finished_nothing_is_no_measure() -> None:
    served = [
        {"system": system, "round": 0, "tokens_per_s": speed, "waste": None, "most_waste": None}
        for system, speed in (("rows", 4000.0), ("blocks, sdpa", 0.0))
    ]
    first = {"tokens": 100, "known": 0.9, "new_s": 4.0, "known_s": 1.0}
    result = {"memory_bytes": 100, "served": served, "first_tokens": first}
    found = batching_tables.compare(result)
    assert found[0] == {"what": "tokens/s on rows over blocks, sdpa", "value": None}
    assert [line for line in comparisons.lines(found) if "not measured" in line] == [(found[0]["what"], "not measured")]
