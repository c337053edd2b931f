"""The attention benchmark, as far as it goes without a GPU: its arithmetic, layouts, answers and tables."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest
import torch
from conftest import DEVICE, ROOT, run_module_here
from rich.console import Console

from benchmarks import tables as docs
from benchmarks.attention import batches, cascade, comparisons, shapes
from benchmarks.attention import layouts as layouts_module
from benchmarks.attention.__main__ import wrong_rows
from benchmarks.attention.batches import Case, Reference, evenly, make_batch, spread
from benchmarks.attention.cascade import Shape, make_shared, ours, shared_layouts, with_gains
from benchmarks.attention.cases import EVEN, RAGGED, attention, compare_ragged, decode_cases, with_ratios
from benchmarks.attention.layouts import layers_that_fit, layouts
from benchmarks.attention.peers import page_table
from benchmarks.attention.prompts import Step, error_of, make_prompt, make_step
from benchmarks.attention.rotary import rotary_calls
from benchmarks.attention.shapes import Geometry, make_call
from benchmarks.attention.tables import tables
from benchmarks.newest import RESULTS, newest
from benchmarks.tables import TABLES
from vmmkv.kernels.arguments import LATENT_DIM

HEADS, KV_HEADS = 8, 2


@pytest.fixture
def _few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries for each head of K and V as are measured; but each of those is work of its own in a simulator."""
    for module in (batches, cascade, layouts_module, shapes):
        assert module.NUM_KV_HEADS == 8
        monkeypatch.setattr(module, "NUM_KV_HEADS", KV_HEADS)
        if hasattr(module, "NUM_HEADS"):
            monkeypatch.setattr(module, "NUM_HEADS", HEADS)


@pytest.mark.parametrize(("q_len", "seq_len", "causal"), [(1, 9, True), (4, 4, True), (3, 10, True), (3, 10, False)])
def test_flops_count_the_pairs_of_the_mask(q_len: int, seq_len: int, causal: bool) -> None:
    mask = np.tril(np.ones((q_len, seq_len)), seq_len - q_len if causal else seq_len)
    case = Case("prefill", "", (seq_len, seq_len), q_len, causal)
    assert case.flops == 2 * mask.sum() * 4 * 32 * 128
    assert case.kv_bytes == 2 * seq_len * 2 * 8 * 128 * 2


def test_even_lengths_have_the_total_of_ragged_ones(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{tokens},1\n" for tokens in (7, 100, 3000)))
    for trace in (None, path):
        cases = {case.name: case.seq_lens for case in decode_cases(trace)}
        even, ragged = cases[EVEN], cases[RAGGED]
        assert (sum(even), len(even)) == (sum(ragged), len(ragged))
        assert max(even) - min(even) <= 1
    assert set(ragged) <= {7, 100, 3000}
    assert evenly((5, 0, 3)) == (2, 3, 3)


def test_spread_takes_both_ends() -> None:
    assert spread(3, 4) == [0, 1, 2]
    assert spread(1000, 4) == [0, 333, 666, 999]


def test_a_cache_has_the_layers_that_fit() -> None:
    assert [layers_that_fit(gib << 30, 4 << 30) for gib in (139, 100, 20, 5)] == [32, 16, 2, 1]


@pytest.mark.usefixtures("_few_heads")
@pytest.mark.parametrize(
    ("case", "checked"),
    [
        (Case("decode", "", (40, 3), q_len=2), ("token-major", "paged-16")),
        (Case("prefill", "", (5,), 2, kernels=("plain",)), ("token-major",)),
        (Case("prefill", "", (5,), 2, causal=False, kernels=("plain",)), ("paged-16",)),
    ],
)
def test_all_layouts_hold_the_same_and_the_kernels_find_it(case: Case, checked: tuple[str, ...]) -> None:
    batch = make_batch(case, torch.device(DEVICE))
    reference = Reference(batch)
    with layouts(batch) as kvs:
        for kv in kvs:
            for sequence, seq_len in enumerate(case.seq_lens):
                k, v = kv.row(sequence, seq_len)
                assert torch.equal(k, batch.k[sequence, :seq_len])
                assert torch.equal(v, batch.v[sequence, :seq_len])
            if kv.name in checked:
                assert reference.error(attention(batch, kv, case.kernels[0])()) < 2e-2
    assert not reference.error(torch.full_like(batch.q, torch.nan)) < 2e-2
    assert reference.error(torch.zeros_like(batch.q)) == 1


def test_what_is_shared_is_the_same_in_all_layouts() -> None:
    """In rows of a cache and in blocks there is one copy of it."""
    shape = Shape(groups=2, size=2, shared=32, own=5)
    batch = make_shared(shape, torch.device(DEVICE))
    with shared_layouts(shape, batch) as made:
        for shared in made:
            for index, row in enumerate(shared.rows.tolist()):
                for found, expected in zip(shared.kv.row(row, 37), (batch.k, batch.v)):
                    assert torch.equal(found, expected[index, :37])
        _, rows, blocks = made
        assert rows.kv.k[rows.rows[0], 0, 0, 0] == rows.kv.k[rows.rows[1], 0, 0, 0]
        assert torch.equal(blocks.kv.block_table[0, :2], blocks.kv.block_table[1, :2])
        assert len(blocks.kv.k) == 2 * 2 + 4 * 1


@pytest.mark.usefixtures("_few_heads")
def test_cascade_is_called_as_it_should_be() -> None:
    shape = Shape(groups=1, size=2, shared=16, own=1)
    batch = make_shared(shape, torch.device(DEVICE))
    with shared_layouts(shape, batch, ("paged-16",)) as (shared,):
        shared.kv.block_table[1, 0] = 1 << 30  # it is not looked up
        assert Reference(batch).error(ours(shape, batch, shared, "mma")()) < 2e-2


def test_page_tables_for_flashinfer() -> None:
    batch = make_batch(Case("decode", "", (33, 16, 1)), torch.device(DEVICE))
    with layouts(batch, ("paged-16",)) as (kv,):
        indptr, indices, last = page_table(batch, kv)
    assert indptr.tolist() == [0, 3, 4, 5]
    assert last.tolist() == [1, 16, 1]
    assert sorted(indices.tolist()) == [0, 1, 2, 3, 4]
    assert indices[3] == kv.block_table[1, 0]


def row(case: str, kernel: str, layout: str, microseconds: float, **others: object) -> dict:
    figures = {"gb_per_s": 1e6 / microseconds, "of_copy": 0.9, "tflops": 500.0, "error": 1e-3, "captured": True}
    names = {"case": case, "kernel": kernel, "layout": layout, "layers": 32}
    return names | {"microseconds": microseconds} | figures | others


def test_rotary_embedding_is_the_same_in_one_call_and_in_many() -> None:
    calls, exact = rotary_calls(2, torch.device(DEVICE))
    errors = [(call().double() - exact).norm() / exact.norm() for call in calls.values()]
    assert errors[0] <= errors[1] < 2e-2


@pytest.mark.usefixtures("_few_heads")
def test_other_shapes_are_held_against_float64() -> None:
    for shape, head_bytes in (
        (Geometry(64, heads=HEADS), 128),
        (Geometry(queries=3, heads=HEADS), 256),
        (Geometry(64, 1, torch.int8, HEADS), 68),
    ):
        call, nbytes, exact = make_call(shape, 2, 20, torch.device(DEVICE))
        assert nbytes == 2 * 20 * KV_HEADS * 2 * head_bytes
        assert (call() - exact).norm() < 1e-2 * exact.norm()
    call, nbytes, exact = make_call(Geometry(LATENT_DIM, heads=16), 2, 20, torch.device(DEVICE))
    assert nbytes == 2 * 20 * 576 * 2
    assert (call() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.usefixtures("_few_heads")
def test_prompts_of_other_shapes_are_held_against_float64() -> None:
    for shape in (Geometry(64, kv_dtype=torch.int8, heads=2), Geometry(LATENT_DIM, heads=1)):
        call, exact = make_prompt(shape, 20, torch.device(DEVICE))
        assert len(exact) == 20
        assert error_of(call(), exact) < 1e-2


@pytest.mark.usefixtures("_few_heads")
def test_each_way_to_attend_in_a_step_is_held_against_float64() -> None:
    calls, exact = make_step(Step(1, 5, 1, 20, heads=2), torch.device(DEVICE))
    assert len(exact) == 5 + 1
    assert calls.keys() == {"mixed", "prefill, then decode", "prefill of all"}
    for call in calls.values():
        assert error_of(call(), exact) < 1e-2


def test_tables_of_a_result() -> None:
    result = {
        "decode": with_ratios([row(EVEN, "vmmkv, auto", "contiguous", 90.0)])
        + with_ratios(
            [
                row(RAGGED, "vmmkv, auto", "contiguous", 100.0),
                row(RAGGED, "vmmkv, auto", "token-major", 102.0),
                row(RAGGED, "FlashInfer", "paged-16", 110.0, captured=False),
            ]
        ),
        "prefill": with_ratios([row("1 x 16384", "vmmkv, mma", "paged-64", 5000.0, error=float("nan"))]),
        "shapes": [
            row("64 x 4096", "vmmkv, decode", "", 7.5, shape="heads of 64", of_first_time=0.5, of_first_rate=0.75)
        ],
        "cascade": with_gains(
            [
                row("groups", "vmmkv, decode", "contiguous", 90.0),
                row("groups", "vmmkv, cascade, auto", "contiguous", 16.0, error=0.3),
            ]
        ),
        "copies": [row("", "append", "paged-16", 30.0, exact=False)],
        "rotary": [row("", "append, rotary", "", 4.0, sequences=64, host_microseconds=11.125, error=0.5)],
        "host": [{"call": "decode", "host_microseconds": 7.25}],
        "skipped": [
            {"kernel": "FlashAttention-3", "layout": "contiguous", "case": case, "reason": "ModuleNotFoundError"}
            for case in ("decode, a", "decode, b")
        ],
    }
    compare_ragged(result["decode"])
    console = Console(file=io.StringIO(), width=200)
    for table in tables(result):
        console.print(table)
    text = console.file.getvalue()
    for words in (
        "token-major, 32 layers",
        "1.020",
        "90.0%",
        "decode of other shapes, 64 x 4096",
        "0.75",
        "shared prefixes, groups",
        "5.62",
        "110.0 (stream)",
        "NO",
        "11.1",
        "7.2",
        "decode, a; decode, b",
    ):
        assert words in text
    for name, words in (("cascade", "| groups | vmmkv, cascade, auto |"), ("rotary", "| append, rotary | 64 | 4.0 |")):
        assert words in docs.TABLES[f"attention-{name}"].write(result)
        assert "Not measured" in docs.TABLES[f"attention-{name}"].write({})
    assert [wrong["kernel"] for wrong in wrong_rows(result)] == [
        "vmmkv, mma",
        "vmmkv, cascade, auto",
        "append, rotary",
        "append",
    ]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_module_here("benchmarks.attention", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs an NVIDIA GPU" in done.stderr


def test_comparisons_tell_the_slowest_of_several_cases() -> None:
    """Of the committed results, in which any one figure becomes the slowest."""
    sources = TABLES["attention-comparisons"].sources
    whole, small = (json.loads(newest(ROOT / RESULTS, source).read_text()) for source in sources)
    large = [row for row in whole["decode"] if row["gb_per_s"] * row["microseconds"] * 1e3 >= 2**30]
    slow = random.choice([row for row in large if (row["kernel"], row["layout"]) == ("vmmkv, auto", "token-major")])
    fast = random.choice([row for row in whole["decode"] if row["kernel"] == "FlashAttention-3"])
    copy = random.choice([row for row in small["copies"] if row["kernel"] == "append"])
    slow["of_contiguous"], fast["gb_per_s"], copy["of_copy"] = 1.5, 99_999.0, 0.25
    small["host"] = [{"call": "decode", "host_microseconds": 9.5}]
    small["copies"] = [row for row in small["copies"] if row["kernel"] != "copy_tokens"]
    found = {row["what"]: row["value"] for row in comparisons.compare(whole, small)}
    ours = next(
        row["gb_per_s"]
        for row in whole["decode"]
        if (row["case"], row["layout"], row["kernel"]) == (fast["case"], fast["layout"], "vmmkv, auto")
    )
    expected = {
        f"decode, token-major, time over contiguous's, from 1 GiB on ({slow['case']})": 1.5,
        f"decode, {fast['case']}, GB/s over the fastest peer's ({fast['layout']}, FlashAttention-3)": ours / 99_999.0,
        f"append, GB/s over a device copy's ({copy['layout']})": 0.25,
        "copy_tokens, GB/s over a device copy's": None,
        "decode, µs of the host for a call": 9.5,
    }
    assert expected.items() <= found.items()
