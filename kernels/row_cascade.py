"""cascade: decode of sequences that begin with the same tokens, which are read once for a group of sequences.

Two launches. The first is prefill's kernel, which takes the queries of a group together, so that a tile of the prefix
is read once for all of them; it leaves sums and their softmax's state, in fp32. The second is decode's, which reads
what is a sequence's own and adds the first's sums. That is exact: softmaxes over two sets of tokens give one over both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from . import attention, prefixes, row_decode, row_prefill
from .arguments import LATENT_DIM
from .attention import Call, Geometries, Keys
from .checks import Geometry, check_indices
from .plans import Plans
from .workspace import multiprocessors

ROOM_BYTES = 64 << 20
"""For parts of prefixes, unless one part of each takes more."""


def cascade(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_groups: torch.Tensor,
    prefix_lens: torch.Tensor,
    rows: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Attention of one to eight new tokens per sequence, for groups of sequences that begin with the same tokens.

    Computes what `decode` does, but reads what a group shares only once, in the row of its first sequence; the other
    rows must hold the same ([Hydragen](https://arxiv.org/abs/2402.05099): parts are merged by their maxima and sums of
    weights). Groups, like lengths, are data on the device: one captured graph serves all. Arguments, result and errors
    are those of `decode`, without `starts`, `window` (a window sees little of a prefix: use `decode` for such layers)
    and latents, and with:

    Args:
        cu_groups: int32 `[groups + 1]`, where each group's sequences begin in the batch; sequences before the first
            group and behind the last are in none, and groups may be empty. One that goes beyond the batch shares
            nothing.
        prefix_lens: int32 `[groups]`, the number of tokens that each group shares; 0: none. A sequence with fewer
            tokens before its new ones shares nothing, nor does a group whose first sequence has fewer.
        kernel: what reads the prefixes: "wgmma", "mma" or "auto", as in `prefill`. "plain", and whenever `prefill`
            would use that: `decode`'s kernel, which reads each row.
    """
    out = torch.empty_like(q) if out is None else out
    run = torch.ops.vmmkv.cascade if torch.compiler.is_compiling() else _cascade
    indices = seq_lens, cu_groups, prefix_lens, rows, block_table
    run(q, k, v, out, *indices, sinks, k_scales, v_scales, scale, softcap, kernel)
    return out


def _cascade(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_groups: torch.Tensor,
    prefix_lens: torch.Tensor,
    rows: torch.Tensor | None,
    block_table: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    kernel: str,
) -> None:
    tensors = (q, k, v, out, None, seq_lens, rows, None, block_table, sinks, k_scales, v_scales)
    calls, addresses = _calls.find((*tensors, cu_groups, prefix_lens), scale, softcap, kernel)
    if isinstance(calls, Call):
        attention.launch(calls, addresses[:-2])
        return
    assert calls.own.workspace
    room = calls.own.workspace.room()
    groups = *addresses[-2:], room[0] + calls.parts
    attention.launch(calls.prefix, addresses[:-2], room if calls.prefix.workspace else (), groups)
    attention.launch(calls.own, addresses[:-2], room, groups)


torch.library.custom_op("vmmkv::cascade", _cascade, mutates_args=("out",))


class Calls(NamedTuple):
    """Both launches."""

    prefix: Call
    own: Call
    """With room for the parts of prefixes behind its own."""
    parts: int
    """Where they begin in that room."""


@lru_cache(1024)
def _prepare(scale: float | None, softcap: float, name: str, geometry: Keys) -> Calls | Call:
    """Checks a call, whose last tensors say the groups, chooses the kernels and prepares their launches; one: it is
    decode's alone."""
    of_tensors, of_groups = geometry[:-2], [Geometry._make(key) for key in geometry[-2:] if key]
    given = row_decode.check(of_tensors)
    num_groups = check_groups(given, *of_groups)
    q, k = given.q, given.k
    if q.shape[-1] == LATENT_DIM:
        raise ValueError(f"got heads of {LATENT_DIM}, of latents; cascade takes none, decode does")
    batch, q_len, num_heads, head_dim = q.shape
    prefix_name = row_prefill.choose(name, given)
    if prefix_name == "plain" or not num_groups or not batch:
        return row_decode.prepare(scale, 0, softcap, "plain" if name == "plain" else "auto", of_tensors)
    variants = [row_decode.variant_of(given, False, softcap > 0, causal=each, cascaded=True) for each in (False, True)]
    kernel, queries, box_tokens = row_prefill.fast_kernel(prefix_name, variants[0])
    per_head, most_groups = batch * q_len * variants[0].heads_per_kv, min(num_groups, batch // 2)
    blocks = max(multiprocessors(q.device) // k.shape[2], 1)
    # No batch has more blocks of queries, however it is grouped; each may end with a part that is shorter.
    most = k.shape[2], blocks + per_head // queries + most_groups
    grid, counters = row_prefill.grid_of(prefix_name, most, q.device)
    prefix = attention.make_plan(given, kernel, grid, counters=counters, box_tokens=box_tokens)
    part = prefixes.part_bytes(batch * q_len, num_heads, head_dim)
    most_parts = max(min(blocks, ROOM_BYTES // part), 1)
    own = row_decode.make_plan(given, variants[1], most_parts * part)
    groups = None, None, None, num_groups, blocks, most_parts, queries, batch
    first, second = (attention.prepare(plan, of_tensors, scale, 0, softcap, groups) for plan in (prefix, own))
    return Calls(first, second, own.partial_bytes - most_parts * part)


_calls = Plans(_prepare)


def check_groups(given: Geometries, cu_groups: Geometry, prefix_lens: Geometry) -> int:
    """How many groups there are; `ValueError` or `TypeError` if the two do not fit together."""
    check_indices(given.q.device, prefix_lens.shape[:1], prefix_lens=prefix_lens)
    check_indices(given.q.device, (prefix_lens.shape[0] + 1,), cu_groups=cu_groups)
    return prefix_lens.shape[0]
