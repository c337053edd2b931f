"""Copies before a row may write: a copy takes the place of each frame that other rows or guests have.

The copy is mapped and written in the staging range first (`plan_part`). When the device has made the copy, and has
finished all other work on the row, the copy takes the frame's place (`plan_swap`). A call that fails before the swap
loses nothing. If one fails within the swap, the row is broken: its tokens are in the copy, and `plan_repair` maps that.
"""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..driver.table import SET_ACCESS
from .booking import WITHOUT_FRAME, refuse, settle
from .frames import is_gain, take
from .journal import begin, close, emit, emit_row, plan_unmap
from .reclaim import ALL, is_idle, supply, supply_large
from .rows import available, charge, copies_of, frame_at, place, recount, row_of, track
from .starting import CUT, note
from .streams import fence_row, is_captured
from .tables import (
    ASK,
    BROKEN,
    CACHE,
    CAPTURED,
    CHANGED,
    COPY,
    DONE,
    EXTENT,
    FRAME,
    GONE,
    IN,
    LISTS,
    NO_PAGES,
    OUT,
    POOL,
    ROW,
    ROW_BITS,
    STAGE,
    STEP,
    SUSPENDED,
    UNSTAGE,
    WAIT,
)


@entry
def can_part(cache: int, ticket: int, pages_at: int, token: int, ask: int) -> int:
    """Whether there is room for all copies that a row needs to have its own pages from some on, one in each range.
    If so, guests are told that tokens from `token` on will be written over: what they hold there can be evicted, and
    they hold no page of the row that was just copied. Returns `DONE`, `GONE`, `SUSPENDED` or `NO_PAGES`."""
    c, row, a = view(cache, 1, CACHE)[0], row_of(cache, ticket), view(ask, 1, ASK)[0]
    if row < 0:
        return GONE
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if r.suspended:
        return SUSPENDED
    a.asked, a.available = 0, available(cache)
    for part in range(c.ranges):
        a.asked += copies_of(cache, row, part, view(pages_at, c.ranges, np.int64)[part])
    if a.asked > a.available:
        return NO_PAGES
    if token < r.length:
        note(cache, CUT, row, r.owner, token)
    return DONE


@entry
def plan_part(cache: int, ticket: int, part: int, page: int, ask: int) -> int:
    """Plans one step towards a row whose pages from `page` on are its own: shared pages behind its tokens are unmapped;
    the last frame below `shared` is made writable, or copied to the staging range.

    Returns a serial, and the caller goes on with `plan_swap` if `ask.row` is 1; `DONE` where nothing is left to do;
    `GONE`, `SUSPENDED`, `BROKEN`, `NO_PAGES`, `SHORT`, `WAIT`, or `CAPTURED`.
    """
    c = view(cache, 1, CACHE)[0]
    settle(c.pool, ask)
    row = row_of(cache, ticket)
    if row < 0:
        return GONE
    p, a = view(c.pool, 1, POOL)[0], view(ask, 1, ASK)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    a.row = a.slots = 0
    if view(c.rows_at, c.num_rows + LISTS, ROW)[row].suspended:
        return SUSPENDED
    if view(c.rows_at, c.num_rows + LISTS, ROW)[row].broken:
        return BROKEN
    page = max(page, e.use_first)
    if e.shared > max(e.use_end, e.first) and e.shared > page:
        if not is_idle(cache, row, ask):
            return WAIT
        begin(c.pool)
        plan_unmap(cache, row, part, max(e.use_end, e.first), e.mapped)
        return close(c.pool)
    while e.shared > page:
        frame = frame_at(cache, part, row, e.shared - 1)
        pages = view(p.frames_at, p.capacity, FRAME)[frame].pages
        if not is_gain(c.pool, frame):
            return plan_copy(cache, row, part, e.shared - pages, pages, ask)
        if e.shared - pages < e.readonly:
            begin(c.pool)
            s = view(p.steps_at, p.max_steps, STEP)[emit_row(cache, SET_ACCESS, row, part, e.shared - pages, pages, 0)]
            s.other = 1
            return close(c.pool)
        track(cache, row, part, e.shared - pages)
    recount(cache, row)
    place(cache, row)
    return DONE


@inner
def plan_copy(cache: int, row: int, part: int, page: int, pages: int, ask: int) -> int:
    """Plans to copy a frame of a row to the staging range. Returns a serial, or a reason."""
    c = view(cache, 1, CACHE)[0]
    p, a = view(c.pool, 1, POOL)[0], view(ask, 1, ASK)[0]
    before = available(cache)
    if before < pages:
        a.asked, a.available = pages, before
        return NO_PAGES
    if is_captured(cache, row, ask):
        return CAPTURED
    begin(c.pool)
    code = supply_large(c.pool, ask) if pages > 1 else supply(c.pool, 1, 0, ALL, ask)
    if code < 0:
        return refuse(c.pool, code, ask)
    copy = take(c.pool, pages)
    view(p.frames_at, p.capacity, FRAME)[copy].key = view(c.rows_at, c.num_rows + LISTS, ROW)[row].key
    size, steps = pages * p.page_size, view(p.steps_at, p.max_steps, STEP)
    emit(c.pool, STAGE, copy, p.staging, size, 0)
    emit(c.pool, SET_ACCESS, copy, p.staging, size, 0)
    s = steps[emit_row(cache, COPY, row, part, page, pages, 0)]
    s.address, s.other = p.staging, s.address
    charge(cache, pages)
    p.staged_for, p.staged_part, p.staged_page = cache, part, page
    p.staged_owner = view(c.rows_at, c.num_rows + LISTS, ROW)[row].owner
    a.row = 1
    return close(c.pool)


@entry
def fence(cache: int, ticket: int, ask: int) -> int:
    """Writes the fence of all work on a row so far to `ask`. Returns `DONE`, `GONE`, `CAPTURED` or `FAILED`."""
    c, row = view(cache, 1, CACHE)[0], row_of(cache, ticket)
    if row < 0:
        return GONE
    r, a = view(c.rows_at, c.num_rows + LISTS, ROW)[row], view(ask, 1, ASK)[0]
    code = fence_row(cache, row, ask)
    a.slots, a.tick = r.slots, r.tick
    return code


@entry
def plan_swap(cache: int, ticket: int, part: int, ask: int) -> int:
    """Plans to put the staged copy in the place of the last frame below a row's `shared`. The caller has waited for the
    row's fence. Returns a serial, `GONE`, `WAIT`, or `CHANGED`: other rows share other pages of the row meanwhile,
    or it is suspended."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    settle(c.pool, ask)
    row = row_of(cache, ticket)
    if row < 0 or not p.staged:
        return GONE
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    copy = p.staged - 1
    pages = view(p.frames_at, p.capacity, FRAME)[copy].pages
    if (
        view(c.rows_at, c.num_rows + LISTS, ROW)[row].suspended
        or p.staged_owner != ticket >> ROW_BITS
        or p.staged_part != part
        or p.staged_page != e.shared - pages
    ):
        return CHANGED
    view(ask, 1, ASK)[0].slots = 0
    if not is_idle(cache, row, ask):  # a guest's copy has begun since
        return WAIT
    begin(c.pool)
    emit(c.pool, UNSTAGE, copy, p.staging, pages * p.page_size, 0)
    emit_row(cache, OUT, row, part, e.shared - pages, pages, copy)
    plan_in(cache, row, part, e.shared - pages, pages, copy)
    return close(c.pool)


@inner
def plan_in(cache: int, row: int, part: int, page: int, pages: int, frame: int) -> None:
    """Plans to map a frame on the page that the page table has it on, and to make it accessible."""
    c = view(cache, 1, CACHE)[0]
    p, r = view(c.pool, 1, POOL)[0], view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if r.broken == WITHOUT_FRAME or not r.broken:
        emit_row(cache, IN, row, part, page, pages, frame)
    view(p.steps_at, p.max_steps, STEP)[emit_row(cache, SET_ACCESS, row, part, page, pages, 0)].other = 1


@entry
def plan_unstage(pool: int, ask: int) -> int:
    """Plans to drop a staged copy that lies in no row. The caller has waited for the device. Returns a serial, or
    `DONE`."""
    p = view(pool, 1, POOL)[0]
    settle(pool, ask)
    if not p.staged:
        return DONE
    begin(pool)
    pages = view(p.frames_at, p.capacity, FRAME)[p.staged - 1].pages
    emit(pool, UNSTAGE, p.staged - 1, p.staging, pages * p.page_size, 0)
    return close(pool)


@entry
def plan_repair(cache: int, ticket: int, ask: int) -> int:
    """Plans to map the frame that a broken row lacks. Returns a serial, `DONE` or `GONE`."""
    c = view(cache, 1, CACHE)[0]
    settle(c.pool, ask)
    row = row_of(cache, ticket)
    if row < 0:
        return GONE
    r, p = view(c.rows_at, c.num_rows + LISTS, ROW)[row], view(c.pool, 1, POOL)[0]
    if not r.broken:
        return DONE
    frame = frame_at(cache, r.broken_part, row, r.broken_page)
    begin(c.pool)
    plan_in(cache, row, r.broken_part, r.broken_page, view(p.frames_at, p.capacity, FRAME)[frame].pages, frame)
    return close(c.pool)
