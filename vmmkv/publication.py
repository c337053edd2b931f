"""Publishing: a process that publishes answers `vmmkv top` with a snapshot of its pools, as JSON, over a socket.

The socket has a name in Linux's abstract namespace, of the process and a random number. The kernel removes the name
with the process, however that ends. Both sides ask the kernel for the user of the other one, and deal with no other
user.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .pool import pool_stats

PREFIX = "vmmkv-top-"
"""How names of sockets begin."""
PATIENCE = 1.0
"""Seconds to wait for a process that does not answer, for another thread may hold a pool's lock, or does not read."""
ASKED_AT_ONCE = 32
"""Processes that are asked at the same time, for some may not answer. Other users can publish any number of names."""
KEYS = {"pid", "start", "command", "time", "pools"}
"""Of a record: the process, when it began to publish, what it runs, when the snapshot was taken, and the pools."""


def publish() -> None:
    """Lets `vmmkv top` see this process's pools, from now on to its end. A thread of its own takes a snapshot when
    `vmmkv top` asks for one. A forked child has to call `publish` again. Raises `OSError` if there can be no socket.
    """
    global _publisher
    with _lock:
        if _publisher is None:
            _publisher = Publisher()


def unpublish() -> None:
    """Ends what `publish` began."""
    global _publisher
    with _lock:
        if _publisher is not None:
            publisher, _publisher = _publisher, None
            publisher.stop()


class Publisher:
    """Answers those who ask, in a thread."""

    def __init__(self) -> None:
        self._start, self._is_over = time.time(), False
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(f"\0{PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        self.socket.listen()
        self._thread = threading.Thread(target=self._run, name="vmmkv-publisher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Gives up after `PATIENCE` if another thread holds a pool's lock."""
        self._is_over = True
        self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self.socket.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                if self._is_over:
                    return
                time.sleep(PATIENCE)  # the process has too many files open
                continue
            with client, suppress(Exception):  # whatever becomes of one answer
                client.settimeout(PATIENCE)
                if _is_own(client):
                    client.sendall(json.dumps(self._record()).encode())

    def _record(self) -> dict[str, Any]:
        pools = [
            {"number": pool.number, "device": str(pool.device), "page_size": pool.page_size, **asdict(stats)}
            for pool, stats in pool_stats().items()
        ]
        command = " ".join(Path(word).name if word.startswith("/") else word for word in sys.orig_argv)
        return {"pid": os.getpid(), "start": self._start, "command": command, "time": time.time(), "pools": pools}


def read_all() -> list[dict[str, Any]]:
    """A snapshot of each process of this user that publishes, by process. Passes over processes that do not answer in
    time, or answer something else than a record of this version."""
    words = (line.split()[-1] for line in Path("/proc/net/unix").read_text(errors="replace").splitlines())
    names = {word[1:] for word in words if word.startswith(f"@{PREFIX}")}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        return sorted(filter(None, threads.map(_read, names)), key=lambda record: int(record["pid"]))


def _read(name: str) -> dict[str, Any] | None:
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as server:  # gone meanwhile, or no record
        server.settimeout(PATIENCE)
        server.connect(f"\0{name}")
        if _is_own(server):
            with server.makefile("rb") as answer:
                record = json.load(answer)
            return record if _is_record(record) else None
    return None


def _is_record(found: Any) -> bool:
    if not (isinstance(found, dict) and found.keys() >= KEYS and isinstance(found["pid"], int)):
        return False
    return isinstance(found["pools"], list) and all(isinstance(pool, dict) for pool in found["pools"])


def _is_own(peer: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


_publisher: Publisher | None = None
_lock = threading.RLock()


def _forget() -> None:
    """Forgets the publisher in a forked child, which has no thread of it."""
    global _publisher, _lock
    if _publisher is not None:
        _publisher.socket.close()
    _publisher, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
atexit.register(unpublish)
