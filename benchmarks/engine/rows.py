"""Rows of a `vmmkv.KVCache`: contiguous, memory only where tokens are; with prefix reuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vmmkv import FramePool, KVCache, KVLayout, OutOfPagesError
from vmmkv.driver.driver import open_driver

from .backend import Ids, Rows

IDLE_TOKENS = 2048
"""Room that is left free beside cached prefixes, about what a step takes: pages that were freed a moment ago are still
in use by the device, which a growth onto them would wait for."""
HOST_PAGE_TOKENS = 16
"""On the host a page holds about as many tokens as a 2 MiB page does of Llama-3.1-8B."""


def memory_for(layout: KVLayout, device: torch.device) -> dict[str, Any]:
    """A device, and the size of its pages: one that holds about as many tokens on the host as on a GPU."""
    page_size = None
    if device.type == "cpu":
        granularity = open_driver(device).granularity
        page_size = -(-HOST_PAGE_TOKENS * layout.token_bytes // granularity) * granularity
    return {"device": device, "page_size": page_size}


class VmmKV:
    """A `KVBackend` that can reuse prefixes.

    Args:
        pool: memory that others use as well, instead of `max_bytes` of its own.
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
        pool: FramePool | None = None,
    ) -> None:
        memory: dict[str, Any] = {"pool": pool}
        if pool is None:
            memory = {"max_bytes": max_bytes, **memory_for(layout, device)}
        self.cache = KVCache(layout, max_sequences, max_seq_len, **memory)
        self.sequences = np.full(max_sequences, None, object)
        self.free_rows = max_sequences
        self.batch, self.batched = self.cache.batch([]), np.empty(0, np.int64)

    def fits(self, tokens: int, spare: int = 0) -> bool:
        return bool(self.free_rows) and self.has_room(tokens + spare)

    def has_room(self, tokens: int) -> bool:
        """Whether there is memory for so many more tokens."""
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
        self.batched = np.empty(0, np.int64)  # the rows go to other sequences
        self.free_rows += len(rows)

    def begin(self, ids: Ids, tokens: int, spare: int | None) -> tuple[int, int] | None:
        if spare is not None and not self._fits_shared(ids, tokens, spare):
            return None
        try:
            sequence = self.cache.sequence(token_ids=ids, whole=False, expected_tokens=tokens)
        except OutOfPagesError:
            if spare is not None:
                return None
            # One page too few: the known pages are copied in part, and need memory meanwhile.
            self.cache.trim()
            sequence = self.cache.sequence(token_ids=ids, whole=False, expected_tokens=tokens)
        self.sequences[sequence.row] = sequence
        self.free_rows -= 1
        return sequence.row, sequence.cached_tokens

    def _fits_shared(self, ids: Ids, tokens: int, spare: int) -> bool:
        """Whether a sequence fits, which may share pages with running ones."""
        if not self.free_rows:
            return False
        cache, wanted = self.cache, (tokens + spare + IDLE_TOKENS) * self.cache.layout.token_bytes
        missing = wanted - cache.available_pages * cache.page_size
        return missing <= 0 or missing <= cache.shared_pages(ids) * cache.page_size

    def commit(self, row: int, ids: Ids) -> None:
        self.sequences[row].commit(ids)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.kv(layer)

    def physical_bytes(self) -> int:
        return self.cache.stats().physical_bytes

    def work(self) -> dict[str, float]:
        stats = self.cache.stats()
        seconds = {"driver": stats.driver_calls, "mapper": stats.mapper_calls}
        return {name: sum(call.seconds for call in calls.values()) for name, calls in seconds.items()} | dict(
            stats.pages_mapped
        )

    def give_back(self) -> None:
        self.cache.trim()

    def close(self) -> None:
        self.cache.close()
