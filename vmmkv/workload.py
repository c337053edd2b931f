"""Requests to replay: how long prompts and answers are, from a trace or from a distribution like one."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Request:
    """One request, in tokens."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


def read_trace(path: Path) -> list[Request]:
    """Requests of a trace, in its order.

    Args:
        path: a CSV file with the columns `ContextTokens` and `GeneratedTokens` (Azure's traces), or JSON lines
            with `input_length` and `output_length` (Mooncake's).

    Raises:
        ValueError: it is neither.
    """
    with path.open(newline="") as file:
        rows = map(json.loads, file) if path.suffix == ".jsonl" else csv.DictReader(file)
        keys = ("input_length", "output_length") if path.suffix == ".jsonl" else ("ContextTokens", "GeneratedTokens")
        try:
            return [Request(max(int(row[keys[0]]), 1), max(int(row[keys[1]]), 1)) for row in rows]
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is no trace: {error!r}. It must be CSV with ContextTokens and GeneratedTokens, or .jsonl with "
                "input_length and output_length"
            ) from None


def conversations(count: int, rng: np.random.Generator) -> list[Request]:
    """Random requests with a long tail, about as long as those of a chat service (some 1,300 tokens each)."""
    prompts = np.clip(rng.lognormal(6.5, 1.0, count), 8, 7000).astype(int)
    outputs = np.clip(rng.lognormal(5.0, 0.8, count), 4, 1000).astype(int)
    return [Request(int(prompt), int(output)) for prompt, output in zip(prompts, outputs)]
