"""Hardware counters: what Nsight Compute prints is read by name, whatever else it says and in whatever order."""

from __future__ import annotations

from random import Random

import pytest
import torch
from conftest import run_module_here

from benchmarks.counters import CALLS, COUNTERS, parse, table


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_module_here("benchmarks.counters", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs an NVIDIA GPU" in done.stderr


def test_counters_are_read_by_name() -> None:
    chance = Random()
    values = [{name: round(chance.uniform(1, 99_999), 2) for name in COUNTERS} for _ in CALLS]
    metrics = {counter.metric: name for name, counter in COUNTERS.items()}
    names = ["ID", *chance.sample(list(metrics), len(metrics)), "Kernel Name"]
    cells = [
        [f"{row[metrics[name]]:,}" if name in metrics else f"vmmkv_decode<{name}, 1>" for name in names]
        for row in values
    ]
    lines = [names, ["", *("unit" for _ in metrics), ""], *cells]
    printed = [
        "==PROF== Connected",
        *(",".join(f'"{cell}"' for cell in line) for line in lines),
        "==PROF== Disconnected",
    ]
    found = parse("\n".join(printed))
    for row, expected in zip(found, values, strict=True):
        assert row == pytest.approx({name: expected[name] * counter.scale for name, counter in COUNTERS.items()})
    columns, lines = table({"kernels": dict(zip(CALLS, found))})
    assert {len(line) for line in lines} == {len(columns)} == {1 + len(CALLS)}
