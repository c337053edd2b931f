"""Where a token lies: the one difference between contiguous kernels and their paged twins."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arguments import Addresses, Strides
from .memory import load_i32
from .ptx import inlined


class Row(NamedTuple):
    """A row of the cache; with a block table, a row of that."""

    number: int
    table: int
    """The address of its part of the block table, if there is one."""


class Tokens(NamedTuple):
    """K or V, or one head of it, in all rows (or blocks); or the scales of that."""

    address: int
    """Of the first token of the first row."""
    row_stride: int
    """Bytes from one row, or from one block, to the next."""
    token_stride: int


@inlined
def row_of(sequence: int, at: Addresses, strides: Strides) -> Row:
    """The row of a sequence; without `rows` it has the sequence's number."""
    number = load_i32(at.rows + sequence * 4) if at.rows != 0 else sequence
    return Row(number, at.block_table + number * strides.table)


@inlined
def head_of(kv_head: int, at: Addresses, strides: Strides) -> tuple[Tokens, Tokens]:
    """K and V of one head."""
    k = Tokens(at.k + kv_head * strides.k_head, strides.k_row, strides.k_token)
    v = Tokens(at.v + kv_head * strides.v_head, strides.v_row, strides.v_token)
    return k, v


@inlined
def scales_of(kv_head: int, at: Addresses, strides: Strides) -> tuple[Tokens, Tokens]:
    """The scales of K and V of one head, where there are any."""
    k = Tokens(at.k_scales + kv_head * strides.k_scales_head, strides.k_scales_row, strides.k_scales_token)
    v = Tokens(at.v_scales + kv_head * strides.v_scales_head, strides.v_scales_row, strides.v_scales_token)
    return k, v


@inlined
def first_token(sequence: int, starts: int) -> int:
    """The first token of a sequence that may be read; in front of the first one of all there is another row."""
    return max(load_i32(starts + sequence * 4), 0) if starts != 0 else 0


@inlined
def live_token(token: int, begin: int, end: int) -> int:
    """The token, or in place of one before `begin` or from `end` on one in between."""
    return max(min(token, end - 1), begin)


def make_first_query(mixed: bool) -> Any:
    """A function for kernels: where a sequence's first query is, in bytes from that of the batch.

    Args:
        mixed: `cu_seqlens` says which token of the batch it is.
    """

    @inlined
    def first_query(sequence: int, cu_seqlens: int, batch_stride: int, token_stride: int) -> int:
        return load_i32(cu_seqlens + sequence * 4) * token_stride if mixed else sequence * batch_stride

    return first_query


def make_addressing(block_size: int) -> tuple[Any, Any]:
    """Functions for kernels: `home_of` a token, a row's or a block's number, and the token's address there.

    Args:
        block_size: tokens of a block in the block table; 0: tokens lie in rows.
    """

    @inlined
    def home_of(token: int, row: Row) -> int:
        return load_i32(row.table + token // block_size * 4) if block_size else row.number

    @inlined
    def address_of(token: int, home: int, tokens: Tokens) -> int:
        inside = token % block_size if block_size else token
        return tokens.address + (home * tokens.row_stride + inside * tokens.token_stride)

    return home_of, address_of
