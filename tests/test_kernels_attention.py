"""decode and prefill against float64: in Numba's simulator on host memory, or on a GPU, where there are more tokens.

Everything outside the tokens that a query may see is NaN, in the cache's rows and in unused blocks, and so is the
output before the call.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import DEVICE, few, int32

import vmmkv
from vmmkv.kernels import append, decode, dequantize, mixed, prefill, quantize, sequence_scales

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
e4m3, int8 = torch.float8_e4m3fn, torch.int8


class Case(NamedTuple):
    """A geometry; lengths and data are random."""

    dtype: torch.dtype
    head_dim: int
    heads: int
    kv_heads: int
    q_len: int = 0
    block_size: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    starts: bool = False
    causal: bool = True
    kernel: str = "auto"
    kv: torch.dtype | None = None
    """Of K and V of 8 bits."""


class Inputs(NamedTuple):
    """What kernels are called with, and the same K and V without holes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    counts: list[int]
    lengths: list[int]
    rows: torch.Tensor
    starts: torch.Tensor | None
    block_table: torch.Tensor | None
    sinks: torch.Tensor | None
    live_k: list[torch.Tensor]
    live_v: list[torch.Tensor]
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None


def make_inputs(case: Case, counts: list[int], lengths: list[int]) -> Inputs:
    """Random data in shuffled rows of a cache, or in shuffled blocks. Nothing is in the first row."""
    shapes = [(length, case.kv_heads, case.head_dim) for length in lengths]
    lives = [[torch.randn(shape, device=DEVICE).to(case.dtype) for shape in shapes] for _ in "kv"]
    values = lives
    if case.kv:  # heads of many sizes, and what their bytes stand for
        sizes = [torch.empty(*shape[:2], 1, device=DEVICE).uniform_(-3, 1).exp2() for shape in shapes]
        rounded = [[quantize(new * size, case.kv) for new, size in zip(live, sizes)] for live in lives]
        values = [[pair[part] for pair in pairs] for part in range(2) for pairs in rounded]
        lives = [[dequantize(*pair, torch.float64) for pair in pairs] for pairs in rounded]
    starts = [python_random.randint(0, min(20, length - count)) for count, length in zip(counts, lengths)]
    rows = python_random.sample(range(1, len(lengths) + 1), len(lengths))
    if case.block_size:
        blocks = -(-max(lengths) // case.block_size)
        names = torch.randperm(blocks * (len(lengths) + 1)).view(-1, blocks)
        shape = (names.numel(), case.block_size, case.kv_heads, case.head_dim)
        views = [torch.empty(shape, device=DEVICE, dtype=case.kv or case.dtype) for _ in "kv"]
        views += [torch.empty(shape[:3], device=DEVICE) for _ in "kv" if case.kv]
        for view in views[-2:]:
            view.fill_(torch.nan)
        block_table = names.to(DEVICE, torch.int32)
    else:
        views = list(rows_of_a_cache(case, rows, lengths))
        block_table = None
    for index, (row, length) in enumerate(zip(rows, lengths)):
        seen = starts[index] if case.starts else 0
        if case.window:
            seen = max(seen, length - counts[index] + 1 - case.window)
        if case.block_size:  # blocks that no query sees may be gone
            block_table[row, : seen // case.block_size] = 1 << 30
            block_table[row, -(-length // case.block_size) :] = 1 << 30
        for position in range(seen, length):
            at = (row, position)
            if case.block_size:
                at = (int(names[row, position // case.block_size]), position % case.block_size)
            for view, value in zip(views, values):
                view[at] = value[index][position]
    return Inputs(
        torch.randn(sum(counts), case.heads, case.head_dim, device=DEVICE).to(case.dtype),
        *views[:2],
        counts,
        lengths,
        int32(rows),
        int32(starts) if case.starts else None,
        block_table,
        torch.randn(case.heads, device=DEVICE) if case.sinks else None,
        *lives,
        *views[2:],
    )


def rows_of_a_cache(case: Case, rows: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """K and V of the second layer, and scales; all that is mapped is NaN, the rest is not mapped. A page has but a few
    tokens."""
    num_layers, page_size = (3, 4096) if DEVICE == "cpu" else (32, None)
    scales = "token_head" if case.kv else None
    layout = vmmkv.KVLayout(num_layers, case.kv_heads, case.head_dim, case.kv or case.dtype, scales=scales)
    cache = vmmkv.KVCache(layout, len(rows) + 1, max(lengths), max_bytes="4GiB", device=DEVICE, page_size=page_size)
    sequences = {sequence.row: sequence for sequence in [cache.sequence() for _ in range(len(rows) + 1)]}
    for row, length in zip(rows, lengths):
        sequences[row].extend(length)
        for layer in range(3):
            for view in cache.scaled_kv(layer)[2:] if case.kv else cache.kv(layer):
                view[row, : sequences[row].capacity] = torch.nan
    return cache.scaled_kv(1) if case.kv else cache.kv(1)


def attend(case: Case, inputs: Inputs, dtype: torch.dtype, scale: float | None = None) -> torch.Tensor:
    """The same in plain torch, in another precision."""
    outputs = []
    for index, (count, length) in enumerate(zip(inputs.counts, inputs.lengths)):
        q = inputs.q[sum(inputs.counts[:index]) :][:count].to(dtype)
        group = case.heads // case.kv_heads
        k, v = (live[index].to(dtype).repeat_interleave(group, 1) for live in (inputs.live_k, inputs.live_v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or case.head_dim**-0.5)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        position = torch.arange(length - count, length, device=DEVICE)[:, None]
        key = torch.arange(length, device=DEVICE)
        visible = torch.ones(count, length, dtype=torch.bool, device=DEVICE)
        if case.causal:
            visible &= key <= position
        if case.window:
            visible &= key > position - case.window
        if inputs.starts is not None:
            visible &= key >= inputs.starts[index]
        scores = scores.masked_fill(~visible, -torch.inf)
        if inputs.sinks is not None:
            sinks = inputs.sinks.to(dtype)[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sinks], 2)
        weights = torch.softmax(scores.float() if dtype.itemsize < 4 else scores, 2).to(dtype)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def check(case: Case, inputs: Inputs, ours: torch.Tensor, times: float = 2, scale: float | None = None) -> None:
    check_error(ours, attend(case, inputs, torch.float64, scale), attend(case, inputs, case.dtype, scale), times)


def check_error(ours: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor, times: float) -> None:
    """Our error is at most twice that of the same formulas in torch, in the dtype of the inputs, or than rounding."""
    assert ours.isfinite().all()
    error, peer, size = (values.square().mean().sqrt() for values in (ours - exact, theirs - exact, exact))
    assert error <= times * max(peer, torch.finfo(theirs.dtype).eps * size), f"error {error:.2e}, torch's {peer:.2e}"


DECODE_FAST = [
    Case(bf16, 128, 8, 2, q_len=1),
    Case(bf16, 80, 6, 2, q_len=1, starts=True),
    Case(fp16, 96, 7, 1, q_len=2, window=30),
    Case(bf16, 192, 2, 1, q_len=1, softcap=3.0),
    Case(bf16, 256, 16, 1, q_len=1, sinks=True, window=40),
    Case(fp16, 64, 12, 2, q_len=4, starts=True, sinks=True),
    Case(bf16, 128, 20, 1, q_len=5),
    Case(bf16, 64, 18, 18, q_len=1),  # as many bundles as three teams have blocks
    Case(bf16, 80, 8, 4, q_len=8, starts=True),
    Case(fp16, 64, 4, 2, q_len=3, block_size=32, window=50, starts=True),
    Case(bf16, 128, 8, 2, q_len=1, block_size=16),
    Case(fp16, 96, 4, 4, q_len=1, block_size=128),
    Case(bf16, 256, 2, 1, q_len=1, block_size=64),
    Case(bf16, 80, 4, 2, q_len=1, block_size=48),
]


def call(function: str, q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """`decode`, or `prefill`, of one query for each sequence `[sequences, 1, heads, head_dim]`."""
    if function == "decode":
        return decode(q, *arguments, **options)
    k, v, *others = arguments
    out = options.pop("out", torch.empty_like(q))
    cu_seqlens = torch.arange(len(q) + 1, device=DEVICE, dtype=torch.int32)
    prefill(q[:, 0], k, v, cu_seqlens, *others, out=out[:, 0], **options)
    return out


DECODE_PLAIN = [
    Case(fp32, 64, 4, 2, q_len=1, sinks=True, window=25),
    Case(fp32, 80, 4, 2, q_len=3, window=20, block_size=16),
    Case(fp32, 256, 2, 2, q_len=1, softcap=5.0),
    Case(bf16, 96, 4, 2, q_len=2, starts=True, window=40, kernel="plain"),
    Case(fp16, 192, 4, 1, q_len=1, block_size=32, window=10, kernel="plain"),
]
DECODE_8_BITS = [
    Case(bf16, 128, 8, 2, q_len=1, kv=e4m3),
    Case(bf16, 128, 4, 2, q_len=1, block_size=16, starts=True, kv=int8),
    Case(bf16, 64, 12, 2, q_len=4, sinks=True, window=40, kv=int8),
    Case(bf16, 80, 4, 4, q_len=1, softcap=3.0, kv=e4m3),
    Case(bf16, 192, 2, 1, q_len=1, block_size=32, kv=e4m3, kernel="plain"),
    Case(fp16, 96, 4, 2, q_len=2, window=20, kv=int8),
]


def some_of_each(number: int, group: str, cases: list[Case]) -> list[Any]:
    """Of these cases the simulator runs one with a window, one with a block table, and so many others."""
    windows = [case for case in cases if case.window]
    blocks = [case for case in cases if case.block_size and not case.window]
    others = [case for case in cases if not case.block_size and not case.window]
    return few(1, f"{group}, window", windows) + few(1, f"{group}, blocks", blocks) + few(number, group, others)


@pytest.mark.parametrize(
    "case", few(1, "plain", DECODE_PLAIN) + some_of_each(2, "fast", DECODE_FAST) + few(1, "8 bits", DECODE_8_BITS)
)
def test_decode(case: Case) -> None:
    """A sequence that is cut into shares, or not, among shorter ones."""
    longest = python_random.choice([70, 300 if DEVICE == "cpu" else 3000])
    others = 70 if DEVICE == "cpu" else longest
    lengths = [python_random.randint(case.q_len, others) for _ in range(python_random.randint(1, 4))]
    lengths.append(longest)
    counts = [case.q_len] * len(lengths)
    inputs = make_inputs(case, counts, lengths)
    q = inputs.q.view(len(lengths), case.q_len, case.heads, case.head_dim)
    out = torch.full_like(q, torch.nan)
    decode(
        q, inputs.k, inputs.v, int32(lengths), inputs.rows, inputs.starts, inputs.block_table, inputs.sinks,
        k_scales=inputs.k_scales, v_scales=inputs.v_scales, window=case.window, softcap=case.softcap, out=out,
        kernel=case.kernel,
    )  # fmt: skip
    check(case, inputs, out.flatten(0, 1))


PREFILL_PLAIN = [
    Case(fp32, 64, 2, 1, sinks=True, window=3),
    Case(fp32, 80, 2, 1, window=2, block_size=16),
    Case(bf16, 96, 2, 1, causal=False, kernel="plain"),
]
PREFILL_FAST = [
    Case(bf16, 128, 4, 2),
    Case(fp16, 64, 2, 2, causal=False),
    Case(bf16, 80, 3, 1, starts=True),
    Case(fp16, 96, 2, 1, window=30),
    Case(bf16, 192, 2, 1, softcap=3.0),
    Case(bf16, 256, 2, 2, sinks=True, window=40),
    Case(bf16, 128, 2, 1, block_size=16),
    Case(fp16, 64, 4, 2, block_size=32, window=50, starts=True),
    Case(bf16, 256, 2, 1, block_size=64, causal=False),
    Case(fp16, 96, 2, 2, block_size=128),
    Case(bf16, 80, 2, 1, block_size=256),
    Case(bf16, 80, 2, 1, block_size=48),
]
PREFILL_8_BITS = [
    Case(bf16, 128, 2, 1, kv=e4m3),
    Case(fp16, 80, 2, 2, block_size=16, window=20, kv=int8),
    Case(bf16, 80, 2, 1, block_size=16, window=20, sinks=True, kv=int8),
    Case(bf16, 256, 2, 2, softcap=3.0, starts=True, kv=e4m3),
]


@pytest.mark.parametrize(
    "case",
    few(1, "8 bits", PREFILL_8_BITS)
    + few(1, "plain", PREFILL_PLAIN)
    + some_of_each(1, "mma", [case._replace(kernel="mma") for case in PREFILL_FAST])
    + some_of_each(1, "wgmma", [case._replace(kernel="wgmma") for case in PREFILL_FAST]),
)
def test_prefill(case: Case) -> None:
    """Of a prompt without a cache, one token, and a chunk behind earlier ones, two; on a GPU all of them."""
    most = 500 if DEVICE == "cuda" else 24 if case.kernel.endswith("mma") else 4  # "plain" does one token at a time
    before = python_random.randint(0, 90)
    sequences = [(python_random.randint(1, most), 0), (1, before), (python_random.randint(most, 2 * most), before)]
    sequences = python_random.sample(sequences, 3 if DEVICE == "cuda" else 2)
    counts = [count for count, _ in sequences]
    lengths = [count + before for count, before in sequences]
    inputs = make_inputs(case, counts, lengths)
    out = torch.full_like(inputs.q, torch.nan)
    cu_seqlens = int32([sum(counts[:index]) for index in range(len(counts) + 1)])
    prefill(
        inputs.q, inputs.k, inputs.v, cu_seqlens, int32(lengths), inputs.rows, inputs.starts, inputs.block_table,
        inputs.sinks, k_scales=inputs.k_scales, v_scales=inputs.v_scales, causal=case.causal, window=case.window,
        softcap=case.softcap, out=out, kernel=case.kernel,
    )  # fmt: skip
    check(case, inputs, out)


MIXED = few(1, "8 bits", [Case(bf16, 64, 1, 1, block_size=16, kv=int8)])
MIXED += few(2, "16 bits", [case for case in PREFILL_FAST if case.causal])
MIXED += [pytest.param(PREFILL_PLAIN[0], marks=pytest.mark.gpu, id=str(PREFILL_PLAIN[0]))]


@pytest.mark.parametrize("case", MIXED)
def test_prompts_and_single_tokens_in_one_batch(case: Case) -> None:
    """Single tokens behind long and short beginnings, chunks of prompts, and sequences that have nothing new."""
    most = 500 if DEVICE == "cuda" else 20
    counts = [1, 1, 1, 0, 0, python_random.randint(2, most), 2]
    counts = python_random.sample(counts, len(counts))
    lengths = [count + python_random.choice([0, 20, 2 * most]) + (count == 0) for count in counts]
    inputs = make_inputs(case, counts, lengths)
    cu_seqlens = int32([sum(counts[:index]) for index in range(len(counts) + 1)])
    padding = torch.full_like(inputs.q[:3], torch.nan)  # a batch may be padded to a size that was seen before
    out = torch.full_like(torch.cat([inputs.q, padding]), 7.0)
    mixed(
        torch.cat([inputs.q, padding]), inputs.k, inputs.v, cu_seqlens, int32(lengths), inputs.rows, inputs.starts,
        inputs.block_table, inputs.sinks, k_scales=inputs.k_scales, v_scales=inputs.v_scales, window=case.window,
        softcap=case.softcap, max_prompts=python_random.choice([None, 2]), out=out,
    )  # fmt: skip
    check(case, inputs, out[: sum(counts)])
    assert (out[sum(counts) :] == 7).all()


@pytest.mark.filterwarnings("ignore::vmmkv.StrideLimitWarning")
def test_prompts_in_rows_of_a_tebibyte() -> None:
    """Tensor maps take no strides as long as these: another kernel does it, unless that one was asked for."""
    case, lengths = Case(bf16, 64, 2, 1), [40, 23]
    layout = vmmkv.KVLayout(3, case.kv_heads, case.head_dim, bf16)
    tokens = (1 << 40) // layout.token_bytes + 1
    cache = vmmkv.KVCache(layout, 3, tokens, max_bytes="1GiB", device=DEVICE)
    sequences = [cache.sequence(length) for length in lengths]
    k, v = cache.kv(1)
    assert k.stride(0) * 2 >= 1 << 40
    live_k, live_v = ([torch.randn(length, 1, 64, device=DEVICE).to(bf16) for length in lengths] for _ in "kv")
    for sequence, new_k, new_v in zip(sequences, live_k, live_v):
        k[sequence.row, : len(new_k)], v[sequence.row, : len(new_v)] = new_k, new_v
    rows, q = int32([sequence.row for sequence in sequences]), torch.randn(63, 2, 64, device=DEVICE).to(bf16)
    arguments = (q, k, v, int32([0, *lengths]).cumsum(0, dtype=torch.int32), int32(lengths), rows)
    inputs = Inputs(q, k, v, lengths, lengths, rows, None, None, None, live_k, live_v)
    check(case, inputs, prefill(*arguments))
    with pytest.raises(ValueError, match="strides; it must be one of auto, mma, plain"):
        prefill(*arguments, kernel="wgmma")


WAYS = [("prefill", "wgmma"), ("prefill", "mma"), ("decode", "mma"), ("prefill", "plain"), ("decode", "plain")]
"""Functions and their kernels."""


def new_tokens(kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    """Queries of three sequences, K and V of rows with room for 64 tokens, and what may index them. A head of K and V
    is work of its own: one is enough where heads do not matter."""
    q = torch.randn(3, 1, 2 * kv_heads, 64, device=DEVICE, dtype=bf16)
    k, v = (torch.randn(3, 64, kv_heads, 64, device=DEVICE, dtype=bf16) for _ in "kv")
    return q, k, v, int32([5, 64, 33]), int32([2, 0, 1])


def test_attention_can_be_part_of_a_compiled_graph() -> None:
    q, k, v, seq_lens, rows = new_tokens(kv_heads=1)
    cu_seqlens = int32([0, 1, 2, 3])
    numbers, scales = quantize(k, int8)
    options = {"k_scales": scales, "v_scales": scales}

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        again = decode(q, numbers, numbers, seq_lens, rows, **options)
        return decode(*tensors) * 2, prefill(q[:, 0], k, v, cu_seqlens, seq_lens, rows, kernel="mma") * 2, again

    decoded, prefilled, again = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, seq_lens, rows)
    assert torch.equal(decoded, decode(q, k, v, seq_lens, rows) * 2)
    assert torch.allclose(prefilled, decoded[:, 0], atol=0.05)
    assert torch.equal(again, decode(q, numbers, numbers, seq_lens, rows, **options))


@pytest.mark.few(5)
@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize(("function", "kernel"), WAYS)
def test_a_start_before_the_first_token_is_one_at_it(function: str, kernel: str, block_size: int) -> None:
    """What lies in front, of the row or of its part of the block table, holds NaN."""
    q = torch.randn(2, 1, 2, 64, device=DEVICE).to(bf16)
    k, v = (torch.randn(4, 48, 1, 64, device=DEVICE).to(bf16) for _ in "kv")
    k[0], v[0], k[2], v[2] = [torch.nan] * 4
    table = None
    if block_size:
        k, v = (each.view(12, 16, 1, 64) for each in (k, v))
        table = torch.arange(12, device=DEVICE, dtype=torch.int32).view(4, 3)
    lens, rows = int32([python_random.randint(1, 48) for _ in range(2)]), int32([1, 3])
    starts = int32([-python_random.randint(1, 48), -1])
    options = {"window": python_random.choice([0, 60]), "kernel": kernel}
    out, expected = (
        call(function, q, k, v, lens, rows, each, table, **options) for each in (starts, torch.zeros_like(starts))
    )
    assert torch.equal(out, expected)
    assert out.isfinite().all()


@pytest.mark.few(6)
@pytest.mark.parametrize("lens", [(30, None, 20), (None, None, None), (None, 30, 0)], ids=str)
@pytest.mark.parametrize(("function", "kernel"), WAYS)
def test_a_length_below_nothing_is_nothing(function: str, kernel: str, lens: tuple[int | None, ...]) -> None:
    """Neither the sequence's output nor that of others shows what lies where it would be."""
    q, k, v, _, _ = new_tokens(kv_heads=1)
    k[0], v[0], k[2, 30:], v[2, 30:] = [torch.nan] * 4
    rows, outs = int32([2, 1, 2] if lens[0] else [1, 2, 1]), []
    for nothing in (-python_random.choice([1, 7, 16, 17, 40, 1 << 31]), 0):
        given = int32([nothing if length is None else length for length in lens])
        out = torch.full_like(q, torch.nan)
        outs.append(call(function, q, k, v, given, rows, kernel=kernel, out=out))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


@pytest.mark.parametrize(("function", "kernel"), WAYS)
def test_a_query_that_sees_nothing_gives_zeros_and_looks_up_no_block(function: str, kernel: str) -> None:
    """The block table has no row for it: not for an empty sequence, nor for one that is nothing but padding."""
    q = torch.randn(3, 1, 2, 64, device=DEVICE).to(bf16)
    k, v = (torch.randn(2, 16, 1, 64, device=DEVICE).to(bf16) for _ in "kv")
    lens, starts, rows = int32([0, 20, 16]), int32([0, 0, python_random.choice([16, 21])]), int32([1 << 30, 0, 1 << 30])
    out = call(function, q, k, v, lens, rows, starts, int32([[1, 0]]), kernel=kernel)
    assert (out[::2] == 0).all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("kernel", ["wgmma", "mma", "plain"])
def test_a_query_that_sees_nothing_looks_up_no_block(kernel: str) -> None:
    """The block table has no row for it: not for an empty sequence, nor for one that is nothing but padding."""
    q = torch.randn(3, 1, 2, 64, device=DEVICE).to(bf16)
    k, v = (torch.randn(2, 16, 1, 64, device=DEVICE).to(bf16) for _ in "kv")
    lens, starts, rows = int32([0, 20, 16]), int32([0, 0, python_random.choice([16, 21])]), int32([1 << 30, 0, 1 << 30])
    table, cu_seqlens = int32([[1, 0]]), int32([0, 1, 2, 3])
    outs = [prefill(q[:, 0], k, v, cu_seqlens, lens, rows, starts, table, kernel=kernel)]
    if kernel != "wgmma":
        outs.append(decode(q, k, v, lens, rows, starts, table, kernel=kernel)[:, 0])
    for out in outs:
        assert (out[::2] == 0).all()
        assert out[1].isfinite().all()


@pytest.mark.few(3)
@pytest.mark.parametrize(("function", "kernel"), WAYS)
def test_a_sink_that_is_no_number_shows(function: str, kernel: str) -> None:
    """In its head, of every query that sees a token; minus infinity is none, and a great one takes all weight."""
    q, k, v, lens, rows = new_tokens()
    q, lens, rows = q[:2], lens[:2], rows[:2]  # one with less than a tile of tokens, one with a whole
    sinks = torch.tensor([torch.nan, 0.5, -torch.inf, torch.inf], device=DEVICE)
    out, without = (call(function, q, k, v, lens, rows, sinks=by, kernel=kernel)[:, 0] for by in (sinks, None))
    assert out[:, 0].isnan().all()
    assert out[:, 1:].isfinite().all()
    assert torch.equal(out[:, 2], without[:, 2])
    assert (out[:, 3].abs() < 1e-30).all()


@pytest.mark.parametrize(("function", "kernel"), WAYS)
def test_what_fp32_does_not_hold_is_refused(function: str, kernel: str) -> None:
    """It would be 0 or infinite to a kernel. With a softcap the scale itself is not, but what it is of that."""
    q, k, v, lens, rows = new_tokens()
    for wrong in (
        {"scale": 3.0e38 * 10 ** python_random.uniform(0, 200)},
        {"scale": 1.2e-38 * 10 ** python_random.uniform(-200, -1)},
        {"softcap": 1.2e-38 * 10 ** python_random.uniform(-200, -1)},
        {"softcap": 10.0 ** python_random.uniform(4.1, 12)},
        {"scale": 1e30, "softcap": 1e-9},
        {"scale": 1e-35, "softcap": 1e4},
    ):
        with pytest.raises(ValueError, match=r"fp32|at most 10000"):
            call(function, q, k, v, lens, rows, kernel=kernel, **wrong)


def test_tokens_behind_the_last_sequence_are_left_alone() -> None:
    q, k, v, _, rows = new_tokens(kv_heads=1)
    k[2, 4:], v[2, 4:] = torch.nan, torch.nan
    for kernel in ("plain", "mma", "wgmma"):
        out = torch.full((6, 2, 64), 7.0, device=DEVICE, dtype=bf16)
        prefill(q[0].expand(6, -1, -1), k, v, int32([0, 4]), int32([4]), rows[:1], out=out, kernel=kernel)
        assert out[:4].isfinite().all()
        assert (out[4:] == 7).all()


def test_what_does_not_fit_is_refused_before_any_launch() -> None:
    q, k, v, lens, _ = new_tokens()
    many = q[:, 0].repeat(3, 1, 1)
    cu, rows = int32([0, 3, 6, 9]), torch.zeros(65_537, dtype=torch.int32, device=DEVICE)
    out = torch.zeros_like(q)
    for error, refused in (
        (ValueError, lambda: decode(q[..., :48], k[..., :48], v[..., :48], lens)),
        (ValueError, lambda: decode(q, k[..., :32], v[..., :32], lens)),
        (ValueError, lambda: decode(q[:, :, :3], k, v, lens)),
        (ValueError, lambda: decode(q.expand(-1, 9, -1, -1), k, v, lens)),
        (ValueError, lambda: decode(q, k, v, lens[:2])),
        (ValueError, lambda: decode(q, k, v[:, :32], lens)),
        (ValueError, lambda: decode(q, k, v, lens, block_table=int32([[0]]), out=out[:, :, :2])),
        (ValueError, lambda: decode(q, k[:, :8], v[:, :8], lens, block_table=int32([[0], [1], [2]]))),
        (ValueError, lambda: decode(q, k, v, lens, block_table=int32([0, 1, 2]))),
        (ValueError, lambda: decode(q, k.to("meta"), v, lens)),
        (ValueError, lambda: decode(q.float(), k.float(), v.float(), lens, kernel="mma")),
        (ValueError, lambda: decode(q, k, v, lens, kernel="fast")),
        (ValueError, lambda: decode(q, k, v, lens, sinks=torch.zeros(3, device=DEVICE))),
        (TypeError, lambda: decode(q, k, v, lens, sinks=torch.zeros(4, device=DEVICE, dtype=bf16))),
        (TypeError, lambda: decode(q.double(), k, v, lens)),
        (TypeError, lambda: decode(q, k.half(), v.half(), lens)),
        (TypeError, lambda: decode(q, k, v, lens.long())),
        (TypeError, lambda: decode(q, k, v, lens.tolist())),
        (TypeError, lambda: decode(q, k, v, lens, out=[])),
        (ValueError, lambda: decode(q[:, :, :0], k, v, lens)),
        (ValueError, lambda: decode(q, k, v, lens, out=torch.zeros_like(q[:1]).expand(3, -1, -1, -1))),
        (ValueError, lambda: decode(q, k, v, lens, softcap=-1.0)),
        (ValueError, lambda: decode(q, k, v, lens, softcap=float("nan"))),
        (ValueError, lambda: decode(q, k, v, lens, scale=0.0)),
        (ValueError, lambda: decode(q, k, v, lens, window=-4)),
        (ValueError, lambda: decode(q, k, v, lens, window=1 << 63)),
        (TypeError, lambda: decode(q, k, v, lens, window=np.float64(2))),
        (ValueError, lambda: prefill(q, k, v, cu, lens)),
        (ValueError, lambda: prefill(many, k, v, cu[:2], lens)),
        (ValueError, lambda: prefill(many, k, v, cu, lens, causal=False, window=8)),
        (ValueError, lambda: prefill(many, k, v, cu[:1], lens[:0])),
        (ValueError, lambda: prefill(q[:, 0], k, v, rows, rows[1:], rows[1:], kernel="mma")),  # more than a grid has
        (ValueError, lambda: mixed(many, k, v, cu, lens, max_prompts=-1)),
        (TypeError, lambda: mixed(many, k, v, cu, lens, max_prompts=3.0, kernel="plain")),
    ):
        with pytest.raises(error, match=r"must|without|on |blocks of threads"):
            refused()
    assert (out == 0).all()


def appended(
    kv: torch.dtype, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scales: str = "token_head"
) -> dict[str, torch.Tensor]:
    """What `decode` is to be given of K and V of several sequences, once they are quantized into rows of a cache."""
    layout = vmmkv.KVLayout(2, k.shape[1], k.shape[2], kv, scales=scales)
    cache = vmmkv.KVCache(layout, len(lengths), max(lengths), max_tokens=sum(lengths) + 100, device=DEVICE)
    sequences = [cache.sequence(length) for length in lengths]
    held, rows = cache.scaled_kv(1), int32([sequence.row for sequence in sequences])
    starts, cu_seqlens = int32([0] * len(lengths)), int32([0, *lengths]).cumsum(0, dtype=torch.int32)
    written: Sequence[torch.Tensor] = held[2:]
    if scales == "sequence_head":
        written = cache.sequence_scales(1)
        for states, into in zip((k, v), written):
            for sequence, each in zip(sequences, states.split(lengths)):
                into[sequence.row] = sequence_scales(each, kv)
    append(k, v, held.k, held.v, rows, starts, cu_seqlens, None, None, *written)
    return held._asdict() | {"seq_lens": int32(lengths), "rows": rows}


@pytest.mark.few(2)
@pytest.mark.parametrize("scales", ["token_head", "sequence_head"])
@pytest.mark.parametrize(("kv", "bound"), [(e4m3, 0.08), (int8, 0.02)], ids=str)
def test_what_8_bits_lose(kv: torch.dtype, bound: float, scales: str) -> None:
    """From K and V as they were to the output, as a part of its norm; some heads are zero."""
    case, lengths = Case(bf16, 128, 4, 2, q_len=1, kv=kv), [python_random.randint(40, 80) for _ in range(2)]
    k, v = (torch.randn(sum(lengths), 2, 128, device=DEVICE).to(bf16) for _ in "kv")
    k[3, 1], v[5, 0] = 0, 0
    q = torch.randn(2, 1, 4, 128, device=DEVICE).to(bf16)
    given = appended(kv, k, v, lengths, scales)
    split = [list(states.split(lengths)) for states in (k, v)]
    inputs = Inputs(q[:, 0], k, v, [1, 1], lengths, given["rows"], None, None, None, *split)
    exact = attend(case, inputs, torch.float64)
    assert (decode(q, **given)[:, 0] - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("kernel", ["mma", "plain"])
@pytest.mark.parametrize("kv", [e4m3, int8], ids=str)
def test_every_number_of_8_bits_comes_out_as_it_is(kv: torch.dtype, kernel: str) -> None:
    """All but the NaN of e4m3: two heads of a single token have one of each, in any order."""
    codes = torch.randperm(256).to(torch.uint8).view(kv).view(1, 1, 2, 128).to(DEVICE)
    exact = codes.to(bf16).flatten()
    scales = torch.ones(1, 1, 2, device=DEVICE)
    q = torch.randn(1, 1, 2, 128, device=DEVICE).to(bf16)
    k = codes if kv is int8 else torch.ones_like(codes)
    out = decode(q, k, codes, int32([1]), k_scales=scales, v_scales=scales, kernel=kernel).flatten()
    assert torch.equal(out[~exact.isnan()], exact[~exact.isnan()])


@pytest.mark.parametrize("kv", [e4m3, int8], ids=str)
def test_heads_that_are_no_numbers_show(kv: torch.dtype) -> None:
    """What attends to them is NaN, and nothing else is."""
    lengths = [20, 30]
    k, v = (torch.randn(50, 2, 64, device=DEVICE).to(bf16) for _ in "kv")
    k[7, 0, 11], v[20 + 13, 1, 40] = torch.nan, -torch.inf
    given = appended(kv, k, v, lengths)
    q = torch.randn(2, 1, 4, 64, device=DEVICE).to(bf16)
    for kernel in ("mma", "plain"):
        nan = decode(q, **given, kernel=kernel).isnan().view(2, 4, 64)
        assert nan.all(-1).tolist() == nan.any(-1).tolist() == [[True, True, False, False], [False, False, True, True]]


def test_scales_may_be_those_of_whole_sequences() -> None:
    """As other kernels take them: one for each row and head, for all tokens of it. Queries of fp32 go without tensor
    cores."""
    q, k, v, _, rows = new_tokens()
    lengths = [5, 20, 40]
    lens = int32(lengths)
    numbers, scales = quantize(torch.stack([k, v]), int8)[0], torch.rand(2, 3, 1, 2, device=DEVICE) / 100
    given = {f"{name}_scales": each.expand(-1, 64, -1) for name, each in zip("kv", scales)}
    lives = [
        [dequantize(kept[row, :length], by[row], torch.float64) for row, length in zip(rows.tolist(), lengths)]
        for kept, by in zip(numbers, scales)
    ]
    inputs = Inputs(q[:, 0], k, v, [1, 1, 1], lengths, rows, None, None, None, *lives)
    exact = attend(Case(bf16, 64, 4, 2), inputs, torch.float64)
    for function, kernel in WAYS[1:]:
        out = call(function, q, *numbers, lens, rows, **given, kernel=kernel)[:, 0]
        assert torch.allclose(out.double(), exact, rtol=0.02, atol=0.02)
    assert torch.allclose(decode(q.float(), *numbers, lens, rows, **given)[:, 0].double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kv", [e4m3, int8], ids=str)
def test_8_bits_without_their_scales_are_refused(kv: torch.dtype) -> None:
    q, k, v, lens, _ = new_tokens()
    scales, cu = torch.ones(3, 64, 2, device=DEVICE), int32([0, 1, 2, 3])
    numbers, _ = quantize(k, kv)
    other = numbers.view(int8 if kv == e4m3 else e4m3)
    for error, given, k_scales, v_scales in (
        (TypeError, (numbers, numbers), None, None),
        (TypeError, (numbers, numbers), scales, None),
        (TypeError, (k, numbers), None, None),
        (TypeError, (numbers, v), scales, scales),
        (TypeError, (k, v), scales, scales),
        (TypeError, (numbers, other), scales, scales),
        (TypeError, (numbers, numbers), scales, scales.half()),
        (ValueError, (numbers, numbers), scales, scales[:, :32]),
        (ValueError, (numbers, numbers), scales.to("meta"), scales),
    ):
        options = {"k_scales": k_scales, "v_scales": v_scales}
        with pytest.raises(error, match=r"[kv]_scales|same"):
            decode(q, *given, lens, **options)
        with pytest.raises(error, match=r"[kv]_scales|same"):
            prefill(q[:, 0], *given, cu, lens, **options)
    with pytest.raises(TypeError, match="got q of"):
        decode(q.to(e4m3), numbers, numbers, lens, k_scales=scales, v_scales=scales)
    with pytest.raises(ValueError, match="must be one of auto, mma, plain"):
        prefill(q[:, 0], numbers, numbers, cu, lens, k_scales=scales, v_scales=scales, kernel="wgmma")


@pytest.mark.gpu
def test_one_captured_graph_of_prompts_serves_all_lengths() -> None:
    """Which jobs there are is seen on the device, and the counter by which they are taken is left as it was."""
    q = torch.randn(900, 4, 64, device=DEVICE).to(bf16)
    k, v = (torch.randn(3, 1000, 2, 64, device=DEVICE).to(bf16) for _ in "kv")
    counts, lens = int32([300, 0, 600]), int32([300, 0, 1000])
    cu_seqlens = torch.cat([int32([0]), counts.cumsum(0, dtype=torch.int32)])
    prefill(q, k, v, cu_seqlens, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [prefill(q, k, v, cu_seqlens, lens) for _ in range(2)]
    for given in ([300, 300, 300], [0, 0, 0], [1, 898, 1], [5, 0, 700]):
        cu_seqlens[1:] = int32(given).cumsum(0)
        lens.copy_(int32([count + 100 for count in given]))
        graph.replay()
        expected = prefill(q, k, v, cu_seqlens, lens)
        assert all(torch.equal(out[: sum(given)], expected[: sum(given)]) for out in outs)


@pytest.mark.gpu
def test_branches_of_a_graph_do_not_mix_up_their_parts() -> None:
    q = torch.randn(2, 2, 1, 8, 128, device=DEVICE, dtype=bf16)
    k, v = (torch.randn(2, 2, 20_000, 2, 128, device=DEVICE, dtype=bf16) for _ in "kv")
    lens = int32([20_000, 13_000])
    expected = [decode(*each, lens) for each in zip(q, k, v)]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        first = decode(q[0], k[0], v[0], lens)
        with torch.cuda.stream(side):
            second = decode(q[1], k[1], v[1], lens)
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(20):
        graph.replay()
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])
