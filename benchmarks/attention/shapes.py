"""Decode and prefill of other heads, of several queries, and of K and V in 8 bits, beside heads of 128."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from vmmkv.kernels import decode, dequantize, prefill, quantize

from .batches import DTYPE, NUM_HEADS, NUM_KV_HEADS, attend_exactly
from .timing import Call, measure

CHECKED = 2
"""Sequences that are compared with float64."""
PROMPT = 8192
"""Tokens of a prompt."""
CHECKED_QUERIES = 64
"""The last ones of a prompt, which are compared with float64."""


@dataclass(frozen=True)
class Geometry:
    """A batch of equal lengths."""

    head_dim: int = 128
    queries: int = 1
    kv_dtype: torch.dtype = DTYPE
    heads: int = NUM_HEADS

    @property
    def name(self) -> str:
        queries = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.heads}/{NUM_KV_HEADS} x {self.head_dim}, {str(self.kv_dtype).removeprefix('torch.')}{queries}"

    @property
    def flops(self) -> int:
        """Of a query token and a key: both products of all heads."""
        return 4 * self.heads * self.head_dim


GEOMETRIES = (
    Geometry(),
    Geometry(64),
    Geometry(80),
    Geometry(96),
    Geometry(256),
    Geometry(queries=2),
    Geometry(queries=4),
    Geometry(queries=8),
    Geometry(kv_dtype=torch.float8_e4m3fn),
    Geometry(kv_dtype=torch.int8),
)
BATCHES = (64, 16_384), (64, 4096), (16, 4096)
"""Sequences, and their tokens."""


def run_shapes(device: torch.device) -> list[dict[str, Any]]:
    """For each batch and shape: microseconds, GB/s of K and V (and scales) read, TFLOP/s, the rate beside that of the
    batch's first shape and the time beside it, and the error."""
    compile_shapes(compile_decode, GEOMETRIES)
    return [row for batch, tokens in BATCHES for row in run_batch(batch, tokens, GEOMETRIES, device)]


def compile_shapes(compile_shape: Callable[[Geometry], None], shapes: tuple[Geometry, ...]) -> None:
    """Compile the kernels of shapes in several processes; the results stay on disk, where this process finds them."""
    with ProcessPoolExecutor(min(len(shapes), os.cpu_count() or 1), get_context("spawn")) as pool:
        list(pool.map(compile_shape, shapes))


def compile_decode(shape: Geometry) -> None:
    make_call(shape, 1, 16, torch.device("cuda"))[0]()
    torch.cuda.synchronize()


def compile_prefill(shape: Geometry) -> None:
    make_prompt(shape, CHECKED_QUERIES, torch.device("cuda"))[0]()
    torch.cuda.synchronize()


def run_batch(batch: int, tokens: int, shapes: tuple[Geometry, ...], device: torch.device) -> list[dict[str, Any]]:
    torch.cuda.empty_cache()
    made = [make_call(shape, batch, tokens, device) for shape in shapes]
    rows = []
    for shape, (_, nbytes, exact), timing in zip(shapes, made, measure([call for call, _, _ in made])):
        rows.append(
            {
                "case": f"{batch} x {tokens}",
                "kernel": "vmmkv, decode",
                "shape": shape.name,
                "microseconds": timing.microseconds,
                "gb_per_s": nbytes / timing.microseconds / 1e3,
                "tflops": shape.flops * shape.queries * batch * tokens / timing.microseconds / 1e6,
                "captured": timing.captured,
                "error": error_of(timing.output[:CHECKED], exact),
            }
        )
        rows[-1]["of_first_rate"] = rows[-1]["gb_per_s"] / rows[0]["gb_per_s"]
        rows[-1]["of_first_time"] = rows[-1]["microseconds"] / rows[0]["microseconds"]
    return rows


def run_prompts(device: torch.device) -> list[dict[str, Any]]:
    """For each shape of one query, of a prompt of `PROMPT` tokens: microseconds, TFLOP/s, the rate beside that of the
    first, and the error."""
    shapes = tuple(shape for shape in GEOMETRIES if shape.queries == 1)
    compile_shapes(compile_prefill, shapes)
    torch.cuda.empty_cache()
    made = [make_prompt(shape, PROMPT, device) for shape in shapes]
    rows: list[dict[str, Any]] = []
    for shape, (_, exact), timing in zip(shapes, made, measure([call for call, _ in made])):
        flops = shape.flops * PROMPT * (PROMPT + 1) / 2
        rows.append(
            {
                "kernel": "vmmkv, prefill",
                "shape": shape.name,
                "microseconds": timing.microseconds,
                "captured": timing.captured,
                "tflops": flops / timing.microseconds / 1e6,
                "error": error_of(timing.output[-len(exact) :], exact),
            }
        )
        rows[-1]["of_first_rate"] = rows[-1]["tflops"] / rows[0]["tflops"]
    return rows


class States(NamedTuple):
    """Random data of some sequences of one length: `q` `[batch, queries, heads, head_dim]`, K and V as they are held,
    and as float64 those of the first `CHECKED`; `options` are keywords of the kernels."""

    q: torch.Tensor
    kv: list[torch.Tensor]
    exact: list[torch.Tensor]
    options: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Of K and V, and of their scales."""
        scales = [each for each in self.options.values() if isinstance(each, torch.Tensor)]
        return sum(each.nbytes for each in self.kv + scales)


def make_states(shape: Geometry, batch: int, tokens: int, device: torch.device) -> States:
    q = torch.randn(batch, shape.queries, shape.heads, shape.head_dim, dtype=DTYPE, device=device)
    kv = [torch.randn(batch, tokens, NUM_KV_HEADS, shape.head_dim, dtype=DTYPE, device=device) for _ in "kv"]
    if shape.kv_dtype is DTYPE:
        return States(q, kv, [states[:CHECKED].double() for states in kv], {})
    quantized = [quantize(states, shape.kv_dtype) for states in kv]
    exact = [dequantize(numbers[:CHECKED], scales[:CHECKED], torch.float64) for numbers, scales in quantized]
    options = dict(zip(("k_scales", "v_scales"), (scales for _, scales in quantized)))
    return States(q, [numbers for numbers, _ in quantized], exact, options)


def make_call(shape: Geometry, batch: int, tokens: int, device: torch.device) -> tuple[Call, int, torch.Tensor]:
    """Decode of random data, the bytes that it reads, and what the first sequences' outputs are in float64, from K and
    V as they are held."""
    states = make_states(shape, batch, tokens, device)
    seq_lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    positions = torch.arange(tokens - shape.queries, tokens, device=device)
    exact = attend_exactly(states.q[:CHECKED].double(), *states.exact, positions)
    return partial(decode, states.q, *states.kv, seq_lens, **states.options), states.nbytes, exact


def make_prompt(shape: Geometry, tokens: int, device: torch.device) -> tuple[Call, torch.Tensor]:
    """Prefill of a prompt of random data, and what its last queries' outputs are in float64."""
    states = make_states(replace(shape, queries=tokens), 1, tokens, device)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    positions = torch.arange(tokens, device=device)[-CHECKED_QUERIES:]
    exact = attend_exactly(states.q[:, -CHECKED_QUERIES:].double(), *states.exact, positions)
    return partial(prefill, states.q.flatten(0, 1), *states.kv, ends, ends[1:], **states.options), exact[0]


def error_of(output: torch.Tensor, exact: torch.Tensor) -> float:
    """The difference from float64, of the norm."""
    return float((output.double() - exact).norm() / exact.norm())
