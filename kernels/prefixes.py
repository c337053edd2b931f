"""Shared prefixes: the queries and the tokens of one that a block of threads has, and where it leaves what it makes.

Sequences of a group begin with the same tokens, which are read in the row of the first of them by prefill's kernels:
to these, the queries that share a KV head, of all sequences of a group, are those of one prompt that sees the whole
prefix. A prefix is cut into parts of whole tiles, for one group hardly fills a GPU. Decode's kernel reads what follows
the prefix in each sequence, and adds the prefix's parts to what it makes of that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda

from .addressing import Tokens
from .arguments import Addresses, Groups, Sizes, Strides, Variant
from .arithmetic import divide
from .memory import load_i32, store_f32x2
from .prompts import Prompt, Work
from .ptx import inlined
from .ragged import make_ragged, sequence_of
from .softmax import Softmax, sum_weights

TILE = 128
"""Parts of a prefix begin at multiples of this many tokens: those of all kernels' tiles."""


class PrefixParts(NamedTuple):
    """The parts that there are of a query's prefix: addresses of the first one's sums, and of its maximum and weights;
    bytes from each part's to the next's; how many there are."""

    sums: int
    state: int
    sums_stride: int
    state_stride: int
    num_parts: int


def part_bytes(queries: int, num_heads: int, head_dim: int) -> int:
    """Of one part for each query and head of a batch: sums of V; a maximum and a sum of weights. In fp32."""
    return queries * num_heads * (head_dim + 2) * 4


@inlined
def tokens_of_part(prefix: int, splits: int) -> int:
    """Of every part but the last."""
    return max(divide(prefix + splits * TILE - 1, splits * TILE), 1) * TILE


def make_prefix_of_group(q_len: int) -> Any:
    """A function for kernels: the tokens that the sequences of a group share; 0: they are read one by one."""

    @inlined
    def prefix_of_group(group: int, seq_lens: int, groups: Groups) -> int:
        """Of one sequence there is nothing to share, and in a row only what lies before the newest tokens is there."""
        first = load_i32(groups.cu_groups + group * 4)
        prefix = 0
        if load_i32(groups.cu_groups + group * 4 + 4) - first > 1:
            prefix = load_i32(groups.prefix_lens + group * 4)
            prefix = prefix if 0 < prefix <= load_i32(seq_lens + first * 4) - q_len else 0
        return prefix

    return prefix_of_group


def make_prefix_of(q_len: int) -> Any:
    """A function for kernels: the first tokens of a sequence that are read for its group; 0: none are."""
    prefix_of_group = make_prefix_of_group(q_len)

    @inlined
    def prefix_of(sequence: int, length: int, seq_lens: int, groups: Groups) -> int:
        """A sequence that is shorter, as an unused place of a captured graph is, shares nothing."""
        group = sequence_of(sequence, groups.cu_groups, groups.num_groups)
        begin = load_i32(groups.cu_groups + group * 4)
        prefix = 0
        if begin <= sequence < load_i32(groups.cu_groups + group * 4 + 4):
            prefix = prefix_of_group(group, seq_lens, groups)
        return prefix if prefix <= length - q_len else 0

    return prefix_of


def make_parts_of_query(group: int, q_len: int, head_dim: int) -> Any:
    """A function for kernels: where the parts of a query's prefix are."""

    @inlined
    def parts_of_query(place: int, head: int, prefix: int, sizes: Sizes, groups: Groups) -> PrefixParts:
        """Of the query of this place in the batch."""
        num_heads = sizes.kv_heads * group
        number = place * num_heads + head
        each = sizes.batch * q_len * num_heads
        size = tokens_of_part(prefix, groups.splits)
        return PrefixParts(
            groups.parts + number * (head_dim * 4),
            groups.parts + groups.splits * each * (head_dim * 4) + number * 8,
            each * (head_dim * 4),
            each * 8,
            divide(prefix + size - 1, size),
        )

    return parts_of_query


def make_put(variant: Variant) -> Any:
    """A function for kernels that leaves the parts of a lane's two queries."""
    group, q_len, head_dim = variant.group, variant.q_len, variant.head_dim
    parts_of_query = make_parts_of_query(group, q_len, head_dim)

    @inlined
    def put_query(
        sums: Any, offset: int, m: float, weights: float, number: int, prompt: Prompt, sizes: Sizes, groups: Groups,
        lane: int,
    ) -> None:  # fmt: skip
        if number < prompt.num_queries:
            place = prompt.start * q_len + number // group
            parts = parts_of_query(place, prompt.kv_head * group + number % group, prompt.length, sizes, groups)
            part = cuda.blockIdx.x % groups.splits
            to = parts.sums + part * parts.sums_stride + (lane & 3) * 8
            for j in range(head_dim // 8):
                store_f32x2(to + j * 32, sums[4 * j + offset], sums[4 * j + offset + 1])
            if lane & 3 == 0:
                store_f32x2(parts.state + part * parts.state_stride, m, weights)

    @inlined
    def put(
        sums: Any, softmax: Softmax, line: int, prompt: Prompt, at: Addresses, sizes: Sizes, strides: Strides,
        groups: Groups, outer: float, lane: int,
    ) -> None:  # fmt: skip
        l0, l1 = sum_weights(softmax)
        number = prompt.query + line
        put_query(sums, 0, softmax.m0, l0, number, prompt, sizes, groups, lane)
        put_query(sums, 2, softmax.m1, l1, number + 8, prompt, sizes, groups, lane)

    return put


def make_prefixes(variant: Variant, queries_per_block: int) -> Work:
    """The work on prefixes. A block of the grid has a KV head and a part of a prefix, and in the second dimension some
    of a group's queries: those of all its sequences, each one's tokens, and their heads."""
    group, q_len = variant.group, variant.q_len
    per_sequence = group * q_len
    prefix_of_group = make_prefix_of_group(q_len)

    @inlined
    def units_of(number: int, lengths: tuple[int, Groups]) -> int:
        """Blocks of queries."""
        seq_lens, groups = lengths
        first = load_i32(groups.cu_groups + number * 4)
        count = (load_i32(groups.cu_groups + number * 4 + 4) - first) * per_sequence
        return (count + queries_per_block - 1) // queries_per_block if prefix_of_group(number, seq_lens, groups) else 0

    _, locate = make_ragged(units_of)

    @inlined
    def find_queries(at: Addresses, sizes: Sizes, groups: Groups, window: int, lane: int) -> Prompt:
        """The lanes of a warp look together."""
        number, before = locate(cuda.blockIdx.y, groups.num_groups, (at.seq_lens, groups), lane)
        first = load_i32(groups.cu_groups + number * 4)
        count = (load_i32(groups.cu_groups + number * 4 + 4) - first) * per_sequence
        prefix = prefix_of_group(number, at.seq_lens, groups)
        size = tokens_of_part(prefix, groups.splits)
        kv_head = divide(cuda.blockIdx.x, groups.splits)
        begin = (cuda.blockIdx.x - kv_head * groups.splits) * size
        end = min(begin + size, prefix)
        query = (cuda.blockIdx.y - before) * queries_per_block
        return Prompt(first, first, count if begin < end else 0, query, begin, begin, end, kv_head)

    @inlined
    def queries_of(prompt: Prompt, at: Addresses, strides: Strides) -> Tokens:
        return Tokens(at.q + prompt.kv_head * group * strides.q_head, 1, strides.q_head)

    @inlined
    def home_of_query(number: int, prompt: Prompt, strides: Strides) -> int:
        token = number % per_sequence // group
        return (prompt.start + number // per_sequence) * strides.q_batch + token * strides.q_token

    return Work(find_queries, queries_of, home_of_query, group, make_put(variant))
