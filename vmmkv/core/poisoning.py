"""Poison, for debugging: NaN where tokens are gone, so that a kernel which reads there is found.

A pool with poison fills frames that a row takes (see `must_fill`), tokens that are truncated or released, and those of
a sequence that ends. It fills on the sequence's own stream, behind all work on the row, and leaves pages alone that
other rows or guests may have. A cache with `overread` is not poisoned: kernels read behind its lengths, and find finite
numbers there. The tokens of ended sequences stay where a guest may find them.
"""

from ..compiled import inner
from ..compiled.native import call
from ..driver.running import enter, leave
from .access import cache_of, driver_of, extent_at, pool_of, range_at, row_at
from .codes import DONE
from .journal import poison_of
from .pages import address_of
from .streams import fence_stream, is_captured, order


@inner
def poison(cache: int, row: int, first: int, end: int, ask: int) -> None:
    """Fills tokens of a row. The row's fence covers all work on them, and then the fill. Fills nothing while a graph is
    captured, or where a call fails."""
    p, r, status = pool_of(cache_of(cache).pool), row_at(cache, row), 0
    if first >= end or not poison_of(cache) or r.broken or r.suspended or is_captured(cache, row, ask):
        return
    if order(p.driver, 0, 0, r.slots, r.tick, r.stream, ask) != DONE or enter(p.driver, ask):
        return
    for part in range(cache_of(cache).ranges):
        e, record = extent_at(cache, row, part), range_at(cache, part).record
        begin, behind = max(first * record, max(e.shared, e.readonly, e.first) * p.page_size), end * record
        if begin < behind and status == 0:
            place = address_of(cache, row, part, 0) + begin
            status = call(driver_of(p.driver).fill, (place, p.poison, behind - begin, r.stream))
    leave(p.driver, ask)
    fence_stream(cache, row, r.stream, ask)
