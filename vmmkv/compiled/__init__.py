"""Functions that run as machine code, or interpreted: what they are made of, and how they are called.

Numba compiles such functions once, in a process of its own; the result is a file that llvmlite alone loads. Three ways
to run the same source:

    machine code    the usual one. Numba is not imported.
    interpreted     `VMMKV_INTERPRET=1`: plain Python, for a debugger; 20 to 40 times slower.
    checked         `NUMBA_BOUNDSCHECK=1`: compiled by Numba in this process, an index out of bounds is an IndexError.

Rules for such functions. Arguments are annotated as `int`, the result as `int` or None, and that of an entry as `int`:
each function is compiled once. They allocate nothing and raise nothing; reasons are numbers. They reach memory and C
functions by address (`vmmkv.compiled.native`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

INTERPRETED = os.environ.get("VMMKV_INTERPRET", "0") not in ("", "0")
CHECKED = os.environ.get("NUMBA_BOUNDSCHECK", "0") not in ("", "0") and not INTERPRETED
MAKING = os.environ.get("VMMKV_MAKING_CODE", "0") == "1" and not INTERPRETED
"""Whether this is the process that compiles; see `vmmkv.compiled.code`."""
BY_NUMBA = CHECKED or MAKING

Function = TypeVar("Function", bound=Callable[..., Any])


def inner(function: Function) -> Function:
    """Marks a function that compiled functions call."""
    return _by_numba(function, no_cpython_wrapper=True, no_cfunc_wrapper=True) if BY_NUMBA else function


def entry(function: Function) -> Function:
    """Marks a function that Python, or C, calls. It holds the interpreter's lock from its first line to its last."""
    function.is_entry = True  # type: ignore[attr-defined]
    return _by_numba(function, no_cfunc_wrapper=True) if BY_NUMBA else function


def entry_without_lock(function: Function) -> Function:
    """Marks an entry that gives up the interpreter's lock while it runs."""
    function.is_entry = function.gives_up_lock = True  # type: ignore[attr-defined]
    return _by_numba(function, no_cfunc_wrapper=True, nogil=True) if BY_NUMBA else function


def entries_of(package: str, modules: str) -> list[Any]:
    """The entries that modules of a package define."""
    found = [import_module(f"{package}.{name}") for name in modules.split()]
    functions = [(module.__name__, each) for module in found for each in vars(module).values()]
    return [each for name, each in functions if hasattr(each, "is_entry") and each.__module__ == name]


def accessor(function: Function) -> Function:
    """Marks a function that finds a record or a table for compiled functions; its result has no annotated type."""
    if not BY_NUMBA:
        return function
    from numba import njit

    return njit(error_model="numpy")(function)  # type: ignore[no-any-return]


def _by_numba(function: Any, **options: bool) -> Any:
    from numba import njit

    dispatcher = njit(error_model="numpy", **options)(function)
    compile_for = dispatcher.compile

    def compile_once(_: Any) -> Any:
        # For the annotated types alone: Numba would compile a version for each width and each literal it is given.
        dispatcher.compile = compile_for
        compile_for(signature_of(function))
        dispatcher.disable_compile()
        return dispatcher.overloads[signature_of(function).args].entry_point

    dispatcher.compile = compile_once
    return dispatcher


def signature_of(function: Any) -> Any:
    """Numba's signature of an annotated function."""
    from numba import types

    kinds = [types.void if kind is None else types.int64 for kind in function.__annotations__.values()]
    return kinds[-1](*kinds[:-1])
