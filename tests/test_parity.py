"""`python -m tests.parity` on the models that differ most; and that it notices what it is made to notice."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import transformers
from conftest import few
from parity.batching import check_batching
from parity.check import COMPILE, check
from parity.models import kinds

from vmmkv.integrations.transformers import VmmCache

KERNELS = [
    "LlamaForCausalLM",
    "MistralForCausalLM",  # says its window twice
    "PhimoeForCausalLM",  # says it in the mask only
    "Gemma2ForCausalLM",  # soft caps, and windows in some of the layers
    "GptOssForCausalLM",  # sinks
    "Llama4ForCausalLM",  # chunks
    "DeepseekV3ForCausalLM",  # K and V from latents
    "JambaForCausalLM",  # layers without attention
    "BartForConditionalGeneration",  # an encoder
]
FALLBACKS = ["Inkling2ForCausalLM"]  # a bias of positions, and sinks of another kind
OWN = [
    "BloomForCausalLM",  # asks for no attention
    "GPTNeoForCausalLM",  # looks for its attention among its own
    "DogeForCausalLM",  # makes masks of V
    "DeepseekV32ForCausalLM",  # chooses tokens by the mask
    "NllbMoeForConditionalGeneration",  # routes by the mask
]


@pytest.mark.parametrize("kind", few(4, "kernels", KERNELS) + FALLBACKS + few(2, "own", OWN))
@pytest.mark.simulator
def test_logits_are_those_of_eager_attention(kind: str, device: str) -> None:
    if kind not in kinds():
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    outcomes = list(check(kind, device))
    verdicts = {outcome.verdict for outcome in outcomes}
    assert verdicts <= {"same", "none", "static"} | (set() if kind in KERNELS else {"refused"}), outcomes
    assert [bool(outcome.kernel_calls) for outcome in outcomes] == [kind in KERNELS] * 3 + [False] * 2
    assert {outcome.attention for outcome in outcomes[:3]} == {"eager" if kind in OWN else "vmmkv"}


@pytest.mark.parametrize(
    "kind", ["LlamaForCausalLM", *few(2, "refused", ["Llama4ForCausalLM", *OWN[:-1], "BartForCausalLM"])]
)
@pytest.mark.simulator
def test_requests_on_rows_get_the_tokens_of_generate_or_are_refused(kind: str) -> None:
    outcome = check_batching(kind)
    assert outcome.verdict == ("same" if kind == "LlamaForCausalLM" else "refused"), outcome


@pytest.mark.parametrize("case", [("vmmkv", "VmmCache"), ("vmmkv", COMPILE), ("eager", "VmmCache")])
def test_a_cache_that_loses_a_token_is_noticed(case: tuple[str, str]) -> None:
    update = VmmCache.update

    def forgetful(cache: VmmCache, *states, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = update(cache, *states, **kwargs)
        getattr(keys, "states", keys)[-1, :, 2] = 0  # also of rows that none but vmmkv's attention reads
        return keys, values

    with patch.object(VmmCache, "update", forgetful):
        (outcome,) = check("LlamaForCausalLM", cases=(case,))
    assert outcome.verdict == "differs", outcome
