"""Batches of random queries, K and V, in plain tensors, rows of a cache and blocks; and the right answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from vmmkv import KVCache, KVLayout
from vmmkv.driver.driver import open_driver

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
"""K and V of a token in one layer."""
CAPACITY_STEP = 256
"""Rows of plain tensors hold a multiple of this many tokens: whole blocks of every size."""
CHECKED_SEQUENCES, CHECKED_QUERIES = 4, 32
BLOCK_SIZES = 16, 64, 256
NAMES = "contiguous", "token-major", *(f"paged-{size}" for size in BLOCK_SIZES)
MODEL_LAYERS = 32
SPARE_BYTES = 8 << 30
"""Left free beside a cache, for workspaces and references."""
OVERREAD = 256
"""Tokens behind each row's end that have memory: FlashAttention-3 reads whole tiles, of up to 224 tokens (192 of 16
bits each)."""


@dataclass(frozen=True)
class Case:
    """A batch to measure: `q_len` new tokens at the end of each sequence of `seq_lens` tokens."""

    part: str
    """decode or prefill: the function that is called."""
    name: str
    seq_lens: tuple[int, ...]
    q_len: int = 1
    causal: bool = True
    kernels: tuple[str, ...] = ("auto",)

    @property
    def even(self) -> bool:
        return len(set(self.seq_lens)) == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all tokens."""
        return sum(self.seq_lens) * TOKEN_BYTES

    @property
    def flops(self) -> int:
        """Floating-point operations: two products of `head_dim` for each pair of a query and a visible key."""
        hidden = self.q_len * (self.q_len - 1) // 2 if self.causal else 0
        pairs = sum(self.q_len * seq_len - hidden for seq_len in self.seq_lens)
        return 4 * NUM_HEADS * HEAD_DIM * pairs


@dataclass(frozen=True)
class Batch:
    """A case with data.

    Attributes:
        q: `[batch, q_len, num_heads, head_dim]`.
        k, v: `[batch, capacity, num_kv_heads, head_dim]`; sequence i is the first `seq_lens[i]` tokens of row i.
        seq_lens: int32 `[batch]`.
        cu_seqlens: int32 `[batch + 1]`, where each sequence's queries begin.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor


def make_batch(case: Case, device: torch.device) -> Batch:
    """Random data for a case."""
    batch = len(case.seq_lens)
    capacity = -(-max(case.seq_lens) // CAPACITY_STEP) * CAPACITY_STEP
    kv_shape = batch, capacity, NUM_KV_HEADS, HEAD_DIM
    q = torch.randn(batch, case.q_len, NUM_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    k, v = (torch.randn(kv_shape, dtype=DTYPE, device=device) for _ in "kv")
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * case.q_len
    return Batch(case, q, k, v, seq_lens, cu_seqlens)


def evenly(seq_lens: tuple[int, ...]) -> tuple[int, ...]:
    """As many sequences with the same total, as equal as whole numbers can be."""
    ends = [sum(seq_lens) * index // len(seq_lens) for index in range(len(seq_lens) + 1)]
    return tuple(end - start for start, end in pairwise(ends))


class Reference:
    """Attention in float64 for some queries of some sequences, those with the fewest and the most tokens among them."""

    def __init__(self, batch: Batch) -> None:
        case = batch.case
        by_length = sorted(range(len(case.seq_lens)), key=case.seq_lens.__getitem__)
        queries = spread(case.q_len, CHECKED_QUERIES)
        places, answers = [], []
        for place in spread(len(by_length), CHECKED_SEQUENCES):
            sequence = by_length[place]
            places += [sequence * case.q_len + query for query in queries]
            seq_len = case.seq_lens[sequence]
            q, k, v = batch.q[sequence, queries], batch.k[sequence, :seq_len], batch.v[sequence, :seq_len]
            positions = torch.tensor(queries, device=q.device) + seq_len - case.q_len if case.causal else None
            answers.append(attend_exactly(*(each.double()[None] for each in (q, k, v)), positions)[0])
        self.places = torch.tensor(places, device=batch.q.device)
        self.answers = torch.cat(answers)

    def error(self, out: torch.Tensor) -> float:
        """The largest difference, relative to the largest value of the same query and head."""
        result = out.reshape(-1, NUM_HEADS, HEAD_DIM)[self.places].double()
        difference = (result - self.answers).abs().amax(-1)
        return float((difference / self.answers.abs().amax(-1)).max())


def attend_exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Attention, `[batch, queries, num_heads, head_dim]`. A query sees the keys up to its position; None: all keys."""
    scores = torch.einsum("bqhgd,bthd->bqhgt", q.unflatten(2, (k.shape[2], -1)), k) * q.shape[-1] ** -0.5
    if positions is not None:
        hidden = torch.arange(k.shape[1], device=q.device) > positions[:, None]
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
    return torch.einsum("bqhgt,bthd->bqhgd", scores.softmax(-1), v).flatten(2, 3)


def spread(count: int, at_most: int) -> list[int]:
    """Up to `at_most` of the numbers below `count`, the first and the last among them."""
    if count <= at_most:
        return list(range(count))
    return [index * (count - 1) // (at_most - 1) for index in range(at_most)]


def random_blocks(seq_lens: tuple[int, ...], block_size: int) -> list[torch.Tensor]:
    """For each sequence the numbers of its blocks, in random order over all sequences."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    ends = list(accumulate(counts))
    order = torch.randperm(ends[-1]).to(torch.int32)
    return [order[end - count : end] for count, end in zip(counts, ends)]


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
