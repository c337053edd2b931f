"""Blocks of a preallocated pool and a block table, as serving engines have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import KVLayout

from .backend import Rows, Work, pinned


class PagedKV:
    """A `KVBackend`. The free blocks are a stack: those that were freed last, and may be in caches, come first."""

    def __init__(
        self,
        layout: KVLayout,
        max_sequences: int,
        max_seq_len: int,
        max_bytes: int,
        device: torch.device,
        block_size: int = 16,
    ) -> None:
        blocks = max_bytes // (block_size * layout.token_bytes)
        shape = layout.num_layers, blocks, 2, block_size, layout.num_kv_heads, layout.head_dim
        self.pool = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.block_size = block_size
        self.table = np.zeros((max_sequences, -(-max_seq_len // block_size)), np.int32)
        self.block_table = torch.zeros(self.table.shape, dtype=torch.int32, device=device)
        self.lengths = np.zeros(max_sequences, np.int64)
        self.free_blocks = np.arange(blocks, dtype=np.int32)
        self.num_free = blocks
        self.free_rows = list(range(max_sequences))

    def fits(self, tokens: int, spare: int = 0) -> bool:
        return tokens + spare <= self.available_blocks * self.block_size and bool(self.free_rows)

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had."""
        return self.num_free

    def admit(self, tokens: int) -> int:
        row = self.free_rows.pop()
        self.lengths[row] = 0
        return row

    def extend(self, rows: Rows, counts: Rows | int) -> bool:
        before = self.lengths[rows]
        lengths = before + counts
        blocks = -(lengths // -self.block_size)
        needed = blocks + before // -self.block_size
        ends = needed.cumsum()
        total = int(ends[-1])
        if not self._provide(total):
            return False
        if total:
            # In the flat table the new blocks of a row follow those that it has.
            places = np.arange(total) + (rows * self.table.shape[1] + blocks - ends).repeat(needed)
            self.num_free -= total
            self.table.ravel()[places] = self.free_blocks[self.num_free : self.num_free + total]
            self._publish(places)
        self.lengths[rows] = lengths
        return True

    def _provide(self, blocks: int) -> bool:
        """Sees to it that so many blocks are free, if it can."""
        return blocks <= self.num_free

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self._put_back(self.table[row, : -(-int(self.lengths[row]) // self.block_size)])
        self.free_rows += rows

    def _put_back(self, blocks: npt.NDArray[np.integer[Any]]) -> None:
        """Puts blocks on the stack."""
        self.free_blocks[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    def _publish(self, places: Rows) -> None:
        """Brings these places of the flat table to the device's."""
        device, end = self.block_table.device, 2 * len(places)
        # One copy and one kernel: places are int64, as scatter takes them, and blocks behind them int32.
        packed = np.concatenate([places.view(np.int32), self.table.ravel()[places]])
        update = pinned(packed, device).to(device, non_blocking=True)
        self.block_table.view(-1).scatter_(0, update[:end].view(torch.int64), update[end:])

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.pool[layer]
        return blocks[:, 0], blocks[:, 1]

    def physical_bytes(self) -> int:
        return self.pool.nbytes + self.block_table.nbytes

    def work(self) -> Work:
        return Work()

    def give_back(self) -> None:
        """Nothing: a pool is one tensor."""

    def close(self) -> None:
        del self.pool
