"""A Hugging Face cache that grows in place: `generate(..., past_key_values=VmmCache(...))`.

`DynamicCache` writes all of K and V anew for each token. Here a token is written where it stays, and attention
reads a strided view of the rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..cache import KVCache
from .batch import Limits
from .compiled_layers import CompiledLayerGroup, VmmCompiledLayer, VmmCompiledSlidingWindowLayer
from .extents import Passes
from .layer_group import LayerGroup
from .layers import VmmLayer, VmmSlidingWindowLayer


class VmmCache(DynamicCache):
    """K and V in rows of virtual memory: for `generate(..., past_key_values=cache)`, or `model(...)` by hand.

    Pages are taken as tokens come, on the device of the first K and V and in their dtype; layers with a sliding
    window give theirs back. `reset()` makes room for another batch, of any size, and leaves the pages mapped
    for it: what fits into them costs no driver call (a window that has moved starts over at the front of its
    rows, and pages move there). `trim()` of each of the `kv_caches` gives them back to the system, as does the
    end of the cache. `copy.deepcopy` copies the tokens that are there and nothing else.

    Attention reads strided views. Torch's memory-efficient SDPA counts their strides in 32 bits, so layers
    share a token record only as far as it can address `max_seq_len` tokens (`layers_per_range` of the
    layout): every backend reads the right tokens. The longer the rows, the coarser the pages, therefore.

    For inference only. After a forward pass that ended in the middle (an error, Ctrl-C) its layers are out of step: the
    next one raises `UnfinishedPassError`, until `reset()`.

    Args:
        config: of the model. Layers that keep other things than K and V stay what `DynamicCache` makes them.
        max_seq_len: tokens that a sequence may have, prompt included. Virtual addresses only.
        max_batch_size: sequences at a time, beams and returned sequences counted. Virtual addresses only.
        max_bytes: the budget of each of the `kv_caches`, as in `KVCache`; None is 80 % of the memory that is free when
            it is made.
        page_size: bytes of a page; None is 2 MiB.
        compile: keep the length on the device, so that one compiled forward pass, or CUDA graph, serves every length;
            `generate` compiles by itself then (on a GPU). Made for `attn_implementation="vmmkv"`, which reads live
            tokens only; others read `max_seq_len` tokens at each step, masked behind the live ones, and are slower
            the larger it is. Layers write a prompt as a whole, also where a window moves over it.

    Raises:
        LayoutError: at the first write, where a single layer's rows are longer than 32-bit strides reach, or the
            rows take more virtual addresses than there are.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_seq_len: int,
        *,
        max_batch_size: int = 64,
        max_bytes: float | str | None = None,
        page_size: int | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(config=config)
        self._groups: dict[int | None, LayerGroup] = {}
        limits, passes = Limits(max_seq_len, max_batch_size, max_bytes, page_size), Passes()

        def attention() -> str:
            return str(config.get_text_config(decoder=True)._attn_implementation)

        def group(window: int | None) -> Any:
            if window not in self._groups:
                self._groups[window] = (
                    CompiledLayerGroup(limits, passes, attention) if compile else LayerGroup(limits, passes)
                )
            return self._groups[window]

        full: Any = partial(VmmCompiledLayer, self._groups) if compile else VmmLayer
        sliding: Any = partial(VmmCompiledSlidingWindowLayer, self._groups) if compile else VmmSlidingWindowLayer
        for index, layer in enumerate(self.layers):
            # By exact type: subclasses keep more than K and V, and stay what transformers makes them.
            if type(layer) is DynamicLayer:
                self.layers[index] = full(group(None))
            elif type(layer) is DynamicSlidingWindowLayer:
                self.layers[index] = sliding(group(layer.sliding_window), layer.sliding_window)

    def reserve(self, seq_len: int) -> None:
        """With `compile=True`: maps pages for sequences of up to `seq_len` tokens, for forward passes that are compiled
        or captured by hand, which cannot map any. Call it after the prompt. `generate` does without.

        Raises:
            ValueError: the cache was made without `compile=True`, or nothing was written to it.
            SequenceTooLongError, OutOfPagesError, DriverError: as in `KVCache.extend`. What was reserved stays so.
        """
        compiled = [group for group in self._groups.values() if isinstance(group, CompiledLayerGroup)]
        groups = [group for group in compiled if group.batch and group.batch.rows]
        if not groups:
            raise ValueError("reserve() is for caches with compile=True, after a prompt was written to them")
        for group in groups:
            group.reserve(seq_len)

    @property
    def kv_caches(self) -> list[KVCache]:
        """What K and V lie in, for accounting and `trim()`: a `KVCache` for full attention, and one for each window.
        Those of layers that nothing was written to are missing."""
        return [group.batch.kv_cache for group in self._groups.values() if group.batch]

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            if isinstance(layer, VmmLayer):
                layer.length_after_crop(tokens_to_remove)  # all layers or none
        super().crop(tokens_to_remove)
        self._fit()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._fit()

    def reset(self) -> None:
        super().reset()  # type: ignore[no-untyped-call]
        self._fit()

    def _fit(self) -> None:
        for group in self._groups.values():
            group.fit()
