"""Leases: pages of a pool that a memory pool's allocator creates and releases itself.

torch calls the allocator where no Python may run, so the allocator cannot ask for each page: it is told beforehand how
many it may have. What it has of them it alone decides, at any time, on any thread.

One call changes the books of the pool and of the allocator. It holds the interpreter's lock, so no other change of the
pool comes in between; and the allocator's mutex, so no allocation does. What the allocator may have is always leased.
"""

from ..compiled import entry, inner
from ..compiled.native import call, view
from ..core import leasing
from ..core.access import account_in, pool_of
from .allocating import STATE


@entry
def lease(books: int, pool: int, account: int, pages: int, ask: int) -> int:
    """Leases up to so many more pages. Returns how many; see `vmmkv.core.leasing.lease`."""
    if pool_of(pool).dead:
        return 0
    got, state = leasing.lease(pool, account, pages, ask), view(books, 1, STATE)[0]
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
    leasing.count(pool, account, -given)
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
    p, state = pool_of(pool), view(books, 1, STATE)[0]
    if p.dead or state.account != account + 1:
        return 0
    given = take_back(books, pool, account, p.capacity * p.large, 0)
    leasing.end(pool, account)
    if not account_in(pool, account).open:
        state.account = 0
    return given


ENTRIES = [lease, give_back, end]
SOURCES = ["driver/table.py", "core/tables.py", "core/access.py", "core/leasing.py"]
SOURCES += ["torch/allocating.py", "torch/leasing.py"]
