"""Suspending: a live sequence's tokens leave for host memory, and come back to the same addresses.

`plan_suspend` queues the copies on a stream of the caller's, behind all work on the row, and leaves the row without
tokens. The row's fence covers the copies, so that others get its pages behind them. `plan_resume` maps the pages that
are gone, and queues copies on the sequence's own stream. Pages that nothing has taken meanwhile hold their tokens
still, and stay as they are, also those that other rows share.
"""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import call, view
from ..driver.running import enter, leave
from ..driver.table import DRIVER, SCRATCH, STATUS
from .booking import refuse, settle
from .growth import begin_at, plan_targets
from .journal import begin, plan_unmap
from .reclaim import is_idle
from .rows import address_of, place, recount, row_of, use_tokens
from .starting import CUT, note
from .streams import fence_stream, hold_slot, is_captured, order_slots, record_slots
from .tables import (
    ASK,
    BROKEN,
    CACHE,
    CAPTURED,
    CHANGED,
    DONE,
    EXTENT,
    FAILED,
    GONE,
    INTACT,
    LISTS,
    LOST,
    POOL,
    ROW,
    SUSPENDED,
    WAIT,
)


@inner
def order_behind(cache: int, row: int, handle: int, ask: int) -> int:
    """Makes a stream wait for all work on a row, and on the current stream. Returns `DONE`, `FULL`, `CAPTURED` or
    `FAILED`. It needs the context."""
    c, a = view(cache, 1, CACHE)[0], view(ask, 1, ASK)[0]
    driver = view(c.pool, 1, POOL)[0].driver
    r, streams, current = view(c.rows_at, c.num_rows + LISTS, ROW)[row], 0, 0
    if a.current:
        current = hold_slot(driver, a.current, 0, ask)
        if current < 0:
            return current
        streams = 1 << current
    streams |= r.streams
    code = record_slots(driver, streams, a.current, ask)
    if code != DONE or handle == 0:
        return code
    slot = hold_slot(driver, handle, 0, ask)
    if slot < 0:
        return slot
    status = order_slots(driver, streams | r.slots, max(a.tick, r.tick), slot)
    view(ask, SCRATCH, np.int64)[STATUS] = status
    return FAILED if status else DONE


@entry
def plan_suspend(
    cache: int, ticket: int, start: int, length: int, copies_at: int, copies: int, handle: int, ask: int
) -> int:
    """Queues copies of a sequence's tokens, from `start` to `length`, on a stream behind all work on its row; four
    numbers each, as for `plan_resume`. Then the sequence is suspended. It makes no journal.

    Returns `DONE`, and the row's fence covers the copies. Otherwise the sequence is as before, and `ask` has the fence
    of copies that were made: `GONE`, `SUSPENDED`, `BROKEN`, `CHANGED` where it has other tokens, `FULL`, `CAPTURED` or
    `FAILED`.
    """
    c, a, status = view(cache, 1, CACHE)[0], view(ask, 1, ASK)[0], 0
    driver, words = view(c.pool, 1, POOL)[0].driver, view(copies_at, (copies, 4), np.int64)
    settle(c.pool, ask)
    row = row_of(cache, ticket)
    a.slots = 0
    if row < 0:
        return GONE
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if r.suspended or r.broken:
        return SUSPENDED if r.suspended else BROKEN
    if r.start != start or r.length != length:
        return CHANGED
    if enter(driver, ask):
        return FAILED
    code = order_behind(cache, row, handle, ask)
    a.slots = 0
    for index in range(copies):
        if code == DONE and status == 0:
            source = address_of(cache, row, words[index, 0], 0) + words[index, 1]
            status = call(view(driver, 1, DRIVER)[0].copy, (words[index, 3], source, words[index, 2], handle))
    leave(driver, ask)
    if code != DONE:
        return code
    fence_stream(cache, row, handle, ask)
    if status:
        view(ask, SCRATCH, np.int64)[STATUS] = status
        return FAILED
    note(cache, CUT, row, r.owner, 0)
    c.tokens -= r.length - r.start
    r.away, r.away_start, r.suspended = r.length, r.start, INTACT
    r.length = r.start = 0
    use_tokens(cache, row, 0)
    recount(cache, row)
    place(cache, row)
    return DONE


@entry
def plan_resume(cache: int, ticket_at: int, copies_at: int, copies: int, ask: int) -> int:
    """Plans that a suspended sequence has its tokens again, by copies on its own stream. The copies are four numbers
    each, in the order of the row: range, first byte in the row, bytes, and their address in host memory.

    Returns a serial; `DONE` where the sequence has no tokens, or is not suspended; or `GONE`, `NO_PAGES`, `SHORT`,
    `WAIT`, `FULL`, `CAPTURED` or `FAILED`.
    """
    c, a = view(cache, 1, CACHE)[0], view(ask, 1, ASK)[0]
    settle(c.pool, ask)
    row = row_of(cache, view(ticket_at, 1, np.int64)[0])
    a.slots = 0
    if row < 0:
        return GONE
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if r.away == 0:
        r.suspended = 0
        recount(cache, row)
        return DONE
    if r.suspended == LOST and not is_idle(cache, row, ask):
        return WAIT
    code = order_own(cache, row, 0, 0, ask)
    if code != DONE:
        return code
    begin(c.pool)
    for part in range(c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        if r.suspended == LOST and e.first < e.mapped:
            plan_unmap(cache, row, part, e.first, e.mapped)
    r.target = r.away
    code = begin_at(cache, row, r.away_start, ask)
    if code == DONE:
        code = plan_targets(cache, ticket_at, 1, copies_at, copies, ask)
    else:
        refuse(c.pool, code, ask)
    if code < 0:
        r.start = 0
        use_tokens(cache, row, 0)
        recount(cache, row)
        place(cache, row)
    return code


@inner
def order_own(cache: int, row: int, slots: int, tick: int, ask: int) -> int:
    """Makes a row's own stream wait for the row's fence, and another fence. Returns `DONE`, `FULL`, `CAPTURED` or
    `FAILED`."""
    c, status = view(cache, 1, CACHE)[0], 0
    driver, r = view(c.pool, 1, POOL)[0].driver, view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if r.stream == 0:
        return DONE
    if is_captured(cache, row, ask):
        return CAPTURED
    if enter(driver, ask):
        return FAILED
    slot = hold_slot(driver, r.stream, 0, ask)
    if slot >= 0:
        status = order_slots(driver, r.slots | slots, max(r.tick, tick), slot)
    leave(driver, ask)
    view(ask, SCRATCH, np.int64)[STATUS] = status
    return slot if slot < 0 else FAILED if status else DONE
