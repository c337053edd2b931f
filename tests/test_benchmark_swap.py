"""The benchmark of suspended sequences, on host memory: all bytes come back in every way, and figures."""

from __future__ import annotations

import json

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from benchmarks import swap, tables

APP = Typer()
APP.command()(swap.main)


@pytest.mark.parametrize("kind", [swap.Plain, swap.Gathered])
def test_who_brings_nothing_back_is_found_out(kind: type[swap.Plain]) -> None:
    way = kind(4 * swap.PIECE, torch.device("cpu"))
    swap.measure({swap.PLAIN: way}, torch.device("cpu"), rounds=1)
    way.back = lambda: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        swap.measure({swap.PLAIN: way}, torch.device("cpu"), rounds=1)


def test_it_measures_all_of_it() -> None:
    done = CliRunner().invoke(APP, ["--device", "cpu", "--tokens", "70", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["tokens"] == 64
    assert [row["way"] for row in result["out"]] == [row["way"] for row in result["back"]]
    assert len(result["out"]) == 4
    assert all(row["gb_per_s"] > 0 for row in result["out"] + result["back"])
    assert tables.TABLES["swapping"].write(result).count("\n") == 5
