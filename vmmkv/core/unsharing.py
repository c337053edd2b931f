"""Pages that a row has alone: the steps of `vmmkv.core.parting`, and the waits between them."""

from __future__ import annotations

from array import array
from contextlib import suppress
from sys import is_finalizing
from typing import TYPE_CHECKING

from ..driver.fence import Fence
from ..errors import OutOfPagesError, VmmkvError
from . import entries
from .codes import BROKEN, GONE, NO_PAGES, SUSPENDED
from .pool import NO_LIMIT_PAGES, ROW_AT, SLOTS_AT, TICK, Ask, Pool, busy
from .tables import ROW_MASK

if TYPE_CHECKING:
    from .cache import Cache


def part_from(cache: Cache, ticket: int, pages: list[int], token: int) -> None:
    """Makes a row the only one with its pages from one on, in each range, a frame at a time. Its tokens from `token` on
    will be written over. Raises `OutOfPagesError` where there is no room for all copies."""
    check_copying(cache.pool)
    ask, firsts = Ask(), array("q", pages)
    with cache.pool.copying:
        cache.pool.unstage()
        while (code := entries.can_part(cache.address, ticket, firsts.buffer_info()[0], token, ask.address)) < 0:
            if code != NO_PAGES or not cache.pool.gain_budget_for(ask):
                raise cache.error(code, ask)
        try:
            for part, page in enumerate(pages):
                while _step(cache, ticket, part, page):
                    pass
        except BaseException:
            with suppress(VmmkvError):  # else the next growth, or copy, repairs the row
                cache.repair(ticket)
            with suppress(VmmkvError):  # else the next copy does it
                cache.pool.unstage()
            raise


def check_copying(pool: Pool) -> None:
    """Raises `BusyError` where the thread is in the middle of a change or of `part_from`, or the interpreter ends."""
    if pool.copying._is_owned() or pool.lock._is_owned() or is_finalizing():
        raise busy()


def _step(cache: Cache, ticket: int, part: int, page: int) -> bool:
    """Makes one step of `part_from`. Returns whether there may be more."""
    pool, ask, before = cache.pool, Ask(), _shared_end(cache, ticket, part)
    try:
        code = pool.change(ask, entries.plan_part, cache.address, ticket, part, page)
    except OutOfPagesError:  # unless parked rows, or guests, alone have the frame, too
        if pool.change(Ask(), entries.plan_retired, pool.address, NO_LIMIT_PAGES) == GONE and not pool.ask_guests(1):
            raise
        return True
    if code in (GONE, SUSPENDED):
        raise cache.error(code, ask)
    if code == BROKEN:
        cache.repair(ticket)
        return True
    if ask.words[ROW_AT] and not _swap(cache, ticket, part):
        return True
    return before != _shared_end(cache, ticket, part) > page


def _swap(cache: Cache, ticket: int, part: int) -> bool:
    """Puts the staged copy in its place. Returns False where other rows share pages of the row meanwhile."""
    ask = Ask()
    code = entries.fence(cache.address, ticket, ask.address)
    if code < 0:
        raise cache.error(code, ask)
    Fence(cache.pool.driver, ask.words[SLOTS_AT], ask.words[TICK]).wait()
    code = cache.pool.change(Ask(), entries.plan_swap, cache.address, ticket, part)
    if code < 0:
        cache.pool.unstage()
    return code >= 0


def _shared_end(cache: Cache, ticket: int, part: int) -> int:
    """The page below which a row's pages may be shared."""
    return int(cache.extents[(ticket & ROW_MASK) * len(cache.ranges) + part]["shared"])
