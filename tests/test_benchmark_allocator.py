"""The allocator's benchmark on the host: what it compares are the same calls, and its tables say what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from faulty import recorded_calls
from typer import Typer
from typer.testing import CliRunner

from benchmarks import allocator, tables
from vmmkv.driver import host

SIZE = 1 << 14
"""The least page of 16 tokens in 32 layers."""
WRITABLE = 3
"""PROT_READ | PROT_WRITE."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[object, ...]]]:
    """The calls of each operation that is timed, in turn ours and by hand."""
    found: list[list[tuple[object, ...]]] = []
    made = recorded_calls(monkeypatch)

    def note(operation: Callable[..., Any], *args: Any) -> float:
        made.clear()
        operation(*args)
        found.append(list(made))
        return 1.0

    monkeypatch.setattr(allocator, "open_driver", lambda device: host.HostDriver(SIZE))
    monkeypatch.setattr(allocator, "microseconds", note)
    return found


@pytest.mark.parametrize("growth", allocator.GROWTHS)
@pytest.mark.parametrize("measure", [allocator.growth_onto_new_pages, allocator.growth_onto_reclaimed_pages])
def test_growth_is_compared_with_the_same_calls(
    timed: list[list[tuple[object, ...]]], measure: Callable[..., dict[str, Any]], growth: tuple[int, bool]
) -> None:
    measure(allocator.open_driver(None), *growth, 2)
    assert len(timed) == 6
    assert all(calls == timed[0] for calls in timed)
    pages, large = growth
    frame = allocator.LARGE if large else 1
    steps = 1 if measure is allocator.growth_onto_reclaimed_pages else allocator.MOST_PAGES // pages
    assert timed[0].count(("map", frame * SIZE)) == steps * pages // frame
    assert timed[0].count(("set_access", pages * SIZE, WRITABLE)) == steps


@pytest.mark.parametrize("crossing", [0, 3])
def test_batch_steps_are_compared_with_the_same_calls(timed: list[list[tuple[object, ...]]], crossing: int) -> None:
    allocator.batch_step(allocator.open_driver(None), crossing, 1)
    assert len(timed) == 4
    assert all(calls == timed[0] for calls in timed)
    assert len(timed[0]) == 3 * crossing


def test_it_measures_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "BATCH", 16)
    monkeypatch.setattr(allocator, "open_driver", lambda device: host.HostDriver(SIZE))
    app = Typer()
    app.command()(allocator.main)
    done = CliRunner().invoke(app, ["--rounds", "3", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    for part in ("growth_new", "growth_reclaimed"):
        assert [(row["pages_a_step"], row["large_frames"]) for row in result[part]] == list(allocator.GROWTHS)
        for row in result[part]:
            assert row["extend_p10_us"] <= row["extend_us"] <= row["extend_p90_us"]
            assert row["ratio"] == row["extend_us"] / row["raw_us"]
    allocator.show(result)
    for row, crossing in zip(result["batch_step"][2:], (16, 256)):
        row["crossing"] = crossing  # as with a batch of 256
    text = tables.TABLES["allocator"].write(result)
    for words in ("16 at a time, large frames", "one at a time", "all of them"):
        assert words in text
