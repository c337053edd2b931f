"""Slots: pages of host memory within a budget, pinned where there is a GPU.

Memory is allocated on demand, in chunks of 16 pages, which one copy moves at full speed; only where the budget has less
room left, in 8, 4, 2 or 1. Chunks are powers of two, so that torch's allocator of pinned memory rounds none up. A chunk
without taken pages is given back. Pages that a copy still uses count until their fence has passed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from ..driver.fence import Fence
from ..errors import OutOfHostMemoryError, VmmkvError

CHUNK = 16
"""Pages of most chunks."""


class Chunk:
    """Pages side by side. `free` has a bit for each page that is not taken."""

    __slots__ = "address", "free", "memory", "pages"

    def __init__(self, pages: int, page_size: int, is_pinned: bool) -> None:
        self.pages, self.free = pages, (1 << pages) - 1
        self.memory = torch.empty(pages * page_size, dtype=torch.uint8, pin_memory=is_pinned)
        self.address = self.memory.data_ptr()


class Run(NamedTuple):
    """Neighbouring pages of a chunk."""

    chunk: Chunk
    first: int
    pages: int
    address: int


class Slots:
    """Pages of host memory.

    Args:
        page_size: bytes of a page.
        max_bytes: the budget.
        is_pinned: whether a GPU copies from and to them.
    """

    def __init__(self, page_size: int, max_bytes: int, is_pinned: bool) -> None:
        self.page_size, self.limit, self.is_pinned = page_size, max_bytes // page_size, is_pinned
        self.taken = self.made = 0
        """Pages that are taken, or that a copy still uses; and pages of all chunks."""
        self._partial: list[Chunk] = []
        """Chunks with free pages."""
        self._leaving: list[tuple[Fence, list[Run]]] = []

    @property
    def left(self) -> int:
        """Pages that can be taken."""
        return self.limit - self.taken

    @property
    def leaving(self) -> int:
        """Pages that were given back, and that a copy still uses."""
        return sum(run.pages for _, runs in self._leaving for run in runs)

    def take(self, counts: list[int]) -> list[list[Run]]:
        """Takes so many pages for each range, in as few runs as there are. Waits for copies from or to pages that were
        given back, if there are no others."""
        wanted = sum(counts)
        self.collect()
        while self._leaving and self.left < wanted:
            self._leaving[0][0].wait()
            self.collect()
        if self.left < wanted:
            raise OutOfHostMemoryError(
                f"asked for {wanted} pages of host memory; {self.left} of {self.limit} are left. Resume or free other "
                "sequences, or allow more host memory"
            )
        taken: list[list[Run]] = [[] for _ in counts]
        try:
            for count, runs in zip(counts, taken):
                while count:
                    if not self._partial or (count >= CHUNK <= self.limit - self.made):
                        self._make()
                    runs.append(self._take(count))
                    count -= runs[-1].pages
        except BaseException:
            self.give(taken, Fence())
            raise
        return taken

    def give(self, taken: list[list[Run]], fence: Fence) -> None:
        """Gives pages back, which copies use until a fence has passed."""
        self._leaving.append((fence, [run for runs in taken for run in runs]))
        self.collect()

    def collect(self) -> None:
        """Makes pages free that no copy uses any more, as far as the device says."""
        for each in list(self._leaving):
            fence, runs = each
            with suppress(VmmkvError):
                if fence.passed():
                    self._leaving.remove(each)
                    for run in runs:
                        self._free(run)

    def _make(self) -> None:
        """Allocates a chunk."""
        pages = min(CHUNK, 1 << (self.limit - self.made).bit_length() - 1)
        try:
            chunk = Chunk(pages, self.page_size, self.is_pinned)
        except (MemoryError, RuntimeError) as error:  # torch raises either
            raise OutOfHostMemoryError(f"the host has no memory for {pages} pages: {error}") from error
        self.made += pages
        self._partial.append(chunk)

    def _take(self, wanted: int) -> Run:
        """Takes a run of up to so many pages from the chunk that was made, or was partly freed, last."""
        chunk = self._partial[-1]
        first = (chunk.free & -chunk.free).bit_length() - 1
        behind = chunk.free >> first
        pages = min((~behind & behind + 1).bit_length() - 1, wanted)
        chunk.free &= ~((1 << pages) - 1 << first)
        self.taken += pages
        if not chunk.free:
            self._partial.pop()  # last: an interruption may come behind any call
        return Run(chunk, first, pages, chunk.address + first * self.page_size)

    def _free(self, run: Run) -> None:
        """Makes pages free, and gives their chunk back if it has no others."""
        chunk, was_taken = run.chunk, not run.chunk.free
        chunk.free |= (1 << run.pages) - 1 << run.first
        self.taken -= run.pages
        if was_taken:
            self._partial.insert(0, chunk)
        if chunk.free == (1 << chunk.pages) - 1:
            self.made -= chunk.pages
            self._partial.remove(chunk)


def copies(pieces: Iterable[tuple[int, int, int, Run]], records: Sequence[int], first: int, end: int) -> array[int]:
    """Copies of the tokens from `first` to `end` between a row and slots, as words for the core: range, first byte in
    the row, bytes, and their address in host memory. `pieces` is host memory by range and place: range, first byte in
    the row, bytes, and slots; `records` are the bytes of a token in each range. A copy stays in one chunk: CUDA refuses
    one over two allocations, also where they are neighbours."""
    words, chunk = array("q"), None
    for part, start, nbytes, run in pieces:
        low, high = max(start, first * records[part]), min(start + nbytes, end * records[part])
        place = run.address + low - start
        if run.chunk is chunk and tuple(words[-4:]) == (part, low - words[-2], words[-2], place - words[-2]):
            words[-2] += high - low
        elif low < high:
            words.extend((part, low, high - low, place))
            chunk = run.chunk
    return words
