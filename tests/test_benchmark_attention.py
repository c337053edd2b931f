"""The attention benchmark, as far as it goes without a GPU: its arithmetic, layouts and answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import DEVICE

from benchmarks.attention import batches, shapes
from benchmarks.attention.__main__ import wrong_rows
from benchmarks.attention.batches import Case, Reference, evenly, layers_that_fit, layouts, make_batch, spread
from benchmarks.attention.cases import EVEN, RAGGED, attention, decode_cases
from benchmarks.attention.peers import page_table
from benchmarks.attention.shapes import Geometry, error_of, make_call, make_prompt
from benchmarks.attention.tables import part_table

HEADS, KV_HEADS = 8, 2
WHERE = torch.device(DEVICE)


@pytest.fixture
def _few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries for each head of K and V as are measured; but each of those is work of its own in a simulator."""
    for module in (batches, shapes):
        assert module.NUM_KV_HEADS == 8
        monkeypatch.setattr(module, "NUM_KV_HEADS", KV_HEADS)
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
    assert spread(1000, 4) == [0, 333, 666, 999]
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
    batch = make_batch(case, WHERE)
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


def test_page_tables_for_flashinfer() -> None:
    batch = make_batch(Case("decode", "", (33, 16, 1)), WHERE)
    with layouts(batch, ("paged-16",)) as (kv,):
        indptr, indices, last = page_table(batch, kv)
    assert indptr.tolist() == [0, 3, 4, 5]
    assert last.tolist() == [1, 16, 1]
    assert sorted(indices.tolist()) == [0, 1, 2, 3, 4]
    assert indices[3] == kv.block_table[1, 0]


@pytest.mark.usefixtures("_few_heads")
def test_other_shapes_are_held_against_float64() -> None:
    for shape, head_bytes in (
        (Geometry(64, heads=HEADS), 128),
        (Geometry(queries=3, heads=HEADS), 256),
        (Geometry(64, 1, torch.int8, HEADS), 68),
    ):
        call, nbytes, exact = make_call(shape, 2, 20, WHERE)
        assert nbytes == 2 * 20 * KV_HEADS * 2 * head_bytes
        assert error_of(call(), exact) < 1e-2
    call, exact = make_prompt(Geometry(64, kv_dtype=torch.int8, heads=2), 20, WHERE)
    assert len(exact) == 20
    assert error_of(call(), exact) < 1e-2


def test_wrong_answers_are_named() -> None:
    rows = [
        {"kernel": kernel, "error": error}
        for kernel, error in (("vmmkv, auto", 1e-3), ("vmmkv, mma", float("nan")), ("FlashInfer", 0.5))
    ]
    assert wrong_rows({"decode": rows, "prompts": rows[:1]}) == [rows[1]]
    assert part_table(rows) == (
        ("kernel", "error"),
        [("vmmkv, auto", "0.001"), ("vmmkv, mma", "nan"), ("FlashInfer", "0.5")],
    )
