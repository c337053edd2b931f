"""What the usual ways to lay out a KV cache allocate for the same sequences: arithmetic, no memory.

    static          one contiguous buffer of `max_seq_len` tokens for each sequence
    block_table_16  blocks of 16 tokens that a block table finds
    per_layer       K and V of each layer in a range of their own, backed by pages
    vmmkv           all layers of a token side by side in one range, backed by pages

The last two take 2 MiB pages unless asked otherwise.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .arguments import check_length
from .driver.driver import DEFAULT_PAGE_SIZE
from .layout import SCALE_BYTES, KVLayout, round_up

SCHEMES = ("static", "block_table_16", "per_layer", "vmmkv")
BLOCK_TOKENS = 16


def allocated_bytes(
    scheme: str,
    layout: KVLayout,
    lengths: npt.NDArray[np.integer[Any]],
    max_seq_len: int,
    page_size: int = DEFAULT_PAGE_SIZE,
) -> npt.NDArray[np.int64]:
    """Bytes that each sequence takes under a scheme.

    Args:
        scheme: one of `SCHEMES`.
        lengths: tokens of each sequence, from 0 to `max_seq_len`. Without tokens only `static` takes memory.
        page_size: bytes of a page, for the two schemes that have pages.
    """
    tokens = np.asarray(lengths, np.int64)
    check_length(int(tokens.max(initial=0)), max_seq_len)
    if scheme == "static":
        return np.full_like(tokens, max_seq_len * layout.token_bytes)
    if scheme == "block_table_16":
        return np.asarray(round_up(tokens, BLOCK_TOKENS) * layout.token_bytes)
    if scheme == "per_layer":
        scale = SCALE_BYTES if layout.scales == "token_head" else 0
        strides = [
            layer.num_kv_heads * (width * layout.dtype.itemsize + scale)
            for layer in layout.layers
            for width in (layer.k_head_dim, layer.v_head_dim)
        ]
    elif scheme == "vmmkv":
        strides = list(layout.record_bytes)
    else:
        raise ValueError(f"asked for the scheme {scheme!r}; there are {', '.join(SCHEMES)}")
    ranges = Counter(strides).items()
    return sum((count * round_up(tokens * stride, page_size) for stride, count in ranges), np.zeros_like(tokens))
