"""Loads and stores of addresses, in 16 bytes where it can be."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .ptx import instruction

Words = ctypes.c_uint32 * 4
Floats = ctypes.c_float * 4


def _load_i32(address: int) -> int:
    return ctypes.c_int32.from_address(int(address)).value


def _trap() -> None:
    raise RuntimeError("trap: a kernel was asked to write where it must not")


def simulated_load_f32(address: int) -> Any:
    return np.float32(ctypes.c_float.from_address(int(address)).value)


def _load_4(address: int) -> Any:
    return np.uint32(ctypes.c_uint32.from_address(int(address)).value)


def simulated_load_8(address: int) -> tuple[Any, ...]:
    assert address % 8 == 0, "misaligned"
    return tuple(map(np.uint32, (ctypes.c_uint32 * 2).from_address(int(address))))


def _load_16(address: int) -> tuple[Any, ...]:
    assert address % 16 == 0, "misaligned"
    return tuple(map(np.uint32, Words.from_address(int(address))))


def simulated_load_f32x4(address: int) -> tuple[Any, ...]:
    assert address % 16 == 0, "misaligned"
    return tuple(map(np.float32, Floats.from_address(int(address))))


def simulated_store_f32(address: int, value: float) -> None:
    ctypes.c_float.from_address(int(address)).value = float(value)


def _store_4(address: int, word: int) -> None:
    ctypes.c_uint32.from_address(int(address)).value = int(word)


def simulated_store_8(address: int, *words: int) -> None:
    (ctypes.c_uint32 * 2).from_address(int(address))[:] = [int(word) for word in words]


def simulated_store_16(address: int, *words: int) -> None:
    assert address % 16 == 0, "misaligned"
    Words.from_address(int(address))[:] = [int(word) for word in words]


def _store_f32x2(address: int, *values: float) -> None:
    assert address % 8 == 0, "misaligned"
    (ctypes.c_float * 2).from_address(int(address))[:] = [float(value) for value in values]


def simulated_store_f32x4(address: int, *values: float) -> None:
    assert address % 16 == 0, "misaligned"
    Floats.from_address(int(address))[:] = [float(value) for value in values]


def _increment(address: int, last: int) -> int:
    word = ctypes.c_uint32.from_address(int(address))
    old = word.value
    word.value = 0 if old >= last else old + 1
    return old


load_i32 = instruction(
    "{ .reg .s32 t; ld.global.nc.s32 t, [$1]; cvt.s64.s32 $0, t; }", "l", "l", _load_i32, reads_only=True
)
"""A 32-bit integer at an address."""

load_counter = instruction("{ .reg .s32 t; ld.global.s32 t, [$1]; cvt.s64.s32 $0, t; }", "l", "l", _load_i32)
"""A 32-bit integer at an address that this launch may write to."""

load_f32 = instruction("ld.global.nc.f32 $0, [$1];", "f", "l", simulated_load_f32, reads_only=True)
"""A float at an address."""

load_4 = instruction("ld.global.nc.u32 $0, [$1];", "r", "l", _load_4, reads_only=True)
"""4 bytes at an address."""

load_8 = instruction("ld.global.nc.v2.u32 {$0, $1}, [$2];", "rr", "l", simulated_load_8, reads_only=True)
"""8 bytes at an 8-byte aligned address."""

load_16_once = {
    nbytes: instruction(
        f"ld.global.nc.L1::no_allocate.L2::{nbytes}B.v4.u32 {{$0, $1, $2, $3}}, [$4];", "rrrr", "l", _load_16,
        reads_only=True,
    )
    for nbytes in (64, 128, 256)
}  # fmt: skip
"""16 bytes at a 16-byte aligned address, read once: they bypass the first cache. By how many bytes come to the second:
no more than are read next, since the rest would push others out before it is wanted."""

load_8_once = instruction(
    "ld.global.nc.L1::no_allocate.L2::64B.v2.u32 {$0, $1}, [$2];", "rr", "l", simulated_load_8, reads_only=True
)
"""8 bytes at an 8-byte aligned address, read once."""

load_4_once = instruction("ld.global.nc.L1::no_allocate.L2::64B.u32 $0, [$1];", "r", "l", _load_4, reads_only=True)
"""4 bytes at an address, read once."""

load_16 = load_16_once[256]
"""16 bytes of a long run."""

load_16_cached = instruction("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", "rrrr", "l", _load_16, reads_only=True)
"""16 bytes at a 16-byte aligned address, of which neighbours are read again soon."""

load_16_written = instruction("ld.global.v4.u32 {$0, $1, $2, $3}, [$4];", "rrrr", "l", _load_16)
"""16 bytes at a 16-byte aligned address that this launch may write to."""

store_4 = instruction("st.global.u32 [$0], $1;", "", "lr", _store_4)
"""Puts 4 bytes to an address."""

store_8 = instruction("st.global.v2.u32 [$0], {$1, $2};", "", "lrr", simulated_store_8)
"""Puts 8 bytes to an 8-byte aligned address."""

store_16 = instruction("st.global.v4.u32 [$0], {$1, $2, $3, $4};", "", "lrrrr", simulated_store_16)
"""Puts 16 bytes to a 16-byte aligned address."""

store_f32 = instruction("st.global.f32 [$0], $1;", "", "lf", simulated_store_f32)
"""Puts a float to an address."""

store_f32x2 = instruction("st.global.v2.f32 [$0], {$1, $2};", "", "lff", _store_f32x2)
"""Puts two floats to an 8-byte aligned address."""

store_f32x4 = instruction("st.global.v4.f32 [$0], {$1, $2, $3, $4};", "", "lffff", simulated_store_f32x4)
"""Puts four floats to a 16-byte aligned address."""

# What other blocks wrote during this launch is in the second cache; the first may hold older bytes.
load_fresh_f32 = instruction("ld.global.cg.f32 $0, [$1];", "f", "l", simulated_load_f32)
"""A float that another block of this launch may have written."""

load_fresh_f32x4 = instruction("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "l", simulated_load_f32x4)
"""Four floats that another block of this launch may have written."""

increment = instruction("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "r", "lr", _increment)
"""Counts up at an address, from `last` on to 0 again, and gives what was there before. All blocks see one order."""

trap = instruction("trap;", "", "", _trap)
"""Stops the kernel with an error that ends the context."""
