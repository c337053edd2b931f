"""Copies of a guest's frames to host memory, and from there to a live sequence.

A guest holds the frames while they are copied, so that no row writes to them. They are copied from a row where they
lie; the row's fence covers the copy.
"""

from ..compiled import entry, inner
from ..compiled.native import call
from ..driver.running import enter, leave
from ..driver.table import COPY
from .access import ask_of, cache_of, driver_of, extent_at, frame_in, pool_of, row_at, step_in, words_at
from .booking import settle
from .codes import DONE, FAILED, NO_TOKEN, PART
from .journal import begin, close, emit_row
from .pages import active_row, address_of, frame_at, page_of
from .streams import fence_stream, order_behind, order_row


@inner
def has(cache: int, row: int, part: int, page: int, frame: int) -> int:
    """Whether a row has a frame on a page, where it can be read."""
    r, e = row_at(cache, row), extent_at(cache, row, part)
    if r.busy or r.broken or not e.first <= page < e.ready:
        return 0
    return 1 if frame_at(cache, part, row, page) == frame else 0


@inner
def row_with(cache: int, part: int, page: int, frame: int, last: int) -> int:
    """A row that has a frame on a page, or -1: the only one, or the row `last`."""
    f = frame_in(cache_of(cache).pool, frame)
    if f.refs == 1 and has(cache, f.place, part, page, frame):
        return f.place
    return last if last >= 0 and has(cache, last, part, page, frame) else -1


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
        row, first = row_with(cache, part, pages[last], frames[last], row), last
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
    fence. The copies are as in `vmmkv.core.suspending.plan_resume`.

    Returns a serial, or `GONE`, `SUSPENDED`, `NO_TOKEN`, `PART` where the pages are shared, `FULL`, `CAPTURED` or
    `FAILED`.
    """
    pool, copy = cache_of(cache).pool, words_at(copies_at, (copies, 4))
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
    for index in range(copies):
        s = step_in(pool, emit_row(cache, COPY, row, copy[index, 0], 0, 0, 0))
        s.address, s.nbytes, s.other = s.address + copy[index, 1], copy[index, 2], copy[index, 3]
    return close(pool)
