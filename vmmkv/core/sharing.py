"""Frames in several rows: forks, and the frames of guests in front of a new sequence.

A guest, such as a prefix tree, remembers the tokens of frames and shares them later. It holds frames: these outlive the
rows in which they are mapped. The core knows no token ids. `join` starts the notes of a cache, which tell of sequences
that have ended (`FREED`), were cut (`CUT`) or have passed tokens on (`PASSED`); a guest reads them before each look-up,
and forgets all rows if the ring was full. `plan_share` puts held frames in front of a new sequence, and `adopt_kept`
gives it a parked row as it is. A plan that lacks pages returns `SHORT` and their number; the shell asks guests to drop
as many, without a lock, and plans again. `join`, `hold` and `refer` need no lock and make no driver call.

A list of frames is, for each range of the cache, the number of frames and then their numbers. The frames of a range lie
on its pages from 0 on, one behind the other.
"""

from ..compiled import entry, inner
from ..driver.table import COPY, MAP, SET_READ_ACCESS
from .access import ask_of, cache_of, extent_at, frame_in, pool_of, range_at, row_at, step_in, words_at
from .booking import refuse, settle
from .codes import BROKEN, CAPTURED, DONE, GONE, NO_PAGES, NO_TOKEN, WAIT
from .frames import add_gain, push_free
from .growth import larges_for
from .journal import begin, close, emit_row, plan_length, plan_new, plan_unmap_all, use_source
from .pages import active_row, address_of, fit, frame_at, mapped_pages, page_of, pages_with
from .reclaim import ALL, is_idle, supply
from .rows import add_user, available, charge, is_over, recount, settle_row, track, use, use_tokens
from .starting import kept
from .streams import is_captured, name_stream, order_row
from .tables import ROW_BITS, ROW_MASK


@inner
def next_list(frames_at: int) -> int:
    """The address behind a list of frames, where the next range's begins; 0 where there is no list."""
    return frames_at + 8 * (1 + words_at(frames_at, 1)[0]) if frames_at else 0


@inner
def share_page(cache: int, row: int, part: int, page: int, frame: int) -> int:
    """Plans to map a frame that other rows or a guest have: it counts as used until the commit. Returns its pages."""
    pool, pages = cache_of(cache).pool, frame_in(cache_of(cache).pool, frame).pages
    charge(cache, add_user(cache, frame, 1))
    step_in(pool, emit_row(cache, MAP, row, part, page, pages, frame)).other = 1
    return pages


@inner
def follow(cache: int, source: int, row: int, ask: int) -> int:
    """Makes a row's stream wait for all work on the source row, and names that stream on a live source. Returns `DONE`,
    `FULL`, `CAPTURED` or `FAILED`."""
    s, r = row_at(cache, source), row_at(cache, row)
    code = order_row(cache, row, s.streams & ~r.streams, s.slots, s.tick, ask)
    return name_stream(cache, source, r.stream, ask) if code == DONE and s.owner else code


@inner
def source_row(cache: int, ticket: int, tokens: int) -> int:
    """The row where a sequence has so many tokens, or has left them; `GONE`, `SUSPENDED`, or `NO_TOKEN`."""
    row, owner, live = ticket & ROW_MASK, ticket >> ROW_BITS, active_row(cache, ticket)
    if live != GONE:
        r = row_at(cache, row)
        return live if live < 0 or r.start <= tokens <= r.length else NO_TOKEN
    if ticket < 0 or row >= cache_of(cache).num_rows:
        return GONE
    return row if 0 <= tokens <= kept(cache, row, owner) else GONE


@entry
def plan_share(cache: int, ticket: int, given: int, tokens: int, length: int, frames_at: int, ask: int) -> int:
    """Plans that a new sequence without tokens begins with the first tokens of another, `given`, which may have left
    its row: on the same frames where these are full, and on a copy of the rest. `frames_at` is 0, or the address of
    lists of frames that stand for the full ones; then `given` is the sequence that the rest is copied from, or -1 where
    nothing is.

    The sequence has room for `length` tokens then, but no fewer than it shares. If it is longer than that, no frame
    may reach behind its shared tokens.

    Returns a serial, `GONE`, `SUSPENDED`, `NO_TOKEN`, `BROKEN`, `NO_PAGES`, `SHORT`, `WAIT`, `CAPTURED` or `FAILED`.
    """
    pool, a, source = cache_of(cache).pool, ask_of(ask), -1
    settle(pool, ask)
    a.slots = 0
    row = active_row(cache, ticket)
    if row < 0:
        return row
    r = row_at(cache, row)
    if r.length:
        return NO_TOKEN
    if given != -1 or frames_at == 0:
        source = source_row(cache, given, tokens)
        if source < 0 or source == row:
            return source if source < 0 else NO_TOKEN
        if row_at(cache, source).broken:
            return BROKEN
    if mapped_pages(cache, row) and not is_idle(cache, row, ask):
        return WAIT
    if source >= 0:
        code = follow(cache, source, row, ask)
        if code != DONE:
            return code
    before, cursor, length = available(cache), frames_at, max(length, tokens)
    begin(pool)
    r.start = row_at(cache, source).start if source >= 0 and frames_at == 0 else 0
    if source >= 0 and row_at(cache, source).owner == 0:
        use_source(cache, source)
    for part in range(cache_of(cache).ranges):
        plan_unmap_all(cache, row, part)
        split = share_front(cache, row, part, source, tokens, cursor)
        use(cache, row, part, split, split)
        cursor = next_list(cursor)
    need = use_rest(cache, row, length, frames_at, 1)
    if is_over(cache):
        need = use_rest(cache, row, length, frames_at, 0)
    if is_over(cache):
        a.asked, a.available = need & 0xFFFFFFFF, before
        return give_up(cache, row, NO_PAGES, ask)
    larges, cursor = supply(pool, need & 0xFFFFFFFF, need >> 32, ALL, ask), frames_at
    if larges < 0:
        return give_up(cache, row, larges, ask)
    if source >= 0:  # its own surplus may have been taken
        use_source(cache, source)
    for part in range(cache_of(cache).ranges):
        larges -= copy_rest(cache, row, part, source, tokens, larges if can_be_large(cache, cursor) else 0)
        cursor = next_list(cursor)
    if pool_of(pool).fills and is_captured(cache, row, ask):
        return give_up(cache, row, CAPTURED, ask)
    serial = close(pool)
    plan_length(cache, row, r.start, length)
    return serial


@inner
def can_be_large(cache: int, frames_at: int) -> int:
    """Whether large frames may lie behind a list of frames: it is there, and ends with one, or is empty."""
    count = words_at(frames_at, 1)[0] if frames_at else 0
    if count == 0:
        return 1 if frames_at else 0
    return 1 if frame_in(cache_of(cache).pool, words_at(frames_at, count + 1)[count]).pages > 1 else 0


@inner
def use_rest(cache: int, row: int, length: int, frames_at: int, up: int) -> int:
    """Makes a row use the pages of so many tokens behind those that it shares (`up` as in `larges_for`). Returns the
    number of single pages that it lacks, plus `1 << 32` times the number of large frames, which may lie behind the
    lists of frames."""
    large, singles, larges = pool_of(cache_of(cache).pool).large, 0, 0
    for part in range(cache_of(cache).ranges):
        split = extent_at(cache, row, part).use_first
        end = max(pages_with(cache, part, length), split)
        found = larges_for(cache, row, part, split, end, up) if can_be_large(cache, frames_at) else 0
        larges += found
        singles += max(end - split - found * large, 0)
        use(cache, row, part, split, max(end, split + found * large))
        frames_at = next_list(frames_at)
    return larges << 32 | singles


@inner
def give_up(cache: int, row: int, code: int, ask: int) -> int:
    """Takes back what `plan_share` has planned so far. Returns the code."""
    row_at(cache, row).start = 0
    use_tokens(cache, row, 0)
    return refuse(cache_of(cache).pool, code, ask)


@inner
def share_front(cache: int, row: int, part: int, source: int, tokens: int, frames_at: int) -> int:
    """Plans to map the frames that a row shares with the source or the guest. Returns the page behind them."""
    first = page = 0
    if frames_at:
        count = words_at(frames_at, 1)[0]
        for index in range(1, count + 1):
            page += share_page(cache, row, part, page, words_at(frames_at, count + 1)[index])
    else:
        e = extent_at(cache, source, part)
        split = fit(cache, source, part, page_of(cache, part, tokens), 0)  # where frames are no longer full
        first = page = e.use_first
        if split > e.shared and page < split:
            track(cache, source, part, split)
            recount(cache, source)
        while page < split:
            page += share_page(cache, row, part, page, frame_at(cache, part, source, page))
    if first < page:
        emit_row(cache, SET_READ_ACCESS, row, part, first, page - first, 0)
    return page


@inner
def copy_rest(cache: int, row: int, part: int, source: int, tokens: int, larges: int) -> int:
    """Plans to map the pages behind the shared ones, on so many large frames at most, and to copy their tokens from the
    source. Returns how many large frames it takes."""
    pool, e = cache_of(cache).pool, extent_at(cache, row, part)
    page, end = e.use_first, e.use_end
    if page >= end:
        return 0
    larges = min(larges_for(cache, row, part, page, end, 0), larges)
    plan_new(cache, row, part, page, larges, end)
    nbytes = tokens * range_at(cache, part).record - page * pool_of(pool).page_size
    if nbytes > 0:
        s = step_in(pool, emit_row(cache, COPY, row, part, page, 1, 0))
        s.nbytes, s.other = nbytes, address_of(cache, source, part, page)
    return larges


@entry
def join(cache: int, ring: int, size: int) -> int:
    """Starts the notes of a cache, in a ring of `size` notes."""
    c = cache_of(cache)
    c.ring_at, c.ring_size, c.guest, c.ring_head, c.ring_tail = ring, size, 1, 0, 0
    return DONE


@entry
def hold(cache: int, ticket: int, part: int, first: int, tokens: int, out: int, most: int) -> int:
    """References the frames of a range, from page `first` on, that a sequence's first tokens fill, and writes their
    numbers to `out`. Returns the number of frames, `GONE`, `SUSPENDED`, or `NO_TOKEN`: it has fewer tokens, or has
    released its front."""
    row = active_row(cache, ticket)
    if row < 0:
        return row
    r, numbers = row_at(cache, row), words_at(out, most)
    if tokens > r.length or r.start or r.broken:
        return NO_TOKEN
    page, count, end = first, 0, page_of(cache, part, tokens)
    while page < end and count < most:
        frame = frame_at(cache, part, row, page)
        pages = frame_in(cache_of(cache).pool, frame).pages
        if page + pages > end:
            break
        numbers[count] = frame
        page += pages
        count += 1
    if page > extent_at(cache, row, part).shared:
        track(cache, row, part, page)
    for index in range(count):
        reference(cache, numbers[index], 1)
    settle_row(cache, row)
    return count


@entry
def refer(cache: int, frames_at: int, count: int, sign: int) -> int:
    """Adds a reference to frames that are held (`sign` is 1), or ends one (-1). The list says which frames have theirs:
    those that have none are written as `~frame`. So a second call changes nothing."""
    frames = words_at(frames_at, count)
    for index in range(count):
        frame = frames[index]
        if (frame < 0) == (sign > 0):
            frames[index] = ~frame
            reference(cache, max(frame, ~frame), sign)
    return DONE


@inner
def reference(cache: int, frame: int, sign: int) -> None:
    """Adds a reference to a frame, or ends one."""
    f = frame_in(cache_of(cache).pool, frame)
    add_gain(cache, frame, -1)
    f.held += sign
    add_gain(cache, frame, 1)
    if f.refs == 0 and f.held == 0:
        push_free(cache_of(cache).pool, frame)
