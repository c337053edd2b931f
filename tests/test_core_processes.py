"""Processes that are killed, forked, or end while threads are in every call; and finalizers on every thread."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from random import Random
from typing import Any

import pytest
from conftest import ROUNDS, join, run_python
from core_rows import Row, check_all, new_cache, new_pool

from vmmkv.core import entries, mapper
from vmmkv.core.cache import Cache
from vmmkv.core.pool import Pool
from vmmkv.errors import BusyError, OutOfPagesError, OutOfRowsError


def test_children_that_are_killed_leave_nothing_behind() -> None:
    """In the middle of their own changes, on several threads; their parent goes on."""
    child = run_python(KILLED, str(6 * ROUNDS))
    assert (child.returncode, child.stderr) == (0, "")


KILLED = """
    import os, random, signal, threading, time
    from core_rows import Row, check_all, new_cache, new_pool, use_everything

    pool = new_pool()
    cache = new_cache(pool, lookahead=9)
    row = Row(cache.start(30))
    row.write(random.Random(1), 0)
    for _ in range(int(sys.argv[1])):
        inside, outside = os.pipe()
        child = os.fork()
        if child == 0:
            own = new_pool()
            for _ in range(3):
                threading.Thread(target=use_everything, args=(new_cache(own, lookahead=9),)).start()
            os.write(outside, b"x")
            time.sleep(60)
        os.read(inside, 1)
        time.sleep(random.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    row.sequence.extend(40)
    row.write(random.Random(2), 30)
    row.verify()
    check_all(pool, cache)
    pool.mapper.stop()
"""


def test_a_forked_child_is_told_and_ends() -> None:
    """Also where a thread of the parent holds the locks, and the mapper works. The parent goes on."""
    child = run_python(FORKED)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


FORKED = """
    import os, random, signal, threading
    from array import array
    from functools import partial
    from core_rows import Row, check_all, new_cache, new_pool
    from vmmkv.errors import ForkError

    pool = new_pool()
    cache, other = new_cache(pool, lookahead=9), new_cache(pool)
    row = Row(cache.start(30))
    batch = cache.batch([row.sequence])
    row.write(random.Random(1), 0)
    left = cache.start(9)
    place, last = left.row, left.ticket >> 24
    left.free()
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with pool.copying, pool.lock:
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        sequence, failed = row.sequence, []
        for name, call in {
            "extend": partial(sequence.extend, 1), "extend far": partial(sequence.extend, 90),
            "in place": partial(sequence.extend_in_place, 1),
            "batch": batch.extend, "many": partial(cache.extend, [sequence], [2]),
            "fork": sequence.fork, "truncate": partial(sequence.truncate, 3), "free": sequence.free,
            "release": partial(sequence.release_before, 3), "begin": partial(cache.start, 3),
            "empty": cache.start,
            "part": partial(cache.part, sequence.ticket, 0), "trim": pool.trim_to, "limit": partial(pool.limit_to, 90),
            "adopt": partial(cache.adopt_kept, place, last, 2), "close": other.close,
            "new": partial(new_cache, pool),
        }.items():
            try:
                if call() is not False:
                    failed.append(name)
            except ForkError:
                pass
        del sequence, left
        cache.sweep()
        own = new_pool()
        there = Row(new_cache(own).start(20))
        there.write(random.Random(3), 0)
        there.verify()
        print(end=", ".join(failed))
        sys.exit(len(failed))
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
    go_on.set()
    thread.join()
    row.sequence.extend(50)
    row.write(random.Random(2), 30)
    row.verify()
    check_all(pool, cache, other)
    pool.mapper.stop()
"""


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_interpreter_ends_while_daemon_threads_are_in_every_call(is_interrupted: bool) -> None:
    """And the mapper works. Finalizers that come then are refused, or done; it ends at once, and says nothing."""
    for _ in range(ROUNDS):
        child = run_python(ENDING, str(int(is_interrupted)), fresh=True)
        assert (child.returncode, child.stderr) == (0, "")


ENDING = """
    import random, signal, threading, time
    from core_rows import new_cache, new_pool, use_everything
    from vmmkv.errors import VmmkvError

    signal.alarm(120)  # it is not to take for ever
    pool = new_pool()
    caches = [new_cache(pool, rows=20, lookahead=12) for _ in range(3)]

    class Finalized:
        def __init__(self, sequence):
            self.sequence, self.cache, self.itself = sequence, sequence.cache, self

        def __del__(self):
            begin = self.cache.start
            for call in (self.sequence.free, pool.trim_to, begin, lambda: begin(30), self.cache.close):
                try:
                    call()
                except (VmmkvError, ValueError):
                    pass

    kept = [Finalized(cache.start(5)) for cache in caches]
    for index in range(6):
        threading.Thread(target=use_everything, args=(caches[index % 3],), daemon=True).start()
    time.sleep(random.random() * 0.2)
    if sys.argv[1] == "1":
        for line in range(30):
            try:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                for _ in range(100):
                    pool.trim_to()
            except KeyboardInterrupt:
                pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)
"""


class Finalized:
    """What calls everything when it is collected."""

    def __init__(self, pool: Pool, caches: list[Cache], done: Counter[str]) -> None:
        self.pool, self.caches, self.done = pool, caches, done
        self.sequence = caches[0].start()
        self.itself = self

    def __del__(self) -> None:
        thread = "mapper" if threading.get_ident() == self.pool.mapper._ident else "other"
        for name, call in (
            ("free", self.sequence.free),
            ("trim", self.pool.trim_to),
            ("begin", lambda: self.caches[0].start(9)),
            ("empty", self.caches[0].start),
            ("limit", lambda: self.pool.limit_to(150)),
            ("close", lambda: self.caches.pop().close() if len(self.caches) > 1 else None),
        ):
            try:
                call()
                self.done[f"{thread} {name}"] += 1
            except BusyError:
                self.done[f"{thread} {name} refused"] += 1
            except (OutOfPagesError, OutOfRowsError):
                pass


def test_a_ring_holds_no_lock_of_python_code() -> None:
    """An interruption in it, or a finalizer that rings, too, would find the lock held for ever."""
    pool, called = new_pool(), []
    cache = new_cache(pool, lookahead=9)
    cache.start(1)
    pool.mapper.ring()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    pool.mapper.ring()
    sys.setprofile(None)
    pool.mapper.stop()
    assert called == ["ring"]


def test_finalizers_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of changes and between them, also on the mapper's thread: done or refused; none hangs."""
    random, pool = Random(), new_pool(150)
    cache = new_cache(pool, rows=30, lookahead=12)
    run, ask = entries.run, mapper.Ask
    done: Counter[str] = Counter()

    def collect() -> None:
        if random.random() < 0.3 or threading.get_ident() == pool.mapper._ident:
            closed = [cache, new_cache(pool, rows=2)] if not pool.lock._is_owned() else [cache]
            Finalized(pool, closed, done).itself = None  # type: ignore[assignment]

    def in_the_middle(*words: int) -> int:
        collect()
        return int(run(*words))

    def between() -> Any:
        collect()
        return ask()

    monkeypatch.setattr(entries, "run", in_the_middle)
    monkeypatch.setattr(mapper, "Ask", between)

    def work() -> None:
        rows: list[Row] = []
        for _ in range(40 * ROUNDS):
            try:
                rows.append(Row(cache.start(20)))
                rows[-1].write(random, 0)
                rows[0].sequence.extend(3)
                rows[0].write(random, len(rows[0].tokens))
            except (OutOfPagesError, OutOfRowsError):
                pass
            if len(rows) > 4 or (rows and rows[0].sequence.length > 150):
                rows.pop(0).verify()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    join(*threads)
    pool.mapper.stop()
    monkeypatch.undo()
    check_all(pool, cache)
    names = ("mapper trim", "mapper trim refused", "other trim refused", "mapper free", "mapper close")
    assert all(done[name] for name in names), done
