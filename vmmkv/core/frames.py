"""Frames: the stacks of free frames, and the rows in which frames are mapped."""

from ..compiled import inner
from ..driver.table import VACANT
from .access import cache_of, extent_at, frame_in, pool_of, row_at, words_at
from .pages import frame_at, put_frame
from .rows import link_old
from .tables import GAINED, POOL, TAKEN_FRAME

SMALL, LARGES, UNMADE, GAINED_SMALL, GAINED_LARGE = range(5)
"""Stacks of a pool, in the order of `POOL`."""
STACKS = POOL.fields["small"][1] if POOL.fields else 0


@inner
def push(pool: int, stack: int, frame: int) -> None:
    """Puts a frame on a stack."""
    s = words_at(pool + STACKS + 16 * stack, 2)  # the count, and the address of the numbers
    words_at(s[1], s[0] + 1)[s[0]] = frame
    s[0] += 1


@inner
def pop(pool: int, stack: int) -> int:
    """Takes the last frame from a stack that is not empty."""
    s = words_at(pool + STACKS + 16 * stack, 2)
    s[0] -= 1
    frame: int = words_at(s[1], s[0] + 1)[s[0]]
    return frame


@inner
def push_free(pool: int, frame: int) -> None:
    """Puts a free frame on the stack of its size."""
    push(pool, LARGES if frame_in(pool, frame).pages > 1 else SMALL, frame)


@inner
def push_gained(pool: int, frame: int) -> None:
    """Puts a frame that the journal makes free on a stack for other steps of the journal."""
    f = frame_in(pool, frame)
    f.moving = GAINED
    push(pool, GAINED_LARGE if f.pages > 1 else GAINED_SMALL, frame)


@inner
def take(pool: int, pages: int) -> int:
    """Takes a free frame of a size for a step. The caller has made sure that there is one."""
    p = pool_of(pool)
    if pages > 1:
        frame = pop(pool, GAINED_LARGE if p.gained_large else LARGES)
    else:
        frame = pop(pool, GAINED_SMALL if p.gained else SMALL)
    frame_in(pool, frame).moving = TAKEN_FRAME
    return frame


@inner
def settle_frame(pool: int, frame: int) -> None:
    """Puts a frame of a booked journal on the stack where it belongs, if it is free."""
    f = frame_in(pool, frame)
    if f.moving and f.refs == 0 and f.held == 0:
        if f.handle == VACANT:
            push(pool, UNMADE, frame)
        else:
            push_free(pool, frame)
    f.moving = 0


@inner
def add_gain(cache: int, frame: int, sign: int) -> None:
    """Adds a frame to the gain of its row, if that is its only mapping and no guest holds it."""
    f = frame_in(cache_of(cache).pool, frame)
    if f.refs == 1 and f.held == 0:
        r = row_at(cache, f.place)
        r.gain += sign * f.pages
        if r.owner == 0 and r.gain > 0 and not r.busy:
            link_old(cache, f.place)


@inner
def add_mapping(cache: int, frame: int, row: int, sign: int) -> None:
    """Counts that a frame was mapped in a row (`sign` is 1), or unmapped (-1)."""
    f = frame_in(cache_of(cache).pool, frame)
    add_gain(cache, frame, -1)
    f.refs += sign
    f.place ^= row
    add_gain(cache, frame, 1)


@inner
def book_map(cache: int, part: int, row: int, page: int, frame: int, shared: int) -> None:
    """Books that a frame was mapped."""
    e, pages = extent_at(cache, row, part), frame_in(cache_of(cache).pool, frame).pages
    if e.first == e.mapped:
        e.first = e.ready = e.mapped = page
        e.head_end = page if pages > 1 else 0
        e.shared = e.readonly = page if shared else 0
    put_frame(cache, part, row, page, pages, frame + 1)
    add_mapping(cache, frame, row, 1)
    if page == e.mapped:
        e.mapped = page + pages
        if pages > 1:
            e.head_end = e.mapped


@inner
def book_unmap(cache: int, part: int, row: int, page: int, pages: int) -> None:
    """Books that pages were unmapped. The plan has taken them out of the extents."""
    pool, end = cache_of(cache).pool, page + pages
    while page < end:
        frame = frame_at(cache, part, row, page)
        f = frame_in(pool, frame)
        put_frame(cache, part, row, page, f.pages, 0)
        f.leaving -= 1
        add_mapping(cache, frame, row, -1)
        if f.refs == 0 and f.moving == GAINED:  # it may leave several rows in one journal
            settle_frame(pool, frame)
        elif f.refs == 0 and f.held == 0 and f.moving == 0:  # a guest has dropped it meanwhile
            push_free(pool, frame)
        page += f.pages


@inner
def is_gain(pool: int, frame: int) -> int:
    """Whether a frame becomes free with its next unmapping."""
    f = frame_in(pool, frame)
    return 1 if f.refs - f.leaving == 1 and f.held == 0 else 0


@inner
def leave(cache: int, part: int, row: int, page: int, end: int) -> int:
    """Plans that frames leave a row; returns the pages of those that are free then. Steps of the same journal that take
    such a frame find the row's key on it."""
    pool, key, gained = cache_of(cache).pool, row_at(cache, row).key, 0
    while page < end:
        frame = frame_at(cache, part, row, page)
        f = frame_in(pool, frame)
        if is_gain(pool, frame):
            gained += f.pages
            push_gained(pool, frame)
        f.leaving += 1
        f.key = key if page < extent_at(cache, row, part).ready else f.key
        page += f.pages
    return gained
