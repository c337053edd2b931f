"""Prefill of heads of other sizes, of K and V in 8 bits and of latents; and a step of prompts and decode in one call,
beside the same in two."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from vmmkv.kernels import decode, mixed, prefill

from .batches import NUM_HEADS
from .shapes import GEOMETRIES, Geometry, attend_exactly, make_states
from .timing import Call, host_microseconds, measure

SHAPES = tuple(shape for shape in GEOMETRIES if shape.queries == 1)
TOKENS = 8192
"""Of a prompt."""
CHECKED_QUERIES = 64
"""The last ones of a prompt, which are compared with float64."""


class Step(NamedTuple):
    """Prompts, new tokens of each, other sequences, of one new token each, tokens of any of them, and query heads."""

    prompts: int
    chunk: int
    others: int
    tokens: int
    heads: int = NUM_HEADS


STEP = Step(2, 1024, 64, 4096)
SMALL_STEP = Step(2, 16, 14, 256)
"""One that takes the device less time than the host."""


def run_prompts(device: torch.device) -> list[dict[str, Any]]:
    """For each shape, of a prompt of `TOKENS`: microseconds, TFLOP/s, the rate beside that of the first, the error."""
    with ProcessPoolExecutor(min(len(SHAPES), os.cpu_count() or 1), get_context("spawn")) as pool:
        list(pool.map(compile_shape, SHAPES))
    torch.cuda.empty_cache()
    made = [make_prompt(shape, TOKENS, device) for shape in SHAPES]
    rows: list[dict[str, Any]] = []
    for shape, (_, exact), timing in zip(SHAPES, made, measure([call for call, _ in made])):
        flops = shape.flops * TOKENS * (TOKENS + 1) / 2
        row = {"shape": shape.name, "microseconds": timing.microseconds, "captured": timing.captured}
        row["tflops"] = flops / timing.microseconds / 1e6
        rows.append(row | {"error": error_of(timing.output[-len(exact) :], exact)})
        rows[-1]["of_first_rate"] = rows[-1]["tflops"] / rows[0]["tflops"]
    return rows


def compile_shape(shape: Geometry) -> None:
    """Leaves a shape's kernel on disk."""
    make_prompt(shape, CHECKED_QUERIES, torch.device("cuda"))[0]()
    torch.cuda.synchronize()


def make_prompt(shape: Geometry, tokens: int, device: torch.device) -> tuple[Call, torch.Tensor]:
    """Prefill of a prompt of random data, and what its last queries' outputs are in float64."""
    states = make_states(replace(shape, queries=tokens), 1, tokens, device)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    exact = attend_exactly(states.q[:, -CHECKED_QUERIES:].double(), *states.exact)
    return partial(prefill, states.q.flatten(0, 1), *states.kv, ends, ends[1:], **states.options), exact[0]


def run_mixed(device: torch.device) -> list[dict[str, Any]]:
    """Of each way to attend in a step: microseconds on the device and, of a small step, of the host, and the error."""
    calls, exact = make_step(STEP, device)
    small, _ = make_step(SMALL_STEP, device)
    timings = measure(list(calls.values()))
    return [
        {
            "call": name,
            "microseconds": timing.microseconds,
            "captured": timing.captured,
            "host_microseconds": host_microseconds(small[name]),
            "error": error_of(timing.output, exact),
        }
        for name, timing in zip(calls, timings)
    ]


def make_step(step: Step, device: torch.device) -> tuple[dict[str, Call], torch.Tensor]:
    """A step's attention in one call and in two, and as if all were prompts, all of its outputs each; and what they are
    in float64."""
    prompts, chunk, others, tokens, heads = step
    new = prompts * chunk
    states = make_states(Geometry(queries=chunk, heads=heads), prompts + others, tokens, device)
    counts = torch.tensor([chunk] * prompts + [1] * others, dtype=torch.int32, device=device)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    lengths = torch.full_like(counts, tokens)
    q = torch.cat([states.q[:prompts].flatten(0, 1), states.q[prompts:, -1]])
    k, v = states.kv
    out = torch.empty_like(q)

    def apart() -> torch.Tensor:
        prefill(q[:new], k, v, ends[: prompts + 1], lengths[:prompts], out=out[:new])
        decode(q[new:, None], k[prompts:], v[prompts:], lengths[prompts:], out=out[new:, None])
        return out

    calls: dict[str, Call] = {
        "mixed": partial(mixed, q, k, v, ends, lengths, max_prompts=prompts),
        "prefill, then decode": apart,
        "prefill of all": partial(prefill, q, k, v, ends, lengths),
    }
    exact = []
    for sequence, count in enumerate(counts.tolist()):
        own_q, own_k, own_v = (each[sequence : sequence + 1].double() for each in (states.q[:, -count:], k, v))
        exact.append(attend_exactly(own_q, own_k, own_v)[0])
    return calls, torch.cat(exact)


def error_of(output: torch.Tensor, exact: torch.Tensor) -> float:
    """The difference from float64, of the norm."""
    return float((output.double() - exact).norm() / exact.norm())
