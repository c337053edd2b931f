"""`VmmCache(kv_dtype=...)` against a `DynamicCache` of K and V that were rounded to 8 bits and back, bit for bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import each_with_few
from generation import PAGE_SIZE, RoundingCache, check_same_generation, left_padding, random_tokens
from generation import uncompiled as uncompiled
from parity.batching import answer, config, without_kernels
from tiny_models import DECODER, tiny_model
from transformers import Cache, EncoderDecoderCache, LlamaConfig

import vmmkv
from vmmkv.integrations import attention, row_writes
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching import attention as on_rows
from vmmkv.integrations.batching.attention import Kept, Packed
from vmmkv.integrations.row_writes import RowWriter
from vmmkv.integrations.stand_ins import ScaledStates
from vmmkv.integrations.transformers import VmmCache
from vmmkv.kernels.quantized import quantize
from vmmkv.layout import KV_DTYPES

pytestmark = pytest.mark.usefixtures("uncompiled")
MODES = [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}]


def pair(config: Any, kv_dtype: str, page_size: int = 4096) -> list[Cache]:
    return [VmmCache(config, 400, page_size=page_size, kv_dtype=kv_dtype), RoundingCache(config, kv_dtype)]


def forward(rows: int, tokens: int, dtype: torch.dtype, *caches: Cache) -> None:
    for index in range(len(caches[0].layers)):
        k, v = torch.randn(2, rows, 2, tokens, 24).to(dtype)
        found, expected = [cache.update(k, v, index) for cache in caches]
        assert all(map(torch.equal, found, expected))


# ---------------------------------------------------------------------- what models make of it


@pytest.mark.few(8)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "deepseek-v3", "bart"])
def test_generation(name: str, kv_dtype: str, mode: dict, device: str) -> None:
    """Of beams, and of drafts that are refused; models whose K differ from V in width, and that read `keys` again."""
    model = tiny_model(name, "sdpa", device)
    tokens = random_tokens(model, 1, 9).repeat(1, 3)
    made = zip(*(pair(model.config, kv_dtype, PAGE_SIZE[device]) for _ in range(2)))
    is_seq2seq = model.config.is_encoder_decoder
    ours, reference = (EncoderDecoderCache(*both) if is_seq2seq else both[0] for both in made)
    check_same_generation(model, tokens, ours, reference, **mode)


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


@pytest.mark.parametrize(("name", "kv_dtype"), each_with_few(1, ["llama-gqa", "gemma3", "gpt-oss"], KV_DTYPES))
def test_continuous_batching(name: str, kv_dtype: str) -> None:
    """Prompts in chunks, beside decode, with beginnings that are known, windows and sinks: every token attends to what
    is kept, also of the same requests before."""
    model = tiny_model(name, "eager", "cpu")
    begin, *ends = (random_tokens(model, 30, seed=seed).tolist() for seed in range(6))
    prompts = [begin + end[: 3 * i] for i, end in enumerate(ends, 1)]
    found = [answer(model, prompt, 12, RoundingCache(model.config, kv_dtype, always=True)) for prompt in prompts]
    expected = [each for each in found if each] * 2
    rows.enable(
        model, pool=vmmkv.FramePool(200 * 4096, device="cpu", page_size=4096), max_seq_len=100, kv_dtype=kv_dtype
    )
    try:
        with without_kernels():
            results = model.generate_batch([each.prompt for each in expected], **config()).values()
    finally:
        rows.disable(model)
    assert expected
    assert [result.generated_tokens for result in results] == [each.tokens for each in expected]


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
        with patch.object(on_rows, "kernels_take", return_value=False) if patched else nullcontext():
            found.append((kept, on_rows.write_and_attend(query, *new, kept, batch, scale=0.3).float()))
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
