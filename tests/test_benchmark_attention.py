"""The attention benchmark, as far as it goes without a GPU: its arithmetic, layouts and answers."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE

from benchmarks.attention import batches, shapes
from benchmarks.attention.batches import Case, Reference, layouts, make_batch
from benchmarks.attention.cases import attention
from benchmarks.attention.shapes import Geometry, error_of, make_call, make_prompt

HEADS, KV_HEADS = 8, 2
WHERE = torch.device(DEVICE)


@pytest.fixture
def _few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries for each head of K and V as are measured; but each of those is work of its own in a simulator."""
    for module in (batches, shapes):
        assert module.NUM_KV_HEADS == 8
        monkeypatch.setattr(module, "NUM_KV_HEADS", KV_HEADS)
        monkeypatch.setattr(module, "NUM_HEADS", HEADS)


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


@pytest.mark.usefixtures("_few_heads")
@pytest.mark.parametrize(
    ("shape", "head_bytes"),
    [
        (Geometry(64, heads=HEADS), 128),
        (Geometry(queries=3, heads=HEADS), 256),
        (Geometry(64, 1, torch.int8, HEADS), 68),
        (Geometry(64, kv_dtype=torch.int8, heads=2), 0),
    ],
)
def test_other_shapes_are_held_against_float64(shape: Geometry, head_bytes: int) -> None:
    if head_bytes:
        call, nbytes, exact = make_call(shape, 2, 20, WHERE)
        assert nbytes == 2 * 20 * KV_HEADS * 2 * head_bytes
    else:
        call, exact = make_prompt(shape, 20, WHERE)
    assert error_of(call(), exact) < 1e-2
