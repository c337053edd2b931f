"""decode: attention of the newest tokens of each sequence to all of its tokens, in rows or by a block table.

And what all attention has in common: checks, the choice of a kernel, launches, and plans of decode, also for latents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import ARGUMENTS, LATENT_DIM, LATENT_V_DIM, NO_GROUPS, Maps, Variant
from .checks import (
    ALIGNMENT, Geometry, Key, Plans, check_attention, check_block_table, check_indices, check_integer, check_sinks,
    refuse_alignment,
)  # fmt: skip
from .compiler import Kernel
from .decode_mma import make_decode, queries_of, registers_for, shared_bytes_of
from .decode_parts import part_bytes
from .decode_products import THREADS, Queries
from .latent_products import WGMMA_QUERIES, WGMMA_SHARED, mma_blocks_per_sm, mma_shared_of, slots_for
from .latents import THREADS as LATENT_THREADS
from .latents import bundles_of, latent_queries
from .launches import Launch, Workspace, index_of, maps_of, most_shared_bytes, multiprocessors
from .memory import LOG2E
from .plain import plain_kernel
from .row_latents import make_decode as make_latent_decode
from .row_latents import make_prefill as make_latent_prefill

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


@lru_cache(1024)
def prepare_decode(scale: float | None, window: int, softcap: float, name: str, geometry: Keys) -> Call:
    """Checks a call, chooses the kernel and prepares its launch."""
    given = check_decode(geometry)
    variant = variant_of(given, window, softcap)
    latents = variant.head_dim == LATENT_DIM
    best: tuple[str, ...] = ("mma",) if variant.kv_dtype is None or variant.dtype == torch.bfloat16 else ()
    name = choose_kernel(name, given, best_latents(given, latent_queries(variant)) if latents else best)
    if name == "plain":
        batch, q_len, num_heads, _ = given.q.shape
        plan = Plan(plain_kernel(variant), (batch * q_len, num_heads))
    else:
        plan = decode_plan(given, variant, name)
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


def variant_of(given: Geometries, window: int, softcap: float, general: bool = False, q_len: int = 0) -> Variant:
    """The constants of a kernel: of decode if there is a `q_len`, or a dimension of it. A general kernel of decode is
    for all numbers of queries that make as many octets, so far as these are few."""
    *_, num_heads, head_dim = given.q.shape
    heads_per_kv, kv_dtype = num_heads // given.k.shape[2], given.k.dtype if given.k_scales else None
    q_len = q_len if given.cu_seqlens else given.q.shape[1]
    general = general or q_len > 1 or window != 0 or softcap != 0 or given.block_table is not None
    variant = Variant(given.q.dtype, head_dim, heads_per_kv, q_len, kv_dtype, general)
    if not (general and q_len):
        return variant
    # With more heads, three octets would be one more kernel beside those for five to eight queries.
    sizes: tuple[int, ...] = (8, 16, 24, 32) if heads_per_kv <= 4 else (8, 16, 32)
    if head_dim == LATENT_DIM:
        sizes = (16, 32, 64)
    elif len(registers_for(variant)) == 1:  # a warp works on one octet at a time: one without queries costs as much
        sizes = (8,)
    columns = next((size for size in sizes if heads_per_kv * q_len <= size), sizes[-1])
    return variant._replace(q_len=min(-(-heads_per_kv * q_len // columns) * columns // heads_per_kv, MAX_QUERIES))


def decode_plan(given: Geometries, variant: Variant, name: str = "auto", more_bytes: int = 0) -> Plan:
    """The plan of a call on tensor cores, with so many bytes of room behind that for its own partial results. Of
    latents by the kernel of this name."""
    if variant.head_dim == LATENT_DIM:
        return latent_decode_plan(given, variant, name)
    kv_heads = given.k.shape[2]
    queries = queries_of(variant, kv_heads)
    kernel, counters = mma_kernel(variant, queries), given.seq_lens.shape[0] * queries.bundles(kv_heads)
    blocks = queries.grid(multiprocessors(given.q.device) * kernel.blocks_per_sm)
    return Plan(kernel, (blocks, 1), 2 * blocks * part_bytes(queries, variant.head_dim) + more_bytes, counters)


@cache
def mma_kernel(variant: Variant, queries: Queries) -> Kernel:
    """The kernel on tensor cores."""
    fit, room = registers_for(variant)[queries.at_once - 1], shared_bytes_of(variant, queries)
    return Kernel(make_decode, (variant, queries), ARGUMENTS, THREADS, blocks_per_sm=fit, shared_bytes=room)


def best_latents(given: Geometries, queries: int) -> tuple[str, ...]:
    """The kernels on tensor cores for a call with so many queries in a block of threads. Heads must fill matrices of
    16, and shared memory must have room for two tiles."""
    room = slots_for(queries, most_shared_bytes(given.q.device)) >= 2
    if given.q.shape[-2] % 16 or not room:
        return ()
    return ("wgmma", "mma") if queries == WGMMA_QUERIES else ("mma",)


def latent_decode_plan(given: Geometries, variant: Variant, name: str) -> Plan:
    """The plan of a decode on tensor cores, by the kernel of this name; "auto": by the best."""
    bundles = bundles_of(variant)
    name = choose_kernel(name, given, best_latents(given, bundles.per_bundle))
    kernel = latent_kernel(name, variant, most_shared_bytes(given.q.device))
    blocks = bundles.grid(multiprocessors(given.q.device) * kernel.blocks_per_sm)
    counters = given.seq_lens.shape[0] * bundles.bundles(1)
    return Plan(kernel, (blocks, 1), 2 * blocks * part_bytes(bundles, LATENT_V_DIM), counters)


@cache
def latent_kernel(name: str, variant: Variant, shared_bytes: int) -> Kernel:
    """The kernel on tensor cores of this name, for devices with so much shared memory a block: of decode where the
    variant says how many queries there are, else of prefill."""
    factory = make_latent_decode if variant.q_len else make_latent_prefill
    if name == "wgmma":
        return Kernel(factory, (variant, 0), ARGUMENTS, LATENT_THREADS, shared_bytes=WGMMA_SHARED.nbytes, hopper=True)
    queries = latent_queries(variant)
    slots, blocks_per_sm = slots_for(queries, shared_bytes), mma_blocks_per_sm(queries, shared_bytes)
    room = mma_shared_of(queries, slots).nbytes
    return Kernel(factory, (variant, slots), ARGUMENTS, LATENT_THREADS, blocks_per_sm=blocks_per_sm, shared_bytes=room)


LARGEST_SOFTCAP = 10_000  # scores are this times a `tanh` that is exact to 2**-22: of larger ones too little is left
Keys = tuple[Key | None, ...]  # of what a call is given, in the order of `Geometries`


class Geometries(NamedTuple):
    """The tensors of a call, without data, in the order of `Addresses`."""

    q: Geometry
    k: Geometry
    v: Geometry
    out: Geometry
    cu_seqlens: Geometry | None
    seq_lens: Geometry
    rows: Geometry | None
    starts: Geometry | None
    block_table: Geometry | None
    sinks: Geometry | None
    k_scales: Geometry | None
    v_scales: Geometry | None


class Plan(NamedTuple):
    """The kernel for a call, its grid, and its workspace."""

    kernel: Kernel
    blocks: tuple[int, int]
    partial_bytes: int = 0
    counters: int = 0
    box_tokens: int = 0  # of a copy by tensor map; 0: the kernel takes no tensor maps


def choose_kernel(kernel: str, given: Geometries, best: tuple[str, ...]) -> str:
    """The kernel to use: what was asked for, or else the best that the device has; `ValueError` if it cannot be."""
    possible, dtype, device = ["plain"], given.q.dtype, given.q.device
    if dtype != torch.float32:  # tensor cores would round it
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        if capability < (8, 0):
            raise ValueError(f"got {device} of compute capability {capability}; it must be 8.0 or later")
        possible = [name for name in best if name == "mma" or capability == (9, 0)] + possible
    if kernel == "auto":
        return possible[0]
    if kernel not in possible:
        raise ValueError(
            f"got kernel {kernel!r} for q of {dtype}, k of {given.k.dtype} on {device} and these strides; it must be "
            f"one of auto, {', '.join(possible)}"
        )
    return kernel


def check_call(keys: Keys) -> Geometries:
    """Raises `ValueError` or `TypeError` where tensors do not fit together."""
    geometries = Geometries(*[Geometry._make(key) if key else None for key in keys])  # type: ignore[arg-type]
    q, k, v, out, cu_seqlens, seq_lens, rows, starts, block_table, sinks, k_scales, v_scales = geometries
    check_attention(q, k, v, out, k_scales, v_scales)
    check_indices(q.device, seq_lens.shape[:1], seq_lens=seq_lens, rows=rows, starts=starts)
    check_indices(q.device, (seq_lens.shape[0] + 1,), cu_seqlens=cu_seqlens)
    if block_table:
        check_block_table(q.device, block_table, k)
    batch, there = seq_lens.shape[0], (block_table or k).shape[0]
    if rows is None and batch > there:
        raise ValueError(f"got {batch} sequences without rows, of which there are {there}; rows must be given")
    if batch == 0 and q.shape[0]:
        raise ValueError(f"got q {list(q.shape)} and no sequences; there must be one for each token")
    if sinks:
        check_sinks(sinks, q)
    return geometries


def output_like(q: torch.Tensor) -> torch.Tensor:
    """A tensor for the result: the shape of `q`, but the width of V for latents, whose V is narrower than their K."""
    return torch.empty_like(q) if q.shape[-1] != LATENT_DIM else q.new_empty(*q.shape[:-1], LATENT_V_DIM)


def sizes_of(given: Geometries) -> tuple[int, ...]:
    """The fields of `Sizes`."""
    q, k, v, out = given[:4]
    ragged = (0,) if given.cu_seqlens else ()  # then q has no dimension of sequences
    steps = (
        (q.dtype.itemsize, (*ragged, *q.strides[:-1])),
        (k.dtype.itemsize, (*k.strides[:3], *v.strides[:3])),
        (out.dtype.itemsize, (*ragged, *out.strides[:-1])),
        *((4, scales.strides if scales else (0, 0, 0)) for scales in (given.k_scales, given.v_scales)),
    )
    table = given.block_table.strides[0] * 4 if given.block_table else 0
    strides = [size * stride for size, strides in steps for stride in strides]
    return given.seq_lens.shape[0], k.shape[2], table, *strides


class Call(NamedTuple):
    """A plan with all its arguments but addresses."""

    launch: Launch
    workspace: Workspace | None  # where its parts and counters are, if it needs any
    maps: Callable[[int, int], Maps] | None  # tensor maps of K and V at two addresses, if the kernel takes them
    latents: bool  # V is a view of K


def prepare(
    plan: Plan, given: Geometries, scale: float | None, window: int, softcap: float, causal: bool = True,
    mixed: bool = False, groups: tuple[int | None, ...] = NO_GROUPS,
) -> Call:  # fmt: skip
    """A plan's launch for tensors of a geometry; numbers in `Groups` that are None will be given."""
    head_dim, index = given.q.shape[-1], index_of(given.q.device)
    latents = head_dim == LATENT_DIM
    if latents and scale is None:
        raise ValueError("got no scale for latents; it follows from the width of the heads that they stand for")
    # Numbers of other types are equal to these, and would be rounded to theirs in a launch that all equal calls share.
    scale = head_dim**-0.5 if scale is None else float(scale)
    window, softcap = check_integer("window", window), float(softcap)
    inner, outer = scale / softcap if softcap else 0.0, (softcap or scale) * LOG2E
    least, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    fitting = least <= (inner if softcap else outer) <= most and least <= outer <= most
    if not (fitting and softcap <= LARGEST_SOFTCAP and 0 <= window < 1 << 63):
        raise ValueError(
            f"got scale {scale}, softcap {softcap} and window {window}; scale must be positive, the others not "
            f"negative, all finite, softcap at most {LARGEST_SOFTCAP}, and scale, or softcap and scale / softcap, "
            "must not be too small or too great for fp32, nor window for 64 bits"
        )
    maps = maps_of(given.k, given.v, plan.box_tokens) if plan.box_tokens else None
    addresses = [None if each else 0 for each in given]
    workspace = Workspace(index, plan.partial_bytes, plan.counters) if plan.counters else None
    room = (None, None) if workspace else (0, 0)
    q_len = 1 if given.cu_seqlens else given.q.shape[1]
    block_size = given.k.shape[1] if given.block_table else 0
    window = min(window, 1 << 31)  # no sequence is longer, and differences to lengths fit in 64 bits
    options = window, inner, outer, int(bool(causal)), q_len, int(mixed), block_size, plan.box_tokens
    arguments = (*[None] * (4 if maps else 0), *addresses, *room, *sizes_of(given), *options, *groups)
    return Call(Launch(plan.kernel, plan.blocks, index, arguments), workspace, maps, latents)


def launch(call: Call, addresses: list[int], room: tuple[int, ...] | None = None, groups: tuple[int, ...] = ()) -> None:
    """Runs a call on the current stream, with the addresses of the tensors that are given.

    `room` has the addresses of its workspace, if another call's is to be used; `groups` those in `Groups`.
    """
    q, k, v, out, *_ = addresses
    if (q | k | v | out) % ALIGNMENT:
        refuse_alignment(q, k, v, out)
    if call.latents and k != v:
        raise ValueError(f"got latents k at {k:#x} and v at {v:#x}; v must be their view k[..., :{LATENT_V_DIM}]")
    if room is None:
        room = call.workspace.room() if call.workspace else ()
    maps = call.maps(k, v) if call.maps else ()
    call.launch.run(*maps, *addresses, *room, *groups)


TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor? cu_seqlens, Tensor seq_lens, Tensor? rows, Tensor? starts, "
    "Tensor? block_table, Tensor? sinks, Tensor? k_scales, Tensor? v_scales"
)


def define_operator(name: str, run: Callable[..., None], options: str) -> None:
    """Makes torch's operator `vmmkv::name`, opaque to `torch.compile`, of a function of `Geometries` and options."""
    schema = f"({TENSORS}, {options}) -> ()"
    torch.library.custom_op(f"vmmkv::{name}", run, mutates_args=("out",), schema=schema)


define_operator("decode", _decode, "float? scale, int window, float softcap, str kernel")
