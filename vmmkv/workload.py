"""Requests to replay: how long prompts and answers are, from a trace or from a distribution like one."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from .errors import VmmkvError

BLOCK = 512
"""Tokens that an id of Mooncake's `hash_ids` stands for."""


class TraceError(VmmkvError, ValueError):
    """A file that is no request trace."""


@dataclass(frozen=True)
class Request:
    """One request: how many tokens, and when, in seconds after the first of its trace (0 where that is not known).

    Where the trace says so, what its prompt consists of: ids of `blocks` of `BLOCK` tokens, the last of which may be
    fewer. Equal ids are equal tokens behind an equal beginning.
    """

    prompt: int
    output: int
    arrival: float = 0.0
    blocks: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return self.prompt + self.output


def read_trace(path: Path) -> list[Request]:
    """Requests of a trace, in its order.

    Args:
        path: a CSV file with the columns `ContextTokens` and `GeneratedTokens` (Azure's traces), or JSON lines
            with `input_length` and `output_length`, and possibly `hash_ids` (Mooncake's); times are in `TIMESTAMP`, a
            date, or in `timestamp`, in milliseconds.

    Raises:
        TraceError: it is neither, or empty.
    """
    prompt, output = (
        ("input_length", "output_length") if path.suffix == ".jsonl" else ("ContextTokens", "GeneratedTokens")
    )
    try:
        with path.open(newline="") as file:
            rows = map(json.loads, file) if path.suffix == ".jsonl" else csv.DictReader(file)
            found = [
                Request(max(int(row[prompt]), 1), max(int(row[output]), 1), _seconds(row), _blocks(row)) for row in rows
            ]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        raise TraceError(
            f"{path} is no trace ({type(error).__name__}): it must be CSV with ContextTokens and GeneratedTokens, or "
            ".jsonl with input_length and output_length"
        ) from None
    if not found:
        raise TraceError(f"{path} holds no requests")
    return [replace(request, arrival=request.arrival - found[0].arrival) for request in found]


def _seconds(row: Mapping[str, Any]) -> float:
    """When a request came."""
    if "TIMESTAMP" in row:
        return datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return float(row.get("timestamp", 0)) / 1000


def _blocks(row: Mapping[str, Any]) -> tuple[int, ...]:
    """What a request's prompt consists of."""
    return tuple(map(int, row.get("hash_ids", ())))


def known_tokens(requests: Iterable[Request]) -> list[int]:
    """By request how many tokens its prompt has in common with the beginning of one before it, as their blocks say; but
    for its last token, which has to be computed."""
    seen: Counter[int] = Counter()
    known = []
    for request in requests:
        common, goes_on = 0, True
        for block, left in zip(request.blocks, range(request.prompt, 0, -BLOCK)):
            tokens = min(left, BLOCK)
            common += min(tokens, seen[block]) if goes_on else 0
            goes_on = goes_on and seen[block] >= tokens
            seen[block] = max(seen[block], tokens)
        known.append(min(common, request.prompt - 1))
    return known


def name_of(trace: Path | None) -> str:
    """What results call the requests that were replayed: a trace's, or random ones."""
    return trace.name if trace else "lognormal, those of vmmkv.workload.conversations"


def conversations(count: int, rng: np.random.Generator) -> list[Request]:
    """Random requests with a long tail, about as long as those of a chat service (some 1,300 tokens each)."""
    prompts = np.clip(rng.lognormal(6.5, 1.0, count), 8, 7000).astype(int)
    outputs = np.clip(rng.lognormal(5.0, 0.8, count), 4, 1000).astype(int)
    return [Request(int(prompt), int(output)) for prompt, output in zip(prompts, outputs)]
