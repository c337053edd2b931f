"""The caches and accounts of a pool: how they are opened and closed."""

import numpy as np

from ..compiled import entry, inner
from ..compiled.native import view
from .booking import settle
from .tables import ACCOUNT, ASK, CACHE, DONE, FULL, LISTS, LIVE, NO_LIMIT, POOL, ROW, TAKEN


@entry
def open_account(pool: int, limit: int, reserved: int, ask: int) -> int:
    """Opens an account. Returns its number; `NO_LIMIT`, and how much it can have reserved; or `FULL`."""
    p, a = view(pool, 1, POOL)[0], view(ask, 1, ASK)[0]
    a.available = p.budget - p.committed
    if reserved > p.budget - p.committed:
        return NO_LIMIT
    accounts = view(p.accounts_at, p.accounts, ACCOUNT)
    for number in range(p.accounts):
        if not accounts[number].open:
            accounts[number].used = accounts[number].leased = 0
            accounts[number].limit, accounts[number].reserved, accounts[number].open = limit, reserved, 1
            p.committed += reserved
            return number
    return FULL


@entry
def close_account(pool: int, number: int) -> int:
    """Closes an account that uses nothing."""
    p = view(pool, 1, POOL)[0]
    a = view(p.accounts_at, p.accounts, ACCOUNT)[number]
    if a.open:
        p.committed -= max(a.used, a.reserved)
        a.open = 0
    return DONE


@entry
def open_cache(cache: int, limit: int, reserved: int, ask: int) -> int:
    """Puts a cache on its pool, with an account of its own. Returns what `open_account` does."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    caches = view(p.caches_at, p.caches, np.int64)
    for index in range(p.caches):
        if not caches[index]:
            number = open_account(c.pool, limit, reserved, ask)
            if number >= 0:
                c.account, caches[index] = number, cache
            return number
    return FULL


@inner
def leave_pool(cache: int) -> None:
    """Takes a cache off its pool, if it is there still."""
    c = view(cache, 1, CACHE)[0]
    p = view(c.pool, 1, POOL)[0]
    caches = view(p.caches_at, p.caches, np.int64)
    for index in range(p.caches):
        if caches[index] == cache:
            caches[index] = 0
            p.hungry -= c.queue_count
            c.queue_count = 0
            close_account(c.pool, c.account)


@entry
def forget_adoption(cache: int) -> int:
    """Takes back that a sequence has adopted a row, whose start is refused."""
    view(cache, 1, CACHE)[0].adopted -= 1
    return DONE


@entry
def plan_close(cache: int, ask: int) -> int:
    """Takes a cache without sequences and pages off its pool. Returns `DONE`; or `TAKEN`: there are sequences, or
    pages."""
    c = view(cache, 1, CACHE)[0]
    settle(c.pool, ask)
    heads = view(c.rows_at, c.num_rows + LISTS, ROW)
    for which in range(LIVE, LISTS):
        if heads[c.num_rows + which].next != c.num_rows + which:
            return TAKEN
    c.closed = 1
    leave_pool(cache)
    return DONE
