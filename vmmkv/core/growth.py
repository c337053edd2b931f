"""Growing rows: inside mapped pages by one call, onto new pages by a journal."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..driver.table import SET_ACCESS
from .booking import refuse, settle
from .journal import (
    begin,
    close,
    emit_row,
    first_unfilled,
    plan_fill,
    plan_fill_cut,
    plan_length,
    plan_pages,
    plan_unmap,
)
from .reclaim import ALL, is_idle, supply
from .rows import (
    available,
    copies_of,
    grow_to,
    is_over,
    left_for,
    page_of,
    pages_for,
    place,
    recount,
    row_of,
    set_length,
    use,
    use_tokens,
)
from .streams import is_captured
from .tables import (
    ASK,
    BROKEN,
    CACHE,
    CAPTURED,
    COPY,
    DEAD,
    DONE,
    EXTENT,
    GONE,
    LISTS,
    NEEDS,
    NO_PAGES,
    NO_TOKEN,
    PART,
    POOL,
    RING,
    ROW,
    ROW_MASK,
    STEP,
    SUSPENDED,
    TOO_LONG,
    TWICE,
    WAIT,
)


@inner
def look(cache: int, tickets_at: int, count: int, each: int, counts_at: int, ask: int) -> int:
    """Checks sequences that are to grow, and writes down their targets. Returns `DONE` if the rows have room, `NEEDS`
    if pages must be mapped or counted, or a reason."""
    c = view(cache, 1, CACHE)[0]
    rows, tickets = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64)
    counts, code = view(counts_at, count if each < 0 else 0, np.int64), DONE
    if view(c.pool, 1, POOL)[0].dead:
        return DEAD
    c.turn += 1
    for index in range(count):
        row = row_of(cache, tickets[index])
        if row < 0:
            view(ask, 1, ASK)[0].row = index
            return GONE
        r = rows[row]
        if r.turn == c.turn:
            view(ask, 1, ASK)[0].row = index
            return TWICE
        r.turn = c.turn
        r.target = r.length + (each if each >= 0 else counts[index])
        if r.target > r.room:
            if r.suspended:
                view(ask, 1, ASK)[0].row = index
                return SUSPENDED
            if r.target > c.max_tokens:
                view(ask, 1, ASK)[0].row, view(ask, 1, ASK)[0].asked = index, r.target
                return TOO_LONG
            code = NEEDS
    return code


@inner
def grow_inside(cache: int, tickets_at: int, count: int) -> int:
    """Sets rows to their targets, if all targets lie in ready pages. Returns `DONE`, `RING` or `NEEDS`."""
    c, ring, used_from = view(cache, 1, CACHE)[0], 0, count
    rows, tickets = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64)
    for index in range(count):
        r = rows[tickets[index] & ROW_MASK]
        if r.target > r.capacity:
            return NEEDS
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if rows[row].target > rows[row].room:
            use_tokens(cache, row, rows[row].target)
            used_from = min(used_from, index)
    if used_from < count and is_over(cache):
        for index in range(used_from, count):
            row = tickets[index] & ROW_MASK
            if rows[row].target > rows[row].room:
                use_tokens(cache, row, rows[row].length)
        return NEEDS
    for index in range(count):
        row = tickets[index] & ROW_MASK
        is_onto_pages = rows[row].target > rows[row].room
        ring |= set_length(cache, row, rows[row].target)
        if is_onto_pages:
            recount(cache, row)
            place(cache, row)
    return RING if ring else DONE


@entry
def grow(cache: int, tickets_at: int, count: int, each: int, counts_at: int, ask: int) -> int:
    """Makes room for `each` more tokens in sequences, or for `counts` where `each` is negative, if no page has to be
    mapped. Returns `DONE`, `RING`, `NEEDS`, or a reason. It needs no lock."""
    c = view(cache, 1, CACHE)[0]
    code = look(cache, tickets_at, count, each, counts_at, ask)
    if code == NEEDS:
        return grow_inside(cache, tickets_at, count)
    if code != DONE:
        return code
    rows, tickets, ring = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64), 0
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if rows[row].target > rows[row].length:
            ring |= set_length(cache, row, rows[row].target)
    return RING if ring else DONE


@entry
def grow_one(cache: int, ticket: int, tokens: int, held: int) -> int:
    """Makes room for more tokens in one sequence, if its length is `held` or `held` is negative. Returns `DONE`, `RING`
    or `NEEDS`. It needs no lock."""
    c, row = view(cache, 1, CACHE)[0], row_of(cache, ticket)
    if row < 0 or view(c.pool, 1, POOL)[0].dead:
        return NEEDS
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    return NEEDS if held >= 0 and r.length != held else grow_to(cache, row, r.length + tokens)


# ---------------------------------------------------------------------- onto pages


@inner
def first_missing(cache: int, row: int, part: int) -> int:
    """The first page that a row is to use and that is not mapped."""
    c = view(cache, 1, CACHE)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    return e.mapped if e.first < e.mapped else page_of(cache, part, view(c.rows_at, c.num_rows + LISTS, ROW)[row].start)


@inner
def larges_for(cache: int, row: int, part: int, page: int, end: int) -> int:
    """The number of large frames for the pages that a row lacks: none unless all its pages are on large frames, and
    only frames that the row uses, or is expected to use, as a whole."""
    c = view(cache, 1, CACHE)[0]
    large = view(c.pool, 1, POOL)[0].large
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    g_pages = pages_for(cache, part, c.max_tokens + c.overread)
    if not c.large or page % large or (e.first < e.mapped and page != e.head_end):
        return 0
    wish = min(max(end, pages_for(cache, part, r.expected)), g_pages)
    needed = (end - page + large - 1) // large
    return max(min(needed, (wish - page) // large), 0)


@inner
def use_targets(cache: int, tickets_at: int, count: int, allow_large: int) -> int:
    """Makes rows use the pages of their targets. Returns the number of single pages that they lack, plus `1 << 32`
    times the number of large frames."""
    c, singles, larges = view(cache, 1, CACHE)[0], 0, 0
    rows, tickets = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64)
    large = view(c.pool, 1, POOL)[0].large
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if rows[row].target > rows[row].room:
            use_tokens(cache, row, rows[row].target)
            for part in range(c.ranges):
                e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
                page, end = first_missing(cache, row, part), e.use_end
                if page < end:
                    found = larges_for(cache, row, part, page, end) if allow_large else 0
                    larges += found
                    singles += max(end - page - found * large, 0)
                    use(cache, row, part, e.use_first, max(end, page + found * large))
    return larges << 32 | singles


@inner
def unuse_targets(cache: int, tickets_at: int, count: int) -> None:
    """Takes `use_targets` back."""
    c, tickets = view(cache, 1, CACHE)[0], view(tickets_at, count, np.int64)
    rows = view(c.rows_at, c.num_rows + LISTS, ROW)
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if rows[row].target > rows[row].room:
            use_tokens(cache, row, rows[row].length)


@inner
def map_row(cache: int, row: int, larges: int) -> int:
    """Plans to map the used pages that a row lacks, on so many large frames at most, and to fill pages with bytes of
    another key. Returns the number of large frames that are left."""
    c = view(cache, 1, CACHE)[0]
    large, r = view(c.pool, 1, POOL)[0].large, view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    for part in range(c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        page, end, filled = first_missing(cache, row, part), e.use_end, e.use_end
        if page < end:
            wanted = min(larges_for(cache, row, part, page, end), larges)
            larges -= wanted
            filled = plan_pages(cache, row, part, page, wanted, end)
            end = max(end, page + wanted * large)
        ready = e.ready if e.first < e.mapped else page
        if ready < end:
            emit_row(cache, SET_ACCESS, row, part, ready, end - ready, 0)
        unfilled = first_unfilled(cache, row, part, ready, min(page, end))
        filled = unfilled if unfilled < page else filled
        if filled < end:
            plan_fill(cache, row, part, filled, end)
        if not r.suspended:
            plan_fill_cut(cache, row, part, r.target)
    return larges


@entry
def plan_growth(cache: int, tickets_at: int, count: int, each: int, counts_at: int, starts_at: int, ask: int) -> int:
    """Plans that sequences grow: all of them or none. With `starts`, sequences without tokens begin there.

    Returns a serial; `DONE` or `RING` where no page is missing any more; or a reason: `PART` and a row that would write
    to shared pages; `WAIT` and a fence; `SHORT` and the pages that guests have to give up.
    """
    c = view(cache, 1, CACHE)[0]
    pool, asked = c.pool, view(ask, 1, ASK)[0]
    rows, tickets = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64)
    settle(pool, ask)
    code = look(cache, tickets_at, count, each, counts_at, ask)
    if code != NEEDS and code != DONE:
        return code
    if starts_at:
        starts = view(starts_at, count, np.int64)
        for index in range(count):
            r = rows[tickets[index] & ROW_MASK]
            asked.row = index
            if r.length or not 0 <= starts[index] <= r.target:
                return NO_TOKEN
    else:
        inside = grow_inside(cache, tickets_at, count)
        if inside != NEEDS:
            return inside
    for index in range(count):
        row = tickets[index] & ROW_MASK
        for part in range(c.ranges):
            e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
            if rows[row].broken:
                asked.row = row
                return BROKEN
            if rows[row].target > rows[row].length and page_of(cache, part, rows[row].length) < e.shared:
                asked.row = row
                return PART if starts_at else can_part_all(cache, tickets_at, count, ask)
    begin(pool)
    code = DONE
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if code == DONE and rows[row].length == 0 and rows[row].target:
            code = begin_at(cache, row, view(starts_at, count, np.int64)[index] if starts_at else 0, ask)
    code = plan_targets(cache, tickets_at, count, 0, 0, ask) if code == DONE else refuse(pool, code, ask)
    if code < 0 and starts_at:
        for index in range(count):
            rows[tickets[index] & ROW_MASK].start = 0
            recount(cache, tickets[index] & ROW_MASK)
    return code


@inner
def can_part_all(cache: int, tickets_at: int, count: int, ask: int) -> int:
    """`PART`, or `NO_PAGES`: there is no room for what rows will use, and for copies of what others read there."""
    c, asked, copies, before = view(cache, 1, CACHE)[0], view(ask, 1, ASK)[0], 0, available(cache)
    rows, tickets = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64)
    use_targets(cache, tickets_at, count, 0)
    for index in range(count):
        row = tickets[index] & ROW_MASK
        for part in range(c.ranges):
            if rows[row].target > rows[row].length:
                copies += copies_of(cache, row, part, page_of(cache, part, rows[row].length))
    left = left_for(cache) - copies
    unuse_targets(cache, tickets_at, count)
    asked.asked, asked.available = before - left, before
    return NO_PAGES if left < 0 else PART


@inner
def begin_at(cache: int, row: int, start: int, ask: int) -> int:
    """Sets the start of a row without tokens, and plans to unmap pages away from it. Returns `DONE` or `WAIT`."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    for part in range(c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        if e.first < e.mapped and not e.first <= page_of(cache, part, start) <= e.mapped:
            view(ask, 1, ASK)[0].slots = 0
            if not is_idle(cache, row, ask):
                return WAIT
            plan_unmap(cache, row, part, e.first, e.mapped)
    r.start = start
    r.room = min(r.room, r.target - 1)
    return DONE


@inner
def are_captured(cache: int, tickets_at: int, count: int, ask: int) -> int:
    """Whether a graph is being captured on the own stream of one of these sequences, or on the caller's."""
    tickets = view(tickets_at, count, np.int64)
    for index in range(count):
        if is_captured(cache, tickets[index] & ROW_MASK, ask):
            return 1
    return 0


@inner
def plan_targets(cache: int, tickets_at: int, count: int, copies_at: int, copies: int, ask: int) -> int:
    """Plans to map the pages that rows lack for their targets, and to make copies to the first (see `plan_resume`). The
    journal is open; a refusal closes it."""
    p = view(view(cache, 1, CACHE)[0].pool, 1, POOL)[0]
    poison = p.poison
    if poison and are_captured(cache, tickets_at, count, ask):
        p.poison = 0  # what is only for debugging is no part of a graph
    code = plan_pages_of(cache, tickets_at, count, copies_at, copies, ask)
    p.poison = poison
    return code


@inner
def plan_pages_of(cache: int, tickets_at: int, count: int, copies_at: int, copies: int, ask: int) -> int:
    """Does what `plan_targets` does."""
    c = view(cache, 1, CACHE)[0]
    pool, asked = c.pool, view(ask, 1, ASK)[0]
    rows, tickets = view(c.rows_at, c.num_rows + LISTS, ROW), view(tickets_at, count, np.int64)
    before = available(cache)
    need = use_targets(cache, tickets_at, count, 1)
    if is_over(cache):
        unuse_targets(cache, tickets_at, count)
        need = use_targets(cache, tickets_at, count, 0)
    if is_over(cache):
        missing = before - left_for(cache)
        unuse_targets(cache, tickets_at, count)
        asked.asked, asked.available = missing, before
        return refuse(pool, NO_PAGES, ask)
    larges = supply(pool, need & 0xFFFFFFFF, need >> 32, ALL, ask)
    if larges < 0:
        unuse_targets(cache, tickets_at, count)
        return refuse(pool, larges, ask)
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if rows[row].target > rows[row].room:
            larges = map_row(cache, row, larges)
    if copies:
        plan_copies(cache, tickets[0] & ROW_MASK, copies_at, copies)
    if view(pool, 1, POOL)[0].fills and are_captured(cache, tickets_at, count, ask):
        unuse_targets(cache, tickets_at, count)
        return refuse(pool, CAPTURED, ask)
    serial = close(pool)
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if rows[row].target > rows[row].length:
            plan_length(cache, row, rows[row].start, rows[row].target)
    return serial


@inner
def plan_copies(cache: int, row: int, copies_at: int, copies: int) -> None:
    """Plans to copy tokens to a row from host memory, but for those on pages that are mapped: see `plan_resume`."""
    c, words = view(cache, 1, CACHE)[0], view(copies_at, (copies, 4), np.int64)
    p = view(c.pool, 1, POOL)[0]
    for index in range(copies):
        part, first, nbytes = words[index, 0], words[index, 1], words[index, 2]
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        begin = max(first, e.mapped * p.page_size)
        if begin < first + nbytes:
            s = view(p.steps_at, p.max_steps, STEP)[emit_row(cache, COPY, row, part, 0, 0, 0)]
            s.address, s.nbytes, s.other = s.address + begin, first + nbytes - begin, words[index, 3] + begin - first
