"""Mapping ahead: the mapper's plans, a few frames at a time, from idle memory."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..driver.table import SET_ACCESS
from .booking import refuse, settle
from .growth import larges_for
from .journal import begin, close, emit_row, first_unfilled, plan_fill, plan_pages
from .reclaim import IDLE, supply
from .rows import page_of, pages_for
from .streams import is_captured
from .tables import CACHE, CAPTURED, DONE, EXTENT, LISTS, POOL, ROW, SHORT


@inner
def next_row(cache: int) -> int:
    """Takes the first row from a cache's queue, or -1."""
    c = view(cache, 1, CACHE)[0]
    if c.queue_count == 0:
        return -1
    row = view(c.queue_at, c.num_rows, np.int64)[c.queue_first] + 0
    c.queue_first = (c.queue_first + 1) % c.num_rows
    c.queue_count -= 1
    view(c.pool, 1, POOL)[0].hungry -= 1
    view(c.rows_at, c.num_rows + LISTS, ROW)[row].queued = 0
    return row


@inner
def map_ahead(cache: int, row: int, frames: int, ask: int) -> int:
    """Plans to map up to so many frames behind a row. Returns their number; or `SHORT` or `WAIT`: no memory is idle."""
    c, done = view(cache, 1, CACHE)[0], 0
    large = view(c.pool, 1, POOL)[0].large
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    tokens = min(max(r.length + c.lookahead + c.lookahead // 2, r.expected), c.max_tokens)
    for part in range(c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        page = e.mapped if e.first < e.mapped else page_of(cache, part, r.start)
        ready, end = e.ready if e.first < e.mapped else page, pages_for(cache, part, tokens + c.overread)
        if page < end and done < frames:
            larges = min(larges_for(cache, row, part, page, end), frames - done)
            singles = 0 if larges else min(end - page, frames - done)
            found = supply(c.pool, singles, larges, IDLE, ask)
            if found < 0:
                return found if done == 0 else done
            if found < larges:  # fewer large frames, and single pages in their place
                larges = found
                end = page + larges * large if larges else min(end, page + frames - done)
            end = max(page + larges * large, page + singles if larges == 0 and singles else page)
            if end > page:
                filled = plan_pages(cache, row, part, page, larges, end)
                unfilled = first_unfilled(cache, row, part, ready, page)
                filled = unfilled if unfilled < page else filled
                emit_row(cache, SET_ACCESS, row, part, ready, end - ready, 0)
                if filled < end:
                    plan_fill(cache, row, part, filled, end)
                done += max(larges, singles)
    return done


@entry
def plan_ahead(pool: int, frames: int, ask: int) -> int:
    """Plans to map up to so many frames behind rows that are about to need them. Returns a serial, `DONE` where no row
    needs any, or a reason."""
    p, done = view(pool, 1, POOL)[0], 0
    settle(pool, ask)
    caches = view(p.caches_at, p.caches, np.int64)
    begin(pool)
    for index in range(p.caches):
        row = next_row(caches[index]) if caches[index] else -1
        while row >= 0:
            c = view(caches[index], 1, CACHE)[0]
            r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
            if r.owner and not r.broken and not r.suspended and r.capacity < c.max_tokens:
                found = map_ahead(caches[index], row, frames - done, ask)
                if found < 0 or (p.fills and is_captured(caches[index], row, ask)):
                    r.ahead_at = c.max_tokens + 1  # until its pages change
                    return refuse(pool, CAPTURED if found >= 0 else SHORT, ask) if p.steps else give_up(pool)
                done += found
            if done >= frames:
                return close(pool)
            row = next_row(caches[index])
    return close(pool) if p.steps else give_up(pool)


@inner
def give_up(pool: int) -> int:
    """Closes a journal without steps."""
    view(pool, 1, POOL)[0].pending = 0
    return DONE
