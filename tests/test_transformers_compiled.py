"""`VmmCache(compile=True)`: the length is data on the device, and one compiled forward pass serves every length."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from generation import (
    LENGTHS,
    NEW,
    PAGE_SIZE,
    _reference_kernels,  # noqa: F401  # a fixture
    caches,
    check_same_generation,
    driver_calls,
    inside_a_graph,
    left_padding,
    random_tokens,
    vmm_cache,
)
from tiny_models import DECODER, ENCODER_DECODER, MODELS, WIDE_MODELS, WINDOW, tiny_model
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
from vmmkv.integrations.attention import kernels_take
from vmmkv.integrations.states import WholeRows
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


@pytest.fixture
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def compile_config(model: PreTrainedModel, backend: str = "eager") -> CompileConfig:
    """What `generate` is to compile with: on a GPU as it does by itself, with CUDA graphs, but as one graph."""
    if model.device.type == "cuda":
        return CompileConfig(fullgraph=True)
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def generate(model: PreTrainedModel, tokens: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return model.generate(tokens, do_sample=False, **{**LENGTHS, **kwargs})


def check_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.few(5)
@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("name", [*MODELS, *WIDE_MODELS])
def test_uncompiled(name: str, device: str) -> None:
    """Behind left padding, with kernels for all layers, for some, or for none."""
    model = tiny_model(name, "vmmkv", device)
    tokens = random_tokens(model, 3, 12)
    mask = torch.ones_like(tokens) if name in SEQ2SEQ else left_padding(tokens)
    check_same_generation(model, tokens, compile=True, attention_mask=mask)


@pytest.mark.few(5)
@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("name", ["llama-gqa-wide", "gemma3-wide", "gemma4"])
@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 4},
        {"prefill_chunk_size": 5},
    ],
    ids=str,
)
def test_modes(name: str, mode: dict, device: str) -> None:
    model = tiny_model(name, "vmmkv", device)
    check_same_generation(model, random_tokens(model, 2, 12), compile=True, **mode)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("name", ["llama-gqa-wide", "gemma3-wide"])
def test_turns_and_copies(name: str, device: str) -> None:
    model = tiny_model(name, "vmmkv", device)
    conversations = []
    for cache in caches(model, compile=True):
        tokens = random_tokens(model, 2, 6)
        for turn in range(3):
            tokens = generate(model, tokens, past_key_values=cache, attention_mask=torch.ones_like(tokens))
            tokens = torch.cat([tokens, random_tokens(model, 2, 9, seed=turn)], dim=1)
            cache = copy.deepcopy(cache)
        conversations.append(tokens)
    assert torch.equal(*conversations)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("name", ["llama-gqa-wide", "mistral-wide"])
def test_a_mask_without_kernels_reads_live_tokens_only(name: str, device: str) -> None:
    """SDPA cannot know where rows have no memory, or, behind a window, none any more."""
    model = tiny_model(name, "vmmkv", device)
    tokens = random_tokens(model, 2, 60)
    mask = torch.ones_like(tokens)
    mask[:, ::5] = 0
    expected, logits = [], []
    for cache, results in zip(caches(model, compile=True), (expected, logits)):
        for start in range(0, 60, 20):
            seen = slice(start, start + 20)
            with torch.no_grad():
                output = model(tokens[:, seen], attention_mask=mask[:, : seen.stop], past_key_values=cache)
            results.append(output.logits[mask[:, seen].bool()])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_uncompiled")
def test_a_wrong_guess_of_the_shape_does_no_harm(device: str) -> None:
    """The kernels could take what is announced, but not what comes."""
    model = tiny_model("llama-gqa", "vmmkv", device)
    tokens = random_tokens(model, 2, 12)
    cache = vmm_cache(model.config, device, compile=True)
    cache.early_initialization(2, 2, 64, torch.float32, torch.device(device))
    assert torch.equal(generate(model, tokens, past_key_values=cache), generate(model, tokens))


@pytest.mark.parametrize("modes", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)])
@pytest.mark.usefixtures("_uncompiled")
def test_no_grad_and_inference_mode_in_either_order(modes, device: str) -> None:
    model = tiny_model("gemma3-wide", "vmmkv", device)
    generated = []
    for cache in caches(model, compile=True):
        tokens = random_tokens(model, 2, 6)
        for mode in (*modes, *modes):
            with mode():
                logits = model(tokens, past_key_values=cache).logits
                cache = copy.deepcopy(cache)
                tokens = logits[:, -3:].argmax(-1)
        generated.append(logits.clone())
    torch.testing.assert_close(*generated, atol=1e-4, rtol=1e-4)


@pytest.mark.few(3)
@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("name", ["llama-gqa-wide", "gemma3-wide", "gemma4", *SEQ2SEQ])
def test_assisted_generation(name: str, device: str) -> None:
    """Tokens are proposed from the prompt, or by another model, and those that the model refuses are cropped."""
    model, assistant = tiny_model(name, "vmmkv", device), tiny_model(name, "sdpa", device, seed=1)
    assistant.generation_config.num_assistant_tokens = 4
    check_same_generation(model, random_tokens(model, 1, 12), compile=True, assistant_model=assistant)
    prompt = random_tokens(model, 1, 5).repeat(1, 3)
    check_same_generation(model, prompt, compile=True, prompt_lookup_num_tokens=4)


@pytest.mark.usefixtures("_uncompiled")
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


@pytest.mark.usefixtures("_uncompiled")
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


@pytest.mark.usefixtures("_uncompiled")
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


def holes(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask that no kernel takes."""
    return (torch.arange(tokens.shape[1], device=tokens.device) % 5 > 0).long().expand_as(tokens)


# ---------------------------------------------------------------------- parity of the cache's own operations


def random_kv(device: str, rows: int, tokens: int, width: int = 64) -> list[torch.Tensor]:
    """K and V, whose heads the kernels take if they are 64 wide; four tokens of two layers fill a page then."""
    return [torch.randn(rows, PAGE_SIZE[device] // 4096, tokens, width, device=device) for _ in "kv"]


class Pair:
    """A cache and what it must be equal to. Of its layers some never write, others write an image now and then.

    A pass gives each of the other layers `tokens`, of heads of some `width`.
    """

    def __init__(self, compile: bool, width: int, device: str, random: np.random.Generator, recording: bool) -> None:
        self.config = tiny_model("gemma3", "vmmkv", "cpu").config
        self.width, self.device, self.random, self.recording = width, device, random, recording
        self.has_whole_rows = compile and kernels_take(*random_kv(device, 1, 1, width))
        self.cache = vmm_cache(self.config, device, max_batch_size=8, compile=compile)
        self.reset()

    def reset(self) -> None:
        self.cache.reset()
        self.reference = DynamicCache(config=self.config)  # 5.17 zeroes it, but keeps its length
        self.rows, self.newest = int(self.random.integers(1, 4)), 0
        kinds = self.random.permutation(["text", "text", "image", "silent"])
        windows = [kind == "sliding_attention" for kind in self.config.layer_types]
        self.layers: dict[str, list[int]] = {"text": [], "image": [], "silent": []}
        for index, (kind, is_window) in enumerate(zip(kinds, windows)):
            self.layers["text" if self.recording or (is_window and kind == "image") else kind].append(index)
        for each in (self.cache, self.reference) if self.recording else ():
            each.activate_past_recording()

    @property
    def length(self) -> int:
        return self.reference.get_seq_length(self.layers["text"][0])

    def forward(self, tokens: int, *, is_asked: bool, graph: bool = False) -> None:
        order, before = self.layers["text"], self.length
        is_whole = self.has_whole_rows and before > 0 and (is_asked or graph)
        if is_asked:
            for _ in range(self.random.integers(1, 3)):
                sizes = self.cache.get_mask_sizes(tokens, int(self.random.choice(order)))
                assert (sizes == (200, 0)) == (self.has_whole_rows and before > 0)
        with inside_a_graph() if graph else nullcontext():
            for index in order:
                self.update(index, tokens, is_whole)
        if self.layers["image"] and not graph and self.random.random() < 0.3 and self.length < 100:
            for index in self.layers["image"]:
                self.update(index, 13, is_whole=False)
        self.newest += tokens

    def update(self, index: int, tokens: int, is_whole: bool) -> None:
        kv = random_kv(self.device, self.rows, tokens, self.width)
        visible, _ = self.reference.get_mask_sizes(tokens, index)
        states, expected = self.cache.update(*kv, index), self.reference.update(*kv, index)
        end = self.reference.get_seq_length(index)
        for got, want in zip(states, expected):
            assert got.shape[2] == (200 if is_whole else visible)
            assert isinstance(got, WholeRows) == is_whole
            live = got.states[:, :, end - visible : end] if is_whole else got
            assert torch.equal(live, want[:, :, -visible:])  # 5.17 gives more while it records

    def check(self) -> None:
        for index, (layer, expected) in enumerate(zip(self.cache.layers, self.reference.layers)):
            assert self.cache.get_seq_length(index) == self.reference.get_seq_length(index)
            if self.reference.get_seq_length(index):
                assert torch.equal(layer.keys, expected.keys)
                assert torch.equal(layer.values, expected.values)
            else:
                assert layer.keys is layer.values is None
        for kv_cache in self.cache.kv_caches:
            kv_cache.check()

    def both(self, name: str, *arguments: object) -> None:
        for each in (self.cache, self.reference):
            getattr(each, name)(*arguments)


@pytest.mark.few(8)
@pytest.mark.parametrize(("compile", "width"), [(False, 64), (True, 64), (True, 8)])
@pytest.mark.parametrize("seed", range(6))
def test_random_operations(seed: int, compile: bool, width: int, device: str) -> None:
    """Some of the layers, with and without a mask, in graphs and outside of them; copies hold what they held."""
    random = np.random.default_rng(seed)
    pair = Pair(compile, width, device, random, recording=seed % 3 == 0)
    looking, others = seed % 2 == 0, []
    operations = ["forward"] * 3 + ["ask", "crop", "reorder", "repeat", "select", "copy"]
    operations += ["graph"] * 4 if pair.has_whole_rows else []
    for _ in range(60):
        operation, tokens = random.choice([*operations, "reset"]), int(random.integers(1, 13))
        if operation == "reset" or pair.length > 150:
            pair.reset()
        elif operation == "forward" or not pair.length:
            pair.forward(tokens, is_asked=bool(random.integers(2)))
        elif operation == "graph":
            pair.forward(tokens, is_asked=True, graph=True)
        elif operation == "ask":
            pair.cache.get_mask_sizes(tokens, pair.layers["text"][0])
            pair.cache.get_mask_sizes(tokens + 1, pair.layers["text"][0])  # so that no pass that comes was asked for
            pair.cache.get_mask_sizes(40, pair.layers["text"][0])
        elif operation == "crop" and pair.recording:
            pair.both("crop", -int(random.integers(0, pair.newest + 1)))
            pair.newest = 0
        elif operation == "reorder":
            pair.both("reorder_cache", torch.from_numpy(random.integers(0, pair.rows, pair.rows)).to(device))
        elif operation == "repeat" and pair.rows <= 4:
            pair.both("batch_repeat_interleave", 2)
            pair.rows *= 2
        elif operation == "select":
            kept = random.permutation(pair.rows)[: random.integers(1, pair.rows + 1)]
            pair.both("batch_select_indices", torch.from_numpy(kept).to(device))
            pair.rows = len(kept)
        elif operation == "copy":
            others = [*others[-5:], copy.copy(pair)]
            pair.cache, pair.reference = copy.deepcopy(pair.cache), copy.deepcopy(pair.reference)
            if random.integers(2):
                pair, others[-1] = others[-1], pair
        if looking:
            pair.check()
    for each in (pair, *others):
        each.check()


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
def test_layers_of_different_shapes(device: str) -> None:
    """What a prompt has told of the last layer is where the graph finds the first."""
    config = LlamaConfig(**DECODER, attn_implementation="vmmkv")
    cache, reference = vmm_cache(config, device, compile=True), DynamicCache(config=config)

    def forward(kv: list[torch.Tensor]) -> list[torch.Tensor]:
        return [states for index, (k, v) in enumerate(kv) for states in cache.update(k, v, index)]

    step = torch.compile(forward, backend="eager", fullgraph=True)
    for length, tokens in enumerate([10, 1, 1], start=10):
        kv = [torch.randn(2, 2, heads, tokens, 64, device=device) for heads in (2, 2, 6, 4)]
        expected = [states for index, (k, v) in enumerate(kv) for states in reference.update(k, v, index)]
        if tokens == 1:
            cache.get_mask_sizes(1, 0)
        for states, reference_states in zip((forward if tokens > 1 else step)(kv), expected):
            assert torch.equal(states.states[:, :, :length] if tokens == 1 else states, reference_states)


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


# ---------------------------------------------------------------------- memory


def used_pages(cache: vmmkv.KVCache) -> int:
    return sum(kv_cache.stats().pages["used"] for kv_cache in cache.kv_caches)


@pytest.mark.usefixtures("_uncompiled")
def test_pages_come_with_tokens(device: str) -> None:
    model = tiny_model("llama-gqa-wide", "vmmkv", device)
    cache = vmm_cache(model.config, device, 2000, compile=True, lookahead=0)
    with torch.no_grad():
        model(random_tokens(model, 2, 5), past_key_values=cache)
        for length in range(6, 30):
            model(random_tokens(model, 2, 1), past_key_values=cache)
            (kv_cache,) = cache.kv_caches
            assert used_pages(cache) == 2 * -(-length * kv_cache.layout.token_bytes // kv_cache.page_size)
            kv_cache.check()


@pytest.mark.gpu
def test_windows_give_pages_back() -> None:
    model = tiny_model("mistral-wide", "vmmkv", "cuda")
    cache = vmm_cache(model.config, "cuda", 200_000, compile=True)
    with torch.no_grad():
        for _ in range(6):
            model(random_tokens(model, 1, 4000), past_key_values=cache)
    (kv_cache,) = cache.kv_caches
    tokens_of_a_page = kv_cache.page_size // kv_cache.layout.token_bytes
    assert used_pages(cache) <= -(-(4000 + WINDOW) // tokens_of_a_page) + 1


@pytest.mark.usefixtures("_uncompiled")
def test_a_second_generation_maps_nothing(device: str) -> None:
    model = tiny_model("llama-gqa-wide", "vmmkv", device)
    tokens = random_tokens(model, 3, 12)
    cache = check_same_generation(model, tokens, compile=True)
    before = driver_calls(cache)
    for rows in (3, 1, 2):
        cache.reset()
        assert used_pages(cache) == 0
        assert torch.equal(generate(model, tokens[:rows], past_key_values=cache), generate(model, tokens[:rows]))
    assert driver_calls(cache) == before


# ---------------------------------------------------------------------- errors


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


@pytest.mark.usefixtures("_uncompiled")
def test_the_longest_sequence_and_no_more(device: str) -> None:
    model = tiny_model("llama-gqa-wide", "vmmkv", device)
    cache = vmm_cache(model.config, device, 20, compile=True)
    with torch.no_grad():
        for tokens in (12, 7, 1):
            model(random_tokens(model, 2, tokens), past_key_values=cache)
        with pytest.raises(vmmkv.SequenceTooLongError, match=r"21 tokens.*max_seq_len=20"):
            model(random_tokens(model, 2, 1), past_key_values=cache)
    assert cache.get_seq_length() == 20


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("compile", [False, True])
def test_a_decode_step_with_another_mask_than_left_padding(compile: bool, device: str) -> None:
    """Holes, padding on the right, too short a mask: SDPA runs, with what is left."""
    model, eager = (tiny_model("llama-gqa-wide", attention, device) for attention in ("vmmkv", "eager"))
    tokens = random_tokens(model, 2, 10)
    masks = [torch.ones_like(tokens) for _ in range(3)]
    masks[0][0, 4], masks[1][1, 9], masks[2] = 0, 0, masks[2][:, :6]
    for mask in masks:
        logits = []
        for each, cache in (
            (eager, DynamicCache(config=eager.config)),
            (model, vmm_cache(model.config, device, compile=compile)),
        ):
            with torch.no_grad():
                each(tokens[:, :9], past_key_values=cache)
                logits.append(each(tokens[:, 9:], attention_mask=mask, past_key_values=cache).logits)
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


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


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("compile", [False, True])
def test_an_interrupted_pass_is_told_of_with_any_mask(compile: bool, device: str) -> None:
    model = copy.deepcopy(tiny_model("mistral-wide", "vmmkv", device))
    tokens = random_tokens(model, 1, 10)
    cache = vmm_cache(model.config, device, compile=compile)

    def fail(*args: object) -> None:
        raise RuntimeError("in the middle")

    with torch.no_grad():
        model(tokens[:, :9], past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(tokens[:, 9:], past_key_values=cache)
        hook.remove()
        with pytest.raises((vmmkv.UnfinishedPassError, vmmkv.UnsupportedAttentionError)):
            model(tokens[:, 9:], attention_mask=torch.ones_like(tokens), past_key_values=cache)


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


@pytest.mark.usefixtures("_uncompiled")
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
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gemma4"])
def test_without_kernels_nothing_is_compiled(name: str, device: str) -> None:
    """A warning says why; the model may be compiled by hand, but not captured."""
    model = tiny_model(name, "vmmkv", device)
    tokens = random_tokens(model, 2, 12)
    expected = generate(model, tokens)
    cache = vmm_cache(model.config, device, compile=True)
    step, generated = torch.compile(model, backend="eager"), [tokens]
    with torch.no_grad():
        with pytest.warns(UserWarning, match="works uncompiled.*no kernels for heads of (8|16) ") as caught:
            logits = step(tokens, past_key_values=cache).logits
        assert sum("works uncompiled" in str(warning.message) for warning in caught) == 1
        for _ in range(NEW - 1):
            generated.append(logits[:, -1:].argmax(-1))
            logits = step(generated[-1], past_key_values=cache).logits
        generated.append(logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(generated, 1), expected)
    assert not cache.is_compileable
    cache.reset()
    assert torch.equal(generate(model, tokens, past_key_values=cache), expected)
    assert not counters["inductor"]
