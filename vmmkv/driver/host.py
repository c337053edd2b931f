"""Virtual memory on ordinary Linux memory: a memfd holds the pages, `mmap` puts them in place.

The same behaviour as on a GPU, without one: pages are scattered in the file, ranges are contiguous in
the address space, one page may be mapped many times, and a stray access kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import re
import sys
import weakref
from pathlib import Path

import torch

from ..errors import DeviceError, DriverError, DriverOutOfMemoryError
from . import Event, Handle, check_page_size

# mmap(2) and fallocate(2): the constants that Python's mmap module does not name.
PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
MAP_FAILED = ctypes.c_void_p(-1).value
NOTHING_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE

MAPPINGS_HINT = "a larger page_size takes fewer, /proc/sys/vm/max_map_count allows more"
CGROUP = Path("/sys/fs/cgroup")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


class _Done:
    """The event of a memory system whose work is finished when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: None) -> None:
        pass


class HostDriver:
    """Pages of host memory (see `vmmkv.driver.Driver`). A handle is an offset into the memfd.

    Args:
        page_size: bytes of a page, a multiple of the system's own page (4 KiB on most machines).
    """

    def __init__(self, page_size: int | None = None) -> None:
        if sys.platform != "linux":
            raise DeviceError(f"device='cpu' needs Linux (memfd and MAP_FIXED); this is {sys.platform}")
        self.device = torch.device("cpu")
        self.granularity = mmap.PAGESIZE
        self.page_size = check_page_size(page_size, self.granularity)
        self._libc = _libc()
        self._fd = os.memfd_create("vmmkv")
        self._ends = itertools.count(step=self.page_size)
        self._holes: list[int] = []
        # One mapping per page, as pages are scattered in the file; the rest of the process needs some, too.
        self._mappings_left = int(Path("/proc/sys/vm/max_map_count").read_text()) * 3 // 4
        weakref.finalize(self, os.close, self._fd)

    def memory_info(self) -> tuple[int, int]:
        with open("/proc/meminfo") as meminfo:
            kib = dict(re.findall(r"(\w+):\s+(\d+) kB", meminfo.read()))
        free, total = int(kib["MemAvailable"]) << 10, int(kib["MemTotal"]) << 10
        try:  # a container's own limit
            limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        except (OSError, ValueError):
            return free, total
        return max(min(free, limit - used), 0), min(total, limit)

    def reserve(self, nbytes: int) -> int:
        address = self._libc.mmap(None, nbytes, PROT_NONE, NOTHING_MAPPED, -1, 0)
        self._check("mmap", address != MAP_FAILED, f"reserving {nbytes} bytes of addresses")
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        self._check("munmap", self._libc.munmap(address, nbytes) == 0, "")

    def create(self) -> Handle:
        try:
            offset = self._holes.pop()
        except IndexError:
            offset = next(self._ends)
        try:
            # Takes the memory now: a page that is only promised would kill the process when written.
            os.posix_fallocate(self._fd, offset, self.page_size)
        except OSError as error:
            self._holes.append(offset)
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise DriverOutOfMemoryError("posix_fallocate", name, "the host has no memory left") from None
        return Handle(offset)

    def release(self, handle: Handle) -> None:
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        done = self._libc.fallocate(self._fd, mode, handle, self.page_size)
        self._check("fallocate", done == 0, "punching a hole into the memfd")
        self._holes.append(int(handle))  # type: ignore[call-overload]

    def map(self, address: int, handle: Handle) -> None:
        if self._mappings_left <= 0:
            raise DriverError("mmap", "ENOMEM", f"too many mappings of {self.page_size} bytes; {MAPPINGS_HINT}")
        flags = mmap.MAP_SHARED | MAP_FIXED
        at = self._libc.mmap(address, self.page_size, PROT_NONE, flags, self._fd, handle)
        self._check("mmap", at == address, MAPPINGS_HINT)
        self._mappings_left -= 1

    def set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._check("mprotect", self._libc.mprotect(address, nbytes, access) == 0, "")

    def unmap(self, address: int, nbytes: int) -> None:
        flags = NOTHING_MAPPED | MAP_FIXED
        at = self._libc.mmap(address, nbytes, PROT_NONE, flags, -1, 0)
        self._check("mmap", at == address, MAPPINGS_HINT)
        self._mappings_left += nbytes // self.page_size

    def fill(self, address: int, nbytes: int, value: int, stream: None) -> None:
        ctypes.memset(address, value, nbytes)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes)

    def current_stream(self) -> None:
        return None

    def record(self, stream: None) -> Event:
        return _Done()

    def synchronize(self) -> None:
        pass

    def _check(self, call: str, done: bool, detail: str) -> None:
        if not done:
            code = ctypes.get_errno()
            raise DriverError(call, errno.errorcode.get(code, str(code)), detail)
