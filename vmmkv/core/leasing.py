"""Leased pages: those that the user of an account creates and releases itself, which need no frames of the pool.

They count as used. The callers hold the interpreter's lock, as for all changes of the books, and need no other.
"""

from ..compiled import inner
from ..compiled.native import view
from .tables import ACCOUNT, ASK, POOL


@inner
def lease(pool: int, account: int, pages: int, ask: int) -> int:
    """Leases up to so many more pages. Returns how many. `ask.asked` is how many more there would be to lease, had free
    frames and surplus been released."""
    p = view(pool, 1, POOL)[0]
    a = view(p.accounts_at, p.accounts, ACCOUNT)[account]
    unused = p.budget - p.committed + max(a.used, a.reserved) - a.used
    wanted = max(min(pages, a.limit - a.used, unused), 0)
    got = max(min(wanted, p.budget - p.created - p.leased), 0)
    view(ask, 1, ASK)[0].asked = wanted - got
    count(pool, account, got)
    return got


@inner
def count(pool: int, account: int, pages: int) -> None:
    """Counts pages that are leased from now on, or given back (`pages` is negative)."""
    p = view(pool, 1, POOL)[0]
    a = view(p.accounts_at, p.accounts, ACCOUNT)[account]
    p.committed -= max(a.used, a.reserved)
    a.used += pages
    a.leased += pages
    p.committed += max(a.used, a.reserved)
    p.used += pages
    p.leased += pages


@inner
def end(pool: int, account: int) -> None:
    """Ends the reservation of an account, and the account itself if nothing is leased any more."""
    p = view(pool, 1, POOL)[0]
    a = view(p.accounts_at, p.accounts, ACCOUNT)[account]
    p.committed -= max(a.used, a.reserved) - a.used
    a.reserved = 0
    if a.used == 0:
        a.open = 0
