"""Memory of launches: those that may run beside each other share none, those of one stream find theirs again."""

from __future__ import annotations

import random
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from conftest import ROUNDS

from vmmkv.kernels import launches
from vmmkv.kernels.launches import Workspace

SIZES = [(1 << 10, 256), (5000, 700), (1 << 16, 64), (1 << 16, 65)]
"""Bytes and counters of plans; of the first both take as much, so that what is given back is given again."""


@pytest.mark.parametrize("slab", [1024, 1 << 20])
def test_what_may_run_at_once_shares_nothing(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    """Of streams no room and no counters, whichever plans use them; of captures, which have torch's room, none of both,
    and no counters of others. A slab that is used up cannot be replaced in a capture."""
    for books in ("_rooms", "_counters", "_slabs"):
        monkeypatch.setattr(launches, books, {})
    kept: list[torch.Tensor] = []
    now = {"stream": 0, "capture": 0}

    def allocate(index: int, nbytes: int) -> int:
        kept.append(torch.zeros(nbytes, dtype=torch.uint8))
        return kept[-1].data_ptr()

    on_host = SimpleNamespace(
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: now["stream"]),
        empty=lambda nbytes, dtype, device: torch.empty(nbytes, dtype=dtype),
        zeros=lambda count, dtype, device: torch.zeros(count, dtype=dtype),
        uint8=torch.uint8,
        int32=torch.int32,
    )
    monkeypatch.setattr(launches, "torch", on_host)
    monkeypatch.setattr(launches, "_capture_of", lambda index, stream: now["capture"])
    monkeypatch.setattr(launches, "_allocate", allocate)
    monkeypatch.setattr(launches, "SLAB", slab)
    plans = [(Workspace(0, *sizes), *sizes) for sizes in SIZES]
    used: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for _ in range(60 * ROUNDS):
        stream, capture = random.choice([(0, 0), (16, 0), (32, 0), (32, 1), (32, 2)])
        now |= {"stream": stream, "capture": capture}
        plan, nbytes, count = random.choice(plans)
        room, counters = plan.room()
        assert room + nbytes <= counters or counters + 4 * count <= room
        lasting = {(room, room + nbytes), (counters, counters + 4 * count)}
        if capture:
            ours = [range(each.data_ptr(), each.data_ptr() + len(each)) for each in kept]
            lasting = {(first, end) for first, end in lasting if any(first in each for each in ours)}
        else:
            assert plan.room() == (room, counters)
        used.setdefault((stream, capture), set()).update(lasting)
    for mine, others in combinations(used.values(), 2):
        assert all(end <= begin or last <= first for first, end in mine for begin, last in others)
