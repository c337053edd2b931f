"""Attention over MLA's latents against float64, and against the attention of heads that they stand for.

Everything outside the tokens that a query may see is NaN, or not there at all, and so is the output before the call.
"""

from __future__ import annotations

import random as python_random
from typing import Any

import pytest
import torch
from conftest import DEVICE, few, int32
from test_kernels_attention import Case, Inputs, check

import vmmkv
from vmmkv.kernels import append, cascade, decode, mixed, prefill

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, V_WIDTH, ROTARY = 576, 512, 64
SCALE = (128 + ROTARY) ** -0.5


def of(heads: int, dtype: torch.dtype = bf16, **options: Any) -> Case:
    """A geometry of latents."""
    return Case(dtype, WIDTH, heads, 1, **options)


def make_cache(rows: int, tokens: int, dtype: torch.dtype) -> vmmkv.KVCache:
    """Latents of three layers, kept once. On the host a page has but a few tokens."""
    layout = vmmkv.KVLayout(3, 1, WIDTH, dtype, v_head_dim=0)
    page_size = 4096 if DEVICE == "cpu" else None
    return vmmkv.KVCache(layout, rows, tokens, max_bytes="1GiB", device=DEVICE, page_size=page_size)


def make_inputs(case: Case, counts: list[int], lengths: list[int]) -> Inputs:
    """Random latents in rows of a cache, of which nothing is in the first, or in shuffled blocks."""
    live = [torch.randn(length, 1, WIDTH, device=DEVICE).to(case.dtype) for length in lengths]
    starts = [python_random.randint(0, min(20, length - count)) for count, length in zip(counts, lengths)]
    rows = python_random.sample(range(1, len(lengths) + 1), len(lengths))
    table = None
    if case.block_size:
        blocks = -(-max(lengths) // case.block_size)
        names = torch.randperm(blocks * (len(lengths) + 1)).view(-1, blocks)
        k = torch.full((names.numel(), case.block_size, 1, WIDTH), torch.nan, device=DEVICE, dtype=case.dtype)
        table = names.to(DEVICE, torch.int32)
    else:
        cache = make_cache(len(lengths) + 1, max(lengths), case.dtype)
        sequences = {sequence.row: sequence for sequence in [cache.sequence() for _ in range(len(lengths) + 1)]}
        k, _ = cache.kv(1)
        for row, length in zip(rows, lengths):
            sequences[row].extend(length)
            k[row, : sequences[row].capacity] = torch.nan
    for row, count, length, start, latents in zip(rows, counts, lengths, starts, live):
        seen = start if case.starts else 0
        if case.window:
            seen = max(seen, length - count + 1 - case.window)
        if table is None:
            k[row, seen:length] = latents[seen:]
            continue
        for position in range(seen, length):
            k[names[row, position // case.block_size], position % case.block_size] = latents[position]
        table[row, : seen // case.block_size] = 1 << 30  # blocks that no query sees may be gone
        table[row, -(-length // case.block_size) :] = 1 << 30
    q = torch.randn(sum(counts), case.heads, WIDTH, device=DEVICE).to(case.dtype)
    sinks = torch.randn(case.heads, device=DEVICE) if case.sinks else None
    v, begins = k[..., :V_WIDTH], int32(starts) if case.starts else None
    live_v = [each[..., :V_WIDTH] for each in live]
    return Inputs(q, k, v, counts, lengths, int32(rows), begins, table, sinks, live, live_v)


def check_latents(case: Case, inputs: Inputs, ours: torch.Tensor) -> None:
    times = 3 if case.dtype == fp32 else 2  # 576 products are added one after the other
    check(case, inputs, ours, times, SCALE)


DECODE = [
    of(16, q_len=1, kernel="mma"),
    of(16, q_len=1, block_size=16, dtype=fp16),
    of(16, q_len=2, starts=True, sinks=True),
    of(32, q_len=1, block_size=48),
    of(16, q_len=1, window=40, softcap=3.0, kernel="mma"),
    of(48, q_len=1, starts=True, kernel="mma"),
    of(64, q_len=1, kernel="mma"),
    of(80, q_len=1, block_size=32, kernel="mma", dtype=fp16),
]
DECODE_HOPPER = [
    of(64, q_len=1, kernel="wgmma"),
    of(16, q_len=4, block_size=16, dtype=fp16),
    of(48, q_len=2, starts=True, sinks=True, kernel="wgmma"),
    of(16, q_len=8, window=40, kernel="wgmma"),
    of(128, q_len=1, block_size=64, kernel="wgmma"),
    of(64, q_len=1, softcap=3.0, kernel="wgmma"),
]
DECODE_PLAIN = [
    of(3, q_len=2),
    of(2, q_len=1, dtype=fp32, block_size=16),
    of(4, q_len=1, dtype=fp32, window=20, sinks=True),
]


@pytest.mark.parametrize("case", few(2, "mma", DECODE) + few(1, "wgmma", DECODE_HOPPER) + few(1, "plain", DECODE_PLAIN))
def test_decode(case: Case) -> None:
    """A sequence that is cut into shares, or not, among shorter ones."""
    plain = case in DECODE_PLAIN
    longest = python_random.choice([70, 40 if plain else 170] if DEVICE == "cpu" else [70, 3000])
    others = python_random.randint(1, 3 if case.heads < 64 or DEVICE == "cuda" else 1)
    lengths = [python_random.randint(case.q_len, 40) for _ in range(others)]
    lengths.insert(python_random.randint(0, len(lengths)), longest)
    inputs = make_inputs(case, [case.q_len] * len(lengths), lengths)
    q = inputs.q.view(len(lengths), case.q_len, case.heads, WIDTH)
    out = torch.full_like(q[..., :V_WIDTH], torch.nan).contiguous()
    arguments = (q, inputs.k, inputs.v, int32(lengths), *inputs[5:9])
    options = {"scale": SCALE, "window": case.window, "softcap": case.softcap, "kernel": case.kernel}
    decode(*arguments, **options, out=out)
    check_latents(case, inputs, out.flatten(0, 1))
    assert torch.equal(decode(*arguments, **options), out) or DEVICE == "cuda"  # counters are 0 again


PREFILL = [
    of(16, kernel="mma"),
    of(16, kernel="mma", block_size=16, dtype=fp16, starts=True),
    of(48, kernel="mma", causal=False),
    of(80, kernel="mma", window=30, sinks=True),
]
PREFILL_PLAIN = [of(3), of(2, dtype=fp32, block_size=32), of(1, window=20, starts=True)]


@pytest.mark.parametrize(
    "case",
    few(1, "prefill, mma", PREFILL)
    + few(1, "prefill, wgmma", [case._replace(kernel="wgmma") for case in PREFILL])
    + few(1, "prefill, plain", PREFILL_PLAIN),
)
def test_prefill(case: Case) -> None:
    """Of a prompt without a cache, one token, and a chunk behind earlier ones, two; on a GPU all of them."""
    most = 500 if DEVICE == "cuda" else 3 if case in PREFILL_PLAIN else max(2, 144 // case.heads)  # some tiles of heads
    before = python_random.randint(0, 60)
    sequences = [(python_random.randint(1, most), 0), (1, before), (python_random.randint(most, 2 * most), before)]
    sequences = python_random.sample(sequences, 3 if DEVICE == "cuda" else 2)
    counts, lengths = [count for count, _ in sequences], [count + cached for count, cached in sequences]
    inputs = make_inputs(case, counts, lengths)
    out = torch.full_like(inputs.q[..., :V_WIDTH], torch.nan).contiguous()
    prefill(
        inputs.q, inputs.k, inputs.v, cumulated(counts), int32(lengths), *inputs[5:9], scale=SCALE, causal=case.causal,
        window=case.window, softcap=case.softcap, out=out, kernel=case.kernel,
    )  # fmt: skip
    check_latents(case, inputs, out)


def cumulated(counts: list[int]) -> torch.Tensor:
    return int32([sum(counts[:index]) for index in range(len(counts) + 1)])


@pytest.mark.parametrize("case", few(1, "mixed", [of(16), of(16, kernel="mma", block_size=16), of(64)]))
def test_prompts_and_single_tokens_in_one_batch(case: Case) -> None:
    """Single tokens behind long and short beginnings, chunks of prompts, and sequences that have nothing new."""
    counts = python_random.sample([1, 1, 0, 5, 2], 5)
    lengths = [count + python_random.choice([0, 20, 50]) + (count == 0) for count in counts]
    inputs = make_inputs(case, counts, lengths)
    out = torch.full((sum(counts) + 2, case.heads, V_WIDTH), 7.0, device=DEVICE, dtype=bf16)
    padding = torch.full_like(inputs.q[:2], torch.nan)
    mixed(
        torch.cat([inputs.q, padding]), inputs.k, inputs.v, cumulated(counts), int32(lengths), *inputs[5:9],
        scale=SCALE, max_prompts=python_random.choice([None, 2]), kernel=case.kernel, out=out,
    )  # fmt: skip
    check_latents(case, inputs, out[: sum(counts)])
    assert (out[sum(counts) :] == 7).all()


HEADS = {"wgmma": 64, "mma": 16, "plain": 4}
"""As few as a kernel takes; of "plain", which computes them one by one, some."""


def latents(heads: int = 16, dtype: torch.dtype = bf16) -> tuple[torch.Tensor, ...]:
    """Queries of two sequences, latents with room for 64 tokens, and lengths."""
    q = torch.randn(2, 1, heads, WIDTH, device=DEVICE).to(dtype)
    return q, torch.randn(2, 64, 1, WIDTH, device=DEVICE).to(dtype), int32([33, 20])


@pytest.mark.few(3)
@pytest.mark.parametrize("function", ["prefill", "decode"])
@pytest.mark.parametrize("kernel", ["wgmma", "mma", "plain"])
def test_what_would_lie_before_a_row_is_not_read(kernel: str, function: str) -> None:
    """A start there is one at its first token, and a length below nothing is none."""
    q, k, _ = latents(HEADS[kernel])
    k[0], rows, cu_seqlens = torch.nan, int32([1, 1]), int32([0, 1, 2])
    below = -python_random.choice([1, 17, 40])
    given = int32([33, below]), rows, int32([below, 0])
    right = int32([33, 0]), rows, int32([0, 0])
    options = {"scale": SCALE, "kernel": kernel}
    if function == "prefill":
        outs = [prefill(q[:, 0], k, k[..., :V_WIDTH], cu_seqlens, *each, **options) for each in (given, right)]
    else:
        outs = [decode(q, k, k[..., :V_WIDTH], *each, **options) for each in (given, right)]
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


def test_what_does_not_fit_is_refused_before_any_launch() -> None:
    q, k, lens = latents()
    v = k[..., :V_WIDTH]
    wide, other = torch.zeros(2, 64, 1, WIDTH + 64, device=DEVICE, dtype=bf16), k.clone()
    eight = k.to(torch.float8_e4m3fn)
    scales = torch.ones(2, 64, 1, device=DEVICE)
    groups = int32([0, 2]), int32([16])
    out = torch.zeros(2, 1, 16, V_WIDTH, device=DEVICE, dtype=bf16)
    calls: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "no scale for latents", lambda: decode(q, k, v, lens, out=out)),
        (ValueError, "no scale for latents", lambda: prefill(q[:, 0], k, v, int32([0, 1, 2]), lens)),
        (ValueError, "must be their view", lambda: decode(q, k, k, lens, scale=SCALE)),
        (ValueError, "must be their view", lambda: decode(q, k, v.contiguous(), lens, scale=SCALE)),
        (ValueError, "must be their view", lambda: decode(q, k, other[..., :V_WIDTH], lens, scale=SCALE, out=out)),
        (ValueError, "must be their view", lambda: decode(q, k, k[..., 64:], lens, scale=SCALE, out=out)),
        (ValueError, "must be their view", lambda: decode(q, k, k[..., 8 : 8 + V_WIDTH], lens, scale=SCALE, out=out)),
        (ValueError, "latents k", lambda: decode(q, wide, v, lens, scale=SCALE, out=out)),
        (ValueError, "latents k", lambda: decode(
            q, k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1), lens, scale=SCALE, out=out
        )),
        (ValueError, "not of 8 bits", lambda: decode(
            q, eight, eight[..., :V_WIDTH], lens, scale=SCALE, k_scales=scales, v_scales=scales
        )),
        (ValueError, "it must be", lambda: decode(q, k, v, lens, scale=SCALE, out=torch.zeros_like(q))),
        (ValueError, "must be one of auto, mma, plain", lambda: decode(q, k, v, lens, scale=SCALE, kernel="wgmma")),
        (ValueError, "must be one of auto, plain", lambda: decode(
            q[:, :, :3], k, v, lens, scale=SCALE, kernel="mma"
        )),
        (ValueError, "cascade takes none", lambda: cascade(q, k, v, lens, *groups, scale=SCALE, out=out)),
        (ValueError, "576 of latents", lambda: decode(q[..., :V_WIDTH], v, v, lens)),
    ]  # fmt: skip
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    assert (out == 0).all()


def test_append_takes_latents_without_a_v() -> None:
    """Into rows and into blocks, whatever the strides of what is not there."""
    new = torch.randn(5, 1, WIDTH, device=DEVICE).to(bf16)
    blocks = torch.zeros(4, 16, 1, WIDTH, device=DEVICE, dtype=bf16)
    nothing = torch.empty(5, 1, 0, device=DEVICE, dtype=bf16)
    table, starts = int32([3, 1]).view(1, 2), int32([13])
    append(new, nothing, blocks, blocks[..., :0], int32([0]), starts, int32([0, 5]), table)
    assert torch.equal(torch.cat([blocks[3, 13:], blocks[1, :2]]), new)
    assert (blocks[[0, 2]] == 0).all()
