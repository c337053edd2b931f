"""Frame pools under caches for transformers: what layer groups, copies and models share, and when it runs out."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from conftest import PATIENCE
from generation import LENGTHS, PAGE_SIZE, random_tokens, vmm_cache
from tiny_models import DECODER, tiny_model
from transformers import LlamaConfig

import vmmkv
from vmmkv.integrations.transformers import VmmCache

MIXED = ["gemma3", "gpt-oss"]


def make_pool(device: str, pages: int = 512) -> vmmkv.FramePool:
    return vmmkv.FramePool(pages * PAGE_SIZE[device], device=device, page_size=PAGE_SIZE[device])


def forward(cache: VmmCache, rows: int, tokens: int, device: str) -> None:
    """What a forward pass does to a cache: 8 tokens of a layer, of a row, fill a page on the host."""
    for layer in range(len(cache)):
        cache.update(*torch.randn(2, rows, 2, tokens, PAGE_SIZE[device] // 128, device=device), layer)


def full_layers(pool: vmmkv.FramePool) -> VmmCache:
    config = LlamaConfig(**{**DECODER, "num_hidden_layers": 1})
    return VmmCache(config, 400, max_batch_size=8, pool=pool)


def used(cache: VmmCache) -> list[int]:
    return [kv_cache.stats().pages["used"] for kv_cache in cache.kv_caches]


@pytest.mark.parametrize("name", MIXED)
def test_windows_and_full_attention_share_a_pool(name: str, device: str) -> None:
    """As many pages as all groups take at their peak are enough: they need not be there for each of them."""
    model = tiny_model(name, "eager", device)
    tokens = random_tokens(model, 3, 40)
    roomy = vmm_cache(model.config, device, lookahead=0)
    expected = model.generate(tokens, past_key_values=roomy, do_sample=False, **LENGTHS)
    (pool,) = roomy.pools
    assert len(roomy.kv_caches) == 2
    assert pool.stats().holders == 2
    taken = pool.stats().physical_bytes // PAGE_SIZE[device]
    tight = vmm_cache(model.config, device, max_bytes=taken * PAGE_SIZE[device])
    assert torch.equal(model.generate(tokens, past_key_values=tight, do_sample=False, **LENGTHS), expected)
    assert tight.pools[0].stats().physical_bytes <= taken * PAGE_SIZE[device]
    for kv_cache in tight.kv_caches:
        kv_cache.check()


def test_two_models_run_out_only_together(device: str) -> None:
    pool = make_pool(device, 16)
    one, other = full_layers(pool), full_layers(pool)
    forward(one, 1, 8 * 4, device)
    forward(other, 1, 8 * 10, device)  # more than a half
    assert (used(one), used(other)) == ([4], [10])
    forward(one, 1, 8 * 2, device)
    for cache in (one, other):
        with pytest.raises(vmmkv.OutOfPagesError):
            forward(cache, 1, 8, device)
    other.reset()
    forward(one, 1, 8 * 10, device)  # pages that are still mapped in the other one
    assert used(one) == [16]
    with pytest.raises(vmmkv.OutOfPagesError):
        forward(other, 1, 1, device)
    del one
    gc.collect()
    forward(other, 1, 8 * 16, device)
    assert used(other) == [16]
    assert pool.stats().holders == 1
    assert pool.stats().physical_bytes == 16 * PAGE_SIZE[device]


def test_copies_lie_on_the_same_pool_and_what_was_saved_on_its_own(device: str) -> None:
    own = VmmCache(LlamaConfig(**DECODER), 400, max_bytes=32 * PAGE_SIZE[device], page_size=PAGE_SIZE[device])
    pool = make_pool(device)
    given = full_layers(pool)
    for cache in (own, given):
        forward(cache, 2, 5, device)
    twin, shared = copy.deepcopy(own), copy.deepcopy(given)
    assert twin.pools == own.pools
    assert own.pools[0].limit_pages == 32
    assert shared.pools == given.pools == [pool]
    assert own.pools[0].stats().holders == pool.stats().holders == 1, "rows of the same KVCache"
    loaded = pickle.loads(pickle.dumps([own, given]))
    assert loaded[0].pools[0].limit_pages == 32
    assert loaded[1].pools not in ([], [pool])
    for cache, reference in ((twin, own), (shared, given), (loaded[0], own), (loaded[1], given)):
        for states, expected in zip(cache, reference, strict=True):
            assert all(map(torch.equal, states[:2], expected[:2]))


def test_a_pool_ends_with_what_lies_on_it(device: str) -> None:
    cache = vmm_cache(tiny_model("gemma3", "sdpa", device).config, device)
    forward(cache, 1, 9, device)
    ended = threading.Event()
    (pool,) = map(weakref.ref, cache.pools)
    weakref.finalize(pool(), ended.set)
    gc.collect()
    assert pool() is not None
    del cache
    gc.collect()
    assert ended.wait(PATIENCE)  # the mapper may be at work for it


def test_layers_that_look_different_leave_no_memory_behind(device: str) -> None:
    """Tokens move to rows of another layout: both are on the pool meanwhile, and one is afterwards."""
    pool = make_pool(device)
    cache = VmmCache(LlamaConfig(**{**DECODER, "num_hidden_layers": 2}), 400, pool=pool, lookahead=0)
    gc.disable()  # nothing waits for it
    try:
        cache.update(*torch.randn(2, 1, 2, 40, 64, device=device), 0)
        cache.update(*torch.randn(2, 1, 2, 40, 128, device=device), 1)
    finally:
        gc.enable()
    if device == "cuda":
        torch.cuda.synchronize()
    assert pool.stats().holders == 1
    assert pool.trim() > 0
    assert pool.stats().physical_bytes == sum(used(cache)) * PAGE_SIZE[device]


def test_what_a_pool_does_not_go_with_is_refused() -> None:
    for arguments, message in (
        ({"max_bytes": "1GiB"}, "beside a pool"),
        ({"page_size": 4096}, "beside a pool"),
        ({"pool": "60GiB"}, "FramePool"),
    ):
        with pytest.raises(vmmkv.ArgumentError, match=message):
            VmmCache(LlamaConfig(**DECODER), 100, **({"pool": make_pool("cpu")} | arguments))


def test_a_pool_of_another_device_is_refused_before_anything_is_written() -> None:
    cache = full_layers(make_pool("cpu"))
    with pytest.raises(vmmkv.DeviceError, match="pool of this cache is on cpu"):
        cache.update(*torch.randn(2, 1, 2, 4, 16, device="meta"), 0)
    assert cache.kv_caches == []
    forward(cache, 1, 4, "cpu")
