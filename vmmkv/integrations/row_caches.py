"""The caches of continuous batching on rows, one for each layer group: what they may take, and how many rows there are.

All of a device lie on one pool, and tokens on the host are shared out by what each group keeps of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache import KVCache
from ..core.addresses import ADDRESS_LIMIT
from ..pool import FramePool
from .row_groups import Group, devices_of
from .row_ranks import Ranks


@dataclass(frozen=True)
class Options:
    """What `enable` was told."""

    max_bytes: float | str | None
    pool: FramePool | None
    max_seq_len: int
    idle_seconds: float
    kv_dtype: torch.dtype | None


def make_caches(
    options: Options,
    groups: list[Group],
    budget: Callable[[int], float | str],
    requests: int,
    host_bytes: int,
    ranks: Ranks,
) -> list[KVCache]:
    """Makes the caches of all groups, which may take as much in every process.

    Args:
        budget: the most that they may take on a device where a token has so many bytes, where nobody has said it.
        requests: how many should have a row at a time.
        host_bytes: what may be moved to the host.
        ranks: the processes.
    """
    caches: list[KVCache] = []

    def make() -> int:
        caches[:] = _caches_here(options, groups, budget, requests, host_bytes)
        return caches[0].pool.limit_pages

    here, least = ranks.attempt(make)
    if options.pool is None and least < here:
        caches[0].pool.set_limit(int(least) * caches[0].pool.page_size)
    return caches


def _caches_here(
    options: Options, groups: list[Group], budget: Callable[[int], float | str], requests: int, host_bytes: int
) -> list[KVCache]:
    """Makes the caches of this process."""
    pools: dict[torch.device, FramePool] = {}
    for device in devices_of(groups):
        limit = options.max_bytes
        if limit is None:
            limit = budget(bytes_of_token([group for group in groups if group.device == device]))
        pools[device] = options.pool or FramePool(limit, device=device)
    token_bytes = bytes_of_token(groups)
    rows = _num_rows(options.max_seq_len * token_bytes, requests)
    has_windows = any(group.window for group in groups)
    return [
        KVCache(
            group.layout,
            rows,
            options.max_seq_len,
            pool=pools[group.device],
            large_frames=not group.window,
            host_bytes=host_bytes * group.layout.token_bytes // token_bytes,
            host_priority=None if has_windows else 30,
        )
        for group in groups
    ]


def bytes_of_token(groups: list[Group]) -> int:
    """Of a token, in all layers."""
    return sum(group.layout.token_bytes for group in groups)


def _num_rows(row_bytes: int, wanted: int) -> int:
    """How many rows each group has: as many as are wanted, or as there are addresses for."""
    return max(min(wanted, ADDRESS_LIMIT // 2 // row_bytes), 1)
