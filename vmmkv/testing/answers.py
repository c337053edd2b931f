"""What the checker asks of a kernel, what a call answered, and the float64 attention that it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import isfinite
from typing import NamedTuple

import torch

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""By dtype: the largest error that is rounding, relative to the largest number of the right output."""


class Verdict(StrEnum):
    """What came of a call."""

    RIGHT = "right"
    WRONG = "wrong"
    FAULTS = "faults"
    HANGS = "hangs"
    REFUSES = "refuses"
    NOT_RUN = "not run"


class Case(NamedTuple):
    """The geometry of all calls of a check; see `check_attention`."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    tokens: int
    tolerance: float
    seed: int


class Answer(NamedTuple):
    """What came of a call.

    Attributes:
        error: how far the output is off, relative to the largest number of the right one; None where it is unknown, and
            where the output holds NaN or infinity.
        note: what else is known: the lengths that are wrong, the message of an error, the signal.
    """

    verdict: Verdict
    error: float | None = None
    note: str = ""


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Attention in float64 over dense K and V: `softmax(q @ k.T / sqrt(head_dim)) @ v` of the first `length` tokens of
    each sequence; zeros for a length of 0. Shapes are those of `check_attention`'s kernel."""
    out, groups = torch.zeros(q.shape, dtype=torch.float64, device=q.device), q.shape[2] // k.shape[2]
    for index, length in enumerate(lengths):
        if length:
            keys, values = (each[index, :length].double().repeat_interleave(groups, 1) for each in (k, v))
            scores = torch.einsum("qhd,thd->hqt", q[index].double(), keys) * q.shape[3] ** -0.5
            out[index] = torch.einsum("hqt,thd->qhd", scores.softmax(-1), values)
    return out


def compare(out: object, expected: torch.Tensor, lengths: Sequence[int], tolerance: float) -> Answer:
    """Holds an output against the right one, sequence by sequence."""
    if not isinstance(out, torch.Tensor) or out.shape != expected.shape:
        found = f"of shape {[*out.shape]}" if isinstance(out, torch.Tensor) else type(out).__name__
        return Answer(Verdict.WRONG, note=f"the output is {found} instead of {[*expected.shape]}")
    off = (out.double() - expected).abs().flatten(1).amax(1) / expected.abs().max().clamp(min=1e-30)
    wrong = [length for length, error in zip(lengths, off.tolist()) if not error <= tolerance]
    error = float(off.max())
    if not wrong:
        return Answer(Verdict.RIGHT, error)
    which = sorted(set(wrong))
    shown = ", ".join(map(str, which[:6])) + (", ..." if len(which) > 6 else "")
    note = f"at lengths {shown}" if set(lengths) - set(wrong) else ""
    return Answer(Verdict.WRONG, error if isfinite(error) else None, note)
