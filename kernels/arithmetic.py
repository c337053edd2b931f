"""Numbers: exponentials as the hardware has them, and two 16-bit floats in a 32-bit word."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from .ptx import float32, inlined, instruction

LOG2E = 1.4426950408889634
NEGATIVE_INFINITY = float("-inf")
FLOOR = -1e30
"""A maximum below all sensible scores; infinite ones would have no difference."""


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

log2 = instruction("lg2.approx.ftz.f32 $0, $1;", "f", "f", _log2, pure=True)
"""The power of 2 that x is, to 22 bits."""

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

    name: str
    """As instructions call it."""
    per_word: int
    """Numbers in a word of 32 bits."""
    pack: Any
    """Two floats as one word, the first in its lower half; of fp32 the first alone."""
    low: Any
    """The lower half of a word as a float; of fp32 the word."""
    high: Any
    """The upper half of a word as a float."""
    values: Any
    """The floats that an array of uint16 stands for, in the simulator."""


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
