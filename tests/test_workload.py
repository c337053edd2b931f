"""Traces: what is read of them, and what is said of files that are none."""

from __future__ import annotations

import csv
import io
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmmkv.workload import Request, TraceError, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,3,1\n2023-11-17 00:00:01.7500000,4,2\n"
MOONCAKE = (
    '{"timestamp": 500, "input_length": 3, "output_length": 1}\n'
    '{"timestamp": 2750, "input_length": 4, "output_length": 2}\n'
)
READ = [Request(3, 1, 0.0), Request(4, 2, 2.25)]


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace.json", "trace"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\n\n", " \r\n \r\n"], ids=ascii)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["no mark", "mark"])
@pytest.mark.parametrize("text", [AZURE, MOONCAKE], ids=["Azure", "Mooncake"])
def test_what_a_trace_is_follows_from_its_content(tmp_path: Path, name: str, ends: str, mark: str, text: str) -> None:
    """Whatever its name, with and without a byte order mark, empty lines, and a last line that ends."""
    if text is AZURE and " " in ends:
        ends = ends.replace(" ", "")
    for content in (text, text[:-1]):
        (tmp_path / name).write_bytes((mark + content.replace("\n", ends)).encode())
        assert read_trace(tmp_path / name) == READ


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_columns_are_found_by_name(tmp_path: Path, form: str) -> None:
    """In any order, among others, some of which have the other form's names; in CSV quoted, too."""
    prompt, output = ("ContextTokens", "GeneratedTokens") if form == "csv" else ("input_length", "output_length")
    rows, other = [], {"input_length": 7} if form == "csv" else {"hash_ids": [3]}
    for at in range(20):
        tokens = {prompt: random.randrange(600, 1000), output: random.randrange(1, 2000), "timestamp": 1000 * at}
        rows.append(tokens | {"ContextTokens ": "é,\n", "x": 1} | other)
    names, text = random.sample([*rows[0]], len(rows[0])), io.StringIO()
    if form == "csv":
        writer = csv.DictWriter(text, names, quoting=random.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.writelines(json.dumps({name: row[name] for name in names}) + "\n" for row in rows)
    path = tmp_path / f"trace.{form}"
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    blocks = tuple(other.get("hash_ids", ()))
    assert read_trace(path) == [Request(row[prompt], row[output], float(at), blocks) for at, row in enumerate(rows)]


def odd() -> Iterator[tuple[bytes, list[str]]]:
    """Files that are no traces, and what has to be said of them."""
    both = ["ContextTokens", "input_length"]  # what is read
    yield b"\xef\xbb\xbf \r\n", ["holds no requests", *both]
    yield b"ContextTokens,GeneratedTokens\n", ["holds no requests"]
    yield b"a,b\n1,2\n", ["ContextTokens and GeneratedTokens missing; there are ['a', 'b']", "input_length"]
    for number in (b"", b"1.5", b"-1", b"many"):
        yield b"ContextTokens,GeneratedTokens\n1,2\n3," + number + b"\n", ["request 2", number.decode()]
    yield b"ContextTokens,GeneratedTokens\n1,2\n3\n", ["request 2"]
    yield b"timestamp,ContextTokens,GeneratedTokens\nnan,2,3\n", ["request 1", "nan"]
    yield AZURE.encode("utf-16"), ["utf-8", *both]
    for no_rows in (b"{what}\n", MOONCAKE.encode() + b"[1]\n", b'{"x": ' + b"[" * 100_000):
        yield no_rows, ["is no trace, at request", *both]
    yield b'{"x": 1, "output_length": 2}', ["input_length missing; there are ['x', 'output_length']"]
    yield MOONCAKE.encode() + b'{"input_length": 1, "output_length": 2}', ["some have none"]
    for value in ("null", "1.5", "true", "Infinity", "-3", '"x"', "1" * 5000):
        yield f'{{"input_length": {value}, "output_length": 1}}'.encode(), ["request 1", *both]
    for value in ('["a"]', "7", "[null]"):
        yield f'{{"input_length": 3, "output_length": 1, "hash_ids": {value}}}'.encode(), ["request 1"]
    yield b'{"input_length": 3, "output_length": 1, "timestamp": NaN}', ["request 1", "no time"]


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace.json"])
def test_what_is_no_trace_says_what_it_is_and_what_is_read(tmp_path: Path, name: str) -> None:
    for content, words in odd():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(TraceError) as error:
            read_trace(path)
        message = str(error.value)
        assert str(path) in message
        assert all(word in message for word in words), (content[:200], message)
        assert len(message) < 1000


def test_times_do_not_depend_on_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clocks are put back between two requests, and where they are not; with zones, too."""
    path = tmp_path / "trace.csv"
    times = ["2023-10-29 00:30:00", "2023-10-29 04:30:00"]
    try:
        for zone in ("Europe/Berlin", "UTC", "Asia/Kathmandu"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            for ends in (["", ""], ["Z", "+02:00"]):
                rows = [f"{at}{end},1,1" for at, end in zip(times, ends)]
                path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
                assert [each.arrival for each in read_trace(path)] == [0, (4 - 2 * bool(ends[0])) * 3600]
    finally:
        monkeypatch.undo()
        time.tzset()
