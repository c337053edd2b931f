"""What a cache, and a pool, says of itself: one snapshot, physical bytes only, every page counted once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

FREE_PAGE = -1
"""In `KVCache.page_map`: the page exists and is mapped nowhere."""
SURPLUS_PAGE = -2
"""In `KVCache.page_map`: the page is mapped and holds no live token; it can be adopted or reclaimed."""
VACANT_PAGE = -3
"""In `KVCache.page_map`: the page's memory was given back to the system."""
OTHERS_PAGE = -5
"""In `KVCache.page_map`: the page is another cache's, on the same pool."""
LOOKAHEAD_PAGE = -6
"""In `KVCache.page_map`: the page holds no token, and is mapped behind a live sequence that will soon need it, as
`lookahead` and `expected_tokens` say. It can be reclaimed all the same: `stats()` counts it as surplus."""
SHARED_PAGE = -7
"""In `KVCache.page_map`: the page holds tokens of several sequences, which were forked, or begin alike."""
KEPT_PAGE = -8
"""In `KVCache.page_map`: the page holds a cached prefix, and no token of a live sequence, on a row or on none. It can
be reclaimed all the same: `stats()` counts it as surplus."""


class Table:
    """Prints the fields of a snapshot, a line each."""

    def __str__(self) -> str:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return "\n".join(f"{name:<20} {_text(name, getattr(self, name))}".rstrip() for name in names)


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(key, part)}" for key, part in value.items())
    if isinstance(value, tuple):
        return ", ".join(each.name for each in value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name == "waste":
        return f"{value:.1%}"
    if isinstance(value, CallStats):
        return f"{value.count:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value) if value is None else f"{value:,}"


@dataclass(frozen=True)
class CallStats:
    """One call of the memory system: how often, and how long in all."""

    count: int
    seconds: float


@dataclass(frozen=True)
class AccountStats:
    """What one cache, or growable tensor, has of a `FramePool`, in bytes.

    Attributes:
        name: its kind, and its number among all that the pool has had: `"KVCache 0"`.
        limit_bytes, reserved_bytes: the most that it may have mapped, and what it can have at any time.
        mapped_bytes, used_bytes: physical memory mapped for it, and the part of that which holds live tokens; the rest
            can be reclaimed by others.
        sequences, tokens: live sequences, of a cache, and their tokens.
    """

    name: str
    limit_bytes: int
    reserved_bytes: int
    mapped_bytes: int
    used_bytes: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class FramePoolStats(Table):
    """A snapshot of a `FramePool`, in bytes.

    Attributes:
        limit_bytes: the most that the pool may take.
        physical_bytes: physical memory that it takes now.
        free_bytes: the part of that which belongs to no account.
        leased_bytes: what memory pools of torch have, or may take without asking; the others can have that much less.
        reserved_bytes: what is reserved for accounts, in all.
        holders: the number of accounts.
        used_bytes: the part of `physical_bytes` that cannot be reclaimed, since accounts use it.
        sequences, tokens: live sequences of all caches, and their tokens.
        pages_created, pages_mapped, prompt_tokens, cached_tokens, driver_calls, mapper_calls: as in `CacheStats`.
        mapper_error: the mapper's last error. The call that grew a sequence then mapped the pages itself, or raised.
        accounts: the accounts, the oldest first.
    """

    limit_bytes: int
    physical_bytes: int
    free_bytes: int
    leased_bytes: int
    reserved_bytes: int
    holders: int
    used_bytes: int
    sequences: int
    tokens: int
    pages_created: int
    pages_mapped: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    driver_calls: dict[str, CallStats]
    mapper_calls: dict[str, CallStats]
    mapper_error: str | None
    accounts: tuple[AccountStats, ...]


@dataclass(frozen=True)
class CacheStats(Table):
    """A snapshot of a `KVCache`.

    Attributes:
        budget_bytes: the most that the cache may take.
        physical_bytes: what it takes now: all of `pages`.
        tokens: tokens of live sequences, from each sequence's `start` on.
        token_bytes: bytes of these tokens.
        waste: the part of the used pages that holds no token, 0 without sequences. Of a page that sequences share, the
            tokens of the one with most of them there count.
        pages: pages by state: `used` (hold tokens), `surplus` (mapped, ready to be adopted or
            reclaimed), `free` (created, not mapped).
        rows: rows by state: `live`, `parked` (mapped, to be adopted), `retired`, `empty`.
        pages_created: pages created since the beginning.
        page_uses: how often a page was part of a sequence since the beginning.
        reuse_factor: `page_uses / pages_created`, 0 without pages.
        adoptions: sequences that started on a row whose pages were mapped already.
        prefix_pages: pages in the prefix tree, which new sequences may begin with, whether a live sequence uses them
            (`used`) or they are only kept (`surplus`); see `Sequence.commit`.
        host_bytes: host memory that suspended sequences and evicted prefixes take.
        host_prefix_pages: pages of prefixes in host memory, whether they are on the device as well or not.
        prompt_tokens: tokens of all `token_ids` that sequences were started with, for reuse, since the beginning.
        cached_tokens: the part of these that held K and V already: hits.
        events_dropped: events dropped because `event_log` was full and not drained in time; 0 without one.
        pages_mapped: pages of the pool mapped `ahead` of need, by its mapper, and `in need`, by the call that grew a
            sequence.
        driver_calls: calls of the memory system by name, of all caches on the pool, without its mapper's.
        mapper_calls: the mapper's calls, which no user thread waits for.
        driver_seconds: time in all `driver_calls`.
    """

    budget_bytes: int
    physical_bytes: int
    tokens: int
    token_bytes: int
    waste: float
    pages: dict[str, int]
    rows: dict[str, int]
    pages_created: int
    page_uses: int
    reuse_factor: float
    adoptions: int
    prefix_pages: int
    host_bytes: int
    host_prefix_pages: int
    prompt_tokens: int
    cached_tokens: int
    events_dropped: int
    pages_mapped: dict[str, int]
    driver_calls: dict[str, CallStats]
    mapper_calls: dict[str, CallStats]
    driver_seconds: float


def format_bytes(nbytes: float) -> str:
    """Bytes to four digits in the largest binary unit that they fill: `2 GiB`, `139.8 GiB`, `96 B`."""
    units = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    unit = next((unit for unit, size in units.items() if nbytes >= size), "B")
    return f"{nbytes / units[unit]:.4g} {unit}"
