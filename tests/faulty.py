"""A driver for tests: puts its own C functions in the place of another's, fails any call on demand, and keeps books."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import vmmkv
from vmmkv.driver.driver import Driver, Handle
from vmmkv.driver.table import FUNCTIONS
from vmmkv.errors import DriverError, DriverOutOfMemoryError

CALLS = ("reserve", "free", "create", "release", "map", "set_access", "unmap", "fill", "copy")
FIRST_STATUS = 1_000_000
"""Statuses from here on stand for exceptions."""

Words = dict[str, Callable[..., int]]
MISUSE: list[AssertionError] = []
"""What drivers have refused as misuse in a test, which fails by it even if the caller ignores the status."""


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

    It writes its functions into the table of `inner`, which has to be new. What a function raises is raised where the
    call was made from, as the driver's own error is: a status stands for it on its way.

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
        changes: pages that were mapped, and ranges that were unmapped, so far.
    """

    calls = CALLS
    functions: tuple[str, ...] = (*CALLS, "deallocate")
    """Those that are put into the table."""
    methods = "error", "current_stream", "current_handle", "new_stream", "memory_info"
    """Those of the driver that a subclass may replace."""

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.handles: list[Handle] = []
        self.sizes: dict[Handle, int] = {}
        self.mapped: dict[int, Handle] = {}
        self.accessible: set[int] = set()
        self.writable: set[int] = set()
        self.failures = 0
        self.unmaps_anything = False
        self.changes = 0
        self.ranges: dict[int, int] = {}
        self._faults: list[Fault] = []
        self._now = threading.local()
        self._raised: dict[int, BaseException] = {}
        self._statuses = itertools.count(FIRST_STATUS)
        self._inner_error = inner.error
        self._originals: Words = {}
        self._callbacks: Words = {}
        vars(inner)["callbacks"] = self._callbacks  # which may be called as long as it lives
        for name in self.functions:
            self._replace(name)
        for name in self.methods:
            if any(name in vars(base) for base in type(self).__mro__):
                setattr(inner, name, _weak(self, name, inner))

    def _replace(self, name: str) -> None:
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * FUNCTIONS[name])
        self._originals[name] = kind(int(self.inner.table[name]))
        answer, original = _weak(self, "_answer"), self._originals[name]
        self._callbacks[name] = kind(lambda *words: original(*words) if answer.is_gone() else answer(name, *words))
        self.inner.table[name] = ctypes.cast(self._callbacks[name], ctypes.c_void_p).value  # type: ignore[arg-type]

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
        return getattr(self.inner, name)

    def _answer(self, name: str, *words: int) -> int:
        """A C function of the table: a method `_c_NAME`, or a call that is checked and passed on."""
        before, self._now.words = getattr(self._now, "words", ()), words
        try:
            if function := getattr(self, f"_c_{name}", None):
                return int(function(*words) or 0)
            self._call(name, *self._arguments(name, *words))
            return 0
        except BaseException as error:
            if isinstance(error, AssertionError):
                MISUSE.append(error)
            status = next(self._statuses)
            self._raised[status] = error
            return status
        finally:
            self._now.words = before

    def _arguments(self, name: str, *words: int) -> tuple[Any, ...]:
        """What a function was asked for."""
        size = self.inner.page_size
        if name == "reserve":
            return (words[1],)
        if name == "create":
            return (words[1] // size,)
        if name == "map":
            return words[0], words[3], words[1] // size
        if name == "set_access":
            return *words[:2], words[2] == int(self.inner.table["access"])
        if name == "fill":
            return words[0], words[2], words[1], words[3]
        return words

    def error(self, name: str, status: int, detail: str = "") -> BaseException:
        """What a status stands for; see `vmmkv.driver.driver.Driver.error`."""
        raised = self._raised.pop(status, None)
        return raised.with_traceback(None) if raised else self._inner_error(name, status, detail)

    def _call(self, name: str, *args: Any) -> Any:
        """One call: refused, or made and written down. Subclasses may do more around it."""
        self.meet(name)
        getattr(self, f"_before_{name}", lambda *args: None)(*args)
        make = getattr(self, f"_make_{name}", None)
        result = make(*args) if make else self._pass(name)
        getattr(self, f"_after_{name}", lambda *args: None)(result, *args)
        return result

    def _pass(self, name: str) -> int | None:
        """Calls the function that was in the table, as this one was called; returns what it has made."""
        words = self._now.words
        if status := self._originals[name](*words):
            raise self._inner_error(name, status)
        return ctypes.c_int64.from_address(words[0]).value if name in ("reserve", "create") else None

    def _c_deallocate(self, address: int) -> None:
        """What waits for all work on the device."""
        self.meet("synchronize")
        self._pass("deallocate")

    # What is checked, and written down.

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
        size = self.inner.page_size
        pages = range(address // size * size, address + nbytes, size)
        assert self.writable.issuperset(pages), "filled a page that may not be written"


def _weak(owner: object, name: str, inner: object = None) -> Any:
    """A method of an object that does not keep the object; `is_gone` says whether it is. The inner driver's own method
    takes its place then."""
    reference = weakref.ref(owner)

    def method(*args: Any) -> Any:
        if (there := reference()) is not None:
            return getattr(there, name)(*args)
        return getattr(type(inner), name)(inner, *args)

    method.is_gone = lambda: reference() is None  # type: ignore[attr-defined]
    return method


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
