"""What the books of a cache say: statistics, and whose each page is. Queries: they change nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..core.cache import Cache
from ..core.tables import RETIRED
from ..rows.rows import FREE_PAGE, KEPT_PAGE, LOOKAHEAD_PAGE, OTHERS_PAGE, SHARED_PAGE, SURPLUS_PAGE, VACANT_PAGE
from ..stats import CacheStats, MappedRange

if TYPE_CHECKING:
    from .cache import KVCache

Ints = npt.NDArray[np.int64]


def mapped_rows(cache: Cache) -> Iterator[tuple[int, int]]:
    """Rows and ranges that have mapped pages."""
    extents = cache.extents.reshape(cache.max_sequences, len(cache.ranges))
    rows, parts = np.nonzero(extents["mapped"] > extents["first"])
    yield from zip(rows.tolist(), parts.tolist())


def frames_on(cache: Cache, row: int, part: int, first: int, end: int) -> Ints:
    """The frames on pages of a row, one for each page."""
    if first >= end:
        return np.empty(0, np.int64)
    bounds = cache.ranges[part]
    address = int(bounds["pages_at"]) + 4 * (row * int(bounds["row_pages"]) + first)
    pages = np.ctypeslib.as_array((ctypes.c_int32 * (end - first)).from_address(address))
    return pages.astype(np.int64) - 1


def frames_of(cache: Cache, rows: npt.NDArray[np.bool_] | None = None, bounds: str = "mapped") -> Ints:
    """Frames in rows, each once for each page. `bounds` is `mapped` for all of them, or `use` for those that sequences
    use."""
    first, end = ("first", "mapped") if bounds == "mapped" else ("use_first", "use_end")
    found = [np.empty(0, np.int64)]
    for row, part in mapped_rows(cache):
        if rows is None or rows[row]:
            extent = cache.extents[row * len(cache.ranges) + part]
            stop = min(int(extent[end]), int(extent["mapped"]))
            found.append(frames_on(cache, row, part, max(int(extent[first]), int(extent["first"])), stop))
    return np.concatenate(found)


def mapped_pages(cache: KVCache) -> int:
    """Pages that are mapped for a cache, each counted once."""
    frames = np.unique(frames_of(cache))
    return int(cache.pool.frames["pages"][frames].sum())


def page_map(cache: KVCache) -> Ints:
    """What each physical page holds: see `KVCache.page_map`."""
    pool = cache.pool
    frames = pool.frames[: pool.word("fresh")]
    owners = np.full(len(frames), OTHERS_PAGE, np.int64)
    owners[(frames["refs"] == 0) & (frames["held"] == 0)] = FREE_PAGE
    owners[frames["handle"] == -1] = VACANT_PAGE
    live = cache.owners[: cache.max_sequences] > 0
    owners[frames_of(cache)] = SURPLUS_PAGE
    owners[(owners == SURPLUS_PAGE) & (frames["held"] > 0)] = KEPT_PAGE
    for row, part in mapped_rows(cache):
        if live[row]:
            extent = cache.extents[row * len(cache.ranges) + part]
            record, size = int(cache.ranges[part]["record"]), pool.page_size
            use_end, mapped = int(extent["use_end"]), int(extent["mapped"])
            wanted = max(int(cache.lengths[row]) + cache.lookahead, int(cache.rows["expected"][row]))
            ahead = frames_on(cache, row, part, use_end, min(mapped, -(-wanted * record // size)))
            owners[ahead] = LOOKAHEAD_PAGE
    for row, part in mapped_rows(cache):
        if live[row]:
            extent = cache.extents[row * len(cache.ranges) + part]
            used = frames_on(
                cache, row, part, int(extent["use_first"]), min(int(extent["use_end"]), int(extent["mapped"]))
            )
            owners[used] = cache.owners[row]
    owners[frames["users"] > 1] = SHARED_PAGE
    return np.repeat(owners, frames["pages"])


def page_uses(cache: KVCache) -> Ints:
    """How many sequences have had each physical page and ended: see `KVCache.page_uses`."""
    frames = cache.pool.frames[: cache.pool.word("fresh")]
    uses = frames["uses"].copy()
    for other in cache.pool.holders.values():
        if isinstance(other, Cache):
            for row, part in mapped_rows(other):
                extent = other.extents[row * len(other.ranges) + part]
                found = frames_on(other, row, part, int(extent["first"]), int(extent["mapped"]))
                np.add.at(uses, np.unique(found), int(other.rows["ended"][row]))
    return np.repeat(uses, frames["pages"])


def mapped_ranges(cache: KVCache) -> list[MappedRange]:
    """Where pages are mapped: one run for each row, and each range of the layout, that has any."""
    size, found = cache.page_size, []
    for row, part in mapped_rows(cache):
        extent, bounds = cache.extents[row * len(cache.ranges) + part], cache.ranges[part]
        base = int(bounds["address"]) + row * int(bounds["row_pages"]) * size
        begin, end = (int(words[row]) * int(bounds["record"]) for words in (cache.starts, cache.lengths))
        first, mapped = int(extent["first"]), int(extent["mapped"])
        owner = int(cache.owners[row]) or -1
        found.append(MappedRange(base + first * size, (mapped - first) * size, base + begin, end - begin, row, owner))
    return found


def stats(cache: KVCache) -> CacheStats:
    """Counts bytes, tokens, waste, pages and rows by state, reuse, driver calls."""
    pool, size, tokens = cache.pool, cache.page_size, int(cache.state[0]["tokens"])
    account = pool.accounts[cache.account]
    used, records = int(account["used"]), sum(cache.layout.record_bytes)
    pages = {
        "used": used,
        "surplus": max(mapped_pages(cache) - used, 0),
        "free": 0 if pool.is_shared else pool.free_pages(),
    }
    uses, calls, made = int(cache.state[0]["page_uses"]), pool.meter.stats(), pool.word("made")
    live = int((cache.owners[: cache.max_sequences] > 0).sum())
    retired = int((cache.rows["list"][: cache.max_sequences] == RETIRED).sum())
    parked = len({row for row, _ in mapped_rows(cache) if not cache.owners[row]}) - retired
    return CacheStats(
        budget_bytes=min(int(account["limit"]), pool.limit_pages) * size,
        physical_bytes=sum(pages.values()) * size,
        tokens=tokens,
        token_bytes=tokens * records,
        waste=1 - tokens * records / (used * size) if used else 0.0,
        pages=pages,
        rows={
            "live": live,
            "parked": parked,
            "retired": retired,
            "empty": cache.max_sequences - live - parked - retired,
        },
        pages_created=made,
        page_uses=uses,
        reuse_factor=uses / made if made else 0.0,
        adoptions=int(cache.state[0]["adopted"]) + int(cache.state[0]["reused"]),
        prefix_pages=0,
        promoted_pages=0,
        host_bytes=0,
        host_prefix_pages=0,
        prompt_tokens=pool.prompt_tokens,
        cached_tokens=pool.cached_tokens,
        events_dropped=0,
        pages_mapped={"ahead": pool.word("mapped_ahead"), "in need": pool.word("mapped_in_need")},
        pages_cleaned=0,
        driver_calls=calls,
        mapper_calls=pool.ahead_meter.stats(),
        driver_seconds=sum(call.seconds for call in calls.values()),
    )
