"""`VmmCache` against `DynamicCache`: the same tokens and logits, and memory only where tokens are.

Pages on the CPU are 4 KiB and hold a few tokens; an access outside of them kills the process, which is the point.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROUNDS, each_with_few, open_drivers_with, soon
from faulty import FaultyDriver
from generation import (
    PAGE_SIZE,
    caches,
    check_same_generation,
    check_same_state,
    forward,
    generate,
    inside_a_graph,
    left_padding,
    pages,
    random_kv,
    random_tokens,
    vmm_cache,
)
from generation import kernels_for_all as kernels_for_all
from generation import mixed_config as mixed_config
from generation import reference_kernels as reference_kernels
from generation import uncompiled as uncompiled
from interruption import interrupted
from tiny_models import DECODER, MODELS, WIDE_MODELS, skip_unsupported, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, masking_utils

import vmmkv
from vmmkv.driver.driver import open_driver
from vmmkv.integrations.transformers import VmmCache

pytestmark = [
    pytest.mark.usefixtures("uncompiled"),
    *map(  # what transformers itself calls
        pytest.mark.filterwarnings,
        (
            "ignore:_compile flag on create_block_mask:DeprecationWarning",
            "ignore:`torch.jit.script_method`:DeprecationWarning",
            "ignore:flex_attention called without torch.compile:UserWarning",
        ),
    ),
]

SEQ2SEQ = ["bart", "t5"]
WIDE = ["llama-gqa-wide", "gemma3-wide", "gemma4"]
"""For the last there are no kernels."""
INTERRUPTS = 6 * ROUNDS
"""How often an operation is interrupted, each time somewhere else."""


# ---------------------------------------------------------------------- the tokens of generate()


def with_attentions(names: Iterable[str]) -> list[Any]:
    """Each model with some of the ways to attend; FlexAttention, whose masks take most of the time, with one."""
    flex = [pytest.param(name, "flex_attention", marks=pytest.mark.few(1, "flex")) for name in names]
    wide = [pytest.param(name, "compile", marks=pytest.mark.few(3, "wide")) for name in WIDE_MODELS]
    return each_with_few(2, names, ["eager", "sdpa", "vmmkv", "compile"]) + flex + wide


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(("name", "attention"), with_attentions(MODELS))
def test_greedy(name: str, attention: str, device: str) -> None:
    """With padding on the left, and without."""
    skip_unsupported(name, attention, device)
    if (name, attention) == ("t5", "compile"):
        pytest.skip("whole rows are not read with a bias of positions")
    compile = attention == "compile"
    model = tiny_model(name, "vmmkv" if compile else attention, device)
    tokens = random_tokens(model, 3, 12)
    for mask in (torch.ones_like(tokens), *[left_padding(tokens)] * (name not in SEQ2SEQ)):
        check_same_generation(model, tokens, *caches(model, compile=compile), attention_mask=mask)


MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.9},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 4},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "padded beams": {"num_beams": 4},
    "sampled beams": {"num_beams": 4, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 5},  # of decoders only
    "prompt lookup": {"prompt_lookup_num_tokens": 4},  # proposes tokens from the prompt; those refused are cropped
    "assistant": {},  # another model does
}
MODELS_OF_MODES = ["llama-gqa", "mistral", "gemma3", "gemma4", "deepseek-v3", "qwen3-next", *SEQ2SEQ]


@pytest.mark.few(24)
@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "compile"), [(name, False) for name in MODELS_OF_MODES] + [(name, True) for name in [*WIDE, "bart"]]
)
def test_modes(name: str, compile: bool, mode: str, device: str) -> None:
    if (mode in ("padded beams", "chunked prefill") and name in SEQ2SEQ) or (
        mode in ("prompt lookup", "assistant") and name == "qwen3-next"
    ):
        pytest.skip("generate() does not do it")
    model, options = tiny_model(name, "vmmkv" if compile else "sdpa", device), MODES[mode]
    tokens = random_tokens(model, 1, 5).repeat(1, 3) if mode == "prompt lookup" else random_tokens(model, 2, 12)
    if mode == "assistant":
        tokens, options = tokens[:1], {"assistant_model": tiny_model(name, "sdpa", device, seed=1)}
        options["assistant_model"].generation_config.num_assistant_tokens = 4
    mask = left_padding(tokens) if mode == "padded beams" else torch.ones_like(tokens)
    check_same_generation(model, tokens, *caches(model, compile=compile), attention_mask=mask, **options)


def test_compiled_flex_attention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is made for the strides that it sees. Masks and prompts, which take as long to compile, know none."""
    if device == "cuda":
        pytest.skip("torch compiles FlexAttention for heads of 16 and more on a GPU; those of the tiny models have 8")
    model = tiny_model("llama-gqa", "flex_attention", device)
    tokens, logits = random_tokens(model, 2, 12), []
    make_mask = torch.compiler.set_stance("force_eager")(masking_utils.create_block_mask)
    monkeypatch.setattr(masking_utils, "create_block_mask", make_mask)
    with torch.no_grad():
        for stance, cache in zip(("force_eager", "default"), caches(model)):
            model(tokens[:, :-1], past_key_values=cache)
            with torch.compiler.set_stance(stance):
                logits.append(model(tokens[:, -1:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_compiled_model(device: str) -> None:
    """Pages are mapped between the graphs: a graph that was captured once must not skip that."""
    sizes = {**DECODER, "num_hidden_layers": 1, "num_key_value_heads": 4}  # 16 tokens in a page
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device).eval()
    compiled = torch.compile(model, backend="eager")
    reference, cache = caches(model)
    for seed, tokens in enumerate((12, *[1] * 3)):
        step = random_tokens(model, 2, tokens, seed=seed)
        with torch.compiler.set_stance("default"):
            logits = compiled(step, past_key_values=cache).logits
        torch.testing.assert_close(logits, model(step, past_key_values=reference).logits, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- parity of the cache's own operations


def test_tokens_from_anywhere(device: str, mixed_config: PreTrainedConfig) -> None:
    """Whether they lie as the last ones did, apart, or where no kernel can read whole vectors."""
    cache, reference = vmm_cache(mixed_config, device), DynamicCache(config=mixed_config)
    forward(device, 2, 5, cache, reference)
    head_dim = PAGE_SIZE[device] // 256
    for offset, step in ((0, 1), (0, 1), (1, 1), (8, 1), (0, 2), (1, 2), (0, 1), (3, 1)):
        for layer in range(mixed_config.num_hidden_layers):
            memory = torch.randn(2, 2, 1, 2, 2 * head_dim + 8, device=device)
            k, v = memory[..., offset : offset + step * head_dim : step].transpose(2, 3)
            assert all(map(torch.equal, cache.update(k, v, layer), reference.update(k, v, layer)))


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("compile", [False, True])
def test_a_shape_announced_wrong_does_no_harm(compile: bool, device: str) -> None:
    """By `early_initialization`, of models that cache latents; kernels could take it, but not what comes."""
    model = tiny_model("llama-gqa", "vmmkv", device)
    tokens, cache = random_tokens(model, 2, 12), vmm_cache(model.config, device, compile=compile)
    cache.early_initialization(2, 5, 64, torch.float32, torch.device(device))
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, tokens, past_key_values=cache), generate(model, tokens))
    assert {layer.num_kv_heads for layer in cache.kv_caches[0].layout.layers} == {2}


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("modes", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)])
def test_no_grad_and_inference_mode_in_either_order(modes: Any, compile: bool, device: str) -> None:
    model = tiny_model("gemma3-wide", "vmmkv", device)
    generated = []
    for cache in caches(model, compile=compile):
        tokens = random_tokens(model, 2, 6)
        for mode in (*modes, *modes):
            with mode():
                logits = model(tokens, past_key_values=cache).logits
                cache.reorder_cache(torch.tensor([1, 0], device=device))
                cache = copy.deepcopy(cache)
                tokens = logits[:, -3:].argmax(-1).flip(0)
        generated.append(logits.clone())
    cache.layers[1].keys.zero_()
    torch.testing.assert_close(*generated, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- memory


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[FaultyDriver]:
    """The drivers of the caches that a test makes."""
    opened: list[FaultyDriver] = []

    def open_faulty(device: object, page_size: int | None) -> FaultyDriver:
        opened.append(FaultyDriver(open_driver(device, page_size)))
        return opened[-1]

    open_drivers_with(monkeypatch, open_faulty)
    return opened


@pytest.mark.usefixtures("kernels_for_all")
@pytest.mark.parametrize("compile", [False, True])
def test_pages_come_with_tokens_and_leave_with_the_window(
    compile: bool, device: str, mixed_config: PreTrainedConfig
) -> None:
    """8 tokens fill a page; 6 that a window keeps, and one that is new, lie in two, and a third leaves later."""
    cache = vmm_cache(mixed_config, device, lookahead=0, compile=compile)
    assert cache.kv_caches == []
    for length in range(1, 100):
        for index in range(len(cache)):
            cache.update(*random_kv(device, 2, 1), index)
        full, window = pages(cache)
        assert full == 2 * -(-length // 8)
        assert window <= 2 * 3
    for kv_cache in cache.kv_caches:
        kv_cache.check()
    (pool,) = cache.pools
    assert pool.stats().physical_bytes <= sum(pages(cache) + pages(cache, "surplus")) * pool.page_size


def test_tokens_that_are_dropped_leave_their_pages(device: str, mixed_config: PreTrainedConfig) -> None:
    """Those that a window leaves behind, or has recorded until a crop; those of sequences; and all."""
    cache = vmm_cache(mixed_config, device, lookahead=0)
    forward(device, 2, 80, cache)
    assert (pages(cache), pages(cache, "surplus")) == ([2 * 10, 2 * 1], [0, 0])
    cache.reset()
    cache.activate_past_recording()
    forward(device, 3, 80, cache)
    assert pages(cache) == [3 * 10, 3 * 10]
    cache.crop(-8)
    assert pages(cache) == [3 * 9, 3 * 1]
    cache.batch_select_indices(torch.tensor([2], device=device))
    assert pages(cache) == [9, 1]
    cache.reset()
    assert pages(cache) == [0, 0]
    for kv_cache in cache.kv_caches:
        kv_cache.trim()
        assert kv_cache.stats().physical_bytes == 0
    forward(device, 5, 20, cache)


def driver_calls(cache: VmmCache) -> int:
    return sum(call.count for kv_cache in cache.kv_caches for call in kv_cache.stats().driver_calls.values())


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize(
    ("name", "compile"), [("llama-gqa", False), ("deepseek-v3", False), ("bart", False), ("llama-gqa-wide", True)]
)
def test_a_second_generation_maps_nothing(name: str, compile: bool, device: str) -> None:
    model = tiny_model(name, "vmmkv", device)
    tokens, made = random_tokens(model, 3, 12), caches(model, compile=compile)
    check_same_generation(model, tokens, *made)
    cache = made[1]
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if name == "bart" else [cache]
    before = [driver_calls(part) for part in parts]
    for rows in (3, 1, 2):
        cache.reset()
        assert [pages(part) for part in parts] == [[0]] * len(parts)
        assert torch.equal(generate(model, tokens[:rows], past_key_values=cache), generate(model, tokens[:rows]))
    assert [driver_calls(part) for part in parts] == before


@pytest.mark.usefixtures("kernels_for_all")
@pytest.mark.parametrize("compile", [False, True])
def test_the_end_of_a_cache_returns_everything(
    compile: bool, device: str, mixed_config: PreTrainedConfig, drivers: list[FaultyDriver]
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
        soon(lambda: not any(driver.ranges for driver in drivers))
        assert not any(driver.handles or driver.mapped or driver.ranges for driver in drivers)
    finally:
        gc.enable()


# ---------------------------------------------------------------------- errors


def test_autograd_through_the_cache_is_refused(device: str) -> None:
    model = tiny_model("llama-gqa", "sdpa", device)
    cache = vmm_cache(model.config, device)
    with pytest.raises(vmmkv.AutogradError, match=r"no_grad.*DynamicCache"):
        model(random_tokens(model, 1, 5), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(random_tokens(model, 1, 5), past_key_values=cache)


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


@torch.no_grad()
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("earlier", [[], [5], [5, 1]], ids=str)
@pytest.mark.parametrize("name", ["mistral-wide", "gemma3-wide", "gemma4", "t5"])
@pytest.mark.usefixtures("reference_kernels")
def test_an_unfinished_forward_pass_is_found(name: str, earlier: list[int], compile: bool, device: str) -> None:
    """By the next one, wherever it ended, with any mask; and `reset()` is all that it takes to start over."""
    model = tiny_model(name, "vmmkv", device)
    layers = model.get_decoder().block if name == "t5" else model.get_decoder().layers
    encoded = {"encoder_outputs": (torch.randn(2, 7, 64, device=device),)} if name == "t5" else {}
    ids, prefix = ("decoder_input_ids", "decoder_") if name == "t5" else ("input_ids", "")
    reference, cache = caches(model, compile=compile)
    written = 4 if name == "gemma4" else len(layers)  # the others read what these have written

    def run(tokens: int, cache: Cache, before: int = 0) -> torch.Tensor:
        mask = {f"{prefix}attention_mask": torch.ones(2, before + tokens, device=device)} if before else {}
        return model(**{ids: random_tokens(model, 2, tokens)}, **encoded, **mask, past_key_values=cache).logits

    def fail(*_: object) -> None:
        raise LayerError

    for after in range(written - 1):
        cache.reset()
        for tokens in earlier:
            run(tokens, cache)
        hook = layers[after].register_forward_hook(fail)
        with pytest.raises(LayerError):
            run(3, cache)
        hook.remove()
        for tokens, before in ((3, 0), (1, 0), (1, sum(earlier))):
            refused = (vmmkv.UnfinishedPassError, vmmkv.UnsupportedAttentionError)[: 1 + compile]  # for its mask
            with pytest.raises(refused, match=r"reset\(\)|a mask that kernels do not know"):
                run(tokens, cache, before)
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


Tokens = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V for each layer."""


def new_tokens(device: str, rows: int, tokens: int, layers: int) -> Tokens:
    return [random_kv(device, rows, tokens) for _ in range(layers)]


def write(cache: Cache, kv: Tokens) -> None:
    for index, states in enumerate(kv):
        cache.update(*states, index)


def hold_the_same(*caches: Cache) -> bool:
    held = [[states for layer in cache.layers for states in (layer.keys, layer.values)] for cache in caches]
    return all(map(torch.equal, *held))


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
            at = int(random.integers(1, lines)) if lines else sys.maxsize  # nowhere at first
            lines = interrupted(partial(CHANGES[change], cache, kv), at) or lines
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
