"""Growing rows: inside mapped pages by one call, onto new pages by a journal."""

from ..compiled import entry, inner
from ..driver.table import COPY
from .access import ask_of, cache_of, extent_at, pool_of, row_at, step_in, words_at
from .booking import refuse, settle
from .codes import BROKEN, CAPTURED, DEAD, DONE, NEEDS, NO_PAGES, NO_TOKEN, PART, RING, SUSPENDED, TOO_LONG, TWICE, WAIT
from .journal import begin, close, emit_row, plan_fill_cut, plan_length, plan_new, plan_unmap_all
from .pages import page_of, pages_for, row_of
from .reclaim import ALL, is_idle, supply
from .rows import available, copies_of, grow_to, is_over, left_for, set_length, settle_row, use, use_tokens
from .streams import is_captured, order_row
from .tables import ROW_MASK


@inner
def look(cache: int, tickets_at: int, count: int, each: int, counts_at: int, ask: int) -> int:
    """Checks sequences that are to grow, and writes down their targets. Returns `DONE` if the rows have room, `NEEDS`
    if pages must be mapped or counted, or a reason."""
    c, a, code = cache_of(cache), ask_of(ask), DONE
    tickets, counts = words_at(tickets_at, count), words_at(counts_at, count if each < 0 else 0)
    if pool_of(c.pool).dead:
        return DEAD
    c.turn += 1
    for index in range(count):
        row = row_of(cache, tickets[index])
        if row < 0:
            a.row = index
            return row
        r = row_at(cache, row)
        if r.turn == c.turn:
            a.row = index
            return TWICE
        r.turn = c.turn
        r.target = r.length + (each if each >= 0 else counts[index])
        if r.target > r.room:
            if r.suspended or r.target > c.max_tokens:
                a.row, a.asked = index, r.target
                return SUSPENDED if r.suspended else TOO_LONG
            code = NEEDS
    return code


@inner
def grow_inside(cache: int, tickets_at: int, count: int, found: int) -> int:
    """Sets rows to their targets, if all targets lie in ready pages. `found` is what `look` has returned. Returns
    `DONE`, `RING` or `NEEDS`."""
    tickets, ring, needing = words_at(tickets_at, count), 0, count if found == NEEDS else 0
    for index in range(needing):
        r = row_at(cache, tickets[index] & ROW_MASK)
        if r.target > r.capacity:
            return NEEDS
    for index in range(needing):
        r = row_at(cache, tickets[index] & ROW_MASK)
        if r.target > r.room:
            use_tokens(cache, tickets[index] & ROW_MASK, r.target)
    if needing and is_over(cache):
        unuse_targets(cache, tickets_at, count)
        return NEEDS
    for index in range(count):
        row = tickets[index] & ROW_MASK
        ring |= set_length(cache, row, row_at(cache, row).target)
    return RING if ring else DONE


@entry
def grow(cache: int, tickets_at: int, count: int, each: int, counts_at: int, ask: int) -> int:
    """Makes room for `each` more tokens in sequences, or for `counts` where `each` is negative, if no page has to be
    mapped. Returns `DONE`, `RING`, `NEEDS`, or a reason. It needs no lock."""
    code = look(cache, tickets_at, count, each, counts_at, ask)
    return grow_inside(cache, tickets_at, count, code) if code in (DONE, NEEDS) else code


@entry
def grow_one(cache: int, ticket: int, tokens: int, held: int) -> int:
    """Makes room for more tokens in one sequence, if its length is `held` or `held` is negative. Returns `DONE`, `RING`
    or `NEEDS`. It needs no lock."""
    row = row_of(cache, ticket)
    if row < 0 or pool_of(cache_of(cache).pool).dead:
        return NEEDS
    length = row_at(cache, row).length
    return NEEDS if held >= 0 and length != held else grow_to(cache, row, length + tokens)


@inner
def first_missing(cache: int, row: int, part: int) -> int:
    """The page behind a row's mapped pages, or the first that it needs."""
    e = extent_at(cache, row, part)
    return e.mapped if e.first < e.mapped else page_of(cache, part, row_at(cache, row).start)


@inner
def larges_for(cache: int, row: int, part: int, page: int, end: int, up: int) -> int:
    """The number of large frames for the pages that a row lacks: none unless all its pages are on large frames, and
    only frames that the row uses, or with `up` is expected to use, as a whole."""
    c, e = cache_of(cache), extent_at(cache, row, part)
    large = pool_of(c.pool).large
    if not c.large or page % large or (e.first < e.mapped and page != e.head_end):
        return 0
    most = pages_for(cache, part, c.max_tokens + c.overread)
    wish = min(max(end, pages_for(cache, part, row_at(cache, row).expected)), most)
    return max(min((end - page + (large - 1) * up) // large, (wish - page) // large), 0)


@inner
def use_targets(cache: int, tickets_at: int, count: int, up: int) -> int:
    """Makes rows use the pages of their targets, and with `up` those of whole large frames. Returns the number of
    single pages that they lack, plus `1 << 32` times the number of large frames."""
    c, tickets, singles, larges = cache_of(cache), words_at(tickets_at, count), 0, 0
    large = pool_of(c.pool).large
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if row_at(cache, row).target <= row_at(cache, row).room:
            continue
        use_tokens(cache, row, row_at(cache, row).target)
        for part in range(c.ranges):
            e, page = extent_at(cache, row, part), first_missing(cache, row, part)
            end = e.use_end
            if page < end:
                found = larges_for(cache, row, part, page, end, up)
                larges += found
                singles += max(end - page - found * large, 0)
                use(cache, row, part, e.use_first, max(end, page + found * large))
    return larges << 32 | singles


@inner
def unuse_targets(cache: int, tickets_at: int, count: int) -> None:
    """Takes `use_targets` back."""
    tickets = words_at(tickets_at, count)
    for index in range(count):
        r = row_at(cache, tickets[index] & ROW_MASK)
        if r.target > r.room:
            use_tokens(cache, tickets[index] & ROW_MASK, r.length)


@inner
def map_row(cache: int, row: int, larges: int) -> int:
    """Plans to map the used pages that a row lacks, on so many large frames at most, and to fill pages with bytes of
    another key. Returns the number of large frames that are left."""
    for part in range(cache_of(cache).ranges):
        e, page = extent_at(cache, row, part), first_missing(cache, row, part)
        wanted = min(larges_for(cache, row, part, page, e.use_end, 0), larges) if page < e.use_end else 0
        larges -= wanted
        plan_new(cache, row, part, page, wanted, e.use_end)
        if not row_at(cache, row).suspended:
            plan_fill_cut(cache, row, part, row_at(cache, row).target)
    return larges


@entry
def plan_growth(cache: int, tickets_at: int, count: int, each: int, counts_at: int, starts_at: int, ask: int) -> int:
    """Plans that sequences grow: all of them or none. With `starts`, sequences without tokens begin there.

    Returns a serial; `DONE` or `RING` where no page is missing any more; or a reason: `PART` and a row that would write
    to shared pages; `WAIT` and a fence; `SHORT` and the pages that guests have to give up.
    """
    pool, a, tickets = cache_of(cache).pool, ask_of(ask), words_at(tickets_at, count)
    settle(pool, ask)
    code = look(cache, tickets_at, count, each, counts_at, ask)
    if code != NEEDS and code != DONE:
        return code
    for index in range(count if starts_at else 0):
        r = row_at(cache, tickets[index] & ROW_MASK)
        a.row = index
        if r.length or not 0 <= words_at(starts_at, count)[index] <= r.target:
            return NO_TOKEN
    if not starts_at:
        inside = grow_inside(cache, tickets_at, count, code)
        if inside != NEEDS:
            return inside
    for index in range(count):
        row = tickets[index] & ROW_MASK
        r = row_at(cache, row)
        if r.broken:
            a.row = row
            return BROKEN
        for part in range(cache_of(cache).ranges):
            if r.target > r.length and page_of(cache, part, r.length) < extent_at(cache, row, part).shared:
                a.row = row
                return PART if starts_at else can_part_all(cache, tickets_at, count, ask)
    begin(pool)
    code = DONE
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if code == DONE and row_at(cache, row).length == 0 and row_at(cache, row).target:
            code = begin_at(cache, row, words_at(starts_at, count)[index] if starts_at else 0, ask)
    code = plan_targets(cache, tickets_at, count, 0, 0, ask) if code == DONE else refuse(pool, code, ask)
    for index in range(count if code < 0 and starts_at else 0):
        row_at(cache, tickets[index] & ROW_MASK).start = 0
        settle_row(cache, tickets[index] & ROW_MASK)
    return code


@inner
def can_part_all(cache: int, tickets_at: int, count: int, ask: int) -> int:
    """`PART`, or `NO_PAGES`: there is no room for what rows will use, and for copies of what others read there."""
    a, tickets, copies, before = ask_of(ask), words_at(tickets_at, count), 0, available(cache)
    use_targets(cache, tickets_at, count, 0)
    for index in range(count):
        r = row_at(cache, tickets[index] & ROW_MASK)
        for part in range(cache_of(cache).ranges if r.target > r.length else 0):
            copies += copies_of(cache, tickets[index] & ROW_MASK, part, page_of(cache, part, r.length))
    left = left_for(cache) - copies
    unuse_targets(cache, tickets_at, count)
    a.asked, a.available = before - left, before
    return NO_PAGES if left < 0 else PART


@inner
def begin_at(cache: int, row: int, start: int, ask: int) -> int:
    """Sets the start of a row without tokens, and plans to unmap pages away from it. Returns `DONE` or `WAIT`."""
    r = row_at(cache, row)
    for part in range(cache_of(cache).ranges):
        e = extent_at(cache, row, part)
        if e.first < e.mapped and not e.first <= page_of(cache, part, start) <= e.mapped:
            ask_of(ask).slots = 0
            if not is_idle(cache, row, ask):
                return WAIT
            plan_unmap_all(cache, row, part)
    r.start = start
    r.room = min(r.room, r.target - 1)
    return DONE


@inner
def are_captured(cache: int, tickets_at: int, count: int, ask: int) -> int:
    """Whether a graph is being captured on the own stream of one of these sequences, or on the caller's."""
    for index in range(count):
        if is_captured(cache, words_at(tickets_at, count)[index] & ROW_MASK, ask):
            return 1
    return 0


@inner
def plan_targets(cache: int, tickets_at: int, count: int, copies_at: int, copies: int, ask: int) -> int:
    """Plans to map the pages that rows lack for their targets, and to make copies to the first (see `plan_resume`). The
    journal is open; a refusal closes it."""
    pool, a, tickets, before = cache_of(cache).pool, ask_of(ask), words_at(tickets_at, count), available(cache)
    if pool_of(pool).poison and are_captured(cache, tickets_at, count, ask):
        pool_of(pool).poisons = 0  # what is only for debugging is no part of a graph
    for index in range(count):
        r, ordered = row_at(cache, tickets[index] & ROW_MASK), DONE
        if r.cut > r.length and not r.suspended:  # it is filled, and other streams may still read it
            ordered = order_row(cache, tickets[index] & ROW_MASK, r.streams, 0, 0, ask)
        if ordered != DONE:
            return refuse(pool, ordered, ask)
    need = use_targets(cache, tickets_at, count, 1)
    if is_over(cache):
        unuse_targets(cache, tickets_at, count)
        need = use_targets(cache, tickets_at, count, 0)
    missing, code = before - left_for(cache), NO_PAGES
    if not is_over(cache):
        code = supply(pool, need & 0xFFFFFFFF, need >> 32, ALL, ask)
    if code < 0:
        unuse_targets(cache, tickets_at, count)
        if code == NO_PAGES:
            a.asked, a.available = missing, before
        return refuse(pool, code, ask)
    for index in range(count):
        row = tickets[index] & ROW_MASK
        if row_at(cache, row).target > row_at(cache, row).room:
            code = map_row(cache, row, code)
    if copies:
        plan_copies(cache, tickets[0] & ROW_MASK, copies_at, copies, 0)
    if pool_of(pool).fills and are_captured(cache, tickets_at, count, ask):
        unuse_targets(cache, tickets_at, count)
        return refuse(pool, CAPTURED, ask)
    serial = close(pool)
    for index in range(count):
        r = row_at(cache, tickets[index] & ROW_MASK)
        if r.target > r.length:
            plan_length(cache, tickets[index] & ROW_MASK, r.start, r.target)
    return serial


@inner
def plan_copies(cache: int, row: int, copies_at: int, copies: int, everywhere: int) -> None:
    """Plans to copy tokens to a row from host memory (see `plan_resume`), unless `everywhere` only those on pages that
    are not mapped."""
    pool, copy = cache_of(cache).pool, words_at(copies_at, (copies, 4))
    for index in range(copies):
        part, first, nbytes = copy[index, 0], copy[index, 1], copy[index, 2]
        mapped = 0 if everywhere else extent_at(cache, row, part).mapped
        begin = max(first, mapped * pool_of(pool).page_size)
        if begin < first + nbytes:
            s = step_in(pool, emit_row(cache, COPY, row, part, 0, 0, 0))
            s.address, s.nbytes, s.other = s.address + begin, first + nbytes - begin, copy[index, 3] + begin - first
