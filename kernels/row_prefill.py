"""prefill: attention of prompts, or of chunks of them, to all of their tokens, in rows or by a block table."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from . import attention, latents, plain, prefill_mma, prefill_wgmma, row_latents, wgmma_shapes
from .arguments import LATENT_DIM, Maps, Variant
from .attention import Call, Geometries, Keys, Plan
from .compiler import Kernel
from .plans import Plans
from .tensor_map import can_be_mapped
from .tile_copies import box_of
from .workspace import multiprocessors


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
    out = attention.output_like(q) if out is None else out
    run = torch.ops.vmmkv.prefill if torch.compiler.is_compiling() else _prefill
    run(
        q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales, causal, scale, window,
        softcap, kernel,
    )  # fmt: skip
    return out


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor | None,
    block_table: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    window: int,
    softcap: float,
    kernel: str,
) -> None:
    tensors = (q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales)
    call, addresses = _calls.find(tensors, causal, scale, window, softcap, kernel)
    attention.launch(call, addresses)


torch.library.custom_op("vmmkv::prefill", _prefill, mutates_args=("out",))


@lru_cache(1024)  # prompts have many lengths
def _prepare(causal: bool, scale: float | None, window: int, softcap: float, name: str, geometry: Keys) -> Call:
    """Checks a call, chooses the kernel and prepares its launch."""
    plan = make_plan(causal, window > 0, softcap > 0, name, geometry)
    return attention.prepare(plan, geometry, scale, window, softcap)


_calls = Plans(_prepare)


def make_plan(
    causal: bool,
    windowed: bool,
    softcapped: bool,
    name: str,
    geometry: Keys,
    mixed: bool = False,
    max_prompts: int | None = None,
) -> Plan:
    """Checks a call's geometry and chooses the kernel; on tensor cores it leaves single tokens of a mixed batch out, in
    which there are so many prompts at most."""
    given = attention.check(geometry)
    q, k = given.q, given.k
    if len(q.shape) != 3:
        raise ValueError(f"got q {list(q.shape)}; it must be [tokens, num_heads, head_dim]")
    if windowed and not causal:
        raise ValueError("got a window without causal; a window reaches back from each token")
    tokens, num_heads, head_dim = q.shape
    block_size = k.shape[1] if given.block_table else 0
    kv_dtype = k.dtype if given.k_scales else None
    name = choose(name, given)
    mixed &= name != "plain"
    heads_per_kv = num_heads // k.shape[2]
    variant = Variant(q.dtype, head_dim, heads_per_kv, 0, block_size, causal, windowed, softcapped, mixed, kv_dtype)
    if name == "plain":
        return attention.make_plan(given, plain.plain_kernel(variant), (tokens, num_heads))
    prompts = given.seq_lens.shape[0] if max_prompts is None else max_prompts
    if head_dim == LATENT_DIM:
        return row_latents.prefill_plan(given, variant, name, prompts)
    kernel, queries, box_tokens = fast_kernel(name, variant)
    most = tokens // queries + prompts  # no batch has more blocks of queries, however its tokens are spread
    blocks, counters = grid_of(name, (num_heads, most), q.device)
    return attention.make_plan(given, kernel, blocks, counters=counters, box_tokens=box_tokens)


def choose(name: str, given: Geometries) -> str:
    """The kernel to use: what was asked for, or else the best."""
    best: tuple[str, ...] = ("wgmma", "mma") if can_be_mapped(given.k) and can_be_mapped(given.v) else ("mma",)
    if given.k_scales:
        best = ("mma",) if given.q.dtype == torch.bfloat16 else ()
    if given.q.shape[-1] == LATENT_DIM:
        best = row_latents.best(given, latents.PREFILL_QUERIES)
    return attention.choose(name, given, best)


def fast_kernel(name: str, variant: Variant) -> tuple[Kernel, int, int]:
    """The kernel on tensor cores of this name, its queries of a block of threads, and its `box_tokens`."""
    if name == "mma":
        return mma_kernel(variant), 16 * prefill_mma.warps_of(variant.head_dim), 0
    box_tokens = box_of(wgmma_shapes.tile_of(variant.head_dim), variant.block_size)
    return wgmma_kernel(variant), wgmma_shapes.QUERIES, box_tokens


def grid_of(name: str, most: tuple[int, int], device: torch.device) -> tuple[tuple[int, int], int]:
    """The blocks of threads of a kernel, and its counters, where there are so many heads and jobs of one at most."""
    if name == "mma":
        return most, 0
    return (min(most[0] * most[1], multiprocessors(device)), 1), 1  # they take jobs by a counter


@cache
def mma_kernel(variant: Variant) -> Kernel:
    """The kernel on tensor cores."""
    threads = 32 * prefill_mma.warps_of(variant.head_dim)
    shared = prefill_mma.shared_of(variant.head_dim, variant.kv_dtype is not None)
    structs = attention.structs_of(variant)
    return Kernel(prefill_mma.make_prefill, (variant,), structs, threads, shared_bytes=shared.nbytes)


@cache
def wgmma_kernel(variant: Variant) -> Kernel:
    """The kernel for Hopper."""
    structs, shared = (Maps, *attention.structs_of(variant)), wgmma_shapes.shared_of(variant.head_dim)
    threads = wgmma_shapes.THREADS
    return Kernel(prefill_wgmma.make_prefill, (variant,), structs, threads, shared_bytes=shared.nbytes, hopper=True)
