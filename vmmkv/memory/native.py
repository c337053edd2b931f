"""C functions by their addresses, for code that Numba compiles: it calls them without the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def call(_typing: Any, function: Any, arguments: Any) -> Any:
    """Calls the C function at an address: `int function(word, ...)`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, packed = values
        kinds = signature.args[1]
        words = [
            context.cast(builder, word, kind, types.int64)
            for word, kind in zip(cgutils.unpack_tuple(builder, packed), kinds)
        ]
        prototype = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * len(words))
        return builder.call(builder.inttoptr(address, prototype.as_pointer()), words)

    return types.int32(types.int64, arguments), generate


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_typing: Any, address: Any) -> Any:
    """An address as a `void *`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def word(_typing: Any) -> Any:
    """The address of a word on the stack, for a C function to write to."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.IntType(64)), ir.IntType(64))

    return types.int64(), generate


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def at(address: int) -> Any:
    """The word at an address."""
    return carray(pointer(address), 1, np.int64)[0]
