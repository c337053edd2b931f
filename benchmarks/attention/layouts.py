"""Where K and V of a batch lie: in plain tensors, in rows of a `vmmkv.KVCache`, in blocks of a block table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vmmkv import KVCache, KVLayout
from vmmkv.driver.driver import open_driver

from .batches import DTYPE, HEAD_DIM, NUM_KV_HEADS, TOKEN_BYTES, Batch, random_blocks

BLOCK_SIZES = 16, 64, 256
NAMES = "contiguous", "token-major", *(f"paged-{size}" for size in BLOCK_SIZES)
MODEL_LAYERS = 32
SPARE_BYTES = 8 << 30
"""Left free beside a cache, for workspaces and references."""
OVERREAD = 256
"""Tokens behind each row's end that have memory: FlashAttention-3 reads whole tiles, of up to 224 tokens (192 of 16
bits each)."""


@dataclass(frozen=True)
class KV:
    """K and V of a batch in one layout.

    Attributes:
        k, v: `[rows, tokens, num_kv_heads, head_dim]`, or with a block table
            `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_table: int32 `[batch, max_blocks]`.
        layers: layers in a token record of rows of a cache; 1 elsewhere.
    """

    name: str
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor | None = None
    layers: int = 1

    def row(self, sequence: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first tokens of a sequence; a copy where they lie in blocks."""
        if self.block_table is None:
            return self.k[sequence, :tokens], self.v[sequence, :tokens]
        blocks = self.block_table[sequence, : -(-tokens // self.k.shape[1])]
        return self.k[blocks].flatten(0, 1)[:tokens], self.v[blocks].flatten(0, 1)[:tokens]


@contextmanager
def layouts(batch: Batch, names: tuple[str, ...] = NAMES) -> Iterator[list[KV]]:
    """The same K and V in each of some layouts; the memory of rows is given back in the end."""
    made = {"contiguous": KV("contiguous", batch.k, batch.v)}
    for size in BLOCK_SIZES:
        if f"paged-{size}" in names:
            made[f"paged-{size}"] = paged(batch, size)
    if "token-major" not in names:
        yield [made[name] for name in names]
        return
    tokens = sum(batch.case.seq_lens) + OVERREAD * len(batch.case.seq_lens)
    layers = layers_that_fit(open_driver(batch.k.device).memory_info()[0], tokens * TOKEN_BYTES)
    with make_cache(batch, layers) as cache:
        made["token-major"] = token_major(batch, cache)
        yield [made[name] for name in names]


def paged(batch: Batch, block_size: int) -> KV:
    """Blocks `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, K beside V, in random order."""
    tables = random_blocks(batch.case.seq_lens, block_size)
    shape = sum(map(len, tables)), 2, block_size, NUM_KV_HEADS, HEAD_DIM
    blocks = torch.empty(shape, dtype=DTYPE, device=batch.k.device)
    block_table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(batch.k.device)
    for sequence, table in enumerate(tables):
        for which, rows in enumerate((batch.k, batch.v)):
            tokens = rows[sequence, : len(table) * block_size]
            blocks[block_table[sequence, : len(table)], which] = tokens.unflatten(0, (-1, block_size))
    return KV(f"paged-{block_size}", blocks[:, 0], blocks[:, 1], block_table)


def layers_that_fit(free_bytes: int, layer_bytes: int) -> int:
    """A model's layers, or half of them, a quarter, ... as many as there is memory for."""
    layers = MODEL_LAYERS
    while layers > 1 and layers * layer_bytes + SPARE_BYTES > free_bytes:
        layers //= 2
    return layers


def make_cache(batch: Batch, layers: int) -> KVCache:
    """A cache for a batch of a model of so many layers."""
    seq_lens = batch.case.seq_lens
    layout = KVLayout(layers, NUM_KV_HEADS, HEAD_DIM, DTYPE)
    device = batch.k.device
    return KVCache(
        layout, len(seq_lens), max(seq_lens), max_tokens=sum(seq_lens), device=device, lookahead=0, overread=OVERREAD
    )


def token_major(batch: Batch, cache: KVCache) -> KV:
    """Rows of a cache; a layer in the middle holds K and V, the others nothing."""
    seq_lens = batch.case.seq_lens
    sequences = sorted((cache.sequence() for _ in seq_lens), key=lambda sequence: sequence.row)
    cache.extend(sequences, seq_lens)
    layer = cache.layout.num_layers // 2
    for index, sequence in enumerate(sequences):
        sequence.write(layer, batch.k[index, : sequence.length], batch.v[index, : sequence.length])
    return KV("token-major", *cache.kv(layer), layers=cache.layout.num_layers)
