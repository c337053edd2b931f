"""Small calls of each kernel, for `compute-sanitizer`: `python -m tests.sanitized NAME...`.

Tensors end where tokens do, and with `PYTORCH_NO_CUDA_MEMORY_CACHING=1` each is an allocation of its own, so that what
lies beyond its end is nobody's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from vmmkv.kernels import RotateHalf, append, cascade, copy_tokens, decode, mixed, prefill, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [37, 200, 91] if DEVICE == "cuda" else [3, 37, 20]
"""The longest one ends where its row ends."""
CAPACITY = max(LENGTHS)
HEADS, KV_HEADS, DIM = 4, 2, 64
BLOCK = 16


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def rows() -> list[torch.Tensor]:
    """K and V, `[rows, tokens, kv_heads, head_dim]`."""
    return [random(len(LENGTHS), CAPACITY, KV_HEADS, DIM) for _ in "kv"]


def blocks() -> list[torch.Tensor]:
    """K and V in blocks, and the block table."""
    count = -(-CAPACITY // BLOCK)
    table = torch.randperm(len(LENGTHS) * count, device=DEVICE).to(torch.int32).view(len(LENGTHS), -1)
    return [*(random(table.numel(), BLOCK, KV_HEADS, DIM) for _ in "kv"), table]


def in_8_bits() -> dict[str, torch.Tensor]:
    """K and V with their scales."""
    (k, k_scales), (v, v_scales) = (quantize(states, torch.float8_e4m3fn) for states in rows())
    return {"k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales}


def cumulated(counts: list[int]) -> torch.Tensor:
    return int32(*(sum(counts[:index]) for index in range(len(counts) + 1)))


def append_in_blocks() -> list[torch.Tensor]:
    k, v, table = blocks()
    append(*(random(sum(LENGTHS), KV_HEADS, DIM) for _ in "kv"), k, v, int32(2, 0, 1), int32(0, 0, 0),
           cumulated([LENGTHS[row] for row in (2, 0, 1)]), table)  # fmt: skip
    return [k, v]


def append_rotated_in_8_bits() -> list[torch.Tensor]:
    held, tokens = in_8_bits(), len(LENGTHS)
    query, starts = random(tokens, HEADS, DIM), int32(*(length - 1 for length in LENGTHS))
    rotary = RotateHalf(query, torch.empty_like(query), random(tokens, DIM), random(tokens, DIM))
    new = [random(tokens, KV_HEADS, DIM) for _ in "kv"]
    append(*new, held["k"], held["v"], int32(0, 1, 2), starts, rotary=rotary,
           k_scales=held["k_scales"], v_scales=held["v_scales"])  # fmt: skip
    return [held["k_scales"], held["v_scales"], rotary.rotated]


def append_in_8_bits_of_sequences() -> list[torch.Tensor]:
    held, tokens = in_8_bits(), len(LENGTHS)
    scales = torch.rand(2, tokens, KV_HEADS, device=DEVICE)
    append(*(random(tokens, KV_HEADS, DIM) for _ in "kv"), held["k"], held["v"], int32(0, 1, 2), int32(0, 0, 0),
           k_scales=scales[0], v_scales=scales[1])  # fmt: skip
    return [held["k"].float(), held["v"].float()]


def decode_rows() -> list[torch.Tensor]:
    return [decode(random(len(LENGTHS), 1, HEADS, DIM), *rows(), int32(*LENGTHS))]


def decode_blocks() -> list[torch.Tensor]:
    k, v, table = blocks()
    return [decode(random(len(LENGTHS), 8, HEADS, DIM), k, v, int32(*LENGTHS), block_table=table)]


def decode_8_bits() -> list[torch.Tensor]:
    return [decode(random(len(LENGTHS), 1, HEADS, DIM), seq_lens=int32(*LENGTHS), **in_8_bits())]


def prefill_with(kernel: str) -> Callable[[], list[torch.Tensor]]:
    def call() -> list[torch.Tensor]:
        q = random(sum(LENGTHS), HEADS, DIM)
        return [prefill(q, *rows(), cumulated(LENGTHS), int32(*LENGTHS), kernel=kernel)]

    return call


def prefill_8_bits() -> list[torch.Tensor]:
    q = random(sum(LENGTHS), HEADS, DIM)
    return [prefill(q, cu_seqlens=cumulated(LENGTHS), seq_lens=int32(*LENGTHS), **in_8_bits())]


def mixed_blocks() -> list[torch.Tensor]:
    k, v, table = blocks()
    counts = [1, LENGTHS[1] - 5, 1]
    q = random(sum(counts), HEADS, DIM)
    return [mixed(q, k, v, cumulated(counts), int32(*LENGTHS), block_table=table)]


def cascade_rows() -> list[torch.Tensor]:
    q = random(len(LENGTHS), 1, HEADS, DIM)
    return [cascade(q, *rows(), int32(*LENGTHS), int32(1, 3), int32(min(LENGTHS[1:]) - 1))]


def latents() -> tuple[torch.Tensor, ...]:
    """K and V of latents, and lengths."""
    k = random(len(LENGTHS), CAPACITY, 1, 576)
    return k, k[..., :512], int32(*LENGTHS)


def decode_latents(heads: int, kernel: str) -> Callable[[], list[torch.Tensor]]:
    return lambda: [decode(random(len(LENGTHS), 1, heads, 576), *latents(), scale=0.07, kernel=kernel)]


def prefill_latents() -> list[torch.Tensor]:
    k, v, seq_lens = latents()
    q = random(sum(LENGTHS), 16, 576)
    return [prefill(q, k, v, cumulated(LENGTHS), seq_lens, scale=0.07)]


def copy() -> list[torch.Tensor]:
    k, _ = rows()
    copy_tokens(k, k, int32(1), int32(CAPACITY - 20), int32(2), int32(CAPACITY - 19), int32(19), 19)
    return [k]


CALLS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "append, blocks": append_in_blocks,
    "append, rotary, 8 bits": append_rotated_in_8_bits,
    "append, 8 bits of sequences": append_in_8_bits_of_sequences,
    "decode": decode_rows,
    "decode, blocks": decode_blocks,
    "decode, 8 bits": decode_8_bits,
    "prefill": prefill_with("auto"),
    "prefill, mma": prefill_with("mma"),
    "prefill, 8 bits": prefill_8_bits,
    "mixed": mixed_blocks,
    "cascade": cascade_rows,
    "decode, latents": decode_latents(16, "mma"),
    "decode, latents, wgmma": decode_latents(64, "auto"),
    "prefill, latents": prefill_latents,
    "copy_tokens": copy,
}
"""Each gives what it has written, which is finite."""

BEYOND = "beyond"


def copy_beyond() -> list[torch.Tensor]:
    """Copies from behind the last row: what the sanitizer must see."""
    k, _ = rows()
    copy_tokens(k, k, int32(len(LENGTHS) - 1), int32(CAPACITY), int32(0), int32(0), int32(16), 16)
    return []


if __name__ == "__main__":
    for name in sys.argv[1:]:
        assert all(bool(written.isfinite().all()) for written in (CALLS | {BEYOND: copy_beyond})[name]()), name
