"""A memory system of C functions for tests, and a memory pool's allocator as torch calls it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from conftest import small_driver
from faulty import FaultyDriver

from vmmkv.driver.driver import Handle
from vmmkv.driver.host import NullDriver
from vmmkv.driver.table import FUNCTIONS
from vmmkv.torch.allocator import Allocator

CALLED = ("reserve", "free", "create", "release", "map", "set_access", "unmap", "push", "pop", "synchronize")
"""Functions that an allocator calls."""


class CDriver:
    """C functions with the CUDA driver's signatures over pages of the host, with books of their own.

    Args:
        driver: has the pages; somebody else may have some there, too.

    Attributes:
        fail_at: the number of the call to fail, from 0 on.
        failed: its name, once it has.
        misuse: what the driver below would not have.
        table: a driver whose table has the functions.
    """

    def __init__(self, fail_at: int = -1, driver: FaultyDriver | None = None) -> None:
        self.driver = driver or FaultyDriver(small_driver("cpu"))
        self.fail_at = fail_at
        self.failed: str | None = None
        self.misuse: list[BaseException] = []
        self.handles: dict[int, Handle] = {}
        self.released: set[int] = set()
        self.synchronized = False
        self.callbacks = {name: self._callback(name) for name in CALLED}
        self.table = NullDriver(1 << 30, self.driver.page_size)
        for name, callback in self.callbacks.items():
            self.table.table[name] = ctypes.cast(callback, ctypes.c_void_p).value

    def _callback(self, name: str) -> Callable[..., int]:
        def call(*words: int) -> int:
            self.fail_at -= 1
            if self.fail_at == -1:
                self.failed = name
                return 2
            try:
                getattr(self, name)(*words)
            except BaseException as error:
                self.misuse.append(error)
                return 1
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * FUNCTIONS[name])(call)

    def reserve(self, out: int, size: int, *_: int) -> None:
        ctypes.c_int64.from_address(out).value = self.driver.reserve(size)

    def free(self, address: int, size: int) -> None:
        self.driver.free(address, size)

    def create(self, out: int, size: int, *_: int) -> None:
        number = len(self.handles) + 1
        self.handles[number] = self.driver.create()
        ctypes.c_int64.from_address(out).value = number

    def release(self, number: int) -> None:
        """As on a GPU, a page that is mapped goes when it is unmapped."""
        if self.handles[number] in self.driver.mapped.values():
            self.released.add(number)
        else:
            self.driver.release(self.handles[number])

    def map(self, address: int, size: int, offset: int, number: int, flags: int) -> None:
        self.driver.map(address, self.handles[number])

    def set_access(self, address: int, size: int, *_: int) -> None:
        self.driver.set_access(address, size)

    def unmap(self, address: int, size: int) -> None:
        pages = [self.driver.mapped[place] for place in range(address, address + size, self.driver.page_size)]
        assert self.synchronized or self.failed, "a page was unmapped that a kernel may still use"
        self.synchronized = False
        self.driver.unmap(address, size)
        for number in [number for number in self.released if self.handles[number] in pages]:
            self.released.remove(number)
            self.driver.release(self.handles[number])

    def push(self, context: int) -> None: ...

    def pop(self, out: int) -> None: ...

    def synchronize(self) -> None:
        self.synchronized = True


class Functions:
    """An allocator as torch calls it."""

    def __init__(self, c_driver: CDriver, budget: int) -> None:
        self.allocator = Allocator(c_driver.table, budget)
        self.books = self.allocator.state
        self._allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
            self.allocator.allocate
        )
        self._deallocate = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
            self.allocator.deallocate
        )

    def allocate(self, nbytes: int) -> int:
        return self._allocate(nbytes, 0, None) or 0

    def deallocate(self, segment: int, nbytes: int) -> None:
        self._deallocate(segment, nbytes, 0, None)
