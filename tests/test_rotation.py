"""Rotary embedding that waits for attention: nobody but attention on rows can tell, and disabling leaves nothing."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from parity.batching import config
from tiny_models import tiny_model

import vmmkv
from vmmkv.integrations import continuous_batching as rows
from vmmkv.integrations.batching import packed
from vmmkv.integrations.batching.rotation import Unrotated, deferring, rotates_halves, rotation_of

HALVES = ["llama", "gemma3", "olmo2", "phi3", "qwen3_next", "glm4_moe"]
OTHERS = ["glm", "cohere", "gpt_oss", "nanochat", "ernie4_5", "deepseek_v4", "gptj"]

LOOKS = {
    "number": lambda q, k: q * 3,
    "in place": lambda q, k: q.mul_(3),
    "in place, of another": lambda q, k: torch.zeros_like(k).copy_(k),
    "view": lambda q, k: q.transpose(1, 2).reshape(1, q.shape[2], -1),
    "part": lambda q, k: q[:, 1:, ..., ::2],
    "list": lambda q, k: torch.cat([k, k + 1], -1),
    "keyword": lambda q, k: torch.mul(input=k, other=k),
    "product": lambda q, k: q[:, :2] @ k.mT,
    "norm": lambda q, k: torch.nn.functional.layer_norm(q, q.shape[-1:]),
    "attention": lambda q, k: torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True),
    "numpy": lambda q, k: torch.from_numpy(k.numpy()),
    "copy": lambda q, k: copy.deepcopy(q),
    "pickle": lambda q, k: pickle.loads(pickle.dumps(q)),
}


def function_of(kind: str) -> Callable[..., Any]:
    """The `apply_rotary_pos_emb` of a kind of model."""
    return pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}").apply_rotary_pos_emb


def given(head_dim: int = 16) -> list[torch.Tensor]:
    """Query, key, cos and sin, as Llama's attention has them."""
    query, key = (torch.randn(1, 5, heads, head_dim).transpose(1, 2) for heads in (4, 2))
    return [query, key, *torch.randn(2, 1, 5, head_dim)]


def test_nothing_waits_in_a_function_that_is_compiled() -> None:
    """There the compiler sees to it; beside it everything is as before."""
    apply, states = function_of("llama"), given()

    @torch.compile(backend="eager", fullgraph=True)
    def attention(*states: torch.Tensor) -> list[torch.Tensor]:
        return [each + 1 for each in deferring(apply)(*states)]

    torch.testing.assert_close(attention(*states), [each + 1 for each in apply(*states)])
    assert type(deferring(apply)(*states)[0]) is Unrotated


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_rotated_ones(look: str) -> None:
    states, apply = given(), function_of("llama")
    query, key = deferring(apply)(*states)
    assert type(query) is type(key) is Unrotated
    assert (query.shape, query.dtype, query.device) == (states[0].shape, states[0].dtype, states[0].device)
    rotation = rotation_of(query, key)
    assert rotation is not None
    assert rotation.query is states[0]
    assert rotation_of(key, query) is rotation_of(query, states[1]) is None
    found, expected = LOOKS[look](query, key), LOOKS[look](*apply(*states))
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    assert rotation_of(query, key) is None, "what was looked at may have been changed"
    if look == "in place":
        assert torch.equal(query + 0, expected)


def test_whoever_does_not_ask_torch_gets_nothing() -> None:
    query, _ = deferring(function_of("llama"))(*given())
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(vmmkv.UnsupportedAttentionError, match="disable"):
        query + 1


@pytest.mark.parametrize("kind", HALVES + OTHERS)
def test_what_a_function_computes_is_tried_out(kind: str) -> None:
    apply = function_of(kind)
    dtype = random.choice([torch.float32, torch.float16, torch.bfloat16])
    assert rotates_halves(apply, 32, 32, dtype) == (kind in HALVES)
    assert not rotates_halves(lambda *states: apply(*states)[::-1], 32, 32, dtype)
    assert not rotates_halves(lambda *states: [each.double() for each in apply(*states)], 32, 32, dtype)


def test_only_what_is_understood_waits() -> None:
    (query, key, cos, sin), apply = given(), function_of("llama")
    wide = [states.repeat(2, 1, 1, 1)[..., :16] for states in (query, key)]
    for states, more in (
        ((query, key, cos, sin), {"unsqueeze_dim": 1}),
        ((query, key, cos, sin, 1), {}),
        ((query, key, cos.double(), sin.double()), {}),
        ((*wide, cos, sin), {}),
        ((query, key, cos[:, :1], sin[:, :1]), {}),
        ((query, key, cos.as_subclass(torch.nn.Parameter), sin), {}),
    ):
        found, expected = deferring(apply)(*states, **more), apply(*states, **more)
        assert all(type(each) is not Unrotated for each in found)
        assert all(map(torch.equal, found, expected))


@pytest.mark.simulator
def test_kernels_rotate_where_models_would() -> None:
    """Tokens are the likeliest; copies of the model, and itself when it is not on rows, compute as before."""
    model = tiny_model("qwen3-wide", "eager", "cpu")  # with norms in front
    tokens = torch.randint(2, 97, (1, 6))
    with torch.no_grad():
        expected = model(tokens).logits
    rows.enable(model, pool=vmmkv.FramePool("2MiB", device="cpu", page_size=4096), max_seq_len=100)
    try:
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        options = config(max_batch_tokens=5)
        options["generation_config"].max_new_tokens = 3
        with patch.object(packed, "append", wraps=packed.append) as append:
            (result,) = model.generate_batch([tokens[0].tolist()], **options).values()
        assert {call.kwargs["rotary"] is not None for call in append.call_args_list} == {True}
        with torch.no_grad():
            for each in (model, *others):
                assert torch.equal(each(tokens).logits, expected)
                text = torch.cat([tokens[0], torch.tensor(result.generated_tokens)])
                logits = each(text[None, :-1]).logits[0, 5:]
                chosen = logits.gather(1, text[6:, None]).squeeze(1)
                assert (logits.amax(1) - chosen).max() < 1e-3
    finally:
        rows.disable(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_of_somebody_else_stays() -> None:
    model = tiny_model("llama-gqa", "eager", "cpu")
    first, second, *_ = (layer.self_attn for layer in model.model.layers)
    theirs = vars(first)["forward"] = MethodType(type(first).forward, first)
    try:
        rows.enable(model, max_bytes="1MiB")
        rows.enable(model, max_bytes="1MiB")
        assert vars(first)["forward"] is theirs
        assert second.forward != MethodType(type(second).forward, second)
        vars(second)["forward"] = theirs  # around ours
        rows.disable(model)
        assert vars(first)["forward"] is vars(second)["forward"] is theirs
    finally:
        for module in model.modules():
            vars(module).pop("forward", None)
