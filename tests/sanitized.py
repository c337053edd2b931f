"""Small calls of each kernel, for `compute-sanitizer`: `python -m tests.sanitized NAME...`.

Tensors end where tokens do, and with `PYTORCH_NO_CUDA_MEMORY_CACHING=1` each is an allocation of its own, so that what
lies beyond its end is nobody's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vmmkv.kernels import RotateHalf, append, cascade, copy_tokens, decode, mixed, prefill, quantize
from vmmkv.kernels.row_append import append_behind, bind_append

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [37, 200, 91] if DEVICE == "cuda" else [3, 37, 20]
"""The longest one ends where its row ends."""
CAPACITY = max(LENGTHS)
HEADS, KV_HEADS, DIM = 4, 2, 64
BLOCK = 16
Call = Callable[[], list[torch.Tensor]]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


Held = dict[str, torch.Tensor]


def in_rows(head_dim: int = DIM) -> Held:
    """K and V, `[rows, tokens, kv_heads, head_dim]`."""
    return {name: random(len(LENGTHS), CAPACITY, KV_HEADS, head_dim) for name in "kv"}


def in_blocks() -> Held:
    """K and V in blocks, and the block table."""
    count = -(-CAPACITY // BLOCK)
    table = torch.randperm(len(LENGTHS) * count, device=DEVICE).to(torch.int32).view(len(LENGTHS), -1)
    return {name: random(table.numel(), BLOCK, KV_HEADS, DIM) for name in "kv"} | {"block_table": table}


def in_8_bits(dtype: torch.dtype = torch.float8_e4m3fn, whole: bool = False) -> Held:
    """K and V with their scales, which may be those of whole sequences."""
    (k, k_scales), (v, v_scales) = (quantize(states, dtype) for states in in_rows().values())
    scales = torch.rand(2, len(LENGTHS), KV_HEADS, device=DEVICE) if whole else (k_scales, v_scales)
    return {"k": k, "v": v, "k_scales": scales[0], "v_scales": scales[1]}


def latents() -> Held:
    k = random(len(LENGTHS), CAPACITY, 1, 576)
    return {"k": k, "v": k[..., :512]}


def new(tokens: int = len(LENGTHS)) -> list[torch.Tensor]:
    """K and V of new tokens."""
    return [random(tokens, KV_HEADS, DIM) for _ in "kv"]


def cumulated(counts: list[int]) -> torch.Tensor:
    return int32(*(sum(counts[:index]) for index in range(len(counts) + 1)))


def append_to(
    held: Callable[[], Held], order: tuple[int, ...] = (0, 1, 2), rotary_dim: int = 0, one_each: bool = False
) -> Call:
    """All tokens of each sequence, or the last one; rotated, if part of a head is to be."""

    def call() -> list[torch.Tensor]:
        kept = held()
        counts = [1] * len(order) if one_each else [LENGTHS[row] for row in order]
        starts = int32(*(LENGTHS[row] - count for row, count in zip(order, counts)))
        tokens, rotary, cu_seqlens = sum(counts), None, None if one_each else cumulated(counts)
        if rotary_dim:
            query, (cos, sin) = random(tokens, HEADS, DIM), (random(tokens, rotary_dim) for _ in "cs")
            rotary = RotateHalf(query, torch.empty_like(query), cos, sin)
        k, v = kept.pop("k"), kept.pop("v")
        append(*new(tokens), k, v, int32(*order), starts, cu_seqlens, rotary=rotary, **kept)
        written = [k.float(), v.float(), *(kept[name] for name in kept if name != "block_table")]
        return [*written, rotary.rotated] if rotary else written

    return call


def append_behind_lengths() -> list[torch.Tensor]:
    """One token each, then two."""
    kept, lengths = in_rows(), int32(*(length - 3 for length in LENGTHS))
    append_behind(*new(), *kept.values(), int32(0, 1, 2), lengths, int32(CAPACITY))
    append_behind(*new(6), *kept.values(), int32(0, 1, 2), lengths, int32(CAPACITY), cumulated([2, 2, 2]))
    assert lengths.tolist() == LENGTHS
    return [*kept.values()]


def append_by_address() -> list[torch.Tensor]:
    kept, (k, v), places, starts = in_rows(), new(), int32(0, 1, 2), int32(*(length - 1 for length in LENGTHS))
    bind_append(k, v, *kept.values(), places)(k.data_ptr(), v.data_ptr(), starts.data_ptr())
    return [*kept.values()]


def attention(
    function: Callable[..., torch.Tensor],
    held: Callable[[], Held] = in_rows,
    heads: int = HEADS,
    q_len: int = 1,
    **options: Any,
) -> Call:
    """Queries of all tokens, of new ones in a mixed batch, or of the last `q_len`."""

    def call() -> list[torch.Tensor]:
        kept, lens, more = held(), int32(*LENGTHS), dict(options)
        width = kept["k"].shape[-1]
        more |= {"scale": 0.07} if width == 576 else {}
        if function in (prefill, mixed):
            counts = LENGTHS if function is prefill else [1, LENGTHS[1] - 5, 1]
            q, more["cu_seqlens"] = random(sum(counts), heads, width), cumulated(counts)
        else:
            q = random(len(LENGTHS), q_len, heads, width)
        if function is cascade:
            more |= {"cu_groups": int32(1, 3), "prefix_lens": int32(min(LENGTHS[1:]) - 1)}
        return [function(q, seq_lens=lens, **kept, **more)]

    return call


def copy(beyond: bool = False) -> list[torch.Tensor]:
    """A range onto the end of the next row; or, which the sanitizer must see, one from behind the last row."""
    k = in_rows()["k"]
    if beyond:
        copy_tokens(k, k, int32(len(LENGTHS) - 1), int32(CAPACITY), int32(0), int32(0), int32(16), 16)
        return []
    copy_tokens(k, k, int32(1), int32(CAPACITY - 20), int32(2), int32(CAPACITY - 19), int32(19), 19)
    return [k]


CALLS: dict[str, Call] = {
    "append": append_to(in_rows),
    "append, blocks": append_to(in_blocks, (2, 0, 1)),
    "append, behind": append_behind_lengths,
    "append, by address": append_by_address,
    "append, rotary": append_to(in_rows, rotary_dim=DIM // 2),
    "append, 8 bits": append_to(partial(in_8_bits, torch.int8), one_each=True),
    "append, rotary, 8 bits": append_to(in_8_bits, rotary_dim=DIM, one_each=True),
    "append, 8 bits of sequences": append_to(partial(in_8_bits, whole=True), one_each=True),
    "decode": attention(decode),
    "decode, plain": attention(decode, kernel="plain"),
    "decode, blocks": attention(decode, in_blocks, q_len=8),
    "decode, queries in shared memory": attention(decode, partial(in_rows, 128), 4 * KV_HEADS, 8),
    "decode, pairs of KV heads": attention(decode, partial(in_rows, 80)),
    "decode, 8 bits": attention(decode, in_8_bits),
    "decode, int8": attention(decode, partial(in_8_bits, torch.int8)),
    "prefill": attention(prefill),
    "prefill, mma": attention(prefill, kernel="mma"),
    "prefill, plain": attention(prefill, kernel="plain"),
    "prefill, 8 bits": attention(prefill, in_8_bits),
    "mixed": attention(mixed, in_blocks),
    "mixed, 8 bits": attention(mixed, in_8_bits),
    "cascade": attention(cascade),
    "cascade, mma": attention(cascade, kernel="mma"),
    "cascade, blocks": attention(cascade, in_blocks),
    "cascade, 8 bits": attention(cascade, in_8_bits),
    "decode, latents": attention(decode, latents, 16, kernel="mma"),
    "decode, latents, wgmma": attention(decode, latents, 64),
    "prefill, latents": attention(prefill, latents, 16),
    "prefill, latents, mma": attention(prefill, latents, 16, kernel="mma"),
    "mixed, latents": attention(mixed, latents, 16),
    "copy_tokens": copy,
}
"""Each gives what it has written, which is finite."""

BEYOND = "beyond"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        assert all(
            bool(written.isfinite().all()) for written in (CALLS | {BEYOND: partial(copy, beyond=True)})[name]()
        ), name
