"""`VmmCache(kv_dtype=...)` against a `DynamicCache` of K and V that were rounded to 8 bits and back, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import ROUNDS, each_with_few
from generation import PAGE_SIZE, left_padding, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.batching import answer, config, without_kernels
from tiny_models import DECODER, MIXED, tiny_model
from transformers import Cache, DynamicCache, EncoderDecoderCache, Gemma3TextConfig, LlamaConfig

import vmmkv
from vmmkv.integrations import attention, row_writes
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations import states as kept_states
from vmmkv.integrations.batching import packed
from vmmkv.integrations.batching.packed import Kept, Packed
from vmmkv.integrations.row_writes import RowWriter
from vmmkv.integrations.states import ScaledStates
from vmmkv.integrations.transformers import VmmCache
from vmmkv.kernels.quantized import dequantize, quantize
from vmmkv.layout import KV_DTYPES

MODES = [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}]


def rounded(states: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    return dequantize(*quantize(states, KV_DTYPES[kv_dtype]), states.dtype)


class RoundingCache(DynamicCache):
    """What comes first attends to itself as it is, unless `always`, and what comes later to what was rounded."""

    def __init__(self, config: Any, kv_dtype: str, always: bool = False) -> None:
        super().__init__(config=config)
        self.config, self.kv_dtype, self.always = config, kv_dtype, always

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        is_alone = not (self.always or self.get_seq_length(layer_idx))
        attended = super().update(rounded(keys, self.kv_dtype), rounded(values, self.kv_dtype), layer_idx)
        return (keys, values) if is_alone else attended


def pair(config: Any, kv_dtype: str, page_size: int = 4096) -> list[Cache]:
    return [VmmCache(config, 400, page_size=page_size, kv_dtype=kv_dtype), RoundingCache(config, kv_dtype)]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kept_states, "PIECE", 300)  # so that most is rounded in several
    with torch.compiler.set_stance("force_eager"):
        yield


# ---------------------------------------------------------------------- what caches give to attention


def forward(rows: int, tokens: int, dtype: torch.dtype, *caches: Cache) -> None:
    for index in range(len(caches[0].layers)):
        k, v = torch.randn(2, rows, 2, tokens, 24).mul(torch.randn(24).exp()).to(dtype)
        found, expected = [cache.update(k, v, index) for cache in caches]
        assert all(map(torch.equal, found, expected))
        assert [states.dtype for states in found] == [dtype] * 2
        assert isinstance(found[0], ScaledStates) <= (caches[1].config._attn_implementation == "vmmkv")


def selections(random: Random, rows: int) -> list[int]:
    return [random.randrange(rows) for _ in range(random.randint(1, 5))]


@settings(max_examples=20 * ROUNDS)
@given(
    seed=st.integers(0, 2**32), kv_dtype=st.sampled_from([*KV_DTYPES]), dtype=st.sampled_from(["float32", "bfloat16"])
)
def test_any_operations_in_any_order(seed: int, kv_dtype: str, dtype: str) -> None:
    """Caches grow, are cropped, reordered, repeated, cut, copied, and go on; those that were copied as well."""
    random = Random(seed)
    windows = random.random() < 0.3
    config = Gemma3TextConfig(**DECODER, **MIXED) if windows else LlamaConfig(**DECODER)
    config._attn_implementation = random.choice(["vmmkv", "flex_attention"])
    family = [pair(config, kv_dtype)]
    for _ in range(8 * ROUNDS):
        index = random.randrange(len(family))
        caches = family[index]
        rows = caches[0].layers[0].rows
        what = random.choice(["grow"] * 4 + ["crop", "reorder", "repeat", "select", "copy", "reset"])
        if what == "grow" or not rows:
            forward(rows or random.randint(1, 3), random.choice([1, 1, 2, 9, 30]), getattr(torch, dtype), *caches)
        elif what == "crop" and not windows:
            tokens = random.randint(1, 12)
            for cache in caches:
                cache.crop(-min(tokens, cache.get_seq_length() - 1))
        elif what == "reorder":
            order = torch.tensor([random.randrange(rows) for _ in range(rows)])
            for cache in caches:
                cache.reorder_cache(order)
        elif what == "repeat" and rows < 4:
            for cache in caches:
                cache.batch_repeat_interleave(2)
        elif what == "select":
            chosen = torch.tensor(selections(random, rows))
            for cache in caches:
                cache.batch_select_indices(chosen)
        elif what == "copy" and len(family) < 4:
            family.append([copy.deepcopy(cache) for cache in caches])
        elif what == "reset":
            caches[0].reset()
            caches[1] = RoundingCache(config, kv_dtype)
    for caches in family:
        rows = caches[0].layers[0].rows
        forward(rows or 1, 1, getattr(torch, dtype), *caches)


# ---------------------------------------------------------------------- what models make of it


@pytest.mark.few(8)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "deepseek-v3", "bart"])
def test_generation(name: str, kv_dtype: str, mode: dict, device: str) -> None:
    """Of beams, and of drafts that are refused; models whose K differ from V in width, and that read `keys` again."""
    model = tiny_model(name, "sdpa", device)
    tokens = random_tokens(model, 1, 9).repeat(1, 3)
    page_size, outputs = PAGE_SIZE[device], []
    caches, others = zip(*(pair(model.config, kv_dtype, page_size=page_size) for _ in range(2)))
    for cache in (caches, others):
        arguments = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": 12}
        cache = EncoderDecoderCache(*cache) if model.config.is_encoder_decoder else cache[0]
        outputs.append(model.generate(tokens, past_key_values=cache, min_new_tokens=12, **arguments, **mode))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "length", "rows"), [("fp8", torch.float32, 4, 2), ("int8", torch.bfloat16, 12, 1)], ids=str
)
@pytest.mark.simulator
def test_kernels_read_what_is_kept(
    kv_dtype: str, dtype: torch.dtype, length: int, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, and many tokens, or a few, behind left padding: the same logits as with eager attention to what was
    rounded."""
    monkeypatch.setattr(attention, "_attend_without_kernels", None)  # whoever calls it fails
    tokens = random_tokens(tiny_model("llama-gqa-wide", "eager", device), 2, length)
    tokens, mask = tokens[-rows:], left_padding(tokens)[-rows:]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = []
    for number, name in enumerate(("vmmkv", "eager")):
        model = copy.deepcopy(tiny_model("llama-gqa-wide", name, device)).to(dtype)
        cache = pair(model.config, kv_dtype, PAGE_SIZE[device])[number]
        for chunk in (slice(0, 3), slice(3, length)):
            given = {"attention_mask": mask[:, : chunk.stop], "position_ids": positions[:, chunk]}
            with torch.no_grad():
                output = model(tokens[:, chunk], past_key_values=cache, **given)
        logits.append(output.logits[mask[:, chunk].bool()].float())
    tolerance = 2e-3 if dtype is torch.float32 else 5e-2
    assert (logits[0] - logits[1]).norm() <= tolerance * logits[1].norm()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.simulator
def test_the_kernel_writes_the_same_bits(kv_dtype: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token each, twice, and of several; heads of 24 it leaves to torch."""
    monkeypatch.setattr(row_writes, "can_append", lambda keys, values: True)
    row_numbers, starts = torch.tensor([[2, 0], [1, 7]], dtype=torch.int32, device=device)
    for head_dim in (64, 24):
        k_rows, v_rows = (torch.zeros(3, 50, 2, head_dim, device=device).to(KV_DTYPES[kv_dtype]) for _ in range(2))
        scales = torch.zeros(2, 3, 50, 2, device=device)
        writer = RowWriter(k_rows, v_rows, row_numbers, *scales)
        for tokens in (1, 1, 5):
            keys, values = torch.randn(2, 2, 2, tokens, head_dim, device=device).to(torch.bfloat16)
            assert writer.write(keys, values, starts) == (head_dim == 64)
            if head_dim == 24:
                continue
            for states, numbers, scale in ((keys, k_rows, scales[0]), (values, v_rows, scales[1])):
                expected = quantize(states, numbers.dtype)
                for sequence, (row, start) in enumerate(zip(row_numbers.tolist(), starts.tolist())):
                    there = slice(start, start + tokens)
                    assert torch.equal(numbers[row, there].float(), expected[0][sequence].transpose(0, 1).float())
                    assert torch.equal(scale[row, there], expected[1][sequence].transpose(0, 1))


# ---------------------------------------------------------------------- continuous batching


def batched(
    name: str, kv_dtype: str, prompts: list[list[int]], new: int, max_batch_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """What continuous batching makes of prompts, twice, the second time with what is known of the first; and what
    `generate` makes of them, of those where that is clear."""
    model = tiny_model(name, "eager", "cpu")
    found = [answer(model, prompt, new, RoundingCache(model.config, kv_dtype, always=True)) for prompt in prompts]
    expected = [each for each in found if each]
    pool = vmmkv.FramePool(200 * 4096, device="cpu", page_size=4096)
    rows.enable(model, pool=pool, max_seq_len=100, kv_dtype=kv_dtype)
    try:
        options = config(max_batch_tokens=max_batch_tokens)
        options["generation_config"].max_new_tokens = new
        results = model.generate_batch([each.prompt for each in expected] * 2, **options)
    finally:
        rows.disable(model)
    return [result.generated_tokens for result in results.values()], [each.tokens for each in expected] * 2


@pytest.mark.parametrize(("name", "kv_dtype"), each_with_few(1, ["llama-gqa", "gemma3", "gpt-oss"], KV_DTYPES))
def test_continuous_batching(name: str, kv_dtype: str) -> None:
    """Prompts in chunks, beside decode, with beginnings that are known, windows and sinks: every token attends to what
    is kept."""
    begin, *ends = (random_tokens(tiny_model(name, "eager", "cpu"), 30, seed=seed).tolist() for seed in range(6))
    with without_kernels():
        found, expected = batched(name, kv_dtype, [begin + end[: 3 * i] for i, end in enumerate(ends, 1)], 12, 32)
    assert expected
    assert found == expected


@pytest.mark.parametrize("prompts", [True, False], ids=["mixed", "decode"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.simulator
def test_kernels_of_continuous_batching(kv_dtype: str, prompts: bool, device: str) -> None:
    """They keep the bits that torch keeps, and attend to them."""
    news, starts, numbers = [2, 1] if prompts else [1, 1], [3, 6], [1, 0]
    indices = torch.tensor([[0, news[0], sum(news)], [*numbers, 0], [*starts, 0]], dtype=torch.int32, device=device)
    cu_seqlens, row_numbers, starts_there = indices[0], indices[1, :2], indices[2, :2]
    lengths = starts_there + cu_seqlens.diff()
    batch = Packed(cu_seqlens, row_numbers, starts_there, lengths, max_prompts=int(prompts))
    made = torch.randn(2, 2, 9, 1, 64, device=device)
    found = []
    query, *new = (torch.randn(sum(news), heads, 64, device=device).bfloat16() for heads in (2, 1, 1))
    for patched in (False, True):
        (k, k_scales), (v, v_scales) = (quantize(states, KV_DTYPES[kv_dtype]) for states in made)
        kept = Kept(k, v, k_scales, v_scales)
        with patch.object(packed, "kernels_take", return_value=False) if patched else nullcontext():
            packed.write(*new, kept, batch)
            found.append((kept, packed.attend(query, kept, batch, scale=0.3).float()))
    (kept, output), (others, expected) = found
    assert all(torch.equal(of.float(), other.float()) for of, other in zip(kept, others))
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)


# ---------------------------------------------------------------------- what is refused


def test_what_is_not_supported_is_refused_by_name() -> None:
    config = LlamaConfig(**DECODER)
    with pytest.raises(vmmkv.DtypeError, match=r"kv_dtype='fp4'.*'fp8', 'int8'"):
        VmmCache(config, 400, kv_dtype="fp4")
    with pytest.raises(vmmkv.UnsupportedError, match="kv_dtype='int8' with compile=True"):
        VmmCache(config, 400, kv_dtype="int8", compile=True)
    with pytest.raises(vmmkv.DtypeError, match="kv_dtype='fp4'"):
        rows.enable(tiny_model("llama-gqa", "eager", "cpu"), kv_dtype="fp4")
    cache, _ = pair(config, "fp8")
    with pytest.raises(vmmkv.DtypeError, match=r"torch\.int8 to keep as torch\.float8_e4m3fn"):
        cache.update(*torch.ones(2, 1, 2, 3, 16, dtype=torch.int8), 0)
    assert cache.get_seq_length() == 0
    forward(1, 3, torch.float32, cache, RoundingCache(config, "fp8"))
    with pytest.raises(AttributeError):
        cache.layers[0].keys = torch.zeros(1, 2, 3, 24)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_are_not_taken_for_what_is_kept(kv_dtype: str) -> None:
    """Whatever reads K and V of 8 bits reads what they stand for; nobody writes to a copy unawares."""
    cache, reference = pair(LlamaConfig(**DECODER), kv_dtype)
    forward(2, 9, torch.float16, cache, reference)
    states, expected = cache.layers[1].keys, reference.layers[1].keys
    assert isinstance(states, ScaledStates)
    assert (states.shape, states.dtype) == (expected.shape, expected.dtype)
    for read in (torch.clone, lambda of: of.transpose(2, 3) @ of, lambda of: torch.cat([of, of[:, :, 1:]], 2)):
        assert type(read(states)) is torch.Tensor
        assert torch.equal(read(states), read(expected))
    for write in (
        torch.Tensor.zero_,
        lambda of: of.index_copy_(2, torch.tensor([0]), torch.zeros(2, 2, 1, 24).half()),
        lambda of: torch.add(expected, 1, out=of),
        lambda of: torch._foreach_zero_([of]),
        lambda of: of.__setitem__((0, 0, slice(2)), 0.5),
        lambda of: of.data.__setitem__(0, expected[0]),
        lambda of: of.data_ptr(),
        torch.from_dlpack,
    ):
        with pytest.raises(vmmkv.UnsupportedError, match="8 bits"):
            write(states)
    assert torch.equal(states, expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_same_memory_holds_nearly_twice_the_tokens(kv_dtype: str) -> None:
    """Scales included, of heads of 128 in bf16; pages take as many more."""
    config = LlamaConfig(**{**DECODER, "num_hidden_layers": 2, "head_dim": 128, "num_key_value_heads": 8})
    used = []
    for chosen in (None, kv_dtype):
        cache = VmmCache(config, 4000, page_size=4096, kv_dtype=chosen)
        for layer in range(2):
            cache.update(*torch.zeros(2, 1, 8, 300, 128, dtype=torch.bfloat16), layer)
        (kv_cache,) = cache.kv_caches
        used.append(kv_cache.stats().pages["used"])
    assert used[0] >= 1.9 * used[1]
