"""Tenants: what one wrote is nowhere to be read from another's rows."""

from __future__ import annotations

import pytest
import torch

import vmmkv
from vmmkv.torch import GrowableTensor

LAYOUT = vmmkv.KVLayout(2, 2, 16, torch.float32)


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
