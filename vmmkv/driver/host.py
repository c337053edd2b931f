"""Virtual memory on ordinary Linux memory: a memfd holds the pages, `mmap` puts them in place.

The same behaviour as on a GPU, without one: pages are scattered in the file, ranges are contiguous in
the address space, one page may be mapped many times, and a stray access kills the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import sys
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from ..compiled.code import address_of, keep
from ..errors import DeviceError, DriverError, DriverOutOfMemoryError
from . import entries
from .driver import Driver, check_page_size
from .mapping import FILE
from .table import FUNCTIONS

NAMES = {
    "reserve": "mmap", "free": "munmap", "create": "posix_fallocate", "release": "fallocate", "map": "mmap",
    "set_access": "mprotect", "unmap": "mmap",
}  # fmt: skip
"""By name in the table of a driver: the function of the C library."""
NO_MEMORY = ("ENOMEM", "ENOSPC", "EFBIG")
"""What `posix_fallocate` fails with for want of memory, or at a limit of it."""
OURS = {name: getattr(entries, f"host_{name}") for name in (*NAMES, "fill", "copy")}
WORDS = {name: address_of(OURS.get(name, entries.host_nothing)) for name in FUNCTIONS}
MAPPINGS_HINT = "a larger page_size takes fewer mappings, and /proc/sys/vm/max_map_count allows more"


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

    def memory_info(self) -> tuple[int, int]:
        return memory()

    def current_handle(self) -> int:
        return 0

    def error_of(self, name: str, status: int, detail: str) -> DriverError:
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


def memory() -> tuple[int, int]:
    """Free and total bytes: the machine's, or those of the container around this process where they are less."""
    kib = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    free, total = int(kib["MemAvailable"]) << 10, int(kib["MemTotal"]) << 10
    with suppress(DriverError, ValueError):  # there is no cgroup, or "max" is its limit
        limit, used = (int(_read(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
        free, total = min(free, limit - used), min(total, limit)
    return max(free, 0), total


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise DriverError("open", _name(error.errno), path) from None


def _name(code: int | None) -> str:
    return errno.errorcode.get(code or 0, str(code))


def _close(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(fd)
