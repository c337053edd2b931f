"""Where the time of serving goes: what a run on the host tells, and how kernels are added up."""

from __future__ import annotations

import json
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import run_module_here

from benchmarks.serve.measure import Load
from benchmarks.step_times import BACKENDS, SHOWN, Kernel, compare, largest, measure, table


@pytest.mark.parametrize(
    ("requests", "way"), [(3, []), (2, ["--reuse"]), (2, ["--wait"])], ids=["alone", "reuse", "each step waited for"]
)
def test_a_step_is_as_long_as_what_it_consists_of(requests: int, way: list[str]) -> None:
    few = "--device", "cpu", "--rounds", "1", "--requests", str(requests)
    done = run_module_here("benchmarks.step_times", *few, *way, "--json")
    assert not done.returncode, done.stderr
    result = json.loads(done.stdout)
    assert [row["backend"] for row in result["serving"]] == list(BACKENDS)
    for row in result["serving"]:
        assert row["finished"] == row["requests"] == requests
        step = row["seconds"] * 1e6 / row["steps"]
        assert 0 <= row["driver_us"] <= row["manager_us"] <= row["host_us"] <= step
        assert row["device_us"] == 0  # there is no device
        assert ("system prompts" in row["trace"]) == result["reuse"] == ("--reuse" in way)
    assert result["wait"] == ("--wait" in way)
    _, lines = table(result)
    assert list(lines[0][1:]) == [f"{row['seconds'] * 1e6 / row['steps']:,.0f}" for row in result["serving"]]


def test_the_largest_kernels_are_named_and_the_others_added_up() -> None:
    chance = Random()
    kernels = [Kernel(f"kernel {i}", chance.randint(1, 9), chance.random()) for i in range(chance.randint(0, 20))]
    found = largest(kernels)
    assert sum(kernel.us for kernel in found) == pytest.approx(sum(kernel.us for kernel in kernels))
    assert sum(kernel.calls for kernel in found) == sum(kernel.calls for kernel in kernels)
    named = [kernel for kernel in found if kernel.name != "others"]
    assert len(named) == min(SHOWN, len(kernels))
    least = min((kernel.us for kernel in named), default=0)
    assert all(kernel in named for kernel in kernels if kernel.us > least)


def test_rows_are_compared_with_blocks() -> None:
    def row(backend: str, speed: float, device: float) -> dict[str, Any]:
        return {"trace": "t", "backend": backend, "output_tokens_per_s": speed, "device_us": device}

    result = {"serving": [row("paged", 100, 50), row("vmm", 98, 51)]}
    speed, kernels = compare(result)
    assert (speed["value"], kernels["value"]) == (0.98, 1.02)


def test_engines_of_both_backends_reuse_or_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(_settings: Any, _workload: Any, name: str) -> Mock:
        made.append(name)
        return Mock()

    monkeypatch.setattr("benchmarks.step_times.make_engine", make)
    for name in ("serve", "middle", "profiled"):
        monkeypatch.setattr(f"benchmarks.step_times.{name}", lambda *_: {})
    for reuse in (False, True):
        measure(Mock(), Mock(), Load(), 1, reuse)
    assert made == [*BACKENDS, *(f"{name}+reuse" for name in BACKENDS)]
