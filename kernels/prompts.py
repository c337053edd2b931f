"""Which queries a block of prefill has, which keys they see, and what becomes of their sums.

Of a prompt a job is some queries of a head. Of sequences that share a prefix a job is queries of a KV head of all
sequences of a group, and some tokens of the prefix, which is read in the first sequence's row. A prefix is cut into
parts of whole tiles, since one group hardly fills a GPU: a group gets blocks of threads by its share of the sequences.
Decode's kernel reads what follows the prefix and adds the prefix's parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .arguments import Given, Groups, Options, Variant, first_token, make_ragged, num_queries, sequence_of
from .compiler import inlined
from .memory import divide, load_i32, store_f32x2
from .softmax import Softmax, Visible, divisors, make_store, sum_weights

PREFIX_TILE = 128  # parts of a prefix begin at multiples of this many tokens: those of all kernels' tiles


class Prompt(NamedTuple):
    """A job: the queries of a sequence (or of a group's sequences), and the first of those that a block has."""

    sequence: int
    start: int  # where the sequence's queries begin in the batch; of a group its first sequence
    num_queries: int
    query: int  # the block's first; where that is behind the last there is nothing to do
    position: int  # which token of the sequence that is
    begin: int  # the first token that any of the queries sees
    length: int  # the sequence's tokens; of a prefix, where the part ends
    head: int  # the query head; of a prefix that of K and V, whose query heads are worked on together
    kv_head: int
    part: int  # of a prefix: the number of the part that its tokens are; else 0


class Work(NamedTuple):
    """Functions for kernels: which queries a block of threads has, where they are, and what becomes of their sums.

    Of each head there are as many jobs as `count_jobs` says, and for each head of K and V `heads`: `find_queries` takes
    a head and the number of a job, `query_at` the number of a query in it.
    """

    heads: int
    count_jobs: Any
    find_queries: Any
    query_at: Any
    put: Any


@inlined
def live(token: int, prompt: Prompt) -> int:
    """The token, or a live one in its place."""
    return max(min(token, prompt.length - 1), prompt.begin)


def make_prompts(variant: Variant, queries_per_block: int) -> Work:
    """The work on prompts. A job is a query head of some tokens of a prompt; in a mixed batch sequences with a single
    query are left out."""
    heads_per_kv = variant.heads_per_kv
    store = make_store(variant.dtype, variant.head_dim // 2)

    @inlined
    def count_of(sequence: int, given: Given) -> int:
        """Queries."""
        count = num_queries(sequence, given)
        return 0 if given.options.mixed != 0 and count == 1 else count

    @inlined
    def units_of(sequence: int, given: Given) -> int:
        """Blocks of queries."""
        return (count_of(sequence, given) + queries_per_block - 1) // queries_per_block

    total, locate = make_ragged(units_of)

    @inlined
    def count_jobs(given: Given, lane: int) -> int:
        return total(given.sizes.batch, given, lane)

    @inlined
    def find_queries(head: int, unit: int, given: Given, lane: int) -> Prompt:
        sequence, before = locate(unit, given.sizes.batch, given, lane)
        start = load_i32(given.at.cu_seqlens + sequence * 4)
        count = count_of(sequence, given)
        length = load_i32(given.at.seq_lens + sequence * 4)
        begin = first_token(sequence, given)
        if given.options.window != 0:  # tokens that no query of the sequence sees may be gone
            begin = max(begin, length - count + 1 - given.options.window)
        query = (unit - before) * queries_per_block
        kv_head = head // heads_per_kv
        return Prompt(sequence, start, count, query, length - count + query, begin, length, head, kv_head, 0)

    @inlined
    def query_at(number: int, prompt: Prompt, given: Given) -> int:
        at, steps = given.at, given.sizes.q
        return at.q + prompt.start * steps.token + prompt.head * steps.head + number * steps.token

    @inlined
    def put(sums: Any, softmax: Softmax, line: int, prompt: Prompt, given: Given, lane: int) -> None:
        """Makes the outputs of a lane's two queries; `line` is the first one's number in the block."""
        at, sizes = given.at, given.sizes
        d0, d1 = divisors(softmax, at.sinks, prompt.head, given.options.outer)
        to = at.out + (prompt.start + prompt.query) * sizes.out.token + prompt.head * sizes.out.head
        store(sums, d0, d1, to, sizes.out.token, line, prompt.num_queries - prompt.query, lane)

    return Work(heads_per_kv, count_jobs, find_queries, query_at, put)


@inlined
def keys_of_block(prompt: Prompt, queries: int, options: Options) -> tuple[int, int]:
    """The keys that so many queries of a block see: the first, and where they end."""
    window = options.window
    end = min(prompt.position + queries, prompt.length) if options.causal != 0 else prompt.length
    first = max(prompt.begin, prompt.position + 1 - window) if window != 0 else prompt.begin
    return first, end if prompt.begin < prompt.length else 0


@inlined
def keys_of_lane(prompt: Prompt, line: int, options: Options) -> Visible:
    """The keys that a lane's two queries see, of number `line` in the block and 8 further on."""
    position, window, causal = prompt.position + line, options.window, options.causal != 0
    high0 = min(position + 1, prompt.length) if causal else prompt.length
    high1 = min(position + 9, prompt.length) if causal else prompt.length
    low0 = max(prompt.begin, position + 1 - window) if window != 0 else prompt.begin
    low1 = max(prompt.begin, position + 9 - window) if window != 0 else prompt.begin
    return Visible(low0, high0, low1, high1)


class PrefixParts(NamedTuple):
    """The partial results of a query's prefix."""

    sums: int  # address of the first part's sums of V
    state: int  # and of its maximum and sum of weights
    sums_stride: int  # bytes from one part's to the next's
    state_stride: int
    num_parts: int


@inlined
def blocks_of(group: int, groups: Groups, per_sequence: int) -> int:
    """The blocks of queries of a group, whose sequences have so many queries of a KV head each."""
    sequences = load_i32(groups.cu_groups + group * 4 + 4) - load_i32(groups.cu_groups + group * 4)
    return divide(sequences * per_sequence + groups.queries - 1, groups.queries)


@inlined
def tokens_of_part(group: int, prefix: int, groups: Groups, per_sequence: int) -> int:
    """Tokens of every part of a group's prefix but the last; the group is not empty."""
    sequences = load_i32(groups.cu_groups + group * 4 + 4) - load_i32(groups.cu_groups + group * 4)
    all_groups = load_i32(groups.cu_groups + groups.num_groups * 4) - load_i32(groups.cu_groups)
    parts = divide(groups.blocks * sequences, all_groups * blocks_of(group, groups, per_sequence))
    parts = max(min(parts, groups.most_parts), 1)
    return divide(prefix + parts * PREFIX_TILE - 1, parts * PREFIX_TILE) * PREFIX_TILE


@inlined
def prefix_of_group(group: int, given: Given) -> int:
    """The tokens that the sequences of a group share; 0: they are read one by one.

    One sequence shares nothing, nor does a group that is not in the batch; a row holds only what lies before the newest
    tokens.
    """
    groups = given.groups
    first, end = load_i32(groups.cu_groups + group * 4), load_i32(groups.cu_groups + group * 4 + 4)
    prefix = 0
    if end - first > 1 and first >= 0 and end <= groups.batch:
        prefix = load_i32(groups.prefix_lens + group * 4)
        prefix = prefix if 0 < prefix <= load_i32(given.at.seq_lens + first * 4) - given.options.q_len else 0
    return prefix


@inlined
def prefix_of(sequence: int, length: int, given: Given) -> int:
    """The first tokens of a sequence that are read for its group. A sequence that is shorter, as an unused place of a
    captured graph is, shares nothing."""
    groups = given.groups
    group = sequence_of(sequence, groups.cu_groups, groups.num_groups)
    begin = load_i32(groups.cu_groups + group * 4)
    prefix = 0
    if begin <= sequence < load_i32(groups.cu_groups + group * 4 + 4):
        prefix = prefix_of_group(group, given)
    return prefix if prefix <= length - given.options.q_len else 0


def make_parts_of_query(heads_per_kv: int, head_dim: int) -> Any:
    """A function for kernels: where the partial results of a query's prefix are, by its place in the batch."""

    @inlined
    def parts_of_query(place: int, head: int, num_parts: int, given: Given) -> PrefixParts:
        num_heads = given.sizes.kv_heads * heads_per_kv
        number = place * num_heads + head
        each = given.sizes.batch * given.options.q_len * num_heads
        sums = given.groups.parts
        states = sums + given.groups.most_parts * each * (head_dim * 4)
        return PrefixParts(
            sums + number * (head_dim * 4), states + number * 8, each * (head_dim * 4), each * 8, num_parts
        )

    return parts_of_query


def make_prefixes(variant: Variant, queries_per_block: int) -> Work:
    """The work on prefixes. A job is a KV head of a part of a group's prefix, and some of the group's queries: those of
    all its sequences, each one's tokens, and their heads."""
    heads_per_kv, head_dim = variant.heads_per_kv, variant.head_dim
    parts_of_query = make_parts_of_query(heads_per_kv, head_dim)

    @inlined
    def units_of(number: int, given: Given) -> int:
        """Parts of a group's prefix, for each of its blocks of queries."""
        groups, per_sequence = given.groups, heads_per_kv * given.options.q_len
        prefix = prefix_of_group(number, given)
        units = 0
        if prefix > 0:
            tokens = tokens_of_part(number, prefix, groups, per_sequence)
            units = divide(prefix + tokens - 1, tokens) * blocks_of(number, groups, per_sequence)
        return units

    total, locate = make_ragged(units_of)

    @inlined
    def count_jobs(given: Given, lane: int) -> int:
        return total(given.groups.num_groups, given, lane)

    @inlined
    def find_queries(head: int, unit: int, given: Given, lane: int) -> Prompt:
        groups, per_sequence = given.groups, heads_per_kv * given.options.q_len
        number, before = locate(unit, groups.num_groups, given, lane)
        prefix = prefix_of_group(number, given)
        first = load_i32(groups.cu_groups + number * 4)
        count, query, part, begin, end = 0, 0, 0, 0, 0
        if prefix > 0:
            count = (load_i32(groups.cu_groups + number * 4 + 4) - first) * per_sequence
            # The blocks of queries of a part follow each other, and find it in the second cache.
            blocks = blocks_of(number, groups, per_sequence)
            tokens = tokens_of_part(number, prefix, groups, per_sequence)
            part = divide(unit - before, blocks)
            query = (unit - before - part * blocks) * queries_per_block
            begin = part * tokens
            end = min(begin + tokens, prefix)
        return Prompt(first, first, count if begin < end else 0, query, begin, begin, end, head, head, part)

    @inlined
    def query_at(number: int, prompt: Prompt, given: Given) -> int:
        steps, per_sequence = given.sizes.q, heads_per_kv * given.options.q_len
        sequence = divide(number, per_sequence)
        inside = number - sequence * per_sequence
        address = given.at.q + (prompt.start + sequence) * steps.row + inside // heads_per_kv * steps.token
        return address + (prompt.kv_head * heads_per_kv + inside % heads_per_kv) * steps.head

    @inlined
    def put_query(
        sums: Any, offset: int, m: float, weights: float, number: int, prompt: Prompt, given: Given, lane: int
    ) -> None:
        if number < prompt.num_queries:
            place = prompt.start * given.options.q_len + number // heads_per_kv
            parts = parts_of_query(place, prompt.kv_head * heads_per_kv + number % heads_per_kv, 0, given)
            to = parts.sums + prompt.part * parts.sums_stride + (lane & 3) * 8
            for j in range(head_dim // 8):
                store_f32x2(to + j * 32, sums[4 * j + offset], sums[4 * j + offset + 1])
            if lane & 3 == 0:
                store_f32x2(parts.state + prompt.part * parts.state_stride, m, weights)

    @inlined
    def put(sums: Any, softmax: Softmax, line: int, prompt: Prompt, given: Given, lane: int) -> None:
        """Leaves the partial results of a lane's two queries."""
        l0, l1 = sum_weights(softmax)
        number = prompt.query + line
        put_query(sums, 0, softmax.m0, l0, number, prompt, given, lane)
        put_query(sums, 2, softmax.m1, l1, number + 8, prompt, given, lane)

    return Work(1, count_jobs, find_queries, query_at, put)
