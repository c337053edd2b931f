"""Requests to replay: how long prompts and answers are, from a trace or from a distribution like one."""

from __future__ import annotations

import csv
import json
import reprlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from .errors import VmmkvError

BLOCK = 512
"""Tokens that an id of Mooncake's `hash_ids` stands for."""
CSV_COLUMNS = "ContextTokens", "GeneratedTokens"
JSON_COLUMNS = "input_length", "output_length"
READ = f"A trace is CSV with {' and '.join(CSV_COLUMNS)}, or JSON lines with {' and '.join(JSON_COLUMNS)}, in UTF-8"


class TraceError(VmmkvError, ValueError):
    """A file that is no request trace."""


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
        prompt, output: numbers of tokens.
        arrival: seconds after the first request of the trace; 0 if the trace has no times.
        blocks: ids of the prompt's blocks of `BLOCK` tokens, the last of which may have fewer; empty if the trace has
            none. Equal ids are equal tokens behind an equal beginning.
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
        path: a file in UTF-8, with or without a byte order mark: CSV with the columns `ContextTokens` and
            `GeneratedTokens` (Azure's traces), or JSON lines with `input_length` and `output_length`, and possibly
            `hash_ids` (Mooncake's). Times are in `TIMESTAMP`, a date (UTC if it names no zone), or in `timestamp`, in
            milliseconds; all requests have one or none has. What a file is follows from its content, not from its name.
    """
    requests: list[Request] = []
    times: list[float | None] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_json = file.read(4096).lstrip().startswith("{")
            file.seek(0)
            rows = map(json.loads, filter(str.strip, file)) if is_json else csv.DictReader(file)
            for row in rows:
                times.append(_seconds(row))
                requests.append(_request(row, JSON_COLUMNS if is_json else CSV_COLUMNS))
    except (TypeError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        raise TraceError(f"{path} is no trace, at request {len(requests) + 1}: {error}. {READ}") from None
    if not requests:
        raise TraceError(f"{path} holds no requests. {READ}")
    if len({time is None for time in times}) > 1:
        raise TraceError(f"{path} is no trace: some of its requests have times and some have none. {READ}")
    return [replace(each, arrival=(time or 0.0) - (times[0] or 0.0)) for each, time in zip(requests, times)]


def _request(row: dict[str, Any], columns: tuple[str, str]) -> Request:
    if missing := [name for name in columns if name not in row]:
        raise ValueError(f"{' and '.join(missing)} missing; there are {reprlib.repr([*row])}")
    blocks = row.get("hash_ids", ())
    if isinstance(blocks, str):
        raise ValueError(f"hash_ids {blocks!r} are text; they are a list of numbers, in JSON lines")
    prompt, output = (max(_count(row[name]), 1) for name in columns)
    return Request(prompt, output, blocks=tuple(map(int, blocks)))


def _count(value: object) -> int:
    number = int(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return number


def _seconds(row: dict[str, Any]) -> float | None:
    """When a request came; None if the row does not say."""
    if "TIMESTAMP" in row:
        date = datetime.fromisoformat(row["TIMESTAMP"])
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if "timestamp" not in row:
        return None
    seconds = float(row["timestamp"]) / 1000
    if not isfinite(seconds):
        raise ValueError(f"timestamp {row['timestamp']!r} is no time")
    return seconds


def conversations(count: int, rng: np.random.Generator) -> list[Request]:
    """Random requests with a long tail, about as long as those of a chat service (some 1,300 tokens each)."""
    prompts = np.clip(rng.lognormal(6.5, 1.0, count), 8, 7000).astype(int)
    outputs = np.clip(rng.lognormal(5.0, 0.8, count), 4, 1000).astype(int)
    return [Request(int(prompt), int(output)) for prompt, output in zip(prompts, outputs)]
