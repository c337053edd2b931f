"""Who holds how many of our pages in this process: `torch.cuda.memory_allocated()` cannot know."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..cache import KVCache
from ..errors import VmmkvError
from ..pool import FramePool, holders, pool_stats
from .growable_tensor import GrowableTensor
from .pool import MemoryPool, pools


@dataclass(frozen=True)
class MemoryStats:
    """What one owner holds: a live `KVCache`, `GrowableTensor` or `MemoryPool`, or a `FramePool`, which holds what is
    free. Its own `stats()` says more.

    Attributes:
        owner, device: the owner, and where its pages are.
        physical_bytes, budget_bytes: bytes of its pages, and the most that it may take.
    """

    owner: KVCache | GrowableTensor | MemoryPool | FramePool
    device: torch.device
    physical_bytes: int
    budget_bytes: int


def memory_stats(device: str | torch.device | None = None) -> list[MemoryStats]:
    """What every cache, growable tensor, frame pool and memory pool of this process holds, the largest first.

    Args:
        device: counts only what is there: `"cuda"` (torch's current device; torch's own error, where there is none),
            `"cuda:1"`, `"cpu"`; None counts all.
    """
    takers: list[Any] = [*dict.fromkeys([*holders(), *pools])]  # memory pools may lie on no frame pool
    stats = []
    for owner in takers:
        if device is None or owner.device == _whole_device(device):
            with suppress(VmmkvError):  # closed, or the parent's
                held = owner.stats()
                stats.append(MemoryStats(owner, owner.device, held.physical_bytes, held.budget_bytes))
    for pool, free in pool_stats().items():
        if pool.is_shared and (device is None or pool.device == _whole_device(device)):
            stats.append(MemoryStats(pool, pool.device, free.free_bytes, free.limit_bytes))
    return sorted(stats, key=lambda held: -held.physical_bytes)


def memory_allocated(device: str | torch.device | None = None) -> int:
    """Bytes of all of vmmkv's pages on a device, named as in `memory_stats`, or on all. torch also counts those of
    memory pools (in `torch.cuda.memory_reserved`), but not those of caches and growable tensors."""
    return sum(held.physical_bytes for held in memory_stats(device))


def _whole_device(device: str | torch.device) -> torch.device:
    """The device with its index."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
