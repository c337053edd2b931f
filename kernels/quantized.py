"""8-bit K and V: a byte for each number and a scale for each token and head, in torch and in kernels, bit for bit.

A head's scale maps its largest number to the largest that a byte holds:

    a head with a NaN or an infinity     its scale is NaN and its numbers are 0: all of it reads as NaN
    a head of zeros, or below 2**-100    its numbers are 0
    a head of width 0                    it has no numbers, and the scale of a head of zeros

A given scale, as of a head of a whole sequence, is kept as it is:

    a number beyond the largest          becomes the largest, with its sign; an infinity as well
    a NaN                                becomes 0
    a scale of NaN or infinity           all numbers are 0: with that scale they read as NaN
    a scale that is 0, negative or below 2**-100    all numbers are 0

Each 8-bit number is a bf16 and an f16 as well, so it is read without loss. Hopper converts e4m3 to f16 in hardware.
Elsewhere bits are shifted to where the wider format has them; the exponent is then short of a constant, which a product
adds. e4m3's NaN, which `quantize` never writes, reads as 480 or -480 that way.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cuda

from .compiler import float32, inlined, instruction
from .memory import FORMATS, load_8, load_16, load_f32, make_turn, store_4, store_f32
from .warp import shuffle_xor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The greatest number of each format; that of int8 has a negative."""

LEAST = 2.0**-100
"""A head is 0 if all of it, or a scale that is given, is below: so scales, and what divides by them, stay normal
numbers."""


def quantize(
    states: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds K or V to 8 bits, to nearest even: `head / scale`, where a head's scale is `max(abs(head)) / largest`, and
    `largest` is 448 for e4m3fn and 127 for int8.

    Args:
        states: `[..., head_dim]`, floating-point.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        scales: fp32, broadcast to `[...]`: the scales to use, for example `[num_kv_heads]` of a sequence. Numbers too
            large for them become the largest of the format; NaN becomes 0. None: one for each head of `states`.

    Returns:
        8-bit numbers like `states`, and fp32 scales `[...]`, or those that were given.

    Raises:
        ValueError: states are a single number.
        TypeError: there is no such 8-bit format, or states or scales have another dtype.
    """
    _check_states(states)
    if scales is not None and scales.dtype != torch.float32:
        raise TypeError(f"got scales of {scales.dtype}; they must be torch.float32")
    largest, states = _largest(dtype), states.float()
    # Products, which every device rounds alike: torch makes divisions by a number products on some of them.
    if scales is None:
        top = _top(states, -1)
        finite = top < torch.inf
        scales = torch.where(finite, top * (1 / largest), torch.nan)
        usable, numbers = finite & (top >= LEAST), states * (top.reciprocal() * largest)[..., None]
    else:
        usable, numbers = (scales >= LEAST) & (scales < torch.inf), states * scales.reciprocal()[..., None]
    numbers = torch.where(usable[..., None] & ~numbers.isnan(), numbers, 0).clamp(-largest, largest)
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype), scales


def sequence_scales(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales for K or V of a whole sequence, for which none of these tokens is too large.

    Later tokens may be: their numbers are then limited to the largest of the format. Multiply the scales, by 2 for
    example, to leave room.

    Args:
        states: `[tokens, num_kv_heads, head_dim]`, floating-point: of a prompt, or of calibration data.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.

    Returns:
        fp32 `[num_kv_heads]`: NaN for a head that holds a NaN or an infinity, 1 for one that is 0.

    Raises:
        ValueError: states have another shape, or no token.
        TypeError: there is no such 8-bit format, or states have another dtype.
    """
    _check_states(states)
    if states.dim() != 3 or not states.shape[0]:
        raise ValueError(
            f"got states {list(states.shape)}; they must be [tokens, num_kv_heads, head_dim], of a token or more"
        )
    top = _top(states.float(), (0, 2))
    scales = torch.where(top < torch.inf, top * (1 / _largest(dtype)), torch.nan)
    return torch.where(scales < LEAST, 1, scales)


def _check_states(states: torch.Tensor) -> None:
    if not states.dtype.is_floating_point:
        raise TypeError(f"got states of {states.dtype}; they must be floating-point")
    if not states.dim():
        raise ValueError("got states []; they must be [..., head_dim]")


def _top(states: torch.Tensor, dims: int | tuple[int, ...]) -> torch.Tensor:
    """The greatest size of a number along dimensions, the last of which is the width of heads; 0 if that is 0."""
    if not states.shape[-1]:
        states = states.new_zeros(*states.shape[:-1], 1)
    return states.abs().amax(dims)


def _largest(dtype: torch.dtype) -> float:
    if dtype not in LARGEST:
        raise TypeError(f"asked for {dtype}; it must be one of {', '.join(map(str, LARGEST))}")
    return LARGEST[dtype]


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiplies 8-bit numbers by their scales.

    Args:
        numbers: `[..., head_dim]`, e4m3fn or int8.
        scales: `[...]`.
        dtype: of the result, floating-point; the product is fp32 or wider.

    Returns:
        `[..., head_dim]` of `dtype`.

    Raises:
        TypeError: numbers are in no such 8-bit format, or the result would not be floating-point.
    """
    if numbers.dtype not in LARGEST:
        raise TypeError(f"got numbers of {numbers.dtype}; they must be one of {', '.join(map(str, LARGEST))}")
    if not dtype.is_floating_point:
        raise TypeError(f"asked for {dtype}; it must be floating-point")
    wide = torch.promote_types(dtype, torch.float32)
    return (numbers.to(wide) * scales.to(wide)[..., None]).to(dtype)


# What codes stand for, in the simulator; of e4m3 also as shifted bits read.
_INT8_VALUES, _E4M3_VALUES = (
    torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy() for dtype in (torch.int8, torch.float8_e4m3fn)
)
_E4M3_SHIFTED = _E4M3_VALUES.copy()
_E4M3_SHIFTED[[127, 255]] = 480, -480


def _e4m3_code(value: float) -> Any:
    size = min(abs(float(value)), 448.0)
    exponent = math.frexp(max(size, 2**-6))[1] + 6  # of the step: an eighth of a power of two, or of the least
    code = (exponent << 3) - 8 + round(math.ldexp(size, 10 - exponent))
    return np.uint32(code | (0x80 if math.copysign(1, value) < 0 else 0))


def _int8_code(value: float) -> Any:
    return np.uint32(round(max(min(float(value), 127.0), -127.0)) & 0xFFFFFFFF)


def _number(values: Any, index: int) -> Any:
    return lambda word: values[int(word) >> 8 * index & 255]


def _pair(values: Any) -> Any:
    table = [int(bits) >> 16 for bits in values.view(np.uint32)]

    def pair(a: int, b: int, selector: int) -> Any:
        there, chosen = int(a) | int(b) << 32, int(selector)
        low, high = (there >> 8 * (chosen >> place & 7) & 255 for place in (0, 8))
        return np.uint32(table[low] | table[high] << 16)

    return pair


def _half_of_word(values: Any, shift: int) -> Any:
    table = [int(bits) for bits in values.astype(np.float16).view(np.uint16)]
    return lambda word: np.uint32(table[int(word) >> shift & 255] | table[int(word) >> shift + 8 & 255] << 16)


def _pack_bytes(*codes: int) -> Any:
    return np.uint32(sum((int(code) & 255) << 8 * index for index, code in enumerate(codes)))


def _e4m3_half(index: int) -> Any:
    """Two of a word's numbers as f16; 0: the lower, 1: the upper."""
    return instruction(
        f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {'lh'[index]}; }}",
        "r", "r", _half_of_word(_E4M3_VALUES, 16 * index), pure=True,
        before_hopper=f"{{ .reg .b32 p, m, s; prmt.b32 p, $1, 0, {('0x1404', '0x3424')[index]}; shr.u32 m, p, 1; "
        "and.b32 m, m, 0x3f803f80; lop3.b32 m, p, 0x80008000, m, 0xea; mov.b32 s, 0x5c005c00; mul.rn.f16x2 $0, m, s; }",
    )  # fmt: skip


def _int8_half(index: int) -> Any:
    """1024 + 128 + the number, as f16 has it with its bits below those of 1024, less 1152."""
    return instruction(
        "{ .reg .b32 p, s; xor.b32 p, $1, 0x80808080; mov.b32 s, 0x64646464; "
        f"prmt.b32 p, p, s, {('0x4140', '0x4342')[index]}; mov.b32 s, 0x64806480; sub.rn.f16x2 $0, p, s; }}",
        "r", "r", _half_of_word(_INT8_VALUES, 16 * index), pure=True,
    )  # fmt: skip


class EightBits(NamedTuple):
    """A format of 8-bit numbers."""

    numbers: tuple[Any, ...]  # each of a word's four numbers as a float, from the lowest on
    pair: Any  # two of the eight numbers of two words as two bf16: two hexadecimal digits of the selector for each
    lower: Any  # a word's numbers 0 and 1 as two f16 in a word: fewer instructions than to bf16
    upper: Any  # its numbers 2 and 3
    code: Any  # a float as a word's lowest byte, rounded to nearest even, not beyond the largest number; of NaN: any


EIGHT_BITS = {
    torch.float8_e4m3fn: EightBits(
        tuple(
            instruction(
                f"{{ .reg .b32 t, m; shl.b32 t, $1, {24 - 8 * index}; shr.u32 m, t, 4; and.b32 m, m, 0x07f00000; "
                "lop3.b32 m, t, 0x80000000, m, 0xea; .reg .f32 f; mov.b32 f, m; mul.f32 $0, f, 0f7B800000; }",
                "f", "r", _number(_E4M3_SHIFTED, index), pure=True,
            )
            for index in range(4)
        ),
        instruction(
            "{ .reg .b32 p, m, s, z; prmt.b32 p, $1, $2, $3; shr.u32 m, p, 4; and.b32 m, m, 0x07f007f0; "
            "lop3.b32 m, p, 0x80008000, m, 0xea; mov.b32 s, 0x7b807b80; mov.b32 z, 0x80008000; "
            "fma.rn.bf16x2 $0, m, s, z; }",
            "r", "rrr", _pair(_E4M3_SHIFTED), pure=True,
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
                "f", "r", _number(_INT8_VALUES, index), pure=True,
            )
            for index in range(4)
        ),
        # 128 + the lower 7 bits, less 128, or 256 where the sign is set: all of them whole numbers in bf16.
        instruction(
            "{ .reg .b32 p, m, s, n; prmt.b32 p, $1, $2, $3; lop3.b32 m, p, 0x007f007f, 0x43004300, 0xea; "
            "lop3.b32 s, p, 0x00800080, 0x43004300, 0xea; mov.b32 n, 0xbf80bf80; fma.rn.bf16x2 $0, s, n, m; }",
            "r", "rrr", _pair(_INT8_VALUES), pure=True,
        ),
        _int8_half(0),
        _int8_half(1),
        instruction(
            "{ .reg .f32 t; max.f32 t, $1, 0fC2FE0000; min.f32 t, t, 0f42FE0000; cvt.rni.s32.f32 $0, t; }",
            "r", "f", _int8_code, pure=True,
        ),
    ),
}  # fmt: skip

# The lowest bytes of four words as one, the first at the bottom.
pack_bytes = instruction(
    "{ .reg .b32 l, h; prmt.b32 l, $1, $2, 0x0040; prmt.b32 h, $3, $4, 0x0040; prmt.b32 $0, l, h, 0x5410; }",
    "r", "rrrr", _pack_bytes, pure=True,
)  # fmt: skip

WARPS = 4  # of a block of threads, as `row_copy.THREADS`
INFINITY, NAN = math.inf, math.nan


def _greater(a: float, b: float) -> Any:
    return np.float32(max(a, abs(b)) if a == a and b == b else NAN)


# The larger of a number and the size of another; NaN if one of them is.
greater = instruction("{ .reg .f32 t; abs.f32 t, $2; max.NaN.f32 $0, $1, t; }", "f", "ff", _greater, pure=True)
# 1 / x, rounded to nearest.
exact_reciprocal = instruction("rcp.rn.f32 $0, $1;", "f", "f", lambda x: np.float32(1) / np.float32(x), pure=True)


def make_load_four(dtype: torch.dtype) -> Any:
    """A function for kernels that loads four numbers of a head, by its address, to a place in a local array. The first
    `half` bytes of a head turn with as many behind them; results are rounded."""
    low, high, turn = FORMATS[dtype].low, FORMATS[dtype].high, make_turn(dtype)
    words, load = (4, load_16) if dtype.itemsize == 4 else (2, load_8)
    four_bytes = 4 * dtype.itemsize

    @inlined
    def put(numbers: Any, place: int, i: int, word: int) -> None:
        if words == 4:
            numbers[place + i] = low(word)
        else:
            numbers[place + 2 * i] = low(word)
            numbers[place + 2 * i + 1] = high(word)

    @inlined
    def load_four(numbers: Any, place: int, source: int, four: int, cos: int, sin: int, half: int) -> None:
        half_fours = half // four_bytes
        x = load(source + four * four_bytes)
        if four < 2 * half_fours:
            first = four < half_fours
            y = load(source + (four + half_fours if first else four - half_fours) * four_bytes)
            c, s = load(cos + four * four_bytes), load(sin + four * four_bytes)
            for i in range(words):
                put(numbers, place, i, turn(x[i], y[i], c[i], s[i], float32(-1) if first else float32(1)))
        else:
            for i in range(words):
                put(numbers, place, i, x[i])

    return load_four


def make_quantize_heads(num_heads: int, head_dim: int, dtype: torch.dtype, to: torch.dtype, given: bool) -> Any:
    """A function for kernels, called by all threads, that writes one token's heads as 8-bit numbers, a warp a head.

    Scales that are `given` are read, and not written.
    """
    load_four, code = make_load_four(dtype), EIGHT_BITS[to].code
    fours = head_dim // 4
    owned = -(-fours // 32)
    num_numbers = 4 * owned
    whole, step = 1.0 if given else LARGEST[to], 1 / LARGEST[to]

    @inlined
    def quantize_heads(
        source: int, target: int, scales: int, source_head: int, target_head: int, scale_head: int, cos: int, sin: int,
        half: int,
    ) -> None:  # fmt: skip
        """From address `source` to `target` and `scales`, with bytes from one head to the next, and a token's angles,
        by which the first `half` bytes of a head turn with as many behind them."""
        lane = cuda.threadIdx.x & 31
        head = cuda.threadIdx.x >> 5
        numbers = cuda.local.array(num_numbers, float32)
        while head < num_heads:
            top = float32(0)
            for i in range(owned):  # a lane behind the last takes that as well
                load_four(numbers, 4 * i, source + head * source_head, min(i * 32 + lane, fours - 1), cos, sin, half)
                if not given:
                    for j in range(4):
                        top = greater(top, numbers[4 * i + j])
            if given:
                top = load_f32(scales + head * scale_head)
            else:
                for turn in range(5):
                    top = greater(top, shuffle_xor(top, 1 << turn))
            finite = top < float32(INFINITY)
            usable = finite and top >= float32(LEAST)
            factor = exact_reciprocal(top) * float32(whole) if usable else float32(0)
            for i in range(owned):
                for j in range(4):
                    number = numbers[4 * i + j]
                    numbers[4 * i + j] = number * factor if usable and (not given or number == number) else float32(0)
                if i * 32 + lane < fours:
                    word = pack_bytes(
                        code(numbers[4 * i]), code(numbers[4 * i + 1]),
                        code(numbers[4 * i + 2]), code(numbers[4 * i + 3]),
                    )  # fmt: skip
                    store_4(target + head * target_head + (i * 32 + lane) * 4, word)
            if lane == 0 and not given:
                store_f32(scales + head * scale_head, top * float32(step) if finite else float32(NAN))
            head += WARPS

    return quantize_heads
