"""Prewarming: pages that are created, and mapped in rows, before sequences need them.

With a number of tokens, sequences of that length are started on empty rows and freed, one after another. They leave
parked rows, so later sequences of that length make no driver call. Other pages are free frames; without tokens three
quarters of these are large ones, for prompts, if the cache has large frames.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ..errors import VmmkvError
from . import entries
from .pool import LARGE, TRIMMED, Ask, out_of_pages
from .sequence import check_tokens
from .tables import VACANT_ROWS

if TYPE_CHECKING:
    from .cache import Cache

PROMPTS = 3 / 4
"""The share of large frames: about that of sequences of 1,400 tokens, 16 to a page."""
STOCK = 32
"""Where the mapper works, one page of so many is left free for it."""


def prewarm(cache: Cache, pages: int | None, tokens: int, mapped: int) -> int:
    """Creates pages until a cache has so many, or finds them free; returns how many were created.

    Args:
        pages: in all; None is all that are idle.
        tokens: of each row that is mapped; 0 maps none. None is mapped, either, where sequences have different keys.
        mapped: pages that are mapped for the cache.

    Raises:
        OutOfPagesError: so many are not idle.
        DriverError, StreamCaptureError: a call failed. What was made is given back.
    """
    pool, account = cache.pool, cache.pool.accounts[cache.account]
    check_tokens(tokens, cache.max_seq_len)
    before, free = pool.word("created"), pool.free_pages()
    idle = free + max(pool.word("budget") - before - pool.word("leased"), 0)
    idle = max(min(idle, int(account["limit"]) - mapped), 0)
    ahead = idle if pages is None else max(pages - mapped, 0)
    if ahead > idle:
        raise out_of_pages(ahead, idle)
    rows = _rows(cache, ahead, tokens) if tokens else []
    made = max(ahead - free, 0)
    larges = int(PROMPTS * made) // LARGE if cache.state[0]["large"] else 0
    if rows:
        larges = min(max(len(rows) * sum(_larges(cache, tokens)) - pool.word("larges"), 0), made // LARGE)
    try:
        _make(cache, made - larges * LARGE, larges)
        for row in rows:
            cache.free((cache.start(tokens, row=row),))
    except BaseException:
        _undo(cache, rows, before)
        raise
    return pool.word("created") - before


def _pages(cache: Cache, tokens: int) -> list[int]:
    """Pages of a row with so many tokens, in each range."""
    size, overread = cache.pool.driver.page_size, int(cache.state[0]["overread"])
    return [-(-(tokens + overread) * record // size) for record in cache.records]


def _larges(cache: Cache, tokens: int) -> list[int]:
    """Large frames of such a row, in each range."""
    return [pages // LARGE if cache.state[0]["large"] else 0 for pages in _pages(cache, tokens)]


def _rows(cache: Cache, pages: int, tokens: int) -> list[int]:
    """Empty rows to map so many tokens in: as many as there are pages for."""
    if any(each.rows["key"].any() or each.state[0]["key_of_sequence"] for each in cache.pool.members):
        return []  # nothing says whose the rows would be
    usable = pages - pages // STOCK if cache.state[0]["lookahead"] else pages
    empty = np.flatnonzero(cache.rows["list"][: cache.max_sequences] == VACANT_ROWS)
    return [int(row) for row in empty[: usable // sum(_pages(cache, tokens))]]


def _make(cache: Cache, singles: int, larges: int) -> None:
    """Creates free frames, some of them at a time."""
    while singles or larges:
        now = min(larges, TRIMMED // LARGE), min(singles, TRIMMED)
        cache.pool.change(Ask(), entries.plan_stock, cache.pool.address, now[1], now[0])
        singles, larges = singles - now[1], larges - now[0]


def _undo(cache: Cache, rows: list[int], before: int) -> None:
    """Unmaps rows that have no sequence, and releases free pages until so many exist as before."""
    pool = cache.pool
    with suppress(VmmkvError):
        cache.sweep()
        for row in rows:
            pool.change(Ask(), entries.plan_empty, cache.address, row)
    with suppress(VmmkvError):
        created = pool.word("created")
        pool.trim_to(created - max(min(created - before, pool.free_pages()), 0))
