"""Tenants: what one wrote is nowhere to be read from another's rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from faulty import FaultyDriver

import vmmkv
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)
TENANTS = ["alice", "bob", None]


def readable(cache: vmmkv.KVCache, driver: FaultyDriver, row: int) -> bytes:
    """All that is mapped in a row."""
    pages = b""
    for arena, _ in cache._rows.ranges:
        start = arena.table.address_of(row, 0)
        inside = [page for page in sorted(driver.accessible) if start <= page < start + arena.row_bytes]
        pages += b"".join(ctypes.string_at(page, cache.page_size) for page in inside)
    return pages


def is_secret(cache: vmmkv.KVCache, driver: FaultyDriver, sequence: vmmkv.Sequence) -> bool:
    """Whether the secret can be read anywhere in a sequence's row."""
    held = torch.frombuffer(bytearray(readable(cache, driver, sequence.row)), dtype=torch.float32)
    return bool((held == 7).any())


def test_a_growable_tensor_reads_no_tenants_bytes() -> None:
    pool = vmmkv.FramePool("1MiB", device="cpu", page_size=4096)
    cache = vmmkv.KVCache(LAYOUT, 3, 60, pool=pool)
    sequence = cache.sequence(60, tenant="alice")
    sequence.k(0).fill_(7.0)
    sequence.free()
    cache.close()
    grown = GrowableTensor((4000,), torch.float32, pool=pool)
    grown.resize(4000)
    assert not (grown.tensor == 7).any()


def test_a_tenant_adopts_its_own_rows() -> None:
    cache = vmmkv.KVCache(LAYOUT, 3, 60, max_bytes="1MiB", device="cpu", page_size=4096)
    for tenant in ("alice", "bob"):
        cache.sequence(40, tenant=tenant).free()
    before = cache.stats().driver_calls["map"].count
    for tenant in ("bob", "alice"):
        assert cache.sequence(40, tenant=tenant).length == 40
    assert cache.stats().driver_calls["map"].count == before


@pytest.mark.usefixtures("undebugged")
def test_what_is_cleaned_is_zero() -> None:
    cache = vmmkv.KVCache(LAYOUT, 2, 60, max_bytes="40KiB", device="cpu", page_size=4096)
    first = cache.sequence(60, tenant="alice")
    first.k(0).fill_(7.0)
    first.v(1).fill_(7.0)
    first.free()
    second = cache.sequence(60, tenant="bob")
    for layer in range(2):
        assert not second.k(layer).any()
        assert not second.v(layer).any()


def lie_on_pieces(cache: vmmkv.KVCache) -> tuple[vmmkv.Sequence, ...]:
    """Tokens of bob's that whoever begins with them has to copy, in front of what is shared and behind it."""
    ids = np.arange(200)
    first = bobs(cache, ids)  # on a large frame
    ids = np.append(ids[:80], range(300, 328))
    return first, bobs(cache, ids), bobs(cache, ids)


def have_it_alone(cache: vmmkv.KVCache) -> tuple[vmmkv.Sequence, ...]:
    """A fork of bob's has for its own what it was truncated into."""
    first = bobs(cache, np.arange(40))
    fork = first.fork()
    fork.truncate(20)
    fork.extend(1)
    return first, fork


def grown(cache: vmmkv.KVCache, tenant: str) -> vmmkv.Sequence:
    """A sequence on 40 frames of one page."""
    sequence = cache.sequence(8, tenant=tenant)
    for _ in range(39):
        sequence.extend(8)
    return sequence


def bobs(cache: vmmkv.KVCache, ids: np.ndarray) -> vmmkv.Sequence:
    """Of which all that was not there is the secret."""
    sequence = cache.sequence(token_ids=ids, tenant="bob")
    cache.pool.driver.synchronize()
    for layer in range(2):
        sequence.k(layer)[sequence.cached_tokens :] = 7.0
        sequence.v(layer)[sequence.cached_tokens :] = 7.0
    sequence.commit(ids)
    return sequence
