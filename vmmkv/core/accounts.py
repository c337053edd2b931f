"""The caches and accounts of a pool: how they are opened and closed."""

from ..compiled import entry
from .access import account_in, ask_of, cache_of, caches_of, pool_of, row_at
from .booking import settle
from .codes import DONE, FULL, NO_LIMIT, TAKEN
from .tables import LISTS, LIVE


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
