"""What every attention kernel is told: when it is compiled, and, in structs of numbers, when it is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch

LATENT_DIM, LATENT_V_DIM = 576, 512
"""Of MLA's latents: numbers of K, of which the first are V as well."""


def v_dim_of(head_dim: int) -> int:
    """The width of V, and of outputs."""
    return LATENT_V_DIM if head_dim == LATENT_DIM else head_dim


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: torch.dtype
    head_dim: int
    heads_per_kv: int
    """Query heads that share a KV head."""
    q_len: int
    """Queries of each sequence; 0: they are where `cu_seqlens` says."""
    block_size: int
    """Tokens of a block in the block table; 0: there is none."""
    causal: bool
    windowed: bool
    softcapped: bool
    mixed: bool = False
    """Prompts and single tokens lie in one batch: decode leaves out the former, prefill the latter."""
    kv_dtype: torch.dtype | None = None
    """Of K and V of 8 bits, which have scales; None: theirs is `dtype`."""
    cascaded: bool = False
    """Groups of sequences share their first tokens: prefill's kernel reads these, decode's the rest."""


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
    partials: int
    """Room in which blocks of threads leave parts for each other."""
    counters: int
    """32-bit counters, which are 0 and are left 0."""


class Sizes(NamedTuple):
    """How much there is, but for what is fixed when a kernel is compiled."""

    batch: int
    kv_heads: int


class Strides(NamedTuple):
    """Bytes from one row of the block table to the next, and from one sequence, row (or block), token and head."""

    table: int
    q_batch: int
    q_token: int
    q_head: int
    k_row: int
    k_token: int
    k_head: int
    v_row: int
    v_token: int
    v_head: int
    out_batch: int
    out_token: int
    out_head: int
    k_scales_row: int
    k_scales_token: int
    k_scales_head: int
    v_scales_row: int
    v_scales_token: int
    v_scales_head: int


class Scoring(NamedTuple):
    """Which keys a query sees, and their weights: `exp2(outer * x)` of `x = q k`, of `tanh(inner * q k)` if capped."""

    window: int
    inner: float
    outer: float


class Groups(NamedTuple):
    """Which sequences share their first tokens; what the fields are, `cascade` says."""

    cu_groups: int
    prefix_lens: int
    parts: int
    """The address of the room in which the kernel of the prefixes leaves parts for decode's."""
    num_groups: int
    blocks: int
    """Blocks of threads that are to work on a KV head's prefixes, or one more for each of their blocks of queries."""
    most_parts: int
    """Of a query's prefix."""
    queries: int
    """Of a block of threads."""
    batch: int
    """Sequences that there are."""


NO_GROUPS = Groups(0, 0, 0, 0, 0, 0, 0, 0)


class Maps(NamedTuple):
    """Tensor maps of K and V, for boxes of tokens and for single ones; in a kernel their addresses."""

    k_boxes: bytes
    v_boxes: bytes
    k_tokens: bytes
    v_tokens: bytes
