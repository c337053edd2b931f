"""What is attended to: batches of random queries, K and V, and the right answer for some of the queries."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
"""K and V of a token in one layer."""
CAPACITY_STEP = 256
"""Rows of plain tensors hold a multiple of this many tokens: whole blocks of every size."""
CHECKED_SEQUENCES, CHECKED_QUERIES = 4, 32


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
            answers.append(attend_exactly(batch, sequence, queries))
        self.places = torch.tensor(places, device=batch.q.device)
        self.answers = torch.cat(answers)

    def error(self, out: torch.Tensor) -> float:
        """The largest difference, relative to the largest value of the same query and head."""
        result = out.reshape(-1, NUM_HEADS, HEAD_DIM)[self.places].double()
        difference = (result - self.answers).abs().amax(-1)
        return float((difference / self.answers.abs().amax(-1)).max())


def attend_exactly(batch: Batch, sequence: int, queries: list[int]) -> torch.Tensor:
    """`[queries, num_heads, head_dim]` in float64."""
    case, seq_len = batch.case, batch.case.seq_lens[sequence]
    k, v = (tensor[sequence, :seq_len].double() for tensor in (batch.k, batch.v))
    q = batch.q[sequence, queries].double().unflatten(1, (NUM_KV_HEADS, -1))
    scores = torch.einsum("nhgd,thd->hgnt", q, k) * HEAD_DIM**-0.5
    if case.causal:
        positions = torch.tensor(queries, device=q.device) + seq_len - case.q_len
        scores.masked_fill_(torch.arange(seq_len, device=q.device) > positions[:, None], -torch.inf)
    return torch.einsum("hgnt,thd->nhgd", scores.softmax(-1), v).flatten(1, 2)


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
