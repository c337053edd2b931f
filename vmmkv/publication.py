"""Publishing: this process's pools in a small file that `vmmkv top` reads, in memory where there is such a folder.

A thread takes a snapshot of each pool twice a second and puts the file in place as a whole. A reader finds one snapshot
or the other, never half of one, and takes no lock, so that a killed process blocks no reader. A killed process leaves
its file behind; readers see by the start of the process that it is gone, and remove the file.

Files lie in a folder that only this user can read and write (`kernels.folders`), below the first of `roots` that allows
it. Readers look below all of them, since two processes of a user may have different environments.
"""

from __future__ import annotations

import atexit
import json
import os
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
KEYS = {"pid", "start", "command", "time", "pools"}
"""Of a record: the process, when it started, what it runs, when the snapshot was taken, and the pools."""


def roots() -> list[Path]:
    """Folders below which private folders may lie, the best one first."""
    folders = [Path(runtime)] if (runtime := os.environ.get("XDG_RUNTIME_DIR")) else []
    folders.append(Path("/dev/shm"))
    with suppress(OSError):
        folders.append(Path(gettempdir()))
    return list(dict.fromkeys(folders))


def publish() -> None:
    """Lets `vmmkv top` see this process's pools, from now on to its end. This costs a snapshot twice a second, in a
    thread of its own. A forked child has to call `publish` again. Raises `OSError` if the file can be written nowhere.
    """
    global _publisher
    with _lock:
        if _publisher is not None:
            return
        read_all()  # removes the files of processes that are gone
        failures = []
        for root in roots():
            try:
                publisher = Publisher(private_folder(root))
                publisher.write()
            except OSError as error:
                failures.append(f"{root}: {error.strerror or error}")
            else:
                _publisher = publisher
                publisher.thread.start()
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
    """Writes one process's file, again and again."""

    def __init__(self, folder: Path) -> None:
        self._process = os.getpid()
        self._start = start_of(self._process)
        self._path = folder / f"{self._process}.json"
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="vmmkv-publisher", daemon=True)

    def stop(self) -> None:
        """Ends the thread, and removes the file. Gives up after `PATIENCE` if another thread holds a pool's lock."""
        self._is_over.set()
        self.thread.join(PATIENCE)
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
    """The last snapshot of each process of this user that lives and publishes. Removes the files of processes that are
    gone, and ignores files that are no records of this version."""
    folders = [folder for root in roots() for folder in private_folders(root)]
    found = {record["pid"]: record for folder in folders for record in _read(folder)}
    return [found[pid] for pid in sorted(found)]


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    for path in (*folder.glob("*.json"), *folder.glob("*.new")):
        with suppress(OSError, ValueError):  # gone meanwhile, or not a record
            start = start_of(int(path.stem))
            if start is None:
                path.unlink()
            elif path.suffix == ".json":
                record = json.loads(path.read_text())
                if not (isinstance(record, dict) and record.keys() >= KEYS):
                    continue
                if record["start"] == start:
                    yield record
                else:
                    path.unlink()


def start_of(pid: int) -> int | None:
    """When a living process was started, in clock ticks since the system was: together with its number this names a
    process for ever. None: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


_publisher: Publisher | None = None
_lock = threading.RLock()


def _forget() -> None:
    """Forgets the publisher in a forked child, which has no thread of it."""
    global _publisher, _lock
    _publisher, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
atexit.register(unpublish)
