"""Rows of a `vmmkv.KVCache`: contiguous, memory under tokens only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vmmkv import FramePool, KVCache, KVLayout, OutOfPagesError
from vmmkv.driver.driver import open_driver

from .backend import Rows, Work

HOST_PAGE_TOKENS = 16
"""On the host a page holds about as many tokens as a 2 MiB page does of Llama-3.1-8B."""


def memory_for(layout: KVLayout, device: torch.device) -> dict[str, Any]:
    """A device, and the size of its pages: one that holds about as many tokens on the host as on a GPU."""
    page_size = None
    if device.type == "cpu":
        granularity = open_driver(device).granularity
        page_size = -(-HOST_PAGE_TOKENS * layout.token_bytes // granularity) * granularity
    return {"device": device, "page_size": page_size}


OVERREAD = {"overread": 256, "scrub": True}
"""What rows need for FlashAttention-3, which reads whole tiles, of up to 224 tokens, and multiplies what it masks."""


class VmmKV:
    """A `KVBackend`.

    Args:
        overread, scrub, large_frames: see `KVCache`.
        lookahead: tokens that are mapped behind each sequence before it needs them; None is what `KVCache` does.
        pool: memory that others use as well, instead of `max_bytes` of its own.
        host_bytes: of host memory, for sequences that are suspended.
    """

    block_table = None

    def __init__(
        self,
        layout: KVLayout,
        max_sequences: int,
        max_seq_len: int,
        max_bytes: int,
        device: torch.device,
        *,
        lookahead: int | None = None,
        pool: FramePool | None = None,
        host_bytes: int = 0,
        overread: int = 0,
        scrub: bool = False,
        large_frames: bool = True,
    ) -> None:
        memory: dict[str, Any] = {"pool": pool}
        if pool is None:
            memory = {"max_bytes": max_bytes, **memory_for(layout, device)}
        memory |= {"lookahead": lookahead, "host_bytes": host_bytes, "overread": overread, "scrub": scrub}
        memory |= {"large_frames": large_frames}
        self.cache = KVCache(layout, max_sequences, max_seq_len, **memory)
        self.overread = overread
        self.sequences = np.full(max_sequences, None, object)
        self.free_rows = max_sequences
        self.batch, self.batched = self.cache.batch(), np.empty(0, np.int64)

    def fits(self, tokens: int, spare: int = 0) -> bool:
        return bool(self.free_rows) and self.has_room(tokens + self.overread + spare)

    def has_room(self, tokens: int) -> bool:
        """Whether there is memory for so many tokens more."""
        return tokens * self.cache.layout.token_bytes <= self.cache.available_pages * self.cache.page_size

    def admit(self, tokens: int) -> int:
        sequence = self.cache.sequence(expected_tokens=tokens)
        self.sequences[sequence.row] = sequence
        self.free_rows -= 1
        return sequence.row

    def extend(self, rows: Rows, counts: Rows | int) -> bool:
        try:
            if not isinstance(counts, int):
                self.cache.extend(self.sequences[rows].tolist(), counts)
                return True
            if not np.array_equal(rows, self.batched):
                self.batch, self.batched = self.cache.batch(self.sequences[rows]), rows
            self.batch.extend(counts)
        except OutOfPagesError:
            return False
        return True

    def free(self, rows: list[int]) -> None:
        self.cache.free(self.sequences[rows].tolist())
        self.sequences[rows] = None
        self.batched = np.empty(0, np.int64)  # others get these rows
        self.free_rows += len(rows)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.kv(layer)

    def physical_bytes(self) -> int:
        return self.cache.stats().physical_bytes

    def work(self) -> Work:
        stats = self.cache.stats()
        return Work(
            {name: calls.seconds for name, calls in stats.driver_calls.items()},
            {name: calls.seconds for name, calls in stats.mapper_calls.items()},
            {name: calls.count for name, calls in stats.mapper_calls.items()},
            stats.pages_mapped,
        )

    def give_back(self) -> None:
        self.cache.trim()

    def close(self) -> None:
        self.cache.close()
