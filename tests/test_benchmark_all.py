"""The command that runs all benchmarks: that its commands are such, and that it goes on past one that fails."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from conftest import ROOT
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import all as every
from benchmarks.report import PLOTS
from benchmarks.tables import TABLES
from vmmkv.cli.app import app

APP = typer.Typer()
APP.command()(every.main)


def test_it_makes_all_that_the_report_reads() -> None:
    read = {source for table in TABLES.values() for source in table.sources} | {source for source, _ in PLOTS.values()}
    made = {
        f"{name}{'' if benchmark.kind == every.Kind.HOST else '_gpu'}.json"
        for name, benchmark in every.BENCHMARKS.items()
    }
    assert made - read == {"compiling_gpu.json"}  # which is made for the others' sake
    assert read <= made
    for kind in every.Kind:
        assert sum(benchmark.minutes for benchmark in every.BENCHMARKS.values() if benchmark.kind == kind) <= 30


@pytest.mark.parametrize("name", every.BENCHMARKS)
def test_its_commands_are_understood(name: str, tmp_path: Path) -> None:
    words = shlex.split(f"{every.BENCHMARKS[name].command} {every.BENCHMARKS[name].beside}")
    places = {key: str(tmp_path / file) for key, file in every.TRACES.items()}
    for place in places.values():
        Path(place).touch()
    places["vllm"] = str(tmp_path)
    minus_m, module, *words = (word.format(json=tmp_path / "json", seconds="60", **places) for word in words)
    assert minus_m == "-m"
    if module == "vmmkv":
        command = get_command(app).commands[words.pop(0)]  # type: ignore[attr-defined]
    else:
        package = ROOT / module.replace(".", "/")
        module = f"{module}.__main__" if package.is_dir() else module
        tool = typer.Typer()
        tool.command()(import_module(module).main)
        command = get_command(tool)
    with command.make_context(name, words):
        pass


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results go, one of which is there."""
    folder = tmp_path / every.RESULTS
    folder.mkdir(parents=True)
    (folder / "fails.json").write_text("old")
    commands = {
        "fails": "-c \"print(1); raise SystemExit('no')\"",
        "hangs": '-c "import time; print({{}}); time.sleep(1000)"',
        "lies": '-c "print({{}})"',
        "lacks": "-c pass {conv}",
        "prints": '-c "print(\'{{\\"environment\\": 1}}\')"',
        "peer": "-c 'print({{}})' {vllm}",
        "interrupted": '-c "import time\ntry: time.sleep(1000)\nfinally: print(\'{{\\"environment\\": 3}}\')"',
        "writes": "-c \"open('{json}', 'w').write('{{\\\"environment\\\": 2}}')\"",
    }
    limited = {
        name: every.Benchmark(every.Kind.HOST, {"hangs": 0.01, "interrupted": 0.05}.get(name, 10), command)
        for name, command in commands.items()
    }
    monkeypatch.setattr(every, "BENCHMARKS", limited)
    monkeypatch.setattr(every, "ROOT", tmp_path)
    return folder


def test_it_goes_on_past_those_that_fail_and_names_them(results: Path, tmp_path: Path) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--kind", "host", "--traces", str(tmp_path)])
    assert done.exit_code == 1
    reasons = "it ended with 1", "stopped after 0.02 minutes", "does not say how", "there is no azure"
    for words in (*reasons, "stopped after 0.1 minutes, and written"):  # after twice its own
        assert words in done.stdout
    assert done.stdout.count("written") == 3
    assert "peer" not in done.stdout
    assert {path.stem for path in results.iterdir()} == {"fails", "interrupted", "prints", "writes"}
    assert json.loads((results / "interrupted.json").read_text()) == {"environment": 3}
    assert (results / "fails.json").read_text() == "old"
    assert json.loads((results / "prints.json").read_text()) == {"environment": 1}
    assert json.loads((results / "writes.json").read_text()) == {"environment": 2}


def test_all_together_take_no_longer_than_their_minutes(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)"
    slow = every.Benchmark(every.Kind.HOST, 0.01, f"-c '{code}'")
    monkeypatch.setattr(every, "BENCHMARKS", {"hangs": slow, "also hangs": slow, "too late": slow})
    done = CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--kind", "host"])
    assert done.exit_code == 1
    assert "stopped after 0.02 minutes" in done.stdout  # twice its own; the next has what is left
    assert "not begun" in done.stdout


def test_within_seconds_one_without_a_budget_begins_if_there_is_room_for_all_of_it(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 'import json, sys; print(json.dumps({{"environment": sys.argv[1:]}}))'
    minutes = {"one": (2, "-"), "half": (2.5, "-"), "budgeted": (2.5, "{seconds}"), "far": (5, "{seconds}")}
    chosen = {
        name: every.Benchmark(every.Kind.HOST, needed, f"-c '{writes}' {word}")
        for name, (needed, word) in minutes.items()
    }
    monkeypatch.setattr(every, "BENCHMARKS", chosen)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--kind", "host", "--seconds", "125"])
    assert done.exit_code == 1
    assert done.stdout.count("not begun") == 2
    written = {path.stem: json.loads(path.read_text())["environment"] for path in results.glob("[!f]*.json")}
    assert written.keys() == {"one", "budgeted"}
    assert 60 < int(written["budgeted"][0]) < 125


def test_results_are_named_after_the_gpu(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, host = (every.Benchmark(kind, 1, "-c pass") for kind in (every.Kind.GPU, every.Kind.HOST))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="torch sees none"):
        every.result_of("some", gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert every.result_of("some", gpu) == results / "some_h100.json"
    assert every.result_of("some", host) == results / "some.json"


def test_what_runs_can_be_chosen(results: Path) -> None:
    def invoke(*words: str) -> str:
        done = CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--kind", "host", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "written" in invoke("--only", "prints")
    listed = invoke("--list", "--skip", "prints")
    assert "hangs" in listed
    assert "prints" not in listed
    assert "peer" in invoke("--list", "--vllm", str(results))
    assert CliRunner().invoke(APP, ["--only", "nothing"]).exit_code == 2
    assert CliRunner().invoke(APP, ["--only", "peer"]).exit_code == 2
