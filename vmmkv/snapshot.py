"""What the books of a cache say: statistics, and whose each page is. Queries: they change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .core import entries
from .core.cache import Cache
from .core.codes import NEEDS
from .core.pool import LARGE
from .core.tables import COUNTS
from .stats import FREE_PAGE, KEPT_PAGE, LOOKAHEAD_PAGE, OTHERS_PAGE, SHARED_PAGE, SURPLUS_PAGE, VACANT_PAGE, CacheStats

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
    return cache.tables[part][row, first:end].astype(np.int64) - 1


def frames_in(cache: Cache, row: int, part: int) -> tuple[int, Ints]:
    """The first mapped page of a row, and the frames from there on, one for each page."""
    extent = cache.extents[row * len(cache.ranges) + part]
    first = int(extent["first"])
    return first, frames_on(cache, row, part, first, int(extent["mapped"]))


def pages_in(cache: Cache, row: int, part: int) -> tuple[int, Ints]:
    """The first mapped page of a row, and the numbers of the physical pages from there on. Large frames begin at
    multiples of their pages."""
    sizes: Ints = cache.pool.frames["pages"][: cache.pool.word("fresh")]
    first, found = frames_in(cache, row, part)
    return first, (np.cumsum(sizes) - sizes)[found] + np.arange(first, first + len(found)) % sizes[found]


def counts(cache: Cache) -> dict[str, int]:
    """Pages, bytes and rows by the names of `COUNTS`."""
    found, code = np.zeros(1, COUNTS), NEEDS
    while code == NEEDS:  # another thread may make frames meanwhile
        seen = np.zeros(cache.pool.word("fresh") * LARGE, np.int64)
        code = entries.count(cache.address, seen.ctypes.data, len(seen), found.ctypes.data)
    return dict(zip(COUNTS.names or (), found[0].tolist()))


def page_map(cache: KVCache) -> Ints:
    pool = cache.pool
    frames = pool.frames[: pool.word("fresh")]
    owners = np.full(len(frames), OTHERS_PAGE, np.int64)
    owners[(frames["refs"] == 0) & (frames["held"] == 0)] = FREE_PAGE
    owners[frames["handle"] == -1] = VACANT_PAGE
    if cache.prefixes:
        owners[cache.prefixes.frames()] = KEPT_PAGE
    for row, part in mapped_rows(cache):
        owners[frames_in(cache, row, part)[1]] = SURPLUS_PAGE
    owners[(owners == SURPLUS_PAGE) & (frames["held"] > 0)] = KEPT_PAGE
    for row, part in mapped_rows(cache):
        if cache.owners[row]:
            extent = cache.extents[row * len(cache.ranges) + part]
            record, size = int(cache.ranges[part]["record"]), pool.page_size
            first, use_end, mapped = max(extent["first"], extent["use_first"]), extent["use_end"], extent["mapped"]
            wanted = max(int(cache.lengths[row]) + cache.lookahead, int(cache.rows["expected"][row]))
            ahead = frames_on(cache, row, part, use_end, min(mapped, -(-wanted * record // size)))
            owners[ahead[owners[ahead] < 0]] = LOOKAHEAD_PAGE  # another row may use one
            owners[frames_on(cache, row, part, first, min(mapped, use_end))] = cache.owners[row]
    owners[frames["users"] > 1] = SHARED_PAGE
    return np.repeat(owners, frames["pages"])


def stats(cache: KVCache) -> CacheStats:
    pool, size, tokens, host = cache.pool, cache.page_size, int(cache.state[0]["tokens"]), cache.host_tier
    account, found = pool.accounts[cache.account], counts(cache)
    used, records = int(account["used"]), sum(cache.layout.record_bytes)
    pages = {
        "used": used,
        "surplus": (found["mapped"] if pool.is_shared else pool.word("created") - pool.free_pages()) - used,
        "free": 0 if pool.is_shared else pool.free_pages(),
    }
    rows = {state: found[state] for state in ("live", "parked", "retired")}
    uses = int(cache.state[0]["page_uses"]) + found["uses"]
    shared = pool.counts()
    made = shared["pages_created"]
    return CacheStats(
        budget_bytes=min(int(account["limit"]), pool.limit_pages) * size,
        physical_bytes=sum(pages.values()) * size,
        tokens=tokens,
        token_bytes=tokens * records,
        waste=1 - found["bytes"] / (used * size) if used else 0.0,
        pages=pages,
        rows=rows | {"empty": cache.max_sequences - sum(rows.values())},
        page_uses=uses,
        reuse_factor=uses / made if made else 0.0,
        adoptions=int(cache.state[0]["adopted"]) + int(cache.state[0]["reused"]),
        prefix_pages=int(cache.prefixes.state[0]["pages"]) if cache.prefixes else 0,
        host_bytes=host.slots.taken * size if host else 0,
        host_prefix_pages=sum(host.prefixes.pages.values()) if host else 0,
        prompt_tokens=cache.prompt_tokens,
        cached_tokens=cache.cached_tokens,
        events_dropped=cache.event_log.dropped if cache.event_log else 0,
        driver_seconds=sum(call.seconds for call in shared["driver_calls"].values()),
        **shared,
    )
