"""`vmmkv.publish()` and `vmmkv top`: what a process publishes is what is shown, whatever becomes of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from conftest import calls, run_python
from typer.testing import CliRunner

import vmmkv
from vmmkv import publication
from vmmkv.cli.app import app
from vmmkv.cli.top import draw
from vmmkv.kernels.folders import private_folder
from vmmkv.publication import start_of

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(publication, "roots", lambda: [tmp_path])
    monkeypatch.setattr(publication, "INTERVAL", 0.01)
    yield
    vmmkv.unpublish()


def files(root: Path) -> list[Path]:
    """What is published below a folder."""
    return sorted(path for path in root.glob("*/*"))


def own(root: Path) -> Path:
    """The folder below it that records of this user are put into, made where there is none."""
    return private_folder(root)


def top() -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["top", "--once", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(pool: vmmkv.FramePool) -> dict[str, Any]:
    (record,) = top()
    assert record["pid"] == os.getpid()
    (found,) = (each for each in record["pools"] if each["number"] == pool.number)
    return found


def publishing(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that publishes all the time."""
    begin = """
        import os, sys
        from pathlib import Path
        import vmmkv
        from vmmkv import publication
        publication.roots, publication.INTERVAL = lambda: [Path(sys.argv[1])], 0
        cache = vmmkv.KVCache(vmmkv.KVLayout(1, 1, 8), 4, 80, max_bytes="64KiB", device="cpu", page_size=4096)
        vmmkv.publish()
    """
    return run_python(dedent(begin) + dedent(code), str(folder))


def test_what_is_published_is_shown_and_follows(tmp_path: Path) -> None:
    assert top() == []
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 4, 80, pool=pool)
    vmmkv.publish()
    vmmkv.publish()
    found = shown(pool)
    assert (found["limit_bytes"], found["physical_bytes"], found["holders"]) == (160 << 10, 0, 1)
    with cache.sequence(20), calls(publication.Publisher, "write") as until:
        until(lambda: shown(pool)["tokens"] == 20)
        found = shown(pool)
        assert (found["used_bytes"], found["sequences"]) == (3 * 4096, 1)
        assert found["driver_calls"]["map"]["count"] == 3
    with calls(publication.Publisher, "write") as until:
        until(lambda: shown(pool)["sequences"] == 0)
    vmmkv.unpublish()
    assert top() == []
    assert not files(tmp_path)


def test_a_killed_process_is_gone_from_the_table_and_its_file_too(tmp_path: Path) -> None:
    """Killed in the middle of writing."""
    process = publishing(
        """
        import json, threading
        def write_half(record, file):
            file.write(json.dumps(record)[:9])
            file.flush()
            os.kill(os.getpid(), 9)
        json.dump = write_half
        threading.Event().wait()
        """,
        tmp_path,
    )
    assert process.returncode == -9
    assert files(tmp_path)
    assert top() == []
    assert not files(tmp_path)


def test_a_number_that_another_process_has_now_is_no_sign_of_life(tmp_path: Path) -> None:
    path = own(tmp_path) / f"{os.getpid()}.json"
    path.write_text(json.dumps({"pid": os.getpid(), "start": 0, "command": "", "time": 0.5, "pools": []}))
    assert top() == []
    assert not path.exists()


def test_the_end_of_a_process_and_its_forks(tmp_path: Path) -> None:
    """A forked child publishes only for itself, and does not end what its parent does."""
    process = publishing(
        """
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print([*Path(sys.argv[1]).glob("*/*")] != [])
        """,
        tmp_path,
    )
    assert process.stdout == "True\n", process.stderr
    assert not files(tmp_path)


def test_odd_records_are_passed_over(tmp_path: Path) -> None:
    """Cut ones, and those of another version: by `top`, and by a process that publishes. Other files are left alone."""
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    folder, pid = own(tmp_path), os.getppid()
    path = folder / f"{pid}.json"
    vmmkv.publish()
    (record,) = top()
    vmmkv.unpublish()
    record |= {"pid": pid, "start": start_of(pid)}
    whole = json.dumps(record)
    cut = [whole[:end] for end in (0, 1, len(whole) // 2, len(whole) - 1)] + ["[1]", "null", "\0"]
    for text in cut + [json.dumps({name: value for name, value in record.items() if name != left}) for left in record]:
        path.write_text(text)
        assert top() == [], text[:200]
    for value in ("x", None, [], {}, -1):
        odd = record | {"pools": [{"number": value}, {}, *record["pools"]]}
        assert f"pool {pool.number} (cpu)" in draw([odd], [record]).plain
    vmmkv.publish()
    assert shown(pool)["number"] == pool.number
    vmmkv.unpublish()
    path.unlink()
    for name, text in (("x", "{}"), (f"{pid}", "no JSON"), ("1.5", "{}"), (f"{pid}.1", "[1]"), ("", "{}")):
        (folder / f"{name}.json").write_text(text)
    before = files(tmp_path)
    assert top() == []
    assert files(tmp_path) == before


@pytest.mark.parametrize("what", ["file", "folder of all", "link to one's own", "dangling"])
def test_a_folder_that_others_could_read_or_write_is_not_used(tmp_path: Path, what: str) -> None:
    """A file or a link under its name stops no process, and nothing is read from there or written to it."""
    target, planted = tmp_path / "target", tmp_path / f"vmmkv-{os.geteuid()}-1"
    target.mkdir(mode=0o700)
    record = {"pid": os.getppid(), "start": start_of(os.getppid()), "command": "", "time": 0.5, "pools": []}
    (target / f"{os.getppid()}.json").write_text(json.dumps(record))
    if what == "file":
        planted.touch()
    elif what == "folder of all":
        target.rename(planted)
        planted.chmod(0o770)
    else:
        planted.symlink_to(tmp_path / "nowhere" if what == "dangling" else target)
    before = sorted(target.iterdir()) if target.exists() else []
    assert top() == []
    vmmkv.publish()
    assert [each["pid"] for each in top()] == [os.getpid()]
    (found,) = (path for path in files(tmp_path) if path.name == f"{os.getpid()}.json" and path.parent != planted)
    assert found.parent.stat().st_mode & 0o777 == 0o700
    assert (sorted(target.iterdir()) if target.exists() else []) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, folders and links of theirs, in a folder of all, and one that is theirs alone."""
    tmp_path.chmod(0o755)
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    shared.mkdir()
    shared.chmod(0o1777)
    theirs.mkdir()
    os.chown(theirs, 54321, 54321)
    for number, make in enumerate((Path.touch, Path.mkdir, lambda path: path.symlink_to("/"))):
        make(path := shared / f"vmmkv-0-{number}")
        os.chown(path, 54321, 54321, follow_symlinks=False)
    monkeypatch.setattr(publication, "roots", lambda: [tmp_path / "missing", theirs, shared])
    vmmkv.publish()
    assert [each["pid"] for each in top()] == [os.getpid()]
    assert not list(theirs.iterdir())
    assert [path.parent.stat().st_uid for path in shared.glob(f"*/{os.getpid()}.json")] == [0]


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
