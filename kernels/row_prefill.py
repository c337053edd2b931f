"""prefill, and what launches decode's kernel beside it: mixed and cascade.

`mixed`: prefill reads a sequence once for each head and block of queries, which is slow for a single query. So single
tokens go to decode's kernel, prompts to prefill's; the kernels see on the device which is which.

`cascade`: prefill's kernel takes the queries of a group of sequences together, reads their common prefix once, and
leaves sums and the softmax's state in fp32. Decode's kernel reads the rest of each sequence and adds those sums. That
is exact: softmaxes over two sets of tokens give one over both.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from .arguments import LATENT_DIM, Maps, Variant, structs_of
from .checks import Geometry, check_indices, check_integer
from .compiler import Kernel
from .latents import PREFILL_QUERIES
from .launches import can_be_mapped, multiprocessors
from .plain import plain_kernel
from .plans import (
    Call, Geometries, Keys, Plan, Plans, check_call, choose_kernel, launch, make_plan, output_like, prepare,
)  # fmt: skip
from . import prefill_mma, prefill_wgmma
from .prefill_rings import QUERIES, THREADS, box_of, shared_of, tile_of
from .prompts import prefix_bytes
from .row_decode import check_decode, mma_plan, prepare_decode, variant_of
from .row_latents import best_latents, latent_decode_plan, latent_prefill_plan


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Attention of many new tokens per sequence, its last ones, on the current stream.

    Computes what `decode` does. K and V of the new tokens are in the cache already, behind those of earlier chunks or
    of a shared prefix.

    On tensor cores scores, scaled, must stay below some 1e9 in size: with greater ones the result may be NaN or zeros,
    although all of Q, K and V are finite. `kernel="plain"` takes them all.

    Args:
        q: `[tokens, num_heads, head_dim]`, fp32, fp16 or bf16, `head_dim` 64, 80, 96, 128, 192 or 256: the new tokens
            of all sequences, one after the other. K and V have the same dtype, or 8 bits with scales. Or 576, for
            latents: see `decode`.
        k: `[max_sequences, max_seq_len, num_kv_heads, head_dim]`, any strides of rows, tokens and heads; with a block
            table `[num_blocks, block_size, num_kv_heads, head_dim]`.
        v: like `k`, with strides of its own.
        cu_seqlens: int32 `[batch + 1]`, from 0 on, where each sequence's tokens begin in `q`; tokens behind the last
            are ignored.
        seq_lens: int32 `[batch]`, tokens of each sequence, cached ones and new ones.
        rows: int32 `[batch]`, the row of each sequence (of the block table, if there is one); None: 0, 1, 2, ...
        starts: int32 `[batch]`, the first token of each sequence that may be read, as with left padding; None: 0.
        block_table: int32 `[max_sequences, max_blocks]`, the block of each run of `block_size` tokens, which is a
            multiple of 16; None: `k` and `v` hold rows.
        sinks: fp32 `[num_heads]`, a logit per head that takes part in the softmax and has no V, as in
            [gpt-oss](https://arxiv.org/abs/2508.10925); None: none.
        k_scales: fp32 `[max_sequences, max_seq_len, num_kv_heads]` (`[num_blocks, block_size, num_kv_heads]`), any
            strides, including 0: what K is multiplied by; required if `k` is e4m3fn or int8, otherwise None. See
            `quantized`.
        v_scales: likewise for V.
        causal: each token sees itself and those before it; False: all tokens of its sequence.
        scale: of the scores; None: `head_dim ** -0.5`. It must be given for latents.
        window: each token sees itself and the `window - 1` tokens before it; 0: all before it. Causal only.
        softcap: scores become `softcap * tanh(score / softcap)`, as in [Gemma 2](https://arxiv.org/abs/2408.00118),
            up to 10,000; 0: no cap.
        out: like `q`, as wide as `v`, takes the result; None: a new tensor.
        kernel: "wgmma", on Hopper, for rows below 1 TiB, not in 8 bits; "mma", on the tensor cores of any GPU since
            Ampere; "plain", without, as always for fp32, which they would round, and for 8-bit K and V with queries
            other than bf16; "auto". For latents both "wgmma" and "mma" take heads in multiples of 16.

    Returns:
        `out`, or a new tensor like it. A query that sees no token gives zeros.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or alignments do not fit, a number is out of range, or the
            `kernel` is not for these tensors or this GPU; nothing is launched.
    """
    out = output_like(q) if out is None else out
    run = torch.ops.vmmkv.prefill if torch.compiler.is_compiling() else _prefill
    run(
        q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales, causal, scale, window,
        softcap, kernel,
    )  # fmt: skip
    return out


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor | None, block_table: torch.Tensor | None,
    sinks: torch.Tensor | None, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None, causal: bool,
    scale: float | None, window: int, softcap: float, kernel: str,
) -> None:  # fmt: skip
    tensors = (q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales)
    call, addresses = _calls.find(tensors, causal, scale, window, softcap, kernel)
    launch(call, addresses)


torch.library.custom_op("vmmkv::prefill", _prefill, mutates_args=("out",))


@lru_cache(1024)  # prompts have many lengths
def _prepare(causal: bool, scale: float | None, window: int, softcap: float, name: str, geometry: Keys) -> Call:
    """Checks a call, chooses the kernel and prepares its launch."""
    plan = prefill_plan(causal, window > 0, softcap > 0, name, geometry)
    return prepare(plan, geometry, scale, window, softcap)


_calls = Plans(_prepare)


def prefill_plan(
    causal: bool, windowed: bool, softcapped: bool, name: str, geometry: Keys, mixed: bool = False,
    max_prompts: int | None = None,
) -> Plan:  # fmt: skip
    """Checks a call's geometry and chooses the kernel; on tensor cores it leaves single tokens of a mixed batch out, in
    which there are so many prompts at most."""
    given = check_call(geometry)
    q, k = given.q, given.k
    if len(q.shape) != 3:
        raise ValueError(f"got q {list(q.shape)}; it must be [tokens, num_heads, head_dim]")
    if windowed and not causal:
        raise ValueError("got a window without causal; a window reaches back from each token")
    tokens, num_heads, head_dim = q.shape
    block_size = k.shape[1] if given.block_table else 0
    kv_dtype = k.dtype if given.k_scales else None
    name = choose_prefill(name, given)
    mixed &= name != "plain"
    heads_per_kv = num_heads // k.shape[2]
    variant = Variant(q.dtype, head_dim, heads_per_kv, 0, block_size, causal, windowed, softcapped, mixed, kv_dtype)
    if name == "plain":
        return make_plan(given, plain_kernel(variant), (tokens, num_heads))
    prompts = given.seq_lens.shape[0] if max_prompts is None else max_prompts
    if head_dim == LATENT_DIM:
        return latent_prefill_plan(given, variant, name, prompts)
    kernel, queries, box_tokens = fast_kernel(name, variant)
    most = tokens // queries + prompts  # no batch has more blocks of queries, however its tokens are spread
    blocks, counters = grid_of(name, (num_heads, most), q.device)
    return make_plan(given, kernel, blocks, counters=counters, box_tokens=box_tokens)


def choose_prefill(name: str, given: Geometries) -> str:
    """The kernel to use: what was asked for, or else the best."""
    best: tuple[str, ...] = ("wgmma", "mma") if can_be_mapped(given.k) and can_be_mapped(given.v) else ("mma",)
    if given.k_scales:
        best = ("mma",) if given.q.dtype == torch.bfloat16 else ()
    if given.q.shape[-1] == LATENT_DIM:
        best = best_latents(given, PREFILL_QUERIES)
    return choose_kernel(name, given, best)


def fast_kernel(name: str, variant: Variant) -> tuple[Kernel, int, int]:
    """The kernel on tensor cores of this name, its queries of a block of threads, and its `box_tokens`."""
    if name == "mma":
        return mma_kernel(variant), 16 * prefill_mma.warps_of(variant.head_dim), 0
    box_tokens = box_of(tile_of(variant.head_dim), variant.block_size)
    return wgmma_kernel(variant), QUERIES, box_tokens


def grid_of(name: str, most: tuple[int, int], device: torch.device) -> tuple[tuple[int, int], int]:
    """The blocks of threads of a kernel, and its counters, where there are so many heads and jobs of one at most."""
    if name == "mma":
        return most, 0
    return (min(most[0] * most[1], multiprocessors(device)), 1), 1  # they take jobs by a counter


@cache
def mma_kernel(variant: Variant) -> Kernel:
    """The kernel on tensor cores."""
    threads = 32 * prefill_mma.warps_of(variant.head_dim)
    shared = prefill_mma.mma_shared_of(variant.head_dim, variant.kv_dtype is not None)
    structs = structs_of(variant)
    return Kernel(prefill_mma.make_prefill, (variant,), structs, threads, shared_bytes=shared.nbytes)


@cache
def wgmma_kernel(variant: Variant) -> Kernel:
    """The kernel for Hopper."""
    structs, shared = (Maps, *structs_of(variant)), shared_of(variant.head_dim)
    threads = THREADS
    return Kernel(prefill_wgmma.make_prefill, (variant,), structs, threads, shared_bytes=shared.nbytes, hopper=True)


def mixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    max_prompts: int | None = None,
    out: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
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
    indices = cu_seqlens, seq_lens, rows, starts, block_table
    run(q, k, v, out, *indices, sinks, k_scales, v_scales, scale, window, softcap, max_prompts, kernel)
    return out


def _mixed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor | None, block_table: torch.Tensor | None,
    sinks: torch.Tensor | None, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None, scale: float | None,
    window: int, softcap: float, max_prompts: int | None, kernel: str,
) -> None:  # fmt: skip
    tensors = (q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales)
    calls, addresses = _mixed_calls.find(tensors, scale, window, softcap, kernel, max_prompts)
    for call in calls:
        launch(call, addresses)


torch.library.custom_op("vmmkv::mixed", _mixed, mutates_args=("out",))


@lru_cache(1024)
def _prepare_mixed(
    scale: float | None, window: int, softcap: float, name: str, max_prompts: int | None, geometry: Keys
) -> list[Call]:
    """Checks a call, chooses its kernels and prepares their launches."""
    plans = _mixed_plans(window > 0, softcap > 0, name, geometry, max_prompts)
    return [prepare(plan, geometry, scale, window, softcap) for plan in plans]


_mixed_calls = Plans(_prepare_mixed)


def _mixed_plans(windowed: bool, softcapped: bool, name: str, geometry: Keys, max_prompts: int | None) -> list[Plan]:
    """Checks a call's geometry and chooses the kernels: two on tensor cores, or the one without them."""
    if max_prompts is not None and check_integer("max_prompts", max_prompts) < 0:
        raise ValueError(f"got max_prompts {max_prompts}; it must not be negative")
    prompts = prefill_plan(True, windowed, softcapped, name, geometry, True, max_prompts)
    variant, *_ = prompts.kernel.constants
    if not variant.mixed:
        return [prompts]
    dtype, head_dim, heads_per_kv, _, *others = variant
    given, variant = check_call(geometry), Variant(dtype, head_dim, heads_per_kv, 1, *others)
    if head_dim == LATENT_DIM:
        return [latent_decode_plan(given, variant, "mma" if name == "mma" else "auto"), prompts]
    return [mma_plan(given, variant), prompts]


ROOM_BYTES = 64 << 20  # for parts of prefixes, unless one part of each takes more


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, seq_lens: torch.Tensor,
    cu_groups: torch.Tensor, prefix_lens: torch.Tensor, rows: torch.Tensor | None, block_table: torch.Tensor | None,
    sinks: torch.Tensor | None, k_scales: torch.Tensor | None, v_scales: torch.Tensor | None, scale: float | None,
    softcap: float, kernel: str,
) -> None:  # fmt: skip
    tensors = (q, k, v, out, None, seq_lens, rows, None, block_table, sinks, k_scales, v_scales)
    calls, addresses = _cascade_calls.find((*tensors, cu_groups, prefix_lens), scale, softcap, kernel)
    if isinstance(calls, Call):
        launch(calls, addresses[:-2])
        return
    assert calls.own.workspace
    room = calls.own.workspace.room()
    groups = *addresses[-2:], room[0] + calls.parts
    launch(calls.prefix, addresses[:-2], room if calls.prefix.workspace else (), groups)
    launch(calls.own, addresses[:-2], room, groups)


torch.library.custom_op("vmmkv::cascade", _cascade, mutates_args=("out",))


class Calls(NamedTuple):
    """Both launches."""

    prefix: Call
    own: Call  # with room for the parts of prefixes behind its own
    parts: int  # where they begin in that room


@lru_cache(1024)
def _prepare_cascade(scale: float | None, softcap: float, name: str, geometry: Keys) -> Calls | Call:
    """Checks a call, whose last tensors say the groups, chooses the kernels and prepares their launches; one: it is
    decode's alone."""
    of_tensors, of_groups = geometry[:-2], [Geometry._make(key) for key in geometry[-2:] if key]
    given = check_decode(of_tensors)
    num_groups = check_groups(given, *of_groups)
    q, k = given.q, given.k
    if q.shape[-1] == LATENT_DIM:
        raise ValueError(f"got heads of {LATENT_DIM}, of latents; cascade takes none, decode does")
    batch, q_len, num_heads, head_dim = q.shape
    prefix_name = choose_prefill(name, given)
    if prefix_name == "plain" or not num_groups or not batch:
        return prepare_decode(scale, 0, softcap, "plain" if name == "plain" else "auto", of_tensors)
    variants = [variant_of(given, False, softcap > 0, causal=each, cascaded=True) for each in (False, True)]
    kernel, queries, box_tokens = fast_kernel(prefix_name, variants[0])
    per_head, most_groups = batch * q_len * variants[0].heads_per_kv, min(num_groups, batch // 2)
    blocks = max(multiprocessors(q.device) // k.shape[2], 1)
    # No batch has more blocks of queries, however it is grouped; each may end with a part that is shorter.
    most = k.shape[2], blocks + per_head // queries + most_groups
    grid, counters = grid_of(prefix_name, most, q.device)
    prefix = make_plan(given, kernel, grid, counters=counters, box_tokens=box_tokens)
    part = prefix_bytes(batch * q_len, num_heads, head_dim)
    most_parts = max(min(blocks, ROOM_BYTES // part), 1)
    own = mma_plan(given, variants[1], most_parts * part)
    groups = None, None, None, num_groups, blocks, most_parts, queries, batch
    first, second = (prepare(plan, of_tensors, scale, 0, softcap, groups) for plan in (prefix, own))
    return Calls(first, second, own.partial_bytes - most_parts * part)


_cascade_calls = Plans(_prepare_cascade)


def check_groups(given: Geometries, cu_groups: Geometry, prefix_lens: Geometry) -> int:
    """How many groups there are; `ValueError` or `TypeError` if the two do not fit together."""
    check_indices(given.q.device, prefix_lens.shape[:1], prefix_lens=prefix_lens)
    check_indices(given.q.device, (prefix_lens.shape[0] + 1,), cu_groups=cu_groups)
    return prefix_lens.shape[0]
