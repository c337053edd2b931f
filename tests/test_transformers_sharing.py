"""What copies of a `VmmCache`, and its own sequences, share: in memory once, and never written, against `DynamicCache`.

Pages on the CPU are 4 KiB and hold a few tokens. Who wrote to one that is shared would end the process, or show in
what others read.
"""

from __future__ import annotations

import copy
import gc
from random import Random
from typing import Any

import pytest
import torch
from conftest import seed_alone
from generation import LENGTHS, PAGE_SIZE, caches, generate, left_padding, pages, random_tokens, vmm_cache
from generation import kernels_for_all as kernels_for_all
from generation import reference_kernels as reference_kernels
from generation import uncompiled as uncompiled
from tiny_models import DECODER, tiny_model
from transformers import Cache, DynamicCache, LlamaConfig, MistralConfig, MistralForCausalLM, PreTrainedConfig

import vmmkv
from vmmkv.core.pool import LARGE
from vmmkv.integrations.batch import MAX_BATCHES
from vmmkv.integrations.transformers import VmmCache

MODELS = ["llama-gqa", "mistral", "gemma3", "gemma4", "deepseek-v3", "qwen3-next"]
COMPILED = ["llama-gqa-wide", "mistral-wide", "gemma3-wide", "gemma4"]
"""For the last there are no kernels."""
pytestmark = pytest.mark.usefixtures("uncompiled", "reference_kernels")


def forward(rows: int, tokens: int, *caches: Cache) -> None:
    """What a forward pass does to caches; all must give attention the same."""
    for index in range(len(caches[0].layers)):
        k, v = torch.randn(2, rows, 2, tokens, 16)
        first, *others = [cache.update(k, v, index) for cache in caches]
        for other in others:
            assert all(map(torch.equal, other, first))


def pair(
    rows: int = 0, tokens: int = 0, config: PreTrainedConfig | None = None, **options: Any
) -> tuple[VmmCache, DynamicCache]:
    """A cache, and what it is compared with; four layers, four tokens of which fill a page."""
    config = config or LlamaConfig(**DECODER, attn_implementation="vmmkv")
    cache, reference = VmmCache(config, 400, page_size=4096, **options), DynamicCache(config=config)
    if rows:
        forward(rows, tokens, cache, reference)
    return cache, reference


def check(cache: VmmCache, reference: DynamicCache) -> None:
    """Compares all that both hold; what a cache shares is copied then."""
    for layer, expected in zip(cache.layers, reference.layers):
        assert torch.equal(layer.keys, expected.keys)
        assert torch.equal(layer.values, expected.values)


def used(cache: VmmCache) -> int:
    return sum(pages(cache))


def full_pages(cache: VmmCache, tokens: int) -> int:
    """Pages that a sequence fills, without those of a large frame that it does not: such a frame is copied."""
    (kv_cache,) = cache.kv_caches
    full, rest = divmod(tokens * kv_cache.layout.token_bytes, kv_cache.page_size)
    return full if not rest or (full + 1) % LARGE else full + 1 - LARGE


# ---------------------------------------------------------------------- copies


@pytest.mark.few(8)
@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("name", [*MODELS, *COMPILED])
def test_a_prompt_goes_on_in_copies(name: str, mode: dict) -> None:
    """The cache that was copied goes on as well; copies are copied, and end in any order."""
    model, compile = tiny_model(name, "vmmkv", "cpu"), name in COMPILED
    rows = 2 * mode.get("num_beams", 1)
    prompt = random_tokens(model, rows, 45)
    mask = left_padding(prompt)
    results = []
    for cache in caches(model, compile=compile):
        with torch.no_grad():
            model(prompt, attention_mask=mask, past_key_values=cache)
        family = [cache, copy.deepcopy(cache)]
        family.append(copy.deepcopy(family[1]))
        for seed, each in enumerate(family):
            tokens = torch.cat([prompt, random_tokens(model, rows, 3, seed=seed)], dim=1)[:: mode.get("num_beams", 1)]
            seed_alone(seed)
            arguments = {"do_sample": False, **mode, "attention_mask": extended(mask, tokens, rows)}
            arguments |= {"max_new_tokens": 12, "min_new_tokens": 12}
            results.append(model.generate(tokens, past_key_values=each, **arguments))
            if seed == 1:
                family[0] = None
    half = len(results) // 2
    for output, expected in zip(results[half:], results[:half]):
        assert torch.equal(output, expected)


def extended(mask: torch.Tensor, tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """A mask with as many tokens more."""
    mask = mask[:: rows // len(tokens)]
    return torch.cat([mask, torch.ones_like(tokens[:, mask.shape[1] :])], dim=1)


def test_what_is_full_lies_in_memory_once() -> None:
    tokens = Random().randint(20, 100)
    cache, reference = pair(3, tokens)
    alone = used(cache)
    family, pages = [(cache, reference)], alone
    (kv_cache,) = cache.kv_caches
    begun = bool(tokens * kv_cache.layout.token_bytes % kv_cache.page_size)
    for _ in range(MAX_BATCHES - 1):
        source, expected = Random().choice(family)
        # A copy lies on single pages where a large frame was not full, and shares these with its own copies.
        pages += alone - 3 * full_pages(cache, tokens) if source is cache else 3 * begun
        family.append((copy.deepcopy(source), copy.deepcopy(expected)))
    assert all(each.kv_caches == cache.kv_caches for each, _ in family)
    assert used(cache) == pages
    assert copy.deepcopy(cache).kv_caches != cache.kv_caches, "there are no rows left: it was copied"
    for each, expected in family:
        forward(3, Random().randint(1, 20), each, expected)
    for kv_cache in cache.kv_caches:
        kv_cache.check()
    del each, expected, source, cache, reference, kv_cache
    Random().shuffle(family)
    while family:
        each, expected = family.pop()
        forward(3, 1, each, expected)
        check(each, expected)
        for kv_cache in each.kv_caches:
            kv_cache.check()


def test_who_looks_at_keys_may_write_to_them() -> None:
    """Before or after a copy was made, in the copy or in what it was made of."""
    cache, reference = pair(2, 50)
    twin, expected = copy.deepcopy(cache), copy.deepcopy(reference)
    for each in (twin, expected):
        each.layers[1].keys.zero_()
        each.layers[2].values[:, :, 3] = 7
    check(cache, reference)
    check(twin, expected)
    views = [each.layers[0].keys for each in (twin, expected)]
    again, expected_again = copy.deepcopy(twin), copy.deepcopy(expected)
    for keys in views:
        keys.fill_(3)
    check(again, expected_again)
    check(twin, expected)
    twin.reset()
    forward(2, 50, twin)
    assert copy.deepcopy(twin).kv_caches == twin.kv_caches, "nobody looks at what is there now"


@pytest.mark.usefixtures("kernels_for_all")
@pytest.mark.parametrize("compile", [False, True])
def test_layers_that_are_cropped_one_by_one(compile: bool) -> None:
    """Nothing but the next write says so, and it comes to tokens that were full pages."""
    cache, reference = pair(2, 50, compile=compile)
    twin, expected = copy.deepcopy(cache), copy.deepcopy(reference)
    dropped = Random().randint(1, 49)
    for each in (twin, expected):
        for layer in each.layers:
            layer.crop(-dropped)
    forward(2, 3, twin, expected)
    forward(2, 3, cache, reference)
    check(cache, reference)
    check(twin, expected)


# ---------------------------------------------------------------------- sequences of one cache


def test_beams_share_a_prompt_once_they_have_been_put_into_order() -> None:
    """Their rows of it differ, in last bits, say; but all continue the first one."""
    cache, reference = pair(4, 200)
    apart, random = used(cache), Random()
    for _ in range(30):
        for beams in ([0, 0, 0, 0], random.choices(range(4), k=4)):
            for each in (cache, reference):
                each.reorder_cache(torch.tensor(beams))
            forward(4, 1, cache, reference)
            assert used(cache) <= apart // 4 + 4 * full_pages(cache, 80), "the prompt once"
    check(cache, reference)


def test_a_window_of_one_token_keeps_none_to_share() -> None:
    """Without a cache: `DynamicCache` keeps all tokens behind a window of one."""
    model = MistralForCausalLM(MistralConfig(**DECODER, sliding_window=1)).eval()
    prompts = random_tokens(model, 1, 40).repeat(3, 1)
    cache = VmmCache(model.config, 200, page_size=PAGE_SIZE["cpu"])
    assert torch.equal(generate(model, prompts, past_key_values=cache), generate(model, prompts, use_cache=False))


# ---------------------------------------------------------------------- frame pools


def make_pool(device: str, pages: int = 512) -> vmmkv.FramePool:
    return vmmkv.FramePool(pages * PAGE_SIZE[device], device=device, page_size=PAGE_SIZE[device])


def fill(cache: VmmCache, rows: int, tokens: int, device: str) -> None:
    """What a forward pass does to a cache: 8 tokens of a layer, of a row, fill a page on the host."""
    for layer in range(len(cache)):
        cache.update(*torch.randn(2, rows, 2, tokens, PAGE_SIZE[device] // 128, device=device), layer)


def full_layers(pool: vmmkv.FramePool) -> VmmCache:
    config = LlamaConfig(**{**DECODER, "num_hidden_layers": 1})
    return VmmCache(config, 400, max_batch_size=8, pool=pool)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
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
    assert pool.stats().physical_bytes == sum(pages(cache)) * PAGE_SIZE[device]


def test_what_a_pool_does_not_go_with_is_refused() -> None:
    for arguments, error, message in (
        ({"max_bytes": "1GiB"}, ValueError, "a pool has its own"),
        ({"page_size": 4096}, ValueError, "a pool has its own"),
        ({"pool": "60GiB"}, vmmkv.ArgumentError, "FramePool"),
    ):
        with pytest.raises(error, match=message):
            VmmCache(LlamaConfig(**DECODER), 100, **({"pool": make_pool("cpu")} | arguments))


def test_a_pool_of_another_device_is_refused_before_anything_is_written() -> None:
    cache = full_layers(make_pool("cpu"))
    with pytest.raises(vmmkv.DeviceError, match="pool of this cache is on cpu"):
        cache.update(*torch.randn(2, 1, 2, 4, 16, device="meta"), 0)
    assert cache.kv_caches == []
    fill(cache, 1, 4, "cpu")
