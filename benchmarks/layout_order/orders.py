"""The orders in which K and V of tokens can lie in a page, and the models that they are compared for.

Tokens first is `[tokens, layers, K and V, heads, dim]`, what rows of a `KVCache` are: records go on over the ends of
pages, and a row is one strided tensor. Heads first is `[layers, K and V, heads, tokens, dim]` within a page: a head's
tokens lie side by side, a page holds whole tokens only, and a row is none: kernels look pages up, as blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from vmmkv import KVLayout

PAGE_BYTES = 2 << 20
BLOCK_STEP = 16
"""Blocks that the attention kernels look up hold a multiple of this many tokens."""


class Model(NamedTuple):
    """What attention sees of a model, in bf16."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def layout(self, layers_per_range: int) -> KVLayout:
        return KVLayout(self.layers, self.kv_heads, self.head_dim, layers_per_range=layers_per_range)

    def ranges(self) -> dict[str, int]:
        """Layers that share a token record, by what they are called."""
        return {"all": self.layers, "half": self.layers // 2, "4": 4, "1": 1}


MODELS = {
    "Llama-3.1-8B": Model(32, 32, 8, 128),
    "Llama-3.1-70B, TP 8": Model(80, 8, 1, 128),
    "Qwen3-0.6B": Model(28, 16, 8, 128),
    "Llama-2-7B": Model(32, 32, 32, 128),
    "26 layers of 4 x 256": Model(26, 8, 4, 256),
}
"""Of eight GPUs each has one of the 70B's eight KV heads."""


def tokens_of_page(record_bytes: int, step: int = 1) -> int:
    """Whole tokens of a page, as a multiple of `step`; 0: it holds none."""
    return PAGE_BYTES // record_bytes // step * step
