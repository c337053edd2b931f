"""One budget for several processes: `FramePool(shared=...)`."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROUNDS, run_python, soon
from interruption import interrupted_after
from typer.testing import CliRunner

import vmmkv
from vmmkv import ledger, lending
from vmmkv.cli.app import app
from vmmkv.kernels.folders import cache_folder
from vmmkv.ledger import LINE, Book, Ledger

PAGE = 4096
LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
"""8 tokens of it fill a page."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with machine code, and without ledgers."""
    (tmp_path / "vmmkv").mkdir()
    for path in cache_folder().glob("*.bc"):
        (tmp_path / "vmmkv" / path.name).symlink_to(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vmmkv" / "pools"


class Process:
    """A pool with a cache: two of them in a process have two lines, as those of two processes."""

    def __init__(self, pages: int, **options: Any) -> None:
        self.pool = vmmkv.FramePool(pages * PAGE, device="cpu", page_size=PAGE, shared="one", **options)
        self.cache = vmmkv.KVCache(LAYOUT, 16, 8000, pool=self.pool, lookahead=0, large_frames=False)

    def close(self) -> None:
        self.cache.close()
        self.pool.close()

    @property
    def granted(self) -> int:
        """Pages that the ledger grants."""
        return self.look(lambda book: int(book.mine["granted"])) // PAGE

    def look(self, read: Callable[[Book], Any]) -> Any:
        """What a function reads in the ledger."""
        return self.pool.lender.ledger.change(read)  # type: ignore[union-attr]


SETTLING = 5 * 10**8


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Process, Process]]:
    monkeypatch.setattr(ledger, "SETTLING", SETTLING)
    monkeypatch.setattr(lending, "SWEEP", 2)
    both = Process(100), Process(100)
    yield both
    for each in both:
        each.close()


def can_be_locked() -> bool:
    """Whether another process can lock the ledger."""
    (path,) = (cache_folder() / "pools").glob("*.ledger")
    visitor = Ledger(path)
    try:
        visitor.change(lambda book: None)
    except vmmkv.BudgetError:
        return False
    finally:
        visitor.leave()
    return True


def test_any_use_of_one_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever others neither use nor have reserved a process can have, and no more, also while the limit moves:
    surplus goes to who lacks it, and live tokens stay."""
    monkeypatch.setattr(ledger, "SETTLING", SETTLING)
    monkeypatch.setattr(lending, "SWEEP", 2)
    random, limit, reserved = Random(), 100, 20
    both = Process(100), Process(100, reserved=reserved * PAGE)
    live: list[tuple[Process, vmmkv.Sequence, float]] = []

    def room_of(process: Process) -> int:
        used = {each: sum(sequence.length // 8 for of, sequence, _ in live if of is each) for each in both}
        kept = max(reserved - used[both[1]], 0) if process is both[0] else 0
        return limit - sum(used.values()) - kept

    for _ in range(40 * ROUNDS):
        process, pages, value = random.choice(both), random.randint(1, 110), random.random()
        what, room = random.choice(["start", "start", "free", "limit"]), room_of(process)
        if what == "start" and len(live) < 12:
            soon(lambda process=process, room=room: process.cache.available_pages == room)
            if pages > room:
                with pytest.raises(vmmkv.OutOfPagesError):
                    process.cache.sequence(8 * pages)
                pages = max(room // 2, 1)
            if pages <= room:
                live.append((process, process.cache.sequence(8 * pages), value))
                live[-1][1].k(0).fill_(value)
        elif what == "free" and live:
            live.pop(random.randrange(len(live)))[1].free()
        elif what == "limit" and room_of(both[0]) >= limit - 100:
            limit = random.randint(limit - max(room_of(both[0]), 0), 100)
            process.pool.set_limit(limit * PAGE)
            soon(lambda limit=limit: sum(each.granted for each in both) <= limit)
            assert both[0].pool.stats().limit_bytes == limit * PAGE
        assert sum(each.granted for each in both) <= limit
        assert all((sequence.k(0) == value).all() for _, sequence, value in live)
    (path,) = folder.iterdir()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o077) == (0o600, 0)
    for each in both:
        each.close()


def test_more_cannot_be_reserved_than_there_is() -> None:
    first = Process(100)
    kept = first.cache.sequence(8 * 50)
    with pytest.raises(vmmkv.BudgetError, match="reserve"):
        Process(100, reserved=60 * PAGE)
    second = Process(100, reserved="40%")
    kept.extend(8 * 10)
    with pytest.raises(vmmkv.BudgetError, match="reserve"):
        Process(100, reserved=61 * PAGE)
    for each in (first, second):
        each.close()


def make_book(limit: int, *lines: dict[str, int]) -> Book:
    made = np.zeros(len(lines), LINE)
    for number, line in enumerate(lines):
        made[number]["pid"] = number + 1
        for name, value in line.items():
            made[number][name] = value
    return Book(np.array((0, limit, 0, 0), ledger.HEADER), made, 0)


@pytest.mark.parametrize("seed", range(5))
def test_processes_that_all_want_memory_have_shares_in_proportion_to_reserves(seed: int) -> None:
    """However large their pieces are, and in whatever order they come."""
    random = Random(seed)
    reserves = [random.randint(1, 100) for _ in range(4)]
    limit = 10 * sum(reserves)
    book = make_book(limit, *({"reserved": each, "granted": each} for each in reserves))
    piece = 5
    for _ in range(10_000):
        book.number = random.randrange(4)
        book.others = np.arange(4) != book.number
        for line in book.lines:
            line["wanted"], line["since"] = piece, time.monotonic_ns()
        book.take(piece)
    assert book.free < piece
    for line, reserve in zip(book.lines, reserves):
        assert line["granted"] >= reserve * 10 - 4 * piece


def test_processes_that_are_killed_lose_nothing() -> None:
    """At random moments. What is granted never exceeds the limit, and in the end one process can have all."""
    child = run_python(KILLED, str(3 * ROUNDS))
    assert (child.returncode, child.stderr) == (0, "")


KILLED = """
    import os, random, signal, time
    import lending_process as process

    def check(book):
        assert book.free >= 0
        time.sleep(random.uniform(0, 0.001))

    children = [process.start("many", random.choice([0, 10])) for _ in range(4)]
    visitor = process.visitor("many")
    for _ in range(int(sys.argv[1])):
        time.sleep(random.uniform(0.01, 0.1))
        victim = random.randrange(4)
        os.kill(children[victim], signal.SIGKILL)
        for _ in range(20):
            visitor.change(check)
        assert os.waitpid(children[victim], 0)[1] == signal.SIGKILL
        children[victim] = process.start("many", random.choice([0, 10]))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    visitor.close()
    cache = process.make_cache("many", 0)
    cache.sequence(8 * process.LIMIT).free()
    cache.close()
    cache.pool.close()
"""


def test_a_process_that_is_stopped_is_not_waited_for() -> None:
    child = run_python(STOPPED)
    assert (child.returncode, child.stderr) == (0, "")


STOPPED = """
    import os, signal, time
    import lending_process as process, vmmkv

    def stop(cache, random):
        kept = cache.sequence(800)
        time.sleep(0.3)  # it changes nothing now, so the ledger stays unlocked
        os.kill(os.getpid(), signal.SIGSTOP)

    child = process.start("one", 0, stop)
    os.waitpid(child, os.WUNTRACED)
    cache = process.make_cache("one", 0)
    try:
        sequence = cache.sequence(8 * process.LIMIT)
    except vmmkv.OutOfPagesError:
        pass
    else:
        raise AssertionError("it has memory that another process holds")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    cache.sequence(8 * process.LIMIT).free()
    cache.close()
    cache.pool.close()
"""


def test_a_thread_that_cannot_lock_the_ledger_stops_no_other(pair: tuple[Process, Process], folder: Path) -> None:
    first, _ = pair
    with locked_by_another(folder), pytest.raises(vmmkv.BudgetError, match="stopped"):
        first.pool.lender.look()  # type: ignore[union-attr]
    thread = threading.Thread(target=first.cache.sequence, args=(8 * 50,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def locked_by_another(folder: Path) -> Iterator[None]:
    """Locks the ledger, as a process does that is stopped meanwhile."""
    (path,) = folder.glob("*.ledger")
    file = os.open(path, os.O_RDWR)
    ledger._lock_soon(file, path)
    yield
    os.close(file)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    place = 8 if how == "negative" else 0
    data[place : place + 8] = b"\xff" * 8
    path.write_bytes(b"" if how == "empty" else data)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["empty", "gone", "noise", "negative"])
def test_a_damaged_ledger_is_made_anew(pair: tuple[Process, Process], folder: Path, how: str) -> None:
    first, second = pair
    kept = first.cache.sequence(8 * 60)
    (path,) = folder.iterdir()
    with locked_by_another(folder):  # no change of a pool writes over the damage
        damage(path, how)
    soon(lambda: first.granted >= 60 and second.cache.available_pages == 40)
    time.sleep(SETTLING / 1e9)
    rest = second.cache.sequence(8 * 40)
    with pytest.raises(vmmkv.OutOfPagesError):
        rest.extend(8)
    assert first.pool.limit_pages == 100
    assert len([*folder.glob("*.damaged")]) == (how not in ("gone", "empty"))
    kept.free()


def test_what_killed_processes_leave_is_removed_by_a_visitor(folder: Path) -> None:
    child = run_python(
        "import os, lending_process as process\nkept = process.make_cache('left', 0)\nkept.sequence(8)\nos._exit(0)"
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert len([*folder.glob("left@*")]) == 1
    invoke("pool")
    assert not [*folder.glob("left@*")]


def test_a_signal_handler_within_a_change_changes_nothing(pair: tuple[Process, Process]) -> None:
    pool, lender = pair[0].pool, pair[0].pool.lender
    assert lender
    with pytest.raises(vmmkv.BusyError):
        pair[0].look(lambda book: pool.set_limit(50 * PAGE))
    with lender._moving:
        assert lender.borrow(10) == 0
    assert lender.ledger.limit == 100 * PAGE


def test_an_interrupted_change_keeps_no_lock(pair: tuple[Process, Process]) -> None:
    """Also not while its traceback is there, as in a notebook."""
    random, kept = Random(), list[KeyboardInterrupt]()

    def change() -> None:
        try:
            pair[0].look(lambda book: book.limit)
        except KeyboardInterrupt as error:
            kept.append(error)

    for _ in range(500 * ROUNDS):
        interrupted_after(change, random.uniform(1e-6, 3e-4))
        soon(can_be_locked)
    assert kept


def test_a_full_disk_is_told_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(vmmkv.BudgetError, match="No space left"):
        Process(100)


@pytest.mark.parametrize("options", [*({"shared": name} for name in ("-/", "..\0", "x" * 65, 7)), {"reserved": PAGE}])
def test_names_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(vmmkv.ArgumentError, match=next(iter(options))):
        vmmkv.FramePool(100 * PAGE, device="cpu", page_size=PAGE, **options)


def test_a_forked_child_leaves_the_parents_line_alone(folder: Path) -> None:
    child = run_python(
        """
        import os, vmmkv
        pool = vmmkv.FramePool(100 * 4096, device="cpu", page_size=4096, shared="one", reserved=10 * 4096)
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0
            print(*pool.lender.ledger.change(lambda book: (book.mine["granted"] // 4096, book.others.sum())))
        else:
            del pool
            import gc; gc.collect()
        """
    )
    assert (child.returncode, child.stderr) == (0, "")
    granted, others = map(int, child.stdout.split())
    assert 10 <= granted <= 12
    assert others == 0


def test_a_pool_that_is_dropped_leaves_no_line_and_no_thread(folder: Path) -> None:
    with vmmkv.KVCache(
        LAYOUT, 2, 80, pool=vmmkv.FramePool(9 * PAGE, device="cpu", page_size=PAGE, shared="one"), lookahead=0
    ) as cache:
        cache.sequence(20)
        assert [*folder.glob("one@*")]
    del cache
    soon(lambda: not [*folder.glob("one@*")])


def test_the_command_shows_and_changes_budgets(pair: tuple[Process, Process]) -> None:
    kept = pair[0].cache.sequence(8 * 20)
    soon(lambda: pair[1].cache.available_pages == 80)
    (shown,) = json.loads(invoke("pool", "--json"))
    assert shown["limit"] == 100 * PAGE
    assert sorted(line["used"] for line in shown["processes"]) == [0, 20 * PAGE]
    invoke("pool", "one", "--limit", str(50 * PAGE), "--reserve", f"{os.getpid()}={PAGE}")
    (shown,) = json.loads(invoke("pool", "one", "--json"))
    assert shown["limit"] == 50 * PAGE
    assert [line["reserved"] for line in shown["processes"]] == [PAGE, 0]
    assert "reserved" in invoke("pool")
    assert "reserved" in invoke("top", "--once")
    with pytest.raises(vmmkv.ArgumentError, match="one@"):
        invoke("pool", "another", "--limit", "1GiB")
    kept.free()


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    if isinstance(result.exception, vmmkv.VmmkvError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout
