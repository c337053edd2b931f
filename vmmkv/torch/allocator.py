"""The allocator that torch calls for a memory pool: machine code, so that it never takes the interpreter's lock.

torch's threads take the interpreter's lock before the lock of torch's allocator, and torch calls this one under the
latter: a Python callback would take them in the other order and deadlock. So two functions are compiled by Numba,
call the memory system through the addresses of its C functions, and keep their books in a numpy record.

Invariants:
 1. `physical <= budget`, in bytes: the budget is debited before the first call, and credited for what is really gone.
    Whoever lowers the budget meanwhile gets what was not taken.
 2. `allocate` returns a segment all of whose pages can be accessed, or 0 and has changed nothing.
 3. A page is unmapped only after all work on its device. What cannot be unmapped stays in the books.
 4. Nothing here is ever freed: torch may give back a segment at any time until the process has ended.

A page is released as soon as it is mapped: the mapping keeps it, so that there are no handles to remember.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from ..memory.native import at, call, pointer, word

C_FUNCTIONS = ("reserve", "free", "create", "release", "map", "set_access", "unmap", "push", "pop", "synchronize")
C_ARGUMENTS = ("property", "access", "context")
_LIBC = ("pthread_mutex_lock", "pthread_mutex_unlock")

STATE = np.dtype(
    [("mutex", np.int64, 8)]  # a pthread_mutex_t, which zeros initialise
    + [(name, np.int64) for name in ("page_size", "budget", "physical", "segments", "refused", "status")]
    + [(name, np.int64) for name in C_FUNCTIONS + C_ARGUMENTS + _LIBC]
)
"""The books, and the addresses of what is called. `refused` is the size of the last segment that could not be had,
`status` what the memory system said to it, or 0 where the budget did not allow it."""

_kept: list[object] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))  # the end of the interpreter must not free it


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _take(state: Any, lock: int, size: int) -> Any:
    """Debits the budget, where it allows."""
    call(state.pthread_mutex_lock, (lock,))
    allowed = state.physical + size <= state.budget
    if allowed:
        state.physical += size
        state.segments += 1
    else:
        state.refused, state.status = size, 0
    call(state.pthread_mutex_unlock, (lock,))
    return allowed


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _give(state: Any, lock: int, size: int, refused: int, status: int) -> None:
    """Credits the budget with what a segment has given back."""
    call(state.pthread_mutex_lock, (lock,))
    state.physical -= size
    state.segments -= 1
    if refused:
        state.refused, state.status = refused, status
    call(state.pthread_mutex_unlock, (lock,))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _map(state: Any, address: int, size: int, out: int) -> tuple[int, int, int]:
    """Maps new pages; returns the first error, the bytes mapped, and bytes that nothing can give back any more."""
    page = state.page_size
    for mapped in range(0, size, page):
        status = call(state.create, (out, page, state.property, 0))
        if status:
            return status, mapped, 0
        status = call(state.map, (address + mapped, page, 0, at(out), 0))
        released = call(state.release, (at(out),))
        if status or released:
            return status or released, mapped + (0 if status else page), page if released else 0
    return call(state.set_access, (address, size, state.access, 1)), size, 0


@njit(types.int64(types.int64, types.int64), error_model="numpy")  # type: ignore[untyped-decorator]
def _allocate(books: int, nbytes: int) -> Any:
    """The address of a new segment of at least `nbytes`, or 0."""
    state = carray(pointer(books), 1, STATE)[0]
    size = -(-nbytes // state.page_size) * state.page_size
    if not _take(state, books, size):
        return 0
    out = word()
    status = call(state.reserve, (out, size, 0, 0, 0))
    if status:
        _give(state, books, size, size, status)
        return 0
    address = at(out)
    status, mapped, lost = _map(state, address, size, out)
    if status == 0:
        return address
    if mapped and call(state.unmap, (address, mapped)):
        lost += mapped
    else:
        call(state.free, (address, size))
    _give(state, books, size - lost, size, status)
    return 0


@njit(types.void(types.int64, types.int64, types.int64), error_model="numpy")  # type: ignore[untyped-decorator]
def _deallocate(books: int, address: int, nbytes: int) -> None:
    """Gives a segment back, after all work on its device: torch trusts that this waits as `cudaFree` does."""
    state = carray(pointer(books), 1, STATE)[0]
    size = -(-nbytes // state.page_size) * state.page_size
    if call(state.push, (state.context,)):
        return
    status = call(state.synchronize, ())
    call(state.pop, (word(),))
    if status == 0 and call(state.unmap, (address, size)) == 0:
        call(state.free, (address, size))
        _give(state, books, size, 0, 0)


@njit(types.int64(types.int64, types.int64), error_model="numpy")  # type: ignore[untyped-decorator]
def _set_budget(books: int, budget: int) -> Any:
    """Sets the budget, but not below what is taken; returns what it is now."""
    state = carray(pointer(books), 1, STATE)[0]
    call(state.pthread_mutex_lock, (books,))
    state.budget = max(budget, state.physical)
    now = state.budget
    call(state.pthread_mutex_unlock, (books,))
    return now


class Allocator:
    """One memory pool's pair of functions, and its books. The process keeps all of it for ever.

    Args:
        words: addresses of the memory system's `C_FUNCTIONS`, with the signatures of the CUDA driver's, and the
            `C_ARGUMENTS` that they take: see `vmmkv.memory.driver.cuda.CudaDriver.c_interface`.
        page_size: bytes of a page.
        budget: pages.
        owner: what must live as long as the words are used.

    Attributes:
        allocate: address of `void *allocate(ssize_t size, int device, void *stream)`.
        deallocate: address of `void deallocate(void *segment, ssize_t size, int device, void *stream)`.
        state: the books, a record of `STATE`.
    """

    def __init__(self, words: Mapping[str, int], page_size: int, budget: int, owner: object = None) -> None:
        records = np.zeros(1, STATE)
        self.state = records[0]
        self.state["page_size"], self.state["budget"] = page_size, budget * page_size
        for name in C_FUNCTIONS + C_ARGUMENTS:
            self.state[name] = words[name]
        for name in _LIBC:
            self.state[name] = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
        self._address = books = records.ctypes.data

        @cfunc(types.voidptr(types.int64, types.int32, types.voidptr))  # type: ignore[untyped-decorator]
        def allocate(size: int, device: int, stream: int) -> Any:
            return pointer(_allocate(books, size))

        @cfunc(types.void(types.intp, types.int64, types.int32, types.voidptr))  # type: ignore[untyped-decorator]
        def deallocate(segment: int, size: int, device: int, stream: int) -> None:
            _deallocate(books, segment, size)

        self.allocate: int = allocate.address
        self.deallocate: int = deallocate.address
        _kept.append((records, allocate, deallocate, _allocate, _deallocate, owner))

    @property
    def budget(self) -> int:
        """Pages that it may take in all."""
        return int(self.state["budget"]) // int(self.state["page_size"])

    @property
    def physical(self) -> int:
        """Pages that it has taken."""
        return int(self.state["physical"]) // int(self.state["page_size"])

    def set_budget(self, pages: int) -> int:
        """Sets the budget, or what is taken, if that is more; returns it. No allocation comes in between."""
        page_size = int(self.state["page_size"])
        return int(_set_budget(self._address, pages * page_size)) // page_size
