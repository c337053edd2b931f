"""Mapping ahead: the mapper's plans, a few frames at a time, from idle memory."""

from ..compiled import entry, inner
from .access import cache_of, caches_of, pool_of, row_at, words_at
from .booking import refuse, settle
from .codes import CAPTURED, DONE, SHORT
from .growth import first_missing, larges_for
from .journal import begin, close, close_if_any, plan_new
from .pages import pages_for
from .reclaim import IDLE, supply
from .streams import is_captured


@inner
def next_row(cache: int) -> int:
    """Takes the first row from a cache's queue, or -1."""
    c = cache_of(cache)
    if c.queue_count == 0:
        return -1
    row = words_at(c.queue_at, c.num_rows)[c.queue_first] + 0
    c.queue_first = (c.queue_first + 1) % c.num_rows
    c.queue_count -= 1
    pool_of(c.pool).hungry -= 1
    row_at(cache, row).queued = 0
    return row


@inner
def map_ahead(cache: int, row: int, frames: int, ask: int) -> int:
    """Plans to map up to so many frames behind a row. Returns their number; or `SHORT` or `WAIT`: no memory is idle."""
    c, r, done = cache_of(cache), row_at(cache, row), 0
    large = pool_of(c.pool).large
    tokens = min(max(r.length + c.lookahead + c.lookahead // 2, r.expected), c.max_tokens)
    for part in range(c.ranges):
        page, end = first_missing(cache, row, part), pages_for(cache, part, tokens + c.overread)
        if page >= end or done >= frames:
            continue
        larges = min(larges_for(cache, row, part, page, end, 1), frames - done)
        singles = 0 if larges else min(end - page, frames - done)
        found = supply(c.pool, singles, larges, IDLE, ask)
        if found < 0:
            return found if done == 0 else done
        larges = min(larges, found)
        end = page + (larges * large if larges else singles)
        if end > page:
            plan_new(cache, row, part, page, larges, end)
            done += max(larges, singles)
    return done


@entry
def plan_ahead(pool: int, frames: int, ask: int) -> int:
    """Plans to map up to so many frames behind queued rows. Returns a serial, `DONE` for no frames, or a reason."""
    p, caches, done = pool_of(pool), caches_of(pool), 0
    settle(pool, ask)
    begin(pool)
    for index in range(p.caches):
        cache = caches[index]
        row = next_row(cache) if cache else -1
        while row >= 0:
            r, most = row_at(cache, row), cache_of(cache).max_tokens
            if r.owner and not r.broken and not r.suspended and r.capacity < most:
                found = map_ahead(cache, row, frames - done, ask)
                if found < 0 or (p.fills and is_captured(cache, row, ask)):
                    r.ahead_at = most + 1  # until its pages change
                    return refuse(pool, CAPTURED if found >= 0 else SHORT, ask) if p.steps else close_if_any(pool, DONE)
                done += found
            if done >= frames:
                return close(pool)
            row = next_row(cache)
    return close_if_any(pool, DONE)
