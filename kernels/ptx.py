"""PTX instructions as functions: inline assembly on a GPU, Python of the same meaning in Numba's simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.cuda.core import config

SIMULATED = bool(config.ENABLE_CUDASIM)

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
    """
    if SIMULATED:
        return meaning
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    llvm = {"r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType()}
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
        assembly = ir.InlineAsm(kind, asm, constraints, side_effect=not pure)
        value = builder.call(assembly, list(arguments), attrs=("convergent",) if convergent else ())
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return value
        values = [builder.extract_value(value, index) for index in range(len(outputs))]
        return context.make_tuple(builder, signature.return_type, values)

    signature = returned(*[REGISTERS[register] for register in inputs])
    # Numba reads the number of parameters off the function.
    parameters = ", ".join(["context", *(f"argument{index}" for index in range(len(inputs)))])
    scope: dict[str, Any] = {"signature": signature, "codegen": codegen}
    exec(f"def typing({parameters}):\n    return signature, codegen", scope)
    return intrinsic(scope["typing"])
