"""The cases, and how one of them is measured: all layouts, kernels and peers in turn."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vmmkv.kernels import decode, prefill
from vmmkv.workload import conversations, read_trace

from .batches import KV, NAMES, Batch, Case, Reference, evenly, layouts, make_batch
from .peers import peers
from .timing import Call, Timing, measure

RAGGED_BATCH = 256
RAGGED, EVEN = "ragged", "ragged's total, evenly"
MOST_COMPILERS = 12


def decode_cases(trace: Path | None) -> list[Case]:
    """Decode; ragged lengths are those of prompts of a trace, or of the library's own conversations (lognormal)."""
    rng = np.random.default_rng(0)
    if trace:
        prompts = [request.prompt for request in read_trace(trace)]
    else:
        prompts = [request.prompt for request in conversations(RAGGED_BATCH, rng)]
    ragged = tuple(map(int, rng.choice(prompts, RAGGED_BATCH)))
    return [
        Case("decode", "16 x 4096", (4096,) * 16, kernels=("auto", "plain")),
        Case("decode", "64 x 4096", (4096,) * 64),
        Case("decode", "16 x 16384", (16384,) * 16),
        Case("decode", "64 x 16384", (16384,) * 64),
        Case("decode", "64 x 4096, 4 queries", (4096,) * 64, q_len=4),
        Case("decode", EVEN, evenly(ragged)),
        Case("decode", RAGGED, ragged),
    ]


def prefill_cases() -> list[Case]:
    kernels = "auto", "mma"
    return [
        Case("prefill", "1 x 16384", (16384,), 16384, kernels=kernels),
        Case("prefill", "4 x 4096", (4096,) * 4, 4096, kernels=kernels),
        Case("prefill", "2048 after 30000", (32048,), 2048, kernels=kernels),
        Case("prefill", "1 x 8192, not causal", (8192,), 8192, causal=False, kernels=kernels),
    ]


def attention(batch: Batch, kv: KV, kernel: str) -> Call:
    """A call of ours, into an output that starts as NaN."""
    out = torch.full_like(batch.q, torch.nan)
    options = {"block_table": kv.block_table, "kernel": kernel}
    if batch.case.part == "decode":
        return partial(decode, batch.q, kv.k, kv.v, batch.seq_lens, out=out, **options)
    q, out = batch.q.flatten(0, 1), out.flatten(0, 1)
    options["causal"] = batch.case.causal
    return partial(prefill, q, kv.k, kv.v, batch.cu_seqlens, batch.seq_lens, out=out, **options)


class Contender(NamedTuple):
    kernel: str
    kv: KV
    call: Call


Rows = list[dict[str, Any]]


def run_case(case: Case, device: torch.device) -> tuple[Rows, Rows]:
    """Figures for each kernel and layout, ours and then the peers'; and which peers were skipped, and why."""
    torch.cuda.empty_cache()
    batch = make_batch(case, device)
    reference = Reference(batch)
    with layouts(batch) as kvs:
        ours = [
            Contender(f"vmmkv, {kernel}", kv, attention(batch, kv, kernel)) for kernel in case.kernels for kv in kvs
        ]
        theirs, skipped = peers_of(batch, kvs)
        contenders = ours + theirs
        timings = measure([contender.call for contender in contenders])
        rows = [make_row(case, *pair, reference) for pair in zip(contenders, timings)]
    return rows, skipped


def peers_of(batch: Batch, kvs: list[KV]) -> tuple[list[Contender], Rows]:
    """The peers that are installed and do what the case asks for, each has run once; and the others."""
    contenders, skipped = [], []
    case = f"{batch.case.part}, {batch.case.name}"
    for peer, kv in [(peer, kv) for peer in peers(batch.case.q_len) for kv in kvs if kv.name in peer.layouts]:
        try:
            call = peer.make(batch, kv)
            call()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a peer raises is its reason
            skipped.append({"kernel": peer.name, "layout": kv.name, "case": case, "reason": reason_of(error)})
        else:
            contenders.append(Contender(peer.name, kv, call))
    return contenders, skipped


def reason_of(error: Exception) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def make_row(case: Case, contender: Contender, timing: Timing, reference: Reference) -> dict[str, Any]:
    return {
        "case": case.name,
        "kernel": contender.kernel,
        "layout": contender.kv.name,
        "layers": contender.kv.layers,
        "microseconds": timing.microseconds,
        "gb_per_s": case.kv_bytes / timing.microseconds / 1e3,
        "tflops": case.flops / timing.microseconds / 1e6,
        "error": reference.error(timing.output),
        "captured": timing.captured,
    }


def compile_kernels(cases: list[Case]) -> None:
    """Compiles what the cases need in many processes; the results stay on disk, where this process finds them."""
    # A kernel depends on none of the lengths, and not on strides, so that token-major needs none of its own.
    small = {
        (replace(case, name="", seq_lens=(256,), q_len=min(case.q_len, 16), kernels=(kernel,)), layout)
        for case in cases
        for kernel in case.kernels
        for layout in NAMES
        if layout != "token-major"
    }
    if not small:
        return
    workers = min(len(small), os.cpu_count() or 1, MOST_COMPILERS)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(run_once, *zip(*small)))


def run_once(case: Case, layout: str) -> None:
    batch = make_batch(case, torch.device("cuda"))
    with layouts(batch, (layout,)) as (kv,):
        attention(batch, kv, case.kernels[0])()
        torch.cuda.synchronize()
