"""Decode of heads of other sizes, of several queries, of K and V in 8 bits and of latents, beside heads of 128 and one
query."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from vmmkv.kernels import decode, dequantize, quantize
from vmmkv.kernels.arguments import LATENT_DIM, LATENT_V_DIM, v_dim_of

from .batches import DTYPE, NUM_HEADS, NUM_KV_HEADS
from .timing import Call, measure

CHECKED = 2
"""Sequences that are compared with float64."""


@dataclass(frozen=True)
class Geometry:
    """A batch of equal lengths. Heads of latents are 576 wide and share one, whose first 512 numbers are V."""

    head_dim: int = 128
    queries: int = 1
    kv_dtype: torch.dtype = DTYPE
    heads: int = NUM_HEADS

    @property
    def kv_heads(self) -> int:
        return 1 if self.head_dim == LATENT_DIM else NUM_KV_HEADS

    @property
    def name(self) -> str:
        queries = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.heads}/{self.kv_heads} x {self.head_dim}, {str(self.kv_dtype).removeprefix('torch.')}{queries}"

    @property
    def flops(self) -> int:
        """Of a query token and a key: both products of all heads."""
        return 2 * self.heads * (self.head_dim + v_dim_of(self.head_dim))


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
    Geometry(LATENT_DIM, heads=16),
    Geometry(LATENT_DIM, heads=128),
)
BATCHES = (64, 16_384), (64, 4096), (16, 4096)
"""Sequences, and their tokens."""


def run_shapes(device: torch.device) -> list[dict[str, Any]]:
    """For each batch and shape: microseconds, GB/s of K and V (and scales) read, TFLOP/s, the rate beside that of the
    batch's first shape and the time beside it, and the error."""
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
                "tflops": shape.flops * shape.queries * batch * tokens / timing.microseconds / 1e6,
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
    q = torch.randn(batch, shape.queries, shape.heads, shape.head_dim, dtype=DTYPE, device=device)
    seq_lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    if shape.head_dim == LATENT_DIM:
        k = torch.randn(batch, tokens, 1, LATENT_DIM, dtype=DTYPE, device=device)
        v = k[..., :LATENT_V_DIM]
        checked = (states[:CHECKED].double() for states in (q, k, v))
        return partial(decode, q, k, v, seq_lens, scale=LATENT_DIM**-0.5), k.nbytes, attend_exactly(*checked)
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
    """`[batch, q_len, num_heads, head_dim]`; the queries are those of the last tokens. K and V are not copied for each
    of their query heads, of which latents have so many that a GPU of 80 GB has no room for them."""
    positions = torch.arange(k.shape[1], device=q.device)
    hidden = positions > positions[-q.shape[1] :, None]
    grouped = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bqhgd,bthd->bqhgt", grouped, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill_(hidden[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bqhgt,bthd->bqhgd", weights, v).flatten(2, 3)
