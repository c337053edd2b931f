"""`VmmCache` against `DynamicCache`: the same tokens and logits, and memory only where tokens are.

Pages on the CPU are 4 KiB and hold a few tokens; an access outside of them kills the process, which is the point.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from faulty import FaultyDriver
from tiny_models import DECODER, MODELS, VOCABULARY, WINDOW, skip_unsupported, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, EncoderDecoderCache, LlamaConfig, PreTrainedConfig, PreTrainedModel

import vmmkv
from vmmkv.integrations.transformers import VmmCache

ATTENTIONS = ["eager", "sdpa", "flex_attention"]
LENGTHS = {"max_new_tokens": 24, "min_new_tokens": 24}
SEQ2SEQ = ["bart", "t5"]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """FlexAttention compiles a kernel per stride; the same arithmetic runs uncompiled in a tenth of a second."""
    with torch.compiler.set_stance("force_eager"):
        yield


def vmm_cache(config: PreTrainedConfig, device: str, max_seq_len: int = 200, **kwargs: int) -> VmmCache:
    return VmmCache(config, max_seq_len, page_size=4096 if device == "cpu" else None, **kwargs)


def caches(model: PreTrainedModel) -> list[Cache]:
    """A `DynamicCache` and a `VmmCache` for a model."""
    makers: list[Callable[[], Cache]] = [
        lambda: DynamicCache(config=model.config),
        lambda: vmm_cache(model.config, model.device.type),
    ]
    if model.config.is_encoder_decoder:
        return [EncoderDecoderCache(make(), make()) for make in makers]
    return [make() for make in makers]


def random_tokens(model: PreTrainedModel, *shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator).to(model.device)


def left_padding(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask that pads the first sequence by a half, the second by two, others not."""
    mask = torch.ones_like(tokens)
    mask[0, : tokens.shape[1] // 2] = 0
    mask[1, :2] = 0
    return mask


def check_same_generation(model: PreTrainedModel, tokens: torch.Tensor, **kwargs: object) -> Cache:
    """Generates with both caches, compares, and returns the `VmmCache`."""
    kwargs = {"attention_mask": torch.ones_like(tokens), "do_sample": False, **LENGTHS, **kwargs}
    outputs = []
    for cache in caches(model):
        torch.manual_seed(7)
        outputs.append(
            model.generate(
                tokens, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **kwargs
            )
        )
    reference, output = outputs
    assert output.past_key_values is cache
    assert torch.equal(output.sequences, reference.sequences)
    assert len(output.logits) == len(reference.logits)
    for logits, expected in zip(output.logits, reference.logits):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    return cache


def driver_calls(cache: VmmCache) -> int:
    return sum(call.count for kv in cache.kv_caches for call in kv.stats().driver_calls.values())


def used_pages(cache: VmmCache) -> int:
    return sum(kv.stats().pages["used"] for kv in cache.kv_caches)


# ---------------------------------------------------------------------- parity of generate()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy(name: str, attention: str, device: str) -> None:
    skip_unsupported(name, attention, device)
    model = tiny_model(name, attention, device)
    check_same_generation(model, random_tokens(model, 3, 12))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SEQ2SEQ])
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


SPECULATIVE = ["llama-gqa", "mistral", "gemma3", "gemma4", "deepseek-v3", "qwen3-next"]


@pytest.mark.parametrize("name", SPECULATIVE)
def test_prompt_lookup(name: str, device: str) -> None:
    """Tokens are proposed from the prompt, and those that the model refuses are cropped."""
    model = tiny_model(name, "sdpa", device)
    prompt = random_tokens(model, 1, 5).repeat(1, 3)
    check_same_generation(model, prompt, prompt_lookup_num_tokens=4)


@pytest.mark.parametrize("name", SPECULATIVE)
def test_assistant_model(name: str, device: str) -> None:
    model, assistant = (tiny_model(name, "sdpa", device, seed) for seed in (0, 1))
    assistant.generation_config.num_assistant_tokens = 4
    check_same_generation(model, random_tokens(model, 1, 12), assistant_model=assistant)


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


def test_compiled_flex_attention(device: str) -> None:
    """Its kernel is made for the strides that it sees."""
    with torch.compiler.set_stance("default"):
        model = tiny_model("llama-gqa", "flex_attention", device)
        check_same_generation(model, random_tokens(model, 2, 12), max_new_tokens=3, min_new_tokens=3)


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
    """Full attention and windows in turn."""
    return tiny_model("gemma3", "eager", "cpu").config


def random_kv(device: str, rows: int, tokens: int, heads: int = 2, head_dim: int = 8) -> tuple[torch.Tensor, ...]:
    """K and V as attention modules make them: V is a transposed view."""
    k = torch.randn(rows, heads, tokens, head_dim, device=device)
    v = torch.randn(rows, tokens, heads, head_dim, device=device).transpose(1, 2)
    return k, v


def check_same_state(cache: Cache, reference: Cache) -> None:
    assert cache.get_seq_length() == reference.get_seq_length()
    for index, (layer, expected) in enumerate(zip(cache.layers, reference.layers)):
        assert cache.get_mask_sizes(3, index) == reference.get_mask_sizes(3, index)
        if expected.get_seq_length():
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)
        else:
            assert layer.keys is None or not layer.keys.numel()


def update_both(cache: Cache, reference: Cache, device: str, rows: int, tokens: int) -> None:
    """One forward pass: what attention is given must be the same, and as many tokens as the mask has."""
    for index in range(len(cache.layers)):
        kv = random_kv(device, rows, tokens)
        kv_length, _ = cache.get_mask_sizes(tokens, index)
        for states, expected in zip(cache.update(*kv, index), reference.update(*kv, index)):
            assert states.shape[-2] == kv_length
            assert torch.equal(states, expected[:, :, -kv_length:])  # 5.17 gives more while it records


@pytest.mark.parametrize("seed", range(6))
def test_random_operations(seed: int, device: str, mixed_config: PreTrainedConfig) -> None:
    random = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    cache, reference = vmm_cache(mixed_config, device, max_batch_size=8), DynamicCache(config=mixed_config)
    rows, recording = pick(1, 3), False
    for _ in range(60):
        length = reference.get_seq_length()
        operation = pick(0, 9)
        if operation == 0 or length > 150:
            for each in (cache, reference):
                each.reset()
            if reference.get_seq_length():  # 5.17 keeps the length
                reference = DynamicCache(config=mixed_config)
                if recording:
                    reference.activate_past_recording()
            rows = pick(1, 3)
        elif operation == 1:
            recording = True
            for each in (cache, reference):
                each.activate_past_recording()
        elif operation == 2 and length and (recording or length < WINDOW):
            count = pick(0, min(3, length - 1))
            for each in (cache, reference):
                each.crop(-count)
            # Only what was recorded since the last crop may be cropped: go on from there.
        elif operation == 3 and length:
            indices = torch.randint(rows, (rows,), generator=random).to(device)
            for each in (cache, reference):
                each.reorder_cache(indices)
        elif operation == 4 and length and rows <= 4:
            for each in (cache, reference):
                each.batch_repeat_interleave(2)
            rows *= 2
        elif operation == 5 and length and rows > 1:
            indices = torch.randperm(rows, generator=random)[: pick(1, rows)].to(device)
            for each in (cache, reference):
                each.batch_select_indices(indices)
            rows = len(indices)
        elif operation == 6 and length:
            cache, reference = copy.deepcopy(cache), copy.deepcopy(reference)
        else:
            update_both(cache, reference, device, rows, pick(1, 12))
        check_same_state(cache, reference)
        for kv in cache.kv_caches:
            kv.check()
