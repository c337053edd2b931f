"""Copies between rows and slots, as words for the core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .slots import Run


def copies(taken: list[list[Run]], page_size: int, bounds: Iterable[tuple[int, int, int]]) -> Iterator[int]:
    """Copies of four numbers each: range, first byte in the row, bytes, and their address in host memory.

    Args:
        taken: the slots of each range.
        bounds: for each range the byte of a row where its slots begin, and the bytes that are copied: first and end.
    """
    for part, (runs, (at, first, end)) in enumerate(zip(taken, bounds)):
        for run in runs:
            low, high = max(at, first), min(at + run.pages * page_size, end)
            if low < high:
                yield from (part, low, high - low, run.address + low - at)
            at += run.pages * page_size
