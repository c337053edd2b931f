"""The mapper's benchmark on the host: what it reports adds up, and it says what it left out."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest
from conftest import calls
from typer import Typer
from typer.testing import CliRunner

from benchmarks import mapper, tables
from benchmarks.geometry import open_geometry
from vmmkv.core.mapper import Mapper

APP = Typer()
APP.command()(mapper.main)
TABLES = "mapper-decode", "mapper-launches", "mapper-prompts"


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> dict[str, Any]:
    monkeypatch.setattr(mapper, "PROMPT_ROUNDS", 1)
    monkeypatch.setattr(mapper, "RESTLESS_SECONDS", 0.05)
    sizes = "--steps", "40", "--sequences", "8", "--launches", "5", "--rounds", "2"
    done = CliRunner().invoke(APP, ["--device", "cpu", *sizes, "--json", *args])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    mapper.show(result)
    parts = [result["decode"], result["launching"], result["prompts"]]
    for name, rows in zip(TABLES, parts):
        written = str(tables.TABLES[name].write(result))
        assert written.count("\n") >= 2 if rows else written == "Not measured yet."
    return result  # type: ignore[no-any-return]


def test_it_compares_ways_to_have_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch)
    rows = {row["way"]: row for row in result["decode"]}
    assert list(rows) == list(mapper.WAYS)
    assert [len(row["rounds"]) for row in rows.values()] == [2, 2, 1]
    for row in rows.values():
        assert min(row["rounds"]) <= row["seconds"] <= max(row["rounds"])
    before, ahead, need = (rows[way] for way in mapper.WAYS)
    assert (before["of_mapped_before"], before["extends_with_a_call"], before["steps_with_a_call"]) == (1, 0, 0)
    # Steps take no time on the host: it is up to the machine whether the mapper comes to anything in between.
    assert before["pages_ahead"] == need["pages_ahead"] == 0 <= ahead["pages_ahead"]
    assert need["extends_with_a_call"] == pytest.approx(1 / 16, rel=0.5)  # a page holds 16 tokens
    assert need["extends_with_a_call"] <= need["steps_with_a_call"] <= 1
    assert [row["way"] for row in result["launching"]] == [mapper.MAPPED, mapper.AHEAD]
    assert result["restless"]["pages_per_s"]["min"] > 0
    for row in result["prompts"]:
        assert 0 < row["min"] <= row["median"] <= row["max"]
    assert [row["frames"] for row in result["prompts"]] == list(mapper.FRAMES) * 3
    assert result["missed"] == []


@pytest.mark.parametrize("way", mapper.WAYS)
def test_one_way_has_a_mapper(way: str) -> None:
    bench = mapper.Bench(*open_geometry("cpu"), lookahead=32, deadline=inf, missed=[])
    with mapper.growing(bench, way, sequences=8, steps=40) as (cache, _):
        if way == mapper.AHEAD:
            with calls(Mapper, "_change") as until:
                until(lambda: cache.stats().pages_mapped["ahead"] > 0)
        else:
            assert cache.pool.mapper is None


def test_it_says_what_it_did_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, "--budget-seconds", "0")
    assert result["decode"] == result["launching"] == result["prompts"] == []
    assert [name.split(", round 1")[0] for name in result["missed"]] == [
        "prompts",
        "launching",
        "launching beside a mapper that never rests",
        "decoding",
        "decoding without a mapper",
    ]
