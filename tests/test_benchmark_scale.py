"""The benchmark of many rows: what it measures happens, and its table says what it found."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import scale, tables


def test_each_operation_does_what_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    house = scale.build(1000)
    pool = house.cache.pool
    assert house.cache.stats().rows == {"live": 700, "parked": 200, "retired": 0, "empty": 100}
    pages, surplus = 1000 * 9 * 10 // 10, 200 * 10 + 700 * 2
    assert pool.word("created") - pool.free_pages() == pages
    assert house.cache.stats().pages["surplus"] == surplus

    def mapped() -> tuple[int, int]:
        return pool.word("mapped_in_need"), pool.word("mapped_ahead")

    def rounds(operation: object) -> tuple[int, int]:
        """Pages that were mapped in need, and ahead, in two rounds behind the first."""
        measured = operation(house)  # type: ignore[operator]
        next(measured)
        before = mapped()
        assert all(took > 0 for took in islice(measured, 2))
        return mapped()[0] - before[0], mapped()[1] - before[1]

    nothing, crossing = (0, 0), 2 * scale.CROSSING
    assert rounds(scale.extend_within) == rounds(scale.extend_many_within) == rounds(scale.shorten) == nothing
    assert rounds(scale.free) == rounds(scale.adopt) == rounds(scale.adopt_one_after_another) == nothing
    assert rounds(scale.extend_onto_a_page) == (2, 0)
    assert rounds(scale.extend_many_onto_pages) == (crossing, 0)
    assert rounds(scale.start_with_shared_pages) == (4, 0)
    assert rounds(scale.map_nothing) == nothing
    assert rounds(scale.map_for_some) == (0, 2 * crossing)
    assert rounds(scale.extend_onto_a_page_of_others) == (2, 0)
    assert rounds(scale.extend_onto_the_last_page) == (2, 0)
    assert rounds(scale.find_no_page) == nothing
    assert rounds(scale.map_for_many) == (0, 4 * scale.BATCH)


def test_it_tells_what_grows() -> None:
    app = Typer()
    app.command()(scale.main)
    done = CliRunner().invoke(app, ["--rows", "1000", "--rows", "2000", "--rounds", "3", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [row["rows"] for row in result["measured"]] == [1000] * len(scale.OPERATIONS) + [2000] * len(
        scale.OPERATIONS
    )
    assert [row["what"] for row in result["measured"]] == list(scale.OPERATIONS) * 2
    few, many = (row["us"] for row in result["measured"] if row["what"] == "free")
    scale.show(result)
    text = tables.TABLES["scale-of-rows"].write(result)
    assert text.count("\n") == 1 + len(scale.OPERATIONS)
    assert "1,000 rows, µs" in text
    assert f"| free | {few:,.1f} | {many:,.1f} | {many / few:.1f} |" in text
    pages = [(row["what"], row["pages"]) for row in result["pages"]]
    assert pages == 2 * [(what, count) for count in scale.PAGES for what in ("free", "start on its row")]
    assert all(0 < row["best_us"] <= row["us"] for row in result["pages"])
    text = tables.TABLES["scale-of-pages"].write(result)
    assert text.count("\n") == 1 + len(pages) // len(scale.PAGES)
