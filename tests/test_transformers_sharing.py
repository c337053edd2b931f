"""What copies of a `VmmCache`, and its own sequences, share: in memory once, and never written, against `DynamicCache`.

Pages on the CPU are 4 KiB and hold a few tokens. Who wrote to one that is shared would end the process, or show in
what others read.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from conftest import on_driver, seed_alone
from faulty import FaultyDriver
from generation import (
    LENGTHS,
    PAGE_SIZE,
    _kernels_for_all,  # noqa: F401  # a fixture
    _reference_kernels,  # noqa: F401  # a fixture
    caches,
    inside_a_graph,
    left_padding,
    random_tokens,
)
from tiny_models import DECODER, tiny_model
from transformers import Cache, DynamicCache, LlamaConfig, MistralConfig, MistralForCausalLM, PreTrainedConfig

import vmmkv
from vmmkv.core.pool import LARGE
from vmmkv.driver.driver import open_driver
from vmmkv.integrations import batch
from vmmkv.integrations.batch import MAX_BATCHES
from vmmkv.integrations.transformers import VmmCache

MODELS = ["llama-gqa", "mistral", "gemma3", "gemma4", "deepseek-v3", "qwen3-next"]
COMPILED = ["llama-gqa-wide", "mistral-wide", "gemma3-wide", "gemma4"]
"""For the last there are no kernels."""


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


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
    return sum(kv_cache.stats().pages["used"] for kv_cache in cache.kv_caches)


def full_pages(cache: VmmCache, tokens: int) -> int:
    """Pages that a sequence fills, without those of a large frame that it does not: such a frame is copied."""
    (kv_cache,) = cache.kv_caches
    full, rest = divmod(tokens * kv_cache.layout.token_bytes, kv_cache.page_size)
    return full if not rest or (full + 1) % LARGE else full + 1 - LARGE


# ---------------------------------------------------------------------- copies


@pytest.mark.few(8)
@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"do_sample": True}], ids=str)
@pytest.mark.usefixtures("reference_kernels")
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


@pytest.mark.few(3)
@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "gemma3", *COMPILED])
def test_copies_drop_what_was_proposed_and_refused(name: str) -> None:
    """With each crop the next tokens come to lie further in front, down to where the prompt ends."""
    model, compile = tiny_model(name, "vmmkv", "cpu"), name in COMPILED
    prompt = random_tokens(model, 1, 9).repeat(1, 5)
    outputs = []
    for cache in caches(model, compile=compile):
        with torch.no_grad():
            model(prompt[:, :-1], past_key_values=cache)
        for each in (copy.deepcopy(cache), copy.deepcopy(cache), cache):
            arguments = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "prompt_lookup_num_tokens": 6}
            outputs.append(model.generate(prompt, past_key_values=each, **arguments, **LENGTHS))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


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


def test_there_are_rows_again_where_a_copy_has_ended() -> None:
    cache, reference = pair(2, 50)
    others = [copy.deepcopy(cache) for _ in range(MAX_BATCHES - 1)]
    apart = copy.deepcopy(cache)
    assert apart.kv_caches != cache.kv_caches, "there are no rows left: it was copied"
    assert apart.pools == cache.pools
    forward(2, 9, cache, reference, apart)
    for _ in range(5):
        del others[Random().randrange(len(others))]
        gc.collect()
        others.append(copy.deepcopy(cache))
        assert others[-1].kv_caches == cache.kv_caches
    forward(2, 9, cache, reference, apart, *others[-1:])
    check(apart, reference)
    check(others[-1], reference)
    check(cache, reference)


@pytest.mark.parametrize("fitting", [0, 1, 3])
def test_long_rows_leave_room_for_fewer_copies(fitting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = 400 * vmmkv.KVLayout(4, 2, 16, torch.float32).token_bytes
    monkeypatch.setattr(batch, "MAX_ADDRESSES", 64 * row_bytes * fitting + 1)
    cache, reference = pair(1, 30)
    family = [cache, *(copy.deepcopy(cache) for _ in range(4))]
    assert sum(each.kv_caches == cache.kv_caches for each in family) == max(fitting, 1)
    forward(1, 9, reference, *family)
    for each in family:
        check(each, reference)


def test_who_looks_at_keys_may_write_to_them() -> None:
    """Before or after a copy was made, in the copy or in what it was made of."""
    cache, reference = pair(2, 50)
    twin, expected = copy.deepcopy(cache), copy.deepcopy(reference)
    for each in (twin, expected):
        each.layers[1].keys.zero_()
        each.layers[2].values[:, :, 3] = 7
    check(cache, reference)
    check(twin, expected)
    again, expected_again = copy.deepcopy(twin), copy.deepcopy(expected)
    for each in (twin, expected):
        each.layers[0].keys.fill_(3)
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


@pytest.mark.usefixtures("kernels_for_all")
def test_compiled_passes_write_behind_what_is_shared() -> None:
    cache, reference = pair(2, 50, compile=True)
    for tokens in (1, 1, 7):
        for _ in range(2):
            twin, expected = copy.deepcopy(cache), copy.deepcopy(reference)
            assert twin.kv_caches == cache.kv_caches
            for each, other in ((cache, reference), (twin, expected)):
                each.get_mask_sizes(tokens, 0)
                compiled(each, other, tokens)
                each.crop(-1)
                other.crop(-1)
    check(cache, reference)
    check(twin, expected)


def compiled(cache: VmmCache, reference: DynamicCache, tokens: int) -> None:
    """A pass inside of a graph."""
    for index, layer in enumerate(reference.layers):
        k, v = torch.randn(2, 2, 2, tokens, 16)
        layer.update(k, v)
        with inside_a_graph():
            got = cache.update(k, v, index)
        length = layer.get_seq_length()
        for states, wanted in zip(got, (layer.keys, layer.values)):
            assert torch.equal(states.states[:, :, :length], wanted)


@pytest.mark.parametrize("call", ["copy", "map", "set_access", "create"])
def test_a_copy_that_fails_leaves_what_was(call: str) -> None:
    for skip in range(6):
        driver = FaultyDriver(open_driver("cpu", 4096))
        pool = on_driver(driver, vmmkv.FramePool, "16MiB")
        cache, reference = VmmCache(LlamaConfig(**DECODER), 400, pool=pool), DynamicCache(config=LlamaConfig(**DECODER))
        forward(2, 50, cache, reference)
        copies = [copy.deepcopy(cache)]
        fault = driver.fail(call, skip)
        try:
            copies.append(copy.deepcopy(cache))
        except vmmkv.DriverError:
            driver.heal()
            copies.append(copy.deepcopy(cache))
        driver.heal()
        assert fault.was_met or skip
        for each in copies:
            forward(2, 3, each, copy.deepcopy(reference))
        check(cache, reference)
        for kv_cache in cache.kv_caches:
            kv_cache.check()


# ---------------------------------------------------------------------- sequences of one cache


@pytest.mark.few(8)
@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "gemma3", *COMPILED])
@pytest.mark.parametrize("mode", [{"do_sample": True, "num_return_sequences": 6}, {"num_beams": 6}], ids=str)
def test_answers_to_one_prompt(name: str, mode: dict) -> None:
    """The model reads it once; `generate` finds it there for each beam, and each sequence that it is to return."""
    model, compile = tiny_model(name, "vmmkv", "cpu"), name in COMPILED
    prompt = random_tokens(model, 1, 60)
    outputs, took = [], []
    for cache in caches(model, compile=compile):
        with torch.no_grad():
            model(prompt[:, :-1], past_key_values=cache)
        if isinstance(cache, VmmCache):
            before = used(cache)
        cache.batch_repeat_interleave(6)
        if isinstance(cache, VmmCache):
            took.append((before, used(cache)))
        seed_alone(3)
        arguments = {"do_sample": False, **LENGTHS, **mode, "attention_mask": torch.ones_like(prompt)}
        outputs.append(model.generate(prompt, past_key_values=cache, **arguments))
    assert torch.equal(*outputs)
    ((before, after),) = took
    groups = len(cache.kv_caches)
    assert after <= before + 5 * groups, "in each range a page that is not full"


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
    config = MistralConfig(**DECODER, sliding_window=1)
    model = MistralForCausalLM(config).eval()
    prompts = random_tokens(model, 1, 40).repeat(3, 1)
    expected = model.generate(prompts, use_cache=False, do_sample=False, **LENGTHS)
    cache = VmmCache(config, 200, page_size=PAGE_SIZE["cpu"])
    assert torch.equal(model.generate(prompts, past_key_values=cache, do_sample=False, **LENGTHS), expected)


def test_a_batch_without_room_for_more_is_as_before() -> None:
    cache, reference = pair(2, 130, max_bytes=90 * PAGE_SIZE["cpu"], max_batch_size=32)
    with pytest.raises(vmmkv.OutOfPagesError):
        cache.batch_repeat_interleave(15)
    with pytest.raises(vmmkv.OutOfRowsError):
        cache.batch_repeat_interleave(17)
    forward(2, 1, cache, reference)
    for each in (cache, reference):
        each.batch_repeat_interleave(2)
    forward(4, 1, cache, reference)
    with pytest.raises(vmmkv.OutOfPagesError):
        check(cache, reference)  # who may write to what is shared needs copies
    forward(4, 1, cache, reference)
