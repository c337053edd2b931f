"""From a Python function to a loaded kernel: with `ptx`, all that touches Numba's internals.

Numba makes PTX of a kernel for the device at hand, which is kept on disk. The driver assembles it (and keeps that as
well). `launches` launches it: Numba's own dispatcher spends tens of microseconds on looking at arguments.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import torch
from numba import cuda, types
from numba.cuda.core import ir

from .context import beside_captures
from .folders import cache_folder

TYPES = {int: types.int64, float: types.float32, bytes: types.int64}
"""What they are to the compiler; of a tensor map the code gets the address."""

Structs = tuple[type[Any], ...]
"""A kernel's parameters: named tuples of `int`, `float` and `bytes`."""


class Kernel:
    """A kernel, made when it is first launched.

    Args:
        factory: makes the kernel, a plain Python function, from `constants`.
        constants: what is fixed at compile time.
        structs: what it takes: each parameter of the function is a struct, each field of it an argument.
        threads: threads of a block.
        blocks_per_sm: as many blocks are to fit on a multiprocessor; bounds the registers.
        shared_bytes: dynamic shared memory of a block.
        hopper: it uses instructions that only compute capability 9.0 has.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        constants: tuple[Any, ...],
        structs: Structs,
        threads: int,
        *,
        blocks_per_sm: int = 1,
        shared_bytes: int = 0,
        hopper: bool = False,
    ) -> None:
        self.factory = factory
        self.constants = constants
        self.structs = structs
        self.threads = threads
        self.blocks_per_sm = blocks_per_sm
        self.shared_bytes = shared_bytes
        self.hopper = hopper
        self._handles: dict[int, Any] = {}

    def handle(self, index: int) -> Any:
        """The driver's handle of it on the CUDA device `index`, where it is loaded if it was not."""
        return self._handles.get(index) or self._load(index)

    def simulate(self, blocks: tuple[int, int], arguments: list[Any]) -> None:
        """Runs a grid of blocks in the simulator, with the fields of all structs, in order."""
        values = iter(arguments)
        structs = [each._make(islice(values, len(each._fields))) for each in self.structs]
        self._simulated[blocks, self.threads, 0, self.shared_bytes](*structs)

    @property
    def name(self) -> str:
        """What it is called in its PTX, and so by profilers."""
        return f"vmmkv_{self.factory.__name__.removeprefix('make_')}"

    def __str__(self) -> str:
        return f"{self.factory.__name__}{self.constants}"

    def ptx(self, capability: tuple[int, int]) -> str:
        """The kernel for a compute capability, from disk or from the compiler. Needs no GPU."""
        path = None
        with suppress(OSError):  # it is not there, or cannot be read
            path = cache_folder() / f"{self._key(capability)}.ptx"
            return path.read_text()
        bounds = self.threads, self.blocks_per_sm
        ptx = to_ptx(self.name, self.factory(*self.constants), self.structs, bounds, self._target(capability))
        if path is not None:
            with suppress(OSError):  # without a disk it is made again
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
                unfinished.write_text(ptx)
                unfinished.replace(path)  # others may be doing the same
        return ptx

    def _target(self, capability: tuple[int, int]) -> tuple[Any, ...]:
        # PTX runs on later devices; what is newer than Hopper would need a newer version of it.
        return (*capability, "a") if self.hopper else min(capability, (9, 0))

    def _key(self, capability: tuple[int, int]) -> str:
        name = f"{self.factory.__module__}.{self} {self.threads} {self.blocks_per_sm} {self._target(capability)}"
        return hashlib.sha256(f"{name} {_sources()} {version('numba-cuda')}".encode()).hexdigest()

    def _load(self, index: int) -> Any:
        code = self.ptx(torch.cuda.get_device_capability(index)).encode() + b"\0"
        with beside_captures(index) as cu:
            status, module = cu.cuModuleLoadData(code)
            if not status:
                status, handle = cu.cuModuleGetFunction(module, self.name.encode())
            if not status and self.shared_bytes:
                limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = cu.cuFuncSetAttribute(handle, limit, self.shared_bytes)
        if status:
            raise RuntimeError(f"loading {self} failed with {status.name}")
        self._handles[index] = handle
        return handle

    @cached_property
    def _simulated(self) -> Any:
        return cuda.jit(self.factory(*self.constants))


def _copy_scope(scope: ir.Scope, memo: dict[int, Any]) -> ir.Scope:
    """A copy in which variables are added and renamed; the variables in it are the same.

    Whatever Numba inlines it copies block by block, and with each block all variables of the function: of a kernel that
    is most of the time that it compiles.
    """
    memo[id(scope)] = copied = ir.Scope(scope.parent, scope.loc)
    copied.localvars._con.update(scope.localvars._con)
    copied.redefined.update(scope.redefined)
    copied.var_redefinitions.update({name: set(names) for name, names in scope.var_redefinitions.items()})
    return copied


ir.Scope.__deepcopy__ = _copy_scope


def fields(structs: Structs) -> list[type]:
    """The types of the structs' fields, in order."""
    return [kind for each in structs for kind in get_type_hints(each).values()]


def to_ptx(name: str, function: Any, structs: Structs, launch_bounds: tuple[int, int], target: tuple[Any, ...]) -> str:
    """Compiles a kernel, which gets a name."""
    signature = types.void(*[types.NamedTuple([TYPES[kind] for kind in fields((each,))], each) for each in structs])
    options: dict[str, Any] = {"device": False, "abi": "numba", "output": "ptx", "launch_bounds": launch_bounds}
    ptx: str = cuda.compile(function, signature, cc=target, **options)[0]
    mangled = re.search(r"\.entry\s+(\w+)", ptx)
    assert mangled
    # All that is used here is in PTX 8.6; the compiler's own version may be newer than the driver.
    ptx = re.sub(r"\.version \d+\.\d+", ".version 8.6", ptx.replace(mangled[1], name))
    for index in range(fields(structs).count(bytes)):
        ptx = _pass_by_value(ptx, f"{name}_param_{index}")
    return ptx


def _pass_by_value(ptx: str, parameter: str) -> str:
    """Makes an integer parameter 128 bytes of constant memory, and its value their address."""
    ptx, declared = re.subn(rf"\.param \.u64 {parameter}\b", f".param .align 64 .b8 {parameter}[128]", ptx)
    ptx, loaded = re.subn(
        rf"ld\.param\.u64\s+(%rd\d+), \[{parameter}\];",
        rf"mov.b64 \1, {parameter};\n\tcvta.param.u64 \1, \1;",
        ptx,
    )
    assert (declared, loaded) == (1, 1), f"the compiler reads {parameter} in a way that is not known here"
    return ptx


@cache
def _sources() -> str:
    """A hash of all kernels' sources: any change makes new PTX."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
