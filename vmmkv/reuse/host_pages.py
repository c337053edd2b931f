"""Pages in host memory, by number: pinned where there is a GPU, in pieces of neighbours.

A piece holds 16 pages, 8, 4, 2 or 1: sizes that torch's allocator of pinned memory does not round up, and of which the
largest is moved at full speed. It is given back when none of its pages is wanted any more and no copy uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

from ..errors import OutOfHostMemoryError, VmmkvError
from ..memory.fence import Fence
from ..memory.frames import LARGE


@dataclass(eq=False)
class Piece:
    """Neighbouring pages.

    Attributes:
        memory: their bytes.
        wanted: how many of them are.
        fence: passes when no copy uses them; None: one may, and nobody knows when it ends.
    """

    memory: torch.Tensor
    wanted: int
    fence: Fence | None = field(default_factory=Fence)

    @property
    def is_idle(self) -> bool:
        """Whether no copy uses it, as far as the device says."""
        with suppress(VmmkvError):
            return self.fence is not None and self.fence.passed()
        return False


class Run(NamedTuple):
    """Of a list of pages `[begin, end)`, which are neighbours, at an address."""

    begin: int
    end: int
    address: int


class HostPages:
    """See above.

    Args:
        page_size: bytes of a page.
        pinned: whether a GPU copies from there.
    """

    def __init__(self, page_size: int, pinned: bool) -> None:
        self._page_size, self._pinned = page_size, pinned
        self._places: dict[int, tuple[Piece, int]] = {}
        """By number the piece, and which of its pages it is."""
        self._leaving: list[Piece] = []
        """Those that nobody wants, and a copy may use."""
        self._numbers = count()
        self.nbytes = 0
        """Bytes of all pieces."""
        self.leaving_bytes = 0
        """Those of pieces that nobody wants."""
        weakref.finalize(self, _leave_behind, self._places, self._leaving).atexit = False

    def __len__(self) -> int:
        return len(self._places)

    def add(self, pages: int) -> list[int]:
        """Makes room for so many pages; returns their numbers.

        Raises:
            OutOfHostMemoryError: the host has none left.
        """
        numbers: list[int] = []
        try:
            while len(numbers) < pages:
                size = 1 << (min(pages - len(numbers), LARGE).bit_length() - 1)
                memory = torch.empty(size * self._page_size, dtype=torch.uint8, pin_memory=self._pinned)
                self.nbytes += memory.nbytes
                piece = Piece(memory, size)
                for index in range(size):
                    number = next(self._numbers)
                    self._places[number] = piece, index
                    numbers.append(number)
        except (MemoryError, RuntimeError) as error:  # torch raises either
            self.drop(numbers)
            raise OutOfHostMemoryError(f"asked for {pages} pages of host memory: {error}") from error
        return numbers

    def drop(self, numbers: Iterable[int]) -> None:
        """Says that pages are not wanted any more."""
        for number in numbers:
            piece, _ = self._places.pop(number)
            piece.wanted -= 1
            if not piece.wanted:
                self._leaving.append(piece)
                self.leaving_bytes += piece.memory.nbytes
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Gives back what no copy uses.

        Args:
            wait: for copies.

        Raises:
            DriverError: they could not be waited for.
        """
        for piece in self._leaving if wait else ():
            if piece.fence:
                piece.fence.wait()
        left = [piece for piece in self._leaving if not piece.is_idle]
        gone = self.leaving_bytes - sum(piece.memory.nbytes for piece in left)
        self._leaving[:] = left
        self.leaving_bytes -= gone
        self.nbytes -= gone
        for piece in list(_left_behind):
            if piece.is_idle:
                with suppress(ValueError):  # another thread's cache was faster
                    _left_behind.remove(piece)

    def use(self, numbers: Iterable[int], fence: Fence | None) -> None:
        """Says when copies that use pages have ended: with a fence, or, for now, nobody knows."""
        for piece in {self._places[number][0] for number in numbers}:
            piece.fence = fence

    def runs(self, numbers: list[int]) -> Iterator[Run]:
        """Where pages lie, as few runs of neighbours as there are."""
        begin = 0
        while begin < len(numbers):
            piece, index = self._places[numbers[begin]]
            end = begin + 1
            while end < len(numbers) and self._places[numbers[end]] == (piece, index + end - begin):
                end += 1
            yield Run(begin, end, piece.memory.data_ptr() + index * self._page_size)
            begin = end

    def clear(self, finished: bool) -> None:
        """Drops all, in whatever state the books are.

        Args:
            finished: whether all copies are known to have ended.
        """
        if not finished:
            _leave_behind(self._places, self._leaving)
        self._places.clear()
        self._leaving.clear()
        self.nbytes = self.leaving_bytes = 0


_left_behind: list[Piece] = []
"""Pieces of caches that are gone, which copies may use."""


def _leave_behind(places: dict[int, tuple[Piece, int]], leaving: list[Piece]) -> None:
    """Keeps what copies may use for a while longer than who had it."""
    pieces = {piece for piece, _ in places.values()} | set(leaving)
    _left_behind.extend(piece for piece in pieces if not piece.is_idle)
