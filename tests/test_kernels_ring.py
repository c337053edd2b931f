"""A ring in shared memory: every tile comes to every warp that uses it, whole and in order, in rings of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import DEVICE
from numba import cuda

from vmmkv.kernels.arguments import Row
from vmmkv.kernels.checks import keys
from vmmkv.kernels.compiler import Kernel, uint32
from vmmkv.kernels.launches import Launch, maps_of
from vmmkv.kernels.memory import shared_address, store_4
from vmmkv.kernels.prefill_rings import BARRIER_BYTES, Ring, Source, make_copy_tile, make_ring, tile_bytes
from vmmkv.kernels.prompts import Prompt
from vmmkv.kernels.warp import ATOM_BYTES, publish_barriers, swizzled, sync_warp

TILE, USERS = 16, 3
NBYTES = tile_bytes(64, TILE)


class Given(NamedTuple):
    """What the kernel takes: K of one head, of boxes and of tokens, where tiles go, and what they are made of."""

    boxes: bytes
    tokens: bytes
    out: int
    tiles: int
    begin: int
    length: int


def make_hand_on(num_slots: int) -> Any:
    """A kernel: one warp fills a ring with tiles of row 1, three put all of them to `out`, one behind the other."""
    init, wait_empty, fill, _, wait_full, release = make_ring(num_slots, NBYTES, USERS)
    look_up, copy_tile = make_copy_tile(64, TILE, 0)

    def kernel(given: Given) -> None:
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        words = cuda.shared.array(0, uint32)
        base = (shared_address(words) + ATOM_BYTES - 1) // ATOM_BYTES * ATOM_BYTES
        ring = Ring(base, base + num_slots * NBYTES)
        if cuda.threadIdx.x == 0:
            init(ring)
            publish_barriers()
        cuda.syncthreads()
        if warp == 0:
            prompt = Prompt(0, 0, 0, 0, 0, given.begin, given.length, 0, 0, 0)
            for n in range(given.tiles):
                wait_empty(ring, n)
                home = look_up(n * TILE, Row(1, 0), prompt, lane)
                copy_tile(fill(ring, n, lane), Source(given.boxes, given.tokens, 0), home, n * TILE, prompt, lane)
        else:
            for n in range(given.tiles):
                first = (wait_full(ring, n) - shared_address(words)) // 4
                to = given.out + ((warp - 1) * given.tiles + n) * NBYTES
                for word in range(lane, NBYTES // 4, 32):
                    store_4(to + word * 4, words[first + word])
                sync_warp()
                release(ring, n, lane)

    return kernel


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() != (9, 0), reason="needs the copy engine of Hopper"
)
@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_every_tile_comes_whole_and_in_order(num_slots: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # a change of this file makes new PTX
    shared_bytes = num_slots * (NBYTES + BARRIER_BYTES) + ATOM_BYTES
    kernel = Kernel(make_hand_on, (num_slots,), (Given,), 32 * (1 + USERS), shared_bytes=shared_bytes, hopper=True)
    for tiles in (1, 3, 11):
        begin, length = int(torch.randint(0, 5, ())), TILE * tiles - int(torch.randint(0, 11, ()))
        k = torch.randn(2, length, 1, 64, device=DEVICE).to(torch.bfloat16)
        k[1, :begin] = torch.nan  # may be gone
        out = torch.zeros(USERS, tiles, NBYTES, dtype=torch.uint8, device=DEVICE)
        (key,) = keys((k,))
        maps = maps_of(key, key, TILE)(k.data_ptr(), k.data_ptr())
        given = Given(maps.k_boxes, maps.k_tokens, out.data_ptr(), tiles, begin, length)
        Launch(kernel, (1, 1), k.get_device(), given).run()
        came = out.cpu()[..., swizzled(np.arange(NBYTES))].view(torch.bfloat16).view(USERS, tiles * TILE, 64)
        live = torch.arange(tiles * TILE).clamp(begin, length - 1)
        assert all(torch.equal(tokens, k[1, live, 0].cpu()) for tokens in came)
