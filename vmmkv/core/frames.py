"""Frames: the stacks of free frames, and the rows in which frames are mapped."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from ..driver.table import VACANT
from .rows import frame_at, link_old, put_frame
from .tables import (
    CACHE,
    EXTENT,
    FRAME,
    FRESH_KEY,
    GAINED,
    LISTS,
    POOL,
    ROW,
    TAKEN_FRAME,
)


@inner
def push_free(pool: int, frame: int) -> None:
    """Puts a free frame on the stack of its size."""
    p = view(pool, 1, POOL)[0]
    if view(p.frames_at, p.capacity, FRAME)[frame].pages > 1:
        view(p.larges_at, p.capacity, np.int64)[p.larges] = frame
        p.larges += 1
    else:
        view(p.small_at, p.capacity, np.int64)[p.small] = frame
        p.small += 1


@inner
def push_gained(pool: int, frame: int) -> None:
    """Puts a frame that the journal makes free on a stack for other steps of the journal."""
    p = view(pool, 1, POOL)[0]
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    f.moving = GAINED
    if f.pages > 1:
        view(p.gained_large_at, p.capacity, np.int64)[p.gained_large] = frame
        p.gained_large += 1
    else:
        view(p.gained_at, p.capacity, np.int64)[p.gained] = frame
        p.gained += 1


@inner
def take(pool: int, pages: int) -> int:
    """Takes a free frame of a size for a step. The caller has made sure that there is one."""
    p = view(pool, 1, POOL)[0]
    if pages > 1:
        if p.gained_large:
            p.gained_large -= 1
            frame = view(p.gained_large_at, p.capacity, np.int64)[p.gained_large]
        else:
            p.larges -= 1
            frame = view(p.larges_at, p.capacity, np.int64)[p.larges]
    elif p.gained:
        p.gained -= 1
        frame = view(p.gained_at, p.capacity, np.int64)[p.gained]
    else:
        p.small -= 1
        frame = view(p.small_at, p.capacity, np.int64)[p.small]
    view(p.frames_at, p.capacity, FRAME)[frame].moving = TAKEN_FRAME
    return frame


@inner
def number(pool: int, pages: int) -> int:
    """Takes an unused frame number, for a frame of so many pages."""
    p = view(pool, 1, POOL)[0]
    if p.unmade:
        p.unmade -= 1
        frame = view(p.unmade_at, p.capacity, np.int64)[p.unmade]
    else:
        frame = p.fresh
        p.fresh += 1
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    f.handle, f.pages, f.key, f.uses, f.moving = VACANT, pages, FRESH_KEY, 0, TAKEN_FRAME
    return frame


@inner
def settle_frame(pool: int, frame: int) -> None:
    """Puts a frame of a booked journal on the stack where it belongs, if it is free."""
    p = view(pool, 1, POOL)[0]
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    if f.moving == 0:
        return
    f.moving = 0
    if f.refs == 0 and f.held == 0:
        if f.handle == VACANT:
            view(p.unmade_at, p.capacity, np.int64)[p.unmade] = frame
            p.unmade += 1
        else:
            push_free(pool, frame)


@inner
def add_gain(cache: int, frame: int, sign: int) -> None:
    """Adds a frame to the gain of its row, if that is its only mapping and no guest holds it."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    if f.refs == 1 and f.held == 0:
        r = view(c.rows_at, c.num_rows + LISTS, ROW)[f.place]
        r.gain += sign * f.pages
        if r.owner == 0 and r.gain > 0 and not r.busy:
            link_old(cache, f.place)


@inner
def book_map(cache: int, part: int, row: int, page: int, frame: int, shared: int) -> None:
    """Books that a frame was mapped."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    if e.first == e.mapped:
        e.first = e.ready = e.mapped = page
        e.head_end = page if f.pages > 1 else 0
        e.shared = e.readonly = page if shared else 0
    put_frame(cache, part, row, page, f.pages, frame + 1)
    add_gain(cache, frame, -1)
    f.refs += 1
    f.place ^= row
    f.uses -= view(c.rows_at, c.num_rows + LISTS, ROW)[row].ended
    add_gain(cache, frame, 1)
    if page == e.mapped:
        e.mapped = page + f.pages
        if f.pages > 1:
            e.head_end = e.mapped


@inner
def book_unmap(cache: int, part: int, row: int, page: int, pages: int) -> None:
    """Books that pages were unmapped. The plan has taken them out of the extents."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    frames, end = view(p.frames_at, p.capacity, FRAME), page + pages
    while page < end:
        frame = frame_at(cache, part, row, page)
        f = frames[frame]
        put_frame(cache, part, row, page, f.pages, 0)
        add_gain(cache, frame, -1)
        f.refs -= 1
        f.place ^= row
        f.leaving -= 1
        f.uses += view(c.rows_at, c.num_rows + LISTS, ROW)[row].ended
        add_gain(cache, frame, 1)
        if f.refs == 0 and f.moving == GAINED:  # it may leave several rows in one journal
            settle_frame(c.pool, frame)
        elif f.refs == 0 and f.held == 0 and f.moving == 0:  # a guest has dropped it meanwhile
            push_free(c.pool, frame)
        page += f.pages


@inner
def is_gain(pool: int, frame: int) -> int:
    """Whether a frame becomes free with its next unmapping."""
    p = view(pool, 1, POOL)[0]
    f = view(p.frames_at, p.capacity, FRAME)[frame]
    return 1 if f.refs - f.leaving == 1 and f.held == 0 else 0


@inner
def leave(cache: int, part: int, row: int, page: int, end: int) -> int:
    """Plans that frames leave a row; returns the pages of those that are free then. Steps of the same journal that take
    such a frame find the row's key on it."""
    c, gained = view(cache, 1, CACHE)[0], 0
    pool, key = c.pool, view(c.rows_at, c.num_rows + LISTS, ROW)[row].key
    ready = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part].ready
    while page < end:
        frame = frame_at(cache, part, row, page)
        f = view(view(pool, 1, POOL)[0].frames_at, frame + 1, FRAME)[frame]
        if is_gain(pool, frame):
            gained += f.pages
            push_gained(pool, frame)
        f.leaving += 1
        f.key = key if page < ready else f.key
        page += f.pages
    return gained


@inner
def stay(cache: int, part: int, row: int, page: int, end: int) -> None:
    """Takes `leave` back for pages that were not unmapped."""
    p = view(view(cache, 1, CACHE)[0].pool, 1, POOL)[0]
    while page < end:
        f = view(p.frames_at, p.capacity, FRAME)[frame_at(cache, part, row, page)]
        f.leaving -= 1
        if f.moving == GAINED:
            f.moving = 0
        page += f.pages
