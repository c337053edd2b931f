"""What result files say of themselves."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import environment


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is said of a copy without its history. Results that were written since change no code."""
    code, result = tmp_path / "benchmarks" / "environment.py", tmp_path / "result.json"
    code.parent.mkdir()
    monkeypatch.setattr(environment, "__file__", str(code))
    monkeypatch.setenv("VMMKV_COMMIT", "0123abc")
    assert commit() == "0123abc"
    monkeypatch.delenv("VMMKV_COMMIT")
    assert commit() == "unknown"

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout

    code.write_text("")
    result.write_text("")
    git("init")
    git("add", "-A")
    git("commit", "-m", "as it was")
    result.write_text("1")
    assert len(commit()) >= 12
    assert git("rev-parse", "HEAD").startswith(commit())
    code.write_text("1")
    assert commit().endswith("-dirty")


def commit() -> str:
    return str(environment.environment(torch.device("cpu"))["commit"])


def test_versions_and_inputs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(b"1,2")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--trace", str(trace), "--requests", "3", "--json", "result.json"])
    told = environment.environment(torch.device("cpu"))
    assert told["packages"]["numba-cuda"] == version("numba-cuda")
    assert "vllm" not in told["packages"]
    assert told["inputs"] == {"trace.csv": hashlib.sha256(b"1,2").hexdigest()}
    assert environment.complete({"environment": told}) == {"environment": told}


def test_the_state_of_gpus_is_told_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = tmp_path / "states"
    states.write_text("580.1, 345, 2619, 78.9, 31, 0x1\n580.1, 1980, 2619, 690.2, 60, 0x4\n")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nhead -n 1 {states}\nsed -i 1d {states}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(environment, "cuda_version", lambda: "13.0")
    told = environment.complete({"environment": environment.environment(torch.device("cuda"))})["environment"]
    (before,), (after,) = told["gpus_before"], told["gpus_after"]
    assert (before["clocks.sm"], after["clocks.sm"], after["power.draw"]) == ("345", "1980", "690.2")
    assert before["driver_version"] == after["driver_version"] == "580.1"
    states.write_text("")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert environment.complete({"environment": told})["environment"]["gpus_after"] == []
