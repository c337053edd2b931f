"""`attn_implementation="vmmkv"` against the attention of transformers: kernels where there are some, SDPA elsewhere."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import seed_alone
from generation import caches, check_same_generation, left_padding, random_tokens
from parity import reference_kernels
from parity.models import build
from tiny_models import WIDE_MODELS, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.utils import logging

import vmmkv
from vmmkv.integrations import attention
from vmmkv.integrations.stand_ins import Spans, make_mask


def test_gradients_flow_through_sdpa(device: str) -> None:
    """Without a cache, as in training."""
    gradients = []
    for name in ("sdpa", "vmmkv"):
        model = tiny_model("gemma3-wide", name, device)
        tokens = random_tokens(model, 2, 12)
        model.zero_grad()
        mask = left_padding(tokens)
        labels = tokens.masked_fill(mask.cumsum(-1) <= 1, -100)  # nor the first token, which padding foretells
        model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for gradient, expected in zip(*gradients):
        torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-3)


# ---------------------------------------------------------------------- masks


def a_mask(*functions: Any, q_length: int = 5, offset: int = 4, **kwargs: Any) -> dict[str, Any]:
    """What transformers asks a mask with, of 3 sequences: for what all functions show."""
    function = and_masks(*functions) if len(functions) > 1 else (*functions, causal_mask_function)[0]
    kwargs = {"kv_length": q_length + offset, "use_vmap": False, "config": None, "dtype": torch.float32, **kwargs}
    return {"batch_size": 3, "q_length": q_length, "q_offset": offset, "mask_function": function, **kwargs}


def test_spans_stand_for_the_mask_of_eager_attention() -> None:
    """Windows shorter and longer than the prompt, behind padding, in rows that are longer or have lost their front."""
    for _ in range(200):
        q_length, offset, window = random.randint(1, 9), random.randint(0, 9), random.choice([0, 1, 3, 30])
        lost = random.randint(0, min(offset, max(offset - window + 1, 0))) if window else 0
        behind = random.choice([0, 5])
        function = sliding_window_causal_mask_function(window) if window else causal_mask_function
        length = q_length + offset
        padded = torch.arange(length) >= torch.tensor([0, random.randint(0, length - 1), length - 1])[:, None]
        padded = random.choice([None, padded, torch.nn.functional.pad(padded, (0, behind))])
        asked = a_mask(function, q_length=q_length, offset=offset, kv_offset=lost, attention_mask=padded)
        asked |= {"kv_length": length - lost + behind, "local_size": window or None}
        expected = eager_mask(**asked)
        spans = make_mask(**asked)
        assert isinstance(spans, Spans)
        assert spans.shape == expected.shape
        assert torch.equal(spans.as_bias(torch.float32), expected)
        assert torch.equal(spans[:, :, -1:].as_bias(torch.float32), expected[:, :, -1:])


HOLES = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]] * 3).bool()
WINDOW, OTHER = sliding_window_causal_mask_function(3), lambda b, h, q, k: k != 6
MASKS = [
    a_mask(attention_mask=HOLES),
    a_mask(attention_mask=HOLES.flip(1).cummin(1).values),
    a_mask(attention_mask=HOLES[:, 3:]),
    a_mask(chunked_causal_mask_function(4, torch.tensor([0, 1, 2])), local_size=4),
    a_mask(bidirectional_mask_function, offset=0, allow_is_bidirectional_skip=False),
    a_mask(sliding_window_bidirectional_mask_function(3), offset=0, local_size=3, allow_is_bidirectional_skip=True),
    a_mask(or_masks(causal_mask_function, lambda b, h, q, k: k < 6), use_vmap=True),
    a_mask(WINDOW, OTHER, use_vmap=True, local_size=3),
    a_mask(WINDOW, causal_mask_function, OTHER),
    a_mask(or_masks(WINDOW, lambda b, h, q, k: k < 6), local_size=3),
    a_mask(packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1]] * 3)), offset=0, allow_is_causal_skip=False),
    a_mask(sliding_window_overlay(3), bidirectional_mask_function, offset=0, local_size=3),
]


@pytest.mark.parametrize("asked", MASKS)
def test_masks_that_spans_cannot_say_are_those_of_eager_attention(asked: dict) -> None:
    mask = make_mask(**asked)
    assert not isinstance(mask, Spans)
    assert torch.equal(mask, eager_mask(**asked))


COMPUTATIONS = {
    "add": lambda mask: torch.zeros(3, 2, 5, 9) + mask,
    "compare": lambda mask: mask == 0,
    "where": lambda mask: torch.where(mask, 0.0, -1.0),
    "fill": lambda mask: torch.zeros(3, 2, 5, 9).masked_fill(mask, -1.0),
    "invert": lambda mask: ~mask,
    "cast": lambda mask: mask.float(),
    "concatenate": lambda mask: torch.cat([mask, mask], -1),
    "fewer keys": lambda mask: mask[..., :4],
    "first queries": lambda mask: mask[:, :, :4],
    "one query": lambda mask: mask[:, :, -1],
    "some sequences": lambda mask: mask[1:],
    "expand": lambda mask: mask.expand(3, 2, 5, 9),
    "any": lambda mask: mask.any(),
}


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_who_computes_with_spans_is_told(compute) -> None:
    with pytest.raises(vmmkv.UnsupportedAttentionError, match="attn_implementation='eager'"):
        compute(make_mask(**a_mask()))


def test_spans_pass_for_a_mask() -> None:
    """What models, generate and device maps do with masks without computing."""
    spans = make_mask(**a_mask())
    for same in (spans.contiguous(), spans[:, :, :, :9], spans[:, :, :, :99], spans.to("cpu"), spans.detach()):
        assert isinstance(same, Spans)
        assert torch.equal(same.as_bias(torch.float16), spans.as_bias(torch.float16))
    moved = spans.to("meta")
    assert (moved.device.type, moved.first.device.type, moved.shape) == ("meta", "meta", spans.shape)


# ---------------------------------------------------------------------- attention


def attention_of(name: str, **kwargs) -> torch.nn.Module:
    """The first attention of a tiny model."""
    return next(m for n, m in tiny_model(name, "vmmkv", "cpu").named_modules() if n.endswith("self_attn"))


def plain_attention(q, k, v, bias, scaling=None, softcap=None, sinks=None) -> torch.Tensor:
    """In fp64, and as it is written."""
    q, k, v = (states.double() for states in (q, k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores + bias.double()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.simulator
def test_attention_is_what_was_asked_for_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any combination of what models say: the right tokens, from kernels where they can do all of it."""
    calls = Mock(wraps=reference_kernels.decode)
    monkeypatch.setattr(attention, "decode", calls)
    modules = {name: attention_of(name) for name in ("llama-gqa-wide", "gemma2-wide", "gpt-oss-wide")}
    refused = 0
    for _ in range(300):
        name, module = random.choice(list(modules.items()))
        window = random.choice([0, 3])
        asked = a_mask(sliding_window_causal_mask_function(window) if window else causal_mask_function)
        bias, spans = eager_mask(**asked), make_mask(**asked)
        mask = random.choice([spans, spans, bias, bias == 0])
        told = {
            "scaling": random.choice([None, None, 0.3, 0.0, -0.5]),
            "sliding_window": random.choice([None, window or None, 4]),
            "softcap": random.choice([None, 2.0]) if name == "gemma2-wide" else None,
            "s_aux": getattr(module, "sinks", None),
            "position_bias": random.choice([None, None, torch.randn(1, 2, 5, 9)]),
            "use_cache": True,
        }
        q, k, v = torch.randn(3, 2, 5, 64), *torch.randn(2, 3, 1, 9, 64)
        before = calls.call_count
        try:
            with torch.no_grad():
                output, _ = attention.attend(module, q, k, v, mask, **told)
        except vmmkv.UnsupportedAttentionError:
            refused += 1
            assert told["position_bias"] is not None
            assert told["softcap"] or told["s_aux"] is not None
            continue
        bias = bias if told["position_bias"] is None else bias + told["position_bias"]
        expected = plain_attention(q, k, v, bias, told["scaling"], told["softcap"], told["s_aux"])
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
        by_kernels = (
            mask is spans
            and (told["scaling"] or 0.125) > 0
            and told["sliding_window"] in (None, window or None)
            and told["position_bias"] is None
            and told["scaling"] != 0
        )
        assert calls.call_count - before == by_kernels
    assert 0 < refused < 150


@pytest.mark.parametrize(
    "instruction", ["indices", "block_indices", "sinks", "head_mask", "cu_seq_lens_q", "cache", "new"]
)
def test_an_instruction_that_nobody_knows_is_refused(instruction: str) -> None:
    q, k, v = torch.randn(3, 3, 2, 5, 64)
    with pytest.raises(
        vmmkv.UnsupportedAttentionError, match=f"LlamaAttention gives its attention {instruction}.*eager"
    ):
        attention.attend(
            attention_of("llama-gqa-wide"), q, k, v, None, is_causal=False, **{instruction: torch.zeros(3)}
        )


def test_no_mask_is_all_tokens_or_an_error() -> None:
    module = attention_of("llama-gqa-wide")
    q, k, v = torch.randn(3, 2, 5, 64), *torch.randn(2, 3, 1, 9, 64)
    with pytest.raises(vmmkv.UnsupportedAttentionError, match="LlamaAttention is causal and gives no mask for its 5"):
        attention.attend(module, q, k, v, None)
    for query, told in ((q, {"is_causal": False}), (q[:, :, :1], {})):
        output, _ = attention.attend(module, query, k, v, None, **told)
        expected = plain_attention(query, k, v, torch.zeros(1))
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


LOWEST = torch.finfo(torch.float32).min
INPUTS = {
    "bool mask": {"attention_mask": torch.rand(2, 1, 8, 8) < 0.7},
    "mask to be added": {"attention_mask": torch.where(torch.rand(2, 1, 8, 8) < 0.7, 0.0, LOWEST)},
    "two sequences in one": {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 2), "use_cache": False},
    "weights": {"output_attentions": True},
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_what_callers_may_ask_for(inputs: dict) -> None:
    """SDPA knows masks of bool, eager attention all else."""
    model = tiny_model("llama-gqa-wide", "vmmkv", "cpu")
    masks = inputs.get("attention_mask", torch.zeros(1))
    like = tiny_model("llama-gqa-wide", "sdpa" if masks.dtype == torch.bool else "eager", "cpu")
    tokens = random_tokens(model, 2, 8)
    with torch.no_grad():
        output, expected = (each(tokens, **inputs) for each in (model, like))
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-4, rtol=1e-4)
    for weights, expected_weights in zip(output.attentions or (), expected.attentions or ()):
        torch.testing.assert_close(weights, expected_weights, atol=1e-4, rtol=1e-4)
    assert bool(output.attentions) == inputs.get("output_attentions", False)


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_that_looks_both_ways(padded: bool) -> None:
    """An encoder by its configuration."""
    config = LlamaConfig(**{**WIDE_MODELS["llama-gqa-wide"][2], "is_causal": False})
    logits = []
    for name in ("eager", "vmmkv"):
        seed_alone(0)
        model = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        tokens = random_tokens(model, 2, 8)
        mask = left_padding(tokens) if padded else torch.ones_like(tokens)
        with torch.no_grad():
            logits.append(model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()])
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- models


def test_models_with_their_own_attention_keep_it_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    logging.warning_once.cache_clear()
    for _ in range(2):
        model = build("GPTNeoForCausalLM", "vmmkv")
        assert model.config._attn_implementation == "eager"
    (message,) = caplog.messages
    assert 'attn_implementation="vmmkv" is not for GPTNeoForCausalLM' in message
    check_same_generation(model, random_tokens(model, 2, 6), *caches(model))
    model = build("DogeForCausalLM", "sdpa")
    model.set_attn_implementation("vmmkv")
    assert model.config._attn_implementation == "eager"
    assert tiny_model("llama-gqa", "vmmkv", "cpu").config._attn_implementation == "vmmkv"
