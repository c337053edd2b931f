"""What is compared: a cache, an attention, and whether `generate` compiles its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from vmmkv.integrations.transformers import VmmCache

BUDGET = "95%"
"""Of the memory that is free, for a `VmmCache`; the others have no budget, and fail where there is no more."""


@dataclass(frozen=True)
class Contender:
    """One way to decode.

    Attributes:
        cache: its class.
        attention: transformers' `attn_implementation`.
        backend: of SDPA: what torch and transformers choose by themselves, or flash and nothing else.
        compiled: `generate` compiles the decode step and replays it as a CUDA graph, which it does by itself where
            the cache allows it.
    """

    cache: type[Cache]
    attention: str = "sdpa"
    backend: str = "default"
    compiled: bool = False

    @property
    def name(self) -> str:
        details = [self.attention]
        details += ["flash"] if self.backend == "flash" else []
        details += ["compiled"] if self.compiled else []
        return f"{self.cache.__name__}, {', '.join(details)}"

    def make(self, model: PreTrainedModel, capacity: int, page_size: int | None) -> Cache:
        """An empty cache: a static one for `capacity` tokens, a `VmmCache` for as many as the model can take."""
        if self.cache is StaticCache:
            return StaticCache(model.config, max_cache_len=capacity)
        if self.cache is VmmCache:
            seq_len = model.config.max_position_embeddings
            return VmmCache(model.config, seq_len, max_bytes=BUDGET, page_size=page_size, compile=self.compiled)
        return DynamicCache(config=model.config)

    @contextmanager
    def chosen(self, model: PreTrainedModel) -> Iterator[None]:
        """The model decodes like this inside."""
        model.set_attn_implementation(self.attention)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.backend == "flash" else nullcontext():
                yield
        finally:
            if self.compiled:
                torch.compiler.reset()  # or the compiled steps, and the memory of their graphs, would stay


BASELINE = Contender(DynamicCache)
"""What `generate` does unless told otherwise."""

CONTENDERS = (
    BASELINE,
    Contender(DynamicCache, backend="flash"),
    Contender(VmmCache),
    Contender(VmmCache, backend="flash"),
    Contender(VmmCache, attention="vmmkv"),
    Contender(VmmCache, attention="vmmkv", compiled=True),
    Contender(StaticCache),
    Contender(StaticCache, compiled=True),
)


def renew(cache: Cache, model: PreTrainedModel) -> None:
    """Empties a cache for the next batch. It keeps its addresses, which a compiled step may know, and has no more
    memory than a new one."""
    if type(cache) is DynamicCache:
        cache.__init__(config=model.config)  # reset() of transformers 5.17 keeps the length
        return
    cache.reset()
    if isinstance(cache, VmmCache):
        for pool in cache.pools:
            pool.trim()


def held_bytes(cache: Cache) -> int:
    """Bytes of memory that the cache keeps."""
    if isinstance(cache, VmmCache):
        return sum(pool.stats().physical_bytes for pool in cache.pools)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
