"""Memory in which the blocks of one launch leave their parts for each other."""

from __future__ import annotations

from functools import cache

import torch

_workspaces: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_captured: dict[int, tuple[int, tuple[torch.Tensor, torch.Tensor]]] = {}


def workspace(index: int, partial_bytes: int, counters: int) -> tuple[int, int]:
    """Addresses of room for parts, and of that many 32-bit counters which are 0 and are left 0 by each launch.

    Launches on one stream follow each other and share it. A graph may run beside any stream: it has its own, set to 0
    whenever it is replayed.
    """
    if index >= 0 and torch._C._cuda_isCurrentStreamCapturing():
        capture = _capture_id(index)
        captured, have = _captured.get(index, (-1, None))
        if have is None or captured != capture or not _suffices(have, partial_bytes, counters):
            have = _make(index, partial_bytes, counters)
            _captured[index] = capture, have
    else:
        key = index, torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
        have = _workspaces.get(key)
        if have is None or not _suffices(have, partial_bytes, counters):
            have = _workspaces[key] = _make(index, partial_bytes, counters)
    return have[0].data_ptr(), have[1].data_ptr()


def _suffices(have: tuple[torch.Tensor, torch.Tensor], partial_bytes: int, counters: int) -> bool:
    return have[0].numel() >= partial_bytes and have[1].numel() >= counters


def _make(index: int, partial_bytes: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    partials = torch.empty(1 << (partial_bytes - 1).bit_length(), dtype=torch.uint8, device=device)
    return partials, torch.zeros(1 << (counters - 1).bit_length(), dtype=torch.int32, device=device)


def _capture_id(index: int) -> int:
    import cuda.bindings.driver as cu

    return int(cu.cuStreamGetCaptureInfo(torch._C._cuda_getCurrentRawStream(index))[2])


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; two for the simulator, so that work is shared there as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
