"""cascade against float64. What a group shares is NaN in all rows but its first one's, as is all that nobody sees."""

from __future__ import annotations

import random as python_random
from typing import NamedTuple

import pytest
import torch
from conftest import DEVICE, int32
from test_kernels_attention import Case, Inputs, bf16, check, e4m3, fp16, fp32, int8
from test_kernels_attention import make_inputs as independent

from vmmkv.kernels import cascade, decode, row_prefill

LONG = 140 if DEVICE == "cpu" else 3000
"""A prefix of several parts."""


class Batch(NamedTuple):
    """Sequences, some of them in groups, with queries, and K and V of their own in rows or blocks."""

    lengths: list[int]
    cu_groups: list[int]
    prefix_lens: list[int]
    leaders: list[int]
    """Of each sequence: the first one of its group."""
    shared: list[int]
    """And its tokens that only that one's row has."""


def random_batch(q_len: int, longest: int) -> Batch:
    """Groups of several, of one and of no sequences, and sequences in none; one is shorter than it should be."""
    sizes, prefix_lens = [python_random.randint(2, 3), 1, 0, 2], [longest, 40, 9, python_random.choice([1, 70, 128])]
    order = python_random.sample(range(4), 4)
    sizes, prefix_lens = [sizes[group] for group in order], [prefix_lens[group] for group in order]
    before = python_random.randint(0, 1)
    cu_groups = [before + sum(sizes[:group]) for group in range(5)]
    prefixes, leaders = [0] * before, list(range(before))
    for size, prefix, first in zip(sizes, prefix_lens, cu_groups):
        prefixes += [prefix] * size
        leaders += [first] * size
    prefixes, leaders = [*prefixes, 0], [*leaders, len(leaders)]
    lengths = [prefix + q_len + python_random.choice([0, python_random.randint(0, 40)]) for prefix in prefixes]
    lengths[python_random.randrange(len(lengths))] = python_random.randint(0, 20)
    most = [prefix if prefix <= lengths[leader] - q_len else 0 for prefix, leader in zip(prefixes, leaders)]
    shared = [
        most[index] if index != leader and most[index] <= lengths[index] - q_len else 0
        for index, leader in enumerate(leaders)
    ]
    return Batch(lengths, cu_groups, prefix_lens, leaders, shared)


def make_inputs(case: Case, batch: Batch) -> Inputs:
    """Random data in rows of a cache, or in blocks; what a group shares is in those of its first one alone."""
    lengths = batch.lengths
    inputs = independent(case, [min(case.q_len, length) for length in lengths], lengths)
    held = inputs[-2:] if case.kv else inputs[1:3]
    for index, (row, leader, shared) in enumerate(zip(inputs.rows.tolist(), batch.leaders, batch.shared)):
        for live in (inputs.live_k, inputs.live_v):
            live[index] = torch.cat([live[leader][:shared], live[index][shared:]])
        if case.block_size:
            inputs.block_table[row, : shared // case.block_size] = 1 << 30  # nobody looks these up
        begun = shared % case.block_size if case.block_size else shared
        first = inputs.block_table[row, shared // case.block_size] if case.block_size and begun else row
        for states in held if begun else ():  # a block of its own may begin with what is shared
            states[first, :begun] = torch.nan
    q = torch.randn(len(lengths) * case.q_len, case.heads, case.head_dim, device=DEVICE).to(case.dtype)
    return inputs._replace(q=q)


def run(case: Case, batch: Batch, inputs: Inputs) -> torch.Tensor:
    """The outputs, which were NaN."""
    q = inputs.q.unflatten(0, (len(batch.lengths), case.q_len))
    return cascade(
        q, inputs.k, inputs.v, int32(batch.lengths), int32(batch.cu_groups), int32(batch.prefix_lens), inputs.rows,
        inputs.block_table, inputs.sinks, k_scales=inputs.k_scales, v_scales=inputs.v_scales, softcap=case.softcap,
        out=torch.full_like(q, torch.nan), kernel=case.kernel,
    )  # fmt: skip


def check_outputs(case: Case, inputs: Inputs, outs: torch.Tensor) -> None:
    """Against float64. Queries before a sequence's first token give zeros."""
    q = inputs.q.unflatten(0, (-1, case.q_len))
    missing = [case.q_len - count for count in inputs.counts]
    assert all((out[:before] == 0).all() for out, before in zip(outs, missing))
    q, outs = (torch.cat([each[before:] for each, before in zip(of, missing)]) for of in (q, outs))
    check(case, inputs._replace(q=q), outs)


CASES = [
    Case(bf16, 128, 4, 1, q_len=1, kernel="wgmma"),
    Case(fp16, 64, 14, 2, q_len=2, sinks=True, kernel="mma"),
    Case(bf16, 80, 2, 1, q_len=1, softcap=3.0, kernel="wgmma"),
    Case(fp16, 96, 4, 1, q_len=1, block_size=16, kernel="wgmma"),
    Case(bf16, 64, 72, 1, q_len=1, kernel="wgmma"),
    Case(bf16, 64, 4, 1, q_len=1, kv=e4m3),
]
OTHER_KERNEL = [case._replace(kernel="mma" if case.kernel == "wgmma" else "wgmma") for case in CASES[:-1]]
ON_A_GPU = [
    *OTHER_KERNEL,
    Case(bf16, 256, 3, 1, q_len=3, kernel="mma"),
    Case(bf16, 256, 8, 2, q_len=1, sinks=True, kernel="wgmma"),
    Case(bf16, 128, 16, 2, q_len=8, block_size=64, kernel="mma"),
    Case(bf16, 192, 4, 4, q_len=2, block_size=32, softcap=5.0, kernel="wgmma"),
    Case(bf16, 128, 2, 1, q_len=1, block_size=16, kv=int8),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES + (ON_A_GPU if DEVICE == "cuda" else []), ids=str)
def test_cascade(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few parts, or in as many as a GPU with more multiprocessors would be given."""
    multiprocessors = python_random.choice([1, 8] if DEVICE == "cpu" else [1, 8, 132])
    monkeypatch.setattr(row_prefill, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(row_prefill, "ROOM_BYTES", python_random.choice([0, 1 << 26, 1 << 26]))
    batch = random_batch(case.q_len, python_random.choice([30, LONG]))
    inputs = make_inputs(case, batch)
    check_outputs(case, inputs, run(case, batch, inputs))


ALONE = [0, 1, 2, 3]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("dtype", "cu_groups", "prefix_lens", "others"),
    [
        (fp32, [0, 3], [20], ALONE),
        (bf16, [2], [], ALONE),
        (bf16, [1, 4], [0], ALONE),
        (bf16, [1, 4], [21], ALONE),
        (bf16, [0, 2, 4 + 5], [20, 20], [2, 3]),
        (bf16, [0, 2, 4 + 1000], [20, 20], [2, 3]),
        (bf16, [-1, 2, 4], [20, 20], [0, 1]),
        (bf16, [4, 9, 4], [20, 20], ALONE),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["wgmma", "mma", "plain"])
def test_what_is_not_shared_is_left_to_decode(
    dtype: torch.dtype, cu_groups: list[int], prefix_lens: list[int], others: list[int], kernel: str
) -> None:
    """Queries of fp32, no tensor cores, no groups, prefixes of no tokens, such as are too long, and groups that are
    not in the batch, which would read and write beyond it: rows of theirs do not begin with the same, others do."""
    q = torch.randn(4, 1, 2, 64, device=DEVICE).to(dtype)
    k, v = (torch.randn(4, 40, 1, 64, device=DEVICE).to(dtype) for _ in "kv")
    if others != ALONE and kernel != "plain":
        alike = [row for row in range(4) if row not in others]
        for states in (k, v):
            states[alike, :20] = states[alike[:1], :20]
    lens, name = int32([40, 21, 30, 27]), "auto" if dtype == fp32 else kernel
    out = cascade(q, k, v, lens, int32(cu_groups), int32(prefix_lens), kernel=name)
    exact = decode(q.float(), k.float(), v.float(), lens)
    assert (out - exact).norm() < 0.01 * exact.norm()


@pytest.mark.gpu
def test_one_captured_graph_serves_all_groups() -> None:
    """Groups, prefixes and lengths come with each replay. What is shared is only in the row of a group's first."""
    case = Case(bf16, 128, 8, 2, q_len=1)
    q = torch.empty(8, 1, case.heads, case.head_dim, device=DEVICE, dtype=bf16)
    k, v = (torch.empty(9, 3000, case.kv_heads, case.head_dim, device=DEVICE, dtype=bf16) for _ in "kv")
    given = [int32([0] * 8), int32([0] * 5), int32([0] * 4), int32([0] * 8)]
    cascade(q, k, v, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [cascade(q, k, v, *given) for _ in range(2)]
    for _ in range(8):
        batch = random_batch(1, 2000)
        inputs = make_inputs(case, batch)
        count = len(batch.lengths)
        for tensor, values in zip(given, (batch.lengths, batch.cu_groups, batch.prefix_lens, inputs.rows.tolist())):
            tensor.copy_(int32([*values, *[0] * (len(tensor) - len(values))]))  # the rest is unused places
        q[:count] = inputs.q[:, None]
        for whole, part in ((k, inputs.k), (v, inputs.v)):
            whole.fill_(torch.nan)
            for row, length in zip(inputs.rows.tolist(), batch.lengths):
                whole[row, :length] = part[row, :length]
        graph.replay()
        for out in outs:
            check_outputs(case, inputs, out[:count])
            assert (out[count:] == 0).all()
