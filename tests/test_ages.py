"""The age of results: counted in commits to what they measure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import ages

APP = Typer()
APP.command()(ages.main)


def commit(root: Path, name: str) -> str:
    """Commits a change to a file; returns the commit."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{path.read_text() if path.exists() else ''}more\n")
    git = ["git", "-C", str(root), "-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    for command in (["add", "--all"], ["commit", "--quiet", "--message", name]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_commits_to_what_was_measured_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    commit(tmp_path, "vmmkv/cache.py")
    measured = commit(tmp_path, "benchmarks/scale.py")[:12]
    results = tmp_path / ages.RESULTS
    results.mkdir()
    for name, of in (("new", measured), ("dirty", f"{measured}-dirty"), ("unknown", None)):
        facts = {"commit": of, "date": "today", "command": "python -m benchmarks.scale --json"}
        (results / f"{name}.json").write_text(json.dumps({"environment": facts}))
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    expected = {"dirty.json": None, "new.json": 0, "unknown.json": None}
    for changed, more in (("docs/page.md", 0), ("benchmarks/swap.py", 0), ("benchmarks/scale.py", 1), ("kernels/a", 1)):
        commit(tmp_path, changed)
        expected["new.json"] += more
        told = json.loads(CliRunner().invoke(APP, ["--json"]).stdout)
        assert {each["name"]: each["commits"] for each in told} == expected
    assert CliRunner().invoke(APP, ["--check"]).exit_code == 1
    for name in ("dirty", "new", "unknown"):
        (results / f"{name}.json").unlink()
    assert CliRunner().invoke(APP, ["--check"]).exit_code == 0
