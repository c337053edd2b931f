"""8-bit K and V: a byte for each number, and a scale for each token and head. Plain torch; kernels give the same bits.

A head's scale brings its greatest number to the greatest that a byte holds. What is no number has no scale either:

    a head that holds a NaN or an infinity   its scale is NaN and its numbers are 0, so it is NaN as a whole
    a head of zeros, or below 2**-100        its numbers are 0
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The greatest number of each format; that of int8 has a negative."""

LEAST = 2.0**-100
"""A head is 0 if all of it is below: so scales, and what divides by them, stay normal numbers."""


def quantize(states: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds K or V to 8 bits, to nearest even.

    A head's scale is `max(abs(head)) / largest`, where `largest` is 448 of e4m3fn and 127 of int8; what is rounded is
    `head / scale`.

    Args:
        states: `[..., head_dim]`, floating-point.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.

    Returns:
        8-bit numbers like `states`, and fp32 scales `[...]`.

    Raises:
        TypeError: there is no such 8-bit format.
    """
    if dtype not in LARGEST:
        raise TypeError(f"asked for {dtype}; it must be one of {', '.join(map(str, LARGEST))}")
    largest, states = LARGEST[dtype], states.float()
    top = states.abs().amax(-1)
    finite = top < torch.inf
    scales = torch.where(finite, top * (1 / largest), torch.nan)
    # Products, which every device rounds alike: torch makes divisions by a number products on some of them.
    numbers = states * (top.reciprocal() * largest)[..., None]
    numbers = torch.where((finite & (top >= LEAST))[..., None], numbers, 0).clamp(-largest, largest)
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype), scales


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What 8-bit numbers and their scales stand for.

    Args:
        numbers: `[..., head_dim]`.
        scales: `[...]`.
        dtype: of the result; the product is fp32 or wider.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return (numbers.to(wide) * scales.to(wide)[..., None]).to(dtype)
