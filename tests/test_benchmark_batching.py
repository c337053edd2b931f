"""The benchmark of continuous batching, on the host with its tiny model: what it reports adds up."""

from __future__ import annotations

import json

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from benchmarks import batching

APP = Typer()
APP.command()(batching.main)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_it_measures_rows_and_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(
        APP,
        ["--requests", "4", "--rounds", "1", "--seconds", "600", "--memory", "8MiB", "--attention", "eager", "--json"],
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [(row["system"], row["round"]) for row in result["served"]] == [("rows", 0), ("blocks, eager", 0)]
    for row in result["served"]:
        assert row["finished"] == result["requests"] == 4
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(result["output_tokens"])
        assert row["peak_bytes"] <= result["memory_bytes"]
    assert result["first_tokens"]["new_s"] > 0 < result["first_tokens"]["known_s"]
    batching.show(result)
    assert f"4 of {result['requests']}" in capsys.readouterr().out
