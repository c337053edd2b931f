"""Compiled calls against the same calls one by one, on a C library of our own: whichever call fails."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from conftest import small_driver
from faulty import FaultyDriver
from hypothesis import given
from hypothesis import strategies as st

from vmmkv.driver.calls import MAP, SET_ACCESS, SET_READ_ACCESS, UNMAP, VACANT, LoopedCalls
from vmmkv.driver.driver import Handle
from vmmkv.driver.meter import Meter
from vmmkv.errors import DriverError
from vmmkv.memory.compiled_calls import CompiledCalls

ARGUMENTS = {"create": 4, "release": 1, "map": 5, "set_access": 4, "unmap": 2}
WRITABLE, READABLE = 1001, 1002


class CLibrary(FaultyDriver):
    """A driver that C code can call: callbacks with the signatures of the CUDA driver."""

    def __init__(self) -> None:
        super().__init__(small_driver("cpu"))
        self.changes_access = True
        kinds = {name: ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count) for name, count in ARGUMENTS.items()}
        self.callbacks = {name: kind(self._function(name)) for name, kind in kinds.items()}

    def _function(self, name: str) -> Callable[..., int]:
        def function(*words: int) -> int:
            try:
                getattr(self, f"_{name}")(*words)
            except DriverError:
                return 700
            return 0

        return function

    def _create(self, out: int, nbytes: int, prop: int, flags: int) -> None:
        assert (prop, flags) == (77, 0)
        ctypes.c_int64.from_address(out).value = self.create(nbytes // self.page_size)

    def _release(self, handle: int) -> None:
        self.release(Handle(handle))

    def _map(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert (offset, flags) == (0, 0)
        self.map(address, Handle(handle), nbytes // self.page_size)

    def _set_access(self, address: int, nbytes: int, access: int, count: int) -> None:
        assert count == 1
        self.set_access(address, nbytes, {WRITABLE: True, READABLE: False}[access])

    def _unmap(self, address: int, nbytes: int) -> None:
        self.unmap(address, nbytes)

    def c_interface(self) -> dict[str, int]:
        addresses = {name: ctypes.cast(each, ctypes.c_void_p).value or 0 for name, each in self.callbacks.items()}
        return addresses | {"property": 77, "access": WRITABLE, "read_access": READABLE}

    def error(self, name: str, status: int) -> DriverError:
        assert status == 700
        return DriverError(name, "INJECTED")


def life(library: CLibrary, calls: Any, faults: list[tuple[str, int]]) -> list[Any]:
    """What many calls come to, with some of them failing."""
    size, address = library.page_size, library.reserve(16 * library.page_size)
    handles = np.full(16, VACANT)
    seen: list[Any] = []
    for fault in faults:
        library.fail(*fault)

    def note(outcome: Any) -> None:
        seen.append(outcome.done)
        try:
            outcome.check()
        except DriverError as error:
            seen.append(str(error))

    def run(steps: list[tuple[int, ...]]) -> None:
        note(calls.run([*chain.from_iterable(steps)]))

    sizes = {3: 1, 0: 1, 7: 1, 8: 4, 12: 4}
    note(calls.create(handles, [3, 0, 7], 1))
    note(calls.create(handles, [8, 12], 4))
    seen.append((handles != VACANT).tolist())
    made = [frame for frame in sizes if handles[frame] != VACANT]
    places = dict(zip(made, np.cumsum([1, *(sizes[frame] for frame in made)]).tolist()))
    ranges = [(address + place * size, sizes[frame] * size) for frame, place in places.items()]
    maps = [(MAP, *each, handles[frame]) for each, frame in zip(ranges, made)]
    run([*maps, *((SET_READ_ACCESS, *each, VACANT) for each in ranges)])
    there = [each for each in ranges if each[0] in library.mapped]
    run([(SET_ACCESS, *each, VACANT) for each in there[1:]])
    seen += [len(library.accessible), len(library.writable)]
    run([*((UNMAP, *each, VACANT) for each in there), *maps[:1]])
    library.heal()
    library.unmaps_anything = True
    run([(UNMAP, address, 16 * size, VACANT)])
    library.fail("release", 1)
    for pages in (1, 4):
        note(calls.release(handles, [frame for frame in made if sizes[frame] == pages], pages))
    seen.append((handles != VACANT).tolist())
    library.heal()
    for pages in (1, 4):
        left = [frame for frame in made if sizes[frame] == pages and handles[frame] != VACANT]
        note(calls.release(handles, left, pages))
    assert not library.handles
    library.free(address, 16 * size)
    return seen


@given(st.lists(st.tuples(st.sampled_from([*ARGUMENTS, "any"]), st.integers(0, 5)), max_size=3))
def test_compiled_calls_do_what_single_ones_do(faults: list[tuple[str, int]]) -> None:
    outcomes = []
    for kind in (LoopedCalls, CompiledCalls):
        library = CLibrary()
        calls = kind(library, Meter())
        outcomes.append([*life(library, calls, faults), calls.meter.spent[:, 0].tolist()])
        assert not calls.in_doubt
    assert outcomes[0] == outcomes[1]


def test_errors_leave_nothing_for_the_garbage_collector() -> None:
    import gc
    import weakref

    library = CLibrary()
    calls = CompiledCalls(library, Meter())
    library.fail("create")
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(DriverError):
            calls.create(np.full(1, VACANT), [0], 1).check()
        gone = weakref.ref(calls)
        del calls
        assert gone() is None
    finally:
        gc.enable()
