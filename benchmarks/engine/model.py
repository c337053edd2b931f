"""A Llama-type model in plain torch: weights, and one forward pass over tokens of many sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from vmmkv import KVLayout

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of new tokens, `[tokens, head_dim]`."""
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Angles], torch.Tensor]
"""Attention of a layer: takes its number, q, k, v of new tokens `[tokens, heads, head_dim]`, and the angles by which q
and k are still to be turned, and may be where they are; returns one like q."""


@dataclass(frozen=True)
class Config:
    """The shape of a model; names as in transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """Of K and V in this dtype."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, dtype)


MODELS = {
    "llama-3.1-8b": Config(128_256, 4096, 14_336, 32, 32, 8, 128),
    "qwen3-0.6b": Config(151_936, 1024, 3072, 28, 16, 8, 128, qk_norm=True, tie_word_embeddings=True),
    "tiny": Config(509, 64, 128, 2, 4, 2, 16),
}
"""Shapes by name; `tiny` is for machines without a GPU."""

BEFORE = "input_norm", "qkv", "qk_norm"
BEHIND = "o", "post_norm", "gate_up", "down"
"""Weights of a layer that are needed before attention, and behind it."""


class Model:
    """A decoder. Between attention of one layer and the next `torch.compile` joins what goes by element, on a GPU.

    Args:
        weights: by name as in `weight_shapes`.
        max_seq_len: positions that there are.
    """

    def __init__(self, config: Config, weights: dict[str, torch.Tensor], max_seq_len: int) -> None:
        self.config = config
        self.weights = weights
        self.dtype, self.device = weights["embed"].dtype, weights["embed"].device
        angles = torch.outer(torch.arange(max_seq_len).float(), rope_frequencies(config)).repeat(1, 2)
        self.angles = torch.stack([angles.cos(), angles.sin()]).to(weights["embed"])  # as precise as transformers'
        between = self._finish_and_project
        self._between = compiled(between) if self.device.type == "cuda" else between

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states `[tokens, hidden_size]` of tokens at positions `[tokens]`, before the last norm."""
        cos, sin = self.angles[:, positions]
        x = embedding(tokens, self.weights["embed"])
        states, last = self._project(x, self._weights(0, *BEFORE)), self.config.num_layers - 1
        for layer in range(last):
            attended = attend(layer, *states, (cos, sin))
            x, states = self._between(x, attended, self._weights(layer, *BEHIND), self._weights(layer + 1, *BEFORE))
        return self._finish(x, attend(last, *states, (cos, sin)), self._weights(last, *BEHIND))

    def _weights(self, layer: int, *names: str) -> list[torch.Tensor]:
        """Of a layer, as far as it has them."""
        return [self.weights[name] for name in (f"{layer}.{name}" for name in names) if name in self.weights]

    def _project(self, x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a layer does before attention: q, k and v, not rotated."""
        c, (norm, qkv, *qk_norm) = self.config, weights
        states = linear(self.norm(x, norm), qkv).unflatten(-1, (-1, c.head_dim))
        qk, v = states.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), 1)
        for weight in qk_norm:
            qk = rms_norm(qk, (c.head_dim,), eps=c.rms_norm_eps) * weight
        return [*qk.split((c.num_heads, c.num_kv_heads), 1), v]

    def _finish(self, x: torch.Tensor, attended: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        """What it does behind attention."""
        o, norm, gate_up, down = weights
        x = x + linear(attended.flatten(1), o)
        gate, up = linear(self.norm(x, norm), gate_up).chunk(2, -1)
        return x + linear(silu(gate) * up, down)

    def _finish_and_project(
        self, x: torch.Tensor, attended: torch.Tensor, weights: list[torch.Tensor], following: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What is done between attention of a layer and of the one that follows."""
        x = self._finish(x, attended, weights)
        return x, self._project(x, following)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[tokens, vocab_size]` from the hidden states of some tokens."""
        norm, lm_head = self.weights["norm"], self.weights.get("lm_head", self.weights["embed"])
        return linear(self.norm(hidden, norm), lm_head)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)


def compiled(function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """One program of a function of two tensors of tokens, and of weights, for any number of tokens but one: that would
    take a program of its own, and so would the first number, if nobody said that there will be others."""
    program = torch.compile(function, backend=backend)

    def run(x: torch.Tensor, attended: torch.Tensor, *weights: list[torch.Tensor]) -> Any:
        for tokens in (x, attended):
            torch._dynamo.maybe_mark_dynamic(tokens, 0)
        return program(x, attended, *weights)

    return run


def rotate(states: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotary position embedding of `[tokens, heads, head_dim]`."""
    cos, sin = (each.unsqueeze(1) for each in angles)
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def rope_frequencies(config: Config) -> torch.Tensor:
    """Radians a token for each pair of dims."""
    return config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a model: q, k and v of a layer are one matrix, gate and up another."""
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = config.vocab_size, hidden
    for layer in range(config.num_layers):
        shapes[f"{layer}.input_norm"] = shapes[f"{layer}.post_norm"] = (hidden,)
        shapes[f"{layer}.qkv"] = (heads + 2 * kv_heads) * config.head_dim, hidden
        shapes[f"{layer}.o"] = hidden, heads * config.head_dim
        shapes[f"{layer}.gate_up"] = 2 * config.intermediate_size, hidden
        shapes[f"{layer}.down"] = hidden, config.intermediate_size
        if config.qk_norm:
            shapes[f"{layer}.qk_norm"] = heads + kv_heads, config.head_dim
    return shapes


def random_model(config: Config, max_seq_len: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Model:
    """Random weights that keep the size of what they multiply; norms are 1. Made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith("norm"):
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            random = torch.empty(shape, dtype=dtype, device=device).normal_(0, shape[-1] ** -0.5, generator=generator)
            weights[name] = random
    return Model(config, weights, max_seq_len)
