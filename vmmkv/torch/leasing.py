"""Leases: pages of a pool that a memory pool's allocator creates and releases itself, without frames of the pool.

torch calls the allocator where no Python may run, so the allocator cannot ask for each page: it is told beforehand how
many it may have. What it has of them it alone decides, at any time, on any thread. Leased pages count as used.

One call changes the books of the pool and of the allocator. It holds the interpreter's lock, so no other change of the
pool comes in between; and the allocator's mutex, so no allocation does. What the allocator may have is always leased.
"""

from ..compiled import entry, inner
from ..compiled.native import call, view
from ..core.access import account_in, ask_of, pool_of
from .allocating import STATE


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


@entry
def lease(books: int, pool: int, account: int, pages: int, ask: int) -> int:
    """Leases up to so many more pages. Returns how many. `ask.asked` is how many more there would be to lease, had free
    frames and surplus been released."""
    p, a, state = pool_of(pool), account_in(pool, account), view(books, 1, STATE)[0]
    if p.dead:
        return 0
    unused = p.budget - p.committed + max(a.used, a.reserved) - a.used
    wanted = max(min(pages, a.limit - a.used, unused), 0)
    got: int = max(min(wanted, p.budget - p.created - p.leased), 0)
    ask_of(ask).asked = wanted - got
    count(pool, account, got)
    call(state.lock, (books,))
    state.budget += got * state.page_size
    call(state.unlock, (books,))
    return got


@inner
def take_back(books: int, pool: int, account: int, pages: int, kept: int) -> int:
    """Takes up to so many pages off the allocator that it has not taken, and leaves `kept` leased. Returns how many."""
    state = view(books, 1, STATE)[0]
    leased = account_in(pool, account).leased
    call(state.lock, (books,))
    given: int = max(min(pages, (state.budget - state.physical) // state.page_size, leased - kept), 0)
    state.budget -= given * state.page_size
    call(state.unlock, (books,))
    count(pool, account, -given)
    return given


@entry
def give_back(books: int, pool: int, account: int, pages: int, kept: int) -> int:
    """Gives up to so many pages back to the pool that are leased and not taken, and leaves `kept` leased. Returns how
    many."""
    if pool_of(pool).dead or view(books, 1, STATE)[0].account != account + 1:
        return 0
    return take_back(books, pool, account, pages, kept)


@entry
def end(books: int, pool: int, account: int) -> int:
    """Gives all pages back that are not taken, and ends the reservation, and the account if no page is left. Returns
    how many. A call behind the end of the account does nothing."""
    p, a, state = pool_of(pool), account_in(pool, account), view(books, 1, STATE)[0]
    if p.dead or state.account != account + 1:
        return 0
    given = take_back(books, pool, account, p.capacity * p.large, 0)
    p.committed -= max(a.used, a.reserved) - a.used
    a.reserved = 0
    if a.used == 0:
        a.open = state.account = 0
    return given


ENTRIES = [lease, give_back, end]
SOURCES = ["driver/table.py", "core/tables.py", "core/access.py", "torch/allocating.py", "torch/leasing.py"]
