"""FlashAttention-3 on a GPU, which reads a tile beyond a row's end."""

from __future__ import annotations

import pytest
import torch

import vmmkv
from benchmarks.attention.batches import OVERREAD
from vmmkv.kernels import decode
from vmmkv.snapshot import frames_in

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
        for sequence in sequences:
            tokens, (_, frames) = sequence.length + OVERREAD, frames_in(cache, sequence.row, 0)
            assert len(frames) == -(-tokens * layout.token_bytes // cache.page_size)
        q = torch.randn(len(lengths), q_len, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
        seq_lens = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32, device="cuda")
        found = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=seq_lens, causal=True)
        ours = decode(q, k, v, seq_lens)
        for sequence in sequences:
            expected = exact(q[sequence.row], sequence.k(layer), sequence.v(layer))
            for out in (found, ours):
                assert (out[sequence.row] - expected).abs().max() <= 2e-2 * expected.abs().max()
