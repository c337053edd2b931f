"""Requests to replay: how long prompts and answers are, from a trace or from a distribution like one."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .errors import VmmkvError

BLOCK = 512
"""Tokens that an id of Mooncake's `hash_ids` stands for."""
CSV_COLUMNS = "ContextTokens", "GeneratedTokens"
JSON_COLUMNS = "input_length", "output_length"
TIMES = "TIMESTAMP", "timestamp"
READ = f"A trace is CSV with {' and '.join(CSV_COLUMNS)}, or JSON lines with {' and '.join(JSON_COLUMNS)}, in UTF-8"
SHAREGPT = "it looks like ShareGPT's conversations, which are texts without numbers of tokens"


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
        path: a file in UTF-8, with or without a byte order mark: CSV with the columns `ContextTokens` and
            `GeneratedTokens` (Azure's traces), or JSON lines with `input_length` and `output_length`, and possibly
            `hash_ids` (Mooncake's). Times are in `TIMESTAMP`, a date (UTC if it names no zone), or in `timestamp`, in
            milliseconds; all requests have one or none has. What a file is follows from its content, not from its name.

    Raises:
        TraceError: it is neither, or empty; the message says what is missing and what there is.
    """
    requests: list[Request] = []
    times: list[float | None] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for row, columns in _rows(file):
                time = _seconds(row)
                if times and (time is None) != (times[0] is None):
                    raise ValueError("of its requests some have times and some have none")
                times.append(time)
                requests.append(_request(row, columns))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no trace: it is not text in UTF-8 ({error.reason}). {READ}") from None
    except (TypeError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        raise TraceError(f"{path} is no trace, at request {len(requests) + 1}: {error}. {READ}") from None
    if not requests:
        raise TraceError(f"{path} holds no requests. {READ}")
    return [replace(each, arrival=(time or 0.0) - (times[0] or 0.0)) for each, time in zip(requests, times)]


def _rows(file: TextIO) -> Iterator[tuple[Mapping[str, Any], tuple[str, str]]]:
    """The requests of a file by the names of their columns, and which of these say how many tokens they have."""
    begin = file.read(4096).lstrip()
    file.seek(0)
    if begin.startswith("["):
        kind = SHAREGPT if '"conversations"' in begin else "write each entry on a line of its own"
        raise ValueError(f"it is one JSON document, a list: {kind}")
    if begin.startswith("{"):
        for line in filter(str.strip, file):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"a line is not JSON ({error.msg}); a document over several lines is not read"
                ) from None
            if not isinstance(row, dict):
                raise ValueError("a line of JSON is not an object")
            _check_columns(JSON_COLUMNS, row)
            yield row, JSON_COLUMNS
    elif begin:
        reader = csv.DictReader(file)
        _check_columns(CSV_COLUMNS, reader.fieldnames or ())
        for row in reader:
            if None in row:
                raise ValueError(f"a line has more values than the {len(row) - 1} columns")
            _check_columns(CSV_COLUMNS, [name for name, value in row.items() if value is not None])
            yield row, CSV_COLUMNS


def _check_columns(needed: Iterable[str], there: Collection[str]) -> None:
    """Raises `ValueError` where a column is missing, or has nearly the name of one that is read."""
    names = ", ".join(map(repr, list(there)[:20]))
    if missing := [name for name in needed if name not in there]:
        kind = f" ({SHAREGPT})" if "conversations" in there else ""
        raise ValueError(f"{' and '.join(missing)} missing; there are {names or 'no columns'}{kind}")
    if odd := [name for name in there if name.strip().lower() == "timestamp" and name not in TIMES]:
        raise ValueError(f"column {odd[0]!r} is neither TIMESTAMP nor timestamp; there are {names}")


def _request(row: Mapping[str, Any], columns: tuple[str, str]) -> Request:
    """A request without its time."""
    prompt, output = (row[name] for name in columns)
    blocks = row.get("hash_ids", ())
    if isinstance(blocks, str):
        raise ValueError(f"hash_ids {blocks!r} are text; they are a list of numbers, in JSON lines")
    return Request(max(_count(prompt), 1), max(_count(output), 1), blocks=tuple(map(int, blocks)))


def _count(value: object) -> int:
    """A number of tokens."""
    number = int(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return number


def _seconds(row: Mapping[str, Any]) -> float | None:
    """When a request came; None where that is not known."""
    if "TIMESTAMP" in row:
        date = datetime.fromisoformat(row["TIMESTAMP"])
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if "timestamp" not in row:
        return None
    seconds = float(row["timestamp"]) / 1000
    if not isfinite(seconds):
        raise ValueError(f"timestamp {row['timestamp']!r} is no time")
    return seconds


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
