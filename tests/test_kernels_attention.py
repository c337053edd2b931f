"""decode, prefill and mixed against float64: in Numba's simulator on host memory, or on a GPU, where there are more
tokens. Heads of 576 are MLA's latents, of which V is a part.

Everything outside the tokens that a query may see is NaN, in the cache's rows and in unused blocks, and so is the
output before the call.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import DEVICE, few, int32

import vmmkv
from vmmkv.kernels import append, decode, dequantize, mixed, prefill, quantize, sequence_scales

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
e4m3, int8 = torch.float8_e4m3fn, torch.int8
LATENT, LATENT_V = 576, 512


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
    whole: bool = False
    """Whether their scales are those of whole sequences."""

    @property
    def scale(self) -> float:
        return 192**-0.5 if self.head_dim == LATENT else self.head_dim**-0.5

    @property
    def v_dim(self) -> int:
        return LATENT_V if self.head_dim == LATENT else self.head_dim


def latents(heads: int, dtype: torch.dtype = bf16, **options: Any) -> Case:
    return Case(dtype, LATENT, heads, 1, **options)


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
    if case.head_dim == LATENT:
        lives[1] = [live[..., :LATENT_V] for live in lives[0]]
    values = lives
    if case.kv:  # heads of many sizes, and what their bytes stand for
        sizes = [torch.empty(*shape[:2], 1, device=DEVICE).uniform_(-3, 1).exp2() for shape in shapes]
        rounded = [[in_8_bits(case, new * size) for new, size in zip(live, sizes)] for live in lives]
        values = [[pair[part] for pair in pairs] for part in range(2) for pairs in rounded]
        lives = [[dequantize(*pair, torch.float64) for pair in pairs] for pairs in rounded]
    starts = [python_random.randint(0, min(20, length - count)) for count, length in zip(counts, lengths)]
    rows = python_random.sample(range(1, len(lengths) + 1), len(lengths))
    if case.block_size:
        blocks = -(-max(lengths) // case.block_size)
        names = torch.randperm(blocks * (len(lengths) + 1)).view(-1, blocks)
        shape = (names.numel(), case.block_size, case.kv_heads, case.head_dim)
        wide = [torch.zeros(*shape[:3], shape[3] + more, device=DEVICE) for more in (0, 16)]  # V has its own strides
        views = [states.to(case.kv or case.dtype)[..., : case.head_dim] for states in wide]
        views += [torch.empty(shape[:3], device=DEVICE) for _ in "kv" if case.kv]
        for view in views[-2:]:
            view.fill_(torch.nan)
        if case.head_dim == LATENT:
            views[1] = views[0][..., :LATENT_V]
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


def in_8_bits(case: Case, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and a scale for each token and head."""
    if not case.whole:
        return quantize(states, case.kv)
    scales = sequence_scales(states, case.kv).expand(states.shape[:2])
    return quantize(states, case.kv, scales)[0], scales


def rows_of_a_cache(case: Case, rows: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """K and V of the second layer, and scales; all that is mapped is NaN, the rest is not mapped. A page has but a few
    tokens."""
    wide = DEVICE == "cuda" and case.head_dim != LATENT
    scales = ("sequence_head" if case.whole else "token_head") if case.kv else None
    v_head_dim = 0 if case.head_dim == LATENT else None
    layout = vmmkv.KVLayout(
        32 if wide else 3, case.kv_heads, case.head_dim, case.kv or case.dtype, v_head_dim, scales=scales
    )
    page_size = 4096 if DEVICE == "cpu" else None
    cache = vmmkv.KVCache(layout, len(rows) + 1, max(lengths), max_bytes="4GiB", device=DEVICE, page_size=page_size)
    sequences = {sequence.row: sequence for sequence in [cache.sequence() for _ in range(len(rows) + 1)]}
    for row, length in zip(rows, lengths):
        sequences[row].extend(length)
        for layer in range(3):
            for view in cache.scaled_kv(layer)[2:] if case.kv else cache.kv(layer):
                view[row, : 1 if case.whole else sequences[row].capacity] = torch.nan
    k, v, *scales = cache.scaled_kv(1) if case.kv else cache.kv(1)
    return (k, k[..., :LATENT_V]) if case.head_dim == LATENT else (k, v, *scales)


def cumulated(counts: list[int]) -> torch.Tensor:
    return int32([sum(counts[:index]) for index in range(len(counts) + 1)])


def run(function: Callable[..., torch.Tensor], case: Case, inputs: Inputs, padding: int = 0, **more: Any) -> Any:
    """The output, which was NaN, of all tokens; behind them there may be padding."""
    q, lens = inputs.q, int32(inputs.lengths)
    q = torch.cat([q, torch.full_like(q[:1], torch.nan).expand(padding, -1, -1)]) if padding else q
    if function is decode:
        q, places = q.view(len(lens), case.q_len, case.heads, case.head_dim), (lens,)
    else:
        places = cumulated(inputs.counts), lens
    out = torch.full_like(q[..., : case.v_dim], torch.nan, memory_format=torch.contiguous_format)
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap, "kernel": case.kernel} | more
    scales = {"k_scales": inputs.k_scales, "v_scales": inputs.v_scales}
    function(q, inputs.k, inputs.v, *places, *inputs[5:9], **scales, **options, out=out)
    return out.view(-1, case.heads, case.v_dim)


def attend(case: Case, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """The same in plain torch, in another precision."""
    outputs = []
    for index, (count, length) in enumerate(zip(inputs.counts, inputs.lengths)):
        q = inputs.q[sum(inputs.counts[:index]) :][:count].to(dtype)
        group = case.heads // case.kv_heads
        k, v = (live[index].to(dtype).repeat_interleave(group, 1) for live in (inputs.live_k, inputs.live_v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.scale
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


def check(case: Case, inputs: Inputs, ours: torch.Tensor) -> None:
    times = 3 if case.head_dim == LATENT and case.dtype == fp32 else 2  # 576 products are added one after the other
    check_error(ours, attend(case, inputs, torch.float64), attend(case, inputs, case.dtype), times)


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
    Case(bf16, 64, 4, 2, q_len=1, kv=int8, whole=True),
    Case(bf16, 64, 4, 2, q_len=1, kv=e4m3, whole=True, kernel="plain"),
    Case(fp32, 64, 4, 2, q_len=1, kv=int8, whole=True),
]
DECODE_LATENTS = [
    latents(16, q_len=1, kernel="mma"),
    latents(16, q_len=1, block_size=16, dtype=fp16),
    latents(16, q_len=2, starts=True, sinks=True),
    latents(32, q_len=1, block_size=48),
    latents(16, q_len=1, window=40, softcap=3.0, kernel="mma"),
    latents(48, q_len=1, starts=True, kernel="mma"),
    latents(64, q_len=1, kernel="mma"),
    latents(80, q_len=1, block_size=32, kernel="mma", dtype=fp16),
]
DECODE_LATENTS_HOPPER = [
    latents(64, q_len=1, kernel="wgmma"),
    latents(16, q_len=4, block_size=16, dtype=fp16),
    latents(48, q_len=2, starts=True, sinks=True, kernel="wgmma"),
    latents(16, q_len=8, window=40, kernel="wgmma"),
    latents(128, q_len=1, block_size=64, kernel="wgmma"),
    latents(64, q_len=1, softcap=3.0, kernel="wgmma"),
]
DECODE_LATENTS_PLAIN = [
    latents(3, q_len=2),
    latents(2, q_len=1, dtype=fp32, block_size=16),
    latents(4, q_len=1, dtype=fp32, window=20, sinks=True),
]


def some_of_each(number: int, group: str, cases: list[Case]) -> list[Any]:
    """Of these cases the simulator runs one with a window, one with a block table, and so many others."""
    windows = [case for case in cases if case.window]
    blocks = [case for case in cases if case.block_size and not case.window]
    others = [case for case in cases if not case.block_size and not case.window]
    return few(1, f"{group}, window", windows) + few(1, f"{group}, blocks", blocks) + few(number, group, others)


@pytest.mark.parametrize(
    "case",
    few(1, "plain", DECODE_PLAIN)
    + some_of_each(2, "fast", DECODE_FAST)
    + few(1, "8 bits", DECODE_8_BITS)
    + few(2, "latents, mma", DECODE_LATENTS)
    + few(1, "latents, wgmma", DECODE_LATENTS_HOPPER)
    + few(1, "latents, plain", DECODE_LATENTS_PLAIN),
)
def test_decode(case: Case) -> None:
    """A sequence that is cut into shares, or not, among shorter ones."""
    is_latent = case.head_dim == LATENT
    most = 3000 if DEVICE == "cuda" else 300 if not is_latent else 40 if case in DECODE_LATENTS_PLAIN else 170
    longest = python_random.choice([70, most])
    others = 40 if is_latent else 70 if DEVICE == "cpu" else longest
    most = 1 if is_latent and case.heads >= 64 and DEVICE == "cpu" else 3 if is_latent else 4
    lengths = [python_random.randint(case.q_len, others) for _ in range(python_random.randint(1, most))]
    lengths.insert(python_random.randint(0, len(lengths)), longest)
    inputs = make_inputs(case, [case.q_len] * len(lengths), lengths)
    out = run(decode, case, inputs)
    check(case, inputs, out)
    if is_latent and DEVICE == "cpu":  # counters are 0 again
        assert torch.equal(run(decode, case, inputs), out)


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
    Case(bf16, 64, 4, 2, kv=int8, whole=True, kernel="mma"),
    Case(bf16, 64, 4, 2, kv=int8, whole=True, kernel="plain"),
]
PREFILL_LATENTS = [
    latents(16, kernel="mma"),
    latents(16, kernel="mma", block_size=16, dtype=fp16, starts=True),
    latents(48, kernel="mma", causal=False),
    latents(80, kernel="mma", window=30, sinks=True),
]
PREFILL_LATENTS_PLAIN = [latents(3), latents(2, dtype=fp32, block_size=32), latents(1, window=20, starts=True)]


@pytest.mark.parametrize(
    "case",
    few(1, "8 bits", PREFILL_8_BITS)
    + few(1, "plain", PREFILL_PLAIN)
    + some_of_each(1, "mma", [case._replace(kernel="mma") for case in PREFILL_FAST])
    + some_of_each(1, "wgmma", [case._replace(kernel="wgmma") for case in PREFILL_FAST])
    + few(1, "latents, mma", PREFILL_LATENTS)
    + few(1, "latents, wgmma", [case._replace(kernel="wgmma") for case in PREFILL_LATENTS])
    + few(1, "latents, plain", PREFILL_LATENTS_PLAIN),
)
def test_prefill(case: Case) -> None:
    """Of a prompt without a cache, one token, and a chunk behind earlier ones, two; on a GPU all of them."""
    most = 500 if DEVICE == "cuda" else 24 if case.kernel.endswith("mma") else 4  # "plain" does one token at a time
    if case.head_dim == LATENT and DEVICE == "cpu":
        most = 3 if case in PREFILL_LATENTS_PLAIN else max(2, 144 // case.heads)  # some tiles of heads
    before = python_random.randint(0, 60 if case.head_dim == LATENT else 90)
    sequences = [(python_random.randint(1, most), 0), (1, before), (python_random.randint(most, 2 * most), before)]
    sequences = python_random.sample(sequences, 3 if DEVICE == "cuda" else 2)
    counts = [count for count, _ in sequences]
    inputs = make_inputs(case, counts, [count + before for count, before in sequences])
    out = run(prefill, case, inputs, padding=2, causal=case.causal)
    check(case, inputs, out[:-2])
    assert out[-2:].isnan().all(), "tokens behind the last sequence are left alone"


MIXED = few(1, "8 bits", [Case(bf16, 64, 1, 1, block_size=16, kv=int8)])
MIXED += few(2, "16 bits", [case for case in PREFILL_FAST if case.causal])
MIXED += [pytest.param(PREFILL_PLAIN[0], marks=pytest.mark.gpu, id=str(PREFILL_PLAIN[0]))]
MIXED += few(1, "latents", [latents(16), latents(16, kernel="mma", block_size=16), latents(64)])


@pytest.mark.parametrize("case", MIXED)
def test_prompts_and_single_tokens_in_one_batch(case: Case) -> None:
    """Single tokens behind long and short beginnings, chunks of prompts, and sequences that have nothing new. A batch
    may be padded to a size that was seen before."""
    most = 500 if DEVICE == "cuda" else 5 if case.head_dim == LATENT else 20
    counts = [1, 1, 1, 0, 0, python_random.randint(2, most), 2]
    counts = python_random.sample(counts, 5 if case.head_dim == LATENT else 7)
    lengths = [count + python_random.choice([0, 20, max(2 * most, 40)]) + (count == 0) for count in counts]
    inputs = make_inputs(case, counts, lengths)
    out = run(mixed, case, inputs, padding=3, max_prompts=python_random.choice([None, 2]))
    check(case, inputs, out[: sum(counts)])
    assert out[sum(counts) :].isnan().all(), "padding is left alone"


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
    lives = [[torch.randn(length, 1, 64, device=DEVICE).to(bf16) for length in lengths] for _ in "kv"]
    for states, live in zip((k, v), lives):
        for sequence, new in zip(sequences, live):
            states[sequence.row, : len(new)] = new
    rows, q = int32([sequence.row for sequence in sequences]), torch.randn(63, 2, 64, device=DEVICE).to(bf16)
    inputs = Inputs(q, k, v, lengths, lengths, rows, None, None, None, *lives)
    check(case, inputs, run(prefill, case, inputs))
    with pytest.raises(ValueError, match="strides; it must be one of auto, mma, plain"):
        run(prefill, case._replace(kernel="wgmma"), inputs)


def call(function: str, q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """`decode`, or `prefill`, of one query for each sequence `[sequences, 1, heads, head_dim]`."""
    if function == "decode":
        return decode(q, *arguments, **options)
    return prefill(q[:, 0], *arguments[:2], int32(range(len(q) + 1)), *arguments[2:], **options)[:, None]


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


@pytest.mark.few(9)
@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize(
    ("function", "kernel", "heads", "width"),
    [(*way, 2, 64) for way in WAYS]
    + [(*way, {"wgmma": 64, "mma": 16, "plain": 4}[way[1]], LATENT) for way in [*WAYS, ("decode", "wgmma")]],
)
def test_what_lies_outside_of_a_sequence_is_not_read(
    function: str, kernel: str, heads: int, width: int, block_size: int
) -> None:
    """It holds NaN, in front of the row, or of its part of the block table, and behind. A start before the first token
    is one at it, and a length below nothing is nothing; a query that sees nothing gives zeros and looks up no block,
    as for a sequence that is nothing but padding."""
    q = torch.randn(4, 1, heads, width, device=DEVICE).to(bf16)
    below, length = -python_random.choice([1, 7, 16, 17, 40, 1 << 31]), python_random.randint(1, 48)
    seen = [(length, -python_random.randint(1, 48)), (20, 3), (below, below), (16, python_random.choice([16, 21]))]
    seen = python_random.sample([*seen[:2], python_random.choice([(0, 0), seen[2]]), seen[3]], 4)
    k, v = (torch.full((6, 48, 1, width), torch.nan, device=DEVICE, dtype=bf16) for _ in "kv")
    rows, exact = [], []
    for row, (query, (end, start)) in enumerate(zip(q, seen)):
        there = slice(max(start, 0), max(end, 0))
        for states in (k, v):
            states[row + 1, : there.stop] = torch.randn_like(states[row + 1, : there.stop])
        keys, values = (states[row + 1, there, 0].double() for states in (k, v if width == 64 else k[..., :LATENT_V]))
        exact.append(torch.softmax(query[0].double() @ keys.T * 0.1, 1) @ values)
        rows.append(row + 1 if len(keys) or not block_size else 1 << 30)
    table = None
    if block_size:
        k, v = (states.unflatten(1, (3, 16)).flatten(0, 1) for states in (k, v))
        table = int32(range(18)).view(6, 3)
    v = v if width == 64 else k[..., :LATENT_V]
    ends, starts = (int32(each) for each in zip(*seen))
    options = {"window": python_random.choice([0, 60]), "kernel": kernel, "scale": 0.1}
    out = call(function, q, k, v, ends, int32(rows), starts, table, **options)[:, 0]
    for found, right, (end, start) in zip(out, exact, seen):
        assert (found - right).norm() <= 0.02 * right.norm(), (end, start)


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


def appended(
    kv: torch.dtype, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scales: str = "token_head"
) -> dict[str, torch.Tensor]:
    """What `decode` is to be given of K and V of several sequences, once they are quantized into rows of a cache."""
    layout = vmmkv.KVLayout(2, k.shape[1], k.shape[2], kv, scales=scales)
    cache = vmmkv.KVCache(layout, len(lengths), max(lengths), max_tokens=sum(lengths) + 100, device=DEVICE)
    sequences = [cache.sequence(length) for length in lengths]
    held, rows = cache.scaled_kv(1), int32([sequence.row for sequence in sequences])
    starts, cu_seqlens = int32([0] * len(lengths)), int32([0, *lengths]).cumsum(0, dtype=torch.int32)
    written: tuple[torch.Tensor, ...] = held[2:]
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
