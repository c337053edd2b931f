"""Rows: the lists that they are on, the pages that they use, and the tokens that they have room for."""

from ..compiled import inner
from .access import account_in, cache_of, extent_at, frame_in, pool_of, range_at, row_at, rows_of, words_at
from .codes import DONE, NEEDS, RING
from .pages import fit, frame_at, page_of, pages_with, span_at
from .tables import CLASSES, LIVE, NUM_CLASSES, RETIRED, SPARE, VACANT_ROWS


@inner
def unlink(cache: int, row: int) -> None:
    """Takes a row off its list."""
    c, rows = cache_of(cache), rows_of(cache)
    r = rows[row]
    if r.list < 0:
        return
    rows[r.prev].next, rows[r.next].prev = r.next, r.prev
    head = c.num_rows + r.list
    if r.list >= CLASSES and rows[head].next == head:
        c.classes &= ~(1 << (r.list - CLASSES))
    r.list = -1


@inner
def link(cache: int, row: int, which: int) -> None:
    """Puts a row on a list, as its youngest."""
    c, rows = cache_of(cache), rows_of(cache)
    r, head = rows[row], c.num_rows + which
    if r.list == which:
        return
    unlink(cache, row)
    r.list, r.prev, r.next = which, rows[head].prev, head
    rows[r.prev].next = rows[head].prev = row
    if which >= CLASSES:
        c.classes |= 1 << (which - CLASSES)


@inner
def unlink_old(cache: int, row: int) -> None:
    """Takes a row off the list of rows to reclaim, which is in order of age."""
    rows = rows_of(cache)
    r = rows[row]
    if r.is_old:
        rows[r.older].younger, rows[r.younger].older = r.younger, r.older
        r.is_old = 0


@inner
def link_old(cache: int, row: int) -> None:
    """Puts a row on the list to reclaim: at the young end, or at the old end if others there are younger."""
    rows, behind = rows_of(cache), cache_of(cache).num_rows  # the head: its `younger` is the oldest row
    r = rows[row]
    if r.is_old:
        return
    if rows[rows[behind].older].stamp <= r.stamp or rows[behind].older == behind:
        behind = rows[behind].older
    r.older, r.younger, r.is_old = behind, rows[behind].younger, 1
    rows[r.younger].older = rows[behind].younger = row


@inner
def class_of(pages: int) -> int:
    """The size class of so many pages: four for each power of two."""
    if pages < 8:
        return pages
    bits = 0
    while pages >> bits >= 8:
        bits += 1
    return min(4 + bits * 4 + ((pages >> bits) & 3), NUM_CLASSES - 1)


@inner
def place(cache: int, row: int) -> None:
    """Puts a row on the lists where it belongs."""
    r, pages, has_spare, is_whole = row_at(cache, row), 0, 0, 1
    if r.busy:
        unlink(cache, row)
        unlink_old(cache, row)
        return
    for part in range(cache_of(cache).ranges):
        e = extent_at(cache, row, part)
        pages += e.mapped - e.first
        has_spare |= (e.first < min(e.use_first, e.mapped)) | (max(e.use_end, e.first) < e.mapped)
        is_whole &= (e.shared == 0) & (e.first == 0)
    if r.owner:
        link(cache, row, SPARE if has_spare else LIVE)
    elif pages == 0:
        link(cache, row, VACANT_ROWS)
    else:
        link(cache, row, CLASSES + class_of(pages) if is_whole and r.broken == 0 else RETIRED)
    if r.owner == 0 and r.gain > 0:
        link_old(cache, row)
    else:
        unlink_old(cache, row)


@inner
def charge(cache: int, pages: int) -> None:
    """Adds to the pages that a cache uses."""
    p, a = pool_of(cache_of(cache).pool), account_in(cache_of(cache).pool, cache_of(cache).account)
    p.committed -= max(a.used, a.reserved)
    a.used += pages
    p.used += pages
    p.committed += max(a.used, a.reserved)


@inner
def is_over(cache: int) -> int:
    """Whether a cache uses more than it may."""
    p, a = pool_of(cache_of(cache).pool), account_in(cache_of(cache).pool, cache_of(cache).account)
    return 1 if p.committed > p.budget or a.used > a.limit else 0


@inner
def left_for(cache: int) -> int:
    """Pages that a cache may begin to use; negative, the pages that it uses too much."""
    p, a = pool_of(cache_of(cache).pool), account_in(cache_of(cache).pool, cache_of(cache).account)
    return min(a.limit - a.used, p.budget - p.committed + max(a.used, a.reserved) - a.used)


@inner
def available(cache: int) -> int:
    """Pages that a cache may begin to use."""
    return max(left_for(cache), 0)


@inner
def add_user(cache: int, frame: int, users: int) -> int:
    """Adds to the users of a frame below `shared`. Returns the pages to charge: all of them with the first user; those
    to discharge, with the last, are negative."""
    f = frame_in(cache_of(cache).pool, frame)
    before = f.users
    f.users += users
    return f.pages * ((f.users > 0) - (before > 0))


@inner
def count_users(cache: int, row: int, part: int, first: int, end: int, users: int) -> None:
    """Counts pages that a row begins (`users` is 1) or ceases (-1) to use: below `shared` by frame, above by page."""
    e, page, pages = extent_at(cache, row, part), first, 0
    while page < min(end, e.shared):
        pages += add_user(cache, frame_at(cache, part, row, page), users)
        page += span_at(cache, row, part, page)
    charge(cache, pages + max(end - page, 0) * users)


@inner
def copies_of(cache: int, row: int, part: int, page: int) -> int:
    """Pages that a row uses from one on, and other live rows use, too: the row needs a copy of them to have its own."""
    e, total = extent_at(cache, row, part), 0
    page = fit(cache, row, part, max(page, e.use_first), 0)
    while page < min(e.shared, e.use_end):
        f = frame_in(cache_of(cache).pool, frame_at(cache, part, row, page))
        total += f.pages if f.users > 1 else 0
        page += f.pages
    return total


@inner
def use(cache: int, row: int, part: int, first: int, end: int) -> None:
    """Sets which pages of a row are used; the bounds are of whole frames."""
    e = extent_at(cache, row, part)
    was_first, was_end = e.use_first, e.use_end
    count_users(cache, row, part, first, min(end, max(was_first, first)), 1)
    count_users(cache, row, part, max(first, was_end), end, 1)
    count_users(cache, row, part, was_first, min(was_end, max(first, was_first)), -1)
    count_users(cache, row, part, max(was_first, end), was_end, -1)
    e.use_first, e.use_end = first, end


@inner
def use_tokens(cache: int, row: int, tokens: int) -> None:
    """Makes a row use the pages of its tokens, from its start to a length, and of the overread behind them."""
    for part in range(cache_of(cache).ranges):
        end = pages_with(cache, part, tokens)
        first = min(page_of(cache, part, row_at(cache, row).start), end)
        use(cache, row, part, fit(cache, row, part, first, 0), fit(cache, row, part, end, 1))


@inner
def track(cache: int, row: int, part: int, shared: int) -> None:
    """Moves `shared`, the end of the pages that a row may share and that are counted frame by frame."""
    r, e = row_at(cache, row), extent_at(cache, row, part)
    first, end = e.use_first, e.use_end
    if r.owner:
        use(cache, row, part, first, first)
    e.shared = shared
    if r.owner:
        use(cache, row, part, first, end)


@inner
def recount(cache: int, row: int) -> None:
    """Computes `room`, the tokens up to the end of a row's used pages; `capacity`, those up to the end of its ready
    pages; and `ahead_at`, the length from which the mapper looks at the row."""
    c, r = cache_of(cache), row_at(cache, row)
    size, room, capacity = pool_of(c.pool).page_size, c.max_tokens, c.max_tokens
    for part in range(c.ranges):
        record, e = range_at(cache, part).record, extent_at(cache, row, part)
        ready = e.ready
        if page_of(cache, part, r.length) < e.shared or page_of(cache, part, r.start) < e.first:
            ready = 0  # a write would need a copy first, or pages in front are missing
        room = min(room, min(e.use_end, ready) * size // record - c.overread)
        capacity = min(capacity, ready * size // record - c.overread)
    if r.cut > r.length:  # what a truncation has left is filled before the row grows
        room, capacity = min(room, r.length), min(capacity, r.length)
    r.room, r.capacity = max(room, 0), max(capacity, 0)
    if r.broken or r.suspended:
        r.room = r.capacity = -1
    r.ahead_at = r.capacity - c.lookahead if c.lookahead and r.capacity < c.max_tokens else c.max_tokens + 1


@inner
def settle_row(cache: int, row: int) -> None:
    """Computes what follows from a row's pages and tokens, and puts the row on its lists."""
    recount(cache, row)
    place(cache, row)


@inner
def queue_row(cache: int, row: int) -> int:
    """Has the mapper look at a row. Returns whether it is to be woken."""
    c, r = cache_of(cache), row_at(cache, row)
    p = pool_of(c.pool)
    if not r.queued:
        r.queued = 1
        words_at(c.queue_at, c.num_rows)[(c.queue_first + c.queue_count) % c.num_rows] = row
        c.queue_count += 1
        p.hungry += 1
    return 1 if p.asleep else 0


@inner
def set_length(cache: int, row: int, length: int) -> int:
    """Sets the length of a row that uses the pages of its tokens. Returns whether the mapper is to be woken."""
    r = row_at(cache, row)
    cache_of(cache).tokens += length - r.length
    r.length = length
    ring = queue_row(cache, row) if length > r.ahead_at else 0
    if length > r.room:
        settle_row(cache, row)
    return ring


@inner
def set_bounds(cache: int, row: int, start: int, length: int) -> None:
    """Sets the start and the length of a row on pages that are mapped."""
    r = row_at(cache, row)
    cache_of(cache).tokens += (length - start) - (r.length - r.start)
    r.start, r.length = start, length
    use_tokens(cache, row, length)
    settle_row(cache, row)


@inner
def grow_to(cache: int, row: int, target: int) -> int:
    """Sets the length of a row, if its pages are ready. Returns `DONE`, `RING` or `NEEDS`."""
    r = row_at(cache, row)
    if target > r.capacity:
        return NEEDS
    if target > r.room:
        use_tokens(cache, row, target)
        if is_over(cache):
            use_tokens(cache, row, r.length)
            return NEEDS
    return RING if set_length(cache, row, target) else DONE
