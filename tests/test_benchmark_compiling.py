"""What compiles for other benchmarks, on the host: every backend of every model is warmed up, or says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compiling


def test_engines_are_warmed_up_and_what_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "HOST", tuple(("tiny", name) for name in ("vmm", "paged+flashinfer", "paged")))
    for rank in range(3):
        compiling.compile_all(rank, "cpu", str(tmp_path))
    rows = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [row["backend"] for row in rows] == ["vmm", "paged+flashinfer", "paged"]
    assert rows[0]["seconds"] > 0 < rows[2]["seconds"]
    assert "flashinfer" in rows[1]["reason"]
    assert [line[:2] for line in compiling.lines({"compiled": rows})] == [
        (row["model"], row["backend"]) for row in rows
    ]
