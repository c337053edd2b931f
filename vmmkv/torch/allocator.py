"""The allocator that torch calls for a memory pool: machine code, so that it never takes the interpreter's lock.

torch's threads take the interpreter's lock before the lock of torch's allocator, and torch calls this one under the
latter: a Python callback would take them in the other order and deadlock. So two functions are compiled
(`vmmkv.torch.allocating`), call the memory system through the addresses of its C functions, and keep their books in a
numpy record.

Invariants:
 1. `physical <= budget`, in bytes: the budget is debited before the first call, and credited for what is really gone.
    A lease that lowers the budget meanwhile gets what was not taken.
 2. `allocate` returns a segment all of whose pages can be accessed, or 0 and has changed nothing.
 3. A page is unmapped only after all work on its device. What cannot be unmapped stays in the books.
 4. Nothing here is ever freed: torch may give back a segment at any time until the process has ended.

A page is released as soon as it is mapped: the mapping keeps it, so that there are no handles to remember.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ..compiled.code import address_of, bind, keep, link
from ..driver.driver import Driver
from .allocating import ENTRIES, SOURCES, STATE

allocate, deallocate = link("vmmkv.torch.allocating", ENTRIES, SOURCES)


class Allocator:
    """One memory pool's pair of functions, and its books. The process keeps all of it for ever.

    Args:
        driver: the memory system.
        budget: pages.

    Attributes:
        allocate: address of `void *allocate(ssize_t size, int device, void *stream)`.
        deallocate: address of `void deallocate(void *segment, ssize_t size, int device, void *stream)`.
        state: the books, a record of `STATE`.
        address: that of the books.
    """

    def __init__(self, driver: Driver, budget: int) -> None:
        records = np.zeros(1, STATE)
        self.state, self.address = records[0], records.ctypes.data
        self.state["driver"], self.state["page_size"] = driver.address, driver.page_size
        self.state["budget"] = budget * driver.page_size
        libc = ctypes.CDLL(None)
        for name in ("lock", "unlock"):
            function = getattr(libc, f"pthread_mutex_{name}")
            self.state[name] = ctypes.cast(function, ctypes.c_void_p).value
        self.allocate, self.deallocate = (
            bind(address_of(function), self.address, words) for function, words in ((allocate, 1), (deallocate, 2))
        )
        keep(records, driver)

    @property
    def physical(self) -> int:
        """Pages that it has taken."""
        return int(self.state["physical"]) // int(self.state["page_size"])
