"""append and copy_tokens against torch's copy_, and what calls cost their caller."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from vmmkv.kernels import append, copy_tokens, decode, prefill
from vmmkv.kernels.row_append import bind_append

from .batches import HEAD_DIM, NUM_KV_HEADS, TOKEN_BYTES, Case, make_batch
from .layouts import KV, layouts
from .timing import Call, host_microseconds, measure

PROMPT = 16_384
HOST_BATCH, HOST_TOKENS = 16, 256


def run_copies(device: torch.device) -> list[dict[str, Any]]:
    """GB/s, bytes read and written, of a prompt's K and V on their way into a row and from it to another.

    It is some 64 MiB that are read again and again: a part of it stays in the second-level cache.
    """
    torch.cuda.empty_cache()
    batch = make_batch(Case("small", "", (PROMPT, PROMPT)), device)
    new = torch.randn(2, PROMPT, NUM_KV_HEADS, HEAD_DIM, device=device).to(batch.k.dtype)
    with layouts(batch, ("contiguous", "token-major", "paged-16")) as kvs:
        rows = [kv for kv in kvs if kv.block_table is None]
        appends = [("append", kv, append_prompt(kv, new)) for kv in kvs]
        appends += [("copy_ of new tokens", kv, copy_prompt(kv, new)) for kv in rows]
        results = timed(appends, new)
        old = torch.stack(rows[0].row(0, PROMPT))
        copies = [("copy_tokens", kv, copy_row(kv)) for kv in rows]
        copies += [("copy_ of a row", kv, copy_prompt(kv, old)) for kv in rows]
        return results + timed(copies, old)


def timed(work: list[tuple[str, KV, Call]], expected: torch.Tensor) -> list[dict[str, Any]]:
    """A row of figures for each call. Each must leave `expected` in sequence 1, K and V of `PROMPT` tokens."""
    rows = []
    for (name, kv, call), timing in zip(work, measure([call for _, _, call in work])):
        where = 1 if kv.block_table is None else kv.block_table[1]
        for tensor in (kv.k, kv.v):
            tensor[where] = 0
        call()
        rows.append(
            {
                "kernel": name,
                "layout": kv.name,
                "layers": kv.layers,
                "microseconds": timing.microseconds,
                "gb_per_s": 2 * PROMPT * TOKEN_BYTES / timing.microseconds / 1e3,
                "exact": torch.equal(torch.stack(kv.row(1, PROMPT)), expected),
                "captured": timing.captured,
            }
        )
    return rows


def append_prompt(kv: KV, new: torch.Tensor) -> Call:
    row, start = (torch.tensor([value], dtype=torch.int32, device=new.device) for value in (1, 0))
    cu_seqlens = torch.tensor([0, PROMPT], dtype=torch.int32, device=new.device)

    def call() -> torch.Tensor:
        append(*new, kv.k, kv.v, row, start, cu_seqlens, kv.block_table)
        return kv.k

    return call


def copy_prompt(kv: KV, new: torch.Tensor) -> Call:
    """The same by torch."""
    k, v = kv.row(1, PROMPT)

    def call() -> torch.Tensor:
        k.copy_(new[0])
        return v.copy_(new[1])

    return call


def copy_row(kv: KV) -> Call:
    """From sequence 0 to sequence 1."""
    zero, one, length = (torch.tensor([value], dtype=torch.int32, device=kv.k.device) for value in (0, 1, PROMPT))

    def call() -> torch.Tensor:
        for tensor in (kv.k, kv.v):
            copy_tokens(tensor, tensor, zero, zero, one, zero, length, PROMPT)
        return kv.k

    return call


def run_host(device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of host time of one call for a small batch, one token a sequence; and, to see what the machine's
    driver takes of it, of a call of torch that does no more than launch a kernel."""
    batch = make_batch(Case("small", "", (HOST_TOKENS,) * HOST_BATCH), device)
    q, k, v, seq_lens = batch.q, batch.k, batch.v, batch.seq_lens
    rows = torch.arange(HOST_BATCH, dtype=torch.int32, device=device)
    new_k, new_v, starts = k[:, 0].contiguous(), v[:, 0].contiguous(), seq_lens - 1
    flat, out = q.flatten(0, 1), torch.empty_like(q)
    bound = bind_append(new_k, new_v, k, v, rows)
    calls = {
        "append": partial(append, new_k, new_v, k, v, rows, starts),
        "append, bound": partial(bound, new_k.data_ptr(), new_v.data_ptr(), starts.data_ptr()),
        "decode": partial(decode, q, k, v, seq_lens, out=out),
        "decode, out not given": partial(decode, q, k, v, seq_lens),
        "prefill": partial(prefill, flat, k, v, batch.cu_seqlens, seq_lens, out=out.flatten(0, 1)),
        "copy_tokens": partial(copy_tokens, k, k, rows, rows * 0, rows, starts, rows * 0 + 1, 1),
        "torch.add, out given": partial(torch.add, rows, rows, out=rows.clone()),
    }
    return [{"call": name, "host_microseconds": host_microseconds(call)} for name, call in calls.items()]
