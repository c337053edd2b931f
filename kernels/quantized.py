"""8-bit K and V: a byte for each number, and a scale for each token and head. Plain torch; kernels give the same bits.

A head's scale brings its greatest number to the greatest that a byte holds. What is no number has no scale either:

    a head that holds a NaN or an infinity   its scale is NaN and its numbers are 0, so it is NaN as a whole
    a head of zeros, or below 2**-100        its numbers are 0
    a head of no width                       it has no numbers, and the scale of one of zeros

A scale that is given, of a head of a whole sequence, say, stays what it is, and so cannot tell of any of this:

    a number beyond the greatest             the greatest, or its negative; an infinity as well
    a NaN                                    0
    a scale that is NaN or an infinity       all numbers are 0, which with that scale are NaN as a whole
    zero, negative, or below 2**-100         all numbers are 0
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The greatest number of each format; that of int8 has a negative."""

LEAST = 2.0**-100
"""A head is 0 if all of it, or a scale that is given, is below: so scales, and what divides by them, stay normal
numbers."""


def quantize(
    states: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds K or V to 8 bits, to nearest even.

    A head's scale is `max(abs(head)) / largest`, where `largest` is 448 for e4m3fn and 127 for int8; `head / scale` is
    rounded.

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
