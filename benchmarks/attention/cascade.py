"""Decode of sequences that begin with the same tokens, which are read once for all of them, or once for each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from vmmkv import KVCache, KVLayout
from vmmkv.kernels import cascade, decode

from .batches import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Batch, Case, Reference, make_batch
from .cases import Contender, reason_of
from .layouts import KV, MODEL_LAYERS
from .peers import make_workspace
from .timing import Call, Timing, measure

BLOCK_SIZE = 16
NAMES = "contiguous", "token-major", f"paged-{BLOCK_SIZE}"
KERNELS = "auto", "mma"
"""Of `cascade`."""
PLAIN, PEER = "vmmkv, decode", "FlashInfer, cascade"


@dataclass(frozen=True)
class Shape:
    """Groups of sequences that begin with the same tokens."""

    groups: int
    size: int
    """Sequences of a group."""
    shared: int
    own: int

    @property
    def case(self) -> Case:
        name = f"{self.groups} x {self.size} sequences, {self.shared} + {self.own} tokens"
        return Case("cascade", name, (self.shared + self.own,) * (self.groups * self.size))


SHAPES = (
    Shape(1, 64, 8192, 512),
    Shape(1, 64, 2048, 512),
    Shape(8, 8, 8192, 512),
    Shape(16, 4, 2048, 512),
)


@dataclass(frozen=True)
class Shared:
    """A batch in one layout.

    Attributes:
        kv: K and V; in rows of a cache and in blocks there is one copy of what is shared.
        rows: int32 `[batch]`, the row of each sequence.
    """

    kv: KV
    rows: torch.Tensor


def make_shared(shape: Shape, device: torch.device) -> Batch:
    """Random data of which each group's first tokens are the same."""
    batch = make_batch(shape.case, device)
    for rows in (batch.k, batch.v):
        by_group = rows.unflatten(0, (shape.groups, shape.size))
        by_group[:, 1:, : shape.shared] = by_group[:, :1, : shape.shared]
    return batch


@contextmanager
def shared_layouts(shape: Shape, batch: Batch, names: tuple[str, ...] = NAMES) -> Iterator[list[Shared]]:
    """The same K and V in some layouts; the memory of rows is given back in the end."""
    rows = torch.arange(len(shape.case.seq_lens), dtype=torch.int32, device=batch.k.device)
    made = {NAMES[0]: Shared(KV(NAMES[0], batch.k, batch.v), rows)}
    if NAMES[2] in names:
        made[NAMES[2]] = Shared(in_blocks(shape, batch), rows)
    if NAMES[1] not in names:
        yield [made[name] for name in names]
        return
    layout = KVLayout(MODEL_LAYERS, NUM_KV_HEADS, HEAD_DIM, DTYPE)
    tokens = shape.groups * (shape.shared + shape.size * shape.own)
    with KVCache(layout, len(rows), batch.k.shape[1], max_tokens=tokens, device=batch.k.device, lookahead=0) as cache:
        made[NAMES[1]] = in_rows(shape, batch, cache)
        yield [made[name] for name in names]


def in_rows(shape: Shape, batch: Batch, cache: KVCache) -> Shared:
    """Rows of a cache, forked from the first of each group; a layer in the middle holds K and V."""
    layer, sequences = MODEL_LAYERS // 2, []
    for first in range(0, len(shape.case.seq_lens), shape.size):
        parent = cache.sequence(shape.shared)
        parent.write(layer, batch.k[first, : shape.shared], batch.v[first, : shape.shared])
        sequences += [parent, *cache.fork_many(parent, shape.size - 1)]
    cache.extend(sequences, [shape.own] * len(sequences))
    whole = slice(shape.shared, shape.shared + shape.own)
    for index, sequence in enumerate(sequences):
        sequence.write(layer, batch.k[index, whole], batch.v[index, whole])
    rows = torch.tensor([sequence.row for sequence in sequences], dtype=torch.int32, device=batch.k.device)
    return Shared(KV("token-major", *cache.kv(layer), layers=MODEL_LAYERS), rows)


def in_blocks(shape: Shape, batch: Batch) -> KV:
    """Blocks in random order, K beside V; those of a prefix are in the tables of all of its group."""
    sequences, device = len(shape.case.seq_lens), batch.k.device
    prefix, own = shape.shared // BLOCK_SIZE, -(-shape.own // BLOCK_SIZE)
    order = torch.randperm(shape.groups * prefix + sequences * own).to(torch.int32)
    of_groups = order[: shape.groups * prefix].view(-1, prefix).repeat_interleave(shape.size, 0)
    block_table = torch.cat([of_groups, order[shape.groups * prefix :].view(sequences, own)], 1).to(device)
    blocks = torch.empty(len(order), 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    for which, rows in enumerate((batch.k, batch.v)):
        tokens = rows[:, : (prefix + own) * BLOCK_SIZE].unflatten(1, (-1, BLOCK_SIZE))
        for sequence in range(sequences):
            blocks[block_table[sequence], which] = tokens[sequence]
    return KV(NAMES[2], blocks[:, 0], blocks[:, 1], block_table)


def groups_of(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`cu_groups` and `prefix_lens`."""
    cu_groups = torch.arange(shape.groups + 1, dtype=torch.int32, device=device) * shape.size
    return cu_groups, torch.full((shape.groups,), shape.shared, dtype=torch.int32, device=device)


def ours(shape: Shape, batch: Batch, shared: Shared, kernel: str | None) -> Call:
    """A call of `cascade`, or, without a kernel, of `decode`; into an output that starts as NaN."""
    kv, out = shared.kv, torch.full_like(batch.q, torch.nan)
    options: dict[str, Any] = {"rows": shared.rows, "block_table": kv.block_table, "out": out}
    if kernel is None:
        return partial(decode, batch.q, kv.k, kv.v, batch.seq_lens, **options)
    groups = groups_of(shape, batch.q.device)
    return partial(cascade, batch.q, kv.k, kv.v, batch.seq_lens, *groups, kernel=kernel, **options)


def flashinfer_cascade(shape: Shape, batch: Batch, kv: KV) -> Call:
    """FlashInfer's cascade of two levels, planned here, outside of what is timed."""
    from flashinfer import MultiLevelCascadeAttentionWrapper

    assert kv.block_table is not None
    sequences, device = len(shape.case.seq_lens), batch.q.device
    prefix, own = shape.shared // BLOCK_SIZE, kv.block_table.shape[1] - shape.shared // BLOCK_SIZE
    cu_groups, _ = groups_of(shape, device)
    first = kv.block_table[:: shape.size, :prefix]
    wrapper = MultiLevelCascadeAttentionWrapper(2, make_workspace(batch), "NHD")
    wrapper.plan(
        [cu_groups, batch.cu_seqlens],
        [torch.arange(count + 1, dtype=torch.int32, device=device) * each for count, each in
         ((shape.groups, prefix), (sequences, own))],
        [first.flatten(), kv.block_table[:, prefix:].flatten()],
        [torch.full((count,), last, dtype=torch.int32, device=device) for count, last in
         ((shape.groups, BLOCK_SIZE), (sequences, (shape.own - 1) % BLOCK_SIZE + 1))],
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE,
    )  # fmt: skip
    return partial(wrapper.run, batch.q.flatten(0, 1), (kv.k, kv.v))


Rows = list[dict[str, Any]]


def run_cascade(shapes: tuple[Shape, ...], device: torch.device) -> tuple[Rows, Rows]:
    """Microseconds with and without, in each layout; and which peers were skipped, and why."""
    compile_kernels()
    results: Rows = []
    skipped: Rows = []
    for shape in shapes:
        torch.cuda.empty_cache()
        batch = make_shared(shape, device)
        reference = Reference(batch)
        with shared_layouts(shape, batch) as made:
            contenders = [
                Contender(name_of(kernel), shared.kv, ours(shape, batch, shared, kernel))
                for shared, kernel in product(made, (None, *KERNELS))
            ]
            try:
                contenders.append(peer_of(shape, batch, made[-1].kv))
            except Exception as error:  # whatever a peer raises is its reason
                case = f"cascade, {shape.case.name}"
                skipped.append({"kernel": PEER, "layout": NAMES[2], "case": case, "reason": reason_of(error)})
            timings = measure([contender.call for contender in contenders])
            rows = [make_row(*pair, shape, reference) for pair in zip(contenders, timings)]
        results += with_gains(rows)
    return results, skipped


def name_of(kernel: str | None) -> str:
    return f"vmmkv, cascade, {kernel}" if kernel else PLAIN


def peer_of(shape: Shape, batch: Batch, kv: KV) -> Contender:
    """The peer, which has run once."""
    call = flashinfer_cascade(shape, batch, kv)
    call()
    torch.cuda.synchronize()
    return Contender(PEER, kv, call)


def make_row(contender: Contender, timing: Timing, shape: Shape, reference: Reference) -> dict[str, Any]:
    return {
        "case": shape.case.name,
        "kernel": contender.kernel,
        "layout": contender.kv.name,
        "layers": contender.kv.layers,
        "microseconds": timing.microseconds,
        "error": reference.error(timing.output),
        "captured": timing.captured,
    }


def with_gains(rows: Rows) -> Rows:
    """Adds to each row how many times as fast it is as `decode` in the same layout."""
    plain = {row["layout"]: row["microseconds"] for row in rows if row["kernel"] == PLAIN}
    return [row | {"gain": plain[row["layout"]] / row["microseconds"]} for row in rows]


def compile_kernels() -> None:
    """Compiles ours in several processes; the results stay on disk, where this process finds them."""
    work = list(product((NAMES[0], NAMES[2]), (None, *KERNELS)))
    with ProcessPoolExecutor(len(work), get_context("spawn")) as pool:
        list(pool.map(run_once, *zip(*work)))


def run_once(layout: str, kernel: str | None) -> None:
    shape = Shape(1, 2, 256, 16)
    batch = make_shared(shape, torch.device("cuda"))
    with shared_layouts(shape, batch, (layout,)) as (shared,):
        ours(shape, batch, shared, kernel)()
        torch.cuda.synchronize()
