"""What kernels are written with: PTX instructions as functions, and functions that are inlined.

An instruction is inline assembly on a GPU, and Python of the same meaning in Numba's simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import cuda, types
from numba.cuda.core import config

SIMULATED = bool(config.ENABLE_CUDASIM)

if SIMULATED:
    from .simulator import device_function

# What kernels convert numbers with: Numba's own do the same in the simulator, in ten times the time.
float32: Any
int64: Any
uint32: Any
float32, int64, uint32 = (np.float32, np.int64, np.uint32) if SIMULATED else (types.float32, types.int64, types.uint32)

Function = TypeVar("Function", bound=Callable[..., Any])

inlined: Callable[[Function], Function] = device_function if SIMULATED else cuda.jit(device=True, inline="always")
"""Makes a function one for kernels, put in place wherever it is called: structs that it takes or gives cost nothing.

Annotations are for readers and for mypy. A local array, which stays in registers, is `Any`.
"""

REGISTERS = {"r": types.uint32, "l": types.int64, "f": types.float32}
"""Register classes of inline assembly: 32-bit and 64-bit integers, 32-bit floats."""


def instruction(
    asm: str,
    outputs: str,
    inputs: str,
    meaning: Callable[..., Any],
    *,
    pure: bool = False,
    reads_only: bool = False,
    convergent: bool = False,
    before_hopper: str | None = None,
) -> Any:
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
    from llvmlite import ir
    from numba.cuda.core import targetconfig

    llvm = _llvm_registers()
    results = [llvm[kind] for kind in outputs]
    result = ir.VoidType() if not results else results[0] if len(results) == 1 else ir.LiteralStructType(results)
    clobbers = [] if pure or reads_only else ["~{memory}"]
    constraints = ",".join([f"={kind}" for kind in outputs] + list(inputs) + clobbers)
    if not outputs:
        returned = types.void
    elif len(outputs) == 1:
        returned = REGISTERS[outputs]
    else:
        returned = types.UniTuple(REGISTERS[outputs[0]], len(outputs))

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(result, [llvm[register] for register in inputs])
        older = before_hopper and targetconfig.ConfigStack().top().compute_capability < (9, 0)
        assembly = ir.InlineAsm(kind, before_hopper if older else asm, constraints, side_effect=not pure)
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
    """A function for kernels that is PTX on a whole local array of floats, which stays in registers.

    Its first argument is the array, of which every element is read and written; threads execute it together.

    Args:
        asm: a format string, with {array} for the array's registers, {0}, {1}, ... for inputs, and `facts`' names.
        size: elements of the array.
        inputs: a register class for each input.
        meaning: what it does to the array, in Python, for the simulator.
    """
    if SIMULATED:
        return meaning
    from llvmlite import ir

    llvm = _llvm_registers()
    names = [f"${size * 2 + index}" for index in range(len(inputs))]
    text = asm.format(*names, array=", ".join(f"${index}" for index in range(size)), **facts) if facts else asm
    constraints = ",".join(["=f"] * size + [str(index) for index in range(size)] + list(inputs) + ["~{memory}"])
    kind = ir.FunctionType(
        ir.LiteralStructType([ir.FloatType()] * size), [ir.FloatType()] * size + [llvm[register] for register in inputs]
    )

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        places = [builder.gep(data, [ir.Constant(ir.IntType(32), index)]) for index in range(size)]
        operands = [builder.load(place) for place in places] + list(arguments[1:])
        assembly = ir.InlineAsm(kind, text, constraints, side_effect=True)
        value = builder.call(assembly, operands, attrs=("convergent",))
        for index, place in enumerate(places):
            builder.store(builder.extract_value(value, index), place)
        return context.get_dummy_value()

    kinds = [REGISTERS[register] for register in inputs]
    return _make_intrinsic(1 + len(inputs), lambda array, *arguments: types.void(array, *kinds), codegen)


def instruction_on_address(asm: str, meaning: Callable[..., Any]) -> Any:
    """A function for kernels that is one PTX instruction, which makes one address ($0) of an array's address ($1).

    Args:
        asm: the instruction.
        meaning: what it makes of the array, in Python, for the simulator.
    """
    if SIMULATED:
        return meaning
    from llvmlite import ir

    address = _llvm_registers()["l"]
    assembly = ir.InlineAsm(ir.FunctionType(address, [address]), asm, "=l,l")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        return builder.call(assembly, [builder.ptrtoint(data, address)])

    return _make_intrinsic(1, lambda array: REGISTERS["l"](array), codegen)


def _llvm_registers() -> dict[str, Any]:
    """What `REGISTERS` are to LLVM."""
    from llvmlite import ir

    return {"r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType()}


def _make_intrinsic(parameters: int, signature_of: Callable[..., Any], codegen: Callable[..., Any]) -> Any:
    """A function for kernels. Numba reads the number of its parameters off the function that gives its signature."""
    from numba.cuda.extending import intrinsic

    names = ", ".join(f"argument{index}" for index in range(parameters))
    scope: dict[str, Any] = {"signature_of": signature_of, "codegen": codegen}
    exec(f"def typing(context, {names}):\n    return signature_of({names}), codegen", scope)
    return intrinsic(scope["typing"])
