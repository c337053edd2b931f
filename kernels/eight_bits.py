"""Numbers of 8 bits, four in a word: how they get out of it, and into it.

Every one of them is a bf16 and an f16 as well, so out of a word they come without loss. To f16 Hopper converts e4m3 by
itself. Elsewhere bits are shifted to where the wider format has them, which leaves the exponent of e4m3 short of a
constant, also in numbers below its normal ones, and a product puts that right. e4m3's own NaN, which `quantize` never
makes, is 480 or -480 that way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from .ptx import instruction


def _e4m3_value(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    size = math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9)
    return math.copysign(size, -(code >> 7))


def _e4m3_or_nan(code: int) -> float:
    return math.nan if code & 127 == 127 else _e4m3_value(code)


def _int8_value(code: int) -> float:
    return float(code - (code >> 7 << 8))


def _e4m3_code(value: float) -> Any:
    size = min(abs(float(value)), 448.0)
    exponent = math.frexp(max(size, 2**-6))[1] + 6  # of the step: an eighth of a power of two, or of the least
    code = (exponent << 3) - 8 + round(math.ldexp(size, 10 - exponent))
    return np.uint32(code | (0x80 if math.copysign(1, value) < 0 else 0))


def _int8_code(value: float) -> Any:
    return np.uint32(round(max(min(float(value), 127.0), -127.0)) & 0xFFFFFFFF)


def _number(value_of: Callable[[int], float], index: int) -> Any:
    table = [np.float32(value_of(code)) for code in range(256)]
    return lambda word: table[int(word) >> 8 * index & 255]


def _pair(value_of: Callable[[int], float]) -> Any:
    table = [int(np.float32(value_of(code)).view(np.uint32)) >> 16 for code in range(256)]

    def pair(a: int, b: int, selector: int) -> Any:
        there, chosen = int(a) | int(b) << 32, int(selector)
        low, high = (there >> 8 * (chosen >> place & 7) & 255 for place in (0, 8))
        return np.uint32(table[low] | table[high] << 16)

    return pair


def _half_of_word(value_of: Callable[[int], float], shift: int) -> Any:
    table = [int(np.float16(value_of(code)).view(np.uint16)) for code in range(256)]
    return lambda word: np.uint32(table[int(word) >> shift & 255] | table[int(word) >> shift + 8 & 255] << 16)


def _pack_bytes(*codes: int) -> Any:
    return np.uint32(sum((int(code) & 255) << 8 * index for index, code in enumerate(codes)))


def _e4m3_half(index: int) -> Any:
    """Two of a word's numbers as f16; 0: the lower, 1: the upper."""
    return instruction(
        f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {'lh'[index]}; }}",
        "r", "r", _half_of_word(_e4m3_or_nan, 16 * index), pure=True,
        before_hopper=f"{{ .reg .b32 p, m, s; prmt.b32 p, $1, 0, {('0x1404', '0x3424')[index]}; shr.u32 m, p, 1; "
        "and.b32 m, m, 0x3f803f80; lop3.b32 m, p, 0x80008000, m, 0xea; mov.b32 s, 0x5c005c00; mul.rn.f16x2 $0, m, s; }",
    )  # fmt: skip


def _int8_half(index: int) -> Any:
    """1024 + 128 + the number, as f16 has it with its bits below those of 1024, less 1152."""
    return instruction(
        "{ .reg .b32 p, s; xor.b32 p, $1, 0x80808080; mov.b32 s, 0x64646464; "
        f"prmt.b32 p, p, s, {('0x4140', '0x4342')[index]}; mov.b32 s, 0x64806480; sub.rn.f16x2 $0, p, s; }}",
        "r", "r", _half_of_word(_int8_value, 16 * index), pure=True,
    )  # fmt: skip


class EightBits(NamedTuple):
    """A format of 8-bit numbers."""

    numbers: tuple[Any, ...]
    """Each of a word's four numbers as a float, from the lowest on."""
    pair: Any
    """Two numbers, out of the eight of two words, as two bf16 in a word. Of the selector's hexadecimal digits the lower
    two say which is the first, and the higher two, which is the second."""
    lower: Any
    """A word's numbers 0 and 1 as two f16 in a word: fewer instructions than to bf16."""
    upper: Any
    """Its numbers 2 and 3."""
    code: Any
    """A float as the lowest byte of a word, rounded to nearest even, not beyond the greatest number. Of NaN: any."""


EIGHT_BITS = {
    torch.float8_e4m3fn: EightBits(
        tuple(
            instruction(
                f"{{ .reg .b32 t, m; shl.b32 t, $1, {24 - 8 * index}; shr.u32 m, t, 4; and.b32 m, m, 0x07f00000; "
                "lop3.b32 m, t, 0x80000000, m, 0xea; .reg .f32 f; mov.b32 f, m; mul.f32 $0, f, 0f7B800000; }",
                "f", "r", _number(_e4m3_value, index), pure=True,
            )
            for index in range(4)
        ),
        instruction(
            "{ .reg .b32 p, m, s, z; prmt.b32 p, $1, $2, $3; shr.u32 m, p, 4; and.b32 m, m, 0x07f007f0; "
            "lop3.b32 m, p, 0x80008000, m, 0xea; mov.b32 s, 0x7b807b80; mov.b32 z, 0x80008000; "
            "fma.rn.bf16x2 $0, m, s, z; }",
            "r", "rrr", _pair(_e4m3_value), pure=True,
        ),
        _e4m3_half(0),
        _e4m3_half(1),
        # Normal numbers are rounded as integers; those below as multiples of a step, by adding what has that step.
        instruction(
            "{ .reg .f32 a, t; .reg .b32 n, l, d, s; .reg .pred p; abs.f32 a, $1; min.f32 a, a, 0f43E00000; "
            "mov.b32 n, a; bfe.u32 l, n, 20, 1; add.u32 n, n, l; add.u32 n, n, 0xc407ffff; shr.u32 n, n, 20; "
            "add.f32 t, a, 0f46800000; mov.b32 d, t; sub.u32 d, d, 0x46800000; "
            "setp.lt.f32 p, a, 0f3C800000; selp.b32 n, d, n, p; "
            "mov.b32 s, $1; shr.u32 s, s, 24; lop3.b32 $0, s, 0x80, n, 0xea; }",
            "r", "f", _e4m3_code, pure=True,
        ),
    ),
    torch.int8: EightBits(
        tuple(
            instruction(
                f"{{ .reg .s32 t; bfe.s32 t, $1, {8 * index}, 8; cvt.rn.f32.s32 $0, t; }}",
                "f", "r", _number(_int8_value, index), pure=True,
            )
            for index in range(4)
        ),
        # 128 + the lower 7 bits, less 128, or 256 where the sign is set: all of them whole numbers in bf16.
        instruction(
            "{ .reg .b32 p, m, s, n; prmt.b32 p, $1, $2, $3; lop3.b32 m, p, 0x007f007f, 0x43004300, 0xea; "
            "lop3.b32 s, p, 0x00800080, 0x43004300, 0xea; mov.b32 n, 0xbf80bf80; fma.rn.bf16x2 $0, s, n, m; }",
            "r", "rrr", _pair(_int8_value), pure=True,
        ),
        _int8_half(0),
        _int8_half(1),
        instruction(
            "{ .reg .f32 t; max.f32 t, $1, 0fC2FE0000; min.f32 t, t, 0f42FE0000; cvt.rni.s32.f32 $0, t; }",
            "r", "f", _int8_code, pure=True,
        ),
    ),
}  # fmt: skip
"""By dtype."""

pack_bytes = instruction(
    "{ .reg .b32 l, h; prmt.b32 l, $1, $2, 0x0040; prmt.b32 h, $3, $4, 0x0040; prmt.b32 $0, l, h, 0x5410; }",
    "r", "rrrr", _pack_bytes, pure=True,
)  # fmt: skip
"""The lowest bytes of four words as one, the first at the bottom."""
