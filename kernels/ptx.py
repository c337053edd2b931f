"""PTX instructions as functions: inline assembly on a GPU, Python of the same meaning in Numba's simulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from numba import types
from numba.cuda.core import config

SIMULATED = bool(config.ENABLE_CUDASIM)

REGISTERS = {"r": types.uint32, "l": types.int64}
"""Register classes of inline assembly: 32-bit and 64-bit integers."""


def instruction(asm: str, outputs: str, inputs: str, meaning: Callable[..., Any], reads_only: bool = False) -> Any:
    """A function for kernels that is one PTX instruction.

    Args:
        asm: the instruction, with $0, $1, ... for its outputs and then its inputs.
        outputs: a register class for each output; several come back as a tuple.
        inputs: a register class for each input.
        meaning: what the instruction does, in Python, for the simulator.
        reads_only: the compiler may move it over other memory accesses.
    """
    if SIMULATED:
        return meaning
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    integer = {"r": ir.IntType(32), "l": ir.IntType(64)}
    results = [integer[kind] for kind in outputs]
    result = ir.VoidType() if not results else results[0] if len(results) == 1 else ir.LiteralStructType(results)
    constraints = ",".join([f"={kind}" for kind in outputs] + list(inputs) + ["~{memory}"] * (not reads_only))
    if not outputs:
        returned = types.void
    elif len(outputs) == 1:
        returned = REGISTERS[outputs]
    else:
        returned = types.UniTuple(REGISTERS[outputs[0]], len(outputs))

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(result, [integer[register] for register in inputs])
        value = builder.call(ir.InlineAsm(kind, asm, constraints, side_effect=True), list(arguments))
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return value
        values = [builder.extract_value(value, index) for index in range(len(outputs))]
        return context.make_tuple(builder, signature.return_type, values)

    signature = returned(*[REGISTERS[register] for register in inputs])
    # Numba reads the number of parameters off the function.
    parameters = ", ".join(f"argument{index}" for index in range(len(inputs)))
    scope: dict[str, Any] = {"signature": signature, "codegen": codegen}
    exec(f"def typing(context, {parameters}):\n    return signature, codegen", scope)
    return intrinsic(scope["typing"])


def _load_i32(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def _load_16(address: int) -> tuple[int, ...]:
    assert address % 16 == 0, "misaligned"
    return tuple((ctypes.c_uint32 * 4).from_address(address))


def _store_16(address: int, *words: int) -> None:
    assert address % 16 == 0, "misaligned"
    (ctypes.c_uint32 * 4).from_address(address)[:] = list(words)


load_i32 = instruction("{ .reg .s32 t; ld.global.nc.s32 t, [$1]; cvt.s64.s32 $0, t; }", "l", "l", _load_i32, True)
"""A 32-bit integer at an address."""

load_16 = instruction("ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", "rrrr", "l", _load_16, True)
"""16 bytes at a 16-byte aligned address, read once: they bypass the first cache."""

store_16 = instruction("st.global.v4.u32 [$0], {$1, $2, $3, $4};", "", "lrrrr", _store_16)
"""Puts 16 bytes to a 16-byte aligned address."""
