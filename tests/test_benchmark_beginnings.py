"""The benchmark of starts on what is known: who finds something, who makes driver calls, and figures."""

from __future__ import annotations

import json

from typer import Typer
from typer.testing import CliRunner

from benchmarks import prefixes, tables
from benchmarks.geometry import open_geometry

APP = Typer()
APP.command()(prefixes.main)


def test_what_is_found_and_called() -> None:
    driver, layout = open_geometry("cpu")
    for large in (True, False):
        hit, turn, listed, without = prefixes.beginnings(driver, layout, 512, large, rounds=2)
        assert (hit["cached_tokens"], without["cached_tokens"]) == (512, 0)
        assert turn["cached_tokens"] == listed["cached_tokens"] == 512
        assert hit["calls"]["map"] == (2 if large else 32) + 1, "what is known, and a page behind it"
        assert not turn["calls"]
        assert not listed["calls"]
        assert without["calls"]["create"] == without["calls"]["map"]


def test_it_measures_all_of_it() -> None:
    done = CliRunner().invoke(APP, ["--device", "cpu", "--tokens", "70", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert len(result["starts"]) == 8
    assert all(row["start_us"] > 0 for row in result["starts"])
    assert tables.TABLES["beginnings"].write(result).count("\n") == 9
