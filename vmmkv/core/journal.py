"""The journal: the driver calls of one change, in order, and how many of them are done."""

from ..compiled import entry_without_lock, inner
from ..driver.running import enter, meter, now
from ..driver.running import leave as leave_context
from ..driver.running import step as driver_step
from ..driver.table import FILL, MAP, RELEASE, SET_ACCESS, SET_READ_ACCESS, UNMAP
from .access import cache_of, extent_at, frame_in, pool_of, range_at, row_at, step_in
from .codes import STALE
from .frames import leave, take
from .pages import address_of, frame_at
from .rows import place, recount, track
from .tables import FRESH_KEY, IN, LENGTH, OUT, STAGE, UNSTAGE


@inner
def emit(pool: int, kind: int, frame: int, address: int, nbytes: int, other: int) -> int:
    """Adds a step that concerns no row. Returns its number."""
    p = pool_of(pool)
    s = step_in(pool, p.steps)
    s.kind, s.cache, s.row, s.frame, s.address, s.nbytes, s.other = kind, 0, -1, frame, address, nbytes, other
    p.steps += 1
    return p.steps - 1


@inner
def emit_row(cache: int, kind: int, row: int, part: int, page: int, count: int, frame: int) -> int:
    """Adds a step on pages of a row, and makes the row busy. Returns the number of the step."""
    p, r = pool_of(cache_of(cache).pool), row_at(cache, row)
    s = step_in(cache_of(cache).pool, p.steps)
    s.kind, s.cache, s.row, s.range, s.page, s.count, s.frame = kind, cache, row, part, page, count, frame
    s.address = address_of(cache, row, part, page)
    s.nbytes, s.other, s.stream, s.owner = count * p.page_size, 0, r.stream, r.owner
    if not r.busy:
        r.busy = 1
        place(cache, row)
    p.steps += 1
    return p.steps - 1


@inner
def begin(pool: int) -> None:
    """Opens an empty journal."""
    p = pool_of(pool)
    p.serial += 1
    p.steps = p.calls = p.done = p.status = p.gained = p.gained_large = p.fills = p.source_of = 0
    p.pending, p.poisons = p.serial, p.poison


@inner
def plan_unmap(cache: int, row: int, part: int, page: int, end: int) -> int:
    """Plans to unmap the first or the last pages of a row. Returns the pages of frames that become free."""
    e = extent_at(cache, row, part)
    s = step_in(cache_of(cache).pool, emit_row(cache, UNMAP, row, part, page, end - page, 0))
    s.ready, s.head_end, s.shared, s.readonly = e.ready, e.head_end, e.shared, e.readonly
    gained = leave(cache, part, row, page, end)
    if page == e.first:
        e.first = end
    else:
        e.mapped = page
    e.ready = min(e.ready, e.mapped)
    if e.shared > e.mapped:
        track(cache, row, part, e.mapped)
    e.readonly, e.head_end = min(e.readonly, e.mapped), min(e.head_end, e.mapped)
    if e.first >= e.mapped:
        track(cache, row, part, 0)
        e.first = e.ready = e.mapped = e.head_end = e.readonly = 0
    recount(cache, row)  # its sequence may grow while the journal is run, and not onto these pages
    return gained


@inner
def plan_unmap_all(cache: int, row: int, part: int) -> None:
    """Plans to unmap all pages of a row in a range."""
    e = extent_at(cache, row, part)
    if e.first < e.mapped:
        plan_unmap(cache, row, part, e.first, e.mapped)


@inner
def poison_of(cache: int) -> int:
    """The byte that a journal fills pages without tokens with: NaN for debugging, unless kernels may read behind
    lengths."""
    return 0 if cache_of(cache).overread else pool_of(cache_of(cache).pool).poisons


@inner
def must_fill(cache: int, row: int, frame: int) -> int:
    """Whether a frame that a row takes may hold bytes of another key, or is to be poisoned."""
    c, key = cache_of(cache), row_at(cache, row).key
    was = frame_in(c.pool, frame).key
    return 1 if (was != key and (was != FRESH_KEY or c.key_of_sequence)) or poison_of(cache) else 0


@inner
def plan_fill(cache: int, row: int, part: int, page: int, end: int) -> int:
    """Plans to fill pages, accessible by then, on the stream of the row's sequence. Returns the number of the step."""
    pool, index = cache_of(cache).pool, emit_row(cache, FILL, row, part, page, end - page, 0)
    step_in(pool, index).other = poison_of(cache)
    pool_of(pool).fills += 1
    return index


@inner
def plan_new(cache: int, row: int, part: int, page: int, larges: int, end: int) -> None:
    """Plans to map free frames behind a row's pages, from `page` on: so many large ones, then single ones up to `end`.
    All pages that are not ready are made accessible, and filled from the first on that may hold bytes of another key:
    one of them may be mapped by now, where a call for it has failed."""
    pool, e, at, filled = cache_of(cache).pool, extent_at(cache, row, part), page, -1
    ready = unfilled = e.ready if e.first < e.mapped else page
    end = max(end, page + larges * pool_of(pool).large) if larges else end
    while at < end:
        frame = take(pool, pool_of(pool).large if larges > 0 else 1)
        filled = at if filled < 0 and must_fill(cache, row, frame) else filled
        emit_row(cache, MAP, row, part, at, frame_in(pool, frame).pages, frame)
        at += frame_in(pool, frame).pages
        larges -= 1
    if ready < end:
        emit_row(cache, SET_ACCESS, row, part, ready, end - ready, 0)
    while unfilled < min(page, end) and not must_fill(cache, row, frame_at(cache, part, row, unfilled)):
        unfilled += 1
    filled = unfilled if unfilled < min(page, end) else filled
    if filled >= 0:
        plan_fill(cache, row, part, filled, end)


@inner
def plan_fill_cut(cache: int, row: int, part: int, end: int) -> None:
    """Plans to fill what a truncation has left of tokens in front of one, but for pages that others have, too."""
    pool, record, r = cache_of(cache).pool, range_at(cache, part).record, row_at(cache, row)
    first = max(max(r.length, r.start) * record, extent_at(cache, row, part).shared * pool_of(pool).page_size)
    last = min(r.cut, end) * record
    if first < last:
        s = step_in(pool, plan_fill(cache, row, part, 0, 0))
        s.address, s.nbytes = s.address + first, last - first


@inner
def close(pool: int) -> int:
    """Ends the driver calls of a journal; lengths may follow. Returns its serial."""
    p = pool_of(pool)
    p.calls = p.steps
    return p.serial


@inner
def close_if_any(pool: int, otherwise: int) -> int:
    """Ends the driver calls of a journal: see `close`. Drops a journal without steps, and returns `otherwise`."""
    if pool_of(pool).steps:
        return close(pool)
    pool_of(pool).pending = 0
    return otherwise


@inner
def plan_length(cache: int, row: int, start: int, length: int) -> None:
    """Plans the start and the length that a sequence has after the commit."""
    pool, r = cache_of(cache).pool, row_at(cache, row)
    s = step_in(pool, emit(pool, LENGTH, length, 0, start, 0))
    s.cache, s.row, s.page, s.owner = cache, row, r.length, r.owner


@inner
def use_source(cache: int, row: int) -> None:
    """Keeps a row as it is until the journal, which copies from it, is booked."""
    p = pool_of(cache_of(cache).pool)
    p.source_of, p.source = cache, row
    row_at(cache, row).busy = 1
    place(cache, row)


@inner
def driver_kind(kind: int) -> int:
    """The driver's call for a kind of steps."""
    if kind in (UNSTAGE, OUT):
        return UNMAP
    return MAP if kind in (STAGE, IN) else kind


@entry_without_lock
def run(pool: int, serial: int, ahead: int) -> int:
    """Makes the driver calls of a journal. Returns the driver's status, or `STALE`."""
    p = pool_of(pool)
    if p.pending != serial:
        return STALE
    p.ahead = ahead
    driver, scratch, spent = p.driver, p.run_scratch, p.spent_ahead if ahead else p.spent
    status = enter(driver, scratch)
    if status:
        p.status = status
        return status
    start = now(driver, scratch)
    while p.done < p.calls and status == 0:
        s = step_in(pool, p.done)
        kind, counted = s.kind, driver_kind(s.kind)
        other = frame_in(pool, s.frame).handle if counted == MAP else s.other
        status = driver_step(driver, counted, s.address, s.nbytes, other, s.stream)
        p.status = status
        if status == 0:
            p.done += 1
        if counted <= RELEASE or counted == SET_READ_ACCESS:
            meter(spent, counted, 1 if status == 0 else 0, 0)
            if status or p.done == p.calls or step_in(pool, p.done).kind != kind:
                time = now(driver, scratch)
                meter(spent, counted, 0, time - start)
                start = time
    leave_context(driver, scratch)
    return status
