"""The journal: the driver calls of one change, in order, and how many of them are done."""

from ..compiled import entry_without_lock, inner
from ..compiled.native import call, view
from ..driver.running import enter, meter, now
from ..driver.running import leave as leave_context
from ..driver.running import step as driver_step
from ..driver.table import DRIVER, MAP, RELEASE, SET_READ_ACCESS, UNMAP
from .frames import leave, take
from .rows import address_of, frame_at, place, recount, track
from .tables import (
    CACHE,
    COPY,
    EXTENT,
    FILL,
    FRAME,
    FRESH_KEY,
    IN,
    LENGTH,
    LISTS,
    OUT,
    POOL,
    RANGE,
    ROW,
    STAGE,
    STALE,
    STEP,
    UNSTAGE,
)


@inner
def emit(pool: int, kind: int, frame: int, address: int, nbytes: int, other: int) -> int:
    """Adds a step that concerns no row. Returns its number."""
    p = view(pool, 1, POOL)[0]
    s = view(p.steps_at, p.max_steps, STEP)[p.steps]
    s.kind, s.cache, s.row, s.frame, s.address, s.nbytes, s.other = kind, 0, -1, frame, address, nbytes, other
    p.steps += 1
    return p.steps - 1


@inner
def emit_row(cache: int, kind: int, row: int, part: int, page: int, count: int, frame: int) -> int:
    """Adds a step on pages of a row, and makes the row busy. Returns the number of the step."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    s = view(p.steps_at, p.max_steps, STEP)[p.steps]
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
    p = view(pool, 1, POOL)[0]
    p.serial += 1
    p.steps = p.calls = p.done = p.status = p.gained = p.gained_large = p.fills = p.source_of = 0
    p.pending = p.serial


@inner
def plan_unmap(cache: int, row: int, part: int, page: int, end: int) -> int:
    """Plans to unmap the first or the last pages of a row, and takes them out of its extents. Returns the pages of
    frames that become free."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    s = view(p.steps_at, p.max_steps, STEP)[emit_row(cache, UNMAP, row, part, page, end - page, 0)]
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
def poison_of(cache: int) -> int:
    """The byte that memory without tokens is filled with: NaN for debugging, unless kernels may read behind lengths."""
    c = view(cache, 1, CACHE)[0]
    return 0 if c.overread else view(c.pool, 1, POOL)[0].poison


@inner
def must_fill(cache: int, row: int, frame: int) -> int:
    """Whether a frame that a row takes may hold bytes of another key, or is to be poisoned."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    key = view(c.rows_at, c.num_rows + LISTS, ROW)[row].key
    return 1 if (f.key != key and (f.key != FRESH_KEY or c.key_of_sequence)) or poison_of(cache) else 0


@inner
def first_unfilled(cache: int, row: int, part: int, page: int, end: int) -> int:
    """The first of pages which are mapped and not ready that is to be filled, or `end`: a fill of it has failed."""
    while page < end and not must_fill(cache, row, frame_at(cache, part, row, page)):
        page += 1
    return page


@inner
def plan_map(cache: int, row: int, part: int, page: int, frame: int) -> None:
    """Plans to map a frame on a page of a row."""
    p = view(view(cache, 1, CACHE)[0].pool, 1, POOL)[0]
    emit_row(cache, MAP, row, part, page, view(p.frames_at, p.capacity, FRAME)[frame].pages, frame)


@inner
def plan_pages(cache: int, row: int, part: int, page: int, larges: int, end: int) -> int:
    """Plans to map free frames from a page on: so many large ones, then single ones up to `end`. Returns the first page
    to fill, with all behind it; or the page behind the last frame, where there is nothing to fill."""
    pool = view(cache, 1, CACHE)[0].pool
    p, first_filled = view(pool, 1, POOL)[0], -1
    while page < end or larges > 0:
        frame = take(pool, p.large if larges > 0 else 1)
        if first_filled < 0 and must_fill(cache, row, frame):
            first_filled = page
        plan_map(cache, row, part, page, frame)
        page += p.large if larges > 0 else 1
        larges -= 1
    return page if first_filled < 0 else first_filled


@inner
def plan_fill(cache: int, row: int, part: int, page: int, end: int) -> None:
    """Plans to fill pages on the stream of the row's sequence. Earlier steps make them accessible."""
    p = view(view(cache, 1, CACHE)[0].pool, 1, POOL)[0]
    s = view(p.steps_at, p.max_steps, STEP)[emit_row(cache, FILL, row, part, page, end - page, 0)]
    s.other = poison_of(cache)
    p.fills += 1


@inner
def plan_fill_cut(cache: int, row: int, part: int, end: int) -> None:
    """Plans to fill what a truncation has left of tokens in front of one, but for pages that others have, too."""
    c = view(cache, 1, CACHE)[0]
    p, g = view(c.pool, 1, POOL)[0], view(c.ranges_at, c.ranges, RANGE)[part]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    first = max(max(r.length, r.start) * g.record, e.shared * p.page_size)
    last = min(r.cut, end) * g.record
    if first < last:
        plan_fill(cache, row, part, 0, 0)
        s = view(p.steps_at, p.max_steps, STEP)[p.steps - 1]
        s.address, s.nbytes = s.address + first, last - first


@inner
def close(pool: int) -> int:
    """Ends the driver calls of a journal; lengths may follow. Returns its serial."""
    p = view(pool, 1, POOL)[0]
    p.calls = p.steps
    return p.serial


# ---------------------------------------------------------------------- running


@inner
def driver_kind(kind: int) -> int:
    """The driver's call for a kind of steps."""
    if kind in (UNSTAGE, OUT):
        return UNMAP
    return MAP if kind in (STAGE, IN) else kind


@inner
def make(pool: int, driver: int, step: int) -> int:
    """Makes the driver call of a step. Returns a status."""
    p, s, d = view(pool, 1, POOL)[0], view(step, 1, STEP)[0], view(driver, 1, DRIVER)[0]
    if s.kind == FILL:
        return call(d.fill, (s.address, s.other, s.nbytes, s.stream))
    if s.kind == COPY:
        return call(d.copy, (s.address, s.other, s.nbytes, s.stream))
    other, address = s.other, s.address
    kind = driver_kind(s.kind)
    if kind == MAP:
        other = view(p.frames_at, p.capacity, FRAME)[s.frame].handle
    return driver_step(driver, kind, address, s.nbytes, other)


@entry_without_lock
def run(pool: int, serial: int, ahead: int) -> int:
    """Makes the driver calls of a journal. Returns the driver's status, or `STALE`."""
    p = view(pool, 1, POOL)[0]
    if p.pending != serial:
        return STALE
    p.ahead = ahead
    driver, scratch, spent = p.driver, p.run_scratch, p.spent_ahead if ahead else p.spent
    status = enter(driver, scratch)
    if status:
        p.status = status
        return status
    steps, start, item = view(p.steps_at, p.max_steps, STEP), now(driver, scratch), STEP_SIZE
    while p.done < p.calls and status == 0:
        kind = steps[p.done].kind
        status = make(pool, driver, p.steps_at + p.done * item)
        p.status = status
        if status == 0:
            p.done += 1
        counted = driver_kind(kind)
        if counted <= RELEASE or counted == SET_READ_ACCESS:
            meter(spent, counted, 1 if status == 0 else 0, 0)
            if status or p.done == p.calls or steps[p.done].kind != kind:
                time = now(driver, scratch)
                meter(spent, counted, 0, time - start)
                start = time
    leave_context(driver, scratch)
    return status


STEP_SIZE = STEP.itemsize


@inner
def plan_length(cache: int, row: int, start: int, length: int) -> None:
    """Plans the start and the length that a sequence has after the commit."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    s = view(p.steps_at, p.max_steps, STEP)[emit(c.pool, LENGTH, length, 0, start, 0)]
    s.cache, s.row, s.page, s.owner = cache, row, r.length, r.owner


@inner
def use_source(cache: int, row: int) -> None:
    """Keeps a row as it is until the journal, which copies from it, is booked."""
    c = view(cache, 1, CACHE)[0]
    p, r = view(c.pool, 1, POOL)[0], view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    p.source_of, p.source = cache, row
    r.busy = 1
    place(cache, row)
