"""What result files say of themselves."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from benchmarks import environment as figures
from vmmkv import environment


def test_the_commit_is_that_of_the_code() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its history")
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    commit, *dirty = environment.environment(torch.device("cpu"))["commit"].split("-")
    assert len(commit) >= 12
    assert head.startswith(commit)
    assert dirty in ([], ["dirty"])


def test_a_copy_without_its_history_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "vmmkv" / "environment.py"))
    monkeypatch.delenv("VMMKV_COMMIT", raising=False)
    assert environment.environment(torch.device("cpu"))["commit"] == "unknown"
    monkeypatch.setenv("VMMKV_COMMIT", "0123abc")
    assert environment.environment(torch.device("cpu"))["commit"] == "0123abc"


def test_versions_and_inputs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(b"1,2")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--trace", str(trace), "--requests", "3", "--json", "result.json"])
    told = figures.environment(torch.device("cpu"))
    assert told["packages"]["numba-cuda"] == version("numba-cuda")
    assert "vllm" not in told["packages"]
    assert told["inputs"] == {"trace.csv": hashlib.sha256(b"1,2").hexdigest()}
    assert figures.complete({"environment": told}) == {"environment": told}
