"""Attention over MLA's latents: which queries and tokens a block of threads has, and how they come to shared memory.

There is one KV head, of 576 numbers, whose first 512 are V as well (DeepSeek-V2, arXiv 2405.04434, with the projections
of K and V absorbed in those of queries and outputs). So a sequence's queries are its tokens' heads, one token's behind
the other's: all of them read the same. A block of threads has 16, 32 or 64, and brings tiles of keys to shared memory,
once for both products, which `latent_mma` and `latent_wgmma` make.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .addressing import Row, Tokens, make_addressing
from .arguments import LATENT_DIM, LATENT_V_DIM, Strides, Variant
from .arithmetic import clamp
from .decode_shares import Queries
from .ptx import inlined
from .shared import copy_16
from .softmax import Visible

WARPS = 8
THREADS = 32 * WARPS
TOGETHER = THREADS // 8
"""Queries, or keys, that a block's threads copy at a time, eight of them each."""
PREFILL_QUERIES = 64
"""Of a block of threads."""


class Bundles(Queries):
    """The queries of a sequence in decode: 16, 32 or 64 are a bundle, on which all warps of a block work."""

    @property
    def at_once(self) -> int:
        return next((octets for octets in (2, 4) if self.per_head <= octets * 8), 8)

    @property
    def sharing(self) -> int:
        return 1


def bundles_of(variant: Variant) -> Queries:
    """How decode's queries are worked on."""
    return Bundles(variant.heads_per_kv, variant.q_len, variant.mixed).in_teams(1)


def queries_of(variant: Variant) -> int:
    """Queries of a block of threads."""
    return bundles_of(variant).per_bundle if variant.q_len else PREFILL_QUERIES


def dims_of(queries: int) -> int:
    """Of V, that a warp has, for its 16 queries."""
    return LATENT_V_DIM * queries // 16 // WARPS


def sums_of(queries: int) -> int:
    """Sums that a thread has."""
    return dims_of(queries) // 2


class Job(NamedTuple):
    """Queries of a sequence that a block of threads works on, and the tokens that they see."""

    q: int
    """The address of the sequence's first."""
    num_queries: int
    """The sequence's."""
    query: int
    """The block's first among them; behind the last there is it again."""
    k: Tokens
    row: Row
    key: int
    """Where the first tile begins."""
    begin: int
    """The first token that is there."""
    end: int


class Part(NamedTuple):
    """What a warp has of the work of a block of threads."""

    strip: int
    """Its 16 queries."""
    half: int
    """Of a tile's keys; on Hopper of K's numbers."""
    numbers: int
    """Which part of K's; on Hopper 0."""
    dims: int
    """The first of V that it has."""


def make_part_of(queries: int) -> Any:
    """A function for kernels: a warp's part of the work."""
    strips, dims = queries // 16, dims_of(queries)

    @inlined
    def part_of(warp: int) -> Part:
        number = warp // strips
        return Part(warp % strips, number % 2, number // 2, number * dims)

    return part_of


def make_copies(variant: Variant, queries: int, tile: int, line_bytes: int) -> tuple[Any, Any, Any, int]:
    """Functions for kernels, called by all of a block's threads: begin to copy queries; look up the tokens of a tile,
    and begin to copy them; and how many homes a thread looks up.

    Args:
        tile: keys of a tile.
        line_bytes: from one query's or key's first 16 bytes in shared memory to the next one's. 128: these are all that
            it has there, swizzled, and the next 128 bytes of all follow, as Hopper's products take them.
    """
    heads_per_kv, swizzled = variant.heads_per_kv, line_bytes == 128
    turns = -(-tile // TOGETHER)
    home_of, address_of = make_addressing(variant.block_size)

    @inlined
    def copy(to: int, lines: int, line: int, source: int, thread: int) -> None:
        """Of one of so many queries or keys the 16 bytes that are this thread's, of each 128: eight take turns."""
        vector = thread & 7
        source += vector * 16
        to += line * line_bytes + ((vector ^ (line & 7)) if swizzled else vector) * 16
        for i in range(LATENT_DIM // 64):
            copy_16(to + i * (lines * line_bytes if swizzled else 128), source + i * 128)

    @inlined
    def copy_queries(to: int, job: Job, strides: Strides, thread: int) -> None:
        for turn in range(-(-queries // TOGETHER)):
            line = turn * TOGETHER + (thread >> 3)
            if line < queries:
                number = min(job.query + line, job.num_queries - 1)
                source = job.q + number // heads_per_kv * strides.q_token + number % heads_per_kv * strides.q_head
                copy(to, queries, line, source, thread)

    @inlined
    def look_up(homes: Any, key: int, job: Job, thread: int) -> None:
        for turn in range(turns):
            token = key + turn * TOGETHER + (thread >> 3)
            homes[turn] = home_of(clamp(token, job.begin, job.end - 1), job.row)

    @inlined
    def copy_tile(to: int, homes: Any, key: int, job: Job, thread: int) -> None:
        """Those that are not there repeat one that is."""
        for turn in range(turns):
            line = turn * TOGETHER + (thread >> 3)
            if line < tile:
                token = clamp(key + line, job.begin, job.end - 1)
                copy(to, tile, line, address_of(token, homes[turn], job.k), thread)

    return copy_queries, look_up, copy_tile, turns


def make_visible_of(variant: Variant) -> Any:
    """A function for kernels: the keys that a lane's two queries see."""
    heads_per_kv, causal, windowed = variant.heads_per_kv, variant.causal, variant.windowed

    @inlined
    def visible_of(number: int, tokens: int, first: int, length: int, window: int) -> Visible:
        """Of the queries of this number and 8 further on, of so many tokens; behind the last there is it again."""
        high0 = length - tokens + 1 + min(number // heads_per_kv, tokens - 1) if causal else length
        high1 = length - tokens + 1 + min((number + 8) // heads_per_kv, tokens - 1) if causal else length
        low0 = max(first, high0 - window) if windowed else first
        low1 = max(first, high1 - window) if windowed else first
        return Visible(low0, high0, low1, high1)

    return visible_of
