"""The host's memory system, compiled: pages of a memfd, put under addresses by `mmap`, by the contract of `table`.

A handle is the address of a piece of the file: where it lies, and its size. Pieces that were released keep their places
in the file, and are found again by their sizes. A status is the C library's `errno`.

Mappings (`/proc/self/maps`) are limited for the process as a whole, and at the limit nothing works any more: taking the
middle of a mapping away makes two of it, so even unmapping fails. So they are counted here.

Invariants:
 1. `HOST.mappings` is at least the number of mappings in all reserved ranges, whatever is unmapped next: one for each
    page, and for each gap before, between and behind runs of pages. Linux merges some; whether it does is luck.
 2. `host_map` returns `NO_MAPPINGS`, and maps nothing, where there would be more than `HOST.allowed`, and a recount
    (`vmmkv.driver.host`) finds no room either.
 3. What drivers share is changed under a lock, and no Python runs under it.
"""

import numpy as np

from ..compiled import entry_without_lock, inner
from ..compiled.native import c_function, call, errno, static, view
from .table import FORKED, NO_MAPPINGS

MUTEX = ("mutex", np.int64, 8)
"""Zeros make a `pthread_mutex_t`."""
HOST = np.dtype([MUTEX, *((name, np.int64) for name in ("mappings", "allowed", "recount", "ranges"))])
"""What the drivers of a process share. `recount(needed)` is a C function that may raise `allowed`; a list of ranges."""
RANGE = np.dtype([(name, np.int64) for name in ("address", "nbytes", "page_size", "present", "next")])
"""A reserved range. `present` is the address of a byte a page: whether something is mapped there. Python reads the list
without the lock, so a record is kept for ever: what it links to is one, too."""
FILE = np.dtype([MUTEX, *((name, np.int64) for name in ("fd", "end", "released"))])
"""A memfd: its length, and a list of pieces that were released."""
PIECE = np.dtype([(name, np.int64) for name in ("file", "offset", "nbytes", "next")])
RANGE_SIZE, PIECE_SIZE = RANGE.itemsize, PIECE.itemsize
HOST_RANGES, RANGE_NEXT, FILE_RELEASED, PIECE_NEXT = (kind.itemsize - 8 for kind in (HOST, RANGE, FILE, PIECE))
"""Where the last word of each lies: lists are linked by it."""

_mmap, _munmap, _mprotect = c_function("mmap", 6), c_function("munmap", 2), c_function("mprotect", 3)
_madvise, _fallocate = c_function("madvise", 3), c_function("fallocate", 4)
_posix_fallocate = c_function("posix_fallocate", 3)
_memset, _memmove = c_function("memset", 3), c_function("memmove", 3)
_malloc, _calloc, _free = c_function("malloc", 1), c_function("calloc", 2), c_function("free", 1)
_lock, _unlock = c_function("pthread_mutex_lock", 1), c_function("pthread_mutex_unlock", 1)

NOTHING = 0x22 | 0x4000
"""MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE."""
SHARED_FIXED, FIXED = 0x11, 0x10
PUNCH_HOLE, DONTFORK = 0x03, 10
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE; and what keeps a page from forked children."""
INTERRUPTED = 4
"""EINTR."""
LOOKED_AT = 8
"""Released pieces that are looked at for one of the right size: there are few sizes."""


@inner
def failed(result: int) -> int:
    """The status of a function that returns an `int`: 0, or -1 and sets `errno`."""
    return errno() if result & 0xFFFFFFFF else 0


@inner
def host() -> int:
    """The address of the process's `HOST`."""
    return view(static("host"), 1, np.int64)[0]


@inner
def unlink(head: int, item: int, next_at: int) -> None:
    """Takes an item out of a list, whose head is the word at an address and whose links are behind so many bytes."""
    place = head
    while view(place, 1, np.int64)[0] != item:
        place = view(place, 1, np.int64)[0] + next_at
    view(place, 1, np.int64)[0] = view(item + next_at, 1, np.int64)[0]


@entry_without_lock
def host_install(address: int) -> int:
    """Tells these functions where the process's `HOST` is."""
    view(static("host"), 1, np.int64)[0] = address
    return 0


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
def host_reserve(out: int, nbytes: int, page_size: int, _0: int, _1: int) -> int:
    address = _mmap(0, nbytes, 0, NOTHING, -1, 0)
    if address == -1:
        return errno()
    item = _malloc(RANGE_SIZE)
    r, h = view(item, 1, RANGE)[0], view(host(), 1, HOST)[0]
    r.address, r.nbytes, r.page_size, r.present = address, nbytes, page_size, _calloc(nbytes // page_size + 2, 1)
    _lock(host())
    r.next = h.ranges
    h.ranges = item
    h.mappings += 1
    _unlock(host())
    view(out, 1, np.int64)[0] = address
    return 0


@inner
def range_at(address: int) -> int:
    """The `RANGE` that an address is in, or 0. It needs the lock."""
    item = view(host(), 1, HOST)[0].ranges
    while item:
        r = view(item, 1, RANGE)[0]
        if r.address <= address < r.address + r.nbytes:
            return item
        item = r.next
    return 0


@entry_without_lock
def host_free(address: int, nbytes: int) -> int:
    h = view(host(), 1, HOST)[0]
    _lock(host())
    item = range_at(address)
    status = failed(_munmap(address, nbytes))  # under the lock: right after it the addresses may be another thread's
    if status == 0 and item:
        unlink(host() + HOST_RANGES, item, RANGE_NEXT)
        h.mappings -= 1
    _unlock(host())
    if status == 0 and item:
        _free(view(item, 1, RANGE)[0].present)
    return status


@inner
def count(address: int, nbytes: int, present: int) -> None:
    """Counts pages that are mapped now, or not: each takes two mappings in the middle of a gap, none where it closes
    one."""
    _lock(host())
    item = range_at(address)
    if item:
        r, h = view(item, 1, RANGE)[0], view(host(), 1, HOST)[0]
        pages = view(r.present, r.nbytes // r.page_size + 2, np.int8)
        first = (address - r.address) // r.page_size + 1
        for page in range(first, first + nbytes // r.page_size):
            if pages[page] != present:
                pages[page] = present
                neighbours = np.int64(pages[page - 1]) + np.int64(pages[page + 1])
                h.mappings += (2 - neighbours) if present else (neighbours - 2)
    _unlock(host())


@inner
def released_piece(file: int, nbytes: int) -> int:
    """Takes a piece of a size off the list of released ones; 0 if there is none. It needs the file's lock."""
    head, looked = file + FILE_RELEASED, 0
    piece = view(head, 1, np.int64)[0]
    while piece and looked < LOOKED_AT:
        p = view(piece, 1, PIECE)[0]
        if p.nbytes == nbytes:
            unlink(head, piece, PIECE_NEXT)
            return piece
        piece, looked = p.next, looked + 1
    return 0


@inner
def give_back(piece: int) -> None:
    """Puts a piece on the list of released ones."""
    p = view(piece, 1, PIECE)[0]
    f = view(p.file, 1, FILE)[0]
    _lock(p.file)
    p.next = f.released
    f.released = piece
    _unlock(p.file)


@entry_without_lock
def host_create(out: int, nbytes: int, file: int, _: int) -> int:
    """Takes the memory now: a page that is only promised would kill the process when written."""
    f = view(file, 1, FILE)[0]
    _lock(file)
    piece = released_piece(file, nbytes)
    if piece == 0:
        piece = _malloc(PIECE_SIZE)
        new = view(piece, 1, PIECE)[0]
        new.file, new.offset, new.nbytes = file, f.end, nbytes
        f.end += nbytes
    _unlock(file)
    p = view(piece, 1, PIECE)[0]
    status = INTERRUPTED
    while status == INTERRUPTED:  # by a signal; Python looks at it later
        status = _posix_fallocate(f.fd, p.offset, nbytes) & 0xFFFFFFFF
    if status:
        give_back(piece)
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
        give_back(piece)
    return status


@inner
def room_for(address: int, nbytes: int) -> int:
    """How many mappings pages need that there may not be; 0 if there may."""
    h = view(host(), 1, HOST)[0]
    _lock(host())
    item, needed = range_at(address), 0
    if item:
        needed = nbytes // view(item, 1, RANGE)[0].page_size + 1
        needed = needed if h.mappings + needed > h.allowed else 0
    _unlock(host())
    return needed


@entry_without_lock
def host_map(address: int, nbytes: int, _0: int, piece: int, _1: int) -> int:
    p = view(piece, 1, PIECE)[0]
    needed = room_for(address, nbytes)
    if needed and call(view(host(), 1, HOST)[0].recount, (needed,)):
        return NO_MAPPINGS
    if _mmap(address, nbytes, 0, SHARED_FIXED, view(p.file, 1, FILE)[0].fd, p.offset) != address:
        return errno()
    count(address, nbytes, 1)
    return 0


@entry_without_lock
def host_set_access(address: int, nbytes: int, access: int, _: int) -> int:
    """A forked child has no part in the pages: what it writes through a view it has kept must not reach them."""
    status = failed(_madvise(address, nbytes, DONTFORK))
    return status if status else failed(_mprotect(address, nbytes, access))


@entry_without_lock
def host_unmap(address: int, nbytes: int) -> int:
    if _mmap(address, nbytes, 0, NOTHING | FIXED, -1, 0) != address:
        return errno()
    count(address, nbytes, 0)
    return 0


@entry_without_lock
def host_fill(address: int, value: int, nbytes: int, _: int) -> int:
    _memset(address, value, nbytes)
    return 0


@entry_without_lock
def host_copy(destination: int, source: int, nbytes: int, _: int) -> int:
    _memmove(destination, source, nbytes)
    return 0
