"""What a test leaves behind: threads, child processes and listening sockets that were not there before the test."""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path

PATIENCE = float(os.environ.get("VMMKV_LEFTOVERS_SECONDS", "30"))
"""Seconds that threads and processes have to end after their test has told them to."""
OF_RUN: set[int] = set()
"""Child processes that serve all tests of a run."""
OF_LIBRARIES = ("TMonitor",)
"""Classes of threads that a library starts once and never ends: tqdm's monitor of progress bars."""
IDLE = ("asyncio_",)
"""How names of idle threads begin that end with their executor: transformers' server leaves its event loop open."""
DRAW_NOTHING = ("vmmkv-publisher",)
"""Names of our own threads, which draw no random numbers."""


class Living:
    """The threads, child processes and listening sockets that this process has now."""

    def __init__(self) -> None:
        self.threads = {
            each
            for each in threading.enumerate()
            if type(each).__name__ not in OF_LIBRARIES and not each.name.startswith(IDLE)
        }
        # multiprocessing starts its resource tracker once, and keeps it.
        self.children = children() - OF_RUN - {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
        self.sockets = listening()

    def since(self, before: Living) -> list[str]:
        """Describes what exists now and did not exist before."""
        threads = [f"thread {each.name}" for each in self.threads - before.threads if each.is_alive()]
        processes = [f"process {each} ({command_of(each)})" for each in self.children - before.children]
        sockets = [f"socket at {self.sockets[each]}" for each in self.sockets.keys() - before.sockets.keys()]
        return threads + processes + sockets


def left_since(before: Living) -> list[str]:
    """Describes what a test has left. Waits for what is about to end, and for what ends when garbage is collected."""
    left = Living().since(before)
    if left:
        gc.collect()  # a pool that no one holds ends its mapper's thread
    until = time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        time.sleep(0.005)
        left = Living().since(before)
    return left


def drawing_threads(before: Living) -> list[str]:
    """Names of the threads started since that may draw from a global random generator."""
    return [each.name for each in Living().threads - before.threads if each.name not in DRAW_NOTHING]


def children() -> set[int]:
    """Numbers of this process's child processes; some may have ended without being waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
    return found


def command_of(process: int) -> str:
    """The command line of a process, empty if the process has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def listening() -> dict[int, str]:
    """The addresses at which this process listens, by the socket's inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[status.st_ino] = str(each.getsockname())
        except OSError:  # closed meanwhile
            continue
    return found
