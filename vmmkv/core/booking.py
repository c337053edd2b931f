"""Booking: what a journal that was run has changed, and what of it was not done."""

from ..compiled import entry, inner
from ..driver.table import COPY, CREATE, FILL, MAP, RELEASE, SET_ACCESS, SET_READ_ACCESS, UNMAP
from .access import ask_of, cache_of, extent_at, frame_in, pool_of, row_at, step_in
from .codes import CHANGED, DONE, FAILED, RING, STALE
from .frames import add_gain, add_mapping, book_map, book_unmap, push_free, settle_frame
from .pages import frame_at, put_frame
from .rows import add_user, charge, queue_row, settle_row, track, use_tokens
from .streams import fence_stream, order_stream
from .tables import GAINED, IN, LOST, OUT, STAGE, TAKEN_FRAME, UNSTAGE

WITHOUT_FRAME, WITHOUT_ACCESS = 1, 2
"""Reasons why a row is broken: the frame of a page is not mapped, or is mapped and cannot be accessed."""


@inner
def book(pool: int, index: int) -> None:
    """Books a driver call that was made."""
    p, s = pool_of(pool), step_in(pool, index)
    if s.kind == CREATE:
        p.made += frame_in(pool, s.frame).pages
    elif s.kind == STAGE:
        p.staged = s.frame + 1
        frame_in(pool, s.frame).held = 1
    if s.cache == 0:
        return
    r, e, end = row_at(s.cache, s.row), extent_at(s.cache, s.row, s.range), s.page + s.count
    if s.kind == UNMAP:
        book_unmap(s.cache, s.range, s.row, s.page, s.count)
    elif s.kind == MAP:
        p.mapped_ahead += s.count if p.ahead else 0
        p.mapped_in_need += 0 if p.ahead else s.count
        book_map(s.cache, s.range, s.row, s.page, s.frame, s.other)
        r.suspended = LOST if r.suspended else 0  # until the copy of its tokens is booked
        if s.other:  # a shared frame
            track(s.cache, s.row, s.range, max(e.shared, end))
    elif s.kind == SET_ACCESS:
        e.ready = max(e.ready, end)
        if s.page < e.readonly <= end:
            e.readonly = s.page
        if s.other:  # the row has the frame alone
            track(s.cache, s.row, s.range, s.page)
            r.broken = 0
    elif s.kind == SET_READ_ACCESS:
        e.ready, e.readonly = max(e.ready, end), max(e.readonly, end)
    elif s.kind == OUT:
        book_swap(pool, index)
    elif s.kind == IN:
        r.broken = WITHOUT_ACCESS


@inner
def book_swap(pool: int, index: int) -> None:
    """Books that a shared frame has left a row. The copy is to take its place; until then the row is broken."""
    s = step_in(pool, index)
    r, new = row_at(s.cache, s.row), frame_in(pool, s.frame)
    track(s.cache, s.row, s.range, s.page)
    old = frame_at(s.cache, s.range, s.row, s.page)
    add_mapping(s.cache, old, s.row, -1)
    if frame_in(pool, old).refs == 0 and frame_in(pool, old).held == 0:  # others have left it meanwhile
        push_free(pool, old)
    new.held, new.refs, new.place = 0, 1, s.row
    add_gain(s.cache, s.frame, 1)
    put_frame(s.cache, s.range, s.row, s.page, s.count, s.frame + 1)
    charge(s.cache, -s.count)
    pool_of(pool).staged = 0
    r.broken, r.broken_part, r.broken_page = WITHOUT_FRAME, s.range, s.page


@inner
def undo(pool: int, index: int) -> None:
    """Takes back the plan of a driver call that was not made. Steps are taken back in reverse order."""
    p, s = pool_of(pool), step_in(pool, index)
    if s.kind == UNMAP:
        e, page, end = extent_at(s.cache, s.row, s.range), s.page, s.page + s.count
        if e.first == e.mapped:
            e.first, e.mapped = page, end
        elif end == e.first:
            e.first = page
        else:
            e.mapped = end
        e.ready, e.head_end, e.readonly = s.ready, s.head_end, s.readonly
        track(s.cache, s.row, s.range, s.shared)
        while page < end:  # takes `leave` back
            f = frame_in(pool, frame_at(s.cache, s.range, s.row, page))
            f.leaving -= 1
            f.moving = 0 if f.moving == GAINED else f.moving
            page += f.pages
    elif s.kind == FILL and s.count:
        e = extent_at(s.cache, s.row, s.range)
        e.ready = min(e.ready, s.page)
    elif s.kind == CREATE:
        p.created -= frame_in(pool, s.frame).pages
    elif s.kind == STAGE:
        charge(p.staged_for, -frame_in(pool, s.frame).pages)


@inner
def book_length(pool: int, index: int, done: int, ask: int) -> None:
    """Sets the length of a sequence, if the journal is `done`; otherwise makes it use the pages of its tokens alone."""
    p, s = pool_of(pool), step_in(pool, index)
    r = row_at(s.cache, s.row)
    if r.owner != s.owner or s.owner == 0:
        return
    if done:
        cache_of(s.cache).tokens += s.frame - s.nbytes - max(r.length - r.start, 0)
        r.length, r.start = s.frame, s.nbytes
        if r.suspended:  # there may be no other step
            order_stream(p.driver, r.stream, ask_of(ask).current, ask)
            r.suspended = r.away = r.away_start = 0
            r.busy = 1
        r.cut = r.cut if r.cut > r.length else 0
        if r.length > r.ahead_at and not r.busy:
            queue_row(s.cache, s.row)
    elif r.length == 0:
        r.start = 0
    if r.busy or not done:
        use_tokens(s.cache, s.row, r.length)


@inner
def finish(pool: int, accepted: int, ask: int) -> int:
    """Books a journal as far as it was run, and closes it. Returns `DONE`, `RING`, `FAILED` or `CHANGED`."""
    p = pool_of(pool)
    was_run = 1 if accepted and p.done == p.calls else 0
    done = was_run
    for index in range(p.calls, p.steps):  # the plan has seen these owners and lengths
        s = step_in(pool, index)
        r = row_at(s.cache, s.row)
        done = done if r.owner == s.owner and r.length == s.page else 0
    for index in range(p.done):
        book(pool, index)
    for index in range(p.calls - 1, p.done - 1, -1):
        undo(pool, index)
    for index in range(p.calls):
        s = step_in(pool, index)
        f = frame_in(pool, s.frame)
        if s.kind == UNSTAGE and index < p.done and f.held:  # the copy is free unless it lies in a row
            f.held, f.moving, p.staged = 0, TAKEN_FRAME, 0
            charge(p.staged_for, -f.pages)
        if s.kind == RELEASE and index < p.done:
            p.created -= frame_in(pool, s.frame).pages
        if s.kind == MAP or s.kind == CREATE or s.kind == RELEASE or s.kind == STAGE or s.kind == UNSTAGE:
            settle_frame(pool, s.frame)
        if (s.kind == FILL or s.kind == COPY) and index < p.done and s.row >= 0:
            fence_stream(s.cache, s.row, s.stream, ask)  # its pages may be surplus while they are written to
            if done:
                order_stream(p.driver, s.stream, ask_of(ask).current, ask)
            if s.kind == COPY and p.source_of:  # what lies there stays until it is copied, tokens of a sequence, too
                source = row_at(p.source_of, p.source)
                if source.owner:
                    order_stream(p.driver, s.stream, source.stream, ask)
                fence_stream(p.source_of, p.source, s.stream, ask)
    for index in range(p.calls, p.steps):
        book_length(pool, index, done, ask)
    for index in range(p.calls):
        s = step_in(pool, index)
        if s.kind == MAP and s.other:
            charge(s.cache, add_user(s.cache, s.frame, -1))
    for index in range(p.steps):
        s = step_in(pool, index)
        if s.row >= 0 and row_at(s.cache, s.row).busy:
            r = row_at(s.cache, s.row)
            r.busy = 0
            settle_row(s.cache, s.row)
            if r.owner and r.length > r.ahead_at:
                queue_row(s.cache, s.row)
    if p.source_of:
        row_at(p.source_of, p.source).busy = 0
        settle_row(p.source_of, p.source)
        p.source_of = 0
    p.pending = 0
    if not done:
        return CHANGED if was_run else FAILED
    return RING if p.hungry and p.asleep else DONE


@entry
def commit(pool: int, serial: int, ask: int) -> int:
    """Books a journal that was run: `DONE`, `FAILED`, `CHANGED`, or `STALE` if another thread has settled it."""
    return finish(pool, 1, ask) if pool_of(pool).pending == serial else STALE


@inner
def settle(pool: int, ask: int) -> None:
    """Books a journal that an interruption has left behind: as far as it was run, with lengths as before. Each plan
    calls this first. The caller holds the planning lock, so no other thread is running the journal."""
    if pool_of(pool).pending:
        finish(pool, 0, ask)
        pool_of(pool).settled += 1


@inner
def refuse(pool: int, code: int, ask: int) -> int:
    """Takes back a plan that was not run. Returns the code."""
    pool_of(pool).calls = pool_of(pool).steps
    finish(pool, 0, ask)
    return code
