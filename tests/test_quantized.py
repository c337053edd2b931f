"""Rounding K and V to 8 bits, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmmkv.kernels.quantized import LARGEST, LEAST, dequantize, quantize

INPUTS = [torch.float32, torch.float16, torch.bfloat16]


def heads(dtype: torch.dtype, exponents: list[int]) -> torch.Tensor:
    """A head of 64 random numbers for each exponent, some of them far smaller than others, some zero."""
    spread = torch.exp2(torch.randint(-14, 1, (len(exponents), 64)))
    numbers = torch.randn(len(exponents), 64) * spread * torch.exp2(torch.tensor(exponents).float())[:, None]
    return numbers.masked_fill(torch.rand(numbers.shape) < 0.1, 0).to(dtype)


@given(
    inputs=st.sampled_from(INPUTS),
    dtype=st.sampled_from(list(LARGEST)),
    exponents=st.lists(st.integers(-130, 120), min_size=1, max_size=5),
)
def test_a_round_trip_is_as_exact_as_the_format(inputs, dtype, exponents) -> None:
    """Half a step off at most: of its own magnitude in e4m3, down to a fixed step; of the head's in int8."""
    states = heads(inputs, exponents)
    exact = states.double()
    top = exact.abs().amax(1, keepdim=True)
    top[~(top < torch.inf)] = torch.nan  # fp16 holds no such exponents
    numbers, scales = quantize(states, dtype)
    again = dequantize(numbers, scales, torch.float64)
    assert numbers.dtype is dtype
    assert scales.dtype is torch.float32
    assert torch.equal(again.isnan(), top.isnan().expand_as(again))
    error = (again - exact).abs()
    if dtype is torch.int8:
        bound = (top / 127 / 2).expand_as(error)
    else:
        bound = torch.maximum(exact.abs() * 2**-4, top / 448 * 2**-10)
    assert (error <= torch.where(top < LEAST, LEAST, bound * (1 + 1e-5)))[~again.isnan()].all()
    assert (numbers.double().abs() <= LARGEST[dtype]).all()
    reached = numbers.double().abs().amax(1, keepdim=True)
    assert (reached == LARGEST[dtype])[top >= LEAST].all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_makes_its_head_none(dtype, strange) -> None:
    states = torch.randn(3, 2, 16)
    states[1, 0, 5] = strange
    numbers, scales = quantize(states, dtype)
    assert scales.isnan().nonzero().tolist() == [[1, 0]]
    assert (numbers[1, 0].float() == 0).all()
    assert dequantize(numbers, scales)[1, 0].isnan().all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_zeros_stay_zeros(dtype) -> None:
    numbers, scales = quantize(torch.zeros(2, 3, 16), dtype)
    assert (numbers.float() == 0).all()
    assert (scales == 0).all()


def test_other_formats_are_refused() -> None:
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        quantize(torch.zeros(1, 16), torch.float8_e5m2)
