"""Decode of heads of other sizes, of several queries, and of K and V in 8 bits, beside heads of 128 and one query."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from vmmkv.kernels import decode, dequantize, quantize

from .batches import DTYPE, NUM_HEADS, NUM_KV_HEADS
from .timing import Call, measure

CHECKED = 2
"""Sequences that are compared with float64."""


@dataclass(frozen=True)
class Geometry:
    """A batch of equal lengths."""

    head_dim: int = 128
    queries: int = 1
    kv_dtype: torch.dtype = DTYPE

    @property
    def name(self) -> str:
        queries = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{NUM_HEADS}/{NUM_KV_HEADS} x {self.head_dim}, {str(self.kv_dtype).removeprefix('torch.')}{queries}"


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
    """For each batch and shape: microseconds, GB/s of K and V (and scales) read, the rate beside that of the batch's
    first shape and the time beside it, and the error."""
    with ProcessPoolExecutor(min(len(GEOMETRIES), os.cpu_count() or 1), get_context("spawn")) as pool:
        list(pool.map(compile_shape, GEOMETRIES))
    return [row for batch, tokens in BATCHES for row in run_batch(batch, tokens, GEOMETRIES, device)]


def compile_shape(shape: Geometry) -> None:
    """Leaves a shape's kernel on disk."""
    make_call(shape, 1, 16, torch.device("cuda"))[0]()
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
                "captured": timing.captured,
                "error": float((timing.output[:CHECKED].double() - exact).norm() / exact.norm()),
            }
        )
        rows[-1]["of_first_rate"] = rows[-1]["gb_per_s"] / rows[0]["gb_per_s"]
        rows[-1]["of_first_time"] = rows[-1]["microseconds"] / rows[0]["microseconds"]
    return rows


def make_call(shape: Geometry, batch: int, tokens: int, device: torch.device) -> tuple[Call, int, torch.Tensor]:
    """Decode of random data, the bytes that it reads, and what the first sequences' outputs are in float64, from K and
    V as they are held."""
    q = torch.randn(batch, shape.queries, NUM_HEADS, shape.head_dim, dtype=DTYPE, device=device)
    seq_lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    kv = [torch.randn(batch, tokens, NUM_KV_HEADS, shape.head_dim, dtype=DTYPE, device=device) for _ in "kv"]
    scales: list[torch.Tensor] = []
    exact = [states[:CHECKED].double() for states in kv]
    if shape.kv_dtype is not DTYPE:
        quantized = [quantize(states, shape.kv_dtype) for states in kv]
        exact = [dequantize(numbers[:CHECKED], scales[:CHECKED], torch.float64) for numbers, scales in quantized]
        kv, scales = [numbers for numbers, _ in quantized], [scales for _, scales in quantized]
    names = dict(zip(("k_scales", "v_scales"), scales))
    nbytes = sum(each.nbytes for each in kv + scales)
    return partial(decode, q, *kv, seq_lens, **names), nbytes, attend_exactly(q[:CHECKED].double(), *exact)


def attend_exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[batch, q_len, num_heads, head_dim]`; the queries are those of the last tokens."""
    positions = torch.arange(k.shape[1], device=q.device)
    mask = positions <= positions[-q.shape[1] :, None]
    states = (each.transpose(1, 2) for each in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask, enable_gqa=True).transpose(1, 2)
