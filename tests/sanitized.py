"""Small calls of each kernel, for `compute-sanitizer`: `python -m tests.sanitized NAME...`.

Tensors end where tokens do, and with `PYTORCH_NO_CUDA_MEMORY_CACHING=1` each is an allocation of its own, so that what
lies beyond its end is nobody's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from vmmkv.kernels import RotateHalf, append, cascade, copy_tokens, decode, mixed, prefill, quantize
from vmmkv.kernels.row_append import append_behind, bind_append

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


def rows(head_dim: int = DIM) -> list[torch.Tensor]:
    """K and V, `[rows, tokens, kv_heads, head_dim]`."""
    return [random(len(LENGTHS), CAPACITY, KV_HEADS, head_dim) for _ in "kv"]


def blocks() -> list[torch.Tensor]:
    """K and V in blocks, and the block table."""
    count = -(-CAPACITY // BLOCK)
    table = torch.randperm(len(LENGTHS) * count, device=DEVICE).to(torch.int32).view(len(LENGTHS), -1)
    return [*(random(table.numel(), BLOCK, KV_HEADS, DIM) for _ in "kv"), table]


def in_8_bits(dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, torch.Tensor]:
    """K and V with their scales."""
    (k, k_scales), (v, v_scales) = (quantize(states, dtype) for states in rows())
    return {"k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales}


def new(tokens: int = len(LENGTHS)) -> list[torch.Tensor]:
    """K and V of new tokens."""
    return [random(tokens, KV_HEADS, DIM) for _ in "kv"]


def cumulated(counts: list[int]) -> torch.Tensor:
    return int32(*(sum(counts[:index]) for index in range(len(counts) + 1)))


def last_ones() -> torch.Tensor:
    """Where each sequence's last token goes."""
    return int32(*(length - 1 for length in LENGTHS))


def append_in_rows() -> list[torch.Tensor]:
    k, v = rows()
    append(*new(sum(LENGTHS)), k, v, int32(0, 1, 2), int32(0, 0, 0), cumulated(LENGTHS))
    return [k, v]


def append_in_blocks() -> list[torch.Tensor]:
    k, v, table = blocks()
    order = cumulated([LENGTHS[row] for row in (2, 0, 1)])
    append(*new(sum(LENGTHS)), k, v, int32(2, 0, 1), int32(0, 0, 0), order, table)
    return [k, v]


def append_behind_lengths() -> list[torch.Tensor]:
    """One token each, then two."""
    (k, v), lengths = rows(), int32(*(length - 3 for length in LENGTHS))
    append_behind(*new(), k, v, int32(0, 1, 2), lengths, int32(CAPACITY))
    append_behind(*new(6), k, v, int32(0, 1, 2), lengths, int32(CAPACITY), cumulated([2, 2, 2]))
    assert lengths.tolist() == LENGTHS
    return [k, v]


def append_by_address() -> list[torch.Tensor]:
    (k, v), numbers, places, starts = rows(), new(), int32(0, 1, 2), last_ones()
    bind_append(*numbers, k, v, places)(numbers[0].data_ptr(), numbers[1].data_ptr(), starts.data_ptr())
    return [k, v]


def rotary_of(tokens: int, rotary_dim: int = DIM) -> RotateHalf:
    """Rotates new tokens, and their queries."""
    query = random(tokens, HEADS, DIM)
    return RotateHalf(query, torch.empty_like(query), random(tokens, rotary_dim), random(tokens, rotary_dim))


def append_rotated() -> list[torch.Tensor]:
    """Half of each head is rotated, and half is not."""
    (k, v), rotary = rows(), rotary_of(sum(LENGTHS), DIM // 2)
    append(*new(sum(LENGTHS)), k, v, int32(0, 1, 2), int32(0, 0, 0), cumulated(LENGTHS), rotary=rotary)
    return [k, v, rotary.rotated]


def append_in_8_bits() -> list[torch.Tensor]:
    held = in_8_bits(torch.int8)
    scales = {name: held[name] for name in ("k_scales", "v_scales")}
    append(*new(), held["k"], held["v"], int32(0, 1, 2), last_ones(), **scales)
    return [held["k_scales"], held["v_scales"]]


def append_rotated_in_8_bits() -> list[torch.Tensor]:
    held, rotary = in_8_bits(), rotary_of(len(LENGTHS))
    append(*new(), held["k"], held["v"], int32(0, 1, 2), last_ones(), rotary=rotary,
           k_scales=held["k_scales"], v_scales=held["v_scales"])  # fmt: skip
    return [held["k_scales"], held["v_scales"], rotary.rotated]


def append_in_8_bits_of_sequences() -> list[torch.Tensor]:
    held, tokens = in_8_bits(), len(LENGTHS)
    scales = torch.rand(2, tokens, KV_HEADS, device=DEVICE)
    append(*new(), held["k"], held["v"], int32(0, 1, 2), int32(0, 0, 0), k_scales=scales[0], v_scales=scales[1])
    return [held["k"].float(), held["v"].float()]


def decode_with(kernel: str) -> Callable[[], list[torch.Tensor]]:
    return lambda: [decode(random(len(LENGTHS), 1, HEADS, DIM), *rows(), int32(*LENGTHS), kernel=kernel)]


def decode_heads(head_dim: int, heads: int = HEADS, q_len: int = 1) -> Callable[[], list[torch.Tensor]]:
    return lambda: [decode(random(len(LENGTHS), q_len, heads, head_dim), *rows(head_dim), int32(*LENGTHS))]


def decode_blocks() -> list[torch.Tensor]:
    k, v, table = blocks()
    return [decode(random(len(LENGTHS), 8, HEADS, DIM), k, v, int32(*LENGTHS), block_table=table)]


def decode_8_bits(dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
    return lambda: [decode(random(len(LENGTHS), 1, HEADS, DIM), seq_lens=int32(*LENGTHS), **in_8_bits(dtype))]


def prefill_with(kernel: str) -> Callable[[], list[torch.Tensor]]:
    def call() -> list[torch.Tensor]:
        q = random(sum(LENGTHS), HEADS, DIM)
        return [prefill(q, *rows(), cumulated(LENGTHS), int32(*LENGTHS), kernel=kernel)]

    return call


def prefill_8_bits() -> list[torch.Tensor]:
    q = random(sum(LENGTHS), HEADS, DIM)
    return [prefill(q, cu_seqlens=cumulated(LENGTHS), seq_lens=int32(*LENGTHS), **in_8_bits())]


COUNTS = [1, LENGTHS[1] - 5, 1]
"""New tokens of a mixed batch."""


def mixed_blocks() -> list[torch.Tensor]:
    k, v, table = blocks()
    q = random(sum(COUNTS), HEADS, DIM)
    return [mixed(q, k, v, cumulated(COUNTS), int32(*LENGTHS), block_table=table)]


def mixed_8_bits() -> list[torch.Tensor]:
    q = random(sum(COUNTS), HEADS, DIM)
    return [mixed(q, cu_seqlens=cumulated(COUNTS), seq_lens=int32(*LENGTHS), **in_8_bits())]


def in_rows() -> dict[str, torch.Tensor]:
    k, v = rows()
    return {"k": k, "v": v}


def in_blocks() -> dict[str, torch.Tensor]:
    k, v, table = blocks()
    return {"k": k, "v": v, "block_table": table}


def cascade_of(kernel: str, held: Callable[[], dict[str, torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    def call() -> list[torch.Tensor]:
        q = random(len(LENGTHS), 1, HEADS, DIM)
        groups = {"cu_groups": int32(1, 3), "prefix_lens": int32(min(LENGTHS[1:]) - 1)}
        return [cascade(q, seq_lens=int32(*LENGTHS), **groups, **held(), kernel=kernel)]

    return call


def latents() -> tuple[torch.Tensor, ...]:
    """K and V of latents, and lengths."""
    k = random(len(LENGTHS), CAPACITY, 1, 576)
    return k, k[..., :512], int32(*LENGTHS)


def decode_latents(heads: int, kernel: str) -> Callable[[], list[torch.Tensor]]:
    return lambda: [decode(random(len(LENGTHS), 1, heads, 576), *latents(), scale=0.07, kernel=kernel)]


def prefill_latents(kernel: str) -> Callable[[], list[torch.Tensor]]:
    def call() -> list[torch.Tensor]:
        k, v, seq_lens = latents()
        q = random(sum(LENGTHS), 16, 576)
        return [prefill(q, k, v, cumulated(LENGTHS), seq_lens, scale=0.07, kernel=kernel)]

    return call


def mixed_latents() -> list[torch.Tensor]:
    k, v, seq_lens = latents()
    return [mixed(random(sum(COUNTS), 16, 576), k, v, cumulated(COUNTS), seq_lens, scale=0.07)]


def copy() -> list[torch.Tensor]:
    k, _ = rows()
    copy_tokens(k, k, int32(1), int32(CAPACITY - 20), int32(2), int32(CAPACITY - 19), int32(19), 19)
    return [k]


CALLS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "append": append_in_rows,
    "append, blocks": append_in_blocks,
    "append, behind": append_behind_lengths,
    "append, by address": append_by_address,
    "append, rotary": append_rotated,
    "append, 8 bits": append_in_8_bits,
    "append, rotary, 8 bits": append_rotated_in_8_bits,
    "append, 8 bits of sequences": append_in_8_bits_of_sequences,
    "decode": decode_with("auto"),
    "decode, plain": decode_with("plain"),
    "decode, blocks": decode_blocks,
    "decode, queries in shared memory": decode_heads(128, 4 * KV_HEADS, 8),
    "decode, pairs of KV heads": decode_heads(80),
    "decode, 8 bits": decode_8_bits(torch.float8_e4m3fn),
    "decode, int8": decode_8_bits(torch.int8),
    "prefill": prefill_with("auto"),
    "prefill, mma": prefill_with("mma"),
    "prefill, plain": prefill_with("plain"),
    "prefill, 8 bits": prefill_8_bits,
    "mixed": mixed_blocks,
    "mixed, 8 bits": mixed_8_bits,
    "cascade": cascade_of("auto", in_rows),
    "cascade, mma": cascade_of("mma", in_rows),
    "cascade, blocks": cascade_of("auto", in_blocks),
    "cascade, 8 bits": cascade_of("auto", in_8_bits),
    "decode, latents": decode_latents(16, "mma"),
    "decode, latents, wgmma": decode_latents(64, "auto"),
    "prefill, latents": prefill_latents("auto"),
    "prefill, latents, mma": prefill_latents("mma"),
    "mixed, latents": mixed_latents,
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
