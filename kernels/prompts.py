"""Which queries of a prefill a block of threads has, and which keys they see."""

from __future__ import annotations

from typing import Any, NamedTuple

from .addressing import Tokens, first_token, live_token
from .arguments import Addresses, Groups, Sizes, Strides, Variant
from .memory import load_i32
from .ptx import inlined
from .ragged import make_ragged
from .softmax import Softmax, Visible, divisors, make_store


class Prompt(NamedTuple):
    """The queries of a sequence, and the first of those that a block of threads has."""

    sequence: int
    start: int
    """Where the sequence's queries begin in the batch."""
    num_queries: int
    """How many they are."""
    query: int
    """The block's first among them; where that is behind the last there is nothing to do."""
    position: int
    """Which token of the sequence that is."""
    begin: int
    """The sequence's first token that any of its queries sees."""
    length: int
    """Its tokens."""
    head: int
    """The query head; of a shared prefix that of K and V, whose query heads are worked on together."""
    kv_head: int
    part: int
    """Of a shared prefix: the number of the part that its tokens are; else 0."""


class Work(NamedTuple):
    """Functions for kernels: which queries a block of threads has, where they are, and what becomes of their sums.

    Of each head there are as many jobs as `count_jobs` says, and for each head of K and V `heads`: `find_queries` takes
    a head and the number of a job. Queries lie as tokens do: `query_block` and `home_of_query` are for
    `make_addressing` what a block table is.
    """

    heads: int
    count_jobs: Any
    find_queries: Any
    queries_of: Any
    home_of_query: Any
    query_block: int
    put: Any


@inlined
def live(token: int, prompt: Prompt) -> int:
    """The token, or a live one in its place."""
    return live_token(token, prompt.begin, prompt.length)


def make_prompts(variant: Variant, queries_per_block: int) -> Work:
    """The work on prompts. A job is a query head of some tokens of a prompt."""
    heads_per_kv, store = variant.heads_per_kv, make_store(variant.dtype, variant.head_dim // 2)

    @inlined
    def queries_of(prompt: Prompt, at: Addresses, strides: Strides) -> Tokens:
        address = at.q + prompt.start * strides.q_token + prompt.head * strides.q_head
        return Tokens(address, 0, strides.q_token)

    @inlined
    def home_of_query(number: int, prompt: Prompt, strides: Strides) -> int:
        return 0

    @inlined
    def put(
        sums: Any, softmax: Softmax, line: int, prompt: Prompt, at: Addresses, sizes: Sizes, strides: Strides,
        groups: Groups, outer: float, lane: int,
    ) -> None:  # fmt: skip
        """Makes the outputs of a lane's two queries; `line` is the first one's number in the block."""
        d0, d1 = divisors(softmax, at.sinks, prompt.head, outer)
        to = at.out + (prompt.start + prompt.query) * strides.out_token + prompt.head * strides.out_head
        store(sums, d0, d1, to, strides.out_token, line, prompt.num_queries - prompt.query, lane)

    count_jobs, find_queries = make_find_queries(queries_per_block, heads_per_kv, variant.windowed, variant.mixed)
    return Work(heads_per_kv, count_jobs, find_queries, queries_of, home_of_query, 0, put)


def make_find_queries(queries_per_block: int, heads_per_kv: int, windowed: bool, mixed: bool) -> tuple[Any, Any]:
    """Functions for kernels that count the jobs of a head, and give one its queries; in a mixed batch sequences with a
    single one are left out. The lanes of a warp call them together."""

    @inlined
    def count_of(sequence: int, cu_seqlens: int) -> int:
        """Queries."""
        count = load_i32(cu_seqlens + sequence * 4 + 4) - load_i32(cu_seqlens + sequence * 4)
        return 0 if mixed and count == 1 else count

    @inlined
    def units_of(sequence: int, cu_seqlens: int) -> int:
        """Blocks of queries."""
        return (count_of(sequence, cu_seqlens) + queries_per_block - 1) // queries_per_block

    total, locate = make_ragged(units_of)

    @inlined
    def count_jobs(at: Addresses, sizes: Sizes, groups: Groups, lane: int) -> int:
        return total(sizes.batch, at.cu_seqlens, lane)

    @inlined
    def find_queries(
        head: int, unit: int, at: Addresses, sizes: Sizes, groups: Groups, window: int, lane: int
    ) -> Prompt:
        sequence, before = locate(unit, sizes.batch, at.cu_seqlens, lane)
        start = load_i32(at.cu_seqlens + sequence * 4)
        count = count_of(sequence, at.cu_seqlens)
        length = load_i32(at.seq_lens + sequence * 4)
        begin = first_token(sequence, at.starts)
        if windowed:  # what no query of the sequence sees may be gone
            begin = max(begin, length - count + 1 - window)
        query = (unit - before) * queries_per_block
        return Prompt(
            sequence, start, count, query, length - count + query, begin, length, head, head // heads_per_kv, 0
        )

    return count_jobs, find_queries


def make_ranges(queries_per_block: int, step: int, causal: bool, windowed: bool) -> tuple[Any, Any]:
    """Functions for kernels: the keys that a block's queries see, and those that a lane's two see."""

    @inlined
    def keys_of_block(prompt: Prompt, window: int) -> tuple[int, int]:
        """From a multiple of `step` on, and before which."""
        end = min(prompt.position + queries_per_block, prompt.length) if causal else prompt.length
        end = end if prompt.begin < prompt.length else 0
        first = max(prompt.begin, prompt.position + 1 - window) if windowed else prompt.begin
        return first // step * step, end

    @inlined
    def keys_of_lane(prompt: Prompt, line: int, window: int) -> Visible:
        """Of the block's query of number `line`, and of that 8 further on."""
        position = prompt.position + line
        high0 = min(position + 1, prompt.length) if causal else prompt.length
        high1 = min(position + 9, prompt.length) if causal else prompt.length
        low0 = max(prompt.begin, position + 1 - window) if windowed else prompt.begin
        low1 = max(prompt.begin, position + 9 - window) if windowed else prompt.begin
        return Visible(low0, high0, low1, high1)

    return keys_of_block, keys_of_lane
