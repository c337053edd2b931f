"""How far log probabilities of a model in bf16 are from those in fp32: on rows, and without a cache."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.generate.models import build
from vmmkv.integrations import continuous_batching as rows

LAYERS = 4
"""Of the model, so that it is on the device twice, once in fp32."""
PROMPTS, NEW = 16, 32
"""Requests, and the tokens that each gets."""


def logit_distances(name: str, device: torch.device, longest: int) -> dict[str, Any]:
    """The distances, of the norm of those in fp32, of a model with few layers and prompts of up to `longest` tokens."""
    model: Any = build(name, LAYERS, device)
    exact = copy.deepcopy(model).float()
    random, vocabulary = Random(0), model.config.vocab_size
    prompts = [[random.randrange(vocabulary) for _ in range(random.randint(1, longest))] for _ in range(PROMPTS)]
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rows.enable(model, max_bytes="64MiB" if device.type == "cpu" else "4GiB", max_seq_len=longest + NEW)
    try:
        asked = {"continuous_batching_config": ContinuousBatchingConfig(return_logprobs=True)}
        results = list(model.generate_batch(prompts, generation, progress_bar=False, **asked).values())
    finally:
        rows.disable(model)
    made = torch.tensor([result.logprobs for result in results])
    pairs = [(prompt, result.generated_tokens) for prompt, result in zip(prompts, results)]
    right, own = (torch.stack([_log_probabilities(each, *pair) for pair in pairs]) for each in (exact, model))
    facts = {"layers": LAYERS, "prompts": PROMPTS, "longest": longest, "tokens": NEW}
    return facts | {"rows": _distance(made, right), "own": _distance(own, right)}


def _distance(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


@torch.no_grad()
def _log_probabilities(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of tokens behind a prompt, by a model without a cache, `[tokens]`."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()
    return logits.log_softmax(dim=-1)[range(len(tokens)), tokens]
