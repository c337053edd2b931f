"""Virtual memory on ordinary Linux memory: a memfd holds the pages, `mmap` puts them in place.

The same behaviour as on a GPU, without one: pages are scattered in the file, ranges are contiguous in
the address space, one page may be mapped many times, and a stray access kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import sys
import weakref
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ..compiled.code import address_of, keep
from ..errors import DeviceError, DriverError, DriverOutOfMemoryError
from . import entries
from .driver import Driver, check_page_size
from .limits import memory, read
from .mapping import FILE, HOST, RANGE
from .table import FUNCTIONS, NO_MAPPINGS

NAMES = {
    "reserve": "mmap",
    "free": "munmap",
    "create": "posix_fallocate",
    "release": "fallocate",
    "map": "mmap",
    "set_access": "mprotect",
    "unmap": "mmap",
}
"""By name in the table of a driver: the function of the C library."""
NO_MEMORY = ("ENOMEM", "ENOSPC", "EFBIG")
"""What `posix_fallocate` fails with for want of memory, or at a limit of it."""
OURS = {name: getattr(entries, f"host_{name}") for name in (*NAMES, "fill", "copy")}
WORDS = {name: address_of(OURS.get(name, entries.host_nothing)) for name in FUNCTIONS}


SPARE = 1 / 8
"""Of the mappings that there may be: for threads, libraries and large tensors, which ask nobody, and for unmapping."""

MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")
MAPPINGS_HINT = f"a larger page_size takes fewer, {MAX_MAPPINGS} allows more"


class HostDriver(Driver):
    """Pages of host memory (see `vmmkv.driver.driver.Driver`).

    Args:
        page_size: bytes of a page, a multiple of the system's own page (4 KiB on most machines).
    """

    def __init__(self, page_size: int | None = None) -> None:
        if sys.platform != "linux":
            raise DeviceError(f"device='cpu' needs Linux (memfd and MAP_FIXED); this is {sys.platform}")
        size = check_page_size(page_size, mmap.PAGESIZE)
        try:
            fd = os.memfd_create("vmmkv")
        except OSError as error:
            raise DriverError("memfd_create", _name(error.errno), "no file for the pages could be made") from None
        # Not at exit, when there may be caches still: they would write to whichever file had the number next.
        weakref.finalize(self, _close, fd, os.getpid()).atexit = False
        files = np.zeros(1, FILE)
        files["fd"] = self.fd = fd
        keep(files)
        access = {"access": mmap.PROT_READ | mmap.PROT_WRITE, "read_access": mmap.PROT_READ}
        words = WORDS | access | {"property": files.ctypes.data}
        super().__init__(torch.device("cpu"), mmap.PAGESIZE, size, words, dict.fromkeys(FUNCTIONS, "") | NAMES)
        self.alignment = size

    def memory_info(self) -> tuple[int, int]:
        return memory()

    def current_handle(self) -> int:
        return 0

    def reserve(self, nbytes: int) -> int:
        check_mappings()
        return super().reserve(nbytes)

    def error_of(self, name: str, status: int, detail: str) -> DriverError:
        if status == NO_MAPPINGS:
            return no_mappings()
        code = _name(status)
        if name == "create":
            detail = "the host has no memory left for its pages"
            if code == "EFBIG":
                limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
                detail = (
                    f"no file, that of the pages included, may be longer than {limit} bytes; `ulimit -f` allows more"
                )
        elif name in ("map", "unmap"):
            detail = MAPPINGS_HINT
        kind = DriverOutOfMemoryError if name == "create" and code in NO_MEMORY else DriverError
        return kind(self.names[name], code, detail)


class NullDriver(HostDriver):
    """Addresses without memory: a page is a number, and an access anywhere faults. A cache keeps its books, no bytes.

    Args:
        nbytes: the memory that the device is said to have.
        page_size: bytes of a page.
    """

    def __init__(self, nbytes: int, page_size: int | None = None) -> None:
        super().__init__(page_size)
        self.nbytes = nbytes
        for name in ("release", "map", "set_access", "unmap", "fill", "copy"):
            self.table[name] = WORDS["push"]
        self.table["create"] = address_of(entries.host_number)

    def memory_info(self) -> tuple[int, int]:
        return self.nbytes, self.nbytes


def _name(code: int | None) -> str:
    return errno.errorcode.get(code or 0, str(code))


def _close(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(fd)


def check_mappings(needed: int = 2) -> None:
    """Raises `DriverError` unless so many mappings can be added."""
    if mapped["mappings"] + needed > mapped["allowed"] and _recount(needed):
        raise no_mappings()


def _recount(needed: int) -> int:
    """Sets how many mappings drivers may have before others' are counted again; 1 if that is too few."""
    limit = int(read(MAX_MAPPINGS))
    starts = [int(line.split("-", 1)[0], 16) for line in read("/proc/self/maps").splitlines()]
    inside = sum(bisect_left(starts, first + size) - bisect_left(starts, first) for first, size in _ranges())
    _counted[:], own, spare = [len(starts) - inside], int(mapped["mappings"]), int(limit * SPARE)
    room = limit - spare - _counted[0] - own
    if room < needed:
        return 1
    mapped["allowed"] = own + max(min(room, spare), needed)
    return 0


def no_mappings() -> DriverError:
    """What is raised where a process may not have more mappings."""
    limit = int(read(MAX_MAPPINGS))
    return DriverError(
        "mmap",
        "ENOMEM",
        f"of the {limit} mappings that this process may have, pages take {mapped['mappings']}, all else takes "
        f"{_counted[0]}, and {int(limit * SPARE)} are kept for it and for unmapping; {MAPPINGS_HINT}",
    )


def _ranges() -> Iterator[tuple[int, int]]:
    """Address and bytes of each reserved range."""
    place = int(mapped["ranges"])
    while place:
        record = np.frombuffer(ctypes.string_at(place, RANGE.itemsize), RANGE)[0]
        yield int(record["address"]), int(record["nbytes"])
        place = int(record["next"])


def _reset() -> None:
    """Forgets all in a forked child, which inherits no pages, and maybe a lock that nobody there will give up."""
    _hosts[:] = 0
    _install()


def _install() -> None:
    mapped["recount"] = ctypes.cast(_callback, ctypes.c_void_p).value
    entries.host_install(_hosts.ctypes.data)


_hosts = np.zeros(1, HOST)
mapped = _hosts[0]
"""Mappings of all drivers: see `vmmkv.driver.mapping`."""
_counted = [0]
"""Mappings of all else, as counted last."""
_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(_recount)
keep(_hosts, _callback)
_install()
os.register_at_fork(after_in_child=_reset)
