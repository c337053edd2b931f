"""`VmmCache(compile=True)`: the length is data on the device, and one compiled forward pass serves every length."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from generation import LENGTHS, NEW, PAGE_SIZE, caches, generate, inside_a_graph, left_padding, random_tokens, vmm_cache
from generation import reference_kernels as reference_kernels
from generation import uncompiled as uncompiled
from tiny_models import DECODER, ENCODER_DECODER, WIDE_MODELS, WINDOW, shortened, tiny_model
from torch._dynamo.utils import counters
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Cache,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MoshiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProphetNetConfig,
)

import vmmkv
from vmmkv.integrations.transformers import VmmCache

pytestmark = pytest.mark.usefixtures("reference_kernels")

SEQ2SEQ = ["bart", "t5"]
REST = {"max_new_tokens": LENGTHS["max_new_tokens"] - 3, "min_new_tokens": LENGTHS["min_new_tokens"] - 3}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compile_config(model: PreTrainedModel, backend: str = "eager") -> CompileConfig:
    """What `generate` is to compile with: on a GPU as it does by itself, with CUDA graphs, but as one graph."""
    if model.device.type == "cuda":
        return CompileConfig(fullgraph=True)
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def check_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]


# ---------------------------------------------------------------------- the same tokens


def holes(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask that no kernel takes."""
    return (torch.arange(tokens.shape[1], device=tokens.device) % 5 > 0).long().expand_as(tokens)


DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "holes": holes,
    "a hole in one": lambda tokens: torch.ones_like(tokens).index_put(
        (torch.tensor(0), torch.tensor(4)), tokens.new_zeros(())
    ),
    "padding on the right": lambda tokens: torch.ones_like(tokens).index_fill(
        1, tokens.new_tensor([38, 39, 40, 41]), 0
    ),
    "too short": lambda tokens: torch.ones_like(tokens[:, :36]),
}


@torch.no_grad()
@pytest.mark.few(10)
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("cache", ["DynamicCache", "VmmCache", "compiled"])
@pytest.mark.parametrize("name", ["llama-gqa-wide", "mistral-wide"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_other_masks_than_left_padding_run_on_sdpa(damage: str, name: str, cache: str, device: str) -> None:
    """Which cannot know where rows have no memory, or, behind a window, none any more."""
    model, eager = (tiny_model(name, attention, device) for attention in ("vmmkv", "eager"))
    tokens, results = random_tokens(model, 2, 42), []
    mask = DAMAGES[damage](tokens)
    made = caches(model, compile=cache == "compiled")
    for each, kept in ((eager, DynamicCache(config=eager.config)), (model, made[cache != "DynamicCache"])):
        logits, end = [], 0
        for count in (20, 20, 1, 1):
            given = {"attention_mask": mask[:, : end + count], "past_key_values": kept}
            logits.append(each(tokens[:, end : end + count], **given).logits)
            end += count
        results.append(torch.cat(logits, 1)[torch.nn.functional.pad(mask, (0, end - mask.shape[1]), value=1).bool()])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["llama-gqa-wide", "mistral-wide"])
@pytest.mark.simulator
def test_masks_for_tokens_without_memory_are_refused(name: str, device: str) -> None:
    """A mask of the caller's own, where the sizes of another were asked for."""
    model = tiny_model(name, "vmmkv", device)
    tokens = random_tokens(model, 1, 41)
    whole, hidden = torch.zeros(1, 1, 1, 200, device=device), torch.finfo(torch.float32).min
    whole[..., 41:] = hidden
    whole[..., : 40 - WINDOW + 1] = hidden  # of a window there is no more
    position = torch.tensor([[40]], device=device)
    behind, before = whole.clone(), whole.clone()
    behind[..., 41] = before[..., 0] = 0
    refused = [whole[..., :1], torch.zeros_like(whole), behind, *([before] if "mistral" in name else [])]
    prompt = vmm_cache(model.config, device, compile=True)
    with torch.no_grad():
        model(tokens[:, :40], past_key_values=prompt, attention_mask=holes(tokens[:, :40]))
        for mask in [*refused, whole]:
            cache = copy.deepcopy(prompt)
            cache.get_mask_sizes(1, 0)
            with nullcontext() if mask is whole else pytest.raises(vmmkv.UnsupportedAttentionError, match="mask"):
                model(tokens[:, 40:], past_key_values=cache, attention_mask=mask, position_ids=position)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["llama-gqa-wide", "gemma3-wide"])
def test_masks_of_the_callers_own(name: str, device: str) -> None:
    """A mask as long as what has come so far; transformers does not ask the cache how long it is, then."""
    model = tiny_model(name, "vmmkv", device)
    tokens = random_tokens(model, 2, 40)
    with torch.no_grad():
        expected = model(tokens).logits
        cache, logits = vmm_cache(model.config, device, compile=True), []
        for start, end in ((0, 12), (12, 13), (13, 14), (14, 40)):
            masks = {}
            for kind in set(getattr(model.config, "layer_types", ["full_attention"])):
                query, key = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
                seen = key <= query
                if kind == "sliding_attention":
                    seen = (seen & (key > query - WINDOW))[:, max(start - WINDOW + 1, 0) :]
                masks[kind] = seen.expand(2, 1, -1, -1)
            mask = masks if len(masks) > 1 else masks["full_attention"]
            logits.append(model(tokens[:, start:end], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("others", ["eager", "sdpa"])
@pytest.mark.simulator
def test_whole_rows_are_for_vmmkv_only(others: str, device: str) -> None:
    """Whoever else gets them is told, whether the attention changes or another model comes; and may start over."""
    first, model = (copy.deepcopy(tiny_model("llama-gqa-wide", "vmmkv", device)) for _ in range(2))
    tokens = random_tokens(model, 2, 12)
    cache = vmm_cache(first.config, device, 4096, compile=True)
    with torch.no_grad():
        expected = model(tokens).logits
        for each in (model, first):
            each.set_attn_implementation("vmmkv")
            for seen in (slice(0, 10), slice(10, 11)):
                logits = each(tokens[:, seen], past_key_values=cache).logits
                torch.testing.assert_close(logits, expected[:, seen], atol=1e-4, rtol=1e-4)
            each.set_attn_implementation(others)
            with pytest.raises(vmmkv.UnsupportedError, match="set_attn_implementation"):
                each(tokens[:, 11:], past_key_values=cache)
            cache.reset()


# ---------------------------------------------------------------------- one graph

BY_HAND = [name for name in WIDE_MODELS if name != "gpt-oss-wide"]  # whose experts only generate() makes compileable


@pytest.mark.few(5)
@pytest.mark.parametrize("name", WIDE_MODELS)
@pytest.mark.simulator
def test_one_graph_serves_every_length(name: str, device: str) -> None:
    """Prompts of several lengths, padded, one after the other; only another batch size is another graph."""
    model = tiny_model(name, "vmmkv", device)
    cache = vmm_cache(model.config, device, compile=True)
    for length in (12, 5, 40):
        tokens = random_tokens(model, 2, length)
        mask = left_padding(tokens)
        expected = generate(model, tokens, attention_mask=mask, past_key_values=DynamicCache(config=model.config))
        cache.reset()
        with torch._dynamo.config.patch(error_on_recompile=True):
            output = generate(
                model, tokens, attention_mask=mask, past_key_values=cache, compile_config=compile_config(model)
            )
        assert torch.equal(output, expected)
    check_one_graph()


@pytest.mark.simulator
def test_no_compiler_copies_rows(device: str) -> None:
    """They are far more than there is memory. Little else: each kernel takes some seconds to compile."""
    config = LlamaConfig(**{**WIDE_MODELS["llama-gqa-wide"][2], "num_hidden_layers": 1})
    config._attn_implementation = "vmmkv"
    model = LlamaForCausalLM(config).to(device).eval()
    (layer,) = model.model.layers
    layer.mlp = layer.input_layernorm = layer.post_attention_layernorm = model.model.norm = torch.nn.Identity()
    max_seq_len, rows = (8_000_000, 256) if device == "cuda" else (20_000, 10_000)
    tokens = random_tokens(model, 1, 5)
    cache = vmm_cache(model.config, device, max_seq_len, max_batch_size=rows, compile=True)
    lengths = {"max_new_tokens": 3, "min_new_tokens": 3}
    config = compile_config(model, "inductor")
    with torch._inductor.config.patch({"cpp.simdlen": 1}):  # to read what vectors need takes a third of the compiler
        output = generate(model, tokens, past_key_values=cache, compile_config=config, **lengths)
    assert torch.equal(output, generate(model, tokens, **lengths))
    check_one_graph()


@pytest.mark.simulator
def test_one_graph_of_an_encoder_decoder(device: str) -> None:
    """Cross-attention reads what it wrote before: its length is a part of the graph."""
    heads = {f"{half}_{what}": 1 for half in ("encoder", "decoder") for what in ("attention_heads", "layers")}
    config = BartConfig(**ENCODER_DECODER, **heads, decoder_start_token_id=2, forced_eos_token_id=None)
    model = BartForConditionalGeneration._from_config(config, attn_implementation="vmmkv").to(device).eval()
    tokens = random_tokens(model, 2, 12)
    _, cache = caches(model, compile=True)
    mask = {"decoder_attention_mask": torch.ones_like(tokens[:, :1])}  # else 5.17 makes it inside of the graph
    for _ in range(2):
        cache.reset()
        output = generate(model, tokens, past_key_values=cache, compile_config=compile_config(model), **mask)
        assert torch.equal(output, generate(model, tokens))
    check_one_graph()


@pytest.mark.few(5)
@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.simulator
def test_compiled_by_hand(name: str, device: str) -> None:
    model = tiny_model(name, "vmmkv", device)
    prompt = random_tokens(model, 2, 12)
    expected = generate(model, prompt, past_key_values=DynamicCache(config=model.config))
    cache = vmm_cache(model.config, device, compile=True)
    mode = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "eager"}
    step = torch.compile(model, fullgraph=True, **mode)
    with torch.no_grad():
        tokens = [prompt, model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)]
        while len(tokens) < 1 + NEW:
            cache.get_mask_sizes(1, 0)
            tokens.append(step(tokens[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(tokens, 1), expected)
    check_one_graph()
    assert cache.get_seq_length() == 12 + NEW - 1


@pytest.mark.simulator
@pytest.mark.parametrize("compile", [False, True])
def test_layers_of_different_shapes(compile: bool, device: str) -> None:
    """The first K and V tell each layer's own shape; what a prompt has told of the last is where a graph finds it."""
    config, heads = LlamaConfig(**DECODER, attn_implementation="vmmkv"), [2, 2, 6, 4]
    cache, reference = vmm_cache(config, device, compile=compile), DynamicCache(config=config)

    def forward(kv: list[torch.Tensor]) -> list[torch.Tensor]:
        return [states for index, (k, v) in enumerate(kv) for states in cache.update(k, v, index)]

    step = torch.compile(forward, backend="eager", fullgraph=True)
    for length, tokens in enumerate([10, 1, 1], start=10):
        kv = [torch.randn(2, 2, count, tokens, 64, device=device) for count in heads]
        expected = [states for index, (k, v) in enumerate(kv) for states in reference.update(k, v, index)]
        in_graph = compile and tokens == 1
        if in_graph:
            cache.get_mask_sizes(1, 0)
        for states, reference_states in zip((step if in_graph else forward)(kv), expected):
            assert torch.equal(states.states[:, :, :length] if in_graph else states, reference_states)
    assert [layer.num_kv_heads for layer in cache.kv_caches[0].layout.layers] == heads


@pytest.mark.gpu
def test_captured_by_hand() -> None:
    """Nobody would map pages for replays."""
    model = tiny_model("llama-gqa-wide", "vmmkv", "cuda")
    prompt = random_tokens(model, 2, 12)
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for compile in (True, False):
            cache = vmm_cache(model.config, "cuda", compile=compile)
            token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
            model(token, past_key_values=copy.deepcopy(cache))  # kernels compile before the capture
            with pytest.raises(vmmkv.StreamCaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(token, past_key_values=cache)


# ---------------------------------------------------------------------- errors


def random_kv(device: str, rows: int, tokens: int, width: int = 64) -> list[torch.Tensor]:
    """K and V, whose heads the kernels take if they are 64 wide; four tokens of two layers fill a page then."""
    return [torch.randn(rows, PAGE_SIZE[device] // 4096, tokens, width, device=device) for _ in "kv"]


@pytest.mark.simulator
def test_what_cannot_map_pages_says_so(device: str) -> None:
    """Before anything is written: compiled passes that nobody has announced, also after some that were."""
    config = LlamaConfig(**{**DECODER, "num_hidden_layers": 2}, attn_implementation="vmmkv")
    cache, reference = vmm_cache(config, device, compile=True), DynamicCache(config=config)

    def forward(kv: list[torch.Tensor], is_asked: bool = False, cache: Cache = cache) -> None:
        if is_asked:
            cache.get_mask_sizes(kv[0].shape[2], 0)
        for index in range(2):
            cache.update(*kv, index)

    step = torch.compile(forward, backend="eager", fullgraph=True)
    for announced in (0, 1, 3):
        for run, tokens in ((forward, 5), *[(step, 1)] * announced):
            kv = random_kv(device, 2, tokens)
            if run is step:
                cache.get_mask_sizes(1, 0)
            run(kv)
            forward(kv, cache=reference)
        for tokens, is_asked in ((1, False), (1, True), (2, False)):
            with pytest.raises(Exception, match="outside of the graph"):
                step(random_kv(device, 2, tokens), is_asked)
        cache.get_mask_sizes(1, 0)
        with pytest.raises(Exception, match="outside of the graph"):
            step(random_kv(device, 2, 2))
        with pytest.raises(Exception, match=r"batch of 3.*holds 2"):
            step(random_kv(device, 3, 1))
        for each in (cache, reference):
            each.batch_select_indices(torch.tensor([1, 0], device=device))  # gives back what was for the pass to come
        with pytest.raises(Exception, match="outside of the graph"):
            step(random_kv(device, 2, 1))
        for layer, expected in zip(cache.layers, reference.layers):
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)


def test_a_compiled_pass_that_fails_in_the_middle(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts for nothing: some layers have written, and the host has not counted it."""
    model = tiny_model("gemma3-wide", "vmmkv", device)
    tokens = random_tokens(model, 2, 6)
    expected = generate(model, tokens)
    cache = vmm_cache(model.config, device, compile=True)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    calls, module = 0, sys.modules["vmmkv.integrations.row_writes"]
    can_append = module.can_append

    def fail_in_the_middle(*kv: torch.Tensor) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2 * 3 + 2:  # layer 2 of the third step
            raise RuntimeError("in the middle")
        return can_append(*kv)

    monkeypatch.setattr(module, "can_append", fail_in_the_middle)
    with pytest.raises(RuntimeError, match="in the middle"):
        generate(model, tokens, past_key_values=cache, compile_config=config)
    length = int(cache.get_seq_length())
    assert length == 6 + 2
    continued = generate(model, expected[:, : length + 1], past_key_values=cache, compile_config=config, **REST)
    assert torch.equal(continued, expected)


@pytest.mark.simulator
def test_inside_of_graphs_a_mask_with_holes_is_never_taken_for_left_padding() -> None:
    """Nobody can look there: the device asserts it (on a GPU that ends the context)."""
    model = tiny_model("llama-gqa-wide", "vmmkv", "cpu")
    cache = vmm_cache(model.config, "cpu", compile=True)
    tokens = random_tokens(model, 2, 8)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        model(tokens[:, :7], attention_mask=mask[:, :7], past_key_values=cache)
        cache.get_mask_sizes(1, 0)
        mask[0, 3] = 0
        with inside_a_graph(), pytest.raises(RuntimeError, match="pad on the left"):
            model(tokens[:, 7:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("name", ["eager", "sdpa", None])
def test_other_attention_is_refused(name: str | None) -> None:
    """Inside of other models, too."""
    for config in (LlamaConfig(**DECODER), LlavaConfig(text_config=LlamaConfig(**DECODER))):
        config._attn_implementation = name
        with pytest.raises(vmmkv.ArgumentError, match=f"attn_implementation='?{name}.* without compile=True"):
            VmmCache(config, 100, compile=True)


@pytest.mark.parametrize("config", [MoshiConfig, ProphetNetConfig])
def test_models_whose_own_code_reads_whole_rows_are_refused(config: type[PreTrainedConfig]) -> None:
    with pytest.raises(vmmkv.UnsupportedError, match=f"compile=True for {config.model_type}"):
        VmmCache(config(attn_implementation="vmmkv"), 100, compile=True)


@pytest.mark.usefixtures("uncompiled")
def test_a_mask_without_the_window_of_its_layer_is_refused(device: str) -> None:
    """The layer gives back what lies before its window."""
    model = copy.deepcopy(tiny_model("mistral-wide", "vmmkv", device))
    tokens = random_tokens(model, 1, 13)
    cache = vmm_cache(model.config, device, compile=True)
    model.config.sliding_window = None
    with torch.no_grad():
        model(tokens[:, :12], past_key_values=cache)
        with pytest.raises(vmmkv.UnsupportedAttentionError, match="see other tokens than"):
            model(tokens[:, 12:], past_key_values=cache)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_without_kernels_nothing_is_compiled(name: str, device: str) -> None:
    """A warning says why; the model may be compiled by hand, but not captured."""
    model = shortened(tiny_model(name, "vmmkv", device))
    tokens, few = random_tokens(model, 2, 12), {"max_new_tokens": 4, "min_new_tokens": 4}
    expected = generate(model, tokens, **few)
    cache = vmm_cache(model.config, device, compile=True)
    step = torch.compile(model, backend="eager")
    with torch.no_grad():
        with pytest.warns(UserWarning, match="works uncompiled.*no kernels for K heads of 8, ") as caught:
            made = torch.cat([tokens, step(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)], 1)
        assert sum("works uncompiled" in str(warning.message) for warning in caught) == 1
        while made.shape[1] < expected.shape[1]:
            token = step(made[:, -1:], past_key_values=cache).logits[:, -1:].argmax(-1)
            made = torch.cat([made, token], 1)
    assert torch.equal(made, expected)
    assert not cache.is_compileable
    cache.reset()
    assert torch.equal(generate(model, tokens, past_key_values=cache, **few), expected)
    assert not counters["inductor"]
