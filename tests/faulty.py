"""A driver for tests: wraps another, fails any call on demand, and keeps books of its own."""

from __future__ import annotations

from typing import Any

import vmmkv
from vmmkv.errors import DriverError, DriverOutOfMemoryError
from vmmkv.memory.driver import Driver, Handle

CALLS = ("reserve", "free", "create", "release", "map", "set_access", "unmap", "fill", "copy")


class FaultyDriver:
    """Passes calls on to `inner`; refuses misuse that a real driver may let pass.

    Attributes:
        handles: pages that exist.
        mapped: by address, the page mapped there.
        accessible: addresses of pages that may be accessed.
        writable: those of them that may be written.
        failures: calls that were made to fail so far.
        unmaps_anything: whether to unmap what is not mapped is all right, as a driver has it. Nobody has reason to but
            after an interruption.
        changes: pages that were mapped, and ranges that were unmapped, so far.
    """

    c_interface = None  # every call is to come by here

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.handles: list[Handle] = []
        self.mapped: dict[int, Handle] = {}
        self.accessible: set[int] = set()
        self.writable: set[int] = set()
        self.failures = 0
        self.unmaps_anything = False
        self.changes = 0
        self.ranges: dict[int, int] = {}
        self._faults: list[tuple[str, int, bool]] = []

    def fail(self, call: str = "any", skip: int = 0, out_of_memory: bool = False) -> None:
        """Makes one call fail: the one named, or any, after `skip` of them have passed."""
        self._faults.append((call, skip, out_of_memory))

    def heal(self) -> bool:
        """Forgets the faults still to come; returns whether there were any."""
        pending, self._faults = bool(self._faults), []
        return pending

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            return getattr(self.inner, name)
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> Any:
        waiting = []
        failed = None
        for call, skip, out_of_memory in self._faults:
            if call not in ("any", name):
                waiting.append((call, skip, out_of_memory))
            elif skip:
                waiting.append((call, skip - 1, out_of_memory))
            else:
                failed = DriverOutOfMemoryError if out_of_memory and name == "create" else DriverError
        self._faults = waiting
        if failed:
            self.failures += 1
            raise failed(name, "INJECTED")
        getattr(self, f"_before_{name}", lambda *args: None)(*args)
        result = getattr(self.inner, name)(*args)
        getattr(self, f"_after_{name}", lambda *args: None)(result, *args)
        return result

    def _pages(self, address: int, nbytes: int) -> range:
        assert nbytes > 0
        assert nbytes % self.inner.page_size == 0
        return range(address, address + nbytes, self.inner.page_size)

    def _after_reserve(self, address: int, nbytes: int) -> None:
        self.ranges[address] = nbytes

    def _before_free(self, address: int, nbytes: int) -> None:
        assert self.ranges.pop(address) == nbytes
        assert not any(address <= page < address + nbytes for page in self.mapped), "freed a range with pages in it"

    def _after_create(self, handle: Handle) -> None:
        self.handles.append(handle)

    def _before_release(self, handle: Handle) -> None:
        assert handle not in self.mapped.values(), "released a page that is mapped"
        self.handles.remove(handle)

    def _before_map(self, address: int, handle: Handle) -> None:
        assert address not in self.mapped, "mapped over a page"
        assert handle in self.handles
        assert any(start <= address < start + nbytes for start, nbytes in self.ranges.items())

    def _after_map(self, _: None, address: int, handle: Handle) -> None:
        self.mapped[address] = handle
        self.changes += 1

    def _before_set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        assert set(self._pages(address, nbytes)) <= self.mapped.keys(), "set access where nothing is mapped"

    def _after_set_access(self, _: None, address: int, nbytes: int, writable: bool = True) -> None:
        pages = self._pages(address, nbytes)
        self.accessible.update(pages)
        (self.writable.update if writable else self.writable.difference_update)(pages)

    def _before_unmap(self, address: int, nbytes: int) -> None:
        self.changes += 1
        for page in self._pages(address, nbytes):
            assert page in self.mapped or self.unmaps_anything, "unmapped what is not mapped"
            self.mapped.pop(page, None)
            self.accessible.discard(page)
            self.writable.discard(page)

    def _before_fill(self, address: int, nbytes: int, value: int, stream: object) -> None:
        assert set(self._pages(address, nbytes)) <= self.writable, "filled a page that may not be written"


def has_memory(sequence: vmmkv.Sequence, driver: FaultyDriver) -> bool:
    """Whether each token of a sequence can be written, in each layer."""
    size = driver.inner.page_size
    kv = [part for layer in range(sequence.cache.layout.num_layers) for part in (sequence.k(layer), sequence.v(layer))]
    addresses = [token.data_ptr() + at for part in kv for token in part for at in (0, token.nbytes - 1)]
    return driver.writable.issuperset(address // size * size for address in addresses)
