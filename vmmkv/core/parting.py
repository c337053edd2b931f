"""Copies before a row may write: a copy takes the place of each frame that other rows or guests have.

The copy is mapped and written in the staging range first (`plan_part`). When the device has made the copy, and has
finished all other work on the row, the copy takes the frame's place (`plan_swap`). A call that fails before the swap
loses nothing. If one fails within the swap, the row is broken: its tokens are in the copy, and `plan_repair` maps that.
"""

from ..compiled import entry, inner
from ..driver.table import COPY, SET_ACCESS
from .access import ask_of, cache_of, extent_at, frame_in, pool_of, row_at, step_in, words_at
from .booking import WITHOUT_FRAME, refuse, settle
from .codes import BROKEN, CAPTURED, CHANGED, DONE, GONE, NO_PAGES, WAIT
from .frames import is_gain, take
from .journal import begin, close, emit, emit_row, plan_unmap
from .pages import active_row, frame_at, row_of
from .reclaim import ALL, is_idle, supply, supply_large
from .rows import available, charge, copies_of, settle_row, track
from .starting import CUT, note
from .streams import fence_row, is_captured
from .tables import IN, OUT, ROW_BITS, STAGE, UNSTAGE


@entry
def can_part(cache: int, ticket: int, pages_at: int, token: int, ask: int) -> int:
    """Whether there is room for all copies that a row needs to have its own pages from some on, one in each range.
    If so, guests are told that tokens from `token` on will be written over: what they hold there can be evicted, and
    they hold no page of the row that was just copied. Returns `DONE`, `GONE`, `SUSPENDED` or `NO_PAGES`."""
    row, a, ranges = active_row(cache, ticket), ask_of(ask), cache_of(cache).ranges
    if row < 0:
        return row
    a.asked, a.available = 0, available(cache)
    for part in range(ranges):
        a.asked += copies_of(cache, row, part, words_at(pages_at, ranges)[part])
    if a.asked > a.available:
        return NO_PAGES
    if token < row_at(cache, row).length:
        note(cache, CUT, row, token)
    return DONE


@entry
def plan_part(cache: int, ticket: int, part: int, page: int, ask: int) -> int:
    """Plans one step towards a row whose pages from `page` on are its own: shared pages behind its tokens are unmapped;
    the last frame below `shared` is made writable, or copied to the staging range.

    Returns a serial, and the caller goes on with `plan_swap` if `ask.row` is 1; `DONE` where nothing is left to do;
    `GONE`, `SUSPENDED`, `BROKEN`, `NO_PAGES`, `SHORT`, `WAIT`, or `CAPTURED`.
    """
    pool, a = cache_of(cache).pool, ask_of(ask)
    settle(pool, ask)
    row = active_row(cache, ticket)
    a.row = a.slots = 0
    if row < 0:
        return row
    if row_at(cache, row).broken:
        return BROKEN
    e = extent_at(cache, row, part)
    page, behind = max(page, e.use_first), max(e.use_end, e.first)
    if e.shared > behind and e.shared > page:
        if not is_idle(cache, row, ask):
            return WAIT
        begin(pool)
        plan_unmap(cache, row, part, behind, e.mapped)
        return close(pool)
    while e.shared > page:
        frame = frame_at(cache, part, row, e.shared - 1)
        pages = frame_in(pool, frame).pages
        last = e.shared - pages
        if not is_gain(pool, frame):
            return plan_copy(cache, row, part, last, pages, ask)
        if last < e.readonly:
            begin(pool)
            step_in(pool, emit_row(cache, SET_ACCESS, row, part, last, pages, 0)).other = 1
            return close(pool)
        track(cache, row, part, last)
    settle_row(cache, row)
    return DONE


@inner
def plan_copy(cache: int, row: int, part: int, page: int, pages: int, ask: int) -> int:
    """Plans to copy a frame of a row to the staging range. Returns a serial, or a reason."""
    pool, a, r, before = cache_of(cache).pool, ask_of(ask), row_at(cache, row), available(cache)
    p = pool_of(pool)
    if before < pages:
        a.asked, a.available = pages, before
        return NO_PAGES
    if is_captured(cache, row, ask):
        return CAPTURED
    begin(pool)
    code = supply_large(pool, ask) if pages > 1 else supply(pool, 1, 0, ALL, ask)
    if code < 0:
        return refuse(pool, code, ask)
    copy = take(pool, pages)
    frame_in(pool, copy).key = r.key
    emit(pool, STAGE, copy, p.staging, pages * p.page_size, 0)
    emit(pool, SET_ACCESS, copy, p.staging, pages * p.page_size, 0)
    s = step_in(pool, emit_row(cache, COPY, row, part, page, pages, 0))
    s.address, s.other = p.staging, s.address
    charge(cache, pages)
    p.staged_for, p.staged_owner, p.staged_part, p.staged_page = cache, r.owner, part, page
    a.row = 1
    return close(pool)


@entry
def fence(cache: int, ticket: int, ask: int) -> int:
    """Writes the fence of all work on a row so far to `ask`. Returns `DONE`, `GONE`, `CAPTURED` or `FAILED`."""
    row, a = row_of(cache, ticket), ask_of(ask)
    if row < 0:
        return GONE
    code = fence_row(cache, row, ask)
    a.slots, a.tick = row_at(cache, row).slots, row_at(cache, row).tick
    return code


@entry
def plan_swap(cache: int, ticket: int, part: int, ask: int) -> int:
    """Plans to put the staged copy in the place of the last frame below a row's `shared`. The caller has waited for the
    row's fence. Returns a serial, `GONE`, `WAIT`, or `CHANGED`: other rows share other pages of the row meanwhile,
    or it is suspended."""
    pool = cache_of(cache).pool
    p = pool_of(pool)
    settle(pool, ask)
    row = row_of(cache, ticket)
    if row < 0 or not p.staged:
        return GONE
    copy = p.staged - 1
    pages = frame_in(pool, copy).pages
    page = extent_at(cache, row, part).shared - pages
    if p.staged_owner != ticket >> ROW_BITS or p.staged_part != part or p.staged_page != page:
        return CHANGED
    if row_at(cache, row).suspended:
        return CHANGED
    ask_of(ask).slots = 0
    if not is_idle(cache, row, ask):  # a guest's copy has begun since
        return WAIT
    begin(pool)
    emit(pool, UNSTAGE, copy, p.staging, pages * p.page_size, 0)
    emit_row(cache, OUT, row, part, page, pages, copy)
    plan_in(cache, row, part, page, pages, copy)
    return close(pool)


@inner
def plan_in(cache: int, row: int, part: int, page: int, pages: int, frame: int) -> None:
    """Plans to map a frame on the page that the page table has it on, and to make it accessible."""
    r = row_at(cache, row)
    if r.broken == WITHOUT_FRAME or not r.broken:
        emit_row(cache, IN, row, part, page, pages, frame)
    step_in(cache_of(cache).pool, emit_row(cache, SET_ACCESS, row, part, page, pages, 0)).other = 1


@entry
def plan_unstage(pool: int, ask: int) -> int:
    """Plans to drop a staged copy that lies in no row, behind all work on the device. Returns a serial, or `DONE`."""
    p = pool_of(pool)
    settle(pool, ask)
    if not p.staged:
        return DONE
    begin(pool)
    emit(pool, UNSTAGE, p.staged - 1, p.staging, frame_in(pool, p.staged - 1).pages * p.page_size, 0)
    return close(pool)


@entry
def plan_repair(cache: int, ticket: int, ask: int) -> int:
    """Plans to map the frame that a broken row lacks. Returns a serial, `DONE` or `GONE`."""
    pool = cache_of(cache).pool
    settle(pool, ask)
    row = row_of(cache, ticket)
    if row < 0:
        return GONE
    r = row_at(cache, row)
    if not r.broken:
        return DONE
    frame = frame_at(cache, r.broken_part, row, r.broken_page)
    begin(pool)
    plan_in(cache, row, r.broken_part, r.broken_page, frame_in(pool, frame).pages, frame)
    return close(pool)
