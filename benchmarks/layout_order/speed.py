"""How fast kernels are on each order: decode, prefill and append on views of the same random numbers.

A page is a block of as many tokens as it holds; heads first, a head's tokens are `head_dim` apart and heads a block.
Beside it lie the same blocks with tokens first, rows with tokens first, and contiguous rows of one layer alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.attention.shapes import attend_exactly
from benchmarks.attention.timing import Call, measure
from vmmkv.kernels import append, decode, prefill

from .orders import BLOCK_STEP, MODELS, PAGE_BYTES, Model, tokens_of_page

DTYPE = torch.bfloat16
TOKENS = 4096
"""Of each sequence."""
DECODE_BYTES = 256 << 20
"""K and V that a decode step reads: several times the second-level cache."""
PROMPTS = 4
"""Sequences that prefill and append work on."""
CHECKED_QUERIES = 8
RANGES = "all", "4"
"""Layers of a range that are measured; kernels are compiled for each size of blocks."""
ERROR_BOUND = 2e-2
"""A relative error that rounding to bf16 can explain."""


@dataclass(frozen=True)
class Order:
    """K and V of a layer, in rows or, with a block table, in blocks."""

    name: str
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor | None = None

    def sequence(self, index: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence's first tokens, `[tokens, kv_heads, head_dim]`."""
        if self.block_table is None:
            return self.k[index, :tokens], self.v[index, :tokens]
        blocks = self.block_table[index]
        return self.k[blocks].flatten(0, 1)[:tokens], self.v[blocks].flatten(0, 1)[:tokens]


@dataclass(frozen=True)
class Shape:
    """Sequences of a model that are as long as each other, with so many layers in a range."""

    model: Model
    layers: int
    sequences: int
    tokens: int
    block: int
    """Tokens of a page; 0: fewer than a block has."""
    page: int
    """Elements of a page."""

    @property
    def record(self) -> int:
        """Elements of a token record."""
        return self.layers * 2 * self.model.kv_heads * self.model.head_dim

    @property
    def blocks(self) -> int:
        """Of a sequence."""
        return -(-self.tokens // self.block) if self.block else 0

    @property
    def elements(self) -> int:
        """That views of it lie in."""
        return self.sequences * max(self.blocks * self.page, self.tokens * self.record)


def shape_of(model: Model, layers: int) -> Shape:
    """What is measured: as many sequences as make `DECODE_BYTES`."""
    token_bytes = 2 * model.kv_heads * model.head_dim * DTYPE.itemsize
    block = tokens_of_page(layers * token_bytes, BLOCK_STEP)
    return Shape(model, layers, DECODE_BYTES // (TOKENS * token_bytes), TOKENS, block, PAGE_BYTES // DTYPE.itemsize)


def make_orders(shape: Shape, numbers: torch.Tensor) -> list[Order]:
    """Views of `numbers`, of a layer in the middle of its range; pages are in random order."""
    _, _, heads, dim = shape.model
    width, layer = heads * dim, shape.layers // 2

    def views(sizes: tuple[int, int], strides: tuple[int, int, int], first: int, v: int) -> list[torch.Tensor]:
        return [numbers.as_strided((*sizes, heads, dim), (*strides, 1), place) for place in (first, first + v)]

    rows, whole = (shape.sequences, shape.tokens), shape.sequences * shape.tokens * width
    orders = [
        Order("contiguous", *views(rows, (shape.tokens * width, width, dim), 0, whole)),
        Order(
            "rows, tokens first",
            *views(rows, (shape.tokens * shape.record, shape.record, dim), layer * 2 * width, width),
        ),
    ]
    if shape.block:
        pages, apart = (shape.sequences * shape.blocks, shape.block), shape.block * dim
        table = torch.randperm(pages[0], device=numbers.device).to(torch.int32).view(shape.sequences, -1)
        tokens_first = views(pages, (shape.page, shape.record, dim), layer * 2 * width, width)
        heads_first = views(pages, (shape.page, dim, apart), layer * 2 * width * shape.block, width * shape.block)
        orders += [
            Order("blocks, tokens first", *tokens_first, table),
            Order("blocks, heads first", *heads_first, table),
        ]
    return orders


# ------------------------------------------------------------------ what is timed


@dataclass(frozen=True)
class Part:
    """A kernel's work on a shape: decode of all sequences, prefill or append of some.

    Attributes:
        amount: bytes, or floating-point operations.
        make: a call on an order.
        error: how far its output is off there; NaN where it wrote something else than it was given.
    """

    name: str
    unit: str
    amount: float
    make: Callable[[Order], Call]
    error: Callable[[Order, torch.Tensor], float]


def decode_part(shape: Shape, device: torch.device) -> Part:
    _, heads, kv_heads, dim = shape.model
    q = torch.randn(shape.sequences, 1, heads, dim, dtype=DTYPE, device=device)
    seq_lens = full(shape.sequences, shape.tokens, device)

    def make(order: Order) -> Call:
        return partial(decode, q, order.k, order.v, seq_lens, block_table=order.block_table)

    def error(order: Order, out: torch.Tensor) -> float:
        return off_by(out[-1:], q[-1:], order.sequence(shape.sequences - 1, shape.tokens))

    nbytes = shape.sequences * shape.tokens * 2 * kv_heads * dim * DTYPE.itemsize
    return Part("decode", "gb_per_s", nbytes / 1e9, make, error)


def prefill_part(shape: Shape, device: torch.device) -> Part:
    _, heads, _, dim = shape.model
    prompts = min(PROMPTS, shape.sequences)
    q = torch.randn(prompts * shape.tokens, heads, dim, dtype=DTYPE, device=device)
    seq_lens = full(prompts, shape.tokens, device)
    cu_seqlens = torch.arange(prompts + 1, dtype=torch.int32, device=device) * shape.tokens

    def make(order: Order) -> Call:
        return partial(prefill, q, order.k, order.v, cu_seqlens, seq_lens, block_table=order.block_table)

    def error(order: Order, out: torch.Tensor) -> float:
        last = slice(-min(CHECKED_QUERIES, shape.tokens), None)
        return off_by(out[None, last], q[None, last], order.sequence(prompts - 1, shape.tokens))

    pairs = prompts * shape.tokens * (shape.tokens + 1) / 2
    return Part("prefill", "tflops", 4 * heads * dim * pairs / 1e12, make, error)


def append_part(shape: Shape, device: torch.device) -> Part:
    prompts = min(PROMPTS, shape.sequences)
    sizes = prompts * shape.tokens, shape.model.kv_heads, shape.model.head_dim
    new = [torch.randn(sizes, dtype=DTYPE, device=device) for _ in "kv"]
    rows = torch.arange(prompts, dtype=torch.int32, device=device)
    starts = torch.zeros_like(rows)
    cu_seqlens = torch.arange(prompts + 1, dtype=torch.int32, device=device) * shape.tokens

    def make(order: Order) -> Call:
        def call() -> torch.Tensor:
            append(*new, order.k, order.v, rows, starts, cu_seqlens, order.block_table)
            return order.k

        return call

    def error(order: Order, out: torch.Tensor) -> float:
        make(order)()  # others have written to the same memory since
        found = [order.sequence(index, shape.tokens) for index in range(prompts)]
        same = (torch.equal(torch.cat(states), given) for states, given in zip(zip(*found), new))
        return 0.0 if all(same) else torch.nan

    return Part("append", "gb_per_s", 2 * sum(each.nbytes for each in new) / 1e9, make, error)


PARTS = decode_part, prefill_part, append_part
"""Append is last: it writes over what the others read."""


def full(count: int, value: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32, device=device)


def off_by(out: torch.Tensor, q: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Of the norm; `[1, queries, heads, head_dim]`, the queries of the last tokens."""
    k, v = (each[None].double() for each in states)
    exact = attend_exactly(q.double(), k, v)
    return float((out.double() - exact).norm() / exact.norm())


# ------------------------------------------------------------------ all of it


def run_speed(device: torch.device) -> list[dict[str, Any]]:
    """A row of figures for each model, layers of a range, order and part; times beside those of contiguous rows."""
    shapes = {
        (name, called): shape_of(model, model.ranges()[called]) for name, model in MODELS.items() for called in RANGES
    }
    small = {small_shape(shape.model, block) for shape in shapes.values() for block in (0, shape.block)}
    jobs = [(shape, part) for part in range(len(PARTS)) for shape in small]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), get_context("spawn")) as pool:
        list(pool.map(run_once, *zip(*jobs)))
    rows = []
    for (name, called), shape in shapes.items():
        rows += [{"model": name, "layers_per_range": called, **row} for row in run_shape(shape, device)]
        torch.cuda.empty_cache()
    return rows


def run_shape(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    orders = make_orders(shape, torch.empty(shape.elements, dtype=DTYPE, device=device).normal_())
    rows = []
    for part in (make(shape, device) for make in PARTS):
        timings = measure([part.make(order) for order in orders])
        for order, timing in zip(orders, timings):
            rows.append(
                {
                    "part": part.name,
                    "order": order.name,
                    "tokens_of_block": shape.block if order.block_table is not None else None,
                    "sequences": shape.sequences,
                    "microseconds": timing.microseconds,
                    part.unit: part.amount / timing.microseconds * 1e6,
                    "of_contiguous": timing.microseconds / timings[0].microseconds,
                    "captured": timing.captured,
                    "error": part.error(order, timing.output),
                }
            )
    return rows


def small_shape(model: Model, block: int) -> Shape:
    """One for which the same kernels are compiled: strides do not matter to them."""
    width = 2 * model.kv_heads * model.head_dim
    return Shape(model._replace(layers=1), 1, 1, BLOCK_STEP, block, block * width)


def run_once(shape: Shape, part: int) -> None:
    """Leaves a shape's kernel on disk: that for blocks, if it has any."""
    device = torch.device("cuda")
    *_, order = make_orders(shape, torch.zeros(shape.elements, dtype=DTYPE, device=device))
    PARTS[part](shape, device).make(order)()
    torch.cuda.synchronize()
