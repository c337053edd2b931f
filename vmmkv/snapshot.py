"""What a cache says of itself, read off its books: how much there is of what, and where."""

from __future__ import annotations

from .events import EventLog
from .reuse.host_tier import HostTier
from .reuse.prefixes import Prefixes
from .rows.rows import Rows
from .stats import CacheStats, MappedRange


def snapshot(rows: Rows, host: HostTier | None, log: EventLog | None) -> CacheStats:
    """Counts bytes, tokens, waste, pages and rows by state, reuse, driver calls; `host` and `log` where there are."""
    pool, books, tokens = rows.pool, rows.books, rows.table.tokens
    size, used, made, mapper = pool.page_size, books.used_pages, pool.frames.made, pool.mapper
    pages = {
        "used": used,
        "surplus": rows.account.taken - len(books.zero_frames) - used,
        "free": 0 if pool.is_shared else pool.frames.free_pages,
        "zero": len(books.zero_frames),
    }
    keeper = rows.keeping.keeper
    uses, calls = rows.page_uses + used, pool.meter.stats()
    prefixes = keeper if isinstance(keeper, Prefixes) else None
    return CacheStats(
        budget_bytes=pool.accounts.limit_of(rows.account) * size,
        physical_bytes=sum(pages.values()) * size,
        tokens=tokens,
        token_bytes=tokens * sum(books.records),
        waste=1 - books.token_bytes() / (used * size) if used else 0.0,
        pages=pages,
        rows=rows.table.counts(),
        pages_created=made,
        page_uses=uses,
        reuse_factor=uses / made if made else 0.0,
        adoptions=rows.beginning.adoptions,
        prefix_pages=prefixes.pages if prefixes else 0,
        promoted_pages=prefixes.promotion.pages if prefixes and prefixes.promotion else 0,
        host_bytes=host.used if host else 0,
        host_prefix_pages=host.prefixes.pages if host else 0,
        prompt_tokens=prefixes.prompt_tokens if prefixes else 0,
        cached_tokens=prefixes.cached_tokens if prefixes else 0,
        events_dropped=log.dropped if log else 0,
        pages_mapped={"ahead": mapper.pages if mapper else 0, "in need": rows.growing.pages},
        pages_cleaned=pool.pages_cleaned,
        driver_calls=calls,
        mapper_calls=mapper.meter.stats() if mapper else {},
        driver_seconds=sum(call.seconds for call in calls.values()),
    )


def mapped_ranges(rows: Rows) -> list[MappedRange]:
    """Finds where pages are mapped: one run for each row, and each range of the layout, that has any."""
    table = rows.table
    return [
        arena.table.mapped_range(row, table.start[row] * record, table.length[row] * record, table.owner[row])
        for row in range(table.num_rows)
        for arena, record in rows.ranges
        if arena.table.pages(row)
    ]
