"""The host's memory system, compiled: pages of a memfd, put under addresses by `mmap`, by the contract of `table`.

A handle is the address of a piece of the file: where it lies, and its size. The file is sparse, and places in it are
not used again. A status is the C library's `errno`. No Python runs under a lock.
"""

import numpy as np

from ..compiled import entry_without_lock, inner
from ..compiled.native import c_function, errno, view
from .table import FORKED

MUTEX = ("mutex", np.int64, 8)
"""Zeros make a `pthread_mutex_t`."""
FILE = np.dtype([MUTEX, *((name, np.int64) for name in ("fd", "end"))])
"""A memfd, and the end of the last piece of it."""
PIECE = np.dtype([(name, np.int64) for name in ("file", "offset", "nbytes")])
PIECE_SIZE = PIECE.itemsize

_mmap, _munmap, _mprotect = c_function("mmap", 6), c_function("munmap", 2), c_function("mprotect", 3)
_madvise, _fallocate = c_function("madvise", 3), c_function("fallocate", 4)
_posix_fallocate = c_function("posix_fallocate", 3)
_memset, _memmove = c_function("memset", 3), c_function("memmove", 3)
_malloc, _free = c_function("malloc", 1), c_function("free", 1)
_lock, _unlock = c_function("pthread_mutex_lock", 1), c_function("pthread_mutex_unlock", 1)

NOTHING = 0x22 | 0x4000
"""MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE."""
SHARED_FIXED, FIXED = 0x11, 0x10
PUNCH_HOLE, DONTFORK = 0x03, 10
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE; and what keeps a page from forked children."""
INTERRUPTED = 4
"""EINTR."""


@inner
def failed(result: int) -> int:
    """The status of a function that returns an `int`: 0, or -1 and sets `errno`."""
    return errno() if result & 0xFFFFFFFF else 0


@entry_without_lock
def host_nothing(_: int) -> int:
    """Stands for what the host has no need of: contexts, events, captures. It may be given more arguments."""
    return 0


@entry_without_lock
def host_number(out: int, _0: int, counter: int, _1: int) -> int:
    """Stands for `create` where there is no memory: handles are numbers."""
    _lock(counter)
    numbers = view(counter, 1, FILE)[0]
    numbers.end += 1
    view(out, 1, np.int64)[0] = numbers.end
    _unlock(counter)
    return 0


@entry_without_lock
def host_refuse(_: int) -> int:
    """Stands for all that a forked child has no part in."""
    return FORKED


@entry_without_lock
def host_reserve(out: int, nbytes: int, _0: int, _1: int, _2: int) -> int:
    address = _mmap(0, nbytes, 0, NOTHING, -1, 0)
    if address == -1:
        return errno()
    view(out, 1, np.int64)[0] = address
    return 0


@entry_without_lock
def host_free(address: int, nbytes: int) -> int:
    return failed(_munmap(address, nbytes))


@entry_without_lock
def host_create(out: int, nbytes: int, file: int, _: int) -> int:
    """Takes the memory now: a page that is only promised would kill the process when written."""
    f, piece = view(file, 1, FILE)[0], _malloc(PIECE_SIZE)
    p = view(piece, 1, PIECE)[0]
    _lock(file)
    p.file, p.offset, p.nbytes = file, f.end, nbytes
    f.end += nbytes
    _unlock(file)
    status = INTERRUPTED
    while status == INTERRUPTED:  # by a signal; Python looks at it later
        status = _posix_fallocate(f.fd, p.offset, nbytes) & 0xFFFFFFFF
    if status:
        _free(piece)
    else:
        view(out, 1, np.int64)[0] = piece
    return status


@entry_without_lock
def host_release(piece: int) -> int:
    p = view(piece, 1, PIECE)[0]
    status = INTERRUPTED
    while status == INTERRUPTED:
        status = failed(_fallocate(view(p.file, 1, FILE)[0].fd, PUNCH_HOLE, p.offset, p.nbytes))
    if status == 0:
        _free(piece)
    return status


@entry_without_lock
def host_map(address: int, nbytes: int, _0: int, piece: int, _1: int) -> int:
    p = view(piece, 1, PIECE)[0]
    if _mmap(address, nbytes, 0, SHARED_FIXED, view(p.file, 1, FILE)[0].fd, p.offset) != address:
        return errno()
    return 0


@entry_without_lock
def host_set_access(address: int, nbytes: int, access: int, _: int) -> int:
    """A forked child has no part in the pages: what it writes through a view it has kept must not reach them."""
    status = failed(_madvise(address, nbytes, DONTFORK))
    return status if status else failed(_mprotect(address, nbytes, access))


@entry_without_lock
def host_unmap(address: int, nbytes: int) -> int:
    return errno() if _mmap(address, nbytes, 0, NOTHING | FIXED, -1, 0) != address else 0


@entry_without_lock
def host_fill(address: int, value: int, nbytes: int, _: int) -> int:
    _memset(address, value, nbytes)
    return 0


@entry_without_lock
def host_copy(destination: int, source: int, nbytes: int, _: int) -> int:
    _memmove(destination, source, nbytes)
    return 0
