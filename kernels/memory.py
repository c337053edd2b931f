"""Instructions on numbers and memory: loads and stores, copies to shared memory, arithmetic, formats of numbers."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from .compiler import float32, inlined, instruction

KINDS: dict[str, tuple[str, Any, Any]] = {
    "u32": ("r", ctypes.c_uint32, np.uint32),
    "f32": ("f", ctypes.c_float, np.float32),
}
"""By a PTX type: its register class, and what it is in the simulator."""


def _access(kind: str, count: int, place: int, first: int, where: str, code: str) -> str:
    """A load or store of some numbers by the address in operand `place`; addresses in shared memory have 32 bits."""
    operands = ", ".join(f"${first + index}" for index in range(count))
    operands, vector = (f"{{{operands}}}", f".v{count}") if count > 1 else (operands, "")
    if "shared" not in where:
        return code.format(name=f"{where}{vector}.{kind}", at=f"${place}", operands=operands)
    access = code.format(name=f"{where}{vector}.{kind}", at="a", operands=operands)
    return f"{{ .reg .u32 a; cvt.u32.u64 a, ${place}; {access} }}"


def make_load(where: str, kind: str, count: int = 1, *, reads_only: bool = False) -> Any:
    """A function for kernels that loads numbers from an address, which is a multiple of their bytes; several come as a
    tuple. `where` is the instruction's state space and cache hints."""
    register, c_kind, number = KINDS[kind]
    c_kinds, nbytes = c_kind * count, 4 * count

    def load_one(address: int) -> Any:
        return number(c_kind.from_address(int(address)).value)

    def load_several(address: int) -> tuple[Any, ...]:
        assert address % nbytes == 0, "misaligned"
        return tuple(map(number, c_kinds.from_address(int(address))))

    asm = _access(kind, count, count, 0, where, "ld.{name} {operands}, [{at}];")
    return instruction(asm, register * count, "l", load_several if count > 1 else load_one, reads_only=reads_only)


def make_store(where: str, kind: str, count: int = 1) -> Any:
    """A function for kernels that stores numbers to an address, which is a multiple of their bytes."""
    register, c_kind, _ = KINDS[kind]
    c_kinds, nbytes, plain = c_kind * count, 4 * count, int if kind == "u32" else float

    def store(address: int, *values: Any) -> None:
        assert address % nbytes == 0, "misaligned"
        c_kinds.from_address(int(address))[:] = [plain(value) for value in values]

    return instruction(
        _access(kind, count, 0, 1, where, "st.{name} [{at}], {operands};"), "", "l" + register * count, store
    )


def _trap() -> None:
    raise RuntimeError("trap: a kernel was asked to write where it must not")


def _increment(address: int, last: int) -> int:
    word = ctypes.c_uint32.from_address(int(address))
    old = word.value
    word.value = 0 if old >= last else old + 1
    return old


def _load_i32(asm: str, *, reads_only: bool = False) -> Any:
    return instruction(
        asm, "l", "l", lambda address: ctypes.c_int32.from_address(int(address)).value, reads_only=reads_only
    )


load_i32 = _load_i32("{ .reg .s32 t; ld.global.nc.s32 t, [$1]; cvt.s64.s32 $0, t; }", reads_only=True)
# An integer that this launch may write to.
load_counter = _load_i32("{ .reg .s32 t; ld.global.s32 t, [$1]; cvt.s64.s32 $0, t; }")
load_f32 = make_load("global.nc", "f32", reads_only=True)
load_4, load_8 = (make_load("global.nc", "u32", count, reads_only=True) for count in (1, 2))
load_16_cached = make_load("global.nc", "u32", 4, reads_only=True)  # neighbours of these bytes are read again soon
load_16_written = make_load("global", "u32", 4)  # this launch may write to these bytes

# Bytes that are read once bypass the first cache. 64, 128 or 256 bytes come to the second: no more than are read next,
# since the rest would push others out before it is wanted.
load_4_once, load_8_once = (
    make_load("global.nc.L1::no_allocate.L2::64B", "u32", count, reads_only=True) for count in (1, 2)
)
load_16_once = {
    nbytes: make_load(f"global.nc.L1::no_allocate.L2::{nbytes}B", "u32", 4, reads_only=True)
    for nbytes in (64, 128, 256)
}
load_16 = load_16_once[256]  # 16 bytes of a long run

store_4, store_8, store_16 = (make_store("global", "u32", count) for count in (1, 2, 4))
store_f32, store_f32x2, store_f32x4 = (make_store("global", "f32", count) for count in (1, 2, 4))

# What another block wrote during this launch is in the second cache; the first may hold older bytes.
load_fresh_f32, load_fresh_f32x4 = (make_load("global.cg", "f32", count) for count in (1, 4))

increment = instruction("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "r", "lr", _increment)
"""Counts up at an address, from `last` on to 0 again, and gives what was there before. All blocks see one order."""

trap = instruction("trap;", "", "", _trap)  # stops the kernel with an error that ends the context


def _copy_16(target: int, source: int) -> None:
    assert (target | source) % 16 == 0, "misaligned"
    ctypes.memmove(int(target), int(source), 16)


_to_shared = instruction("cvta.to.shared.u64 $0, $1;", "l", "l", lambda address: address, pure=True)


@inlined
def shared_address(array: Any) -> int:
    """The address of a shared array, as instructions on shared memory want it."""
    return _to_shared(array.ctypes.data)


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


store_shared_8, store_shared_16 = (make_store("shared", "u32", count) for count in (2, 4))
store_shared_f32, store_shared_f32x4 = (make_store("shared", "f32", count) for count in (1, 4))
load_shared_f32, load_shared_f32x4 = (make_load("shared", "f32", count) for count in (1, 4))
# Loaded each time: registers are for values that are needed more often.
load_shared_8 = make_load("volatile.shared", "u32", 2, reads_only=True)

store_shared_i32 = instruction(
    "{ .reg .u32 a, v; cvt.u32.u64 a, $0; cvt.u32.u64 v, $1; st.shared.u32 [a], v; }", "", "ll",
    lambda address, value: ctypes.memmove(int(address), ctypes.byref(ctypes.c_int32(int(value))), 4),
)  # fmt: skip
load_shared_i32 = _load_i32("{ .reg .u32 a; .reg .s32 v; cvt.u32.u64 a, $1; ld.shared.s32 v, [a]; cvt.s64.s32 $0, v; }")

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


def _raising(x: float) -> tuple[Any, Any]:
    exponent = max(int(np.float32(x).view(np.uint32)) >> 23 & 255, 15)
    return np.float32(2.0 ** (141 - exponent)), np.float32(2.0 ** (exponent - 141))


def _pick_bytes(a: int, b: int, selector: int) -> Any:
    there, chosen = int(a) | int(b) << 32, int(selector)
    low, second, third, high = (there >> 8 * (chosen >> place & 7) & 255 for place in (0, 4, 8, 12))
    return np.uint32(low | second << 8 | third << 16 | high << 24)


# To 2 units in the last place, to 22 bits, and to 1 unit in the last place.
exp2, log2, reciprocal = (
    instruction(f"{name}.approx.ftz.f32 $0, $1;", "f", "f", meaning, pure=True)
    for name, meaning in (
        ("ex2", lambda x: np.float32(math.exp2(x) if x < 128 else x * math.inf)),
        ("lg2", lambda x: np.float32(math.log2(x) if x > 0 else x * math.inf - math.inf)),
        ("rcp", lambda x: np.float32(1 / float(x) if x else math.copysign(math.inf, x))),
    )
)
maximum = instruction("max.f32 $0, $1, $2;", "f", "ff", lambda a, b: np.float32(max(a, b)), pure=True)
fma = instruction(  # a * b + c, rounded once
    "fma.rn.f32 $0, $1, $2, $3;", "f", "fff", lambda a, b, c: np.float32(float(a) * float(b) + float(c)), pure=True
)

# The power of 2 that brings a number into f16's highest but one, from 2**14 on (or nearer to it, from below 2**-112),
# and the power that takes it back.
raising = instruction(
    "{ .reg .b32 t; mov.b32 t, $2; and.b32 t, t, 0x7f800000; max.u32 t, t, 0x07800000; sub.u32 t, 0x86000000, t; "
    "mov.b32 $0, t; sub.u32 t, 0x7f000000, t; mov.b32 $1, t; }",
    "ff", "f", _raising, pure=True,
)  # fmt: skip

# a // b of counts below 2**32: a fifth of the instructions of a 64-bit division.
divide = instruction(
    "{ .reg .u32 a, b; cvt.u32.u64 a, $1; cvt.u32.u64 b, $2; div.u32 a, a, b; cvt.u64.u32 $0, a; }",
    "l", "ll", lambda a, b: a // b, pure=True,
)  # fmt: skip

# The nearest to a count that is not below `low` and, where this is not either, not above `high`; counts below 2**31: a
# third of the instructions that 64 bits take.
clamp = instruction(
    "{ .reg .s32 a, b, c; cvt.u32.u64 a, $1; cvt.u32.u64 b, $2; cvt.u32.u64 c, $3; min.s32 a, a, c; max.s32 a, a, b; "
    "cvt.u64.u32 $0, a; }",
    "l", "lll", lambda count, low, high: max(min(count, high), low), pure=True,
)  # fmt: skip

# x where `low <= count < high`, and minus infinity elsewhere; counts between -2**31 and 2**31.
if_within = instruction(
    "{ .reg .s32 t, l, h; .reg .pred p; cvt.u32.u64 t, $2; cvt.u32.u64 l, $3; cvt.u32.u64 h, $4; "
    "setp.ge.s32 p, t, l; setp.lt.and.s32 p, t, h, p; selp.f32 $0, $1, 0fFF800000, p; }",
    "f", "flll", lambda x, count, low, high: x if low <= count < high else np.float32(-math.inf), pure=True,
)  # fmt: skip

# Four bytes out of the eight of two words; one hexadecimal digit of the selector for each.
pick_bytes = instruction("prmt.b32 $0, $1, $2, $3;", "r", "rrr", _pick_bytes, pure=True)


class Format(NamedTuple):
    """A format of numbers in memory: how they get into 32-bit words and out again."""

    name: str  # as instructions call it
    per_word: int  # numbers in a word of 32 bits
    pack: Any  # two floats as one word, the first in its lower half; of fp32 the first alone
    low: Any  # the lower half of a word as a float; of fp32 the word
    high: Any  # the upper half of a word as a float
    values: Any  # the floats that an array of uint16 stands for, in the simulator


def _half(dtype: torch.dtype, bits_of: Any, low: str, high: str) -> Format:
    """A format of 16 bits: its floats' meaning in a word, and the instructions that give a half of one."""
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    table = torch.arange(1 << 16).to(torch.int16).view(dtype).float().numpy()
    return Format(
        name, 2, instruction(f"cvt.rn.{name}x2.f32 $0, $2, $1;", "r", "ff", bits_of, pure=True),
        instruction(low, "f", "r", lambda word: table[int(word) & 0xFFFF], pure=True),
        instruction(high, "f", "r", lambda word: table[int(word) >> 16], pure=True),
        lambda bits: table[np.asarray(bits, np.uint16)],
    )  # fmt: skip


FORMATS = {
    torch.float32: Format(
        "f32", 1,
        instruction("mov.b32 $0, $1;", "r", "ff", lambda value, _: np.float32(value).view(np.uint32), pure=True),
        instruction("mov.b32 $0, $1;", "f", "r", lambda word: np.uint32(word).view(np.float32), pure=True), None, None,
    ),
    torch.bfloat16: _half(
        torch.bfloat16, _bfloat16_bits, "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }",
        "{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }",
    ),
    torch.float16: _half(
        torch.float16, _float16_bits, "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }",
    ),
}  # fmt: skip

# The formats that tensor cores multiply without loss.
HALVES = {dtype: number for dtype, number in FORMATS.items() if number.per_word == 2}


@inlined
def tanh(x: float) -> float:
    """From the exponential: the hardware's own tanh has 11 bits."""
    return float32(1) - float32(2) * reciprocal(exp2(x * float32(2.8853900817779268)) + float32(1))


def make_turn(dtype: torch.dtype) -> Any:
    """A function for kernels that rotates the numbers in a word, with their counterparts in another and a sign."""
    number = FORMATS[dtype]
    pack, low, high, paired = number.pack, number.low, number.high, number.per_word == 2

    @inlined
    def turn(x: int, y: int, cos: int, sin: int, sign: float) -> int:
        first = fma(low(x), low(cos), sign * low(y) * low(sin))
        return pack(first, fma(high(x), high(cos), sign * high(y) * high(sin)) if paired else float32(0))

    return turn
