"""A ledger: the budget that several processes share, in a file of one user.

A ledger holds a limit in bytes, and a line for each process: the bytes that are granted to it, and what it wants. Each
process changes its own line alone, in one write, so that a process that is killed at any moment leaves a whole line. It
locks the header for microseconds meanwhile, and its own line for as long as it lives: the next process that looks
removes lines that nobody locks. The locks are those of open files (`F_OFD_SETLK`). The kernel drops them when a process
ends.

Invariants:
 1. The bytes that are granted are at most the limit, unless the limit was lowered. Then processes give back what holds
    no live tokens.
 2. A process makes no memory beyond what its line grants; it gives memory back before it lowers its line.
 3. A damaged file is begun anew; a copy of it stays. Each process writes its line when it looks next, and until all
    have looked nothing more is granted.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from .errors import ArgumentError, BudgetError, BusyError, VmmkvError
from .kernels.folders import cache_folder
from .stats import format_bytes

Result = TypeVar("Result")
LINES, LINE_BYTES = 128, 128
"""Lines do not lie across pages of memory, so that a write to one is not done by half."""


def _words(*names: str) -> np.dtype[np.void]:
    return np.dtype({"names": names, "formats": [np.int64] * len(names), "itemsize": LINE_BYTES})


HEADER = _words("magic", "limit", "requests", "rebuilt")
"""`requests` counts how often a process has asked the others for memory. `rebuilt` is the time at which a damaged or
lost file was begun anew."""
LINE = _words("pid", "address", "granted", "used", "reserved", "wanted", "since", "giving", "answered")
"""One process. `address` is a random number in the name of its socket. In bytes: `granted`, `used` by live tokens and
reservations of its caches, `reserved`: always granted, `wanted`: what it lacks `since` a time, or `giving`: what it has
been about to give back since then. `answered` is the last request that it has seen. Times are nanoseconds of the
monotonic clock."""
AMOUNTS = "pid", "granted", "used", "reserved", "wanted", "giving"
"""Words of a line that are never negative, nor as large as 2**54."""
SIZE = LINE_BYTES * (1 + LINES)
MAGIC = 0x76_6D_6D_6B_76_6C_30_32
LOCK = struct.Struct("hhqqi4x")
"""A lock for the kernel: its kind, from where its place counts, its place and length, and a process, which is 0."""
LOCK_SECONDS = 0.5
"""How long to wait for the lock of the file: only a process that was stopped in between keeps it so long."""
GRACE = 10**8
"""Nanoseconds after which a process that does not answer counts as stopped."""
SETTLING = 3 * 10**9
"""Nanoseconds in which all processes write their lines into a file that was begun anew."""
RIVALRY = 10**9
"""Nanoseconds for which a process that wants memory may go first, or one that gives memory back is waited for."""


class Book:
    """The contents of a ledger, while it is locked: `HEADER`, `LINE`s, and the number of this process's line, which is
    None for a visitor."""

    def __init__(self, header: Any, lines: Any, number: int | None) -> None:
        self.header, self.lines, self.number = header, lines, number
        self.others = lines["pid"] != 0
        """Which lines are those of other processes."""
        if number is not None:
            self.others[number] = False

    @property
    def mine(self) -> Any:
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
    def open(self) -> int:
        """Bytes that can be granted to this process now: none that others have reserved."""
        lacking = self.lines["reserved"] - self.lines["granted"]
        return self.free - int(lacking[self.others & (lacking > 0)].sum())

    @property
    def given(self) -> Any:
        """Bytes of each process that it is about to give back."""
        is_late = self.lines["since"] < time.monotonic_ns() - RIVALRY
        return np.where(is_late, 0, self.lines["giving"])

    @property
    def missing(self) -> int:
        """Bytes that processes should give back, beyond those that they are about to give back."""
        lines = self.lines
        lacking = np.maximum(lines["wanted"], lines["reserved"] - lines["granted"])
        return int(lacking.sum()) - self.free - int(self.given.sum())

    @property
    def attainable(self) -> int:
        """Bytes that this process can have: those that others neither use nor have reserved."""
        return self.limit - int(np.maximum(self.lines["used"], self.lines["reserved"])[self.others].sum())

    @property
    def is_settled(self) -> bool:
        """Whether all processes have had time to write their lines. The clock begins anew with the machine."""
        return not 0 <= time.monotonic_ns() - int(self.header["rebuilt"]) <= SETTLING

    def take(self, nbytes: int) -> bool:
        """Grants this process more bytes, if they are free and no other process goes first."""
        if nbytes > self.open or not self.is_settled or not self._is_next(nbytes):
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

    def reserve(self, line: Any, nbytes: int) -> None:
        """Reserves bytes for the process of a line. Raises `BudgetError` where others have reserved too much."""
        others = int(self.lines["reserved"].sum()) - int(line["reserved"])
        if nbytes + others > self.limit:
            raise BudgetError(
                f"asked to reserve {format_bytes(nbytes)} of {format_bytes(self.limit)} that processes share; others "
                f"have reserved {format_bytes(others)}"
            )
        line["reserved"] = nbytes

    def is_hopeless(self, request: int) -> bool:
        """Whether no process will give anything more for a request of this process."""
        is_late = time.monotonic_ns() - int(self.mine["since"]) > GRACE
        has_answered = is_late or (self.lines["answered"] >= request)[self.others].all()
        return bool(has_answered and not self.given.any())  # also this process, for a request that has ended meanwhile


class Ledger:
    """The file of a ledger.

    Args:
        path: of the file: see `path_of`.
        limit: bytes that all processes may have together; counts where no other process uses the ledger.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        self.path, self.limit, self.is_new = path, limit, True
        self._file, self._is_closed = -1, False
        self._lock = threading.RLock()
        """Of this process's threads: the file is locked for all of them."""
        self._line: Any = None
        """What this process has written last; None for a visitor."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        """Without a timeout of Python's, with which it would send to a full queue again and again."""
        _ledgers.add(self)

    def join(self) -> None:
        """Gives this process a line with the next change; without one it is a visitor."""
        pid, address = os.getpid(), secrets.randbits(62)
        self._line = np.zeros((), LINE)
        self._line["pid"], self._line["address"] = pid, address
        with suppress(OSError):  # without a name the process looks now and then
            self.socket.bind(_address(pid, address))

    @property
    def is_busy(self) -> bool:
        """Whether this thread is in the middle of a change: in a finalizer or a signal handler."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def change(self, edit: Callable[[Book], Result]) -> Result:
        """Locks and reads the ledger, removes lines of processes that have ended, and has a function change the book;
        then writes the header and this process's line, unless the function has raised an error. Returns what the
        function returns. This is no context manager: one that is interrupted keeps its locks with its traceback."""
        if self.is_busy:
            raise BusyError(f"the ledger {self.path} is changed by a call that this one interrupts")
        closed = BudgetError(f"the ledger {self.path} was closed")
        if self._is_closed:  # in a forked child another thread of the parent has the lock
            raise closed
        with self._lock:
            if self._is_closed:
                raise closed
            try:
                self._open()
                book = self._read()
                result = edit(book)
                self.limit, self.is_new = book.limit, False
                os.pwrite(self._file, book.header.tobytes(), 0)
                if book.number is not None:
                    self._line = book.mine.copy()
                    self.write(book, book.number)
                return result
            except OSError as error:
                raise BudgetError(f"the ledger {self.path} cannot be used: {error.strerror or error}") from error
            finally:
                if self._file >= 0:
                    _lock(self._file, fcntl.F_UNLCK)

    def set_limit(self, nbytes: int) -> None:
        """Sets the limit, and has processes give back what is beyond it and holds no live tokens. Raises `BudgetError`
        where more is reserved."""

        def edit(book: Book) -> None:
            reserved = int(book.lines["reserved"].sum())
            if nbytes < max(reserved, 1):
                raise BudgetError(f"asked for a limit of {format_bytes(nbytes)}; {format_bytes(reserved)} are reserved")
            book.header["limit"] = nbytes
            book.header["requests"] += 1
            self.wake(book)

        self.change(edit)

    def peek(self) -> bytes:
        """The contents of the file, perhaps in the middle of a change of another process; empty where there is none."""
        with self._lock:
            return os.pread(self._file, SIZE, 0) if self._file >= 0 else b""

    def write(self, book: Book, number: int) -> None:
        os.pwrite(self._file, book.lines[number].tobytes(), LINE_BYTES * (1 + number))

    def wake(self, book: Book) -> None:
        """Has the other processes look at the ledger."""
        for pid, address in book.lines[["pid", "address"]][book.others].tolist():
            with suppress(OSError):  # it has ended, or it is about to look anyway
                self.socket.sendto(b"\0", socket.MSG_DONTWAIT, _address(pid, address))

    def close(self) -> None:
        """Removes the line of this process, whose memory must be gone. Where there is no other, removes the file. Where
        the file cannot be locked now, the next process that looks removes the line."""
        if not (self.is_new or self._is_closed):
            with suppress(VmmkvError):
                self.change(self._remove)
        if self._file >= 0 or not self._is_closed:
            with self._lock:
                self.leave()

    def _remove(self, book: Book) -> None:
        """The last change: another thread must not make the file again."""
        self._is_closed = True
        if book.number is not None:
            book.lines[book.number] = 0
            self.wake(book)
        if not book.others.any() and book.is_settled:
            self.path.unlink()

    def leave(self) -> None:
        """Closes the file, whose locks a forked child has in common with its parent; and the socket."""
        self._is_closed = True
        self.socket.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        """Opens and locks the file, which another process may have removed meanwhile."""
        while True:
            if self._file < 0:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _lock_soon(self._file, self.path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), os.stat(self.path)):
                    return
            os.close(self._file)
            self._file = -1

    def _read(self) -> Book:
        """Reads the locked file. Begins a new or damaged one; a copy of the latter stays."""
        data = os.pread(self._file, SIZE + 1, 0)
        header, lines = _parts(data if len(data) == SIZE else bytes(SIZE))
        amounts = [header["limit"], *(lines[name] for name in AMOUNTS)]
        if header["magic"] != MAGIC or not all(((each >= 0) & (each < 1 << 54)).all() for each in amounts):
            if data:
                with suppress(OSError):
                    self.path.with_suffix(".damaged").write_bytes(data)
            is_first = self.is_new and not _is_locked(self._file, 1, LINES)
            header, lines = self._begin(0 if is_first else time.monotonic_ns())
        for number in map(int, np.flatnonzero(lines["pid"])):
            if not self._is_own(lines[number]) and not _is_locked(self._file, 1 + number):  # its process has ended
                lines[number] = 0
                os.pwrite(self._file, lines[number].tobytes(), LINE_BYTES * (1 + number))
        book = Book(header, lines, None if self._line is None else self._place(lines))
        if self.limit and (not book.limit or (self.is_new and not book.others.any())):
            book.header["limit"] = self.limit
        return book

    def _begin(self, rebuilt: int) -> tuple[Any, Any]:
        """Begins the file, with room for all lines: a later write must not lack it. The header comes last, so that a
        process that is killed leaves a damaged file."""
        os.posix_fallocate(self._file, 0, SIZE)
        header, lines = _parts(bytes(SIZE))
        header["magic"], header["limit"], header["rebuilt"] = MAGIC, self.limit, rebuilt
        os.pwrite(self._file, lines.tobytes(), LINE_BYTES)
        os.ftruncate(self._file, SIZE)
        os.pwrite(self._file, header.tobytes(), 0)
        return header, lines

    def _is_own(self, line: Any) -> Any:
        """Whether a line, or which of them, is this process's."""
        return self._line is not None and line["address"] == self._line["address"]

    def _place(self, lines: Any) -> int:
        """Locks this process's line: the one that it has, or an empty one. Returns its number."""
        own = self._is_own(lines)
        for number in map(int, np.flatnonzero(own if own.any() else lines["pid"] == 0)):
            with suppress(BlockingIOError):  # the process that has it has not written into a new file yet
                _lock(self._file, fcntl.F_WRLCK, 1 + number)
                if not own.any():
                    lines[number] = self._line
                return number
        raise BudgetError(f"the ledger {self.path} has {LINES} processes, and no room for another")


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
    return Path(cache_folder(), "pools")


def _parts(data: bytes) -> tuple[Any, Any]:
    return np.frombuffer(bytearray(data), HEADER, 1)[0], np.frombuffer(bytearray(data), LINE, offset=LINE_BYTES)


def _lock(file: int, kind: int, place: int = 0) -> None:
    """Locks or unlocks the header, which has the place 0, or a line. Raises `BlockingIOError` where another process has
    locked it."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, LOCK.pack(kind, os.SEEK_SET, LINE_BYTES * place, LINE_BYTES, 0))


def _is_locked(file: int, place: int, places: int = 1) -> bool:
    lock = LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, LINE_BYTES * place, LINE_BYTES * places, 0)
    return bool(LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, lock))[0] != fcntl.F_UNLCK)


def _lock_soon(file: int, path: Path) -> None:
    """Locks the header. Raises `BudgetError` where another process keeps it locked."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            _lock(file, fcntl.F_WRLCK)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise BudgetError(f"another process keeps the ledger {path} locked; it may have been stopped") from None
        time.sleep(0.0002)


def _address(pid: int, number: int) -> str:
    return f"\0vmmkv-{pid}-{number:016x}"


def _leave_to_parent() -> None:
    """Leaves the ledgers of the parent in a forked child."""
    for ledger in [*_ledgers]:
        ledger.leave()


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)
