"""Publishing: this process's pools in a small file that `vmmkv top` reads, in memory.

A thread takes a snapshot of each pool twice a second and puts the file in place as a whole: whoever reads it finds one
snapshot or the other, never half of one, and no lock, so that a process that is killed blocks nobody. It leaves its
file behind; readers know by the process's start that it is gone, and remove it.
"""

from __future__ import annotations

import atexit
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .memory.pool import pool_stats

FOLDER = Path("/dev/shm")
INTERVAL = 0.5
"""Seconds between two snapshots."""
PATIENCE = 5.0
"""Seconds that the end of a process waits for a snapshot that is being taken."""


def publish() -> None:
    """Lets `vmmkv top` see this process's pools, from now on to its end. It costs a snapshot twice a second, in a
    thread of its own; a forked child has to call it anew.

    Raises:
        OSError: the file could not be written.
    """
    global _publisher
    with _lock:
        if _publisher is None:
            read_all()  # removes what others left behind
            publisher = Publisher()
            publisher.write()
            _publisher = publisher
            publisher.start()


def unpublish() -> None:
    """Ends what `publish` began, and removes the file."""
    global _publisher
    with _lock:
        if _publisher is not None:
            publisher, _publisher = _publisher, None
            publisher.stop()


class Publisher:
    """Writes one process's file, again and again."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._start = start_of(self._process)
        self._path = FOLDER / f"{_prefix()}{self._process}"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vmmkv-publisher", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and removes the file; does not wait for who keeps a pool to himself for ever."""
        self._is_over.set()
        self._thread.join(PATIENCE)
        self._path.unlink(missing_ok=True)

    def write(self) -> None:
        """Puts a snapshot in place."""
        pools = [
            {"number": pool.number, "device": str(pool.device), "page_size": pool.page_size, **asdict(stats)}
            for pool, stats in pool_stats().items()
        ]
        record = {
            "pid": self._process,
            "start": self._start,
            "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv),
            "time": time.time(),
            "pools": pools,
        }
        if self._is_over.is_set():
            return
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(record, file)
        new.replace(self._path)

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL):
            with suppress(OSError):  # no room: the next one may find some
                self.write()


def read_all() -> list[dict[str, Any]]:
    """The last snapshot of each process of this user that lives and publishes; removes what others left behind."""
    return sorted(_read(), key=lambda record: int(record["pid"]))


def _read() -> Iterator[dict[str, Any]]:
    for path in FOLDER.glob(f"{_prefix()}*"):
        pid = path.stem.removeprefix(_prefix())
        with suppress(OSError, ValueError, TypeError, KeyError):  # gone meanwhile, or none of ours
            status = path.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
                continue
            start = start_of(int(pid))
            record = json.loads(path.read_text()) if path.suffix != ".new" else None
            if start is None or (record is not None and record["start"] != start):
                path.unlink()
            elif record:
                yield record


def start_of(pid: int) -> int | None:
    """When a process that lives was started, in ticks since the system was: no two of one number have the same."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _prefix() -> str:
    return f"vmmkv-{os.getuid()}-"


_publisher: Publisher | None = None
_lock = threading.RLock()


def _forget() -> None:
    """In a forked child, where the threads are not."""
    global _publisher, _lock
    _publisher, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
atexit.register(unpublish)
