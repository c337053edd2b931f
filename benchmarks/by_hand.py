"""A driver's calls, one by one, with nothing around them: the baseline of host times."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from vmmkv.driver.driver import Driver
from vmmkv.driver.table import FUNCTIONS


class ByHand:
    """Calls of a driver's functions: through `cuda.bindings` on a GPU, else through ctypes."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.size, self._cell = driver, driver.page_size, array("q", [0])
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * FUNCTIONS[name])(int(driver.table[name]))
            for name in ("create", "release", "map", "set_access", "unmap")
        }
        self._cuda: Any = None
        if driver.device.type == "cuda":
            import cuda.bindings.driver as cu

            self._cuda = cu

    def create(self, pages: int = 1) -> int:
        """Create memory; return its handle."""
        if self._cuda:
            return int(self._cuda.cuMemCreate(pages * self.size, self.driver.allocation, 0)[1])  # type: ignore[attr-defined]
        out = self._cell.buffer_info()[0]
        self._functions["create"](out, pages * self.size, int(self.driver.table["property"]), 0)
        return self._cell[0]

    def map(self, address: int, handle: int, pages: int = 1) -> None:
        """Map memory."""
        if self._cuda:
            self._cuda.cuMemMap(address, pages * self.size, 0, handle, 0)
        else:
            self._functions["map"](address, pages * self.size, 0, handle, 0)

    def access(self, address: int, pages: int = 1, writable: bool = True) -> None:
        """Allow access."""
        if self._cuda:
            self._cuda.cuMemSetAccess(address, pages * self.size, self.driver.access[writable], 1)  # type: ignore[attr-defined]
        else:
            access = int(self.driver.table["access" if writable else "read_access"])
            self._functions["set_access"](address, pages * self.size, access, 1)

    def unmap(self, address: int, pages: int = 1) -> None:
        """Unmap memory."""
        if self._cuda:
            self._cuda.cuMemUnmap(address, pages * self.size)
        else:
            self._functions["unmap"](address, pages * self.size)

    def release(self, handle: int) -> None:
        """Release memory."""
        if self._cuda:
            self._cuda.cuMemRelease(handle)
        else:
            self._functions["release"](handle)
