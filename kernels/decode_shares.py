"""Equal shares of a decode step: which queries, and which tokens of them, a block of threads works on.

The queries of a KV head are taken in octets, and a block works on a bundle of these at a time. The work of a sequence
is laid out bundle by bundle, in units of 16 tokens, and that of all sequences end to end (see `ragged`): a share begins
and ends anywhere, and is worked on in pieces of one sequence and bundle each.

Neighbouring heads of a token lie side by side, so blocks form teams: a share is a team's, and each of its blocks works
on the same tokens as the others at about the same time, on a bundle of its own.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from numba import cuda

from .addressing import first_token
from .arguments import Groups
from .arithmetic import divide
from .memory import load_i32
from .prefixes import make_prefix_of
from .ptx import inlined
from .ragged import make_ragged

WARPS = 4
"""Of a block."""
THREADS = 32 * WARPS
UNIT = 16
"""Tokens of a unit of work."""
LEAST = 8
"""Units of a share at least, so that short sequences are not cut to crumbs."""
MOST_IN_TEAM = 8
"""Blocks. With more, what is left over of the multiprocessors, and idle, would be more."""


class Queries(NamedTuple):
    """The queries of a sequence: those that share a KV head, of `heads_per_kv` heads and `q_len` tokens, in octets."""

    heads_per_kv: int
    """Query heads that share a KV head."""
    q_len: int
    mixed: bool = False
    """They are where `cu_seqlens` says; sequences with more or fewer are left out."""
    most_at_once: int = 1
    """Octets that a warp has registers for."""
    heads: int = 1
    """Neighbouring KV heads that a block works on; there is a multiple of so many."""
    team: int = 1
    """Blocks that work on the same tokens, each on other bundles; there is a multiple of so many of these."""

    @property
    def per_head(self) -> int:
        """Queries of a KV head."""
        return self.heads_per_kv * self.q_len

    @property
    def octets_per_head(self) -> int:
        """Behind the last query others are made up, so that warps have as many octets each."""
        octets = -(-self.per_head // 8)
        return -(-octets // self.at_once) * self.at_once

    @property
    def per_octet(self) -> int:
        return min(8, self.per_head)

    @property
    def at_once(self) -> int:
        """Octets of a head that a warp works on: it loads K and V once for all of them."""
        return min(self.most_at_once, -(-self.per_head // 8))

    @property
    def sharing(self) -> int:
        """Warps that work on the same tokens of a bundle, each on other octets of it."""
        return gcd(WARPS, self.octets_per_head // self.at_once * self.heads)

    @property
    def octets(self) -> int:
        """Of a bundle."""
        return self.sharing * self.at_once

    @property
    def per_bundle(self) -> int:
        return self.octets * self.per_octet

    @property
    def token_warps(self) -> int:
        """Warps of a block that work on the same octets, and on different tokens."""
        return WARPS // self.sharing

    def bundles(self, kv_heads: int) -> int:
        """Of a sequence."""
        return kv_heads * self.octets_per_head // self.octets

    def in_teams(self, kv_heads: int) -> Queries:
        """The same, worked on in the largest teams that there can be."""
        bundles = self.bundles(kv_heads)
        return self._replace(team=max(size for size in range(1, MOST_IN_TEAM + 1) if bundles % size == 0))

    def grid(self, blocks: int) -> int:
        """Of so many blocks those that are in whole teams; at least one team."""
        return max(blocks // self.team, 1) * self.team


class Lengths(NamedTuple):
    """What the amount of work follows from."""

    cu_seqlens: int
    seq_lens: int
    starts: int
    window: int
    rounds: int
    """Bundles of a sequence that a block of a team works on, one after the other."""
    groups: Groups


class Share(NamedTuple):
    """The units of a team of blocks."""

    number: int
    member: int
    """This block's number in its team."""
    size: int
    """Units of every share, but for the last."""
    begin: int
    end: int
    sequence: int
    """The one it begins with."""
    before: int
    """Units of those before."""


class Piece(NamedTuple):
    """What a share has of one sequence and bundle. Units are counted over the whole batch."""

    sequence: int
    first: int
    """The sequence's first token that its queries see."""
    last: int
    """Its last token."""
    round: int
    """Of the sequence's."""
    bundle: int
    """The bundle's number in its sequence."""
    bundle_begin: int
    """The bundle's first unit, and the one that it ends before."""
    bundle_end: int
    begin: int
    """The piece's first unit, and the one that it ends before."""
    end: int
    token: int
    """The piece's first token, and the one that it ends before."""
    token_end: int


def make_shares(queries: Queries, windowed: bool, cascaded: bool) -> tuple[Any, Any, Any, Any]:
    """Functions for kernels: this block's share, the piece that a unit begins, the sequence after one, and whether one
    is empty."""
    q_len, mixed, team = queries.q_len, queries.mixed, queries.team
    prefix_of = make_prefix_of(q_len)

    @inlined
    def span(sequence: int, lengths: Lengths) -> tuple[int, int]:
        """The first token that a sequence's queries see, and its length."""
        length = load_i32(lengths.seq_lens + sequence * 4)
        first = first_token(sequence, lengths.starts)
        if windowed:
            first = max(first, length - q_len + 1 - lengths.window)
        if cascaded:
            first = prefix_of(sequence, length, lengths.seq_lens, lengths.groups)
        return min(first, length), length

    @inlined
    def takes_part(sequence: int, lengths: Lengths) -> bool:
        """Whether it has as many queries as the kernel is for."""
        if mixed:
            begin = load_i32(lengths.cu_seqlens + sequence * 4)
            return load_i32(lengths.cu_seqlens + sequence * 4 + 4) - begin == q_len
        return True

    @inlined
    def units_of(sequence: int, lengths: Lengths) -> int:
        """One that sees none of its tokens has a unit as well: somebody must write its output."""
        if not takes_part(sequence, lengths):
            return 0
        first, length = span(sequence, lengths)
        if length <= 0:
            return 0
        return max((length + UNIT - 1) // UNIT - first // UNIT, 1) * lengths.rounds

    @inlined
    def is_empty(sequence: int, lengths: Lengths) -> bool:
        """Whether it takes part without a token."""
        return load_i32(lengths.seq_lens + sequence * 4) <= 0 and takes_part(sequence, lengths)

    total, locate = make_ragged(units_of)

    @inlined
    def share_of_block(batch: int, lengths: Lengths, lane: int) -> Share:
        """The lanes of a warp look together."""
        units, teams = total(batch, lengths, lane), cuda.gridDim.x // team
        size = max(divide(units + teams - 1, teams), LEAST)
        number = cuda.blockIdx.x // team
        begin = number * size
        sequence, before = locate(begin, batch, lengths, lane)
        return Share(number, cuda.blockIdx.x % team, size, begin, min(begin + size, units), sequence, before)

    @inlined
    def piece_at(unit: int, share: Share, sequence: int, before: int, lengths: Lengths) -> Piece:
        """From a unit of a share on; `before` are the units of the sequences before."""
        first, length = span(sequence, lengths)
        bundle_units = divide(units_of(sequence, lengths), lengths.rounds)
        turn = divide(unit - before, bundle_units)
        begin = before + turn * bundle_units
        piece_end = min(begin + bundle_units, share.end)
        origin = (first // UNIT - begin) * UNIT  # where unit 0 would lie
        return Piece(
            sequence=sequence,
            first=first,
            last=length - 1,
            round=turn,
            bundle=turn * team + share.member,
            bundle_begin=begin,
            bundle_end=begin + bundle_units,
            begin=unit,
            end=piece_end,
            token=origin + unit * UNIT,
            token_end=min(origin + piece_end * UNIT, length) if first < length else 0,
        )

    @inlined
    def sequence_after(sequence: int, share: Share, unit: int, lengths: Lengths) -> int:
        """The next sequence of a share, whose first unit this is."""
        sequence += 1
        while unit < share.end and units_of(sequence, lengths) == 0:
            sequence += 1
        return sequence

    return share_of_block, piece_at, sequence_after, is_empty
