"""Host time of operations in turns, and driver calls by hand as their baseline."""

from __future__ import annotations

import ctypes
import gc
from array import array
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np

from vmmkv.driver.driver import Driver
from vmmkv.driver.table import FUNCTIONS


def microseconds(operation: Callable[..., Any], *args: Any) -> float:
    """How long an operation takes."""
    start = perf_counter_ns()
    operation(*args)
    return (perf_counter_ns() - start) / 1e3


def in_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each side returns in each round. The side that begins changes from round to round, and the first round is
    not counted. Garbage is collected before, and not meanwhile."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                took[name].append(sides[name]())
    finally:
        gc.enable()
    return {name: values[1:] for name, values in took.items()}


def spread(values: list[float], name: str = "") -> dict[str, float]:
    """The median in microseconds, and between which figures four of five values lie."""
    low, middle, high = np.percentile(values, (10, 50, 90)).tolist()
    name += "_" if name else ""
    return {f"{name}us": middle, f"{name}p10_us": low, f"{name}p90_us": high}


def ranged(row: dict[str, float], name: str = "", digits: int = 0) -> str:
    """A cell of what `spread` gave: the median, and the range in brackets."""
    name += "_" if name else ""
    middle, low, high = (row[f"{name}{part}us"] for part in ("", "p10_", "p90_"))
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


class ByHand:
    """A driver's calls, one by one, with nothing around them: through `cuda.bindings` on a GPU, else through ctypes."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.size, self._cell = driver, driver.page_size, array("q", [0])
        self._functions: dict[str, Any] = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * FUNCTIONS[name])(int(driver.table[name]))
            for name in ("create", "release", "map", "set_access", "unmap")
        }
        self._cuda: Any = None
        if driver.device.type == "cuda":
            import cuda.bindings.driver as cu

            self._cuda = cu
            self._functions |= {"map": cu.cuMemMap, "unmap": cu.cuMemUnmap, "release": cu.cuMemRelease}

    def create(self, pages: int = 1) -> int:
        """Create memory; return its handle."""
        if self._cuda:
            return int(self._cuda.cuMemCreate(pages * self.size, self.driver.allocation, 0)[1])  # type: ignore[attr-defined]
        out = self._cell.buffer_info()[0]
        self._functions["create"](out, pages * self.size, int(self.driver.table["property"]), 0)
        return self._cell[0]

    def map(self, address: int, handle: int, pages: int = 1) -> None:
        """Map memory."""
        self._functions["map"](address, pages * self.size, 0, handle, 0)

    def access(self, address: int, pages: int = 1, writable: bool = True) -> None:
        """Allow access."""
        if self._cuda:
            self._cuda.cuMemSetAccess(address, pages * self.size, [self.driver.access[writable]], 1)  # type: ignore[attr-defined]
        else:
            access = int(self.driver.table["access" if writable else "read_access"])
            self._functions["set_access"](address, pages * self.size, access, 1)

    def unmap(self, address: int, pages: int = 1) -> None:
        """Unmap memory."""
        self._functions["unmap"](address, pages * self.size)

    def release(self, handle: int) -> None:
        """Release memory."""
        self._functions["release"](handle)
