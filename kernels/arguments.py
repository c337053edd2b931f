"""What every kernel is told, and how it finds tokens by it.

At compile time a kernel is told its `Variant`, at launch structs of numbers. Most calls have neither a window nor a cap
nor a block table: their kernel is the general one with constants in place of those numbers (`make_entry`), and the
compiler leaves out what follows from them. All other calls of a head shape share the general one.

A token lies in a row, or in a block of a block table: only `home_of` and `address_of` know which.

Lengths are data on the device. `make_ragged` lays the work of all sequences end to end; each block of threads takes an
equal share of it and finds the sequence that its share begins with. So one launch, or one captured graph, serves all
lengths, and no block waits for the longest sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .compiler import float32, inlined
from .memory import divide, load_i32
from .warp import count_true, prefix_sum, shuffle_count, sum_of_lanes

LATENT_DIM, LATENT_V_DIM = 576, 512  # of MLA's latents: numbers of K, of which the first are V as well


def v_dim_of(head_dim: int) -> int:
    """The width of V, and of outputs."""
    return LATENT_V_DIM if head_dim == LATENT_DIM else head_dim


class Variant(NamedTuple):
    """The constants of a kernel."""

    dtype: torch.dtype
    head_dim: int
    heads_per_kv: int  # query heads that share a KV head
    q_len: int  # queries of each sequence at most; 0: they are where `cu_seqlens` says
    kv_dtype: torch.dtype | None = None  # of K and V of 8 bits, which have scales; None: theirs is `dtype`
    general: bool = True  # else: causal, in rows, without a window, a cap and groups; decode has `q_len` queries
    prefixes: bool = False  # prefill's kernel reads what groups of sequences share


class Addresses(NamedTuple):
    """Where tensors lie; 0: this one is not given. What they are, `decode` and `prefill` say."""

    q: int
    k: int
    v: int
    out: int
    cu_seqlens: int
    seq_lens: int
    rows: int
    starts: int
    block_table: int
    sinks: int
    k_scales: int
    v_scales: int
    partials: int  # room in which blocks of threads leave parts for each other
    counters: int  # 32-bit counters, which are 0 and are left 0


class Steps(NamedTuple):
    """Bytes from one row (sequence, or block), token and head to the next."""

    row: int
    token: int
    head: int


class Sizes(NamedTuple):
    """Sizes of a call that are no constants; bytes from one row of the block table to the next; steps of tensors."""

    batch: int
    kv_heads: int
    table: int
    q: Steps
    k: Steps
    v: Steps
    out: Steps
    k_scales: Steps
    v_scales: Steps


class Options(NamedTuple):
    """What a call asks for. Weights of keys are `exp2(outer * x)` of `x = q k`, or of `tanh(inner * q k)`."""

    window: int  # 0: there is none
    inner: float  # 0: there is no cap
    outer: float
    causal: int
    q_len: int  # queries of each sequence of decode
    mixed: int  # sequences with one query are decode's, others are prefill's
    block_size: int  # tokens of a block in the block table; 0: there is none
    box: int  # of those, tokens of a copy by tensor map


class Groups(NamedTuple):
    """Which sequences share their first tokens; what the fields are, `cascade` says."""

    cu_groups: int
    prefix_lens: int
    parts: int  # the address of the room in which the kernel of the prefixes leaves parts for decode's
    num_groups: int
    blocks: int  # blocks of threads to work on a KV head's prefixes; one more for each of their blocks of queries
    most_parts: int  # of a query's prefix
    queries: int  # of a block of threads
    batch: int  # sequences


NO_GROUPS = Groups(0, 0, 0, 0, 0, 0, 0, 0)


class Given(NamedTuple):
    """The arguments of an attention kernel, for its functions."""

    at: Addresses
    sizes: Sizes
    options: Options
    groups: Groups


class Maps(NamedTuple):
    """Tensor maps of K and V, for boxes of tokens and for single ones; in a kernel their addresses."""

    k_boxes: bytes
    v_boxes: bytes
    k_tokens: bytes
    v_tokens: bytes


class Row(NamedTuple):
    """A row of the cache; with a block table, a row of that."""

    number: int
    table: int  # the address of its part of the block table, if there is one
    block_size: int  # tokens of a block; 0: there is no block table


class Tokens(NamedTuple):
    """K or V, or one head of it, in all rows (or blocks); or the scales of that."""

    address: int  # of the first token of the first row
    row_stride: int  # bytes from one row, or from one block, to the next
    token_stride: int
    block_size: int  # as in `Row`


class Head(NamedTuple):
    """One head of K and V, and of their scales, where there are any."""

    k: Tokens
    v: Tokens
    k_scales: Tokens
    v_scales: Tokens


@inlined
def head_in(address: int, head: int, steps: Steps, block_size: int) -> Tokens:
    """One head of a tensor; 0: all of them."""
    return Tokens(address + head * steps.head, steps.row, steps.token, block_size)


@inlined
def row_of(sequence: int, given: Given) -> Row:
    """The row of a sequence; without `rows` it has the sequence's number."""
    rows = given.at.rows
    number = load_i32(rows + sequence * 4) if rows != 0 else sequence
    return Row(number, given.at.block_table + number * given.sizes.table, given.options.block_size)


@inlined
def head_of(kv_head: int, given: Given) -> Head:
    """One head of K and V."""
    at, sizes = given.at, given.sizes
    block = given.options.block_size
    return Head(
        head_in(at.k, kv_head, sizes.k, block), head_in(at.v, kv_head, sizes.v, block),
        head_in(at.k_scales, kv_head, sizes.k_scales, block), head_in(at.v_scales, kv_head, sizes.v_scales, block),
    )  # fmt: skip


@inlined
def first_token(sequence: int, given: Given) -> int:
    """The first token of a sequence that may be read; in front of the first one of all there is another row."""
    starts = given.at.starts
    return max(load_i32(starts + sequence * 4), 0) if starts != 0 else 0


@inlined
def first_query(sequence: int, steps: Steps, given: Given) -> int:
    """Where a sequence's first query is, in bytes from the batch's first; in a mixed batch `cu_seqlens` says."""
    if given.options.mixed != 0:
        return load_i32(given.at.cu_seqlens + sequence * 4) * steps.token
    return sequence * steps.row


@inlined
def num_queries(sequence: int, given: Given) -> int:
    """The queries of a sequence, where `cu_seqlens` says."""
    return load_i32(given.at.cu_seqlens + sequence * 4 + 4) - load_i32(given.at.cu_seqlens + sequence * 4)


@inlined
def home_of(token: int, row: Row) -> int:
    """The *home* of a token: its row, or its block with that block's first token in the lower 32 bits."""
    if row.block_size == 0:
        return row.number
    block = divide(token, row.block_size)
    return load_i32(row.table + block * 4) << 32 | block * row.block_size


@inlined
def address_of(token: int, home: int, tokens: Tokens) -> int:
    """A token's address."""
    if tokens.block_size == 0:
        return tokens.address + (home * tokens.row_stride + token * tokens.token_stride)
    inside = token - (home & 0xFFFFFFFF)
    return tokens.address + ((home >> 32) * tokens.row_stride + inside * tokens.token_stride)


@inlined
def sequence_of(token: int, cu_seqlens: int, batch: int) -> int:
    """The sequence that a token belongs to: the last one that begins at the token or before it."""
    sequence, end = 0, batch
    while end - sequence > 1:
        middle = (sequence + end) // 2
        if load_i32(cu_seqlens + middle * 4) <= token:
            sequence = middle
        else:
            end = middle
    return sequence


def make_ragged(units_of: Any) -> tuple[Any, Any]:
    """Functions for kernels, called by all lanes of a warp: count the units of work of a batch, and find a unit.

    `units_of` is an inlined function: the units of a sequence (or of a group), from its index and what is given.
    """

    @inlined
    def total(count: int, given: Any, lane: int) -> int:
        units = 0
        sequence = lane
        while sequence < count:
            units += units_of(sequence, given)
            sequence += 32
        return sum_of_lanes(units)

    @inlined
    def locate(unit: int, count: int, given: Any, lane: int) -> tuple[int, int]:
        """The sequence of a unit (at most the last one), and the units of those before it."""
        first, before, units, upto, searching = 0, 0, 0, 0, True
        while searching:
            units = units_of(first + lane, given) if first + lane < count else 0
            upto = prefix_sum(units, lane)
            chunk = shuffle_count(upto, 31)
            searching = before + chunk <= unit and first + 32 < count
            if searching:
                before += chunk
                first += 32
        ended = min(count_true(1 if before + upto <= unit else 0), count - 1 - first)
        return first + ended, before + shuffle_count(upto - units, ended)

    return total, locate


def make_given(variant: Variant) -> Any:
    """A function for kernels: what its functions are given, from its parameters. Unless it is general, constants take
    the place of options."""
    q_len, none = variant.q_len, float32(0)
    of_all = inlined(lambda at, sizes, options, groups: Given(at, sizes, options, groups))

    @inlined
    def of_plain(at: Addresses, sizes: Sizes, options: Options, groups: Groups) -> Given:
        return Given(at, sizes, Options(0, none, options.outer, 1, q_len, 0, 0, 0), NO_GROUPS)

    return of_all if variant.general else of_plain


def make_entry(variant: Variant, work: Any) -> Any:
    """A kernel that does the `work`, an inlined function of `Given`."""
    given_of = make_given(variant)

    def kernel(at: Addresses, sizes: Sizes, options: Options, groups: Groups) -> None:
        work(given_of(at, sizes, options, groups))

    return kernel


ARGUMENTS = Addresses, Sizes, Options, Groups  # what every attention kernel takes, behind tensor maps if any
