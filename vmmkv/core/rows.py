"""Rows: the lists that they are on, the pages that they use, and the tokens that they have room for."""

import numpy as np

from ..compiled import inner
from ..compiled.native import view
from .tables import (
    ACCOUNT,
    CACHE,
    CLASSES,
    DONE,
    EXTENT,
    FRAME,
    GONE,
    LISTS,
    LIVE,
    NEEDS,
    NUM_CLASSES,
    POOL,
    RANGE,
    RETIRED,
    RING,
    ROW,
    ROW_BITS,
    ROW_MASK,
    SPARE,
    VACANT_ROWS,
)


@inner
def row_of(cache: int, ticket: int) -> int:
    """The row that a ticket names, or `GONE`."""
    c, row = view(cache, 1, CACHE)[0], ticket & ROW_MASK
    if ticket >> ROW_BITS <= 0 or row >= c.num_rows:
        return GONE
    if view(c.rows_at, c.num_rows + LISTS, ROW)[row].owner != ticket >> ROW_BITS:
        return GONE
    return row


@inner
def frame_at(cache: int, part: int, row: int, page: int) -> int:
    """The frame on a page that is mapped."""
    c = view(cache, 1, CACHE)[0]
    g = view(c.ranges_at, c.ranges, RANGE)[part]
    return view(g.pages_at, c.num_rows * g.row_pages, np.int32)[row * g.row_pages + page] - 1


@inner
def put_frame(cache: int, part: int, row: int, page: int, pages: int, value: int) -> None:
    """Writes a frame + 1, or 0, to pages of a page table."""
    c = view(cache, 1, CACHE)[0]
    g = view(c.ranges_at, c.ranges, RANGE)[part]
    table = view(g.pages_at, c.num_rows * g.row_pages, np.int32)
    for each in range(page, page + pages):
        table[row * g.row_pages + each] = value


@inner
def pages_for(cache: int, part: int, tokens: int) -> int:
    """The number of pages that so many tokens need."""
    c = view(cache, 1, CACHE)[0]
    size = view(c.pool, 1, POOL)[0].page_size
    return (tokens * view(c.ranges_at, c.ranges, RANGE)[part].record + size - 1) // size


@inner
def page_of(cache: int, part: int, token: int) -> int:
    """The page that a token begins on."""
    c = view(cache, 1, CACHE)[0]
    return token * view(c.ranges_at, c.ranges, RANGE)[part].record // view(c.pool, 1, POOL)[0].page_size


@inner
def address_of(cache: int, row: int, part: int, page: int) -> int:
    """The address of a page of a row."""
    c = view(cache, 1, CACHE)[0]
    g = view(c.ranges_at, c.ranges, RANGE)[part]
    return g.address + (row * g.row_pages + page) * view(c.pool, 1, POOL)[0].page_size


@inner
def span_at(cache: int, row: int, part: int, page: int) -> int:
    """Pages of the frame on a page, which is the frame's first or last."""
    c = view(cache, 1, CACHE)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    return view(c.pool, 1, POOL)[0].large if page < e.head_end else 1


@inner
def fit(cache: int, row: int, part: int, page: int, up: int) -> int:
    """A page, or the boundary of the large frame around it: its end if `up`, else its first page."""
    c = view(cache, 1, CACHE)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    large = view(c.pool, 1, POOL)[0].large
    if page >= e.head_end:
        return page
    return (page + (large - 1) * up) // large * large


# ---------------------------------------------------------------------- lists


@inner
def unlink(cache: int, row: int) -> None:
    """Takes a row off its list."""
    c = view(cache, 1, CACHE)[0]
    rows = view(c.rows_at, c.num_rows + LISTS, ROW)
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
    c = view(cache, 1, CACHE)[0]
    rows = view(c.rows_at, c.num_rows + LISTS, ROW)
    r = rows[row]
    if r.list == which:
        return
    unlink(cache, row)
    head = c.num_rows + which
    r.list, r.prev, r.next = which, rows[head].prev, head
    rows[r.prev].next = rows[head].prev = row
    if which >= CLASSES:
        c.classes |= 1 << (which - CLASSES)


@inner
def unlink_old(cache: int, row: int) -> None:
    """Takes a row off the list of rows to reclaim, which is in order of age."""
    c = view(cache, 1, CACHE)[0]
    rows = view(c.rows_at, c.num_rows + LISTS, ROW)
    r = rows[row]
    if r.is_old:
        rows[r.older].younger, rows[r.younger].older = r.younger, r.older
        r.is_old = 0


@inner
def link_old(cache: int, row: int) -> None:
    """Puts a row on the list of rows to reclaim: at the young end, or at the old end if its stamp is older than the
    youngest there."""
    c = view(cache, 1, CACHE)[0]
    rows = view(c.rows_at, c.num_rows + LISTS, ROW)
    r = rows[row]
    if r.is_old:
        return
    behind = c.num_rows  # the head, whose `younger` is the oldest row
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
def mapped_pages(cache: int, row: int) -> int:
    """Pages that are mapped in a row."""
    c, total = view(cache, 1, CACHE)[0], 0
    extents = view(c.extents_at, c.num_rows * c.ranges, EXTENT)
    for part in range(row * c.ranges, (row + 1) * c.ranges):
        total += extents[part].mapped - extents[part].first
    return total


@inner
def place(cache: int, row: int) -> None:
    """Puts a row on the lists where it belongs."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    extents = view(c.extents_at, c.num_rows * c.ranges, EXTENT)
    if r.busy:
        unlink(cache, row)
        unlink_old(cache, row)
        return
    pages = mapped_pages(cache, row)
    if r.owner:
        spare = False
        for part in range(row * c.ranges, (row + 1) * c.ranges):
            e = extents[part]
            spare |= (e.first < min(e.use_first, e.mapped)) | (max(e.use_end, e.first) < e.mapped)
        link(cache, row, SPARE if spare else LIVE)
    elif pages == 0:
        link(cache, row, VACANT_ROWS)
    else:
        as_it_is = r.broken == 0
        for part in range(row * c.ranges, (row + 1) * c.ranges):
            as_it_is &= (extents[part].shared == 0) & (extents[part].first == 0)
        link(cache, row, CLASSES + class_of(pages) if as_it_is else RETIRED)
    if r.owner == 0 and r.gain > 0:
        link_old(cache, row)
    else:
        unlink_old(cache, row)


# ---------------------------------------------------------------------- used pages


@inner
def charge(cache: int, pages: int) -> None:
    """Adds to the pages that a cache uses."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    a = view(p.accounts_at, p.accounts, ACCOUNT)[c.account]
    p.committed -= max(a.used, a.reserved)
    a.used += pages
    p.used += pages
    p.committed += max(a.used, a.reserved)


@inner
def is_over(cache: int) -> int:
    """Whether a cache uses more than it may."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    a = view(p.accounts_at, p.accounts, ACCOUNT)[c.account]
    return 1 if p.committed > p.budget or a.used > a.limit else 0


@inner
def left_for(cache: int) -> int:
    """Pages that a cache may begin to use; negative, the pages that it uses too much."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    a = view(p.accounts_at, p.accounts, ACCOUNT)[c.account]
    return min(a.limit - a.used, p.budget - p.committed + max(a.used, a.reserved) - a.used)


@inner
def available(cache: int) -> int:
    """Pages that a cache may begin to use."""
    return max(left_for(cache), 0)


@inner
def add_user(cache: int, frame: int, users: int) -> None:
    """Adds to the users of a frame below `shared`. The first user charges its pages, the last discharges them."""
    f = view(view(view(cache, 1, CACHE)[0].pool, 1, POOL)[0].frames_at, frame + 1, FRAME)[frame]
    before = f.users
    f.users += users
    if before == 0 or f.users == 0:
        charge(cache, f.pages * ((f.users > 0) - (before > 0)))


@inner
def count_users(cache: int, row: int, part: int, first: int, end: int, users: int) -> None:
    """Counts pages that a row begins (`users` is 1) or ceases (-1) to use: by frame below `shared`, by page above
    it."""
    c = view(cache, 1, CACHE)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    page = first
    while page < min(end, e.shared):
        add_user(cache, frame_at(cache, part, row, page), users)
        page += span_at(cache, row, part, page)
    if page < end:
        charge(cache, (end - page) * users)


@inner
def copies_of(cache: int, row: int, part: int, page: int) -> int:
    """Pages that a row uses from one on, and other live rows use, too: so many more are used once the row has its
    own."""
    c, total = view(cache, 1, CACHE)[0], 0
    p = view(c.pool, 1, POOL)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    page = fit(cache, row, part, max(page, e.use_first), 0)
    while page < min(e.shared, e.use_end):
        f = view(p.frames_at, p.capacity, FRAME)[frame_at(cache, part, row, page)]
        total += f.pages if f.users > 1 else 0
        page += f.pages
    return total


@inner
def use(cache: int, row: int, part: int, first: int, end: int) -> None:
    """Sets which pages of a row are used; the bounds are of whole frames."""
    c = view(cache, 1, CACHE)[0]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
    was_first, was_end = e.use_first, e.use_end
    count_users(cache, row, part, first, min(end, max(was_first, first)), 1)
    count_users(cache, row, part, max(first, was_end), end, 1)
    count_users(cache, row, part, was_first, min(was_end, max(first, was_first)), -1)
    count_users(cache, row, part, max(was_first, end), was_end, -1)
    e.use_first, e.use_end = first, end


@inner
def use_tokens(cache: int, row: int, tokens: int) -> None:
    """Makes a row use the pages of its tokens, from its start to a length, and of the overread behind them."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    for part in range(c.ranges):
        end = pages_for(cache, part, tokens + c.overread) if tokens else 0
        first = min(page_of(cache, part, r.start), end)
        use(cache, row, part, fit(cache, row, part, first, 0), fit(cache, row, part, end, 1))


@inner
def track(cache: int, row: int, part: int, shared: int) -> None:
    """Moves `shared`, the end of the pages that a row may share and that are counted frame by frame."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
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
    c = view(cache, 1, CACHE)[0]
    size = view(c.pool, 1, POOL)[0].page_size
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    room = capacity = c.max_tokens
    for part in range(c.ranges):
        g = view(c.ranges_at, c.ranges, RANGE)[part]
        e = view(c.extents_at, c.num_rows * c.ranges, EXTENT)[row * c.ranges + part]
        ready = e.ready
        if page_of(cache, part, r.length) < e.shared or page_of(cache, part, r.start) < e.first:
            ready = 0  # a write would need a copy first, or pages in front are missing
        room = min(room, min(e.use_end, ready) * size // g.record - c.overread)
        capacity = min(capacity, ready * size // g.record - c.overread)
    if r.cut > r.length:  # what a truncation has left is filled before the row grows
        room, capacity = min(room, r.length), min(capacity, r.length)
    r.room, r.capacity = max(room, 0), max(capacity, 0)
    if r.broken or r.suspended:
        r.room = r.capacity = -1
    r.ahead_at = r.capacity - c.lookahead if c.lookahead and r.capacity < c.max_tokens else c.max_tokens + 1


@inner
def queue_row(cache: int, row: int) -> int:
    """Has the mapper look at a row. Returns whether it is to be woken."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    p = view(c.pool, 1, POOL)[0]
    if not r.queued:
        r.queued = 1
        view(c.queue_at, c.num_rows, np.int64)[(c.queue_first + c.queue_count) % c.num_rows] = row
        c.queue_count += 1
        p.hungry += 1
    return 1 if p.asleep else 0


@inner
def set_length(cache: int, row: int, length: int) -> int:
    """Sets the length of a row that has room for it. Returns whether the mapper is to be woken."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    c.tokens += length - r.length
    r.length = length
    return queue_row(cache, row) if length > r.ahead_at else 0


@inner
def grow_to(cache: int, row: int, target: int) -> int:
    """Sets the length of a row, if its pages are ready. Returns `DONE`, `RING` or `NEEDS`."""
    c = view(cache, 1, CACHE)[0]
    r = view(c.rows_at, c.num_rows + LISTS, ROW)[row]
    if target > r.capacity:
        return NEEDS
    if target > r.room:
        use_tokens(cache, row, target)
        if is_over(cache):
            use_tokens(cache, row, r.length)
            return NEEDS
    ring = set_length(cache, row, target)
    if target > r.room:
        recount(cache, row)
        place(cache, row)
    return RING if ring else DONE
