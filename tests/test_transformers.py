"""`VmmCache` against `DynamicCache`: the same tokens and logits, and memory only where tokens are.

Pages on the CPU are 4 KiB and hold a few tokens; an access outside of them kills the process, which is the point.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PATIENCE, ROUNDS, each_with_few, on_driver, open_drivers_with
from faulty import FaultyDriver
from generation import (
    LENGTHS,
    PAGE_SIZE,
    _kernels_for_all,  # noqa: F401  # a fixture
    _reference_kernels,  # noqa: F401  # a fixture
    caches,
    check_same_generation,
    driver_calls,
    inside_a_graph,
    left_padding,
    random_tokens,
    vmm_cache,
)
from tiny_models import DECODER, MODELS, WINDOW, skip_unsupported, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    masking_utils,
)

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations.transformers import VmmCache

pytestmark = [  # what transformers itself calls
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

SEQ2SEQ = ["bart", "t5"]
INTEGRATIONS = str(Path(vmmkv.integrations.__file__).parent)
INTERRUPTS = 6 * ROUNDS
"""How often an operation is interrupted, each time somewhere else."""


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """FlexAttention compiles a kernel per stride; the same arithmetic runs uncompiled in a tenth of a second."""
    with torch.compiler.set_stance("force_eager"):
        yield


# ---------------------------------------------------------------------- parity of generate()


def with_attentions(names: Iterable[str]) -> list[Any]:
    """Each model with some of the ways to attend; FlexAttention, whose masks take most of the time, with one."""
    flex = [pytest.param(name, "flex_attention", marks=pytest.mark.few(1, "flex")) for name in names]
    return each_with_few(2, names, ["eager", "sdpa", "vmmkv"]) + flex


@pytest.mark.parametrize(("name", "attention"), with_attentions(MODELS))
def test_greedy(name: str, attention: str, device: str) -> None:
    skip_unsupported(name, attention, device)
    model = tiny_model(name, attention, device)
    check_same_generation(model, random_tokens(model, 3, 12))


@pytest.mark.parametrize(("name", "attention"), with_attentions([name for name in MODELS if name not in SEQ2SEQ]))
def test_left_padding(name: str, attention: str, device: str) -> None:
    skip_unsupported(name, attention, device)
    model = tiny_model(name, attention, device)
    tokens = random_tokens(model, 3, 12)
    check_same_generation(model, tokens, attention_mask=left_padding(tokens))


MODES = {
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.9},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 4},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 4, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 5},
}


@pytest.mark.few(12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "gemma3", "gemma4", "deepseek-v3", "qwen3-next", *SEQ2SEQ])
def test_modes(name: str, mode: str, device: str) -> None:
    if mode == "chunked prefill" and name in SEQ2SEQ:
        pytest.skip("generate() chunks the prompts of decoders only")
    model = tiny_model(name, "sdpa", device)
    check_same_generation(model, random_tokens(model, 2, 12), **MODES[mode])


@pytest.mark.parametrize("name", ["llama-mha", "gemma3"])
def test_left_padded_beams(name: str, device: str) -> None:
    model = tiny_model(name, "sdpa", device)
    tokens = random_tokens(model, 2, 12)
    check_same_generation(model, tokens, attention_mask=left_padding(tokens), num_beams=4)


SPECULATIVE = [
    "llama-gqa",
    "mistral",
    "gemma3",
    "gemma4",
    "deepseek-v3",
    *SEQ2SEQ,
]  # generate() refuses linear attention


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SPECULATIVE)
def test_prompt_lookup(name: str, device: str) -> None:
    """Tokens are proposed from the prompt, and those that the model refuses are cropped."""
    model = tiny_model(name, "sdpa", device)
    prompt = random_tokens(model, 1, 5).repeat(1, 3)
    check_same_generation(model, prompt, prompt_lookup_num_tokens=4)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SPECULATIVE)
def test_assistant_model(name: str, device: str) -> None:
    model, assistant = (tiny_model(name, "sdpa", device, seed) for seed in (0, 1))
    assistant.generation_config.num_assistant_tokens = 4
    check_same_generation(model, random_tokens(model, 1, 12), assistant_model=assistant)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "gemma3", "deepseek-v3", "qwen3-next"])
def test_turns_of_a_conversation(name: str, device: str) -> None:
    model = tiny_model(name, "sdpa", device)
    conversations = []
    for cache in caches(model):
        tokens = random_tokens(model, 2, 6)
        for turn in range(3):
            mask = torch.ones_like(tokens)
            tokens = model.generate(tokens, attention_mask=mask, past_key_values=cache, do_sample=False, **LENGTHS)
            tokens = torch.cat([tokens, random_tokens(model, 2, 9, seed=turn)], dim=1)
        conversations.append(tokens)
    assert torch.equal(*conversations)


def test_compiled_flex_attention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is made for the strides that it sees. Masks know nothing of them, and take as long to compile; so does
    a kernel for the prompt."""
    if device == "cuda":
        pytest.skip("torch compiles FlexAttention for heads of 16 and more on a GPU; those of the tiny models have 8")
    model = tiny_model("llama-gqa", "flex_attention", device)
    tokens = random_tokens(model, 2, 12)
    cache, reference = vmm_cache(model.config, device), DynamicCache(config=model.config)
    make_mask = torch.compiler.set_stance("force_eager")(masking_utils.create_block_mask)
    monkeypatch.setattr(masking_utils, "create_block_mask", make_mask)
    with torch.no_grad():
        for each in (cache, reference):
            model(tokens[:, :-1], past_key_values=each)
        expected = model(tokens[:, -1:], past_key_values=reference).logits
        with torch.compiler.set_stance("default"):
            logits = model(tokens[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_compiled_model(device: str) -> None:
    """Pages are mapped between the graphs: a graph that was captured once must not skip that."""
    sizes = {**DECODER, "num_hidden_layers": 1, "num_key_value_heads": 4}  # 16 tokens in a page
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device).eval()
    compiled = torch.compile(model, backend="eager")
    cache, reference = vmm_cache(model.config, device), DynamicCache(config=model.config)
    for seed, tokens in enumerate((12, *[1] * 6)):
        step = random_tokens(model, 2, tokens, seed=seed)
        with torch.no_grad(), torch.compiler.set_stance("default"):
            logits = compiled(step, past_key_values=cache).logits
        with torch.no_grad():
            torch.testing.assert_close(logits, model(step, past_key_values=reference).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama-mha", "mistral", "gemma2", "gemma4", "deepseek-v3", "gpt-oss"])
def test_logits_of_uneven_chunks(name: str, padded: bool, device: str) -> None:
    """Chunks shorter and longer than the window, after a prompt that is longer, too."""
    model = tiny_model(name, "eager", device)
    tokens = random_tokens(model, 3, 40)
    mask = left_padding(tokens) if padded else torch.ones_like(tokens)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = []
    for cache in caches(model):
        chunks, start = [], 0
        for length in (11, 5, 9, 1, 1, 3, 10):
            chunk = slice(start, start + length)
            with torch.no_grad():
                output = model(
                    tokens[:, chunk],
                    attention_mask=mask[:, : chunk.stop],
                    position_ids=positions[:, chunk],
                    past_key_values=cache,
                )
            chunks.append(output.logits)
            start = chunk.stop
        logits.append(torch.cat(chunks, dim=1)[mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- parity of the cache's own operations


@pytest.fixture
def mixed_config() -> PreTrainedConfig:
    """Windows and full attention in turn, two layers of each."""
    return tiny_model("gemma3", "vmmkv", "cpu").config


def random_kv(device: str, rows: int, tokens: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as attention modules make them, V as a transposed view; two layers of them take 1/8 of a page."""
    head_dim = PAGE_SIZE[device] // 256
    k = torch.randn(rows, heads, tokens, head_dim, device=device)
    v = torch.randn(rows, tokens, heads, head_dim, device=device).transpose(1, 2)
    return k, v


def forward(device: str, rows: int, tokens: int, *caches: Cache) -> None:
    """What a forward pass does to caches; all of them must give attention the same, as long as their masks."""
    for index in range(len(caches[0].layers)):
        kv = random_kv(device, rows, tokens)
        kv_length, _ = caches[0].get_mask_sizes(tokens, index)
        first, *others = [cache.update(*kv, index) for cache in caches]
        assert all(states.shape[-2] == kv_length for states in first)
        for other in others:
            for states, expected in zip(first, other):
                assert torch.equal(states, expected[:, :, -kv_length:])  # 5.17 gives more while it records


def check_same_state(cache: VmmCache, reference: DynamicCache) -> None:
    assert cache.get_seq_length() == reference.get_seq_length()
    for index, (layer, expected) in enumerate(zip(cache.layers, reference.layers)):
        assert cache.get_mask_sizes(3, index) == reference.get_mask_sizes(3, index)
        if cache.get_seq_length():
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)
        else:
            assert layer.keys is None
            assert layer.values is None


def test_tokens_from_anywhere(device: str, mixed_config: PreTrainedConfig) -> None:
    """Whether they lie as the last ones did, apart, or where no kernel can read whole vectors."""
    cache, reference = vmm_cache(mixed_config, device), DynamicCache(config=mixed_config)
    forward(device, 2, 5, cache, reference)
    head_dim = PAGE_SIZE[device] // 256
    for offset, step in ((0, 1), (0, 1), (1, 1), (8, 1), (0, 2), (1, 2), (0, 1), (3, 1)):
        for layer in range(mixed_config.num_hidden_layers):
            memory = torch.randn(2, 2, 1, 2, 2 * head_dim + 8, device=device)[
                ..., offset : offset + step * head_dim : step
            ]
            k, v = memory.transpose(2, 3)
            kept, expected = cache.update(k, v, layer), reference.update(k, v, layer)
            assert all(map(torch.equal, kept, expected))


def test_keys_and_values_are_live_views(device: str, mixed_config: PreTrainedConfig) -> None:
    cache = vmm_cache(mixed_config, device)
    forward(device, 2, 5, cache)
    for index, layer in enumerate(cache.layers):
        layer.keys.fill_(3)
        layer.values.fill_(4)
        k, v = cache.update(*random_kv(device, 2, 1), index)
        assert (k[:, :, :5] == 3).all()
        assert (v[:, :, :5] == 4).all()
        assert k.data_ptr() == layer.keys.data_ptr()


def test_layers_of_different_shapes(device: str) -> None:
    """The first K and V tell each layer's own shape, and no memory is spent on a wrong guess."""
    config = LlamaConfig(**DECODER)
    cache, reference = vmm_cache(config, device), DynamicCache(config=config)
    heads = [2, 2, 6, 4]
    for tokens in (10, 1, 1):
        for index in range(4):
            kv = random_kv(device, 2, tokens, heads[index])
            for states, expected in zip(cache.update(*kv, index), reference.update(*kv, index)):
                assert torch.equal(states, expected)
    check_same_state(cache, reference)
    assert [layer.num_kv_heads for layer in cache.kv_caches[0].layout.layers] == heads


def test_a_shape_announced_wrong_does_no_harm(device: str, mixed_config: PreTrainedConfig) -> None:
    """As `early_initialization` does for models that cache latents."""
    cache, reference = vmm_cache(mixed_config, device), DynamicCache(config=mixed_config)
    cache.early_initialization(2, 5, 24, torch.float32, torch.device(device))
    assert cache.get_seq_length() == 0
    forward(device, 2, 10, cache, reference)
    check_same_state(cache, reference)
    assert {layer.num_kv_heads for layer in cache.kv_caches[0].layout.layers} == {2}


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_decode_step_makes_few_python_calls(window: int | None, device: str) -> None:
    """The first layer works out what the pass does, and gives back what a window left; the others write and view."""
    layers, calls = 64, 0
    cache = vmm_cache(MistralConfig(**{**DECODER, "num_hidden_layers": layers, "sliding_window": window}), device)
    forward(device, 2, 9, cache)
    forward(device, 2, 1, cache)
    kv = new_tokens(device, 2, 1, layers)

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        write(cache, kv)
    finally:
        sys.setprofile(None)
    assert calls <= 7 * layers + (60 if window is None else 100)


# ---------------------------------------------------------------------- memory


def pages(cache: VmmCache, state: str = "used") -> list[int]:
    """Pages of full attention and of windows, in this order."""
    by_length = sorted(cache.kv_caches, key=lambda kv_cache: -kv_cache.stats().tokens)
    return [kv_cache.stats().pages[state] for kv_cache in by_length]


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[FaultyDriver]:
    """The drivers of the caches that a test makes."""
    opened: list[FaultyDriver] = []

    def open_faulty(device: object, page_size: int | None) -> FaultyDriver:
        opened.append(FaultyDriver(open_driver(device, page_size)))
        return opened[-1]

    open_drivers_with(monkeypatch, open_faulty)
    return opened


def test_pages_come_with_tokens_and_leave_with_the_window(device: str, mixed_config: PreTrainedConfig) -> None:
    """8 tokens fill a page; 6 that a window keeps, and one that is new, lie in two, and a third leaves later."""
    cache = vmm_cache(mixed_config, device, lookahead=0)
    assert cache.kv_caches == []
    for length in range(1, 100):
        forward(device, 2, 1, cache)
        full, window = pages(cache)
        assert full == 2 * -(-length // 8)
        assert window <= 2 * 3
    (pool,) = cache.pools
    assert pool.stats().physical_bytes <= sum(pages(cache) + pages(cache, "surplus")) * pool.page_size


def test_a_long_prompt_takes_no_more_than_a_window(device: str, mixed_config: PreTrainedConfig) -> None:
    cache = vmm_cache(mixed_config, device, lookahead=0)
    forward(device, 2, 80, cache)
    assert pages(cache) == [2 * 10, 2 * 1]
    assert all(kv_cache.stats().pages["surplus"] == 0 for kv_cache in cache.kv_caches)


def test_rows_behind_a_window_take_no_more_than_it(device: str) -> None:
    """4 tokens fill a page: of 40 the window lies in two or three, and ten are not to be had."""
    config = tiny_model("mistral", "eager", "cpu").config
    cache, reference = vmm_cache(config, device, max_bytes=9 * PAGE_SIZE[device]), DynamicCache(config=config)
    for _ in range(40):
        forward(device, 1, 1, cache, reference)
    for each in (cache, reference):
        each.batch_repeat_interleave(3)
    check_same_state(cache, reference)
    assert pages(cache) <= [3 * 3]
    forward(device, 3, 1, cache, reference)


def test_recorded_pages_leave_with_the_crop(device: str, mixed_config: PreTrainedConfig) -> None:
    cache = vmm_cache(mixed_config, device)
    cache.activate_past_recording()
    forward(device, 1, 80, cache)
    assert pages(cache) == [10, 10]
    cache.crop(-8)
    assert pages(cache) == [9, 1]


def test_cropped_and_deselected_tokens_leave_their_pages(device: str) -> None:
    cache = vmm_cache(LlamaConfig(**{**DECODER, "num_hidden_layers": 2}), device)
    forward(device, 3, 80, cache)
    cache.crop(-40)
    assert pages(cache) == [3 * 5]
    cache.batch_select_indices(torch.tensor([2], device=device))
    assert pages(cache) == [5]


@pytest.mark.parametrize("name", ["llama-gqa", "deepseek-v3", "bart"])
def test_a_second_generation_maps_nothing(name: str, device: str) -> None:
    model = tiny_model(name, "sdpa", device)
    tokens = random_tokens(model, 3, 12)
    cache = check_same_generation(model, tokens)
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if name == "bart" else [cache]
    before = [driver_calls(part) for part in parts]
    for rows in (3, 1, 2):
        cache.reset()
        assert [pages(part) for part in parts] == [[0]] * len(parts)
        output = model.generate(tokens[:rows], past_key_values=cache, do_sample=False, **LENGTHS)
        assert torch.equal(output, model.generate(tokens[:rows], do_sample=False, **LENGTHS))
    assert [driver_calls(part) for part in parts] == before


def test_a_second_generation_over_windows_takes_no_memory(device: str) -> None:
    """A window that has moved begins again at the front of its row: pages move there, and none is created."""
    model = tiny_model("gemma3", "sdpa", device)
    cache = vmm_cache(model.config, device, lookahead=0)
    model.generate(random_tokens(model, 3, 12), past_key_values=cache, do_sample=False, **LENGTHS)
    created = [kv_cache.stats().pages_created for kv_cache in cache.kv_caches]
    cache.reset()
    model.generate(random_tokens(model, 3, 12), past_key_values=cache, do_sample=False, **LENGTHS)
    assert [kv_cache.stats().pages_created for kv_cache in cache.kv_caches] == created


def test_reset_and_trim_return_everything(device: str, mixed_config: PreTrainedConfig) -> None:
    cache = vmm_cache(mixed_config, device)
    forward(device, 3, 80, cache)
    cache.reset()
    assert pages(cache) == [0, 0]
    for kv_cache in cache.kv_caches:
        kv_cache.trim()
        assert kv_cache.stats().physical_bytes == 0
    forward(device, 5, 20, cache)


@pytest.mark.usefixtures("kernels_for_all")
@pytest.mark.parametrize("compile", [False, True])
def test_the_end_of_a_cache_returns_everything(
    compile: bool, device: str, mixed_config: PreTrainedConfig, drivers
) -> None:
    """As soon as the mapper has made the change that it is at, and without the help of the cycle collector."""
    cache = vmm_cache(mixed_config, device, lookahead=16, compile=compile)
    forward(device, 3, 30, cache)
    twin = copy.deepcopy(cache)
    cache.layers[0].keys.zero_()
    other = copy.deepcopy(cache)
    assert len(cache.kv_caches) == len(twin.kv_caches) == len(other.kv_caches)
    assert all(driver.handles for driver in drivers)
    gc.disable()
    try:
        del cache, twin, other
        until = time.monotonic() + PATIENCE
        while any(driver.ranges for driver in drivers) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(driver.handles or driver.mapped or driver.ranges for driver in drivers)
    finally:
        gc.enable()


def test_a_copy_holds_live_tokens_only(device: str, mixed_config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(mixed_config, device, lookahead=0), DynamicCache(config=mixed_config)
    for tokens in (30, *[1] * 20):
        forward(device, 2, tokens, cache, reference)
    before = pages(cache)
    twin, twin_reference = copy.deepcopy(cache), copy.deepcopy(reference)
    assert pages(twin) == [used + 2 for used in before], "a page for each sequence"
    for layer in cache.layers:
        assert layer.keys is not None, "whoever looks at them may write to them"
    apart = copy.deepcopy(cache)
    assert pages(apart) == [2 * 7, 2 * 2]
    assert pages(apart, "surplus") == [0, 0]
    del apart
    forward(device, 2, 3, cache, reference)
    forward(device, 2, 5, twin, twin_reference)
    check_same_state(cache, reference)
    check_same_state(twin, twin_reference)
    assert copy.deepcopy(vmm_cache(mixed_config, device)).get_seq_length() == 0


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen3-next"])
def test_a_prompt_is_reused_by_copies(name: str, device: str) -> None:
    model = tiny_model(name, "sdpa", device)
    prompt = random_tokens(model, 1, 20)
    continued = []
    for cache in caches(model):
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        for seed in (2, 3):
            tokens = torch.cat([prompt, random_tokens(model, 1, 4, seed=seed)], dim=1)
            continued.append(model.generate(tokens, past_key_values=copy.deepcopy(cache), do_sample=False, **LENGTHS))
    assert torch.equal(torch.cat(continued[:2]), torch.cat(continued[2:]))


# ---------------------------------------------------------------------- inference only


def test_autograd_through_the_cache_is_refused(device: str) -> None:
    model = tiny_model("llama-gqa", "sdpa", device)
    cache = vmm_cache(model.config, device)
    with pytest.raises(vmmkv.AutogradError, match=r"no_grad.*DynamicCache"):
        model(random_tokens(model, 1, 5), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(random_tokens(model, 1, 5), past_key_values=cache)


@pytest.mark.parametrize("modes", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)])
def test_no_grad_and_inference_mode_in_either_order(device: str, modes, mixed_config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(mixed_config, device), DynamicCache(config=mixed_config)
    for mode in (*modes, *modes):
        with mode():
            forward(device, 2, 3, cache, reference)
            cache.reorder_cache(torch.tensor([1, 0], device=device))
            reference.reorder_cache(torch.tensor([1, 0], device=device))
            cache = copy.deepcopy(cache)
    forward(device, 2, 3, cache)
    cache.layers[1].keys.zero_()


# ---------------------------------------------------------------------- errors


def test_what_does_not_fit_is_refused(device: str, mixed_config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(mixed_config, device, max_batch_size=3), DynamicCache(config=mixed_config)
    with pytest.raises(vmmkv.OutOfRowsError, match="max_batch_size"):
        cache.update(*random_kv(device, 4, 1), 1)
    forward(device, 2, 4, cache, reference)
    k, v = random_kv(device, 2, 1)
    for refused, error, message in (
        (random_kv(device, 3, 1), vmmkv.ShapeError, r"batch of 3.*holds 2.*reset\(\)"),
        (random_kv(device, 2, 1, heads=1), vmmkv.ShapeError, "num_kv_heads=2"),
        ((k, v[:, :1]), vmmkv.ShapeError, "only head_dim may differ"),
        ((k.double(), v.double()), vmmkv.DtypeError, "float64.*float32.*autocast"),
        ((k.double(), v), vmmkv.DtypeError, "float64.*float32.*autocast"),
        ((k.to("meta"), v.to("meta")), vmmkv.DeviceError, "meta"),
        (random_kv(device, 2, 197), vmmkv.SequenceTooLongError, "201 tokens.*max_seq_len=200"),
    ):
        with pytest.raises(error, match=message):
            cache.update(*refused, 1)
    with pytest.raises(vmmkv.OutOfRowsError):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="-3 drops"):
        cache.crop(3)
    check_same_state(cache, reference)


def test_a_cache_keeps_to_its_budget(device: str) -> None:
    """8 tokens fill a page."""
    config = LlamaConfig(**{**DECODER, "num_hidden_layers": 2})
    cache, reference = vmm_cache(config, device, max_bytes=4 * PAGE_SIZE[device]), DynamicCache(config=config)
    forward(device, 2, 16, cache, reference)
    with pytest.raises(vmmkv.OutOfPagesError, match="raise the limit"):
        forward(device, 2, 1, cache)
    check_same_state(cache, reference)
    for each in (cache, reference):
        each.crop(-3)
    forward(device, 2, 3, cache, reference)
    check_same_state(cache, reference)


def test_a_window_that_has_moved_cannot_be_cropped(device: str, mixed_config: PreTrainedConfig) -> None:
    """Nor can the layers of full attention be, then: those before the window are as they were, too."""
    config = copy.deepcopy(mixed_config)
    config.layer_types = config.layer_types[::-1]
    cache, reference = vmm_cache(config, device), DynamicCache(config=config)
    forward(device, 2, 10, cache, reference)
    with pytest.raises(vmmkv.ReleasedTokensError, match=r"10 tokens.*activate_past_recording\(\)"):
        cache.crop(-1)
    check_same_state(cache, reference)


# ---------------------------------------------------------------------- what ended in the middle


class LayerError(Exception):
    """What a layer of a model raises."""


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("earlier", [[], [5], [5, 1]], ids=str)
@pytest.mark.parametrize("name", ["llama-gqa-wide", "gemma3-wide", "gemma4", "t5"])
@pytest.mark.usefixtures("reference_kernels")
def test_an_unfinished_forward_pass_is_found(name: str, earlier: list[int], compile: bool, device: str) -> None:
    """By the next one, wherever it ended; and `reset()` is all that it takes to start over."""
    model = tiny_model(name, "vmmkv", device)
    decoder = model.get_decoder()
    layers = decoder.block if name == "t5" else decoder.layers
    encoded = {"encoder_outputs": (torch.randn(2, 7, 64, device=device),)} if name == "t5" else {}
    ids = "decoder_input_ids" if name == "t5" else "input_ids"
    reference, cache = caches(model, compile=compile)
    written = 4 if name == "gemma4" else len(layers)  # the others read what these have written

    def run(tokens: int, cache: Cache) -> torch.Tensor:
        return model(**{ids: random_tokens(model, 2, tokens)}, **encoded, past_key_values=cache).logits

    def fail(*_: object) -> None:
        raise LayerError

    with torch.no_grad():
        for after in range(written - 1):
            cache.reset()
            for tokens in earlier:
                run(tokens, cache)
            hook = layers[after].register_forward_hook(fail)
            with pytest.raises(LayerError):
                run(3, cache)
            hook.remove()
            for tokens in (3, 1):
                with pytest.raises(vmmkv.UnfinishedPassError, match=r"reset\(\)"):
                    run(tokens, cache)
        cache.reset()
        torch.testing.assert_close(run(3, cache), run(3, reference), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels_for_all")
@pytest.mark.parametrize("compile", [False, True])
def test_a_pass_that_has_left_layers_out_is_told_of(compile: bool, device: str) -> None:
    """By the next one, whichever layers it has reached."""
    config = LlamaConfig(**DECODER, attn_implementation="vmmkv")
    layers = range(config.num_hidden_layers)
    for reached in range(1, 2 ** len(layers)):
        cache = vmm_cache(config, device, compile=compile)

        def run(tokens: int, layers: Iterable[int], cache: Cache = cache) -> None:
            for layer in layers:
                cache.update(*(torch.randn(2, 2, tokens, 16, device=device) for _ in "kv"), layer)

        run(5, layers)
        run(1, [layer for layer in layers if reached >> layer & 1])
        is_whole = reached == 2 ** len(layers) - 1
        with nullcontext() if is_whole else pytest.raises(vmmkv.UnfinishedPassError, match=r"reset\(\)"):
            run(1, layers)


def interrupt(line: int, run: Callable[[], object]) -> int:
    """Runs something, and Ctrl-C at a line of the integration. Returns at which it was."""
    seen = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal seen
        seen += event == "line"
        if seen > line:
            raise KeyboardInterrupt
        return count

    def enter(frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        return count if frame.f_code.co_filename.startswith(INTEGRATIONS) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    left = sys.exc_info()[1]  # Python takes it for handled still, where the interrupt came as an `except` ended
    while left:
        left.__traceback__, left = None, left.__context__  # whose frames hold what was interrupted
    return seen


Tokens = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V for each layer."""


def new_tokens(device: str, rows: int, tokens: int, layers: int) -> Tokens:
    return [random_kv(device, rows, tokens) for _ in range(layers)]


def write(cache: Cache, kv: Tokens) -> None:
    for index, states in enumerate(kv):
        cache.update(*states, index)


def hold_the_same(cache: Cache, other: Cache) -> bool:
    pairs = [
        pair
        for one, two in zip(cache.layers, other.layers)
        for pair in ((one.keys, two.keys), (one.values, two.values))
    ]
    return all(states.shape == expected.shape and torch.equal(states, expected) for states, expected in pairs)


CHANGES: dict[str, Callable[[Cache, Tokens], object]] = {
    "prompt": write,
    "forward": write,
    "graph": write,
    "sharing": lambda cache, kv: (cache.get_mask_sizes(20, 0), write(cache, kv)),
    "announcement": lambda cache, kv: cache.get_mask_sizes(20, 0),
    "reorder": lambda cache, kv: cache.reorder_cache(torch.tensor([1, 1], device=kv[0][0].device)),
    "repeat": lambda cache, kv: cache.batch_repeat_interleave(2),
    "copy": lambda cache, kv: copy.deepcopy(cache),
    "crop": lambda cache, kv: cache.crop(-3),
    "reset": lambda cache, kv: cache.reset(),
}


@pytest.mark.usefixtures("kernels_for_all")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupt_anywhere(change: str, compile: bool, device: str, mixed_config: PreTrainedConfig) -> None:
    """What follows is refused, or right, and `reset()` is all that it takes to start over."""
    if change in ("graph", "announcement") and not compile:
        pytest.skip("only of caches made with compile=True")
    config, random, lines = copy.deepcopy(mixed_config), np.random.default_rng(), 0

    def new_cache() -> VmmCache:
        cache = vmm_cache(config, device, max_batch_size=8, compile=compile)
        cache.activate_past_recording()
        return cache

    for trial in range(INTERRUPTS):
        layers = 1 if trial % 5 == 4 else 2
        config.num_hidden_layers, config.layer_types = layers, mixed_config.layer_types[:layers]
        cache, before = new_cache(), DynamicCache(config=config)
        before.activate_past_recording()
        first = [] if change == "prompt" else [new_tokens(device, 2, count, layers) for count in (9, 1)]
        if change == "sharing":  # of a prompt, behind which rows are alike
            first = [[(k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)) for k, v in new_tokens(device, 1, 20, layers)]]
        for kv in first:
            write(cache, kv)
            write(before, kv)
        kv = new_tokens(device, 2, 20, layers)
        if change == "graph":
            cache.get_mask_sizes(20, 0)
        with inside_a_graph() if change == "graph" else nullcontext():
            at = int(random.integers(lines)) if lines else sys.maxsize  # nowhere at first
            lines = max(lines, interrupt(at, partial(CHANGES[change], cache, kv)))
        after = DynamicCache(config=config) if change == "reset" else copy.deepcopy(before)  # 5.17 keeps its length
        CHANGES[change](after, kv)
        kv = new_tokens(device, 2, 3, layers)
        is_graph = compile and change != "prompt" and random.random() < 0.5
        try:
            if is_graph or random.random() < 0.5:
                cache.get_mask_sizes(3, int(random.integers(layers)))
            with inside_a_graph() if is_graph else nullcontext():
                write(cache, kv)
        except (vmmkv.UnfinishedPassError, vmmkv.ShapeError, vmmkv.StreamCaptureError) as error:
            is_beyond_the_limit = "would write up to" in str(error)
            assert not is_beyond_the_limit, "a GPU would have stopped"
            if change != "repeat":
                assert at < sys.maxsize
        else:
            possible = [before] if change == "repeat" else [before, after]
            for reference in possible:
                write(reference, kv)
            assert any(hold_the_same(cache, reference) for reference in possible)
        cache.reset()
        fresh, kv = new_cache(), new_tokens(device, 3, 11, layers)
        write(cache, kv)
        write(fresh, kv)
        assert hold_the_same(cache, fresh)
        if pages(cache) != pages(fresh):
            gc.collect()  # a copy that was interrupted may hang on the frames that were traced
        assert pages(cache) == pages(fresh)
        for kv_cache in cache.kv_caches:
            kv_cache.check()


@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_a_failed_driver_call_changes_nothing(device: str, mixed_config: PreTrainedConfig, drivers, call: str) -> None:
    cache, reference = vmm_cache(mixed_config, device, lookahead=0), DynamicCache(config=mixed_config)
    forward(device, 2, 10, cache, reference)
    drivers[0].fail(call, skip=1)
    with pytest.raises(vmmkv.DriverError, match="INJECTED"):
        forward(device, 2, 20, cache)
    check_same_state(cache, reference)
    forward(device, 2, 20, cache, reference)
    check_same_state(cache, reference)


# ---------------------------------------------------------------------- 32-bit strides


def test_long_rows_have_short_strides(device: str) -> None:
    """The geometry of Llama-3.1-8B: 32 layers in a record reach 32,768 tokens."""
    config = LlamaConfig(num_hidden_layers=32)
    k = torch.randn(1, 8, 1, 128, dtype=torch.bfloat16, device=device)
    for max_seq_len, ranges in ((32_768, 1), (32_769, 2), (131_072, 4), (1_048_576, 32)):
        cache = VmmCache(config, max_seq_len, max_batch_size=2)
        cache.update(k, k, 0)
        layout = cache.kv_caches[0].layout
        assert len(layout.record_bytes) == ranges
        assert layout.int32_token_limit >= max_seq_len
    with pytest.raises(vmmkv.LayoutError, match="Lower max_seq_len"):
        VmmCache(config, 1_048_577, max_batch_size=2).update(k, k, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_attention_reads_the_last_token_of_the_longest_row(backend: SDPBackend) -> None:
    """Two layers of 32 heads: together 2**32 elements a row, so each has a record of its own, of 4 GiB."""
    tokens = 2**31 // (2 * 32 * 128)
    cache = VmmCache(LlamaConfig(**{**DECODER, "num_hidden_layers": 2}), tokens, max_batch_size=1)
    k, v = (torch.randn(1, 32, tokens, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    query = 4 * k[:, :, -1:]  # its weight on the last token is nearly 1
    attended = cache.update(k, v, 0)
    with sdpa_kernel(backend):
        output = torch.nn.functional.scaled_dot_product_attention(query, *attended)
    torch.testing.assert_close(output, v[:, :, -1:], atol=0.05, rtol=0.02)


def test_what_was_reordered_can_be_written_over(device: str, mixed_config: PreTrainedConfig) -> None:
    cache, reference = vmm_cache(mixed_config, device), DynamicCache(config=mixed_config)
    forward(device, 3, 60, cache, reference)
    for each in (cache, reference):
        each.batch_repeat_interleave(2)
        for _ in range(40):
            each.reorder_cache(torch.tensor([0, 0, 0, 3, 3, 3], device=device))
    for layer, expected in zip(cache.layers, reference.layers):
        new = torch.randn_like(expected.keys)
        layer.keys.copy_(new)
        expected.keys = new
    check_same_state(cache, reference)


@pytest.mark.parametrize("skip", range(6))
def test_a_reordering_that_fails_in_the_middle(skip: int, mixed_config: PreTrainedConfig) -> None:
    """What is left is refused, until a reset."""
    driver = FaultyDriver(open_driver("cpu", 4096))
    pool = on_driver(driver, vmmkv.FramePool, "64MiB")
    cache, reference = VmmCache(mixed_config, 200, pool=pool), DynamicCache(config=mixed_config)
    forward("cpu", 3, 60, cache)
    driver.fail("copy", skip)
    try:
        cache.reorder_cache(torch.tensor([1, 2, 0]))
    except vmmkv.DriverError:
        with pytest.raises(vmmkv.UnfinishedPassError):
            forward("cpu", 3, 1, cache)
        cache.reset()
        forward("cpu", 3, 20, cache, reference)
        check_same_state(cache, reference)
