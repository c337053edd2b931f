"""prefill, and what launches decode's kernel beside it: mixed and cascade.

`mixed`: prefill reads a sequence once for each head and block of queries, which is slow for a single query. So single
tokens go to decode's kernel, prompts to prefill's; the kernels see on the device which is which.

`cascade`: prefill's kernel takes the queries of a group of sequences together, reads their common prefix once, and
leaves sums and the softmax's state in fp32. Decode's kernel reads the rest of each sequence and adds those sums. That
is exact: softmaxes over two sets of tokens give one over both.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import prefill_mma, prefill_wgmma
from .arguments import ARGUMENTS, LATENT_DIM, Maps, Variant
from .checks import Geometry, Plans, check_indices, check_integer
from .compiler import Kernel
from .latents import PREFILL_QUERIES
from .launches import can_be_mapped, most_shared_bytes, multiprocessors
from .plain import plain_kernel
from .prefill_rings import QUERIES, THREADS, box_of, shared_of, tile_of
from .row_decode import (
    Call, Geometries, Keys, Plan, best_latents, check_call, check_decode, choose_kernel, decode_plan, define_operator,
    latent_kernel, launch, output_like, prepare, prepare_decode, variant_of,
)  # fmt: skip

ROOM_BYTES = 64 << 20  # for partial results of prefixes, unless one of each takes more


def prefill(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, rows: Tensor | None = None,
    starts: Tensor | None = None, block_table: Tensor | None = None, sinks: Tensor | None = None, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, causal: bool = True, scale: float | None = None,
    window: int = 0, softcap: float = 0.0, out: Tensor | None = None, kernel: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention of many new tokens per sequence, its last ones, on the current stream.

    Computes what `decode` does. K and V of the new tokens are in the cache already, behind those of earlier chunks or
    of a shared prefix. Arguments that are not described here, and limits of scores, are those of `decode`.

    Args:
        q: `[tokens, num_heads, head_dim]`: the new tokens of all sequences, one after the other.
        cu_seqlens: int32 `[batch + 1]`, from 0 on, where each sequence's tokens begin in `q`; tokens behind the last
            are ignored.
        seq_lens: int32 `[batch]`, tokens of each sequence, cached ones and new ones.
        causal: each token sees itself and those before it; False: all tokens of its sequence.
        window: each token sees itself and the `window - 1` tokens before it; 0: all before it. Causal only.
        kernel: "wgmma", on Hopper, for rows below 1 TiB, not in 8 bits; "mma", on the tensor cores of any GPU since
            Ampere; "plain", without, as always for fp32, which they would round, and for 8-bit K and V with queries
            other than bf16; "auto". For latents both "wgmma" and "mma" take heads in multiples of 16.

    Returns:
        `out`, or a new tensor like it. A query that sees no token gives zeros.

    Raises:
        ValueError, TypeError: as in `decode`; nothing is launched.
    """
    out = output_like(q) if out is None else out
    run = torch.ops.vmmkv.prefill if torch.compiler.is_compiling() else _prefill
    tensors = q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales
    run(*tensors, causal, scale, window, softcap, kernel)
    return out


def _prefill(*arguments: Any) -> None:
    launch(*_calls.find(arguments[:12], *arguments[12:]))


define_operator("prefill", _prefill, "bool causal, float? scale, int window, float softcap, str kernel")


@lru_cache(1024)  # prompts have many lengths
def _prepare(causal: bool, scale: float | None, window: int, softcap: float, name: str, geometry: Keys) -> Call:
    """Checks a call, chooses the kernel and prepares its launch."""
    given = check_prefill(geometry, causal, window)
    plan = prefill_plan(given, variant_of(given, window, softcap, general=not causal), choose_prefill(name, given))
    return prepare(plan, given, scale, window, softcap, causal)


_calls = Plans(_prepare)


def check_prefill(geometry: Keys, causal: bool, window: int) -> Geometries:
    """Raises `ValueError` or `TypeError` where tensors do not fit together."""
    given = check_call(geometry)
    if len(given.q.shape) != 3:
        raise ValueError(f"got q {list(given.q.shape)}; it must be [tokens, num_heads, head_dim]")
    if window > 0 and not causal:
        raise ValueError("got a window without causal; a window reaches back from each token")
    return given


def prefill_plan(given: Geometries, variant: Variant, name: str, max_prompts: int | None = None) -> Plan:
    """The plan by the kernel of this name, for so many prompts at most."""
    tokens, num_heads, _ = given.q.shape
    if name == "plain":
        return Plan(plain_kernel(variant), (tokens, num_heads))
    prompts = given.seq_lens.shape[0] if max_prompts is None else max_prompts
    # No batch has more blocks of queries, however its tokens are spread.
    if variant.head_dim == LATENT_DIM:
        kernel = latent_kernel(name, variant, most_shared_bytes(given.q.device))
        return Plan(kernel, (tokens * num_heads // PREFILL_QUERIES + prompts, 1))
    return fast_plan(name, variant, given, num_heads, tokens, prompts)


def choose_prefill(name: str, given: Geometries) -> str:
    """The kernel to use: what was asked for, or else the best."""
    best: tuple[str, ...] = ("wgmma", "mma") if can_be_mapped(given.k) and can_be_mapped(given.v) else ("mma",)
    if given.k_scales:
        best = ("mma",) if given.q.dtype == torch.bfloat16 else ()
    if given.q.shape[-1] == LATENT_DIM:
        best = best_latents(given, PREFILL_QUERIES)
    return choose_kernel(name, given, best)


def queries_of_block(name: str, variant: Variant) -> int:
    """Queries of a block of threads of the kernel on tensor cores of this name."""
    return 16 * prefill_mma.warps_of(variant.head_dim) if name == "mma" else QUERIES


def fast_plan(name: str, variant: Variant, given: Geometries, heads: int, queries: int, more: int) -> Plan:
    """The plan by the kernel on tensor cores of this name, where of each of so many heads there are no more jobs than
    all its queries fill, and so many more."""
    jobs = queries // queries_of_block(name, variant) + more
    if name == "mma":
        return Plan(mma_kernel(variant), (heads, jobs))
    blocks = min(heads * jobs, multiprocessors(given.q.device)), 1  # they take jobs by a counter
    box_tokens = box_of(tile_of(variant.head_dim), given.k.shape[1] if given.block_table else 0)
    return Plan(wgmma_kernel(variant), blocks, counters=1, box_tokens=box_tokens)


@cache
def mma_kernel(variant: Variant) -> Kernel:
    """The kernel on tensor cores."""
    threads = 32 * prefill_mma.warps_of(variant.head_dim)
    shared = prefill_mma.shared_of(variant.head_dim, variant.kv_dtype is not None)
    return Kernel(prefill_mma.make_prefill, (variant,), ARGUMENTS, threads, shared_bytes=shared.nbytes)


@cache
def wgmma_kernel(variant: Variant) -> Kernel:
    """The kernel for Hopper."""
    structs, shared_bytes = (Maps, *ARGUMENTS), shared_of(variant.head_dim).nbytes
    return Kernel(prefill_wgmma.make_prefill, (variant,), structs, THREADS, shared_bytes=shared_bytes, hopper=True)


def mixed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, rows: Tensor | None = None,
    starts: Tensor | None = None, block_table: Tensor | None = None, sinks: Tensor | None = None, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, scale: float | None = None, window: int = 0,
    softcap: float = 0.0, max_prompts: int | None = None, out: Tensor | None = None, kernel: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention of any number of new tokens per sequence, causal, on the current stream.

    Computes what `prefill` does, but faster if some sequences have one new token: a decode step beside prompts.
    Arguments, result and errors are those of `prefill`, and:

    Args:
        max_prompts: at least the number of sequences with more than one new token; outputs of further ones would be
            missing. It saves blocks of threads that find nothing to do: 32 a sequence, with 32 heads (none on Hopper).
            None: all may be prompts.

    Raises:
        ValueError, TypeError: also for `max_prompts` that is negative or no integer.
    """
    out = output_like(q) if out is None else out
    run = torch.ops.vmmkv.mixed if torch.compiler.is_compiling() else _mixed
    tensors = q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales
    run(*tensors, scale, window, softcap, kernel, max_prompts)
    return out


def _mixed(*arguments: Any) -> None:
    calls, addresses = _mixed_calls.find(arguments[:12], *arguments[12:])
    for call in calls:
        launch(call, addresses)


define_operator("mixed", _mixed, "float? scale, int window, float softcap, str kernel, int? max_prompts")


@lru_cache(1024)
def _prepare_mixed(
    scale: float | None, window: int, softcap: float, name: str, max_prompts: int | None, geometry: Keys
) -> list[Call]:
    """Checks a call and prepares launches of two kernels on tensor cores, or of the one without them."""
    if max_prompts is not None and check_integer("max_prompts", max_prompts) < 0:
        raise ValueError(f"got max_prompts {max_prompts}; it must not be negative")
    given = check_prefill(geometry, True, window)
    chosen = choose_prefill(name, given)
    plans = [prefill_plan(given, variant_of(given, window, softcap, general=True), chosen, max_prompts)]
    if chosen != "plain":
        variant = variant_of(given, window, softcap, general=True, q_len=1)
        plans.insert(0, decode_plan(given, variant, "mma" if name == "mma" else "auto"))
    return [prepare(plan, given, scale, window, softcap, mixed=True) for plan in plans]


_mixed_calls = Plans(_prepare_mixed)


def cascade(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, cu_groups: Tensor, prefix_lens: Tensor,
    rows: Tensor | None = None, block_table: Tensor | None = None, sinks: Tensor | None = None, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, scale: float | None = None, softcap: float = 0.0,
    out: Tensor | None = None, kernel: str = "auto",
) -> Tensor:  # fmt: skip
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
    tensors = q, k, v, out, None, seq_lens, rows, None, block_table, sinks, k_scales, v_scales, cu_groups, prefix_lens
    run(*tensors, scale, softcap, kernel)
    return out


def _cascade(*arguments: Any) -> None:
    calls, addresses = _cascade_calls.find(arguments[:14], *arguments[14:])
    if isinstance(calls, Call):
        launch(calls, addresses[:-2])
        return
    assert calls.own.workspace
    room = calls.own.workspace.room()
    groups = *addresses[-2:], room[0] + calls.parts
    launch(calls.prefix, addresses[:-2], room if calls.prefix.workspace else (), groups)
    launch(calls.own, addresses[:-2], room, groups)


define_operator("cascade", _cascade, "Tensor cu_groups, Tensor prefix_lens, float? scale, float softcap, str kernel")


class Calls(NamedTuple):
    """Both launches."""

    prefix: Call
    own: Call  # with room for partial results of prefixes behind its own
    parts: int  # where they begin in that room


@lru_cache(1024)
def _prepare_cascade(scale: float | None, softcap: float, name: str, geometry: Keys) -> Calls | Call:
    """Checks a call, whose last tensors say the groups, and prepares its launches; one: it is decode's alone."""
    of_tensors, of_groups = geometry[:-2], [Geometry._make(key) for key in geometry[-2:] if key]
    given = check_decode(of_tensors)
    cu_groups, prefix_lens = of_groups
    check_indices(given.q.device, prefix_lens.shape[:1], prefix_lens=prefix_lens)
    num_groups = prefix_lens.shape[0]
    check_indices(given.q.device, (num_groups + 1,), cu_groups=cu_groups)
    batch, q_len, num_heads, head_dim = given.q.shape
    kv_heads = given.k.shape[2]
    if head_dim == LATENT_DIM:
        raise ValueError(f"got heads of {LATENT_DIM}, of latents; cascade takes none, decode does")
    prefix_name = choose_prefill(name, given)
    if prefix_name == "plain" or not num_groups or not batch:
        return prepare_decode(scale, 0, softcap, "plain" if name == "plain" else "auto", of_tensors)
    variant = variant_of(given, 0, softcap, general=True)
    of_prefixes = variant._replace(q_len=0, prefixes=True)
    per_head, most_groups = batch * q_len * variant.heads_per_kv, min(num_groups, batch // 2)
    blocks = max(multiprocessors(given.q.device) // kv_heads, 1)
    # No batch has more blocks of queries, however it is grouped; each may end with a part that is shorter.
    prefix = fast_plan(prefix_name, of_prefixes, given, kv_heads, per_head, blocks + most_groups)
    part = batch * q_len * num_heads * (head_dim + 2) * 4  # bytes: sums of V, a maximum and a sum of weights, in fp32
    most_parts = max(min(blocks, ROOM_BYTES // part), 1)
    own = decode_plan(given, variant, more_bytes=most_parts * part)
    groups = None, None, None, num_groups, blocks, most_parts, queries_of_block(prefix_name, variant), batch
    plans = (prefix, False), (own, True)
    first, second = (prepare(plan, given, scale, 0, softcap, causal, False, groups) for plan, causal in plans)
    return Calls(first, second, own.partial_bytes - most_parts * part)


_cascade_calls = Plans(_prepare_cascade)
