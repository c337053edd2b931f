"""Kernels that read a tile beyond a row's end: FlashAttention-3 on a GPU, and what the benchmark of it tells."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, run_module_here

import vmmkv
from benchmarks import overread, tables
from benchmarks.attention.batches import Case, Reference, make_batch
from benchmarks.attention.cases import attention
from benchmarks.attention.layouts import OVERREAD, layouts
from vmmkv.kernels import decode

HEADS, KV_HEADS, WIDTH = 8, 2, 128


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence, `[tokens, heads, width]`, in float64."""
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (q, k, v))
    groups = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(k.shape[1] - q.shape[1] + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 0)).transpose(0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_flash_attention_3_reads_ragged_rows_right(q_len: int) -> None:
    fa3 = pytest.importorskip("fa3_fwd_interface", reason="needs fa3-fwd")
    layout = vmmkv.KVLayout(16, KV_HEADS, WIDTH, torch.bfloat16)
    page_tokens, most = (2 << 20) // layout.token_bytes, 4096
    lengths = [q_len, 127, 128, 129, 3 * page_tokens - OVERREAD, 3 * page_tokens - OVERREAD + 1, most]
    lengths += torch.randint(q_len, most, (25,)).tolist()
    options = {"lookahead": 0, "large_frames": False, "overread": OVERREAD}
    with vmmkv.KVCache(layout, len(lengths), most, max_bytes="8GiB", device="cuda", **options) as cache:
        layer = int(torch.randint(layout.num_layers, ()))
        k, v = cache.kv(layer)
        sequences = sorted((cache.sequence(length) for length in lengths), key=lambda sequence: sequence.row)
        for sequence in sequences:
            noise = torch.randn(2, sequence.length, KV_HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
            sequence.write(layer, *noise)
            for tensor in (k, v):  # what would be seen at once
                tensor[sequence.row, sequence.length : sequence.length + OVERREAD] = 1e4
        for mapped in cache.mapped_ranges():
            tokens = sequences[mapped.row].length + OVERREAD
            assert mapped.nbytes == -(-tokens * layout.token_bytes // cache.page_size) * cache.page_size
        q = torch.randn(len(lengths), q_len, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
        seq_lens = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32, device="cuda")
        found = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=seq_lens, causal=True)
        ours = decode(q, k, v, seq_lens)
        for sequence in sequences:
            expected = exact(q[sequence.row], sequence.k(layer), sequence.v(layer))
            for out in (found, ours):
                assert (out[sequence.row] - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.gpu
def test_the_benchmark_measures_on_a_gpu() -> None:
    pytest.importorskip("fa3_fwd_interface", reason="needs fa3-fwd")
    result = overread.run(Case("decode", "", (300, 17, 1000, 1)), torch.device("cuda"))
    assert all(row["error"] < 2e-2 for row in result["decode"])
    assert result["nan_behind"]["vmmkv"] < 2e-2
    overread.show(result)


def test_nan_behind_rows_does_not_come_through_our_kernel() -> None:
    batch = make_batch(Case("decode", "", (40, 3)), torch.device(DEVICE))
    reference = Reference(batch)
    with layouts(batch, overread.LAYOUTS) as kvs:
        assert [kv.name for kv in kvs] == list(overread.LAYOUTS)
        overread.spoil(batch, kvs[-1])
        assert kvs[-1].k[1, 3:40].isnan().all()
        assert kvs[-1].v[1, 3:40].isnan().all()
        assert reference.error(attention(batch, kvs[-1], "auto")()) < 2e-2


def test_what_the_benchmark_tells() -> None:
    rows = [
        {"kernel": kernel, "layout": layout, "microseconds": time, "gb_per_s": 1e5 / time, "error": error}
        for kernel, layout, time, error in (
            (overread.PEER, overread.PADDED, 100.0, 0.001),
            (overread.PEER, overread.ROWS, 103.0, 0.004),
            (overread.OURS, overread.PADDED, 90.0, 0.002),
            (overread.OURS, overread.ROWS, 90.0, 0.003),
        )
    ]
    result = {"sequences": 2, "tokens": 5, "decode": rows, "nan_behind": {overread.PEER: None, overread.OURS: 0.003}}
    overread.show(result)
    lines = tables.TABLES["overread-decode"].write(result).splitlines()
    assert lines[2:] == [
        "| FlashAttention-3 | 100 µs, 1,000 GB/s | 103 µs, 971 GB/s | 1.030 | 0.40% |",
        "| vmmkv | 90 µs, 1,111 GB/s | 90 µs, 1,111 GB/s | 1.000 | 0.30% |",
    ]
    told = tables.TABLES["overread-nan"].write(result)
    assert told == "With NaN behind every sequence vmmkv read right, FlashAttention-3 did not."
    result["nan_behind"][overread.PEER] = 0.004
    assert overread.verdict(result) == "With NaN behind every sequence FlashAttention-3 and vmmkv read right."


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_module_here("benchmarks.overread", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs an NVIDIA GPU" in done.stderr
