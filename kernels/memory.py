"""Instructions on numbers and memory: arithmetic, formats of numbers, loads and stores, copies to shared memory."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from .compiler import float32, inlined, instruction, instruction_on_address

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

load_4 = instruction("ld.global.nc.u32 $0, [$1];", "r", "l", _load_4, reads_only=True)  # 4 bytes at an address

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

load_16 = load_16_once[256]  # 16 bytes of a long run

load_16_cached = instruction("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", "rrrr", "l", _load_16, reads_only=True)
"""16 bytes at a 16-byte aligned address, of which neighbours are read again soon."""

load_16_written = instruction("ld.global.v4.u32 {$0, $1, $2, $3}, [$4];", "rrrr", "l", _load_16)
"""16 bytes at a 16-byte aligned address that this launch may write to."""

store_4 = instruction("st.global.u32 [$0], $1;", "", "lr", _store_4)  # puts 4 bytes to an address

store_8 = instruction("st.global.v2.u32 [$0], {$1, $2};", "", "lrr", simulated_store_8)
"""Puts 8 bytes to an 8-byte aligned address."""

store_16 = instruction("st.global.v4.u32 [$0], {$1, $2, $3, $4};", "", "lrrrr", simulated_store_16)
"""Puts 16 bytes to a 16-byte aligned address."""

store_f32 = instruction("st.global.f32 [$0], $1;", "", "lf", simulated_store_f32)  # puts a float to an address

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

trap = instruction("trap;", "", "", _trap)  # stops the kernel with an error that ends the context


def _copy_16(target: int, source: int) -> None:
    assert (target | source) % 16 == 0, "misaligned"
    ctypes.memmove(int(target), int(source), 16)


def _store_i32(address: int, value: int) -> None:
    ctypes.c_int32.from_address(int(address)).value = int(value)


shared_address = instruction_on_address("cvta.to.shared.u64 $0, $1;", lambda array: array.ctypes.data)
"""The address of a shared array, as instructions on shared memory want it."""

copy_16 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; cp.async.cg.shared.global.L2::256B [a], [$1], 16; }", "", "ll", _copy_16
)
"""Begins to copy 16 bytes from global to shared memory; both addresses are multiples of 16."""

wait_copies = instruction("cp.async.wait_all;", "", "", lambda: None)
"""Waits until this thread's copies are there. Other threads see them after a barrier."""

commit_copies = instruction("cp.async.commit_group;", "", "", lambda: None)
"""Makes all of this thread's copies since the last commit those of one more, which may be none."""


def make_wait_older_copies(pending: int) -> Any:
    """A function for kernels that waits for this thread's copies, but for those of the last `pending` commits."""
    return instruction(f"cp.async.wait_group {pending};", "", "", lambda: None)


store_shared_16 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.v4.u32 [a], {$1, $2, $3, $4}; }", "", "lrrrr", simulated_store_16
)
"""Puts 16 bytes to a 16-byte aligned address."""

store_shared_f32 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.f32 [a], $1; }", "", "lf", simulated_store_f32
)
"""Puts a float to an address."""

load_shared_f32 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $1; ld.shared.f32 $0, [a]; }", "f", "l", simulated_load_f32
)
"""A float at an address."""

store_shared_f32x4 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.v4.f32 [a], {$1, $2, $3, $4}; }", "", "lffff", simulated_store_f32x4
)
"""Puts four floats to a 16-byte aligned address."""

load_shared_f32x4 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $4; ld.shared.v4.f32 {$0, $1, $2, $3}, [a]; }", "ffff", "l", simulated_load_f32x4
)
"""Four floats at a 16-byte aligned address."""

store_shared_8 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $0; st.shared.v2.u32 [a], {$1, $2}; }", "", "lrr", simulated_store_8
)
"""Puts 8 bytes to an 8-byte aligned address."""

load_shared_8 = instruction(
    "{ .reg .u32 a; cvt.u32.u64 a, $2; ld.volatile.shared.v2.u32 {$0, $1}, [a]; }",
    "rr",
    "l",
    simulated_load_8,
    reads_only=True,
)
"""8 bytes at an 8-byte aligned address, loaded each time: registers are for what is needed more often."""

store_shared_i32 = instruction(
    "{ .reg .u32 a, v; cvt.u32.u64 a, $0; cvt.u32.u64 v, $1; st.shared.u32 [a], v; }", "", "ll", _store_i32
)
"""Puts a 32-bit integer to an address."""

load_shared_i32 = instruction(
    "{ .reg .u32 a; .reg .s32 v; cvt.u32.u64 a, $1; ld.shared.s32 v, [a]; cvt.s64.s32 $0, v; }", "l", "l", _load_i32
)
"""A 32-bit integer at an address."""

LOG2E = 1.4426950408889634
NEGATIVE_INFINITY = float("-inf")
FLOOR = -1e30  # a maximum below all sensible scores; infinite ones would have no difference

_two_floats, _two_words = struct.Struct("ff"), struct.Struct("II")


def _bfloat16_bits(low: float, high: float) -> Any:
    """Rounds to nearest even, as the hardware does."""
    halves = [
        0x7FFF if value != value else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        for value, bits in zip((low, high), _two_words.unpack(_two_floats.pack(low, high)))
    ]
    return np.uint32(halves[0] | halves[1] << 16)


def _float16_bits(low: float, high: float) -> Any:
    with np.errstate(over="ignore"):
        return np.array((low, high), np.float32).astype(np.float16).view(np.uint32)[0]


def bfloat16_values(bits: Any) -> Any:
    """Of an array of uint16."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def float16_values(bits: Any) -> Any:
    """Of an array of uint16."""
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


def _exp2(x: float) -> Any:
    return np.float32(math.exp2(x) if x < 128 else x * math.inf)


def _log2(x: float) -> Any:
    return np.float32(math.log2(x) if x > 0 else x * math.inf - math.inf)


def _raising(x: float) -> tuple[Any, Any]:
    exponent = max(int(np.float32(x).view(np.uint32)) >> 23 & 255, 15)
    return np.float32(2.0 ** (141 - exponent)), np.float32(2.0 ** (exponent - 141))


def _reciprocal(x: float) -> Any:
    return np.float32(1 / float(x) if x else math.copysign(math.inf, x))


def _pick_bytes(a: int, b: int, selector: int) -> Any:
    there, chosen = int(a) | int(b) << 32, int(selector)
    low, second, third, high = (there >> 8 * (chosen >> place & 7) & 255 for place in (0, 4, 8, 12))
    return np.uint32(low | second << 8 | third << 16 | high << 24)


exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", "f", "f", _exp2, pure=True)
"""2 to the power of x, to 2 units in the last place."""

log2 = instruction("lg2.approx.ftz.f32 $0, $1;", "f", "f", _log2, pure=True)  # the power of 2 that x is, to 22 bits

raising = instruction(
    "{ .reg .b32 t; mov.b32 t, $2; and.b32 t, t, 0x7f800000; max.u32 t, t, 0x07800000; sub.u32 t, 0x86000000, t; "
    "mov.b32 $0, t; sub.u32 t, 0x7f000000, t; mov.b32 $1, t; }",
    "ff", "f", _raising, pure=True,
)  # fmt: skip
"""The power of 2 that brings a number into f16's highest but one, from 2**14 on (or nearer to it, from below 2**-112),
and the power that takes it back."""

reciprocal = instruction("rcp.approx.ftz.f32 $0, $1;", "f", "f", _reciprocal, pure=True)
"""1 / x, to one unit in the last place."""

maximum = instruction("max.f32 $0, $1, $2;", "f", "ff", lambda a, b: np.float32(max(a, b)), pure=True)
"""The greater of two."""

fma = instruction(
    "fma.rn.f32 $0, $1, $2, $3;", "f", "fff", lambda a, b, c: np.float32(float(a) * float(b) + float(c)), pure=True
)
"""a * b + c, rounded once."""

divide = instruction(
    "{ .reg .u32 a, b; cvt.u32.u64 a, $1; cvt.u32.u64 b, $2; div.u32 a, a, b; cvt.u64.u32 $0, a; }",
    "l", "ll", lambda a, b: a // b, pure=True,
)  # fmt: skip
"""a // b of counts below 2**32: a fifth of the instructions of a 64-bit division."""

clamp = instruction(
    "{ .reg .s32 a, b, c; cvt.u32.u64 a, $1; cvt.u32.u64 b, $2; cvt.u32.u64 c, $3; min.s32 a, a, c; max.s32 a, a, b; "
    "cvt.u64.u32 $0, a; }",
    "l", "lll", lambda count, low, high: max(min(count, high), low), pure=True,
)  # fmt: skip
"""The nearest to a count that is not below `low` and, where this is not either, not above `high`; counts below 2**31:
a third of the instructions that 64 bits take."""

if_within = instruction(
    "{ .reg .s32 t, l, h; .reg .pred p; cvt.u32.u64 t, $2; cvt.u32.u64 l, $3; cvt.u32.u64 h, $4; "
    "setp.ge.s32 p, t, l; setp.lt.and.s32 p, t, h, p; selp.f32 $0, $1, 0fFF800000, p; }",
    "f", "flll", lambda x, count, low, high: x if low <= count < high else np.float32(-math.inf), pure=True,
)  # fmt: skip
"""x where `low <= count < high`, and minus infinity elsewhere; counts between -2**31 and 2**31."""

pick_bytes = instruction("prmt.b32 $0, $1, $2, $3;", "r", "rrr", _pick_bytes, pure=True)
"""Four bytes out of the eight of two words; one hexadecimal digit of the selector for each."""


class Format(NamedTuple):
    """A format of numbers in memory: how they get into 32-bit words and out again."""

    name: str  # as instructions call it
    per_word: int  # numbers in a word of 32 bits
    pack: Any  # two floats as one word, the first in its lower half; of fp32 the first alone
    low: Any  # the lower half of a word as a float; of fp32 the word
    high: Any  # the upper half of a word as a float
    values: Any  # the floats that an array of uint16 stands for, in the simulator


def _low(values: Any) -> Any:
    table = values(np.arange(1 << 16))
    return lambda word: table[int(word) & 0xFFFF]


def _high(values: Any) -> Any:
    table = values(np.arange(1 << 16))
    return lambda word: table[int(word) >> 16]


def _float(word: int) -> Any:
    return np.uint32(word).view(np.float32)


FORMATS = {
    torch.float32: Format(
        "f32",
        1,
        instruction("mov.b32 $0, $1;", "r", "ff", lambda value, _: np.float32(value).view(np.uint32), pure=True),
        instruction("mov.b32 $0, $1;", "f", "r", _float, pure=True),
        None,
        None,
    ),
    torch.bfloat16: Format(
        "bf16",
        2,
        instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff", _bfloat16_bits, pure=True),
        instruction("{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", "f", "r", _low(bfloat16_values), pure=True),
        instruction(
            "{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", "f", "r", _high(bfloat16_values), pure=True
        ),
        bfloat16_values,
    ),
    torch.float16: Format(
        "f16",
        2,
        instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "r", "ff", _float16_bits, pure=True),
        instruction(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "f", "r", _low(float16_values), pure=True
        ),
        instruction(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }", "f", "r", _high(float16_values), pure=True
        ),
        float16_values,
    ),
}

HALVES = {dtype: number for dtype, number in FORMATS.items() if number.per_word == 2}
"""The formats that tensor cores multiply without loss."""


@inlined
def tanh(x: float) -> float:
    """From the exponential: the hardware's own tanh has 11 bits."""
    return float32(1) - float32(2) * reciprocal(exp2(x * float32(2.8853900817779268)) + float32(1))


def make_turn(dtype: torch.dtype) -> Any:
    """A function for kernels that rotates the numbers in a word, with their counterparts in another and a sign."""
    number = FORMATS[dtype]
    pack, low, high = number.pack, number.low, number.high

    @inlined
    def turn_single(x: int, y: int, cos: int, sin: int, sign: float) -> int:
        return pack(fma(low(x), low(cos), sign * low(y) * low(sin)), float32(0))

    @inlined
    def turn_pair(x: int, y: int, cos: int, sin: int, sign: float) -> int:
        return pack(
            fma(low(x), low(cos), sign * low(y) * low(sin)), fma(high(x), high(cos), sign * high(y) * high(sin))
        )

    return turn_single if number.per_word == 1 else turn_pair
