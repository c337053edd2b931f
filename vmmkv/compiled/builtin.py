"""Python's own way to call C: machine code as built-in functions. A call through ctypes takes longer than most entries.

A built-in function gets an array of objects. A few instructions, made here for each function, turn these into words,
call, and turn the result into an int; they raise what a callback of Python has raised meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

METH_FASTCALL = 0x80
SYMBOLS = (
    "PyLong_AsLongLong", "PyLong_FromLongLong", "PyErr_Occurred", "PyErr_SetString", "PyEval_SaveThread",
    "PyEval_RestoreThread",
)  # fmt: skip
"""Functions of CPython's stable interface."""


class _Method(ctypes.Structure):
    """CPython's `PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


def assembly(functions: Sequence[Any], addresses: Sequence[int]) -> str:
    """LLVM assembly of a caller, named `vmmkv_call_` and its number, for each function at an address."""
    addresses_of = (ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in SYMBOLS)
    as_word, as_int, occurred, set_error, save, restore = (f"inttoptr (i64 {each} to ptr)" for each in addresses_of)
    type_error = ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyExc_TypeError").value
    text = ['@message = internal constant [27 x i8] c"wrong number of arguments\\00\\00"']
    for number, (function, place) in enumerate(zip(functions, addresses)):
        count = function.__code__.co_argcount
        words = ", ".join(f"i64 %word{index}" for index in range(count))
        read = "\n".join(
            f"""
          %at{index} = getelementptr ptr, ptr %arguments, i64 {index}
          %object{index} = load ptr, ptr %at{index}
          %word{index} = call i64 {as_word}(ptr %object{index})"""
            for index in range(count)
        )
        gives_up_lock = hasattr(function, "gives_up_lock")
        text.append(f"""
        define ptr @vmmkv_call_{number}(ptr %self, ptr %arguments, i64 %count) {{
          %is_right = icmp eq i64 %count, {count}
          br i1 %is_right, label %read, label %wrong
        wrong:
          call void {set_error}(ptr inttoptr (i64 {type_error} to ptr), ptr @message)
          ret ptr null
        read:{read}
          %unread = call ptr {occurred}()
          %is_read = icmp eq ptr %unread, null
          br i1 %is_read, label %run, label %failed
        run:
          {f"%thread = call ptr {save}()" if gives_up_lock else ""}
          %function = inttoptr i64 {place} to ptr
          %result = call i64 %function({words})
          {f"call void {restore}(ptr %thread)" if gives_up_lock else ""}
          %raised = call ptr {occurred}()
          %is_done = icmp eq ptr %raised, null
          br i1 %is_done, label %done, label %failed
        done:
          %value = call ptr {as_int}(i64 %result)
          ret ptr %value
        failed:
          ret ptr null
        }}""")
    return "\n".join(text)


def built_in(name: str, address: int, keep: Callable[..., None]) -> Any:
    """A built-in function for a caller at an address; what it needs is kept for the life of the process."""
    method = _Method(name.encode(), address, METH_FASTCALL, None)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function = new(ctypes.addressof(method), None, None)
    keep(method, function)
    return function
