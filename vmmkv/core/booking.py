"""Booking: what a journal that was run has changed, and what of it was not done."""

from ..compiled import entry, inner
from ..compiled.native import view
from ..driver.table import CREATE, MAP, RELEASE, SET_ACCESS, SET_READ_ACCESS, UNMAP
from .frames import add_gain, book_map, book_unmap, push_free, settle_frame, stay
from .journal import STEP_SIZE
from .rows import add_user, charge, frame_at, place, put_frame, queue_row, recount, track, use_tokens
from .streams import fence_stream, order_stream
from .tables import (
    ASK,
    CACHE,
    CHANGED,
    COPY,
    DONE,
    EXTENT,
    FAILED,
    FILL,
    FRAME,
    IN,
    LISTS,
    LOST,
    OUT,
    POOL,
    RING,
    ROW,
    STAGE,
    STALE,
    STEP,
    TAKEN_FRAME,
    UNSTAGE,
)

WITHOUT_FRAME, WITHOUT_ACCESS = 1, 2
"""Reasons why a row is broken: the frame of a page is not mapped, or is mapped and cannot be accessed."""


@inner
def book(step: int) -> None:
    """Books a driver call that was made."""
    s = view(step, 1, STEP)[0]
    if s.cache == 0:
        return
    c = view(s.cache, 1, CACHE)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[s.row * c.ranges + s.range]
    end = s.page + s.count
    if s.kind == UNMAP:
        book_unmap(s.cache, s.range, s.row, s.page, s.count)
    elif s.kind == MAP:
        book_map(s.cache, s.range, s.row, s.page, s.frame, s.other)
        r = view(c.rows_at, c.num_rows + LISTS, ROW)[s.row]
        r.suspended = LOST if r.suspended else 0  # until the copy of its tokens is booked
        if s.other:  # a shared frame
            track(s.cache, s.row, s.range, max(e.shared, end))
    elif s.kind == SET_ACCESS:
        e.ready = max(e.ready, end)
        if s.page < e.readonly <= end:
            e.readonly = s.page
        if s.other:  # the row has the frame alone
            track(s.cache, s.row, s.range, s.page)
            view(c.rows_at, c.num_rows + LISTS, ROW)[s.row].broken = 0
    elif s.kind == SET_READ_ACCESS:
        e.ready, e.readonly = max(e.ready, end), max(e.readonly, end)
    elif s.kind == OUT:
        book_swap(step)
    elif s.kind == IN:
        view(c.rows_at, c.num_rows + LISTS, ROW)[s.row].broken = WITHOUT_ACCESS


@inner
def book_swap(step: int) -> None:
    """Books that a shared frame has left a row. The copy is to take its place; until then the row is broken."""
    s = view(step, 1, STEP)[0]
    c = view(s.cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[s.row]
    track(s.cache, s.row, s.range, s.page)
    old, new = frame_at(s.cache, s.range, s.row, s.page), view(p.frames_at, p.capacity, FRAME)[s.frame]
    f = view(p.frames_at, p.capacity, FRAME)[old]
    add_gain(s.cache, old, -1)
    f.refs -= 1
    f.place ^= s.row
    f.uses += r.ended
    add_gain(s.cache, old, 1)
    if f.refs == 0 and f.held == 0:  # others have left it meanwhile
        push_free(c.pool, old)
    new.held, new.refs, new.place = 0, 1, s.row
    new.uses -= r.ended
    add_gain(s.cache, s.frame, 1)
    put_frame(s.cache, s.range, s.row, s.page, s.count, s.frame + 1)
    charge(s.cache, -s.count)
    p.staged = 0
    r.broken, r.broken_part, r.broken_page = WITHOUT_FRAME, s.range, s.page


@inner
def count_pages(pool: int, step: int) -> None:
    """Counts pages that were created or mapped."""
    p, s = view(pool, 1, POOL)[0], view(step, 1, STEP)[0]
    if s.kind == CREATE:
        p.made += view(p.frames_at, p.capacity, FRAME)[s.frame].pages
    elif s.kind == MAP and p.ahead:
        p.mapped_ahead += s.count
    elif s.kind == MAP:
        p.mapped_in_need += s.count


@inner
def unstage(pool: int, frame: int) -> None:
    """Books that a copy has left the staging range. The copy is free unless it lies in a row."""
    p = view(pool, 1, POOL)[0]
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    if f.held:
        f.held, f.moving, p.staged = 0, TAKEN_FRAME, 0
        charge(p.staged_for, -f.pages)


@inner
def release_source(pool: int) -> None:
    """Takes `use_source` back."""
    p = view(pool, 1, POOL)[0]
    c = view(p.source_of, 1, CACHE)[0]
    view(c.rows_at, c.num_rows + LISTS, ROW)[p.source].busy = 0
    recount(p.source_of, p.source)
    place(p.source_of, p.source)
    p.source_of = 0


@inner
def fence_source(cache: int, source: int, stream: int, ask: int) -> None:
    """Keeps what lies on a row until copies of it, on another row's stream, have been made: the pages of a parked row,
    and tokens that a sequence might write over."""
    c = view(cache, 1, CACHE)[0]
    rows = view(c.rows_at, c.num_rows + LISTS, ROW)
    if rows[source].owner:
        order_stream(view(c.pool, 1, POOL)[0].driver, stream, rows[source].stream, ask)
    fence_stream(cache, source, stream, ask)


@inner
def put_back(step: int) -> None:
    """Takes `plan_unmap` back for pages that were not unmapped. Steps are put back in reverse order."""
    s = view(step, 1, STEP)[0]
    c = view(s.cache, 1, CACHE)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[s.row * c.ranges + s.range]
    end = s.page + s.count
    if e.first == e.mapped:
        e.first, e.mapped = s.page, end
    elif end == e.first:
        e.first = s.page
    else:
        e.mapped = end
    e.ready, e.head_end, e.readonly = s.ready, s.head_end, s.readonly
    track(s.cache, s.row, s.range, s.shared)
    stay(s.cache, s.range, s.row, s.page, end)


@inner
def undo(pool: int, step: int) -> None:
    """Takes back the plan of a driver call that was not made."""
    p, s = view(pool, 1, POOL)[0], view(step, 1, STEP)[0]
    if s.kind == UNMAP:
        put_back(step)
    elif s.kind == FILL:
        c = view(s.cache, 1, CACHE)[0]
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[s.row * c.ranges + s.range]
        e.ready = min(e.ready, s.page) if s.count else e.ready
    elif s.kind == CREATE:
        p.created -= view(p.frames_at, p.capacity, FRAME)[s.frame].pages
    elif s.kind == STAGE:
        charge(p.staged_for, -view(p.frames_at, p.capacity, FRAME)[s.frame].pages)


@inner
def are_current(pool: int) -> int:
    """Whether all sequences that get new lengths have the owner and the length that the plan saw."""
    p = view(pool, 1, POOL)[0]
    for index in range(p.calls, p.steps):
        s = view(p.steps_at, p.max_steps, STEP)[index]
        c = view(s.cache, 1, CACHE)[0]
        r = view(c.rows_at, c.num_rows + LISTS, ROW)[s.row]
        if r.owner != s.owner or r.length != s.page:
            return 0
    return 1


@inner
def finish(pool: int, accepted: int, ask: int) -> int:
    """Books a journal as far as it was run, and closes it. Returns `DONE`, or `RING` where the mapper has work, or
    `FAILED` or `CHANGED`."""
    p = view(pool, 1, POOL)[0]
    steps, was_run = view(p.steps_at, p.max_steps, STEP), accepted and p.done == p.calls
    done = was_run and are_current(pool)
    for index in range(p.done):
        book(p.steps_at + index * STEP_SIZE)
        count_pages(pool, p.steps_at + index * STEP_SIZE)
        if steps[index].kind == STAGE:
            p.staged = steps[index].frame + 1
            view(p.frames_at, p.capacity, FRAME)[steps[index].frame].held = 1
    for index in range(p.calls - 1, p.done - 1, -1):
        undo(pool, p.steps_at + index * STEP_SIZE)
    for index in range(p.calls):
        s = steps[index]
        if s.kind == UNSTAGE and index < p.done:
            unstage(pool, s.frame)
        if s.kind == RELEASE and index < p.done:
            p.created -= view(p.frames_at, p.capacity, FRAME)[s.frame].pages
        if s.kind == MAP or s.kind == CREATE or s.kind == RELEASE or s.kind == STAGE or s.kind == UNSTAGE:
            settle_frame(pool, s.frame)
        if (s.kind == FILL or s.kind == COPY) and index < p.done and s.row >= 0:
            fence_stream(s.cache, s.row, s.stream, ask)  # its pages may be surplus while they are written to
            if done:
                order_stream(p.driver, s.stream, view(ask, 1, ASK)[0].current, ask)
            if s.kind == COPY and p.source_of:
                fence_source(p.source_of, p.source, s.stream, ask)
    for index in range(p.calls, p.steps):
        s = steps[index]
        c = view(s.cache, 1, CACHE)[0]
        r = view(c.rows_at, c.num_rows + LISTS, ROW)[s.row]
        if r.owner == s.owner and s.owner:
            if done:
                c.tokens += s.frame - s.nbytes - max(r.length - r.start, 0)
                r.length, r.start = s.frame, s.nbytes
                if r.suspended:  # there may be no other step
                    order_stream(p.driver, r.stream, view(ask, 1, ASK)[0].current, ask)
                    r.suspended = r.away = r.away_start = 0
                    r.busy = 1
                r.cut = r.cut if r.cut > r.length else 0
                if r.length > r.ahead_at and not r.busy:
                    queue_row(s.cache, s.row)
            elif r.length == 0:
                r.start = 0
            if r.busy or not done:
                use_tokens(s.cache, s.row, r.length)
    for index in range(p.calls):
        s = steps[index]
        if s.kind == MAP and s.other:
            add_user(s.cache, s.frame, -1)
    for index in range(p.steps):
        s = steps[index]
        if s.row >= 0:
            c = view(s.cache, 1, CACHE)[0]
            r = view(c.rows_at, c.num_rows + LISTS, ROW)[s.row]
            if r.busy:
                r.busy = 0
                recount(s.cache, s.row)
                place(s.cache, s.row)
                if r.owner and r.length > r.ahead_at:
                    queue_row(s.cache, s.row)
    if p.source_of:
        release_source(pool)
    p.pending = 0
    if not done:
        return CHANGED if was_run else FAILED
    return RING if p.hungry and p.asleep else DONE


@entry
def commit(pool: int, serial: int, ask: int) -> int:
    """Books a journal that was run: `DONE`, `FAILED`, `CHANGED`, or `STALE` if another thread has settled it."""
    return finish(pool, 1, ask) if view(pool, 1, POOL)[0].pending == serial else STALE


@inner
def settle(pool: int, ask: int) -> None:
    """Books a journal that an interruption has left behind: as far as it was run, with lengths as before. Each plan
    calls this first. The caller holds the planning lock, so no other thread is running the journal."""
    p = view(pool, 1, POOL)[0]
    if p.pending:
        finish(pool, 0, ask)
        p.settled += 1


@inner
def refuse(pool: int, code: int, ask: int) -> int:
    """Takes back a plan that was not run. Returns the code."""
    p = view(pool, 1, POOL)[0]
    p.calls = p.steps
    finish(pool, 0, ask)
    return code
