"""Publishing: this process's pools in a small file that `vmmkv top` reads, in memory where there is such a folder.

A thread takes a snapshot of each pool twice a second and replaces the file as a whole: a reader finds one snapshot or
the other, and no lock, so that a process that is killed blocks nothing. Readers know by the process's start that the
process of a file has ended, and remove the file.

Files lie in a folder that only this user can read and write (`kernels.folders`), below the first of `roots` that allows
it. Readers look below all of them, since two processes of a user may have different environments.
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
from tempfile import gettempdir
from typing import Any

from .kernels.folders import private_folder, private_folders
from .pool import pool_stats

INTERVAL = 0.5
"""Seconds between two snapshots."""
PATIENCE = 5.0
"""Seconds that the end of a process waits for a snapshot that is being taken."""
MAX_BYTES = 1 << 20
"""Bytes of a record, at most."""
FIELDS = {"pid": int, "start": int, "command": str, "time": float, "pools": list}
"""The types of a record's fields."""


def roots() -> list[Path]:
    """Folders below which records may lie, the best one first."""
    folders = [Path(runtime)] if (runtime := os.environ.get("XDG_RUNTIME_DIR")) else []
    folders.append(Path("/dev/shm"))
    with suppress(OSError):
        folders.append(Path(gettempdir()))
    return list(dict.fromkeys(folders))


def publish() -> None:
    """Lets `vmmkv top` see this process's pools, from now on to its end. It costs a snapshot twice a second, in a
    thread of its own; a forked child has to call it anew.

    Raises:
        OSError: there is no folder in which the file could be written.
    """
    global _publisher
    with _lock:
        if _publisher is not None:
            return
        read_all()  # removes what others left behind
        failures = []
        for root in roots():
            try:
                publisher = Publisher(private_folder(root))
                publisher.write()
            except OSError as error:
                failures.append(f"{root}: {error.strerror or error}")
            else:
                publisher.thread.start()
                _publisher = publisher
                return
        raise OSError(f"no folder to publish in ({'; '.join(failures)}); set XDG_RUNTIME_DIR to one of your own")


def unpublish() -> None:
    """Ends what `publish` began, and removes the file."""
    global _publisher
    with _lock:
        if _publisher is not None:
            publisher, _publisher = _publisher, None
            publisher.stop()


class Publisher:
    """Writes one process's file, again and again, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.path = folder / f"{self.pid}.json"
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="vmmkv-publisher", daemon=True)

    def stop(self) -> None:
        """Ends the thread, and removes the file. Waits for a snapshot, but not for a pool that stays locked."""
        self.is_over.set()
        self.thread.join(PATIENCE)
        self.path.unlink(missing_ok=True)

    def write(self) -> None:
        """Puts a snapshot in place."""
        pools = [
            {"number": pool.number, "device": str(pool.device), "page_size": pool.page_size, **asdict(stats)}
            for pool, stats in pool_stats().items()
        ]
        command = " ".join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv)
        values = self.pid, start_of(self.pid), command, time.time(), pools
        if self.is_over.is_set():
            return
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(dict(zip(FIELDS, values)), file)
        new.replace(self.path)

    def _run(self) -> None:
        while not self.is_over.wait(INTERVAL):
            with suppress(OSError):  # there was no room; the next snapshot may find some
                self.write()


def read_all() -> list[dict[str, Any]]:
    """The last snapshot of each process of this user that lives and publishes. Removes files of processes that have
    ended, and passes over files that are no records."""
    found = {record["pid"]: record for root in roots() for folder in private_folders(root) for record in _read(folder)}
    return [found[pid] for pid in sorted(found)]


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    for path in (*folder.glob("*.json"), *folder.glob("*.new")):
        with suppress(OSError, ValueError, AttributeError, RecursionError):  # gone meanwhile, or no record
            status, pid = path.lstat(), int(path.stem)
            if not stat.S_ISREG(status.st_mode):
                continue
            start = start_of(pid)
            if start is None:
                path.unlink()
            elif path.suffix == ".json" and status.st_size <= MAX_BYTES:
                record = json.loads(path.read_text(), parse_int=_whole, parse_float=_finite, parse_constant=_finite)
                is_record = [type(record.get(name)) for name in FIELDS] == [*FIELDS.values()] and record["pid"] == pid
                if not is_record or not all(isinstance(pool, dict) for pool in record["pools"]):
                    continue
                if record["start"] == start:
                    yield record
                else:
                    path.unlink()


def _whole(text: str) -> int:
    """A number of 64 bits. Raises `ValueError` where it has more."""
    _finite(text)
    return int(text)


def _finite(text: str) -> float:
    """A number of a size that statistics may have. Raises `ValueError` where it has another."""
    number = float(text)
    if not abs(number) < 1 << 63:
        raise ValueError(f"{text[:20]} is no statistic")
    return number


def start_of(pid: int) -> int | None:
    """The time at which a live process was started, in ticks; no two processes of one number have the same."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


_publisher: Publisher | None = None
_lock = threading.RLock()


def _forget() -> None:
    """In a forked child, where the threads are not."""
    global _publisher, _lock
    _publisher, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
atexit.register(unpublish)
