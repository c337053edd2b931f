"""Frames in several rows: forks, and given frames in front of a new sequence."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..driver.running import enter
from ..driver.running import leave as leave_context
from ..driver.table import MAP, SET_ACCESS, SET_READ_ACCESS
from .booking import refuse, settle
from .growth import larges_for
from .journal import begin, close, emit_row, plan_fill, plan_length, plan_pages, plan_unmap, use_source
from .reclaim import ALL, is_idle, supply
from .rows import (
    add_user,
    available,
    fit,
    frame_at,
    is_over,
    page_of,
    pages_for,
    recount,
    row_of,
    track,
    use,
    use_tokens,
)
from .starting import kept
from .streams import hold_slot, is_captured, order_slots, record_slots
from .tables import (
    ASK,
    BROKEN,
    CACHE,
    CAPTURED,
    COPY,
    DONE,
    EXTENT,
    FAILED,
    FRAME,
    GONE,
    LISTS,
    NO_PAGES,
    NO_TOKEN,
    POOL,
    RANGE,
    ROW,
    ROW_BITS,
    ROW_MASK,
    STEP,
    SUSPENDED,
    WAIT,
)


@inner
def share_page(cache: int, row: int, part: int, page: int, frame: int) -> int:
    """Plans to map a frame that other rows or a guest have. Until the commit the frame counts as used. Returns its
    pages."""
    p = view(view(cache, 1, CACHE)[0].pool, 1, POOL)[0]
    add_user(cache, frame, 1)
    index = emit_row(cache, MAP, row, part, page, view(p.frames_at, p.capacity, FRAME)[frame].pages, frame)
    s = view(p.steps_at, p.max_steps, STEP)[index]
    s.other = 1
    return s.count


@inner
def follow(cache: int, source: int, row: int, ask: int) -> int:
    """Makes a row's stream wait for all work on the source row, and names that stream on a live source. Returns `DONE`,
    `CAPTURED` or `FAILED`."""
    c = view(cache, 1, CACHE)[0]
    driver = view(c.pool, 1, POOL)[0].driver
    rows, a, code = view(c.rows_at, c.num_rows + LISTS, ROW), view(ask, 1, ASK)[0], DONE
    s, r = rows[source], rows[row]
    if s.streams | s.slots | r.streams == 0:
        return DONE
    if is_captured(cache, row, ask):
        return CAPTURED
    if enter(driver, ask):
        return FAILED
    slots, tick = s.slots, s.tick
    if s.streams & ~r.streams:
        code = record_slots(driver, s.streams & ~r.streams, 0, ask)
        slots, tick = slots | a.slots, max(tick, a.tick)
    if code == DONE and r.stream:
        slot = hold_slot(driver, r.stream, 0, ask)
        if order_slots(driver, slots, tick, slot):
            code = FAILED
        elif s.owner and not s.streams >> slot & 1:
            hold_slot(driver, r.stream, 1, ask)
            s.streams |= 1 << slot
    leave_context(driver, ask)
    return code


@inner
def split_page(cache: int, source: int, part: int, tokens: int) -> int:
    """The first page of the first frame of a row that so many tokens do not fill."""
    return fit(cache, source, part, page_of(cache, part, tokens), 0)


@inner
def source_row(cache: int, ticket: int, tokens: int) -> int:
    """The row where a sequence has so many tokens, or has left them; `GONE`, `SUSPENDED`, or
    `NO_TOKEN`."""
    c, row, owner = view(cache, 1, CACHE)[0], ticket & ROW_MASK, ticket >> ROW_BITS
    if ticket < 0 or row >= c.num_rows:
        return GONE
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if owner and r.owner == owner:
        if r.suspended:
            return SUSPENDED
        return row if r.start <= tokens <= r.length else NO_TOKEN
    return row if 0 <= tokens <= kept(cache, row, owner) else GONE


@inner
def covered(cache: int, part: int, frames_at: int) -> int:
    """Pages of a list of frames, or -1: these are not held, or do not lie on a row like that."""
    c, pages, singles = view(cache, 1, CACHE)[0], 0, 0
    p, count = view(c.pool, 1, POOL)[0], view(frames_at, 1, np.int64)[0]
    frames = view(frames_at, count + 1, np.int64)
    for index in range(1, count + 1):
        if not 0 <= frames[index] < p.fresh:
            return -1
        f = view(p.frames_at, p.capacity, FRAME)[frames[index]]
        if f.held < 1 or (f.pages > 1 and singles):
            return -1
        singles += f.pages == 1
        pages += f.pages
    return pages if pages <= view(c.ranges_at, c.ranges, RANGE)[part].row_pages else -1


@inner
def are_right(cache: int, source: int, tokens: int, frames_at: int) -> int:
    """Whether lists of frames can lie in front of so many tokens: in front of all of them, if there is no source."""
    c, cursor = view(cache, 1, CACHE)[0], frames_at
    size = view(c.pool, 1, POOL)[0].page_size
    for part in range(c.ranges):
        pages = covered(cache, part, cursor)
        if pages < 0 or (source < 0 and pages * size < tokens * view(c.ranges_at, c.ranges, RANGE)[part].record):
            return 0
        cursor += 8 * (1 + view(cursor, 1, np.int64)[0])
    return 1 if 0 <= tokens <= c.max_tokens else 0


@entry
def plan_share(cache: int, ticket: int, given: int, tokens: int, length: int, frames_at: int, ask: int) -> int:
    """Plans that a new sequence without tokens begins with the first tokens of another, `given`, which may have left
    its row: on the same frames where these are full, and on a copy of the rest. `frames_at` is 0, or the address of
    numbers of frames that stand for the full ones, for each range `pages` and as many numbers (see
    `vmmkv.core.guests`); then `given` is the sequence that the rest is copied from, or -1 where nothing is.

    The sequence has room for `length` tokens then, but no fewer than it shares. If it is longer than that, no frame
    may reach behind its shared tokens.

    Returns a serial, `GONE`, `SUSPENDED`, `NO_TOKEN`, `BROKEN`, `NO_PAGES`, `SHORT`, `WAIT`, `CAPTURED` or `FAILED`.
    """
    c, source = view(cache, 1, CACHE)[0], -1
    asked, rows = view(ask, 1, ASK)[0], view(c.rows_at, c.num_rows + LISTS, ROW)
    settle(c.pool, ask)
    row = row_of(cache, ticket)
    if row < 0 or rows[row].length:
        return GONE if row < 0 else NO_TOKEN
    if rows[row].suspended:
        return SUSPENDED
    if given != -1 or frames_at == 0:
        source = source_row(cache, given, tokens)
        if source < 0 or source == row:
            return source if source < 0 else NO_TOKEN
        if rows[source].broken:
            return BROKEN
    if frames_at and not are_right(cache, source, tokens, frames_at):
        return NO_TOKEN
    if mapped_anywhere(cache, row) and not is_idle(cache, row, ask):
        return WAIT
    if source >= 0:
        code = follow(cache, source, row, ask)
        if code != DONE:
            return code
    before, start = available(cache), rows[source].start if source >= 0 and frames_at == 0 else 0
    begin(c.pool)
    rows[row].start, cursor, length = start, frames_at, max(length, tokens)
    if source >= 0 and rows[source].owner == 0:
        use_source(cache, source)
    for part in range(c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        if e.first < e.mapped:
            plan_unmap(cache, row, part, e.first, e.mapped)
        split = share_front(cache, row, part, source, tokens, cursor)
        use(cache, row, part, split, split)
        if cursor:
            cursor += 8 * (1 + view(cursor, 1, np.int64)[0])
    need = use_rest(cache, row, length, frames_at)
    if is_over(cache):
        need = use_rest(cache, row, length, 0)
    code = NO_PAGES if is_over(cache) else DONE
    if code == DONE:
        code = supply(c.pool, need & 0xFFFFFFFF, need >> 32, ALL, ask)
    else:
        asked.asked, asked.available = need & 0xFFFFFFFF, before
    if code < 0:
        return give_up(cache, row, code, ask)
    if source >= 0:  # its own surplus may have been taken
        use_source(cache, source)
    larges, cursor = code, frames_at
    for part in range(c.ranges):
        larges = copy_rest(cache, row, part, source, tokens, larges if can_be_large(cache, cursor) else 0, larges)
        if cursor:
            cursor += 8 * (1 + view(cursor, 1, np.int64)[0])
    if view(c.pool, 1, POOL)[0].fills and is_captured(cache, row, ask):
        return give_up(cache, row, CAPTURED, ask)
    serial = close(c.pool)
    plan_length(cache, row, start, length)
    return serial


@inner
def can_be_large(cache: int, frames_at: int) -> int:
    """Whether large frames may lie behind a list of frames: it is there, and ends with one, or is empty."""
    p = view(view(cache, 1, CACHE)[0].pool, 1, POOL)[0]
    if frames_at == 0:
        return 0
    count = view(frames_at, 1, np.int64)[0]
    if count == 0:
        return 1
    return 1 if view(p.frames_at, p.capacity, FRAME)[view(frames_at, count + 1, np.int64)[count]].pages > 1 else 0


@inner
def use_rest(cache: int, row: int, length: int, frames_at: int) -> int:
    """Makes a row use the pages of so many tokens behind those that it shares. Returns the number of single pages that
    it lacks, plus `1 << 32` times the number of large frames, which may lie behind the lists of frames."""
    c, singles, larges, cursor = view(cache, 1, CACHE)[0], 0, 0, frames_at
    large = view(c.pool, 1, POOL)[0].large
    for part in range(c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        split, end = e.use_first, max(pages_for(cache, part, length + c.overread) if length else 0, e.use_first)
        found = larges_for(cache, row, part, split, end) if can_be_large(cache, cursor) else 0
        larges += found
        singles += max(end - split - found * large, 0)
        use(cache, row, part, split, max(end, split + found * large))
        if cursor:
            cursor += 8 * (1 + view(cursor, 1, np.int64)[0])
    return larges << 32 | singles


@inner
def give_up(cache: int, row: int, code: int, ask: int) -> int:
    """Takes back what `plan_share` has planned so far. Returns the code."""
    c = view(cache, 1, CACHE)[0]
    view(c.rows_at, c.num_rows + LISTS, ROW)[row].start = 0
    use_tokens(cache, row, 0)
    return refuse(c.pool, code, ask)


@inner
def mapped_anywhere(cache: int, row: int) -> int:
    """Whether any page of a row is mapped."""
    c = view(cache, 1, CACHE)[0]
    for part in range(row * c.ranges, (row + 1) * c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[part]
        if e.first < e.mapped:
            return 1
    return 0


@inner
def share_front(cache: int, row: int, part: int, source: int, tokens: int, frames_at: int) -> int:
    """Plans to map the frames that a row shares with the source or the guest. Returns the page behind them."""
    c = view(cache, 1, CACHE)[0]
    if frames_at:
        count, page = view(frames_at, 1, np.int64)[0], 0
        frames = view(frames_at, count + 1, np.int64)
        for index in range(1, count + 1):
            page += share_page(cache, row, part, page, frames[index])
    else:
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[source * c.ranges + part]
        page, split = e.use_first, split_page(cache, source, part, tokens)
        if split > e.shared and page < split:
            track(cache, source, part, split)
            recount(cache, source)
        while page < split:
            page += share_page(cache, row, part, page, frame_at(cache, part, source, page))
        page = max(page, e.use_first)
    first = 0 if frames_at else view(c.extents_at, c.num_rows * c.ranges, EXTENT)[source * c.ranges + part].use_first
    if first < page:
        emit_row(cache, SET_READ_ACCESS, row, part, first, page - first, 0)
    return page


@inner
def copy_rest(cache: int, row: int, part: int, source: int, tokens: int, most: int, larges: int) -> int:
    """Plans to map the pages behind the shared ones, on `most` large frames at most, and to copy their tokens from the
    source. Returns how many of `larges` are left."""
    c = view(cache, 1, CACHE)[0]
    p, g = view(c.pool, 1, POOL)[0], view(c.ranges_at, c.ranges, RANGE)[part]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    page, end = e.use_first, e.use_end
    if page >= end:
        return larges
    most = min(larges_for(cache, row, part, page, end), most)
    filled = plan_pages(cache, row, part, page, most, end)
    emit_row(cache, SET_ACCESS, row, part, page, end - page, 0)
    if filled < end:
        plan_fill(cache, row, part, filled, end)
    nbytes = tokens * g.record - page * p.page_size
    if nbytes > 0:
        s = view(p.steps_at, p.max_steps, STEP)[emit_row(cache, COPY, row, part, page, 1, 0)]
        s.nbytes, s.other = nbytes, g.address + (source * g.row_pages + page) * p.page_size
    return larges - most
