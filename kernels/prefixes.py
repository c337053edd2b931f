"""Shared prefixes: the queries and the tokens of one that a block of threads has, and where it leaves what it makes.

Sequences of a group begin with the same tokens, which are read in the row of the first of them by prefill's kernels:
to these, the queries that share a KV head, of all sequences of a group, are those of one prompt that sees the whole
prefix. A prefix is cut into parts of whole tiles, since one group hardly fills a GPU: a group has as large a share of
the blocks of threads as of the sequences in groups. Decode's kernel reads what follows the prefix in each sequence, and
adds the prefix's parts to what it makes of that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


def make_blocks_of(per_sequence: int) -> Any:
    """A function for kernels: the blocks of queries of a group.

    Args:
        per_sequence: queries of a KV head in a sequence.
    """

    @inlined
    def blocks_of(group: int, groups: Groups) -> int:
        sequences = load_i32(groups.cu_groups + group * 4 + 4) - load_i32(groups.cu_groups + group * 4)
        return divide(sequences * per_sequence + groups.queries - 1, groups.queries)

    return blocks_of


def make_tokens_of_part(per_sequence: int) -> Any:
    """A function for kernels: tokens of every part of a group's prefix but the last."""
    blocks_of = make_blocks_of(per_sequence)

    @inlined
    def tokens_of_part(group: int, prefix: int, groups: Groups) -> int:
        """The group is not empty."""
        sequences = load_i32(groups.cu_groups + group * 4 + 4) - load_i32(groups.cu_groups + group * 4)
        all_groups = load_i32(groups.cu_groups + groups.num_groups * 4) - load_i32(groups.cu_groups)
        parts = divide(groups.blocks * sequences, all_groups * blocks_of(group, groups))
        parts = max(min(parts, groups.most_parts), 1)
        return divide(prefix + parts * TILE - 1, parts * TILE) * TILE

    return tokens_of_part


def make_prefix_of_group(q_len: int) -> Any:
    """A function for kernels: the tokens that the sequences of a group share; 0: they are read one by one."""

    @inlined
    def prefix_of_group(group: int, seq_lens: int, groups: Groups) -> int:
        """Of one sequence there is nothing to share, and in a row only what lies before the newest tokens is there.
        Nor is there anything of a group that is not in the batch."""
        first, end = load_i32(groups.cu_groups + group * 4), load_i32(groups.cu_groups + group * 4 + 4)
        prefix = 0
        if end - first > 1 and first >= 0 and end <= groups.batch:
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


def make_parts_of_query(heads_per_kv: int, q_len: int, head_dim: int) -> Any:
    """A function for kernels: where the parts of a query's prefix are."""

    @inlined
    def parts_of_query(place: int, head: int, num_parts: int, sizes: Sizes, groups: Groups) -> PrefixParts:
        """Of the query of this place in the batch."""
        num_heads = sizes.kv_heads * heads_per_kv
        number = place * num_heads + head
        each = sizes.batch * q_len * num_heads
        sums = groups.parts
        states = sums + groups.most_parts * each * (head_dim * 4)
        return PrefixParts(
            sums + number * (head_dim * 4), states + number * 8, each * (head_dim * 4), each * 8, num_parts
        )

    return parts_of_query


def make_put(variant: Variant) -> Any:
    """A function for kernels that leaves the parts of a lane's two queries."""
    heads_per_kv, q_len, head_dim = variant.heads_per_kv, variant.q_len, variant.head_dim
    parts_of_query = make_parts_of_query(heads_per_kv, q_len, head_dim)

    @inlined
    def put_query(
        sums: Any, offset: int, m: float, weights: float, number: int, prompt: Prompt, sizes: Sizes, groups: Groups,
        lane: int,
    ) -> None:  # fmt: skip
        if number < prompt.num_queries:
            place = prompt.start * q_len + number // heads_per_kv
            parts = parts_of_query(place, prompt.kv_head * heads_per_kv + number % heads_per_kv, 0, sizes, groups)
            to = parts.sums + prompt.part * parts.sums_stride + (lane & 3) * 8
            for j in range(head_dim // 8):
                store_f32x2(to + j * 32, sums[4 * j + offset], sums[4 * j + offset + 1])
            if lane & 3 == 0:
                store_f32x2(parts.state + prompt.part * parts.state_stride, m, weights)

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
    """The work on prefixes. A job is a KV head of a part of a group's prefix, and some of the group's queries: those of
    all its sequences, each one's tokens, and their heads."""
    heads_per_kv, q_len = variant.heads_per_kv, variant.q_len
    per_sequence = heads_per_kv * q_len
    prefix_of_group, blocks_of = make_prefix_of_group(q_len), make_blocks_of(per_sequence)
    tokens_of_part = make_tokens_of_part(per_sequence)

    @inlined
    def units_of(number: int, lengths: tuple[int, Groups]) -> int:
        """Parts of a group's prefix, for each of its blocks of queries."""
        seq_lens, groups = lengths
        prefix = prefix_of_group(number, seq_lens, groups)
        units = 0
        if prefix > 0:
            tokens = tokens_of_part(number, prefix, groups)
            units = divide(prefix + tokens - 1, tokens) * blocks_of(number, groups)
        return units

    total, locate = make_ragged(units_of)

    @inlined
    def count_jobs(at: Addresses, sizes: Sizes, groups: Groups, lane: int) -> int:
        return total(groups.num_groups, (at.seq_lens, groups), lane)

    @inlined
    def find_queries(
        head: int, unit: int, at: Addresses, sizes: Sizes, groups: Groups, window: int, lane: int
    ) -> Prompt:
        number, before = locate(unit, groups.num_groups, (at.seq_lens, groups), lane)
        prefix = prefix_of_group(number, at.seq_lens, groups)
        first = load_i32(groups.cu_groups + number * 4)
        count, query, part, begin, end = 0, 0, 0, 0, 0
        if prefix > 0:
            count = (load_i32(groups.cu_groups + number * 4 + 4) - first) * per_sequence
            # The blocks of queries of a part follow each other, and find it in the second cache.
            blocks, tokens = blocks_of(number, groups), tokens_of_part(number, prefix, groups)
            part = divide(unit - before, blocks)
            query = (unit - before - part * blocks) * queries_per_block
            begin = part * tokens
            end = min(begin + tokens, prefix)
        return Prompt(first, first, count if begin < end else 0, query, begin, begin, end, head, head, part)

    @inlined
    def queries_of(prompt: Prompt, at: Addresses, strides: Strides) -> Tokens:
        return Tokens(at.q + prompt.kv_head * heads_per_kv * strides.q_head, 1, strides.q_head)

    @inlined
    def home_of_query(number: int, prompt: Prompt, strides: Strides) -> int:
        token = number % per_sequence // heads_per_kv
        return (prompt.start + number // per_sequence) * strides.q_batch + token * strides.q_token

    return Work(1, count_jobs, find_queries, queries_of, home_of_query, heads_per_kv, make_put(variant))
