"""The age of results: which code that they measure has changed since."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from typer import Typer
from typer.testing import CliRunner

from benchmarks import ages
from benchmarks.imports import Project

APP = Typer()
APP.command()(ages.main)


def commit(root: Path, name: str, text: str) -> str:
    """Commits a file; returns the commit."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git = ["git", "-C", str(root), "-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    for command in (["add", "--all"], ["commit", "--quiet", "--message", name]):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_code_that_was_measured_counts_if_it_does_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    commit(tmp_path, "vmmkv/cache.py", "def extend(): return 1\n")
    commit(tmp_path, "vmmkv/other.py", "def other(): return 1\n")
    commit(tmp_path, "kernels/decode.py", "def decode(): return 1\n")
    measured = commit(tmp_path, "benchmarks/scale.py", "from vmmkv.cache import extend\n")[:12]
    results = tmp_path / ages.RESULTS
    results.mkdir()
    for name, of in (("new", measured), ("dirty", f"{measured}-dirty"), ("unknown", None)):
        facts = {"commit": of, "date": "today", "device": "some", "command": "python -m benchmarks.scale --json"}
        (results / f"{name}.json").write_text(json.dumps({"environment": facts}))
    monkeypatch.setattr(ages, "ROOT", tmp_path)

    def told() -> dict[str, list[str] | None]:
        return {each["name"]: each["changed"] for each in json.loads(CliRunner().invoke(APP, ["--json"]).stdout)}

    assert not ages.has_history(tmp_path / ages.RESULTS / "nowhere")
    assert ages.has_history(tmp_path)
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", tmp_path.as_uri(), str(shallow)], check=True)
    assert not ages.has_history(shallow)

    assert told() == {"dirty.json": None, "new.json": [], "unknown.json": None}
    changed: list[str] = []
    for path, text, more in (
        ("docs/page.md", "words", []),
        ("vmmkv/cache.py", '"""Words."""\ndef extend():\n    """Words."""\n    return 1  # words\n', []),
        ("vmmkv/other.py", "def other(): return 2\n", []),
        ("vmmkv/cache.py", "def extend(): return 2\n", ["vmmkv.cache"]),
        ("kernels/decode.py", "def decode(): return 2\n", []),
        (
            "benchmarks/scale.py",
            "from vmmkv.cache import extend\nimport vmmkv.other\n",
            ["benchmarks.scale", "vmmkv.other"],
        ),
    ):
        commit(tmp_path, path, text)
        changed = sorted([*changed, *more])
        assert told()["new.json"] == changed
    facts["commit"] = commit(tmp_path, "docs/page.md", "other words")
    mended = commit(tmp_path, "vmmkv/cache.py", "def extend(): return 3\n")
    commit(tmp_path, ages.MENDS, f"{mended} 3 is as good as 2\n")
    assert told()["new.json"] == changed  # it was changed before, too
    (results / "new.json").write_text(json.dumps({"environment": facts}))
    assert [(age.changed, age.mends) for age in ages.ages(tmp_path) if age.name == "new.json"] == [([], 1)]
    (tmp_path / "vmmkv/cache.py").write_text("def extend(): return 4\n")
    assert told()["new.json"] == ["vmmkv.cache"]
    commit(tmp_path, "vmmkv/cache.py", "def extend(): return 4\n")
    assert told()["new.json"] == ["vmmkv.cache"]

    done = CliRunner().invoke(APP, ["--check"])
    assert done.exit_code == 1
    assert "nobody knows" in done.stdout
    for name in ("dirty", "new", "unknown"):
        (results / f"{name}.json").unlink()
    assert CliRunner().invoke(APP, ["--check"]).exit_code == 0


FORMS = (
    "import {package}.m{number}",
    "from {package} import m{number}",
    "from {package}.m{number} import value",
    "from . import m{number}",
    "from .m{number} import value",
    "from {package} import passed_on{number}",
    "def later():\n    from .m{number} import value",
)


def test_what_is_imported_is_found_and_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    count = 12
    edges = rng.random((count, count)) < 0.12
    folder = tmp_path / "kernels"
    folder.mkdir()
    passed = (f"from .m{number} import value as passed_on{number}\n" for number in range(count))
    (folder / "__init__.py").write_text("".join(passed).replace("value as ", ""))
    for number, row in enumerate(edges):
        lines = [
            rng.choice(FORMS).format(package="vmmkv.kernels", number=other) for other in np.flatnonzero(row).tolist()
        ]
        (folder / f"m{number}.py").write_text("\n".join(["import numpy", *lines]) + "\n")
    reached = np.linalg.matrix_power(edges.astype(int) + np.eye(count, dtype=int), count) > 0
    for number in range(count):
        expected = {f"vmmkv.kernels.m{other}" for other in np.flatnonzero(reached[number]).tolist()}
        assert Project(tmp_path).closure(f"vmmkv.kernels.m{number}") == expected


@pytest.mark.skipif(not ages.has_history(ROOT), reason="needs the history")
def test_mends_are_commits_and_say_why_no_figure_follows_from_them() -> None:
    for mended, why in ages.reasons(ROOT / ages.MENDS).items():
        found = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-t", mended], capture_output=True, text=True)
        assert found.stdout.strip() == "commit", mended
        assert len(mended) == 40
        assert why.strip()
