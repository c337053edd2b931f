"""The benchmark of forks on the host: what it compares are the same calls, and what it counts adds up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from conftest import on_driver
from faulty import recorded_calls
from typer import Typer
from typer.testing import CliRunner

from benchmarks import sharing, tables
from benchmarks.geometry import SMALL
from vmmkv import KVCache
from vmmkv.driver.driver import open_driver

APP = Typer()
APP.command()(sharing.main)
SIZE = 16 * SMALL.token_bytes


@pytest.mark.parametrize("large", sharing.FRAMES)
def test_forks_are_compared_with_the_same_calls(monkeypatch: pytest.MonkeyPatch, undebugged: None, large: bool) -> None:
    timed: list[list[tuple[object, ...]]] = []

    def note(operation: Callable[..., Any], *args: Any) -> float:
        made.clear()
        operation(*args)
        timed.append(list(made))
        return 1.0

    made = recorded_calls(monkeypatch)
    driver = open_driver("cpu", SIZE)
    monkeypatch.setattr("benchmarks.sharing.microseconds", note)
    tokens, count = random.randint(1, 600), random.randint(1, 3)
    row = sharing.forking(driver, SMALL, tokens, count, large, rounds=2)
    assert len(timed) == 7
    assert all(calls == timed[0] for calls in timed)
    for name, calls in row["calls"].items():
        assert calls == sum(call[0] == name for call in timed[0])
    assert row["bytes_copied"] == tokens * SMALL.token_bytes - row["pages_shared"] * SIZE
    assert row["pages_shared"] + row["pages_of_a_fork"] == SMALL.pages(tokens, SIZE)


@pytest.mark.parametrize("large", sharing.FRAMES)
def test_pages_of_samples_are_counted(large: bool) -> None:
    driver = open_driver("cpu", SIZE)
    tokens, samples, new_tokens = random.randint(1, 600), random.randint(2, 5), random.randint(1, 40)
    row = sharing.sampling(driver, SMALL, tokens, samples, new_tokens, large)
    with on_driver(driver, KVCache, SMALL, samples, 700, max_bytes="32MiB", large_frames=False) as cache:
        separate = [cache.sequence(tokens + new_tokens) for _ in range(samples)]
        assert row["pages_separate"] == cache.stats().pages["used"]
        cache.free(separate)
    assert row["pages_shared"] <= tokens * SMALL.token_bytes // SIZE
    assert row["pages_once_and_own"] <= row["pages"] <= row["pages_separate"]
    if not large:
        assert row["pages"] == row["pages_once_and_own"]


def test_it_measures_all_of_it() -> None:
    sizes = "--tokens", "520", "--samples", "3", "--new-tokens", "20", "--launches", "5", "--rounds", "1"
    done = CliRunner().invoke(APP, ["--device", "cpu", *sizes, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [(row["tokens"], row["forks"]) for row in result["forking"]] == [(520, 1), (520, 3), (513, 1), (513, 3)] * 2
    for row in result["forking"]:
        assert row["ratio"] == row["fork_us"] / row["raw_us"]
        assert 0 < row["driver_us"] < row["fork_us"]
    assert result["kernels"].keys() == {"launch_us_alone", "launch_us_beside", "forks"}  # without a GPU no queue
    assert result["kernels"]["forks"] > 0
    assert len(result["sampling"]) == 4
    sharing.show(result)
    for name in ("forking", "forking-kernels", "samples"):
        assert tables.TABLES[name].write(result).count("\n") >= 2
