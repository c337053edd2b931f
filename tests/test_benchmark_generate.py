"""The benchmark of `generate`, as far as it goes without a GPU: its models, its arithmetic, and a run of a tiny one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from test_benchmarks import measured
from transformers import StaticCache

from benchmarks.generate import __main__ as command
from benchmarks.generate.__main__ import run, wrong_cells
from benchmarks.generate.cells import BASELINE, CONTENDERS, CPU, QWEN
from benchmarks.generate.tables import tables
from vmmkv.integrations.transformers import VmmCache

STATIC_COMPILED = next(entry for entry in CONTENDERS if entry.cache is StaticCache and entry.compiled)
HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def result() -> dict:
    """Of the command."""
    return measured(command, "--device cpu")


def test_every_cell_is_measured_or_says_why_not(result: dict) -> None:
    names = [(cell["model"], cell["batch"], cell["prompt"], cell["contender"]) for cell in result["cells"]]
    wanted = {(*batch, prompt, entry.name) for batch in CPU.batches for prompt in CPU.prompts for entry in CONTENDERS}
    assert set(names) == wanted
    assert len(names) == len(wanted)
    for cell in result["cells"]:
        assert cell["status"] == ("not run" if cell["compiled"] else "measured"), cell
    for table in tables("tiny").values():
        columns, lines = table(result)
        assert len(columns) == 5
        assert len(lines) == len(CONTENDERS)


def test_figures_of_cells(result: dict) -> None:
    cells = [cell for cell in result["cells"] if cell["status"] == "measured"]
    dynamic = {(cell["batch"], cell["prompt"]): cell for cell in cells if cell["contender"] == BASELINE.name}
    for cell in cells:
        base, token = dynamic[cell["batch"], cell["prompt"]], 2 * 2 * 2 * 16 * 2
        tokens = cell["prompt"] + cell["new_tokens"] - 1  # the last one was never fed to the model
        assert cell["live_bytes"] == cell["batch"] * tokens * token
        assert cell["tokens_per_s"] == pytest.approx(cell["batch"] / cell["step_ms"] * 1e3)
        assert cell["of_baseline"] == base["step_ms"] / cell["step_ms"]
        assert (cell["ttft_ms"] is None) == (cell["batch"] * cell["prompt"] > CPU.computed_tokens)
        assert cell["logits_error"] < 2e-2
        assert cell["same_tokens"] > 0.9
        if cell["cache"] != "VmmCache":
            held = cell["prompt"] + CPU.new_tokens if cell["cache"] == "StaticCache" else tokens
            assert cell["held_bytes"] == cell["batch"] * held * token
            continue
        assert 0 <= cell["held_bytes"] - cell["live_bytes"] < cell["batch"] * CPU.page_size
        if cell["attention"] != "vmmkv" or not transformers.__version__.startswith("5.17."):  # it copies for a mask
            assert base["copied_bytes"] - cell["copied_bytes"] > 0.95 * base["live_bytes"]  # masks differ


def test_a_cache_that_loses_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    update = VmmCache.update

    def forgetful(self: VmmCache, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = update(self, *args)
        half = k.shape[2] // 2
        return (k[:, :, half:], v[:, :, half:]) if args[0].shape[2] == 1 else (k, v)

    monkeypatch.setattr(VmmCache, "update", forgetful)
    wrong = wrong_cells(run(CPU, HOST, layers=2, budget_seconds=600))
    vmm = [cell for cell in CPU.cells() if cell.contender.cache is VmmCache and not cell.contender.compiled]
    assert [cell["contender"] for cell in wrong] == [cell.contender.name for cell in vmm]


@pytest.mark.gpu
def test_compiled_steps_and_peaks_on_a_gpu() -> None:
    plan = replace(CPU, batches=((QWEN, 1), (QWEN, 2)), page_size=None)  # heads as wide as real ones
    cells = run(plan, torch.device("cuda"), layers=2, budget_seconds=300)["cells"]
    for cell in cells:
        assert cell["status"] in ("measured", "not run"), cell
        if cell["status"] == "measured":
            assert cell["logits_error"] < 5e-2, cell
            assert bool(cell["sdpa_kernels"]) == (cell["attention"] == "sdpa"), cell
            assert cell["peak_bytes"] >= cell["held_bytes"], cell
            assert cell["kv_peak_bytes"] <= cell["peak_bytes"], cell
    assert any(cell["status"] == "measured" for cell in cells if cell["contender"] == STATIC_COMPILED.name)
