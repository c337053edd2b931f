"""What each scheme allocates, counted again token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vmmkv
from vmmkv.layout import DTYPES, SCALED_DTYPES
from vmmkv.schemes import SCHEMES, allocated_bytes

MAX_SEQ_LEN = 80
LLAMA = vmmkv.KVLayout(num_layers=32, num_kv_heads=8, head_dim=128)


@st.composite
def layouts(draw: st.DrawFn) -> vmmkv.KVLayout:
    num_layers = draw(st.integers(1, 5))

    def widths(least: int) -> st.SearchStrategy[int | list[int]]:
        width = st.integers(least, 40)
        return width | st.lists(width, min_size=num_layers, max_size=num_layers)

    dtype = draw(st.sampled_from(DTYPES))
    return vmmkv.KVLayout(
        num_layers=num_layers,
        num_kv_heads=draw(widths(1)),
        head_dim=draw(widths(1)),
        dtype=dtype,
        v_head_dim=draw(st.none() | widths(0)),
        layers_per_range=draw(st.none() | st.integers(1, num_layers)),
        scales=draw(st.sampled_from([None, "token_head"])) if dtype in SCALED_DTYPES else None,
    )


lengths = st.lists(st.integers(0, MAX_SEQ_LEN), max_size=4)
page_sizes = st.sampled_from([64, 100, 512, 4096])


def pages_touched(tokens: int, stride: int, page_size: int) -> int:
    """Walks over the bytes of a range, token by token."""
    pages = set()
    for token in range(tokens):
        pages.update(range(token * stride // page_size, ((token + 1) * stride - 1) // page_size + 1))
    return len(pages)


def slow_allocated_bytes(scheme: str, layout: vmmkv.KVLayout, tokens: int, page_size: int) -> int:
    if scheme == "static":
        return sum(layout.token_bytes for _ in range(MAX_SEQ_LEN))
    if scheme == "block_table_16":
        return len({token // 16 for token in range(tokens)}) * 16 * layout.token_bytes
    if scheme == "vmmkv":
        return sum(pages_touched(tokens, record, page_size) * page_size for record in layout.record_bytes)
    total = 0
    for layer in layout.layers:
        k = torch.empty(layer.num_kv_heads, layer.k_head_dim, dtype=layout.dtype, device="meta")
        v = torch.empty(layer.num_kv_heads, layer.v_head_dim, dtype=layout.dtype, device="meta")
        scales = torch.empty(layer.num_kv_heads, device="meta").nbytes if layout.scales else 0
        for nbytes in (k.nbytes + scales, v.nbytes + scales):
            total += pages_touched(tokens, nbytes, page_size) * page_size if nbytes else 0
    return total


@pytest.mark.parametrize("scheme", SCHEMES)
@given(layout=layouts(), lengths=lengths, page_size=page_sizes)
def test_allocates_what_counting_token_by_token_gives(scheme, layout, lengths, page_size):
    allocated = allocated_bytes(scheme, layout, np.array(lengths, np.int32), MAX_SEQ_LEN, page_size)
    assert allocated.tolist() == [slow_allocated_bytes(scheme, layout, tokens, page_size) for tokens in lengths]


def test_refuses_what_is_no_scheme_and_what_is_no_length():
    with pytest.raises(ValueError, match="per_layer"):
        allocated_bytes("paged", LLAMA, np.array([1]), 8192)
    with pytest.raises(vmmkv.SequenceTooLongError, match="8193"):
        allocated_bytes("static", LLAMA, np.array([5, 8193]), 8192)
