"""Rows by ticket, and the pages of rows: numbers, addresses, and the frames on them."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from .access import cache_of, extent_at, pool_of, range_at, row_at
from .codes import GONE, SUSPENDED
from .tables import ROW_BITS, ROW_MASK


@inner
def row_of(cache: int, ticket: int) -> int:
    """The row that a ticket names, or `GONE`."""
    row, owner = ticket & ROW_MASK, ticket >> ROW_BITS
    return GONE if owner <= 0 or row >= cache_of(cache).num_rows or row_at(cache, row).owner != owner else row


@inner
def active_row(cache: int, ticket: int) -> int:
    """The row of a sequence that is on the device; `GONE` or `SUSPENDED`."""
    row = row_of(cache, ticket)
    return SUSPENDED if row >= 0 and row_at(cache, row).suspended else row


@inner
def frame_at(cache: int, part: int, row: int, page: int) -> int:
    """The frame on a page that is mapped."""
    g = range_at(cache, part)
    return view(g.pages_at, cache_of(cache).num_rows * g.row_pages, np.int32)[row * g.row_pages + page] - 1


@inner
def put_frame(cache: int, part: int, row: int, page: int, pages: int, value: int) -> None:
    """Writes a frame + 1, or 0, to pages of a page table."""
    g = range_at(cache, part)
    table, first = view(g.pages_at, cache_of(cache).num_rows * g.row_pages, np.int32), row * g.row_pages
    for each in range(first + page, first + page + pages):
        table[each] = value


@inner
def pages_for(cache: int, part: int, tokens: int) -> int:
    """The number of pages that so many tokens need."""
    size = pool_of(cache_of(cache).pool).page_size
    return (tokens * range_at(cache, part).record + size - 1) // size


@inner
def pages_with(cache: int, part: int, tokens: int) -> int:
    """The number of pages that so many tokens need, with the overread behind them."""
    return pages_for(cache, part, tokens + cache_of(cache).overread) if tokens else 0


@inner
def page_of(cache: int, part: int, token: int) -> int:
    """The page that a token begins on."""
    return token * range_at(cache, part).record // pool_of(cache_of(cache).pool).page_size


@inner
def address_of(cache: int, row: int, part: int, page: int) -> int:
    """The address of a page of a row."""
    g = range_at(cache, part)
    return g.address + (row * g.row_pages + page) * pool_of(cache_of(cache).pool).page_size


@inner
def span_at(cache: int, row: int, part: int, page: int) -> int:
    """Pages of the frame on a page, which is the frame's first or last."""
    return pool_of(cache_of(cache).pool).large if page < extent_at(cache, row, part).head_end else 1


@inner
def fit(cache: int, row: int, part: int, page: int, up: int) -> int:
    """A page, or the boundary of the large frame around it: its end if `up`, else its first page."""
    large = pool_of(cache_of(cache).pool).large
    return page if page >= extent_at(cache, row, part).head_end else (page + (large - 1) * up) // large * large


@inner
def mapped_pages(cache: int, row: int) -> int:
    """Pages that are mapped in a row."""
    total = 0
    for part in range(cache_of(cache).ranges):
        e = extent_at(cache, row, part)
        total += e.mapped - e.first
    return total
