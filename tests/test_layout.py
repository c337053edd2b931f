"""The arithmetic of the token record, against memory laid out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmmkv import DtypeError, KVLayout, LayoutError
from vmmkv.layout import DTYPES, SCALED_DTYPES, SCALES

KINDS = [(dtype, None) for dtype in DTYPES] + [(dtype, "token_head") for dtype in SCALED_DTYPES]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=7),
    kind=st.sampled_from(KINDS),
    layers_per_range=st.none() | st.integers(1, 8),
)
def test_planes_are_aligned_apart_and_in_order(shapes, kind, layers_per_range) -> None:
    heads, k_dims, v_dims = (list(column) for column in zip(*shapes))
    dtype, scales = kind
    layout = KVLayout(len(shapes), heads, k_dims, dtype, v_dims, layers_per_range, scales)
    per_range = layers_per_range or len(shapes)
    taken: dict[int, set[int]] = {}
    for index, layer in enumerate(layout.layers):
        assert layer.range == index // per_range
        record = taken.setdefault(layer.range, set())
        for offset, width in ((layer.k_offset, layer.k_head_dim), (layer.v_offset, layer.v_head_dim)):
            first = offset * dtype.itemsize
            plane = set(range(first, first + layer.num_kv_heads * width * dtype.itemsize))
            assert first % 16 == 0
            assert not plane & record
            assert not record or not plane or min(plane) > max(record)
            record |= plane
        assert (layer.num_kv_heads, layer.k_head_dim, layer.v_head_dim) == shapes[index]
        assert (layer.scales_offset is None) == (scales is None)
    for layer in layout.layers if scales else ():
        plane = set(range(4 * layer.scales_offset, 4 * layer.scales_offset + 8 * layer.num_kv_heads))
        assert not taken[layer.range] or min(plane) > max(taken[layer.range])
        taken[layer.range] |= plane
    for index, nbytes in enumerate(layout.record_bytes):
        assert nbytes % 16 == 0
        assert max(taken[index]) < nbytes
        assert nbytes <= len(taken[index]) + 16 * (2 * per_range + 1)


def test_llama_3_1_8b_is_128_kib_a_token_16_tokens_a_page() -> None:
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    assert layout.record_bytes == (128 * 1024,)
    assert layout.pages(16, 2 << 20) == 1
    assert layout.pages(17, 2 << 20) == 2
    assert layout.int32_token_limit == 32_768


@pytest.mark.parametrize("dtype", SCALED_DTYPES, ids=str)
def test_with_scales_a_token_takes_little_more_than_half(dtype) -> None:
    whole, half = KVLayout(32, 8, 128), KVLayout(32, 8, 128, dtype, scales="token_head")
    assert half.record_bytes == (64 * 1024 + 32 * 8 * 2 * 4,)
    assert whole.token_bytes > 1.9 * half.token_bytes


def test_llama_2_7b_wraps_at_8192_tokens() -> None:
    layout = KVLayout(num_layers=32, num_kv_heads=32, head_dim=128, dtype=torch.float16)
    assert layout.int32_token_limit == 8_192
    assert KVLayout(32, 32, 128, torch.float16, layers_per_range=4).int32_token_limit == 65_536


def test_int32_token_limit_is_the_last_length_whose_offsets_fit() -> None:
    layout = KVLayout(num_layers=5, num_kv_heads=3, head_dim=24, dtype=torch.float16)
    stride = layout.record_bytes[0] // 2
    assert layout.int32_token_limit * stride <= 2**31 < (layout.int32_token_limit + 1) * stride


@pytest.mark.parametrize("number", [np.uint8, np.int64, torch.tensor], ids=["uint8", "int64", "tensor"])
def test_whole_numbers_of_other_libraries_are_numbers(number) -> None:
    """Of NumPy's some overflow, and lay heads over one another."""
    sizes = [3, 2, 96, 200, 1]
    names = "num_layers", "num_kv_heads", "head_dim", "v_head_dim", "layers_per_range"
    expected = KVLayout(**dict(zip(names, sizes)))
    layout = KVLayout(**dict(zip(names, map(number, sizes))))
    assert (layout.layers, layout.record_bytes) == (expected.layers, expected.record_bytes)
    assert {layout: 1}[expected] == 1


def test_a_layout_can_be_a_key() -> None:
    assert len({KVLayout(2, [4, 8], 64), KVLayout(2, (4, 8), 64), KVLayout(2, 8, 64)}) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"num_kv_heads": [1, 2, 3]}, "3 entries for 2 layers"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"v_head_dim": -1}, "v_head_dim=-1"),
        ({"layers_per_range": 0}, "layers_per_range=0"),
        ({"dtype": torch.int8, "scales": "tensor"}, "scales='tensor'; vmmkv keeps"),
    ],
)
def test_impossible_geometry(arguments, says) -> None:
    with pytest.raises(LayoutError, match=says):
        KVLayout(**{"num_layers": 2, "num_kv_heads": 4, "head_dim": 64, **arguments})


def test_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(DtypeError, match="bfloat16"):
        KVLayout(2, 4, 64, torch.float64)
    with pytest.raises(DtypeError, match=r"'bfloat16' of type str; .* torch\.bfloat16"):
        KVLayout(2, 4, 64, "bfloat16")


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - set(SCALED_DTYPES), key=str), ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_only_some_dtypes_have_scales(dtype, scales) -> None:
    with pytest.raises(DtypeError, match="float8_e4m3fn, int8"):
        KVLayout(2, 4, 64, dtype, scales=scales)
