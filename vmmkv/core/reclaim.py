"""Finding frames: free ones, new ones within the budget, then surplus pages, the least recently used first."""

from ..compiled import entry, inner
from ..driver.table import CREATE, RELEASE, UNMAP, VACANT
from .access import account_in, ask_of, cache_of, caches_of, extent_at, frame_in, pool_of, row_at, rows_of, step_in
from .booking import settle
from .codes import DONE, GONE, NO_LIMIT, SHORT, WAIT
from .frames import UNMADE, is_gain, pop, push_gained, take
from .journal import begin, close_if_any, emit, plan_unmap
from .pages import fit, frame_at, pages_for, span_at
from .rows import link_old, unlink_old
from .streams import unfinished
from .tables import FRAME, FRESH_KEY, RETIRED, SPARE

MOST_WAITING = 64
"""Rows in use by the device that a plan passes over before it gives up."""
IDLE, ROWS, ALL, WHOLE = 0, 1, 2, 3
"""Levels of reclaiming: from parked rows; also surplus of live rows beyond their lookahead and expected length; all;
and alone, whole parked rows that share pages with other rows."""
FRAME_SIZE = FRAME.itemsize


@inner
def is_idle(cache: int, row: int, ask: int) -> int:
    """Whether the work on a row's surplus has finished. If not, its fence goes to `ask`, unless `ask` has one."""
    r, a = row_at(cache, row), ask_of(ask)
    r.slots = unfinished(pool_of(cache_of(cache).pool).driver, r.slots, r.tick, ask)
    if r.slots and a.slots == 0:
        a.slots, a.tick = r.slots, r.tick
    return 1 if r.slots == 0 else 0


@inner
def take_back(cache: int, row: int, part: int, first: int, wanted: int) -> int:
    """Plans to unmap pages from a row's end, down to `first`, until so many are free. Returns how many are free."""
    pool, e, gained = cache_of(cache).pool, extent_at(cache, row, part), 0
    page = e.mapped
    while page > max(first, e.first) and gained < wanted:
        page -= span_at(cache, row, part, page - 1)
        frame = frame_at(cache, part, row, page)
        gained += frame_in(pool, frame).pages if is_gain(pool, frame) else 0
    return plan_unmap(cache, row, part, page, e.mapped) if page < e.mapped else 0


@inner
def take_parked(cache: int, row: int, wanted: int) -> int:
    """Plans to unmap pages of a parked row, from its end in each range. Returns how many become free."""
    gained = 0
    for part in range(cache_of(cache).ranges):
        gained += take_back(cache, row, part, 0, wanted - gained) if gained < wanted else 0
    return gained


@inner
def take_spare(cache: int, row: int, wanted: int, level: int) -> int:
    """Plans to unmap pages that a live row does not use: in front, then behind, at `ALL` also those that it expects to
    need. Returns how many become free."""
    c, r, gained = cache_of(cache), row_at(cache, row), 0
    for part in range(c.ranges):
        e = extent_at(cache, row, part)
        if e.first < min(e.use_first, e.mapped):
            gained += plan_unmap(cache, row, part, e.first, min(e.use_first, e.mapped))
        keep = e.use_end
        if level < ALL and not r.suspended:
            tokens = min(max(r.expected, r.length + c.lookahead) + c.overread, c.max_tokens + c.overread)
            keep = max(keep, fit(cache, row, part, min(pages_for(cache, part, tokens), e.mapped), 1))
        if gained < wanted and keep < e.mapped:
            gained += take_back(cache, row, part, keep, wanted - gained)
    return gained


@inner
def oldest(pool: int) -> int:
    """The cache with the oldest parked row, or 0."""
    found, stamp, caches = 0, 0, caches_of(pool)
    for index in range(pool_of(pool).caches):
        cache = caches[index]
        if cache:
            row = row_at(cache, cache_of(cache).num_rows).younger
            if row != cache_of(cache).num_rows and (found == 0 or row_at(cache, row).stamp < stamp):
                found, stamp = cache, row_at(cache, row).stamp
    return found


@inner
def reclaim(pool: int, wanted: int, level: int, ask: int) -> int:
    """Plans to unmap surplus until so many pages become free. Returns how many do. Rows that the device still uses go
    to the young end, and the fence of the first goes to `ask`."""
    p, caches, gained, waiting = pool_of(pool), caches_of(pool), 0, 0
    ask_of(ask).slots = 0
    cache = oldest(pool)
    while cache and gained < wanted and waiting < MOST_WAITING:
        row = row_at(cache, cache_of(cache).num_rows).younger
        if is_idle(cache, row, ask):
            gained += take_parked(cache, row, wanted - gained)
        else:
            waiting += 1
            p.clock += 1
            row_at(cache, row).stamp = p.clock
            unlink_old(cache, row)
            link_old(cache, row)
        cache = oldest(pool)
    for wave in range(ROWS, level + 1):
        for index in range(p.caches):
            if caches[index]:
                gained += reclaim_spare(caches[index], wanted - gained, wave, ask)
    for index in range(p.steps if level == ALL else 0):  # rows that have given some of it are on no list by now
        s = step_in(pool, index)
        if gained < wanted and s.kind == UNMAP and row_at(s.cache, s.row).owner:
            gained += take_spare(s.cache, s.row, wanted - gained, ALL)
    return gained


@inner
def reclaim_spare(cache: int, wanted: int, level: int, ask: int) -> int:
    """Plans to unmap surplus of live rows of a cache, at `WHOLE` parked rows that share pages. Returns how many pages
    become free."""
    rows, num_rows, gained, waiting = rows_of(cache), cache_of(cache).num_rows, 0, 0
    row, p = rows[num_rows + (RETIRED if level == WHOLE else SPARE)].next, pool_of(cache_of(cache).pool)
    most = p.capacity * p.large
    while row < num_rows and gained < wanted and waiting < MOST_WAITING:
        following, found = rows[row].next, 0
        if is_idle(cache, row, ask):
            whole = level == WHOLE
            found = take_parked(cache, row, most) if whole else take_spare(cache, row, wanted - gained, level)
        gained += found
        waiting += 1 if found == 0 else 0
        row = following
    return gained


@inner
def wait_or(code: int, ask: int) -> int:
    """`WAIT` where `ask` has a fence, otherwise a code."""
    return WAIT if ask_of(ask).slots else code


@entry
def plan_retired(pool: int, wanted: int, ask: int) -> int:
    """Plans to unmap parked rows whose pages other rows have, too, until so many pages are free: a frame that parked
    rows share is no gain in any of them. Returns a serial, `GONE` where there are no such rows, or `WAIT`."""
    p, caches, gained = pool_of(pool), caches_of(pool), 0
    settle(pool, ask)
    ask_of(ask).slots = 0
    begin(pool)
    for index in range(p.caches):
        if caches[index]:
            gained += reclaim_spare(caches[index], wanted - gained, WHOLE, ask)
    return close_if_any(pool, wait_or(GONE, ask))


@entry
def plan_trim_own(cache: int, most: int, ask: int) -> int:
    """Plans to unmap surplus of a cache, of about `most` pages. Returns a serial, `GONE` for no surplus, or `WAIT`."""
    pool, rows, num_rows, gained = cache_of(cache).pool, rows_of(cache), cache_of(cache).num_rows, 0
    settle(pool, ask)
    ask_of(ask).slots = 0
    begin(pool)
    row = rows[num_rows].younger
    while row < num_rows and gained < most:
        following = rows[row].younger
        if is_idle(cache, row, ask):
            gained += take_parked(cache, row, most - gained)
        row = following
    if gained < most:
        reclaim_spare(cache, most - gained, ALL, ask)
    if pool_of(pool).steps == 0:
        reclaim_spare(cache, most, WHOLE, ask)
    return close_if_any(pool, wait_or(GONE, ask))


# ---------------------------------------------------------------------- supply


@inner
def plan_create(pool: int, pages: int) -> None:
    """Plans to create a frame for a later step."""
    p = pool_of(pool)
    frame = pop(pool, UNMADE) if p.unmade else p.fresh
    p.fresh = max(p.fresh, frame + 1)
    f = frame_in(pool, frame)
    f.handle, f.pages, f.key = VACANT, pages, FRESH_KEY
    emit(pool, CREATE, frame, p.frames_at + frame * FRAME_SIZE, pages * p.page_size, 1)
    p.created += pages
    push_gained(pool, frame)


@inner
def plan_release(pool: int, pages: int) -> None:
    """Plans to release a free frame of a size."""
    frame = take(pool, pages)
    emit(pool, RELEASE, frame, pool_of(pool).frames_at + frame * FRAME_SIZE, 0, 1)


@inner
def can_create(pool: int, ask: int) -> int:
    """Pages that may be created within the budget."""
    p = pool_of(pool)
    return 0 if ask_of(ask).frugal else max(p.budget - p.created - p.leased, 0)


@inner
def lacking(missing: int, ask: int) -> int:
    """`WAIT` or `SHORT`, with the missing pages in `ask.asked`."""
    ask_of(ask).asked = missing
    return wait_or(SHORT, ask)


@inner
def supply(pool: int, singles: int, larges: int, level: int, ask: int) -> int:
    """Plans to have so many free frames of one page and large ones; single frames replace large ones that cannot be
    had. Returns the number of large frames; or `WAIT` or `SHORT`, with the missing pages in `ask.asked`."""
    p, creatable = pool_of(pool), can_create(pool, ask)
    missing = singles + larges * p.large - p.small - p.gained - (p.larges + p.gained_large) * p.large - creatable
    if missing > 0:
        missing -= reclaim(pool, missing, level, ask)
        if missing > 0:
            return lacking(missing, ask)
    # Large frames first, as long as enough pages are left for the single ones.
    there, free = p.larges + p.gained_large, p.small + p.gained + creatable
    most = min(larges, there + creatable // p.large)
    while most > there and singles + (larges - most) * p.large > free - (most - there) * p.large:
        most -= 1
    for _ in range(there, most):
        plan_create(pool, p.large)
        creatable -= p.large
    # Free single frames become large ones: to map them one by one takes longer, now and each time they are used again.
    while most < larges and p.small + p.gained >= p.large and ask_of(ask).frugal == 0:
        for _ in range(p.large):
            plan_release(pool, 1)
        plan_create(pool, p.large)
        most += 1
    singles += (larges - most) * p.large
    for _ in range(p.small + p.gained, singles):
        if creatable < 1:  # release a free large frame, for single ones
            plan_release(pool, p.large)
            creatable += p.large
        plan_create(pool, 1)
        creatable -= 1
    return most


@inner
def supply_large(pool: int, ask: int) -> int:
    """Plans to have a free large frame, if need be by releasing single ones. Returns `DONE`, `WAIT` or `SHORT`."""
    p, creatable = pool_of(pool), can_create(pool, ask)
    missing = p.large - p.small - p.gained - creatable
    if missing > 0 and p.larges + p.gained_large == 0:
        reclaim(pool, missing, ALL, ask)
    if p.larges + p.gained_large:
        return DONE
    if p.small + p.gained + creatable < p.large:
        return lacking(p.large - p.small - p.gained - creatable, ask)
    for _ in range(creatable, p.large):
        plan_release(pool, 1)
    plan_create(pool, p.large)
    return DONE


@entry
def plan_limit(pool: int, account: int, pages: int, reserved: int, ask: int) -> int:
    """Sets the budget of the pool (`account` is -1), or the limit and the reservation of an account. Returns `DONE`; or
    `NO_LIMIT`, with the smallest possible limit in `ask.available`."""
    p, asked = pool_of(pool), ask_of(ask)
    settle(pool, ask)
    asked.asked = pages
    if account < 0:
        asked.available = p.committed
        if pages < p.committed:
            return NO_LIMIT
        p.budget = pages
        return DONE
    a = account_in(pool, account)
    committed = p.committed - max(a.used, a.reserved) + max(a.used, reserved)
    asked.available = a.used
    if pages < a.used or committed > p.budget or reserved > pages:
        return NO_LIMIT
    a.limit, a.reserved, p.committed = pages, reserved, committed
    return DONE


@entry
def plan_trim(pool: int, keep: int, most: int, ask: int) -> int:
    """Plans to release free frames, and surplus, until no more than `keep` pages exist, about `most` pages at a time.
    Returns a serial, `DONE` where nothing is left to do, or `WAIT`."""
    p = pool_of(pool)
    settle(pool, ask)
    excess = min(p.created - keep, most)
    if excess <= 0:
        return DONE
    begin(pool)
    free = p.small + p.larges * p.large
    if free < excess:
        reclaim(pool, excess - free, ALL, ask)
    while excess > 0 and p.larges + p.gained_large > 0 and (excess >= p.large or p.small + p.gained < excess):
        plan_release(pool, p.large)
        excess -= p.large
    while excess > 0 and p.small + p.gained > 0:
        plan_release(pool, 1)
        excess -= 1
    return close_if_any(pool, wait_or(DONE, ask))
