"""`attn_implementation="vmmkv"` against the attention of transformers: kernels where there are some, SDPA elsewhere."""

from __future__ import annotations

import pytest
import torch
from generation import caches, left_padding, random_tokens
from tiny_models import WIDE_MODELS, tiny_model
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from vmmkv.integrations import attention

IN_SIMULATOR = ["gemma2-wide", "gpt-oss-wide"]
"""Windows, soft caps and sinks between the two: the simulator takes seconds for each."""


def logits_of(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, chunks: tuple[int, ...]) -> list:
    """Logits of unmasked tokens, chunk by chunk, with a `DynamicCache` and with a `VmmCache`."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = []
    for cache in caches(model):
        parts, start = [], 0
        for length in chunks:
            chunk = slice(start, start + length)
            start = chunk.stop
            with torch.no_grad():
                output = model(
                    tokens[:, chunk],
                    attention_mask=mask[:, :start],
                    position_ids=positions[:, chunk],
                    past_key_values=cache,
                )
            parts.append(output.logits)
        logits.append(torch.cat(parts, 1)[mask[:, :start].bool()])
    return logits


@pytest.mark.parametrize("name", WIDE_MODELS)
def test_kernels_give_the_same_logits(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a chunk of many tokens, one of a few, and single tokens, behind left padding."""
    if device == "cpu" and name not in IN_SIMULATOR:
        pytest.skip("two models are enough for the simulator")
    monkeypatch.setattr(attention, "_attend_without_kernels", None)  # whoever calls it fails
    tokens = random_tokens(tiny_model(name, "eager", device), 2, 24)
    mask = left_padding(tokens)
    chunks = (10, 9, 3, 1, 1) if device == "cuda" else (9, 2)
    expected, _ = logits_of(tiny_model(name, "eager", device), tokens, mask, chunks)
    for logits in logits_of(tiny_model(name, "vmmkv", device), tokens, mask, chunks):
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)


def holes(mask: torch.Tensor) -> torch.Tensor:
    mask[:, 3] = mask[0, 9] = 0
    return mask


def right_padding(mask: torch.Tensor) -> torch.Tensor:
    mask[0, 7:] = 0
    return mask


@pytest.mark.parametrize("damage", [holes, right_padding])
def test_other_masks_than_left_padding_run_on_sdpa(damage, device: str) -> None:
    tokens = random_tokens(tiny_model("llama-gqa-wide", "sdpa", device), 2, 12)
    mask = damage(torch.ones_like(tokens))
    chunks = (10, 1, 1)
    expected, _ = logits_of(tiny_model("llama-gqa-wide", "sdpa", device), tokens, mask, chunks)
    for logits in logits_of(tiny_model("llama-gqa-wide", "vmmkv", device), tokens, mask, chunks):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_gradients_flow_through_sdpa(device: str) -> None:
    """Without a cache, as in training."""
    gradients = []
    for name in ("sdpa", "vmmkv"):
        model = tiny_model("gemma3-wide", name, device)
        tokens = random_tokens(model, 2, 12)
        model.zero_grad()
        mask = left_padding(tokens)
        labels = tokens.masked_fill(mask == 0, -100)  # what padding sees is nobody's business, and differs
        model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for gradient, expected in zip(*gradients):
        torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-3)


def test_a_fallback_is_warned_of_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.warning_once.cache_clear()
    model = tiny_model("llama-gqa", "vmmkv", device)
    for _ in range(2):
        with torch.no_grad():
            model(random_tokens(model, 1, 5), past_key_values=DynamicCache(config=model.config))
    assert [message for message in caplog.messages if "no kernels for heads of 8 and 8 in torch.float32" in message]
    assert len(caplog.messages) == 1
