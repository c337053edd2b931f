"""What the tests of the transformers integration share: caches, prompts, and the comparison with `DynamicCache`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from conftest import seed_alone
from parity import reference_kernels
from tiny_models import VOCABULARY
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from vmmkv.integrations import attention, compiled_layers
from vmmkv.integrations.transformers import VmmCache

NEW = 16
"""Tokens behind a prompt of a dozen: together four windows of the tiny models, and several pages on the host."""
LENGTHS = {"max_new_tokens": NEW, "min_new_tokens": NEW}

PAGE_SIZE = {"cpu": 4096, "cuda": 2 << 20}


def vmm_cache(config: PreTrainedConfig, device: str, max_seq_len: int = 200, **kwargs: int) -> VmmCache:
    return VmmCache(config, max_seq_len, page_size=PAGE_SIZE[device], **kwargs)


def caches(model: PreTrainedModel, **kwargs: int) -> list[Cache]:
    """A `DynamicCache` and a `VmmCache` for a model."""
    makers: list[Callable[[], Cache]] = [
        lambda: DynamicCache(config=model.config),
        lambda: vmm_cache(model.config, model.device.type, **kwargs),
    ]
    if model.config.is_encoder_decoder:
        return [
            EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config)),
            EncoderDecoderCache(makers[1](), makers[1]()),
        ]
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


def check_same_generation(
    model: PreTrainedModel, tokens: torch.Tensor, compile: bool = False, **kwargs: object
) -> Cache:
    """Generates with both caches, compares, and returns the `VmmCache`, which may be made with `compile`."""
    kwargs = {"attention_mask": torch.ones_like(tokens), "do_sample": False, **LENGTHS, **kwargs}
    outputs = []
    for cache in caches(model, compile=compile):
        seed_alone(7)
        outputs.append(
            model.generate(tokens, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **kwargs)
        )
    reference, output = outputs
    assert output.past_key_values is cache
    assert torch.equal(output.sequences, reference.sequences)
    assert len(output.logits) == len(reference.logits)
    for logits, expected in zip(output.logits, reference.logits):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    return cache


def driver_calls(cache: VmmCache) -> int:
    return sum(call.count for kv_cache in cache.kv_caches for call in kv_cache.stats().driver_calls.values())


@pytest.fixture(name="reference_kernels")
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host plain PyTorch stands in for kernels; what is compiled decodes, by one operation."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "decode", _decode)
        monkeypatch.setattr(attention, "prefill", reference_kernels.prefill)


@pytest.fixture(name="kernels_for_all")
def _kernels_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """`VmmCache(compile=True)` takes it that there are kernels for any K and V: for tests in which nothing attends."""
    monkeypatch.setattr(compiled_layers, "kernels_take", lambda *_: True)


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
    return reference_kernels.decode(q, k, v, seq_lens, **options)


_decode.register_fake(lambda q, *_, **__: torch.empty_like(q))


@contextmanager
def inside_a_graph() -> Iterator[None]:
    """What Python does when a graph is traced it does each time the graph runs, by guards and side effects."""
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        yield
