"""How much memory may be taken: bytes, a share of what is free, or tokens."""

from __future__ import annotations

import re
from typing import Protocol

import torch

from .errors import BudgetError, LayoutError
from .layout import KVLayout, shown, whole_number
from .stats import format_bytes

UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}B": size for unit, size in UNITS.items() if unit not in ("", "B")}
UNITS |= {f"{unit}iB": 1 << (10 * power) for power, unit in enumerate("KMGT", start=1)}


def parse_bytes(size: float | str, free: int) -> int:
    """Bytes from `20 * 2**30`, `"20GiB"`, `"20 GB"`, `"80%"` or `0.8` (a share of `free`)."""
    text = shown(size) if isinstance(size, int) else str(size)
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d*)?)\s*(%|[KMGT]?i?B?)\s*", text)
    number, unit = (float(match[1]), match[2]) if match else (-1.0, "")
    if unit == "" and "." in text and 0 < number <= 1:
        number, unit = number * 100, "%"
    if unit == "%" and 0 <= number <= 100:
        return int(number / 100 * free)
    if unit in UNITS and number >= 0:
        return int(number * UNITS[unit])
    asked = text if isinstance(size, int) else repr(size)
    raise BudgetError(f"asked for a size of {asked}; write bytes, '20GiB', or a share of free memory up to '100%'")


class Memory(Protocol):
    """Where pages come from: a driver, or a pool."""

    @property
    def device(self) -> torch.device: ...
    @property
    def page_size(self) -> int: ...
    def memory_info(self) -> tuple[int, int]:
        """Bytes that shares are of, and bytes in all."""


def budget_pages(
    memory: Memory,
    layout: KVLayout,
    max_sequences: int,
    max_bytes: float | str | None,
    max_tokens: int | None,
    overread: int = 0,
) -> int:
    """The largest number of pages that a cache may have at a time.

    Args:
        max_bytes: see `parse_bytes`; rounded down to whole pages.
        max_tokens: instead of bytes, what this many tokens take however they are spread over
            `max_sequences` sequences: of `n` sequences all but one may begin a page more per range.
        overread: tokens that each sequence has mapped behind its end.
    """
    if max_bytes is not None and max_tokens is not None:
        raise BudgetError(f"got max_bytes={max_bytes} and max_tokens={max_tokens}; give one of the two")
    least = len(layout.record_bytes)
    if max_tokens is not None:
        try:
            max_tokens = whole_number("max_tokens", max_tokens)
        except LayoutError as error:
            raise BudgetError(str(error)) from None
        begun = max(min(max_sequences, max_tokens) - 1, 0) * least
        tokens = max_tokens + overread * min(max_sequences, max_tokens)
        pages = layout.pages(tokens, memory.page_size) + begun
        return _check_pages(memory, pages, f"max_tokens={max_tokens}", least)
    return pages_within(memory, "80%" if max_bytes is None else max_bytes, least)


def pages_within(memory: Memory, max_bytes: float | str, least: int = 1, name: str = "max_bytes", held: int = 0) -> int:
    """The largest number of pages within `max_bytes` (see `parse_bytes`), which users call `name`; shares are of what
    is free and of `held` bytes."""
    pages = parse_bytes(max_bytes, memory.memory_info()[0] + held) // memory.page_size
    return _check_pages(memory, pages, f"{name}={max_bytes!r}", least)


def _check_pages(memory: Memory, pages: int, asked: str, least: int) -> int:
    """`pages`, where they are enough to begin with and no more than there are."""
    free, total = memory.memory_info()
    if pages < least:
        raise BudgetError(
            f"asked for {asked}, which is {pages} pages of {memory.page_size} bytes; it takes at least {least} to "
            "begin. Raise it, or make page_size smaller where the device allows"
        )
    if pages * memory.page_size > total:
        raise BudgetError(
            f"asked for {asked}, which is {format_bytes(pages * memory.page_size)}; there are {format_bytes(total)} on "
            f"{memory.device} for it in all, {format_bytes(free)} of them free now"
        )
    return pages
