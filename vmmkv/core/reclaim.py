"""Finding frames: free ones, new ones within the budget, then surplus pages, the least recently used first."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from ..driver.running import enter
from ..driver.running import leave as leave_context
from ..driver.table import CREATE, RELEASE, UNMAP
from .booking import settle
from .frames import is_gain, number, push_gained, take
from .journal import begin, close, emit, plan_unmap
from .rows import fit, frame_at, link_old, pages_for, span_at, unlink_old
from .streams import pending_slots
from .tables import (
    ACCOUNT,
    ASK,
    CACHE,
    DONE,
    EXTENT,
    FRAME,
    GONE,
    LISTS,
    NO_LIMIT,
    POOL,
    RETIRED,
    ROW,
    SHORT,
    SPARE,
    STEP,
    WAIT,
)

MOST_WAITING = 64
"""Rows in use by the device that a plan passes over before it gives up."""
IDLE, ROWS, ALL = 0, 1, 2
"""Levels of reclaiming: from parked rows; also surplus of live rows beyond their lookahead and expected length; all."""


@inner
def is_idle(cache: int, row: int, ask: int) -> int:
    """Whether the work on a row's surplus has finished. If not, its fence goes to `ask`, unless `ask` has one."""
    c = view(cache, 1, CACHE)[0]
    r, a = view(c.rows_at, c.num_rows + LISTS, ROW)[row], view(ask, 1, ASK)[0]
    if r.slots == 0:
        return 1
    driver = view(c.pool, 1, POOL)[0].driver
    if enter(driver, ask) == 0:
        r.slots = pending_slots(driver, r.slots, r.tick)
        leave_context(driver, ask)
    if r.slots and a.slots == 0:
        a.slots, a.tick = r.slots, r.tick
    return 1 if r.slots == 0 else 0


@inner
def take_back(cache: int, row: int, part: int, first: int, wanted: int) -> int:
    """Plans to unmap pages from the end of a row, down to `first`, until so many become free. Returns how many become
    free."""
    c, gained = view(cache, 1, CACHE)[0], 0
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    page = e.mapped
    while page > max(first, e.first) and gained < wanted:
        page -= span_at(cache, row, part, page - 1)
        frame = frame_at(cache, part, row, page)
        if is_gain(c.pool, frame):
            gained += view(view(c.pool, 1, POOL)[0].frames_at, frame + 1, FRAME)[frame].pages
    return plan_unmap(cache, row, part, page, e.mapped) if page < e.mapped else 0


@inner
def take_parked(cache: int, row: int, wanted: int) -> int:
    """Plans to unmap pages of a parked row, from its end in each range. Returns how many become free."""
    gained = 0
    for part in range(view(cache, 1, CACHE)[0].ranges):
        if gained < wanted:
            gained += take_back(cache, row, part, 0, wanted - gained)
    return gained


@inner
def take_spare(cache: int, row: int, wanted: int, level: int) -> int:
    """Plans to unmap pages that a live row does not use: in front, then behind, at `ALL` also those that it expects to
    need. Returns how many become free."""
    c, gained = view(cache, 1, CACHE)[0], 0
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    for part in range(c.ranges):
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
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
    p, found, stamp = view(pool, 1, POOL)[0], 0, 0
    caches = view(p.caches_at, p.caches, np.int64)
    for index in range(p.caches):
        if caches[index]:
            c = view(caches[index], 1, CACHE)[0]
            rows = view(c.rows_at, c.num_rows + LISTS, ROW)
            row = rows[c.num_rows].younger
            if row != c.num_rows and (found == 0 or rows[row].stamp < stamp):
                found, stamp = caches[index], rows[row].stamp
    return found


@inner
def reclaim(pool: int, wanted: int, level: int, ask: int) -> int:
    """Plans to unmap surplus until so many pages become free. Returns how many do. Rows that the device still uses go
    to the young end, and the fence of the first goes to `ask`."""
    p, gained, waiting = view(pool, 1, POOL)[0], 0, 0
    view(ask, 1, ASK)[0].slots = 0
    cache = oldest(pool)
    while cache and gained < wanted and waiting < MOST_WAITING:
        c = view(cache, 1, CACHE)[0]
        rows = view(c.rows_at, c.num_rows + LISTS, ROW)
        row = rows[c.num_rows].younger
        if is_idle(cache, row, ask):
            gained += take_parked(cache, row, wanted - gained)
        else:
            waiting += 1
            p.clock += 1
            rows[row].stamp = p.clock
            unlink_old(cache, row)
            link_old(cache, row)
        cache = oldest(pool)
    caches, _limit = view(p.caches_at, p.caches, np.int64), MOST_WAITING
    for wave in range(ROWS, level + 1):
        for index in range(p.caches):
            if caches[index]:
                gained += reclaim_spare(caches[index], wanted - gained, wave, ask)
    steps = view(p.steps_at, p.max_steps, STEP)
    for index in range(p.steps if level == ALL else 0):  # rows that have given some of it are on no list by now
        s = steps[index]
        if gained < wanted and s.kind == UNMAP and is_live(s.cache, s.row):
            gained += take_spare(s.cache, s.row, wanted - gained, ALL)
    return gained


@inner
def is_live(cache: int, row: int) -> int:
    """Whether a sequence has a row."""
    c = view(cache, 1, CACHE)[0]
    return 1 if view(c.rows_at, c.num_rows + LISTS, ROW)[row].owner else 0


@inner
def take_retired(cache: int, wanted: int, ask: int) -> int:
    """Plans to unmap whole parked rows whose pages other rows have, too. Returns how many pages become free."""
    c, gained, waiting = view(cache, 1, CACHE)[0], 0, 0
    p, rows = view(c.pool, 1, POOL)[0], view(c.rows_at, c.num_rows + LISTS, ROW)
    row = rows[c.num_rows + RETIRED].next
    while row < c.num_rows and gained < wanted and waiting < MOST_WAITING:
        following = rows[row].next
        if is_idle(cache, row, ask):
            gained += take_parked(cache, row, p.capacity * p.large)
        else:
            waiting += 1
        row = following
    return gained


@entry
def plan_retired(pool: int, wanted: int, ask: int) -> int:
    """Plans to unmap parked rows whose pages other rows have, too, until so many pages are free: a frame that parked
    rows share is no gain in any of them. Returns a serial, `GONE` where there are no such rows, or `WAIT`."""
    p, gained = view(pool, 1, POOL)[0], 0
    settle(pool, ask)
    view(ask, 1, ASK)[0].slots = 0
    begin(pool)
    caches = view(p.caches_at, p.caches, np.int64)
    for index in range(p.caches):
        if caches[index]:
            gained += take_retired(caches[index], wanted - gained, ask)
    if p.steps:
        return close(pool)
    p.pending = 0
    return WAIT if view(ask, 1, ASK)[0].slots else GONE


@entry
def plan_trim_own(cache: int, most: int, ask: int) -> int:
    """Plans to unmap surplus of a cache, until about `most` pages become free. Returns a serial; `GONE` where there is
    none; or `WAIT`."""
    c, gained = view(cache, 1, CACHE)[0], 0
    p, rows = view(c.pool, 1, POOL)[0], view(c.rows_at, c.num_rows + LISTS, ROW)
    settle(c.pool, ask)
    view(ask, 1, ASK)[0].slots = 0
    begin(c.pool)
    row = rows[c.num_rows].younger
    while row < c.num_rows and gained < most:
        following = rows[row].younger
        if is_idle(cache, row, ask):
            gained += take_parked(cache, row, most - gained)
        row = following
    if gained < most:
        reclaim_spare(cache, most - gained, ALL, ask)
    if p.steps == 0:
        take_retired(cache, most, ask)
    if p.steps:
        return close(c.pool)
    p.pending = 0
    return WAIT if view(ask, 1, ASK)[0].slots else GONE


@inner
def reclaim_spare(cache: int, wanted: int, level: int, ask: int) -> int:
    """Plans to unmap surplus of live rows of a cache. Returns how many pages become free."""
    c, gained, waiting = view(cache, 1, CACHE)[0], 0, 0
    rows = view(c.rows_at, c.num_rows + LISTS, ROW)
    row = rows[c.num_rows + SPARE].next
    while row < c.num_rows and gained < wanted and waiting < MOST_WAITING:
        following = rows[row].next
        if is_idle(cache, row, ask):
            found = take_spare(cache, row, wanted - gained, level)
            gained += found
            waiting += 1 if found == 0 else 0
        else:
            waiting += 1
        row = following
    return gained


# ---------------------------------------------------------------------- supply


@inner
def plan_create(pool: int, pages: int) -> int:
    """Plans to create a frame for a later step. Returns its number."""
    p = view(pool, 1, POOL)[0]
    frame = number(pool, pages)
    handle = p.frames_at + frame * FRAME_SIZE
    emit(pool, CREATE, frame, handle, pages * p.page_size, 1)
    p.created += pages
    return frame


FRAME_SIZE = FRAME.itemsize


@inner
def plan_release(pool: int, frame: int) -> None:
    """Plans to release a frame that was taken."""
    p = view(pool, 1, POOL)[0]
    emit(pool, RELEASE, frame, p.frames_at + frame * FRAME_SIZE, 0, 1)


@inner
def can_create(pool: int, ask: int) -> int:
    """Pages that may be created within the budget."""
    p = view(pool, 1, POOL)[0]
    return 0 if view(ask, 1, ASK)[0].frugal else max(p.budget - p.created - p.leased, 0)


@inner
def supply(pool: int, singles: int, larges: int, level: int, ask: int) -> int:
    """Plans to have so many free frames of one page and large ones; single frames replace large ones that cannot be
    had. Returns the number of large frames; or `WAIT` or `SHORT`, with the missing pages in `ask.asked`."""
    p = view(pool, 1, POOL)[0]
    wanted, creatable = singles + larges * p.large, can_create(pool, ask)
    missing = wanted - p.small - p.gained - (p.larges + p.gained_large) * p.large - creatable
    if missing > 0:
        missing -= reclaim(pool, missing, level, ask)
        if missing > 0:
            view(ask, 1, ASK)[0].asked = missing
            return WAIT if view(ask, 1, ASK)[0].slots else SHORT
    # Large frames first, as long as enough pages are left for the single ones.
    there = p.larges + p.gained_large
    most = min(larges, there + creatable // p.large)
    while most > there and singles + (larges - most) * p.large > (
        p.small + p.gained + creatable - (most - there) * p.large
    ):
        most -= 1
    for _ in range(there, most):
        push_gained(pool, plan_create(pool, p.large))
        creatable -= p.large
    singles += (larges - most) * p.large
    for _ in range(p.small + p.gained, singles):
        if creatable < 1:  # release a free large frame, for single ones
            plan_release(pool, take(pool, p.large))
            creatable += p.large
        push_gained(pool, plan_create(pool, 1))
        creatable -= 1
    return most


@inner
def supply_large(pool: int, ask: int) -> int:
    """Plans to have a free large frame, if need be by releasing single ones. Returns `DONE`, `WAIT` or `SHORT`."""
    p = view(pool, 1, POOL)[0]
    creatable = can_create(pool, ask)
    missing = p.large - p.small - p.gained - creatable
    if missing > 0 and p.larges + p.gained_large == 0:
        reclaim(pool, missing, ALL, ask)
    if p.larges + p.gained_large:
        return DONE
    if p.small + p.gained + creatable < p.large:
        view(ask, 1, ASK)[0].asked = p.large - p.small - p.gained - creatable
        return WAIT if view(ask, 1, ASK)[0].slots else SHORT
    for _ in range(creatable, p.large):
        plan_release(pool, take(pool, 1))
    push_gained(pool, plan_create(pool, p.large))
    return DONE


@entry
def plan_limit(pool: int, account: int, pages: int, reserved: int, ask: int) -> int:
    """Sets the budget of the pool (`account` is -1), or the limit and the reservation of an account. Returns `DONE`; or
    `NO_LIMIT`, with the smallest possible limit in `ask.available`."""
    p = view(pool, 1, POOL)[0]
    settle(pool, ask)
    asked = view(ask, 1, ASK)[0]
    if account >= 0:
        a = view(p.accounts_at, p.accounts, ACCOUNT)[account]
        rest = p.committed - max(a.used, a.reserved)
        asked.asked, asked.available = pages, a.used
        if pages < a.used or rest + max(a.used, reserved) > p.budget or reserved > pages:
            return NO_LIMIT
        a.limit, a.reserved = pages, reserved
        p.committed = rest + max(a.used, reserved)
        return DONE
    asked.asked, asked.available = pages, p.committed
    if pages < p.committed:
        return NO_LIMIT
    p.budget = pages
    return DONE


@entry
def plan_trim(pool: int, keep: int, most: int, ask: int) -> int:
    """Plans to release free frames, and surplus, until no more than `keep` pages exist, about `most` pages at a time.
    Returns a serial, `DONE` where nothing is left to do, or `WAIT`."""
    p = view(pool, 1, POOL)[0]
    settle(pool, ask)
    excess = min(p.created - keep, most)
    if excess <= 0:
        return DONE
    begin(pool)
    free = p.small + p.larges * p.large
    if free < excess:
        reclaim(pool, excess - free, ALL, ask)
    while excess > 0 and p.larges + p.gained_large > 0 and (excess >= p.large or p.small + p.gained < excess):
        plan_release(pool, take(pool, p.large))
        excess -= p.large
    while excess > 0 and p.small + p.gained > 0:
        plan_release(pool, take(pool, 1))
        excess -= 1
    if p.steps == 0:
        p.pending = 0
        return WAIT if view(ask, 1, ASK)[0].slots else DONE
    return close(pool)
