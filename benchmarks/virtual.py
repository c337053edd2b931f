"""The ways to lay out a KV cache, as allocators that hand out memory which is not there: only the books are kept.

An 80 GiB cache can so be filled on a machine that has less. The rows are a real `KVCache` on a driver without
memory; static reservation and block tables are a pool with a free list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vmmkv import FramePool, KVCache, KVLayout, OutOfPagesError
from vmmkv.core import entries, mapper
from vmmkv.core.codes import RING
from vmmkv.core.pool import Ask, Pool
from vmmkv.driver.host import NullDriver

SCHEMES = ("static", "block 16", "block 64", "block 256", "per layer", "token-major")
"""`static` reserves the maximum for each sequence. `per layer` has a range of 2 MiB pages for K and for V of each
layer, `token-major` one for all of them: both are a `KVCache`."""
FRAMES = ("single pages", "large frames", "large frames, and pages ahead")
"""What lies under the rows of `token-major`, which has the second. The third has the lookahead that is usual on a
GPU."""


class Rested:
    """A mapper without a thread: it works only when it is called."""

    error = None

    def __init__(self, pool: Pool) -> None:
        self.pool, self.ask = pool, Ask()

    def ring(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def work(self) -> bool:
        """Makes one change, as the mapper's thread does. Returns whether it has mapped pages."""
        with self.pool.lock:
            code = entries.plan_ahead(self.pool.address, mapper.FRAMES, self.ask.address)
            if code <= RING:
                return False
            entries.run(self.pool.address, code, 1)
            return bool(entries.commit(self.pool.address, code, self.ask.address) >= 0)


@dataclass(slots=True, eq=False)
class BlockSequence:
    """A sequence in blocks: its length, and its row of the block table."""

    length: int
    blocks: list[int]


class BlockPool:
    """Blocks of one size from a free list; with blocks of `max_seq_len` tokens it is static reservation.

    Args:
        num_blocks: blocks of the pool.
        block_tokens: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.free_blocks = list(range(num_blocks))

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self.free_blocks)

    def sequence(self, tokens: int) -> BlockSequence:
        sequence = BlockSequence(0, [])
        self.extend([sequence], tokens)
        return sequence

    def extend(self, sequences: Sequence[BlockSequence], tokens: int) -> None:
        """All of them or none, as `KVCache.extend`."""
        size = self.block_tokens
        missing = [-(-(sequence.length + tokens) // size) - len(sequence.blocks) for sequence in sequences]
        if sum(missing) > len(self.free_blocks):
            requested, available = sum(missing), len(self.free_blocks)
            raise OutOfPagesError(
                f"asked for {requested} more blocks of {size} tokens; {available} of {self.num_blocks} are free",
                requested=requested,
                available=available,
            )
        for sequence, count in zip(sequences, missing):
            sequence.length += tokens
            for _ in range(count):
                sequence.blocks.append(self.free_blocks.pop())

    def free(self, sequences: Sequence[BlockSequence]) -> None:
        for sequence in sequences:
            self.free_blocks += sequence.blocks
            sequence.blocks.clear()


def make_allocator(
    scheme: str, layout: KVLayout, budget: int, max_seq_len: int, max_sequences: int
) -> KVCache | BlockPool:
    """An allocator of one of `SCHEMES`, or `FRAMES`, over `budget` bytes."""
    if scheme == "per layer":
        # K and V of each layer as layers of their own, which have no V.
        heads, width = layout.num_kv_heads, layout.head_dim
        layout = KVLayout(2 * layout.num_layers, heads, width, layout.dtype, v_head_dim=0, layers_per_range=1)
    if scheme in ("per layer", "token-major", *FRAMES):
        pool = FramePool.on(NullDriver(budget), budget)
        pool.mapper = Rested(pool)
        # One row more than there could be pages for: what runs out is memory.
        rows = min(max_sequences, budget // pool.page_size // len(layout.record_bytes) + 1)
        large = scheme not in ("per layer", FRAMES[0])  # elsewhere a range per layer has pages of one size
        ahead = -(-4 * pool.page_size // layout.token_bytes) if scheme == FRAMES[2] else 0
        return KVCache(layout, rows, max_seq_len, pool=pool, large_frames=large, lookahead=ahead)
    block_tokens = max_seq_len if scheme == "static" else int(scheme.removeprefix("block "))
    return BlockPool(budget // (block_tokens * layout.token_bytes), block_tokens)


def map_ahead(allocator: KVCache | BlockPool) -> None:
    """Has a mapper do all that it would do in the background."""
    while isinstance(allocator, KVCache) and isinstance(allocator.pool.mapper, Rested) and allocator.pool.mapper.work():
        pass


def mapped_bytes(cache: KVCache) -> int:
    """Bytes that are mapped under and behind live sequences, whether others can have them or not."""
    return sum(mapped.nbytes for mapped in cache.mapped_ranges() if mapped.owner >= 0)


def used_bytes(allocator: KVCache | BlockPool, layout: KVLayout) -> int:
    """Bytes that live sequences keep from others."""
    if isinstance(allocator, BlockPool):
        return allocator.used_blocks * allocator.block_tokens * layout.token_bytes
    return allocator.stats().pages["used"] * allocator.page_size
