"""Leased pages: those that the user of an account creates and releases itself, which need no frames of the pool.

They count as used. The callers hold the interpreter's lock, as for all changes of the books, and need no other.
"""

from ..compiled import inner
from .access import account_in, ask_of, pool_of


@inner
def lease(pool: int, account: int, pages: int, ask: int) -> int:
    """Leases up to so many more pages. Returns how many. `ask.asked` is how many more there would be to lease, had free
    frames and surplus been released."""
    p, a = pool_of(pool), account_in(pool, account)
    unused = p.budget - p.committed + max(a.used, a.reserved) - a.used
    wanted = max(min(pages, a.limit - a.used, unused), 0)
    got = max(min(wanted, p.budget - p.created - p.leased), 0)
    ask_of(ask).asked = wanted - got
    count(pool, account, got)
    return got


@inner
def count(pool: int, account: int, pages: int) -> None:
    """Counts pages that are leased from now on, or given back (`pages` is negative)."""
    p, a = pool_of(pool), account_in(pool, account)
    p.committed -= max(a.used, a.reserved)
    a.used += pages
    a.leased += pages
    p.committed += max(a.used, a.reserved)
    p.used += pages
    p.leased += pages


@inner
def end(pool: int, account: int) -> None:
    """Ends the reservation of an account, and the account itself if nothing is leased any more."""
    a = account_in(pool, account)
    pool_of(pool).committed -= max(a.used, a.reserved) - a.used
    a.reserved = 0
    if a.used == 0:
        a.open = 0
