"""Publishing: this process's pools in a small file that `vmmkv top` reads, in memory where there is such a folder.

A thread takes a snapshot of each pool twice a second and puts the file in place as a whole: whoever reads it finds one
snapshot or the other, never half of one, and no lock, so that a process that is killed blocks nobody. It leaves its
file behind; readers know by the process's start that it is gone, and remove it.

Files lie in a folder that only this user can read and write (`kernels.folders`), below the first of `roots` that allows
it. Readers look below all of them, since two processes of a user may have different environments.
"""

from __future__ import annotations

import atexit
import json
import math
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
from .processes import start_of

INTERVAL = 0.5
"""Seconds between two snapshots."""
PATIENCE = 5.0
"""Seconds that the end of a process waits for a snapshot that is being taken."""
MAX_BYTES = 1 << 20
"""Bytes of a record, at most."""


def roots() -> list[Path]:
    """Folders below which private folders may lie, the best one first."""
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
        if _publisher is None:
            read_all()  # removes what others left behind
            _publisher = _first_publisher()
            _publisher.start()


def _first_publisher() -> Publisher:
    """One that has written its file, in the first folder that allows it."""
    failures = []
    for root in roots():
        try:
            publisher = Publisher(private_folder(root))
            publisher.write()
            return publisher
        except OSError as error:
            failures.append(f"{root}: {error.strerror or error}")
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
    """The last snapshot of each process of this user that lives and publishes; removes what others left behind, and
    passes over what is none."""
    folders = [folder for root in roots() for folder in private_folders(root)]
    found = {record["pid"]: record for folder in folders for record in _read(folder)}
    return [found[pid] for pid in sorted(found)]


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    for path in (*folder.glob("*.json"), *folder.glob("*.new")):
        with suppress(OSError, ValueError, RecursionError):  # gone meanwhile, or none of ours
            status, pid = path.lstat(), int(path.stem)
            if not stat.S_ISREG(status.st_mode):
                continue
            start = start_of(pid)
            if start is None:
                path.unlink()
            elif path.suffix == ".json" and status.st_size <= MAX_BYTES:
                record = json.loads(path.read_text(), parse_int=_whole, parse_float=_finite, parse_constant=_finite)
                if not _is_record(record, pid):
                    continue
                if record["start"] == start:
                    yield record
                else:
                    path.unlink()


def _is_record(record: object, pid: int) -> bool:
    """Whether a file holds what a process of this number may have written."""
    if not isinstance(record, dict) or record.get("pid") != pid:
        return False
    kinds = {"pid": int, "start": int, "command": str, "time": float, "pools": list}
    return all(type(record.get(name)) is kind for name, kind in kinds.items()) and all(
        isinstance(pool, dict) for pool in record["pools"]
    )


def _whole(text: str) -> int:
    """A number of 64 bits. Raises `ValueError` where it has more."""
    _finite(text)
    return int(text)


def _finite(text: str) -> float:
    """A number of a size that statistics may have. Raises `ValueError` where it has another."""
    number = float(text)
    if not math.fabs(number) < 1 << 63:
        raise ValueError(f"{text[:20]} is no statistic")
    return number


_publisher: Publisher | None = None
_lock = threading.RLock()


def _forget() -> None:
    """In a forked child, where the threads are not."""
    global _publisher, _lock
    _publisher, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
atexit.register(unpublish)
