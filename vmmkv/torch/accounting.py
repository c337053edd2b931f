"""How much memory is ours in this process: `torch.cuda.memory_allocated()` cannot know."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ..errors import VmmkvError
from ..pool import holders, pool_stats
from .pool import pools


def memory_allocated(device: str | torch.device | None = None) -> int:
    """Bytes of the pages of all caches, growable tensors, frame pools and memory pools of this process. torch also
    counts those of memory pools (in `torch.cuda.memory_reserved`), but not those of caches and growable tensors.

    Args:
        device: counts only what is there: `"cuda"` (torch's current device; torch's own error, where there is none),
            `"cuda:1"`, `"cpu"`; None counts all.
    """
    where = None if device is None else torch.device(device)
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    found = sum(
        free.free_bytes for pool, free in pool_stats().items() if pool.is_shared and where in (None, pool.device)
    )
    owners: list[Any] = [*dict.fromkeys([*holders(), *pools])]  # memory pools may lie on no frame pool
    for owner in owners:
        with suppress(VmmkvError):  # closed, or the parent's
            found += owner.stats().physical_bytes if where in (None, owner.device) else 0
    return found
