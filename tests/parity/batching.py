"""One kind of model under transformers' continuous batching, on rows, against `generate`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import Cache, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import vmmkv
from vmmkv.integrations import continuous_batching
from vmmkv.integrations.batching import attention

from .check import Outcome
from .models import build, kinds

NEW = 12
"""Tokens that each request is to have."""
CLEAR = 1e-3
"""By so much the logit of each of them is at least above all others."""
NEVER = 1 << 30
"""A token that no model has."""
REQUESTS = 5
TRIES = 20


class Answer(NamedTuple):
    """A prompt, and what `generate` makes of it."""

    prompt: list[int]
    tokens: list[int]


def answer(model: PreTrainedModel, prompt: list[int], new: int = NEW, cache: Cache | None = None) -> Answer | None:
    """What `generate` makes of a prompt, on an empty cache of some kind, before a manager has the model; None where
    another rounding of the same sums could make something else."""
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    plain = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=NEVER, pad_token_id=0, **options)
    tokens = torch.tensor([prompt], device=model.device)
    with torch.no_grad():  # without a mask it would take padding for some of them
        given = {"attention_mask": torch.ones_like(tokens), "past_key_values": cache}
        made = model.generate(tokens, generation_config=plain, **given)
    first, second = torch.cat(made.logits).topk(2).values.unbind(-1)
    return Answer(prompt, made.sequences[0, len(prompt) :].tolist()) if (first - second).min() > CLEAR else None


def config(**options: Any) -> dict[str, Any]:
    """What `generate_batch` and `init_continuous_batching` take: greedy, and prompts in chunks."""
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=NEVER, pad_token_id=0)
    generation.num_return_sequences = options.pop("num_return_sequences", None)
    batching = ContinuousBatchingConfig(**{"max_batch_tokens": 32, "max_requests_per_batch": 16, **options})
    return {"generation_config": generation, "continuous_batching_config": batching}


def without_kernels() -> AbstractContextManager[object]:
    """In plain PyTorch."""
    return patch.object(attention, "kernels_take", return_value=False)


def check_batching(kind: str, device: str = "cpu") -> Outcome:
    """Runs requests of a kind."""
    outcome, random = Outcome(attention=continuous_batching.NAME), Random(1)
    try:
        model = build(kind, "sdpa" if kinds()[kind]._supports_sdpa else "eager", device)
        prompts = [[random.randrange(3, 97) for _ in range(random.randint(1, 40))] for _ in range(TRIES)]
        expected = [found for prompt in prompts if (found := answer(model, prompt))][:REQUESTS]
        if not expected:
            raise ValueError("no answer is clear")
    except Exception as error:
        return Outcome("none", f"{type(error).__name__}: {error}", continuous_batching.NAME)
    try:
        pool = vmmkv.FramePool("16MiB", device=device, page_size=4096 if device == "cpu" else None)
        continuous_batching.enable(model, pool=pool, max_seq_len=128)
        with nullcontext() if device == "cuda" else without_kernels():
            results = model.generate_batch([each.prompt for each in expected], **config())
    except vmmkv.VmmkvError as error:
        outcome.verdict, outcome.detail = "refused", f"{type(error).__name__}: {error}"
        return outcome
    except Exception as error:
        outcome.verdict, outcome.detail = "failed", f"{type(error).__name__}: {error}"
        return outcome
    made = [result.generated_tokens for result in results.values()]
    outcome.verdict = "same" if made == [each.tokens for each in expected] else "differs"
    outcome.detail = "; ".join(sorted({result.error for result in results.values() if result.error}))
    return outcome
