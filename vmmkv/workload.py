"""Requests to replay: how long prompts and answers are, from a trace or from a distribution like one."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from .errors import VmmkvError


class TraceError(VmmkvError, ValueError):
    """A file that is no request trace."""


@dataclass(frozen=True)
class Request:
    """One request: how many tokens, and when, in seconds after the first of its trace (0 where that is not known)."""

    prompt: int
    output: int
    arrival: float = 0.0

    @property
    def total(self) -> int:
        return self.prompt + self.output


def read_trace(path: Path) -> list[Request]:
    """Requests of a trace, in its order.

    Args:
        path: a CSV file with the columns `ContextTokens` and `GeneratedTokens` (Azure's traces), or JSON lines
            with `input_length` and `output_length` (Mooncake's); times are in `TIMESTAMP`, a date, or in
            `timestamp`, in milliseconds.

    Raises:
        TraceError: it is neither, or empty.
    """
    prompt, output = (
        ("input_length", "output_length") if path.suffix == ".jsonl" else ("ContextTokens", "GeneratedTokens")
    )
    try:
        with path.open(newline="") as file:
            rows = map(json.loads, file) if path.suffix == ".jsonl" else csv.DictReader(file)
            found = [(max(int(row[prompt]), 1), max(int(row[output]), 1), _seconds(row)) for row in rows]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise TraceError(
            f"{path} is no trace ({type(error).__name__}): it must be CSV with ContextTokens and GeneratedTokens, or "
            ".jsonl with input_length and output_length"
        ) from None
    if not found:
        raise TraceError(f"{path} holds no requests")
    return [Request(tokens, generated, seconds - found[0][2]) for tokens, generated, seconds in found]


def _seconds(row: Mapping[str, Any]) -> float:
    """When a request came."""
    if "TIMESTAMP" in row:
        return datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return float(row.get("timestamp", 0)) / 1000


def name_of(trace: Path | None) -> str:
    """What results call the requests that were replayed: a trace's, or random ones."""
    return trace.name if trace else "lognormal, those of vmmkv.workload.conversations"


def conversations(count: int, rng: np.random.Generator) -> list[Request]:
    """Random requests with a long tail, about as long as those of a chat service (some 1,300 tokens each)."""
    prompts = np.clip(rng.lognormal(6.5, 1.0, count), 8, 7000).astype(int)
    outputs = np.clip(rng.lognormal(5.0, 0.8, count), 4, 1000).astype(int)
    return [Request(int(prompt), int(output)) for prompt, output in zip(prompts, outputs)]
