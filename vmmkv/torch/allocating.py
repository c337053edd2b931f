"""The functions that torch calls for a memory pool, compiled, and leases of it: see `vmmkv.torch.allocator`."""

import numpy as np

from ..compiled import entry, entry_without_lock, inner
from ..compiled.native import call, view, word
from ..core.access import account_in, ask_of, pool_of
from ..driver.table import DRIVER

STATE = np.dtype(
    [("mutex", np.int64, 8)]  # a pthread_mutex_t, which zeros initialise
    + [(name, np.int64) for name in ("driver", "page_size", "budget", "physical", "segments", "refused", "status")]
    + [(name, np.int64) for name in ("lock", "unlock", "account")]
)
"""The books; `driver` is the address of a driver's table. `refused` is the size of the last segment that could not be
had, `status` what the memory system said to it, or 0 where the budget did not allow it. `account` is the account of a
lease + 1, or 0."""


@inner
def take(books: int, size: int) -> int:
    """Debits the budget, where it allows; returns whether it does."""
    state = view(books, 1, STATE)[0]
    call(state.lock, (books,))
    allowed = 1 if state.physical + size <= state.budget else 0
    if allowed:
        state.physical += size
        state.segments += 1
    else:
        state.refused, state.status = size, 0
    call(state.unlock, (books,))
    return allowed


@inner
def give(books: int, size: int, refused: int, status: int) -> None:
    """Credits the budget with what a segment has given back."""
    state = view(books, 1, STATE)[0]
    call(state.lock, (books,))
    state.physical -= size
    state.segments -= 1
    if refused:
        state.refused, state.status = refused, status
    call(state.unlock, (books,))


MAPPED, LOST = 1, 2


@inner
def map_page(driver: int, address: int, nbytes: int, cell: int) -> int:
    """Maps a new page, and releases it: the mapping keeps it. Returns a status; the cell says whether the page is
    mapped, and whether nothing can give it back."""
    d, outcome = view(driver, 1, DRIVER)[0], view(cell, 1, np.int64)
    status = call(d.create, (cell, nbytes, d.property, 0))
    if status:
        outcome[0] = 0
        return status
    handle = outcome[0]
    status = call(d.map, (address, nbytes, 0, handle, 0))
    released = call(d.release, (handle,))
    outcome[0] = (0 if status else MAPPED) | (LOST if released else 0)
    return status if status else released


@inner
def rounded(books: int, nbytes: int) -> int:
    """Whole pages."""
    page = view(books, 1, STATE)[0].page_size
    return (nbytes + page - 1) // page * page


@inner
def map_segment(books: int, size: int, out: int) -> int:
    """Reserves addresses, which go to `out`, and maps pages there. Undoes what it has done where a call fails, and says
    so in the books. Returns a status."""
    state = view(books, 1, STATE)[0]
    driver, page = state.driver, state.page_size
    d = view(driver, 1, DRIVER)[0]
    status = call(d.reserve, (out, size, 0, 0, 0))
    if status:
        give(books, size, size, status)
        return status
    address, cell = view(out, 1, np.int64)[0], word()
    mapped = lost = 0
    while mapped < size and status == 0:
        status = map_page(driver, address + mapped, page, cell)
        outcome = view(cell, 1, np.int64)[0]
        mapped += page if outcome & MAPPED else 0
        lost += page if outcome & LOST else 0
    if status == 0:
        status = call(d.set_access, (address, size, d.access, 1))
    if status:
        if mapped and call(d.unmap, (address, mapped)):
            lost += mapped
        else:
            call(d.free, (address, size))
        give(books, size - lost, size, status)
    return status


@entry_without_lock
def allocate(books: int, nbytes: int) -> int:
    """The address of a new segment of at least `nbytes`, or 0."""
    size = rounded(books, nbytes)
    if take(books, size) == 0:
        return 0
    out, context = word(), word()
    d = view(view(books, 1, STATE)[0].driver, 1, DRIVER)[0]
    status = call(d.push, (d.context,))
    if status:
        give(books, size, size, status)
        return 0
    status = map_segment(books, size, out)
    call(d.pop, (context,))
    return 0 if status else view(out, 1, np.int64)[0]


@entry_without_lock
def deallocate(books: int, address: int, nbytes: int) -> int:
    """Gives a segment back, after all work on its device: torch trusts that this waits as `cudaFree` does."""
    d, size = view(view(books, 1, STATE)[0].driver, 1, DRIVER)[0], rounded(books, nbytes)
    context = word()
    if call(d.push, (d.context,)):
        return 0
    if call(d.synchronize, ()) == 0 and call(d.unmap, (address, size)) == 0:
        call(d.free, (address, size))
        give(books, size, 0, 0)
    call(d.pop, (context,))
    return 0


# ---------------------------------------------------------------------- leases: pages of a frame pool
#
# torch calls the allocator where no Python may run, so the allocator cannot ask for each page: it is told beforehand
# how many it may have. What it has of them it alone decides, at any time, on any thread. Leased pages count as used.
#
# One call changes the books of the pool and of the allocator. It holds the interpreter's lock, so no other change of
# the pool comes in between; and the allocator's mutex, so no allocation does.


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


ENTRIES = [allocate, deallocate, lease, give_back, end]
SOURCES = ["driver/table.py", "core/tables.py", "core/access.py", "torch/allocating.py"]
