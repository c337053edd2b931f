"""The caches and accounts of a pool: how they are opened and closed, and what they have."""

from ..compiled import entry
from ..compiled.native import view
from .access import (
    account_in, ask_of, cache_of, caches_of, extent_at, frame_in, pool_of, range_at, row_at, words_at,
)  # fmt: skip
from .booking import settle
from .codes import DONE, FULL, NEEDS, NO_LIMIT, TAKEN
from .pages import frame_at
from .tables import COUNTS, LISTS, LIVE, RETIRED


@entry
def open_account(pool: int, limit: int, reserved: int, ask: int) -> int:
    """Opens an account. Returns its number; `NO_LIMIT`, and how much it can have reserved; or `FULL`."""
    p = pool_of(pool)
    ask_of(ask).available = p.budget - p.committed
    if reserved > p.budget - p.committed:
        return NO_LIMIT
    for number in range(p.accounts):
        a = account_in(pool, number)
        if not a.open:
            a.used, a.leased, a.limit, a.reserved, a.open = 0, 0, limit, reserved, 1
            p.committed += reserved
            return number
    return FULL


@entry
def open_cache(cache: int, limit: int, reserved: int, ask: int) -> int:
    """Puts a cache on its pool, with an account of its own. Returns what `open_account` does."""
    c = cache_of(cache)
    caches = caches_of(c.pool)
    for index in range(pool_of(c.pool).caches):
        if not caches[index]:
            number = open_account(c.pool, limit, reserved, ask)
            if number >= 0:
                c.account, caches[index] = number, cache
            return number
    return FULL


@entry
def plan_close(cache: int, ask: int) -> int:
    """Takes a cache off its pool. Returns `DONE`; or `TAKEN`: there are sequences, or pages."""
    c = cache_of(cache)
    p, caches = pool_of(c.pool), caches_of(c.pool)
    settle(c.pool, ask)
    for head in range(c.num_rows + LIVE, c.num_rows + LISTS):
        if row_at(cache, head).next != head:
            return TAKEN
    c.closed = 1
    for index in range(p.caches):
        if caches[index] == cache:
            caches[index] = 0
            p.hungry -= c.queue_count
            c.queue_count = 0
            a = account_in(c.pool, c.account)
            p.committed -= max(a.used, a.reserved)
            a.open = 0
    return DONE


@entry
def count(cache: int, seen_at: int, pages: int, counts_at: int) -> int:
    """Counts what `COUNTS` names. `seen_at` has numbers, all of them 0, for so many pages; frames with numbers below
    `fresh` may have `large` pages each. Returns `DONE`; or `NEEDS`: there are more frames. It needs no lock, and no
    other thread's change falls in the middle."""
    c, n, seen = cache_of(cache), view(counts_at, 1, COUNTS)[0], words_at(seen_at, pages)
    p = pool_of(c.pool)
    size = p.page_size
    if p.fresh * p.large > pages:
        return NEEDS
    for row in range(c.num_rows):
        r, is_mapped = row_at(cache, row), 0
        for part in range(c.ranges):
            e, record = extent_at(cache, row, part), range_at(cache, part).record
            begin, end, page = r.start * record, r.length * record, e.first
            is_mapped |= e.mapped > e.first
            while page < min(e.shared, e.mapped):  # a frame may be there twice, or in another row, too
                frame = frame_at(cache, part, row, page)
                first, behind = frame * p.large, frame * p.large + frame_in(c.pool, frame).pages
                n.mapped += behind - first if not seen[first] else 0
                for place in range(first, behind):
                    used = max(min(end, page * size + size) - max(begin, page * size), 0) if r.owner else 0
                    n.bytes += max(used + 1 - seen[place], 0) - (seen[place] == 0)
                    seen[place] = max(seen[place], used + 1)
                    page += 1
            n.mapped += max(e.mapped - page, 0)
            if r.owner:
                n.bytes += max(min(end, e.mapped * size) - max(begin, page * size), 0)
                n.uses += e.use_end - e.use_first
        n.live += r.owner > 0
        n.retired += r.owner == 0 and r.list == RETIRED
        n.parked += r.owner == 0 and r.list != RETIRED and is_mapped
    return DONE
