"""The benchmark of `generate`, as far as it goes without a GPU: its models, its arithmetic, and a run of a tiny one."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import run_module_here
from rich.console import Console
from transformers import StaticCache

from benchmarks.generate import __main__ as generate
from benchmarks.generate.__main__ import run, wrong_cells
from benchmarks.generate.caches import BASELINE, CONTENDERS
from benchmarks.generate.decode import Watched
from benchmarks.generate.models import CONFIGS, build, token_bytes, weight_bytes
from benchmarks.generate.plans import CPU, GPU, LLAMA, QWEN
from benchmarks.generate.tables import tables
from vmmkv import KVLayout
from vmmkv.errors import OutOfPagesError
from vmmkv.integrations.transformers import VmmCache

STATIC_COMPILED = next(entry for entry in CONTENDERS if entry.cache is StaticCache and entry.compiled)


@pytest.fixture(scope="module")
def result() -> dict:
    """Of the command, as CI can run it."""
    done = run_module_here("benchmarks.generate", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def figures(result: dict, cache: str) -> list[dict]:
    """Of the cells of one class of caches that were measured; there are some."""
    found = [cell for cell in result["cells"] if cell["status"] == "measured" and cell["cache"] == cache]
    assert found
    return found


def test_every_cell_is_measured_or_says_why_not(result: dict) -> None:
    names = [(cell["model"], cell["batch"], cell["prompt"], cell["contender"]) for cell in result["cells"]]
    wanted = {(*batch, prompt, entry.name) for batch in CPU.batches for prompt in CPU.prompts for entry in CONTENDERS}
    assert set(names) == wanted
    assert len(names) == len(wanted)
    for cell in result["cells"]:
        if cell["compiled"]:
            assert (cell["status"], "GPU only" in cell["reason"]) == ("not run", True)
        else:
            assert cell["status"] == "measured", cell


def test_memory_is_that_of_the_tokens(result: dict) -> None:
    for cell in result["cells"]:
        if cell["status"] == "measured":
            tokens = cell["prompt"] + cell["new_tokens"] - 1  # the last one was never fed to the model
            assert cell["live_bytes"] == cell["batch"] * tokens * 2 * 2 * 2 * 16 * 2
    for cell in figures(result, "DynamicCache"):
        assert cell["held_bytes"] == cell["live_bytes"]
    for cell in figures(result, "VmmCache"):
        assert 0 <= cell["held_bytes"] - cell["live_bytes"] < cell["batch"] * CPU.page_size
    for cell in figures(result, "StaticCache"):
        assert cell["held_bytes"] == cell["batch"] * (cell["prompt"] + CPU.new_tokens) * 2 * 2 * 2 * 16 * 2


def test_a_dynamic_cache_copies_what_it_holds(result: dict) -> None:
    dynamic = {(cell["batch"], cell["prompt"]): cell for cell in figures(result, "DynamicCache")}
    for cell in figures(result, "VmmCache"):
        if cell["attention"] == "vmmkv" and transformers.__version__.startswith("5.17."):
            continue  # SDPA in its place, on the CPU, has a mask, for which that version copies K and V
        other = dynamic[cell["batch"], cell["prompt"]]
        assert other["copied_bytes"] - cell["copied_bytes"] > 0.95 * other["live_bytes"]  # masks differ by some bytes


def test_caches_compute_the_same(result: dict) -> None:
    for cell in figures(result, "VmmCache") + figures(result, "StaticCache"):
        assert cell["logits_error"] < 2e-2
        assert cell["same_tokens"] > 0.9
        assert cell["sdpa_kernels"]


def test_times_are_of_what_was_run(result: dict) -> None:
    for cell in figures(result, "VmmCache") + figures(result, "DynamicCache"):
        computed = cell["batch"] * cell["prompt"] <= CPU.computed_tokens
        assert (cell["ttft_ms"] is not None) == computed == (cell["prompt_kv"] == "computed")
        assert cell["tokens_per_s"] == pytest.approx(cell["batch"] / cell["step_ms"] * 1e3)
        if computed and cell["cache"] == "VmmCache":
            assert cell["driver_calls_when_used"] == 0
    assert all(cell["of_baseline"] == 1 for cell in result["cells"] if cell["contender"] == BASELINE.name)
    assert any(cell["ttft_chunked_ms"] for cell in figures(result, "VmmCache"))


def test_tables_show_every_cell(result: dict) -> None:
    console = Console(file=io.StringIO(), width=200)
    for table in tables(result):
        console.print(table)
    text = console.file.getvalue()
    assert all(text.count(f"│ {entry.name} ") >= 4 for entry in CONTENDERS if not entry.compiled)
    assert "GPU only" in text


def test_without_time_it_says_what_was_not_reached() -> None:
    cells = run(CPU, torch.device("cpu"), layers=None, budget_seconds=0)["cells"]
    assert [cell["status"] for cell in cells] == ["measured"] + ["not reached"] * (len(list(CPU.cells())) - 1)


def test_who_is_stopped_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object) -> Iterator[dict]:
        yield next(measure_cells(*args))
        raise KeyboardInterrupt

    measure_cells = generate.measure_cells
    monkeypatch.setattr(generate, "measure_cells", stopped)
    cells = run(CPU, torch.device("cpu"), layers=None, budget_seconds=600)["cells"]
    assert {cell.get("reason") for cell in cells} == {None, "stopped"}
    assert [cell["status"] for cell in cells] == ["measured"] + ["not reached"] * (len(list(CPU.cells())) - 1)


def test_what_is_wrong() -> None:
    good = {"status": "measured", "logits_error": 0.01}
    bad = [good | {"logits_error": error} for error in (0.5, float("nan"))] + [{"status": "failed"}]
    assert wrong_cells({"cells": [good, *bad, {"status": "out of memory"}]}) == bad


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), "out of memory"),
        (OutOfPagesError("no pages", requested=3, available=0), "out of memory"),
        (ValueError(), "failed"),
    ],
)
def test_a_contender_that_fails_costs_its_own_cells_only(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(VmmCache, "update", fail)
    plan = replace(CPU, batches=(("tiny", 1),), prompts=(16,))
    cells = run(plan, torch.device("cpu"), layers=1, budget_seconds=600)["cells"]
    for cell in cells:
        if cell["compiled"]:
            assert cell["status"] == "not run"
        elif cell["cache"] == "VmmCache":
            assert cell["status"] == status
            assert type(error).__name__ in cell["reason"]
            assert "test_benchmark_generate.py" in cell["reason"]
        else:
            assert cell["status"] == "measured"


def test_a_cache_that_loses_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    update = VmmCache.update

    def forgetful(self: VmmCache, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = update(self, *args)
        half = k.shape[2] // 2
        return (k[:, :, half:], v[:, :, half:]) if args[0].shape[2] == 1 else (k, v)

    monkeypatch.setattr(VmmCache, "update", forgetful)
    wrong = wrong_cells(run(CPU, torch.device("cpu"), layers=2, budget_seconds=600))
    vmm = [cell for cell in CPU.cells() if cell.contender.cache is VmmCache and not cell.contender.compiled]
    assert [cell["contender"] for cell in wrong] == [cell.contender.name for cell in vmm]


def test_models_have_their_sizes() -> None:
    """As their cards say: 8.03 and 0.6 billion parameters."""
    llama, qwen = (build(name, None, torch.device("meta")) for name in (LLAMA, QWEN))
    assert [model.num_parameters() for model in (llama, qwen)] == [8_030_261_248, 596_049_920]
    assert weight_bytes(llama) == 2 * (8_030_261_248 - 128_256 * 4096)
    assert weight_bytes(qwen) == 2 * 596_049_920
    for name in (LLAMA, QWEN):
        assert len(build(name, 3, torch.device("meta")).model.layers) == 3
    assert token_bytes(CONFIGS[LLAMA]) == KVLayout(32, 8, 128, torch.bfloat16).token_bytes == 128 << 10


def test_what_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (120 << 30, 141 << 30))
    left_out = {}
    for cell in GPU.cells():
        reason = GPU.left_out(cell, token_bytes(CONFIGS[cell.model]), torch.device("cuda"))
        left_out[cell.model, cell.batch, cell.prompt, cell.contender] = reason and reason["status"]
    assert left_out[LLAMA, 32, 32_768, BASELINE] == "does not fit"  # 129 GiB
    assert left_out[LLAMA, 8, 32_768, BASELINE] is left_out[LLAMA, 32, 8192, BASELINE] is None
    compiled = {key[1:3] for key, status in left_out.items() if key[3] == STATIC_COMPILED and not status}
    assert compiled == set(GPU.compiled_static)


def test_copies_are_counted() -> None:
    a, b = torch.ones(4, 6), torch.ones(4, 2)
    with Watched() as watched:
        a[:, 1:3].t().contiguous()  # 8 values
        torch.cat([a, b], dim=1)  # 32
        a[:2].copy_(a[2:])  # 12
        a.index_copy_(1, torch.tensor([0, 3]), b)  # 8
        a.view(6, 4).sum() + a.t()[0].mul(2).max()
    assert watched.copied_bytes == 4 * (8 + 32 + 12 + 8)
    assert not watched.attention
    with Watched() as watched:
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 16).unbind())
    assert len(watched.attention) == 1


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
            assert cell["floor_ms"] < cell["step_ms"], cell
            assert cell.get("driver_calls_when_used", 0) == 0, cell
    assert any(cell["status"] == "measured" for cell in cells if cell["contender"] == STATIC_COMPILED.name)
