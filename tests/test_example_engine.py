"""The engine of `docs/examples`: what it generates is what its model would without a cache, whatever runs beside it."""

from __future__ import annotations

import runpy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import ROOT, ROUNDS
from hypothesis import example, given, settings
from hypothesis import strategies as st

EXAMPLE = runpy.run_path(str(ROOT / "docs" / "examples" / "engine.py"))
VOCABULARY, MOST = 50, 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,
}


def random_model(kind: str, **options: Any) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


@torch.inference_mode()
def check_greedy(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the likeliest behind those before it, or as likely as rounding can tell."""
    found = model(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = found.gather(1, torch.tensor(tokens[len(prompt) :]).unsqueeze(1)).squeeze(1)
    assert tokens[: len(prompt)] == prompt
    assert (found.amax(1) - chosen).max() < 1e-3


def with_graphs(engine: Any) -> None:
    """What a graph would run again is run anew, over padding as well, whose results are no numbers."""
    attend = EXAMPLE["attend_on_host"]

    def padded(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        *tensors, rows, starts, ends = others
        live, out = ends.diff() > 0, torch.full_like(q, torch.nan)
        if live.any():
            k, v, cos, sin = (each[: ends[-1]] for each in tensors[:4])
            indices = rows[live], starts[live], ends[: int(live.sum()) + 1]
            out[: ends[-1]] = attend(q[: ends[-1]], k, v, cos, sin, *tensors[4:], *indices)
        return out

    type(engine).compute.__globals__["attend_on_host"] = padded
    slots = engine.max_sequences
    steps = [(False, size, size) for size in range(1, slots + 1, 3)] + [(False, slots, slots)]
    steps += [(True, size, slots) for size in (8, engine.chunk + slots)]
    engine.graphs = {step: SimpleNamespace(replay=partial(engine.compute, *step)) for step in steps}


REQUEST = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 30), st.booleans())
"""Tokens of a common beginning, other tokens, new tokens, and whether a token stops the answer."""

PREEMPTED = (0, 8, 60, False)
"""Four of these begin on a page each, of eight, and need twenty."""


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@given(
    asked=st.lists(REQUEST, min_size=1, max_size=10),
    late=st.lists(REQUEST, max_size=4),
    pages=st.integers(7, 20),
    max_sequences=st.integers(1, 6),
    chunk=st.sampled_from([8, 20, 100]),
    graphs=st.booleans(),
)
@example(asked=[PREEMPTED] * 4, late=[PREEMPTED], pages=8, max_sequences=4, chunk=20, graphs=False)
@settings(max_examples=10 * ROUNDS, deadline=None)
def test_requests_have_the_tokens_that_they_have_alone(
    kind: str, asked: list[Any], late: list[Any], pages: int, max_sequences: int, chunk: int, graphs: bool
) -> None:
    """Also when they are preempted, find what others have computed, stop early, or come while others run."""
    if torch.cuda.is_available() and graphs:
        return  # there are real ones
    model = random_model(kind)
    page_size = 2 << 20 if torch.cuda.is_available() else 32 << 10  # 16 tokens
    options = {"max_bytes": pages * page_size, "chunk": chunk, "max_sequences": max_sequences}
    options |= {} if torch.cuda.is_available() else {"page_size": page_size}
    engine = EXAMPLE["Engine"](EXAMPLE["Model"](model, MOST), **options)
    attend = EXAMPLE["attend_on_host"]
    if graphs:
        with_graphs(engine)
    common, requests = torch.randint(VOCABULARY, (40,)).tolist(), []

    def add(shared: int, own: int, new: int, stops: bool) -> None:
        prompt = common[:shared] + torch.randint(VOCABULARY, (own,)).tolist()
        requests.append((prompt, new, engine.add(prompt, new, stop=3 if stops else None)))

    try:
        for each in asked:
            add(*each)
        for each in late:
            engine.step()
            add(*each)
        engine.run()
    finally:
        type(engine).compute.__globals__["attend_on_host"] = attend
    for prompt, new, request in requests:
        check_greedy(model, prompt, request.tokens)
        answer = request.tokens[len(prompt) :]
        assert len(answer) == new or (answer[-1] == request.stop and request.stop is not None)
        assert request.stop is None or request.stop not in answer[:-1]
    engine.cache.check()
    assert engine.cache.stats().rows["live"] == 0


def test_what_it_cannot_run_is_refused() -> None:
    for model in (
        random_model("Llama", attention_bias=True),
        random_model("Llama", hidden_act="gelu"),
        random_model("Llama", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        random_model("Qwen3", use_sliding_window=True, sliding_window=8),
        random_model("Mistral"),
    ):
        with pytest.raises(ValueError, match="cannot run"):
            EXAMPLE["Model"](model, MOST)
    engine = EXAMPLE["Engine"](EXAMPLE["Model"](random_model("Llama"), MOST), max_sequences=2, max_bytes="2MiB")
    for tokens, new in ((0, 3), (5, 0), (MOST, 1)):
        with pytest.raises(ValueError, match="no room"):
            engine.add([1] * tokens, new)
