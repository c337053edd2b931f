"""The main job, and that it fails loudly when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import vmmkv
from vmmkv.cli.app import app


def demo(*args: str):
    return CliRunner().invoke(app, ["demo", "--requests", "25", "--budget-tokens", "9000", *args])


def test_demo(device: str) -> None:
    result = demo("--device", device, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["requests"] == 25
    waste = figures["waste"]
    assert 0 < waste["vmmkv"] <= 0.02 < waste["per_layer"] < waste["static"] < 1
    assert waste["block_table_16"] == pytest.approx(waste["vmmkv"], abs=1e-3)
    assert figures["waste_measured"] == pytest.approx(waste["vmmkv"], abs=5e-3)
    assert figures["reuse_factor"] == figures["page_uses"] / figures["pages_created"] > 1
    assert 0 < figures["max_error"] < figures["error_bound"]
    assert figures["driver_calls"]["map"] >= figures["pages_created"]
    assert figures["device"] == ("cpu" if device == "cpu" else torch.cuda.get_device_name())


def test_the_budget_holds_and_sequences_are_preempted_under_it() -> None:
    figures = json.loads(demo("--device", "cpu", "--sequences", "16", "--json").stdout)
    assert figures["preemptions"] > 0
    assert figures["peak_tokens"] * figures["token_bytes"] <= figures["budget_bytes"]
    assert figures["pages_created"] * figures["page_size"] <= figures["budget_bytes"]


def test_demo_prints_tables_and_a_picture(tmp_path: Path) -> None:
    result = demo("--device", "cpu", "--plot", str(tmp_path / "pages.png"))
    assert result.exit_code == 0, result.output
    for words in ("Replayed 25 requests", "Checked attention", "Waste", "static reservation", "block table", "vmmkv"):
        assert words in " ".join(result.stdout.split())
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")


def test_demo_replays_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,300,10\n2023-11-16,40,8\n")
    figures = json.loads(demo("--device", "cpu", "--trace", str(path), "--json").stdout)
    assert (figures["requests"], figures["steps"], figures["peak_tokens"]) == (2, 10, 300 + 40 + 16)


@pytest.mark.parametrize("plot", ["missing/folder.png", "pages.doc"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(plot: str) -> None:
    assert demo("--device", "cpu", "--plot", plot).exit_code == 2


def test_wrong_contents_show_as_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The books are right, the contents are not."""
    extend = vmmkv.KVCache.extend

    def stray_write(cache, sequences, tokens):
        extend(cache, sequences, tokens)
        for layer in range(4):
            sequences[0].v(layer)[:] += 1

    monkeypatch.setattr(vmmkv.KVCache, "extend", stray_write)
    result = demo("--device", "cpu", "--check-every", "1", "--requests", "4")
    assert result.exit_code == 1
    assert "Attention is wrong" in result.output


def test_a_broken_invariant_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = vmmkv.KVCache.extend

    def leaky(cache, *args):
        extend(cache, *args)
        cache.pool.accounts["used"][cache.account] -= 1

    monkeypatch.setattr(vmmkv.KVCache, "extend", leaky)
    result = demo("--device", "cpu")
    assert result.exit_code == 1
    assert "An invariant broke" in result.output
