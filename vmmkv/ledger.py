"""A ledger: the budget that several processes share, in a file of one user.

A ledger holds a limit in bytes, and a line for each process: the bytes that are granted to it, and what it wants. Each
process changes its own line alone, in one write, so that a process that is killed at any moment leaves a whole line. It
holds a lock of the file for microseconds meanwhile. The lines of processes that have ended are removed by the next one
that looks.

Invariants:
 1. The bytes that are granted are at most the limit, unless the limit was lowered. Then processes give back what holds
    no live tokens.
 2. A process makes no memory beyond what its line grants; it gives memory back before it lowers its line.
 3. A damaged file is set aside. Each process writes its line into the new file when it looks next, and until all have
    looked nothing more is granted.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import ArgumentError, BudgetError
from .kernels.folders import cache_folder
from .processes import namespace, start_of


def _words(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


HEADER = _words("magic", "namespace", "limit", "requests", "rebuilt")
"""`requests` counts how often a process has asked the others for memory. `rebuilt` is the time at which the file took
the place of a damaged one."""
LINE = _words(
    "pid", "start", "address", "granted", "used", "reserved", "wanted", "since", "giving", "answered"
)  # fmt: skip
"""One process. `address` is a random number in the name of its socket. In bytes: `granted`, `used` by live tokens and
reservations of its caches, `reserved`: always granted, `wanted`: what it lacks `since` a time, `giving`: what it is
about to give back. `answered` is the last request that it has seen. Times are nanoseconds of the monotonic clock."""
MAGIC = 0x76_6D_6D_6B_76_6C_30_31
LINES, LINE_BYTES = 128, 128
"""Lines do not lie across pages of memory, so that a write to one is not done by half."""
SIZE = LINE_BYTES * (1 + LINES)
LOCK_SECONDS = 0.1
"""How long to wait for the lock of the file: only a process that was stopped in between keeps it so long."""
GRACE = 10**8
"""Nanoseconds after which a process that does not answer counts as stopped."""
SETTLING = 3 * 10**9
"""Nanoseconds in which all processes write their lines into a new file that has taken the place of a damaged one."""
RIVALRY = 10**9
"""Nanoseconds for which a process that wants memory may go before others."""


class Book:
    """The contents of a ledger, while it is locked.

    Args:
        header, lines: `HEADER` and `LINE`.
        number: the line of this process; None for a visitor.
    """

    def __init__(self, header: Any, lines: Any, number: int | None) -> None:
        self.header, self.lines, self.number = header, lines, number
        self.others = lines["pid"] != 0
        """Which lines are those of other processes."""
        if number is not None:
            self.others[number] = False

    @property
    def mine(self) -> Any:
        """The line of this process."""
        return self.lines[self.number]

    @property
    def limit(self) -> int:
        """Bytes that all processes may have together."""
        return int(self.header["limit"])

    @property
    def free(self) -> int:
        """Bytes that are granted to no process; negative where the limit was lowered."""
        return self.limit - int(self.lines["granted"].sum())

    @property
    def missing(self) -> int:
        """Bytes that processes should give back, beyond those that they are about to give back."""
        return int(self.lines["wanted"].sum()) - self.free - int(self.lines["giving"].sum())

    @property
    def attainable(self) -> int:
        """Bytes that this process can have: those that others neither use nor have reserved."""
        return self.limit - int(np.maximum(self.lines["used"], self.lines["reserved"])[self.others].sum())

    def take(self, nbytes: int) -> bool:
        """Grants this process more bytes, if they are free and no other process goes first."""
        is_settled = self.header["rebuilt"] == 0 or time.monotonic_ns() - self.header["rebuilt"] > SETTLING
        if nbytes > self.free or not is_settled or not self._is_next(nbytes):
            return False
        self.mine["granted"] += nbytes
        return True

    def _is_next(self, nbytes: int) -> bool:
        """Whether this process goes first. A process that stays within its share does; beyond their shares processes
        take what there is as they come. Shares of the limit are in proportion to what is reserved, or equal."""
        lines = self.lines
        rivals = self.others & (lines["wanted"] > 0) & (lines["since"] > time.monotonic_ns() - RIVALRY)
        weights = lines["reserved"] if lines["reserved"].any() else lines["pid"] != 0
        shares = self.limit * (weights / weights.sum())
        within = rivals & (lines["granted"] + lines["wanted"] <= shares)
        return bool(self.mine["granted"] + nbytes <= shares[self.number] or not within.any())

    def ask(self, nbytes: int) -> int:
        """Notes that this process wants bytes. Returns the number of its request."""
        self.header["requests"] += 1
        self.mine["wanted"], self.mine["since"] = nbytes, time.monotonic_ns()
        return int(self.header["requests"])

    def is_hopeless(self, request: int) -> bool:
        """Whether no process will give anything more for a request of this process."""
        is_late = time.monotonic_ns() - int(self.mine["since"]) > GRACE
        lines, others = self.lines, self.others
        return (is_late and not lines["giving"][others].any()) or bool(
            ((lines["answered"] >= request) & (lines["giving"] == 0))[others].all()
        )


class Ledger:
    """The file of a ledger.

    Args:
        path: of the file: see `path_of`.
        limit: bytes that all processes may have together; counts where no other process uses the ledger.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self.path, self.limit, self.is_new = path, limit, True
        self._file = -1
        self._lock = threading.RLock()
        """Of this process's threads: the file is locked for all of them."""
        self._line: Any = None
        """What this process has written last; None for a visitor."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def join(self) -> None:
        """Gives this process a line with the next change; without one it is a visitor."""
        pid, address = os.getpid(), secrets.randbits(62)
        self._line = np.zeros((), LINE)
        self._line["pid"], self._line["start"], self._line["address"] = pid, start_of(pid) or 0, address
        with suppress(OSError):  # without a name the process looks now and then
            self.socket.bind(_address(pid, address))

    @property
    def is_busy(self) -> bool:
        """Whether this thread is in the middle of a change: in a finalizer or a signal handler."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    @contextmanager
    def locked(self) -> Iterator[Book]:
        """Locks and reads the ledger, and removes lines of processes that have ended; at the end writes the header and
        this process's line, unless an error is raised.

        Raises:
            BudgetError: the file cannot be locked, read or written; it is full; or it is used by processes of another
                container.
        """
        with self._lock:
            try:
                self._open()
                try:
                    book = self._read()
                    yield book
                    self.limit, self.is_new = book.limit, False
                    os.pwrite(self._file, book.header.tobytes(), 0)
                    if book.number is not None:
                        self._line = book.mine.copy()
                        self.write(book, book.number)
                finally:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            except OSError as error:
                raise BudgetError(f"the ledger {self.path} cannot be used: {error.strerror or error}") from error

    def peek(self) -> bytes:
        """The contents of the file, perhaps in the middle of a change; empty where there is none."""
        return os.pread(self._file, SIZE, 0) if self._file >= 0 else b""

    def write(self, book: Book, number: int) -> None:
        """Writes a line, while the ledger is locked."""
        os.pwrite(self._file, book.lines[number].tobytes(), LINE_BYTES * (1 + number))

    def wake(self, book: Book) -> None:
        """Has the other processes look at the ledger."""
        for pid, address in book.lines[["pid", "address"]][book.others].tolist():
            with suppress(OSError):  # it has ended, or it is about to look anyway
                self.socket.sendto(b"\0", socket.MSG_DONTWAIT, _address(pid, address))

    def close(self) -> None:
        """Removes the line of this process, whose memory must be gone; the last process removes the file. In a forked
        child it changes nothing."""
        if self._line is not None and self._line["pid"] == os.getpid() and not self.is_new:
            with suppress(BudgetError), self.locked() as book:
                book.lines[book.number] = 0
                self.wake(book)
                if not book.others.any():
                    self.path.unlink()
        self._line = None
        self.socket.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        """Opens and locks the file, which another process may have set aside meanwhile."""
        while True:
            if self._file < 0:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _flock(self._file)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), os.stat(self.path)):
                    return
            os.close(self._file)
            self._file = -1

    def _read(self) -> Book:
        """Reads the locked file. A new file is begun, a damaged one is set aside."""
        data = os.pread(self._file, SIZE + 1, 0)
        header, lines = _parts(data) if data else self._begin(0 if self.is_new else time.monotonic_ns())
        if header is None:
            self.path.replace(self.path.with_suffix(f".damaged-{time.time_ns()}"))
            self._open()
            header, lines = self._begin(time.monotonic_ns())
        if header["namespace"] != namespace():
            raise BudgetError(f"the ledger {self.path} is used by processes of another container")
        for number in np.flatnonzero(lines["pid"]):
            if start_of(int(lines[number]["pid"])) != lines[number]["start"]:  # it has ended, and its memory is free
                lines[number] = 0
                os.pwrite(self._file, lines[number].tobytes(), LINE_BYTES * (1 + int(number)))
        book = Book(header, lines, None if self._line is None else self._place(lines))
        if self.is_new and self.limit and not book.others.any():
            book.header["limit"] = self.limit
        return book

    def _begin(self, rebuilt: int) -> tuple[Any, Any]:
        """Begins the file, with room for all lines: a later write must not lack it."""
        os.posix_fallocate(self._file, 0, SIZE)
        header = np.array((MAGIC, namespace(), self.limit, 0, rebuilt), HEADER)
        os.pwrite(self._file, header.tobytes(), 0)
        return header, np.zeros(LINES, LINE)

    def _place(self, lines: Any) -> int:
        """The number of this process's line: the one that it has, or an empty one."""
        is_own = (lines["pid"] == self._line["pid"]) & (lines["address"] == self._line["address"])
        if is_own.any():
            return int(is_own.argmax())
        if lines["pid"].all():
            raise BudgetError(f"the ledger {self.path} has {LINES} processes, and no room for another")
        number = int(lines["pid"].argmin())
        lines[number] = self._line
        return number


def path_of(name: str, device: str) -> Path:
    """Where the ledger of a pool lies, for a device that has such a name on this machine. Raises `ArgumentError` for
    what is no name of a pool."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ArgumentError(f"got shared={name!r}; write up to 64 letters, digits, '.', '_' and '-'")
    return folder() / f"{name}@{device}.ledger"


def device_name(device: torch.device) -> str:
    """What names a device on this machine, in whatever order a process sees devices."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"host-{socket.gethostname()}"


def folder() -> Path:
    """Where the ledgers of this user lie."""
    return Path(cache_folder(), "pools")


def _parts(data: bytes) -> tuple[Any, Any]:
    """Header and lines of a file; None as header where it is damaged."""
    if len(data) != SIZE:
        return None, None
    words = np.frombuffer(data, np.uint8).copy()
    header = words[: HEADER.itemsize].view(HEADER)[0]
    lines = words[LINE_BYTES:].reshape(LINES, LINE_BYTES)[:, : LINE.itemsize].copy().view(LINE)[:, 0]
    amounts = [lines[name] for name in ("pid", "granted", "used", "reserved", "wanted", "giving")]
    is_whole = header["magic"] == MAGIC and all(((each >= 0) & (each < 1 << 60)).all() for each in amounts)
    return (header if is_whole else None), lines


def _flock(file: int) -> None:
    """Locks a file. Raises `OSError` where another process keeps it locked."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(0.0002)


def _address(pid: int, number: int) -> str:
    """The name of a process's socket."""
    return f"\0vmmkv-{pid}-{number:016x}"
