"""What the tests of the transformers integration share: caches, prompts, and the comparison with `DynamicCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import seed_alone
from parity import reference_kernels as plain
from tiny_models import VOCABULARY, tiny_model
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from vmmkv.integrations import attention, compiled_layers
from vmmkv.integrations.transformers import VmmCache
from vmmkv.kernels.quantized import dequantize, quantize
from vmmkv.layout import KV_DTYPES

NEW = 16
"""Tokens behind a prompt of a dozen: together four windows of the tiny models, and several pages on the host."""
LENGTHS = {"max_new_tokens": NEW, "min_new_tokens": NEW}

PAGE_SIZE = {"cpu": 4096, "cuda": 2 << 20}


def vmm_cache(config: PreTrainedConfig, device: str, max_seq_len: int = 200, **kwargs: Any) -> VmmCache:
    return VmmCache(config, max_seq_len, page_size=PAGE_SIZE[device], **kwargs)


def caches(model: PreTrainedModel, **kwargs: Any) -> list[Cache]:
    """A `DynamicCache` and a `VmmCache` for a model."""
    makers: list[Callable[[], Cache]] = [
        lambda: DynamicCache(config=model.config),
        lambda: vmm_cache(model.config, model.device.type, **kwargs),
    ]
    return [EncoderDecoderCache(make(), make()) if model.config.is_encoder_decoder else make() for make in makers]


def random_tokens(model: PreTrainedModel, *shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator).to(model.device)


def left_padding(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask that pads the first sequence by a half, the second by two, others not."""
    mask = torch.ones_like(tokens)
    mask[0, : tokens.shape[1] // 2] = 0
    mask[1:2, :2] = 0
    return mask


def generate(model: PreTrainedModel, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model.generate(tokens, do_sample=False, **{**LENGTHS, **kwargs})


def check_same_generation(model: PreTrainedModel, tokens: torch.Tensor, *made: Cache, **kwargs: Any) -> None:
    """Generates with each cache, and compares sequences and logits."""
    kwargs = {"attention_mask": torch.ones_like(tokens), "do_sample": False, **LENGTHS, **kwargs}
    outputs = []
    for cache in made:
        seed_alone(7)
        outputs.append(
            model.generate(tokens, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **kwargs)
        )
        assert outputs[-1].past_key_values is cache
    expected, *others = outputs
    for output in others:
        assert torch.equal(output.sequences, expected.sequences)
        for logits, reference in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- caches without a model


@pytest.fixture
def mixed_config() -> PreTrainedConfig:
    """Windows and full attention in turn, two layers of each."""
    return tiny_model("gemma3", "vmmkv", "cpu").config


def random_kv(device: str, rows: int, tokens: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as attention modules make them, V as a transposed view; two layers of them take 1/8 of a page."""
    head_dim = PAGE_SIZE[device] // 256
    k = torch.randn(rows, heads, tokens, head_dim, device=device)
    return k, torch.randn(rows, tokens, heads, head_dim, device=device).transpose(1, 2)


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
    for index, (layer, expected) in enumerate(zip(cache.layers, reference.layers, strict=True)):
        assert cache.get_mask_sizes(3, index) == reference.get_mask_sizes(3, index)
        if cache.get_seq_length():
            assert torch.equal(layer.keys, expected.keys)
            assert torch.equal(layer.values, expected.values)
        else:
            assert layer.keys is layer.values is None


def pages(cache: VmmCache, state: str = "used") -> list[int]:
    """Pages of full attention and of windows, in this order."""
    by_length = sorted(cache.kv_caches, key=lambda kv_cache: -kv_cache.stats().tokens)
    return [kv_cache.stats().pages[state] for kv_cache in by_length]


class RoundingCache(DynamicCache):
    """What comes first attends to itself as it is, unless `always`, and what comes later to what was rounded."""

    def __init__(self, config: Any, kv_dtype: str, always: bool = False) -> None:
        super().__init__(config=config)
        self.kv_dtype, self.always = kv_dtype, always

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        is_alone = not (self.always or self.get_seq_length(layer_idx))
        rounded = (dequantize(*quantize(each, KV_DTYPES[self.kv_dtype]), each.dtype) for each in (keys, values))
        attended = super().update(*rounded, layer_idx)
        return (keys, values) if is_alone else attended


# ---------------------------------------------------------------------- kernels and graphs


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host plain PyTorch stands in for kernels; what is compiled decodes, by one operation."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "decode", _decode)
        monkeypatch.setattr(attention, "prefill", plain.prefill)


@pytest.fixture
def kernels_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """`VmmCache(compile=True)` takes it that there are kernels for any K and V: for tests in which nothing attends."""
    monkeypatch.setattr(compiled_layers, "kernels_take", lambda *_: True)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """FlexAttention compiles a kernel per stride; the same arithmetic runs uncompiled in a tenth of a second."""
    with torch.compiler.set_stance("force_eager"):
        yield


@torch.library.custom_op("vmmkv_tests::decode", mutates_args=())
def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None,
    window: int,
    softcap: float,
) -> torch.Tensor:
    options = {"starts": starts, "sinks": sinks, "scale": scale, "window": window, "softcap": softcap}
    return plain.decode(q, k, v, seq_lens, **options)


_decode.register_fake(lambda q, *_, **__: torch.empty_like(q))


@contextmanager
def inside_a_graph() -> Iterator[None]:
    """What Python does when a graph is traced it does each time the graph runs, by guards and side effects."""
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        yield
