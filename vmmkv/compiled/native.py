"""Memory and C functions by address, for compiled functions; and the same interpreted.

`call(address, (a, b))` calls `int f(long, long)`. `view` is an array over memory that is kept elsewhere. `c_function`
is a function of the C library by name, `static` the address of a word that all functions of a library share, zero at
first.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import numpy as np

from . import BY_NUMBA

if not BY_NUMBA:

    def call(address: int, arguments: tuple[int, ...]) -> int:
        """Calls the C function at an address: `int function(long, ...)`."""
        return int(
            ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * len(arguments))(int(address))(*map(int, arguments))
        )

    def view(address: int, shape: Any, dtype: Any) -> Any:
        """An array over the memory at an address."""
        count = int(np.prod(shape))
        memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(int(address))
        array = np.frombuffer(memory, dtype).reshape(shape)
        return _Records(array) if array.dtype.fields else array

    class _Records:
        """Records whose fields are attributes, whatever numpy calls so."""

        def __init__(self, array: Any) -> None:
            self.array = array

        def __getitem__(self, index: int) -> _Record:
            return _Record(self.array[index])

    class _Record:
        def __init__(self, record: Any) -> None:
            self.__dict__["numpy_record"] = record

        def __getattr__(self, name: str) -> int:
            return int(self.__dict__["numpy_record"][name])

        def __setattr__(self, name: str, value: int) -> None:
            self.__dict__["numpy_record"][name] = value

    _words: deque[Any] = deque(maxlen=64)

    def word() -> int:
        """The address of a word for a C function to write to, until the caller returns."""
        _words.append(ctypes.c_int64())
        return ctypes.addressof(_words[-1])

    def c_function(name: str, arguments: int) -> Any:
        """A function of the C library that takes so many words, and returns one."""
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * arguments
        return function

    _statics: dict[str, Any] = {}

    def static(name: str) -> int:
        """The address of a word of that name."""
        return ctypes.addressof(_statics.setdefault(name, ctypes.c_int64()))

    def errno() -> int:
        """Why the function of the C library that was called last has failed."""
        return ctypes.get_errno()

else:
    from llvmlite import ir
    from numba import carray, njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def call(_typing: Any, function: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address, packed = values
            words = [
                context.cast(builder, word, kind, types.int64)
                for word, kind in zip(cgutils.unpack_tuple(builder, packed), signature.args[1])
            ]
            prototype = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * len(words))
            return builder.call(builder.inttoptr(address, prototype.as_pointer()), words)

        return types.int32(types.int64, arguments), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def _pointer(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], cgutils.voidptr_t)

        return types.voidptr(types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def word(_typing: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.ptrtoint(cgutils.alloca_once(builder, ir.IntType(64)), ir.IntType(64))

        return types.int64(), generate

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def view(address: int, shape: Any, dtype: Any) -> Any:
        return carray(_pointer(address), shape, dtype)

    def c_function(name: str, arguments: int) -> Any:
        return types.ExternalFunction(name, types.int64(*[types.int64] * arguments))

    @intrinsic  # type: ignore[untyped-decorator]
    def static(_typing: Any, name: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            symbol = f"vmmkv_static_{name.literal_value}"
            word = builder.module.globals.get(symbol)
            if word is None:
                word = cgutils.add_global_variable(builder.module, ir.IntType(64), symbol)
                word.initializer, word.linkage = ir.Constant(ir.IntType(64), 0), "linkonce_odr"
            return builder.ptrtoint(word, ir.IntType(64))

        if isinstance(name, types.StringLiteral):
            return types.int64(name), generate
        return None

    _errno_location = c_function("__errno_location", 0)

    @njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def errno() -> Any:
        return view(_errno_location(), 1, np.int32)[0]
