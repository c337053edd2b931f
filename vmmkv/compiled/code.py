"""Machine code of compiled functions: made once by Numba, kept as LLVM bitcode, and loaded by llvmlite alone.

A *library* is a module that calls `link` with its entries. Its bitcode is in a file that is named after the library, a
hash of the content of all sources that it is made of, and the processor. The file is looked for in the package, where a
wheel has it, and then in the user's cache folder. Where it is in neither, as after a change of a source, a process of
its own compiles the library, which is said in a line, and keeps it in the cache folder; or for this process alone,
where no folder can be written to.

Python calls machine code as built-in functions: a call through ctypes takes longer than most entries. A built-in
function gets an array of objects. A few instructions, made here for each function, turn these into words, call, and
turn the result into an int; they raise what a callback of Python has raised meanwhile.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import CHECKED, INTERPRETED, MAKING, signature_of

PACKAGE = Path(__file__).parent.parent
SHIPPED = Path(__file__).parent / "machine_code"
UNREADABLE = OSError, RuntimeError
"""Errors of reading a module: there is none, or a part of one, or one of a later LLVM."""
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


_addresses: dict[Any, int] = {}
"""By built-in function: the entry that it calls."""
_kept: list[object] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def keep(*objects: object) -> None:
    """Keeps machine code, and what it is given addresses of, also after the interpreter: a daemon thread may be in a
    call when the process ends."""
    _kept.extend(objects)


def link(library: str, entries: Sequence[Any], sources: Sequence[str]) -> list[Any]:
    """The entries of a library, the module that calls this, ready to be called: its functions that are marked by
    `entry` or `entry_without_lock`. `sources` are files of the package that it is made of, and folders of such files.
    """
    if MAKING or CHECKED or INTERPRETED:
        return list(entries)
    import llvmlite.binding as llvm

    names = [function.__name__ for function in entries]
    addresses = load(_find(library, digest(sources)), names)
    callers = load(llvm.parse_assembly(assembly(entries, addresses)), [f"call_{n}" for n in range(len(entries))])
    found = [built_in(name, caller) for name, caller in zip(names, callers)]
    _addresses.update(zip(found, addresses))
    return found


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


def built_in(name: str, address: int) -> Any:
    """A built-in function of Python for a caller at an address, for the life of the process."""
    method = _Method(name.encode(), address, METH_FASTCALL, None)
    new = ctypes.pythonapi.PyCFunction_NewEx
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function = new(ctypes.addressof(method), None, None)
    keep(method, function)
    return function


def on_first_use(library: str, entries: Sequence[Any], sources: Sequence[str]) -> Callable[[str], Any]:
    """A `__getattr__` for a library: links its entries when the first is needed, so that importing the package stays
    fast. It links them once: a second copy would have its own `static` words."""
    names, linking = [function.__name__ for function in entries], threading.Lock()

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {library!r} has no attribute {name!r}")
        found = vars(sys.modules[library])
        with linking:
            if name not in found:
                found.update(zip(names, link(library, entries, sources)))
        return found[name]

    return find


def address_of(function: Any) -> int:
    """The address of an entry that `link` returned, for C code to call."""
    if CHECKED:
        from numba import cfunc

        function = cfunc(signature_of(function.py_func), error_model="numpy")(function.py_func)
        keep(function)
        return int(function.address)
    if INTERPRETED:
        function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * function.__code__.co_argcount)(function)
        keep(function)
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return _addresses[function]


def digest(sources: Sequence[str]) -> str:
    """A hash of what a library is made of, this package included."""
    paths = {path for name in ("compiled", *sources) for path in [PACKAGE / name, *(PACKAGE / name).glob("*.py")]}
    found = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def load(module: Any, names: Sequence[str]) -> list[int]:
    """Makes machine code of an LLVM module, for the life of the process. Returns the addresses of its functions, whose
    symbols are these names behind `vmmkv_`."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    keep(engine)
    return [engine.get_function_address(f"vmmkv_{name}") for name in names]


def bind(function: int, first: int, words: int) -> int:
    """The address of a C function of so many words that calls the one at an address, with a word of ours before them;
    for the life of the process."""
    import llvmlite.binding as llvm

    given = [f"i64 %{index}" for index in range(words)]
    text = f"""
        define i64 @vmmkv_bound({", ".join(given)}) {{
          %function = inttoptr i64 {function} to ptr
          %result = call i64 %function({", ".join([f"i64 {first}", *given])})
          ret i64 %result
        }}"""
    return load(llvm.parse_assembly(text), ["bound"])[0]


def _find(library: str, made_of: str) -> Any:
    """The LLVM module of a library, compiled now if it is nowhere."""
    name = f"{library}-{made_of}-{platform.machine()}.bc"
    cache = _writable_cache()
    for folder in filter(None, (SHIPPED, cache)):
        with suppress(*UNREADABLE):
            return _read(folder / name)
    with _one_at_a_time(cache) as folder:
        with suppress(*UNREADABLE):  # another process has been first
            return _read(folder / name)
        print(f"vmmkv: compiling {library} once, for {folder} (a minute or two) ...", file=sys.stderr)
        make(library, folder)
        return _read(folder / name)


def _read(path: Path) -> Any:
    import llvmlite.binding as llvm

    return llvm.parse_bitcode(path.read_bytes())


def _writable_cache() -> Path | None:
    """The folder where this user's compiled code is kept; None: nothing can be written there."""
    from ..kernels.folders import cache_folder  # here: to compile needs no kernels

    with suppress(OSError):
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    return None


@contextmanager
def _one_at_a_time(folder: Path | None) -> Iterator[Path]:
    """Lets one process at a time compile for a folder, a temporary one if there is none."""
    if folder is None:
        with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        flock(lock, LOCK_EX)
        yield folder
    finally:
        os.close(lock)


def make(library: str, folder: Path) -> None:
    """Compiles a library into a folder, for all processors, in a process of its own. Raises `RuntimeError`."""
    script, options = Path(__file__).with_name("make.py"), {"NUMBA_DISABLE_JIT": "0", "NUMBA_BOUNDSCHECK": "0"}
    command = [sys.executable, "-P", str(script), library, str(folder)]
    done = subprocess.run(command, env=os.environ | options, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{library} does not compile:\n{done.stderr}")
