"""What kernels are written with, and how they become loaded code, by Numba's internals.

`inlined` makes a Python function one for kernels. `instruction` makes a PTX instruction one: inline assembly on a GPU,
Python of the same meaning in Numba's simulator. `Kernel` compiles a kernel to PTX for the device at hand and keeps the
PTX on disk; the driver assembles it. `launches` launches it, since Numba's own dispatcher takes tens of microseconds.

Loading and allocating may end another thread's capture of a graph unless the calling thread is in relaxed capture mode.
`beside_captures` sets that mode; the calls inside touch no stream but their own.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import llvmlite.ir as llvm
import numpy as np
import torch
from numba import cuda, types
from numba.cuda.core import config

from .folders import cache_folder

SIMULATED = bool(config.ENABLE_CUDASIM)

if SIMULATED:
    from .simulator import device_function

# What kernels convert numbers with: Numba's own do the same in the simulator, in ten times the time.
float32: Any
int64: Any
uint32: Any
float32, int64, uint32 = (np.float32, np.int64, np.uint32) if SIMULATED else (types.float32, types.int64, types.uint32)

Function = TypeVar("Function", bound=Callable[..., Any])

# Makes a function one for kernels, put in place wherever it is called: structs that it takes or gives cost nothing.
# Annotations are for readers and for mypy. A local array, which stays in registers, is `Any`.
inlined: Callable[[Function], Function] = device_function if SIMULATED else cuda.jit(device=True, inline="always")

# Register classes of inline assembly: 32-bit and 64-bit integers, 32-bit floats.
REGISTERS = {"r": types.uint32, "l": types.int64, "f": types.float32}
LLVM = {"r": llvm.IntType(32), "l": llvm.IntType(64), "f": llvm.FloatType()}


def instruction(
    asm: str, outputs: str, inputs: str, meaning: Callable[..., Any], *, pure: bool = False, reads_only: bool = False,
    convergent: bool = False, before_hopper: str | None = None,
) -> Any:  # fmt: skip
    """A function for kernels that is one PTX instruction.

    Args:
        asm: the instruction, with $0, $1, ... for its outputs and then its inputs.
        outputs: a register class for each output; several come back as a tuple.
        inputs: a register class for each input.
        meaning: what the instruction does, in Python, for the simulator.
        pure: its outputs follow from its inputs; the compiler may move it, merge it or leave it out.
        reads_only: it stays, in order with other instructions, but ordinary memory accesses may pass it.
        convergent: threads execute it together; the compiler must not move it into a branch.
        before_hopper: what it is where the compute capability is below 9.0; None: the same.
    """
    if SIMULATED:
        return meaning
    from numba.cuda.core import targetconfig

    results = [LLVM[kind] for kind in outputs]
    if not outputs:
        result, returned = llvm.VoidType(), types.void
    elif len(outputs) == 1:
        result, returned = results[0], REGISTERS[outputs]
    else:
        result, returned = llvm.LiteralStructType(results), types.UniTuple(REGISTERS[outputs[0]], len(outputs))
    clobbers = [] if pure or reads_only else ["~{memory}"]
    constraints = ",".join([f"={kind}" for kind in outputs] + list(inputs) + clobbers)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = llvm.FunctionType(result, [LLVM[register] for register in inputs])
        older = before_hopper and targetconfig.ConfigStack().top().compute_capability < (9, 0)
        assembly = llvm.InlineAsm(kind, before_hopper if older else asm, constraints, side_effect=not pure)
        value = builder.call(assembly, list(arguments), attrs=("convergent",) if convergent else ())
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return value
        values = [builder.extract_value(value, index) for index in range(len(outputs))]
        return context.make_tuple(builder, signature.return_type, values)

    signature = returned(*[REGISTERS[register] for register in inputs])
    return _make_intrinsic(len(inputs), lambda *arguments: signature, codegen)


def instruction_on_array(asm: str, facts: dict[str, Any], size: int, inputs: str, meaning: Callable[..., Any]) -> Any:
    """A function for kernels that is PTX on a local array of so many floats, its first argument, which stays in
    registers. Every element is read and written; threads execute it together.

    Args:
        asm: a format string, with {array} for the array's registers, {0}, {1}, ... for inputs, and `facts`' names.
        inputs, meaning: as in `instruction`.
    """
    if SIMULATED:
        return meaning
    names = [f"${size * 2 + index}" for index in range(len(inputs))]
    text = asm.format(*names, array=", ".join(f"${index}" for index in range(size)), **facts) if facts else asm
    constraints = ",".join(["=f"] * size + [str(index) for index in range(size)] + list(inputs) + ["~{memory}"])
    floats = [LLVM["f"]] * size
    kind = llvm.FunctionType(llvm.LiteralStructType(floats), floats + [LLVM[register] for register in inputs])

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        places = [builder.gep(data, [llvm.Constant(LLVM["r"], index)]) for index in range(size)]
        operands = [builder.load(place) for place in places] + list(arguments[1:])
        assembly = llvm.InlineAsm(kind, text, constraints, side_effect=True)
        value = builder.call(assembly, operands, attrs=("convergent",))
        for index, place in enumerate(places):
            builder.store(builder.extract_value(value, index), place)
        return context.get_dummy_value()

    kinds = [REGISTERS[register] for register in inputs]
    return _make_intrinsic(1 + len(inputs), lambda array, *arguments: types.void(array, *kinds), codegen)


def _make_intrinsic(parameters: int, signature_of: Callable[..., Any], codegen: Callable[..., Any]) -> Any:
    """A function for kernels. Numba reads the number of its parameters off the function that gives its signature."""
    from numba.cuda.extending import intrinsic

    names = ", ".join(f"argument{index}" for index in range(parameters))
    scope: dict[str, Any] = {"signature_of": signature_of, "codegen": codegen}
    exec(f"def typing(context, {names}):\n    return signature_of({names}), codegen", scope)
    return intrinsic(scope["typing"])


@cache
def driver() -> Any:
    """The bindings, imported where there is a GPU."""
    import cuda.bindings.driver as driver

    return driver


@contextmanager
def beside_captures(index: int) -> Iterator[Any]:
    """The driver, for calls that create things on the CUDA device `index`; this thread's own stream may be captured."""
    cu = driver()
    with torch.cuda.device(index):
        enter_context(index)
        _, mode = cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield cu
        finally:
            cu.cuThreadExchangeStreamCaptureMode(mode)


def enter_context(index: int) -> None:
    """Makes torch's context current, as torch does in a thread with its first call that needs one."""
    driver().cuCtxSetCurrent(_primary_context(index))


@cache
def _primary_context(index: int) -> Any:
    cu = driver()
    _, device = cu.cuDeviceGet(index)
    _, context = cu.cuDevicePrimaryCtxRetain(device)  # for ever, like torch
    return context


def allocate_zeroed(index: int, nbytes: int) -> int:
    """The address of new memory on a CUDA device, zeroed when this returns; other streams are not waited for."""
    with beside_captures(index) as cu:
        status, address = cu.cuMemAlloc(nbytes)
        if not status:
            status = _zero(cu, address, nbytes)
            if status:
                cu.cuMemFree(address)
    if status:
        raise RuntimeError(f"asked for {nbytes} bytes of workspace on device {index}; the driver says {status.name}")
    return int(address)


def _zero(cu: Any, address: int, nbytes: int) -> Any:
    status, stream = cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if not status:
        (status,) = cu.cuMemsetD8Async(address, 0, nbytes, stream)
        if not status:
            (status,) = cu.cuStreamSynchronize(stream)
        cu.cuStreamDestroy(stream)
    return status


TYPES = {int: types.int64, float: types.float32, bytes: types.int64}  # code gets the address of a tensor map
Structs = tuple[type[Any], ...]  # a kernel's parameters: named tuples of `int`, `float` and `bytes`


@dataclass(eq=False)
class Kernel:
    """A kernel, made when it is first launched."""

    factory: Callable[..., Any]  # makes the kernel, a plain Python function, from `constants`
    constants: tuple[Any, ...]  # arguments of `factory`
    structs: Structs  # each parameter of the function is a struct, each field of it an argument
    threads: int  # of a block
    _: KW_ONLY
    blocks_per_sm: int = 1  # as many blocks are to fit on a multiprocessor; bounds the registers
    shared_bytes: int = 0  # dynamic shared memory of a block
    hopper: bool = False  # it uses instructions that only compute capability 9.0 has
    _handles: dict[int, Any] = field(default_factory=dict, init=False)

    def handle(self, index: int) -> Any:
        """The driver's handle of it on the CUDA device `index`, where it is loaded if it was not."""
        return self._handles.get(index) or self._load(index)

    def simulate(self, blocks: tuple[int, int], arguments: list[Any]) -> None:
        """Runs a grid of blocks in the simulator, with the fields of all structs, in order."""
        values = iter(arguments)
        structs = [_make(each, values) for each in self.structs]
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
        _announce(self.name, path)
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
        # PTX runs on later devices; targets after Hopper would need a newer version of PTX.
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


_announced = -60.0


def _announce(name: str, path: Path | None) -> None:
    """Says what is being compiled: the first kernel in a minute, since a model needs several."""
    global _announced
    if time.monotonic() - _announced >= 60:
        kept = f"once, for {path.parent}" if path else "for this process, since there is no folder to keep it"
        print(f"vmmkv: compiling kernels {kept}: {name} and others, some seconds each ...", file=sys.stderr)
        _announced = time.monotonic()


def fields(structs: Structs) -> list[type]:
    """The types of the structs' fields, in order, and of those that are structs themselves."""
    kinds = [kind for each in structs for kind in get_type_hints(each).values()]
    return [part for kind in kinds for part in ([kind] if kind in TYPES else fields((kind,)))]


def _type_of(kind: type) -> Any:
    """A type of a struct's field, or a struct, to the compiler."""
    if kind in TYPES:
        return TYPES[kind]
    return types.NamedTuple([_type_of(each) for each in get_type_hints(kind).values()], kind)


def _make(kind: type, values: Iterator[Any]) -> Any:
    """A struct, or a field of one, of the next values."""
    return next(values) if kind in TYPES else kind(*[_make(each, values) for each in get_type_hints(kind).values()])


def to_ptx(name: str, function: Any, structs: Structs, launch_bounds: tuple[int, int], target: tuple[Any, ...]) -> str:
    """Compiles a kernel, which gets a name."""
    from .front_end import quick

    signature = types.void(*map(_type_of, structs))
    options: dict[str, Any] = {"device": False, "abi": "numba", "output": "ptx", "launch_bounds": launch_bounds}
    with quick():
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
        rf"ld\.param\.u64\s+(%rd\d+), \[{parameter}\];", rf"mov.b64 \1, {parameter};\n\tcvta.param.u64 \1, \1;", ptx
    )
    assert (declared, loaded) == (1, 1), f"the compiler reads {parameter} in a way that is not known here"
    return ptx


@cache
def _sources() -> str:
    """A hash of all kernels' sources: any change makes new PTX."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
