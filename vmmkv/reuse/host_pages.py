"""Pages in host memory, by number: pinned where there is a GPU, in pieces of neighbours.

A piece holds 16 pages, 8, 4, 2 or 1: sizes that torch's allocator of pinned memory does not round up, and of which the
largest is moved at full speed. It is given back when none of its pages is wanted any more and no copy uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

from ..driver.fence import Fence
from ..errors import OutOfHostMemoryError, VmmkvError
from ..memory.frames import LARGE


@dataclass(eq=False)
class Piece:
    """Neighbouring pages.

    Attributes:
        memory: their bytes.
        wanted: how many want any of them.
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


Place = tuple[Piece, int]
"""A piece, and which of its pages."""


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
        self._places: dict[int, Place] = {}
        """By number."""
        self._pieces: set[Piece] = set()
        self._leaving: list[Piece] = []
        """Those that nobody wants, and a copy may use."""
        self._numbers = count()
        self.nbytes = 0
        """Bytes of all pieces."""
        self.leaving_bytes = 0
        """Those of pieces that nobody wants."""
        weakref.finalize(self, _leave_behind, self._pieces).atexit = False

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
                self._pieces.add(piece)
                for index in range(size):
                    number = next(self._numbers)
                    self._places[number] = piece, index
                    numbers.append(number)
        except (MemoryError, RuntimeError) as error:  # torch raises either
            self.drop(numbers)
            raise OutOfHostMemoryError(f"asked for {pages} pages of host memory: {error}") from error
        return numbers

    def drop(self, numbers: Iterable[int]) -> None:
        """Says that pages are not known any more."""
        self.release([self._places.pop(number) for number in numbers])

    def places(self, numbers: Iterable[int]) -> list[Place]:
        """Where pages are."""
        return [self._places[number] for number in numbers]

    def hold(self, places: Iterable[Place]) -> None:
        """Wants pages, whether they stay known or not."""
        for piece, _ in places:
            piece.wanted += 1

    def release(self, places: Iterable[Place]) -> None:
        """Wants them no more."""
        for piece, _ in places:
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
        self._pieces.difference_update(piece for piece in self._leaving if piece not in left)
        self._leaving[:] = left
        self.leaving_bytes -= gone
        self.nbytes -= gone
        for piece in list(_left_behind):
            if piece.is_idle:
                with suppress(ValueError):  # another thread's cache was faster
                    _left_behind.remove(piece)

    def use(self, places: Iterable[Place], fence: Fence | None) -> None:
        """Says when copies that use pages have ended: with a fence, or, for now, nobody knows."""
        for piece in {piece for piece, _ in places}:
            piece.fence = fence

    def runs(self, places: Sequence[Place]) -> Iterator[Run]:
        """Places as runs of neighbours, as few as there are."""
        begin = 0
        while begin < len(places):
            piece, index = places[begin]
            end = begin + 1
            while end < len(places) and places[end] == (piece, index + end - begin):
                end += 1
            yield Run(begin, end, piece.memory.data_ptr() + index * self._page_size)
            begin = end

    def clear(self, finished: bool) -> None:
        """Drops all, in whatever state the books are.

        Args:
            finished: whether all copies are known to have ended.
        """
        if not finished:
            _leave_behind(self._pieces)
        self._places.clear()
        self._pieces.clear()
        self._leaving.clear()
        self.nbytes = self.leaving_bytes = 0


_left_behind: list[Piece] = []
"""Pieces of caches that are gone, which copies may use."""


def _leave_behind(pieces: set[Piece]) -> None:
    """Keeps what copies may use for a while longer than who had it."""
    _left_behind.extend(piece for piece in pieces if not piece.is_idle)
