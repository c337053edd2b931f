"""Rotary embedding of a decode step by `append`, beside the function of transformers and `append` behind it."""

from __future__ import annotations

from typing import Any

import torch

from vmmkv.kernels import RotateHalf, append

from .batches import HEAD_DIM, Case, make_batch
from .timing import Call, host_microseconds, measure

BATCHES, TOKENS = (1, 16, 64, 256), 256


def run_rotary(device: torch.device) -> list[dict[str, Any]]:
    """Microseconds of one layer, on the device (in a CUDA graph) and of the host, and by how much of its norm the
    rotated query is off from float64."""
    rows = []
    for batch in BATCHES:
        calls, exact = rotary_calls(batch, device)
        for (name, call), timing in zip(calls.items(), measure(list(calls.values()))):
            rows.append(
                {
                    "kernel": name,
                    "sequences": batch,
                    "microseconds": timing.microseconds,
                    "captured": timing.captured,
                    "host_microseconds": host_microseconds(call),
                    "error": float((timing.output.double() - exact).norm() / exact.norm()),
                }
            )
    return rows


def rotary_calls(sequences: int, device: torch.device) -> tuple[dict[str, Call], torch.Tensor]:
    """By name: calls that write K and V of a token of each sequence, and give its query, rotated, `[sequences,
    num_heads, head_dim]`; and what that is in float64."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    batch = make_batch(Case("small", "", (TOKENS,) * sequences), device)
    query = batch.q.squeeze(1)
    key, value = torch.randn_like(batch.k[:, 0]), torch.randn_like(batch.v[:, 0])
    angles = (torch.rand(sequences, HEAD_DIM // 2, device=device) * 6).repeat(1, 2)
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    rows = torch.arange(sequences, dtype=torch.int32, device=device)
    places = batch.k, batch.v, rows, batch.seq_lens - 1

    def apply(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = (each.transpose(0, 1).unsqueeze(0) for each in (query, key.to(query.dtype)))
        rotated = apply_rotary_pos_emb(*states, cos.unsqueeze(0), sin.unsqueeze(0))
        return tuple(each.squeeze(0).transpose(0, 1) for each in rotated)

    def in_one() -> torch.Tensor:
        rotated = torch.empty_like(query)
        append(key, value, *places, rotary=RotateHalf(query, rotated, cos, sin))
        return rotated

    def one_by_one() -> torch.Tensor:
        rotated, rotated_key = apply(query, cos, sin)
        append(rotated_key, value, *places)
        return rotated

    calls: dict[str, Call] = {"append, rotary": in_one, "transformers, then append": one_by_one}
    return calls, apply(query.double(), cos.double(), sin.double())[0]
