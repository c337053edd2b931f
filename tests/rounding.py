"""A `DynamicCache` that rounds K and V to 8 bits and back: what a `VmmCache(kv_dtype=...)` is compared with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from vmmkv.kernels.quantized import dequantize, quantize
from vmmkv.layout import KV_DTYPES


class RoundingCache(DynamicCache):
    """What comes first attends to itself as it is, unless `always`, and what comes later to what was rounded."""

    def __init__(self, config: Any, kv_dtype: str, always: bool = False) -> None:
        super().__init__(config=config)
        self.kv_dtype, self.always = kv_dtype, always

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        is_alone = not (self.always or self.get_seq_length(layer_idx))
        rounded = (dequantize(*quantize(each, KV_DTYPES[self.kv_dtype]), each.dtype) for each in (keys, values))
        attended = super().update(*rounded, layer_idx)
        return (keys, values) if is_alone else attended
