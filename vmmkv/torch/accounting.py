"""Who holds how many of our pages in this process: `torch.cuda.memory_allocated()` cannot know."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..cache import KVCache, _caches
from ..errors import VmmkvError
from ..space.page_table import PageTable
from .growable_tensor import GrowableTensor, _tensors
from .pool import MemoryPool, _pools


@dataclass(frozen=True)
class MemoryStats:
    """What one owner holds; its own `stats()` says more.

    Attributes:
        owner: a live `KVCache`, `GrowableTensor` or `MemoryPool`.
        device: where its pages are.
        physical_bytes: bytes of its pages.
        budget_bytes: the most that it may take.
    """

    owner: KVCache | GrowableTensor | MemoryPool
    device: torch.device
    physical_bytes: int
    budget_bytes: int


def memory_stats(device: str | torch.device | None = None) -> list[MemoryStats]:
    """What every cache, growable tensor and memory pool of this process holds, the largest first.

    Args:
        device: counts only what is there: `"cuda"` (torch's current device), `"cuda:1"`, `"cpu"`; None counts all.
    """
    owners: list[KVCache | GrowableTensor | MemoryPool] = [*_caches, *_tensors, *_pools]
    stats = []
    for owner in owners:
        if device is None or owner.device == _whole_device(device):
            with suppress(VmmkvError):  # closed, or the parent's
                held = owner.stats()
                stats.append(MemoryStats(owner, owner.device, held.physical_bytes, held.budget_bytes))
    return sorted(stats, key=lambda held: -held.physical_bytes)


def memory_allocated(device: str | torch.device | None = None) -> int:
    """Bytes of all of our pages on a device, or on all. torch counts those of memory pools too (in
    `torch.cuda.memory_reserved`), those of caches and growable tensors not."""
    return sum(held.physical_bytes for held in memory_stats(device))


def memory_snapshot() -> dict[str, Any]:
    """The mapped pages of caches and growable tensors, as `torch.cuda.memory._snapshot()` describes torch's own.

    A segment is a run of mapped pages; the block in it is what tokens, or rows, lie in, and its frame says whose
    they are. Host memory is the device behind the last GPU. Free pages have no address and are not here, and
    segments of memory pools are in torch's own snapshot.

    Returns:
        `{"segments": [...], "device_traces": [[], ...]}`, for https://pytorch.org/memory_viz and for
        `torch.cuda._memory_viz`.
    """
    traces: list[list[Any]] = [[] for _ in range(torch.cuda.device_count() + 1)]
    return {"segments": [*_cache_segments(), *_tensor_segments()], "device_traces": traces}


def dump_snapshot(path: str | os.PathLike[str]) -> None:
    """Writes `memory_snapshot()` to a file, to be dropped on https://pytorch.org/memory_viz."""
    with open(path, "wb") as file:
        pickle.dump(memory_snapshot(), file, protocol=4)  # that page reads no later one


def _whole_device(device: str | torch.device) -> torch.device:
    """The device with its index."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _cache_segments() -> Iterator[dict[str, Any]]:
    for cache in list(_caches):
        with cache.pool.monitor.lock, suppress(VmmkvError):
            cache.check_usable()
            rows, table = cache._rows, cache._rows.table
            for row in range(cache.max_sequences):
                number, start, length = table.owner[row], table.start[row], table.length[row]
                whose = {"filename": "KVCache", "line": row, "name": f"sequence {number}" if number >= 0 else "surplus"}
                for arena, record in rows.ranges:
                    used = start * record, length * record
                    yield from _segment(cache.device, arena.table, row, used, whose)


def _tensor_segments() -> Iterator[dict[str, Any]]:
    for tensor in list(_tensors):
        with suppress(VmmkvError):
            used = 0, tensor.stats().used_bytes
            whose = {"filename": "GrowableTensor", "line": 0, "name": f"{list(tensor.shape)} {tensor.dtype}"}
            yield from _segment(tensor.device, tensor._arena.table, 0, used, whose)


def _segment(
    device: torch.device, table: PageTable, row: int, used: tuple[int, int], whose: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The segment of a row, where anything is mapped; bytes `[start, end)` of the row hold something."""
    if not table.pages(row):
        return
    start, end = used
    page_size = table.page_size
    first = max(start // page_size, table.first[row])
    edges = (table.first[row], first, max(-(-end // page_size), first), table.end[row])
    blocks = [
        {
            "address": table.address_of(row, begin),
            "size": (stop - begin) * page_size,
            "requested_size": end - start if state == "active_allocated" else 0,
            "state": state,
            "frames": [whose],
        }
        for begin, stop, state in zip(edges, edges[1:], ("inactive", "active_allocated", "inactive"))
        if stop > begin
    ]
    active = (edges[2] - edges[1]) * page_size
    yield {
        "device": torch.cuda.device_count() if device.type == "cpu" else device.index,
        "address": table.address_of(row, table.first[row]),
        "total_size": table.pages(row) * page_size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": end - start,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }
