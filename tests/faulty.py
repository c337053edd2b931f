"""A driver for tests: wraps another, fails any call on demand, and keeps books of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import vmmkv
from vmmkv.errors import DriverError, DriverOutOfMemoryError
from vmmkv.driver.driver import Driver, Handle

CALLS = ("reserve", "free", "create", "release", "map", "set_access", "unmap", "fill", "copy")


@dataclass
class Fault:
    """What `FaultyDriver.fail` was asked for, and whether it has come to that."""

    call: str
    skip: int  # which are still to pass
    out_of_memory: bool
    error: type[Exception]
    lasting: bool
    was_met: bool = False


class FaultyDriver:
    """Passes calls on to `inner`; refuses misuse that a real driver may let pass.

    Attributes:
        calls: those that are any call.
        handles: pieces of memory that exist.
        sizes: of each, in pages.
        mapped: by address of a page, what is mapped there.
        accessible: addresses of pages that may be accessed.
        writable: those of them that may be written.
        failures: calls that were made to fail so far.
        unmaps_anything: whether to unmap what is not mapped is all right, as a driver has it. Nobody has reason to but
            after an interruption.
        changes_access: whether what is mapped may become writable, or read-only, in place; see `Sharing`.
        changes: pages that were mapped, and ranges that were unmapped, so far.
    """

    c_interface = None  # every call is to come by here
    calls = CALLS

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.handles: list[Handle] = []
        self.sizes: dict[Handle, int] = {}
        self.mapped: dict[int, Handle] = {}
        self.accessible: set[int] = set()
        self.writable: set[int] = set()
        self.failures = 0
        self.unmaps_anything = self.changes_access = False
        self.changes = 0
        self.ranges: dict[int, int] = {}
        self._faults: list[Fault] = []

    @property
    def num_pages(self) -> int:
        """Pages of all that exists."""
        return sum(self.sizes[handle] for handle in self.handles)

    def fail(
        self,
        call: str = "any",
        skip: int = 0,
        out_of_memory: bool = False,
        *,
        error: type[Exception] = DriverError,
        lasting: bool = False,
    ) -> Fault:
        """Makes a call fail: the one named, or any, after `skip` of them have passed; a lasting fault, all from there
        on. With `out_of_memory`, a `create` fails for want of that."""
        self._faults.append(fault := Fault(call, skip, out_of_memory, error, lasting))
        return fault

    def heal(self) -> bool:
        """Forgets all faults; returns whether there were any that no call has met."""
        faults, self._faults = self._faults, []
        return not all(fault.was_met for fault in faults)

    def meet(self, name: str) -> None:
        """Raises what a call of that name is to fail with."""
        error: type[Exception] | None = None
        for fault in list(self._faults):
            if fault.call != name and (fault.call != "any" or name not in self.calls):
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.was_met = True
            error = DriverOutOfMemoryError if fault.out_of_memory and name == "create" else fault.error
            if not fault.lasting:
                self._faults.remove(fault)
        if error:
            self.failures += 1
            raise error(name, "INJECTED")

    def __getattr__(self, name: str) -> Any:
        if name not in self.calls:
            return getattr(self.inner, name)
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> Any:
        self.meet(name)
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

    def _after_create(self, handle: Handle, pages: int = 1) -> None:
        self.handles.append(handle)
        self.sizes[handle] = pages

    def _before_release(self, handle: Handle) -> None:
        assert handle not in self.mapped.values(), "released a page that is mapped"
        self.handles.remove(handle)

    def _before_map(self, address: int, handle: Handle, pages: int = 1) -> None:
        end = address + pages * self.inner.page_size
        assert not self.mapped.keys() & set(self._pages(address, end - address)), "mapped over a page"
        assert handle in self.handles
        assert self.sizes[handle] == pages, "mapped in part"
        assert any(start <= address and end <= start + nbytes for start, nbytes in self.ranges.items())

    def _after_map(self, _: None, address: int, handle: Handle, pages: int = 1) -> None:
        for index in range(pages):
            self.mapped[address + index * self.inner.page_size] = handle
        self.changes += 1

    def _before_set_access(self, address: int, nbytes: int, writable: bool = True) -> None:
        pages = set(self._pages(address, nbytes))
        assert pages <= self.mapped.keys(), "set access where nothing is mapped"
        before = {page in self.writable for page in pages & self.accessible}
        assert before <= {writable} or self.changes_access, "changed access where it is mapped"

    def _after_set_access(self, _: None, address: int, nbytes: int, writable: bool = True) -> None:
        pages = self._pages(address, nbytes)
        self.accessible.update(pages)
        (self.writable.update if writable else self.writable.difference_update)(pages)

    def _before_unmap(self, address: int, nbytes: int) -> None:
        self.changes += 1
        inside = Counter(self.mapped[page] for page in self._pages(address, nbytes) if page in self.mapped)
        assert all(count % self.sizes[handle] == 0 for handle, count in inside.items()), "unmapped in part"
        for page in self._pages(address, nbytes):
            assert page in self.mapped or self.unmaps_anything, "unmapped what is not mapped"
            self.mapped.pop(page, None)
            self.accessible.discard(page)
            self.writable.discard(page)

    def _before_fill(self, address: int, nbytes: int, value: int, stream: object) -> None:
        assert set(self._pages(address, nbytes)) <= self.writable, "filled a page that may not be written"


def has_memory(sequence: vmmkv.Sequence, driver: FaultyDriver) -> bool:
    """Whether each token of a sequence can be read, in each layer."""
    if sequence.start == sequence.length:
        return True
    size = driver.inner.page_size
    pages: set[int] = set()
    for layer in range(sequence.cache.layout.num_layers):
        for states in (sequence.k(layer), sequence.v(layer)):
            last = states[-1]
            pages.update(range(states.data_ptr() // size * size, last.data_ptr() + last.nbytes, size))
    return driver.accessible.issuperset(pages)
