"""decode: attention of the newest tokens of each sequence to all of its tokens, in rows or by a block table."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from .arguments import LATENT_DIM, Variant, structs_of
from .compiler import Kernel
from .decode_mma import blocks_that_fit, make_decode, queries_of, shared_bytes_of
from .decode_parts import part_bytes
from .decode_products import THREADS, Queries
from .latents import latent_queries
from .launches import multiprocessors
from .plain import plain_kernel
from .plans import (
    Call, Geometries, Keys, Plan, Plans, check_call, choose_kernel, define_operator, launch, output_like, prepare,
)  # fmt: skip
from .row_latents import best_latents, latent_decode_plan

MAX_QUERIES = 8  # tokens of a sequence that `decode` takes; more are a prompt


def decode(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, rows: Tensor | None = None, starts: Tensor | None = None,
    block_table: Tensor | None = None, sinks: Tensor | None = None, *, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None, scale: float | None = None, window: int = 0, softcap: float = 0.0,
    out: Tensor | None = None, kernel: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention of one to eight new tokens per sequence, causal among them, on the current stream.

    For each head `softmax(scale * q @ k.T) @ v` ([Attention Is All You Need](https://arxiv.org/abs/1706.03762)), where
    `num_heads / num_kv_heads` neighbouring query heads read one KV head ([GQA](https://arxiv.org/abs/2305.13245)).

    K and V of the new tokens are in the cache already. Lengths are data on the device: one captured graph serves all.

    On tensor cores scores, scaled, must stay below some 1e9 in size: with larger ones the result may be NaN or zeros,
    although all of Q, K and V are finite. If K and V are in 8 bits, what they stand for must be below some 1e7 in K,
    for the same reason, and above some 1e-20 in V, or it is lost. `kernel="plain"` takes them all.

    Args:
        q: `[batch, q_len, num_heads, head_dim]`, fp32, fp16 or bf16; `q_len` up to 8, `head_dim` 64, 80, 96, 128, 192
            or 256. K and V have the same dtype, or 8 bits with scales. Or 576, for MLA's latents
            ([DeepSeek-V2](https://arxiv.org/abs/2405.04434), its projections absorbed in queries and outputs): one KV
            head, not in 8 bits, of which the first 512 numbers are V: `v` must be the view `k[..., :512]`.
        k: `[max_sequences, max_seq_len, num_kv_heads, head_dim]`, any strides of rows, tokens and heads; with a block
            table `[num_blocks, block_size, num_kv_heads, head_dim]`.
        v: like `k`, with strides of its own.
        seq_lens: int32 `[batch]`, tokens of each sequence, the new ones included; an empty sequence gives zeros.
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
        scale: of the scores; None: `head_dim ** -0.5`. It must be given for latents, where it follows from the heads
            that they stand for.
        window: each token sees itself and the `window - 1` tokens before it; 0: all before it.
        softcap: scores become `softcap * tanh(score / softcap)`, as in [Gemma 2](https://arxiv.org/abs/2408.00118),
            up to 10,000; 0: no cap.
        out: like `q`, as wide as `v`, takes the result; None: a new tensor.
        kernel: "mma", on tensor cores; "plain", without, as always for fp32, which they would round, and for 8-bit K
            and V with queries other than bf16; "auto". For latents "mma" takes heads in multiples of 16, and "wgmma",
            on Hopper, more than 32 queries a sequence.

    Returns:
        `out`, or a new tensor like it.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or alignments do not fit, a number is out of range, or the
            `kernel` is not for these tensors or this GPU; nothing is launched.
    """
    out = output_like(q) if out is None else out
    run = torch.ops.vmmkv.decode if torch.compiler.is_compiling() else _decode
    tensors = q, k, v, out, None, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales
    run(*tensors, scale, window, softcap, kernel)
    return out


def _decode(*arguments: Any) -> None:
    launch(*_calls.find(arguments[:12], *arguments[12:]))


define_operator("decode", _decode, "float? scale, int window, float softcap, str kernel")


@lru_cache(1024)
def prepare_decode(scale: float | None, window: int, softcap: float, name: str, geometry: Keys) -> Call:
    """Checks a call, chooses the kernel and prepares its launch."""
    given = check_decode(geometry)
    variant = variant_of(given, window > 0, softcap > 0)
    latents = variant.head_dim == LATENT_DIM
    best: tuple[str, ...] = ("mma",) if variant.kv_dtype is None or variant.dtype == torch.bfloat16 else ()
    name = choose_kernel(name, given, best_latents(given, latent_queries(variant)) if latents else best)
    if name == "plain":
        batch, q_len, num_heads, _ = given.q.shape
        plan = Plan(plain_kernel(variant), (batch * q_len, num_heads))
    else:
        plan = latent_decode_plan(given, variant, name) if latents else decode_plan(given, variant)
    return prepare(plan, given, scale, window, softcap)


_calls = Plans(prepare_decode)


def check_decode(geometry: Keys) -> Geometries:
    """Raises `ValueError` or `TypeError` where tensors do not fit together."""
    given = check_call(geometry)
    q = given.q
    if len(q.shape) != 4 or not 1 <= q.shape[1] <= MAX_QUERIES or q.shape[:1] != given.seq_lens.shape:
        raise ValueError(
            f"got q {list(q.shape)} for {list(given.seq_lens.shape)} sequences; "
            f"it must be [batch, 1 to {MAX_QUERIES}, num_heads, head_dim]"
        )
    return given


def variant_of(
    given: Geometries, windowed: bool, softcapped: bool, *, causal: bool = True, cascaded: bool = False
) -> Variant:
    """The constants of a kernel; `q_len` is 0 where `cu_seqlens` is given."""
    *_, num_heads, head_dim = given.q.shape
    q_len, heads_per_kv = 0 if given.cu_seqlens else given.q.shape[1], num_heads // given.k.shape[2]
    block_size, kv_dtype = given.k.shape[1] if given.block_table else 0, given.k.dtype if given.k_scales else None
    kind = causal, windowed, softcapped, False, kv_dtype, cascaded
    return Variant(given.q.dtype, head_dim, heads_per_kv, q_len, block_size, *kind)


def decode_plan(given: Geometries, variant: Variant, more_bytes: int = 0) -> Plan:
    """The plan of a call on tensor cores, with so many bytes of room behind that for its own partial results."""
    kv_heads = given.k.shape[2]
    queries = queries_of(variant, kv_heads)
    blocks = queries.grid(multiprocessors(given.q.device) * blocks_that_fit(variant, queries))
    partial_bytes = 2 * blocks * part_bytes(queries, variant.head_dim) + more_bytes
    counters = given.seq_lens.shape[0] * queries.bundles(kv_heads)
    return Plan(mma_kernel(variant, queries), (blocks, 1), partial_bytes, counters)


@cache
def mma_kernel(variant: Variant, queries: Queries) -> Kernel:
    """The kernel on tensor cores."""
    fit, room = blocks_that_fit(variant, queries), shared_bytes_of(variant, queries)
    structs = structs_of(variant)
    return Kernel(make_decode, (variant, queries), structs, THREADS, blocks_per_sm=fit, shared_bytes=room)
