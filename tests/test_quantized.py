"""Rounding K and V to 8 bits, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmmkv.kernels.quantized import LARGEST, LEAST, dequantize, quantize, sequence_scales

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


@given(
    inputs=st.sampled_from(INPUTS),
    dtype=st.sampled_from(list(LARGEST)),
    exponents=st.lists(st.integers(-8, 8), min_size=1, max_size=5),
    room=st.sampled_from([0.25, 1.0, 4.0]),
)
def test_with_scales_of_a_sequence_all_but_what_is_too_great_is_as_exact_as_the_format(
    inputs, dtype, exponents, room
) -> None:
    """Half a step of the scale in int8; in e4m3 of the number's own magnitude, down to a step of the scale."""
    states = torch.stack([heads(inputs, exponents) for _ in range(3)])  # three tokens
    exact = states.double()
    scales = sequence_scales(states, dtype)
    top = exact.abs().amax((0, 2))
    assert torch.allclose(scales.double() * LARGEST[dtype], torch.where(top > 0, top, LARGEST[dtype]), rtol=1e-6)
    numbers, given = quantize(states, dtype, room * scales)
    assert torch.equal(given, room * scales)
    step = given.double()[:, None]
    limited = exact.clamp(-LARGEST[dtype] * step, LARGEST[dtype] * step)
    error = (dequantize(numbers, given, torch.float64) - limited).abs()
    bound = step / 2 if dtype is torch.int8 else torch.maximum(limited.abs() * 2**-4, step * 2**-10)
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_what_is_no_number_is_so_in_given_scales_or_is_limited(dtype) -> None:
    most = LARGEST[dtype]
    states = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 2.0, 0.0])
    numbers, _ = quantize(states, dtype, torch.tensor(2.0**-9))
    assert numbers.tolist() == [0, most, -most, most, -most, most, 0]
    scales = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -1.0, LEAST / 2, LEAST])
    numbers, given = quantize(states.expand(7, 7), dtype, scales)
    again = dequantize(numbers, given)
    assert again[:3].isnan().all()
    assert (numbers[:6].float() == 0).all()
    assert (again[3:6] == 0).all()
    assert numbers[6].tolist() == [0, most, -most, most, -most, most, 0]


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_a_sequence_that_holds_no_number_has_no_scale(dtype) -> None:
    """One that is zero so far has 1."""
    states = torch.randn(5, 4, 16)
    states[1, 0, 5], states[2, 1, 7], states[:, 2] = torch.nan, -torch.inf, 0
    scales = sequence_scales(states, dtype)
    assert scales.isnan().tolist() == [True, True, False, False]
    assert scales[2] == 1
    assert dequantize(*quantize(states, dtype, scales))[:, :2].isnan().all()


def test_what_is_no_state_scale_or_number_is_refused() -> None:
    states, numbers, scales = torch.randn(5, 2, 16), torch.zeros(5, 2, 16, dtype=torch.int8), torch.ones(5, 2)
    other = torch.float8_e5m2
    for error, match, call in (
        (TypeError, "float8_e4m3fn", lambda: quantize(states, other)),
        (TypeError, "float8_e4m3fn", lambda: quantize(states, other, scales)),
        (TypeError, "float8_e4m3fn", lambda: sequence_scales(states, other)),
        (TypeError, "states of torch.complex64", lambda: quantize(states.to(torch.complex64), torch.int8)),
        (TypeError, "states of torch.int64", lambda: quantize(states.long(), torch.int8)),
        (ValueError, r"states \[\]", lambda: quantize(states[0, 0, 0], torch.int8)),
        (TypeError, "scales of torch.bfloat16", lambda: quantize(states, torch.int8, scales.bfloat16())),
        (TypeError, "scales of torch.float64", lambda: quantize(states, torch.int8, scales.double())),
        (TypeError, "states of torch.int32", lambda: sequence_scales(states.int(), torch.int8)),
        (ValueError, r"states \[3, 5, 2, 16\]", lambda: sequence_scales(states.expand(3, -1, -1, -1), torch.int8)),
        (ValueError, r"states \[5, 16\]", lambda: sequence_scales(states[:, 0], torch.int8)),
        (ValueError, r"states \[0, 2, 16\]", lambda: sequence_scales(states[:0], torch.int8)),
        (TypeError, "numbers of torch.uint8", lambda: dequantize(numbers.view(torch.uint8), scales)),
        (TypeError, "numbers of torch.int32", lambda: dequantize(numbers.int(), scales)),
        (TypeError, "numbers of torch.bfloat16", lambda: dequantize(states.bfloat16(), scales)),
        (TypeError, "asked for torch.int8", lambda: dequantize(numbers, scales, torch.int8)),
    ):
        with pytest.raises(error, match=match):
            call()
