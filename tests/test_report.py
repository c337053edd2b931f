"""The report: committed documents agree with the result files, and the report finds documents that do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from benchmarks import report
from benchmarks.cited import unheld
from benchmarks.tables import TABLES, Table


def test_documents_and_plots_are_up_to_date() -> None:
    stale, _ = report.update(ROOT, check=True)
    assert not stale, "run python -m benchmarks.report"


def test_figures_in_prose_are_in_the_files_that_it_names() -> None:
    assert report.uncited(ROOT) == []


def test_a_figure_that_no_file_holds_is_found(tmp_path: Path) -> None:
    number = np.random.default_rng().uniform(0.1, 0.9)
    (tmp_path / "some.json").write_text(json.dumps({"rows": [{"s": number}], "command": "run --tokens 8192"}))
    page = "Words, {figure} of them (`{name}`).\n\n| 777 |\n\n```\n777\n```\n\nNo file has 777."

    def told(figure: str, name: str = "some.json") -> list[str]:
        return unheld(page.format(figure=figure, name=name), tmp_path)

    for figure in (f"{number:.3f} s", f"{1e3 * number:.1f} ms", f"{1e6 * number:,.0f} µs", f"{100 * number:.1f} %"):
        assert told(figure) == []
    assert told("8,192 tokens") == []
    assert told("60 or 1.5") == []
    assert told(f"{1e3 * number + 0.2:.1f} ms") == [f"{1e3 * number + 0.2:.1f} is not in some.json"]
    assert told("777", "other.json") == ["there is no other.json"]


def test_every_table_has_a_place() -> None:
    documents = "".join(path.read_text() for pattern in report.DOCUMENTS for path in ROOT.glob(pattern))
    assert [name for name in TABLES if f"{report.OPENING} {name} -->" not in documents] == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with one table and one result."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("before\n<!-- table: answer -->\nold\n<!-- /table -->\nafter\n")
    (tmp_path / report.RESULTS).mkdir(parents=True)
    facts = {"device": "cpu (x86_64)", "date": "2000-01-02T03:04", "commit": "0123abc"}
    (tmp_path / report.RESULTS / "answer.json").write_text(json.dumps({"answer": 42, "environment": facts}))
    return tmp_path


@pytest.fixture(autouse=True)
def answer_table(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "root" in request.fixturenames:
        monkeypatch.setitem(TABLES, "answer", Table(("answer.json",), lambda result: f"| {result['answer']} |"))


def test_a_table_is_written_between_its_marks(root: Path) -> None:
    page = root / "docs" / "page.md"
    before = page.read_text()
    assert report.update(root, check=True)[0] == ["docs/page.md"]
    assert page.read_text() == before
    assert report.update(root, check=False)[0] == ["docs/page.md"]
    assert page.read_text() == before.replace(
        "old", "| 42 |\n\n<sub>cpu (x86_64), 2000-01-02, commit 0123abc: `answer.json`</sub>"
    )
    assert report.update(root, check=True)[0] == []
