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
import threading
import weakref

import torch

from ...errors import DeviceError, DriverError, DriverOutOfMemoryError
from . import Event, Handle, check_page_size, check_process, limits
from .limits import mappings

# mmap(2), madvise(2) and fallocate(2): the constants that Python's mmap module does not name.
PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
MADV_DONTFORK = 10
MAP_FAILED = ctypes.c_void_p(-1).value
NOTHING_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE

NO_MEMORY = ("ENOMEM", "ENOSPC", "EFBIG")
"""What `posix_fallocate` fails with for want of memory, or at a limit of it."""


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
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
    """Pages of host memory (see `vmmkv.memory.driver.Driver`). A handle is an offset into the memfd.

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
        self._process = os.getpid()
        try:
            self._fd = os.memfd_create("vmmkv")
        except OSError as error:
            raise DriverError("memfd_create", _name(error.errno), "no file for the pages could be made") from None
        # Not at exit, when there may be caches still: they would write to whichever file had the number next.
        weakref.finalize(self, _close, self._fd, self._process).atexit = False
        self._end = 0
        self._lock = threading.Lock()
        self._holes: dict[int, list[int]] = {}
        """By size in bytes: pieces of the file that nobody has."""
        self._sizes: dict[int, int] = {}
        """By handle: bytes of what is more than a page."""

    def enter_thread(self) -> None:
        pass

    def memory_info(self) -> tuple[int, int]:
        return limits.memory()

    def reserve(self, nbytes: int) -> int:
        check_process(self._process)
        mappings.check()
        address = self._libc.mmap(None, nbytes, PROT_NONE, NOTHING_MAPPED, -1, 0)
        self._check("mmap", address != MAP_FAILED, f"reserving {nbytes} bytes of addresses")
        mappings.add_range(address, nbytes)
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        mappings.remove_range(address)  # before: right after it the addresses may be another thread's
        if self._libc.munmap(address, nbytes):
            mappings.add_range(address, nbytes)
            self._check("munmap", False)

    def create(self, pages: int = 1) -> Handle:
        check_process(self._process)
        nbytes = pages * self.page_size
        holes = self._holes.setdefault(nbytes, [])
        try:
            offset = holes.pop()
        except IndexError:
            with self._lock:
                offset, self._end = self._end, self._end + nbytes
        try:
            # Takes the memory now: a page that is only promised would kill the process when written.
            os.posix_fallocate(self._fd, offset, nbytes)
        except BaseException as error:
            holes.append(offset)
            if not isinstance(error, OSError):
                raise
            raise self._not_created(nbytes, _name(error.errno)) from None
        if pages > 1:
            self._sizes[offset] = nbytes
        return Handle(offset)

    def _not_created(self, nbytes: int, code: str) -> DriverError:
        detail = f"the host has no memory left for {nbytes} bytes"
        if code == "EFBIG":
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            detail = f"no file, that of the pages included, may be longer than {limit} bytes; `ulimit -f` allows more"
        return (DriverOutOfMemoryError if code in NO_MEMORY else DriverError)("posix_fallocate", code, detail)

    def release(self, handle: Handle) -> None:
        check_process(self._process)
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        nbytes = self._sizes.get(handle, self.page_size)
        done = self._libc.fallocate(self._fd, mode, handle, nbytes)
        self._check("fallocate", done == 0, "punching a hole into the memfd")
        self._sizes.pop(handle, None)
        self._holes[nbytes].append(handle)

    def map(self, address: int, handle: Handle, pages: int = 1) -> None:
        check_process(self._process)
        mappings.check(pages)
        flags = mmap.MAP_SHARED | MAP_FIXED
        at = self._libc.mmap(address, self.page_size * pages, PROT_NONE, flags, self._fd, handle)
        self._check("mmap", at == address, limits.MAPPINGS_HINT)
        for page in range(pages):
            mappings.add_page(address + page * self.page_size, self.page_size)

    def set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        # A forked child has no part in the pages: what it writes through a view it has kept must not reach them.
        self._check("madvise", self._libc.madvise(address, nbytes, MADV_DONTFORK) == 0)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._check("mprotect", self._libc.mprotect(address, nbytes, access) == 0)

    def unmap(self, address: int, nbytes: int) -> None:
        flags = NOTHING_MAPPED | MAP_FIXED
        at = self._libc.mmap(address, nbytes, PROT_NONE, flags, -1, 0)
        self._check("mmap", at == address, limits.MAPPINGS_HINT)
        mappings.remove_pages(range(address, address + nbytes, self.page_size))

    def fill(self, address: int, nbytes: int, value: int, stream: None) -> None:
        ctypes.memset(address, value, nbytes)

    def copy(self, destination: int, source: int, nbytes: int, stream: None = None) -> None:
        ctypes.memmove(destination, source, nbytes)

    def current_stream(self) -> None:
        return None

    def new_stream(self) -> None:
        return None

    def record(self, stream: None) -> Event:
        return _Done()

    def synchronize(self) -> None:
        pass

    def _check(self, call: str, done: bool, detail: str = "") -> None:
        if not done:
            raise DriverError(call, _name(ctypes.get_errno()), detail)


def _name(code: int | None) -> str:
    return errno.errorcode.get(code or 0, str(code))


def _close(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(fd)
