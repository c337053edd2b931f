"""What a cache, and a pool, says of itself: one snapshot, physical bytes only, every page counted once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallStats:
    """One call of the memory system: how often, and how long in all."""

    count: int
    seconds: float


@dataclass(frozen=True)
class AccountStats:
    """What one cache, or growable tensor, has of a `FramePool`, in bytes.

    Attributes:
        name: what it is, and its number among those that the pool has had: `"KVCache 0"`.
        limit_bytes: the most that it may have mapped.
        guaranteed_bytes: what it can have at any time.
        mapped_bytes: what it has.
        used_bytes: what of that it uses, so that nobody else can have it.
        sequences: live ones, of a cache.
        tokens: theirs.
    """

    name: str
    limit_bytes: int
    guaranteed_bytes: int
    mapped_bytes: int
    used_bytes: int
    sequences: int
    tokens: int


@dataclass(frozen=True)
class FramePoolStats:
    """A snapshot of a `FramePool`, in bytes.

    Attributes:
        limit_bytes: the most that the pool may take.
        physical_bytes: what it takes now.
        free_bytes: what of it belongs to nobody.
        leased_bytes: what memory pools of torch have, or may take without asking; that is less for the others.
        guaranteed_bytes: what is promised to accounts.
        holders: how many have an account.
        used_bytes: what of it holders use, so that nobody else can have it.
        sequences: live ones, of caches.
        tokens: theirs.
        pages_created: pages created since the beginning.
        pages_mapped: how many were mapped `ahead` of need, by the mapper, and how many `in need`, by whoever grew.
        pages_cleaned: how many that were another tenant's were zeroed ahead of need, by the mapper.
        prompt_tokens: tokens of `token_ids` that sequences were started with, for reuse, since the beginning.
        cached_tokens: those of them that held K and V already.
        driver_calls: calls of the memory system by name, but for the mapper's.
        mapper_calls: those of the mapper, which nobody waits for.
        mapper_error: what went wrong in it last; who grew then did its work, or was told by an error of his own call.
        accounts: what each holder has, the oldest first.
    """

    limit_bytes: int
    physical_bytes: int
    free_bytes: int
    leased_bytes: int
    guaranteed_bytes: int
    holders: int
    used_bytes: int
    sequences: int
    tokens: int
    pages_created: int
    pages_mapped: dict[str, int]
    pages_cleaned: int
    prompt_tokens: int
    cached_tokens: int
    driver_calls: dict[str, CallStats]
    mapper_calls: dict[str, CallStats]
    mapper_error: str | None
    accounts: tuple[AccountStats, ...]


@dataclass(frozen=True)
class MappedRange:
    """A run of mapped pages.

    Attributes:
        address: of the first byte.
        nbytes: bytes of the pages.
        used_address: of the first byte that is in use.
        used_bytes: bytes in use: tokens of a sequence, or rows of a growable tensor.
        row: the row that they lie in.
        owner: the number of the sequence that has the row; -1 where nobody has it.
    """

    address: int
    nbytes: int
    used_address: int
    used_bytes: int
    row: int
    owner: int


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of a `KVCache`.

    Attributes:
        budget_bytes: the most that the cache may take.
        physical_bytes: what it takes now: all `pages`.
        tokens: tokens of live sequences, from each sequence's `start` on.
        token_bytes: bytes of these tokens.
        waste: the part of the used pages that holds no token, 0 without sequences.
        pages: pages by state: `used` (hold tokens), `surplus` (mapped, ready to be adopted or
            reclaimed), `free` (created, not mapped), `zero` (the one behind all rows with `zero_tail`).
        rows: rows by state: `live`, `parked` (mapped, to be adopted), `retired`, `empty`.
        pages_created: pages created since the beginning.
        page_uses: how often a page was part of a sequence since the beginning.
        reuse_factor: `page_uses / pages_created`, 0 without pages.
        adoptions: sequences that started on a row whose pages were mapped already.
        prefix_pages: pages that are known to hold tokens that sequences may begin with, whether one uses them (`used`)
            or they are kept (`surplus`); see `Sequence.commit`.
        promoted_pages: known pages that have moved to large frames since the beginning, because they were hit on single
            ones.
        host_bytes: host memory that suspended sequences and evicted prefixes take.
        host_prefix_pages: pages that are known on the host, whether they are on the device as well or not.
        prompt_tokens: tokens of `token_ids` that sequences were started with, for reuse, since the beginning.
        cached_tokens: those of them that held K and V already: hits.
        events_dropped: events that did not fit `event_log`, for nobody drained it in time; 0 without one.
        pages_mapped: how many pages of the pool were mapped `ahead` of need, by its mapper, and how many of this cache
            `in need`, by whoever grew.
        pages_cleaned: how many pages of the pool that were another tenant's were zeroed ahead of need, by its mapper.
        driver_calls: calls of the memory system by name, for all that lies on the pool, but for its mapper's.
        mapper_calls: those of the mapper, which nobody waits for.
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
    promoted_pages: int
    host_bytes: int
    host_prefix_pages: int
    prompt_tokens: int
    cached_tokens: int
    events_dropped: int
    pages_mapped: dict[str, int]
    pages_cleaned: int
    driver_calls: dict[str, CallStats]
    mapper_calls: dict[str, CallStats]
    driver_seconds: float


def format_bytes(nbytes: float) -> str:
    """Bytes to four digits in the largest binary unit that they fill: `2 GiB`, `139.8 GiB`, `96 B`."""
    units = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    unit = next((unit for unit, size in units.items() if nbytes >= size), "B")
    return f"{nbytes / units[unit]:.4g} {unit}"
