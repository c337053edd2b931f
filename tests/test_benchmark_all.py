"""The command that runs all benchmarks: its commands are understood, and it goes on past a benchmark that fails."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer
from conftest import ROOT
from typer.main import get_command
from typer.testing import CliRunner, Result

from benchmarks import all as every
from benchmarks.all import Benchmark, Kind
from benchmarks.report import PLOTS
from benchmarks.tables import TABLES

APP = typer.Typer()
APP.command()(every.main)


def invoke(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["--kind", "host", *words])


def test_it_makes_all_that_the_report_reads() -> None:
    read = {source for table in TABLES.values() for source in table.sources} | {source for source, _ in PLOTS.values()}
    made = {f"{name}{'' if each.kind == Kind.HOST else '_gpu'}.json" for name, each in every.BENCHMARKS.items()}
    assert made == read
    for kind in Kind:
        assert sum(benchmark.minutes for benchmark in every.BENCHMARKS.values() if benchmark.kind == kind) <= 30


@pytest.mark.parametrize("name", every.BENCHMARKS)
def test_its_commands_are_understood(name: str, tmp_path: Path) -> None:
    places = {key: str(tmp_path / file) for key, file in every.TRACES.items()}
    for place in places.values():
        Path(place).touch()
    places["vllm"] = str(tmp_path)
    words = shlex.split(f"{every.BENCHMARKS[name].command} {every.BENCHMARKS[name].beside}")
    module, *words = (word.format(json=tmp_path / "json", seconds="60", **places) for word in words)
    package = (ROOT / "benchmarks" / module).is_dir()
    tool = typer.Typer()
    tool.command()(import_module(f"benchmarks.{module}{'.__main__' if package else ''}").main)
    with get_command(tool).make_context(name, words):
        pass


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the results of some benchmarks, in which one result is there already."""
    folder = tmp_path / every.RESULTS
    folder.mkdir(parents=True)
    (folder / "fails.json").write_text("old")
    codes = {
        "fails": "print(1); raise SystemExit('no')",
        "stubborn": "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)",
        "lies": "print({})",
        "lacks": "pass",
        "prints": "import json, sys; print(json.dumps({'environment': sys.argv[1:]}))",
        "writes": "import sys; open(sys.argv[1], 'w').write('{\"environment\": 2}')",
    }
    (tmp_path / "benchmarks" / "__init__.py").touch()
    for name, code in codes.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(code)
    arguments = {"lacks": " {conv}", "writes": " {json}", "prints": " {seconds}"}
    made = {name: Benchmark(Kind.HOST, 10, name + arguments.get(name, "")) for name in codes}
    made["stubborn"] = made["stubborn"]._replace(minutes=0.01)
    monkeypatch.setattr(every, "BENCHMARKS", made)
    monkeypatch.setattr(every, "ROOT", tmp_path)
    return folder


def test_it_goes_on_past_those_that_fail_and_names_them(results: Path, tmp_path: Path) -> None:
    done = invoke("--traces", str(tmp_path))
    assert done.exit_code == 1
    for words in ("it ended with 1", "stopped after 0.02 minutes", "does not say how", "there is no azure"):
        assert words in done.stdout
    found = {path.stem: path.read_text() for path in results.iterdir()}
    assert found.keys() == {"fails", "prints", "writes"}
    assert found["fails"] == "old"
    assert json.loads(found["writes"]) == {"environment": 2}


def test_what_runs_can_be_chosen(results: Path) -> None:
    listed = invoke("--list", "--only", "fails").stdout
    assert "fails" in listed
    assert "prints" not in listed
    assert invoke("--only", "nothing").exit_code == 2
