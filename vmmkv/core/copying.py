"""Copies of tokens: to host memory and back, and between rows. All go on one stream, behind all work on the rows.

A live sequence that is suspended leaves for host memory, and comes back to the same addresses.

`plan_suspend` queues the copies on a stream of the caller's, behind all work on the row, and leaves the row without
tokens. The row's fence covers the copies, so that others get its pages behind them. `plan_resume` maps the pages that
are gone, and queues copies on the sequence's own stream. Pages that nothing has taken meanwhile hold their tokens
still, and stay as they are, also those that other rows share.

A guest holds frames while they are copied, so that no row writes to them. They are copied from a row where they lie;
the row's fence covers the copy.
"""

from ..compiled import entry, inner
from ..compiled.native import call
from ..driver.fencing import SLOTS
from ..driver.running import enter, leave
from .access import ask_of, cache_of, driver_of, extent_at, frame_in, pool_of, row_at, words_at
from .booking import refuse, settle
from .codes import BROKEN, CHANGED, DONE, FAILED, NO_TOKEN, PART, WAIT
from .growth import begin_at, plan_copies, plan_targets
from .journal import begin, close, plan_unmap_all
from .pages import active_row, address_of, frame_at, page_of, row_of
from .reclaim import is_idle
from .rows import recount, set_bounds, settle_row, use_tokens
from .starting import CUT, note
from .streams import fence_stream, order, order_behind, order_row, order_stream, stream_in
from .tables import INTACT, LOST


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
    pool, a, copy, status = cache_of(cache).pool, ask_of(ask), words_at(copies_at, (copies, 4)), 0
    driver = pool_of(pool).driver
    settle(pool, ask)
    row = active_row(cache, ticket)
    a.slots = 0
    if row < 0:
        return row
    r = row_at(cache, row)
    if r.broken:
        return BROKEN
    if r.start != start or r.length != length:
        return CHANGED
    code = order_behind(cache, row, handle, ask)
    if code != DONE:
        return code
    if enter(driver, ask):
        return FAILED
    for index in range(copies):
        if status == 0:
            source = address_of(cache, row, copy[index, 0], 0) + copy[index, 1]
            status = call(driver_of(driver).copy, (copy[index, 3], source, copy[index, 2], handle))
    leave(driver, ask)
    fence_stream(cache, row, handle, ask)
    if status:
        a.status = status
        return FAILED
    note(cache, CUT, row, 0)
    r.away, r.away_start, r.suspended = r.length, r.start, INTACT
    set_bounds(cache, row, 0, 0)
    return DONE


@entry
def plan_resume(cache: int, ticket_at: int, copies_at: int, copies: int, ask: int) -> int:
    """Plans that a suspended sequence has its tokens again, by copies on its own stream. The copies are four numbers
    each, in the order of the row: range, first byte in the row, bytes, and their address in host memory.

    Returns a serial; `DONE` where the sequence has no tokens, or is not suspended; or `GONE`, `NO_PAGES`, `SHORT`,
    `WAIT`, `FULL`, `CAPTURED` or `FAILED`.
    """
    pool = cache_of(cache).pool
    settle(pool, ask)
    row = row_of(cache, words_at(ticket_at, 1)[0])
    ask_of(ask).slots = 0
    if row < 0:
        return row
    r = row_at(cache, row)
    if r.away == 0:
        r.suspended = 0
        recount(cache, row)
        return DONE
    if r.suspended == LOST and not is_idle(cache, row, ask):
        return WAIT
    code = order_row(cache, row, 0, 0, 0, ask)
    if code != DONE:
        return code
    begin(pool)
    for part in range(cache_of(cache).ranges if r.suspended == LOST else 0):
        plan_unmap_all(cache, row, part)
    r.target = r.away
    code = begin_at(cache, row, r.away_start, ask)
    if code == DONE:
        code = plan_targets(cache, ticket_at, 1, copies_at, copies, ask)
    else:
        refuse(pool, code, ask)
    if code < 0:
        r.start = 0
        use_tokens(cache, row, 0)
        settle_row(cache, row)
    return code


@inner
def has(cache: int, row: int, part: int, page: int, frame: int) -> int:
    """Whether a row has a frame on a page, where it can be read."""
    r, e = row_at(cache, row), extent_at(cache, row, part)
    if r.busy or r.broken or not e.first <= page < e.ready:
        return 0
    return 1 if frame_at(cache, part, row, page) == frame else 0


@entry
def copy_frames(
    cache: int, part: int, pages_at: int, frames_at: int, hosts_at: int, count: int, handle: int, ask: int
) -> int:
    """Queues copies of pages of a range, on a stream behind all work on the rows where they lie. The words at
    `pages_at` are the pages, those at `frames_at` the frame on each, and those at `hosts_at` its address in host
    memory: 0 where a copy was queued. The other frames lie in no row that is known.

    Returns `DONE`, or `FULL`, `CAPTURED` or `FAILED`; then copies may be under way.
    """
    p, a, row, last = pool_of(cache_of(cache).pool), ask_of(ask), -1, count - 1
    pages, frames, hosts = words_at(pages_at, count), words_at(frames_at, count), words_at(hosts_at, count)
    while last >= 0:
        f, first = frame_in(cache_of(cache).pool, frames[last]), last
        row = f.place if f.refs == 1 else row  # else perhaps the row of the frame before
        row = row if row >= 0 and has(cache, row, part, pages[last], frames[last]) else -1
        if row >= 0:
            while (
                first > 0
                and pages[first - 1] == pages[first] - 1
                and hosts[first - 1] == hosts[first] - p.page_size
                and has(cache, row, part, pages[first - 1], frames[first - 1])
            ):
                first -= 1
            code = order_behind(cache, row, handle, ask)
            if code != DONE:
                return code
            if enter(p.driver, ask):
                return FAILED
            copy, nbytes = driver_of(p.driver).copy, (last + 1 - first) * p.page_size
            status = call(copy, (hosts[first], address_of(cache, row, part, pages[first]), nbytes, handle))
            leave(p.driver, ask)
            fence_stream(cache, row, handle, ask)
            if status:
                a.status = status
                return FAILED
            for each in range(first, last + 1):
                hosts[each] = 0
        last = first - 1
    a.slots = 0
    return DONE


@entry
def plan_load(
    cache: int, ticket: int, first: int, end: int, copies_at: int, copies: int, slots: int, tick: int, ask: int
) -> int:
    """Plans to copy tokens from `first` to `end` to a sequence that has room for them, on its own stream and behind a
    fence. The copies are as in `plan_resume`.

    Returns a serial, or `GONE`, `SUSPENDED`, `NO_TOKEN`, `PART` where the pages are shared, `FULL`, `CAPTURED` or
    `FAILED`.
    """
    pool = cache_of(cache).pool
    settle(pool, ask)
    row = active_row(cache, ticket)
    if row < 0:
        return row
    r = row_at(cache, row)
    if not r.start <= first < end <= r.length:
        return NO_TOKEN
    for part in range(cache_of(cache).ranges):
        e = extent_at(cache, row, part)
        if page_of(cache, part, first) < max(e.shared, e.readonly):
            return PART
    code = order_row(cache, row, 0, slots, tick, ask)
    if code != DONE:
        return code
    begin(pool)
    plan_copies(cache, row, copies_at, copies, 1)
    return close(pool)


@entry
def copy_rows(
    cache: int, tickets_at: int, count: int, copies_at: int, copies: int, held_at: int, changed: int, handle: int,
    ask: int,
) -> int:  # fmt: skip
    """Makes copies between rows, of each a destination, a source and bytes, in the order of one stream. The first
    `changed` of the rows hold tokens from a start to a length then, which `held` has. Without any the stream comes
    behind all work on the rows, and that is all. It needs no lock.

    Returns `DONE`, or `GONE`, `SUSPENDED`, `CAPTURED`, `FULL` or `FAILED`. If `ask.row` is 1 the rows that
    were to change hold no tokens any more, and the device may still write to them.
    """
    driver, a, code, streams, slots, tick = pool_of(cache_of(cache).pool).driver, ask_of(ask), DONE, 0, 0, 0
    tickets, copy, held = words_at(tickets_at, count), words_at(copies_at, 3 * copies), words_at(held_at, 2 * changed)
    a.row = 0
    for index in range(count):
        row = active_row(cache, tickets[index])
        if row < 0:
            return row
        r = row_at(cache, row)
        streams, slots, tick = streams | r.streams, slots | r.slots, max(tick, r.tick)
    if handle:
        code = order(driver, streams, handle, slots, tick, handle, ask)
    for index in range(count if code == DONE and handle else 0):
        r = row_at(cache, row_of(cache, tickets[index]))
        r.slots, r.tick = r.slots | r.streams, max(r.tick, a.tick)
    if code != DONE or changed == 0:
        return code
    if enter(driver, ask):
        return FAILED
    a.row, status = 1, 0
    for index in range(0, 3 * copies, 3):
        if status == 0:
            status = call(driver_of(driver).copy, (copy[index], copy[index + 1], copy[index + 2], handle))
    leave(driver, ask)
    for slot in range(SLOTS if handle else 0):
        if streams >> slot & 1:
            order_stream(driver, handle, stream_in(driver, slot).handle, ask)
    for index in range(count if handle else 0):
        fence_stream(cache, row_of(cache, tickets[index]), handle, ask)
    a.status = status
    for index in range(changed):
        row, is_done = row_of(cache, tickets[index]), status == 0
        r, start, length = row_at(cache, row), held[2 * index] * is_done, held[2 * index + 1] * is_done
        note(cache, CUT, row, 0)
        cut = max(r.cut, r.length) if cache_of(cache).key_of_sequence else 0
        r.cut = cut if cut > length else 0
        set_bounds(cache, row, start, length)
    a.row = 1 if status else 0
    return FAILED if status else DONE
