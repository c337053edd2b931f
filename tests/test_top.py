"""`vmmkv.publish()` and `vmmkv top`: what a process publishes is what is shown, whatever becomes of it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROUNDS, run_python, soon
from rich.console import Console
from typer.testing import CliRunner

import vmmkv
from vmmkv import publication
from vmmkv.cli.app import app
from vmmkv.cli.top import draw

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)  # 512 bytes: 8 tokens in a page of 4 KiB


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(publication, "FOLDER", tmp_path)
    monkeypatch.setattr(publication, "INTERVAL", 0.01)
    yield
    vmmkv.unpublish()


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
        import os, sys, time
        from pathlib import Path
        import vmmkv
        from vmmkv import publication
        publication.FOLDER, publication.INTERVAL = Path(sys.argv[1]), 0
        cache = vmmkv.KVCache(vmmkv.KVLayout(1, 1, 8), 4, 80, max_bytes="64KiB", device="cpu", page_size=4096)
        vmmkv.publish()
    """
    return run_python(dedent(begin) + dedent(code), str(folder))


def test_what_is_published_is_shown_and_follows() -> None:
    assert top() == []
    pool = vmmkv.FramePool("160KiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 4, 80, pool=pool)
    vmmkv.publish()
    vmmkv.publish()
    found = shown(pool)
    assert (found["limit_bytes"], found["physical_bytes"], found["holders"]) == (160 << 10, 0, 1)
    with cache.sequence(20):
        soon(lambda: shown(pool)["tokens"] == 20)
        found = shown(pool)
        assert (found["used_bytes"], found["sequences"]) == (3 * 4096, 1)
        assert found["driver_calls"]["map"]["count"] == 3
    soon(lambda: shown(pool)["sequences"] == 0)
    vmmkv.unpublish()
    assert top() == []
    assert not list(publication.FOLDER.iterdir())


def test_a_killed_process_is_gone_from_the_table_and_its_file_too(tmp_path: Path) -> None:
    """Killed in the middle of writing, like as not."""
    process = publishing("time.sleep(0.05); os.kill(os.getpid(), 9)", tmp_path)
    assert process.returncode == -9
    assert list(tmp_path.iterdir())
    assert top() == []
    assert not list(tmp_path.iterdir())


KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path
    import vmmkv
    from vmmkv import publication

    signal.alarm(300)
    publication.FOLDER, publication.INTERVAL = Path(sys.argv[1]), 0
    layout = vmmkv.KVLayout(1, 1, 64)
    def make():
        return vmmkv.KVCache(layout, 8, 800, max_bytes="256KiB", device="cpu", page_size=4096, lookahead=50)

    def serve():
        vmmkv.publish()
        cache, live = make(), []
        while True:
            try:
                live.append(cache.sequence(random.randrange(100), tenant=random.choice(["a", "b"])))
                cache.extend(live, random.randrange(50))
            except vmmkv.VmmkvError:
                cache.free(live[random.randrange(len(live)) :])
                live = [each for each in live if "gone" not in repr(each)]
                cache.trim()

    seen = 0
    for _ in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            serve()
        until = time.monotonic() + random.expovariate(1 / 0.02)
        while time.monotonic() < until or not seen:  # the first one lives until it was seen
            for record in publication.read_all():
                assert record["pid"] == child
                seen += len(record["pools"])
        os.kill(child, 9)
        os.waitpid(child, 0)
        left = [path.name for path in publication.FOLDER.iterdir()]
        assert publication.read_all() == [] == list(publication.FOLDER.iterdir()), left
        with make() as cache, cache.sequence(100) as sequence:
            sequence.extend(100)
    vmmkv.publish()
    assert [record["pid"] for record in publication.read_all()] == [os.getpid()]
    print(seen)
"""


def test_processes_that_are_killed_at_any_moment(tmp_path: Path) -> None:
    """They leave nothing that others stumble over: not `vmmkv top`, not one that lives, and not the next one."""
    child = run_python(KILLED, str(tmp_path), str(20 * ROUNDS))
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 0
    assert not list(tmp_path.iterdir())


def test_what_is_shown_is_always_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "INTERVAL", 0)
    vmmkv.publish()
    times = {publication.read_all()[0]["time"] for _ in range(300)}
    soon(lambda: publication.read_all()[0]["time"] > min(times))


def test_a_number_that_another_process_has_now_is_no_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / f"vmmkv-{os.getuid()}-{os.getpid()}"
    path.write_text(json.dumps({"pid": os.getpid(), "start": 0, "pools": []}))
    assert top() == []
    assert not path.exists()


def test_the_end_of_a_process_and_its_forks(tmp_path: Path) -> None:
    """A forked child publishes only for itself, and does not end what its parent does."""
    process = publishing(
        """
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print(os.listdir(sys.argv[1]) != [])
        """,
        tmp_path,
    )
    assert process.stdout == "True\n", process.stderr
    assert not list(tmp_path.iterdir())


def test_what_others_have_put_there_is_left_alone(tmp_path: Path) -> None:
    pid = os.getpid()
    for name, text in (("x", "{}"), (f"{pid}", "no JSON"), ("1.5", "{}"), (f"{pid}.1", "[1]"), (f"{pid}.2", "{}")):
        (tmp_path / f"vmmkv-{os.getuid()}-{name}").write_text(text)
    (tmp_path / f"vmmkv-{os.getuid()}-{pid}.3").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / f"vmmkv-{os.getuid()}-1").symlink_to(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    assert top() == []
    assert sorted(tmp_path.iterdir()) == before


def test_many_threads_publish_once(tmp_path: Path) -> None:
    threads = [threading.Thread(target=vmmkv.publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([thread for thread in threading.enumerate() if thread.name == "vmmkv-publisher"]) == 1
    vmmkv.unpublish()
    assert not list(tmp_path.iterdir())


def test_the_end_does_not_wait_for_a_pool_that_somebody_keeps(tmp_path: Path) -> None:
    process = publishing(
        """
        import threading
        publication.PATIENCE = 0.1
        kept = threading.Event()
        def keep():
            with cache.pool.monitor.lock:
                kept.set()
                time.sleep(1000)
        threading.Thread(target=keep, daemon=True).start()
        kept.wait()
        """,
        tmp_path,
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


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
    console = Console(width=200)
    with console.capture() as capture:
        console.print(draw([record], [earlier]))
    line = next(line for line in capture.get().splitlines() if str(os.getpid()) in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    rate = len(record["pools"][0]["driver_calls"]) / 2
    assert cells == [
        f"{os.getpid()} python [/bold] serve.py",
        f"{pool.number} (cpu)",
        "160 KiB",
        "28 KiB",
        "28 KiB",
        "2",
        f"{kept.length + cached.length}",
        "40%",
        "0%",
        f"{rate:.1f}",
        "0.0",
    ]
    vmmkv.unpublish()
    result = CliRunner().invoke(app, ["top", "--once"])
    assert "vmmkv.publish()" in result.stdout
