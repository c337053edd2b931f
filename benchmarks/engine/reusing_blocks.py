"""Blocks of which sequences begin with those of others: a radix tree whose edges are full blocks.

Invariants:
 1. A known block stands under its ids and the known block before it (`ROOT` at a beginning): what is found was compared
    id by id, there are no hashes that could collide.
 2. Who uses a known block uses those before it. So among idle blocks, which are in the order in which they were last
    used and of a sequence the last one first, each comes before the one that it follows: the least recently used can
    be given up at any time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .backend import Ids, Rows
from .paged import PagedKV

ROOT = -1
Key = tuple[int, bytes]


class ReusingPagedKV(PagedKV):
    """A `ReusingKV`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}
        self.users = np.zeros(len(self.free_blocks), np.int32)
        """Of known blocks, how many rows have each."""
        self.idle: dict[int, None] = {}
        """Known blocks that no row has, the one that goes first first."""
        self.num_known = np.zeros(len(self.table), np.int64)
        """By row, how many blocks from its first on are known."""
        self.changed: list[Rows] = []
        """Places of the flat table that the device has not been told of."""

    @property
    def available_blocks(self) -> int:
        return self.num_free + len(self.idle)

    def begin(self, ids: Ids, tokens: int, spare: int | None) -> tuple[int, int] | None:
        found = self._find(ids[:-1])  # what comes after the last token has to be computed
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
        """Gives up so many idle blocks."""
        for _ in range(count):
            block = next(iter(self.idle))
            del self.idle[block], self.known[self.keys.pop(block)]
            self._put_back(np.array([block]))

    def give_back(self) -> None:
        """Forgets what no row has; the pool stays one tensor."""
        self._evict(len(self.idle))
