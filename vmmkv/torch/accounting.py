"""Who holds how many of our pages in this process: `torch.cuda.memory_allocated()` cannot know."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..cache import KVCache
from ..errors import VmmkvError
from ..pool import FramePool, holders, pool_stats
from ..stats import MappedRange
from .growable_tensor import GrowableTensor
from .pool import MemoryPool, pools

Kind = TypeVar("Kind", KVCache, GrowableTensor)


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
    takers: list[KVCache | GrowableTensor | MemoryPool] = [*_all(KVCache), *_all(GrowableTensor), *pools]
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


def memory_snapshot() -> dict[str, Any]:
    """The mapped pages of caches and growable tensors, as `torch.cuda.memory._snapshot()` describes torch's own.

    A segment is a run of mapped pages; its block is the part that holds tokens, or rows, and its stack frame says whose
    they are. Pages that several sequences share appear once for each. Host memory is a device after the last GPU. Free
    pages have no address and do not appear; segments of memory pools are in torch's own snapshot.

    Returns:
        `{"segments": [...], "device_traces": [[], ...]}`, for https://pytorch.org/memory_viz and for
        `torch.cuda._memory_viz`.
    """
    traces: list[list[Any]] = [[] for _ in range(torch.cuda.device_count() + 1)]
    return {"segments": [*_segments()], "device_traces": traces}


def dump_snapshot(path: str | os.PathLike[str]) -> None:
    """Writes `memory_snapshot()` to a file, to be dropped on https://pytorch.org/memory_viz. Raises as `open` does."""
    with open(path, "wb") as file:
        pickle.dump(memory_snapshot(), file, protocol=4)  # that page reads no later one


def _all(kind: type[Kind]) -> list[Kind]:
    """The caches, or the growable tensors, of this process."""
    return [owner for owner in holders() if isinstance(owner, kind)]


def _whole_device(device: str | torch.device) -> torch.device:
    """The device with its index."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _segments() -> Iterator[dict[str, Any]]:
    owners: list[KVCache | GrowableTensor] = [*_all(KVCache), *_all(GrowableTensor)]
    for owner in owners:
        with suppress(VmmkvError):
            for mapped in owner.mapped_ranges():
                if isinstance(owner, GrowableTensor):
                    whose = {"filename": "GrowableTensor", "line": 0, "name": f"{list(owner.shape)} {owner.dtype}"}
                else:
                    name = f"sequence {mapped.owner}" if mapped.owner >= 0 else "surplus"
                    whose = {"filename": "KVCache", "line": mapped.row, "name": name}
                yield _segment(owner.device, owner.pool.page_size, mapped, whose)


def _segment(device: torch.device, page_size: int, mapped: MappedRange, whose: dict[str, Any]) -> dict[str, Any]:
    """The segment of a row: surplus pages, those in use, and surplus pages again."""
    start, used = mapped.address, mapped.used_address - mapped.address
    begin = max(used // page_size * page_size, 0)
    end = max(-(-(used + mapped.used_bytes) // page_size) * page_size, begin)
    edges = (start, start + begin, start + end, start + mapped.nbytes)
    blocks = [
        {
            "address": at,
            "size": stop - at,
            "requested_size": mapped.used_bytes if state == "active_allocated" else 0,
            "state": state,
            "frames": [whose],
        }
        for at, stop, state in zip(edges, edges[1:], ("inactive", "active_allocated", "inactive"))
        if stop > at
    ]
    return {
        "device": torch.cuda.device_count() if device.type == "cpu" else device.index,
        "address": mapped.address,
        "total_size": mapped.nbytes,
        "allocated_size": end - begin,
        "active_size": end - begin,
        "requested_size": mapped.used_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }
