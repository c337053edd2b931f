"""`vmmkv.publish()` and `vmmkv top`: what a process publishes is what is shown, whatever becomes of it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from conftest import join, run_python, soon
from typer.testing import CliRunner

import vmmkv
from vmmkv import publication
from vmmkv.cli.app import app
from vmmkv.cli.top import draw

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests that run at the same time do not see one another."""
    monkeypatch.setattr(publication, "PREFIX", f"vmmkv-test-{secrets.token_hex(8)}-")
    yield
    vmmkv.unpublish()


def names() -> list[str]:
    """The names of sockets of this test."""
    with open("/proc/net/unix") as file:
        return [line.split("@")[1].strip() for line in file if publication.PREFIX in line]


def top() -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["top", "--once", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(pool: vmmkv.FramePool) -> dict[str, Any]:
    (record,) = top()
    assert record["pid"] == os.getpid()
    (found,) = (each for each in record["pools"] if each["number"] == pool.number)
    return found


def test_what_is_published_is_shown_and_follows() -> None:
    assert top() == []
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 4, 80, pool=pool)
    vmmkv.publish()
    vmmkv.publish()
    found = shown(pool)
    assert (found["limit_bytes"], found["physical_bytes"], found["holders"]) == (160 << 10, 0, 1)
    with cache.sequence(20):
        found = shown(pool)
        assert found["tokens"] == 20
        assert (found["used_bytes"], found["sequences"]) == (3 * 4096, 1)
        assert found["driver_calls"]["map"]["count"] == 3
    assert shown(pool)["sequences"] == 0
    vmmkv.unpublish()
    assert top() == []
    assert names() == []


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()"])
def test_other_processes_are_shown_until_they_end(end: str) -> None:
    """However they do. A forked child publishes only for itself, and does not end what its parent does."""
    code = """
        import os, sys
        import vmmkv
        from vmmkv import publication
        publication.PREFIX = sys.argv[1]
        vmmkv.publish()
        if os.fork() == 0:
            sys.exit()
        os.wait()
        (record,) = publication.read_all()
        assert record["pid"] == os.getpid()
        print("shown", flush=True)
    """
    process = run_python(f"{dedent(code)}\n{end}", publication.PREFIX)
    assert process.stdout == "shown\n", process.stderr
    assert top() == []
    assert names() == []


def test_odd_answers_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut ones, those of another version and of another user, and none: whatever else is there is shown."""
    monkeypatch.setattr(publication, "PATIENCE", 0.05)
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    vmmkv.publish()
    (record,) = top()
    whole = json.dumps(record)
    odd = [*(whole[:end] for end in (0, 1, len(whole) // 2, len(whole) - 1)), "[1]", "null", "\0", None]
    odd += [json.dumps({name: value for name, value in record.items() if name != left}) for left in record]
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{publication.PREFIX}1")
        other.listen()

        def answer() -> None:
            for text in odd:
                with other.accept()[0] as client:
                    if text is None:
                        client.recv(1)  # until the reader has given up
                    else:
                        client.sendall(text.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        for text in odd:
            assert shown(pool)["number"] == pool.number, text
        join(thread)
    for value in ("x", None, [], {}, -1):
        strange = record | {"pools": [{"number": value}, {}, *record["pools"]]}
        assert f"pool {pool.number} (cpu)" in draw([strange], [record]).plain
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert top() == []


def test_a_reader_that_goes_or_does_not_read_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "PATIENCE", 0.05)
    monkeypatch.setattr(publication, "pool_stats", dict)
    monkeypatch.setattr(publication.sys, "orig_argv", ["x" * (1 << 22)])
    vmmkv.publish()
    (name,) = names()
    for _ in range(3):
        reader = socket.socket(socket.AF_UNIX)
        reader.connect(f"\0{name}")
        soon(lambda: len(top()) == 1)
        reader.close()


def test_the_table() -> None:
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 4, 80, pool=pool)
    kept = cache.sequence(20)
    ids = np.arange(30)
    with cache.sequence(token_ids=ids[:20]) as first:
        first.commit(ids[:20])
    cached = cache.sequence(token_ids=ids)  # 20 of 50 tokens were there
    vmmkv.publish()
    (record,) = top()
    record["command"] = "python [/bold] serve.py"
    record["pools"] = [each for each in record["pools"] if each["number"] == pool.number]
    earlier = json.loads(json.dumps(record))
    earlier["time"] -= 2
    for call in earlier["pools"][0]["driver_calls"].values():
        call["seconds"] = 0.0
    for call in record["pools"][0]["driver_calls"].values():
        call["seconds"] = 0.001
    columns, name, figures = draw([record], [earlier]).plain.splitlines()
    assert name == f"{os.getpid()} python [/bold] serve.py, pool {pool.number} (cpu)"
    assert max(map(len, (columns, name, figures))) < 80
    rate = f"{len(record['pools'][0]['driver_calls']) / 2:.1f}"
    shown = ["160 KiB", "28 KiB", "28 KiB", "2", f"{kept.length + cached.length}", "40%", "0%", rate, "0.0"]
    assert figures.split() == " ".join(shown).split()
    vmmkv.unpublish()
    result = CliRunner().invoke(app, ["top", "--once"])
    assert "vmmkv.publish()" in result.stdout
