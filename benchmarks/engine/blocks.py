"""Blocks of a preallocated pool and a block table, as serving engines have them.

With reuse, a radix tree has full blocks as its edges.

Invariants of the tree:
 1. A known block stands under its ids and the known block before it (`ROOT` at a beginning). Found blocks were compared
    id by id; there are no hashes that could collide.
 2. A row that uses a known block uses those before it. So idle blocks, in the order of their last use and of a sequence
    the last one first, come before the block that they follow: the least recently used one can be evicted at any time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import KVLayout

from .backend import Ids, Rows, pinned

ROOT = -1
Key = tuple[int, bytes]


class PagedKV:
    """A `KVBackend`. Free blocks are a stack: the blocks that were freed last, and may be in caches, come first."""

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
        """Blocks that are free or can be evicted."""
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
        """Make so many blocks free; return whether that succeeded."""
        return blocks <= self.num_free

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self._put_back(self.table[row, : -(-int(self.lengths[row]) // self.block_size)])
        self.free_rows += rows

    def _put_back(self, blocks: npt.NDArray[np.integer[Any]]) -> None:
        """Put blocks on the stack."""
        self.free_blocks[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    def _publish(self, places: Rows) -> None:
        """Copy these places of the flat table to the device."""
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

    def work(self) -> dict[str, float]:
        return {}

    def give_back(self) -> None:
        """Nothing: a pool is one tensor."""

    def close(self) -> None:
        del self.pool


class ReusingPagedKV(PagedKV):
    """Blocks that begin with the known blocks of others."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}
        self.users = np.zeros(len(self.free_blocks), np.int32)
        """By known block, how many rows have it."""
        self.idle: dict[int, None] = {}
        """Known blocks that no row has, in the order of their eviction."""
        self.num_known = np.zeros(len(self.table), np.int64)
        """By row, how many blocks from its first on are known."""
        self.changed: list[Rows] = []
        """Places of the flat table that are to be copied to the device."""

    @property
    def available_blocks(self) -> int:
        return self.num_free + len(self.idle)

    def begin(self, ids: Ids, tokens: int, spare: int | None) -> tuple[int, int] | None:
        found = self._find(ids[:-1])  # the last token has to be computed
        used = int((self.users[found] > 0).sum()) * self.block_size
        if spare is not None and not self.fits(tokens - used, spare):
            return None
        row, count = self.admit(tokens), len(found)
        self.users[found] += 1
        for block in found:
            self.idle.pop(block, None)
        self.table[row, :count] = found
        self.num_known[row] = count
        self.lengths[row] = count * self.block_size
        if count:
            self.changed.append(row * self.table.shape[1] + np.arange(count))
        return row, count * self.block_size

    def _find(self, ids: Ids) -> list[int]:
        """The known blocks that hold the longest beginning of these tokens."""
        found: list[int] = []
        block = ROOT
        for each in self._blocks(ids, 0):
            known = self.known.get((block, each))
            if known is None:
                break
            found.append(block := known)
        return found

    def _blocks(self, ids: Ids, first: int) -> list[bytes]:
        """The ids of each full block from a number on."""
        data, size = ids.astype(np.int32).tobytes(), 4 * self.block_size
        return [data[start : start + size] for start in range(first * size, len(data) - size + 1, size)]

    def extend(self, rows: Rows, counts: Rows | int) -> bool:
        if not super().extend(rows, counts):
            return False
        if self.changed:
            self._publish(np.concatenate(self.changed))
            self.changed.clear()
        return True

    def commit(self, row: int, ids: Ids) -> None:
        first = int(self.num_known[row])
        before = int(self.table[row, first - 1]) if first else ROOT
        for index, each in enumerate(self._blocks(ids, first), first):
            block = int(self.table[row, index])
            known = self.known.setdefault((before, each), block)
            if known == block:
                self.keys[block] = before, each
            else:  # another row has computed the same meanwhile
                self.idle.pop(known, None)
                self._put_back(np.array([block]))
                self.table[row, index] = known
                self.changed.append(np.array([row * self.table.shape[1] + index]))
            self.users[known] += 1
            self.num_known[row] = index + 1
            before = known

    def free(self, rows: list[int]) -> None:
        for row in rows:
            count, known = -(-int(self.lengths[row]) // self.block_size), int(self.num_known[row])
            self._put_back(self.table[row, known:count])
            blocks = self.table[row, :known][::-1]
            self.users[blocks] -= 1
            self.idle.update(dict.fromkeys(blocks[self.users[blocks] == 0].tolist()))
            self.num_known[row] = 0
        self.free_rows += rows

    def _provide(self, blocks: int) -> bool:
        missing = blocks - self.num_free
        if missing > len(self.idle):
            return False
        self._evict(missing)
        return True

    def _evict(self, count: int) -> None:
        """Evict so many idle blocks."""
        for _ in range(count):
            block = next(iter(self.idle))
            del self.idle[block], self.known[self.keys.pop(block)]
            self._put_back(np.array([block]))

    def give_back(self) -> None:
        """Forget the blocks that no row has; the pool stays one tensor."""
        self._evict(len(self.idle))
